# SPDX-License-Identifier: Apache-2.0
"""What lies at the limits: numbers too large for their dtype, sizes no array can have, other devices and processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import exactqat as eq
from exactqat.operators import OPERATORS, cpu
from exactqat.operators.declarations.op import operator
from exactqat.operators.declarations.specification import Lowering, Tensor

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
            "make the output too large",
        ),
        (lambda: eq.fake_quant_with_min_max_args(X, num_bits=2**64), "num_bits must fit 64 bits"),
        (lambda: eq.fake_quant_with_min_max_args(X, -(10**400), 1), "min must fit float64"),
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


FRAMEWORKS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.asarray,
    "torch": lambda array: pytest.importorskip("torch").from_numpy(array),
    "jax": lambda array: pytest.importorskip("jax").numpy.asarray(array),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numbers_beyond_float32_are_infinite(framework: str) -> None:
    """As TensorFlow makes them, attributes and operands alike; a range that is not finite gives NaN."""
    x = FRAMEWORKS[framework](np.ones((2, 3), np.float32))
    for _ in range(2):
        for huge in (1e300, 10**300, 3.4028235677973366e38):
            for call in (
                lambda: eq.fake_quant_with_min_max_args(x, -huge, huge),  # noqa: B023
                lambda: eq.fake_quant_with_min_max_vars(x, -huge, huge),  # noqa: B023
                lambda: eq.fake_quant_with_min_max_vars_per_channel(x, [-float(huge)] * 3, [float(huge)] * 3),  # noqa: B023
                lambda: eq.raw_ops.QuantizeAndDequantizeV2(input=x, input_min=-huge, input_max=huge, range_given=True),  # noqa: B023
            ):
                assert np.isnan(np.asarray(call())).all()
        largest = np.asarray(eq.fake_quant_with_min_max_vars(x, -1.0, 3.4028235677973362e38))
        assert not np.isnan(largest).any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numbers_that_are_none(framework: str) -> None:
    x = FRAMEWORKS[framework](np.ones((2, 3), np.float32))
    for _ in range(2):
        with pytest.raises(ValueError, match="max must fit float64, got a larger integer"):
            eq.fake_quant_with_min_max_vars(x, 0.0, 10**400)
        with pytest.raises(ValueError, match="min must fit float64, got a larger integer"):
            eq.fake_quant_with_min_max_vars_per_channel(x, [0, 0, -(10**400)], [1, 1, 1])
        with pytest.raises(TypeError, match="max must be real, got complex 1j"):
            eq.fake_quant_with_min_max_vars(x, 0.0, 1j)


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
