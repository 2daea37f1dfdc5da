# SPDX-License-Identifier: Apache-2.0
"""What a network costs with other bits, estimated within microseconds, to decide what is worth writing and
measuring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..deploy.formats.tflite import tflite_bytes
from ..deploy.graph import Graph
from ..deploy.packing import packed
from ..kit.device.tensor import CODE_RANGES, INT4
from ..kit.engine.arena import lifetimes
from .assignment import Assignments, Bits
from .precisions import Part, layer_of

# What an operator that converts between 8 and 16 bits adds to a file, including its tensor: 184 to 200 bytes were seen.
CONVERSION = 190


# A tensor's name, elements and part.
Held = tuple[str, int, Part | None]


@dataclass(frozen=True)
class _Work:
    """An operator, as far as bits matter to it.

    read: what it reads; result: part of what it stores; weights: that of its filter; filter: the number of weights;
    packs: whether the device has them in four bits; live: all tensors held while it runs.
    """

    read: tuple[Held, ...]
    result: Part | None
    weights: Part | None
    filter: int
    packs: bool
    biases: int
    multiply_adds: int
    live: tuple[Held, ...]

    def is_int16(self, bits: Bits) -> bool:
        return _is_int16(bits, self.result)

    def is_packed(self, bits: Bits) -> bool:
        return self.packs and self.weights is not None and not self.is_int16(bits) and bits[self.weights] <= 4

    def converted(self, bits: Bits) -> list[Held]:
        """What it reads in the other width."""
        return [held for held in self.read if _is_int16(bits, held[2]) != self.is_int16(bits)]


class Costs:
    """Estimates for all assignments of a network, from its graph in 8 bits."""

    def __init__(self, assignments: Assignments, graph: Graph, device: str) -> None:
        self._file = len(tflite_bytes(graph, packed=False))
        parts: dict[str, Part | None] = {name: assignments.part_of(name) for name in graph.inputs}
        steps = [((), graph.inputs), *((operator.inputs, operator.outputs) for operator in graph.operators)]
        alive = lifetimes(steps, graph.outputs)
        for operator in graph.operators:
            read = [name for name in operator.inputs if graph.tensors[name].data is None]
            for name in operator.outputs:
                own = assignments.part_of(layer_of(name))
                parts[name] = parts.get(read[0]) if own is None and read else own

        def held(name: str) -> Held:
            tensor = graph.tensors[name]
            return name, math.prod(tensor.shape) * (1 if tensor.dtype in CODE_RANGES else 4), parts[name]

        # Filters that a device has in four bits, where they may have as few.
        few = assignments.attempt(assignments.nearest(weights=0))
        four = {} if few is None else packed(few.graph(), device).tensors
        packable = {name for name, tensor in four.items() if tensor.dtype == INT4}
        self._work = []
        for number, operator in enumerate(graph.operators, 1):
            names = operator.inputs
            weighted = len(names) == 3 and graph.tensors[names[1]].data is not None
            self._work.append(
                _Work(
                    tuple(held(name) for name in names if name in alive),
                    parts[operator.outputs[0]],
                    assignments.part_of(layer_of(operator.outputs[0]), weights=True) if weighted else None,
                    math.prod(graph.tensors[names[1]].shape) if weighted else 0,
                    weighted and names[1] in packable,
                    math.prod(graph.tensors[names[2]].shape) if weighted else 0,
                    graph.multiply_accumulates(operator),
                    tuple(held(name) for name, (first, last) in alive.items() if first <= number <= last),
                )
            )

    def flash(self, bits: Bits) -> float:
        """Bytes of the file."""
        converted = {(name, work.is_int16(bits)) for work in self._work for name, _, _ in work.converted(bits)}
        packed = sum(work.filter / 2 for work in self._work if work.is_packed(bits))
        wider = sum(4.0 * work.biases for work in self._work if work.is_int16(bits))
        return self._file - packed + wider + CONVERSION * len(converted)

    def arena(self, bits: Bits) -> np.ndarray:
        """Bytes held while each operator runs."""
        held = []
        for work in self._work:
            size = sum(size * (2 if _is_int16(bits, part) else 1) for _, size, part in work.live)
            # What is read in the other width is stored twice.
            size += sum(size for _, size, _ in work.converted(bits)) * (2 if work.is_int16(bits) else 1)
            # Packed weights are unpacked while they are used.
            held.append(size + (work.filter if work.is_packed(bits) else 0))
        return np.asarray(held, np.float64)

    def multiply_adds(self, bits: Bits, fewest: int = 2) -> float:
        """In units of 8 by 8 bits. fewest: what fewer bits count as."""
        total = 0.0
        for work in self._work:
            if not work.multiply_adds:
                continue
            read = [bits[part] if part is not None else 8 for _, _, part in work.read]
            first = 16 if work.is_int16(bits) else min(read[0], 8)
            second = bits[work.weights] if work.weights is not None else min(read[-1], 8) if len(read) > 1 else 8
            total += work.multiply_adds * max(first, fewest) * max(second, fewest) / 64
        return total

    def all(self, bits: Bits, fewest: int = 2) -> Mapping[str, float]:
        """All costs by the names of budgets; the arena at its peak. fewest: as for `multiply_adds`."""
        arena, work = self.arena(bits), self.multiply_adds(bits, fewest)
        return {"flash": self.flash(bits), "arena": float(arena.max(initial=0)), "multiply_adds": work}


def _is_int16(bits: Bits, part: Part | None) -> bool:
    return part is not None and bits[part] == 16
