# SPDX-License-Identifier: Apache-2.0
"""Layers that say what they are while a function is traced: batch norm, other norms, dropout, resizing.

In a jaxpr they would be a dozen equations, and not the same in training and evaluation. So each becomes one
equation of a primitive of our own. Flax's layers do so by themselves; for plain functions there are `batch_norm` and
`dropout` of `exactqat.qat.jax`.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from ..core.builder import Moving, entering
from ..core.expressions import Dropout
from ..core.refusals import Refused
from .converter import Converter, Operation, handles
from .items import Fixed, Item

_LAYER = Primitive("exactqat_layer")
_capturing: ContextVar[bool] = ContextVar("exactqat_capturing", default=False)
_patching = threading.RLock()

Attributes = tuple[tuple[str, Any], ...]


@_LAYER.def_abstract_eval
def _(x: Any, *tensors: object, shape: tuple[int, ...] | None, **params: object) -> Any:
    return x.update(shape=x.shape if shape is None else shape, weak_type=False)


def _batched(operands: Sequence[jax.Array], axes: Sequence[Any], **params: Any) -> tuple[jax.Array, int]:
    """Under `vmap`: one axis more in front."""
    x, *tensors = operands
    if any(axis is not None for axis in axes[1:]):
        raise NotImplementedError("a layer with parameters for each member of a vmap")
    x = jnp.moveaxis(x, axes[0], 0)
    moved = dict(params["attributes"])
    moved |= {key: tuple(axis + 1 for axis in moved[key]) for key in ("axes", "kept_axes") if key in moved}
    moved |= {key: moved[key] + 1 for key in ("channel_axis",) if key in moved}
    shape = None if params["shape"] is None else (x.shape[0], *params["shape"])
    return _LAYER.bind(x, *tensors, **{**params, "attributes": tuple(moved.items()), "shape": shape}), 0


batching.primitive_batchers[_LAYER] = _batched


def capturing() -> bool:
    """Whether a function is being traced for its network."""
    return _capturing.get()


def layer(
    kind: str, x: Any, *tensors: Any, shape: tuple[int, ...] | None = None, trains: bool = True, **attributes: Any
) -> jax.Array:
    """One equation for a step of this kind; tensors may be None.

    trains: whether the call asks for what it does in training.
    """
    x = jnp.asarray(x)
    return _LAYER.bind(
        x,
        *(jnp.asarray(tensor) for tensor in tensors if tensor is not None),
        kind=kind,
        present=tuple(tensor is not None for tensor in tensors),
        attributes=tuple(attributes.items()),
        shape=shape,
        trains=trains,
    )


@handles("exactqat_layer")
def _layer(c: Converter, operation: Operation, x: Moving, *operands: Item) -> Item:
    params, rest = operation.params, iter(operands)
    if not all(isinstance(item, Fixed) for item in operands):
        raise Refused("its parameters depend on the input")
    tensors: list[Any] = [next(rest) if present else None for present in params["present"]]
    attributes = dict(params["attributes"])
    if params["kind"] == "batch_norm":
        if any(item is not None and not item.node.path and item.node.function is not None for item in tensors[2:]):
            raise Refused("its statistics are computed; they must be leaves of the parameters, which training moves")
        attributes["training"] = id(operation.equation) not in c.fixed_in_training
    shape = operation.shape
    module = next((c.module_of(tensor) for tensor in tensors if tensor is not None), "")
    if params["kind"] == "group_norm":
        return c.group_norm(x, tensors, module, **attributes)
    if params["kind"] == "dropout" and id(operation.equation) in c.fixed_in_training:
        return x
    if params["kind"] == "dropout":
        expression = Dropout(attributes["rate"], attributes["kept_axes"])
        return c.emit("dropout", [x], shape, expression=expression)
    return c.emit(params["kind"], [x, *tensors], shape, module=module, **attributes)


# --- Flax -------------------------------------------------------------------------------------------------------------

# By the name of the layer's class: (layer, x, get, flag) -> the result, or None where it is to be traced as it is.
# `get` gives a parameter or a statistic by its name, or None; `flag` what the call, or else the layer, says of a name.
Get = Callable[[str], Any]
_LAYERS: dict[str, Callable[[Any, jax.Array, Get, Get], jax.Array | None]] = {}
_flax = entering(_LAYERS)


def _one_axis(module: Any, x: jax.Array, name: str) -> int | None:
    axis = getattr(module, name, -1)
    axis = axis[0] if isinstance(axis, tuple | list) and len(axis) == 1 else axis
    return axis % x.ndim if isinstance(axis, int) else None


@_flax("BatchNorm")
def _batch_norm(module: Any, x: jax.Array, get: Get, flag: Get) -> jax.Array | None:
    axis, trains = _one_axis(module, x, "axis"), not flag("use_running_average")
    if axis is None:
        return None
    tensors = [get(name) for name in ("scale", "bias", "mean", "var")]
    how: dict[str, Any] = {"epsilon": float(module.epsilon), "momentum": 1.0 - float(module.momentum), "biased": True}
    return layer("batch_norm", x, *tensors, channel_axis=axis, trains=trains, **how)


@_flax("Dropout")
def _dropout(module: Any, x: jax.Array, get: Get, flag: Get) -> jax.Array | None:
    rate, kept = float(module.rate), tuple(axis % x.ndim for axis in module.broadcast_dims)
    return x if rate == 0 else layer("dropout", x, rate=rate, kept_axes=kept, trains=not flag("deterministic"))


@_flax("LayerNorm", "RMSNorm")
def _layer_norm(module: Any, x: jax.Array, get: Get, flag: Get) -> jax.Array | None:
    if any(_one_axis(module, x, name) != x.ndim - 1 for name in ("reduction_axes", "feature_axes")):
        return None
    root = any(base.__name__ == "RMSNorm" for base in type(module).__mro__)
    weights = [get("scale")] if root else [get("scale"), get("bias")]
    return layer("rms_norm" if root else "layer_norm", x, *weights, axes=(x.ndim - 1,), epsilon=float(module.epsilon))


@_flax("GroupNorm", "InstanceNorm")
def _group_norm(module: Any, x: jax.Array, get: Get, flag: Get) -> jax.Array | None:
    """Groups of instance norm are single channels."""
    axis, instances = x.ndim - 1, not hasattr(module, "num_groups")
    whole = getattr(module, "reduction_axes", None) is None
    if x.ndim < 3 or not (_one_axis(module, x, "feature_axes") == axis if instances else whole):
        return None
    size = 1 if instances else int(module.group_size or 0)
    how: dict[str, Any] = {
        "groups": x.shape[axis] // size if size else int(module.num_groups),
        "epsilon": float(module.epsilon),
    }
    return layer("group_norm", x, get("scale"), get("bias"), channel_axis=axis, **how)


def _flag(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Get:
    """What a call of a layer says of a flag that only it or the layer has; it is the call's second argument."""

    def flag(name: str) -> Any:
        value = kwargs.get(name, args[1] if len(args) > 1 else None)
        return getattr(module, name, None) if value is None else value

    return flag


def _linen(next_function: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """An interceptor of Linen's methods."""
    import flax.linen as nn

    # Bound by a partial; the name says whose method it is, a subclass's or the layer's own.
    method_ = getattr(context.orig_method, "func", context.orig_method)
    qualified = getattr(method_, "__qualname__", "")
    name, _, method = qualified.partition(".")
    known = getattr(nn, name, None) if name in _LAYERS else None
    masked = kwargs.get("mask") is not None
    if method == "__call__" and known is not None and isinstance(context.module, known) and args and not masked:
        tensors: dict[str, Any] = {}
        if name != "Dropout":
            for collection in context.module.variables.values():
                tensors.update(collection)
        result = _LAYERS[name](context.module, args[0], tensors.get, _flag(context.module, args, kwargs))
        if result is not None:
            return result
    return next_function(*args, **kwargs)


def _nnx(name: str, original: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A layer's `__call__` in NNX."""

    def call(self: Any, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        def get(tensor: str) -> jax.Array | None:
            held = getattr(self, tensor, None)
            return None if held is None else held[...]

        flag = _flag(self, (x, *args), kwargs)
        result = _LAYERS[name](self, x, get, flag) if kwargs.get("mask") is None else None
        return original(self, x, *args, **kwargs) if result is None else result

    return call


def _attention_weights(original: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Attention's dropout as a layer of its own."""

    def weights(*args: Any, **kwargs: Any) -> jax.Array:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        rate, deterministic = float(arguments["dropout_rate"]), arguments["deterministic"]
        arguments.update(dropout_rate=0.0, deterministic=True)
        result = original(*call.args, **call.kwargs)
        if rate == 0:
            return result
        kept = tuple(range(arguments["key"].ndim - 2)) if arguments["broadcast_dropout"] else ()
        return layer("dropout", result, rate=rate, kept_axes=kept, trains=not deterministic)

    return weights


# --- resizing ---------------------------------------------------------------------------------------------------------


def _resize(original: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def resize(image: jax.Array, shape: Sequence[int], method: Any, *rest: Any, **others: Any) -> jax.Array:
        sizes, word = tuple(shape), getattr(method, "name", str(method)).lower()
        changed = [axis for axis, (a, b) in enumerate(zip(image.shape, sizes, strict=True)) if a != b]
        factors = [sizes[axis] / image.shape[axis] for axis in changed]
        nearest = word == "nearest" and all(factor == int(factor) for factor in factors)
        linear = word in ("linear", "bilinear", "triangle") and all(factor > 1 for factor in factors)
        channels = [axis for axis in (3, 1) if axis not in changed]
        if not (len(sizes) == 4 and changed and changed[0] > 0 and (nearest or linear) and channels):
            return original(image, shape, method, *rest, **others)
        size = tuple(sizes[axis] for axis in (1, 2, 3) if axis != channels[0])
        how: dict[str, Any] = {"mode": "nearest" if nearest else "bilinear", "align_corners": False, "scales": None}
        return layer("resize", image, shape=sizes, size=size, channel_axis=channels[0], **how)

    return resize


@contextmanager
def telling() -> Iterator[None]:
    """While a function is traced for its network."""
    token = _capturing.set(True)
    with context_of_its_own(), ExitStack() as stack:
        try:
            if sys.modules.get("flax") is not None:
                from flax import linen, nnx

                stack.enter_context(linen.intercept_methods(_linen))
                # What is computed again in the backward pass is the same network. Through `checkpoint`, what Flax hands
                # in comes out as another array, though nothing changed it.
                # Both are also decorators with settings.
                same = lambda f=None, **settings: (lambda g: g) if f is None else f  # noqa: E731
                for name in ("checkpoint", "remat"):
                    stack.enter_context(replacing(jax, name, same))
                for file in ("flax.linen.attention", "flax.nnx.nn.attention"):
                    owner, name = sys.modules.get(file), "dot_product_attention_weights"
                    if hasattr(owner, name):
                        stack.enter_context(replacing(owner, name, _attention_weights(getattr(owner, name))))
                for name in _LAYERS:
                    owner = getattr(nnx, name, None)
                    if owner is not None:
                        stack.enter_context(replacing(owner, "__call__", _nnx(name, owner.__call__)))
            scale = sys.modules.get("jax._src.image.scale")
            if scale is not None and hasattr(scale, "_resize"):
                stack.enter_context(replacing(scale, "_resize", _resize(scale._resize)))
            yield
        finally:
            _capturing.reset(token)


@contextmanager
def context_of_its_own() -> Iterator[None]:
    """What is traced here is no part of what JAX remembers of the functions that the user has compiled."""
    with _patching, jax.default_matmul_precision("float32"):
        yield


@contextmanager
def replacing(owner: object, name: str, value: object) -> Iterator[None]:
    """Another value of an attribute, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
