# SPDX-License-Identifier: Apache-2.0
"""NumPy's implementation of the few functions that compute integers from trained numbers.

Every operation is rounded by itself, as PyTorch rounds it on a CPU: the same numbers give the same integers, whatever
framework trained them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from . import primitives
from .primitives import Array


def _over(function: Callable[..., Array]) -> Callable[..., Array]:
    """Over some axes."""

    def reduce(x: Array, axes: Sequence[int]) -> Array:
        return function(x, tuple(axes))

    return reduce


abs, sqrt, exact_sqrt, square, sign = np.abs, np.sqrt, np.sqrt, np.square, np.sign
round, where, maximum, minimum = np.rint, np.where, np.maximum, np.minimum
ones_like, zeros_like, moveaxis, reshape = np.ones_like, np.zeros_like, np.moveaxis, np.reshape
amax, amin, sum = _over(np.max), _over(np.min), _over(np.sum)
to_float = np.float32


def array(values: Array, like: Array) -> Array:
    return np.asarray(values, like.dtype)


def stop_gradient(x: Array) -> Array:
    return x


def straight_through(value: Array, gradient_of: Array) -> Array:
    return value


def fake_quantize(x: Array, minimum: Array, maximum: Array, bits: int, narrow_range: bool) -> Array:
    x, minimum, maximum = (np.asarray(operand, np.float32) for operand in (x, minimum, maximum))
    return primitives.fake_quantize(np.ascontiguousarray(x), minimum, maximum, bits, narrow_range)
