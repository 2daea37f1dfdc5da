# SPDX-License-Identifier: Apache-2.0
"""Forked children, limits of the system and the end of the interpreter: no call hangs or ends the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRELUDE = """
import os, resource, signal, sys, threading, time
import numpy as np
x = np.linspace(-9, 9, 1_000_000, dtype=np.float32).reshape(1000, 1000)
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


FORK = """
child = os.fork()
if child == 0:
    signal.alarm(30)  # what hangs dies of it
    import exactqat as eq
    for _ in range(3): eq.fake_quant_with_min_max_args(x)
    if "torch" in sys.modules:
        for _ in range(3): eq.fake_quant_with_min_max_args(torch.from_numpy(x))
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, status
"""
BEFORE = {
    "nothing was called": "import exactqat",
    "a large call": "import exactqat as eq; eq.fake_quant_with_min_max_args(x)",
    "PyTorch's threads": (
        "import torch, exactqat as eq; eq.fake_quant_with_min_max_args(torch.ones(3)); torch.ones(4000, 1000).add(1)"
    ),
    "PyTorch's threads, exactqat afterwards": "import torch; torch.ones(4000, 1000).add(1)",
}


@pytest.mark.parametrize("before", BEFORE)
def test_forked_children(before: str) -> None:
    if "torch" in BEFORE[before]:
        pytest.importorskip("torch")
    run(BEFORE[before] + FORK)


@pytest.mark.slow
def test_a_process_pool() -> None:
    pytest.importorskip("torch")
    run("""
from concurrent.futures import ProcessPoolExecutor
import multiprocessing, torch, exactqat as eq
eq.fake_quant_with_min_max_args(torch.ones(1000, 1000)); torch.ones(4000, 1000).add(1)
wanted = eq.fake_quant_with_min_max_args(x)
with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
    for found in pool.map(eq.fake_quant_with_min_max_args, [x] * 4, timeout=60):
        assert (found == wanted).all()
""")


LIMITED = """
import exactqat as eq
from exactqat.operators import cpu
result, wanted = np.empty_like(x), np.concatenate([eq.fake_quant_with_min_max_args(row[None]) for row in x])
{limit}
eq.fake_quant_with_min_max_args(x, out=result)
assert (result == wanted).all()
if {torch}:
    import torch
    eq.fake_quant_with_min_max_args(torch.from_numpy(x), out=torch.from_numpy(result))
    assert (result == wanted).all()
print(cpu.get_num_threads(), len(os.listdir("/proc/self/task")))
"""
LIMITS = {
    "many": "cpu.set_num_threads(100000)",
    "memory": """
cpu.set_num_threads(100000)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20),) * 2)
""",
    "processes": """
if os.getuid() == 0: os.setuid(65534)  # root has no such limit
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
""",
}


@pytest.mark.parametrize("limit", LIMITS)
def test_threads_that_cannot_be_made(limit: str) -> None:
    asked, threads = run(LIMITED.format(limit=LIMITS[limit], torch=False)).split()
    assert int(threads) <= max(64, os.cpu_count() or 1) + 1
    assert limit == "processes" or asked == "100000"


def test_threads_that_pytorch_cannot_make() -> None:
    """Its OpenMP would end the process."""
    pytest.importorskip("torch")
    limit = "import torch; eq.fake_quant_with_min_max_args(torch.ones(3))\n" + LIMITS["processes"]
    run(LIMITED.format(limit=limit, torch=True))


@pytest.mark.parametrize("asked", ["2147483647", "99999999999999999999", "0", "-1", "some"])
def test_threads_asked_for_by_the_environment(asked: str) -> None:
    _, threads = run(LIMITED.format(limit="", torch=False), EXACTQAT_NUM_THREADS=asked).split()
    assert int(threads) <= max(64, os.cpu_count() or 1) + 1


def test_daemon_threads_at_the_end_of_the_interpreter() -> None:
    """In a large call, in the first call of a kind, or on the way from one to the next."""
    for _ in range(3):
        run("""
import exactqat as eq
image, filter = np.ones((1, 5, 5, 2), np.float32), np.ones((2, 2, 2, 1), np.float32)
def work(i):
    n = 0
    while True:
        n += 1
        eq.fake_quant_with_min_max_args(x[:20], -1 - n % 5000 if i % 2 else -1, 1)
        eq.raw_ops.DepthwiseConv2dNative(input=image, filter=filter, strides=[1, 1, 1, 1], padding="SAME")
for i in range(6): threading.Thread(target=work, args=(i,), daemon=True).start()
time.sleep(0.2)
""")
