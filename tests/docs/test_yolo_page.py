# SPDX-License-Identifier: Apache-2.0
"""What the page on YOLO shows is run, where Ultralytics is installed: `make packages` does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "yolo-on-a-phone.md"


@pytest.mark.slow
def test_the_page_trains_a_detector_that_the_device_computes(tmp_path: Path) -> None:
    pytest.importorskip("ultralytics")
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    program = "\n".join([*blocks, "import json\nprint(json.dumps(accuracy))"])
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    accuracy = json.loads(run.stdout.splitlines()[-1])
    assert accuracy["float"] > 0.5, accuracy
    # The frozen network computes the device's integers.
    assert accuracy["frozen"] == accuracy["device"], accuracy
    assert accuracy["device"] > accuracy["float"] - 0.05, accuracy
