# SPDX-License-Identifier: Apache-2.0
"""One framework's process: it holds the operands of one call at a time and takes a timed turn whenever it is asked.

    python bench/worker.py {exactqat,torch,jax,tensorflow} --threads N [--device {cpu,cuda}]

One JSON object for each line, in and out; `Worker` is the other end. Every framework has a process of its own, so that
one's threads, allocator and environment are not another's, and TensorFlow may live in another environment; the
processes sleep while it is not their turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Worker:
    """Starts a worker and talks to it. `python`: the interpreter that has the framework."""

    def __init__(self, framework: str, threads: int, device: str = "cpu", python: str | Path = sys.executable) -> None:
        count = str(threads)
        environment = os.environ | {
            "EXACTQAT_NUM_THREADS": count,
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "NPROC": count,  # XLA's thread pool
            "JAX_PLATFORMS": "cpu" if device == "cpu" else device,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONWARNINGS": "ignore",
        }
        if device != "cpu":
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the others need memory too
        elif framework == "torch":
            # Unbound, two of its threads may meet on one core, where each waits for the other in a busy loop: calls
            # that take a hundred microseconds then took eight milliseconds.
            environment |= {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
        self.framework = framework
        # On a GPU, of the call that is held: each contestant's clock, and why those that are missing were left out.
        self.clocks: dict[str, str] = {}
        self.left_out: list[str] = []
        self._messages: list[str] = []
        command = [str(python), str(HERE / "worker.py"), framework, "--threads", count, "--device", device]
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        threading.Thread(target=self._listen, daemon=True).start()
        hello = self._answer()
        self.versions: dict[str, str] = hello["versions"]
        self.pause: float = hello["pause"]  # seconds for which its threads stay busy after a call

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._messages = [*self._messages[-50:], line]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            time.sleep(0.1)  # for its last words
            raise RuntimeError(f"the process of {self.framework} ended:\n{''.join(self._messages)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.framework}: {answer['error']}")
        return answer

    @property
    def process(self) -> int:
        return self._process.pid

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def hold(self, **arguments: Any) -> list[str]:
        """Prepares a call and names the contestants that can make it."""
        answer = self.ask("hold", **arguments)
        self.clocks, self.left_out = answer["clocks"], answer["left_out"]
        return answer["contestants"]

    def turn(self, contestant: str) -> float:
        return self.ask("turn", contestant=contestant)["seconds"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def serve(framework: str, threads: int, device: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print is not an answer
    import contestants
    import overhead
    import timing

    backend = contestants.BACKENDS[framework](threads, device)
    pause = 0.0
    if threads > 1 and backend.busy is not None:
        pause = timing.spinning(backend.busy)
    calls: dict[str, Any] = {}

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer(versions=backend.versions, pause=pause)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            match request.pop("request"):
                case "hold":
                    calls.clear()
                    calls.update(backend.calls(**request))
                    for call in calls.values():
                        call()  # compiles what has to be compiled
                    answer(
                        contestants=list(calls),
                        clocks={} if device == "cpu" else {name: call.clock for name, call in calls.items()},
                        left_out=getattr(backend, "left_out", []),
                    )
                case "turn":
                    call = calls[request["contestant"]]
                    answer(seconds=timing.turn(call) if device == "cpu" else call.turn())
                case "drop":
                    calls.clear()
                    answer()
                case "overhead":
                    answer(seconds=overhead.measure(backend.small_calls()))
                    calls.clear()
                case "peak":
                    answer(seconds=backend.peak())
        except Exception as error:  # the other end decides whether that matters
            answer(error=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    sys.path.append(str(HERE.parent / "tests"))  # for operands that are test cases
    serve(options.framework, options.threads, options.device)
