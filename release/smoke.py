# SPDX-License-Identifier: Apache-2.0
"""A first use of an installed package, in an environment of its own: `python -I release/smoke.py`.

With `--deploy`, which needs that extra, a file is written, run by LiteRT and compared as well.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

import exactqat as eq


def operators() -> None:
    """The installed package is the one that is imported, its kernels are there, and one of them quantizes."""
    package = Path(eq.__file__).parent
    assert package.is_relative_to(sysconfig.get_path("platlib")), package
    assert list(package.glob("cpu/_baseline*")), f"{package} has no kernels"
    x = np.linspace(-8, 8, 4096, dtype=np.float32)
    y = eq.quantization.fake_quant_with_min_max_vars(x, np.float32(-6), np.float32(6), num_bits=8)
    # The documented formula: -6..6 is moved so that zero is a code.
    step = np.float32(12) / np.float32(255)
    low, high = (np.float32(code) * step for code in (-128, 127))
    expected = np.floor((np.clip(x, low, high) - low) / step + np.float32(0.5)) * step + low
    assert np.abs(y - expected).max() < 1e-5 and len(np.unique(y)) == 256, np.abs(y - expected).max()
    printed = subprocess.run(
        [sys.executable, "-m", "exactqat", "--version"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == f"exactqat {eq.__version__}\n", printed.stdout


def deployment() -> None:
    """A file that is written runs as simulated."""
    from exactqat import deploy

    builder = deploy.Builder()
    x = builder.input("x", (1, 8, 8, 3), deploy.per_tensor(0.05, -3))
    y = builder.average_pool_2d(x, name="pooled", filter_size=(2, 2), strides=(2, 2))
    graph = builder.graph([y])
    codes = np.random.default_rng(0).integers(-128, 128, (4, 8, 8, 3)).astype(np.int8)
    with tempfile.TemporaryDirectory() as folder:
        report = deploy.verify(graph, deploy.write_tflite(graph, Path(folder) / "model.tflite"), codes)
    assert report.equal and report.values >= 4 * 4 * 4 * 3, report


if __name__ == "__main__":
    operators()
    if "--deploy" in sys.argv:
        deployment()
    print(f"exactqat {eq.__version__} on Python {sys.version.split()[0]}, NumPy {np.__version__}")
