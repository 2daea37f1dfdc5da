# SPDX-License-Identifier: Apache-2.0
"""onnxruntime on one model: codes in, codes out, by tensor name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...device.as_onnx import SHIFT
from ...device.tensor import CODE_RANGES
from ..codes import as_real
from ..formats.onnx import channels_first, ends, inner_names, stored_dtype, tensor_description
from ..formats.tflite import import_deploy
from ..graph import Graph
from .trial import RuntimeRefusal


@contextmanager
def _refusing(doing: str) -> Iterator[None]:
    """Turns errors of onnx and onnxruntime, which have no common type, into one sentence."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - parsers of damaged files raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeRefusal(f"{doing}: {reason}") from error


def saturates() -> bool:
    """Whether this processor is an x86 without VNNI instructions: onnxruntime then adds products of uint8 and int8 in
    16 bits, which can saturate. False where the system does not list its instructions."""
    try:
        words = set(Path("/proc/cpuinfo").read_text("utf-8", "replace").split())
    except OSError:
        return False
    return "sse2" in words and not words & {"avx512_vnni", "avx_vnni"}


class OnnxRuntime:
    """onnxruntime on one model: codes in, codes with the graph's axes out, by tensor name. One thread; otherwise a
    session's default options.

    Attributes:
        module: the one that provides it.

    outputs: for each, the file's name, the graph's, and the graph's axis that each of its axes holds.
    """

    module = "onnxruntime"

    def __init__(self, graph: Graph, content: bytes, outputs: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        runtime = self.interpreters()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self.graph = graph
        self.outputs = list(outputs)
        with _refusing("onnxruntime rejects the file"):
            self.session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    @staticmethod
    def interpreters() -> Any:
        """The module that holds the session, or an ImportError that says how to install it."""
        return import_deploy("onnxruntime", "onnx")

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        feeds = {}
        for end in ends(self.graph)[0]:
            tensor = self.graph.tensors[end.tensor]
            real = as_real(batch[end.tensor], tensor.dtype, tensor.quantization)
            feeds[end.name] = np.ascontiguousarray(real.transpose(end.order))
        with _refusing("onnxruntime fails to run the file"):
            results = self.session.run([name for name, _, _ in self.outputs], feeds)
        return {
            tensor: self._codes(tensor, result.transpose(np.argsort(order)))
            for (_, tensor, order), result in zip(self.outputs, results, strict=True)
        }

    def _codes(self, name: str, result: np.ndarray) -> np.ndarray:
        """The graph's codes for what the file returns."""
        tensor = self.graph.tensors[name]
        if tensor.dtype not in CODE_RANGES:
            return result
        if result.dtype == np.float32:
            steps = np.rint(result / tensor.quantization.scale[0]).astype(np.int64)
            return (steps + tensor.quantization.zero_point[0]).astype(tensor.dtype)
        return (result.astype(np.int16) - SHIFT).astype(np.int8) if result.dtype == np.uint8 else result


def in_real_numbers(content: bytes, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What a file returns, in its own order, for real numbers or indices by the names of its inputs. A file with a
    fixed batch gets one example at a time.

    Raises:
        RuntimeRefusal: onnxruntime takes neither the file nor these inputs.
    """
    runtime = OnnxRuntime.interpreters()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    with _refusing("onnxruntime rejects the file"):
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    given = session.get_inputs()
    types = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    arrays = {each.name: inputs[each.name].astype(types.get(each.type, np.float32)) for each in given}
    fixed = all(each.shape and each.shape[0] == 1 for each in given)
    count = len(next(iter(arrays.values())))
    rows = [slice(row, row + 1) for row in range(count)] if fixed else [slice(None)]
    with _refusing("onnxruntime fails to run the file"):
        found = [session.run(None, {name: each[row] for name, each in arrays.items()}) for row in rows]
    return [np.concatenate(each) for each in zip(*found, strict=True)]


def run_with_codes(
    content: bytes, outputs: Sequence[str], codes: Sequence[str]
) -> Callable[[Mapping[str, np.ndarray]], tuple[list[np.ndarray], list[np.ndarray]]]:
    """A function of the inputs by name: what the file itself returns, then some of its codes.

    Raises:
        RuntimeRefusal: onnxruntime does not take the file; the function raises it for inputs that onnxruntime does not
            take.
    """
    onnx: Any = import_deploy("onnx", "onnx")
    runtime = OnnxRuntime.interpreters()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    with _refusing("the file is damaged"):
        model = onnx.load_model_from_string(content)
        returned = {each.name for each in model.graph.output}
        names = [name for name in dict.fromkeys(codes) if name not in returned]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        more = bytes(model.SerializeToString())
    with _refusing("onnxruntime rejects the file"):
        plain, opened = (
            runtime.InferenceSession(each, options, providers=["CPUExecutionProvider"]) for each in (content, more)
        )
    types = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    given = {each.name: types.get(each.type, np.float32) for each in plain.get_inputs()}

    def run(inputs: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        feeds = {name: np.ascontiguousarray(inputs[name].astype(dtype)) for name, dtype in given.items()}
        with _refusing("onnxruntime fails to run the file"):
            return plain.run(list(outputs), feeds), opened.run(list(codes), feeds)

    return run


def opened(graph: Graph, content: bytes) -> tuple[OnnxRuntime, OnnxRuntime]:
    """The file unchanged, and with the codes of all results as its outputs."""
    inner, names = inner_names(graph), graph.results()
    wanted = [(each.name, each.tensor, each.order) for each in ends(graph)[1]]
    codes = [(f"{inner[name]}/codes", name, channels_first(range(len(graph.tensors[name].shape)))) for name in names]
    plain = OnnxRuntime(graph, content, wanted)
    return plain, OnnxRuntime(graph, with_codes_as_outputs(graph, content), codes)


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
        stored = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(stored_dtype(tensor.dtype)))
        order = channels_first(range(len(tensor.shape)))
        codes = tensor_description(onnx, tensor, f"{inner[name]}/codes", stored, order)
        model.graph.output.append(codes)
    return bytes(model.SerializeToString())
