# SPDX-License-Identifier: Apache-2.0
"""What the README shows is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MY_PROJECT = """
import torch
from torch import nn

images, labels = torch.rand(128, 1, 8, 8), torch.randint(0, 4, (128,))
network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def train(model):
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
"""


def test_the_code_blocks_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 2
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)


def test_the_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([\w-]+)", README + (ROOT / "CONTRIBUTING.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target} is written about but not in the Makefile"


def test_the_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "exactqat", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"exactqat \d+[.]\d+[.]\d+.*", result.stdout.strip())
