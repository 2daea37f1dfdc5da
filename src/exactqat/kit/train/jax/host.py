# SPDX-License-Identifier: Apache-2.0
"""Functions of NumPy arrays in compiled programs.

On a CPU, XLA calls them on its own memory with a custom call: nothing is copied, JAX is not involved, and if arrays are
sharded over several devices each of them computes its own examples. Elsewhere it is `jax.pure_callback`.
"""

from __future__ import annotations

import ctypes
import math
import secrets
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from exactqat.operators.jax import CAN_CUT, aval_of, current_mesh, host_target

from ..core.primitives import HostFunction

EXPORT = (
    "a frozen network computes its device's integers on this host, which jax.export cannot take along: prepare it with "
    "device=None, or deploy the graph that lower gives"
)


@dataclass(frozen=True)
class _Signature:
    """trained: how many of the operands are. Then the dtypes of all operands and results."""

    trained: int
    operands: tuple[str, ...]
    results: tuple[str, ...]


_call = Primitive("exactqat_host")
_call.multiple_results = True


def call(
    function: HostFunction, likes: Sequence[jax.Array], trained: Sequence[jax.Array], features: Sequence[jax.Array]
) -> list[jax.Array]:
    """One array for each of `likes`, with its type."""
    arrays = [jnp.asarray(each) for each in (*trained, *features)]
    avals = tuple(aval_of(each) for each in likes)
    cut = None
    if jax.device_count() > 1 and not getattr(current_mesh(), "manual_axes", ()):
        cut = _in_parts(function, avals, len(trained), arrays)
    return list(_call.bind(*arrays, function=function, likes=avals, trained=len(trained), parts=cut, kept=True))


@cache
def is_custom_call() -> bool:
    """Whether programs for the default device have it; they may be sharded over several devices."""
    return jax.default_backend() == "cpu" and CAN_CUT and host_target(_answer) is not None


# --- calls from programs ----------------------------------------------------------------------------------------------

# By numbers unique to this process: a program compiled elsewhere finds nothing here.
_functions: dict[int, tuple[weakref.ref[Any], _Signature]] = {}
_numbers: weakref.WeakKeyDictionary[Any, dict[_Signature, int]] = weakref.WeakKeyDictionary()


def _number_of(function: HostFunction, signature: _Signature) -> int:
    known = _numbers.setdefault(function, {})
    if signature not in known:
        number = known[signature] = secrets.randbits(62)
        _functions[number] = (weakref.ref(function), signature)
        weakref.finalize(function, _functions.pop, number, None)
    return known[signature]


def _answer(
    number: int, operands: Sequence[tuple[int, tuple[int, ...]]], results: Sequence[tuple[int, tuple[int, ...]]]
) -> str | None:
    """Fills the results, or says why not; both are addresses and shapes."""
    reference, signature = _functions.get(number, (None, None))
    function = None if reference is None else reference()
    if function is None or signature is None:
        return "the prepared network that this program computes is no longer there: keep it, too"
    given = [_array(*each, dtype) for each, dtype in zip(operands, signature.operands, strict=True)]
    for each in given:
        each.flags.writeable = False
    try:
        made = _computed(function, signature.trained, given)
        for place, value, dtype in zip(results, made, signature.results, strict=True):
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
    made = function(arrays[:trained], arrays[trained:])
    return [made] if isinstance(made, np.ndarray) else list(made)


# --- rules of the primitive -------------------------------------------------------------------------------------------


@_call.def_impl
def _(*arrays: Any, function: HostFunction, likes: Any, trained: int, parts: Any, kept: bool) -> list[Any]:
    made = _computed(function, trained, [np.asarray(each) for each in arrays])
    spread = next((each.sharding for each in arrays[trained:] if len(each.devices()) > 1), None)
    if isinstance(spread, NamedSharding) and function.batch_axes is not None:
        cut = _Cut(function, likes, trained, spread.mesh, [each.sharding for each in arrays])
        places: Sequence[Any] = cut.results
    else:
        places = [next(iter(arrays[-1].devices()))] * len(made)
    pairs = zip(made, likes, places, strict=True)
    return [jax.device_put(np.asarray(each, like.dtype), place) for each, like, place in pairs]


@_call.def_abstract_eval
def _(*avals: Any, function: HostFunction, likes: Any, trained: int, parts: Any, kept: bool) -> list[Any]:
    return list(likes)


def _batched(arrays: Any, dims: Any, *, function: Any, likes: Any, trained: int, parts: Any, kept: bool) -> Any:
    """Runs the batch one by one."""
    mapped = [dim is not None for dim in dims]
    moved = [jnp.moveaxis(each, dim, 0) for each, dim, maps in zip(arrays, dims, mapped, strict=True) if maps]

    def one(members: Any) -> Any:
        rest = iter(members)
        given = [next(rest) if maps else each for each, maps in zip(arrays, mapped, strict=True)]
        return _call.bind(*given, function=function, likes=likes, trained=trained, parts=None, kept=kept)

    results = jax.lax.map(one, moved)
    return results, [0] * len(results)


batching.primitive_batchers[_call] = _batched


def _plain(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _refuse_export(context: Any) -> None:
    if getattr(context.module_context.lowering_parameters, "for_export", False):
        raise NotImplementedError(EXPORT)


def _lower_on_cpu(
    context: Any, *values: Any, function: HostFunction, likes: Any, trained: int, parts: Any, kept: bool
) -> Any:
    _refuse_export(context)
    target = host_target(_answer)
    if target is None:
        return _lower_elsewhere(
            context, *values, function=function, likes=likes, trained=trained, parts=parts, kept=kept
        )
    if kept:
        context.module_context.add_keepalive(function)
    if parts is not None:
        return mlir.lower_fun(jaxpr_as_fun(parts), multiple_results=True)(context, *values)
    operands, results = (tuple(each.dtype.name for each in avals) for avals in (context.avals_in, context.avals_out))
    number = _number_of(function, _Signature(trained, operands, results))

    def calling(*arrays: Any) -> Any:
        return jax.ffi.ffi_call(target, [_plain(each) for each in context.avals_out])(
            *arrays, function=np.int64(number)
        )

    return mlir.lower_fun(calling, multiple_results=True)(context, *values)


def _lower_elsewhere(
    context: Any, *values: Any, function: HostFunction, likes: Any, trained: int, parts: Any, kept: bool
) -> Any:
    _refuse_export(context)

    def called(*arrays: Any) -> list[np.ndarray]:
        made = _computed(function, trained, [np.asarray(each) for each in arrays])
        return [np.asarray(each, like.dtype) for each, like in zip(made, context.avals_out, strict=True)]

    def calling(*arrays: Any) -> Any:
        return jax.pure_callback(called, [_plain(each) for each in context.avals_out], *arrays)

    return mlir.lower_fun(calling, multiple_results=True)(context, *values)


mlir.register_lowering(_call, _lower_on_cpu, platform="cpu")
mlir.register_lowering(_call, _lower_elsewhere)


# --- several devices --------------------------------------------------------------------------------------------------


class _Cut:
    """A call on parts of the batch, sharded like the first feature that is split along it.

    Attributes:
        parts: how many.
        operands, results: how each array is sharded.
    """

    def __init__(self, function: HostFunction, likes: Any, trained: int, mesh: Any, given: Sequence[Any]) -> None:
        axes = function.batch_axes
        assert axes is not None
        found = None
        for axis, sharding in zip(axes[0], given[trained:], strict=True):
            spec = sharding.spec
            if found is None and axis < len(spec) and spec[axis]:
                found = spec[axis]
        names = () if found is None else (found,) if isinstance(found, str) else tuple(found)
        parts = math.prod(mesh.shape[name] for name in names)
        if any(like.shape[axis] % parts for like, axis in zip(likes, axes[1], strict=True)):
            parts, found = 1, None
        self.parts = parts
        specs = [PartitionSpec()] * trained + [PartitionSpec(*[None] * axis, found) for axis in axes[0]]
        self.operands = [NamedSharding(mesh, spec) for spec in specs]
        self.results = [NamedSharding(mesh, PartitionSpec(*[None] * axis, found)) for axis in axes[1]]


def _in_parts(function: HostFunction, likes: Any, trained: int, arrays: Sequence[Any]) -> Any:
    """The call as XLA may split it; None if it may not."""
    axes = function.batch_axes
    if axes is None or not CAN_CUT:
        return None
    features = arrays[trained:]
    sizes = {each.shape[axis] for each, axis in zip((*features, *likes), (*axes[0], *axes[1]), strict=True)}
    if len(sizes) != 1 or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None

    def alone(arrays: Any, likes: Any) -> Any:
        return tuple(
            _call.bind(*arrays, function=function, likes=tuple(likes), trained=trained, parts=None, kept=False)
        )

    plain = [jax.core.ShapedArray(each.shape, each.dtype) for each in likes]

    @custom_partitioning
    def whole(*arrays: Any) -> Any:
        return alone(arrays, plain)

    def partition(mesh: Any, given: Any, asked: Any) -> Any:
        cut = _Cut(function, likes, trained, mesh, [each.sharding for each in given])
        local = []
        for like, axis in zip(likes, axes[1], strict=True):
            shape = list(like.shape)
            shape[axis] //= cut.parts
            local.append(jax.core.ShapedArray(tuple(shape), like.dtype))
        return mesh, lambda *arrays: alone(arrays, local), tuple(cut.results), tuple(cut.operands)

    def infer(mesh: Any, given: Any, asked: Any) -> Any:
        return tuple(_Cut(function, likes, trained, mesh, [each.sharding for each in given]).results)

    others: list[str] = []

    def mapping(rank: int, axis: int | None) -> Any:
        names = []
        for at in range(rank):
            if at != axis:
                others.append(f"whole{len(others)}")
            names.append("batch" if at == axis else others[-1])
        return ArrayMapping(*names)

    operands = [mapping(each.ndim, None) for each in arrays[:trained]]
    operands += [mapping(each.ndim, axis) for each, axis in zip(features, axes[0], strict=True)]
    results = [mapping(len(each.shape), axis) for each, axis in zip(likes, axes[1], strict=True)]
    rule = SdyShardingRule(tuple(operands), tuple(results), need_replication_factors=tuple(others))
    whole.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return jax.make_jaxpr(whole)(*map(_plain, arrays))
