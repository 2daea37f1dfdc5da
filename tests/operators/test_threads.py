# SPDX-License-Identifier: Apache-2.0
"""Many threads that call operators at once, while plans are learned, overflow and are forgotten, and while lists and
the number of threads change: each gets the bits that one thread gets. For interpreters without a global lock above all.

EXACTQAT_STRESS_SECONDS=600 python -m pytest tests/operators/test_threads.py runs each for ten minutes.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import exactqat as eq
import exactqat.operators.numpy
from exactqat.operators import OPERATORS, cpu

SECONDS = float(os.environ.get("EXACTQAT_STRESS_SECONDS", "0"))
THREADS = 8
KNOWN = 4096  # kMostKnown in bind.cpp

args, args_gradient = eq.fake_quant_with_min_max_args, eq.fake_quant_with_min_max_args_gradient
per_channel = eq.fake_quant_with_min_max_vars_per_channel
per_channel_gradient = eq.fake_quant_with_min_max_vars_per_channel_gradient

Call = Callable[[bool], bytes]  # on arrays of its own, or on those that all threads share


def call(op: Any, *operands: Any, **attributes: Any) -> Call:
    def run(own: bool) -> bytes:
        arrays = [np.array(v) if own and isinstance(v, np.ndarray) else v for v in operands]
        return bits(op(*arrays, **attributes))

    return run


def into(op: Any, *operands: Any, **attributes: Any) -> Call:
    """The same into arrays for the results."""
    like = op(*operands, **attributes)

    def run(own: bool) -> bytes:
        out = tuple(np.empty_like(v) for v in like) if isinstance(like, tuple) else np.empty_like(like)
        op(*operands, **attributes, out=out)
        return bits(out)

    return run


def refused(op: Any, *operands: Any, **attributes: Any) -> Call:
    def run(own: bool) -> bytes:
        with pytest.raises((ValueError, TypeError)) as error:
            op(*operands, **attributes)
        return str(error.value).encode()

    return run


def bits(results: Any) -> bytes:
    return b"".join(v.tobytes() for v in results) if isinstance(results, tuple) else results.tobytes()


def calls() -> Iterator[Call]:
    random = np.random.default_rng(2026)

    def data(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return random.normal(0, 3, shape).astype(dtype)

    # More kinds of call than one operator's table holds.
    rows = {(i, j): data(i, j) for i in range(1, 24) for j in range(1, 14)}
    kinds = 0
    for bits_ in range(2, 17):
        for x in rows.values():
            yield call(args, x, -3.0, 4.0, num_bits=bits_)
            kinds += 1
    assert kinds > KNOWN
    for shape in ((2, 3), (5, 4, 3), (7,), (300, 300), (512, 600), (40, 3)):
        for dtype in (np.float16, np.float32, np.float64):
            x, gradient = data(*shape, dtype=dtype), data(*shape, dtype=dtype)
            wide = np.float64 if dtype == np.float64 else np.float32
            low, high = -np.abs(data(shape[-1], dtype=wide)), np.abs(data(shape[-1], dtype=wide)) + wide(0.1)
            for num_bits in (2, 8, 11):
                yield call(args_gradient, gradient, x, -2.0, 2.0, num_bits=num_bits)
                yield call(eq.fake_quant_with_min_max_vars, x, -1.5, float(num_bits), num_bits=num_bits)
                yield call(eq.fake_quant_with_min_max_vars_gradient, gradient, x, low[0], high[0], num_bits=num_bits)
                yield call(per_channel, x, low, high, num_bits, narrow_range=True)
                yield call(per_channel_gradient, gradient, x, low, high, num_bits=num_bits)
                yield into(per_channel, x, low, high, num_bits=num_bits)
                yield into(per_channel_gradient, gradient, x, low, high, num_bits=num_bits)
                yield call(
                    OPERATORS["quantize_and_dequantize_v2"], x, low[0], high[0], num_bits=num_bits, range_given=True
                )
                yield call(
                    OPERATORS["quantize_and_dequantize_v4"],
                    x,
                    low,
                    high,
                    num_bits=num_bits,
                    range_given=True,
                    axis=len(shape) - 1,
                )
            yield refused(args, x, -1.0, 1.0, num_bits=17)
            yield refused(per_channel, x, low[:-1], high)
            yield refused(args, x, -1.0, 1.0, out=np.empty((1, 1), dtype))
    for height in range(3, 12):
        for channels in (1, 3, 8):
            x, weights = data(2, height, 6, channels), data(3, 3, channels, 2)
            for stride in ([1, 1, 1, 1], (1, 2, 2, 1), [1, 3, 3, 1]):
                yield call(OPERATORS["depthwise_conv2d_native"], x, weights, strides=stride, padding="SAME")
                yield call(
                    OPERATORS["depthwise_conv2d_native"], x, weights, strides=stride, padding="EXPLICIT",
                    explicit_paddings=[0, 0, 1, 2, 2, 1, 0, 0],
                )  # fmt: skip
            vectors = [np.abs(data(channels)) + np.float32(0.5) for _ in range(4)]
            for training in (True, False):
                yield call(OPERATORS["fused_batch_norm_v3"], x, *vectors, is_training=training)
                yield call(OPERATORS["fused_batch_norm"], x, *vectors, is_training=training)


@contextmanager
def meanwhile(*works: Callable[[], None]) -> Iterator[list[str]]:
    """Runs each again and again; the list says what went wrong."""
    failed: list[str] = []
    done = threading.Event()

    def again(work: Callable[[], None]) -> None:
        try:
            while not done.is_set() and not failed:
                work()
        except BaseException as error:
            failed.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=again, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def threads_of_kernels() -> Iterator[None]:
    before, interval = eq.get_num_threads(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    faulthandler.dump_traceback_later(max(300, 2 * SECONDS), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    sys.setswitchinterval(interval)
    eq.set_num_threads(before)


@pytest.mark.parametrize("forgetting", [False, True], ids=["overflowing", "forgetting"])
def test_many_threads_get_what_one_gets(forgetting: bool, threads_of_kernels: None) -> None:
    known = [(function, function(False)) for function in calls()]
    failed: list[str] = []
    begin = threading.Barrier(THREADS)
    end = time.monotonic() + SECONDS

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        try:
            begin.wait(60)
            while True:
                for turn, i in enumerate(random.permutation(len(known))[: len(known) if SECONDS else 400]):
                    function, wanted = known[i]
                    if function(turn % 2 == 0) != wanted:
                        failed.append(f"call {i} differs")
                    if failed:
                        return
                if time.monotonic() >= end:
                    return
        except BaseException as error:
            failed.append(f"{type(error).__name__}: {error}")

    def change() -> None:
        for count in (1, 2, 4, 3):
            eq.set_num_threads(count)
            time.sleep(0.003)
            if forgetting:
                cpu.forget_plans()

    with meanwhile(change) as also:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed + also


def test_lists_that_change_meanwhile(threads_of_kernels: None) -> None:
    x = np.linspace(-3, 3, 2 * 9 * 8 * 3, dtype=np.float32).reshape(2, 9, 8, 3)
    weights = np.linspace(-1, 1, 27, dtype=np.float32).reshape(3, 3, 3, 1)
    depthwise = OPERATORS["depthwise_conv2d_native"]
    # What is read while another thread writes may be one stride from before and one from after.
    mixed = [[1, down, right, 1] for down in (1, 2, 3) for right in (1, 2, 3)]
    allowed = {bits(depthwise(x, weights, strides=pair, padding="SAME")) for pair in mixed}
    assert len(allowed) == len(mixed)
    strides = [1, 1, 1, 1]
    seen = set()

    def change() -> None:
        for s in (1, 2, 3):
            strides[:] = [1, s, s, 1]
            time.sleep(0)
            strides.clear()
            strides.extend([1 << 40] * 40)  # another place in memory, and integers that are no constants
            strides[:] = [1, s, s, 1]
            time.sleep(0.0001)

    def read() -> None:
        try:
            answer = bits(depthwise(x, weights, strides=strides, padding="SAME"))
        except (ValueError, TypeError) as error:  # a list half changed
            assert "strides" in str(error), error
            return
        assert answer in allowed
        seen.add(answer)

    end = time.monotonic() + max(SECONDS, 1)
    with meanwhile(change, change, *[read] * (THREADS - 2)) as failed:
        while time.monotonic() < end and not failed:
            cpu.forget_plans()
            time.sleep(0.01)
    assert not failed and seen


def test_a_dtype_is_known_both_ways_before_it_counts_as_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that finds its name goes on to make arrays of it."""
    dtypes: dict[str, np.dtype] = {}

    class Names(dict):
        def __setitem__(self, dtype: np.dtype, name: str) -> None:
            assert name in dtypes
            super().__setitem__(dtype, name)

    names = Names()
    monkeypatch.setattr(exactqat.operators.numpy, "_NAMES", names)
    monkeypatch.setattr(exactqat.operators.numpy, "_DTYPES", dtypes)
    assert exactqat.operators.numpy._name(np.dtype(">f2")) == "float16"
    assert names and dtypes == {"float16": np.dtype("float16")}


FREE = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


@pytest.mark.skipif(not FREE, reason="this interpreter always has its lock")
def test_the_lock_stays_off() -> None:
    call = "exactqat.fake_quant_with_min_max_args(numpy.ones(3))"
    code = f"import sys, numpy, exactqat; {call}; print(sys._is_gil_enabled())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    for module in cpu.INSTRUCTION_SETS:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            capture_output=True,
            text=True,
            env=environment | {"EXACTQAT_ISA": module},
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_the_first_call_of_all_may_come_from_many_threads() -> None:
    code = f"""
import threading, numpy as np, exactqat as eq
x = {{dtype: np.linspace(-9, 9, 90_000).astype(dtype) for dtype in ("float16", "float32", "float64")}}
begin, found = threading.Barrier({THREADS}), []
def work(number):
    begin.wait(30)
    if number == 0: eq.set_num_threads(3)
    found.append([eq.fake_quant_with_min_max_args(v).tobytes() for v in x.values()])
threads = [threading.Thread(target=work, args=(number,)) for number in range({THREADS})]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == {THREADS} and found.count(found[0]) == {THREADS} and eq.get_num_threads() == 3
"""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
