# SPDX-License-Identifier: Apache-2.0
"""What is needed of JAX itself, where it is Keras' backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..jax.primitives import fake_quantize, network_on_host, numbers_on_host, on_host, rounded_sums, sums_are_exact
from ..jax.programs import program

Step = Callable[..., tuple[Any, Any]]


def differentiated(step: Step, leaves: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Gradients of what ``step(leaves, others)`` returns first, by the names of leaves, and what it returns second."""
    return jax.grad(step, has_aux=True)(leaves, others)


__all__ = [
    "differentiated",
    "fake_quantize",
    "network_on_host",
    "numbers_on_host",
    "on_host",
    "program",
    "rounded_sums",
    "sums_are_exact",
]
