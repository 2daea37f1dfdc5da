# SPDX-License-Identifier: Apache-2.0
"""What the page on streams shows is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "streams.md"


@pytest.mark.slow
def test_the_page_runs_a_network_frame_by_frame(tmp_path: Path) -> None:
    for name in ("torch", "ai_edge_litert"):
        pytest.importorskip(name, reason="needs exactqat[deploy]")
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 5
    run = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.S)
    first, second = run.stdout.splitlines()
    assert first == shown.strip()
    assert re.fullmatch(r"0 of \d+ integers differ in LiteRT", second)
