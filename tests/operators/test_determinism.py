# SPDX-License-Identifier: Apache-2.0
"""Nothing but the operands and attributes decides about the bits of a result, and a call leaves no state.

Not the instruction set, the number of threads, the process, where the operands lie, what other threads do meanwhile,
nor a fork. The calls are those of the fuzzer; what they should give is test_fuzz.py's business.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ml_dtypes")

import fuzz
from conftest import unwritten

import exactqat as eq
from exactqat.operators import OPERATORS, Operator, cpu
from exactqat.operators.declarations.specification import TensorSpec

ANY_NAN = b"NaN"  # its sign and payload are promised by nobody


@lru_cache
def calls() -> list[fuzz.Call]:
    """Good calls of all operators, a dozen of them large enough for several threads."""
    small, large = [], []
    for case in range(1500):
        call = fuzz.generate(fuzz.Random(20, case))
        if not call.flaw:
            many = max(np.size(value) for value in call.operands.values()) > 40000
            (large if many else small).append(call)
    assert len(large) >= 12
    return small[:150] + large[:12]


def digest_of(results: Any) -> str:
    """Bits, dtypes and shapes of one call's results."""
    digest = hashlib.blake2b(digest_size=16)
    for result in results if isinstance(results, tuple | list) else (results,):
        digest.update(f"{result.dtype} {result.shape}".encode())
        values = np.array(result, order="C")
        digest.update(ANY_NAN + np.isnan(values).tobytes())
        digest.update(np.where(np.isnan(values), values.dtype.type(0), values).tobytes())
    return digest.hexdigest()


def answer(call: fuzz.Call) -> str:
    """The digest of the results, or the refusal."""
    try:
        return digest_of(call.op(**call.operands, **call.attributes))
    except (ValueError, TypeError) as error:
        return str(error)


def answers() -> list[str]:
    return [answer(call) for call in calls()]


def in_process(code: str, **environment: str) -> str:
    """What a fresh interpreter prints that has this file as the module `here`."""
    flags = ["-S"] if sys.flags.no_site else []  # it must import what this process imports
    done = subprocess.run(
        [sys.executable, *flags, "-c", f"import test_determinism as here\n{code}"],
        env=os.environ | environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    return done.stdout


def with_threads(count: int, function: Callable[[], Any]) -> Any:
    before = eq.get_num_threads()
    eq.set_num_threads(count)
    try:
        return function()
    finally:
        eq.set_num_threads(before)


def test_repeated_runs() -> None:
    wanted = answers()
    assert answers() == wanted
    assert with_threads(4, answers) == wanted


SETTINGS = [
    {"EXACTQAT_ISA": isa, "EXACTQAT_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
    for isa in cpu.INSTRUCTION_SETS
    for threads, seed in (("1", "0"), ("3", "4242"))
]


@pytest.mark.slow
@pytest.mark.parametrize("environment", SETTINGS, ids=lambda e: f"{e['EXACTQAT_ISA']}-{e['EXACTQAT_NUM_THREADS']}")
def test_other_processes(environment: dict[str, str]) -> None:
    code = "print(here.cpu.kernels.__name__, here.eq.get_num_threads(), *here.answers(), sep='\\n')"
    said = in_process(code, **environment)
    module, threads, *theirs = said.splitlines()
    assert module == f"exactqat.operators.cpu._{environment['EXACTQAT_ISA']}"
    assert threads == environment["EXACTQAT_NUM_THREADS"]
    ours = "\n".join(answers()).splitlines()
    assert theirs == ours


def placed(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins `offset` bytes into a cache line, as memory that kernels take."""
    buffer = np.zeros(array.nbytes + 128, np.uint8)
    begin = -buffer.ctypes.data % 64 + offset
    view = buffer[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def memory(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [array.view(np.uint16) if array.itemsize == 2 else array for array in arrays]


@lru_cache
def alignable(op: Operator) -> list[tuple[list[np.ndarray], dict[str, Any]]]:
    """Operands and attributes of three calls of some size that succeed."""
    calls: list[tuple[list[np.ndarray], dict[str, Any]]] = []
    case = 0
    while len(calls) < 3:
        call = fuzz.generate(fuzz.Random(21, case), op)
        case += 1
        if call.flaw or "numbers" in call.layouts.values():
            continue
        operands = [np.array(v, v.dtype.newbyteorder("="), order="C") for v in call.operands.values()]
        if not 30 < max(a.size for a in operands) < 5000:
            continue
        with contextlib.suppress(ValueError):
            results = op(**call.operands, **call.attributes)
            first = results[0] if isinstance(results, tuple) else results
            if first.size > 30:
                calls.append((operands, op.bind((), {**call.operands, **call.attributes})[1]))
    return calls


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
@pytest.mark.parametrize("name", fuzz.FUZZED)
def test_alignment(name: str, isa: str) -> None:
    """Operands and results at every 4 bytes (every element, if it is longer) of a cache line, each somewhere else."""
    for operands, attributes in alignable(OPERATORS[name]):
        specs = tuple(TensorSpec(a.shape, a.dtype.name) for a in operands)
        lowered = OPERATORS[name].lower(specs, tuple(attributes.items()))
        plan = cpu.plan(cpu.load(isa), specs, lowered)
        wanted = None
        for step in range(16):
            arrays = []
            for i, array in enumerate(operands):
                arrays.append(placed(array, (step + 3 * i) % 16 * 4 // array.itemsize * array.itemsize))
            for i, empty in enumerate(unwritten(lowered, operands)):
                arrays.append(placed(empty, (step + 5 * i) % 16 * 4 // empty.itemsize * empty.itemsize))
            plan(*memory(arrays))
            digest = digest_of(arrays[len(operands) :])
            wanted = wanted or digest
            assert digest == wanted, f"offset {4 * step}, shapes {[list(a.shape) for a in operands]}"


def test_concurrent_calls() -> None:
    """16 threads, all calls in an order of their own, while the number of threads that kernels use changes."""
    wanted = answers()
    errors: list[str] = []
    start = threading.Barrier(16)

    def work(seed: int) -> None:
        order = list(range(len(wanted)))
        random.Random(seed).shuffle(order)
        start.wait()
        for done, i in enumerate(order):
            if seed == 0 and done % 20 == 0:
                eq.set_num_threads(1 + done // 20 % 3)
            got = answer(calls()[i])
            if got != wanted[i]:
                errors.append(f"{got}, alone {wanted[i]}\n{calls()[i]}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]

    def run_all() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with_threads(2, run_all)
    assert not errors, f"{len(errors)} results differ, the first: {errors[0]}"


def numbered_answer(number: int) -> str:
    return answer(calls()[number])


def child_is_right(wanted: list[str]) -> bool:
    """Forks; the child answers all calls again."""
    process = os.fork()
    if process == 0:
        os._exit(0 if answers() == wanted else 1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def forks() -> None:
    """Run by `test_fork` in a process of its own, so that a hang is cut short and no other library minds the fork."""
    eq.set_num_threads(3)
    wanted = answers()  # starts the threads that kernels use
    assert child_is_right(wanted), "differs after os.fork"
    assert answers() == wanted, "differs in the parent of a fork"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(numbered_answer, range(len(wanted)), chunksize=20) == wanted, "differs in a forked pool"

    stop = threading.Event()
    large = calls()[-1]

    def keep_kernels_busy() -> None:
        while not stop.is_set():
            answer(large)

    busy = threading.Thread(target=keep_kernels_busy)
    busy.start()
    try:
        for _ in range(5):
            assert child_is_right(wanted), "differs after a fork in the middle of a call"
    finally:
        stop.set()
        busy.join()
    print("all right")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_fork() -> None:
    assert in_process("here.forks()") == "all right\n"


def denormal_arithmetic() -> list[bytes]:
    """Bits of denormal operands and results in NumPy's own arithmetic, in this thread. (`==` flushes too.)"""
    bits = []
    for dtype, denormal, normal in DENORMALS:
        bits += [(denormal * dtype(2)).tobytes(), (normal / dtype(4)).tobytes(), (normal - denormal).tobytes()]
    return bits


DENORMALS = [(t, np.full(67, np.finfo(t).tiny / 4), np.full(67, np.finfo(t).tiny)) for t in (np.float32, np.float64)]
UNDISTURBED = denormal_arithmetic()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
def test_denormals_of_the_caller_are_left_alone(isa: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels flush denormals; the caller's arithmetic must not, whether a call succeeds or is refused halfway."""
    module = cpu.load(isa)
    before = module.thread_count()
    module.set_thread_count(threads)
    cpu.forget_plans()
    monkeypatch.setattr(cpu, "kernels", module)
    assert bytes(len(UNDISTURBED[0])) not in UNDISTURBED
    assert denormal_arithmetic() == UNDISTURBED
    try:
        for call in calls():
            answer(call)
            assert denormal_arithmetic() == UNDISTURBED, call
        for size in (1, 100_000):
            x = np.linspace(-1, 1, size, dtype=np.float32)
            with pytest.raises(ValueError, match="Invalid range"):
                eq.raw_ops.QuantizeAndDequantizeV2(input=x, input_min=1.0, input_max=-1.0, range_given=True)
            assert denormal_arithmetic() == UNDISTURBED
    finally:
        cpu.forget_plans()
        module.set_thread_count(before)
