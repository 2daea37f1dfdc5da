# SPDX-License-Identifier: Apache-2.0
"""Arguments are taken in all the forms in which TensorFlow takes them, where nothing is lost: see manners.py."""

from __future__ import annotations

import pydoc
import tomllib
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import goldens
import numpy as np
import pytest
from bits import assert_same_bits
from conftest import BY_RAW_NAME
from manners import PLAIN, Column, Manner, arguments, manners, outcome

import exactqat as eq

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

TO: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": np.array,
    "torch": lambda a: torch.from_numpy(np.array(a)),
    "jax": jnp.asarray,
}
X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(4, 3)
LOW, HIGH = [-1.0, -2.0, -3.0], [1.0, 2.0, 3.0]
DIFFERENCES = Path(__file__).resolve().parents[2] / "docs" / "differences.toml"

FRACTIONS = "Non-integers for integer attributes"
NUMBERS_AS_BYTES = "Bytes or bools for numbers"
OTHER_FLOATS = "NumPy arrays of float64 or float16 as data"
LONG_INTEGERS = "NumPy arrays of 32-bit and 64-bit integers as data"
STATED = (FRACTIONS, NUMBERS_AS_BYTES, OTHER_FLOATS, LONG_INTEGERS)


def difference(manner: Manner, framework: str) -> str | None:
    """Why TensorFlow takes this as the plain call and exactqat does not."""
    declared = BY_RAW_NAME[manner.op]
    is_attribute = manner.argument in declared.attributes
    if is_attribute and manner.form in ("half", "halves"):
        return FRACTIONS
    if is_attribute and manner.form == "bytes" and manner.argument not in declared.choices:
        return NUMBERS_AS_BYTES
    if is_attribute and manner.form == "bool":
        return NUMBERS_AS_BYTES if recorded()[f"{manner.op}/{manner.argument}"]["bool"].startswith("same") else None
    data = [name for name in declared.operands if name not in declared.ranges]
    if framework != "numpy" and len(declared.operands) > 1:  # NumPy's arrays are guests there
        data = data if framework == "jax" and len(data) == 1 and manner.form == "float16" else []
    if manner.argument not in data:
        return None
    if manner.form in ("float64", "float16"):
        return OTHER_FLOATS
    return LONG_INTEGERS if manner.form in ("int64", "int32") else None


def results_of(op: str, inputs: dict[str, Any]) -> list[np.ndarray]:
    results = getattr(eq.raw_ops, op)(**inputs)
    return [np.asarray(result) for result in (results if isinstance(results, tuple) else (results,))]


@lru_cache
def recorded() -> dict[str, dict[str, str]]:
    answers = goldens.load_json("manners")
    assert isinstance(answers, dict)
    return answers


@pytest.mark.parametrize("framework", TO)
@pytest.mark.parametrize("op", PLAIN)
def test_every_argument_in_every_form(op: str, framework: str) -> None:
    wrong = []
    seen: dict[str, list[np.ndarray]] = {}
    for manner in manners(op):
        plain = {k: TO[framework](v) if isinstance(v, np.ndarray) else v for k, v in manner.plain.items()}
        # Some forms cannot hold the plain values, and None means the default.
        key = manner.name if manner.form in ("uint8", "bool", "none") else "plain"
        if key not in seen:
            seen[key] = results_of(op, plain)
        inputs = arguments(manner, TO[framework])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = outcome(lambda inputs=inputs: results_of(op, inputs), seen[key], (ValueError, TypeError))
        theirs = recorded()[f"{op}/{manner.argument}"][manner.form].split(", ")[framework != "numpy"]
        if difference(manner, framework):
            fine = ours != "same"
        elif theirs == "same":
            fine = ours == "same"
        else:
            fine = ours != "other"
        if not fine:
            wrong.append(f"{manner.name}: {ours}, in TensorFlow {theirs}")
    assert not wrong, "\n".join(wrong)


def test_every_operator_has_a_plain_call() -> None:
    assert set(PLAIN) == set(BY_RAW_NAME) - {"QuantizeAndDequantize"}  # which TensorFlow refuses in any form


def test_differences_are_named() -> None:
    documented = {entry["about"] for entry in tomllib.loads(DIFFERENCES.read_text())["difference"]}
    assert documented >= set(STATED)


@pytest.mark.parametrize("framework", TO)
def test_ranges_of_any_kind_of_number(framework: str) -> None:
    """Rounded as Python's numbers are, also in a call that looks like an earlier one."""
    x = TO[framework](X)
    wanted = np.asarray(eq.fake_quant_with_min_max_vars(x, -1.1, 1.7))
    for _ in range(2):
        got = eq.fake_quant_with_min_max_vars(x, np.array(-1.1), np.array(1.7, np.longdouble))
        assert_same_bits(np.asarray(got), wanted, what="float64 and long double")
        got = eq.fake_quant_with_min_max_vars(x, np.array(-1e300), np.array(1))
        assert np.isnan(np.asarray(got)).all()
    half = TO[framework](X.astype(np.float16))
    for low in (np.array(LOW), np.array(LOW, np.float16), np.array(LOW, np.int8), LOW):
        got = eq.fake_quant_with_min_max_vars_per_channel(half, low, HIGH)
        wanted = eq.fake_quant_with_min_max_vars_per_channel(half, LOW, HIGH)
        assert_same_bits(np.asarray(got), np.asarray(wanted), what=f"{getattr(low, 'dtype', 'list')} beside float16")
    got = eq.fake_quant_with_min_max_args_gradient(X.astype(np.float16).tolist(), half)
    assert np.asarray(got).dtype == np.float16


def test_float64_data_keep_float64() -> None:
    wide = X.astype(np.float64)
    assert eq.fake_quant_with_min_max_vars(wide, np.array(-1, np.int32), np.float32(1)).dtype == np.float64
    with pytest.raises(TypeError, match="inputs must be float32 like gradients, got float64"):
        eq.fake_quant_with_min_max_args_gradient(X, wide)
    with pytest.raises(TypeError, match="got int64"):
        eq.fake_quant_with_min_max_args(np.arange(3))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_frameworks_own_dtypes_are_not_changed(framework: str) -> None:
    with jax.enable_x64(True):
        x = TO[framework](X)
        for low in (np.float64(-1), np.int32(-1)):
            with pytest.raises(TypeError, match="min must be float32 for float32 inputs"):
                eq.fake_quant_with_min_max_vars(x, TO[framework](np.asarray(low)), 1.0)


def test_gradients_reach_what_a_tuple_holds() -> None:
    per_channel = eq.fake_quant_with_min_max_vars_per_channel

    def in_torch(end: Any, x: Any) -> Any:
        return per_channel(x, (-end, -2 * end, -3 * end), [end, end, end])

    x = torch.from_numpy(X)
    expected = []
    for function in (in_torch, lambda end, x: per_channel(x, torch.stack([-end, -2 * end, -3 * end]), end.repeat(3))):
        end = torch.tensor(1.5, requires_grad=True)
        (function(end, x) * torch.arange(12.0).reshape(4, 3)).sum().backward()
        expected.append(end.grad)
    assert expected[0] == expected[1] != 0
    compiled = torch.compile(in_torch, fullgraph=True, backend="aot_eager")
    end = torch.tensor(1.5, requires_grad=True)
    (compiled(end, x) * torch.arange(12.0).reshape(4, 3)).sum().backward()
    assert end.grad == expected[0]

    def in_jax(end: Any) -> Any:
        y = per_channel(jnp.asarray(X), (-end, -2 * end, -3 * end), [end, end, end])
        return (y * jnp.arange(12.0).reshape(4, 3)).sum()

    for gradient in (jax.grad(in_jax), jax.jit(jax.grad(in_jax))):
        assert float(gradient(jnp.float32(1.5))) == float(expected[0])


def test_compilers_take_the_same_forms() -> None:
    integers, wide = np.array([-1, -2, -3]), np.array(HIGH)

    def quantized(x: Any, low: Any) -> Any:
        first = eq.fake_quant_with_min_max_vars_per_channel(x, low, wide, num_bits=4.0)
        return eq.quantization.quantize_and_dequantize_v2(
            [first[0], first[1]], LOW, tuple(HIGH), range_given=True, axis=1.0, round_mode=b"HALF_UP"
        )

    wanted = np.asarray(quantized(torch.from_numpy(X), integers))
    compiled = torch.compile(quantized, fullgraph=True, backend="eager")
    assert_same_bits(compiled(torch.from_numpy(X), integers).numpy(), wanted, what="torch.compile")
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for function in (quantized, jax.jit(lambda x: quantized(x, integers))):
                operands = (jnp.asarray(X), integers) if function is quantized else (jnp.asarray(X),)
                assert_same_bits(np.asarray(function(*operands)), wanted, what=f"JAX, 64 bits {x64}")


def test_a_list_of_tensors_is_a_tensor() -> None:
    rows = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0])]
    result = eq.fake_quant_with_min_max_args(rows)
    assert isinstance(result, torch.Tensor) and result.requires_grad
    assert isinstance(eq.fake_quant_with_min_max_args([jnp.ones(2)]), jax.Array)
    with pytest.raises(TypeError, match="inputs is a jax array but inputs is a torch array"):
        eq.fake_quant_with_min_max_args([torch.ones(2), jnp.ones(2)])


@pytest.mark.parametrize("framework", TO)
def test_public_functions_take_lists_with_an_axis(framework: str) -> None:
    for function in (eq.quantization.quantize_and_dequantize, eq.quantization.quantize_and_dequantize_v2):
        for axis in (1, -1, 1.0, np.int64(1)):
            for mode in ("HALF_UP", b"HALF_UP"):
                wanted = function(TO[framework](X), LOW, HIGH, range_given=True, round_mode="HALF_UP", axis=1)
                rows = [TO[framework](row) for row in X]
                for data in (X.tolist(), tuple(rows), rows, TO[framework](X), *[Column(X)] * (framework == "numpy")):
                    got = function(data, LOW, HIGH, range_given=True, round_mode=mode, axis=axis)
                    assert_same_bits(np.asarray(got), np.asarray(wanted), what=f"axis {axis!r}")
        with pytest.raises(ValueError, match="axis must be from -2 to 1"):
            function(X.tolist(), LOW, HIGH, axis=2)
        with pytest.raises(TypeError, match="axis must be a static integer, got str '1'"):
            function(X.tolist(), LOW, HIGH, axis="1")


@pytest.mark.parametrize("framework", TO)
def test_public_convolutions_take_bytes_and_integral_floats(framework: str) -> None:
    to = TO[framework]
    image, weights = to(X[None, :, :, None]), to(np.ones((2, 2, 1, 1), np.float32))
    wanted = np.asarray(eq.nn.depthwise_conv2d(image, weights, [1, 1, 1, 1], "SAME", "NHWC", [1, 1]))
    got = eq.nn.depthwise_conv2d(image, weights, [1.0, 1, 1, np.float32(1)], b"SAME", b"NHWC", [1.0, np.int8(1)])
    assert_same_bits(np.asarray(got), wanted, what="bytes and floats")
    same = [[0, 0], [0, 1.0], (0, np.float64(1)), np.array([0, 0])]
    got = eq.nn.depthwise_conv2d(image, [[[[1]], [[1]]], [[[1]], [[1]]]], [1, 1, 1, 1], same)
    assert_same_bits(np.asarray(got), wanted, what="lists and pairs")
    for padding in ([[0, 0], [0, 1.5], [0, 1], [0, 0]], [["0", "0"]] * 4):
        with pytest.raises(ValueError, match="4 pairs of integers"):
            eq.nn.depthwise_conv2d(image, weights, [1, 1, 1, 1], padding)
    with pytest.raises(ValueError, match="dilations must have 2 values, .* got 2"):
        eq.nn.depthwise_conv2d(image, weights, [1, 1, 1, 1], "SAME", dilations=2)
    x = to(X[None, None])
    for vector in ([1, 1, 1], (1.0, 1.0, 1.0), np.ones(3)):
        y, mean, variance = eq.nn.fused_batch_norm(x, vector, vector)
        wanted_y = eq.nn.fused_batch_norm(x, to(np.ones(3, np.float32)), to(np.ones(3, np.float32)))
        for name, one, other in zip(("y", "mean", "variance"), (y, mean, variance), wanted_y, strict=True):
            assert_same_bits(np.asarray(one), np.asarray(other), what=name)
    with pytest.raises(ValueError, match="scale must be rank 1 but is rank 0"):
        eq.nn.fused_batch_norm(x, 1.0, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("framework", TO)
def test_nests_that_are_no_arrays_are_refused_by_name(framework: str) -> None:
    x = TO[framework](X)
    for bad, error, text in (
        ([1, [2, 3], 4], ValueError, "min must be .* a regular nest of numbers"),
        (["1", "2", "3"], TypeError, "min must contain numbers, got str '1'"),
        ([1, 2, 1j], TypeError, "min must be real, got complex 1j"),
        ([1, 2, np.complex64(1j)], TypeError, "min must be real, got complex64"),
        ([np.array(1j), 2, 3], TypeError, "min must be real, got ndarray"),
        ([1, 2, {3}], TypeError, "min must be a NumPy, PyTorch, JAX or TensorFlow array or a number, got set"),
        (np.array(["1", "2", "3"]), TypeError, "min must"),
        (np.array([1j, 2, 3]), TypeError, "min must"),
        (np.array([1, None, 3]), TypeError, "min must"),
    ):
        with pytest.raises(error, match=text):
            eq.fake_quant_with_min_max_vars_per_channel(x, bad, HIGH)
        with pytest.raises(error, match=text):  # and when the call is known otherwise
            eq.fake_quant_with_min_max_vars_per_channel(x, LOW, HIGH)
            eq.fake_quant_with_min_max_vars_per_channel(x, bad, HIGH)


@pytest.mark.parametrize("framework", TO)
@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (-1e-9, -2e-9, "-1e-09 and -2e-09"),
        (np.float32(1.0000001), np.float32(1), "1.0000001 and 1"),
        (0.1, float("nan"), "0.1 and nan"),
        (np.float32(0.1), np.float32(-2.5e20), r"0.1 and -2.5e\+20"),
    ],
)
def test_ranges_in_errors_are_written_as_people_write_them(framework: str, low: Any, high: Any, text: str) -> None:
    x = TO[framework](X)
    to = TO[framework] if isinstance(low, np.floating) and not isinstance(low, float) else lambda value: value
    for function in (eq.quantization.quantize_and_dequantize, eq.quantization.quantize_and_dequantize_v2):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"quantize_and_dequantize_v[24]: Invalid range: .* got {text}"):
                function(x, to(low), to(high), range_given=True)
            function(x, -1.0, 1.0, range_given=True)
    with pytest.raises(ValueError, match=f"quantize_and_dequantize_v3: Invalid range: .* got {text}"):
        eq.raw_ops.QuantizeAndDequantizeV3(input=x, input_min=to(low), input_max=to(high), num_bits=8)


@pytest.mark.parametrize("framework", TO)
def test_fixed_ranges_in_errors_are_written_as_people_write_them(framework: str) -> None:
    for low, high, text in (
        (-1e-9, -2e-9, "-1e-09 >= -2e-09"),
        (np.float32(0.1), np.float32(-2.5e20), r"0.1 >= -2.5e\+20"),
        (0.1, -1e300, r"0.1 >= -1e\+300"),
        (6.0, float("nan"), "6.0 >= nan"),
    ):
        with pytest.raises(ValueError, match=f"was: {text}"):
            eq.fake_quant_with_min_max_args(TO[framework](X), low, high)
    with pytest.raises(ValueError, match="input_min must be at most input_max, got 0.1 and -1e-09"):
        eq.raw_ops.QuantizeAndDequantize(
            input=TO[framework](X), range_given=True, input_min=np.float32(0.1), input_max=np.float32(-1e-9)
        )


def test_jax_refuses_bad_ranges_when_it_is_called() -> None:
    def refused(x: Any) -> Any:
        return eq.quantization.quantize_and_dequantize_v2(x, 1.0, -1.0, range_given=True)

    with pytest.raises(ValueError, match="Invalid range"):
        refused(jnp.ones((1000, 1000)))  # large enough to be computed while Python goes on
    with pytest.raises(ValueError, match="Invalid range"):
        jax.grad(lambda x: refused(x).sum())(jnp.ones(3))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_public_functions_write_into_out(framework: str) -> None:
    to = TO[framework]
    x, image = to(X), to(X[None, :, :, None])
    for function in (eq.quantization.quantize_and_dequantize, eq.quantization.quantize_and_dequantize_v2):
        wanted = np.asarray(function(x, -1.0, 1.0, range_given=True)).copy()
        out = to(np.full_like(X, np.nan))
        assert function(x, -1.0, 1.0, range_given=True, out=out) is out
        assert_same_bits(np.asarray(out), wanted, what=function.__name__)
    weights, sizes = to(np.ones((2, 2, 1, 1), np.float32)), ((1, 4, 3, 1), (2, 2, 1, 1))
    window = [1, 1, 1, 1], "SAME"
    for function, operands, shape in (
        (eq.nn.depthwise_conv2d, (image, weights), sizes[0]),
        (eq.nn.depthwise_conv2d_native, (image, weights), sizes[0]),
        (eq.nn.depthwise_conv2d_backprop_input, (sizes[0], weights, image), sizes[0]),
        (eq.nn.depthwise_conv2d_backprop_filter, (image, sizes[1], image), sizes[1]),
    ):
        out = to(np.full(shape, np.nan, np.float32))
        assert function(*operands, *window, out=out) is out
        assert_same_bits(np.asarray(out), np.asarray(function(*operands, *window)), what=function.__name__)
    images, vector = to(X[None, None]), to(np.ones(3, np.float32))
    wanted = [np.asarray(result) for result in eq.nn.fused_batch_norm(images, vector, vector)]
    y, mean = to(np.full((1, 1, 4, 3), np.nan, np.float32)), to(np.full(3, np.nan, np.float32))
    for out in ((y, mean, None), (None, None, None)):
        results = eq.nn.fused_batch_norm(images, vector, vector, out=out)
        assert all(target is None or result is target for result, target in zip(results, out, strict=True))
        for result, expected in zip(results, wanted, strict=True):
            assert_same_bits(np.asarray(result), expected, what="batch norm")
    for bad in (y, (y, mean), [y, mean, None]):
        with pytest.raises(ValueError, match="fused_batch_norm: out must be a tuple of 3 arrays"):
            eq.nn.fused_batch_norm(images, vector, vector, out=bad)


def test_help_shows_arrays_and_keywords() -> None:
    array = "numpy.ndarray | torch.Tensor | jax.Array | tf.Tensor"
    text = pydoc.render_doc(eq.fake_quant_with_min_max_vars, renderer=pydoc.plaintext)
    assert f"fake_quant_with_min_max_vars(inputs: {array}, min: {array} | float," in text
    assert "Quantize and dequantize a tensor with one trainable range" in text
    text = pydoc.render_doc(eq.raw_ops.QuantizeAndDequantizeV2, renderer=pydoc.plaintext)
    assert f"QuantizeAndDequantizeV2(*, input: {array}," in text and "Literal['HALF_TO_EVEN', 'HALF_UP']" in text
    for module in (eq.raw_ops, eq.quantization, eq.nn, eq):
        for name in dir(module):
            if callable(getattr(module, name)) and not name.startswith("_") and "Format" not in name:
                assert "TensorSpec" not in pydoc.render_doc(getattr(module, name)), name
    assert f"-> {array}" in pydoc.render_doc(eq.nn.depthwise_conv2d, renderer=pydoc.plaintext)
