# SPDX-License-Identifier: Apache-2.0
"""One call trains a YOLO in the device's integers and writes its verified file, where Ultralytics is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "docs"))

from test_yolo_page import BEFORE, CAMPAIGNS, PAGE  # noqa: E402

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from quantized_yolo import train_quantized

settings["epochs"], float_weights = 2, "runs/float/weights/last.pt"
result = train_quantized(YOLO(float_weights), "yolo.tflite", target="micro", lr0=2e-4, name="quantized",
                         inputs="float32", outputs="float32", **settings)
assert result.report.equal, result.report
from exactqat import deploy
back = deploy.read_tflite(result.path)
assert deploy.verify(back, result.path, data=images[:2].numpy(), device="xnnpack-x86").equal
try:
    train_quantized(YOLO(float_weights), "yolo.tflite", **settings | {{"amp": True}})
except ValueError as error:
    print("refused:", error)
import json
print(json.dumps({{"differ": result.report.differing, "values": result.report.values,
                   "outputs": [port.name for port in back.signature.outputs]}}))
"""


@pytest.mark.slow
def test_one_call_trains_and_writes_a_verified_file(tmp_path: Path) -> None:
    pytest.importorskip("ultralytics")
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    drawn = next(block for block in blocks if "def drawn(" in block)
    data = next(block for block in blocks if "settings = {" in block).partition("class Quantized")[0]
    data = data.replace('"train", 128, 1', '"train", 32, 1').replace("epochs=12", "epochs=1")
    start = drawn[drawn.index("def drawn(") : drawn.index("def train(")]
    program = "\n".join([BEFORE.format(campaigns=str(CAMPAIGNS)), blocks[0], start, data,
                         "images = drawn(4, 9)[0]",
                         PROGRAM.format(folder=str(ROOT / "integrations" / "ultralytics"))])  # fmt: skip
    environment = {**os.environ, "YOLO_OFFLINE": "true"}
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    assert answer["differ"] == 0 < answer["values"] and answer["outputs"] == ["boxes", "scores"]
    with zipfile.ZipFile(tmp_path / "yolo.tflite") as archive:
        known = json.loads(archive.read("metadata.json"))
    assert (known["task"], known["imgsz"], known["names"]) == ("detect", [64, 64], {"0": "square", "1": "disc"})
    assert "refused: amp must be False, got True" in run.stdout
