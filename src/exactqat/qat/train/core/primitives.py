# SPDX-License-Identifier: Apache-2.0
"""What a framework offers to the training core and to the device's declarations.

Each protocol is implemented by a module of functions: `train.torch.primitives`, `train.jax.primitives`,
`train.keras.primitives` and, as far as integers need it, `train.core.primitives_numpy`. Arrays are the framework's own,
float32 unless said otherwise; `axis` and `axes` may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

import exactqat as eq

from ....kit.device.primitives import RealPrimitives

A = TypeVar("A")
Array = Any
# The smallest and the largest value of a range.
Ends = tuple[Array, Array]


def fake_quantize(x: A, minimum: Array, maximum: Array, bits: int, narrow_range: bool) -> A:
    """TensorFlow's fake quantization, per tensor for rank 0 bounds and per channel of the last axis for bounds [d]."""
    operators: Any = eq.quantization
    operator = operators.fake_quant_with_min_max_vars_per_channel
    if len(minimum.shape) == 0:
        operator = operators.fake_quant_with_min_max_vars
    result: A = operator(x, minimum, maximum, num_bits=bits, narrow_range=narrow_range)
    return result


def over(function: Callable[..., Array]) -> Callable[..., Array]:
    """A reduction of a framework's own, over some axes; over none it is its operand, as PyTorch takes none for all."""

    def reduce(x: Array, axes: int | Sequence[int], keep_dims: bool = False) -> Array:
        axes = axes if isinstance(axes, int) else tuple(axes)
        return x if axes == () else function(x, axes, keepdims=keep_dims)

    return reduce


def clipped(where: Callable[..., Array], of_type: Callable[[float, Any], Array]) -> Callable[..., Array]:
    """`Primitives.clip` by a framework's `where` and what makes a number of a type. NaN stays: failed training has to
    show."""

    def clip(x: Array, low: float, high: float) -> Array:
        if low != -math.inf:
            x = where(x <= low, of_type(low, x.dtype), x)
        return x if high == math.inf else where(x >= high, of_type(high, x.dtype), x)

    return clip


class HostFunction(Protocol):
    """Computes NumPy arrays from two lists of them, and may be called from several threads; `DeviceStep` and
    `DeviceNetwork` are such functions."""

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray], /) -> Any: ...


class RangePrimitives(Protocol):
    """What moves a range."""

    def maximum(self, first: Array, second: Array, /) -> Array: ...
    def minimum(self, first: Array, second: Array, /) -> Array: ...
    def where(self, condition: Array, first: Any, second: Any, /) -> Array: ...

    def to_float(self, x: Any, /) -> Any:
        """A whole number as float32."""


class NumberPrimitives(RangePrimitives, Protocol):
    """What computes integers from trained numbers: NumPy offers this much as well, each operation rounded by itself."""

    def abs(self, x: Array, /) -> Array: ...
    def sign(self, x: Array, /) -> Array: ...
    def sqrt(self, x: Array, /) -> Array: ...
    def square(self, x: Array, /) -> Array: ...

    def exact_sqrt(self, x: Array, /) -> Array:
        """The square root, rounded to the nearest float32."""

    def round(self, x: Array, /) -> Array:
        """To the nearest whole number, halves to even."""

    def amax(self, x: Array, axes: Sequence[int], /) -> Array: ...
    def amin(self, x: Array, axes: Sequence[int], /) -> Array: ...
    def sum(self, x: Array, axes: Sequence[int], /) -> Array: ...

    def reshape(self, x: Array, shape: Sequence[int], /) -> Array:
        """One size may be -1."""

    def moveaxis(self, x: Array, source: int, destination: int, /) -> Array: ...

    def ones_like(self, x: Array, /) -> Array: ...
    def zeros_like(self, x: Array, /) -> Array: ...

    def array(self, values: Any, like: Array, /) -> Array:
        """NumPy values as an array with the type and on the device of another one."""

    def stop_gradient(self, x: Array, /) -> Array: ...

    def straight_through(self, value: Array, gradient_of: Array, /) -> Array:
        """The first one's value with the second one's gradient."""

    def fake_quantize(self, x: Array, minimum: Array, maximum: Array, bits: int, narrow_range: bool, /) -> Array:
        """TensorFlow's fake quantization: per tensor for bounds of rank 0, per channel of the last axis for [d]."""


class Primitives(RealPrimitives[Any], NumberPrimitives, Protocol):
    """What training frameworks offer to the device's declarations (`DeviceOperator.real`) and to the core's steps."""

    def sin(self, x: Array, /) -> Array: ...
    def cos(self, x: Array, /) -> Array: ...
    def ceil(self, x: Array, /) -> Array: ...

    def relu(self, x: Array, /) -> Array: ...
    def relu6(self, x: Array, /) -> Array: ...
    def stack(self, arrays: Sequence[Array], axis: int, /) -> Array: ...


class FunctionalPrimitives(Primitives, Protocol):
    """What `Functional` also needs from JAX and Keras; PyTorch's modules keep statistics and draw noise themselves."""

    def from_numpy(self, values: np.ndarray, /) -> Array: ...

    def batch_norm(
        self,
        x: Array,
        scale: Array,
        offset: Array,
        mean: Array,
        variance: Array,
        epsilon: float,
        share: Any,
        axis: int,
        /,
    ) -> tuple[Array, Array, Array]:
        """With the batch's statistics: the result, and the running mean and (unbiased) variance after this batch, which
        has a share of `share` in them."""

    def dropout(self, x: Array, rate: float, key: Any, kept_axes: Sequence[int] = (), /) -> Array:
        """Each value dropped with a probability, the others scaled up; the same along `kept_axes`."""

    def sorted_values(self, x: Array, /) -> Array:
        """All values, of all replicas, in ascending order; flat."""

    def extremes_of_replicas(self, low: Array, high: Array, /) -> tuple[Array, Array]: ...
    def mean_of_replicas(self, x: Array, /) -> Array: ...
    def count_of_replicas(self) -> int: ...

    def on_host(
        self,
        function: HostFunction,
        like: Array,
        first: Sequence[Array],
        second: Sequence[Array],
        /,
    ) -> Array:
        """What a function of two lists of NumPy arrays returns, with the gradient of `like`."""

    def network_on_host(
        self,
        function: HostFunction,
        like: Callable[[], Sequence[Array]],
        first: Sequence[Array],
        second: Sequence[Array],
        /,
    ) -> list[Array] | None:
        """What a function of two lists of NumPy arrays returns, one array for each of `like()`, with its gradient; None
        if that would cost more than `like()`."""

    def sums_are_exact(self) -> bool:
        """Whether `linear` and `conv` sum whole numbers without rounding, as long as float32 holds every sum of any of
        the products, and `rounded_sums` is available: on CPUs."""

    def numbers_on_host(
        self, function: HostFunction, likes: Sequence[Array], arrays: Sequence[Array], /
    ) -> list[Array]:
        """What a function of NumPy arrays, without a second list, returns; constants with the shapes of `likes`."""

    def rounded_sums(
        self,
        sums: Array,
        scale: Array,
        grid: Array,
        rounding: str,
        exact: Array,
        otherwise: Callable[[], Array],
        /,
    ) -> Array:
        """Sums of whole numbers, channels last, as a device rounds them, with the gradient of what is rounded.

        Args:
            scale, grid, rounding: of the operator `rounded_sums_by_grid`.
            exact: whether float32 holds the sums, bool of rank 0; if not, `otherwise` gives the values.
        """
