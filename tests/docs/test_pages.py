# SPDX-License-Identifier: Apache-2.0
"""The programs of pages that no other test runs: they can be pasted, and print what the page shows."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Pages whose programs need nothing else, and what a reader of the others has before each block.
PAGES: dict[str, list[str]] = {
    "ptq-or-qat": [],
    "oracle": [],
    "from-torch-ao": [],
    "from-aimet": [],
    "from-ai-edge-quantizer": [],
    "from-tfmot": [],
    "four-bits": ["", "optimizer, loader = torch.optim.SGD(model.parameters(), 1e-3), [(images[:64], labels[:64])]"],
    "keras-2-files": [
        "import keras\nkeras.Sequential([keras.Input((8, 8, 3)), keras.layers.DepthwiseConv2D(3)]).save('mobilenet.h5')"
    ],
    "microcontrollers": [
        "import torch\nfrom exactqat import qat\nexample = torch.zeros(2, 16)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())"
    ],
    "inspect": [
        "import numpy as np, torch\nfrom exactqat import deploy, qat\n"
        "model = qat.prepare(torch.nn.Conv1d(4, 3, 2), torch.randn(2, 4, 6), device='micro')\n"
        "qat.calibrate(model, [torch.randn(9, 4, 6)])\nqat.freeze(model)\n"
        "stream = deploy.stream(deploy.lower(model.eval()), axis=2)\n"
        "deploy.write_tflite(stream.with_variables(), 'wake_word.tflite')\n"
        "frames = [stream.inputs(np.ones((1, 4, 1), np.int8))['input']] * 2"
    ],
    "files-that-fit": [
        "import torch\nfrom exactqat import deploy, qat\n"
        "class Pets(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv1, self.dense = torch.nn.Conv2d(3, 4, 3, 2), torch.nn.Linear(36, 3)\n"
        "    def forward(self, x):\n"
        "        return self.dense(self.conv1(x).relu().flatten(1))\n"
        "model = qat.prepare(Pets(), torch.rand(2, 3, 8, 8))\n"
        "qat.calibrate(model, [torch.rand(8, 3, 8, 8)])\nqat.freeze(model)\ngraph = deploy.lower(model.eval())"
    ],
    "integrations": [
        "import sys, torch\nfrom exactqat import deploy, qat\n"
        f"sys.path.insert(0, {str(ROOT / 'integrations' / 'huggingface')!r})\n"
        "images, network = torch.rand(20, 4), torch.nn.Linear(4, 3)\nclasses = network(images).argmax(1)\n"
        "model = qat.prepare(network, images)\nqat.calibrate(model, [images])\nqat.freeze(model)\n"
        "graph = deploy.lower(model.eval())\ndeploy.write_tflite(graph, 'model.tflite')"
    ],
    "tune": [
        "import torch\nfrom concurrent.futures import ProcessPoolExecutor\nfrom exactqat import deploy\n"
        "torch.manual_seed(0)\nimages = torch.rand(40, 1, 6, 6)\n"
        "layers = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 1)\n"
        "model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3)).eval()\n"
        "test_images = validation_images = calibration_images = images\nloader, epochs = [images], 1\n"
        "test_classes = validation_classes = calibration_classes = model(images).argmax(1)\n"
        "data = images, test_classes\ntrain = lambda model: qat.calibrate(model, [images])"
    ],
}
# Training rounds otherwise on another processor.
SHARE = re.compile(r"\d+[.]\d%")
BETWEEN = "\nprint('=' * 99)\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_programs_run(name: str, tmp_path: Path) -> None:
    for needed in ("torch", "sklearn", "ai_edge_litert", "tflite_micro", "keras"):
        pytest.importorskip(needed)
    page = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", page, re.S)
    blocks = [(block, shown) for block, shown in blocks if "ultralytics" not in block]  # test_ultralytics.py
    before = PAGES[name] + [""] * (len(blocks) - len(PAGES[name]))
    program = BETWEEN.join(f"{first}\n{block}" for first, (block, _) in zip(before, blocks, strict=True))
    program = program.replace("ProcessPoolExecutor(8)", "ProcessPoolExecutor(1)")
    environment = {**os.environ, "KERAS_BACKEND": "jax" if importlib.util.find_spec("jax") else "torch"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for (_, shown), output in zip(blocks, run.stdout.split("=" * 99 + "\n"), strict=True):
        assert not shown or SHARE.sub("", output).split() == SHARE.sub("", shown).split()
