# SPDX-License-Identifier: Apache-2.0
"""JAX: what its users do with operators, on one device. Several devices: test_jax_devices.py; every operator under
every transformation: test_jax_table.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits

import exactqat as eq
from exactqat.operators import OPERATORS

jax = pytest.importorskip("jax")
jnp = jax.numpy

RANDOM = np.random.Generator(np.random.PCG64(5))
X = RANDOM.standard_normal((6, 5, 4), np.float32) * 3
LOW, HIGH = np.float32([-1, -2, -1.5, -0.5]), np.float32([1, 2, 3, 0.5])


def test_a_jitted_operator_can_be_lowered() -> None:
    compiled = jax.jit(eq.fake_quant_with_min_max_args)
    assert_same_bits(np.asarray(compiled.lower(X).compile()(X)), eq.fake_quant_with_min_max_args(X), what="lowered")
    assert compiled.eval_shape(X).shape == X.shape
    assert compiled.trace(X).jaxpr.eqns


def test_wrapping_an_operator_hides_nothing_of_the_wrapper() -> None:
    """`functools.wraps` copies an operator's own attributes over those of what wraps it."""
    theirs = set(dir(jax.jit(lambda x: x)))
    for op in OPERATORS.values():
        assert not {name for name in vars(op) if not name.startswith("__")} & theirs


def test_a_range_that_the_function_closes_over() -> None:
    """`grad_pass_through` of a function of x that uses x from outside as well."""

    def gradient(to: Any) -> Any:
        def loss(x: Any) -> Any:
            ranged = eq.grad_pass_through(lambda a: eq.fake_quant_with_min_max_vars(a, x.min(), x.max()))
            return (ranged(x) * np.arange(4, dtype=np.float32)).sum()

        return jax.grad(loss)(to(X))

    wanted = np.broadcast_to(np.arange(4, dtype=np.float32), X.shape)
    assert_same_bits(np.asarray(gradient(jnp.asarray)), wanted, what="gradient")
    assert_same_bits(np.asarray(jax.jit(gradient, static_argnums=0)(jnp.asarray)), wanted, what="gradient under jit")
    through = eq.grad_pass_through(lambda a: jnp.round(a))
    out, tangent = jax.jvp(through, (jnp.asarray(X),), (jnp.asarray(2 * X),))
    assert (out == np.round(X)).all() and (tangent == 2 * X).all()
    assert jax.vmap(jax.grad(lambda a: through(a).sum()))(jnp.asarray(X)).shape == X.shape


def test_numpy_arrays_beside_jax_arrays() -> None:
    wanted = eq.fake_quant_with_min_max_vars_per_channel(X, LOW, HIGH)
    for operands in (
        (jnp.asarray(X), LOW, HIGH),
        (X, jnp.asarray(LOW), HIGH),
        (X, jnp.asarray(LOW), jnp.asarray(HIGH)),
        (X, LOW.tolist(), jnp.asarray(HIGH)),
    ):
        got = eq.fake_quant_with_min_max_vars_per_channel(*operands)
        assert isinstance(got, jax.Array)
        assert_same_bits(np.asarray(got), wanted, what="NumPy beside JAX")
    inside = jax.jit(lambda low: eq.fake_quant_with_min_max_vars_per_channel(X, low, HIGH))(LOW)
    assert_same_bits(np.asarray(inside), wanted, what="NumPy beside a tracer")
    gradient = jax.grad(lambda low: eq.fake_quant_with_min_max_vars_per_channel(X, low, HIGH).sum())(jnp.asarray(LOW))
    assert gradient.shape == LOW.shape
    passed = eq.grad_pass_through(lambda a, b: (a * 2, b * 2))(X, jnp.asarray(LOW))
    assert all(isinstance(array, jax.Array) for array in passed)


def test_numpy_arrays_beside_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    wanted = eq.fake_quant_with_min_max_vars_per_channel(X, LOW, HIGH)
    for operands in ((torch.tensor(X), LOW, HIGH), (X, torch.tensor(LOW), HIGH)):
        for _ in range(2):  # the second call is the shorter one
            got = eq.fake_quant_with_min_max_vars_per_channel(*operands)
            assert isinstance(got, torch.Tensor)
            assert_same_bits(got.numpy(), wanted, what="NumPy beside PyTorch")


def test_python_numbers_with_64_bits_enabled() -> None:
    """A Python number that goes through `jax.jit` is a weakly typed float64 there."""
    wanted = eq.fake_quant_with_min_max_vars(X, -1.25, 1.5)
    with jax.enable_x64(True):
        function = eq.fake_quant_with_min_max_vars
        for got in (
            function(jnp.asarray(X), -1.25, 1.5),
            jax.jit(function)(jnp.asarray(X), -1.25, 1.5),
            jax.jit(function)(jnp.asarray(X), jnp.float32(-1.25), 1.5),
            jax.jit(lambda x, low: function(x, low, low + 2.75))(jnp.asarray(X), -1.25),
        ):
            assert_same_bits(np.asarray(got), wanted, what="beside float32")
        double = X.astype(np.float64)
        got = jax.jit(function)(jnp.asarray(double), -1.25, 1.5)
        assert_same_bits(np.asarray(got), function(double, -1.25, 1.5), what="beside float64")
        with pytest.raises(TypeError, match="min must be float32"):
            function(jnp.asarray(X), jnp.float64(-1.25), 1.5)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_platforms_without_kernels_get_a_portable_program(platform: str) -> None:
    def slope(x: Any) -> Any:
        return jax.grad(lambda x: (eq.fake_quant_with_min_max_args(x) ** 2).sum())(x)

    text = jax.jit(slope).trace(X).lower(lowering_platforms=(platform,)).as_text()
    assert "@exactqat(" not in text and "f64" in text
    allowed = [jax.export.DisabledSafetyCheck.custom_call("exactqat")]
    exported = jax.export.export(jax.jit(slope), platforms=["cpu", platform], disabled_checks=allowed)(X)
    text = exported.mlir_module()
    assert "@exactqat(" in text and "f64" in text  # one artefact: kernels on the CPU, XLA's program elsewhere
    restored = jax.export.deserialize(exported.serialize())
    assert_same_bits(np.asarray(restored.call(X)), np.asarray(jax.jit(slope)(X)), what="on the CPU")


def test_without_jit() -> None:
    with jax.disable_jit():
        got = jax.value_and_grad(lambda x: eq.fake_quant_with_min_max_args(x).sum())(jnp.asarray(X))
    wanted = jax.jit(jax.value_and_grad(lambda x: eq.fake_quant_with_min_max_args(x).sum()))(X)
    assert_same_bits(np.asarray(got[1]), np.asarray(wanted[1]), what="gradient")


def test_attributes_beyond_float32_are_one_thing_everywhere() -> None:
    for low, high in ((-1e300, 1e300), (0.0, 1e300), (-1.0, 1.0)):

        def function(x: Any, low: float = low, high: float = high) -> Any:
            return eq.fake_quant_with_min_max_args(x, low, high)

        try:
            wanted = function(X)
        except ValueError as error:
            for way in (function, jax.jit(function), jax.grad(lambda x, f=function: f(x).sum())):
                with pytest.raises(ValueError, match="min"):
                    way(jnp.asarray(X))
            assert "min" in str(error)
            continue
        for way in (function, jax.jit(function), lambda x, f=function: jax.vjp(f, x)[0]):
            assert_same_bits(np.asarray(way(jnp.asarray(X))), wanted, what=f"range {low} to {high}")


def test_results_written_over_a_donated_operand() -> None:
    def over(x: Any) -> Any:
        return eq.fake_quant_with_min_max_vars_per_channel(x, LOW, HIGH, out=x)

    wanted = eq.fake_quant_with_min_max_vars_per_channel(X, LOW, HIGH)
    x = jnp.asarray(X)
    assert_same_bits(np.asarray(over(x)), wanted, what="not donated")
    assert_same_bits(np.asarray(x), X, what="an array that is not donated stays as it is")
    compiled = jax.jit(over, donate_argnums=0).lower(x).compile()
    assert "output_to_operand_aliasing" in compiled.as_text()
    assert " copy(" not in compiled.as_text()
    address = x.unsafe_buffer_pointer()
    got = compiled(x)
    assert got.unsafe_buffer_pointer() == address and x.is_deleted()
    assert_same_bits(np.asarray(got), wanted, what="donated")
    used_later = jax.jit(lambda x: (over(x), x + 1), donate_argnums=0)(jnp.asarray(X))
    assert_same_bits(np.asarray(used_later[0]), wanted, what="used later")
    assert_same_bits(np.asarray(used_later[1]), X + 1, what="what is used later")
    gradient = jax.jit(jax.grad(lambda x: over(x).sum()), donate_argnums=0)(jnp.asarray(X))
    plain = jax.grad(lambda x: eq.fake_quant_with_min_max_vars_per_channel(x, LOW, HIGH).sum())(jnp.asarray(X))
    assert_same_bits(np.asarray(gradient), np.asarray(plain), what="gradient")
    assert jax.vmap(over)(jnp.asarray(X)).shape == X.shape
    for wrong in (jnp.asarray(X), LOW):
        with pytest.raises(TypeError, match=r"out cannot be used with JAX arrays.*\(inputs\)"):
            eq.fake_quant_with_min_max_vars_per_channel(jnp.asarray(X), LOW, HIGH, out=wrong)


def test_operators_without_a_gradient_say_so() -> None:
    op = OPERATORS["quantized_batch_norm_states"]
    assert op.vjp is None
    mask = np.zeros(-(-X.size // 4), np.uint8)
    with pytest.raises(TypeError, match="quantized_batch_norm_states has no gradient"):
        jax.grad(lambda x: op(mask, x).sum())(jnp.asarray(X))


CONV = {"strides": [1, 1, 1, 1], "padding": "SAME"}
IMAGES = RANDOM.standard_normal((3, 2, 5, 4, 4), np.float32)
FILTERS = RANDOM.standard_normal((3, 3, 3, 4, 2), np.float32)
VECTORS = np.abs(RANDOM.standard_normal((3, 4), np.float32)) + 0.5
MAPPED = {  # a function, operands with a batch in front, and which subsets of them become one call
    "one range": (eq.fake_quant_with_min_max_vars, [IMAGES, -VECTORS[:, 0], VECTORS[:, 0]], {(1, 0, 0)}),
    "a range for each channel": (
        eq.fake_quant_with_min_max_vars_per_channel,
        [IMAGES, -VECTORS, VECTORS],
        "all",
    ),
    "training": (
        OPERATORS["fake_quant_with_min_max_vars_training"],
        [IMAGES, -VECTORS[:, 0], VECTORS[:, 0]],
        {(1, 0, 0)},
    ),
    "a mask whose bytes are shared": (OPERATORS["fake_quant_with_min_max_args_training"], [IMAGES[..., :3, 0]], set()),
    "numbers": (eq.fake_quant_with_min_max_args, [VECTORS[:, 0]], "all"),
    "depthwise": (lambda x, w: eq.raw_ops.DepthwiseConv2dNative(input=x, filter=w, **CONV), [IMAGES, FILTERS], "all"),
    "depthwise, channels first": (
        lambda x, w: eq.raw_ops.DepthwiseConv2dNative(input=x, filter=w, data_format="NCHW", **CONV),
        [IMAGES.swapaxes(2, 4), FILTERS],
        "all",
    ),
    "batch norm": (lambda x, s, o: tuple(eq.nn.fused_batch_norm(x, s, o)), [IMAGES, VECTORS, -VECTORS], "all"),
    "slices": (
        lambda x, high: eq.quantization.quantize_and_dequantize(x, -high, high, range_given=True, axis=1),
        [IMAGES.swapaxes(2, 4), VECTORS],
        set(),
    ),
    "rows": (OPERATORS["fake_quant_rows"], [IMAGES], "all"),
    "rows within": (OPERATORS["fake_quant_rows_within"], [IMAGES, VECTORS[:, : IMAGES.shape[1]]], "all"),
    "no members": (eq.fake_quant_with_min_max_vars_per_channel, [IMAGES[:0], -VECTORS[:0], VECTORS[:0]], "all"),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_over_any_operands(name: str) -> None:
    function, operands, folded = MAPPED[name]
    count = len(operands[0])
    for mapped in itertools.product((0, 1), repeat=len(operands)):
        if not any(mapped):
            continue
        single = [
            o if m else (o[0] if count else np.ones(o.shape[1:], o.dtype))
            for o, m in zip(operands, mapped, strict=True)
        ]
        batched = jax.jit(jax.vmap(function, in_axes=[0 if m else None for m in mapped]))
        got = jax.tree.leaves(batched(*single))
        for member in range(count):
            wanted = function(*[jnp.asarray(o[member] if m else o) for o, m in zip(single, mapped, strict=True)])
            for result, value in zip(got, jax.tree.leaves(wanted), strict=True):
                assert_same_bits(np.asarray(result[member]), np.asarray(value), what=f"{mapped}, member {member}")
        text = batched.lower(*single).as_text()
        if folded == "all" or mapped in folded:
            assert "stablehlo.while" not in text and text.count("@exactqat(") == 1, mapped


def test_vmap_of_vmap_and_of_other_axes() -> None:
    x = jnp.asarray(IMAGES)
    per_channel = eq.fake_quant_with_min_max_vars_per_channel
    inner = jax.vmap(per_channel, in_axes=(2, None, None), out_axes=2)
    got = jax.vmap(inner, in_axes=(1, None, None), out_axes=1)(x, -VECTORS[0], VECTORS[0])
    assert_same_bits(np.asarray(got), per_channel(IMAGES, -VECTORS[0], VECTORS[0]), what="vmap of vmap")
    gradient = jax.grad(lambda x, low: eq.fake_quant_with_min_max_vars(x, low, 1.0).sum(), (0, 1))
    to_x, to_low = jax.jit(jax.vmap(gradient, (0, None)))(x, jnp.float32(-1))
    for member in range(3):
        alone = gradient(x[member], jnp.float32(-1))
        assert_same_bits(np.asarray(to_x[member]), np.asarray(alone[0]), what="gradient of the input")
        assert_same_bits(np.asarray(to_low[member]), np.asarray(alone[1]), what="gradient of the range")


@pytest.mark.parametrize("seed", range(6))
def test_random_compositions_of_transformations(seed: int) -> None:
    """`python tests/campaigns/jax_compositions.py` is the campaign."""
    pytest.importorskip("torch")
    import jax_compositions

    jax_compositions.check(seed)
