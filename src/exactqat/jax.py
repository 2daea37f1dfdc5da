# SPDX-License-Identifier: Apache-2.0
"""JAX arrays in, JAX arrays out: every declared operator as an XLA custom call under `jax.custom_vjp`."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from exactqat.cpu import kernels
from exactqat.operators.op import Operator, TensorSpec

_TARGET = "exactqat"
if not hasattr(kernels, "xla_handler"):
    raise ImportError(
        "exactqat was built where jaxlib was not installed; install jax and build exactqat again to use it with JAX"
    )
jax.ffi.register_ffi_target(_TARGET, kernels.xla_handler(), platform="cpu")


def _run(op: Operator, attributes: tuple[tuple[str, Any], ...], *arrays: Any) -> Any:
    lowered = op.lower(tuple(TensorSpec(tuple(a.shape), a.dtype.name) for a in arrays), attributes)
    results = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in lowered.results]
    numbers = {k: np.int64(v) if isinstance(v, int) else np.float64(v) for k, v in lowered.numbers.items()}
    return tuple(
        jax.ffi.ffi_call(_TARGET, results, vmap_method="sequential")(*arrays, kernel=lowered.kernel, **numbers)
    )


@lru_cache
def _differentiable(op: Operator) -> Callable[..., Any]:
    if op.vjp is None:
        return partial(_run, op)
    vjp = op.vjp

    def forward(attributes: Any, *arrays: Any) -> Any:
        # Not `_run`, so that this can be differentiated again.
        results = _call(op.training_form, attributes, arrays)
        kept = [array if name in op.keeps else None for name, array in zip(op.operands, arrays, strict=True)]
        return results[: len(op.results)], (kept, results[op.saved_results])

    def backward(attributes: Any, saved: Any, gradients: Any) -> Any:
        # JAX hands over constants as NumPy arrays. Residuals have no gradients.
        gradients, (arrays, results) = jax.tree.map(jnp.asarray, (gradients[: op.gradient_count], saved))
        answer = vjp(gradients, arrays, results, dict(attributes))
        # None is zero in JAX, too.
        return tuple(g if g is None or a is None else g.astype(a.dtype) for g, a in zip(answer, arrays, strict=True))

    function = jax.custom_vjp(partial(_run, op), nondiff_argnums=(0,))
    function.defvjp(forward, backward)
    return function


@lru_cache
def _jitted(op: Operator) -> Callable[..., Any]:
    return jax.jit(_differentiable(op), static_argnums=0)


def _call(op: Operator, attributes: tuple[tuple[str, Any], ...], arrays: Any) -> Any:
    # Outside of a trace JAX would trace the call every time, which takes a hundred times longer than to look it up.
    tracing = any(isinstance(array, jax.core.Tracer) for array in arrays)
    return (_differentiable(op) if tracing else _jitted(op))(attributes, *arrays)


def call(op: Operator, operands: list[Any], attributes: dict[str, Any], out: tuple[Any, ...] | None = None) -> Any:
    """Run `op` on JAX arrays; numbers and lists become float64 beside a float64 array, else float32."""
    if out is not None:
        raise TypeError(f"{op.name}: out cannot be used with JAX arrays, which never change")
    dtype = next(value.dtype for value in operands if isinstance(value, jax.Array))
    dtype = jnp.float64 if dtype == jnp.float64 else jnp.float32
    arrays = [v if isinstance(v, jax.Array) else jnp.asarray(v, dtype) for v in operands]
    return op.wrap(_call(op, tuple(attributes.items()), arrays))


def pass_through(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """`function(*arrays)`, through which gradients pass unchanged, output by output."""
    passing = jax.custom_vjp(function)
    passing.defvjp(
        lambda *inputs: (function(*inputs), None),
        lambda _, gradients: tuple(gradients) if isinstance(gradients, tuple | list) else (gradients,),
    )
    return passing(*arrays)
