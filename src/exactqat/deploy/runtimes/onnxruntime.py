# SPDX-License-Identifier: Apache-2.0
"""onnxruntime on one .onnx file: codes in, codes out, by the graph's tensor names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...kit.device.as_onnx import SHIFT
from ...kit.device.operator import Layout, Refusal
from ...kit.display import shortened
from ..axes import on_device
from ..codes import as_codes, as_real
from ..formats.onnx import Proto, channels_first, ends, inner_names
from ..formats.read_onnx import OnnxModel
from ..formats.tflite import import_deploy
from ..graph import Graph
from ..signature import Port, Signature
from .trial import RuntimeRefusal

_INTEGERS = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


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


@dataclass(frozen=True)
class OnnxNetwork:
    """A quantized .onnx file as the device's integers.

    Attributes:
        model: the file.
        graph: what onnxruntime computes from it; its signature has the file's inputs and outputs, and their axes.
        codes: by the graph's tensor, what the file calls its codes, and where the file's axes are in it.
        in_float: results that the file computes in float32, and the graph on its own grids.
    """

    model: OnnxModel
    graph: Graph
    codes: Mapping[str, tuple[str, Layout]]
    in_float: frozenset[str] = frozenset()


def written_network(graph: Graph, content: bytes) -> OnnxNetwork:
    """The file that `write_onnx` makes of the graph."""
    inner, (inputs, outputs) = inner_names(graph), ends(graph)

    def back(order: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(range(len(order)), key=lambda axis: order[axis]))

    sides = [
        tuple(Port(end.name, end.tensor, back(end.order), (), end.port.limits) for end in side)
        for side in (inputs, outputs)
    ]
    codes = {
        name: (f"{inner[name]}/codes", Layout(back(channels_first(range(len(graph.tensors[name].shape))))))
        for name in graph.results()
    }
    model = OnnxModel("the file", content, *(tuple(end.name for end in side) for side in (inputs, outputs)))
    return OnnxNetwork(model, replace(graph, ports=Signature(*sides)), codes)


class OnnxRuntime:
    """onnxruntime on a file, unchanged and with its own codes as further outputs. One thread; otherwise a session's
    default options.

    Attributes:
        in_uint8: whether all codes so far were uint8.
    """

    def __init__(self, network: OnnxNetwork) -> None:
        """
        Raises:
            RuntimeRefusal: onnxruntime does not take the file.
            ValueError: it lacks codes of the graph's.
        """
        onnx = import_deploy("onnx", "onnx")
        self._graph, self._codes = network.graph, network.codes
        self._inputs, self._outputs = network.model.inputs, network.model.outputs
        self._computed = [name for name in network.codes if name in network.graph.tensors]
        self._plain = _session(network.model.content)
        wanted = [network.codes[name][0] for name in self._computed]
        with _refusing("the file is damaged"):
            model = onnx.load_model_from_string(network.model.content)
        names = {output for node in model.graph.node for output in node.output}
        missing = [name for name in self._computed if network.codes[name][0] not in names]
        if missing:
            raise ValueError(f"the file has no tensors {missing}; was it written from another graph?")
        self.in_uint8 = _to_uint8(model.graph, onnx)
        returned = {end.name for end in model.graph.output}
        more = [name for name in dict.fromkeys(wanted) if name not in returned]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in more)
        self._wanted = wanted
        self._whole = _session(bytes(model.SerializeToString()))

    def run(self, batch: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The codes that the file holds, and those of the outputs of the unchanged file."""
        ports, tensors = self._graph.signature, self._graph.tensors
        feeds = {}
        for name, port in zip(self._inputs, ports.inputs, strict=True):
            tensor = tensors[port.tensor]
            feeds[name] = port.to_user(as_real(batch[port.tensor], tensor.dtype, tensor.quantization))
        inner = _run(self._whole, self._wanted, feeds) if self._wanted else []
        self.in_uint8 &= all(array.dtype == np.uint8 for array in inner)
        stored = {}
        for name, array in zip(self._computed, inner, strict=True):
            shape, codes = tensors[name].shape, on_device(array, self._codes[name][1])
            if codes.shape[1:] != shape[1:]:
                raise Refusal(f"'{shortened(name)}' has the shape {list(codes.shape)}, not {list(shape)}")
            stored[name] = (codes.astype(np.int16) - SHIFT).astype(np.int8) if codes.dtype == np.uint8 else codes
        returned = {}
        for port, array in zip(ports.outputs, _run(self._plain, self._outputs, feeds), strict=True):
            tensor = tensors[port.tensor]
            returned[port.tensor] = as_codes(port.to_graph(array), tensor.dtype, tensor.quantization)
        return stored, returned


def _to_uint8(graph: Proto, onnx: Proto) -> bool:
    """Stores int8 codes as uint8, as onnxruntime does on x86 before it looks for integer kernels: all that one reader
    dequantizes, which the codes as outputs would hide from it. Others stay, and so do their operators, in float32.

    Returns:
        Whether none stays.
    """
    held = {tensor.name: tensor for tensor in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    readers.update(end.name for end in graph.output)
    makers = {node.output[0]: node for node in graph.node if node.op_type == "QuantizeLinear" and len(node.input) > 2}
    in_int8 = {name: held.get(node.input[2]) for name, node in makers.items()}
    in_int8 = {name: zero for name, zero in in_int8.items() if zero and zero.data_type == onnx.TensorProto.INT8}
    for node in graph.node:
        codes = node.input[0] if node.op_type == "DequantizeLinear" and len(node.input) > 2 else ""
        if codes not in in_int8 or readers[codes] > 1 or readers[node.output[0]] > 1:
            continue
        shifted = onnx.numpy_helper.to_array(in_int8.pop(codes)).astype(np.int16) + SHIFT
        graph.initializer.append(onnx.numpy_helper.from_array(shifted.astype(np.uint8), f"{codes}/uint8"))
        makers[codes].input[2] = node.input[2] = f"{codes}/uint8"
    return not in_int8


def _session(content: bytes) -> Proto:
    runtime = import_deploy("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    with _refusing("onnxruntime rejects the file"):
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _run(session: Proto, names: Sequence[str] | None, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Results of these names (None: all) for real numbers or indices by the names of the inputs."""
    feeds = {
        end.name: np.ascontiguousarray(inputs[end.name].astype(_INTEGERS.get(end.type, np.float32)))
        for end in session.get_inputs()
    }
    with _refusing("onnxruntime fails to run the file"):
        results: list[np.ndarray] = session.run(None if names is None else list(names), feeds)
    return results


def in_real_numbers(content: bytes, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What a file returns, in its own order, for real numbers or indices by the names of its inputs. A file with a
    fixed batch gets one example at a time.

    Raises:
        RuntimeRefusal: onnxruntime takes neither the file nor these inputs.
    """
    session = _session(content)
    fixed = all(end.shape and end.shape[0] == 1 for end in session.get_inputs())
    count = len(next(iter(inputs.values())))
    rows = [slice(row, row + 1) for row in range(count)] if fixed else [slice(None)]
    parts = [_run(session, None, {name: array[row] for name, array in inputs.items()}) for row in rows]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]
