# SPDX-License-Identifier: Apache-2.0
"""Where axes lie: plans that only move elements are lowered, simulated and compared with NumPy in the user's order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactqat.deploy import simulate
from exactqat.deploy.axes import on_device
from exactqat.deploy.lower import Lowering
from exactqat.deploy.values import in_users_order
from exactqat.kit.planning.network import Network
from exactqat.kit.planning.plans import Grid, Numbers, Plan, PlanInput, PlanStep, WeightNumbers, Weights
from exactqat.kit.planning.rules import Rule

GRIDS = {"x": Grid("x", Rule())}
NUMBERS = Numbers({"x": (np.float32(0.5), 128)}, {})
BATCH = 3


def step(
    path: str, kind: str, operands: tuple[str, ...], shape: tuple[int, ...], batch: int, **attributes: Any
) -> PlanStep:
    return PlanStep(path, kind, operands, attributes, "x", shape, batch)


def lowered(shape: tuple[int, ...], steps: list[PlanStep], numbers: Numbers = NUMBERS) -> tuple[Lowering, Any]:
    network = Network((), (), {}, {}, ())
    last = steps[-1].path
    plan = Plan(network, (PlanInput("x", "x", shape),), tuple(steps), GRIDS, {}, (last,), (last,))
    lowering = Lowering(plan, numbers)
    return lowering, lowering.run()


def kinds(graph: Any) -> list[str]:
    return [operator.kind for operator in graph.operators]


@st.composite
def movements(draw: Any) -> tuple[tuple[int, ...], list[tuple[str, Any]]]:
    """An input's shape (batch of one) and what is done to it, one after the other."""
    rank = draw(st.integers(2, 5))
    shape = (1, *[draw(st.sampled_from([1, 2, 3, 4, 6])) for _ in range(rank - 1)])
    ops = [(draw(st.sampled_from(["permute", "split", "join", "slice", "concat"])), draw(st.integers(0, 10**9)))]
    for _ in range(draw(st.integers(0, 7))):
        ops.append(
            (draw(st.sampled_from(["permute", "split", "join", "slice", "concat"])), draw(st.integers(0, 10**9)))
        )
    return shape, ops


@settings(max_examples=300, deadline=None)
@given(movements())
def test_movements_are_those_of_the_user(case: tuple[tuple[int, ...], list[tuple[str, Any]]]) -> None:
    shape, ops = case
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (BATCH, *shape[1:])).astype(np.int8)
    value, batch, path, steps = codes, 0, "x", []
    for number, (what, seed) in enumerate(ops):
        random = np.random.default_rng(seed)
        sizes = list(value.shape)
        sizes[batch] //= BATCH
        axis = int(random.integers(len(sizes)))
        name = f"s{number}"
        if what == "permute":
            order = tuple(int(a) for a in random.permutation(len(sizes)))
            value = value.transpose(order)
            new, batch = [sizes[a] for a in order], order.index(batch)
            steps.append(step(name, "TRANSPOSE", (path,), tuple(new), batch, permutation=order))
        elif what == "slice":
            if axis == batch or sizes[axis] < 2:
                continue
            start, stride = int(random.integers(sizes[axis])), int(random.integers(1, 3))
            begin, end, strides = [0] * len(sizes), [None] * len(sizes), [1] * len(sizes)
            begin[axis], strides[axis] = start, stride
            value = value.take(range(start, sizes[axis], stride), axis)
            new = list(sizes)
            new[axis] = value.shape[axis]
            steps.append(
                step(
                    name,
                    "STRIDED_SLICE",
                    (path,),
                    tuple(new),
                    batch,
                    begin=tuple(begin),
                    end=tuple(end),
                    steps=tuple(strides),
                )
            )
        elif what == "concat":
            if axis == batch or value.size > 4000:
                continue
            value = np.concatenate([value, value], axis)
            new = list(sizes)
            new[axis] *= 2
            steps.append(step(name, "CONCATENATION", (path, path), tuple(new), batch, axis=axis))
        else:
            new = list(sizes)
            moved = batch
            if what == "split":
                parts = [p for p in (1, 2, 3) if sizes[axis] % p == 0]
                part = int(random.choice(parts))
                if len(new) >= 6:
                    continue
                # The batch stays in front of what is split off.
                new[axis : axis + 1] = [sizes[axis] // part, part] if axis == batch else [part, sizes[axis] // part]
                moved = batch + (axis < batch)
            else:
                if axis + 1 >= len(new) or axis + 1 == batch or len(new) <= 2:
                    continue
                new[axis : axis + 2] = [sizes[axis] * sizes[axis + 1]]
                moved = batch - (axis < batch)
            batch = moved
            real = list(new)
            real[batch] *= BATCH
            value = value.reshape(real)
            steps.append(step(name, "RESHAPE", (path,), tuple(new), batch, new_shape=tuple(new)))
        path = name
    if not steps:
        return
    # A first step that cannot be left out, so that the graph has something to compute.
    lowering, graph = lowered(shape, [*steps, step("y", "STRIDED_SLICE", (path,), steps[-1].shape, batch,
        begin=(0,) * value.ndim, end=(None,) * value.ndim, steps=(1,) * value.ndim)])  # fmt: skip
    given_codes = on_device(codes, lowering.layout("x"))
    result = simulate(graph, given_codes)[graph.outputs[0]]
    maps = lowering.layout("y").axes == (0, 2, 3, 1)  # feature maps leave the device with their channels last
    wanted = on_device(value, lowering.layout("y")) if maps else np.moveaxis(value, batch, 0)
    assert np.array_equal(result, wanted)


def test_an_image_network_has_no_transpose() -> None:
    """Convolution, concatenation of channels, slice of rows, permutation there and back: nothing is moved."""
    weights = Weights("w", None, None, Rule())
    window = {"strides": (1, 1), "padding": ((1, 1), (1, 1)), "dilations": (1, 1), "channel_axis": 1}
    convolution = PlanStep(
        "conv", "CONV_2D", ("x",), window, "x", (1, 4, 8, 8), weights=weights,
    )  # fmt: skip
    steps = [
        convolution,
        step("cat", "CONCATENATION", ("conv", "conv"), (1, 8, 8, 8), 0, axis=1),
        step(
            "half", "STRIDED_SLICE", ("cat",), (1, 8, 4, 8), 0, begin=(0, 0, 0, 0), end=(None,) * 4, steps=(1, 1, 2, 1)
        ),
        step("there", "TRANSPOSE", ("half",), (1, 4, 8, 8), 0, permutation=(0, 2, 3, 1)),
        step("back", "TRANSPOSE", ("there",), (1, 8, 4, 8), 0, permutation=(0, 3, 1, 2)),
        step(
            "last", "STRIDED_SLICE", ("back",), (1, 8, 4, 4), 0, begin=(0, 0, 0, 0), end=(None,) * 4, steps=(1, 1, 1, 2)
        ),
    ]
    numbers = Numbers(
        NUMBERS.grids,
        {"conv": WeightNumbers(np.ones((4, 3, 3, 3), np.int64), np.full(4, 0.01, np.float32), np.zeros(4))},
    )
    _, graph = lowered((1, 3, 8, 8), steps, numbers)
    assert kinds(graph) == ["CONV_2D", "CONCATENATION", "STRIDED_SLICE", "STRIDED_SLICE"]


@pytest.mark.parametrize("flatten_first", [True, False])
def test_weights_follow_a_flattened_map(flatten_first: bool) -> None:
    """A Linear after a flatten reads the device's order of features; anything else gets the user's."""
    rng = np.random.default_rng(1)
    weight = rng.integers(-127, 128, (5, 24))
    numbers = Numbers(NUMBERS.grids, {"fc": WeightNumbers(weight, np.full(5, 0.001, np.float32), np.zeros(5))})
    flat = step("flat", "RESHAPE", ("x",), (1, 24), 0, new_shape=(1, 24))
    middle = [flat] if flatten_first else [
        step("cut", "STRIDED_SLICE", ("x",), (1, 2, 3, 4), 0, begin=(0,) * 4, end=(None,) * 4, steps=(1,) * 4),
        step("flat", "RESHAPE", ("cut",), (1, 24), 0, new_shape=(1, 24)),
        step("same", "STRIDED_SLICE", ("flat",), (1, 24), 0, begin=(0, 0), end=(None, None), steps=(1, 1)),
    ]  # fmt: skip
    last = middle[-1].path
    fc = PlanStep("fc", "FULLY_CONNECTED", (last,), {}, "x", (1, 5), weights=Weights("w", None, None, Rule()))
    lowering, graph = lowered((1, 2, 3, 4), [*middle, fc], numbers)
    assert ("TRANSPOSE" in kinds(graph)) == (not flatten_first)
    codes = rng.integers(-128, 128, (BATCH, 2, 3, 4)).astype(np.int8)
    result = simulate(graph, on_device(codes, lowering.layout("x")))["fc"]
    sums = codes.reshape(BATCH, 24).astype(np.int64) @ weight.T
    assert np.array_equal(result, np.clip(np.rint(sums.astype(np.float32) * np.float32(0.001)), -128, 127))


@pytest.mark.parametrize("image", [(2, 3, 4), (6, 4), (3, 1, 8), (24, 1, 1)])
@pytest.mark.parametrize("read_by", ["a convolution", "a slice and a convolution", "a convolution and a slice"])
def test_rows_of_weights_follow_their_reader(image: tuple[int, ...], read_by: str) -> None:
    """A Linear in front of an image puts its results where a convolution reads them; others read the user's order."""
    rng = np.random.default_rng(2)
    weight, bias, scales = rng.integers(-127, 128, (24, 5)), rng.integers(-900, 900, 24), rng.uniform(1e-3, 3e-3, 24)
    channels = image[0]
    filter = np.zeros((channels, channels, *[1] * (len(image) - 1)), np.int64)
    filter[np.arange(channels), np.arange(channels)] = 100
    numbers = Numbers(
        {"x": (np.float32(0.5), 128)},
        {
            "fc": WeightNumbers(weight, scales.astype(np.float32), bias),
            "conv": WeightNumbers(filter, np.full(channels, 0.01, np.float32), np.zeros(channels)),
        },
    )
    given_weights = Weights("w", None, None, Rule())
    whole = (1, *image)
    axes = {"begin": (0,) * len(whole), "end": (None,) * len(whole), "steps": (1,) * len(whole)}
    one = (1,) * (len(image) - 1)
    window = {"strides": one, "padding": ((0, 0),) * len(one), "dilations": one, "channel_axis": 1}
    steps = [
        PlanStep("fc", "FULLY_CONNECTED", ("x",), {}, "x", (1, 24), weights=given_weights),
        step("image", "RESHAPE", ("fc",), whole, 0, new_shape=whole),
    ]
    if read_by.startswith("a slice"):
        steps.append(step("cut", "STRIDED_SLICE", ("image",), whole, 0, **axes))
    steps.append(PlanStep("conv", "CONV_2D", (steps[-1].path,), window, "x", whole, weights=given_weights))
    results = ["conv"]
    if read_by.endswith("a slice"):
        flat_axes = {"begin": (0, 0), "end": (None, None), "steps": (1, 1)}
        steps.append(step("also", "STRIDED_SLICE", ("fc",), (1, 24), 0, **flat_axes))
        results.append("also")
    network = Network((), (), {}, {}, ())
    plan = Plan(network, (PlanInput("x", "x", (1, 5)),), tuple(steps), GRIDS, {}, tuple(results), tuple(results))
    lowering = Lowering(plan, numbers)
    graph = lowering.run()
    moves = read_by.endswith("a slice") and math.prod(image[1:]) > 1
    # Only feature maps of two spatial axes leave the device with their channels last.
    assert kinds(graph).count("TRANSPOSE") == moves + (len(image) == 2)
    codes = rng.integers(-128, 128, (BATCH, 5)).astype(np.int8)
    integers = simulate(graph, codes, tensors=[graph.outputs[0], "fc"])
    layouts = lowering.layouts()
    acc = (codes.astype(np.int64) @ weight.T + bias).astype(np.float32)
    multiplier = np.float32(0.5) * scales.astype(np.float32) / np.float32(0.5)
    wanted = np.clip(np.rint(acc * multiplier), -128, 127)
    assert np.array_equal(in_users_order(integers["fc"], layouts["fc"]), wanted)
    assert np.array_equal(on_device(wanted, layouts["fc"]), integers["fc"])
    convolved = np.clip(np.rint(wanted), -128, 127).reshape(BATCH, *image)
    stored = integers[graph.outputs[0]]
    if graph.outputs[0] == "conv" and len(image) == 3:
        stored = stored.transpose(0, 3, 1, 2)
    assert np.array_equal(stored, convolved)
