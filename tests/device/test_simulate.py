# SPDX-License-Identifier: Apache-2.0
"""The declarations' fast ways against slow ones: whole tensors in int64, the fixed-point arithmetic of one number at a
time, operators without their tables, one block and one thread.

EXACTQAT_SWEEP=20 multiplies the random graphs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from device_cases import CASES, random_codes, random_quantization

from exactqat.deploy import Builder, Graph, per_tensor, simulate
from exactqat.deploy.simulate import simulate_operator
from exactqat.kit.device import OPERATORS, PROFILES, blocks, profile_named, weighted
from exactqat.kit.device.arithmetic import (
    bounds,
    fixed_point,
    multiply_fixed_point,
    rounding_shift,
    same_padding,
    scale_of,
    zero_point_of,
)
from exactqat.kit.device.operator import Call
from exactqat.kit.engine import compiled, declared

COUNT = 20 * int(os.environ.get("EXACTQAT_SWEEP", "1"))
WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
POINTWISE = [kind for kind, operator in OPERATORS.items() if operator.pointwise]


@pytest.fixture(autouse=True)
def by_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels: these are `tests/device/test_engine.py`'s."""
    monkeypatch.setattr(compiled, "make", lambda *operator: ())


# --- one number at a time -------------------------------------------------------------------------------------------


def high_multiply(a: int, b: int) -> int:
    """gemmlowp's SaturatingRoundingDoublingHighMul."""
    if a == b == -(2**31):
        return 2**31 - 1
    nudged = a * b + (2**30 if a * b >= 0 else 1 - 2**30)
    return nudged // 2**31 if nudged >= 0 else -(-nudged // 2**31)


def divide_by_power_of_two(x: int, exponent: int) -> int:
    """gemmlowp's RoundingDivideByPOT."""
    mask = 2**exponent - 1
    return (x >> exponent) + int((x & mask) > (mask >> 1) + (x < 0))


def multiply_by_quantized_multiplier(x: int, significand: int, exponent: int) -> int:
    left = (x << max(exponent, 0)) % 2**32
    left -= 2**32 if left >= 2**31 else 0
    return divide_by_power_of_two(high_multiply(left, significand), max(-exponent, 0))


def test_fixed_point_of_arrays_is_that_of_numbers() -> None:
    rng = np.random.default_rng(0)
    edges = [0, 1, -1, 2, -2, 3, 2**30, -(2**30), 2**31 - 1, -(2**31), 2**31 - 2, 1 - 2**31]
    numbers = np.array([*edges, *rng.integers(-(2**31), 2**31, 300), *rng.integers(-300, 300, 300)])
    significands = [2**30, 2**31 - 1, 2**30 + 1, 1431655765, *map(int, rng.integers(2**30, 2**31, 6))]
    for significand in significands:
        for exponent in (*range(-31, 0, 3), -1, 0, 1, 5):
            expected = [multiply_by_quantized_multiplier(int(x), significand, exponent) for x in numbers]
            assert multiply_fixed_point(numbers, significand, exponent).tolist() == expected
    # Ties of both roundings, and one exponent for each column.
    ties = np.array([[(2 * k + 1) << 7, -((2 * k + 1) << 7)] for k in range(50)])
    for shift in range(12):
        expected = [[divide_by_power_of_two(int(x), shift) for x in row] for row in ties]
        assert rounding_shift(ties, shift).tolist() == expected
    exponents = np.array([0, -9])
    expected = [
        [multiply_by_quantized_multiplier(int(x), 2**30, int(e)) for x, e in zip(row, exponents, strict=True)]
        for row in ties
    ]
    assert multiply_fixed_point(ties, np.array([2**30, 2**30]), exponents).tolist() == expected


# --- whole tensors in int64 -----------------------------------------------------------------------------------------


def accumulators(graph: Graph, codes: np.ndarray) -> np.ndarray:
    """int64 sums of products and bias of the last operator, tap by tap."""
    (operator,) = graph.operators
    input, filter, bias = (graph.tensors[name] for name in operator.inputs)
    x, taps = codes.astype(np.int64) - zero_point_of(input), filter.data.astype(np.int64)
    if operator.kind == "FULLY_CONNECTED":
        return x @ taps.T + bias.data
    strides, dilations = operator.attributes["strides"], operator.attributes["dilations"]
    sizes = taps.shape[1:3]
    if operator.attributes["padding"] == "SAME":
        axes = zip(x.shape[1:3], sizes, strides, dilations, strict=True)
        x = np.pad(x, [(0, 0), *(same_padding(*axis) for axis in axes), (0, 0)])
    height, width = graph.tensors[operator.outputs[0]].shape[1:3]
    total = np.zeros((len(x), height, width, bias.data.size), np.int64) + bias.data
    for i, j in np.ndindex(*sizes):
        top, left = i * dilations[0], j * dilations[1]
        rows = slice(top, top + (height - 1) * strides[0] + 1, strides[0])
        columns = slice(left, left + (width - 1) * strides[1] + 1, strides[1])
        met = x[:, rows, columns]
        if operator.kind == "DEPTHWISE_CONV_2D":
            total += np.repeat(met, taps.shape[3] // met.shape[3], 3) * taps[0, i, j]
            continue
        groups = met.shape[3] // taps.shape[3]
        split = met.reshape(*met.shape[:3], groups, -1)
        of_group = taps[:, i, j].reshape(groups, -1, taps.shape[3])
        total += np.einsum("nhwgi,goi->nhwgo", split, of_group).reshape(total.shape)
    return total


def slow(graph: Graph, codes: np.ndarray, profile: str) -> np.ndarray:
    (operator,) = graph.operators
    total = accumulators(graph, codes)
    input, filter, _ = (graph.tensors[name] for name in operator.inputs)
    output = graph.tensors[operator.outputs[0]]
    if profile.startswith(("xnnpack", "onnxruntime")):
        multiplier = input.quantization.scale * filter.quantization.scale / scale_of(output)
        steps = np.rint(total.astype(np.float32) * multiplier).astype(np.float64)
    else:
        exact = input.quantization.scale.astype(float) * filter.quantization.scale / float(scale_of(output))
        if operator.kind == "FULLY_CONNECTED" and profile == "reference":
            steps = np.trunc(total * exact + np.copysign(0.5, total * exact))
        else:
            significand, exponent = (np.broadcast_to(part, total.shape[-1:]) for part in fixed_point(exact))
            steps = np.empty(total.shape)
            for place in np.ndindex(*total.shape):
                channel = place[-1]
                steps[place] = multiply_by_quantized_multiplier(
                    int(total[place]), int(significand[channel]), int(exponent[channel])
                )
    lowest, highest = bounds(output, operator.attributes, profile_named(profile))
    return np.clip(steps + zero_point_of(output), lowest, highest).astype(np.int8)


@pytest.fixture(params=["as it is", "tiny blocks"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Blocks of a few places in several threads, which small tensors would not meet otherwise."""
    if request.param == "tiny blocks":
        monkeypatch.setattr(blocks, "CACHED_VALUES", 40)
        monkeypatch.setattr(weighted, "FEWEST_IN_A_BLOCK", 3)
        monkeypatch.setattr(weighted, "FEWEST_FOR_A_THREAD", 1)
        monkeypatch.setattr(blocks, "threads", lambda: 3)
        monkeypatch.setattr(weighted, "threads", lambda: 3)
    return str(request.param)


def cases(kind: str, profile: str, batch: int) -> Iterator[tuple[Graph, dict[str, np.ndarray]]]:
    rng = np.random.default_rng([*kind.encode(), list(PROFILES).index(profile), batch])
    for _ in range(COUNT):
        builder = Builder()
        graph = builder.graph([CASES[kind](rng, builder)])
        codes = {
            name: rng.integers(-128, 128, (batch, *array.shape[1:])).astype(np.int8)
            for name, array in random_codes(rng, graph).items()
        }
        yield graph, codes


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", WEIGHTED)
def test_products_in_blocks(kind: str, profile: str, cut: str) -> None:
    for graph, codes in cases(kind, profile, 3):
        if len(graph.operators) > 1:
            continue
        expected = slow(graph, codes["x"], profile)
        if not graph.operators[0].attributes.get("keep_axes", True):
            expected = expected.reshape(-1, expected.shape[-1])
        assert np.array_equal(simulate(graph, codes, profile)[graph.outputs[0]], expected), graph.operators


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("depth", [1, 1031, 1032, 1033, 3000, 140_000])
def test_sums_that_float32_does_not_hold(depth: int, profile: str) -> None:
    """On both sides of 2**24, by the filter or by the bias."""
    rng = np.random.default_rng(depth)
    for zero_point, largest_bias, most in [
        (-128, 9, 127),
        (127, 2**23, 127),
        (0, 2**24, 9),
        (3, 2**30, 127),
        (3, 9, 9),
    ]:
        # The accumulator has 32 bits.
        largest = min(most, (2**31 - 1 - largest_bias) // (255 * depth))
        filter = rng.integers(-largest, largest + 1, (4, depth))
        filter[0], filter[1] = largest, -largest
        bias = np.array([largest_bias, -largest_bias, 1, 0])
        builder = Builder()
        x = builder.input("x", (1, depth), per_tensor(0.5, zero_point))
        scale = np.float32(depth * largest + largest_bias / 100)
        y = builder.fully_connected(x, filter, [1, 0.5, 2, 3], bias, per_tensor(scale, 3), name="y")
        graph = builder.graph([y])
        codes = np.stack([*(np.full(depth, code) for code in (-128, 127, 126)), rng.integers(-128, 128, depth)])
        expected = slow(graph, codes, profile)
        assert np.array_equal(simulate(graph, codes.astype(np.int8), profile)["y"], expected)
        assert len(np.unique(expected)) > 2


def test_both_ways_of_adding_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would show nothing."""
    taken = []
    built = weighted.Products.__init__

    def note(self: weighted.Products, *arguments: object) -> None:
        built(self, *arguments)  # type: ignore[arg-type]
        taken.append((self.whole, len(self.edges) - 1))

    monkeypatch.setattr(weighted.Products, "__init__", note)
    test_sums_that_float32_does_not_hold(3000, "xnnpack")
    test_sums_that_float32_does_not_hold(1, "xnnpack")
    assert {(True, 3), (False, 3), (True, 1), (False, 1)} <= set(taken)


# --- tables, images, threads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", POINTWISE)
def test_tables_of_codes(kind: str, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value by value for large tensors, and all at once for small ones."""
    for graph, codes in cases(kind, profile, 2):
        (operator,) = (operator for operator in graph.operators if operator.kind == kind)
        values = {**codes, **simulate(graph, codes, profile, tensors=graph.results())}
        expected = simulate_operator(graph, operator, values, profile)
        monkeypatch.setattr(declared, "RESULTS_PER_ENTRY", 0)
        looked_up = simulate_operator(graph, operator, values, profile)
        monkeypatch.undo()
        assert looked_up.dtype == expected.dtype and np.array_equal(looked_up, expected), operator


def test_large_tensors_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 200,000 values asks for its 65,536 results and no more."""
    builder = Builder()
    first, second = (builder.input(name, (1, 200, 1000), per_tensor(0.1, 3)) for name in "ab")
    graph = builder.graph([builder.add(first, second, per_tensor(0.2, 4), name="y")])
    codes = {name: np.random.default_rng(0).integers(-128, 128, (1, 200, 1000)).astype(np.int8) for name in "ab"}
    sizes, declared = [], OPERATORS["ADD"].integers

    def note(call: Call) -> np.ndarray:
        sizes.append(call.codes[0].size)
        return declared(call)

    monkeypatch.setattr(OPERATORS["ADD"], "integers", note)
    y = simulate(graph, codes)["y"]
    steps = codes["a"].astype(int) + codes["b"] - 6
    assert sizes == [65536] and np.array_equal(y, np.clip(np.floor(steps / 2 + 0.5) + 4, -128, 127))


@pytest.mark.parametrize("kind", CASES)
def test_images_do_not_meet(kind: str, cut: str) -> None:
    """Of several images, each gets what it gets alone."""
    rng = np.random.default_rng([*kind.encode()])
    for _ in range(3):
        builder = Builder()
        graph = builder.graph([CASES[kind](rng, builder)])
        codes = {
            name: rng.integers(-128, 128, (5, *array.shape[1:])).astype(np.int8)
            if array.dtype == np.int8
            else np.concatenate([array[:1]] * 5)  # indices lie within a table
            for name, array in random_codes(rng, graph).items()
        }
        together = simulate(graph, codes)[graph.outputs[0]]
        alone = simulate(graph, codes, batch_size=1)[graph.outputs[0]]
        assert np.array_equal(together, alone), graph.operators
        none = simulate(graph, {name: array[:0] for name, array in codes.items()})[graph.outputs[0]]
        assert none.dtype == together.dtype and none.shape == (0, *together.shape[1:])


def test_callers_in_several_threads(cut: str) -> None:
    """Buffers belong to the thread that asked for them."""
    rng = np.random.default_rng(5)
    builder = Builder()
    x = builder.input("x", (1, 9, 9, 8), random_quantization(rng, np.float32(0.1)))
    for layer in range(3):
        quantization = per_tensor(0.3 * 20**layer, 2)
        filter = rng.integers(-127, 128, (8, 3, 3, 8))
        x = builder.conv_2d(x, filter, [0.05], rng.integers(-9, 9, 8), quantization, name=f"y{layer}")
    graph = builder.graph([x])
    images = [rng.integers(-128, 128, (3, 9, 9, 8)).astype(np.int8) for _ in range(4)]
    expected = [simulate(graph, image)[x] for image in images]
    results: dict[int, list[np.ndarray]] = {}

    def run(which: int) -> None:
        results[which] = [simulate(graph, images[which])[x] for _ in range(5)]

    callers = [threading.Thread(target=run, args=(which,)) for which in range(len(images))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for which, answer in enumerate(expected):
        assert all(np.array_equal(result, answer) for result in results[which])


def test_work_that_fails_in_a_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "threads", lambda: 3)
    done = []

    def work(todo: list[int]) -> None:
        done.extend(todo)
        if 5 in todo:
            raise ArithmeticError("five")

    with pytest.raises(ArithmeticError, match="five"):
        blocks.share(work, list(range(6)))
    assert sorted(done) == list(range(6))
    blocks.share(work, [])
    blocks.share(work, [1])


def test_threads_of_blas_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # Libraries that other tests brought later, such as SciPy's own BLAS, are none of NumPy's products.
    monkeypatch.setattr(blocks, "_blas", blocks._Blas())
    controller = pytest.importorskip("threadpoolctl").ThreadpoolController().select(user_api="blas")
    if not controller.info():
        pytest.skip("NumPy's BLAS is none that can be asked")

    def count() -> list[int]:
        return [entry["num_threads"] for entry in controller.info()]

    with controller.limit(limits=2):
        before = count()
        with blocks.one_thread_for_blas(), blocks.one_thread_for_blas():
            assert set(count()) == {1}
        assert count() == before
        with pytest.raises(KeyError), blocks.one_thread_for_blas():
            raise KeyError
        assert count() == before


def test_without_threadpoolctl(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread does it all."""
    monkeypatch.setattr(blocks, "ThreadpoolController", None)
    assert blocks.threads() == 1
    with blocks.one_thread_for_blas():
        pass


def test_blocks_are_shared_with_as_many_threads_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that gives no more threads is not the end, and neither is a fork."""
    done = np.zeros(100)

    def work(todo: Sequence[int]) -> None:
        for place in todo:
            done[place] += 1

    def fail(todo: Sequence[int]) -> None:
        raise KeyError("of a thread")

    blocks.share(work, range(100))
    assert (done == 1).all()
    with pytest.raises(KeyError, match="of a thread"):
        blocks.share(fail, range(100))
    start, started = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    blocks.executor.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_one)
        patch.setattr(blocks, "threads", lambda: 4)
        blocks.share(work, range(100))
    assert (done == 2).all() and len(started) == 1 and blocks.executor() is None
    blocks.executor.cache_clear()


def test_a_forked_child_has_threads_of_its_own(cut: str) -> None:
    """Those of its parent are not there, whatever the parent thinks."""
    for graph, codes in cases("CONV_2D", "xnnpack-x86", 3):
        expected = simulate(graph, codes)[graph.outputs[0]]
        break
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        equal = False
        try:
            equal = np.array_equal(simulate(graph, codes)[graph.outputs[0]], expected)
        finally:
            os._exit(0 if equal else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
