# SPDX-License-Identifier: Apache-2.0
"""What the device keeps: integer codes, and the scale and zero point by which they stand for real numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

INT8_MIN, INT8_MAX = -128, 127
INT16_MIN, INT16_MAX = -32768, 32767

# What weights of others' files may be packed in, two to a byte; a graph holds them one to a byte.
INT4, INT4_MIN, INT4_MAX = "int4", -8, 7

# Of inputs that stand for themselves, as cameras give them.
RAW = "uint8"

# What has no grid, and means itself: operators that only move codes move it too.
PLAIN = ("int32", "int64", "bool", RAW)

# What activations are stored in: dtype -> lowest and highest code.
CODE_RANGES = {"int8": (INT8_MIN, INT8_MAX), "int16": (INT16_MIN, INT16_MAX)}


@dataclass(frozen=True, eq=False)
class Quantization:
    """real = scale * (code - zero_point), per tensor (axis None) or per channel along `axis`.

    scale: float32 [1] or [channels]; zero_point: int64 of the same shape, or [1]. See also `per_tensor`.
    dtype: what the codes of an activation are stored in, "int8" or "int16" (then the zero point is 0); of no meaning
    for biases and indices.
    """

    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None = None
    dtype: str = "int8"

    def __post_init__(self) -> None:
        scale = np.atleast_1d(np.asarray(self.scale, np.float32))
        zero_point = np.atleast_1d(np.asarray(self.zero_point, np.int64))
        if scale.ndim != 1 or zero_point.shape not in (scale.shape, (1,)):
            raise ValueError(f"scale and zero_point must be [1] or [channels], got {scale.shape}, {zero_point.shape}")
        if self.axis is None and scale.size != 1:
            raise ValueError(f"per-tensor quantization takes one scale, got {scale.size}; name the channel `axis`")
        if not (np.all(np.isfinite(scale)) and np.all(scale > 0)):
            raise ValueError(f"scale must be positive and finite, got {scale[~((scale > 0) & np.isfinite(scale))][:4]}")
        if self.dtype not in CODE_RANGES:
            raise ValueError(f"dtype must be one of {', '.join(CODE_RANGES)}, got {self.dtype!r}")
        if self.dtype == "int16" and np.any(zero_point):
            raise ValueError(f"the zero point of int16 is 0, got {zero_point[:4]}")
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "zero_point", np.broadcast_to(zero_point, scale.shape).copy())

    def __repr__(self) -> str:
        def numbers(values: np.ndarray, form: str) -> str:
            ends = dict.fromkeys(format(end, form) for end in (values.min(), values.max())) if values.size else ["none"]
            return "..".join(ends)

        channels = "" if self.axis is None else f", {self.scale.size:,} channels along axis {self.axis}"
        scale, zero_point = numbers(self.scale, ".6g"), numbers(self.zero_point, "d")
        return f"Quantization({self.dtype}, scale {scale}, zero point {zero_point}{channels})"

    def equals(self, other: Quantization) -> bool:
        """True when both stand for the same real numbers, bit for bit."""
        return (
            (self.axis, self.dtype) == (other.axis, other.dtype)
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )


def per_tensor(scale: float | np.floating, zero_point: int, dtype: str = "int8") -> Quantization:
    """One float32 scale and one zero point (-128..127, of int16 always 0) for a whole tensor."""
    return Quantization(np.array([scale], np.float32), np.array([zero_point], np.int64), dtype=dtype)


# Indices stand for themselves.
INDICES = per_tensor(1.0, 0)


@dataclass(frozen=True, eq=False)
class Tensor:
    """An activation (`data` None), or a constant.

    shape: channels last, the batch first; of an activation the batch's axis holds the number of rows that one example
    takes, 1 unless the network folds other axes into the batch. dtype: "int8" or "int16", as the quantization says;
    "int32" or "int64" for indices and biases, "uint8" for inputs without a grid, "float32" for real numbers in others'
    files, "int4" for their weights, whose data are int8. variable: it lasts from one call of the network to the next.
    initial: what a variable holds before the first call; None: real 0. successor: the tensor whose values a variable
    holds in the next call; empty where an operator changes it (`DeviceOperator.states`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    quantization: Quantization
    data: np.ndarray | None = None
    variable: bool = False
    initial: np.ndarray | None = None
    successor: str = ""

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        kind = "variable" if self.variable else "activation" if self.data is None else "constant"
        return f"Tensor({self.name!r}, {kind}, {self.dtype}[{shape}], {self.quantization!r})"


def initial_codes(tensor: Tensor, examples: int) -> np.ndarray:
    """What a variable holds before the first call, for so many examples."""
    rows, *rest = tensor.shape
    if tensor.initial is not None:
        return np.concatenate([tensor.initial] * examples) if examples else tensor.initial[:0].copy()
    return np.full((examples * rows, *rest), tensor.quantization.zero_point[0], tensor.dtype)


def code_range(tensor: Tensor) -> tuple[int, int]:
    """The lowest and the highest code of what an activation is stored in."""
    return CODE_RANGES[tensor.dtype]


def _require_quantization(quantization: Quantization) -> None:
    if not isinstance(quantization, Quantization):
        raise TypeError(
            "quantization must be a Quantization, such as graph.tensors['input'].quantization, got "
            f"{type(quantization).__name__}"
        )


def quantize(
    x: np.ndarray, quantization: Quantization, lowest: int | None = None, highest: int | None = None
) -> np.ndarray:
    """Real float32 values to codes lowest..highest, in the steps and roundings of FakeQuantWithMinMaxVars.

    The codes are of the quantization's dtype, and by default all that it has. A tensor of fewer bits names the codes it
    was placed at, for example 112..127. NaN raises ValueError.
    """
    _require_quantization(quantization)
    if not isinstance(x, np.ndarray) and (x is None or isinstance(x, str | bytes | Quantization | os.PathLike)):
        raise TypeError(f"x must be an array of real numbers, got {type(x).__name__}")
    x = np.asarray(x, np.float32)
    ends = CODE_RANGES[quantization.dtype]
    lowest, highest = ends[0] if lowest is None else lowest, ends[1] if highest is None else highest
    if np.isnan(x).any():
        raise ValueError("x contains NaN, which has no code")
    scale, zero_point = quantization.scale[0], np.float32(quantization.zero_point[0])
    nudged_min = (np.float32(lowest) - zero_point) * scale
    nudged_max = (np.float32(highest) - zero_point) * scale
    steps = (np.clip(x, nudged_min, nudged_max) - nudged_min) / scale
    # FakeQuant rounds half up, in steps counted from real 0.
    zero_code = zero_point - np.float32(lowest)
    codes = np.floor((steps - zero_code) + np.float32(0.5)) + zero_point
    return np.clip(codes, lowest, highest).astype(quantization.dtype)


def dequantize(codes: np.ndarray, quantization: Quantization) -> np.ndarray:
    """Codes of a per-tensor quantized tensor to real float32 values."""
    _require_quantization(quantization)
    steps = np.asarray(codes, np.int32) - np.int32(quantization.zero_point[0])
    return steps.astype(np.float32) * quantization.scale[0]
