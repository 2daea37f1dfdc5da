# SPDX-License-Identifier: Apache-2.0
"""Functions of NumPy arrays in compiled programs.

On a CPU, XLA calls them on its own memory with a custom call: nothing is copied, and JAX is not involved. Elsewhere it
is `jax.pure_callback`. In a program for several CPUs each of them computes all examples; one for several accelerators
computes fake quantization in their place.
"""

from __future__ import annotations

import ctypes
import math
import secrets
import traceback
import warnings
import weakref
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from exactqat.operators.jax import host_target

from ....kit.planning.callers import users_line
from ..core.primitives import HostFunction

EXPORT = (
    "a frozen network computes its device's integers on this host, which jax.export cannot take along: prepare it with "
    "device=None, or deploy the graph that lower gives"
)

_call = Primitive("exactqat_host")
_call.multiple_results = True


def call(
    function: HostFunction, likes: Sequence[jax.Array], trained: Sequence[jax.Array], features: Sequence[jax.Array]
) -> list[jax.Array]:
    """One array for each of `likes`, which are fake-quantized, with its type."""
    arrays = [jnp.asarray(array) for array in (*likes, *trained, *features)]
    return list(_call.bind(*map(lax.stop_gradient, arrays), function=function, likes=len(likes), trained=len(trained)))


@cache
def is_custom_call() -> bool:
    """Whether programs for the default device have it."""
    return jax.default_backend() == "cpu" and host_target(_answer) is not None


# --- calls from programs ----------------------------------------------------------------------------------------------


# Functions that programs call, with how many of their operands are trained (the first ones), the dtypes of operands and
# of results. By numbers unique to this process: a program compiled elsewhere finds nothing here.
_known: dict[int, tuple[weakref.ref[Any], int, list[str], list[str]]] = {}
# Addresses and shapes.
Places = Sequence[tuple[int, tuple[int, ...]]]


def _answer(number: int, operands: Places, results: Places) -> str | None:
    """Fills the results, or says why not."""
    known, trained, of_operands, of_results = _known.get(number, (lambda: None, 0, [], []))
    function = known()
    if function is None:
        return "the prepared network that this program computes is no longer there: keep it, too"
    arrays = [_array(*place, dtype) for place, dtype in zip(operands, of_operands, strict=True)]
    for array in arrays:
        array.flags.writeable = False
    try:
        computed = _computed(function, trained, arrays)
        for place, value, dtype in zip(results, computed, of_results, strict=True):
            _array(*place, dtype)[...] = value
    except ValueError as error:  # weights that the device cannot take
        return str(error)
    except Exception:
        return traceback.format_exc()
    return None


def _array(address: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size == 0:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(address)
    return np.ndarray(shape, dtype, memory)


def _computed(function: HostFunction, trained: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    results = function(arrays[:trained], arrays[trained:])
    return [results] if isinstance(results, np.ndarray) else list(results)


# --- rules of the primitive -------------------------------------------------------------------------------------------


@_call.def_impl
def _(*arrays: Array, function: HostFunction, likes: int, trained: int) -> list[Array]:
    types, arrays = arrays[:likes], arrays[likes:]
    results = _computed(function, trained, [np.asarray(array) for array in arrays])
    spread = next((array.sharding for array in arrays if isinstance(array.sharding, NamedSharding)), None)
    place = next(iter(arrays[-1].devices())) if spread is None else NamedSharding(spread.mesh, PartitionSpec())
    return [jax.device_put(np.asarray(x, like.dtype), place) for x, like in zip(results, types, strict=True)]


@_call.def_abstract_eval
def _(*avals: ShapedArray, function: HostFunction, likes: int, trained: int) -> list[ShapedArray]:
    return list(avals[:likes])


def _batched(
    arrays: Sequence[Array], dims: Sequence[int | None], **parameters: object
) -> tuple[list[Array], list[int]]:
    """Runs the batch one by one."""
    mapped = [dim is not None for dim in dims]
    moved = [jnp.moveaxis(array, dim, 0) for array, dim in zip(arrays, dims, strict=True) if dim is not None]

    def one(members: list[Array]) -> list[Array]:
        rest = iter(members)
        operands = [next(rest) if maps else array for array, maps in zip(arrays, mapped, strict=True)]
        return _call.bind(*operands, **parameters)

    results = jax.lax.map(one, moved)
    return results, [0] * len(results)


batching.primitive_batchers[_call] = _batched


def _lower(context: Any, *values: Any, function: HostFunction, likes: int, trained: int, on_cpu: bool = False) -> Any:
    module = context.module_context
    if getattr(module.lowering_parameters, "for_export", False):
        raise NotImplementedError(EXPORT)
    if getattr(module.axis_context, "num_devices", 1) > 1 and not is_custom_call():
        # A device that waits for the host would keep others from synchronizing with it, which may end the process.
        warnings.warn(
            "on several devices other than CPUs a frozen network stays fake quantization, which rounds sums otherwise "
            "than the target, in up to some percent of a deep network's codes; evaluate on one device, or say "
            "device=None in prepare",
            stacklevel=users_line(),
        )
        return values[:likes]
    context = context.replace(avals_in=context.avals_in[likes:])
    values = values[likes:]
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in context.avals_out]
    if on_cpu and (target := host_target(_answer)) is not None:
        module.add_keepalive(function)
        number = secrets.randbits(62)
        operands, results = ([aval.dtype.name for aval in avals] for avals in (context.avals_in, context.avals_out))
        _known[number] = weakref.ref(function), trained, operands, results
        weakref.finalize(function, _known.pop, number, None)
        custom_call = partial(jax.ffi.ffi_call(target, types), function=np.int64(number))
        return mlir.lower_fun(custom_call, multiple_results=True)(context, *values)

    def called(*arrays: Array) -> list[np.ndarray]:
        results = _computed(function, trained, [np.asarray(array) for array in arrays])
        return [np.asarray(x, like.dtype) for x, like in zip(results, types, strict=True)]

    return mlir.lower_fun(partial(jax.pure_callback, called, types), multiple_results=True)(context, *values)


mlir.register_lowering(_call, partial(_lower, on_cpu=True), platform="cpu")
mlir.register_lowering(_call, _lower)
