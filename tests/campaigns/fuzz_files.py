# SPDX-License-Identifier: Apache-2.0
"""Damaged .tflite files through `inspect`: refused in a sentence, or inspected.

    python tests/campaigns/fuzz_files.py --cases 20000 [--seed 1] [--first 5000] [--keep FOLDER]
    python tests/campaigns/fuzz_files.py --onnx FOLDER    .onnx files instead: this library's, and those of the folder

Each file goes through `inspect` and its text and JSON in a worker process with a limit of memory, which a supervisor
replaces if it dies or says nothing for a while. The processes that `inspect` starts for runtimes are forked from the
worker, which has all modules already; every `--plain`th case starts them as users do. Deaths, hangs, exceptions that
are no `Refusal` (or RuntimeError with a reason), and more than `MOST_MEMORY` are reported, with the file.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _tests_folder  # noqa: F401 - finds the modules of tests/
from damaged_files import cases, onnx_cases

from exactqat import qat
from exactqat.deploy import random_inputs
from exactqat.deploy.inspect import inspect
from exactqat.deploy.runtimes import trial
from exactqat.kit.device import Refusal

# Bytes: what the worker may use beside its modules, and what a process of a runtime may.
MOST_MEMORY, MOST_OF_A_CHILD = 512 << 20, 6 << 30
FINE = ("refused", "not simulated", "nothing compared", "inspected, equal")


def forked(function: Any, *arguments: Any, seconds: float | None = None) -> str:
    """As `try_in_a_child`, without the start of a new interpreter."""
    with tempfile.TemporaryFile() as written:
        child = os.fork()
        if child == 0:
            status = 0
            os.setsid()
            os.dup2(written.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_AS, (MOST_OF_A_CHILD, MOST_OF_A_CHILD))
            try:
                function(*pickle.loads(pickle.dumps(arguments)))
            except MemoryError:
                os.write(2, b"it requests too much memory\n")
                status = 1
            except Exception:  # noqa: BLE001, S110 - as there
                pass
            finally:
                os._exit(status)
        end = time.monotonic() + (1e9 if seconds is None else seconds)
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise trial.RuntimeRefusal(f"it takes longer than {seconds:g} seconds")
            time.sleep(0.002)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        written.seek(0)
        said = written.read().decode(errors="replace").strip()
    if status < 0:
        raise trial.RuntimeRefusal(f"the runtime crashed on it ({signal.Signals(-status).name})")
    if status:
        raise trial.RuntimeRefusal(f"the runtime could not be run in another process: {said.splitlines()[-1]}")
    return said


# Without forking.
IN_A_CHILD = trial.try_in_a_child


def fork_instead(yes: bool) -> None:
    """Whether processes of runtimes are forked."""
    for name in ("verify", "footprint", "runtimes.micro", "runtimes.trial"):
        module = importlib.import_module(f"exactqat.deploy.{name}")
        module.try_in_a_child = forked if yes else IN_A_CHILD  # type: ignore[attr-defined]


def import_runtimes(onnx: bool = False) -> None:
    """So that processes that are forked have them."""
    for module in ("onnx", "onnxruntime") if onnx else ("ai_edge_litert.interpreter", "tflite_micro"):
        importlib.import_module(module)


def prepare_to_fork() -> None:
    """From now on processes of runtimes are forked."""
    import_runtimes()
    fork_instead(True)


def drawn(seed: int, count: int, onnx: Path | None) -> Iterator[bytes]:
    """The files of a campaign; onnx: a folder of .onnx files, if it is about these."""
    return cases(seed, count) if onnx is None else onnx_cases(seed, count, sorted(onnx.glob("*.onnx")))


def inspected(content: bytes, folder: Path, seconds: float, onnx: bool) -> str:
    """What became of a file."""
    path = folder / f"damaged.{'onnx' if onnx else 'tflite'}"
    path.write_bytes(content)
    try:
        inspection = inspect(path, examples=1, seconds=seconds)
    except qat.UnsupportedOperator as error:  # a list of places
        return "refused" if str(error) else "refused without a sentence"
    except Refusal as error:
        return "refused" if str(error) and "\n" not in str(error) else "refused without a sentence"
    except RuntimeError as error:
        return f"not simulated: {error}"
    inspection.text()
    inspection.as_json()
    if not inspection.ran_on:
        return "nothing compared"
    return "inspected, equal" if inspection.equal else "inspected, differs"


def work(seed: int, first: int, count: int, seconds: float, plain: int, onnx: Path | None) -> None:
    """Runs cases in this process and prints what became of each."""
    random_inputs.MOST_TRIED = 8  # deaths are looked for, not inputs at which devices differ
    import_runtimes(onnx is not None)
    # What the interpreter of a runtime writes goes where its own errors go.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(drawn(seed, first + count, onnx)):
            if number < first:
                continue
            fork_instead(not plain or number % plain != 0)
            # Addresses; libraries take many already.
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + 2 * MOST_MEMORY, resource.RLIM_INFINITY))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            start = time.perf_counter()
            try:
                outcome = inspected(content, Path(folder), seconds, onnx is not None)
            except BaseException:  # noqa: BLE001 - what the campaign looks for
                outcome = f"traceback: {' '.join(traceback.format_exc().split())[-600:]}"
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            if grown > MOST_MEMORY:
                outcome = f"took {grown:,} bytes; {outcome}"
            whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            peak = 1024 * max(resource.getrusage(who).ru_maxrss for who in whose)
            print(f"{number}\t{time.perf_counter() - start:.2f}\t{peak}\t{outcome}", file=out, flush=True)


class Campaign:
    """Supervises workers and counts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.outcomes: Counter[str] = Counter()
        self.bad = 0
        self.slowest = 0.0
        # Bytes: what a process held at most, its modules among it.
        self.peak = 0

    def note(self, number: int, seconds: float, outcome: str) -> None:
        short = next((prefix for prefix in FINE if outcome.startswith(prefix)), None)
        self.outcomes[short or outcome.split(":")[0]] += 1
        self.slowest = max(self.slowest, seconds)
        if short is None or outcome.startswith("not simulated"):
            print(f"case {number}: {outcome} ({seconds:.1f} s)", flush=True)
            self.keep(number)
        # What differs is a matter of the simulation, and is looked at beside; what is no answer is not.
        self.bad += short is None and outcome != "inspected, differs"

    def keep(self, number: int) -> None:
        folder = self.arguments.keep
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            onnx = self.arguments.onnx
            *_, content = drawn(self.arguments.seed, number + 1, onnx)
            name = f"damaged_{self.arguments.seed}_{number}.{'tflite' if onnx is None else 'onnx'}"
            (folder / name).write_bytes(content)

    def run(self) -> int:
        flags = self.arguments
        number, end, start = flags.first, flags.first + flags.cases, time.perf_counter()
        # All processes of a case, one after the other, and what is done before and between them.
        silence = 10 * flags.seconds + 60
        while number < end:
            options = ["--seed", flags.seed, "--first", number, "--cases", end - number, "--seconds", flags.seconds]
            options += [] if flags.onnx is None else ["--onnx", flags.onnx]
            command = [sys.executable, __file__, "--worker", "--plain", flags.plain, *options]
            with tempfile.TemporaryFile() as errors:
                worker = subprocess.Popen(
                    list(map(str, command)), stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
                )
                assert worker.stdout is not None
                while number < end:
                    ready, _, _ = select.select([worker.stdout], [], [], silence)
                    line = worker.stdout.readline() if ready else ""
                    if not line:
                        break
                    at, seconds, peak, outcome = line.rstrip("\n").split("\t", 3)
                    self.peak = max(self.peak, int(peak))
                    self.note(int(at), float(seconds), outcome)
                    number = int(at) + 1
                    if (number - flags.first) % 200 == 0 or number == end:
                        rate = (number - flags.first) / (time.perf_counter() - start)
                        print(f"{number - flags.first} cases, {rate:.2f} a second, slowest {self.slowest:.1f} s, "
                              f"peak {self.peak >> 20} MiB: {dict(self.outcomes)}", flush=True)  # fmt: skip
                if number < end:
                    hung = worker.poll() is None and not ready
                    os.killpg(worker.pid, signal.SIGKILL)
                    errors.seek(0)
                    said = errors.read()[-500:].decode(errors="replace")
                    self.note(number, silence if hung else 0.0, "hang" if hung else f"death: {said}")
                    number += 1
                worker.wait()
        return int(self.bad > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to go on with")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each process of an inspection")
    parser.add_argument("--plain", type=int, default=100, help="of how many cases one starts processes as users do")
    parser.add_argument("--keep", type=Path, help="folder for the files that did what they should not")
    parser.add_argument("--onnx", type=Path, metavar="FOLDER", help="of sound .onnx files, which are damaged instead")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.seed, arguments.first, arguments.cases, arguments.seconds, arguments.plain, arguments.onnx)
        return 0
    return Campaign(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
