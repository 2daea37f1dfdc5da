# SPDX-License-Identifier: Apache-2.0
"""What the page on text classifiers shows is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "text-classifiers.md"


@pytest.mark.slow
def test_the_page_trains_a_classifier_that_the_device_computes(tmp_path: Path) -> None:
    for name in ("torch", "ai_edge_litert", "tflite_micro"):
        pytest.importorskip(name, reason="needs exactqat[deploy]")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    program = "\n".join([*blocks, "import json\nprint(json.dumps(accuracy))"])
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    assert run.stdout.count("the file runs as simulated: none of ") == 3, run.stdout
    accuracy = json.loads(run.stdout.splitlines()[-1])
    assert accuracy["float"] > 0.9 and accuracy["device"] > accuracy["float"] - 0.03, accuracy
