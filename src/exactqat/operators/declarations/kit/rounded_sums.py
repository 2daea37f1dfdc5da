# SPDX-License-Identifier: Apache-2.0
"""Declarations of the operators that round a frozen layer's sums to the integers that a device's kernels store, and of
their gradient."""

from typing import Literal

from exactqat.operators.declarations.checks import check_length
from exactqat.operators.declarations.op import operator
from exactqat.operators.declarations.specification import Axes, Lowering, Tensor, TensorSpec, letters_of

Rounding = Literal["float32", "float64", "fixed_point"]
# Of `grid`: the scales of the input and of the result, ends of the results, ends between which gradients pass.
GRID_NUMBERS = 6


@operator(None, ("steps",), reuses=("sums",))
def rounded_sums_by_grid(sums: Tensor, scale: Tensor, grid: Tensor, rounding: Rounding) -> Lowering:
    """Integers times a factor per channel, input scale * scale / result scale, as the integers that a device's kernels
    store: rounded as its profile does, and clamped.

    Args:
        sums: float32 integers of the range of int32, `[..., channels]`.
        scale: float32, of the weight, `[channels]`.
        grid: float32, `[6]`: input scale, result scale, lowest and highest result (inclusive), and the two ends between
            which gradients pass (exclusive).
        rounding: `"float32"`: all in float32, ties to even. `"float64"`: all in float64, ties away from zero.
            `"fixed_point"`: TensorFlow Lite's 31-bit multiplier, which rounds twice.
    Returns:
        steps: float32, shape of `sums`.
    Raises:
        ValueError: `sums` of rank 0, `scale` whose length is not the number of channels, a grid of another shape.
        TypeError: dtypes.
    Source: TensorFlow Lite's `QuantizeMultiplier` and `MultiplyByQuantizedMultiplier`; XNNPACK's requantization in
    float32.
    """
    _check_by_grid(sums, scale, grid)
    numbers = {"rounding": ("float32", "float64", "fixed_point").index(rounding)}
    return Lowering((TensorSpec(sums.shape, "float32"),), "rounded_sums_by_grid", numbers)


@operator(None, ("backprops",), reuses=("gradients",))
def rounded_sums_by_grid_gradient(gradients: Tensor, sums: Tensor, scale: Tensor, grid: Tensor) -> Lowering:
    """The gradient of `rounded_sums_by_grid`, straight through the rounding: gradients * factor where sums * factor
    lies between the grid's ends for gradients or is NaN, 0 * factor elsewhere. All in float32.

    Args:
        gradients: float32, of the steps, shape of `sums`.
        sums, scale, grid: as passed to `rounded_sums_by_grid`.
    Returns:
        backprops: float32, of the sums.
    Raises:
        ValueError: as `rounded_sums_by_grid`, shapes that differ. TypeError: dtypes.
    Source: the kit's own; PyTorch's `hardtanh_backward`, times the factor.
    """
    _check_by_grid(sums, scale, grid)
    _check_gradients(gradients, sums)
    return Lowering((TensorSpec(sums.shape, "float32"),), "rounded_sums_by_grid_gradient", {})


@rounded_sums_by_grid.gradient
def _(gradients, operands, results, attributes):
    return rounded_sums_by_grid_gradient(*gradients, *operands), None, None


@rounded_sums_by_grid_gradient.gradient(keeps=("sums", "scale", "grid"))
def _(gradients, operands, results, attributes):
    # Linear in its first operand with a diagonal matrix, so it is its own transpose.
    return rounded_sums_by_grid_gradient(*gradients, *operands[1:]), None, None, None


@rounded_sums_by_grid.axes
def _(sums, scale, grid, rounding):
    letters = letters_of(sums)
    return Axes((f".{letters}", letters[-1:], "?"), (f".{letters}",), ("",), whole="?")


@rounded_sums_by_grid_gradient.axes
def _(gradients, sums, scale, grid):
    letters = letters_of(sums)
    return Axes((f".{letters}", f".{letters}", letters[-1:], "?"), (f".{letters}",), ("",), whole="?")


def _check_by_grid(sums: TensorSpec, scale: TensorSpec, grid: TensorSpec) -> None:
    for name, spec in {"sums": sums, "scale": scale, "grid": grid}.items():
        if spec.dtype != "float32":
            raise TypeError(f"{name} must be float32, got {spec.dtype}")
    if sums.rank < 1:
        raise ValueError("sums must be at least rank 1 (the last dimension holds the channels) but is rank 0")
    check_length(sums.shape[-1], "sums", scale=scale)
    if grid.shape != (GRID_NUMBERS,):
        raise ValueError(f"grid must have shape [{GRID_NUMBERS}], got {list(grid.shape)}")


def _check_gradients(gradients: TensorSpec, sums: TensorSpec) -> None:
    if gradients.dtype != "float32":
        raise TypeError(f"gradients must be float32, got {gradients.dtype}")
    if gradients.shape != sums.shape:
        raise ValueError(f"gradients must have the shape of sums, got {gradients.shape} and {sums.shape}")
