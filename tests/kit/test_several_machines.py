# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/several-machines.md, in two processes or on two devices: CPUs, and GPUs where there are two.

How close several processes come to one is in `test_distributed`, what they exchange in `test_several_processes`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import virtual_devices

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "examples" / "several"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# The package that a program needs, what starts it, and how many processes deliver.
ENGINES = {
    "ddp": ("torch", TORCHRUN, 2),
    "fsdp": ("torch", TORCHRUN, 2),
    "with_accelerate": ("accelerate", TORCHRUN, 2),
    "with_lightning": ("lightning", [], 2),
    "with_ray": ("ray", [], 2),
    "jax_sharded": ("optax", [], 1),
    "jax_processes": ("optax", [], 2),
    "keras_parallel": ("keras", [], 1),
}
RESULT = re.compile(r"process (\d): (0\.\d+) right, 0 of (\d+) integers differ, file (\w{64})")


def port() -> int:
    """One that is free."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def run(name: str, folder: Path, **environment: str) -> list[tuple[str, ...]]:
    """What the processes of a program print in the end; where each takes all cards that it sees, it sees one."""
    needs, start, count = ENGINES[name]
    pytest.importorskip(needs)
    command, place = [sys.executable, *start, str(PROGRAMS / f"{name}.py")], f"127.0.0.1:{port()}"
    environment |= {"KERAS_BACKEND": "jax", "RAY_DEDUP_LOGS": "0"}  # the processes' lines are alike
    numbers = ([place, "2", "0"], [place, "2", "1"]) if name == "jax_processes" else ([],)
    processes = [
        subprocess.Popen(
            [*command, *arguments], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | ({"CUDA_VISIBLE_DEVICES": str(number)} if len(numbers) > 1 else {}) | environment,
        )
        for number, arguments in enumerate(numbers)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)[-6000:]
    results = sorted(set(RESULT.findall("\n".join(outputs))))  # Ray prints a line twice
    assert [number for number, *_ in results] == [str(number) for number in range(count)], outputs
    return results


def check(results: list[tuple[str, ...]]) -> None:
    """All processes have one file, and a network that has learned."""
    assert len({digest for *_, digest in results}) == 1
    assert all(float(accuracy) > 0.6 and int(values) > 100_000 for _, accuracy, values, _ in results)


@cache
def on_cpus(name: str) -> list[tuple[str, ...]]:
    devices = {"XLA_FLAGS": ""} if name == "jax_processes" else virtual_devices.environment(2)
    cpus = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        return run(name, Path(folder), **cpus, **devices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_on_cpus(name: str) -> None:
    check(on_cpus(name))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("ddp", "fsdp"), ("jax_sharded", "jax_processes")])
def test_the_same_training_in_two_ways_delivers_the_same_file(names: tuple[str, str]) -> None:
    check([result for name in names for result in on_cpus(name)])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ENGINES)
def test_on_gpus(name: str, tmp_path: Path) -> None:
    """With NCCL; JAX' frozen networks stay fake-quantized on several of them, and the files are exact nonetheless."""
    if "jax" in name or "keras" in name:
        plugins = [importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)]
        if not any(plugins):
            pytest.skip("needs JAX for CUDA")
    check(run(name, tmp_path))


def test_the_page_names_each_program() -> None:
    page = (ROOT / "docs" / "several-machines.md").read_text()
    programs = {path.stem for path in PROGRAMS.glob("*.py")} - {"digits"}
    assert programs == set(ENGINES) and all(f"`{name}.py`" in page for name in programs)
