# SPDX-License-Identifier: Apache-2.0
"""Tensors that are more than numbers in memory, and PyTorch's ways to look at a call: the answer of a plain call, or a
refusal. The random ones are those of fuzz_tensors.py, which also is the long campaign."""

from __future__ import annotations

import copy
import operator
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from cases import cases
from conftest import BY_RAW_NAME

import exactqat as eq
from exactqat.operators import OPERATORS

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")
pytest.importorskip("ml_dtypes")

import fuzz  # noqa: E402
import fuzz_tensors  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import hessian, jacfwd, jacrev, jvp, vjp  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

generator = torch.Generator().manual_seed(0)
rand, randn = partial(torch.rand, generator=generator), partial(torch.randn, generator=generator)
X = randn(4, 3)
args = eq.fake_quant_with_min_max_args

# What a person differentiates: functions of tensors, and tensors for them.
DIFFERENTIABLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "args": (lambda x: args(x, -1.0, 1.0, 4), (X,)),
    "vars": (lambda x, low, high: eq.fake_quant_with_min_max_vars(x, low, high, 4), (X, -rand(()), rand(()))),
    "per channel": (
        lambda x, low, high: eq.fake_quant_with_min_max_vars_per_channel(x, low, high, 4),
        (X, -rand(3), rand(3)),
    ),
    "quantize": (lambda x: eq.quantization.quantize_and_dequantize(x, 0.0, 0.0), (X,)),
    "quantize, masked": (
        lambda x: eq.quantization.quantize_and_dequantize_v2(x, -1.0, 1.0, range_given=True, num_bits=4),
        (X,),
    ),
    "batch norm": (
        lambda x, scale, offset: eq.nn.fused_batch_norm(x, scale, offset)[0],
        (randn(1, 2, 3, 2), rand(2) + 0.5, randn(2)),
    ),
    "batch norm, inference": (
        lambda x, *vectors: eq.nn.fused_batch_norm(x, *vectors, is_training=False)[0],
        (randn(1, 2, 2, 2), rand(2) + 0.5, randn(2), randn(2), rand(2) + 0.5),
    ),
    "depthwise": (
        lambda x, w: eq.nn.depthwise_conv2d(x, w, (1, 1, 1, 1), "SAME"),
        (randn(1, 3, 3, 2), randn(2, 2, 2, 1)),
    ),
}

LOSSES: dict[str, Callable[[Any], Any]] = {
    "abs": lambda y: y.abs().sum(),
    "l1_loss": lambda y: torch.nn.functional.l1_loss(y, torch.zeros_like(y)),
    "1-norm": lambda y: y.norm(1),
    "sgn": lambda y: (torch.sgn(y) + y).sum(),
}


def penalty(function: Callable[..., Any], tensors: tuple[Any, ...], loss: Callable[[Any], Any]) -> list[Any]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    gradients = torch.autograd.grad(loss(function(*leaves)), leaves, create_graph=True, allow_unused=True)
    squares = sum((g**2).sum() for g in gradients if g is not None)
    return list(torch.autograd.grad(squares, leaves, allow_unused=True)) if squares.requires_grad else []


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_penalty(name: str, loss: str) -> None:
    """The second derivative of |y| arrives as a tensor of zeros without memory."""
    function, tensors = DIFFERENTIABLE[name]
    for _ in range(3):  # from the second time on the calls are known
        gradients = penalty(function, tensors, LOSSES[loss])
        # The same with ordinary zeros: those that a product with 0 leaves.
        wanted = penalty(lambda *t: function(*t) * 1.0, tensors, lambda y: LOSSES[loss](y) + 0.0 * (y * y).sum())
        assert len(gradients) <= len(wanted)
        for a, b in zip(gradients, wanted, strict=False):
            assert a is None or torch.allclose(a, b if b is not None else torch.zeros_like(a), atol=1e-5)


def test_gradient_penalty_of_a_prepared_network() -> None:
    from torch import nn

    from exactqat import qat

    torch.manual_seed(0)
    convolutions = (nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, groups=8, bias=False))
    layers = [layer for conv in convolutions for layer in (conv, nn.BatchNorm2d(8), nn.ReLU())]
    x = torch.randn(2, 3, 8, 8)
    model = qat.prepare(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), x).train()
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(leaf).abs().sum(), leaf, create_graph=True)
        (gradient**2).sum().backward()
        assert leaf.grad is not None and leaf.grad.isfinite().all() and leaf.grad.abs().max() > 0


def test_zeros_without_memory() -> None:
    zeros = torch._efficientzerotensor((4, 3))
    for _ in range(2):
        assert torch.equal(args(zeros), torch.zeros(4, 3))
    with pytest.raises(ValueError, match="out for outputs must be writable"):
        args(X, out=zeros)


def test_storage_that_was_given_back() -> None:
    for offset, left in ((0, 0), (3, 0), (300000, 0), (0, 8)):
        memory = torch.zeros(12 + offset)
        x = memory[offset:].view(4, 3)
        args(torch.zeros(4, 3))
        memory.untyped_storage().resize_(left)
        for call in (args, lambda x: args(x, out=torch.zeros(4, 3)), lambda x: args(X, out=x)):
            with pytest.raises(ValueError, match=r"of shape \[4, 3\] must have memory, but its storage holds"):
                call(x)


def test_results_into_tensors_without_memory() -> None:
    expected = args(X)
    for _ in range(2):
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(X)
            out = torch.empty(4, 3)
            assert args(fake, out=out) is out and type(out).__name__ == "FakeTensor"
        wrapper = fuzz_tensors.Wrapper(torch.zeros(4, 3))
        assert args(X, out=wrapper) is wrapper
        assert_same_bits(wrapper.inner.numpy(), expected.numpy(), what="a wrapper's tensor")
        out = torch.zeros(4, 3)
        torch.func.functionalize(lambda x, out: args(x, out=out))(X, out)
        assert_same_bits(out.numpy(), expected.numpy(), what="functionalize")
        with pytest.raises(ValueError, match="must have separate memory for each element"):
            args(X, out=torch._neg_view(torch.zeros(4, 1)).expand(4, 3))
        with forward_ad.dual_level(), pytest.raises(ValueError, match="out cannot be used in forward mode"):
            args(forward_ad.make_dual(X, X), out=torch.zeros(4, 3))
        with pytest.raises(TypeError, match="out must be PyTorch tensors on the CPU"), FakeTensorMode():
            args(torch.empty(4, 3), out=torch.empty(4, 3, device="meta"))


@pytest.mark.parametrize("view", ["negative", "imaginary"])
def test_results_into_a_view_with_another_sign(view: str) -> None:
    expected = args(X)
    for _ in range(2):
        if view == "negative":
            memory = torch.zeros(4, 3)
            out = torch._neg_view(memory)
        else:
            out = torch.zeros(4, 3, dtype=torch.complex64).conj().imag
        args(X, out=out)
        assert_same_bits(out.clone().numpy(), expected.numpy(), what=view)
    with pytest.raises(ValueError, match="must be float32 of shape"):
        args(X[:2], out=out)


def test_results_of_dtensors() -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("PyTorch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, out = (DTensor.from_local(t, mesh, [Replicate()]) for t in (X, torch.zeros(4, 3)))
        for arguments in ((x, out), (X, out)):
            with pytest.raises((NotImplementedError, RuntimeError), match="sharding|DTensor"):
                args(arguments[0], out=arguments[1])
        assert torch.equal(out.to_local(), torch.zeros(4, 3))
    finally:
        distributed.destroy_process_group()


def test_traces_keep_the_writing() -> None:
    def function(x: Any, out: Any) -> Any:
        return args(x, out=out)

    for trace in (torch.jit.trace, lambda function, operands: make_fx(function)(*operands)):
        traced, out = trace(function, (X, torch.zeros(4, 3))), torch.zeros(4, 3)
        traced(2 * X, out)
        assert_same_bits(out.numpy(), args(2 * X).numpy(), what="out of a trace")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_forward_mode(name: str) -> None:
    function, tensors = DIFFERENTIABLE[name]
    directions = tuple(randn(t.shape) for t in tensors)
    y, pull = vjp(function, *tensors)
    pushed_y, pushed = jvp(function, tensors, directions)
    assert torch.equal(pushed_y, y) and torch.equal(function(*tensors), y)
    cotangent = randn(y.shape)
    along = sum((g * d).sum() for g, d in zip(pull(cotangent), directions, strict=True))
    assert torch.allclose((cotangent * pushed).sum(), along, rtol=1e-4, atol=1e-5)
    assert pushed.abs().max() > 0
    with forward_ad.dual_level(), torch.no_grad():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(tensors, directions, strict=True)]
        assert torch.equal(forward_ad.unpack_dual(function(*duals)).tangent, pushed)
    every = tuple(range(len(tensors)))
    for a, b in zip(jacfwd(function, every)(*tensors), jacrev(function, every)(*tensors), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_hessians(name: str) -> None:
    function, tensors = DIFFERENTIABLE[name]
    weights = randn(function(*tensors).shape)

    def scalar(x: Any) -> Any:
        return (function(x, *tensors[1:]).sin() * weights).sum()

    leaf = tensors[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(scalar(leaf), leaf, create_graph=True)
    rows = [torch.autograd.grad(g, leaf, retain_graph=True)[0] for g in gradient.reshape(-1)]
    wanted = torch.stack(rows).reshape(*leaf.shape, *leaf.shape)
    assert wanted.abs().max() > 0
    for derivative in (hessian(scalar), jacrev(jacrev(scalar)), jacrev(jacfwd(scalar)), jacfwd(jacfwd(scalar))):
        assert torch.allclose(derivative(tensors[0]), wanted, rtol=1e-3, atol=1e-4)


def test_forward_mode_is_refused_without_a_derivative() -> None:
    statistics = OPERATORS["batch_norm_statistics"]
    vector = torch.ones(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        with pytest.raises(NotImplementedError, match="batch_norm_statistics has no gradient"):
            statistics(dual, vector, vector, vector, vector)
    results = statistics(X.clone().requires_grad_(), vector, vector, vector, vector)
    with pytest.raises(NotImplementedError, match="batch_norm_statistics has no gradient"):
        results.low.backward()


def test_pass_through_in_forward_mode() -> None:
    rounded = eq.grad_pass_through(torch.round)
    assert torch.equal(jvp(rounded, (X,), (X + 1,))[1], X + 1)
    assert torch.equal(torch.func.grad(lambda x: (rounded(x) * X).sum())(X), X)


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_what_follows_batch_norm_may_write_in_place(version: str) -> None:
    """As after PyTorch's own: an activation over y, and new running statistics over the old."""
    op = OPERATORS[f"fused_batch_norm{version}"]
    x, scale, offset = randn(2, 3, 3, 4), rand(4) + 0.5, randn(4)
    gradients = []
    for in_place in (False, True):
        leaf, mean, variance, shift = x.clone().requires_grad_(), torch.zeros(4), torch.ones(4), offset.clone()
        results = op(leaf, scale, shift, mean, variance, exponential_avg_factor=0.1)
        if in_place:
            y = results.y.relu_()
            for old, new in ((mean, results.batch_mean), (variance, results.batch_variance), (shift, torch.zeros(4))):
                old.copy_(new)
        else:
            y = results.y.relu()
        y.square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_attributes_may_change(dynamic: bool | None) -> None:
    image, filter = randn(1, 5, 5, 3), randn(2, 2, 3, 1)
    ones = torch.ones(3)
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
        "float": (lambda x, m: args(x, -m, m), (X,), (1.5, 2.5, 3.5)),
        "operand": (lambda x, m: eq.fake_quant_with_min_max_vars(x, -m, m), (X,), (1.5, 2.5, 3.5)),
        "range": (
            lambda x, m: eq.raw_ops.QuantizeAndDequantize(input=x, range_given=True, input_min=-m, input_max=m),
            (X,),
            (1.5, 2.5),
        ),
        "int": (lambda x, n: args(x, -1.0, 1.0, n), (X,), (4, 5, 6)),
        "epsilon": (lambda x, e: eq.nn.fused_batch_norm(x, ones, ones, epsilon=e)[0], (image,), (1e-3, 1e-2)),
        "strides": (lambda x, s: eq.nn.depthwise_conv2d(x, filter, (1, s, s, 1), "SAME"), (image,), (1, 2, 3)),
    }
    for name, (function, tensors, values) in functions.items():
        torch._dynamo.reset()
        backend = "aot_eager" if name == "float" else "eager"  # which is quicker
        compiled = torch.compile(function, backend=backend, dynamic=dynamic)
        for value in values:
            wanted = function(*tensors, value)
            assert_same_bits(compiled(*tensors, value).numpy(), wanted.numpy(), what=f"{name} {value}")
    torch._dynamo.reset()
    compiled = torch.compile(functions["float"][0], backend="eager", dynamic=dynamic)
    for good in (1.0, 2.0):
        compiled(X, good)
        with pytest.raises(ValueError, match="min has to be smaller than max"):
            compiled(X, 0.0)


def test_layouts_that_no_kernel_takes_are_named() -> None:
    square = torch.eye(3)
    for odd, kind in (
        (square.to_sparse(), "torch.sparse_coo"),
        (square.to_sparse_csr(), "torch.sparse_csr"),
        (square.to_mkldnn(), "torch._mkldnn"),
        (torch.quantize_per_tensor(square, 0.5, 0, torch.qint8), "quantized"),
        (torch.nested.nested_tensor([square, square]), "nested"),
        (torch.nested.nested_tensor([square, square], layout=torch.jagged), "nested"),
    ):
        with pytest.raises(TypeError, match=f"inputs must be a dense tensor, got a {kind} one"):
            args(odd)


def test_lists_that_hold_themselves_and_random_keys_are_refused() -> None:
    endless: list[Any] = []
    endless += [endless, endless]
    for odd in (endless, (1.0, endless)):
        with pytest.raises(ValueError, match="inputs must have at most 64 dimensions, got a list nested deeper"):
            args(odd)
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="inputs must contain numbers, got key"):
        args(jax.random.key(0))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_list_that_changes_during_the_first_call(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread may do it: the plan that is remembered is that of the arguments it is found by."""
    to = np.asarray if framework == "numpy" else torch.tensor
    op = OPERATORS["depthwise_conv2d_native"]
    image, filter = to(np.ones((1, 6, 6, 2), np.float32)), to(np.ones((2, 2, 2, 1), np.float32))
    wanted = op(image, filter, (1, 1, 1, 1), "SAME", (), "NHWC", (1, 1, 1, 1))
    strides, bind = [1, 1, 1, 1], op.bind

    def changed(args: Any, kwargs: Any) -> Any:
        strides[1:3] = 2, 2
        return bind(args, kwargs)

    monkeypatch.setattr(op, "bind", changed)
    shape = np.ones((1, 7, 7, 2), np.float32)  # no plan is known for it
    op(to(shape), filter, strides, "SAME")
    monkeypatch.undo()
    assert strides == [1, 2, 2, 1]
    assert op(to(shape), filter, [1, 1, 1, 1], "SAME").shape == (1, 7, 7, 2)
    assert tuple(op(image, filter, [1, 1, 1, 1], "SAME").shape) == tuple(wanted.shape)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("op", sorted(name for name, op in BY_RAW_NAME.items() if len(op.results) > 1))
def test_results_can_be_pickled_and_copied(op: str, framework: str) -> None:
    case = next(case for case in cases(op) if not case.tags)
    to = np.asarray if framework == "numpy" else lambda a: torch.tensor(np.array(a))
    for _ in range(2):
        results = getattr(eq.raw_ops, op)(**{k: to(v) for k, v in case.operands.items()}, **case.attributes)
        for again in (pickle.loads(pickle.dumps(results)), copy.copy(results), copy.deepcopy(results)):
            assert type(again) is type(results) and again._fields == results._fields
            for name, result, wanted in zip(results._fields, again, results, strict=True):
                assert_same_bits(np.asarray(result), np.asarray(wanted), what=name)
        assert copy.deepcopy(results)[0] is not results[0]
        assert all(map(operator.is_, copy.copy(results), results))


@pytest.mark.slow
def test_random_calls() -> None:
    """In a process of its own, which a bad call may end."""
    totals = fuzz.Totals()
    fuzz.run_batch(0, 0, 400, totals, lambda count: None, fuzz_tensors)
    assert not totals.crashes, totals.crashes[0]
    assert not totals.differences, totals.differences[0]
    assert totals.counts["cases"] == 400 and totals.counts["values"] > 5000
    assert 50 < totals.counts["refused"] < 300


def test_everything_is_generated() -> None:
    seen: Counter[Any] = Counter()
    for case in range(1500):
        call = fuzz_tensors.generate(fuzz.Random(0, case))
        seen.update([call.call.op.name, call.context, call.backward])
        seen.update({("operand", kind) for kind in call.kinds.values()})
        seen.update({("out", kind) for kind in call.out})
    wanted: set[Any] = {*fuzz.FUZZED, *fuzz_tensors.CONTEXTS, "zero", "negative", "wrapper"}
    wanted |= {("operand", kind) for kind in fuzz_tensors.KINDS} | {("out", kind) for kind in fuzz_tensors.OUT}
    assert not [item for item in wanted if seen[item] < 2]
