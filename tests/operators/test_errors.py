# SPDX-License-Identifier: Apache-2.0
"""Bad calls are refused with a ValueError or TypeError that names the argument, in every framework and under
compilers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import BadCall, bad_calls
from conftest import BY_RAW_NAME

import exactqat as eq
from exactqat.operators.declarations.specification import TensorSpec

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy


def names_an_argument(op: str, error: BaseException) -> None:
    declared = BY_RAW_NAME[op]
    words = {word.strip("`'\":,.()[]") for word in str(error).split()}
    assert words & set(declared.parameters), f"no argument of {op} is named in: {error}"
    assert declared.name in words, f"the operator is not named in: {error}"


def to_torch(value: Any) -> Any:
    return torch.from_numpy(np.array(value))


def convertible(bad: BadCall) -> bool:
    """Whether other frameworks have the dtypes of this call."""
    return all(
        np.asarray(value).dtype.name in ("float32", "float64", "float16", "int32") for value in bad.operands.values()
    )


def only_ranges_differ(bad: BadCall) -> bool:
    ranges = BY_RAW_NAME[bad.op].ranges
    return all(np.asarray(value).dtype == np.float32 for name, value in bad.operands.items() if name not in ranges)


@pytest.mark.parametrize("bad", bad_calls(), ids=repr)
def test_refused_in_numpy(bad: BadCall) -> None:
    operands = {name: np.array(value) for name, value in bad.operands.items()}
    if bad.error is TypeError and only_ranges_differ(bad):
        return  # NumPy's numbers of any kind are ranges: tests/operators/test_manners.py
    before = {name: value.tobytes() for name, value in operands.items()}
    with pytest.raises(bad.error) as caught:
        getattr(eq.raw_ops, bad.op)(**operands, **bad.attributes)
    if "Invalid range" not in str(caught.value):
        names_an_argument(bad.op, caught.value)
    assert {name: value.tobytes() for name, value in operands.items()} == before


@pytest.mark.parametrize("bad", bad_calls(), ids=repr)
def test_refused_in_torch(bad: BadCall) -> None:
    operands = {
        name: to_torch(value).requires_grad_(np.asarray(value).dtype.kind == "f")
        for name, value in bad.operands.items()
    }
    with pytest.raises(bad.error):
        getattr(eq.raw_ops, bad.op)(**operands, **bad.attributes)


@pytest.mark.parametrize("bad", bad_calls(), ids=repr)
def test_refused_in_jax(bad: BadCall) -> None:
    with jax.enable_x64(True):
        operands = {name: jnp.array(value) for name, value in bad.operands.items()}
        function = getattr(eq.raw_ops, bad.op)
        if bad.error is ValueError and BY_RAW_NAME[bad.op].name.startswith("quantize") and _range_is_bad(bad):
            with pytest.raises(ValueError, match="Invalid range"):
                function(**operands, **bad.attributes)
            with pytest.raises(jax.errors.JaxRuntimeError, match="Invalid range"):
                jax.block_until_ready(jax.jit(lambda **arrays: function(**arrays, **bad.attributes))(**operands))
            return
        with pytest.raises(bad.error):
            function(**operands, **bad.attributes)
        with pytest.raises(bad.error) as caught:
            jax.jit(lambda **arrays: function(**arrays, **bad.attributes))(**operands)
        names_an_argument(bad.op, caught.value)


def _range_is_bad(bad: BadCall) -> bool:
    """Shapes and attributes are right, so only the values of the range can be what is wrong: known when the kernel
    runs."""
    op = BY_RAW_NAME[bad.op]
    try:
        operands, attributes = op.bind((), {**bad.operands, **bad.attributes})
        op.lower(tuple(TensorSpec(np.shape(v), np.asarray(v).dtype.name) for v in operands), tuple(attributes.items()))
    except (ValueError, TypeError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted({bad.op for bad in bad_calls()}))
def test_refused_under_torch_compile(op: str) -> None:
    """By default PyTorch gives up compiling and runs the call, which raises; with fullgraph=True it wraps our text."""
    for bad in bad_calls(op)[::8]:
        if not convertible(bad):
            continue
        arrays = [to_torch(value) for value in bad.operands.values()]

        def function(*tensors: Any, bad: BadCall = bad) -> Any:
            return getattr(eq.raw_ops, bad.op)(**dict(zip(bad.operands, tensors, strict=True)), **bad.attributes)

        torch._dynamo.reset()
        with pytest.raises(bad.error):
            torch.compile(function, backend="eager")(*arrays)


@pytest.mark.parametrize(
    ("one", "other"),
    [(jnp.asarray, lambda a: torch.tensor(a)), (lambda a: torch.tensor(a), jnp.asarray)],
)
def test_mixed_frameworks(one: Any, other: Any) -> None:
    x, low = np.zeros((2, 3), np.float32), np.zeros(3, np.float32)
    with pytest.raises(TypeError, match="min is a .* array but inputs is a .* array"):
        eq.fake_quant_with_min_max_vars_per_channel(one(x), other(low), one(low))


def test_arguments_that_are_not_there() -> None:
    x = np.zeros(3, np.float32)
    for call, text in (
        (lambda: eq.fake_quant_with_min_max_args(), "is missing the required argument 'inputs'"),
        (
            lambda: eq.fake_quant_with_min_max_args(None),
            "inputs must be a NumPy, PyTorch, JAX or TensorFlow array or a number, got None",
        ),
        (
            lambda: eq.raw_ops.DepthwiseConv2dNative(input=x, filter=x, strides=None, padding="SAME"),
            "strides must be a static sequence of integers, got NoneType None",
        ),
        (
            lambda: eq.fake_quant_with_min_max_args(x, bits=8),
            "has no argument 'bits'; its arguments are inputs, min, max",
        ),
        (lambda: eq.fake_quant_with_min_max_args(x, inputs=x), "got argument 'inputs' twice"),
        (lambda: eq.fake_quant_with_min_max_args(x, 0, 1, 8, False, None, 3), "takes at most 6 arguments, got 7"),
        (lambda: eq.raw_ops.FakeQuantWithMinMaxArgs(x), "takes keyword arguments only"),
        (
            lambda: eq.fake_quant_with_min_max_args("x"),
            "inputs must be a NumPy, PyTorch, JAX or TensorFlow array or a number, got str",
        ),
    ):
        with pytest.raises(TypeError, match=text.replace("(", r"\(")):
            call()
    with pytest.raises(AttributeError, match="NoSuchOp"):
        eq.raw_ops.NoSuchOp  # noqa: B018


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("num_bits", "8", "num_bits must be a static integer, got str '8'"),
        ("num_bits", 8.5, "num_bits must be a static integer, got float 8.5"),
        ("num_bits", float("nan"), "num_bits must be a static integer, got float nan"),
        ("num_bits", float("inf"), "num_bits must be a static integer, got float inf"),
        ("num_bits", b"8", "num_bits must be a static integer, got bytes b'8'"),
        ("num_bits", True, "num_bits must be a static integer, got bool True"),
        ("narrow_range", "no", "narrow_range must be a bool, got str 'no'"),
        ("narrow_range", 1, "narrow_range must be a bool, got int 1"),
        ("min", "low", "min must be a number, got str 'low'"),
    ],
)
def test_attributes_of_the_wrong_type(attribute: str, value: Any, text: str) -> None:
    for inputs in (np.zeros(3, np.float32), torch.zeros(3), jnp.zeros(3)):
        with pytest.raises(TypeError, match=text):
            eq.fake_quant_with_min_max_args(inputs, **{attribute: value})
    with pytest.raises(TypeError, match=text):
        jax.jit(lambda a: eq.fake_quant_with_min_max_args(a, **{attribute: value}))(jnp.zeros(3))


def test_attributes_must_be_static() -> None:
    with pytest.raises(TypeError, match="num_bits must be a static integer, got"):
        jax.jit(lambda a, bits: eq.fake_quant_with_min_max_args(a, num_bits=bits))(jnp.zeros(3), 8)


def test_public_functions_refuse_what_they_rearrange() -> None:
    x, w = np.zeros((1, 4, 4, 2), np.float32), np.zeros((3, 3, 2, 1), np.float32)
    for call, text in (
        (lambda: eq.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], [[0, 0], [1, 1]]), "padding must be"),
        (lambda: eq.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME", dilations=[1, 1, 1, 1]), "dilations must have 2"),
        (
            lambda: eq.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME", "NCWH"),
            "data_format must be one of 'NHWC', 'NCHW'",
        ),
        (lambda: eq.nn.fused_batch_norm(x, w[0, 0, :, 0], w[0, 0, :, 0], is_training=False), "mean must be a vector"),
        (lambda: eq.quantization.quantize_and_dequantize(x, 0.0, 1.0, axis=4), "axis must be from -4 to 3"),
        (lambda: eq.set_num_threads(0), "count must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
