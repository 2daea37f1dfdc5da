# SPDX-License-Identifier: Apache-2.0
"""One pass over a network: every step becomes device operators, is fused into one, or is reported.

The handler of a float step, in the file of its family, says what the step becomes; handlers add operators through a
`Maker`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..device import Profile
from ..device.operator import OPERATORS, in_int16
from ..device.primitives import Array
from . import files, masks
from .formula import Formula
from .network import KINDS, Constant, Network, Place, Step
from .plans import Derived, Grid, Plan, PlanInput, PlanOutput, PlanStep, Weights
from .refusals import Problems, Refused, no_operator, word
from .rules import Rule, RuleBook
from .stored import SharedGrid, Stored

Operand = Stored | Constant | float
Handler = Callable[["Planner", Step], Stored]
# By float kind, filled by `handles`.
HANDLERS: dict[str, Handler] = {}
# The grid of plain integers: steps of 1 from 0 on; ranges know the first 256.
INDICES = (1.0, -128)
# Kinds that broadcast to an operand of another shape by themselves.
BROADCASTING = ("add", "sub", "mul", "div", "maximum", "minimum")


def handles(*kinds: str) -> Callable[[Handler], Handler]:
    """Registers the handler for float steps of some kinds."""

    def enter(handler: Handler) -> Handler:
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"{kind!r} is not a kind of network step")
            HANDLERS[kind] = handler
        return handler

    return enter


class Planner:
    """Everything known while a network is walked. Handlers use the methods without underscore."""

    def __init__(
        self,
        network: Network,
        rules: Iterable[Rule],
        deployable: bool,
        keep_final_activation: bool = False,
        constants_on_grids: Container[str] = (),
        device: Profile | None = None,
    ) -> None:
        """constants_on_grids: constants that are operands unchanged, as a file has codes for them. device: whose
        runtime has to have the operators."""
        self.device = device
        self.constants_on_grids = constants_on_grids
        self.network = network
        self.book = RuleBook(rules)
        self.deployable = deployable
        self.keep_final_activation = keep_final_activation
        self.constants: dict[str, Constant] = dict(network.constants)
        self.stored: dict[str, Stored] = {}
        self.whole = masks.extents(network)
        # Recurrent layers that were unrolled, by what they read.
        self.unrolled: dict[tuple[Any, ...], Any] = {}
        # Values of steps that were fused into a step before what they read.
        self.done_before: set[str] = set()
        # By value: padding that the only reader does itself.
        self.ahead: dict[str, list[tuple[int, int]]] = {}
        # By value: the weight and bias of an input's line, which its only reader computes, and where it is 0.
        self.lines: dict[str, tuple[Any, Any, float]] = {}
        # Tensors of 8 bits stored again in 16, or vice versa, by path and the rule they are stored under.
        self.converted: dict[tuple[str, Rule], Stored] = {}
        self.problems = Problems()
        # Values that depend on something refused.
        self.doubtful: set[str] = set()
        self.refused_in_int16 = False
        self.drafts: list[tuple[Stored, PlanStep]] = []
        self._live = _live_steps(network)
        self._readers: dict[str, list[Step]] = {}
        for step in self._live:
            for name in dict.fromkeys(operand for operand in step.inputs if isinstance(operand, str)):
                self._readers.setdefault(name, []).append(step)
        # Operands are identified by name, so no step shares a constant's name.
        self._taken: set[str] = set(network.constants)
        self._modules = {step.module for step in self._live if step.module}
        self.end = ""
        self._absorbed: list[str] = []
        self._between: list[str] = []

    def run(self) -> Plan:
        # Before all modules: rules and programs know the inputs by these names.
        paths = [self._number(name) for name in self.network.input_names]
        inputs = [self._input(name, path) for name, path in zip(self.network.inputs, paths, strict=True)]
        for step in self._live:
            if step.output not in self.stored:
                self._visit(step)
        for name in self.network.outputs:
            if name not in self.network.values:
                what = f"the model returns '{name}', which does not depend on its input; take it from the model itself"
                self.problems.add("output", what, Place())
        planned = [kind for kind in in_int16() if not OPERATORS[kind].purpose]
        of_int16 = [f"in 16 bits {', '.join(planned)}"] if self.refused_in_int16 else []
        self.problems.raise_any([*SUPPORTED, *of_int16])
        return self._finish(inputs)

    def _visit(self, step: Step) -> None:
        self.end, self._absorbed, self._between = step.output, [], []
        doubtful = self.doubtful.intersection(operand for operand in step.inputs if isinstance(operand, str))
        try:
            if step.kind not in HANDLERS:
                raise no_operator(step)
            result = self.tensor(step) if step.output in self.done_before else HANDLERS[step.kind](self, step)
        except Refused as refused:
            # Of booleans or indices that come from a refused step, there is nothing to say before that one is mended.
            if all(self.network.values[name].dtype == "float32" for name in doubtful):
                self.problems.add(word(step), str(refused), step.place)
            self.doubtful.add(step.output)
            result = self._stand_in(step)
        except (IndexError, TypeError, ValueError):
            # What replaces a refused result may have other axes than this step expects.
            if not doubtful:
                raise
            result = self._stand_in(step)
        for name in (step.output, *self._absorbed):
            self.stored[name] = result
        if doubtful:
            self.doubtful.update((step.output, *self._absorbed))

    def _stand_in(self, step: Step) -> Stored:
        """A stand-in for an unavailable result, so that the rest of the model is still checked."""
        value = self.network.values[step.output]
        rule = self.book.rules[0] if self.book.rules else Rule()
        channels = 1 if len(value.shape) in (2, 4) else None
        return Stored("", value.shape, value.batch_axis, SharedGrid(Grid("", rule)), channels)

    def _finish(self, inputs: list[PlanInput]) -> Plan:
        tensors = [*(self.stored[name] for name in self.network.inputs), *(stored for stored, _ in self.drafts)]
        grids = {tensor.grid.now.name: tensor.grid.now for tensor in tensors}
        steps = [replace(step, grid=stored.grid.now.name, high=stored.high) for stored, step in self.drafts]
        by_path = {step.path: step for step in steps}
        outputs = tuple(self.stored[name].path for name in self.network.outputs)
        makers = {step.output: step for step in self._live}
        device_outputs, returned, left_out = [], [], []
        for value, path in zip(self.network.outputs, outputs, strict=True):
            outside: list[str] = []
            while path in by_path and by_path[path].left_out:
                outside.insert(0, path)
                path, value = by_path[path].operands[0], str(makers[value].inputs[0])
            device_outputs.append(path)
            returned.append(value)
            left_out.append(tuple(outside))
        arguments = files.distinct(self.network.argument_names or self.network.input_names)
        names = self.network.output_names
        if len(names) != len(outputs):
            names = tuple(f"output_{number}" for number in range(len(outputs)))
        return Plan(
            self.network,
            tuple(
                replace(
                    port, grid=self.stored[name].grid.now.name, name=word, axes=files.input_axes(self.network, name)
                )
                for word, name, port in zip(arguments, self.network.inputs, inputs, strict=True)
            ),
            tuple(steps),
            grids,
            {**self.network.constants, **self._made_constants(steps)},
            outputs,
            tuple(device_outputs),
            tuple(self.book.unused()),
            tuple(map(PlanOutput, files.distinct(names), files.axes(self.network, returned), left_out)),
            self.book.of_layers,
        )

    def _made_constants(self, steps: Iterable[PlanStep]) -> dict[str, Constant]:
        """The constants that steps, or other constants, read."""
        pending = [name for step in steps for name in (*step.operands, *_names(step.weights))]
        constants: dict[str, Constant] = {}
        while pending:
            name = pending.pop()
            if name not in self.network.constants and name in self.constants and name not in constants:
                constants[name] = self.constants[name]
                expression = constants[name].expression
                pending += expression.operands if isinstance(expression, Derived) else ()
        return {name: constant for name, constant in self.constants.items() if name in constants}

    # --- inputs and outputs -----------------------------------------------------------------------------------------

    def _input(self, name: str, path: str) -> PlanInput:
        value = self.network.values[name]
        rule, rows = self.rule(path), masks.rows_of_tables(self.network, name)
        if rows:
            rule = replace(rule, activation_bits=8, ranges="fixed", fixed_range=(0.0, 255.0))
        elif masks.is_mask(self.network, name):
            rule = replace(rule, activation_bits=8, ranges="fixed", fixed_range=masks.TRUTH)
        elif value.hides and rule.ranges != "fixed" and masks.hides_scores(self.network, name):
            rule = replace(rule, activation_bits=8, ranges="fixed", fixed_range=masks.HIDING)
        grid = SharedGrid(Grid(path, rule, fixed=INDICES if rows else None, of_inputs=True, indices=rows))
        channels = self._asked_channels(name, len(value.shape))
        self.stored[name] = Stored(path, value.shape, value.batch_axis, grid, channels)
        return PlanInput(path, path, value.shape, value.batch_axis, floating=value.dtype == "float32", rows=rows)

    def _asked_channels(self, name: str, rank: int) -> int | None:
        """The channel axis named by the first reader that cares; for images the second axis."""
        reached = {name}
        for step in self._live:
            if not reached.intersection(operand for operand in step.inputs if isinstance(operand, str)):
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
        """The rule for a stored tensor; rules for its `owner` apply too.

        Raises:
            ValueError: there is none, or the device cannot run it.
        """
        rule = self.book.find(path, owner)
        obstacle = rule.deployment_obstacle()
        if self.deployable and obstacle:
            raise ValueError(
                f"layer '{path}', rule match={rule.match!r}: {obstacle} (deployable=False trains it anyway)"
            )
        return rule

    # --- what a step reads ------------------------------------------------------------------------------------------

    def read(self, operand: str | float | None) -> Operand:
        """A number, a constant or a stored tensor; an untrained constant with one value is a number."""
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
        """Likewise for one that may be absent."""
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
        """The only step that reads a step's result; None if there are others, or the model returns it."""
        readers = self.readers(step)
        return readers[0] if len(readers) == 1 and not self.returned(step) else None

    def returned(self, step: Step) -> bool:
        """Whether the model returns a step's result."""
        return step.output in self.network.outputs

    def following(self) -> Step | None:
        """The only reader of what the current step and those absorbed so far compute, ignoring identities; else
        None."""
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
        """Makes a step returned by `following` part of the current one."""
        self._absorbed += [*self._between, step.output]
        self.end = step.output

    def take_activation(self) -> str:
        """Absorbs the activation that follows, if the device can fuse it."""
        step = self.following()
        name = fused_activation(step) if step is not None else "NONE"
        if step is not None and name != "NONE":
            self.absorb(step)
        return name

    # --- what a step stores -----------------------------------------------------------------------------------------

    def add_constant(self, name: str, shape: Sequence[int], **how: Any) -> str:
        """Adds a constant made by planning and returns its name."""
        number, unique = 1, name
        while unique in self.constants or unique in self.network.values:
            number += 1
            unique = f"{name}_{number}"
        self.constants[unique] = Constant(unique, tuple(shape), parameter=False, **how)
        return unique

    def derive(self, name: str, shape: Sequence[int], function: Callable[..., Array], *operands: str) -> str:
        """Adds a constant computed from others and returns its name."""
        constants = [self.constants[operand] for operand in operands]
        sources = dict.fromkeys(
            source for tensor in constants for source in ((tensor.name,) if tensor.parameter else tensor.sources)
        )
        return self.add_constant(
            name,
            shape,
            trainable=any(tensor.trainable for tensor in constants),
            sources=tuple(sources),
            expression=Derived(Formula(function, len(operands)), operands),
        )

    def given(self, x: Stored) -> Stored:
        """The integer input as given, which is `x` in another shape."""
        return next(tensor for tensor in (self.stored[name] for name in self.network.inputs) if tensor.path == x.path)


def fused_activation(step: Step) -> str:
    """RELU or RELU6, if that is what the step computes; else NONE."""
    if step.kind == "clamp":
        low, high = step.attributes.get("min"), step.attributes.get("max")
        unbounded = high is None or high == math.inf
        return "NONE" if low != 0 else "RELU" if unbounded else "RELU6" if high == 6 else "NONE"
    if step.kind == "maximum":
        return "RELU" if any(operand == 0 for operand in step.inputs if not isinstance(operand, str)) else "NONE"
    return {"relu": "RELU", "relu6": "RELU6"}.get(step.kind, "NONE")


def _live_steps(network: Network) -> tuple[Step, ...]:
    """The steps that outputs depend on."""
    needed = set(network.outputs)
    live = []
    for step in reversed(network.steps):
        if step.output in needed:
            needed.update(operand for operand in step.inputs if isinstance(operand, str))
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


SUPPORTED = (
    "Conv2d and Conv1d (plain, grouped, depthwise, transposed), Linear, matrix products, attention",
    "batch, layer, group and instance norm",
    "ReLU and its variants and the smooth activations",
    "arithmetic of tensors, parameters and numbers",
    "pooling, means, sums and extremes over any axes except the batch",
    "reshape, permute, slices, concatenation, padding, resizing, pixel shuffle",
    "LSTM and GRU over a fixed length",
    "softmax, log_softmax, sigmoid or argmax at the very end, outside the device's network or in it",
)
