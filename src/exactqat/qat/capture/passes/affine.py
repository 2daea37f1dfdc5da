# SPDX-License-Identifier: Apache-2.0
"""What follows a convolution or a product becomes part of it: a bias, and a line for each channel.

Some frameworks add the bias by an operation of its own, and batch norm in evaluation is a difference, a product and a
sum. The network has words for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....kit.planning.network import Step
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
                needed.update(name for name in step.inputs if isinstance(name, str))
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

    def _vector(self, step: Step, moves: Sequence[Step], reader: Step) -> Any:
        """What a reader combines a step's result with, as one number for each channel, [channels]; None if it is more.

        moves: the steps in between, which only move values.
        """
        last = moves[-1].output if moves else step.output
        others = [name for name in reader.inputs if name != last]
        if len(others) != 1 or not isinstance(others[0], str) or others[0] not in self.c.constants:
            return None
        item, axis, shape = self.c.fixed_named(others[0]), self._axis(step), self.c.values[step.output].shape
        count = shape[axis]
        # The channel of each value, and the entry of the vector that meets it.
        channels = np.arange(count).reshape([-1 if at == axis else 1 for at in range(len(shape))])
        channels = np.broadcast_to(channels, shape)
        for move in moves:
            moved = self.c.values[move.output].shape
            channels = (
                channels.reshape(moved) if move.kind == "reshape" else channels.transpose(move.attributes["axes"])
            )
        entries = np.arange(math.prod(item.shape)).reshape(item.shape)
        if np.broadcast_shapes(item.shape, channels.shape) != channels.shape:
            return None
        of_channel = np.zeros(count, int)
        of_channel[channels] = entries
        if (of_channel[channels] != entries).any():
            return None
        if entries.size == 1:
            ones = self.c.fixed_of(np.ones(count, np.float32))
            return self.c.of_both(ones, self.c.reshape(item, (1,)), lambda one, number: one * number)
        return self.c.reshape(item, (count,)) if (of_channel == np.arange(count)).all() else None

    def _put(self, name: str, step: Step, *taken: Step) -> None:
        """A step in the place of one of that name, or of the one that it takes the name of, without those it takes."""
        gone = {reader.output for reader in taken}
        self.steps = {
            (step.output if key == name else key): (step if key == name else entry)
            for key, entry in self.steps.items()
            if key == name or key not in gone
        }

    def _with_bias(self, step: Step) -> str:
        """Absorbs a sum with a constant, also where the result was moved in between; returns the result's name."""
        moves: list[Step] = []
        reader = self._only_reader(step.output)
        while reader is not None and reader.kind in ("reshape", "permute"):
            moves.append(reader)
            reader = self._only_reader(reader.output)
        vector = None if reader is None or reader.kind != "add" else self._vector(step, moves, reader)
        if reader is None or vector is None:
            return step.output
        biased, last = replace(step, inputs=(*step.inputs[:2], self.c.operand(vector))), moves[-1] if moves else step
        self.steps[step.output] = biased
        self._put(last.output, replace(self.steps[last.output], output=reader.output), reader)
        return step.output if moves else reader.output

    def _with_line(self, name: str) -> None:
        """Makes differences, products and sums with vectors one batch norm that the user has frozen."""
        c, step = self.c, self.steps[name]
        axis, count = self._axis(step), c.values[name].shape[self._axis(step)]
        # None: no factor, or no offset, so far.
        factor: Any = None
        offset: Any = None
        taken: list[Step] = []
        end = name
        while (reader := self._only_reader(end)) is not None and reader.kind in ("add", "sub", "mul", "div"):
            vector = self._vector(replace(step, output=end), [], reader)
            if vector is None or (reader.kind in ("sub", "div") and reader.inputs[0] != end):
                break
            if reader.kind in ("mul", "div"):
                vector = vector if reader.kind == "mul" else c.then(vector, (count,), lambda array: 1.0 / array)
                factor = vector if factor is None else c.of_both(factor, vector, lambda a, b: a * b)
                offset = None if offset is None else c.of_both(offset, vector, lambda a, b: a * b)
            else:
                vector = vector if reader.kind == "add" else c.then(vector, (count,), lambda array: -array)
                offset = vector if offset is None else c.of_both(offset, vector, lambda a, b: a + b)
            taken.append(reader)
            end = reader.output
        vectors = [vector for vector in (factor, offset) if vector is not None]
        if factor is None or all(c.numbers(vector) is not None for vector in vectors):
            return
        zeros, ones = (c.operand(c.fixed_of(np.full(count, value, np.float32))) for value in (0, 1))
        inputs = (name, c.operand(factor), None if offset is None else c.operand(offset), zeros, ones)
        attributes = {"epsilon": 0.0, "momentum": 0.1, "channel_axis": axis, "training": False, "counter": ""}
        norm = replace(taken[0], kind="batch_norm", inputs=inputs, output=end, attributes=attributes)
        self._put(end, norm, *taken)
