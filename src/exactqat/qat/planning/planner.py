# SPDX-License-Identifier: Apache-2.0
"""One walk over a network: every step becomes operators of the device, is fused into one, or is reported.

What a float step becomes is said by its handler, in the file of its family; handlers put operators down by a `Maker`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...device import OPERATORS
from ..network import KINDS, Constant, Network, Place, Step
from ..plan import BatchNorm, Derived, Grid, Plan, PlanInput, PlanStep, Weights
from ..rules import Rule, RuleBook
from .refusals import Problems, Refused, no_operator, word


class SharedGrid:
    """The grid of one or several tensors while planning goes on: grids that must be one are joined."""

    def __init__(
        self, name: str, rule: Rule, nonnegative: bool = False, fixed: tuple[float, int] | None = None
    ) -> None:
        self.name = name
        self.rule = rule
        self.nonnegative = nonnegative
        self.writers = 1
        self.fixed = fixed
        self._joined: SharedGrid | None = None

    def root(self) -> SharedGrid:
        grid = self
        while grid._joined is not None:
            grid = grid._joined
        return grid

    def join(self, other: SharedGrid) -> None:
        first, second = self.root(), other.root()
        if first is second:
            return
        first.nonnegative = first.nonnegative and second.nonnegative
        first.writers += second.writers
        second._joined = first

    def accepts(self, rule: Rule, fixed: tuple[float, int] | None = None) -> bool:
        """Whether a tensor under `rule`, or on a `fixed` grid, may be stored on this one."""
        grid = self.root()
        if grid.fixed is not None or fixed is not None:
            return grid.fixed == fixed
        names = ("activation_bits", "ranges", "fixed_range", "ema_decay", "percentile")
        return all(getattr(grid.rule, name) == getattr(rule, name) for name in names)

    def finished(self) -> Grid:
        return Grid(self.name, self.rule, self.nonnegative, self.writers, self.fixed)


@dataclass(eq=False)
class Stored:
    """A tensor that the device stores.

    Attributes:
        channels: the axis that holds channels or features, where that is known.
        high: see `PlanStep.high`.
    """

    path: str
    shape: tuple[int, ...]
    batch_axis: int
    grid: SharedGrid
    channels: int | None = None
    high: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def nonnegative(self) -> bool:
        return self.grid.root().nonnegative


def replace_stored(x: Stored, path: str, shape: tuple[int, ...], batch_axis: int) -> Stored:
    """Another tensor that is stored as `x` is."""
    return Stored(path, shape, batch_axis, x.grid, x.channels if len(shape) == x.rank else None, x.high)


@dataclass(frozen=True)
class Coefficient:
    """A number for each channel (or one for all) that is computed from constants."""

    names: tuple[str, ...]
    value: Callable[..., Any]

    @staticmethod
    def of(name: str) -> Coefficient:
        """The constant itself."""
        return Coefficient((name,), lambda array: array.reshape(-1))

    def combined(self, other: float | Coefficient, function: Callable[[Any, Any], Any]) -> Coefficient:
        """``function(self, other)``"""
        if not isinstance(other, Coefficient):
            return Coefficient(self.names, lambda *arrays: function(self.value(*arrays), other))
        count = len(self.names)
        return Coefficient(
            self.names + other.names,
            lambda *arrays: function(self.value(*arrays[:count]), other.value(*arrays[count:])),
        )

    def __mul__(self, other: float | Coefficient) -> Coefficient:
        return self.combined(other, lambda a, b: a * b)

    def __rmul__(self, other: float) -> Coefficient:
        return self * other

    def __add__(self, other: float | Coefficient) -> Coefficient:
        return self.combined(other, lambda a, b: a + b)

    def __radd__(self, other: float) -> Coefficient:
        return self + other

    def __neg__(self) -> Coefficient:
        return self * -1.0

    def inverse(self) -> Coefficient:
        return self.combined(1.0, lambda a, b: b / a)


Operand = Stored | Constant | float
Handler = Callable[["Planner", Step], Stored]
# By float kind, filled by `handles`.
HANDLERS: dict[str, Handler] = {}
# Kinds that add to an operand of another shape by themselves.
BROADCASTING = ("add", "sub", "mul", "div", "maximum", "minimum")


def handles(*kinds: str) -> Callable[[Handler], Handler]:
    """Enters what becomes of float steps of some kinds."""

    def enter(handler: Handler) -> Handler:
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"{kind!r} is no kind of a network's step")
            HANDLERS[kind] = handler
        return handler

    return enter


@dataclass
class _Draft:
    stored: Stored
    step: PlanStep
    operands: list[Stored | str] = field(default_factory=list)


class Planner:
    """Everything that is known while a network is walked. Handlers use the methods without underscore."""

    def __init__(self, network: Network, rules: Iterable[Rule], deployable: bool) -> None:
        self.network = network
        self.book = RuleBook(rules)
        self.deployable = deployable
        self.constants: dict[str, Constant] = dict(network.constants)
        self.stored: dict[str, Stored] = {}
        # Recurrent layers that were unrolled, by what they read.
        self.unrolled: dict[tuple[Any, ...], Any] = {}
        # Values of steps that were fused into one in front of what they read.
        self.done_before: set[str] = set()
        # By value: padding that the only reader does by itself.
        self.ahead: dict[str, list[tuple[int, int]]] = {}
        self.problems = Problems()
        self._drafts: list[_Draft] = []
        self._live = _live_steps(network)
        self._readers: dict[str, list[Step]] = {}
        for step in self._live:
            for name in dict.fromkeys(each for each in step.inputs if isinstance(each, str)):
                self._readers.setdefault(name, []).append(step)
        # Operands are told apart by name, so no step is called as a constant is.
        self._taken: set[str] = set(network.constants)
        self._modules = {step.module for step in self._live if step.module}
        self.end = ""
        self._absorbed: list[str] = []
        self._between: list[str] = []

    def run(self) -> Plan:
        inputs = [self._input(name, path) for name, path in zip(self.network.inputs, self._input_paths(), strict=True)]
        for step in self._live:
            if step.output not in self.stored:
                self._visit(step)
        for name in self.network.outputs:
            if name not in self.network.values:
                what = f"the model returns '{name}', which does not depend on its input; take it from the model itself"
                self.problems.add("output", what, Place())
        self.problems.raise_any(SUPPORTED)
        return self._finish(inputs)

    def _visit(self, step: Step) -> None:
        self.end, self._absorbed, self._between = step.output, [], []
        try:
            if step.kind not in HANDLERS:
                raise no_operator(step)
            result = self.tensor(step) if step.output in self.done_before else HANDLERS[step.kind](self, step)
        except Refused as refused:
            self.problems.add(word(step), str(refused), step.place)
            result = self._stand_in(step)
        for name in (step.output, *self._absorbed):
            self.stored[name] = result

    def _stand_in(self, step: Step) -> Stored:
        """For a result that cannot be had, so that the rest of the model is still checked."""
        value = self.network.values[step.output]
        rule = self.book.rules[0] if self.book.rules else Rule()
        channels = 1 if len(value.shape) in (2, 4) else None
        return Stored("", value.shape, value.batch_axis, SharedGrid("", rule), channels)

    def _finish(self, inputs: list[PlanInput]) -> Plan:
        steps = []
        grids: dict[str, Grid] = {}
        for tensor in [self.stored[name] for name in self.network.inputs] + [draft.stored for draft in self._drafts]:
            grid = tensor.grid.root()
            grids.setdefault(grid.name, grid.finished())
        for draft in self._drafts:
            operands = tuple(each if isinstance(each, str) else each.path for each in draft.operands)
            steps.append(
                replace(draft.step, operands=operands, grid=draft.stored.grid.root().name, high=draft.stored.high)
            )
        by_path = {step.path: step for step in steps}
        outputs = tuple(self.stored[name].path for name in self.network.outputs)
        device_outputs = []
        for path in outputs:
            while path in by_path and by_path[path].outside:
                path = by_path[path].operands[0]
            device_outputs.append(path)
        named = zip(self.network.inputs, inputs, strict=True)
        return Plan(
            self.network,
            tuple(replace(each, grid=self.stored[name].grid.root().name) for name, each in named),
            tuple(steps),
            grids,
            {**self.network.constants, **self._made_constants(steps)},
            outputs,
            tuple(device_outputs),
            tuple(self.book.unused()),
        )

    def _made_constants(self, steps: Iterable[PlanStep]) -> dict[str, Constant]:
        """Those that steps, or other constants, read."""
        pending = [name for step in steps for name in (*step.operands, *_names(step.weights))]
        made: dict[str, Constant] = {}
        while pending:
            name = pending.pop()
            if name not in self.network.constants and name in self.constants and name not in made:
                made[name] = self.constants[name]
                expression = made[name].expression
                pending += expression.operands if isinstance(expression, Derived) else ()
        return {name: constant for name, constant in self.constants.items() if name in made}

    # --- inputs -----------------------------------------------------------------------------------------------------

    def _input_paths(self) -> list[str]:
        # Before all modules: rules and programs know the input by this name.
        return [self._number(name) for name in self.network.input_names]

    def _input(self, name: str, path: str) -> PlanInput:
        value = self.network.values[name]
        if value.dtype != "float32" and self._readers.get(name):
            what = (
                f"the input '{path}' holds {value.dtype}; the device takes real numbers, look up indices outside of it"
            )
            self.problems.add("input", what, Place())
        grid = SharedGrid(path, self.rule(path))
        channels = self._asked_channels(name, len(value.shape))
        self.stored[name] = Stored(path, value.shape, value.batch_axis, grid, channels)
        return PlanInput(path, path, value.shape, value.batch_axis)

    def _asked_channels(self, name: str, rank: int) -> int | None:
        """The axis of the channels that the first reader to care about it names; of images the second one."""
        reached = {name}
        for step in self._live:
            if not reached.intersection(each for each in step.inputs if isinstance(each, str)):
                continue
            if "channel_axis" in step.attributes:
                return int(step.attributes["channel_axis"])
            if step.kind == "linear":
                return rank - 1
            if len(self.network.values[step.output].shape) == rank and step.kind not in ("permute", "reshape"):
                reached.add(step.output)
        return 1 if rank in (2, 4) else None

    # --- names and rules --------------------------------------------------------------------------------------------

    def path(self, step: Step, name: str) -> str:
        """A free path: the module's own, or for a function its scope's and a name; numbered from the second call on."""
        if step.module:
            return self._number(step.module)
        return self.free(".".join(filter(None, (step.place.path, name))))

    def free(self, path: str) -> str:
        """The path itself, or with a number if it is taken or a module's own."""
        number, unique = 1, path
        while unique in self._taken or unique in self._modules:
            number += 1
            unique = f"{path}_{number}"
        self._taken.add(unique)
        return unique

    def _number(self, path: str) -> str:
        if path in self._taken:
            return self.free(path)
        self._taken.add(path)
        return path

    def rule(self, path: str, owner: str = "") -> Rule:
        """The rule that decides about a stored tensor; rules for its `owner` do so too.

        Raises:
            ValueError: there is none, or the device cannot run it.
        """
        rule = self.book.find(path, owner)
        obstacle = rule.deployment_obstacle()
        if self.deployable and obstacle:
            raise ValueError(
                f"layer '{path}', rule match={rule.match!r}: {obstacle} (deployable=False trains it nevertheless)"
            )
        return rule

    # --- what a step reads ------------------------------------------------------------------------------------------

    def read(self, operand: str | float | None) -> Operand:
        """A number, a constant or a stored tensor; a constant of one value that no training moves is a number."""
        if operand is None:
            raise Refused("an operand is missing")
        if not isinstance(operand, str):
            return float(operand)
        constant = self.constants.get(operand)
        if constant is None:
            return self.stored[operand]
        if constant.data is not None and constant.shape == ():
            return float(constant.data)
        return constant

    def tensor(self, step: Step, position: int = 0) -> Stored:
        """An operand that must be a stored tensor."""
        operand = self.read(step.inputs[position])
        if not isinstance(operand, Stored):
            raise Refused(f"{word(step)} of something that does not depend on the input; compute it beforehand")
        return operand

    def constant(self, step: Step, position: int) -> str:
        """Name of an operand that must be a constant."""
        name = step.inputs[position]
        if not isinstance(name, str) or name not in self.constants:
            raise Refused(f"{word(step)} with a weight that depends on the input; the device's weights are fixed")
        return name

    def optional(self, step: Step, position: int) -> str | None:
        """Likewise of one that may be absent."""
        if position >= len(step.inputs) or step.inputs[position] is None:
            return None
        return self.constant(step, position)

    def shape(self, step: Step) -> tuple[int, ...]:
        """Shape of a step's result, for a batch of one."""
        return self.network.values[step.output].shape

    def batch_axis(self, step: Step) -> int:
        return self.network.values[step.output].batch_axis

    # --- what follows a step ----------------------------------------------------------------------------------------

    def readers(self, step: Step) -> list[Step]:
        return self._readers.get(step.output, [])

    def only_reader(self, step: Step) -> Step | None:
        """The step that alone reads a step's result; None if there are others, or the model returns it."""
        readers = self.readers(step)
        return readers[0] if len(readers) == 1 and not self.returned(step) else None

    def returned(self, step: Step) -> bool:
        """Whether the model returns a step's result."""
        return step.output in self.network.outputs

    def following(self) -> Step | None:
        """The only reader of what the current step and those absorbed so far make, identities aside; else None."""
        self._between = []
        value = self.end
        while True:
            readers = self._readers.get(value, [])
            if len(readers) != 1 or value in self.network.outputs:
                return None
            if readers[0].kind != "identity" or readers[0].attributes.get("stop_gradient"):
                return readers[0] if readers[0].inputs.count(value) == 1 else None
            value = readers[0].output
            self._between.append(value)

    def absorb(self, step: Step) -> None:
        """Makes a step that `following` gave a part of the current one."""
        self._absorbed += [*self._between, step.output]
        self.end = step.output

    def take_activation(self) -> str:
        """Absorbs the activation that follows, if there is one that the device fuses."""
        step = self.following()
        name = fused_activation(step) if step is not None else "NONE"
        if step is not None and name != "NONE":
            self.absorb(step)
        return name

    # --- what a step stores -----------------------------------------------------------------------------------------

    def add_constant(self, name: str, shape: Sequence[int], **how: Any) -> str:
        """Enters a constant made by planning and returns its name."""
        number, unique = 1, name
        while unique in self.constants or unique in self.network.values:
            number += 1
            unique = f"{name}_{number}"
        self.constants[unique] = Constant(unique, tuple(shape), parameter=False, **how)
        return unique

    def derive(self, name: str, shape: Sequence[int], function: Callable[..., Any], *operands: str) -> str:
        """Enters a constant computed from others and returns its name."""
        constants = [self.constants[each] for each in operands]
        sources = dict.fromkeys(
            source for each in constants for source in ((each.name,) if each.parameter else each.sources)
        )
        return self.add_constant(
            name,
            shape,
            trainable=any(each.trainable for each in constants),
            sources=tuple(sources),
            expression=Derived(function, operands),
        )

    def draft(self, stored: Stored, step: PlanStep, operands: Sequence[Stored | str]) -> Stored:
        """Puts a step of the plan down."""
        self._drafts.append(_Draft(stored, step, list(operands)))
        return stored


class Maker:
    """Puts down the operators that one float step becomes. The last one has the step's own path.

    Every method takes `part`: the word for an intermediate result, or None for the step's own.
    """

    def __init__(self, planner: Planner, step: Step, name: str) -> None:
        """
        Args:
            name: for a step without a module: what rules call it.
        """
        self.planner = planner
        self.step = step
        self.path = planner.path(step, name)
        known = step.module and step.module not in planner.network.input_names
        self.owner = step.module if known else self.path

    def within(self, part: str) -> Maker:
        """A maker whose own result is a part of this one's."""
        inner = copy.copy(self)
        inner.path = self.planner.free(f"{self.path}_{part}")
        return inner

    def store(
        self,
        kind: str,
        operands: Sequence[Stored | str],
        shape: Sequence[int],
        part: str | None = None,
        *,
        attributes: Mapping[str, Any] | None = None,
        batch_axis: int | None = None,
        channels: int | None = None,
        activation: str = "NONE",
        bounds: tuple[float, float] | None = None,
        rule: Rule | None = None,
        weights: Weights | None = None,
        nonnegative: bool = False,
    ) -> Stored:
        """One operator of the device.

        Args:
            operands: tensors and names of constants.
            channels: the axis of the result that holds channels, where it is known.
            rule: of the result, where it is not that of its path.
        """
        self.need(kind)
        operator = OPERATORS[kind]
        path = self.name(part)
        tensors = [each for each in operands if isinstance(each, Stored)]
        high = activation != "NONE"
        if operator.same_quantization:
            if len(tensors) > 1:
                operands = tensors = self._on_one_grid(tensors, path)
            grid, high = tensors[0].grid, all(each.high for each in tensors)
        else:
            rule = rule or self.rule(path)
            if bounds is not None:
                rule = replace(rule, ranges="fixed", fixed_range=bounds)
            positive = nonnegative or high or (bounds is not None and bounds[0] == 0)
            grid = SharedGrid(path, rule, positive, operator.fixed_grid)
        if batch_axis is None:
            batch_axis = tensors[0].batch_axis
        stored = Stored(path, tuple(shape), batch_axis, grid, channels, high)
        step = PlanStep(
            path,
            kind,
            (),
            dict(attributes or {}),
            "",
            stored.shape,
            batch_axis,
            activation,
            bounds,
            weights=weights,
            place=self.step.place,
        )
        return self.planner.draft(stored, step, operands)

    def leave(self, x: Stored) -> Stored:
        """The step itself, for the program that runs the device."""
        path = self.name(None)
        stored = replace_stored(x, path, self.planner.shape(self.step), self.planner.batch_axis(self.step))
        step = PlanStep(
            path,
            self.step.kind,
            (),
            dict(self.step.attributes),
            "",
            stored.shape,
            stored.batch_axis,
            outside=True,
            place=self.step.place,
        )
        return self.planner.draft(stored, step, [x])

    def only_in_training(self, x: Stored, part: str | None = None, expression: Any = None, **attributes: Any) -> Stored:
        """What training makes of a tensor and the device leaves as it is.

        Args:
            attributes: in the place of an expression: `dropout`, a probability, or `stop_gradient`.
        """
        path = self.name(part)
        stored = replace_stored(x, path, x.shape, x.batch_axis)
        step = PlanStep(
            path, "", (), attributes, "", x.shape, x.batch_axis, expression=expression, place=self.step.place
        )
        return self.planner.draft(stored, step, [x])

    def need(self, kind: str) -> None:
        """Refuses the step if the device has no operator of that kind."""
        if not self.has(kind):
            raise no_operator(self.step)

    @staticmethod
    def has(kind: str) -> bool:
        """Whether the device has an operator of that kind."""
        return kind in OPERATORS

    def name(self, part: str | None) -> str:
        return self.path if part is None else self.planner.free(f"{self.path}_{part}")

    def rule(self, path: str) -> Rule:
        return self.planner.rule(path, self.owner)

    def _on_one_grid(self, tensors: list[Stored], path: str) -> list[Stored]:
        """The tensors on one grid, joined where their rules allow it, else stored once more."""
        if len({id(tensor.grid.root()) for tensor in tensors}) == 1:
            return tensors
        rule = self.rule(path)
        fixed = tensors[0].grid.root().fixed
        if fixed is None or not all(tensor.grid.accepts(rule, fixed) for tensor in tensors):
            fixed = None
        result = []
        for index, tensor in enumerate(tensors):
            if not tensor.grid.accepts(rule, fixed):
                # A tensor whose rule gives it another kind of range is stored once more, under the rule of the result.
                tensor = self.affine(tensor, 1.0, 0.0, f"operand_{index}", rule=rule)
            result.append(tensor)
        for tensor in result[1:]:
            result[0].grid.join(tensor.grid)
        return result

    # --- constants --------------------------------------------------------------------------------------------------

    def array(self, values: Any, name: str) -> str:
        """A constant with these values."""
        data = np.asarray(values, np.float32)
        return self.planner.add_constant(f"{self.path}/{name}", data.shape, data=data)

    def derived(self, name: str, shape: Sequence[int], function: Callable[..., Any], *operands: str) -> str:
        """A constant computed from others."""
        return self.planner.derive(f"{self.path}/{name}", shape, function, *operands)

    def reshaped(self, constant: str, shape: Sequence[int]) -> str:
        """A constant in another shape."""
        shape = tuple(shape)
        if self.planner.constants[constant].shape == shape:
            return constant
        return self.derived(f"{_word(constant)}_reshaped", shape, lambda array: array.reshape(shape), constant)

    # --- value by value ---------------------------------------------------------------------------------------------

    def affine(
        self,
        x: Stored,
        weight: float | Coefficient,
        bias: float | Coefficient,
        part: str | None = None,
        *,
        activation: str = "NONE",
        bounds: tuple[float, float] | None = None,
        batch_norm: BatchNorm | None = None,
        channel_axis: int | None = None,
        rule: Rule | None = None,
        nonnegative: bool = False,
    ) -> Stored:
        """``activation(weight * x + bias)``, value by value, with batch norm in between if one is given.

        Where it is known which axis holds channels, a 1x1 depthwise convolution: the runtimes have operators of their
        own for some of these, with coarser arithmetic or outside of the fast kernels; a convolution is neither, and it
        takes any range and number of bits. Elsewhere a product and a sum with constants.
        """
        axis = channel_axis if channel_axis is not None else x.channels
        last: dict[str, Any] = {"activation": activation, "bounds": bounds, "nonnegative": nonnegative}
        if axis is not None and x.rank in (2, 3, 4) and axis != x.batch_axis:
            path = self.path if part is None else f"{self.path}_{part}"
            count, spatial = x.shape[axis], x.rank - 2
            rule = rule or self.rule(path)
            constant = replace(rule, ranges="ema", fixed_range=None, fold_batch_norm=False)
            start = "" if part is None else f"{part}/"
            filter_ = self._of_channels(weight, (count, *[1] * (x.rank - 1)), f"{start}weight")
            offset = None if bias == 0 else self._of_channels(bias, (count,), f"{start}bias")
            attributes = {
                "strides": (1,) * spatial,
                "padding": ((0, 0),) * spatial,
                "dilations": (1,) * spatial,
                "groups": count,
                "channel_axis": axis,
            }
            weights = Weights(filter_, offset, batch_norm, constant)
            return self.store(
                "DEPTHWISE_CONV_2D",
                [x],
                x.shape,
                part,
                attributes=attributes,
                channels=axis,
                rule=rule,
                weights=weights,
                **last,
            )
        if batch_norm is not None:
            raise Refused(f"batch norm on a tensor of shape {list(x.shape)}; use it on at most two spatial axes")
        if isinstance(weight, Coefficient) or isinstance(bias, Coefficient):
            raise AssertionError("coefficients of channels need an axis of channels")
        if not bias:
            return self.multiply(x, self.array(weight, "factor"), part, rule=rule, **last)
        if weight != 1:
            x = self.multiply(x, self.array(weight, "factor"), f"{part}_scaled" if part else "scaled")
        return self.add(x, self.array(bias, "offset"), part, rule=rule, **last)

    def _of_channels(self, value: float | Coefficient, shape: tuple[int, ...], name: str) -> str:
        """A constant with one number for each channel, [channels, 1, ...]."""
        if not isinstance(value, Coefficient):
            return self.array(np.full(shape, value), name)
        ones = self.array(np.ones(shape[0]), f"{name}/ones")
        count = len(value.names)
        return self.derived(
            name,
            shape,
            lambda *arrays: (value.value(*arrays[:count]) * arrays[count]).reshape(shape),
            *value.names,
            ones,
        )

    def fixed_linear(self, x: Stored, matrix: np.ndarray, part: str | None = None) -> Stored:
        """A product with a matrix [out, in] of fixed numbers, over the last axis."""
        path = self.path if part is None else f"{self.path}_{part}"
        rule = self.rule(path)
        constant = replace(rule, ranges="ema", fixed_range=None, fold_batch_norm=False)
        weight = self.array(matrix, "weight" if part is None else f"{part}/weight")
        shape = (*x.shape[:-1], matrix.shape[0])
        weights = Weights(weight, None, None, constant)
        return self.store("FULLY_CONNECTED", [x], shape, part, channels=x.rank - 1, rule=rule, weights=weights)

    def binary(
        self, kind: str, first: Stored | str, second: Stored | str, part: str | None = None, **how: Any
    ) -> Stored:
        """An operator on two operands that broadcast."""
        shapes = [self.shape_of(each) for each in (first, second)]
        shape = np.broadcast_shapes(*shapes)
        stored = [each for each in (first, second) if isinstance(each, Stored)]
        main = max(stored, key=lambda each: (each.rank, math.prod(each.shape)))
        batch_axis = main.batch_axis + len(shape) - main.rank
        operands = [
            self.aligned(each, len(shape), batch_axis) if isinstance(each, Stored) else each for each in (first, second)
        ]
        channels = main.channels if main.rank == len(shape) else None
        return self.store(kind, operands, shape, part, batch_axis=batch_axis, channels=channels, **how)

    def add(self, first: Stored | str, second: Stored | str, part: str | None = None, **how: Any) -> Stored:
        return self.binary("ADD", first, second, part, **how)

    def multiply(self, first: Stored | str, second: Stored | str, part: str | None = None, **how: Any) -> Stored:
        if isinstance(first, Stored) and math.prod(first.shape) < math.prod(self.shape_of(second)):
            # The runtimes are at their best where the second operand is the one that is repeated.
            first, second = second, first
        if isinstance(first, str):
            first, second = second, first
        if first is second:
            how["nonnegative"] = True
        return self.binary("MUL", first, second, part, **how)

    def subtract(self, first: Stored | str, second: Stored | str, part: str | None = None, **how: Any) -> Stored:
        if self.has("SUB"):
            return self.binary("SUB", first, second, part, **how)
        word_ = f"{part}_negated" if part else "negated"
        if isinstance(second, str):
            return self.add(
                first, self.derived(word_, self.shape_of(second), lambda array: -array, second), part, **how
            )
        return self.add(first, self.affine(second, -1.0, 0.0, word_), part, **how)

    def unary(self, kind: str, x: Stored, part: str | None = None, **how: Any) -> Stored:
        """An operator that keeps the shape of its operand."""
        return self.store(kind, [x], x.shape, part, channels=x.channels, **how)

    def function(
        self, name: str, x: Stored, part: str | None = None, parameters: Sequence[float | None] = (), **how: Any
    ) -> Stored:
        """A function of one value that the device looks up in a table; `name` is a kind of a network's step."""
        return self.unary("TABLE", x, part, attributes={"function": name, "parameters": tuple(parameters)}, **how)

    def shape_of(self, operand: Stored | str) -> tuple[int, ...]:
        """Shape of a tensor or of a constant by its name."""
        return operand.shape if isinstance(operand, Stored) else self.planner.constants[operand].shape

    def aligned(self, x: Stored, rank: int, batch_axis: int) -> Stored:
        """The operand with as many axes as the result."""
        missing = rank - x.rank
        if x.batch_axis + missing != batch_axis:
            raise Refused(
                f"operands of which one has the batch on axis {x.batch_axis} of {x.rank} and the result on axis "
                f"{batch_axis} of {rank}; give both operands the same axes"
            )
        return self.reshape(x, (1,) * missing + x.shape, batch_axis, "aligned") if missing else x

    # --- movement ---------------------------------------------------------------------------------------------------

    def reshape(self, x: Stored, shape: Sequence[int], batch_axis: int, part: str | None = None) -> Stored:
        shape = tuple(shape)
        if math.prod(shape[:batch_axis]) != math.prod(x.shape[: x.batch_axis]):
            raise Refused(
                f"{list(x.shape)} seen as {list(shape)}, which joins an axis in front of the batch with it; put the "
                "batch first"
            )
        channels = _channels_after_reshape(x, shape)
        attributes = {"new_shape": shape}
        return self.store("RESHAPE", [x], shape, part, attributes=attributes, batch_axis=batch_axis, channels=channels)

    def transpose(self, x: Stored, axes: Sequence[int], part: str | None = None) -> Stored:
        axes = tuple(axes)
        return self.store(
            "TRANSPOSE",
            [x],
            [x.shape[axis] for axis in axes],
            part,
            attributes={"permutation": axes},
            batch_axis=axes.index(x.batch_axis),
            channels=axes.index(x.channels) if x.channels is not None else None,
        )

    def slice(self, x: Stored, cuts: Sequence[tuple[int, int, int, int]], part: str | None = None) -> Stored:
        """cuts: (axis, start, stop, step) for every axis that is cut."""
        shape, begin, steps = list(x.shape), [0] * x.rank, [1] * x.rank
        end: list[int | None] = [None] * x.rank
        for axis, start, stop, step in cuts:
            shape[axis] = len(range(start, stop, step))
            begin[axis], end[axis], steps[axis] = start, None if stop == x.shape[axis] else stop, step
        attributes = {"begin": tuple(begin), "end": tuple(end), "steps": tuple(steps)}
        return self.store("STRIDED_SLICE", [x], shape, part, attributes=attributes, channels=x.channels)

    def concatenate(self, tensors: Sequence[Stored], axis: int, part: str | None = None) -> Stored:
        shape = list(tensors[0].shape)
        shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
        channels = tensors[0].channels
        return self.store("CONCATENATION", tensors, shape, part, attributes={"axis": axis}, channels=channels)

    def pad(self, x: Stored, paddings: Sequence[tuple[int, int]], part: str | None = None) -> Stored:
        """Real zeros round a tensor; paddings: (before, after) per axis."""
        paddings = tuple((int(before), int(after)) for before, after in paddings)
        shape = [size + before + after for size, (before, after) in zip(x.shape, paddings, strict=True)]
        return self.store("PAD", [x], shape, part, attributes={"paddings": paddings}, channels=x.channels)

    def reduce(
        self, kind: str, x: Stored, axes: Sequence[int], keep_dims: bool, part: str | None = None, **how: Any
    ) -> Stored:
        axes = tuple(sorted(axes))
        if x.batch_axis in axes:
            raise Refused(f"{word(self.step)} over the batch; every example is computed by itself")
        if keep_dims:
            shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
            return self.store(
                kind, [x], shape, part, attributes={"axes": axes, "keep_dims": True}, channels=x.channels, **how
            )
        shape = [size for axis, size in enumerate(x.shape) if axis not in axes]

        def moved(axis: int | None) -> int | None:
            return None if axis is None or axis in axes else axis - sum(gone < axis for gone in axes)

        channels = moved(x.channels)
        if channels is None and len(shape) == 2:
            channels = 1
        return self.store(
            kind,
            [x],
            shape,
            part,
            attributes={"axes": axes, "keep_dims": False},
            batch_axis=moved(x.batch_axis),
            channels=channels,
            **how,
        )


def fused_activation(step: Step) -> str:
    """RELU or RELU6, if that is what the step computes; else NONE."""
    if step.kind == "clamp":
        low, high = step.attributes.get("min"), step.attributes.get("max")
        unbounded = high is None or high == math.inf
        return "NONE" if low != 0 else "RELU" if unbounded else "RELU6" if high == 6 else "NONE"
    if step.kind == "maximum":
        return "RELU" if any(each == 0 for each in step.inputs if not isinstance(each, str)) else "NONE"
    return {"relu": "RELU", "relu6": "RELU6"}.get(step.kind, "NONE")


def _live_steps(network: Network) -> tuple[Step, ...]:
    """The steps that outputs depend on."""
    needed = set(network.outputs)
    live = []
    for step in reversed(network.steps):
        if step.output in needed:
            needed.update(each for each in step.inputs if isinstance(each, str))
            live.append(step)
    return tuple(reversed(live))


def _names(weights: Weights | None) -> Iterable[str]:
    if weights is None:
        return ()
    norm = weights.batch_norm
    names = [weights.weight, weights.bias]
    if norm is not None:
        names += [norm.weight, norm.bias, norm.mean, norm.variance, norm.counter]
    return [name for name in names if name is not None]


def _word(constant: str) -> str:
    return constant.replace("/", ".").rsplit(".", 1)[-1]


def _channels_after_reshape(x: Stored, shape: tuple[int, ...]) -> int | None:
    """Where the axis of the channels is behind a reshape, if it is still there."""
    if len(shape) == 2:
        return 1
    axis = x.channels
    if axis is None:
        return None
    if shape[: axis + 1] == x.shape[: axis + 1]:
        return axis
    behind = x.rank - axis
    if behind <= len(shape) and shape[-behind:] == x.shape[-behind:]:
        return len(shape) - behind
    return None


SUPPORTED = (
    "Conv2d and Conv1d (plain, grouped, depthwise, transposed), Linear, matrix products, attention",
    "batch, layer, group and instance norm",
    "ReLU and its kin and the smooth activations",
    "arithmetic of tensors, parameters and numbers",
    "pooling, means, sums and extremes over any axes but the batch's",
    "reshape, permute, slices, concatenation, padding, resizing, pixel shuffle",
    "LSTM and GRU over a fixed length",
    "softmax, log_softmax, sigmoid or argmax at the very end, which stay outside of the device's network",
)
