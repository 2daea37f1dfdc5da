# SPDX-License-Identifier: Apache-2.0
"""Pages with one program that can be pasted: it runs, and prints what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["four-bits", "ptq-or-qat", "oracle", "from-torch-ao", "from-aimet", "from-ai-edge-quantizer"]
# Training rounds otherwise on another processor.
SHARE = re.compile(r"\d+[.]\d%")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_program_runs(name: str, tmp_path: Path) -> None:
    for needed in ("torch", "sklearn", "ai_edge_litert", "tflite_micro"):
        pytest.importorskip(needed)
    page = (DOCS / f"{name}.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for shown in re.findall(r"```python\n.*?```\n+```text\n(.*?)```", page, re.S):
        assert SHARE.sub("", run.stdout).split() == SHARE.sub("", shown).split()
