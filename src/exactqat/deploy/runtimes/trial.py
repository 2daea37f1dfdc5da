# SPDX-License-Identifier: Apache-2.0
"""Runs a file in another process first: runtimes trust what they read, and a damaged file can crash them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

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


class RuntimeRefusal(RuntimeError):
    """The runtime rejects a file: it lacks an operator, or supports it only for other shapes, or the file is
    damaged."""


def try_in_a_child(function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> str:
    """Calls a function of a module in another process. Its result or exception is ignored, but the error reports what
    it wrote to standard error.

    seconds: time limit for the process; None: no limit.

    Raises:
        RuntimeRefusal: the process crashed, or was terminated.
    """
    given = pickle.dumps(sys.path) + pickle.dumps((function, arguments))
    command = [sys.executable, "-P", "-c", _PROGRAM]
    pipe = subprocess.PIPE
    # In a session of its own, so that its forks end with it.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as child:
        try:
            _, written = child.communicate(given, timeout=seconds)
        except BaseException as error:
            _end(child)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeRefusal(f"it takes longer than {seconds:g} seconds") from None
            raise
    said = written.decode(errors="replace").strip()
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise RuntimeRefusal(f"the runtime crashed on it ({name}), so it is damaged")
    if child.returncode > 0:
        raise RuntimeRefusal(f"the runtime could not be run in another process: {''.join(said.splitlines()[-1:])}")
    return said


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminates a process, and on POSIX what it started."""
    if hasattr(os, "killpg"):
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
