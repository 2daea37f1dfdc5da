# SPDX-License-Identifier: Apache-2.0
"""The script for timm, where it is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from exactqat import deploy

SCRIPT = Path(__file__).resolve().parents[2] / "integrations" / "timm" / "quantize_timm.py"


@pytest.mark.slow
def test_a_network_of_timm_becomes_a_verified_file(tmp_path: Path) -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("needs timm")
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    random = np.random.default_rng(0)
    pixels, classes = random.integers(0, 256, (16, 32, 32, 3), np.uint8), np.arange(16) % 3
    np.savez(tmp_path / "images.npz", x=pixels, y=classes, labels=["cat", "dog", "bird"])
    path = tmp_path / "m.tflite"
    before = f"import sys; sys.path.insert(0, {str(SCRIPT.parents[2] / 'tests' / 'campaigns')!r}); import zoo; "
    run = f"{before}zoo.torchvision(); import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    arguments = ["mobilenetv3_small_050", "--data", str(tmp_path / "images.npz"), "--out", str(path)]
    done = subprocess.run([sys.executable, "-c", run, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    graph = deploy.read_tflite(path)
    assert graph.attached["labels.txt"] == b"cat\ndog\nbird\n" and "TFLITE_METADATA" in graph.metadata
