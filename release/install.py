# SPDX-License-Identifier: Apache-2.0
"""Installs the package with some of its extras into the Python that runs this: `python release/install.py job`.

A wheel that is newer than the sources, in dist/ or from an earlier run, is used as it is; otherwise one is built, with
progress: compiling takes minutes. Versions of other packages are those of constraints.txt.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SOURCES = (
    "pyproject.toml",
    "CMakeLists.txt",
    "README.md",
    "src/**/*.py",
    "src/**/*.cpp",
    "src/**/*.h",
    "src/**/*.json",
)
BUILT = ROOT / "build" / "wheel"
# Where nobody sees lines change, one comes this often, in seconds.
EVERY = 15.0


def main(extras: str) -> None:
    start = time.monotonic()
    wheel = usable(ROOT / "dist", BUILT) or built(BUILT)
    say(f"Installing {wheel.name} and what its extras {extras} need")
    # The version may be that of an older installation.
    call("install", "--quiet", "--force-reinstall", "--no-deps", str(wheel))
    call("install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"exactqat[{extras}]")
    say(f"Installed in {duration(time.monotonic() - start)}")


def usable(*folders: Path) -> Path | None:
    """The newest wheel in the folders that is newer than all sources and suits this Python."""
    newest = max(path.stat().st_mtime for pattern in SOURCES for path in ROOT.glob(pattern))
    found = [path for folder in folders for path in folder.glob("exactqat-*.whl")]
    wheels = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    for wheel in wheels:
        check = [*PIP, "install", "--quiet", "--dry-run", "--no-deps", "--no-index", str(wheel)]
        suits = wheel.stat().st_mtime > newest and subprocess.run(check, capture_output=True).returncode == 0
        if suits:
            say(f"Using {wheel.relative_to(ROOT)}")
            return wheel
    return None


def built(folder: Path) -> Path:
    """A wheel made from the sources."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    say("Building the kernels; the first build takes two to four minutes on two cores")
    command = [*PIP, "wheel", "-v", "--no-deps", "-w", str(folder), str(ROOT)]
    began = time.time()
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
    (wheel,) = folder.glob("*.whl")
    os.utime(wheel, (began, began))  # a source that changed meanwhile is newer
    say(f"Built in {duration(time.monotonic() - start)}")
    return wheel


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
