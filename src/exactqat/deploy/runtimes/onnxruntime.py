# SPDX-License-Identifier: Apache-2.0
"""onnxruntime on one model: codes in, real numbers or codes out, by tensor name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..formats.onnx import channels_first, ends, inner_names, tensor_description
from ..formats.tflite import import_deploy
from ..graph import Graph
from ..signature import as_real
from .trial import RuntimeRefusal


@contextmanager
def _refusing(doing: str) -> Iterator[None]:
    """Turns errors of onnx and onnxruntime, which have no common type, into one sentence."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - parsers of damaged files raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeRefusal(f"{doing}: {reason}") from error


class OnnxRuntime:
    """onnxruntime on one model: codes in, arrays with the graph's axes out, by tensor name.

    outputs: of each the file's name, the graph's, and the graph's axis that each of its axes holds.
    """

    def __init__(self, graph: Graph, content: bytes, outputs: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        runtime = import_deploy("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self.graph = graph
        self.outputs = list(outputs)
        with _refusing("onnxruntime rejects the file"):
            self.session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        feeds = {}
        for end in ends(self.graph)[0]:
            tensor = self.graph.tensors[end.tensor]
            real = as_real(batch[end.tensor], tensor.dtype, tensor.quantization)
            feeds[end.name] = np.ascontiguousarray(real.transpose(end.order))
        with _refusing("onnxruntime fails to run the file"):
            results = self.session.run([name for name, _, _ in self.outputs], feeds)
        return {
            tensor: result.transpose(np.argsort(order))
            for (_, tensor, order), result in zip(self.outputs, results, strict=True)
        }


def with_codes_as_outputs(graph: Graph, content: bytes) -> bytes:
    """The same model with the codes of all results as its outputs."""
    onnx: Any = import_deploy("onnx", "onnx")
    with _refusing("the file is damaged"):
        model = onnx.load_model_from_string(content)
    present = {output for node in model.graph.node for output in node.output}
    inner = inner_names(graph)
    missing = [name for name in graph.results() if f"{inner[name]}/codes" not in present]
    if missing:
        raise ValueError(f"the file has no tensors {missing}; was it written from another graph?")
    del model.graph.output[:]
    for name in graph.results():
        tensor = graph.tensors[name]
        stored = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
        order = channels_first(range(len(tensor.shape)))
        codes = tensor_description(onnx, tensor, f"{inner[name]}/codes", stored, order)
        model.graph.output.append(codes)
    return bytes(model.SerializeToString())
