# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer and runs the kernel tests on them.

    python tests/sanitize.py            the tests below, then a short fuzzing campaign
    python tests/sanitize.py TEST ...   these tests instead

The sanitized package goes to build/sanitize/site; what is installed stays as it is. Needs GCC on Linux.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
SITE = BUILD / "site"
TESTS = ("test_kernels.py", "test_bad_input.py", "test_determinism.py")  # those that need NumPy only
FUZZ = ("tests/fuzz.py", "--cases", "5000")


def build() -> None:
    """Only what changed is compiled again."""
    options = (
        f"build-dir={BUILD / 'cmake'}",
        "cmake.define.EXACTQAT_SANITIZE=ON",
        "install.strip=false",  # reports name lines
    )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--upgrade"]
    command += ["--target", str(SITE), *(f"--config-settings={option}" for option in options), str(ROOT)]
    subprocess.run(command, check=True)


def library(name: str) -> str:
    """The path of a runtime library of the compiler. Python is not linked with it, so it must be loaded first."""
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        raise SystemExit(f"{compiler} has no {name}: this needs GCC with its sanitizer libraries (or set CXX)")
    return path


def environment() -> dict[str, str]:
    return os.environ | {
        # The C++ library too: else the sanitizer does not find the function that throws exceptions.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python keeps memory until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # every small object its own block, with guards around it
        # Child processes are started with -S, which leaves out an editable installation; what they need is named here.
        "PYTHONPATH": os.pathsep.join([str(SITE), sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]),
    }


def main() -> int:
    build()
    asked = sys.argv[1:]
    tests = asked or [str(ROOT / "tests" / name) for name in TESTS if (ROOT / "tests" / name).exists()]
    commands = [("-m", "pytest", "-p", "no:cacheprovider", *tests)]
    if not asked:
        commands.append(FUZZ)
    failed = 0
    for command in commands:
        failed |= subprocess.run([sys.executable, "-S", *command], cwd=ROOT, env=environment()).returncode
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
