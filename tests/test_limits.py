# SPDX-License-Identifier: Apache-2.0
"""What lies at the limits: numbers too large for their dtype, sizes no array can have, other devices and processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import exactqat as eq
from exactqat import cpu
from exactqat.operators import OPERATORS
from exactqat.operators.op import Lowering, Tensor, operator

X = np.ones((1, 3, 3, 1), np.float32)
W = np.ones((2, 2, 1, 1), np.float32)


def depthwise(**changes: Any) -> Any:
    return eq.raw_ops.DepthwiseConv2dNative(
        **{"input": X, "filter": W, "strides": (1, 1, 1, 1), "padding": "VALID", **changes}
    )


@pytest.mark.parametrize(
    "call, message",
    [
        # A filter so much larger than the image that the count of positions would be negative.
        (lambda: depthwise(filter=np.ones((9, 1, 1, 1), np.float32)), "filter is larger than the padded height"),
        (lambda: depthwise(strides=(1, 2**31, 1, 1)), "strides must be below"),
        (
            lambda: eq.raw_ops.DepthwiseConv2dNativeBackpropInput(
                input_sizes=(1, 2**31, 2**31, 1), filter=W, out_backprop=X, strides=(1, 1, 1, 1), padding="SAME"
            ),
            "input_sizes is too large",
        ),
        (
            lambda: depthwise(padding="EXPLICIT", explicit_paddings=(0, 0) + (2**31 - 1,) * 4 + (0, 0)),
            "give an output that is too large",
        ),
        (lambda: eq.fake_quant_with_min_max_args(X, num_bits=2**64), "num_bits must fit 64 bits"),
        (lambda: eq.fake_quant_with_min_max_args(X, -(10**400), 1), "min must be a float64 number"),
        # Both ends are infinite in float32.
        (lambda: eq.fake_quant_with_min_max_args(X, 1e300, 1e301), "min has to be smaller than max"),
        (
            lambda: eq.raw_ops.QuantizeAndDequantize(input=X, range_given=True, input_min=2.0, input_max=1.0),
            "invalid range",
        ),
        (lambda: cpu.load("sse9"), "EXACTQAT_ISA must be one of .*, got 'sse9'"),
    ],
)
def test_impossible_values_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("strides", [1, "SAME", (1, 1.5, 1, 1), np.ones((4, 1), np.float32)])
def test_sequences_of_integers_are_static_integers(strides: Any) -> None:
    with pytest.raises(TypeError, match="strides must be a static sequence of integers"):
        depthwise(strides=strides)


def test_an_operator_shows_its_signature() -> None:
    shown = repr(OPERATORS["fake_quant_with_min_max_args"])
    assert "fake_quant_with_min_max_args(inputs" in shown and "num_bits: int = 8" in shown


def test_operands_on_another_device_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="max is on device meta, but other operands are on cpu"):
        eq.fake_quant_with_min_max_vars(torch.ones(3), 0.0, torch.ones((), device="meta"))


def test_out_is_refused_where_the_compiler_plans_memory() -> None:
    torch = pytest.importorskip("torch")

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x: Any, out: Any) -> Any:
        return eq.fake_quant_with_min_max_args(x, out=out)

    with pytest.raises(RuntimeError, match="out cannot be used under torch.compile"):
        compiled(torch.ones(3), torch.ones(3))


def test_operators_without_gradient_run_in_jax() -> None:
    jax = pytest.importorskip("jax")

    @operator(None, ("outputs",))
    def without_gradient(inputs: Tensor) -> Lowering:
        numbers = {"min": -1.0, "max": 1.0, "num_bits": 8, "narrow_range": 0}
        return Lowering((inputs,), "fake_quant_with_min_max_args", numbers)

    try:
        x = np.linspace(-2, 2, 7, dtype=np.float32)
        expected = eq.fake_quant_with_min_max_args(x, -1.0, 1.0)
        assert np.array_equal(without_gradient(jax.numpy.asarray(x)), expected)
    finally:
        del OPERATORS["without_gradient"]
