# SPDX-License-Identifier: Apache-2.0
"""What the page on preprocessing shows is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "preprocessing.md"


def test_the_page_prints_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = PAGE.read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.S)
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    assert run.stdout == printed
