# SPDX-License-Identifier: Apache-2.0
"""The runtime of ARM phones on another processor: LiteRT's aarch64 wheel under QEMU's user-mode emulation.

`tests/campaigns/set_up_arm64.py` of the repository sets it up. Then `deploy.verify` accepts the profile "xnnpack-arm64"
on any machine, and `exactqat verify DIR --device xnnpack-arm64` compares a job's files.

XNNPACK selects its kernels by processor, so several are emulated (`CPUS`): one per family of int8 product instructions.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .emulated_runtime import read, write
from .trial import RuntimeRefusal

SET_UP = "python tests/campaigns/set_up_arm64.py, in exactqat's repository"
# What the emulator calls them, one for each way in which XNNPACK multiplies int8: smlal, sdot, smmla, smopa.
CPUS = {"cortex-a53": "cortex-a53", "cortex-a76": "cortex-a76", "neoverse-v1": "max,sme=off", "sme": "max"}
DEFAULT_CPU = "cortex-a76"


def folder() -> Path:
    """Where the emulation is or will be installed: EXACTQAT_ARM64, or exactqat/arm64 in the user's cache."""
    named = os.environ.get("EXACTQAT_ARM64")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "exactqat" / "arm64"


def is_set_up() -> bool:
    """Whether the emulation can be used."""
    return (folder() / "ready.json").is_file()


def versions() -> dict[str, str]:
    """Versions of the runtime and of the emulator."""
    content: dict[str, str] = json.loads((folder() / "ready.json").read_text("utf-8"))
    return content


def cpu_named(name: str | None) -> str:
    """The processor by its name in `CPUS`; EXACTQAT_ARM64_CPU or the default if none is given.

    Raises:
        ValueError: no processor has that name.
    """
    name = name or os.environ.get("EXACTQAT_ARM64_CPU") or DEFAULT_CPU
    if name not in CPUS:
        raise ValueError(f"the emulated processor must be one of {', '.join(CPUS)}, got {name!r}")
    return name


# --- running ----------------------------------------------------------------------------------------------------------


class _Process:
    """A running emulated processor, with the models it has loaded."""

    def __init__(self, cpu: str) -> None:
        here, content = folder(), versions()
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_", "QEMU_"))
        } | {
            "QEMU_CPU": CPUS[cpu],
            "PYTHONHOME": str(here / "system" / "usr"),
            "PYTHONPATH": str(here / "site"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        python = here / "system" / "usr" / "bin" / content["python"]
        script = Path(__file__).with_name("emulated_runtime.py")
        command = [content["emulator"], "-L", str(here / "cpus" / cpu), str(python), "-P", str(script)]
        self.cpu = cpu
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=environment
        )
        self.numbers = itertools.count()

    def ask(self, request: str, model: int, arrays: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        """Sends one request and returns its answer.

        Raises:
            RuntimeError: the runtime refuses, with its message, or has died.
        """
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            write(self.child.stdin, {"request": request, "model": model}, list(arrays))
            message = read(self.child.stdout)
        except (BrokenPipeError, EOFError):
            message = None
        if message is None:
            status = self.child.wait()
            _PROCESSES.pop(self.cpu, None)
            raise RuntimeError(
                f"the runtime died on the emulated {self.cpu} (status {status}): {self.printed()[-500:]}"
            )
        header, results = message
        if "error" in header:
            raise RuntimeError(header["error"])
        return results

    def printed(self) -> str:
        """What the runtime has printed so far."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def end(self) -> None:
        if self.child.stdin is not None:
            self.child.stdin.close()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()


_PROCESSES: dict[str, _Process] = {}


def _process(cpu: str) -> _Process:
    if cpu not in _PROCESSES:
        _PROCESSES[cpu] = _Process(cpu)
        atexit.register(_PROCESSES[cpu].end)
    return _PROCESSES[cpu]


def answers(cpu: str) -> None:
    """Starts the emulated processor and waits for it.

    Raises:
        RuntimeError: the process dies.
    """
    _process(cpu).ask("drop", -1)


class EmulatedInterpreter:
    """LiteRT with one model on an emulated processor; arrays are in the file's order."""

    def __init__(self, content: bytes) -> None:
        """
        Raises:
            RuntimeError: the emulation is not set up, or LiteRT or XNNPACK rejects the file.
        """
        if not is_set_up():
            raise RuntimeError(f"the ARM64 emulation is not set up; run: {SET_UP}")
        self.process = _process(cpu_named(None))
        self.number = next(self.process.numbers)
        self.process.ask("load", self.number, [np.frombuffer(content, np.uint8)])

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        try:
            results = self.process.ask("run", self.number, [np.ascontiguousarray(array) for array in arrays])
        except RuntimeError as error:
            raise RuntimeRefusal(f"LiteRT rejects the file on ARM64: {error}") from error
        if "XNNPACK delegate" not in self.process.printed():
            raise RuntimeError("LiteRT runs without XNNPACK on the emulated processor, unlike on any phone")
        return results

    def __del__(self) -> None:
        process = getattr(self, "process", None)
        if process is not None and process.child.poll() is None and not sys.is_finalizing():
            process.ask("drop", self.number)
