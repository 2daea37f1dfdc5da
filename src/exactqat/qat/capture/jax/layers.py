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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from ..core.expressions import Dropout
from ..core.refusals import Refused
from .converter import Converter, Operation, handles
from .items import Fixed, Item

_LAYER = Primitive("exactqat_layer")
_capturing: ContextVar[bool] = ContextVar("exactqat_capturing", default=False)
_patching = threading.RLock()

Attributes = tuple[tuple[str, Any], ...]


@_LAYER.def_abstract_eval
def _(x: Any, *tensors: Any, shape: tuple[int, ...] | None, **params: Any) -> Any:
    return x.update(shape=x.shape if shape is None else shape, weak_type=False)


def _batched(operands: Sequence[Any], axes: Sequence[Any], *, attributes: Attributes, shape: Any, **params: Any) -> Any:
    """Under `vmap`: one axis more in front."""
    x, *tensors = operands
    if any(axis is not None for axis in axes[1:]):
        raise NotImplementedError("a layer with parameters for each member of a vmap")
    x = jnp.moveaxis(x, axes[0], 0)
    shifted = {
        key: tuple(each + 1 for each in value)
        if key in ("axes", "kept_axes")
        else value + 1
        if key == "channel_axis"
        else value
        for key, value in attributes
    }
    shape = None if shape is None else (x.shape[0], *shape)
    return _LAYER.bind(x, *tensors, attributes=tuple(shifted.items()), shape=shape, **params), 0


batching.primitive_batchers[_LAYER] = _batched


def capturing() -> bool:
    """Whether a function is being traced for its network."""
    return _capturing.get()


def layer(
    kind: str, x: Any, *tensors: Any, shape: tuple[int, ...] | None = None, trains: bool = True, **attributes: Any
) -> Any:
    """One equation for a step of this kind; tensors may be None.

    trains: whether the call asks for what it does in training.
    """
    x = jnp.asarray(x)
    return _LAYER.bind(
        x,
        *(jnp.asarray(each) for each in tensors if each is not None),
        kind=kind,
        present=tuple(each is not None for each in tensors),
        attributes=tuple(attributes.items()),
        shape=shape,
        trains=trains,
    )


@handles("exactqat_layer")
def _layer(c: Converter, operation: Operation, x: Any, *given: Any) -> Item:
    params, rest = operation.params, iter(given)
    tensors = [next(rest) if present else None for present in params["present"]]
    if any(each is not None and not isinstance(each, Fixed) for each in tensors):
        raise Refused("its parameters depend on the input")
    attributes = dict(params["attributes"])
    if params["kind"] == "batch_norm":
        if any(each is not None and not each.node.path and each.node.function is not None for each in tensors[2:]):
            raise Refused("its statistics are computed; they must be leaves of the parameters, which training moves")
        counter = tensors.pop()
        attributes["counter"] = "" if counter is None else counter.node.path
        attributes["training"] = id(operation.equation) not in c.fixed_in_training
    shape = operation.shape
    module = next((c.module_of(each) for each in tensors if each is not None), "")
    if params["kind"] == "group_norm":
        return c.group_norm(x, tensors, module, **attributes)
    if params["kind"] == "dropout" and id(operation.equation) in c.fixed_in_training:
        return x
    if params["kind"] == "dropout":
        expression = Dropout(attributes["rate"], attributes["kept_axes"])
        return c.emit("dropout", [x], shape, expression=expression)
    return c.emit(params["kind"], [x, *tensors], shape, module=module, **attributes)


def batch_norm(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    epsilon: float,
    momentum: float,
    axis: int,
    biased: bool = False,
    trains: bool = True,
    counter: Any = None,
) -> Any:
    """momentum: as in Flax, how much of the old statistics stays. biased: of the running variance. counter: of batches,
    with which statistics that begin at 0 are divided by what they have seen of 1."""
    return layer(
        "batch_norm",
        x,
        scale,
        bias,
        mean,
        variance,
        counter,
        epsilon=float(epsilon),
        momentum=1.0 - float(momentum),
        channel_axis=axis % x.ndim,
        training=True,
        biased=biased,
        debiased=counter is not None,
        trains=trains,
    )


# --- Flax -------------------------------------------------------------------------------------------------------------

# By the name of the layer's class: (layer, x, get, flag) -> the result, or None where it is to be traced as it is.
# `get` gives a parameter or a statistic by its name, or None; `flag` what the call, or else the layer, says of a name.
_LAYERS: dict[str, Callable[[Any, Any, Callable[[str], Any], Callable[[str], Any]], Any]] = {}


def _flax(function: Callable[[Any, Any, Callable[[str], Any], Callable[[str], Any]], Any]) -> Any:
    _LAYERS[function.__name__.strip("_")] = function
    return function


def _one_axis(layer: Any, x: Any, name: str) -> int | None:
    axis = getattr(layer, name, -1)
    axis = axis[0] if isinstance(axis, tuple | list) and len(axis) == 1 else axis
    return axis % x.ndim if isinstance(axis, int) else None


@_flax
def _BatchNorm(layer: Any, x: Any, get: Any, flag: Any) -> Any:
    axis = _one_axis(layer, x, "axis")
    if axis is None:
        return None
    scale, bias, mean, variance = (get(name) for name in ("scale", "bias", "mean", "var"))
    trains = not flag("use_running_average")
    return batch_norm(x, scale, bias, mean, variance, layer.epsilon, layer.momentum, axis, biased=True, trains=trains)


@_flax
def _Dropout(layer_: Any, x: Any, get: Any, flag: Any) -> Any:
    rate = float(layer_.rate)
    kept = tuple(axis % x.ndim for axis in layer_.broadcast_dims)
    return x if rate == 0 else layer("dropout", x, rate=rate, kept_axes=kept, trains=not flag("deterministic"))


@_flax
def _LayerNorm(layer_: Any, x: Any, get: Any, flag: Any, kind: str = "layer_norm") -> Any:
    if any(_one_axis(layer_, x, name) != x.ndim - 1 for name in ("reduction_axes", "feature_axes")):
        return None
    weights = [get(name) for name in (("scale", "bias") if kind == "layer_norm" else ("scale",))]
    return layer(kind, x, *weights, axes=(x.ndim - 1,), epsilon=float(layer_.epsilon))


@_flax
def _RMSNorm(layer_: Any, x: Any, get: Any, flag: Any) -> Any:
    return _LayerNorm(layer_, x, get, flag, "rms_norm")


@_flax
def _GroupNorm(layer_: Any, x: Any, get: Any, flag: Any) -> Any:
    """Also instance norm, whose groups are single channels."""
    axis, instances = x.ndim - 1, not hasattr(layer_, "num_groups")
    usual = (
        _one_axis(layer_, x, "feature_axes") == axis if instances else getattr(layer_, "reduction_axes", None) is None
    )
    if not usual or x.ndim < 3:
        return None
    size = 1 if instances else int(layer_.group_size or 0)
    groups = x.shape[axis] // size if size else int(layer_.num_groups)
    return layer(
        "group_norm", x, get("scale"), get("bias"), groups=groups, epsilon=float(layer_.epsilon), channel_axis=axis
    )


_LAYERS["InstanceNorm"] = _GroupNorm


def _flag(layer_: Any, args: Sequence[Any], kwargs: Any) -> Callable[[str], Any]:
    """What a call of a layer says of a flag that only it or the layer has; it is the call's second argument."""

    def flag(name: str) -> Any:
        given = kwargs.get(name, args[1] if len(args) > 1 else None)
        return getattr(layer_, name, None) if given is None else given

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
        made = _LAYERS[name](context.module, args[0], tensors.get, _flag(context.module, args, kwargs))
        if made is not None:
            return made
    return next_function(*args, **kwargs)


def _nnx(name: str, original: Any) -> Any:
    """A layer's `__call__` in NNX."""

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        def get(tensor: str) -> Any:
            held = getattr(self, tensor, None)
            return None if held is None else held[...]

        flag = _flag(self, (x, *args), kwargs)
        made = _LAYERS[name](self, x, get, flag) if kwargs.get("mask") is None else None
        return original(self, x, *args, **kwargs) if made is None else made

    return call


def _attention_weights(original: Any) -> Any:
    """Attention's dropout as a layer of its own."""

    def weights(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        rate, deterministic = float(given["dropout_rate"]), given["deterministic"]
        given.update(dropout_rate=0.0, deterministic=True)
        made = original(*call.args, **call.kwargs)
        if rate == 0:
            return made
        kept = tuple(range(given["key"].ndim - 2)) if given["broadcast_dropout"] else ()
        return layer("dropout", made, rate=rate, kept_axes=kept, trains=not deterministic)

    return weights


# --- Haiku ------------------------------------------------------------------------------------------------------------


def _haiku(next_function: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """An interceptor of Haiku's methods: its batch norm over all axes but one, with statistics of this process."""
    import haiku as hk

    norm = context.module
    if type(norm) is not hk.BatchNorm or context.method_name != "__call__":
        return next_function(*args, **kwargs)
    call = inspect.signature(hk.BatchNorm.__call__).bind(norm, *args, **kwargs)
    call.apply_defaults()
    x, trains, given = call.arguments["inputs"], call.arguments["is_training"], call.arguments
    axis = norm.channel_index % x.ndim
    others = sorted(at for at in range(x.ndim) if at != axis)
    usual = norm.axis is None or sorted(at % x.ndim for at in norm.axis) == others
    own = given["scale"] is None and given["offset"] is None and not given["test_local_stats"]
    if not (usual and own and isinstance(trains, bool)) or norm.cross_replica_axis:
        return next_function(*args, **kwargs)
    shape = [size if at == axis else 1 for at, size in enumerate(x.shape)]
    scale, offset = (
        hk.get_parameter(name, shape, x.dtype, init).reshape(-1) if made else None
        for name, made, init in (
            ("scale", norm.create_scale, norm.scale_init),
            ("offset", norm.create_offset, norm.offset_init),
        )
    )
    mean, variance = norm.mean_ema, norm.var_ema
    counter = hk.get_current_state()[mean.module_name]["counter"]
    return batch_norm(
        x, scale, offset, mean.average, variance.average, norm.eps, mean.decay, axis, biased=True, trains=trains,
        counter=counter,
    )  # fmt: skip


# --- resizing ---------------------------------------------------------------------------------------------------------


def _resize(original: Any) -> Any:
    def resize(image: Any, shape: Any, method: Any, *rest: Any, **others: Any) -> Any:
        sizes = tuple(shape)
        word = getattr(method, "name", str(method)).lower()
        changed = [axis for axis, (a, b) in enumerate(zip(image.shape, sizes, strict=True)) if a != b]
        factors = [sizes[axis] / image.shape[axis] for axis in changed]
        nearest = word == "nearest" and all(factor == int(factor) for factor in factors)
        linear = word in ("linear", "bilinear", "triangle") and all(factor > 1 for factor in factors)
        images = len(sizes) == 4 and changed and changed[0] > 0
        channels = [axis for axis in (3, 1) if axis not in changed]
        if images and (nearest or linear) and channels:
            channel_axis = channels[0]
            spatial = [axis for axis in (1, 2, 3) if axis != channel_axis]
            return layer(
                "resize",
                image,
                shape=sizes,
                size=tuple(sizes[axis] for axis in spatial),
                mode="nearest" if nearest else "bilinear",
                align_corners=False,
                scales=None,
                channel_axis=channel_axis,
            )
        return original(image, shape, method, *rest, **others)

    return resize


def _not_rematerialized(function: Any = None, **settings: Any) -> Any:
    """In place of `jax.checkpoint`, also as a decorator with settings."""
    return function if function is not None else lambda each: each


@contextmanager
def telling() -> Iterator[None]:
    """While a function is traced for its network."""
    token = _capturing.set(True)
    with context_of_its_own(), ExitStack() as stack:
        try:
            if sys.modules.get("haiku") is not None:
                import haiku

                stack.enter_context(haiku.intercept_methods(_haiku))
            if sys.modules.get("flax") is not None:
                from flax import linen, nnx

                stack.enter_context(linen.intercept_methods(_linen))
                # What is computed again in the backward pass is the same network. Through `checkpoint`, what Flax hands
                # in comes out as another array, though nothing changed it.
                for name in ("checkpoint", "remat"):
                    stack.enter_context(replacing(jax, name, _not_rematerialized))
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
def replacing(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
