# SPDX-License-Identifier: Apache-2.0
"""Declarations of the operators that round a frozen layer's sums to the integers that a device's kernels store, and of
their gradient."""

from exactqat.operators.checks import check_length
from exactqat.operators.op import operator
from exactqat.operators.specification import Axes, Lowering, Tensor, TensorSpec, letters_of


@operator(None, ("steps",), reuses=("sums",))
def rounded_sums(
    sums: Tensor,
    factor: Tensor,
    nudge: Tensor,
    lowest: float,
    highest: float,
    away_from_zero: bool = False,
    in_float32: bool = False,
) -> Lowering:
    """Integers times a factor per channel, rounded to integers and clamped, all in float64 or all in float32.

    With x = sums * factor the result is floor(x + nudge with the sign of x + 1/2), or with `away_from_zero` the nearest
    integer, ties away from zero. The nudge combines the two roundings of a fixed-point multiplier into one
    (docs/decisions/frozen.md). With `in_float32` factor, product and result are float32, and ties are rounded to even.

    Args:
        sums: float32 integers, `[..., channels]`.
        factor, nudge: float64, `[channels]`.
        lowest, highest: limits of the results, inclusive.
        away_from_zero: see above; `nudge` is ignored then.
        in_float32: see above; `nudge` and `away_from_zero` are ignored then.
    Returns:
        steps: float32, shape of `sums`.
    Raises:
        ValueError: `sums` of rank 0, vectors whose length is not the number of channels. TypeError: dtypes.
    Source: TensorFlow Lite's `MultiplyByQuantizedMultiplier`; XNNPACK's requantization in float32.
    """
    _check(sums, factor=factor, nudge=nudge)
    numbers = {
        "lowest": lowest,
        "highest": highest,
        "away_from_zero": int(away_from_zero),
        "in_float32": int(in_float32),
    }
    return Lowering((TensorSpec(sums.shape, "float32"),), "rounded_sums", numbers)


@rounded_sums.axes
def _(sums, factor, nudge, lowest, highest, away_from_zero, in_float32):
    letters = letters_of(sums)
    return Axes((f".{letters}", letters[-1:], letters[-1:]), (f".{letters}",), ("",))


@operator(None, ("backprops",), reuses=("gradients",))
def rounded_sums_gradient(gradients: Tensor, sums: Tensor, factor: Tensor, low: float, high: float) -> Lowering:
    """The gradient of `rounded_sums`, straight through the rounding: gradients * factor where sums * factor lies
    between low and high or is NaN, 0 * factor elsewhere. All in float32.

    Args:
        gradients: float32, of the steps, shape of `sums`.
        sums: float32 integers, `[..., channels]`.
        factor: float64, `[channels]`.
        low, high: ends between which gradients pass, exclusive.
    Returns:
        backprops: float32, of the sums.
    Raises:
        ValueError: `sums` of rank 0, shapes that differ, vectors whose length is not the number of channels. TypeError:
        dtypes.
    Source: the kit's own; PyTorch's `hardtanh_backward`, times the factor.
    """
    _check(sums, factor=factor)
    if gradients.dtype != "float32":
        raise TypeError(f"gradients must be float32, got {gradients.dtype}")
    if gradients.shape != sums.shape:
        raise ValueError(f"gradients must have the shape of sums, got {gradients.shape} and {sums.shape}")
    return Lowering((TensorSpec(sums.shape, "float32"),), "rounded_sums_gradient", {"low": low, "high": high})


@rounded_sums_gradient.axes
def _(gradients, sums, factor, low, high):
    letters = letters_of(sums)
    return Axes((f".{letters}", f".{letters}", letters[-1:]), (f".{letters}",), ("",))


def _check(sums: TensorSpec, **vectors: TensorSpec) -> None:
    if sums.dtype != "float32":
        raise TypeError(f"sums must be float32, got {sums.dtype}")
    for name, spec in vectors.items():
        if spec.dtype != "float64":
            raise TypeError(f"{name} must be float64, got {spec.dtype}")
    if sums.rank < 1:
        raise ValueError("sums must be at least rank 1 (the last dimension holds the channels) but is rank 0")
    check_length(sums.shape[-1], "sums", **vectors)
