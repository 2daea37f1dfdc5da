# SPDX-License-Identifier: Apache-2.0
"""Runs the kernel tests on what is installed: `python release/kernel_tests.py [--few | --jax] [PYTEST'S ARGUMENTS]`.

Needs NumPy, ml_dtypes (for bfloat16), pytest and Hypothesis. The tests are copied away from the source, so that
nothing but what is installed is found.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Every case of every kernel on every instruction set against the reference, the reference against TensorFlow's results,
# odd shapes, signatures and names, many threads, and the door for XLA.
TESTS = (
    "test_arithmetic.py",
    "test_batch_norm_layouts.py",
    "test_bits.py",
    "test_depthwise_shapes.py",
    "test_elementwise_shapes.py",
    "test_fake_quant_rows.py",
    "test_halves.py",
    "test_kernels.py",
    "test_namespaces.py",
    "test_past_the_cache.py",
    "test_reference.py",
    "test_rounded_sums.py",
    "test_signatures.py",
    "test_smallest_normal.py",
    "test_threads.py",
    "test_xla.py",
)
SOME = {
    "--few": (  # for emulators, in which no Python starts another
        "test_arithmetic.py",
        "test_bits.py",
        "test_fake_quant_rows.py",
        "test_kernels.py",
        "test_rounded_sums.py",
        "test_xla.py",
    ),
    "--jax": ("test_jax.py",),  # with jax installed
}


def main() -> int:
    arguments = sys.argv[1:]
    tests = next((some for option, some in SOME.items() if option in arguments), TESTS)
    sys.path.pop(0)  # this folder
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(ROOT / "tests", Path(work) / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        os.chdir(work)
        import exactqat

        print(exactqat.__version__, exactqat.__file__, sys.version.split()[0], flush=True)
        if Path(exactqat.__file__).is_relative_to(ROOT / "src"):
            print("that is this source tree; exactqat is to be installed", file=sys.stderr)
            return 2
        import pytest

        # In this process: an emulated Python cannot start another.
        options = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", work]
        options += [argument for argument in arguments if argument not in SOME]
        status = pytest.main([*options, *(f"tests/operators/{name}" for name in tests)])
        os.chdir(ROOT)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
