# SPDX-License-Identifier: Apache-2.0
"""Declarations of the QuantizeAndDequantize family."""

import math
from typing import Any, Literal

from exactqat.operators.declarations.checks import check_dtypes, check_same_shape
from exactqat.operators.declarations.op import Operator, operator
from exactqat.operators.declarations.plain_numbers import written
from exactqat.operators.declarations.specification import Axes, Lowering, Range, Tensor, TensorSpec, letters_of, wide

RoundMode = Literal["HALF_TO_EVEN", "HALF_UP"]


def _slices(input: TensorSpec, axis: int) -> dict[str, int | float]:
    """The input as `[outer, slices, inner]`: one slice for the whole tensor (axis -1), or one for each index of
    `axis`."""
    if axis < -1:
        raise ValueError(f"axis must be at least -1, got {axis}")
    if axis >= input.rank:
        raise ValueError(f"axis must be less than the rank of input, {input.rank}, got {axis}")
    if axis == -1:
        return {"outer": 1, "slices": 1, "inner": input.size}
    return {
        "outer": math.prod(input.shape[:axis]),
        "slices": input.shape[axis],
        "inner": math.prod(input.shape[axis + 1 :]),
    }


def _check_bound_dtypes(input: TensorSpec, **bounds: TensorSpec) -> None:
    """Like the input, or, beside 16 bits, float32."""
    for name, bound in bounds.items():
        if bound.dtype not in (input.dtype, wide(input.dtype)):
            raise TypeError(f"{name} must be {input.dtype} like input, got {bound.dtype}")


def _check_bounds(input: TensorSpec, axis: int, **bounds: TensorSpec) -> None:
    for name, bound in bounds.items():
        if axis == -1 and bound.rank != 0:
            raise ValueError(f"{name} must be a scalar when axis is -1, got shape {list(bound.shape)}")
        if axis >= 0 and bound.shape != (input.shape[axis],):
            raise ValueError(
                f"{name} has incorrect size, expected [{input.shape[axis]}] to match dimension {axis} of input, "
                f"got {list(bound.shape)}"
            )


def _forward(
    input: TensorSpec,
    input_min: TensorSpec,
    input_max: TensorSpec,
    signed_input: bool,
    num_bits: int,
    range_given: bool,
    round_mode: str,
    narrow_range: bool,
    axis: int,
) -> Lowering:
    check_dtypes(input=input)
    _check_bound_dtypes(input, input_min=input_min, input_max=input_max)
    highest = 61 if signed_input else 62
    if not 1 <= num_bits <= highest:
        raise ValueError(
            f"num_bits is out of range: must be 1 to {highest} with signed_input {signed_input}, got {num_bits}"
        )
    slices = _slices(input, axis)
    if range_given:
        _check_bounds(input, axis, input_min=input_min, input_max=input_max)
    flags = {
        "signed_input": int(signed_input),
        "num_bits": num_bits,
        "range_given": int(range_given),
        "half_up": int(round_mode == "HALF_UP"),
        "narrow_range": int(narrow_range),
        "check_range": int(range_given and axis == -1),
    }
    return Lowering((input,), "quantize_and_dequantize", flags | slices)


@operator("QuantizeAndDequantize", ("output",), reuses=("input",))
def quantize_and_dequantize(
    input: Tensor,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    input_min: float = 0.0,
    input_max: float = 0.0,
) -> Lowering:
    """Version 1: as `quantize_and_dequantize_v2` with the range as attributes, half to even, whole tensor.

    TensorFlow can no longer call it; it exists here for old graphs. The gradient passes straight through.

    Args:
        input: a float tensor, any shape.
        signed_input, num_bits, range_given: see `quantize_and_dequantize_v2`.
        input_min, input_max: the range if `range_given`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `num_bits` out of range, or `range_given` and not `input_min <= input_max`.
    Source: TensorFlow `QuantizeAndDequantize`.
    """
    if range_given and not input_min <= input_max:
        low, high = written(input_min), written(input_max)
        raise ValueError(f"invalid range: input_min must be at most input_max, got {low} and {high}")
    scalar = TensorSpec((), input.dtype)
    lowered = _forward(input, scalar, scalar, signed_input, num_bits, range_given, "HALF_TO_EVEN", False, -1)
    return lowered._replace(numbers={**lowered.numbers, "input_min": input_min, "input_max": input_max})


@operator("QuantizeAndDequantizeV2", ("output",), reuses=("input",))
def quantize_and_dequantize_v2(
    input: Tensor,
    input_min: Range,
    input_max: Range,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: RoundMode = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: int = -1,
) -> Lowering:
    """Quantize and dequantize with a scale derived from a range, given or computed from the data. Straight-through
    gradient.

    The scale maps the range onto the integers of `num_bits` bits so that both ends fit and 0 stays 0. Values are
    clamped only if the range is given. If the range is computed from data that contain NaN, the whole slice is NaN.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars for axis -1, else vectors of the length of that axis;
            otherwise ignored.
        signed_input: integers from `-2**(num_bits-1)` (one more with `narrow_range`), else from 0.
        num_bits: 1 to 61, or to 62 if not signed.
        range_given: use `input_min`, `input_max`; otherwise the minimum and maximum of the data.
        round_mode: "HALF_TO_EVEN" or "HALF_UP".
        narrow_range: omit the lowest signed integer.
        axis: -1 for one range for the whole tensor, else the axis with one range per index.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis`, `num_bits` or `round_mode` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum (known only when the kernel runs). With an axis
            TensorFlow does not check, and such a slice is whatever the formula gives.
    Source: TensorFlow `QuantizeAndDequantizeV2`; per-slice given ranges, which TensorFlow rejects, work as in its V3.
    """
    return _forward(input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range, axis)


@operator("QuantizeAndDequantizeV3", ("output",), reuses=("input",))
def quantize_and_dequantize_v3(
    input: Tensor,
    input_min: Range,
    input_max: Range,
    num_bits: int,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: int = -1,
) -> Lowering:
    """As `quantize_and_dequantize_v2`, half to even; `num_bits` is an operand in TensorFlow and a static integer here.

    Args:
        input: a float tensor, any shape.
        input_min, input_max: the range if `range_given`: scalars (or one element) for axis -1, else vectors of that
            axis' length.
        num_bits: 1 to 61, or to 62 if not signed; an integer or a scalar array with a known value.
        signed_input, range_given, narrow_range, axis: see `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: `axis` or `num_bits` out of range, bounds of the wrong shape, or, with axis -1,
            a bound that is NaN or a minimum above its maximum.
    Source: TensorFlow `QuantizeAndDequantizeV3`.
    """
    if range_given and axis == -1:  # TensorFlow takes any tensor of one element here
        input_min, input_max = (
            spec._replace(shape=()) if isinstance(spec, TensorSpec) and spec.size == 1 else spec
            for spec in (input_min, input_max)
        )
    return _forward(
        input, input_min, input_max, signed_input, num_bits, range_given, "HALF_TO_EVEN", narrow_range, axis
    )


@operator("QuantizeAndDequantizeV4", ("output",), reuses=("input",))
def quantize_and_dequantize_v4(
    input: Tensor,
    input_min: Range,
    input_max: Range,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: RoundMode = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: int = -1,
) -> Lowering:
    """`quantize_and_dequantize_v2` with a gradient that is zero outside `[input_min, input_max]`.

    As in TensorFlow the gradient uses these two bounds even when `range_given` is False;
    `quantization.quantize_and_dequantize_v2` passes the whole gradient in that case.

    Args:
        input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range, axis: see
            `quantize_and_dequantize_v2`.
    Returns:
        output: like `input`.
    Raises:
        ValueError: as `quantize_and_dequantize_v2`.
    Source: TensorFlow `QuantizeAndDequantizeV4`.
    """
    return _forward(input, input_min, input_max, signed_input, num_bits, range_given, round_mode, narrow_range, axis)


@operator(
    "QuantizeAndDequantizeV4Grad",
    ("input_backprop", "input_min_backprop", "input_max_backprop"),
    reuses=("gradients", "input"),
)
def quantize_and_dequantize_v4_grad(
    gradients: Tensor, input: Tensor, input_min: Range, input_max: Range, axis: int = -1
) -> Lowering:
    """Gradient of `quantize_and_dequantize_v4`.

    Args:
        gradients: a float tensor, the incoming gradient of the output; same shape as `input`.
        input, input_min, input_max, axis: as passed to `quantize_and_dequantize_v4`.
    Returns:
        input_backprop: like `input`; `gradients` where `input_min <= input <= input_max`, times 0 elsewhere.
        input_min_backprop, input_max_backprop: zeros, like the bounds.
    Raises:
        ValueError: shapes differ, bounds of the wrong shape, `axis` out of range. TypeError: dtypes differ.
    Source: TensorFlow `QuantizeAndDequantizeV4Grad`.
    """
    check_dtypes(input=input, gradients=gradients)
    _check_bound_dtypes(input, input_min=input_min, input_max=input_max)
    check_same_shape(gradients=gradients, input=input)
    slices = _slices(input, axis)
    _check_bounds(input, axis, input_min=input_min, input_max=input_max)
    return Lowering((input, input_min, input_max), "quantize_and_dequantize_v4_grad", slices)


for _op in (quantize_and_dequantize_v2, quantize_and_dequantize_v3, quantize_and_dequantize_v4):
    _op.refuses(
        "Invalid range: input_min must be at most input_max, got {input_min} and {input_max}",
        range_given=True,
        axis=-1,
    )


@quantize_and_dequantize.gradient(keeps=())
def _(gradients, operands, results, attributes):
    return gradients


@quantize_and_dequantize_v2.gradient(keeps=())
@quantize_and_dequantize_v3.gradient(keeps=())
def _(gradients, operands, results, attributes):
    return *gradients, None, None


@quantize_and_dequantize_v4.gradient
def _(gradients, operands, results, attributes):
    _, input_min, _ = operands
    # Bounds that are not used may be scalars although there is an axis; then they mask the tensor as a whole.
    axis = attributes["axis"] if len(input_min.shape) else -1
    return quantize_and_dequantize_v4_grad(*gradients, *operands, axis=axis)


@quantize_and_dequantize_v4_grad.gradient(keeps=("input", "input_min", "input_max"))
def _(gradients, operands, results, attributes):
    # Linear in its first operand with a diagonal matrix, so it is its own transpose; the bounds' gradients are
    # constant.
    return quantize_and_dequantize_v4_grad(gradients[0], *operands[1:], **attributes)[0], None, None, None


# What the dimensions mean: elements are independent once their range is known; slices always are.


def _axes(op: Operator) -> None:
    @op.axes
    def _(**arguments: Any) -> Axes:
        input, axis = arguments["input"], arguments.get("axis", -1)
        letters = letters_of(input)
        slice = letters[axis : axis + 1] if axis >= 0 else ""
        from_data = not arguments.get("range_given", True)
        # A new dimension in front would be another axis, and to data that make their own range not just more of them.
        tensor = letters if from_data or slice else "." + letters

        def meaning(name: str) -> str:
            if name in ("input", "output", "gradients", "input_backprop"):
                return tensor
            bound = arguments[name.removesuffix("_backprop")]
            return slice if bound.shape == input.shape[axis : axis + 1] and slice else "?" * bound.rank

        return Axes(
            tuple(map(meaning, op.operands)),
            tuple(map(meaning, op.results)),
            ("",) * len(op.results),
            whole="?" + (letters.replace(slice, "") if from_data and slice else letters if from_data else ""),
        )


for _op in (
    quantize_and_dequantize,
    quantize_and_dequantize_v2,
    quantize_and_dequantize_v3,
    quantize_and_dequantize_v4,
    quantize_and_dequantize_v4_grad,
):
    _axes(_op)
