# SPDX-License-Identifier: Apache-2.0
"""`tf.quantization`: the operators exported there, and the functions that TensorFlow implements in Python."""

from typing import Any

from exactqat.operators import OPERATORS
from exactqat.operators.declarations import quantize_and_dequantize as _operators
from exactqat.operators.declarations.dispatch import rank_of as _rank_of
from exactqat.operators.declarations.op import Operator as _Operator
from exactqat.operators.declarations.op import showing_arrays as _showing_arrays
from exactqat.operators.declarations.quantize_and_dequantize import RoundMode

globals().update(
    {
        name.removeprefix("quantization."): op
        for op in OPERATORS.values()
        for name in op.exports
        if name.startswith("quantization.")
    }
)


def _axis(operator: _Operator, input: Any, axis: int | None) -> int:
    """The raw operators' axis, where -1 is the whole tensor, from the public one, where None is and negatives count
    from the end."""
    if axis is None:
        return -1
    if type(axis) is not int:
        axis = int(operator.attribute("axis", axis))
    rank = len(input.shape) if hasattr(input, "shape") else _rank_of(input)
    if not -rank <= axis < rank:
        raise ValueError(f"axis must be from {-rank} to {rank - 1} for an input of rank {rank}, got {axis}")
    return axis % rank


@_showing_arrays
def quantize_and_dequantize(
    input: Any,
    input_min: Any,
    input_max: Any,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: RoundMode = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
    *,
    out: Any = None,
) -> Any:
    """Quantize and dequantize; the gradient passes straight through.

    Args:
        input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range: see
            `raw_ops.QuantizeAndDequantizeV2`.
        name: ignored.
        axis: None for one range for the whole tensor; else the axis with one range per index, may be negative.
        out: an array to write the result into.
    Returns:
        An array like `input`.
    Raises:
        ValueError: as `raw_ops.QuantizeAndDequantizeV2`.
    Source: `tf.quantization.quantize_and_dequantize`.
    """
    operator = _operators.quantize_and_dequantize_v2
    raw_axis = _axis(operator, input, axis)
    return operator(
        input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range, raw_axis, out=out
    )


@_showing_arrays
def quantize_and_dequantize_v2(
    input: Any,
    input_min: Any,
    input_max: Any,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: RoundMode = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
    *,
    out: Any = None,
) -> Any:
    """Quantize and dequantize; the gradient is zero outside the range that was used.

    If the range is computed from the data, all data are inside and the whole gradient passes. (TensorFlow then masks
    with the unused `input_min` and `input_max`, which leaves almost nothing.)

    Args:
        input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range: see
            `raw_ops.QuantizeAndDequantizeV4`.
        name: ignored.
        axis: None for one range for the whole tensor; else the axis with one range per index, may be negative.
        out: an array to write the result into.
    Returns:
        An array like `input`.
    Raises:
        ValueError: as `raw_ops.QuantizeAndDequantizeV4`.
    Source: `tf.quantization.quantize_and_dequantize_v2`.
    """
    operator = _operators.quantize_and_dequantize_v4 if range_given else _operators.quantize_and_dequantize_v2
    raw_axis = _axis(operator, input, axis)
    return operator(
        input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range, raw_axis, out=out
    )
