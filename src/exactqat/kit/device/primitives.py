# SPDX-License-Identifier: Apache-2.0
"""What `DeviceOperator.real` is written in: the arithmetic of a framework's arrays, and its functions of them.

Frameworks offer more than this to the training core, see `train.core.primitives`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np

Pairs = Sequence[Sequence[int]]


class Array(Protocol):
    """An array of NumPy, PyTorch, JAX or Keras; what it is added to is another one, or a number."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __add__(self, other: Any, /) -> Self: ...
    def __radd__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __rsub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __rmul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...
    def __rtruediv__(self, other: Any, /) -> Self: ...
    def __pow__(self, other: int, /) -> Self: ...
    def __neg__(self) -> Self: ...
    def __and__(self, other: Any, /) -> Self: ...
    def __or__(self, other: Any, /) -> Self: ...
    def __xor__(self, other: Any, /) -> Self: ...
    def __invert__(self) -> Self: ...
    def __lt__(self, other: Any, /) -> Self: ...
    def __le__(self, other: Any, /) -> Self: ...
    def __gt__(self, other: Any, /) -> Self: ...
    def __ge__(self, other: Any, /) -> Self: ...


A = TypeVar("A", bound=Array)
Result = TypeVar("Result", covariant=True)


class ResultGrid(Protocol[Result]):
    """The grid of a result: its scale, and the zero point in int8."""

    @property
    def scale(self) -> Result: ...
    @property
    def zero_point(self) -> Result: ...


class RealPrimitives(Protocol[A]):
    """A framework's functions; `axis` and `axes` may be negative."""

    def abs(self, x: A, /) -> A: ...
    def sqrt(self, x: A, /) -> A: ...
    def rsqrt(self, x: A, /) -> A: ...
    def exp(self, x: A, /) -> A: ...
    def expm1(self, x: A, /) -> A: ...
    def log(self, x: A, /) -> A: ...
    def log1p(self, x: A, /) -> A: ...
    def tanh(self, x: A, /) -> A: ...
    def sigmoid(self, x: A, /) -> A: ...
    def erf(self, x: A, /) -> A: ...
    def floor(self, x: A, /) -> A: ...
    def round(self, x: A, /) -> A: ...
    def maximum(self, first: A, second: A | float, /) -> A: ...
    def minimum(self, first: A, second: A | float, /) -> A: ...
    def where(self, condition: A, first: A | float, second: A | float, /) -> A: ...
    def clip(self, x: A, low: float, high: float, /) -> A:
        """Either end may be infinite. No gradient at the ends, as ReLU has none at 0."""

    def stop_gradient(self, x: A, /) -> A: ...
    def straight_through(self, value: A, gradient_of: A, /) -> A: ...
    def array(self, values: Any, like: A, /) -> A: ...
    def sum(self, x: A, axes: Sequence[int], keep_dims: bool = False, /) -> A: ...
    def mean(self, x: A, axes: Sequence[int], keep_dims: bool = False, /) -> A: ...
    def amax(self, x: A, axes: Sequence[int], keep_dims: bool = False, /) -> A: ...
    def amin(self, x: A, axes: Sequence[int], keep_dims: bool = False, /) -> A: ...
    def argmax(self, x: A, axis: int, /) -> A:
        """Where the largest value is, the first of equal ones; int32."""

    def argmin(self, x: A, axis: int, /) -> A:
        """Where the smallest value is, the first of equal ones; int32."""

    def softmax(self, x: A, axis: int, /) -> A: ...
    def log_softmax(self, x: A, axis: int, /) -> A: ...
    def reshape(self, x: A, shape: Sequence[int], /) -> A: ...
    def transpose(self, x: A, permutation: tuple[int, ...] | list[int], /) -> A: ...
    def concatenate(self, arrays: Sequence[A], axis: int, /) -> A:
        """Where other axes differ, sizes of 1 are repeated, such as a constant next to a batch."""

    def flip(self, x: A, axes: Sequence[int], /) -> A: ...
    def slice(self, x: A, axis: int, start: int, stop: int, step: int, /) -> A: ...
    def gather(self, x: A, indices: Sequence[int] | np.ndarray, axis: int, /) -> A: ...
    def embedding(self, indices: A, table: A, fixed_row: int | None = None, /) -> A:
        """Rows of a table [rows, features] by integers of any dtype; the fixed row, if there is one, gets no
        gradient."""

    def pad(self, x: A, pairs: Pairs, value: float, /) -> A: ...
    def pad_reflect(self, x: A, pairs: Pairs, mode: str, /) -> A:
        """mode: "SYMMETRIC" repeats the edge, "REFLECT" does not."""

    def linear(self, x: A, weight: A, bias: A | None = None, /) -> A:
        """Over the last axis; weight [out, in]."""

    def matmul(self, first: A, second: A, /) -> A: ...

    def conv(
        self,
        x: A,
        weight: A,
        bias: A | None,
        strides: Sequence[int],
        padding: Pairs,
        dilations: Sequence[int],
        groups: int = 1,
        channel_axis: int = 1,
    ) -> A:
        """weight [out, in / groups, *window]; without spatial axes: x [batch, in], weight [out, in / groups]."""

    def conv_transpose(
        self,
        x: A,
        weight: A,
        bias: A | None,
        strides: Sequence[int],
        padding: Pairs,
        output_padding: Sequence[int],
        dilations: Sequence[int],
        groups: int = 1,
        channel_axis: int = 1,
    ) -> A:
        """weight [in, out / groups, *window]; padding: what is cropped from the result before and after."""

    def max_pool(self, x: A, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> A:
        """Padding is below all values."""

    def sum_pool(self, x: A, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1) -> A:
        """Padding is 0."""


class NumPyPrimitives:
    """In NumPy, what functions of one value need and what others' files compute in float32."""

    abs, exp, expm1, log, log1p, sqrt = np.abs, np.exp, np.expm1, np.log, np.log1p, np.sqrt
    sin, cos, tanh, sign = np.sin, np.cos, np.tanh, np.sign
    ceil, floor, round = np.ceil, np.floor, np.rint
    maximum, minimum, where, clip = np.maximum, np.minimum, np.where, np.clip
    reshape, transpose, matmul, concatenate = np.reshape, np.transpose, np.matmul, np.concatenate
    argmax, argmin = np.argmax, np.argmin
    gather = np.take
    erf = np.vectorize(math.erf, otypes=[np.float64])

    @staticmethod
    def rsqrt(x: np.ndarray) -> np.ndarray:
        return 1 / np.sqrt(x)

    @staticmethod
    def array(values: Any, like: np.ndarray) -> np.ndarray:
        return np.asarray(values, like.dtype)

    @staticmethod
    def stop_gradient(x: np.ndarray) -> np.ndarray:
        return x

    @staticmethod
    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    @staticmethod
    def mean(x: np.ndarray, axes: Sequence[int], keep_dims: bool = False) -> np.ndarray:
        return x.mean(tuple(axes), keepdims=keep_dims)

    @staticmethod
    def sum(x: np.ndarray, axes: Sequence[int], keep_dims: bool = False) -> np.ndarray:
        return x.sum(tuple(axes), keepdims=keep_dims)

    @staticmethod
    def softmax(x: np.ndarray, axis: int) -> np.ndarray:
        shares = np.exp(x - x.max(axis, keepdims=True))
        return np.asarray(shares / shares.sum(axis, keepdims=True))

    @staticmethod
    def log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
        below = x - x.max(axis, keepdims=True)
        return np.asarray(below - np.log(np.exp(below).sum(axis, keepdims=True)))


# As far as they go; the types of NumPy's own functions say more than any protocol.
NUMPY = cast(RealPrimitives[Any], NumPyPrimitives)
