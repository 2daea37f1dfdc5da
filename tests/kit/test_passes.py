# SPDX-License-Identifier: Apache-2.0
"""What recognises steps knows no framework: networks under construction, written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from exactqat.qat.capture.core.sizes import Batch
from exactqat.qat.capture.files.reader import Fixed, Reader
from exactqat.qat.capture.passes import composites
from exactqat.qat.capture.passes.affine import BiasAndAffine

BATCH = Batch()


def begun(*shape: int) -> tuple[Reader, Any]:
    reader = Reader()
    reader.begin("step", "")
    return reader, reader.input("x", (BATCH, *shape), "float32")


def constant(*values: float) -> Fixed:
    return Fixed("weight", np.asarray(values, np.float32))


def exponential(c: Reader, x: Any, shifted: bool) -> tuple[Any, Any, Any]:
    """(x less its largest value, what exp makes of that, the sums)."""
    if shifted:
        largest = c.emit("amax", [x], (BATCH, 1), axes=(1,), keep_dims=True)
        x = c.emit("sub", [x, largest], x.shape)
    powers = c.emit("exp", [x], x.shape)
    return x, powers, c.emit("sum", [powers], (BATCH, 1), axes=(1,), keep_dims=True)


@pytest.mark.parametrize("shifted", [False, True])
def test_softmax_and_its_logarithm(shifted: bool) -> None:
    c, x = begun(5)
    less, powers, sums = exponential(c, x, shifted)
    result = composites.softmax(c, powers, sums)
    assert result is not None and c.made_by[result.name].kind == "softmax"
    assert c.made_by[result.name].inputs == ("x",)
    logarithm = composites.log_softmax(c, less, c.emit("log", [sums], sums.shape))
    assert logarithm is not None and c.made_by[logarithm.name].kind == "log_softmax"


def test_a_quotient_by_another_sum_is_not_a_softmax() -> None:
    c, x = begun(5)
    _, powers, _ = exponential(c, x, True)
    other = c.emit("sum", [x], (BATCH, 1), axes=(1,), keep_dims=True)
    assert composites.softmax(c, powers, other) is None
    without_axis = c.emit("sum", [powers], (BATCH,), axes=(1,), keep_dims=False)
    assert composites.softmax(c, powers, without_axis) is None


@pytest.mark.parametrize(("word", "number", "mean"), [("div", 5.0, True), ("mul", 0.2, True), ("div", 4.0, False)])
def test_a_sum_over_its_count_is_a_mean(word: str, number: float, mean: bool) -> None:
    c, x = begun(5)
    total = c.emit("sum", [x], (BATCH,), axes=(1,), keep_dims=False)
    result = composites.mean_or_pool(c, word, total, number)
    assert (result is not None) == mean
    assert result is None or c.made_by[result.name].kind == "mean"


def test_sums_of_windows_over_counts_that_leave_padding_out() -> None:
    c, x = begun(4, 4, 2)
    how = {"window": (3, 3), "strides": (1, 1), "padding": ((1, 1), (1, 1)), "channel_axis": 3}
    sums = c.emit("avg_pool", [x], x.shape, **how, over=(0, 0), count_include_pad=True, divisor=1)
    line = np.array([2, 3, 3, 2], np.float32)
    counts = Fixed("counts", (line[:, None] * line)[None, :, :, None], trained=False)
    result = composites.mean_or_pool(c, "div", sums, counts)
    assert result is not None
    assert c.made_by[result.name].attributes["count_include_pad"] is False
    wrong = Fixed("counts", counts.data + 1, trained=False)
    assert composites.mean_or_pool(c, "div", sums, wrong) is None


def product(c: Reader, x: Any) -> Any:
    weight = Fixed("kernel", np.ones((2, x.shape[1]), np.float32))
    return c.emit("linear", [x, weight, None], (BATCH, 2))


def test_a_sum_with_a_vector_is_the_bias_and_a_line_is_a_batch_norm() -> None:
    c, x = begun(3)
    summed = c.emit("add", [product(c, x), constant(1, 2)], (BATCH, 2))
    scaled = c.emit("mul", [summed, constant(3, 4)], (BATCH, 2))
    moved = c.emit("sub", [scaled, constant(5, 6)], (BATCH, 2))
    first, second = BiasAndAffine(c, [moved.name]).run()
    assert (first.kind, second.kind, second.output) == ("linear", "batch_norm", moved.name)
    assert np.array_equal(c.fixed_named(str(first.inputs[2])).data, [1, 2])
    factor, offset = (c.fixed_named(str(name)).data for name in second.inputs[1:3])
    assert np.array_equal(factor, [3, 4]) and np.array_equal(offset, [-5, -6])


def test_what_others_read_too_stays() -> None:
    c, x = begun(3)
    result = product(c, x)
    summed = c.emit("add", [result, constant(1, 2)], (BATCH, 2))
    both = c.emit("mul", [summed, result], (BATCH, 2))
    kinds = [step.kind for step in BiasAndAffine(c, [both.name]).run()]
    assert kinds == ["linear", "add", "mul"]
