# SPDX-License-Identifier: Apache-2.0
"""Unrolled recurrent layers: the step that they repeat, recovered for a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..kit.device import OPERATORS, Tensor
from ..kit.device.in_time import in_time
from ..kit.device.operator import Refusal, need
from ..kit.device.tensor import CODE_RANGES
from .graph import Graph, Operator

# A result of a step: which of its operators, and which result of that.
Key = tuple[int, int]
# Where an operand of a step comes from: a result of this step, or of the one before, the frame, or a constant.
Source = tuple[str, Key | None]
# A first step, two to compare, and a last one, which prepares nothing for a following step.
FEWEST_STEPS = 4


@dataclass(frozen=True)
class Recurrence:
    """The steps of a recurrent layer.

    Attributes:
        frame: what the first step reads: a frame of the sequence.
        axis: the time axis of everything kept or returned.
        first: operators of the first step, which has nothing before it.
        later: operators of every other step.
        sources: for each of `later`, those of its operands.
        begun: for each result of `later` that is kept or returned, the first step's tensor in its place.
        kept: results of a step that the next one reads.
        joined: tensors that hold a result of all steps.
        last: likewise, of the last step alone.
        numbers: of the graph's operators that make up the layer.
    """

    frame: str
    axis: int
    first: tuple[Operator, ...]
    later: tuple[Operator, ...]
    sources: tuple[tuple[Source, ...], ...]
    begun: Mapping[Key, str]
    kept: tuple[Key, ...]
    joined: Mapping[str, Key]
    last: Mapping[str, Key]
    numbers: frozenset[int]


def find_recurrence(graph: Graph, name: str, axis: int) -> Recurrence | None:
    """The layer whose steps take one frame of a tensor each; None if there is none.

    Raises:
        Refusal: its steps differ, or it runs from the last frame to the first.
    """
    slices = _frames(graph, name, axis)
    if len(slices) < FEWEST_STEPS:
        return None
    return _Search(graph, axis, slices).run()


def _frames(graph: Graph, name: str, axis: int) -> dict[int, int]:
    """By frame, the number of the operator that takes it; nothing unless each frame is taken once."""
    size, found = graph.tensors[name].shape[axis], {}
    for number, operator in enumerate(graph.operators):
        if operator.inputs != (name,):
            continue
        output = graph.tensors[operator.outputs[0]]
        try:
            about = in_time(
                OPERATORS[operator.kind], [graph.tensors[name]], [output], operator.attributes, [axis]
            )  # fmt: skip
        except Refusal:
            continue
        if about.axis == axis and about.reach == 1 and output.shape[axis] == 1 and size > 1:
            found[-about.before] = number
    return found if set(found) == set(range(size)) else {}


class _Search:
    def __init__(self, graph: Graph, axis: int, slices: Mapping[int, int]) -> None:
        self.graph, self.axis, self.slices = graph, axis, slices
        self.count = len(slices)
        self.frames = {graph.operators[number].outputs[0]: at for at, number in slices.items()}
        # By tensor, the step that computes it, and its time axis.
        self.level = dict(self.frames)
        self.axes: dict[str, int | None] = dict.fromkeys(self.frames, axis)
        self.steps: list[list[int]] = [[] for _ in range(self.count)]
        self.joins: list[int] = []
        # For each step, its results by tensor.
        self.at: list[dict[str, Key]] = [{} for _ in range(self.count)]
        self.sources: dict[tuple[int, int], Source] = {}
        self.begun: dict[Key, str] = {}

    def run(self) -> Recurrence:
        for number, operator in enumerate(self.graph.operators):
            if operator.outputs[0] not in self.frames and any(name in self.level for name in operator.inputs):
                self._enter(number, operator)
        need(bool(self.steps[1]), "no operator reads the frames one by one")
        later = [self.graph.operators[number] for number in self.steps[1]]
        taken = {*self.slices.values(), *self.steps[0], *self.steps[1], *self.joins}
        for index, each in enumerate(later):
            self.at[1] |= {name: (index, place) for place, name in enumerate(each.outputs)}
        for at in range(2, self.count):
            matched = self._match(at, later)
            taken.update(matched)
            need(
                set(matched) == set(self.steps[at]) or at == self.count - 1,
                f"step {at} of the recurrent layer has other operators than the one before",
            )
        joined = {}
        for number in self.joins:
            operator = self.graph.operators[number]
            keys = {self.at[at].get(name) for at, name in enumerate(operator.inputs) if at}
            need(len(keys) == 1 and None not in keys, f"{operator.outputs[0]!r} joins other results at every step")
            (key,) = (key for key in keys if key is not None)
            self._begin(key, operator.inputs[0])
            joined[operator.outputs[0]] = key
        last = self._last(taken)
        before = [key for word, key in self.sources.values() if word == "before" and key is not None]
        kept = tuple(dict.fromkeys(before))
        for key in {*kept, *joined.values(), *last.values()}:
            self._check(later[key[0]].outputs[key[1]], self.begun.get(key))
        sources = tuple(
            tuple(self.sources[(index, place)] for place in range(len(each.inputs))) for index, each in enumerate(later)
        )
        first = tuple(self.graph.operators[number] for number in self.steps[0])
        frame = next(name for name, at in self.frames.items() if at == 0)
        return Recurrence(
            frame, self.axis, first, tuple(later), sources, self.begun, kept, joined, last, frozenset(taken)
        )  # fmt: skip

    def _enter(self, number: int, operator: Operator) -> None:
        tensors = self.graph.tensors
        inputs, outputs = ([tensors[name] for name in names] for names in (operator.inputs, operator.outputs))
        for tensor in inputs:
            need(
                tensor.name in self.level or tensor.data is not None,
                f"{operator.outputs[0]!r} of a recurrent layer reads {tensor.name!r} beside a frame, as a layer that "
                "also runs from the last frame to the first does",
            )
        axes = [self.axes.get(name) for name in operator.inputs]
        try:
            about = in_time(OPERATORS[operator.kind], inputs, outputs, operator.attributes, axes)
        except Refusal:
            about = None
        if about is not None and about.joins:
            levels = [self.level[name] for name in operator.inputs]
            wrong = next((pair for pair in enumerate(levels) if pair[0] != pair[1]), None)
            need(
                len(levels) == self.count and wrong is None,
                "frame {} depends on frame {}: a recurrent layer runs from the last frame to the first, and a stream "
                "has no last one".format(*(wrong or (0, len(levels) - 1))),
            )
            self.joins.append(number)
            return
        step = max(self.level[name] for name in operator.inputs if name in self.level)
        self.steps[step].append(number)
        for name in operator.outputs:
            self.level[name] = step
            self.axes[name] = None if about is None else about.axis

    def _match(self, at: int, later: Sequence[Operator]) -> list[int]:
        """Numbers of the operators of a step that match those of the second one, in their order."""
        matched: list[int] = []
        own: dict[str, Key] = {}
        index, end = 0, at == self.count - 1
        for number in self.steps[at]:
            operator = self.graph.operators[number]
            # The last step prepares nothing for a following one.
            for candidate in range(index, len(later) if end else min(index + 1, len(later))):
                found = self._sources(at, operator, later[candidate], own)
                places = [] if found is None else [((candidate, place), each) for place, each in enumerate(found)]
                if found is None or any(self.sources.setdefault(*each) != each[1] for each in places):
                    continue
                matched.append(number)
                own |= {name: (candidate, place) for place, name in enumerate(operator.outputs)}
                for (_, place), (word, key) in places:
                    if word == "before":
                        assert key is not None
                        self._begin(key, later[candidate].inputs[place])
                index = candidate + 1
                break
        need(
            end or index == len(later),
            f"step {at} of the recurrent layer is not computed as the one before, from "
            f"{later[min(index, len(later) - 1)].outputs[0]!r} on: each step has ranges or weights of its own; those "
            "of a whole LSTM or GRU layer are one for all steps",
        )
        self.at[at] = own
        return matched

    def _sources(
        self, at: int, operator: Operator, model: Operator, own: Mapping[str, Key]
    ) -> tuple[Source, ...] | None:
        """Where the operands come from, as in the second step; None if it is another operator."""
        if len(operator.inputs) != len(model.inputs) or operator.attributes != model.attributes:
            return None
        if OPERATORS[operator.kind] is not OPERATORS[model.kind] or len(operator.outputs) != len(model.outputs):
            return None
        pairs = zip(operator.outputs, model.outputs, strict=True)
        if not all(_alike(self.graph.tensors[one], self.graph.tensors[other]) for one, other in pairs):
            return None
        found: list[Source] = []
        for name, other in zip(operator.inputs, model.inputs, strict=True):
            tensor = self.graph.tensors[name]
            if tensor.data is not None:
                if not _same_constant(tensor, self.graph.tensors[other]):
                    return None
                found.append(("constant", None))
            elif self.frames.get(name) == at and self.frames.get(other) == 1:
                found.append(("frame", None))
            elif name in own and self.at[1].get(other) == own[name]:
                found.append(("own", own[name]))
            elif name in self.at[at - 1] and self.level.get(other) == 0 and other not in self.frames:
                found.append(("before", self.at[at - 1][name]))
            else:
                return None
        return tuple(found)

    def _begin(self, key: Key, name: str) -> None:
        need(self.begun.setdefault(key, name) == name, f"{name!r} of the first step is in two places of the next one")

    def _last(self, taken: set[int]) -> dict[str, Key]:
        """What the last step computes and others read."""
        own, wanted = self.at[self.count - 1], set(self.graph.outputs)
        for number, operator in enumerate(self.graph.operators):
            if number not in taken:
                wanted.update(operator.inputs)
        found = {}
        inside = {name for at in self.at for name in at}
        for number in self.steps[0]:
            inside.update(self.graph.operators[number].outputs)
        for name in sorted(wanted & (inside | set(self.frames))):
            need(name in own, f"{name!r}, of a step in the middle of a recurrent layer, is read elsewhere")
            found[name] = own[name]
        return found

    def _check(self, name: str, begun: str | None) -> None:
        tensor = self.graph.tensors[name]
        need(self.axes.get(name) == self.axis, f"{name!r} of a recurrent layer has no axis for time")
        need(tensor.dtype in CODE_RANGES, f"{name!r} of a recurrent layer is kept, and {tensor.dtype} has no codes")
        if begun is not None:
            need(
                _alike(tensor, self.graph.tensors[begun]),
                f"{begun!r} and {name!r}, the first and the second step of a recurrent layer, are on different grids",
            )


def _alike(one: Tensor, other: Tensor) -> bool:
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    return same and one.quantization.equals(other.quantization)


def _same_constant(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return other.data is not None and _alike(one, other) and np.array_equal(one.data, other.data)  # type: ignore[arg-type]


__all__ = ["Key", "Recurrence", "find_recurrence"]
