# SPDX-License-Identifier: Apache-2.0
"""A quantized network compared with the float network it was made from: how much of each layer's signal is left.

The float network's tensors are found by name, or else as those with as many values that correlate with the quantized
layer's; so it may come from another framework, with its axes in another order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..kit.device import Refusal
from ..kit.device.operator import FLOAT
from ..kit.device.tensor import CODE_RANGES, dequantize, quantize
from .comparison import decibels, power
from .formats.read_tflite import read_content
from .formats.tflite import import_deploy
from .graph import Graph
from .runtimes.trial import Answer, RuntimeRefusal, answer_of
from .simulate import simulate, simulate_operator

# Tensors belong together from this correlation on.
ALIKE = 0.7
# Below this many decibels a layer's signal counts as lost.
LOST = 10.0


@dataclass(frozen=True)
class LayerBesideFloat:
    """One layer of the quantized network.

    Attributes:
        result, kind: of its operator.
        of: the float network's tensor; "": none was found, and what depends on it is None.
        cumulative: signal to noise in dB of the whole quantized network up to here.
        own: likewise for this layer alone, from the float network's own operands.
        clipped: share of the float values outside the grid.
        wasted: share of the codes between its ends that no value uses.
        dead_channels, channels: entries of the last axis whose codes never change, and how many entries there are.
    """

    result: str
    kind: str
    of: str
    cumulative: float | None
    own: float | None
    clipped: float | None
    wasted: float
    dead_channels: int
    channels: int


def beside_float(
    graph: Graph, codes: Mapping[str, np.ndarray], path: str | os.PathLike[str], profile: str, seconds: float
) -> tuple[LayerBesideFloat, ...]:
    """Every layer that stores codes, in order of execution.

    Args:
        codes: of the graph's inputs, by name; the float network gets the real numbers they represent.
        path: the float network, a .tflite or an .onnx file with as many inputs, in the same order.
        profile: whose integers to compare.
        seconds: time limit for the process that computes both.

    Raises:
        OSError: the file cannot be read.
        Refusal: it is not a float network with these inputs, or cannot be computed.
    """
    path = Path(path)
    content = path.read_bytes()
    try:
        rows = answer_of(_work, graph, dict(codes), content, path.suffix, profile, seconds=seconds)
    except RuntimeRefusal as error:
        raise Refusal(f"{path.name} cannot be compared: {error}") from None
    return tuple(LayerBesideFloat(**row) for row in rows)


def collapse(layers: tuple[LayerBesideFloat, ...]) -> LayerBesideFloat | None:
    """The first layer from which the signal stays lost; None: it is never lost."""
    return next((layer for layer in layers if layer.cumulative is not None and layer.cumulative < LOST), None)


# --- in another process ---------------------------------------------------------------------------------------------


def _work(graph: Graph, codes: Mapping[str, np.ndarray], content: bytes, suffix: str, profile: str) -> list[Answer]:
    real = [dequantized(graph, name, codes[name]) for name in graph.inputs]
    if suffix.lower() == ".onnx":
        values = _of_onnx(content, real)
    else:  # computed in NumPy
        own = read_content(content, "it").graph
        if len(own.inputs) != len(real) or any(own.tensors[name].dtype != FLOAT for name in own.inputs):
            raise Refusal(f"it must take {len(real)} inputs in {FLOAT}, it takes {len(own.inputs)}")
        inputs = dict(zip(own.inputs, real, strict=True))
        values = simulate(own, inputs, tensors=own.results(), batch_size=1, progress=False)
    return [asdict(row) for row in _rows(graph, codes, values, profile)]


def dequantized(graph: Graph, name: str, codes: np.ndarray) -> np.ndarray:
    """The real numbers that a tensor's codes represent."""
    tensor = graph.tensors[name]
    return dequantize(codes, tensor.quantization) if tensor.dtype in CODE_RANGES else codes


def _of_onnx(content: bytes, real: list[np.ndarray]) -> dict[str, np.ndarray]:
    """All results in float32 of an ONNX network on onnxruntime, example by example."""
    onnx: Any = import_deploy("onnx", "onnx")
    runtime: Any = import_deploy("onnxruntime", "onnx")
    try:
        model = onnx.load_from_string(content)
    except Exception as error:  # noqa: BLE001 - of the library that reads it
        raise Refusal(f"it is no ONNX file ({error})") from None
    inferred = onnx.shape_inference.infer_shapes(model)
    present = {value.name for value in model.graph.output}
    model.graph.output.extend(
        value
        for value in inferred.graph.value_info
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT and value.name not in present
    )
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    if len(inputs) != len(real):
        raise Refusal(f"it must take {len(real)} inputs, it takes {len(inputs)}")
    names, parts = [end.name for end in session.get_outputs()], []
    for example in range(len(real[0])):
        feeds = {}
        for end, array in zip(inputs, real, strict=True):
            one = array[example : example + 1]
            turned = np.ascontiguousarray(np.moveaxis(one, -1, 1))  # channels first, if that fits
            sizes = [size if isinstance(size, int) else None for size in end.shape]
            fits = [
                len(form.shape) == len(sizes)
                and all(size in (None, length) for size, length in zip(sizes[1:], form.shape[1:], strict=True))
                for form in (one, turned)
            ]
            feeds[end.name] = turned if fits == [False, True] else one
        parts.append(session.run(names, feeds))
    kept = [at for at, result in enumerate(parts[0]) if result.dtype == np.float32 and result.shape[:1] == (1,)]
    return {names[at]: np.concatenate([part[at] for part in parts]) for at in kept}


def _rows(
    graph: Graph, codes: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray], profile: str
) -> list[LayerBesideFloat]:
    stored = {**codes, **simulate(graph, codes, profile, graph.results(), 1, False)}
    # The float network's values of the tensors that have a partner in it.
    signals = {name: dequantized(graph, name, codes[name]) for name in graph.inputs}
    rows = []
    for operator, name in [(layer, name) for layer in graph.operators for name in layer.outputs]:
        tensor, own_codes = graph.tensors[name], stored[name]
        if tensor.dtype not in CODE_RANGES:
            continue
        real = dequantized(graph, name, own_codes)
        of, signal = _partner(name, real, values)
        flat = own_codes.reshape(-1, own_codes.shape[-1])
        dead = int(np.count_nonzero((flat == flat[0]).all(0))) if len(flat) > 1 else 0
        cumulative = own = clipped = None
        if signal is not None:
            signals[name] = signal
            loudness = power(signal)
            cumulative = decibels(loudness, power(signal, real))
            ends = np.array(CODE_RANGES[tensor.dtype]) - tensor.quantization.zero_point[0] + (-0.5, 0.5)
            low, high = ends * float(tensor.quantization.scale[0])
            clipped = float(np.mean((signal < low) | (signal > high)))
            activations = [source for source in operator.inputs if graph.tensors[source].data is None]
            in_codes = all(source in signals and graph.tensors[source].dtype in CODE_RANGES for source in activations)
            if in_codes and operator.outputs[0] == name:
                feed = {source: quantize(signals[source], graph.tensors[source].quantization) for source in activations}
                alone = simulate_operator(graph, operator, feed, profile)
                own = decibels(loudness, power(signal, dequantized(graph, name, alone)))
        lowest, highest = CODE_RANGES[tensor.dtype]
        wasted, channels = 1 - len(np.unique(own_codes)) / (highest - lowest + 1), own_codes.shape[-1]
        rows.append(LayerBesideFloat(name, operator.kind, of, cumulative, own, clipped, wasted, dead, channels))
    return rows


def _partner(name: str, real: np.ndarray, values: Mapping[str, np.ndarray]) -> tuple[str, np.ndarray | None]:
    """The float network's tensor that matches a layer, with the layer's axes."""
    named = values.get(name)
    if named is not None and named.shape == real.shape:
        return name, named
    best = ALIKE
    partner: tuple[str, np.ndarray | None] = ("", None)
    for other, array in values.items():
        forms = [array, np.moveaxis(array, 1, -1)] if array.ndim > 2 else [array]
        for form in forms:
            if form.size != real.size or len(form) != len(real):
                continue
            form = np.ascontiguousarray(form).reshape(real.shape)
            along = _correlation(real, form)
            if along > best:
                best, partner = along, (other, form)
    return partner


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    one, other = (array.astype(np.float64) - array.mean(dtype=np.float64) for array in (first, second))
    size = math.sqrt(float(np.square(one).sum()) * float(np.square(other).sum()))
    return float((one * other).sum()) / size if size and math.isfinite(size) else 0.0
