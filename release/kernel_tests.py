# SPDX-License-Identifier: Apache-2.0
"""Runs the kernel tests on the installed exactqat: `python release/kernel_tests.py [--few] [PYTEST'S ARGUMENTS]`.

Needs NumPy, pytest and Hypothesis. The tests are copied away from the source, so that nothing but what is installed is
found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Every case of every kernel on every instruction set against the reference, the reference against TensorFlow's results,
# odd shapes, signatures and names, and the door for XLA.
TESTS = (
    "test_arithmetic.py",
    "test_batch_norm_layouts.py",
    "test_bits.py",
    "test_depthwise_shapes.py",
    "test_elementwise_shapes.py",
    "test_kernels.py",
    "test_namespaces.py",
    "test_past_the_cache.py",
    "test_reference.py",
    "test_signatures.py",
    "test_xla.py",
)
# Where an emulator takes a hundred times as long.
FEW = ("test_arithmetic.py", "test_bits.py", "test_kernels.py", "test_xla.py")


def main() -> int:
    arguments = sys.argv[1:]
    tests = FEW if "--few" in arguments else TESTS
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(ROOT / "tests", Path(work) / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        code = "import exactqat, sys; print(exactqat.__version__, exactqat.__file__, sys.version.split()[0])"
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        found = subprocess.run([sys.executable, "-c", code], cwd=work, env=environment, capture_output=True, text=True)
        print(found.stdout + found.stderr, end="", flush=True)
        if found.returncode or str(ROOT / "src") in found.stdout:
            print("exactqat is not installed, or it is this source tree", file=sys.stderr)
            return 2
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", work]
        command += [argument for argument in arguments if argument != "--few"]
        return subprocess.run([*command, *(f"tests/{name}" for name in tests)], cwd=work, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
