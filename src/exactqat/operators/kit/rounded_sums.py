# SPDX-License-Identifier: Apache-2.0
"""Declaration of the operator that rounds a frozen layer's sums to the integers that TensorFlow Lite's kernels
store."""

from exactqat.operators.checks import check_length
from exactqat.operators.op import operator
from exactqat.operators.specification import Axes, Lowering, Tensor, TensorSpec, letters_of


@operator(None, ("steps",), reuses=("sums",))
def rounded_sums(
    sums: Tensor, factor: Tensor, nudge: Tensor, lowest: float, highest: float, away_from_zero: bool = False
) -> Lowering:
    """Integers times a factor per channel, rounded to integers and clamped, all in float64.

    With x = sums * factor the result is floor(x + nudge with the sign of x + 1/2), or with `away_from_zero` the nearest
    integer, ties away from zero. The nudge combines the two roundings of a fixed-point multiplier into one
    (docs/decisions/frozen.md).

    Args:
        sums: float32 integers, `[..., channels]`.
        factor, nudge: float64, `[channels]`.
        lowest, highest: limits of the results, inclusive.
        away_from_zero: see above; `nudge` is ignored then.
    Returns:
        steps: float32, shape of `sums`.
    Raises:
        ValueError: `sums` of rank 0, vectors whose length is not the number of channels. TypeError: dtypes.
    Source: TensorFlow Lite's `MultiplyByQuantizedMultiplier`.
    """
    if sums.dtype != "float32":
        raise TypeError(f"sums must be float32, got {sums.dtype}")
    for name, spec in (("factor", factor), ("nudge", nudge)):
        if spec.dtype != "float64":
            raise TypeError(f"{name} must be float64, got {spec.dtype}")
    if sums.rank < 1:
        raise ValueError("sums must be at least rank 1 (the last dimension holds the channels) but is rank 0")
    check_length(sums.shape[-1], "sums", factor=factor, nudge=nudge)
    numbers = {"lowest": lowest, "highest": highest, "away_from_zero": int(away_from_zero)}
    return Lowering((TensorSpec(sums.shape, "float32"),), "rounded_sums", numbers)


@rounded_sums.axes
def _(sums, factor, nudge, lowest, highest, away_from_zero):
    letters = letters_of(sums)
    return Axes((f".{letters}", letters[-1:], letters[-1:]), (f".{letters}",), ("",))
