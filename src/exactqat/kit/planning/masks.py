# SPDX-License-Identifier: Apache-2.0
"""Masks as network inputs: zeros and ones that hide scores from a softmax, or that multiply values.

And whole numbers that a network computes from masks and uses to look up rows: positions, which it counts. They are on
grids of scale 1, on which the device's sums and products of such numbers are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .network import Constant, Network, Step
from .refusals import Refused
from .rules import Rule
from .stored import Stored

# Beyond this, softmax returns less than half a step of its grid, whatever the other scores are.
SURELY_MASKED = -32.0
# Adding a number this low hides a score in any framework.
HIDES = -1e3


class MaskRange(NamedTuple):
    """What the grid of a mask holds. The user's model clamps nothing there: gradients pass at both ends."""

    low: float
    high: float


# The range of a mask of real numbers, which are added to scores.
HIDING = MaskRange(SURELY_MASKED, 0.0)
# The range of an input that is such a mask.
TRUTH = MaskRange(0.0, 1.0)
# A comparison of an integer that is 0 or 1: whether it holds for 1, by the operator and the number compared with.
HOLDS: dict[tuple[str, float], bool] = {
    **{("ne", 0): True, ("gt", 0): True, ("ge", 1): True, ("eq", 1): True},
    **{("eq", 0): False, ("le", 0): False, ("lt", 1): False, ("ne", 1): False},
}
MOVES = ("reshape", "permute", "expand", "identity", "gather", "slice", "flip")
Ends = tuple[int, int]
# What grids of scale 1 hold: bits, and the range.
_GRIDS: tuple[tuple[int, Ends], ...] = ((8, (0, 255)), (8, (-128, 127)), (16, (-32767, 32767)))
# Beyond this, the 15 bits of a multiplier in int16 kernels are not enough for the next number.
LARGEST = 2**13


def is_mask(network: Network, name: str) -> bool:
    """Whether an input holds zeros and ones: booleans, or integers converted to such, that hide scores or, if the
    example has no others, that are counted."""
    dtype = network.values[name].dtype
    if dtype in ("bool", "float32"):
        return dtype == "bool"
    known = {name}
    for step in network.steps:
        if not known.intersection(operand for operand in step.inputs if isinstance(operand, str)):
            continue
        if step.kind == "clamp" and (step.attributes["min"], step.attributes["max"]) == TRUTH:
            return True
        if is_of_truth(network, step) or (step.kind == "linear" and network.values[name].truth):
            return True
        if step.kind == "mul" and any(not isinstance(factor, str) and (factor or 0) <= HIDES for factor in step.inputs):
            return True
        if step.kind in (*MOVES, "sub") or (step.kind == "mul" and known.issuperset(step.inputs)):
            known.add(step.output)
    return False


def hides(array: np.ndarray) -> bool:
    """Whether real numbers are 0, or so far below 0 that a score they are added to no longer counts."""
    return array.dtype.kind == "f" and bool(array.size) and bool(array.min() <= HIDES and array.max() <= 0)


def with_examples(network: Network, examples: Sequence[Any]) -> Network:
    """The network, with inputs that may be masks marked as such, by what the example holds.

    Args:
        examples: an array for each of its inputs.
    """
    values = dict(network.values)
    for name, example in zip(network.inputs, examples, strict=True):
        array = np.asarray(example)
        truth = array.dtype.kind in "iu" and array.size and bool(array.min() >= 0 and array.max() <= 1)
        values[name] = replace(values[name], hides=hides(array), truth=bool(truth))
    return replace(network, values=values)


def is_of_truth(network: Network, step: Step) -> bool:
    """Whether a step compares something with 0 or 1, as is done with integers that are 0 or 1."""
    if step.kind != "compare":
        return False
    other = step.inputs[1]
    held = network.constants.get(other) if isinstance(other, str) else None
    number = other if held is None or held.data is None or np.ndim(held.data) else float(held.data)
    return (step.attributes["how"], number) in HOLDS


def rows_of_tables(network: Network, name: str) -> int:
    """How many table rows an integer input chooses from: with several tables, those of the smallest; 0: none.

    What it is compared with is also a table, if it is more than 0 and 1: for a length, or the kind of a word.
    """
    known = network.constants
    read = [step for step in network.steps if step.inputs and _source(network, step.inputs[0]) == name]
    tables = [
        known[str(step.inputs[1])].shape[0] for step in read if step.kind == "embedding" and step.inputs[1] in known
    ]
    if tables or network.values[name].dtype == "bool":
        return min(tables, default=0)
    compared = [step for step in read if step.kind == "compare" and not is_of_truth(network, step)]
    numbers = [known[side].data if isinstance(side, str) else side for side in (step.inputs[1] for step in compared)]
    # All beyond the largest of these numbers is equivalent.
    return max((int(np.asarray(number).max()) + 2 for number in numbers if number is not None), default=0)


def _source(network: Network, name: object) -> object:
    """The origin of a value, before steps that change nothing on the device."""
    made_by = {step.output: step for step in network.steps}
    while name in made_by and made_by[str(name)].kind in ("identity", "reshape"):
        name = made_by[str(name)].inputs[0]
    return name


def is_truth(x: Stored) -> bool:
    """Whether it is such an input, or made from such inputs."""
    rule = x.grid.now.rule
    return rule.ranges == "fixed" and rule.fixed_range == TRUTH


def is_hiding(x: Stored) -> bool:
    """Whether it is an input of real numbers that hide scores, in any shape."""
    grid = x.grid.now
    return grid.of_inputs and grid.rule.ranges == "fixed" and grid.rule.fixed_range == HIDING


def are_zeros_and_ones(constant: Constant) -> bool:
    """Whether a constant holds nothing else, whatever is trained."""
    values = None if constant.data is None else np.asarray(constant.data)
    return values is not None and bool(((values == 0) | (values == 1)).all())


def hides_or_keeps(constant: Constant) -> bool:
    """Whether a constant that is added hides scores and leaves all others as they are, whatever is trained."""
    values = None if constant.data is None else np.asarray(constant.data)
    return values is not None and bool(((values == 0) | (values <= HIDES)).all())


def line_in_front_of_softmax(network: Network, name: str, x: Stored, weight: float, bias: float) -> tuple[float, float]:
    """``weight * x + bias`` of a mask before a softmax: no further below 0 than matters, so that the mask does not fill
    the grid of the scores.

    name: the line's result.

    Raises:
        Refused: a number this large is computed from a mask and goes elsewhere, or from something other than a mask.
    """
    lowest = min(bias, weight + bias)
    if lowest > HIDES:
        return weight, bias
    if not is_truth(x):
        raise Refused(
            f"it adds {lowest:g} where something that is computed says so; give the mask as an input of integers or "
            "truth values, 1 where a value counts"
        )
    if not hides_scores(network, name):
        raise Refused(f"it computes {lowest:g} of a mask, which goes elsewhere than in front of a softmax")
    factor = SURELY_MASKED / lowest
    return weight * factor, bias * factor


def hides_scores(network: Network, name: str) -> bool:
    """Whether all that reads a value adds it to what a softmax reads."""
    readers = [step for step in network.steps if name in step.inputs]
    return bool(readers) and all(
        step.kind == "softmax"
        or (step.kind == "attention" and step.inputs.index(name) == 3)
        or (step.kind in ("add", "sub", *MOVES) and hides_scores(network, step.output))
        for step in readers
    )


# --- whole numbers ----------------------------------------------------------------------------------------------------


def extents(network: Network) -> Mapping[str, Ends]:
    """The smallest and the largest possible values: of row numbers, and of what they are computed from."""
    inputs = [name for name in network.inputs if not rows_of_tables(network, name)]
    known: dict[str, Ends] = {name: (0, 1) for name in inputs if is_mask(network, name)}
    for step in network.steps:
        extent = (0, 1) if step.kind == "compare" else _extent(network, step, known)
        if extent is not None and max(map(abs, extent)) <= LARGEST:
            known[step.output] = extent
    made_by = {step.output: step for step in network.steps}
    wanted: set[str] = set()
    rows = [step.inputs[0] for step in network.steps if step.kind == "embedding"]
    while rows:
        name = rows.pop()
        if isinstance(name, str) and name in known and name not in wanted:
            wanted.add(name)
            rows += made_by[name].inputs if name in made_by and made_by[name].kind != "compare" else ()
    return {name: ends for name, ends in known.items() if name in wanted}


def _extent(network: Network, step: Step, known: Mapping[str, Ends]) -> Ends | None:
    if step.kind in MOVES:
        return known.get(str(step.inputs[0]))
    if step.kind == "linear":
        return _of_product(network, step, known)
    if step.kind not in ("add", "sub", "mul", "neg") or not any(operand in known for operand in step.inputs):
        return None
    ends = [_ends(network, operand, known) for operand in step.inputs]
    if any(pair is None for pair in ends):
        return None
    (low, high), *others = (pair for pair in ends if pair is not None)
    if step.kind == "neg":
        return -high, -low
    ((least, most),) = others
    if step.kind == "add":
        return low + least, high + most
    if step.kind == "sub":
        return low - most, high - least
    corners = [a * b for a in (low, high) for b in (least, most)]
    return min(corners), max(corners)


def _of_product(network: Network, step: Step, known: Mapping[str, Ends]) -> Ends | None:
    """Likewise for sums with a matrix of whole numbers."""
    ends, matrix = known.get(str(step.inputs[0])), _numbers(network, step.inputs[1])
    if ends is None or matrix is None or any(bias is not None for bias in step.inputs[2:]):
        return None
    products = np.stack([matrix * ends[0], matrix * ends[1]])
    return int(products.min(0).sum(-1).min()), int(products.max(0).sum(-1).max())


def _ends(network: Network, operand: object, known: Mapping[str, Ends]) -> Ends | None:
    if operand in known:
        return known[str(operand)]
    numbers = _numbers(network, operand)
    return None if numbers is None or not numbers.size else (int(numbers.min()), int(numbers.max()))


def _numbers(network: Network, operand: object) -> np.ndarray | None:
    """Constant whole numbers; None if it is something else."""
    held = network.constants.get(operand) if isinstance(operand, str) else None
    data = (None if held is None or held.trainable else held.data) if isinstance(operand, str) else operand
    numbers = None if data is None else np.asarray(data, np.float64)
    fits = numbers is not None and (np.rint(numbers) == numbers) & (abs(numbers) <= LARGEST)
    return numbers if np.all(fits) else None


def on_whole_grid(rule: Rule, ends: Ends) -> Rule:
    """The rule for a tensor on a grid of scale 1 that reaches from end to end."""
    bits, (low, high) = next(grid for grid in _GRIDS if grid[1][0] <= ends[0] and ends[1] <= grid[1][1])
    return replace(rule, activation_bits=bits, ranges="fixed", fixed_range=(float(low), float(high)))


def is_on_whole_grid(rule: Rule) -> bool:
    """Whether it is such a rule."""
    grids = [(bits, tuple(map(float, ends))) for bits, ends in _GRIDS]
    return rule.ranges == "fixed" and (rule.activation_bits, rule.fixed_range) in grids
