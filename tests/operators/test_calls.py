# SPDX-License-Identifier: Apache-2.0
"""Calls that look like an earlier one skip Python's checks and PyTorch's dispatcher: same results, same errors, and
only where nothing else wants to see the call."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from cases import cases
from conftest import BY_RAW_NAME, expected_of

import exactqat as eq
from exactqat.operators import OPERATORS, cpu

torch = pytest.importorskip("torch")

TO = {"numpy": np.array, "torch": lambda a: torch.from_numpy(np.array(a))}
X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3)
LOW, HIGH = np.full(3, -1, np.float32), np.full(3, 1, np.float32)
per_channel = eq.fake_quant_with_min_max_vars_per_channel


def shortcut_of(op: Any, framework: str) -> Any:
    return op.shortcuts[np.ndarray if framework == "numpy" else torch.Tensor]


@pytest.mark.parametrize("framework", TO)
@pytest.mark.parametrize("op", sorted(BY_RAW_NAME))
def test_the_second_call_gives_the_same(op: str, framework: str) -> None:
    taken = 0
    for case in cases(op)[::2]:
        expected = expected_of(case)
        operands = {name: TO[framework](value) for name, value in case.operands.items()}
        for _ in range(2):
            if isinstance(expected, Exception):
                with pytest.raises(type(expected)):
                    getattr(eq.raw_ops, op)(**operands, **case.attributes)
                continue
            results = getattr(eq.raw_ops, op)(**operands, **case.attributes)
            names = BY_RAW_NAME[op].results
            for name, got, wanted in zip(
                names, results if isinstance(results, tuple) else (results,), expected, strict=True
            ):
                assert_same_bits(np.asarray(got), wanted, what=f"{case.name} {name}", operands=case.operands)
            assert len(names) == 1 or type(results) is BY_RAW_NAME[op].result_type
            plain = {key: value for key, value in case.attributes.items() if not isinstance(value, np.ndarray)}
            taken += shortcut_of(BY_RAW_NAME[op], framework)((), {**operands, **plain}) is not None
    assert taken


@pytest.mark.parametrize("framework", TO)
def test_arrays_for_results_take_the_shortcut_where_they_fit(framework: str) -> None:
    to = TO[framework]
    operands = to(X), to(LOW), to(HIGH)
    expected = np.array(per_channel(*operands))
    known = shortcut_of(per_channel, framework)
    out = to(np.full_like(X, np.nan))
    assert known(operands, {}, (out,)) is out
    assert_same_bits(np.asarray(out), expected, what="out")
    for unfit in (to(X[:3]), to(X.astype(np.float64)), to(np.zeros((3, 4), np.float32)).T, operands[1]):
        assert known(operands, {}, (unfit,)) is None
    assert known(operands, {}, (out, out)) is None
    long = to(np.zeros(15, np.float32))
    assert known((long[:12].reshape(4, 3), *operands[1:]), {}, (long[3:].reshape(4, 3),)) is None  # part of its place
    assert known(operands, {}, (operands[0],)) is operands[0]
    assert_same_bits(np.asarray(operands[0]), expected, what="in place")
    if framework == "numpy":
        out.flags.writeable = False
        assert known(operands, {}, (out,)) is None
        return
    version = out._version
    per_channel(*operands, out=out)
    assert out._version == version + 1
    with torch.inference_mode():
        made_there = torch.zeros(4, 3)
    assert known(operands, {}, (made_there,)) is None
    assert known(operands, {}, (torch.zeros(4, 3, requires_grad=True),)) is None
    assert known((torch.zeros(4, 3, requires_grad=True), *operands[1:]), {}, (out,)) is None


@pytest.mark.parametrize("framework", TO)
def test_what_differs_from_an_earlier_call_counts(framework: str) -> None:
    to = TO[framework]
    x = to(X)
    args, vars_ = eq.fake_quant_with_min_max_args, eq.fake_quant_with_min_max_vars
    for _ in range(2):
        for low, high in ((-6.0, 6.0), (-1, 1), (-0.5, 3.25), (-6, 6)):
            by_attribute, by_number = args(x, low, high, 4), vars_(x, low, max=high, num_bits=4)
            by_array = vars_(x, to(np.float32(low)), to(np.float32(high)), 4)
            assert_same_bits(np.asarray(by_number), np.asarray(by_array), what=f"range {low}, {high}")
            assert_same_bits(np.asarray(by_attribute), args(X, min=low, max=high, num_bits=4), what=f"{low}, {high}")
        assert vars_(to(X.astype(np.float64)), -1.1, 1).dtype == to(np.zeros(1)).dtype
        assert args(x, num_bits=2).tolist() != args(x, num_bits=3).tolist()
        assert args(x, None, None, None, name="ignored").tolist() == args(x).tolist() == args(inputs=x).tolist()
        wide = to(X.astype(np.float64))
        expected = vars_(wide, to(np.float64(-1.1)), to(np.float64(1)))
        assert_same_bits(np.asarray(vars_(wide, -1.1, 1)), np.asarray(expected), what="float64 numbers")


def test_numbers_of_numpy_are_numbers() -> None:
    vars_ = eq.fake_quant_with_min_max_vars
    for x in (X, X.astype(np.float64)):
        expected = vars_(x, -1.1, 0.7)
        for kind in (np.float32, np.float64, np.float16):
            low, high = kind(-1.1), kind(0.7)
            wanted = expected if kind is np.float64 else vars_(x, float(low), float(high))
            assert_same_bits(vars_(x, low, high), wanted, what=f"ranges of {kind.__name__}")
            assert shortcut_of(vars_, "numpy")((x, low, high), {}) is not None
    for odd in (np.int64(1), np.longdouble(1), np.bool_(True), np.float64("1e300")):
        assert shortcut_of(vars_, "numpy")((X, -1.1, odd), {}) is None
    assert_same_bits(vars_(X, X.min(), X.max()), vars_(X, np.array(X.min()), np.array(X.max())), what="its own range")


@pytest.mark.parametrize("framework", TO)
def test_errors_stay_what_they_are(framework: str) -> None:
    to = TO[framework]
    x, low, high = to(X), to(LOW), to(HIGH)
    for _ in range(3):
        per_channel(x, low, high)
        for call, error, text in (
            (lambda: per_channel(x, low, high, True), TypeError, "num_bits must be a static integer, got bool True"),
            (lambda: per_channel(x, low, high, 1), ValueError, "num_bits must be between 2 and 16"),
            (lambda: per_channel(x, low, high, 2**70), ValueError, "num_bits must fit 64 bits"),
            (lambda: per_channel(x, low, high, narrow_range=1), TypeError, "narrow_range must be a bool"),
            (lambda: per_channel(x, low, high, bits=8), TypeError, "has no argument 'bits'"),
            (lambda: per_channel(x, low, high, inputs=x), TypeError, "got argument 'inputs' twice"),
            (lambda: per_channel(x, low), TypeError, "is missing the required argument 'max'"),
            (
                lambda: per_channel(x, low, None),
                TypeError,
                "max must be a NumPy, PyTorch, JAX or TensorFlow array or a number, got None",
            ),
            (lambda: per_channel(x, low, high, 8, False, None, 3), TypeError, "takes at most 6 arguments, got 7"),
            (
                lambda: per_channel(x, low, "high"),
                TypeError,
                "max must be a NumPy, PyTorch, JAX or TensorFlow array or a number",
            ),
            (lambda: per_channel(x, low, 1.0), ValueError, "max must be rank 1"),
            (lambda: per_channel(x, low[:2], high), ValueError, "min has incorrect size, expected 3"),
            (lambda: per_channel(to(X.astype(np.int32)), low, high), TypeError, "inputs must be float16"),
            (
                lambda: eq.fake_quant_with_min_max_args_gradient(x, to(X.astype(np.float64))),
                TypeError,
                "must be float32",
            ),
        ):
            with pytest.raises(error, match=text):
                call()
    other = torch.from_numpy(HIGH) if framework == "numpy" else HIGH
    for _ in range(3):  # NumPy's arrays become tensors beside tensors
        got = per_channel(x, low, other)
        assert isinstance(got, torch.Tensor) and got.numpy().tobytes() == per_channel(X, LOW, HIGH).tobytes()


def test_only_dense_native_arrays_are_taken() -> None:
    per_channel(X, LOW, HIGH)
    known = shortcut_of(per_channel, "numpy")
    big = np.linspace(-2, 2, 48, dtype=np.float32).reshape(8, 6)
    shifted = np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 3)

    class Own(np.ndarray):
        pass

    for x in (X.T.copy().T, big[::2, ::2], X[::-1], X.astype(">f4"), shifted, X.view(Own), [1.0]):
        assert known((x, LOW, HIGH), {}) is None
    read_only = X.copy()
    read_only.flags.writeable = False
    for x in (X, read_only, X[:0], np.ones((2, 5, 3), np.float32)):
        for _ in range(2):
            result = known((x, LOW, HIGH), {})
            assert result.shape == x.shape and result.flags.writeable
            assert_same_bits(result, per_channel(x, LOW, HIGH, out=np.empty(x.shape, np.float32)), what="a plain array")
    tensors = [torch.from_numpy(a) for a in (X, LOW, HIGH)]
    per_channel(*tensors)
    known = shortcut_of(per_channel, "torch")
    x, *others = tensors
    for odd in (x.t().contiguous().t(), x[::2], torch._neg_view(x), x.to_sparse(), x.to("meta"), x.to(torch.int8)):
        assert known((odd, *others), {}) is None
    negated = per_channel(torch._neg_view(x), *others)
    assert_same_bits(negated.numpy(), per_channel(-X, LOW, HIGH), what="a tensor with the negative bit")


def test_pytorch_sees_the_calls_it_wants_to_see() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    tensors = [torch.from_numpy(a) for a in (X, LOW, HIGH)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    for _ in range(2):
        expected = per_channel(*tensors)
        per_channel(*leaves).sum().backward()
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class WatchFunctions(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for mode in (Watch, WatchFunctions):
        for arguments in (tensors, leaves):
            seen.clear()
            with mode():
                per_channel(*arguments)
            assert any("exactqat.fake_quant_with_min_max_vars_per_channel" in name for name in seen), mode
    with FakeTensorMode() as fake:
        result = per_channel(*[fake.from_tensor(t) for t in tensors])
        assert type(result).__name__ == "FakeTensor" and result.shape == (4, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        per_channel(*leaves).sum().backward()
    labels = {event.key for event in profile.key_averages()}
    assert "exactqat::fake_quant_with_min_max_vars_per_channel" in labels
    assert "exactqat::fake_quant_with_min_max_vars_per_channel_gradient_from_mask" in labels
    mapped = torch.vmap(per_channel, (0, None, None))(torch.stack([tensors[0]] * 2), *tensors[1:])
    assert (mapped == expected).all()
    assert any("exactqat" in str(node) for node in torch.jit.trace(per_channel, tensors).graph.nodes())

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs)

    seen.clear()
    assert type(per_channel(tensors[0].as_subclass(Own), *tensors[1:])) is Own and seen
    with torch.device("meta"):
        assert_same_bits(per_channel(*tensors).numpy(), expected.numpy(), what="with a default device")


def test_pytorch_gradient_modes() -> None:
    tensors = [torch.from_numpy(a) for a in (X, LOW, HIGH)]
    leaves = [torch.nn.Parameter(t.clone()) for t in tensors]
    for _ in range(3):
        expected = per_channel(*tensors)
        assert not expected.requires_grad
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                for arguments in (tensors, leaves):
                    result = per_channel(*arguments)
                    assert not result.requires_grad and result.is_inference() == (guard is torch.inference_mode)
                    assert_same_bits(result.numpy(), expected.numpy(), what=guard.__name__)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = per_channel(*leaves)
            assert result.dtype == torch.float32 and result.requires_grad
        only_range = per_channel(tensors[0], leaves[1], tensors[2])
        (wanted,) = torch.autograd.grad(per_channel(*leaves), leaves[1], torch.ones(4, 3))
        (gradient,) = torch.autograd.grad(only_range, leaves[1], torch.ones(4, 3))
        assert_same_bits(gradient.numpy(), wanted.numpy(), what="the gradient of one operand")
        by_number = eq.fake_quant_with_min_max_vars(leaves[0], -1, 1.0)
        assert by_number.grad_fn is not None
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            with torch.inference_mode():
                made_there = tensors[1].clone()
            per_channel(leaves[0], made_there, leaves[2])
    result = per_channel(*leaves)
    with torch.no_grad():
        leaves[1] -= 1  # the input, which is not kept, may change
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_torch_compile_after_eager_calls() -> None:
    tensors = [torch.from_numpy(a) for a in (X, LOW, HIGH)]
    leaves = [torch.nn.Parameter(t.clone()) for t in tensors]
    torch._dynamo.reset()
    compiled = torch.compile(per_channel, fullgraph=True, backend="aot_eager")
    for arguments in (tensors, leaves, [t[:2] for t in tensors[:1]] + tensors[1:]):
        for _ in range(2):
            expected = per_channel(*arguments)
            assert_same_bits(compiled(*arguments).detach().numpy(), expected.detach().numpy(), what="compiled")
    (wanted,) = torch.autograd.grad(per_channel(*leaves).sum(), leaves[0])
    (gradient,) = torch.autograd.grad(compiled(*leaves).sum(), leaves[0])
    assert_same_bits(gradient.numpy(), wanted.numpy(), what="the gradient, compiled")


def test_many_kinds_of_calls_are_forgotten_in_time() -> None:
    for i in range(5000):
        eq.fake_quant_with_min_max_args(X, -1.0 - i, 1.0)
    assert eq.fake_quant_with_min_max_args(X, -1.0, 1.0).max() <= 1.1
    cpu.forget_plans()
    assert not any(op.shortcuts for op in OPERATORS.values())
    tensor = torch.from_numpy(X).requires_grad_()
    for _ in range(2):
        eq.fake_quant_with_min_max_args(tensor).sum().backward()
        assert_same_bits(
            eq.fake_quant_with_min_max_args(X), eq.fake_quant_with_min_max_args(tensor).detach().numpy(), what="again"
        )


@pytest.mark.parametrize("framework", TO)
def test_threads_share_what_is_known(framework: str) -> None:
    x = TO[framework](np.ones((300, 3), np.float32))
    low, high = TO[framework](LOW), TO[framework](HIGH)
    wanted = [np.asarray(eq.fake_quant_with_min_max_args(x * i, 0, 300.0)).tobytes() for i in range(4)]
    failed = []

    def work(i: int) -> None:
        for turn in range(300):
            per_channel(x[: 1 + turn % 50], low, high)
            if np.asarray(eq.fake_quant_with_min_max_args(x * i, 0, 300.0)).tobytes() != wanted[i]:
                failed.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
