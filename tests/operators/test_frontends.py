# SPDX-License-Identifier: Apache-2.0
"""NumPy, PyTorch and JAX: the same bits, gradients, compilers, and an operator declared only here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from cases import Case, cases
from conftest import BY_RAW_NAME, expected_of, in_halves

import exactqat as eq
from exactqat.operators import OPERATORS
from exactqat.operators.declarations.checks import check_dtypes
from exactqat.operators.declarations.op import operator
from exactqat.operators.declarations.specification import Lowering, Tensor, TensorSpec

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

eq.raw_ops.FakeQuantWithMinMaxArgs(inputs=torch.zeros(1))  # the first call registers torch.ops.exactqat

# All cases of an operator are one test: a test of its own for each would take longer than the calls.
OPS = sorted(BY_RAW_NAME)
TO = {"numpy": np.array, "torch": lambda a: torch.from_numpy(np.array(a)), "jax": jnp.array}


def arrays_of(results: Any) -> tuple[np.ndarray, ...]:
    every = results if isinstance(results, tuple) else (results,)
    return tuple(r.detach().numpy() if isinstance(r, torch.Tensor) else np.asarray(r) for r in every)


def call(case: Case, to: Callable[[Any], Any]) -> Any:
    operands = {name: to(value) for name, value in case.operands.items()}
    return getattr(eq.raw_ops, case.op)(**operands, **case.attributes)


def check(case: Case, results: Any, what: str) -> None:
    expected = expected_of(case)
    assert not isinstance(expected, Exception)
    names = BY_RAW_NAME[case.op].results
    for name, result, wanted in zip(names, arrays_of(results), expected, strict=True):
        assert_same_bits(result, wanted, what=f"{case.name} {name} in {what}", operands=case.operands)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_every_case(op: str, framework: str) -> None:
    for case in cases(op=op):
        if isinstance(error := expected_of(case), Exception):
            with pytest.raises(type(error)):
                call(case, TO[framework])
        else:
            check(case, call(case, TO[framework]), framework)


@pytest.mark.parametrize("op", OPS)
def test_every_fifth_case_in_jax(op: str) -> None:
    # XLA compiles again for each shape, which takes longer than everything else here.
    for case in list(cases(op=op))[::5]:
        with jax.enable_x64("float64" in case.tags):
            if isinstance(expected_of(case), Exception):
                with pytest.raises((ValueError, TypeError, jax.errors.JaxRuntimeError)):
                    jax.block_until_ready(call(case, TO["jax"]))
            else:
                check(case, call(case, TO["jax"]), "jax")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_16_bits(op: str, dtype: str) -> None:
    import ml_dtypes

    bits = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def to_torch(array: Any) -> Any:
        array = np.array(array)
        if array.dtype != ml_dtypes.bfloat16:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)

    def from_torch(tensor: Any) -> np.ndarray:
        if tensor.dtype != torch.bfloat16:
            return tensor.numpy()
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)

    plain = [case for case in cases(op) if "float64" not in case.tags]
    for number, case in enumerate(plain[::4]):
        case = in_halves(case, bits)
        expected = expected_of(case)
        if isinstance(expected, Exception):
            continue
        names = BY_RAW_NAME[op].results
        results = call(case, to_torch)
        for name, result, wanted in zip(
            names, results if isinstance(results, tuple) else [results], expected, strict=True
        ):
            assert_same_bits(from_torch(result), wanted, what=f"{case.name} {name} in torch")
        if number < 2:
            check(case, call(case, np.array), "numpy")
            check(case, call(case, jnp.array), "jax")


def test_16_bits_in_training() -> None:
    """What mixed precision does: 16-bit tensors beside float32 ranges and statistics, forward, backward, and again."""
    random = torch.Generator().manual_seed(0)
    x, weights = torch.randn(2, 2, 5, 4, 3, generator=random)
    vector = torch.rand(3) + 0.5
    for dtype in (torch.float16, torch.bfloat16):
        leaf = x.to(dtype).requires_grad_()
        low, high = (-vector).requires_grad_(), vector.clone().requires_grad_()
        eq.fake_quant_with_min_max_vars_per_channel(leaf, low, high).sum().backward()
        assert leaf.grad.dtype == dtype and low.grad.dtype == torch.float32
        scale = vector.clone().requires_grad_()
        y = eq.nn.fused_batch_norm(leaf, scale, vector)[0]
        (gradient,) = torch.autograd.grad((y.float() * weights).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(gradient.float().square().sum(), leaf)
        assert y.dtype == gradient.dtype == second.dtype == dtype
        in_float32 = leaf.detach().float().requires_grad_()
        y = eq.nn.fused_batch_norm(in_float32, vector, vector)[0]
        (gradient,) = torch.autograd.grad((y * weights).sum(), in_float32, create_graph=True)
        (wanted,) = torch.autograd.grad(gradient.square().sum(), in_float32)
        step = 2**-8 if dtype == torch.bfloat16 else 2**-11
        assert (second.float() - wanted).abs().max() <= 8 * step * wanted.abs().max()


def example(op: str) -> Case:
    """An ordinary case of an operator, with elements and without special values."""
    without = {"edge", "empty", "float64", "deviation", "beyond_tensorflow"}
    plain = (case for case in cases(op=op) if not case.tags & without)
    return next(case for case in plain if case.attributes.get("num_bits", 8) == 8)  # one bit can mean NaN everywhere


@pytest.mark.parametrize("op", OPS)
def test_torch_compile_and_export(op: str) -> None:
    case = example(op)
    operands = [TO["torch"](value) for value in case.operands.values()]
    names = list(case.operands)

    def function(*arrays: Any) -> Any:
        return tuple(
            arrays_to_tuple(getattr(eq.raw_ops, op)(**dict(zip(names, arrays, strict=True)), **case.attributes))
        )

    def arrays_to_tuple(results: Any) -> tuple[Any, ...]:
        return tuple(results) if isinstance(results, tuple) else (results,)

    torch._dynamo.reset()
    check(case, torch.compile(function, fullgraph=True, backend="aot_eager")(*operands), "torch.compile")

    class Module(torch.nn.Module):
        def forward(self, *arrays: Any) -> Any:
            return function(*arrays)

    exported = torch.export.export(Module(), tuple(operands))
    check(case, exported.module()(*operands), "torch.export")


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str) -> None:
    case, declared = example(op), BY_RAW_NAME[op]
    operands, attributes = declared.bind((), {**case.operands, **case.attributes})
    # opcheck compares runs with allclose, to which NaN differs from itself.
    tensors = [
        TO["torch"](np.clip(np.nan_to_num(value), -9, 9)).requires_grad_(declared.vjp is not None) for value in operands
    ]
    overload = getattr(torch.ops.exactqat, declared.name).default
    torch.library.opcheck(overload, (*tensors, *attributes.values()))


FORWARD = {
    "FakeQuantWithMinMaxArgs": "FakeQuantWithMinMaxArgsGradient",
    "FakeQuantWithMinMaxVars": "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannel": "FakeQuantWithMinMaxVarsPerChannelGradient",
    "QuantizeAndDequantizeV4": "QuantizeAndDequantizeV4Grad",
    "FusedBatchNormV3": "FusedBatchNormGradV3",
    "DepthwiseConv2dNative": "",
}


def gradient_in_numpy(case: Case, g: np.ndarray) -> tuple[np.ndarray, ...]:
    """The gradients of a forward case through its gradient operator, called by hand on NumPy arrays."""
    raw, attributes = eq.raw_ops, dict(case.attributes)
    if case.op == "DepthwiseConv2dNative":
        x, w = case.operands["input"], case.operands["filter"]
        return (
            raw.DepthwiseConv2dNativeBackpropInput(input_sizes=x.shape, filter=w, out_backprop=g, **attributes),
            raw.DepthwiseConv2dNativeBackpropFilter(input=x, filter_sizes=w.shape, out_backprop=g, **attributes),
        )
    if case.op == "FusedBatchNormV3":
        forward = call(case, np.asarray)
        attributes.pop("exponential_avg_factor", None)
        reserves = {f"reserve_space_{i}": getattr(forward, f"reserve_space_{i}") for i in (1, 2, 3)}
        return raw.FusedBatchNormGradV3(
            y_backprop=g, x=case.operands["x"], scale=case.operands["scale"], **reserves, **attributes
        )[:3]
    if case.op == "QuantizeAndDequantizeV4":
        attributes = {key: value for key, value in attributes.items() if key == "axis"}
    results = getattr(raw, FORWARD[case.op])(gradients=g, **case.operands, **attributes)
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.slow
@pytest.mark.parametrize("op", FORWARD)
def test_gradients_are_the_gradient_operators(op: str) -> None:
    case = example(op)
    random = np.random.Generator(np.random.PCG64(3))
    wanted = None

    def first(results: Any) -> Any:
        return results[0] if isinstance(results, tuple) else results

    for mode in ("eager", "aot_eager", "inductor"):
        tensors = {name: TO["torch"](value).requires_grad_() for name, value in case.operands.items()}

        def function(*arrays: Any, names: tuple[str, ...] = tuple(tensors)) -> Any:
            return first(getattr(eq.raw_ops, op)(**dict(zip(names, arrays, strict=True)), **case.attributes))

        torch._dynamo.reset()
        compiled = function if mode == "eager" else torch.compile(function, fullgraph=True, backend=mode)
        y = compiled(*tensors.values())
        if wanted is None:
            g = random.standard_normal(tuple(y.shape), np.float32)
            wanted = gradient_in_numpy(case, g)
        y.backward(torch.from_numpy(g))
        for name, tensor, expected in zip(tensors, tensors.values(), wanted, strict=False):
            assert_same_bits(tensor.grad.numpy(), expected, what=f"gradient of {op} for {name} in torch, {mode}")

    assert wanted is not None
    for wrap in (lambda f: f, jax.jit):
        _, vjp = jax.vjp(wrap(function), *(jnp.asarray(value) for value in case.operands.values()))
        for name, got, expected in zip(case.operands, vjp(jnp.asarray(g)), wanted, strict=False):
            assert_same_bits(np.asarray(got), expected, what=f"gradient of {op} for {name} in jax")
    gradient = jax.jit(jax.grad(lambda *arrays: (function(*arrays) * g).sum()))(
        *map(jnp.asarray, case.operands.values())
    )
    assert_same_bits(np.asarray(gradient), wanted[0], what=f"jax.grad of {op}")


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_documented_call_by_position(framework: str) -> None:
    """The call as TensorFlow r1.4 documents it, and the same through both namespaces."""
    case = example("FakeQuantWithMinMaxVarsPerChannelGradient")
    arrays = [TO[framework](case.operands[name]) for name in ("gradients", "inputs", "min", "max")]
    g, x, low, high = arrays
    results = [
        eq.fake_quant_with_min_max_vars_per_channel_gradient(*arrays, 8, False, None),
        eq.quantization.fake_quant_with_min_max_vars_per_channel_gradient(*arrays, 8, False, None),
        eq.raw_ops.FakeQuantWithMinMaxVarsPerChannelGradient(gradients=g, inputs=x, min=low, max=high),
    ]
    expected = eq.fake_quant_with_min_max_vars_per_channel_gradient(
        *(case.operands[n] for n in ("gradients", "inputs", "min", "max"))
    )
    for result in results:
        assert result._fields == ("backprops_wrt_input", "backprop_wrt_min", "backprop_wrt_max")
        for got, wanted in zip(arrays_of(result), expected, strict=True):
            assert_same_bits(got, wanted, what=f"in {framework}")


def test_numbers_and_lists_are_operands() -> None:
    x = np.linspace(-2, 2, 9, dtype=np.float32)
    expected = eq.fake_quant_with_min_max_vars(x, np.float32(-1), np.float32(1))
    for framework, to in TO.items():
        assert_same_bits(arrays_of(eq.fake_quant_with_min_max_vars(to(x), -1, 1.0))[0], expected, what=framework)
        columns = eq.fake_quant_with_min_max_vars_per_channel(to(x.reshape(3, 3)), [-1, -1, -1], [1, 2, 3])
        assert columns.shape == (3, 3)
    assert eq.fake_quant_with_min_max_args([0.1, 7.0]).dtype == np.float32


def test_inputs_of_any_layout() -> None:
    base = np.random.Generator(np.random.PCG64(4)).standard_normal((6, 10), np.float32)
    low, high = np.full(5, -1, np.float32), np.full(5, 1, np.float32)
    shifted = np.frombuffer(b"\0" + base[:, :5].tobytes(), np.uint8)[1:].view(np.float32).reshape(6, 5)
    read_only = base[:, :5].copy()
    read_only.flags.writeable = False
    layouts = {
        "strided": base[:, ::2],
        "reversed": base[::-1, 4::-1],
        "Fortran": np.asfortranarray(base[:, :5]),
        "broadcast": np.broadcast_to(base[0, :5], (6, 5)),
        "big-endian": base[:, :5].astype(">f4"),
        "misaligned": shifted,
        "read-only": read_only,
    }
    for name, x in layouts.items():
        plain = np.ascontiguousarray(x).astype(np.float32)
        expected = eq.fake_quant_with_min_max_vars_per_channel(plain, low, high)
        assert_same_bits(eq.fake_quant_with_min_max_vars_per_channel(x, low, high), expected, what=name)
    t = torch.from_numpy(base)
    for x in (t[:, ::2], t.t()[:5].t(), t[0, :5].expand(6, 5)):
        expected = eq.fake_quant_with_min_max_vars_per_channel(x.numpy().copy(), low, high)
        got = eq.fake_quant_with_min_max_vars_per_channel(x, torch.from_numpy(low), torch.from_numpy(high))
        assert_same_bits(got.numpy(), expected, what="a PyTorch view")


def test_an_operator_declared_elsewhere_works_in_all_frameworks() -> None:
    """Declaring is all that a frontend needs: here an operator on a kernel that exists."""

    @operator("ToyRoundToSteps", ("outputs",))
    def toy_round_to_steps(inputs: Tensor, steps: int = 15) -> Lowering:
        """Round to `steps` steps between 0 and 1."""
        check_dtypes(inputs=inputs)
        if steps not in (3, 15, 255):
            raise ValueError(f"steps must be 3, 15 or 255, got {steps}")
        numbers = {"min": 0.0, "max": 1.0, "num_bits": steps.bit_length(), "narrow_range": 0}
        return Lowering((inputs,), "fake_quant_with_min_max_args", numbers)

    @toy_round_to_steps.gradient
    def _(gradients: Any, operands: Any, results: Any, attributes: Any) -> Any:
        return (gradients[0] * 2,)

    try:
        x = np.linspace(-0.5, 1.5, 23, dtype=np.float32)
        expected = eq.fake_quant_with_min_max_args(x, 0, 1, 4)
        for framework, to in TO.items():
            assert_same_bits(arrays_of(toy_round_to_steps(to(x), 15))[0], expected, what=framework)
            assert_same_bits(arrays_of(eq.raw_ops.ToyRoundToSteps(inputs=to(x)))[0], expected, what=framework)
        t = torch.from_numpy(x).requires_grad_()
        torch.compile(toy_round_to_steps, fullgraph=True, backend="aot_eager")(t).sum().backward()
        assert (t.grad == 2).all()
        assert (jax.jit(jax.grad(lambda a: toy_round_to_steps(a).sum()))(jnp.asarray(x)) == 2).all()
        with pytest.raises(ValueError, match="steps must be 3, 15 or 255, got 4"):
            toy_round_to_steps(x, steps=4)
    finally:
        del OPERATORS["toy_round_to_steps"]
        vars(eq.raw_ops).pop("ToyRoundToSteps", None)


@pytest.mark.slow
def test_a_training_form_runs_where_gradients_are_wanted() -> None:
    """An operator whose training form leaves residuals: here one gradient kernel in the place of another."""

    @operator("ToyMasked", ("masked",))
    def toy_masked(values: Tensor, inputs: Tensor, min: Tensor, max: Tensor, narrow_range: bool = False) -> Lowering:
        """`values` where `inputs` lie between -1 and 1."""
        check_dtypes(values=values, inputs=inputs)
        numbers = {"min": -1.0, "max": 1.0, "num_bits": 8, "narrow_range": int(narrow_range)}
        return Lowering((values,), "fake_quant_with_min_max_args_gradient", numbers)

    @operator(None, ("masked", "below", "above", "bits"))
    def toy_masked_training(
        values: Tensor, inputs: Tensor, min: Tensor, max: Tensor, narrow_range: bool = False
    ) -> Lowering:
        """`toy_masked`, and the sums of what lies outside."""
        check_dtypes(values=values, inputs=inputs)
        results = (values, min, max, TensorSpec((5,), "uint8"))
        return Lowering(
            results, "fake_quant_with_min_max_vars_gradient", {"num_bits": 8, "narrow_range": int(narrow_range)}
        )

    @operator(None, ("scaled",))
    def toy_scaled(values: Tensor, bits: Tensor, scale: Tensor) -> Lowering:
        """`values` themselves."""
        assert bits == TensorSpec((5,), "uint8"), bits
        return Lowering(
            (values,), "fake_quant_with_min_max_args", {"min": 0.0, "max": 255.0, "num_bits": 8, "narrow_range": 0}
        )

    seen = []

    @toy_masked.gradient(keeps=("min",), training_form=toy_masked_training)
    def _(gradients: Any, operands: Any, results: Any, attributes: Any) -> Any:
        seen.append([None if operand is None else tuple(operand.shape) for operand in operands])
        (gradient,), (below, above, bits) = gradients, results
        return toy_scaled(gradient, bits, below) * (below + 10 * above), None, gradient.sum() * operands[2], None

    @toy_scaled.gradient(keeps=("bits",))
    def _(gradients: Any, operands: Any, results: Any, attributes: Any) -> Any:
        return gradients[0], None, None

    def arrays(to: Any) -> list[Any]:
        values, inputs = np.float32([1, 2, 3, 4]), np.float32([-2, 0, 0.5, 7])
        return [to(a) for a in (values, inputs, np.float32(-1), np.float32(1))]

    def twice(gradient: Any) -> Any:  # of the gradient for `values`, weighted with it
        return (gradient * gradient).sum()

    try:
        for to in TO.values():
            assert arrays_of(toy_masked(*arrays(to)))[0].tolist() == [0, 2, 3, 0]
        assert isinstance(toy_masked_training(*arrays(np.array)), tuple)
        assert not seen
        for mode in ("eager", "aot_eager", "inductor"):
            torch._dynamo.reset()
            function = toy_masked if mode == "eager" else torch.compile(toy_masked, fullgraph=True, backend=mode)
            leaves = [a.requires_grad_() for a in arrays(TO["torch"])]
            packed: list[Any] = []

            def pack(tensor: Any, packed: list[Any] = packed) -> Any:
                packed.append(tuple(tensor.shape))
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = function(*leaves)
            if mode == "eager":
                assert sorted(packed) == [(), (), (), (5,)]  # min and the residuals, nothing of the tensors' size
            weights = torch.tensor([1.0, 2, 3, 4])
            gradients = torch.autograd.grad(result, leaves, weights, allow_unused=True, create_graph=mode == "eager")
            assert gradients[0].tolist() == [41, 82, 123, 164] and gradients[2] == -10
            assert gradients[1] is None or not gradients[1].any()
            assert seen == [[None, None, (), None]] or mode == "inductor"  # which may know the graph from another run
            seen.clear()
        torch._dynamo.reset()
        leaf, weights = leaves[0], torch.ones(4, requires_grad=True)
        (gradient,) = torch.autograd.grad(toy_masked(*leaves), leaf, weights, create_graph=True)
        assert torch.autograd.grad(twice(gradient), weights)[0].tolist() == [2 * 41**2] * 4
        seen.clear()

        values, *others = arrays(TO["jax"])
        for function in (toy_masked, jax.jit(toy_masked)):
            result, vjp = jax.vjp(function, values, *others)
            assert result.tolist() == [0, 2, 3, 0]
            cotangents = vjp(jnp.float32([1, 2, 3, 4]))
            assert cotangents[0].tolist() == [41, 82, 123, 164] and cotangents[2] == -10 and not cotangents[1].any()
            assert seen.pop() == [None, None, (), None]
            second = jax.grad(lambda w, f=function: twice(jax.vjp(f, values, *others)[1](w)[0]))
            assert second(jnp.ones(4)).tolist() == [2 * 41**2] * 4
            through_the_form = jax.grad(lambda v, f=function: twice(jax.grad(lambda u: f(u, *others).sum())(v)))
            assert through_the_form(values).tolist() == [0, 0, 0, 0]  # residuals count as constants
        with pytest.raises(ValueError, match="toy_scaled does not take and return what toy_masked does"):
            toy_masked.gradient(lambda *_: (), training_form=toy_scaled)
    finally:
        for op in (toy_masked, toy_masked_training, toy_scaled):
            del OPERATORS[op.name]
        vars(eq.raw_ops).pop("ToyMasked", None)


def test_grad_pass_through() -> None:
    @eq.grad_pass_through
    def sign(x: Any) -> Any:
        return abs(x) * 0 + 3

    x = np.linspace(-1, 1, 5, dtype=np.float32)
    for framework, to in TO.items():
        assert (arrays_of(sign(to(x)))[0] == 3).all(), framework
    t = torch.from_numpy(x).requires_grad_()
    (sign(t) * torch.arange(5)).sum().backward()
    assert t.grad.tolist() == [0, 1, 2, 3, 4]
    gradient = jax.jit(jax.grad(lambda a: (sign(a) * jnp.arange(5)).sum()))(jnp.asarray(x))
    assert gradient.tolist() == [0, 1, 2, 3, 4]
    swap = eq.grad_pass_through(lambda a, b: (b * 0, a * 0))
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first, second = swap(a, b)
    (first * 2 + second * 5).sum().backward()
    assert a.grad.tolist() == [2, 2] and b.grad.tolist() == [5, 5]
    with pytest.raises(ValueError, match="it takes 2 and returned 1"):
        eq.grad_pass_through(lambda a, b: a)(a, b)


def test_range_taken_from_data_passes_all_of_the_gradient() -> None:
    x = torch.linspace(-3, 5, 11, requires_grad=True)
    eq.quantization.quantize_and_dequantize_v2(x, 0.0, 0.0, range_given=False).sum().backward()
    assert (x.grad == 1).all()
    x.grad = None
    eq.quantization.quantize_and_dequantize_v2(x, -1.0, 1.0, range_given=True).sum().backward()
    assert x.grad.tolist() == [float(-1 <= v <= 1) for v in x.tolist()]
    x.grad = None
    eq.quantization.quantize_and_dequantize(x, -1.0, 1.0, range_given=True).sum().backward()
    assert (x.grad == 1).all()


def test_importing_needs_numpy_only() -> None:
    heavy = {"torch", "jax", "tensorflow", "triton", "typer", "matplotlib"}
    code = f"import exactqat, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
