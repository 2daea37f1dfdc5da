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


def test_the_code_block_runs() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    subprocess.run([sys.executable, "-c", block], check=True)


def test_the_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)", README + (ROOT / "CONTRIBUTING.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target} is written about but not in the Makefile"


def test_the_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "exactqat", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"exactqat \d+[.]\d+[.]\d+.*", result.stdout.strip())
