# SPDX-License-Identifier: Apache-2.0
"""What is needed of TensorFlow itself, where it is Keras' backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..core import primitives as core
from ..core.primitives import HostFunction

fake_quantize = core.fake_quantize


def on_host(
    function: HostFunction, like: tf.Tensor, first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]
) -> tf.Tensor:
    count = len(first)

    def called(*arrays: np.ndarray) -> np.ndarray:
        return np.asarray(function(list(arrays[:count]), list(arrays[count:])), np.float32)

    operands = [tf.stop_gradient(tensor) for tensor in (*first, *second)]
    result = tf.numpy_function(called, operands, tf.float32, stateful=False)
    result.set_shape(like.shape)
    # Infinity has no difference to itself: a pad before a pool.
    like = tf.where(tf.math.is_inf(like), 0.0, like)
    return tf.stop_gradient(result) + (like - tf.stop_gradient(like))


def network_on_host(
    function: HostFunction,
    like: Callable[[], Sequence[tf.Tensor]],
    first: Sequence[tf.Tensor],
    second: Sequence[tf.Tensor],
) -> None:
    """Whether gradients will be asked for is not known."""


def sums_are_exact() -> bool:
    return False


# There is no such operator; they are called where sums are exact.
numbers_on_host = rounded_sums = None


def differentiated(
    step: Callable[..., tuple[tf.Tensor, Any]], leaves: Mapping[str, tf.Tensor], others: Mapping[str, tf.Tensor]
) -> tuple[dict[str, tf.Tensor], Any]:
    """Gradients of what ``step(leaves, others)`` returns first, by the names of leaves, and what it returns second."""
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        total, results = step(leaves, others)
    gradients = tape.gradient(total, list(leaves.values()))
    return {name: gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}, results
