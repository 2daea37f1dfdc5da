# SPDX-License-Identifier: Apache-2.0
"""Programs that run once or a few times: compile time matters more than run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
from jax import Array

_COMPILING = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def program(function: Callable[..., Any]) -> Any:
    """The function, compiled as a whole: each of its operations by itself takes longer."""
    return jax.jit(function, compiler_options=_options())


def differentiated(
    step: Callable[..., tuple[Any, Any]], leaves: Mapping[str, Array], others: Mapping[str, Array]
) -> tuple[dict[str, Array], Any]:
    """Gradients of what ``step(leaves, others)`` returns first, by the names of leaves, and what it returns second."""
    return jax.grad(step, has_aux=True)(dict(leaves), dict(others))


@cache
def _options() -> dict[str, Any] | None:
    """None where XLA does not know them: on accelerators, and in other versions."""
    try:
        jax.jit(lambda: 0, compiler_options=_COMPILING)()
    except jax.errors.JaxRuntimeError:
        return None
    return _COMPILING
