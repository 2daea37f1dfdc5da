# SPDX-License-Identifier: Apache-2.0
"""NumPy's implementation of the few functions that compute integers from trained numbers.

Every operation is rounded by itself, as PyTorch rounds it on a CPU: the same numbers give the same integers, whatever
framework trained them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

import exactqat as eq

abs, sqrt, sign, where = np.abs, np.sqrt, np.sign, np.where
exact_sqrt = np.sqrt
to_float = np.float32
ones_like, zeros_like = np.ones_like, np.zeros_like
moveaxis = np.moveaxis


def stop_gradient(x: Any) -> Any:
    """The value as a constant, which it is."""
    return x


def straight_through(value: Any, gradient_of: Any) -> Any:
    """The first one's value."""
    return value


def round(x: Any) -> Any:
    """To the nearest whole number, halves to even."""
    return np.rint(x)


def amax(x: Any, axes: Sequence[int]) -> Any:
    """The largest value over some axes."""
    return x.max(tuple(axes))


def amin(x: Any, axes: Sequence[int]) -> Any:
    """The smallest value over some axes."""
    return x.min(tuple(axes))


def maximum(first: Any, second: Any) -> Any:
    """The larger of two."""
    return np.maximum(first, second)


def minimum(first: Any, second: Any) -> Any:
    """The smaller of two."""
    return np.minimum(first, second)


def array(values: Any, like: Any) -> Any:
    """Values as an array of the type of another one."""
    return np.asarray(values, like.dtype)


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """The same elements in another shape."""
    return x.reshape(tuple(shape))


def sum(x: Any, axes: Sequence[int]) -> Any:
    """The sum over some axes."""
    return x.sum(tuple(axes))


def square(x: Any) -> Any:
    """x * x"""
    return x * x


def fake_quantize(x: Any, minimum: Any, maximum: Any, bits: int, narrow_range: bool) -> Any:
    """TensorFlow's fake quantization, per tensor for rank 0 bounds and per channel of the last axis for bounds [d]."""
    operators: Any = eq.quantization
    operator = operators.fake_quant_with_min_max_vars_per_channel
    if np.ndim(minimum) == 0:
        operator = operators.fake_quant_with_min_max_vars
    x, minimum, maximum = (np.asarray(each, np.float32) for each in (x, minimum, maximum))
    return cast(Any, operator(np.ascontiguousarray(x), minimum, maximum, num_bits=bits, narrow_range=narrow_range))
