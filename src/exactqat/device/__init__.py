# SPDX-License-Identifier: Apache-2.0
"""The operators of the device: one declaration each, in the file of its family. See `operator`."""

from . import (
    activation,
    convolution,
    elementwise,
    matrix,
    movement,
    normalization,
    pooling,
    quantize,
    reduction,
    resize,
)
from .operator import (
    ACTIVATIONS,
    OPERATORS,
    PADDINGS,
    PROFILE_ALIASES,
    PROFILES,
    DeviceOperator,
    Refusal,
    profile_named,
)
from .tensor import INT8_MAX, INT8_MIN, Quantization, Tensor, per_tensor

__all__ = [
    "ACTIVATIONS",
    "INT8_MAX",
    "INT8_MIN",
    "OPERATORS",
    "PADDINGS",
    "PROFILES",
    "PROFILE_ALIASES",
    "DeviceOperator",
    "Quantization",
    "Refusal",
    "Tensor",
    "activation",
    "convolution",
    "elementwise",
    "matrix",
    "movement",
    "normalization",
    "per_tensor",
    "pooling",
    "profile_named",
    "quantize",
    "reduction",
    "resize",
]
