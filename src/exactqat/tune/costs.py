# SPDX-License-Identifier: Apache-2.0
"""What a network costs with other bits, estimated within microseconds, to decide what is worth writing and
measuring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..deploy.formats.tflite import tflite_bytes
from ..deploy.graph import Graph
from ..deploy.packing import packed
from ..kit.device import OPERATORS
from ..kit.device.tensor import CODE_RANGES, INT4, INT4_MAX
from .assignment import Assignments, Bits
from .precisions import Part, layer_of

# What an operator that converts between 8 and 16 bits adds to a file, including its tensor: 184 to 200 bytes were seen.
CONVERSION = 190


@dataclass(frozen=True)
class _Work:
    """An operator, as far as bits matter to it.

    read: name, elements and unit of each tensor it reads; result: unit of what it stores; weights: that of its filter;
    filter: the number of weights; packs: whether the device has them in four bits; live: elements and unit of all
    tensors held while it runs.
    """

    read: tuple[tuple[str, int, Part | None], ...]
    result: Part | None
    weights: Part | None
    filter: int
    packs: bool
    biases: int
    multiply_adds: int
    live: tuple[tuple[int, Part | None], ...]


class Costs:
    """Estimates for all assignments of a network, from its graph in 8 bits."""

    def __init__(self, assignments: Assignments, graph: Graph, device: str) -> None:
        self._file = len(tflite_bytes(graph, packed=False))
        units: dict[str, Part | None] = {name: assignments.part_of(name) for name in graph.inputs}
        for operator in graph.operators:
            (first, *_) = [*(name for name in operator.inputs if graph.tensors[name].data is None), None]
            for name in operator.outputs:
                own = assignments.part_of(layer_of(name))
                units[name] = own if own is not None or first is None else units.get(first)
        last = dict.fromkeys(graph.inputs, 0)
        made = dict.fromkeys(graph.inputs, 0)
        for number, operator in enumerate(graph.operators):
            made.update(dict.fromkeys(operator.outputs, number))
            last.update({name: number for name in (*operator.inputs, *operator.outputs) if name in made})
        last.update(dict.fromkeys(graph.outputs, len(graph.operators)))

        def held(name: str) -> tuple[int, Part | None]:
            tensor = graph.tensors[name]
            return math.prod(tensor.shape) * (1 if tensor.dtype in CODE_RANGES else 4), units[name]

        four = packed(_of_few_bits(graph), device)
        self._work = []
        for number, operator in enumerate(graph.operators):
            read = tuple((name, *held(name)) for name in operator.inputs if name in made)
            live = tuple(held(name) for name in made if made[name] <= number <= last[name])
            weights = assignments.part_of(layer_of(operator.outputs[0]), weights=True)
            filter = graph.tensors[operator.inputs[1]] if len(operator.inputs) == 3 else None
            constant = filter is not None and filter.data is not None
            biases = math.prod(graph.tensors[operator.inputs[2]].shape) if constant else 0
            self._work.append(
                _Work(
                    read,
                    units[operator.outputs[0]],
                    weights if constant else None,
                    math.prod(filter.shape) if constant and filter is not None else 0,
                    constant and four.tensors[operator.inputs[1]].dtype == INT4,
                    biases,
                    graph.multiply_accumulates(operator),
                    live,
                )
            )

    def flash(self, bits: Bits) -> float:
        """Bytes of the file."""
        saved = 0.0
        converted = set()
        for work in self._work:
            is_int16 = _is_int16(bits, work.result)
            converted |= {(name, is_int16) for name, _, unit in work.read if _is_int16(bits, unit) != is_int16}
            saved -= 4.0 * work.biases if is_int16 else 0
            if work.weights is not None and work.packs and not is_int16 and bits[work.weights] <= 4:
                saved += work.filter / 2
        return self._file - saved + CONVERSION * len(converted)

    def arena(self, bits: Bits) -> np.ndarray:
        """Bytes held while each operator runs."""
        found = []
        for work in self._work:
            is_int16 = _is_int16(bits, work.result)
            held = sum(size * (2 if _is_int16(bits, unit) else 1) for size, unit in work.live)
            # What is read in the other width is stored twice.
            held += sum(
                size * (2 if is_int16 else 1) for _, size, unit in work.read if _is_int16(bits, unit) != is_int16
            )
            if work.weights is not None and work.packs and not is_int16 and bits[work.weights] <= 4:
                held += work.filter  # unpacked while it is used
            found.append(held)
        return np.asarray(found, np.float64)

    def multiply_adds(self, bits: Bits, fewest: int = 2) -> float:
        """In units of 8 by 8 bits. fewest: what fewer bits count as."""
        total = 0.0
        for work in self._work:
            if not work.multiply_adds:
                continue
            read = [bits[unit] if unit is not None else 8 for _, _, unit in work.read]
            first = 16 if _is_int16(bits, work.result) else min(read[0], 8)
            second = bits[work.weights] if work.weights is not None else min(read[-1], 8) if len(read) > 1 else 8
            total += work.multiply_adds * max(first, fewest) * max(second, fewest) / 64
        return total

    def all(self, bits: Bits, fewest: int = 2) -> Mapping[str, float]:
        """All costs by the names of budgets; the arena at its peak. fewest: as for `multiply_adds`."""
        arena, work = self.arena(bits), self.multiply_adds(bits, fewest)
        return {"flash": self.flash(bits), "arena": float(arena.max(initial=0)), "multiply_adds": work}


def _is_int16(bits: Bits, unit: Part | None) -> bool:
    return unit is not None and bits[unit] == 16


def _of_few_bits(graph: Graph) -> Graph:
    """The graph with filters that fit into four bits, to see which ones a device accepts that way."""
    tensors = dict(graph.tensors)
    for operator in graph.operators:
        declaration = OPERATORS[operator.kind]
        filter = tensors[operator.inputs[1]] if len(operator.inputs) == 3 else None
        if declaration.weights and filter is not None and filter.data is not None:
            tensors[filter.name] = replace(filter, data=np.clip(filter.data, -INT4_MAX, INT4_MAX))
    return replace(graph, tensors=tensors)


__all__ = ["Costs"]
