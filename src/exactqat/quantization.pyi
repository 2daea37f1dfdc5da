# SPDX-License-Identifier: Apache-2.0
# Made by docs/stubs.py from the declarations in operators/; do not edit.

from typing import SupportsIndex, overload

import jax
import torch

from exactqat.raw_ops import (
    _FakeQuantWithMinMaxVarsGradientResults,
    _FakeQuantWithMinMaxVarsPerChannelGradientResults,
    _Float,
    _Numbers,
    _NumPy,
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
) -> _NumPy: ...
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
) -> torch.Tensor: ...
@overload
def fake_quant_with_min_max_args(
    inputs: jax.Array,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array: ...
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
) -> _NumPy: ...
@overload
def fake_quant_with_min_max_args_gradient(
    gradients: torch.Tensor,
    inputs: torch.Tensor | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def fake_quant_with_min_max_args_gradient(
    gradients: jax.Array,
    inputs: jax.Array | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array: ...
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
) -> _NumPy: ...
@overload
def fake_quant_with_min_max_vars(
    inputs: torch.Tensor,
    min: torch.Tensor | _Numbers,
    max: torch.Tensor | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def fake_quant_with_min_max_vars(
    inputs: jax.Array,
    min: jax.Array | _Numbers,
    max: jax.Array | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array: ...
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
) -> _FakeQuantWithMinMaxVarsGradientResults[_NumPy]: ...
@overload
def fake_quant_with_min_max_vars_gradient(
    gradients: torch.Tensor,
    inputs: torch.Tensor | _Numbers,
    min: torch.Tensor | _Numbers,
    max: torch.Tensor | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[torch.Tensor]: ...
@overload
def fake_quant_with_min_max_vars_gradient(
    gradients: jax.Array,
    inputs: jax.Array | _Numbers,
    min: jax.Array | _Numbers,
    max: jax.Array | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[jax.Array]: ...
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
) -> _NumPy: ...
@overload
def fake_quant_with_min_max_vars_per_channel(
    inputs: torch.Tensor,
    min: torch.Tensor | _Numbers,
    max: torch.Tensor | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def fake_quant_with_min_max_vars_per_channel(
    inputs: jax.Array,
    min: jax.Array | _Numbers,
    max: jax.Array | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array: ...
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
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[_NumPy]: ...
@overload
def fake_quant_with_min_max_vars_per_channel_gradient(
    gradients: torch.Tensor,
    inputs: torch.Tensor | _Numbers,
    min: torch.Tensor | _Numbers,
    max: torch.Tensor | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[torch.Tensor]: ...
@overload
def fake_quant_with_min_max_vars_per_channel_gradient(
    gradients: jax.Array,
    inputs: jax.Array | _Numbers,
    min: jax.Array | _Numbers,
    max: jax.Array | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[jax.Array]: ...
@overload
def quantize_and_dequantize(
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: str = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
) -> _NumPy: ...
@overload
def quantize_and_dequantize(
    input: torch.Tensor,
    input_min: torch.Tensor | _Numbers,
    input_max: torch.Tensor | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: str = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
) -> torch.Tensor: ...
@overload
def quantize_and_dequantize(
    input: jax.Array,
    input_min: jax.Array | _Numbers,
    input_max: jax.Array | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: str = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
) -> jax.Array: ...
@overload
def quantize_and_dequantize_v2(
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: str = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
) -> _NumPy: ...
@overload
def quantize_and_dequantize_v2(
    input: torch.Tensor,
    input_min: torch.Tensor | _Numbers,
    input_max: torch.Tensor | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: str = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
) -> torch.Tensor: ...
@overload
def quantize_and_dequantize_v2(
    input: jax.Array,
    input_min: jax.Array | _Numbers,
    input_max: jax.Array | _Numbers,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: str = "HALF_TO_EVEN",
    name: str | None = None,
    narrow_range: bool = False,
    axis: int | None = None,
) -> jax.Array: ...
