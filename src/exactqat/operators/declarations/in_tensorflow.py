# SPDX-License-Identifier: Apache-2.0
"""Which calls TensorFlow's own operators handle: as documented, on every machine, without uninitialized memory. Calls
that they refuse, ignore or crash on are excluded. docs/decisions/tensorflow.md explains why.

Determined with tests/operators/test_tensorflow.py, which compares both paths on all cases, and the notes in
docs/differences.toml.
"""

from typing import Any

from exactqat.operators.declarations import depthwise_conv2d, fake_quant, fused_batch_norm, quantize_and_dequantize
from exactqat.operators.declarations.op import Operator
from exactqat.operators.declarations.specification import InTensorFlow, TensorSpec

# Its gradient operators of these families have no gradients of their own.


def _fake_quant(op: Operator, highest_rank: float) -> None:
    @op.in_tensorflow
    def _(results: tuple[TensorSpec, ...], **call: Any) -> InTensorFlow | None:
        inputs = call["inputs"]
        fits = inputs.dtype == "float32" and inputs.rank <= highest_rank
        return InTensorFlow(gradients=False) if fits else None


for _op, _highest_rank in (
    (fake_quant.fake_quant_with_min_max_args, float("inf")),
    (fake_quant.fake_quant_with_min_max_args_gradient, 8),
    (fake_quant.fake_quant_with_min_max_vars, float("inf")),
    (fake_quant.fake_quant_with_min_max_vars_gradient, float("inf")),
    (fake_quant.fake_quant_with_min_max_vars_per_channel, float("inf")),
    (fake_quant.fake_quant_with_min_max_vars_per_channel_gradient, 4),  # so in graphs
):
    _fake_quant(_op, _highest_rank)


def _quantize_and_dequantize(op: Operator, gradients: bool, given_along_axis: bool) -> None:
    @op.in_tensorflow
    def _(results: tuple[TensorSpec, ...], **call: Any) -> InTensorFlow | None:
        input, axis = call["input"], call["axis"]
        has_range = call.get("range_given", True)
        bound = TensorSpec(() if axis == -1 else (input.shape[axis],), input.dtype)
        # In graphs it looks at the shapes of bounds that are not used, too.
        fits = input.dtype in ("float32", "float64") and call["input_min"] == call["input_max"] == bound
        if not fits or not (given_along_axis or axis == -1 or not has_range):
            return None
        if has_range:
            return InTensorFlow(gradients)
        return InTensorFlow(False, nan_over=tuple(i for i in range(input.rank) if i != axis))


_quantize_and_dequantize(quantize_and_dequantize.quantize_and_dequantize_v2, True, False)
_quantize_and_dequantize(quantize_and_dequantize.quantize_and_dequantize_v3, True, True)
_quantize_and_dequantize(quantize_and_dequantize.quantize_and_dequantize_v4, False, False)
_quantize_and_dequantize(quantize_and_dequantize.quantize_and_dequantize_v4_grad, False, True)


# In inference it has no gradients for the statistics; those of its gradient operators are right once, but take the mean
# in the variance for a constant when they are differentiated again.


def _images(x: TensorSpec, data_format: str, first_version: bool) -> bool | None:
    """Whether every build takes them; None if none does."""
    if x.size == 0 or x.dtype not in (("float32",) if first_version else ("float16", "bfloat16", "float32")):
        return None
    return x.rank == len(data_format) and not data_format.startswith("NC")


def _fused_batch_norm(op: Operator) -> None:
    @op.in_tensorflow
    def _(results: tuple[TensorSpec, ...], **call: Any) -> InTensorFlow | None:
        x, scale, is_training = call["x"], call["scale"], call["is_training"]
        everywhere = _images(x, call["data_format"], op is fused_batch_norm.fused_batch_norm)
        lengths = ((0,), scale.shape)
        if everywhere is None or call["mean"].shape not in lengths or call["variance"].shape not in lengths:
            return None
        if is_training:
            return InTensorFlow(False, everywhere)
        return InTensorFlow(False, everywhere, {"reserve_space_1": "mean", "reserve_space_2": "variance"})


def _fused_batch_norm_grad(op: Operator) -> None:
    @op.in_tensorflow
    def _(results: tuple[TensorSpec, ...], **call: Any) -> InTensorFlow | None:
        everywhere = _images(call["x"], call["data_format"], op is fused_batch_norm.fused_batch_norm_grad)
        return None if everywhere is None else InTensorFlow(False, everywhere, opaque=("reserve_space_3",))


_fused_batch_norm(fused_batch_norm.fused_batch_norm)
_fused_batch_norm(fused_batch_norm.fused_batch_norm_v2)
_fused_batch_norm(fused_batch_norm.fused_batch_norm_v3)
_fused_batch_norm_grad(fused_batch_norm.fused_batch_norm_grad)
_fused_batch_norm_grad(fused_batch_norm.fused_batch_norm_grad_v2)
_fused_batch_norm_grad(fused_batch_norm.fused_batch_norm_grad_v3)


@depthwise_conv2d.depthwise_conv2d_native.in_tensorflow
@depthwise_conv2d.depthwise_conv2d_native_backprop_input.in_tensorflow
@depthwise_conv2d.depthwise_conv2d_native_backprop_filter.in_tensorflow
def _depthwise_conv2d(results: tuple[TensorSpec, ...], **call: Any) -> InTensorFlow | None:
    arrays = [*results, *(value for value in call.values() if isinstance(value, TensorSpec))]
    sizes = [size for array in arrays for size in array.shape] + [*call.get("filter_sizes", ())]
    # Nothing to sum is an error or uninitialized memory in some kernels; the gradients ignore dilations.
    if not all(sizes) or set(call["dilations"]) != {1}:
        return None
    height, width = (call["strides"][call["data_format"].index(letter)] for letter in "HW")
    return InTensorFlow(True, everywhere=call["data_format"] == "NHWC" and height == width)
