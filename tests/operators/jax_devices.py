# SPDX-License-Identifier: Apache-2.0
"""What test_jax_devices.py checks, in a process of its own: XLA makes its devices when it starts.

`PYTHONPATH=tests python tests/operators/jax_devices.py [check ...]` runs every check, or those named, on 8 devices and
prints one line of JSON: {check: error or null}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import virtual_devices

if __name__ == "__main__":
    os.environ |= virtual_devices.environment(8)

import jax
import jax.numpy as jnp
import numpy as np
from bits import assert_same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import exactqat as eq
import exactqat.operators.jax as frontend
from exactqat.operators import OPERATORS

CHECKS: dict[str, Callable[[], None]] = {}
RANDOM = np.random.Generator(np.random.PCG64(7))
q, raw = eq.quantization, eq.raw_ops


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def normal(*shape: int) -> Any:
    return jnp.asarray(RANDOM.standard_normal(shape, np.float32))


def mesh(**axes: int) -> Any:
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )  # the default of 0.9


X = 3 * normal(8, 6, 6, 4)
LOW, HIGH = -jnp.abs(normal(4)) - 0.5, jnp.abs(normal(4)) + 0.5
SCALE, OFFSET = jnp.abs(normal(4)) + 0.5, normal(4)
FILTER = normal(3, 3, 4, 1)
CONV = {"strides": [1, 1, 1, 1], "padding": "SAME"}


def quantized_separable_network(parameters: Any, images: Any) -> Any:
    """A depthwise separable network as in keyword spotting, everything quantized."""
    x = images
    for layer in parameters:
        low, high = layer["weights"]
        kernel = q.fake_quant_with_min_max_vars_per_channel(layer["depthwise"][..., 0], low, high)[..., None]
        x = raw.DepthwiseConv2dNative(input=x, filter=kernel, **CONV)
        x = eq.nn.fused_batch_norm(x, *layer["norm"], *layer["statistics"], is_training=False)[0]
        x = q.fake_quant_with_min_max_vars(jax.nn.relu(x), 0.0, layer["highest"])
        x = x @ q.fake_quant_with_min_max_args(layer["pointwise"], -1, 1)
        x = q.quantize_and_dequantize_v2(x, -layer["highest"], layer["highest"], range_given=True)
    return x.mean((1, 2))


def network() -> Any:
    return [
        {
            "depthwise": normal(3, 3, 4, 1),
            "weights": (LOW, HIGH),
            "norm": (SCALE, OFFSET),
            "statistics": (normal(4), jnp.abs(normal(4)) + 1),
            "highest": jnp.float32(3),
            "pointwise": normal(4, 4) / 2,
        }
        for _ in range(2)
    ]


def loss(parameters: Any, images: Any) -> Any:
    return (quantized_separable_network(parameters, images) ** 2).sum()


def close(got: Any, wanted: Any, what: str) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        scale = float(jnp.abs(b).max()) + 1e-6
        assert float(jnp.abs(a - b).max()) <= 1e-5 * scale, f"{what} {path}: {a} {b}"


@check
def shard_map_does_not_give_one_shard_for_the_whole() -> None:
    devices = mesh(b=8)

    def total(x: Any) -> Any:
        return q.fake_quant_with_min_max_args(x).sum()

    try:
        jax.jit(jax.shard_map(total, mesh=devices, in_specs=P("b"), out_specs=P()))(X)
    except ValueError as error:
        assert "out_specs" in str(error)
    else:
        raise AssertionError("the sum of a shard was taken for that of all")
    summed = jax.shard_map(lambda x: jax.lax.psum(total(x), "b"), mesh=devices, in_specs=P("b"), out_specs=P())
    for way in (summed, jax.jit(summed)):
        close(way(X), total(X), "sum")


@check
def shard_map_of_a_network() -> None:
    """Its gradient is that of the network on one device, whichever way it is taken."""
    devices, parameters = mesh(b=8), network()
    wanted = jax.grad(loss)(parameters, X)

    def summed(parameters: Any, x: Any) -> Any:
        return jax.lax.psum(loss(parameters, x), "b")

    outside = jax.grad(jax.shard_map(summed, mesh=devices, in_specs=(P(), P("b")), out_specs=P()))
    inside = jax.shard_map(jax.grad(loss), mesh=devices, in_specs=(P(), P("b")), out_specs=P())
    close(jax.jit(outside)(parameters, X), wanted, "gradient outside")
    close(jax.jit(inside)(parameters, X), wanted, "gradient inside")
    by_channel = jax.grad(
        lambda low, x: jax.shard_map(
            lambda low, x: jax.lax.psum((q.fake_quant_with_min_max_vars(x, low, 1.0) ** 2).sum(), ("b", "c")),
            mesh=mesh(b=4, c=2),
            in_specs=(P(), P("b", None, None, "c")),
            out_specs=P(),
        )(low, x)
    )
    plain = jax.grad(lambda low, x: (q.fake_quant_with_min_max_vars(x, low, 1.0) ** 2).sum())
    close(by_channel(jnp.float32(-1), X), plain(jnp.float32(-1), X), "gradient of a range over two axes")


@check
def shard_map_over_some_axes_of_the_mesh() -> None:
    devices = mesh(b=4, c=2)

    def part(x: Any) -> Any:
        return q.fake_quant_with_min_max_args(x)

    for checked in (True, False):
        mapped = jax.shard_map(
            part, mesh=devices, in_specs=P("b"), out_specs=P("b"), axis_names={"b"}, check_vma=checked
        )
        assert_same_bits(np.asarray(jax.jit(mapped)(X)), np.asarray(part(X)), what=f"check_vma={checked}")
    sequence = jax.shard_map(
        lambda x: jax.lax.scan(lambda total, row: (total + part(row).sum(), part(row)), jax.lax.pcast(
            jnp.float32(0), "b", to="varying"), x)[1],
        mesh=devices, in_specs=P(None, "b"), out_specs=P(None, "b"),
    )  # fmt: skip
    swapped = X.transpose(1, 0, 2, 3)
    assert_same_bits(np.asarray(jax.jit(sequence)(swapped)), np.asarray(part(swapped)), what="scan in shard_map")


@check
def grad_pass_through_in_shard_map() -> None:
    through = eq.grad_pass_through(lambda a: jnp.round(a) * 0 + 1)
    mapped = jax.shard_map(jax.grad(lambda x: through(x).sum()), mesh=mesh(b=8), in_specs=P("b"), out_specs=P("b"))
    assert (jax.jit(mapped)(X) == 1).all()


BATCH, CHANNELS, BOTH = P("b"), P(None, None, None, "c"), P("b", None, None, "c")

# Functions of images and vectors of channels, and whether each is the same bits however its arrays are cut.
SHARDED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool]] = {
    "fixed range": (lambda x: q.fake_quant_with_min_max_args(x), (), True),
    "one range": (lambda x, low, high: q.fake_quant_with_min_max_vars(x, low[0], high[0]), (LOW, HIGH), True),
    "a range for each channel": (q.fake_quant_with_min_max_vars_per_channel, (LOW, HIGH), True),
    "a range that is given": (
        lambda x, high: q.quantize_and_dequantize_v2(x, -high[0], high[0], range_given=True),
        (HIGH,),
        True,
    ),
    "a range that is given for each channel": (
        lambda x, high: q.quantize_and_dequantize_v2(x, -high, high, range_given=True, axis=3),
        (HIGH,),
        True,
    ),
    "depthwise": (lambda x, w: raw.DepthwiseConv2dNative(input=x, filter=w, **CONV), (FILTER,), True),
    "batch norm, inference": (
        lambda x, scale, offset: eq.nn.fused_batch_norm(x, scale, offset, offset, scale, is_training=False)[0],
        (SCALE, OFFSET),
        True,
    ),
    "batch norm, training": (lambda x, *vectors: eq.nn.fused_batch_norm(x, *vectors)[0], (SCALE, OFFSET), False),
}


def compiled(function: Callable[..., Any], *arrays: Any) -> tuple[Any, str]:
    """What it gives for these arrays, and XLA's program, which must not gather what is spread."""
    executable = jax.jit(function).lower(*arrays).compile()
    program = executable.as_text()
    assert "all-gather" not in program and "all-to-all" not in program, program
    assert "exactqat" in program
    return executable(*arrays), program


def sharded(name: str, specification: Any) -> None:
    function, vectors, same = SHARDED[name]
    devices = mesh(b=4, c=2)
    weights = normal(*X.shape)
    x, arriving = (jax.device_put(array, NamedSharding(devices, specification)) for array in (X, weights))

    def equal(got: Any, wanted: Any, what: str) -> None:
        if same:
            assert_same_bits(np.asarray(got), np.asarray(wanted), what=what)
        else:
            close(got, wanted, what)

    y, _ = compiled(function, x, *vectors)
    equal(y, jax.jit(function)(X, *vectors), "forward")
    assert y.sharding.is_equivalent_to(x.sharding, x.ndim), y.sharding

    def gradients(x: Any, arriving: Any, *vectors: Any) -> Any:
        return jax.vjp(function, x, *vectors)[1](arriving)

    got, program = compiled(gradients, x, arriving, *vectors)
    wanted = jax.jit(gradients)(X, weights, *vectors)
    equal(got[0], wanted[0], "gradient of the input")
    # Each device's sums are in the documented order and rounded; then they are added up.
    close(got[1:], wanted[1:], "gradients that are sums")
    if specification == BATCH and any(np.any(gradient) for gradient in wanted[1:]):
        assert "all-reduce" in program
    pushed, _ = compiled(lambda x, t: jax.jvp(lambda x: function(x, *vectors), (x,), (t,))[1], x, arriving)
    close(pushed, jax.jvp(lambda x: function(x, *vectors), (X,), (weights,))[1], "forward mode")


for _name in SHARDED:
    for _text, _specification in (("batch", BATCH), ("channels", CHANNELS), ("batch and channels", BOTH)):
        CHECKS[f"{_name}, over {_text}"] = partial(sharded, _name, _specification)


@check
def what_cannot_be_cut_is_gathered() -> None:
    """Ranges from all data, and dimensions that the devices do not divide."""
    devices = mesh(b=4, c=2)
    x = jax.device_put(X, NamedSharding(devices, BATCH))
    function = jax.jit(lambda x: q.quantize_and_dequantize(x, 0.0, 0.0))
    assert_same_bits(np.asarray(function(x)), np.asarray(function(X)), what="range from the data")
    odd = jax.jit(lambda x: q.fake_quant_with_min_max_vars_per_channel(x[:7], LOW, HIGH))
    assert_same_bits(np.asarray(odd(x)), np.asarray(odd(X)), what="7 images on 4 devices")
    mask = jax.jit(lambda x: OPERATORS["fake_quant_with_min_max_args_training"](x))
    for got, wanted in zip(mask(x), mask(X), strict=True):
        assert_same_bits(np.asarray(got), np.asarray(wanted), what="mask")
    wide = normal(3, 3, 4, 2)
    twice = jax.jit(lambda x, w: raw.DepthwiseConv2dNative(input=x, filter=w, **CONV))
    x = jax.device_put(X, NamedSharding(devices, BOTH))
    assert_same_bits(np.asarray(twice(x, wide)), np.asarray(twice(X, wide)), what="two filters for each channel")


@check
def a_network_on_sharded_images() -> None:
    devices, parameters = mesh(b=8), network()
    wanted = jax.jit(jax.grad(loss))(parameters, X)
    got, _ = compiled(jax.grad(loss), parameters, jax.device_put(X, NamedSharding(devices, BATCH)))
    close(got, wanted, "gradient")


@check
def an_explicit_mesh() -> None:
    devices = jax.make_mesh((4, 2), ("b", "c"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(devices):
        x = jax.device_put(X, BOTH)
        function = eq.quantization.fake_quant_with_min_max_vars_per_channel
        y = jax.jit(function)(x, LOW, HIGH)
        assert jax.typeof(y).sharding.spec == BOTH, jax.typeof(y)
        assert_same_bits(np.asarray(y), np.asarray(function(np.asarray(X), LOW, HIGH)), what="forward")
        got = jax.jit(jax.grad(lambda low, x: (function(x, low, HIGH) ** 2).sum()))(LOW, x)
    close(got, jax.grad(lambda low, x: (function(x, low, HIGH) ** 2).sum())(LOW, X), "gradient")


def normalized(x: Any, scale: Any, offset: Any) -> Any:
    attributes = {"mean": OFFSET, "variance": SCALE, "exponential_avg_factor": 0.1, "epsilon": 1e-3}
    return raw.FusedBatchNormV3(x=x, scale=scale, offset=offset, **attributes)


def synchronized_normalized(x: Any, scale: Any, offset: Any) -> Any:
    with frontend.synchronized("b"):
        return normalized(x, scale, offset)


WEIGHTS = normal(*X.shape)


def energy(x: Any, scale: Any, offset: Any, weights: Any, norm: Any = normalized) -> Any:
    return ((norm(x, scale, offset).y + weights) ** 3).sum()


def in_two_ways(of_all: Any, what: str) -> None:
    """A sum over all replicas as a function of the whole batch: forward, both modes, and their derivatives."""
    operands = (X + 2, SCALE, OFFSET, WEIGHTS)

    def answers(function: Any) -> Any:
        slope = jax.grad(function, (0, 1, 2))
        bent = jax.grad(lambda *o: sum((g * normal_like).sum() for g, normal_like in zip(slope(*o), o, strict=False)),
                        (0, 1, 2))  # fmt: skip
        along = jax.jvp(lambda x: function(x, *operands[1:]), operands[:1], (WEIGHTS,))[1]
        return [jax.jit(slope)(*operands), jax.jit(bent)(*operands), along]

    close(answers(of_all), answers(energy), what)


@check
def synchronized_batch_norm_in_shard_map() -> None:
    """Statistics, results and derivatives are those of the whole batch, running statistics the same everywhere."""
    devices, replicas = mesh(b=8), P("b")
    for checked in (True, False):
        mapped = jax.shard_map(
            lambda *o: tuple(synchronized_normalized(*o))[:5],
            mesh=devices, in_specs=(replicas, P(), P()), out_specs=(replicas, *[P()] * 4), check_vma=checked,
        )  # fmt: skip
        for way in (mapped, jax.jit(mapped)) if checked else (jax.jit(mapped),):
            close(way(X + 2, SCALE, OFFSET), tuple(normalized(X + 2, SCALE, OFFSET))[:5], f"check_vma={checked}")
        of_all = jax.shard_map(
            lambda *o: jax.lax.psum(energy(*o, norm=synchronized_normalized), "b"),
            mesh=devices, in_specs=(replicas, P(), P(), replicas), out_specs=P(), check_vma=checked,
        )  # fmt: skip
        if checked:
            in_two_ways(of_all, "derivatives")
        else:
            got, wanted = (jax.jit(jax.grad(f, (0, 1, 2)))(X, SCALE, OFFSET, WEIGHTS) for f in (of_all, energy))
            close(got, wanted, "gradient, check_vma=False")


@check
def synchronized_batch_norm_over_two_axes_and_by_other_ways() -> None:
    wanted = normalized(X, SCALE, OFFSET)

    def over_two(x: Any) -> Any:
        with frontend.synchronized(("b", "c")):
            return normalized(x, SCALE, OFFSET).y

    cut = P(("b", "c"))
    close(jax.jit(jax.shard_map(over_two, mesh=mesh(b=4, c=2), in_specs=cut, out_specs=cut))(X), wanted.y, "two axes")
    pairs = X.reshape(4, 2, *X.shape[1:])

    def one(x: Any) -> Any:
        return synchronized_normalized(x, SCALE, OFFSET)

    mapped = jax.jit(jax.vmap(one, axis_name="b"))(pairs)
    close(mapped.y.reshape(X.shape), wanted.y, "vmap")
    close(mapped.batch_variance[3], wanted.batch_variance, "vmap, running variance")
    close(jax.pmap(one, axis_name="b")(X[:, None]).y.reshape(X.shape), wanted.y, "pmap")

    def of_members(x: Any, scale: Any, offset: Any, weights: Any) -> Any:
        members = (x.reshape(pairs.shape), scale, offset, weights.reshape(pairs.shape))
        single = partial(energy, norm=synchronized_normalized)
        return jax.vmap(single, in_axes=(0, None, None, 0), axis_name="b")(*members).sum()

    in_two_ways(of_members, "vmap, derivatives")
    gathered = jax.shard_map(
        lambda x, dy: tuple(gradient_operator(x, dy))[:3],
        mesh=mesh(b=8), in_specs=(P("b"), P("b")), out_specs=(P("b"), P(), P()),
    )  # fmt: skip
    close(jax.jit(gathered)(X, WEIGHTS), tuple(gradient_operator(X, WEIGHTS, alone=True))[:3], "the gradient operator")


def gradient_operator(x: Any, dy: Any, alone: bool = False) -> Any:
    statistics = {"reserve_space_1": X.mean((0, 1, 2)), "reserve_space_2": X.var((0, 1, 2)), "reserve_space_3": 0.0}
    with contextlib.nullcontext() if alone else frontend.synchronized("b"):
        return raw.FusedBatchNormGradV3(y_backprop=dy, x=x, scale=SCALE, **statistics)


@check
def synchronized_says_where_it_belongs() -> None:
    for function in (normalized, jax.jit(normalized)):
        alone = function(X, SCALE, OFFSET)
        try:
            with frontend.synchronized("b"):
                function(X, SCALE, OFFSET)
        except ValueError as error:
            assert "synchronized('b')" in str(error) and "shard_map" in str(error), error
        else:
            raise AssertionError("an axis that is not there, jitted or not, was not missed")
        assert_same_bits(np.asarray(function(X, SCALE, OFFSET).y), np.asarray(alone.y), what="outside of the context")
    with frontend.synchronized("b"):  # what ties nothing together needs no axis
        y = q.fake_quant_with_min_max_args(X)
        raw.FusedBatchNormV3(x=X, scale=SCALE, offset=OFFSET, mean=OFFSET, variance=SCALE, is_training=False)
    assert_same_bits(np.asarray(y), np.asarray(q.fake_quant_with_min_max_args(X)), what="fake quantization")
    for wrong in (None, (), ("b", None)):
        try:
            with frontend.synchronized(wrong):
                pass
        except TypeError as error:
            assert "axis_name" in str(error)
        else:
            raise AssertionError(f"{wrong} was taken for a name")


@check
def training_in_replicas_moves_what_one_device_moves() -> None:
    """Ranges, running statistics and gradients of the kit, inside of `synchronized`, are those of the whole batch."""
    import exactqat.qat.jax as kit
    from exactqat.qat import Rule

    def model(params: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = kit.batch_norm(y, params["scale"], params["offset"], params["mean"], params["variance"], momentum=0.5)
        return jnp.tanh(jax.nn.relu(y)).mean((1, 2)) @ params["head"]

    weights = {"w": normal(3, 3, 4, 4), "scale": jnp.ones(4), "offset": jnp.zeros(4), "mean": jnp.zeros(4)}
    weights |= {"variance": jnp.ones(4), "head": normal(4, 3)}
    # Every device has other values.
    images = X * jnp.arange(1, 9).reshape(-1, 1, 1, 1)
    for rule in (
        Rule(),
        Rule(ranges="percentile", percentile=90),
        Rule(ranges="last_batch"),
        Rule(fold_batch_norm=True),
    ):
        prepared = kit.prepare(model, weights, images, rules=[rule])

        def step(params: Any, state: Any, x: Any, kept: Any = prepared, mean: Any = lambda value: value) -> Any:
            def loss(params: Any) -> Any:
                y, new = kept.apply(params, state, x, train=True)
                return mean((y**2).mean()), new

            return jax.value_and_grad(loss, has_aux=True)(params)

        def replica(params: Any, state: Any, x: Any, step: Any = step) -> Any:
            with frontend.synchronized("b"):
                return step(params, state, x, mean=partial(jax.lax.pmean, axis_name="b"))

        params, state = prepared.init()
        mapped = jax.shard_map(replica, mesh=mesh(b=8), in_specs=(P(), P(), P("b")), out_specs=P())
        got, wanted = jax.jit(mapped)(params, state, images), step(params, state, images)
        close(got[0][1], wanted[0][1], f"state under {rule}")
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert float(jnp.abs(a - b).max()) <= 1e-4 * (1 + float(jnp.abs(b).max())), f"{rule}: {a} {b}"


def main() -> int:
    errors = {}
    chosen = {name: CHECKS[name] for name in sys.argv[1:]} or CHECKS
    for name, function in chosen.items():
        try:
            function()
            errors[name] = None
        except Exception:
            errors[name] = traceback.format_exc()
    print(json.dumps(errors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
