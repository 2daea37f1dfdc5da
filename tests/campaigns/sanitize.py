# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer and runs the kernel tests on them.

    python tests/campaigns/sanitize.py            kernels, integer kernels, determinism, bad input, a short fuzz
    python tests/campaigns/sanitize.py TEST ...   these tests instead

The sanitized package goes to build/sanitize/site; what is installed stays as it is. Needs GCC on Linux.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitize"
SITE = BUILD / "site"
# What needs NumPy only. The bad input is run without the limit of address space under which its test runs it, because
# the sanitizer reserves more than that for itself; requests for terabytes are refused by MAX_ALLOCATION instead.
COMMANDS = (
    (
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/operators/test_kernels.py",
        "tests/operators/test_determinism.py",
    ),
    (
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/operators/test_fake_quant_rows.py",
        "tests/operators/test_rounded_sums.py",
    ),
    ("-m", "pytest", "-p", "no:cacheprovider", "tests/device/test_engine.py"),
    (
        "-c",
        "import resource, sys; sys.path += ['tests', 'tests/operators']; resource.setrlimit = lambda *limits: None\n"
        "import contextlib, io, test_bad_input\n"
        "with contextlib.redirect_stdout(io.StringIO()) as said: test_bad_input.run('numpy', 0)\n"
        "print(said.getvalue().count('begin '), 'calls with bad input')",
    ),
    ("tests/campaigns/fuzz.py", "--cases", "5000"),
)
MAX_ALLOCATION = 16384  # MiB


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
        # No leaks, because Python keeps memory until the end.
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb={MAX_ALLOCATION}",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # every small object its own block, with guards around it
        # Child processes are started with -S, which leaves out an editable installation; what they need is named here.
        "PYTHONPATH": os.pathsep.join([str(SITE), sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]),
    }


def main() -> int:
    build()
    asked = sys.argv[1:]
    failed = 0
    for command in [("-m", "pytest", *asked)] if asked else COMMANDS:
        failed |= subprocess.run([sys.executable, "-S", *command], cwd=ROOT, env=environment()).returncode
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
