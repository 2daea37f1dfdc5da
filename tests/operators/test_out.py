# SPDX-License-Identifier: Apache-2.0
"""Results written into arrays that the caller has: the same bits, in place where that is safe, refused where it is
not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from cases import Case, cases
from conftest import BY_RAW_NAME, expected_of, in_halves

import exactqat as eq

torch = pytest.importorskip("torch")

TO = {"numpy": np.array, "torch": lambda a: torch.from_numpy(np.array(a))}


def outs(case: Case, framework: str) -> tuple[Any, ...]:
    return tuple(TO[framework](np.full(e.shape, np.nan, e.dtype)) for e in expected_of(case))  # type: ignore[union-attr]


def call(case: Case, operands: dict[str, Any], out: Any) -> Any:
    return getattr(eq.raw_ops, case.op)(**operands, **case.attributes, out=out)


@pytest.mark.parametrize("framework", TO)
@pytest.mark.parametrize("op", sorted(BY_RAW_NAME))
def test_results_are_written_into_out(op: str, framework: str) -> None:
    for case in cases(op)[::3]:
        if isinstance(expected_of(case), Exception):
            continue
        out = outs(case, framework)
        results = call(case, {name: TO[framework](a) for name, a in case.operands.items()}, out)
        for name, array, wanted in zip(BY_RAW_NAME[op].results, out, expected_of(case), strict=True):
            assert_same_bits(np.asarray(array), wanted, what=f"{case.name} {name}")
        returned = results if isinstance(results, tuple) else (results,)
        assert all(a is b for a, b in zip(returned, out, strict=True))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("framework", TO)
@pytest.mark.parametrize("op", sorted(name for name, op in BY_RAW_NAME.items() if op.reuses))
def test_the_first_result_takes_the_place_of_an_operand(op: str, framework: str, halves: bool) -> None:
    for case in cases(op)[::3]:
        if halves:
            if "float64" in case.tags:
                continue
            case = in_halves(case, np.dtype(np.float16))
        if isinstance(expected_of(case), Exception):
            continue
        for name in BY_RAW_NAME[op].reuses:
            operands = {key: TO[framework](a) for key, a in case.operands.items()}
            out = (operands[name], *outs(case, framework)[1:])
            call(case, operands, out)
            for result, array, wanted in zip(BY_RAW_NAME[op].results, out, expected_of(case), strict=True):
                assert_same_bits(np.asarray(array), wanted, what=f"{case.name} {result} in the place of {name}")


@pytest.mark.parametrize("framework", TO)
def test_what_is_refused(framework: str) -> None:
    to = TO[framework]
    memory = to(np.zeros(30, np.float32))
    x, low, high = memory[:12].reshape(4, 3), to(np.full(3, -1, np.float32)), to(np.full(3, 1, np.float32))
    op = eq.fake_quant_with_min_max_vars_per_channel
    image, filter = to(np.ones((1, 4, 4, 3), np.float32)), to(np.ones((3, 3, 3, 1), np.float32))
    for out, text in (
        (
            to(np.zeros((3, 4), np.float32)),
            r"out for outputs must be float32 of shape \[4, 3\], got float32 of shape \[3, 4\]",
        ),
        (to(np.zeros((4, 3))), "must be float32 of shape .* got float64"),
        (memory[4:16].reshape(4, 3), "shares memory with inputs; the first result may only overwrite inputs"),
        (memory[:24:2].reshape(4, 3) if framework == "torch" else memory[12:24].reshape(3, 4).T, "must be"),
        ((x, x), "out must be 1 arrays, one per result, got 2"),
    ):
        with pytest.raises(ValueError, match=text):
            op(x, low, high, out=out)
    with pytest.raises(
        ValueError, match="out for output shares memory with input; the first result may only overwrite no operand"
    ):
        eq.raw_ops.DepthwiseConv2dNative(input=image, filter=filter, strides=[1, 1, 1, 1], padding="SAME", out=image)
    gradient = eq.fake_quant_with_min_max_vars_per_channel_gradient
    with pytest.raises(ValueError, match="out for backprop_wrt_min shares memory with min"):
        gradient(x, x, low, high, out=(to(np.zeros((4, 3), np.float32)), low, to(np.zeros(3, np.float32))))
    one = to(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="out for backprop_wrt_max shares memory with out for backprop_wrt_min"):
        gradient(x, x, low, high, out=(to(np.zeros((4, 3), np.float32)), one, one))
    with pytest.raises(TypeError, match="out must be"):
        op(x, low, high, out=[1, 2, 3])


def test_what_only_one_framework_refuses() -> None:
    x = np.zeros((2, 3), np.float32)
    read_only = x.copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="dense and writable"):
        eq.fake_quant_with_min_max_args(x, out=read_only)
    with pytest.raises(ValueError, match="dense and writable"):
        eq.fake_quant_with_min_max_args(x.T, out=np.zeros((2, 3), np.float32).T)
    t = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match="out cannot be used with tensors that require grad"):
        eq.fake_quant_with_min_max_args(t, out=torch.zeros(3))
    with torch.no_grad():
        assert (eq.fake_quant_with_min_max_args(t, out=torch.ones(3)) == 0).all()
    jnp = pytest.importorskip("jax").numpy
    with pytest.raises(TypeError, match="out cannot be used with JAX arrays"):
        eq.fake_quant_with_min_max_args(jnp.zeros(3), out=jnp.zeros(3))


def test_a_trace_refuses_what_its_calls_would() -> None:
    x, out = torch.linspace(-2, 2, 6), torch.zeros(12)[::2]
    with pytest.raises(ValueError, match="dense and writable"):
        eq.fake_quant_with_min_max_args(x, out=out)
    with pytest.raises(ValueError, match="dense and writable"):
        torch.jit.trace(lambda x: eq.fake_quant_with_min_max_args(x, out=out), (x,), check_trace=False)
    assert not out.any()


def test_pytorch_notices_the_change() -> None:
    """A tensor saved for a backward pass and then overwritten must not be used silently."""
    a = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    y = a * saved
    eq.fake_quant_with_min_max_args(torch.zeros(3), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
