# SPDX-License-Identifier: Apache-2.0
"""The integers that training has ended with: of grids, weights and constants, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ....kit.planning.plans import Numbers, PlanStep, WeightNumbers, Weights, require_data, require_finite
from . import primitives_numpy
from .ranges import codes_of
from .state import ConstantOperand, State
from .steps import WeightedStep
from .weights import per_channel, step_width, weight_codes


def nudged_grids(state: State) -> dict[str, tuple[np.float32, int]]:
    """Scale and zero point of all grids, by name.

    Raises:
        ValueError: a range is not finite.
    """
    grids: dict[str, tuple[np.float32, int]] = {}
    for name in state.functional.grids:
        require_finite(f"the range of '{name}'", *map(float, state.grid(name).ends()))
        grids[name] = state.grid(name).scale_and_zero_point()
    return grids


def all_numbers(state: State) -> Numbers:
    """The integers of a whole network.

    Raises:
        MissingData: a range has seen no data.
        ValueError: a range or a weight is not finite.
    """
    for name, grid in state.functional.grids.items():
        if grid.rule.ranges != "fixed" and not state.ranges[name]["batches"] > 0:
            require_data([name])
    return numbers_of(state, state.plan.steps, nudged_grids(state))


def numbers_of(state: State, steps: Sequence[PlanStep], grids: dict[str, tuple[np.float32, int]]) -> Numbers:
    """The integers of some steps. grids: all of them."""
    weights: dict[str, WeightNumbers] = {}
    constants: dict[tuple[str, int], tuple[np.ndarray, np.float32]] = {}
    for step in steps:
        if not step.kind or step.outside or step.expression is not None:
            continue
        for position, name in enumerate(step.operands):
            if name not in state.functional.grid_of:
                constants[(step.path, position)] = _constant_numbers(state, step, position, grids)
        if step.weights is not None:
            weights[step.path] = _weight_numbers(state, step, step.weights)
    return Numbers(grids, weights, constants)


def _constant_numbers(
    state: State, step: PlanStep, position: int, grids: Mapping[str, tuple[np.float32, int]]
) -> tuple[np.ndarray, np.float32]:
    operand = ConstantOperand(state, step, position)
    value = np.asarray(operand.source(), np.float32)
    if operand.shared is not None:
        scale, zero_point = grids[operand.shared.name]
        return codes_of(operand.shared.quantize(value), scale, zero_point) - zero_point, scale
    low, high = operand.bounds(value)
    scale = np.float32(step_width((low, high), operand.bits, operand.rule.narrow_range))
    require_finite(f"a constant of '{step.path}'", scale)
    quantized = primitives_numpy.fake_quantize(value, low, high, operand.bits, operand.rule.narrow_range)
    if scale == 0:
        # All zero: the result's own scale, which is never too large for an operator.
        scale, _ = grids[step.grid]
    return np.rint(quantized / scale).astype(np.int64), scale


def _weight_numbers(state: State, step: PlanStep, weights: Weights) -> WeightNumbers:
    """A layer's weights on the device; a negative batch norm factor has flipped the signs of its channel."""
    norm = weights.batch_norm
    names = [weights.weight, weights.bias, *((norm.weight, norm.bias, norm.mean, norm.variance) if norm else ())]
    held = [state.constant(name) for name in names if name is not None]
    require_finite(f"the layer '{step.path}'", *map(np.asarray, held))
    layer = WeightedStep(state, step)
    stored = layer.stored_weight()
    quantized, raw_scale = layer.weight_quantizer(stored), layer.weight_quantizer.scale(stored)
    with np.errstate(divide="ignore", invalid="ignore"):
        grid = layer.grid(stored)
    codes = weight_codes(quantized, raw_scale, weights.channel_axis)
    signs = np.sign(np.asarray(grid.factor)).astype(np.int64)
    scales = np.asarray(grid.weight_scale)
    one_scale = not weights.rule.per_channel and bool(np.all(scales == scales[0]))
    return WeightNumbers(
        codes * per_channel(primitives_numpy, signs, codes.ndim, weights.channel_axis),
        scales[:1] if one_scale else scales,
        np.asarray(grid.bias_code).astype(np.float64),
    )
