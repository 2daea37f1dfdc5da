# SPDX-License-Identifier: Apache-2.0
# Made by docs/stubs.py from the declarations in operators/; do not edit.

from typing import Any, Literal, SupportsIndex, overload

import jax
import torch

from exactqat.raw_ops import (
    _FakeQuantWithMinMaxVarsGradientResults,
    _FakeQuantWithMinMaxVarsPerChannelGradientResults,
    _Float,
    _Numbers,
    _NumPy,
    _TensorFlow,
)

@overload
def fake_quant_with_min_max_args(
    inputs: _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Quantize and dequantize a tensor with one fixed range.

    The range is first moved ("nudged") so that zero is one of its `2**num_bits` steps (one step fewer with
    `narrow_range`); values outside it are clamped to its ends, values inside it are rounded to the nearest step, ties
    upwards. NaN stays NaN.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range; `min < max`. Values beyond the dtype are infinite, as in TensorFlow, and a non-finite
            range gives NaN.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code, so that a symmetric range has symmetric codes.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgs`.
    """

@overload
def fake_quant_with_min_max_args(
    inputs: torch.Tensor,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Quantize and dequantize a tensor with one fixed range.

    The range is first moved ("nudged") so that zero is one of its `2**num_bits` steps (one step fewer with
    `narrow_range`); values outside it are clamped to its ends, values inside it are rounded to the nearest step, ties
    upwards. NaN stays NaN.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range; `min < max`. Values beyond the dtype are infinite, as in TensorFlow, and a non-finite
            range gives NaN.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code, so that a symmetric range has symmetric codes.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgs`.
    """

@overload
def fake_quant_with_min_max_args(
    inputs: jax.Array,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Quantize and dequantize a tensor with one fixed range.

    The range is first moved ("nudged") so that zero is one of its `2**num_bits` steps (one step fewer with
    `narrow_range`); values outside it are clamped to its ends, values inside it are rounded to the nearest step, ties
    upwards. NaN stays NaN.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range; `min < max`. Values beyond the dtype are infinite, as in TensorFlow, and a non-finite
            range gives NaN.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code, so that a symmetric range has symmetric codes.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgs`.
    """

@overload
def fake_quant_with_min_max_args(
    inputs: _TensorFlow,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Any:
    """Quantize and dequantize a tensor with one fixed range.

    The range is first moved ("nudged") so that zero is one of its `2**num_bits` steps (one step fewer with
    `narrow_range`); values outside it are clamped to its ends, values inside it are rounded to the nearest step, ties
    upwards. NaN stays NaN.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range; `min < max`. Values beyond the dtype are infinite, as in TensorFlow, and a non-finite
            range gives NaN.
        num_bits: 2 to 16.
        narrow_range: omit the lowest code, so that a symmetric range has symmetric codes.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgs`.
    """

@overload
def fake_quant_with_min_max_args_gradient(
    gradients: _NumPy | _Numbers,
    inputs: _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Gradient of `fake_quant_with_min_max_args`: `gradients` where `inputs` lie in the nudged range, times 0
    elsewhere.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_args`.
    Returns:
        backprops: like `inputs`. The nudged range includes both ends; the product with 0 keeps NaN, infinity and the
            sign of zero.
    Raises:
        ValueError: shapes differ, `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgsGradient`.
    """

@overload
def fake_quant_with_min_max_args_gradient(
    gradients: torch.Tensor,
    inputs: torch.Tensor | _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Gradient of `fake_quant_with_min_max_args`: `gradients` where `inputs` lie in the nudged range, times 0
    elsewhere.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_args`.
    Returns:
        backprops: like `inputs`. The nudged range includes both ends; the product with 0 keeps NaN, infinity and the
            sign of zero.
    Raises:
        ValueError: shapes differ, `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgsGradient`.
    """

@overload
def fake_quant_with_min_max_args_gradient(
    gradients: jax.Array,
    inputs: jax.Array | _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Gradient of `fake_quant_with_min_max_args`: `gradients` where `inputs` lie in the nudged range, times 0
    elsewhere.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_args`.
    Returns:
        backprops: like `inputs`. The nudged range includes both ends; the product with 0 keeps NaN, infinity and the
            sign of zero.
    Raises:
        ValueError: shapes differ, `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgsGradient`.
    """

@overload
def fake_quant_with_min_max_args_gradient(
    gradients: _TensorFlow,
    inputs: _TensorFlow | _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Any:
    """Gradient of `fake_quant_with_min_max_args`: `gradients` where `inputs` lie in the nudged range, times 0
    elsewhere.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_args`.
    Returns:
        backprops: like `inputs`. The nudged range includes both ends; the product with 0 keeps NaN, infinity and the
            sign of zero.
    Raises:
        ValueError: shapes differ, `num_bits` outside 2..16, or not `min < max`.
    Source: TensorFlow `FakeQuantWithMinMaxArgsGradient`.
    """

@overload
def fake_quant_with_min_max_vars(
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Quantize and dequantize a tensor with one trainable range.

    As `fake_quant_with_min_max_args`, but the step is computed by a true division, so a few values in a million round
    the other way. With `min == max == 0` every output is 0, also for NaN; any other `min == max` and every non-finite
    range give NaN; `min > max` gives a constant.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range, scalars of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVars`.
    """

@overload
def fake_quant_with_min_max_vars(
    inputs: torch.Tensor,
    min: torch.Tensor | _NumPy | _Numbers,
    max: torch.Tensor | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Quantize and dequantize a tensor with one trainable range.

    As `fake_quant_with_min_max_args`, but the step is computed by a true division, so a few values in a million round
    the other way. With `min == max == 0` every output is 0, also for NaN; any other `min == max` and every non-finite
    range give NaN; `min > max` gives a constant.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range, scalars of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVars`.
    """

@overload
def fake_quant_with_min_max_vars(
    inputs: jax.Array,
    min: jax.Array | _NumPy | _Numbers,
    max: jax.Array | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Quantize and dequantize a tensor with one trainable range.

    As `fake_quant_with_min_max_args`, but the step is computed by a true division, so a few values in a million round
    the other way. With `min == max == 0` every output is 0, also for NaN; any other `min == max` and every non-finite
    range give NaN; `min > max` gives a constant.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range, scalars of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVars`.
    """

@overload
def fake_quant_with_min_max_vars(
    inputs: _TensorFlow,
    min: _TensorFlow | _NumPy | _Numbers,
    max: _TensorFlow | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Any:
    """Quantize and dequantize a tensor with one trainable range.

    As `fake_quant_with_min_max_args`, but the step is computed by a true division, so a few values in a million round
    the other way. With `min == max == 0` every output is 0, also for NaN; any other `min == max` and every non-finite
    range give NaN; `min > max` gives a constant.

    Args:
        inputs: a float tensor, any shape.
        min, max: the range, scalars of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVars`.
    """

@overload
def fake_quant_with_min_max_vars_gradient(
    gradients: _NumPy | _Numbers,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: tuple[_NumPy, _NumPy, _NumPy] | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[_NumPy]:
    """Gradients of `fake_quant_with_min_max_vars` for its inputs and both ends of the range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the nudged range (ends included), times 0 outside.
        backprop_wrt_min: scalar, sum of `gradients` where `inputs` lie below the nudged range.
        backprop_wrt_max: scalar, sum of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums NaN and an infinite gradient the
        sum of the side it is not on. With `min == max == 0` the gradient passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsGradient`.
    """

@overload
def fake_quant_with_min_max_vars_gradient(
    gradients: torch.Tensor,
    inputs: torch.Tensor | _NumPy | _Numbers,
    min: torch.Tensor | _NumPy | _Numbers,
    max: torch.Tensor | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[torch.Tensor]:
    """Gradients of `fake_quant_with_min_max_vars` for its inputs and both ends of the range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the nudged range (ends included), times 0 outside.
        backprop_wrt_min: scalar, sum of `gradients` where `inputs` lie below the nudged range.
        backprop_wrt_max: scalar, sum of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums NaN and an infinite gradient the
        sum of the side it is not on. With `min == max == 0` the gradient passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsGradient`.
    """

@overload
def fake_quant_with_min_max_vars_gradient(
    gradients: jax.Array,
    inputs: jax.Array | _NumPy | _Numbers,
    min: jax.Array | _NumPy | _Numbers,
    max: jax.Array | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[jax.Array]:
    """Gradients of `fake_quant_with_min_max_vars` for its inputs and both ends of the range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the nudged range (ends included), times 0 outside.
        backprop_wrt_min: scalar, sum of `gradients` where `inputs` lie below the nudged range.
        backprop_wrt_max: scalar, sum of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums NaN and an infinite gradient the
        sum of the side it is not on. With `min == max == 0` the gradient passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsGradient`.
    """

@overload
def fake_quant_with_min_max_vars_gradient(
    gradients: _TensorFlow,
    inputs: _TensorFlow | _NumPy | _Numbers,
    min: _TensorFlow | _NumPy | _Numbers,
    max: _TensorFlow | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[Any]:
    """Gradients of `fake_quant_with_min_max_vars` for its inputs and both ends of the range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the nudged range (ends included), times 0 outside.
        backprop_wrt_min: scalar, sum of `gradients` where `inputs` lie below the nudged range.
        backprop_wrt_max: scalar, sum of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums NaN and an infinite gradient the
        sum of the side it is not on. With `min == max == 0` the gradient passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of rank 0, `num_bits` outside 2..16. TypeError: dtypes differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsGradient`.
    """

@overload
def fake_quant_with_min_max_vars_per_channel(
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy:
    """Quantize and dequantize a tensor with one trainable range per channel, the last dimension.

    Each channel behaves as `fake_quant_with_min_max_args` with its own range; ranges of 0 as
    `fake_quant_with_min_max_vars`.

    Args:
        inputs: a float tensor, shape `[..., d]`, any rank from 1.
        min, max: the ranges, shape `[d]`, of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannel`.
    """

@overload
def fake_quant_with_min_max_vars_per_channel(
    inputs: torch.Tensor,
    min: torch.Tensor | _NumPy | _Numbers,
    max: torch.Tensor | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Quantize and dequantize a tensor with one trainable range per channel, the last dimension.

    Each channel behaves as `fake_quant_with_min_max_args` with its own range; ranges of 0 as
    `fake_quant_with_min_max_vars`.

    Args:
        inputs: a float tensor, shape `[..., d]`, any rank from 1.
        min, max: the ranges, shape `[d]`, of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannel`.
    """

@overload
def fake_quant_with_min_max_vars_per_channel(
    inputs: jax.Array,
    min: jax.Array | _NumPy | _Numbers,
    max: jax.Array | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Quantize and dequantize a tensor with one trainable range per channel, the last dimension.

    Each channel behaves as `fake_quant_with_min_max_args` with its own range; ranges of 0 as
    `fake_quant_with_min_max_vars`.

    Args:
        inputs: a float tensor, shape `[..., d]`, any rank from 1.
        min, max: the ranges, shape `[d]`, of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannel`.
    """

@overload
def fake_quant_with_min_max_vars_per_channel(
    inputs: _TensorFlow,
    min: _TensorFlow | _NumPy | _Numbers,
    max: _TensorFlow | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> Any:
    """Quantize and dequantize a tensor with one trainable range per channel, the last dimension.

    Each channel behaves as `fake_quant_with_min_max_args` with its own range; ranges of 0 as
    `fake_quant_with_min_max_vars`.

    Args:
        inputs: a float tensor, shape `[..., d]`, any rank from 1.
        min, max: the ranges, shape `[d]`, of the dtype of `inputs` (float32 if that has 16 bits).
        num_bits: 2 to 16.
        narrow_range: omit the lowest code.
    Returns:
        outputs: like `inputs`.
    Raises:
        ValueError: `inputs` of rank 0, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannel`.
    """

@overload
def fake_quant_with_min_max_vars_per_channel_gradient(
    gradients: _NumPy | _Numbers,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: tuple[_NumPy, _NumPy, _NumPy] | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[_NumPy]:
    """Gradients of `fake_quant_with_min_max_vars_per_channel` for its inputs and both ends of each channel's range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars_per_channel`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the channel's nudged range (ends included), times 0
            outside.
        backprop_wrt_min: shape `[d]`, sums of `gradients` where `inputs` lie below the channel's nudged range.
        backprop_wrt_max: shape `[d]`, sums of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums of its channel NaN and an infinite
        gradient the sum of the side it is not on. Where `min == max == 0` it passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannelGradient`.
    """

@overload
def fake_quant_with_min_max_vars_per_channel_gradient(
    gradients: torch.Tensor,
    inputs: torch.Tensor | _NumPy | _Numbers,
    min: torch.Tensor | _NumPy | _Numbers,
    max: torch.Tensor | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[torch.Tensor]:
    """Gradients of `fake_quant_with_min_max_vars_per_channel` for its inputs and both ends of each channel's range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars_per_channel`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the channel's nudged range (ends included), times 0
            outside.
        backprop_wrt_min: shape `[d]`, sums of `gradients` where `inputs` lie below the channel's nudged range.
        backprop_wrt_max: shape `[d]`, sums of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums of its channel NaN and an infinite
        gradient the sum of the side it is not on. Where `min == max == 0` it passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannelGradient`.
    """

@overload
def fake_quant_with_min_max_vars_per_channel_gradient(
    gradients: jax.Array,
    inputs: jax.Array | _NumPy | _Numbers,
    min: jax.Array | _NumPy | _Numbers,
    max: jax.Array | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[jax.Array]:
    """Gradients of `fake_quant_with_min_max_vars_per_channel` for its inputs and both ends of each channel's range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars_per_channel`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the channel's nudged range (ends included), times 0
            outside.
        backprop_wrt_min: shape `[d]`, sums of `gradients` where `inputs` lie below the channel's nudged range.
        backprop_wrt_max: shape `[d]`, sums of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums of its channel NaN and an infinite
        gradient the sum of the side it is not on. Where `min == max == 0` it passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannelGradient`.
    """

@overload
def fake_quant_with_min_max_vars_per_channel_gradient(
    gradients: _TensorFlow,
    inputs: _TensorFlow | _NumPy | _Numbers,
    min: _TensorFlow | _NumPy | _Numbers,
    max: _TensorFlow | _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[Any]:
    """Gradients of `fake_quant_with_min_max_vars_per_channel` for its inputs and both ends of each channel's range.

    Args:
        gradients: a float tensor, the incoming gradient of the outputs; same shape as `inputs`.
        inputs, min, max, num_bits, narrow_range: as passed to `fake_quant_with_min_max_vars_per_channel`.
    Returns:
        backprops_wrt_input: like `inputs`; `gradients` inside the channel's nudged range (ends included), times 0
            outside.
        backprop_wrt_min: shape `[d]`, sums of `gradients` where `inputs` lie below the channel's nudged range.
        backprop_wrt_max: shape `[d]`, sums of `gradients` where `inputs` lie above it.
        Elements on the other side count as `gradient * 0`, so a NaN makes both sums of its channel NaN and an infinite
        gradient the sum of the side it is not on. Where `min == max == 0` it passes unchanged.
    Raises:
        ValueError: shapes differ, `min` or `max` not of shape `[d]`, `num_bits` outside 2..16. TypeError: dtypes
            differ.
    Source: TensorFlow `FakeQuantWithMinMaxVarsPerChannelGradient`.
    """

@overload
def quantize_and_dequantize(
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
    *,
    out: _NumPy | None = None,
) -> _NumPy:
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

@overload
def quantize_and_dequantize(
    input: torch.Tensor,
    input_min: torch.Tensor | _NumPy | _Numbers,
    input_max: torch.Tensor | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
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

@overload
def quantize_and_dequantize(
    input: jax.Array,
    input_min: jax.Array | _NumPy | _Numbers,
    input_max: jax.Array | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
) -> jax.Array:
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

@overload
def quantize_and_dequantize(
    input: _TensorFlow,
    input_min: _TensorFlow | _NumPy | _Numbers,
    input_max: _TensorFlow | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
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

@overload
def quantize_and_dequantize_v2(
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
    *,
    out: _NumPy | None = None,
) -> _NumPy:
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

@overload
def quantize_and_dequantize_v2(
    input: torch.Tensor,
    input_min: torch.Tensor | _NumPy | _Numbers,
    input_max: torch.Tensor | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
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

@overload
def quantize_and_dequantize_v2(
    input: jax.Array,
    input_min: jax.Array | _NumPy | _Numbers,
    input_max: jax.Array | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
) -> jax.Array:
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

@overload
def quantize_and_dequantize_v2(
    input: _TensorFlow,
    input_min: _TensorFlow | _NumPy | _Numbers,
    input_max: _TensorFlow | _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
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
