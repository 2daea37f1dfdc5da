# SPDX-License-Identifier: Apache-2.0
"""A network under construction, whatever framework the model is written in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from ....kit.planning.network import Constant, Place, Step, Value
from .functions import ITSELF, TOLERANCE, Curve, agree, identify, same
from .refusals import MIXES, Refused
from .sizes import Batch, Shape, Size, exact, for_examples

# How many earlier values a value is known as a function of.
_ROOTS = 15
# What makes truth values, or integers, of nothing but such.
MOVEMENTS = ("reshape", "permute", "expand", "slice", "concat", "gather", "flip", "identity")
# What makes integers of integers.
_OF_WHOLES = {
    *(*MOVEMENTS, "pad", "add", "sub", "mul", "neg", "abs", "square", "sum"),
    *("maximum", "minimum", "clamp", "relu", "amax", "amin"),
}
Handler = TypeVar("Handler", bound=Callable[..., Any])


def entering(table: dict[str, Handler]) -> Callable[..., Callable[[Handler], Handler]]:
    """A decorator that enters a function into a table of handlers, by the names of what it handles."""

    def handles(*names: str) -> Callable[[Handler], Handler]:
        def enter(handler: Handler) -> Handler:
            table.update(dict.fromkeys(names, handler))
            return handler

        return enter

    return handles


def free_name(base: str, *taken: Container[str], first: int = 2) -> str:
    """The name, or the first of `base_2`, `base_3`, ... that is not taken."""
    names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(first)))
    return next(name for name in names if not any(name in container for container in taken))


@dataclass(eq=False)
class Moving:
    """A value of the network: it depends on the input.

    Attributes:
        shape: as traced; sizes that follow the batch are `Batch`.
        samples: by the name of an earlier value, this one as a function of it, if it is one value by value.
        comparison: (word, left, right) of truth values, which the network has no value for; then `name` is "".
    """

    name: str
    shape: Shape
    dtype: Any = "float32"
    samples: Mapping[str, Curve] = field(default_factory=dict)
    comparison: tuple[Any, ...] | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)


class HasShape(Protocol):
    @property
    def shape(self) -> Shape: ...


Fixed = TypeVar("Fixed", bound=HasShape)
# A value, or what a framework has that does not depend on the input: what is made of it is the same.
Either = TypeVar("Either", bound=HasShape)


class ItemBuilder(Generic[Fixed]):
    """A network under construction, of operations that are read as functions of items: each is a `Moving`, or does not
    depend on the input, which a framework represents as it likes (`Fixed`: with a `shape`, and the `number` that it
    holds everywhere, or None).

    A function of one value is known by what it makes of numbers.

    Attributes:
        steps, values, constants: of the network.
    """

    tolerance = TOLERANCE  # of functions' values
    moving = Moving  # its class of values
    merges = True  # whether what is written twice is computed once

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.values: dict[str, Value] = {}
        self.constants: dict[str, Constant] = {}
        # Values that hold nothing but 0 and 1, and integers that the network is given, moved at most.
        self.truths: set[str] = set()
        self.wholes: set[str] = set()
        # Integers computed of those, such as how many words are in front of one.
        self.counted: set[str] = set()
        self.items: dict[str, Moving] = {}
        self.made_by: dict[str, Step] = {}
        self._numbers = itertools.count(1)
        self._made: dict[Any, Moving] = {}

    # --- what a framework says ----------------------------------------------------------------------------------------

    def place(self) -> Place:
        """Where the operation that is being read is in the user's model."""
        raise NotImplementedError

    def batch_axes(self, shape: Sequence[Size]) -> list[int]:
        """The axes of a traced shape whose sizes follow the batch."""
        return [axis for axis, size in enumerate(shape) if isinstance(size, Batch)]

    def for_one(self, shape: Iterable[Size]) -> tuple[int, ...]:
        """A traced shape for a batch of one."""
        return for_examples(exact(shape), 1)

    def operand(self, item: Any) -> str | float | None:
        """How a step names what it reads."""
        raise NotImplementedError

    def read_by(self, kind: str, items: Sequence[object]) -> tuple[str | float | None, ...]:
        """How a step of this kind names what it reads."""
        return tuple(self.operand(item) for item in items)

    def name_of_result(self) -> str:
        """Of the next step."""
        return f"v{next(self._numbers)}"

    def then(self, item: Fixed, shape: Sequence[int], function: Callable[[Any], Any]) -> Fixed:
        """What a function of its array makes of something fixed; it uses methods of NumPy's arrays only."""
        raise NotImplementedError

    def numbers(self, item: Any) -> np.ndarray | None:
        """What something fixed holds, for a batch of one; None of a value, and of what depends on parameters."""
        raise NotImplementedError

    def fixed_of(self, values: np.ndarray) -> Fixed:
        """Numbers as something fixed."""
        raise NotImplementedError

    def fixed_named(self, name: str) -> Fixed:
        """What a constant was made of."""
        raise NotImplementedError

    def of_both(self, first: Fixed, second: Fixed, function: Callable[[Any, Any], Any]) -> Fixed:
        """What a function of the arrays of two fixed things of one shape makes, of that shape."""
        raise NotImplementedError

    def label(self, kind: str) -> str:
        """The user's word for a step of this kind."""
        return kind

    # --- steps --------------------------------------------------------------------------------------------------------

    def batch_axis(self, shape: Sequence[Size]) -> int:
        """Where the batch is in a traced shape.

        Raises:
            Refused: nowhere, or in several places.
        """
        axes = self.batch_axes(shape)
        if len(axes) != 1:
            raise Refused(MIXES)
        return axes[0]

    def input(self, name: str, shape: Sequence[Size], dtype: Any) -> Moving:
        """A value that the network gets."""
        word = str(dtype)
        if "bool" in word:
            self.truths.add(name)
        elif "int" in word:
            self.wholes.add(name)
        return self._entered(name, tuple(shape), dtype, {})

    def emit(
        self,
        kind: str,
        operands: Sequence[object],
        shape: Sequence[Size],
        /,
        dtype: Any = "float32",
        samples: Mapping[str, Curve] | None = None,
        module: str = "",
        label: str = "",
        **attributes: Any,
    ) -> Moving:
        """One float step. shape: as traced."""
        shape = exact(shape)
        self.batch_axis(shape)
        inputs = self.read_by(kind, operands)
        # Expressions may draw random numbers, so each is a step of its own.
        same_step = (kind, inputs, shape, repr(sorted(attributes.items())))
        if self.merges and kind != "unsupported" and same_step in self._made:
            return self._made[same_step]
        output = self.name_of_result()
        step = Step(kind, inputs, output, attributes, self.place(), module, label or self.label(kind))
        self.steps.append(step)
        self.made_by[output] = step
        self._made[same_step] = self._entered(output, shape, dtype, samples or {})
        self._note_masks(kind, operands, output)
        return self._made[same_step]

    def _note_masks(self, kind: str, operands: Sequence[object], output: str) -> None:
        """Whether a step gives truth values, or integers of those that are given."""
        names = [operand.name for operand in operands if isinstance(operand, Moving)]
        if kind == "compare":
            self.truths.add(output)
        if kind not in _OF_WHOLES or not (self.truths | self.wholes | self.counted).issuperset(names):
            return
        others = [self.numbers(operand) for operand in operands if not isinstance(operand, Moving)]
        if all(array is not None and (array == np.rint(array)).all() for array in others):
            self.counted.add(output)
        if kind not in (*MOVEMENTS, "mul", "sub") or not (self.truths | self.wholes).issuperset(names):
            return
        opposite = kind != "sub" or (not isinstance(operands[0], Moving) and self.numbers(operands[0]) == 1)
        if any(array is None or not ((array == 0) | (array == 1)).all() for array in others) or not np.all(opposite):
            return
        (self.truths if self.truths.issuperset(names) else self.wholes).add(output)

    def _entered(self, name: str, shape: Shape, dtype: Any, samples: Mapping[str, Curve]) -> Moving:
        word = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
        known = "float32" if "float" in word else str(np.dtype(word))
        self.values[name] = Value(name, self.for_one(shape), self.batch_axis(shape), known)
        # As a function of earlier values, the last ones of these, and of itself.
        curves = dict(list(samples.items())[-_ROOTS:]) | {name: ITSELF}
        self.items[name] = self.moving(name, shape, dtype, curves)
        return self.items[name]

    def step_of(self, item: object) -> Step | None:
        """The step that made an item."""
        return self.made_by.get(item.name) if isinstance(item, Moving) else None

    def made_from(self, item: object, kind: str, stopped: bool = False) -> tuple[Step, Moving] | None:
        """The step of that kind that made an item, and its first operand; identities aside.

        stopped: those that stop gradients, too.
        """
        step = self.step_of(item)
        while step is not None and step.kind == "identity" and (stopped or not step.attributes.get("stop_gradient")):
            step = self.made_by.get(str(step.inputs[0]))
        if step is None or step.kind != kind or step.inputs[0] not in self.items:
            return None
        return step, self.items[str(step.inputs[0])]

    def forget(self, count: int) -> None:
        """Forgets all steps but the first ones."""
        gone = {step.output for step in self.steps[count:]}
        del self.steps[count:]
        for name in gone:
            del self.values[name], self.items[name], self.made_by[name]
        for names in (self.truths, self.wholes, self.counted):
            names -= gone
        self._made = {key: item for key, item in self._made.items() if item.name not in gone}

    def unsupported(
        self, label: str, read: Sequence[Moving], shapes: Sequence[Sequence[Size]], reason: str
    ) -> list[Moving]:
        """Steps for an operation's results that the plan refuses, so that it lists all of a model's obstacles."""
        results = []
        for shape in shapes:
            if len(self.batch_axes(shape)) != 1:
                # There is no such value; anything that has a batch replaces it.
                reason = reason or MIXES
                shape = (Batch(), *[size for size in shape if not isinstance(size, Batch)])
            attributes: dict[str, Any] = {"reason": reason} if reason else {}
            results.append(self.emit("unsupported", read, shape, label=label, **attributes))
        return results

    # --- functions of one value ---------------------------------------------------------------------------------------

    def sampled(
        self, operands: Sequence[object], evaluate: Callable[..., np.ndarray], turns: Iterable[Any] = ()
    ) -> dict[str, Curve]:
        """What an operation makes of numbers, as a function of earlier values; empty where it is not one.

        Args:
            operands: items and numbers.
            evaluate: the operation, of vectors and numbers.
            turns: what else it knows, numbers among it at which it may turn.
        """
        moving = [operand for operand in operands if isinstance(operand, Moving)]
        numbers: list[Any] = [
            item if isinstance(item, Moving | int | float) else getattr(item, "number", None) for item in operands
        ]
        if any(number is None for number in numbers) or any(item.shape != moving[0].shape for item in moving):
            return {}
        curves = {}
        for root in moving[0].samples:
            if all(root in item.samples for item in moving):
                values = [item.samples[root] if isinstance(item, Moving) else float(item) for item in numbers]
                curves[root] = Curve(evaluate, values, [turn for turn in turns if isinstance(turn, int | float)])
        return curves

    def recognized(self, samples: Mapping[str, Curve], operands: Sequence[object], shape: Shape) -> Moving | None:
        """What makes these samples: one of the operands, or a known function of what they came from; else None."""
        for root, curve in samples.items():
            for operand in operands:
                if isinstance(operand, Moving) and root in operand.samples and operand.shape == shape:
                    earlier = operand.samples[root]
                    alike = earlier.values.dtype != bool and same(curve.values, earlier.values, self.tolerance)
                    if alike and agree(curve, earlier, self.tolerance):
                        return operand
        for root, curve in samples.items():
            known, origin = identify(curve, self.tolerance), self.items[root]
            if known is not None and origin.shape == shape:
                kind, attributes = known
                return self.emit(kind, [origin], shape, samples=samples, **attributes) if kind else origin
        return None

    # --- movement -----------------------------------------------------------------------------------------------------

    def permute(self, item: Either, axes: Sequence[int]) -> Either:
        axes = tuple(int(axis) for axis in axes)
        if axes == tuple(range(len(axes))):
            return item
        shape = [item.shape[axis] for axis in axes]
        if not isinstance(item, Moving):
            return cast(Either, self.then(cast(Fixed, item), shape, lambda array: array.transpose(axes)))
        return cast(Either, self.emit("permute", [item], shape, item.dtype, axes=axes))

    def reshape(self, item: Either, shape: Sequence[Size]) -> Either:
        """shape: as traced."""
        shape = exact(shape)
        sizes = self.for_one(shape)
        if item.shape in (shape, sizes) if not isinstance(item, Moving) else item.shape == shape:
            return item
        if not isinstance(item, Moving):
            return cast(Either, self.then(cast(Fixed, item), sizes, lambda array: array.reshape(sizes)))
        return cast(Either, self.emit("reshape", [item], shape, item.dtype, shape=sizes))

    def before_reshape(self, x: Moving, shape: Sequence[Size]) -> Moving:
        """What had this shape before it was only reshaped; else it is reshaped."""
        source = x
        while source.shape != tuple(shape) and (step := self.step_of(source)) is not None and step.kind == "reshape":
            source = self.items[str(step.inputs[0])]
        return source if source.shape == tuple(shape) else self.reshape(x, shape)

    def cut(self, x: Either, axis: int, start: int, stop: int, step: int = 1) -> Either:
        """Part of an axis."""
        if (start, stop, step) == (0, x.shape[axis], 1):
            return x
        if axis in self.batch_axes(x.shape):
            raise Refused("it takes examples out of the batch")
        sizes = list(x.shape)
        sizes[axis] = -(-(stop - start) // step)
        if not isinstance(x, Moving):
            index = (slice(None),) * axis + (slice(start, stop, step),)
            return cast(Either, self.then(cast(Fixed, x), sizes, lambda array: array[index]))
        start, stop, step = int(start), int(stop), int(step)
        return cast(Either, self.emit("slice", [x], sizes, x.dtype, axis=axis, start=start, stop=stop, step=step))

    def sections(self, x: Either, axis: int, sizes: Iterable[int]) -> list[Either]:
        """An axis in sections, one after another."""
        ends = list(itertools.accumulate(sizes, initial=0))
        return [self.cut(x, axis, start, end) for start, end in itertools.pairwise(ends)]

    def entry(self, x: Either, axis: int, at: int) -> Either:
        """One entry of an axis, without that axis."""
        return self.reshape(self.cut(x, axis, at, at + 1), (*x.shape[:axis], *x.shape[axis + 1 :]))

    def rolled(self, x: Moving, axis: int, shift: int) -> Moving:
        """With entries moved along an axis, the last ones to the front."""
        end = -shift % x.shape[axis]
        return self.join([self.cut(x, axis, end, x.shape[axis]), self.cut(x, axis, 0, end)], axis) if end else x

    def take(self, x: Moving, axis: int, indices: Iterable[int]) -> Moving:
        """These entries of an axis."""
        places = tuple(map(int, indices))
        sizes = [len(places) if at == axis else size for at, size in enumerate(x.shape)]
        return self.emit("gather", [x], sizes, x.dtype, axis=axis, indices=places)

    def flip(self, x: Moving, axes: Sequence[int]) -> Moving:
        if set(axes).intersection(self.batch_axes(x.shape)):
            raise Refused("it turns the batch round")
        return self.emit("flip", [x], x.shape, x.dtype, axes=tuple(axes))

    def join(self, items: Sequence[Any], axis: int) -> Any:
        """Items one after another along an axis, a value of the network among them; empty ones are nothing."""
        items = [item for item in items if item.shape[axis] != 0] or items[:1]
        if len(items) == 1:
            return items[0]
        shape = list(next((item for item in items if isinstance(item, Moving)), items[0]).shape)
        shape[axis] = sum(item.shape[axis] for item in items)
        return self.emit("concat", items, shape, axis=axis)

    def stacked(self, items: Sequence[Any], axis: int) -> Any:
        """Items along a new axis."""
        return self.join([self.reshape(item, (*item.shape[:axis], 1, *item.shape[axis:])) for item in items], axis)

    def group_norm(
        self, x: Moving, tensors: Sequence[object], module: str, channel_axis: int, **attributes: Any
    ) -> Moving:
        """With its channels in front, where the plan wants them; the permutations cost nothing by themselves."""
        order = [0, channel_axis, *(axis for axis in range(1, x.rank) if axis != channel_axis)]
        first = self.permute(x, order)
        norm = self.emit("group_norm", [first, *tensors], first.shape, module=module, channel_axis=1, **attributes)
        return self.permute(norm, [order.index(axis) for axis in range(x.rank)])
