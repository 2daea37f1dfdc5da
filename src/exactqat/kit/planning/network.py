# SPDX-License-Identifier: Apache-2.0
"""A model as the kit sees it, from any framework: float steps from inputs to outputs.

`capture` (one file for each framework) makes a `Network`, `plan` reads it. Nothing here knows a framework: parameters
have the user's names, what is computed from parameters alone is opaque.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..device.attribute import Attributes
from .kinds import KINDS


@dataclass(frozen=True)
class Place:
    """The place of a step in the user's model: path of the innermost module, file and line; empty where unknown."""

    path: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = f"{self.file}, line {self.line}" if self.file else ""
        return " ".join(filter(None, (self.path or "the model's forward", f"({where})" if where else "")))


@dataclass(frozen=True)
class Value:
    """A tensor that depends on the input.

    Attributes:
        shape: for a batch of one. The batch axis holds the number of rows that one example takes: 1, or more if the
            model folds other axes into the batch.
        batch_axis: the axis of the batch.
        dtype: "float32", or "int64" for an index such as argmax's.
        hides: for an input: its numbers are 0, or so far below 0 that what they are added to no longer counts.
        truth: for an integer input: those of the example are 0 or 1.
    """

    name: str
    shape: tuple[int, ...]
    batch_axis: int = 0
    dtype: str = "float32"
    hides: bool = False
    truth: bool = False


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the input.

    Attributes:
        name: unique among values and constants; for a parameter or buffer, its path in the user's model.
        parameter: whether it is an unchanged parameter or buffer; otherwise it is computed from `sources` by
            `expression`, or is `data`.
        trainable: some parameter it depends on requires gradients.
        sources: paths of the parameters and buffers that an expression reads.
        expression: opaque; the framework's `train` computes it from the sources at every step.
        data: opaque; the framework's own array, if it depends on no parameter.
    """

    name: str
    shape: tuple[int, ...]
    parameter: bool = True
    trainable: bool = False
    sources: tuple[str, ...] = ()
    expression: Any = None
    data: Any = None


@dataclass(frozen=True)
class Step:
    """One float operation.

    Attributes:
        kind: from the vocabulary of `KINDS`.
        inputs: names of values or constants, Python numbers, or None for an optional operand that is absent.
        output: name of the value it computes.
        attributes: as `KINDS` declares them. Axes are counted from 0 in the user's order, never negative.
        place: its place in the user's model.
        module: path of the user's module that consists of just this step (a convolution, a ReLU), else "".
        label: the word for it in messages, as the user wrote it: "SiLU", "Conv2d", "torch.cumsum".
    """

    kind: str
    inputs: tuple[str | float | None, ...]
    output: str
    attributes: Attributes = field(default_factory=dict)
    place: Place = Place()
    module: str = ""
    label: str = ""


@dataclass(frozen=True)
class Network:
    """A whole model, checked on creation.

    Attributes:
        inputs: names of the values it takes, in the order of its arguments (flattened).
        outputs: names of what it returns, flattened.
        values, constants: by name.
        steps: in order of execution.
        input_tree, output_tree: opaque; the framework's own description of how inputs and outputs nest.
        output_names: a name for each output made from its place in the tree: "output", "output_0", "logits", ...
        input_names: likewise: "input" for a single one, else the argument's name. Rules know inputs by these.
        argument_names: what the user calls the inputs, even a single one: arguments, keys, input layers; used in files.
            Empty: as input_names.
        channels_first: whether images are [N, C, H, W] in its framework; see `files`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Constant]
    steps: tuple[Step, ...]
    input_names: tuple[str, ...] = ("input",)
    output_names: tuple[str, ...] = ("output",)
    input_tree: Any = None
    output_tree: Any = None
    argument_names: tuple[str, ...] = ()
    channels_first: bool = True

    def __post_init__(self) -> None:
        """Refuses an invalid network.

        Raises:
            ValueError: naming the step and its place, what was given and what is allowed.
        """
        names = set(self.inputs)
        absent = [name for name in self.inputs if name not in self.values]
        absent += [name for name in self.outputs if name not in self.values and name not in self.constants]
        if absent:
            raise ValueError(f"inputs and outputs must be among the values, got {', '.join(absent)}")
        for step in self.steps:
            if step.kind not in KINDS:
                raise ValueError(f"{step.place}: {step.kind!r} is no kind of a step; the kinds are {', '.join(KINDS)}")
            try:
                KINDS[step.kind].check(step.inputs, step.attributes)
            except ValueError as error:
                raise ValueError(f"{step.place}: {error}") from None
            what = f"{step.place}: a step {step.kind!r}"
            for operand in step.inputs:
                if isinstance(operand, str) and operand not in names and operand not in self.constants:
                    raise ValueError(f"{what} reads {operand!r}, which nothing before it makes")
            if step.output not in self.values or step.output in names:
                wrong = "is made already" if step.output in names else "is not among the values"
                raise ValueError(f"{what} makes {step.output!r}, which {wrong}")
            names.add(step.output)
        # The planner refuses an output that is a constant, in the user's words.
        missing = [name for name in self.outputs if name not in names and name not in self.constants]
        if missing:
            raise ValueError(f"no step makes the outputs {', '.join(missing)}")
