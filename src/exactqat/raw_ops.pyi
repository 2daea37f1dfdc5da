# SPDX-License-Identifier: Apache-2.0
# Made by docs/stubs.py from the declarations in operators/; do not edit.

from collections.abc import Iterable
from typing import Any, Generic, Literal, NamedTuple, SupportsIndex, TypeAlias, TypeVar, overload

import jax
import numpy as np
import torch

_Array = TypeVar("_Array")
_NumPy: TypeAlias = np.ndarray[Any, Any]
_Float: TypeAlias = float | np.floating[Any] | np.integer[Any]
_Numbers: TypeAlias = _Float | list[Any] | tuple[Any, ...]

class _FakeQuantWithMinMaxVarsGradientResults(NamedTuple, Generic[_Array]):
    backprops_wrt_input: _Array
    backprop_wrt_min: _Array
    backprop_wrt_max: _Array

class _FakeQuantWithMinMaxVarsPerChannelGradientResults(NamedTuple, Generic[_Array]):
    backprops_wrt_input: _Array
    backprop_wrt_min: _Array
    backprop_wrt_max: _Array

class _FusedBatchNormResults(NamedTuple, Generic[_Array]):
    y: _Array
    batch_mean: _Array
    batch_variance: _Array
    reserve_space_1: _Array
    reserve_space_2: _Array

class _FusedBatchNormV2Results(NamedTuple, Generic[_Array]):
    y: _Array
    batch_mean: _Array
    batch_variance: _Array
    reserve_space_1: _Array
    reserve_space_2: _Array

class _FusedBatchNormV3Results(NamedTuple, Generic[_Array]):
    y: _Array
    batch_mean: _Array
    batch_variance: _Array
    reserve_space_1: _Array
    reserve_space_2: _Array
    reserve_space_3: _Array

class _FusedBatchNormGradResults(NamedTuple, Generic[_Array]):
    x_backprop: _Array
    scale_backprop: _Array
    offset_backprop: _Array
    reserve_space_3: _Array
    reserve_space_4: _Array

class _FusedBatchNormGradV2Results(NamedTuple, Generic[_Array]):
    x_backprop: _Array
    scale_backprop: _Array
    offset_backprop: _Array
    reserve_space_3: _Array
    reserve_space_4: _Array

class _FusedBatchNormGradV3Results(NamedTuple, Generic[_Array]):
    x_backprop: _Array
    scale_backprop: _Array
    offset_backprop: _Array
    reserve_space_4: _Array
    reserve_space_5: _Array

class _QuantizeAndDequantizeV4GradResults(NamedTuple, Generic[_Array]):
    input_backprop: _Array
    input_min_backprop: _Array
    input_max_backprop: _Array

@overload
def DepthwiseConv2dNative(
    *,
    input: _NumPy | _Numbers,
    filter: _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def DepthwiseConv2dNative(
    *,
    input: torch.Tensor,
    filter: torch.Tensor | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def DepthwiseConv2dNative(
    *,
    input: jax.Array,
    filter: jax.Array | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array: ...
@overload
def DepthwiseConv2dNativeBackpropInput(
    *,
    input_sizes: Iterable[SupportsIndex],
    filter: _NumPy | _Numbers,
    out_backprop: _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def DepthwiseConv2dNativeBackpropInput(
    *,
    input_sizes: Iterable[SupportsIndex],
    filter: torch.Tensor,
    out_backprop: torch.Tensor | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def DepthwiseConv2dNativeBackpropInput(
    *,
    input_sizes: Iterable[SupportsIndex],
    filter: jax.Array,
    out_backprop: jax.Array | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array: ...
@overload
def DepthwiseConv2dNativeBackpropFilter(
    *,
    input: _NumPy | _Numbers,
    filter_sizes: Iterable[SupportsIndex],
    out_backprop: _NumPy | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def DepthwiseConv2dNativeBackpropFilter(
    *,
    input: torch.Tensor,
    filter_sizes: Iterable[SupportsIndex],
    out_backprop: torch.Tensor | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def DepthwiseConv2dNativeBackpropFilter(
    *,
    input: jax.Array,
    filter_sizes: Iterable[SupportsIndex],
    out_backprop: jax.Array | _Numbers,
    strides: Iterable[SupportsIndex],
    padding: Literal["SAME", "VALID", "EXPLICIT"],
    explicit_paddings: Iterable[SupportsIndex] = (),
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    dilations: Iterable[SupportsIndex] = (1, 1, 1, 1),
    name: str | None = None,
) -> jax.Array: ...
@overload
def FakeQuantWithMinMaxArgs(
    *,
    inputs: _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def FakeQuantWithMinMaxArgs(
    *,
    inputs: torch.Tensor,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def FakeQuantWithMinMaxArgs(
    *,
    inputs: jax.Array,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array: ...
@overload
def FakeQuantWithMinMaxArgsGradient(
    *,
    gradients: _NumPy | _Numbers,
    inputs: _NumPy | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def FakeQuantWithMinMaxArgsGradient(
    *,
    gradients: torch.Tensor,
    inputs: torch.Tensor | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def FakeQuantWithMinMaxArgsGradient(
    *,
    gradients: jax.Array,
    inputs: jax.Array | _Numbers,
    min: _Float = -6.0,
    max: _Float = 6.0,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array: ...
@overload
def FakeQuantWithMinMaxVars(
    *,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def FakeQuantWithMinMaxVars(
    *,
    inputs: torch.Tensor,
    min: torch.Tensor | _Numbers,
    max: torch.Tensor | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def FakeQuantWithMinMaxVars(
    *,
    inputs: jax.Array,
    min: jax.Array | _Numbers,
    max: jax.Array | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array: ...
@overload
def FakeQuantWithMinMaxVarsGradient(
    *,
    gradients: _NumPy | _Numbers,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy] | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[_NumPy]: ...
@overload
def FakeQuantWithMinMaxVarsGradient(
    *,
    gradients: torch.Tensor,
    inputs: torch.Tensor | _Numbers,
    min: torch.Tensor | _Numbers,
    max: torch.Tensor | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[torch.Tensor]: ...
@overload
def FakeQuantWithMinMaxVarsGradient(
    *,
    gradients: jax.Array,
    inputs: jax.Array | _Numbers,
    min: jax.Array | _Numbers,
    max: jax.Array | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsGradientResults[jax.Array]: ...
@overload
def FakeQuantWithMinMaxVarsPerChannel(
    *,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def FakeQuantWithMinMaxVarsPerChannel(
    *,
    inputs: torch.Tensor,
    min: torch.Tensor | _Numbers,
    max: torch.Tensor | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def FakeQuantWithMinMaxVarsPerChannel(
    *,
    inputs: jax.Array,
    min: jax.Array | _Numbers,
    max: jax.Array | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array: ...
@overload
def FakeQuantWithMinMaxVarsPerChannelGradient(
    *,
    gradients: _NumPy | _Numbers,
    inputs: _NumPy | _Numbers,
    min: _NumPy | _Numbers,
    max: _NumPy | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy] | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[_NumPy]: ...
@overload
def FakeQuantWithMinMaxVarsPerChannelGradient(
    *,
    gradients: torch.Tensor,
    inputs: torch.Tensor | _Numbers,
    min: torch.Tensor | _Numbers,
    max: torch.Tensor | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[torch.Tensor]: ...
@overload
def FakeQuantWithMinMaxVarsPerChannelGradient(
    *,
    gradients: jax.Array,
    inputs: jax.Array | _Numbers,
    min: jax.Array | _Numbers,
    max: jax.Array | _Numbers,
    num_bits: SupportsIndex = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> _FakeQuantWithMinMaxVarsPerChannelGradientResults[jax.Array]: ...
@overload
def FusedBatchNorm(
    *,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    offset: _NumPy | _Numbers,
    mean: _NumPy | _Numbers,
    variance: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormResults[_NumPy]: ...
@overload
def FusedBatchNorm(
    *,
    x: torch.Tensor,
    scale: torch.Tensor | _Numbers,
    offset: torch.Tensor | _Numbers,
    mean: torch.Tensor | _Numbers,
    variance: torch.Tensor | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormResults[torch.Tensor]: ...
@overload
def FusedBatchNorm(
    *,
    x: jax.Array,
    scale: jax.Array | _Numbers,
    offset: jax.Array | _Numbers,
    mean: jax.Array | _Numbers,
    variance: jax.Array | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormResults[jax.Array]: ...
@overload
def FusedBatchNormV2(
    *,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    offset: _NumPy | _Numbers,
    mean: _NumPy | _Numbers,
    variance: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormV2Results[_NumPy]: ...
@overload
def FusedBatchNormV2(
    *,
    x: torch.Tensor,
    scale: torch.Tensor | _Numbers,
    offset: torch.Tensor | _Numbers,
    mean: torch.Tensor | _Numbers,
    variance: torch.Tensor | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormV2Results[torch.Tensor]: ...
@overload
def FusedBatchNormV2(
    *,
    x: jax.Array,
    scale: jax.Array | _Numbers,
    offset: jax.Array | _Numbers,
    mean: jax.Array | _Numbers,
    variance: jax.Array | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormV2Results[jax.Array]: ...
@overload
def FusedBatchNormV3(
    *,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    offset: _NumPy | _Numbers,
    mean: _NumPy | _Numbers,
    variance: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormV3Results[_NumPy]: ...
@overload
def FusedBatchNormV3(
    *,
    x: torch.Tensor,
    scale: torch.Tensor | _Numbers,
    offset: torch.Tensor | _Numbers,
    mean: torch.Tensor | _Numbers,
    variance: torch.Tensor | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormV3Results[torch.Tensor]: ...
@overload
def FusedBatchNormV3(
    *,
    x: jax.Array,
    scale: jax.Array | _Numbers,
    offset: jax.Array | _Numbers,
    mean: jax.Array | _Numbers,
    variance: jax.Array | _Numbers,
    epsilon: _Float = 0.0001,
    exponential_avg_factor: _Float = 1.0,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormV3Results[jax.Array]: ...
@overload
def FusedBatchNormGrad(
    *,
    y_backprop: _NumPy | _Numbers,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    reserve_space_1: _NumPy | _Numbers,
    reserve_space_2: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormGradResults[_NumPy]: ...
@overload
def FusedBatchNormGrad(
    *,
    y_backprop: torch.Tensor,
    x: torch.Tensor | _Numbers,
    scale: torch.Tensor | _Numbers,
    reserve_space_1: torch.Tensor | _Numbers,
    reserve_space_2: torch.Tensor | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormGradResults[torch.Tensor]: ...
@overload
def FusedBatchNormGrad(
    *,
    y_backprop: jax.Array,
    x: jax.Array | _Numbers,
    scale: jax.Array | _Numbers,
    reserve_space_1: jax.Array | _Numbers,
    reserve_space_2: jax.Array | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormGradResults[jax.Array]: ...
@overload
def FusedBatchNormGradV2(
    *,
    y_backprop: _NumPy | _Numbers,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    reserve_space_1: _NumPy | _Numbers,
    reserve_space_2: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormGradV2Results[_NumPy]: ...
@overload
def FusedBatchNormGradV2(
    *,
    y_backprop: torch.Tensor,
    x: torch.Tensor | _Numbers,
    scale: torch.Tensor | _Numbers,
    reserve_space_1: torch.Tensor | _Numbers,
    reserve_space_2: torch.Tensor | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormGradV2Results[torch.Tensor]: ...
@overload
def FusedBatchNormGradV2(
    *,
    y_backprop: jax.Array,
    x: jax.Array | _Numbers,
    scale: jax.Array | _Numbers,
    reserve_space_1: jax.Array | _Numbers,
    reserve_space_2: jax.Array | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormGradV2Results[jax.Array]: ...
@overload
def FusedBatchNormGradV3(
    *,
    y_backprop: _NumPy | _Numbers,
    x: _NumPy | _Numbers,
    scale: _NumPy | _Numbers,
    reserve_space_1: _NumPy | _Numbers,
    reserve_space_2: _NumPy | _Numbers,
    reserve_space_3: _NumPy | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy, _NumPy, _NumPy] | None = None,
) -> _FusedBatchNormGradV3Results[_NumPy]: ...
@overload
def FusedBatchNormGradV3(
    *,
    y_backprop: torch.Tensor,
    x: torch.Tensor | _Numbers,
    scale: torch.Tensor | _Numbers,
    reserve_space_1: torch.Tensor | _Numbers,
    reserve_space_2: torch.Tensor | _Numbers,
    reserve_space_3: torch.Tensor | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _FusedBatchNormGradV3Results[torch.Tensor]: ...
@overload
def FusedBatchNormGradV3(
    *,
    y_backprop: jax.Array,
    x: jax.Array | _Numbers,
    scale: jax.Array | _Numbers,
    reserve_space_1: jax.Array | _Numbers,
    reserve_space_2: jax.Array | _Numbers,
    reserve_space_3: jax.Array | _Numbers,
    epsilon: _Float = 0.0001,
    data_format: Literal["NHWC", "NCHW", "NDHWC", "NCDHW"] = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> _FusedBatchNormGradV3Results[jax.Array]: ...
@overload
def QuantizeAndDequantize(
    *,
    input: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    input_min: _Float = 0.0,
    input_max: _Float = 0.0,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def QuantizeAndDequantize(
    *,
    input: torch.Tensor,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    input_min: _Float = 0.0,
    input_max: _Float = 0.0,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def QuantizeAndDequantize(
    *,
    input: jax.Array,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    input_min: _Float = 0.0,
    input_max: _Float = 0.0,
    name: str | None = None,
) -> jax.Array: ...
@overload
def QuantizeAndDequantizeV2(
    *,
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def QuantizeAndDequantizeV2(
    *,
    input: torch.Tensor,
    input_min: torch.Tensor | _Numbers,
    input_max: torch.Tensor | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def QuantizeAndDequantizeV2(
    *,
    input: jax.Array,
    input_min: jax.Array | _Numbers,
    input_max: jax.Array | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> jax.Array: ...
@overload
def QuantizeAndDequantizeV3(
    *,
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    num_bits: SupportsIndex,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def QuantizeAndDequantizeV3(
    *,
    input: torch.Tensor,
    input_min: torch.Tensor | _Numbers,
    input_max: torch.Tensor | _Numbers,
    num_bits: SupportsIndex,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def QuantizeAndDequantizeV3(
    *,
    input: jax.Array,
    input_min: jax.Array | _Numbers,
    input_max: jax.Array | _Numbers,
    num_bits: SupportsIndex,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> jax.Array: ...
@overload
def QuantizeAndDequantizeV4(
    *,
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: _NumPy | tuple[_NumPy] | None = None,
) -> _NumPy: ...
@overload
def QuantizeAndDequantizeV4(
    *,
    input: torch.Tensor,
    input_min: torch.Tensor | _Numbers,
    input_max: torch.Tensor | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: torch.Tensor | tuple[torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def QuantizeAndDequantizeV4(
    *,
    input: jax.Array,
    input_min: jax.Array | _Numbers,
    input_max: jax.Array | _Numbers,
    signed_input: bool = True,
    num_bits: SupportsIndex = 8,
    range_given: bool = False,
    round_mode: Literal["HALF_TO_EVEN", "HALF_UP"] = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> jax.Array: ...
@overload
def QuantizeAndDequantizeV4Grad(
    *,
    gradients: _NumPy | _Numbers,
    input: _NumPy | _Numbers,
    input_min: _NumPy | _Numbers,
    input_max: _NumPy | _Numbers,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: tuple[_NumPy, _NumPy, _NumPy] | None = None,
) -> _QuantizeAndDequantizeV4GradResults[_NumPy]: ...
@overload
def QuantizeAndDequantizeV4Grad(
    *,
    gradients: torch.Tensor,
    input: torch.Tensor | _Numbers,
    input_min: torch.Tensor | _Numbers,
    input_max: torch.Tensor | _Numbers,
    axis: SupportsIndex = -1,
    name: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> _QuantizeAndDequantizeV4GradResults[torch.Tensor]: ...
@overload
def QuantizeAndDequantizeV4Grad(
    *,
    gradients: jax.Array,
    input: jax.Array | _Numbers,
    input_min: jax.Array | _Numbers,
    input_max: jax.Array | _Numbers,
    axis: SupportsIndex = -1,
    name: str | None = None,
) -> _QuantizeAndDequantizeV4GradResults[jax.Array]: ...
