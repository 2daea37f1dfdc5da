# SPDX-License-Identifier: Apache-2.0
"""A network in uint8, as TensorFlow 1 wrote it, in int8: what becomes of its filters, and which integers change.

Codes of activations are 128 lower on the same scales. Filters of uint8 have a zero point, which int8 kernels lack: a
channel whose codes lie within 127 of it keeps all its values, any other gets a wider scale. The int8 operators are then
simulated from the operands that the uint8 network has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..kit.device import DEFAULT_PROFILE, OPERATORS, PROFILES, Profile, Refusal, profile_named
from ..kit.device.weighted import Weighted
from ..kit.display import Finding, aligned, shortened
from .comparing import Comparing
from .comparison import Comparison, decibels, power
from .graph import Graph, Operator, Quantization, Tensor, require_graph
from .random_inputs import random_codes
from .simulate import check_inputs, simulate

# Random examples, and how many are compared at a time.
EXAMPLES, TOGETHER = 16, 8
# The largest code of a filter.
_LARGEST = 127


@dataclass(frozen=True)
class ConvertedFilter:
    """A filter: `values` codes; `requantized` of them lie in channels with a wider scale; the others represent what
    they did. sqnr: signal to the noise of that, in dB; None: there is none."""

    values: int
    requantized: int = 0
    sqnr: float | None = None


@dataclass(frozen=True, repr=False)
class Conversion(Finding):
    """A network in int8 that was in uint8. It is neither true nor false: that integers change can be as good.

    Attributes:
        graph: in int8, which `write_tflite` writes and `qat.prepare` trains.
        profile: the device by whose arithmetic both were simulated.
        filters: by the operator's result.
        operators: each result of the uint8 network beside that of the int8 operator, from the same operands.
        outputs: those of the whole networks.
    """

    graph: Graph
    profile: str
    filters: Mapping[str, ConvertedFilter]
    operators: tuple[Comparison, ...]
    outputs: tuple[Comparison, ...]

    @property
    def differing(self) -> int:
        """How many integers of the outputs differ."""
        return sum(row.differing for row in self.outputs)

    @property
    def values(self) -> int:
        """How many integers of the outputs were compared."""
        return sum(row.values for row in self.outputs)

    def in_short(self) -> str:
        changed = sum(1 for entry in self.filters.values() if entry.requantized)
        largest = max((row.largest_difference for row in self.outputs), default=0)
        differ = f"{self.differing:,} of {self.values:,} integers of the outputs differ, by {largest:,} at most"
        differ = differ if self.differing else f"none of {self.values:,} integers of the outputs differs"
        kept = len(self.filters) - changed
        return (
            f"{len(self.graph.operators):,} operators in int8; {kept:,} filters kept, {changed:,} requantized. From "
            f"the same codes, by the arithmetic of {PROFILES[self.profile].title}, {differ}"
        )

    def text(self) -> str:
        """What changes, operator by operator."""
        rows = []
        for row in self.operators:
            entry = self.filters.get(row.name, ConvertedFilter(0))
            if row.differing or entry.requantized:
                noise = "" if entry.sqnr is None else f"{entry.sqnr:.1f} dB"
                requantized = f"{entry.requantized:,} of {entry.values:,}" if entry.requantized else ""
                differ = f"{row.differing:,} of {row.values:,}, by {row.largest_difference:,}" if row.differing else "0"
                rows.append((shortened(row.name, 40), row.kind, requantized, noise, differ))
        header = ("operator", "kind", "weights requantized", "their SQNR", "results that differ, from equal operands")
        return "\n".join([f"{self.in_short()}.", *(aligned([header, *rows], {0, 1}) if rows else ())])


def convert(
    graph: Graph,
    x: np.ndarray | Mapping[str, np.ndarray] | None = None,
    device: str | Profile = DEFAULT_PROFILE,
    seed: int = 0,
) -> Conversion:
    """A network in uint8 as one in int8, and what that changes.

    Args:
        graph: from `read_tflite`, of a file in uint8.
        x: codes as the graph has them (int8: 128 below the file's), [batch, ...], or one array per input name, by which
            both networks are compared; by default 16 random examples.
        device: by whose arithmetic.
        seed: of the random examples.

    Raises:
        TypeError: graph is not a Graph.
        ValueError: x does not fit.
        Refusal: its codes are not uint8, or an operator has no form in int8, which the message names.
    """
    require_graph(graph)
    profile = profile_named(device)
    if not graph.in_uint8():
        raise Refusal("its codes are not uint8, so there is nothing to convert")
    tensors, filters, operators, rescaled = dict(graph.tensors), {}, list[Operator](), set[str]()
    for operator in graph.operators:
        declaration = OPERATORS[operator.kind]
        operators.append(replace(operator, unsigned=False))
        if operator.unsigned and isinstance(declaration, Weighted):
            filter, bias = (graph.tensors[name] for name in operator.inputs[1:])
            tensors[filter.name], factor = _symmetric(filter, declaration.filter_axis)
            # Another operator may share it, with a filter on another scale.
            name = bias.name if bias.name not in rescaled else f"{operator.outputs[0]}/int8_bias"
            tensors[name], rescaled = _rescaled(replace(bias, name=name), factor), rescaled | {name}
            operators[-1] = replace(operators[-1], inputs=(*operator.inputs[:2], name))
            filters[operator.outputs[0]] = _said(filter, tensors[filter.name])
    converted = replace(graph, tensors=tensors, operators=tuple(operators))
    try:
        converted.validate()
    except ValueError as error:
        raise Refusal(f"in int8 no runtime has it so: {error}") from error
    codes = random_codes(graph, range(EXAMPLES), seed) if x is None else check_inputs(graph, x)
    comparing = Comparing(converted, profile, claims=False)
    for start in range(0, len(next(iter(codes.values()))), TOGETHER):
        batch = {name: array[start : start + TOGETHER] for name, array in codes.items()}
        before = simulate(graph, batch, profile, graph.results(), progress=False)
        comparing.add(batch, before, {name: {**batch, **before}[name] for name in graph.outputs})
    rows = (tuple(side.values()) for side in (comparing.operators, comparing.outputs))
    return Conversion(converted, profile.name, filters, *rows)


def _steps(filter: Tensor) -> np.ndarray:
    assert filter.data is not None
    return filter.data.astype(np.int64) - filter.quantization.zero_point[0]


def _symmetric(filter: Tensor, axis: int) -> tuple[Tensor, np.ndarray]:
    """The filter without a zero point, and by which factors its channels' scales have grown: [1] or [channels]."""
    steps = np.moveaxis(_steps(filter), axis, 0)
    largest = np.abs(steps.reshape(len(steps), -1)).max(axis=1, initial=0)
    factor = (np.maximum(largest, _LARGEST) / _LARGEST).astype(np.float64)
    wide, scale = bool(np.any(factor > 1)), filter.quantization.scale[0]
    factor = factor if wide else np.ones(1)
    scales = (scale * factor).astype(np.float32)
    shape = [-1] + [1] * (steps.ndim - 1)
    codes = np.rint(steps / (scales / np.float64(scale)).reshape(shape)).astype(np.int8)
    grid = Quantization(scales, np.zeros(1), axis if wide else None)
    return replace(filter, data=np.moveaxis(codes, 0, axis), quantization=grid), scales / np.float64(scale)


def _rescaled(bias: Tensor, factor: np.ndarray) -> Tensor:
    assert bias.data is not None
    grid = Quantization(bias.quantization.scale * factor, np.zeros(1), 0 if factor.size > 1 else None)
    return replace(bias, data=np.rint(bias.data / factor).astype(bias.data.dtype), quantization=grid)


def _said(before: Tensor, after: Tensor) -> ConvertedFilter:
    assert after.data is not None
    steps, axis = _steps(before), after.quantization.axis
    shape = [-1 if at == axis else 1 for at in range(steps.ndim)]
    scale = after.quantization.scale.reshape(shape if axis is not None else [1] * steps.ndim)
    changed = np.broadcast_to(scale != before.quantization.scale[0], steps.shape)
    old, new = steps * np.float64(before.quantization.scale[0]), after.data * scale.astype(np.float64)
    return ConvertedFilter(steps.size, int(changed.sum()), decibels(power(old), power(old, new)))
