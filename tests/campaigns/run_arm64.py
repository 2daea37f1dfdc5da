# SPDX-License-Identifier: Apache-2.0
"""The tests that need only NumPy on an emulated ARM64 processor, with `_neon` and with `_baseline`.

    python tests/campaigns/run_arm64.py                       all of them with both instruction sets
    python tests/campaigns/run_arm64.py --isa neon TEST ...   these tests, or what else pytest takes, with one

Everything is built here by a cross compiler and runs under QEMU's user-mode emulation, in the Python that
`python tests/campaigns/set_up_arm64.py` sets up. What is built goes to build/arm64. Where the compiler or the
emulation is missing, a sentence says what installs it, and nothing is run. The status is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from set_up_arm64 import download, unpack, unpack_wheels

from exactqat.deploy.runtimes import emulation

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-g++"
INSTRUCTION_SETS = ("neon", "baseline")
# What needs NumPy only: kernels, reference, goldens, and what the NumPy frontend promises.
TESTS = (
    "smallest_normal", "kernels", "halves", "fuzz", "determinism", "reference", "arithmetic", "bits",
    "elementwise_shapes", "depthwise_shapes", "batch_norm_layouts", "fake_quant_rows", "rounded_sums",
    "past_the_cache", "namespaces", "signatures", "limits", "simulate", "engine",
)  # fmt: skip
WHEELS = ("pytest", "iniconfig", "pluggy", "packaging", "pygments", "hypothesis", "sortedcontainers")
# Programs that the emulated Python starts are started by the system: `sys.executable` is a script that emulates again.
SITE = """\
import os
import sys

sys.executable = os.environ["EXACTQAT_ARM64_PYTHON"]
"""


def missing() -> str | None:
    """What is needed and not there, and what installs it."""
    if shutil.which(COMPILER) is None:
        return f"there is no {COMPILER}; on Debian this installs it: apt-get install g++-aarch64-linux-gnu"
    if not emulation.is_set_up():
        return f"the ARM64 emulation is not set up; run: {emulation.SET_UP}"
    for tool in ("cmake", "ninja"):
        if shutil.which(tool, path=tools()) is None:
            return f"there is no {tool}; this installs it: python -m pip install nanobind cmake ninja"
    return None


def tools() -> str:
    """Where programs are looked for: beside this Python first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def set_up(folder: Path) -> None:
    """What the emulated Python needs besides: its headers, and pytest."""
    python = emulation.versions()["python"]
    if (folder / "ready.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        unpack(download(Path(work) / "headers", "arm64", [f"lib{python}-dev"]), folder / "headers")
        unpack_wheels(Path(work) / "wheels", python.removeprefix("python"), WHEELS, folder / "pytest")
    (folder / "pytest" / "sitecustomize.py").write_text(SITE, "utf-8")
    (folder / "ready.json").write_text(json.dumps({"python": python}) + "\n", "utf-8")


def build(folder: Path) -> None:
    """The package for ARM64. Only what changed is compiled again."""
    version = emulation.versions()["python"].removeprefix("python")
    headers, soabi = folder / "headers" / "usr" / "include", f"cpython-{version.replace('.', '')}-aarch64-linux-gnu"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder / "cmake"), "-G", "Ninja"]
    configure += ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_INCLUDE_DIR={headers / f'python{version}'}"]
    configure += [f"-DSKBUILD_SOABI={soabi}", f"-DCMAKE_CXX_FLAGS=-I{headers}"]
    environment = os.environ | {"PATH": tools()}
    subprocess.run(configure, check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder / "cmake")], check=True, env=environment)
    leave = shutil.ignore_patterns("*.cpp", "*.h", "*.so", "__pycache__")
    shutil.copytree(ROOT / "src" / "exactqat", folder / "site" / "exactqat", ignore=leave, dirs_exist_ok=True)
    install = ["cmake", "--install", str(folder / "cmake"), "--prefix", str(folder / "site")]
    subprocess.run(install, check=True, env=environment, stdout=subprocess.DEVNULL)


def emulated(folder: Path, cpu: str) -> Path:
    """A script that is the emulated Python."""
    here, content = emulation.folder(), emulation.versions()
    python = here / "system" / "usr" / "bin" / content["python"]
    script = folder / f"python-{cpu}"
    command = shlex.join([content["emulator"], "-L", str(here / "cpus" / cpu), str(python)])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n', "utf-8")
    script.chmod(0o755)
    return script


def environment(folder: Path, python: Path, isa: str, cpu: str) -> dict[str, str]:
    here = emulation.folder()
    left_out = ("PYTHON", "LD_", "QEMU_", "EXACTQAT_")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)} | {
        "QEMU_CPU": emulation.CPUS[cpu],
        "PYTHONHOME": str(here / "system" / "usr"),
        "PYTHONPATH": os.pathsep.join(map(str, (folder / "site", folder / "pytest", here / "site"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "EXACTQAT_ARM64_PYTHON": str(python),
        "EXACTQAT_ISA": isa,
    }


def run(folder: Path, isa: str, cpu: str, asked: list[str], jobs: int) -> bool:
    """Runs tests with one instruction set, several files at a time. Returns whether all passed."""
    python = emulated(folder, cpu)
    others = [other for other in INSTRUCTION_SETS if other != isa]
    # Tests of one module come with every module's name; the other ones' are run when it is their turn.
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-rs", "--tb=short"]
    command += ["-k", " and ".join(f"not {other}" for other in others)]
    calls = (
        [asked]
        if asked
        else [[str(path.relative_to(ROOT))] for name in TESTS for path in (ROOT / "tests").glob(f"*/test_{name}.py")]
    )

    def one(tests: list[str]) -> tuple[list[str], int, str, float]:
        begin = time.monotonic()
        result = subprocess.run(
            [*command, *tests],
            cwd=ROOT,
            env=environment(folder, python, isa, cpu),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return tests, result.returncode, result.stdout, time.monotonic() - begin

    total: Counter[str] = Counter()
    good, begin = True, time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        for tests, status, output, seconds in pool.map(one, calls):
            last = output.strip().splitlines()[-1] if output.strip() else "no output"
            total.update(
                {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
            )
            print(f"_{isa} {' '.join(tests)}: {last} [{seconds:.0f} s]", flush=True)
            if status != 0 or "skipped" in last:
                print(output, flush=True)
            good &= status == 0
    summary = ", ".join(f"{count} {kind}" for kind, count in total.items())
    print(f"_{isa} on an emulated {cpu}: {summary} in {time.monotonic() - begin:.0f} s", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="The tests that need only NumPy on an emulated ARM64 processor.")
    parser.add_argument("--isa", choices=INSTRUCTION_SETS, action="append", help="only this instruction set")
    parser.add_argument("--cpu", choices=list(emulation.CPUS), default=emulation.DEFAULT_CPU)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "arm64", help="where it is built")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="files of tests at a time")
    arguments, tests = parser.parse_known_args()
    if lack := missing():
        print(f"ARM64 is left out: {lack}")
        return 0
    folder = arguments.folder.resolve()
    set_up(folder)
    build(folder)
    good = [run(folder, isa, arguments.cpu, tests, arguments.jobs) for isa in arguments.isa or INSTRUCTION_SETS]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
