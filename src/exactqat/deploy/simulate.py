# SPDX-License-Identifier: Apache-2.0
"""What the device computes, in exact integers, for each rounding profile.

`xnnpack-x86` and `xnnpack-arm64` are the runtime's default on these processors: the XNNPACK delegate, and the built-in
kernels for what XNNPACK does not support. `reference` is the runtime's reference kernels, `micro` those of TFLite-Micro
and CMSIS-NN. The arithmetic is declared with each operator in `exactqat.device`; EXACT lists where equality was shown,
and MEASURED over how many results.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

import numpy as np

from ..device import OPERATORS, PROFILES, Profile, profile_named
from ..device.blocks import one_thread_for_blas
from ..device.tensor import dequantize, quantize
from .graph import Graph, Operator, require_graph


def _measured() -> dict[tuple[str, str], tuple[int, int, int]]:
    content = json.loads(resources.files("exactqat.device").joinpath("measured.json").read_text("utf-8"))
    return {(kind, profile): tuple(row) for kind, rows in content["results"].items() for profile, row in rows.items()}


# (kind, profile) -> results compared with the runtime, how many differed, and by how much at most. Written by
# `tests/campaigns/sweep.py --write`, never by hand. An operator on int16 activations stands there as "CONV_2D:int16".
MEASURED: dict[tuple[str, str], tuple[int, int, int]] = _measured()
# (kind, profile) -> results compared without one difference. A pair that is not here is not claimed to be exact.
EXACT: dict[tuple[str, str], int] = {pair: values for pair, (values, differing, _) in MEASURED.items() if not differing}

# A table of all codes is asked for so many results; below that it costs more than it gives.
PAYS = 2


def unclaimed(graph: Graph, profile: str | Profile) -> tuple[str, ...]:
    """The kinds of operators in a graph whose equality with the profile's runtime has not been shown; usually none."""
    name = profile_named(profile).name
    require_graph(graph)
    kinds = dict.fromkeys(graph.measured_as(operator) for operator in graph.operators)
    return tuple(kind for kind in kinds if (kind, name) not in EXACT)


def simulate(
    graph: Graph,
    x: np.ndarray | Mapping[str, np.ndarray],
    profile: str | Profile = "xnnpack",
    tensors: Sequence[str] | None = None,
    batch_size: int = 8,
) -> dict[str, np.ndarray]:
    """Codes of `tensors` (default: the graph's outputs) for a batch of input codes.

    x: int8 or int16, like the graph's input, [batch, ...] for a graph with one input, or one such array per input name.
    `batch_size` examples are computed at a time, which limits memory use. Every (operator, profile) pair in EXACT is
    bit-exact.
    """
    profile = profile_named(profile)
    inputs = check_inputs(graph, x)
    wanted = tuple(dict.fromkeys(graph.outputs if tensors is None else tensors))
    unknown = [name for name in wanted if name not in (*graph.inputs, *graph.results())]
    if unknown:
        raise ValueError(f"tensors names {unknown}, which the graph does not compute")
    total = next(iter(inputs.values())).shape[0]
    parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    with one_thread_for_blas():
        for start in range(0, total, batch_size):
            values = {name: codes[start : start + batch_size] for name, codes in inputs.items()}
            for operator in graph.operators:
                values[operator.outputs[0]] = simulate_operator(graph, operator, values, profile)
            for name in wanted:
                parts[name].append(values[name])
    empty = {name: (0, *graph.tensors[name].shape[1:]) for name in wanted}
    return {
        name: np.concatenate(part) if part else np.zeros(empty[name], graph.tensors[name].dtype)
        for name, part in parts.items()
    }


def check_inputs(graph: Graph, x: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One [batch, ...] array of codes per input name, or an error that says what is wrong."""
    require_graph(graph)
    arrays = dict(x) if isinstance(x, Mapping) else {graph.inputs[0]: x}
    if set(arrays) != set(graph.inputs):
        raise ValueError(f"x must contain the inputs {list(graph.inputs)}, got {list(arrays)}")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"input {name!r} must be a NumPy array of codes, got {type(array).__name__}; use `quantize`"
            )
        expected = graph.tensors[name].shape
        dtype = graph.tensors[name].dtype
        if array.dtype != dtype:
            raise TypeError(f"input {name!r} must be {dtype} codes, got {array.dtype}; use `quantize`")
        if array.ndim != len(expected) or array.shape[1:] != expected[1:]:
            sizes = ", ".join(map(str, expected[1:]))
            raise ValueError(f"input {name!r} must have shape [batch, {sizes}], got {array.shape}")
    if len({array.shape[0] for array in arrays.values()}) != 1:
        raise ValueError("all inputs must have the same batch size")
    return arrays


def simulate_operator(
    graph: Graph, operator: Operator, values: Mapping[str, np.ndarray], profile: str | Profile
) -> np.ndarray:
    """Codes of one operator's result from the codes of its operands, by tensor name."""
    tensors = [graph.tensors[name] for name in operator.inputs]
    codes = [values[tensor.name] if tensor.data is None else tensor.data for tensor in tensors]
    output, declaration = graph.tensors[operator.outputs[0]], OPERATORS[operator.kind]
    compute = functools.partial(
        declaration.results,
        inputs=tensors,
        output=output,
        attributes=operator.attributes,
        profile=profile_named(profile),
    )
    int8 = output.dtype == "int8" and all(code.dtype == np.int8 for code in codes)
    if declaration.pointwise and int8 and max(code.size for code in codes) > PAYS * 256 ** len(codes):
        return from_table(compute, codes)
    return compute(codes)


def from_table(compute: Callable[[Sequence[np.ndarray]], np.ndarray], codes: Sequence[np.ndarray]) -> np.ndarray:
    """Elementwise `compute` on int8 operands, looked up in a table of its results for all pairs of codes."""
    all_codes = np.arange(-128, 128).astype(np.int8)
    table = compute(np.meshgrid(*[all_codes] * len(codes), indexing="ij")).ravel()
    first, *others = (code.view(np.uint8) ^ np.uint8(128) for code in codes)
    return table.take((first.astype(np.uint16) << 8) | others[0] if others else first)


__all__ = [
    "EXACT",
    "MEASURED",
    "PROFILES",
    "check_inputs",
    "dequantize",
    "quantize",
    "simulate",
    "simulate_operator",
    "unclaimed",
]
