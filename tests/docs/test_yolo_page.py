# SPDX-License-Identifier: Apache-2.0
"""What the page on YOLO shows is run, where Ultralytics is installed: `make packages` does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Of a torchvision whose compiled operators were built for another PyTorch: what Ultralytics' validation asks of it.
BEFORE = """
import sys
sys.path.insert(0, {campaigns!r})
import zoo
zoo.torchvision()
import torchvision.ops
from torchvision.extension import _has_ops
if not _has_ops():
    from ultralytics.utils.nms import TorchNMS
    torchvision.ops.nms = TorchNMS.nms
"""
CAMPAIGNS = Path(__file__).resolve().parents[1] / "campaigns"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "yolo-on-a-phone.md"


@pytest.mark.slow
def test_the_page_trains_a_detector_that_the_device_computes(tmp_path: Path) -> None:
    pytest.importorskip("ultralytics")
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    program = "\n".join([BEFORE.format(campaigns=str(CAMPAIGNS)), *blocks, "import json\nprint(json.dumps(accuracy))"])
    environment = {**os.environ, "YOLO_OFFLINE": "true"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    accuracy = json.loads(run.stdout.splitlines()[-1])
    assert accuracy["float"] > 0.5, accuracy
    # The frozen network computes the device's integers.
    assert accuracy["frozen"] == accuracy["device"], accuracy
    assert accuracy["device"] > accuracy["float"] - 0.05, accuracy
