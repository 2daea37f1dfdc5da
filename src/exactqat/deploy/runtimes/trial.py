# SPDX-License-Identifier: Apache-2.0
"""Runs a file in another process first: runtimes trust what they read, and a damaged file can crash them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from ...kit.display import shortened

# The child can import what the parent can; -P: nothing else from the working directory. It gets half of the machine's
# memory (or 4 GiB of addresses, as libraries reserve many and fill few), so that a small file that asks for all of it
# ends this process and no other.
_PROGRAM = """
import os, pickle, sys
try:
    import resource
    half = max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, 4 << 30)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not 0 <= soft <= half:  # -1: no limit
        resource.setrlimit(resource.RLIMIT_AS, (half, hard))
except (ImportError, AttributeError, ValueError, OSError):
    pass  # not on Windows
sys.path[:] = pickle.load(sys.stdin.buffer)
function, arguments = pickle.load(sys.stdin.buffer)
try:
    function(*arguments)
except MemoryError:
    sys.exit("it requests more than half of this machine's memory")
except Exception:
    pass
"""


# What a process answers, as JSON has it.
Answer = Any


class RuntimeRefusal(RuntimeError):
    """The runtime rejects a file: it lacks an operator, or supports it only for other shapes, or crashes on it."""


def try_in_a_child(function: Callable[..., object], *arguments: object, seconds: float | None = None) -> str:
    """Calls a function of a module in another process. Its result or exception is ignored, but the error reports what
    it wrote to standard error.

    seconds: time limit for the process; None: no limit.

    Raises:
        RuntimeRefusal: the process crashed, or was terminated.
    """
    payload = pickle.dumps(sys.path) + pickle.dumps((function, arguments))
    command = [sys.executable, "-P", "-c", _PROGRAM]
    pipe = subprocess.PIPE
    # In a session of its own, so that its forks end with it.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as child:
        try:
            _, written = child.communicate(payload, timeout=seconds)
        except BaseException as error:
            if hasattr(os, "killpg"):  # on POSIX with what it started
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeRefusal(f"it takes longer than {seconds:g} seconds") from None
            raise
    said = written.decode(errors="replace").strip()
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise RuntimeRefusal(f"the runtime crashed on it ({name})")
    if child.returncode > 0:
        raise RuntimeRefusal(f"the runtime could not be run in another process: {''.join(said.splitlines()[-1:])}")
    return said


def answer_of(function: Callable[..., object], *arguments: object, seconds: float | None = None) -> Answer:
    """Calls a function of a module in another process, and returns what it returned, as JSON has it.

    Raises:
        RuntimeRefusal: as `try_in_a_child`, or what the function raised (RuntimeError, ValueError, ImportError), on one
            line.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "answer.json")
        said = try_in_a_child(_answer, path, function, arguments, seconds=seconds)
        if not os.path.exists(path):
            lines = [line for line in said.splitlines() if line.strip()] or ["no reason given"]
            raise RuntimeRefusal(_on_one_line(lines[-1]))
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    if "error" in content:
        raise RuntimeRefusal(_on_one_line(content["error"]))
    return content["answer"]


def _answer(path: str, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        content = {"answer": function(*arguments)}
    except (RuntimeError, ValueError, ImportError) as error:
        content = {"error": str(error)}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def _on_one_line(text: str) -> str:
    return shortened(" ".join(text.split()), 300)
