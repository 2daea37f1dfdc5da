# SPDX-License-Identifier: Apache-2.0
"""Installs the package with some of its extras into the Python that runs this: `python release/install.py job`.

It is an editable installation: Python files are read from src, only kernels and stubs are built, with progress, as
compiling takes minutes. Versions of other packages are those of constraints.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# Where nobody sees lines change, one comes this often, in seconds.
EVERY = 15.0


def main(extras: str) -> None:
    start = time.monotonic()
    build()
    say(f"Installing what the extras {extras} need")
    call("install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"exactqat[{extras}]")
    say(f"Installed in {duration(time.monotonic() - start)}")


def build() -> None:
    """Compiles what changed in the kernels since the last time, and installs the package without what it needs."""
    say("Building the kernels; the first build takes two to four minutes on two cores")
    command = [*PIP, "install", "-v", "--no-deps", "-e", str(ROOT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    start, shown, log = time.monotonic(), 0.0, []
    for line in process.stdout:
        log.append(line)
        step = re.search(r"\[(\d+)/(\d+)\]", line)
        now = time.monotonic()
        if step and (sys.stderr.isatty() or now - shown >= EVERY):
            shown = now
            done, total = map(int, step.groups())
            say(f"  {done} of {total} steps, {duration(now - start)}", stays=not sys.stderr.isatty())
    if process.wait():
        sys.stderr.write("".join(log[-60:]))
        raise SystemExit("error: the build failed; it needs a C++20 compiler. Its last lines are above.")
    say(f"Built in {duration(time.monotonic() - start)}")


def call(*arguments: str) -> None:
    if status := subprocess.run([*PIP, *arguments]).returncode:
        raise SystemExit(status)


def say(text: str, stays: bool = True) -> None:
    """A line on standard error; one that does not stay is written over by the next."""
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{clear}{text}" + ("\n" if stays else ""))
    sys.stderr.flush()


def duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
