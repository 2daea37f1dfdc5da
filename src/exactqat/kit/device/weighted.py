# SPDX-License-Identifier: Apache-2.0
"""What all operators with a constant filter and bias have in common: their constants, their checks, their rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from .arithmetic import (
    Arrays,
    Tensors,
    activate,
    bounds,
    centered,
    finish,
    fixed_point,
    multiply_fixed_point,
    multiply_half_up,
    multiply_wide,
    scale_of,
    zero_point_of,
)
from .blocks import blocks, repeated, rows_of_block, scratch, share, threads
from .contexts import GraphBuilder, NetworkContext, OnnxWriter, PlanContext
from .operator import (
    FLOAT,
    Attributes,
    Call,
    DeviceOperator,
    FileOperator,
    Operator,
    Refusal,
    ScaleLimits,
    Unreadable,
    need,
)
from .primitives import NUMPY
from .profile import Profile
from .real import real_numbers
from .stated_arithmetic import Arithmetic
from .tensor import INDICES, INT4, INT8_MIN, Quantization, Tensor, code_range

# What filters that hold -128 are measured as.
FULL_RANGE = "full_range"
# What operators with an int32 bias beside int16 activations are measured as, besides.
SHORT_BIAS = "int32_bias"
# The largest code of a bias; of int64, what kernels' sums of 48 bits hold.
LARGEST_BIAS = {"int32": 2**31 - 1, "int64": 2**47}
# What kernels multiply sums by is less.
HIGHEST_MULTIPLIER = 256


def has_short_bias(inputs: Tensors) -> bool:
    """Whether a bias in int32 is added to products of int16, as files with a `quantized_bias_type` have it."""
    return inputs[0].dtype == "int16" and inputs[2].dtype == "int32"


def bias_option(inputs: Tensors) -> dict[str, Any]:
    """What an options table says of a bias that is not in its usual dtype."""
    return {"quantizedBiasType": ("TensorType", "INT32")} if has_short_bias(inputs) else {}


def bias_dtype(input: Tensor) -> str:
    """What the bias is stored in, by what the input is."""
    return {"int16": "int64", FLOAT: FLOAT}.get(input.dtype, "int32")


class Weighted(DeviceOperator):
    """Operands: an activation, a filter (int8, symmetric, per channel or per tensor), a bias (int32; with an int16
    activation int64).

    Training makes narrow filters, -127..127. Those of others' files may hold -128, which kernels need not survive: they
    are measured under a name of their own.

    Attributes:
        filter_axis: the axis of the filter that holds the output channels.
        reads_long_biases: TFLite-Micro's kernel takes any bias beside int16 activations for int64.
        names_bias_dtype: its options table says what a bias beside int16 activations is stored in.
        plan_axis: that of the weight of a plan's step.
    """

    operands = (3, 3)
    dtypes = ("int8", "int16")
    floats = True
    weights = (1, 2)
    filter_axis: ClassVar[int] = 0
    plan_axis: ClassVar[int] = 0
    reads_long_biases: ClassVar[bool] = False
    names_bias_dtype: ClassVar[bool] = True
    asks = (("rounding",), ("channels",), ("multiplier",), ("accumulator",))
    mechanisms = {
        "delegates": "two roundings: XNNPACK multiplies the sum by a float32 scale and rounds once; the built-in "
        "kernels multiply by a 31-bit integer and shift, and round each time",
        "delegates:ties": "half to even or away from zero: the results lie exactly half way between two codes, where "
        "XNNPACK takes the even one and the built-in kernels the one away from zero",
    }

    def build(  # type: ignore[override]
        self,
        builder: GraphBuilder,
        input: str,
        filter: np.ndarray,
        filter_scale: np.ndarray,
        bias: np.ndarray,
        output: Quantization | Sequence[Quantization],
        *,
        name: str,
        zero_point: int | None = None,
        **attributes: object,
    ) -> str:
        """filter: int8 codes in the shape of the operator's filter; filter_scale: [1] or [channels]; bias: integers
        [channels]; then the result's Quantization. The scale of the bias follows.

        zero_point: of a filter as a file holds it, which may have codes of -128.
        """
        dtype, widest = bias_dtype(builder.tensor(input)), 127 if zero_point is None else 128
        for what, codes, bound in (("filter", filter, widest), ("bias", bias, LARGEST_BIAS[dtype])):
            values = np.asarray(codes)
            whole = values.dtype.kind in "iu" or bool(np.all(values == np.rint(values)))
            need(
                whole and bool(-bound <= values.min(initial=0) and values.max(initial=0) <= bound),
                f"{self.kind} {name!r}: {what} codes must be integers within -{bound}..{bound}",
            )
        filter_scale = np.atleast_1d(np.asarray(filter_scale, np.float32))
        # One scale for all channels is stored per tensor: kernels then take it as such.
        axis = self.filter_axis if filter_scale.size > 1 else None
        bias_scale = builder.tensor(input).quantization.scale * filter_scale
        bias_quantization = Quantization(bias_scale, np.zeros(1), None if axis is None else 0)
        grid = Quantization(filter_scale, np.full(1, zero_point or 0), axis)
        operands = [
            input,
            builder.constant(f"{name}/filter", np.asarray(filter, np.int8), grid),
            builder.bias(f"{name}/bias", np.asarray(bias, dtype), bias_quantization),
        ]
        shifted = bool(zero_point)
        return str(builder.operator(self.kind, operands, output, name=name, unsigned=shifted, **attributes))

    def plan_filter(self, codes: np.ndarray) -> np.ndarray:
        """The inverse of `device_filter`."""
        return codes

    def restore(self, context: PlanContext, operator: Operator) -> None:
        context.weighted(operator)

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        """The filter with its axes as a network has them."""
        x, filter, bias = context.operands(operator)
        weight = context.weight(filter, lambda data: np.moveaxis(self.plan_filter(data), 0, self.plan_axis))
        attributes = self.float_attributes(context.shapes(operator), operator.attributes)
        (shape,) = context.results(operator)
        context.give(operator, context.step(self.float_kind, [x, weight, bias], shape, **attributes))

    def read_operands(self, read: FileOperator) -> tuple[Tensor, ...]:
        """A bias that a file leaves out is 0."""
        input, filter = read.operand(0), read.operand(1)
        if len(read.inputs) > 2 and read.inputs[2] is not None:
            bias = read.inputs[2]
            if bias.dtype == FLOAT != input.dtype:
                # LiteRT rejects such a file; TFLite-Micro takes the bytes for integers.
                raise Unreadable(f"a bias in {FLOAT} beside an input in {input.dtype}, which no runtime adds")
            return input, filter, bias
        if not self.filter_axis < len(filter.shape):
            raise Unreadable(f"the filter's shape is {filter.shape}")
        dtype = bias_dtype(input)
        if dtype == "int64" and self.names_bias_dtype:  # kernels sum in 32 bits where it is said, also without a bias
            dtype = "int32" if read.word("quantizedBiasType", "TensorType") == "INT32" else dtype
        codes = np.zeros(filter.shape[self.filter_axis], dtype)
        if input.dtype == FLOAT:
            return input, filter, Tensor(f"{read.output.name}/bias", codes.shape, FLOAT, INDICES, codes)
        axis = None if filter.quantization.axis is None else 0
        scale = input.quantization.scale[0] * filter.quantization.scale
        grid = Quantization(scale, np.zeros(1), axis)
        return input, filter, Tensor(f"{read.output.name}/bias", codes.shape, str(codes.dtype), grid, codes)

    def measured_as(self, inputs: Tensors, output: Tensor) -> str:
        name, filter = super().measured_as(inputs, output), inputs[1].data
        if inputs[1].dtype == INT4 and inputs[0].dtype != FLOAT:
            return f"{name}:{INT4}"
        if has_short_bias(inputs):
            return f"{name}:{SHORT_BIAS}"
        full = inputs[0].dtype != FLOAT and filter is not None and np.any(filter == INT8_MIN)
        return f"{name}:{FULL_RANGE}" if full else name

    def multiply_accumulates(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> int:
        return math.prod(output.shape[:-1]) * math.prod(inputs[1].shape)

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits:
        """The filter's scale is one of the operands'. Those of int16 keep sums of up to 4,096 products, times what is
        bounded, within 32 bits: more than that kernels do not hold before they clamp it to 16."""
        return ScaleLimits("product", 2.0**-32, 2.0**-3 if dtypes[0] == "int16" else HIGHEST_MULTIPLIER)

    def check(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> None:
        input, filter, bias = inputs
        need(filter.dtype in ("int8", INT4), f"{filter.name!r} must be a constant of dtype int8")
        wanted = "int32" if has_short_bias(inputs) else bias_dtype(input)
        need(bias.dtype == wanted, f"{bias.name!r} must be a constant of dtype {wanted}, got {bias.dtype}")
        assert filter.data is not None and bias.data is not None
        no_shift = not np.any(filter.quantization.zero_point) and not np.any(bias.quantization.zero_point)
        need(no_shift, "weights and biases have zero point 0")
        axis = self.filter_axis
        fits = filter.quantization.axis in (None, axis)
        need(fits, f"filter channels must be on axis {axis}, got {filter.quantization.axis}")
        bias_scale = input.quantization.scale * filter.quantization.scale
        # Kernels never look at it, and LiteRT takes what is this far off. A bias of zeros, which converters share, is
        # on any scale.
        off = np.abs(bias.quantization.scale - bias_scale) / output.quantization.scale
        need(bool(np.all((off <= 0.02) | (bias.data == 0))), "bias scale must be input scale * filter scale")
        for tensor in (filter, bias):
            # XNNPACK leaves operators with such constants to kernels that round otherwise.
            normal = tensor.quantization.scale >= np.finfo(np.float32).tiny
            need(bool(np.all(normal)), f"{tensor.name!r} must not have a subnormal scale")

        # Of a channel that training killed it can be as small as 1e-30: fixed point makes 0 of it.
        multiplier = (bias_scale / output.quantization.scale).astype(np.float64)
        fits = bool(np.all(multiplier < HIGHEST_MULTIPLIER))  # the sums of int16 are bounded below
        message = f"input scale * filter scale / output scale must be below {HIGHEST_MULTIPLIER} for every channel"
        need(fits, f"{message}, got {multiplier.max():g}")
        # In float64, as a damaged file's bias may leave int64 with what is added to it.
        bound = filter_reach(filter.data, axis, input) + np.abs(bias.data.astype(np.float64))
        # With int16 activations, kernels multiply 64-bit sums by 15 bits.
        bits, word = (31, "int32") if input.dtype == "int8" else (47, "48-bit")
        fits = int(bound.max()) < 2**bits
        need(fits, f"the {word} accumulator can overflow; the bias or the filter is too large")
        # Kernels with int16 activations rescale in 64 bits. Those for int8 shift a sum left by the exponent first, each
        # with another result where that leaves 32 bits.
        factor = multiplier if bits > 31 else np.exp2(np.maximum(np.frexp(multiplier)[1], 0))
        fits = bool(np.all(bound * factor < 2**31))
        need(fits, "the rescaled sum can leave 32 bits; the bias or the filter is too large for the output's scale")

    def exact_steps(self, call: Call) -> np.ndarray | None:
        x = centered(call.codes[0], call.inputs[0]).astype(np.float64)
        sums = self.wide_sums(x, call.codes[1].astype(np.float64), call.output, call.attributes) + call.codes[2]
        return np.asarray(sums * real_multiplier(call.inputs, call.output))

    def takes_four_bits(self, filter: Tensor, profile: Profile) -> bool:
        """Whether the device's runtime runs it with this filter in four bits."""
        return True

    def without_shift(self, inputs: Tensors) -> Tensors:
        """The filter in int16, from real 0."""
        input, filter, bias = inputs
        if filter.data is None or filter.quantization.axis is not None:
            raise Refusal("a filter in uint8 must be a constant with one scale")
        steps = (filter.data.astype(np.int16) - filter.quantization.zero_point.astype(np.int16)).astype(np.int16)
        grid = replace(filter.quantization, zero_point=np.zeros(1))
        return input, replace(filter, data=steps, quantization=grid), bias

    def results(self, call: Call) -> np.ndarray:
        codes, inputs = call.codes, call.inputs
        if call.profile.unsigned:
            inputs = self.without_shift(inputs)
            codes = (codes[0], np.asarray(inputs[1].data), codes[2])
        # XNNPACK leaves filters of four bits to the built-in kernels.
        own = inputs[1].dtype == INT4 and call.profile.delegates
        return super().results(
            Call(
                codes,
                inputs,
                (call.output,),
                call.attributes,
                replace(call.profile, delegates=False) if own else call.profile,
            )
        )

    def float_results(self, call: Call) -> np.ndarray:
        x, filter, bias = (real_numbers(code, tensor) for code, tensor in zip(call.codes, call.inputs, strict=True))
        sums = self.wide_sums(x.astype(np.float64), filter.astype(np.float64), call.output, call.attributes)
        return np.asarray(activate(NUMPY, sums + bias, call.attributes), np.float32)

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray:
        x, filter, bias = centered(call.codes[0], call.inputs[0]), call.codes[1], call.codes[2].astype(np.int64)

        def sums(x: np.ndarray, filter: np.ndarray) -> np.ndarray:
            whole = self.wide_sums(x.astype(np.float64), filter.astype(np.float64), call.output, call.attributes)
            return whole.astype(np.int64)

        in_order, reach = arithmetic.overflow_at == "each", np.abs(filter.astype(np.int64))
        if in_order and not arithmetic.holds(int((sums(np.abs(x), reach) + np.abs(bias)).max())):
            products = (sums(part, tap) for part, tap in self._taps(x, filter))
            total = arithmetic.accumulated(products, np.broadcast_to(bias, sums(x, filter).shape))
        else:
            total = arithmetic.limited(sums(x, filter) + bias)
        filter_scale = call.inputs[1].quantization.scale
        if arithmetic.channels == "first":
            filter_scale = filter_scale[:1]
        factor = arithmetic.factor([scale_of(call.inputs[0]), filter_scale], scale_of(call.output))
        steps = arithmetic.rescale(total, np.broadcast_to(factor, bias.shape), zero_point_of(call.output))
        return finish(steps, call.output, call.attributes, call.profile)

    def _taps(self, x: np.ndarray, filter: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Operands whose sums have one product each, in the order of the filter's axes but that of the results."""
        inner = self.filter_axis != filter.ndim - 1 and x.shape[-1] == filter.shape[-1]
        sizes = [1 if axis == self.filter_axis or (inner and axis == filter.ndim - 1) else size
                 for axis, size in enumerate(filter.shape)]  # fmt: skip
        for tap in np.ndindex(*sizes):
            at = tuple(
                slice(None) if size == 1 else slice(place, place + 1) for place, size in zip(tap, sizes, strict=True)
            )
            one = np.zeros_like(filter)
            one[at] = filter[at]
            for channel in range(filter.shape[-1]) if inner else (None,):
                cut = slice(None) if channel is None else slice(channel, channel + 1)
                yield x[..., cut], one[..., cut]

    def wide_integers(self, call: Call) -> np.ndarray:
        dtype = np.float32 if call.profile.sums_in_float32 else np.float64
        x, filter = (codes.astype(dtype) for codes in call.codes[:2])
        sums = self.wide_sums(x, filter, call.output, call.attributes)
        if call.profile.sums_in_float32:
            multiplier = real_multiplier(call.inputs, call.output)
            sums *= multiplier.astype(np.float32)
            sums += (call.codes[2] * multiplier).astype(np.float32)
            np.rint(sums, out=sums)
            return sums.clip(*bounds(call.output, call.attributes, call.profile), out=sums).astype(call.output.dtype)
        # Whole numbers below 2**53, which float64 adds in any order.
        bias, short = call.codes[2], has_short_bias(call.inputs)
        if short and self.reads_long_biases and call.profile.reads_long_biases:
            # Two of them at once, and what lies beyond them for the rest: nobody knows what, and nothing is claimed.
            bias, short = np.zeros(2 * len(bias), np.int32), False
            bias[: len(call.codes[2])] = call.codes[2]
            bias = bias.view(np.int64)
        steps = (self.short_steps if short else self.wide_steps)(
            sums.astype(np.int64) + bias, call.inputs, call.output, call.profile
        )
        return np.clip(steps, *bounds(call.output, call.attributes, call.profile)).astype(call.output.dtype)

    def short_steps(self, accumulator: np.ndarray, inputs: Tensors, output: Tensor, profile: Profile) -> np.ndarray:
        """Likewise from 32-bit sums, as those of a bias in int32 are: LiteRT's optimized kernels, which know no groups,
        round halves up."""
        multiplier = fixed_point(real_multiplier(inputs, output))
        groups = inputs[0].shape[-1] != inputs[1].shape[-1]
        multiply = multiply_half_up if profile.optimized and not groups else multiply_fixed_point
        return multiply(accumulator, *multiplier)

    def wide_steps(self, accumulator: np.ndarray, inputs: Tensors, output: Tensor, profile: Profile) -> np.ndarray:
        """Steps of the result from 64-bit sums."""
        return multiply_wide(accumulator, *fixed_point(real_multiplier(inputs, output)))

    def wide_sums(self, x: np.ndarray, filter: np.ndarray, output: Tensor, attributes: Attributes) -> np.ndarray:
        """Sums of products of an input and a filter, [..., channels]; the zero point of int16 is 0."""
        raise NotImplementedError(f"{self.kind} has no int16 form")

    def requantize(
        self,
        sums: np.ndarray,
        codes: Arrays,
        inputs: Tensors,
        output: Tensor,
        attributes: Attributes,
        profile: Profile,
    ) -> np.ndarray:
        """Codes of the result from the sums of products of *codes*: the input's zero point is still in them."""
        filter, bias = codes[1:]
        axes = tuple(axis for axis in range(filter.ndim) if axis != self.filter_axis)
        added = bias.astype(np.int64) - zero_point_of(inputs[0]) * filter.sum(axes, dtype=np.int64)
        result = np.empty(sums.shape, output.dtype)
        flat, into = (array.reshape(-1, sums.shape[-1]) for array in (sums, result))
        rows = rows_of_block(sums.shape[-1], len(flat))
        requantization = Requantization(self, inputs, output, attributes, profile, rows)
        for start in range(0, len(flat), rows):
            block = flat[start : start + rows]
            requantization.store(block.astype(np.float64) + added, into[start : start + rows])
        return result

    def store_products(
        self,
        met: np.ndarray,
        result: np.ndarray,
        codes: Arrays,
        inputs: Tensors,
        output: Tensor,
        attributes: Attributes,
        profile: Profile,
        channels: slice = slice(None),
    ) -> None:
        """Writes into `result` [batch, height, width, channels] what the filter's channels make of the codes that they
        meet at each place: `met` [batch, height, width, ...]. All steps are done with one block of places after the
        other."""
        filter = codes[1][channels].reshape(result.shape[-1], -1)
        places = met.shape[:3]
        total = math.prod(places)
        # BLAS rearranges the filter for every block, and a line of places is in one.
        fewest = min(FEWEST_IN_A_BLOCK, max(total // threads(), FEWEST_FOR_A_THREAD), total)
        rows = rows_of_block(max(filter.shape[1] + 1, len(filter)), total, max(fewest, places[2]))
        largest = -int(np.iinfo(met.dtype).min)
        products = Products(filter, codes[2][channels], zero_point_of(inputs[0]), largest)
        requantization = Requantization(self, inputs, output, attributes, profile, rows, channels)

        def work(todo: Sequence[tuple[slice, slice]]) -> None:
            values, sums = products.buffers(rows)
            for block in todo:
                part = met[block]
                count = math.prod(part.shape[:3])
                values[:count, :-1].reshape(part.shape)[...] = part
                requantization.store(products.sums(values[:count], sums[:count]), result[block])

        share(work, blocks(places, rows))

    def fixed_point_steps(
        self, multiplier: np.ndarray, rows: int, profile: Profile
    ) -> Callable[[np.ndarray], np.ndarray]:
        """From int64 accumulators [at most rows, channels] to steps from the zero point, where multipliers are 32-bit
        fixed-point numbers: of float64 ones [channels]."""
        numbers = zip(("significand", "exponent"), fixed_point(multiplier), strict=True)
        significand, exponent = (repeated(name, part, rows) for name, part in numbers)
        return lambda whole: multiply_fixed_point(whole, significand[: len(whole)], exponent[: len(whole)])

    def rounding(self, profile: Profile) -> str:
        """How sums become steps of the result: `requantize` in a word of `ROUNDINGS`, for those who sum elsewhere."""
        return "float32" if profile.scales_sums_in_float32 else "fixed_point"

    def onnx_weights(
        self, writer: OnnxWriter, operator: Operator, axes: Sequence[int], shape: Sequence[int], channel_axis: int = 0
    ) -> list[str]:
        """The constants as real numbers, the filter's axes in ONNX's order, its channels at `channel_axis`."""
        filter, bias = (writer.graph.tensors[name] for name in operator.inputs[1:])
        assert filter.data is not None and bias.data is not None
        single = filter.quantization.axis is None
        return [
            writer.dequantized(
                filter,
                filter.data.transpose(axes).reshape(shape),
                None if single else channel_axis,
                not operator.unsigned,
            ),
            writer.dequantized(bias, bias.data, None if single else 0, True),
        ]


# Of rows, for a product that costs more than its preparation.
FEWEST_IN_A_BLOCK, FEWEST_FOR_A_THREAD = 256, 64
# Below, float64 is the faster way to exact sums.
FEWEST_IN_A_PART = 256

# The sum times input scale * filter scale / output scale, rounded:
# - float32: all in float32, in this order; the product to the nearest integer, ties to even;
# - float64: all in float64; ties away from zero;
# - fixed_point: by TensorFlow Lite's 31-bit multiplier of the float64 quotient, see `arithmetic.multiply_fixed_point`.
ROUNDINGS = ("float32", "float64", "fixed_point")


class Requantization:
    """From accumulators [rows, channels] to codes, a block of at most `rows` at a time.

    Accumulators are integers, in float32 where it holds them exactly.
    """

    def __init__(
        self,
        operator: Weighted,
        inputs: Tensors,
        output: Tensor,
        attributes: Attributes,
        profile: Profile,
        rows: int,
        channels: slice = slice(None),
    ) -> None:
        self.zero_point = np.float32(zero_point_of(output))
        self.bounds = [np.float32(bound) for bound in bounds(output, attributes, profile)]
        self.steps = None
        if profile.scales_sums_in_float32:
            input_scale, filter_scale = (tensor.quantization.scale for tensor in inputs[:2])
            multiplier = np.broadcast_to(input_scale * filter_scale / scale_of(output), inputs[2].shape)
            self.multiplier = repeated("multiplier", multiplier[channels], rows)
        else:
            self.steps = operator.fixed_point_steps(real_multiplier(inputs, output)[channels], rows, profile)

    def store(self, accumulators: np.ndarray, result: np.ndarray) -> None:
        """Writes the codes into `result`; the accumulators may be overwritten."""
        if self.steps is None:
            real = accumulators.astype(np.float32, copy=False)
            np.multiply(real, self.multiplier[: len(real)], out=real)
            np.rint(real, out=real)
        else:
            real = self.steps(accumulators.astype(np.int64)).astype(np.float32)
        if self.zero_point:
            np.add(real, self.zero_point, out=real)
        real.clip(*self.bounds, out=real)
        np.copyto(result, real.reshape(result.shape), casting="unsafe")


class Products:
    """Sums of products of codes with the rows of a filter [channels, k], and a number added to each: exact.

    Products and sums of these integers are exact in float32 below 2**24, in any order, and BLAS is the fast way to form
    them. Where a sum can be larger, parts of it are formed so and added in float64.

    Args:
        filter: int8.
        bias: integers [channels].
        zero_point: of the codes, which they are rid of.
        largest: the largest magnitude that a code can have.
    """

    def __init__(self, filter: np.ndarray, bias: np.ndarray, zero_point: int, largest: int) -> None:
        channels, depth = filter.shape
        bound = -INT8_MIN if filter.dtype == np.int8 else 2 * -INT8_MIN  # of uint8, from real 0
        width = (2**24 - 1) // (bound * largest)  # of a part that is exact whatever the filter
        dtype = np.float32 if width >= FEWEST_IN_A_PART else np.float64
        self.matrix = scratch("matrix", (channels, depth + 1), dtype)
        weights = self.matrix[:, :-1]
        weights[...] = filter
        self.added = bias.astype(np.float64) - zero_point * row_sums(weights)
        most = np.abs(self.added).max(initial=0)
        self.whole = dtype == np.float64 or most + depth * bound * largest < 2**24
        if not self.whole:
            reach = largest * row_sums(np.abs(weights)) + np.abs(self.added)
            self.whole = bool(reach.max() < 2**24)
        self.edges = [*range(0, depth, width), depth]
        # What is added comes with a last code, which is always 1.
        self.matrix[:, -1] = self.added

    def buffers(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """For `rows` codes [rows, k + 1], whose last is 1, and their sums [rows, channels]."""
        channels, depth = self.matrix.shape
        codes = scratch("codes", (rows, depth), self.matrix.dtype)
        codes[:, -1] = 1
        return codes, scratch("sums", (rows, channels), self.matrix.dtype)

    def sums(self, codes: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Of codes, in `out` where it can hold them; both are `buffers`."""
        if self.whole:
            return np.matmul(codes, self.matrix.T, out=out)
        total = np.broadcast_to(self.added, out.shape).copy()
        for start, end in itertools.pairwise(self.edges):
            total += np.matmul(codes[:, start:end], self.matrix[:, start:end].T, out=out)
        return total


def row_sums(weights: np.ndarray) -> np.ndarray:
    """float64 [rows] of weights [rows, values]; below 2**24, or 128 times as much would not fit into an accumulator."""
    return np.asarray((weights @ np.ones(weights.shape[1], weights.dtype)).astype(np.float64))


def filter_reach(filter: np.ndarray, axis: int, input: Tensor) -> np.ndarray:
    """The largest magnitude that each channel's sum of products can have."""
    zero_point = zero_point_of(input)
    lowest, highest = code_range(input)
    reach = max(highest - zero_point, zero_point - lowest)
    other_axes = tuple(i for i in range(filter.ndim) if i != axis)
    magnitudes: np.ndarray = np.abs(filter.astype(np.int64)).sum(other_axes) * reach
    return magnitudes


def real_multiplier(inputs: Tensors, output: Tensor) -> np.ndarray:
    """float64 input scale * filter scale / output scale, [channels]."""
    input_scale, filter_scale = (tensor.quantization.scale.astype(np.float64) for tensor in inputs[:2])
    multiplier = input_scale * filter_scale / float(scale_of(output))
    return np.broadcast_to(multiplier, inputs[2].shape)
