# SPDX-License-Identifier: Apache-2.0
"""What a framework offers to the training core and to the device's declarations.

Each protocol is implemented by a module of functions: `train.torch.primitives`, `train.jax.primitives`,
`train.keras.primitives` and, as far as integers need it, `train.core.primitives_numpy`. Arrays are the framework's own,
float32 unless said otherwise; `axis` and `axes` may be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Array = Any
Pairs = Sequence[Sequence[int]]


class HostFunction(Protocol):
    """Computes NumPy arrays from two lists of them, and may be called from several threads; `DeviceStep` and
    `DeviceNetwork` are such functions."""

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray], /) -> Any: ...


class RangePrimitives(Protocol):
    """What moves a range: `ranges.scalars` offers this much for NumPy's numbers."""

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


class Primitives(NumberPrimitives, Protocol):
    """What training frameworks offer to the device's declarations (`DeviceOperator.real`) and to the core's steps."""

    def exp(self, x: Array, /) -> Array: ...
    def expm1(self, x: Array, /) -> Array: ...
    def log(self, x: Array, /) -> Array: ...
    def log1p(self, x: Array, /) -> Array: ...
    def rsqrt(self, x: Array, /) -> Array: ...
    def sin(self, x: Array, /) -> Array: ...
    def cos(self, x: Array, /) -> Array: ...
    def tanh(self, x: Array, /) -> Array: ...
    def sigmoid(self, x: Array, /) -> Array: ...
    def erf(self, x: Array, /) -> Array: ...
    def floor(self, x: Array, /) -> Array: ...
    def ceil(self, x: Array, /) -> Array: ...

    def clip(self, x: Array, low: float, high: float, /) -> Array:
        """Either end may be infinite. No gradient at the ends, as ReLU has none at 0."""

    def relu(self, x: Array, /) -> Array: ...
    def relu6(self, x: Array, /) -> Array: ...
    def mean(self, x: Array, axes: int | Sequence[int], keep_dims: bool = False, /) -> Array: ...

    def argmax(self, x: Array, axis: int, keep_dims: bool = False, /) -> Array:
        """Where the largest value is, the first of equal ones; int32."""

    def argmin(self, x: Array, axis: int, keep_dims: bool = False, /) -> Array:
        """Where the smallest value is, the first of equal ones; int32."""

    def softmax(self, x: Array, axis: int, /) -> Array: ...
    def log_softmax(self, x: Array, axis: int, /) -> Array: ...
    def transpose(self, x: Array, permutation: Sequence[int], /) -> Array: ...

    def concatenate(self, arrays: Sequence[Array], axis: int, /) -> Array:
        """Where other axes differ, sizes of 1 are repeated, such as a constant next to a batch."""

    def stack(self, arrays: Sequence[Array], axis: int, /) -> Array: ...
    def flip(self, x: Array, axes: int | Sequence[int], /) -> Array: ...
    def slice(self, x: Array, axis: int, start: int, stop: int, step: int = 1, /) -> Array: ...
    def gather(self, x: Array, indices: Sequence[int], axis: int, /) -> Array: ...

    def embedding(self, indices: Array, table: Array, fixed_row: int | None = None, /) -> Array:
        """Rows of a table [rows, features] by integers of any dtype; the fixed row, if there is one, gets no
        gradient."""

    def pad(self, x: Array, pairs: Pairs, value: float = 0.0, /) -> Array: ...

    def pad_reflect(self, x: Array, pairs: Pairs, mode: str, /) -> Array:
        """mode: "SYMMETRIC" repeats the edge, "REFLECT" does not."""

    def linear(self, x: Array, weight: Array, bias: Array | None = None, /) -> Array:
        """Over the last axis; weight [out, in]."""

    def matmul(self, first: Array, second: Array, /) -> Array: ...

    def conv(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        strides: Sequence[int],
        padding: Pairs,
        dilations: Sequence[int],
        groups: int = 1,
        channel_axis: int = 1,
    ) -> Array:
        """weight [out, in / groups, *window]; without spatial axes: x [batch, in], weight [out, in / groups]."""

    def conv_transpose(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        strides: Sequence[int],
        padding: Pairs,
        output_padding: Sequence[int],
        dilations: Sequence[int],
        groups: int = 1,
        channel_axis: int = 1,
    ) -> Array:
        """weight [in, out / groups, *window]; padding: what is cropped from the result before and after."""

    def max_pool(
        self, x: Array, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1
    ) -> Array:
        """Padding is below all values."""

    def sum_pool(
        self, x: Array, window: Sequence[int], strides: Sequence[int], padding: Pairs, channel_axis: int = 1
    ) -> Array:
        """Padding is 0."""


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
