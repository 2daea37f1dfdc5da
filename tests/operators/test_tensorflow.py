# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's tensors: its own operators where they have the answer, ours elsewhere, with the same results.

Runs where TensorFlow is installed: `make test-tensorflow`.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import goldens
import numpy as np
import pytest
from bits import assert_same_bits
from cases import BITWISE, Case, bad_calls, cases
from conftest import BY_RAW_NAME, expected_of, in_halves
from manners import PLAIN, arguments, manners, outcome

import exactqat as eq

tf = pytest.importorskip("tensorflow")

from exactqat.operators import tensorflow as frontend  # noqa: E402

OPS = sorted(BY_RAW_NAME)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensorflow.md"


def tensors_of(case: Case) -> dict[str, Any]:
    return {name: tf.constant(value) for name, value in case.operands.items()}


def call(case: Case, operands: dict[str, Any] | None = None) -> tuple[Any, ...]:
    operands = tensors_of(case) if operands is None else operands
    results = getattr(eq.raw_ops, case.op)(**operands, **case.attributes)
    return tuple(results) if isinstance(results, tuple) else (results,)


def traced(case: Case, sizes_known: bool = True) -> tuple[Any, ...]:
    """The same in a graph."""
    operands = tensors_of(case)
    signature = [
        tf.TensorSpec(tensor.shape if sizes_known else [None] * len(tensor.shape), tensor.dtype)
        for tensor in operands.values()
    ]
    function = tf.function(lambda *arrays: call(case, dict(zip(operands, arrays, strict=True))), signature)
    return function(*operands.values())


@contextmanager
def watching_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the operators that ours were called for."""
    ours: list[str] = []
    kept = frontend._ours

    def counted(op: Any, *rest: Any) -> Any:
        ours.append(op.name)
        return kept(op, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(frontend, "_ours", counted)
        yield ours


def in_its_own_order(case: Case) -> bool:
    """Where TensorFlow's bits are not the promised ones (docs/differences.toml): its own are what is given."""
    return "tolerance" in case.tags or "auto_zeros_of_both_signs" in case.name or "denormals" in case.name


def check(case: Case, results: tuple[Any, ...], ours: bool, what: str) -> None:
    expected = expected_of(case)
    assert not isinstance(expected, Exception)
    for name, result, wanted in zip(BY_RAW_NAME[case.op].results, results, expected, strict=True):
        got = result.numpy()
        where = f"{case.name} {name} {what}, {'ours' if ours else 'theirs'}"
        assert isinstance(result, tf.Tensor), where
        assert got.dtype == wanted.dtype, where
        if ours or (name in BITWISE[case.op] and not in_its_own_order(case)):
            assert_same_bits(got, wanted, what=where, operands=case.operands)
            continue
        if got.size == 0 or wanted.size == 0 or name.startswith("reserve_space_3"):
            continue  # what carries nothing
        assert got.shape == wanted.shape, where
        if "/mean_" in case.name:
            continue  # what float32 sums lose there
        step = 2e-2 if got.itemsize == 2 else 2e-4
        close = np.isclose(got.astype(np.float64), wanted.astype(np.float64), step, step, equal_nan=True)
        assert close.all(), (where, got[~close][:3], wanted[~close][:3])


@pytest.mark.parametrize("op", OPS)
def test_every_case(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cases(op=op):
        if isinstance(error := expected_of(case), Exception):
            with pytest.raises(type(error)):
                call(case)
            continue
        with watching_ours(monkeypatch) as ours:
            results = call(case)
        check(case, results, bool(ours), "eager")


@pytest.mark.parametrize("sizes_known", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_a_sample_of_the_cases_in_a_graph(op: str, sizes_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = int(os.environ.get("EXACTQAT_TENSORFLOW_STEP", "12"))
    for case in list(cases(op=op))[::step]:
        shapes = [array.shape for array in case.operands.values()]
        if not sizes_known and ("empty" in case.tags or any(0 in shape for shape in shapes)):
            continue  # TensorFlow's operator was chosen before its refusal could be foreseen
        if isinstance(expected_of(case), Exception):
            with pytest.raises((ValueError, TypeError, tf.errors.InvalidArgumentError)):
                traced(case, sizes_known)
            continue
        with watching_ours(monkeypatch) as ours:
            results = traced(case, sizes_known)
        check(case, results, bool(ours), "in a graph")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_16_bits(op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = tf.as_dtype(dtype).as_numpy_dtype
    plain = [case for case in cases(op=op) if not case.tags & {"float64", "tolerance"}]
    for case in plain[::6]:
        case = in_halves(case, np.dtype(bits))
        if isinstance(expected_of(case), Exception):
            continue
        for run in (call, traced):
            with watching_ours(monkeypatch) as ours:
                results = run(case)
            if ours or not op.startswith("Depthwise"):  # TensorFlow rounds elsewhere
                check(case, results, bool(ours), run.__name__)


# Gradients.


class Example(NamedTuple):
    """A function of arrays; `stairs`: differences of its values say nothing about the gradient it declares."""

    function: Callable[..., Any]
    arrays: list[np.ndarray]
    stairs: bool = False
    orders: int = 2


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.Generator(np.random.PCG64(12))
    return [random.standard_normal(shape) for shape in shapes]


def convolution(data_format: str, padding: Any, strides: tuple[int, int], dilations: tuple[int, int]) -> Example:
    shape = (2, 6, 5, 2) if data_format == "NHWC" else (2, 2, 6, 5)
    both = {"H": strides[0], "W": strides[1]}
    four = [both.get(letter, 1) for letter in data_format]
    return Example(
        lambda x, w: eq.nn.depthwise_conv2d(x, w, four, padding, data_format, dilations), arrays(shape, (3, 2, 2, 2))
    )


def batch_norm(shape: tuple[int, ...], data_format: str) -> Example:
    channels = shape[1] if data_format.startswith("NC") else shape[-1]
    return Example(
        lambda x, scale, offset: (
            eq.raw_ops.FusedBatchNormV3(
                x=x, scale=scale, offset=offset, mean=[], variance=[], data_format=data_format, epsilon=0.01
            ).y
        ),
        arrays(shape, (channels,), (channels,)),
    )


def batch_norm_gradient(shape: tuple[int, ...], data_format: str, is_training: bool) -> Example:
    channels = shape[1] if data_format.startswith("NC") else shape[-1]
    fixed = np.linspace(0.5, 1.5, channels)
    options = {"data_format": data_format, "is_training": is_training, "epsilon": 0.01}

    def function(gradient: Any, x: Any, scale: Any) -> Any:
        forward = eq.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=fixed, mean=fixed, variance=fixed, **options)
        reserves = {f"reserve_space_{i}": getattr(forward, f"reserve_space_{i}") for i in (1, 2, 3)}
        return tuple(eq.raw_ops.FusedBatchNormGradV3(y_backprop=gradient, x=x, scale=scale, **reserves, **options)[:3])

    return Example(function, arrays(shape, shape, (channels,)))


SAME = {"strides": [1, 1, 1, 1], "padding": "SAME"}
X, G = arrays((6, 3), (6, 3))
LOW, HIGH = np.full(3, -1.1), np.full(3, 1.2)
GIVEN = {"range_given": True, "num_bits": 8}
EXAMPLES = {
    "DepthwiseConv2dNative": convolution("NHWC", "SAME", (1, 1), (1, 1)),
    "DepthwiseConv2dNative, strides": convolution("NHWC", "VALID", (2, 2), (1, 1)),
    "DepthwiseConv2dNative, NCHW, unequal strides": convolution("NCHW", "VALID", (1, 2), (1, 1)),
    "DepthwiseConv2dNative, dilation": convolution("NHWC", "SAME", (1, 1), (2, 2)),
    "DepthwiseConv2dNative, stride and dilation": convolution("NHWC", "SAME", (2, 1), (1, 2)),
    "DepthwiseConv2dNative, explicit": convolution("NHWC", [(0, 0), (2, 0), (1, 3), (0, 0)], (2, 2), (1, 1)),
    "DepthwiseConv2dNativeBackpropInput": Example(
        lambda w, dy: eq.raw_ops.DepthwiseConv2dNativeBackpropInput(
            input_sizes=(2, 4, 3, 2), filter=w, out_backprop=dy, **SAME
        ),
        arrays((2, 3, 2, 2), (2, 4, 3, 4)),
    ),
    "DepthwiseConv2dNativeBackpropFilter": Example(
        lambda a, dy: eq.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=a, filter_sizes=(2, 3, 2, 2), out_backprop=dy, **SAME
        ),
        arrays((2, 4, 3, 2), (2, 4, 3, 4)),
    ),
    "FusedBatchNormV3": batch_norm((2, 3, 2, 3), "NHWC"),
    "FusedBatchNormV3, NCHW": batch_norm((2, 3, 2, 2), "NCHW"),
    "FusedBatchNormV3, NDHWC": batch_norm((2, 2, 3, 2, 2), "NDHWC"),
    "FusedBatchNormV3, NCDHW": batch_norm((2, 2, 3, 2, 2), "NCDHW"),
    "FusedBatchNormV3, inference": Example(
        lambda a, s, o, m, v: (
            eq.raw_ops.FusedBatchNormV3(x=a, scale=s, offset=o, mean=m, variance=v * v + 1.0, is_training=False).y
        ),
        arrays((2, 2, 2, 3), (3,), (3,), (3,), (3,)),
        orders=1,  # the gradient operator's reserve spaces have no gradients
    ),
    "FusedBatchNormGradV3": batch_norm_gradient((2, 3, 2, 2), "NHWC", True),
    "FusedBatchNormGradV3, NCHW": batch_norm_gradient((2, 2, 3, 2), "NCHW", True),
    "FusedBatchNormGradV3, inference": batch_norm_gradient((2, 2, 3, 2), "NHWC", False),
    "FakeQuantWithMinMaxArgs": Example(lambda a: eq.fake_quant_with_min_max_args(a, -1.1, 1.2), [X], True),
    "FakeQuantWithMinMaxVars": Example(eq.fake_quant_with_min_max_vars, [X, LOW[0], HIGH[0]], True),
    "FakeQuantWithMinMaxVarsPerChannel": Example(eq.fake_quant_with_min_max_vars_per_channel, [X, LOW, HIGH], True),
    "FakeQuantWithMinMaxArgsGradient": Example(
        lambda dy: eq.fake_quant_with_min_max_args_gradient(dy, X, -1.1, 1.2), [G]
    ),
    "FakeQuantWithMinMaxVarsGradient": Example(
        lambda dy: tuple(eq.fake_quant_with_min_max_vars_gradient(dy, X, -1.1, 1.2)), [G]
    ),
    "FakeQuantWithMinMaxVarsPerChannelGradient": Example(
        lambda dy: tuple(eq.fake_quant_with_min_max_vars_per_channel_gradient(dy, X, LOW, HIGH)), [G]
    ),
    "QuantizeAndDequantizeV2": Example(
        lambda a: eq.raw_ops.QuantizeAndDequantizeV2(input=a, input_min=-1.0, input_max=1.0, **GIVEN), [X], True
    ),
    "QuantizeAndDequantizeV2, range from data": Example(
        lambda a: eq.quantization.quantize_and_dequantize_v2(a, 0.0, 0.0), [X], True
    ),
    "QuantizeAndDequantizeV2, ranges along an axis": Example(
        lambda a: eq.quantization.quantize_and_dequantize_v2(a, LOW, HIGH, range_given=True, axis=-1), [X], True
    ),
    "QuantizeAndDequantizeV3": Example(
        lambda a: eq.raw_ops.QuantizeAndDequantizeV3(input=a, input_min=-1.0, input_max=1.0, num_bits=8), [X], True
    ),
    "QuantizeAndDequantizeV4": Example(
        lambda a: eq.raw_ops.QuantizeAndDequantizeV4(input=a, input_min=-1.0, input_max=1.0, **GIVEN), [X], True
    ),
    "QuantizeAndDequantizeV4Grad": Example(
        lambda dy: eq.raw_ops.QuantizeAndDequantizeV4Grad(gradients=dy, input=X, input_min=-1.0, input_max=1.0)[0], [G]
    ),
}


def total(results: Any) -> Any:
    """A number with different derivatives everywhere."""
    every = results if isinstance(results, tuple) else (results,)
    return tf.add_n([tf.reduce_sum(tf.sin(0.1 * result + 1.0)) for result in every])


def first_and_second(function: Callable[..., Any], *tensors: Any) -> Any:
    """Gradients of a number made of the function's results, and of one made of those gradients."""
    with tf.GradientTape() as outer:
        outer.watch(tensors)
        with tf.GradientTape() as inner:
            inner.watch(tensors)
            value = total(function(*tensors))
        first = inner.gradient(value, tensors, unconnected_gradients="zero")
        slope = total(tuple(first))
    return first, outer.gradient(slope, tensors, unconnected_gradients="zero")


def flat(results: Any) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tf.nest.flatten(results)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_gradients(name: str) -> None:
    """Ours, in float64, against differences; TensorFlow's, in float32, against ours; each in a graph, too."""
    function, values, stairs, orders = EXAMPLES[name]
    wide = [tf.constant(value) for value in values]
    ours = flat(first_and_second(function, *wide))
    if not stairs:
        slope = lambda *tensors: first_and_second(function, *tensors)[0]  # noqa: E731
        both = (lambda *tensors: total(function(*tensors)), lambda *tensors: total(tuple(slope(*tensors))))
        for checked in both[:orders]:
            theoretical, numerical = tf.test.compute_gradient(checked, wide, 1e-5)
            for got, wanted in zip(theoretical, numerical, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * max(1, np.abs(wanted).max()))
    single = [tf.constant(value, tf.float32) for value in values]
    unknown = [tf.TensorSpec([None] * len(value.shape), value.dtype) for value in single]
    for what, run, tensors in (
        ("eager", first_and_second, single),
        ("in a graph", tf.function(first_and_second), single),
        ("in a graph", tf.function(first_and_second), wide),
        ("sizes unknown", tf.function(lambda *operands: first_and_second(function, *operands), unknown), single),
    ):
        results = flat(run(*tensors) if what == "sizes unknown" else run(function, *tensors))
        for got, wanted in zip(results, ours, strict=True):
            scale = np.abs(wanted).max() + 1e-3
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5 * scale, err_msg=f"{name} {what}")


def test_graphs_of_tensorflow_hold_no_python(tmp_path: Path) -> None:
    """What TensorFlow takes runs in its graphs, with gradients of first order, and where no Python is: compiled by XLA
    and loaded from a SavedModel."""

    class Layer(tf.Module):
        def __init__(self) -> None:
            self.filter = tf.Variable(tf.random.stateless_normal((3, 3, 2, 2), (1, 2)))
            self.ends = tf.Variable(np.float32([-1.5, 2.5]))

        @tf.function(input_signature=[tf.TensorSpec((None, 6, 5, 2))])
        def step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                filter = eq.quantization.fake_quant_with_min_max_vars_per_channel(
                    self.filter, [-1.0, -2.0], [1.0, 2.0], narrow_range=True
                )
                y = eq.nn.depthwise_conv2d(x, filter, [1, 1, 1, 1], "SAME")
                y = eq.nn.fused_batch_norm(y, tf.ones(4), tf.zeros(4))[0]
                y = eq.fake_quant_with_min_max_vars(y, self.ends[0], self.ends[1])
                y = eq.quantization.quantize_and_dequantize(y, -1.0, 1.0, range_given=True)
                loss = tf.reduce_sum(y * y)
            return [y, *tape.gradient(loss, [self.filter, self.ends])]

    layer = Layer()
    graph = layer.step.get_concrete_function().graph
    kinds = {node.op for node in graph.as_graph_def().node}
    kinds |= {node.op for function in graph.as_graph_def().library.function for node in function.node_def}
    assert "FakeQuantWithMinMaxVars" in kinds and not {"PyFunc", "PyFuncStateless", "EagerPyFunc"} & kinds
    x = tf.random.stateless_normal((2, 6, 5, 2), (3, 4))
    wanted = layer.step(x)
    assert wanted[0].shape == (2, 6, 5, 4)
    compiled = tf.function(layer.step.python_function, jit_compile=True)(x)
    tf.saved_model.save(layer, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    for got, again, expected in zip(compiled, loaded.step(x), wanted, strict=True):
        # XLA fuses; a quantized value may be the next one.
        assert np.mean(np.abs(got - expected) > 1e-3 * np.abs(expected).max()) < 0.05
        np.testing.assert_allclose(again, expected, rtol=1e-4, atol=1e-4)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(loaded.step(x)[0])
    assert np.isfinite(tape.gradient(value, x)).all()


def test_autograph_leaves_the_library_alone() -> None:
    traced = tf.function(eq.fake_quant_with_min_max_args)(X.astype(np.float32) + tf.zeros((6, 3)))
    np.testing.assert_array_equal(traced, eq.fake_quant_with_min_max_args(X.astype(np.float32)))


def test_shapes_of_results_are_known() -> None:
    """As far as those of the operands are, ours like theirs."""
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((None, 6, 5, 3), dtype) for dtype in ("float32", "float64")])
    def function(single: Any, wide: Any) -> Any:
        for x in (single, wide):
            y = eq.fake_quant_with_min_max_vars_per_channel(x, np.zeros(3), np.ones(3))
            z = eq.nn.depthwise_conv2d(y, np.ones((3, 3, 3, 2)), [1, 2, 1, 1], "VALID", dilations=[1, 2])
            normalized, mean, _ = eq.nn.fused_batch_norm(x, np.ones(3), np.zeros(3))
            shapes.append([tuple(tensor.shape) for tensor in (y, z, normalized, mean)])
        return z

    function.get_concrete_function()
    assert shapes == [[(None, 6, 5, 3), (None, 2, 1, 6), (None, 6, 5, 3), (3,)]] * 2


def test_unknown_ranks() -> None:
    x, low, high = (tf.constant(value, tf.float32) for value in (X, LOW, HIGH))
    unknown = tf.TensorSpec(None)
    for operator, ends in (
        (eq.fake_quant_with_min_max_vars_per_channel, (low, high)),
        (eq.fake_quant_with_min_max_vars, (low[0], high[0])),
    ):
        traced = tf.function(lambda x, a, b, op=operator: op(x, a, b), [unknown] * 3)
        np.testing.assert_array_equal(traced(x, *ends), operator(x, *ends))
    # Where TensorFlow ends the process.
    per_channel = tf.function(lambda x: eq.fake_quant_with_min_max_vars_per_channel(x, low, high), [unknown])
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least rank 1"):
        per_channel(tf.constant(1.0))


# Operands and errors.


def test_what_is_given_beside_tensors() -> None:
    x = tf.constant(X, tf.float32)
    wanted = eq.fake_quant_with_min_max_vars_per_channel(X.astype(np.float32), LOW, HIGH)
    for low in (LOW, LOW.tolist(), LOW.astype(np.float32), tf.Variable(LOW, dtype="float32"), [tf.constant(-1.1)] * 3):
        got = eq.fake_quant_with_min_max_vars_per_channel(x, low, HIGH)
        assert_same_bits(got.numpy(), wanted, what=type(low).__name__)
    got = eq.fake_quant_with_min_max_vars_per_channel(X.astype(np.float32), tf.constant(LOW, tf.float32), HIGH)
    assert isinstance(got, tf.Tensor)
    assert_same_bits(got.numpy(), wanted, what="NumPy's data beside a tensor")
    wide = eq.fake_quant_with_min_max_vars(X, tf.constant(-1.0), 1.0)
    assert wide.dtype == tf.float32
    results = eq.raw_ops.FusedBatchNormV3(
        x=tf.ones((1, 2, 2, 3)), scale=[1, 1, 1], offset=[0, 0, 0], mean=[], variance=[]
    )
    assert results._fields == BY_RAW_NAME["FusedBatchNormV3"].results
    assert all(isinstance(result, tf.Tensor) for result in results)


def test_gradients_reach_variables() -> None:
    keras = pytest.importorskip("keras")
    x = tf.constant(X, tf.float32)
    ends = [tf.Variable(-1.0), [tf.Variable(-1.0)] * 3]
    if keras.backend.backend() == "tensorflow":
        ends.append(keras.Variable(np.float32(-1)))
    for low in ends:
        operator = eq.fake_quant_with_min_max_vars_per_channel if type(low) is list else eq.fake_quant_with_min_max_vars
        variable = low[0] if type(low) is list else getattr(low, "value", low)
        variable = low if isinstance(low, tf.Variable) else variable
        with tf.GradientTape() as tape:
            y = operator(x, low, [1.0] * 3 if type(low) is list else 1.0)
        assert tape.gradient(y, variable).numpy() != 0


def test_grad_pass_through() -> None:
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = eq.grad_pass_through(tf.round)(x)
    np.testing.assert_array_equal(y, np.round(X))
    np.testing.assert_array_equal(tape.gradient(y, x), np.ones_like(X))
    with pytest.raises(ValueError, match="as many arrays as it takes"):
        eq.grad_pass_through(lambda a, b: a)(x, x)


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_bad_calls_are_refused(in_a_graph: bool) -> None:
    for call in bad_calls():
        operands = {name: tf.constant(value) for name, value in call.operands.items()}
        run = lambda call=call, operands=operands: getattr(eq.raw_ops, call.op)(**operands, **call.attributes)  # noqa: E731
        # What only the values tell is known when the graph runs.
        late = (tf.errors.InvalidArgumentError,) if in_a_graph else ()
        with pytest.raises((call.error, *late)) as raised:
            tf.function(run)() if in_a_graph else run()
        assert raised.type is not ValueError or BY_RAW_NAME[call.op].name in str(raised.value), call


def test_errors_name_the_argument() -> None:
    x = tf.constant(X, tf.float32)
    for call, error, text in (
        (lambda: eq.fake_quant_with_min_max_args(x, out=x), TypeError, "out cannot be used with TensorFlow tensors"),
        (lambda: eq.fake_quant_with_min_max_args(tf.constant([1])), TypeError, "inputs must be float16"),
        (lambda: eq.fake_quant_with_min_max_args(tf.constant(["1"])), TypeError, "inputs must be float16"),
        (lambda: eq.fake_quant_with_min_max_args(tf.ragged.constant([[1.0]])), TypeError, "inputs must be a dense"),
        (lambda: eq.fake_quant_with_min_max_args(tf.sparse.from_dense(x)), TypeError, "inputs must be a dense"),
        (lambda: eq.fake_quant_with_min_max_vars(x, "low", 1.0), TypeError, "min must be a NumPy, PyTorch, JAX or"),
        (lambda: eq.fake_quant_with_min_max_vars(x, tf.constant(1), 1.0), TypeError, "min must be float32"),
        (lambda: eq.fake_quant_with_min_max_vars(x, [[1.0], 2.0], 1.0), ValueError, "min must be an array"),
        (
            lambda: eq.quantization.quantize_and_dequantize(x, 2.0, 1.0, range_given=True),
            ValueError,
            "input_min must be at most input_max, got 2 and 1",
        ),
    ):
        with pytest.raises(error, match=text):
            call()


def test_other_frameworks_beside_tensors_are_refused() -> None:
    x = tf.constant(X, tf.float32)
    for name, make in (("torch", "tensor"), ("jax.numpy", "asarray")):
        module = pytest.importorskip(name)
        with pytest.raises(TypeError, match="must come from one framework"):
            eq.fake_quant_with_min_max_vars(x, getattr(module, make)(-1.0), 1.0)


def test_symbolic_tensors_of_keras_are_refused() -> None:
    keras = pytest.importorskip("keras")
    with pytest.raises(TypeError, match="inputs is a KerasTensor"):
        eq.fake_quant_with_min_max_args(keras.Input((3,)))


def test_the_page() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {}
    source = str(PAGE)
    linecache.cache[source] = (len(block), None, block.splitlines(keepends=True), source)  # for autograph
    exec(compile(block, source, "exec"), names)
    assert names["gradient"].shape == (3, 3, 1, 2) and names["loss"] > 0


@pytest.mark.parametrize("op", PLAIN)
def test_every_argument_in_every_form(op: str) -> None:
    """As TensorFlow takes them (tests/goldens/manners.json), but for what docs/differences.toml names."""
    recorded = goldens.load_json("manners")

    def results_of(inputs: dict[str, Any]) -> list[np.ndarray]:
        results = getattr(eq.raw_ops, op)(**inputs)
        return [np.asarray(result) for result in (results if isinstance(results, tuple) else (results,))]

    wrong = []
    for manner in manners(op):
        if manner.argument in BY_RAW_NAME[op].operands == (manner.argument,):
            continue  # then there is no tensor
        plain = {k: tf.constant(v) if isinstance(v, np.ndarray) else v for k, v in manner.plain.items()}
        inputs = arguments(manner, tf.constant)
        ours = outcome(lambda inputs=inputs: results_of(inputs), results_of(plain), (ValueError, TypeError))
        theirs = recorded[f"{op}/{manner.argument}"][manner.form].split(", ")[1]
        documented = manner.argument in BY_RAW_NAME[op].attributes and manner.form in ("half", "halves", "bytes")
        if ours != "same" if theirs == "same" and not documented else ours == "other":
            wrong.append(f"{manner.name}: {ours}, in TensorFlow {theirs}")
    assert not wrong, "\n".join(wrong)
