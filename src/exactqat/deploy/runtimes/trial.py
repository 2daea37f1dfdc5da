# SPDX-License-Identifier: Apache-2.0
"""Runs a file in another process first: runtimes trust what they read, and a damaged file can crash them."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from ...kit.display import shortened

# The child can import what the parent can; -P: nothing else from the working directory. It gets half of the machine's
# memory (or 4 GiB of addresses, as libraries reserve many and fill few), so that a small file that asks for all of it
# ends this process and no other.
_PROGRAM = """
import importlib, io, os, pickle, sys
def work(call):
    try:
        import resource
        half = max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, 4 << 30)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if not 0 <= soft <= half:  # -1: no limit
            resource.setrlimit(resource.RLIMIT_AS, (half, hard))
    except (ImportError, AttributeError, ValueError, OSError):
        pass  # not on Windows
    function, arguments = pickle.load(call)
    try:
        function(*arguments)
    except MemoryError:
        sys.exit("it requests more than half of this machine's memory")
    except Exception:
        pass
sys.path[:] = pickle.load(sys.stdin.buffer)
"""
# Once, or again and again in forks; each has a file for what it says.
_ONCE = "work(sys.stdin.buffer)"
_AGAIN = """
while True:
    try:
        module, said, call = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    importlib.import_module(module)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(said, os.O_WRONLY), 2)
        work(io.BytesIO(call))
        break
    os.setpgid(child, child)  # here too: whoever reads its number may end its group at once
    os.write(1, b"%d " % child)
    os.write(1, b"%d " % os.waitpid(child, 0)[1])
"""


# What a process answers, as JSON has it.
Answer = Any


class RuntimeRefusal(RuntimeError):
    """The runtime rejects a file: it lacks an operator, or supports it only for other shapes, or crashes on it."""


@dataclass
class _Parent:
    """A process that forks; it starts with the first call."""

    process: subprocess.Popen[bytes] | None = None

    def call(self, function: Callable[..., object], arguments: object, seconds: float | None) -> tuple[int, bytes]:
        """The exit status of a fork that called the function, and what it wrote to standard error."""
        if self.process is None:
            command, pipe = [sys.executable, "-P", "-c", _PROGRAM + _AGAIN], subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
            pickle.dump(sys.path, cast(Any, self.process.stdin))
        stdin, stdout = cast(Any, self.process.stdin), cast(Any, self.process.stdout).fileno()
        with tempfile.NamedTemporaryFile() as said:
            pickle.dump((function.__module__, said.name, pickle.dumps((function, arguments))), stdin)
            stdin.flush()
            answer = os.read(stdout, 64).split()  # the fork, and its status if it has ended
            try:
                if len(answer) == 1 and not select.select([stdout], [], [], seconds)[0]:
                    raise subprocess.TimeoutExpired(function.__name__, cast(float, seconds))
                answer += os.read(stdout, 64).split() if len(answer) == 1 else []
            except BaseException:
                os.killpg(int(answer[0]), signal.SIGKILL)
                os.read(stdout, 64)
                raise
            if len(answer) < 2:
                return 1, b"it could not be started"
            return os.waitstatus_to_exitcode(int(answer[1])), said.read()


_parent: ContextVar[_Parent | None] = ContextVar("parent", default=None)


@contextmanager
def forking() -> Iterator[None]:
    """While it lasts, processes of `try_in_a_child` are forks of one that has imported what they need: several then
    start in the time of one. Only on Linux, where what is imported survives a fork."""
    parent = _Parent()
    before = _parent.set(parent if sys.platform == "linux" else None)
    try:
        yield
    finally:
        _parent.reset(before)
        if parent.process is not None:
            parent.process.communicate()


def try_in_a_child(function: Callable[..., object], *arguments: object, seconds: float | None = None) -> str:
    """Calls a function of a module in another process. Its result or exception is ignored, but the error reports what
    it wrote to standard error.

    seconds: time limit for the process; None: no limit.

    Raises:
        RuntimeRefusal: the process crashed, or was terminated.
    """
    parent = _parent.get()
    try:
        status, written = (_started if parent is None else parent.call)(function, arguments, seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeRefusal(f"it takes longer than {seconds:g} seconds") from None
    said = written.decode(errors="replace").strip()
    if status < 0:
        raise RuntimeRefusal(f"the runtime crashed on it ({signal.Signals(-status).name})")
    if status > 0:
        raise RuntimeRefusal(f"the runtime could not be run in another process: {''.join(said.splitlines()[-1:])}")
    return said


def _started(function: Callable[..., object], arguments: object, seconds: float | None) -> tuple[int, bytes]:
    """As `_Parent.call`, in a process that is started for it."""
    payload = pickle.dumps(sys.path) + pickle.dumps((function, arguments))
    command = [sys.executable, "-P", "-c", _PROGRAM + _ONCE]
    pipe = subprocess.PIPE
    # In a session of its own, so that its forks end with it.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as child:
        try:
            _, written = child.communicate(payload, timeout=seconds)
        except BaseException:
            if hasattr(os, "killpg"):  # on POSIX with what it started
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()
            raise
    return child.returncode, written


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
