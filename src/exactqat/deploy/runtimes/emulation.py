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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .emulated_runtime import read, write

SET_UP = "python tests/campaigns/set_up_arm64.py, in exactqat's repository"
_BASE = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
_DOT = f"{_BASE} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"


@dataclass(frozen=True)
class Cpu:
    """A processor for the emulator, and how Linux describes it.

    Attributes:
        model: the emulator's name for it.
        part: Arm's part number of the core.
        features: as in /proc/cpuinfo.
    """

    model: str
    part: str
    features: str


# By the instructions that XNNPACK multiplies int8 with: smlal, sdot, smmla, smopa.
CPUS = {
    "cortex-a53": Cpu("cortex-a53", "0xd03", _BASE),
    "cortex-a76": Cpu("cortex-a76", "0xd0b", _DOT),
    "neoverse-v1": Cpu("max,sme=off", "0xd44", f"{_DOT} i8mm bf16"),
    "sme": Cpu("max", "0xd44", f"{_DOT} i8mm bf16"),
}
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
            "QEMU_CPU": CPUS[cpu].model,
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

    def ask(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> tuple[dict[str, Any], list[Any]]:
        """Sends one request and returns its answer.

        Raises:
            RuntimeError: the runtime refuses, with its message, or has died.
        """
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            write(self.child.stdin, dict(header), list(arrays))
            message = read(self.child.stdout)
        except (BrokenPipeError, EOFError):
            message = None
        if message is None:
            status = self.child.wait()
            _PROCESSES.pop(self.cpu, None)
            raise RuntimeError(
                f"the runtime died on the emulated {self.cpu} (status {status}): {self.printed()[-500:]}"
            )
        if "error" in message[0]:
            raise RuntimeError(message[0]["error"])
        return message

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
    _process(cpu).ask({"request": "drop", "model": -1})


class EmulatedInterpreter:
    """LiteRT with one model on an emulated processor: the part of its interpreter's interface used here."""

    def __init__(self, content: bytes, reference: bool = False, cpu: str | None = None) -> None:
        """
        Args:
            reference: run the reference kernels.

        Raises:
            RuntimeError: the emulation is not set up, or LiteRT or XNNPACK rejects the file.
        """
        if not is_set_up():
            raise RuntimeError(f"the ARM64 emulation is not set up; run: {SET_UP}")
        self.process = _process(cpu_named(cpu))
        self.number = next(self.process.numbers)
        header = {"request": "load", "model": self.number, "reference": reference}
        details, _ = self.process.ask(header, [np.frombuffer(content, np.uint8)])
        self.inputs: list[dict[str, Any]] = details["inputs"]
        self.outputs: list[dict[str, Any]] = details["outputs"]

    def run(self, inputs: Mapping[int, np.ndarray], outputs: Sequence[int]) -> list[np.ndarray]:
        """Codes of the tensors `outputs` for those of `inputs`, by tensor index."""
        header = {"request": "run", "model": self.number, "inputs": list(inputs), "outputs": list(outputs)}
        return self.process.ask(header, list(inputs.values()))[1]

    def delegated(self) -> bool:
        """Whether XNNPACK was used in this process."""
        return "XNNPACK delegate" in self.process.printed()

    def __del__(self) -> None:
        process = getattr(self, "process", None)
        if process is not None and process.child.poll() is None and not sys.is_finalizing():
            process.ask({"request": "drop", "model": self.number})
