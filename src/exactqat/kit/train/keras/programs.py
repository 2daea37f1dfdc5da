# SPDX-License-Identifier: Apache-2.0
"""Functions that run once or a few times. JAX would compile each of their operations by itself, which takes longer than
all of them in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

# Compile time matters more than run time.
_COMPILING = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def program(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of tensors, compiled as a whole on JAX."""
    if keras.backend.backend() != "jax":
        return function
    import jax

    # Elsewhere these options are unknown.
    return jax.jit(function, compiler_options=_COMPILING if jax.default_backend() == "cpu" else None)
