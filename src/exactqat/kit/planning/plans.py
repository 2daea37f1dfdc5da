# SPDX-License-Identifier: Apache-2.0
"""What the device will run, and on which grids: the `Plan` made from a `Network` and the user's rules.

A step of a plan is one operator of the device (`exactqat.kit.device`) with the tensor it stores. Axes are in the user's
order; the device's order is decided when the plan is lowered. Nothing here knows a framework.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..device import OPERATORS
from ..device.attribute import Attributes
from ..device.primitives import A
from ..display import listed, shortened
from .network import Constant, Network, Place
from .rules import Rule

# A narrower range has no usable scale, as products of scales have to be normal float32 numbers; [0, 1] replaces it.
SMALLEST_WIDTH = 2.0**-60
# A branch on a range so many times that of the sum that reads it is as good as zero.
_DEAD = 2.0**-20
# From the stand-in, sums on a narrower range could be too fine for the device, whose steps may differ by a factor below
# 256: of two bits, the fewest there are, the stand-in's are thirds, and those of eight bits 255ths of the sum's range.
_FINE = 2.0**-1
# A branch on a narrower range could be too fine for the layer that makes it, whose own operand may be on the stand-in.
_FINEST_BRANCH = 2.0**-10


# With this many bits, a slightly misplaced end of a range costs an input nothing.
ENOUGH_BITS_FOR_INPUTS = 8


@dataclass(frozen=True)
class Grid:
    """The grid of one or several stored tensors.

    Attributes:
        name: path of the first layer that stores on it.
        rule: decides bits and how the range is determined.
        nonnegative: no tensor on it has values below zero.
        writers: how many steps store their own tensors on it.
        fixed: (scale, zero point) if the device fixes the grid (of 8 bits, or of 16 under such a rule), or None.
        of_inputs: it stores only network inputs.
        indices: for an int32 input of plain integers, their exclusive upper bound, the rows of a table; else 0.
    """

    name: str
    rule: Rule
    nonnegative: bool = False
    writers: int = 1
    fixed: tuple[float, int] | None = None
    of_inputs: bool = False
    indices: int = 0

    @property
    def trained(self) -> bool:
        """Whether its range is learned by gradients; that of an 8-bit input is not worth it
        (docs/decisions/input-ranges.md)."""
        return self.rule.ranges == "learned" and not (self.of_inputs and self.bits >= ENOUGH_BITS_FOR_INPUTS)

    @property
    def bits(self) -> int:
        return 8 if self.fixed is not None and not self.rule.is_int16 else self.rule.activation_bits

    @property
    def dtype(self) -> str:
        """The dtype in which the device stores it."""
        return "int16" if self.rule.is_int16 else "int8"

    @property
    def fixed_range(self) -> tuple[float, float] | None:
        """The range, if the device fixes the grid; with 16 bits the symmetric one that 32767 steps reach."""
        if self.fixed is None:
            return None
        scale, zero_point = self.fixed
        lowest, highest = (1 - 2**15, 2**15 - 1) if self.rule.is_int16 else (-128, 127)
        return scale * (lowest - zero_point), scale * (highest - zero_point)

    @property
    def constant_bits(self) -> int:
        """The bits of constants used with its tensors, which are stored in the same dtype."""
        return 16 if self.rule.is_int16 else self.rule.weight_bits


@dataclass(frozen=True)
class Derived:
    """The `expression` of a constant that planning made from others: `function(*operands)`.

    `function` takes and returns a framework's arrays and uses only what all frameworks' arrays have in common:
    arithmetic operators, indexing, `reshape`, `sum(axis)` and `clip(min=)`. So it can be differentiated where its
    operands are trained.
    """

    function: Callable[..., Any]
    operands: tuple[str, ...]


@dataclass(frozen=True)
class BatchNorm:
    """Batch norm folded into a step with weights. Names are those of constants; `counter` counts batches, or is None.

    training: whether statistics follow the batches until `freeze` (False: the user has frozen them).
    biased: whether the running variance takes the batch's biased one, as in Flax and Keras.
    """

    weight: str | None
    bias: str | None
    mean: str
    variance: str
    counter: str | None
    epsilon: float
    momentum: float | None
    training: bool = True
    biased: bool = False


@dataclass(frozen=True)
class Weights:
    """The weights of a step: names of constants.

    Attributes:
        channel_axis: the weight's axis of output channels.
        range_end: where the learned end of a symmetric range begins, [channels] or rank 0; None: where the weight's
            squared error is least.
        start: the codes that it begins with, int8, on the grid of `range_end`, if they are a file's; else None.
    """

    weight: str
    bias: str | None
    batch_norm: BatchNorm | None
    rule: Rule
    channel_axis: int = 0
    range_end: np.ndarray | None = field(default=None, compare=False)
    start: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class PlanStep:
    """One operator of the device and the tensor it stores.

    Attributes:
        path: unique; name of the stored tensor. The user's module path if the step is a module's.
        kind: the device operator; "" for a step with an `expression`.
        operands: paths of steps or inputs, or names of constants (quantized per tensor as they are read, symmetric,
            narrow, by the step's rule). Weights are not among them.
        attributes: the operator's, with axes in the user's order.
        grid: name of the result's grid.
        shape: of the result, for a batch of one; batch_axis as in `Value` (None: it does not depend on the input).
        activation: NONE, RELU or RELU6, fused.
        bounds: what the function itself is clamped to in real numbers; the grid's range is the same.
        high: codes of fewer than eight bits stand at the top of int8 (see `deploy.graph.Graph`).
        weights: those of a step with weights.
        outside: not on the device: a final function of its results, left to the program that runs it (softmax). Then
            `kind` is a float kind of `network.KINDS`.
        device_kind: for an outside step that the device computes anyway: the operator that computes its plain integers,
            which have no grid (the indices of argmax).
        expression: training only: opaque, what training computes from the operand (dropout); the device does nothing.
        place: of the user's operation.
    """

    path: str
    kind: str
    operands: tuple[str, ...]
    attributes: Attributes
    grid: str
    shape: tuple[int, ...]
    batch_axis: int = 0
    activation: str = "NONE"
    bounds: tuple[float, float] | None = None
    high: bool = False
    weights: Weights | None = None
    outside: bool = False
    device_kind: str = ""
    expression: Any = None
    place: Place = Place()

    @property
    def left_out(self) -> bool:
        """Whether files leave it out."""
        return self.outside and not self.device_kind


@dataclass(frozen=True)
class PlanInput:
    """A tensor that the device gets: its path ("input", or the argument's name), grid and shape.

    Attributes:
        name: what the user calls it.
        axes: the user's axis that each axis of the file's tensor holds; empty: as its first reader prefers.
        floating: whether the network was prepared for real numbers; integers are converted, unless they are indices.
        rows: how many rows of a table its integers choose from; 0: it holds no indices.
    """

    path: str
    grid: str
    shape: tuple[int, ...]
    batch_axis: int = 0
    name: str = ""
    axes: tuple[int, ...] = ()
    floating: bool = True
    rows: int = 0


@dataclass(frozen=True)
class PlanOutput:
    """What the device returns in place of one result of the model.

    Attributes:
        name: what the user calls the result.
        axes: the user's axis that each axis of the file's tensor holds.
        outside: paths of the steps that are left to the program that runs the device, in order.
    """

    name: str
    axes: tuple[int, ...]
    outside: tuple[str, ...] = ()


# What the cells of a `Row` are.
ROW_HEADER = ("layer", "operator", "activation", "shape", "bits of weights", "bits of result")


class Row(NamedTuple):
    """A stored tensor as shown to users; None where there is nothing. A shape's None is the batch."""

    path: str
    kind: str
    activation: str | None
    shape: tuple[int | None, ...]
    weight_bits: int | None
    bits: int | None

    def cells(self) -> tuple[object, ...]:
        """For `display.table`."""
        shape = "x".join("batch" if size is None else str(size) for size in self.shape)
        return self.path, self.kind, self.activation, shape, self.weight_bits, self.bits


@dataclass(frozen=True, repr=False)
class Plan:
    """Everything decided before training.

    Attributes:
        steps: in order of execution. Pools pad only with "SAME" or "VALID"; other padding is a separate step. A tensor
            of rank 2 to 4 has 0, 1 or 2 spatial axes for convolutions (weight [out, in / groups, *window]).
        outputs: paths of what the model returns, flattened as in the network; with outside steps.
        device_outputs: paths of what the device returns instead.
        results: how it returns them, one for each; none: for part of a network.
        constants: those of the network and those that planning made (with NumPy `data`), by name.
        unused_rules: one sentence for every rule that has no effect.
        rules: the rule of each layer that planning asked for, by path.
    """

    network: Network
    inputs: tuple[PlanInput, ...]
    steps: tuple[PlanStep, ...]
    grids: Mapping[str, Grid]
    constants: Mapping[str, Constant]
    outputs: tuple[str, ...]
    device_outputs: tuple[str, ...]
    unused_rules: tuple[str, ...] = ()
    results: tuple[PlanOutput, ...] = ()
    rules: Mapping[str, Rule] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: whole, it is as long as the network's weights."""
        names = ", ".join(plan_input.path for plan_input in self.inputs)
        return f"Plan({len(self.steps)} steps from {names} to {', '.join(self.outputs)}; rows() lists them)"

    def stored(self, path: str) -> PlanStep | PlanInput:
        """The step or input that stores the tensor of that path."""
        return self._by_path[path]

    @property
    def stored_steps(self) -> list[PlanStep | PlanInput]:
        """The inputs, and the steps in order of execution."""
        return [*self.inputs, *self.steps]

    def is_stored(self, path: str) -> bool:
        """Whether an operand's name is the path of a step or an input; otherwise it is a constant's."""
        return path in self._by_path

    def grid_of_constant(self, step: PlanStep, position: int) -> str:
        """The grid of a constant operand: one under its own name, or the result's if the operator moves codes. "":
        none, it has its own scale that follows its largest magnitude."""
        if step.operands[position] in self.grids:
            return step.operands[position]
        return step.grid if OPERATORS[step.kind].same_quantization else ""

    @property
    def has_a_device(self) -> bool:
        """Whether a device can run all rules."""
        rules = [grid.rule for grid in self.grids.values()]
        rules += [step.weights.rule for step in self.steps if step.weights is not None]
        return not any(rule.deployment_obstacle() for rule in rules)

    @cached_property
    def branches(self) -> tuple[tuple[str, str], ...]:
        """The grids of what is summed, and those of the sums: (branch, sum), without given ones."""
        presets = {name for name, grid in self.grids.items() if grid.fixed is not None or grid.rule.ranges == "fixed"}
        pairs = [
            (self.stored(operand).grid, step.grid)
            for step in self.steps
            if step.kind in OPERATORS and OPERATORS[step.kind].adds
            for operand in step.operands
            if self.is_stored(operand)
        ]
        return tuple((branch, total) for branch, total in pairs if branch != total and branch not in presets)

    def rows(self) -> list[Row]:
        """What is stored, in order of execution, for display."""
        rows = []
        stored: list[PlanInput | PlanStep] = [*self.inputs, *self.steps]
        for node in stored:
            shape = tuple(None if at == node.batch_axis else size for at, size in enumerate(node.shape))
            bits = self.grids[node.grid].bits
            if isinstance(node, PlanInput):
                rows.append(Row(node.path, "input", None, shape, None, None if node.rows else bits))
                continue
            activation = None if node.activation == "NONE" else node.activation
            weight_bits = None if node.weights is None else node.weights.rule.weight_bits
            kind = f"{node.kind or 'in training only'}{', not on the device' if node.left_out else ''}"
            rows.append(
                Row(node.path, kind, activation, shape, weight_bits, None if node.left_out or not node.kind else bits)
            )
        return rows

    def precisions(self, most: int = 3) -> str:
        """How many layers have which bits for weights and results, such as ", 5 W4A4, 1 W8A8"."""
        counts = Counter((row.weight_bits, row.bits) for row in self.rows() if row.weight_bits is not None)
        return "".join(f", {count} W{weight}A{result}" for (weight, result), count in counts.most_common(most))

    @cached_property
    def _by_path(self) -> dict[str, PlanStep | PlanInput]:
        return {**{port.path: port for port in self.inputs}, **{step.path: step for step in self.steps}}


@dataclass(frozen=True)
class WeightNumbers:
    """A step's weights on the device.

    Attributes:
        codes: int64, the network's order of axes, -127..127; with a zero point -128..127.
        scale: float32 [1] (one for the whole weight) or [channels].
        bias: codes as float64 or int64, [channels]; on the device int32, with int16 activations int64.
        zero_point: of a filter as a file holds it; None: training made it.
    """

    codes: np.ndarray
    scale: np.ndarray
    bias: np.ndarray
    zero_point: int | None = None


@dataclass(frozen=True)
class Numbers:
    """The results of training; all that lowering needs besides the plan.

    Attributes:
        grids: grid's name -> (nudged scale as float32, code 0..2**bits - 1 of real 0).
        weights: step's path -> its weights.
        constants: (step's path, position among its operands) -> (int codes in the user's order of axes, float32 scale).
    """

    grids: Mapping[str, tuple[np.float32, int]]
    weights: Mapping[str, WeightNumbers]
    constants: Mapping[tuple[str, int], tuple[np.ndarray, np.float32]] = field(default_factory=dict)


def require_finite(what: str, *values: ArrayLike) -> None:
    """Raises ValueError if one of `values`, arrays in NumPy or numbers, is NaN or infinite. what: names them."""
    if not all(np.isfinite(value).all() for value in values):
        raise ValueError(
            f"{what} contains NaN or infinity, which the device cannot represent: training has diverged, or the "
            "data contained such values; go back to an earlier state"
        )


class MissingData(RuntimeError):
    """A range is used that has seen no data."""


def without_data(names: Iterable[str]) -> str:
    """A sentence about ranges with these names that have seen no data."""
    ranges = list(names)
    what = f"the range of {ranges[0]} has" if len(ranges) == 1 else f"{len(ranges)} ranges have"
    which = "" if len(ranges) == 1 else f" ({listed(ranges)})"
    return (
        f"{what} seen no data{which}, or no finite data: train on a batch or run calibrate before freeze and evaluation"
    )


def require_data(names: Iterable[str]) -> None:
    """Raises MissingData if there are ranges with these names without data."""
    ranges = [f"'{shortened(name)}'" for name in names]
    if ranges:
        raise MissingData(without_data(ranges))


def refuse_batch(count: int, names: Iterable[str]) -> None:
    """Raises ValueError for the `count`-th calibration batch if tensors with these names were not finite."""
    tensors = list(names)
    if tensors:
        others = len(tensors) - 1
        more = f" and in {others} more tensor{'s' * (others > 1)}" if others else ""
        raise ValueError(
            f"batch {count} of batches gives NaN or infinity in '{tensors[0]}'{more}, which no range can represent"
        )


def branch_range(
    branch: tuple[A, A], total: tuple[A, A], grids: tuple[Grid, Grid], where: Callable[[A, A | float, A | float], A]
) -> tuple[A, A]:
    """The range (min, max) of a branch that was always zero, or nearly, beside the sum that reads it: as fine as that
    of the sum.

    If the sum itself is close to zero, as in untrained deep networks, the branch's is wider: as wide as
    `_FINEST_BRANCH`, or as the sum can read. Every other range stays as it is. `grids`: those of branch and sum;
    `where`: the framework's.
    """
    (low, high), (total_low, total_high) = branch, total
    width = total_high - total_low
    alive = width >= SMALLEST_WIDTH
    dead = (high - low < _DEAD * width) & alive & (width <= _FINE)
    steps = [2**grid.bits - 1 for grid in grids]
    most = max(1, 128 * steps[0] // steps[1])  # half of the factor by which the device's steps may differ
    wider = _FINEST_BRANCH / where(alive, width, SMALLEST_WIDTH)
    wider = where(wider < 1, 1.0, where(wider > most, 1.0 * most, wider))
    if grids[0].nonnegative:
        return low, where(dead, width * wider, high)
    return where(dead, total_low * wider, low), where(dead, total_high * wider, high)
