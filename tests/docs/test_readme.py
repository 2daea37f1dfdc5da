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


def test_it_fits_on_three_screens_and_begins_with_a_program() -> None:
    assert len(README.splitlines()) <= 90
    assert README.index("```python") < README.index("pip install") < README.index("\n## ")


def test_the_program_prints_what_is_shown(tmp_path: Path) -> None:
    for needed in ("torch", "sklearn", "ai_edge_litert"):
        pytest.importorskip(needed)
    ((program, shown),) = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.S)
    run = subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, capture_output=True, text=True)
    # Training rounds otherwise on another processor; how many integers are compared and how many differ does not.
    share = re.compile(r"\d+[.]\d%")
    assert share.sub("", run.stdout).split() == share.sub("", shown).split()
    accuracies = [float(number[:-1]) for number in share.findall(run.stdout)]
    assert len(accuracies) == 2 and min(accuracies) > 85


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
