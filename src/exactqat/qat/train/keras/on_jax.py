# SPDX-License-Identifier: Apache-2.0
"""What is needed of JAX itself, where it is Keras' backend."""

from ..jax.primitives import fake_quantize, network_on_host, numbers_on_host, on_host, rounded_sums, sums_are_exact
from ..jax.programs import differentiated, program

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
