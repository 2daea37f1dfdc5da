# SPDX-License-Identifier: Apache-2.0
"""What follows a convolution or a product becomes part of it: a bias, and a line for each channel.

Some frameworks add the bias by an operation of its own, and batch norm in evaluation is a difference, a product and a
sum. The network has words for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...planning.network import Step
from ..core.builder import ItemBuilder

_WEIGHTED = ("conv", "conv_transpose", "linear")


class BiasAndAffine:
    """The live steps of a network under construction, in order."""

    def __init__(self, c: ItemBuilder[Any], outputs: Sequence[str]) -> None:
        self.c = c
        self.outputs = set(outputs)
        needed = set(outputs)
        live: list[Step] = []
        for step in reversed(c.steps):
            if step.output in needed:
                needed.update(each for each in step.inputs if isinstance(each, str))
                live.append(step)
        self.steps: dict[str, Step] = {step.output: step for step in reversed(live)}

    def run(self) -> list[Step]:
        for output in list(self.steps):
            step = self.steps.get(output)
            if step is not None and step.kind in _WEIGHTED:
                end = self._with_bias(step) if step.inputs[2] is None else step.output
                self._with_line(end)
        return list(self.steps.values())

    def _only_reader(self, name: str) -> Step | None:
        readers = [step for step in self.steps.values() if name in step.inputs]
        if len(readers) != 1 or name in self.outputs or readers[0].inputs.count(name) != 1:
            return None
        return readers[0]

    def _axis(self, step: Step) -> int:
        return int(step.attributes.get("channel_axis", len(self.c.values[step.output].shape) - 1))

    def _vector(self, operand: Any, shape: Sequence[int], axis: int) -> Any:
        """A constant with one number for each channel, [channels]."""
        if not isinstance(operand, str) or operand not in self.c.constants:
            return None
        item = self.c.fixed_named(operand)
        if len(item.shape) > len(shape):
            return None
        sizes = (1,) * (len(shape) - len(item.shape)) + item.shape
        count = shape[axis]
        if any(size != 1 for at, size in enumerate(sizes) if at != axis) or sizes[axis] not in (1, count):
            return None
        repeats = 1 if sizes[axis] == count else count
        return self.c.then(item, (count,), lambda array: array.reshape(-1).repeat(repeats))

    def _take(self, into: Step, reader: Step, **changes: Any) -> None:
        """Makes `into` with these changes give what its reader gave."""
        moved = {
            (reader.output if name == into.output else name): (
                replace(step, output=reader.output, **changes) if name == into.output else step
            )
            for name, step in self.steps.items()
            if name != reader.output
        }
        self.steps = moved

    def _with_bias(self, step: Step) -> str:
        """Absorbs a sum with a constant; returns the name of the result."""
        reader = self._only_reader(step.output)
        if reader is None:
            return step.output
        if reader.kind == "add":
            vector = self._other(step.output, reader, self._axis(step))
            if vector is None:
                return step.output
            self._take(step, reader, inputs=(*step.inputs[:2], self.c.operand(vector)))
            return reader.output
        if reader.kind == "reshape":
            self._bias_after_reshapes(step, reader)
        return step.output

    def _bias_after_reshapes(self, step: Step, reshape: Step) -> None:
        """Likewise where axes of size 1 came or went in between, or the channels of a product were split."""
        last, reader = reshape, self._only_reader(reshape.output)
        while reader is not None and reader.kind == "reshape":
            last, reader = reader, self._only_reader(reader.output)
        if reader is None or reader.kind != "add":
            return
        names = [each for each in reader.inputs if each != last.output]
        if len(names) != 1 or not isinstance(names[0], str) or names[0] not in self.c.constants:
            return
        before, after = self.c.values[step.output].shape, self.c.values[last.output].shape
        item, axis = self.c.fixed_named(names[0]), self._axis(step)
        if len(item.shape) > len(after) or self.c.values[reader.output].shape != after:
            return
        sizes = (1,) * (len(after) - len(item.shape)) + item.shape
        wide = [at for at, size in enumerate(before) if size != 1]
        kept = [at for at, size in enumerate(after) if size != 1]
        whole = [before[at] for at in wide] == [after[at] for at in kept] and axis in wide
        if whole:
            places = [kept[wide.index(axis)]]
        elif axis == len(before) - 1 and after[: len(before) - 1] == before[:-1]:
            places = list(range(len(before) - 1, len(after)))
        else:
            return
        if any(size != (after[at] if at in places else 1) for at, size in enumerate(sizes)):
            return
        bias = self.c.operand(self.c.then(item, (before[axis],), lambda array: array.reshape(-1)))
        self.steps[step.output] = replace(step, inputs=(*step.inputs[:2], bias))
        self._take(last, reader)

    def _other(self, name: str, reader: Step, axis: int) -> Any:
        """The vector that a reader combines a value with; None if it is more than that."""
        if self.c.values[reader.output].shape != self.c.values[name].shape:
            return None
        others = [each for each in reader.inputs if each != name]
        return self._vector(others[0], self.c.values[name].shape, axis) if len(others) == 1 else None

    def _with_line(self, name: str) -> None:
        """Makes differences, products and sums with vectors one batch norm that the user has frozen."""
        step = self.steps[name]
        axis, count = self._axis(step), self.c.values[name].shape[self._axis(step)]
        c = self.c
        factor: Any = None
        offset: Any = None
        taken: list[Step] = []
        end = name

        def combined(known: Any, other: Any, function: Callable[[Any, Any], Any]) -> Any:
            return other if known is None else c.of_both(known, other, function)

        while True:
            reader = self._only_reader(end)
            if reader is None or reader.kind not in ("add", "sub", "mul", "div"):
                break
            vector = self._other(end, reader, axis)
            if vector is None or (reader.kind in ("sub", "div") and reader.inputs[0] != end):
                break
            if reader.kind in ("mul", "div"):
                inverse = vector if reader.kind == "mul" else c.then(vector, (count,), lambda array: 1.0 / array)
                factor = combined(factor, inverse, lambda a, b: a * b)
                offset = None if offset is None else c.of_both(offset, inverse, lambda a, b: a * b)
            else:
                change = vector if reader.kind == "add" else c.then(vector, (count,), lambda array: -array)
                offset = combined(offset, change, lambda a, b: a + b)
            taken.append(reader)
            end = reader.output
        vectors = [each for each in (factor, offset) if each is not None]
        if factor is None or all(c.numbers(each) is not None for each in vectors):
            return
        zeros, ones = (c.operand(c.fixed_of(np.full(count, value, np.float32))) for value in (0, 1))
        weight, bias = c.operand(factor), None if offset is None else c.operand(offset)
        attributes = {"epsilon": 0.0, "momentum": 0.1, "channel_axis": axis, "training": False, "counter": ""}
        norm = replace(
            taken[0], kind="batch_norm", inputs=(name, weight, bias, zeros, ones), output=end, attributes=attributes
        )
        gone = {each.output for each in taken}
        self.steps = {
            key: norm if key == end else each for key, each in self.steps.items() if key not in gone or key == end
        }
