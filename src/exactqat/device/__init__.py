# SPDX-License-Identifier: Apache-2.0
"""The operators of the device: one declaration each, in the file of its family. See `operator`."""

from . import (
    activation,
    conditions,
    convolution,
    elementwise,
    embedding,
    file_functions,
    floating,
    matrix,
    movement,
    normalization,
    pooling,
    quantize,
    rearrangement,
    reduction,
    resize,
)
from .operator import (
    ACTIVATIONS,
    OPERATORS,
    PADDINGS,
    DeviceOperator,
    Refusal,
)
from .profile import DEFAULT_PROFILE, PROFILES, Profile, declare, profile_named
from .tensor import INT8_MAX, INT8_MIN, Quantization, Tensor, per_tensor

__all__ = [
    "ACTIVATIONS",
    "DEFAULT_PROFILE",
    "INT8_MAX",
    "INT8_MIN",
    "OPERATORS",
    "PADDINGS",
    "PROFILES",
    "DeviceOperator",
    "Profile",
    "Quantization",
    "Refusal",
    "Tensor",
    "activation",
    "conditions",
    "convolution",
    "declare",
    "elementwise",
    "embedding",
    "file_functions",
    "floating",
    "matrix",
    "movement",
    "normalization",
    "per_tensor",
    "pooling",
    "profile_named",
    "quantize",
    "rearrangement",
    "reduction",
    "resize",
]
