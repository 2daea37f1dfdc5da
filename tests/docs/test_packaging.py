# SPDX-License-Identifier: Apache-2.0
"""What is said of the package agrees with itself; `make test-wheel` tries what is built of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import exactqat

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_the_version_is_one() -> None:
    assert exactqat.__version__ == PROJECT["project"]["version"]
    assert re.search(rf"^## {re.escape(exactqat.__version__)}\b", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)


@pytest.mark.parametrize("missing", [(), ("typer", "torch", "jax", "rich")])
def test_the_version_is_shown_without_what_the_commands_need(missing: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r})); sys.argv = ['exactqat', '--version']\n"
        "from exactqat.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"exactqat {exactqat.__version__}\n", "")


def test_help_lists_the_version() -> None:
    pytest.importorskip("typer")
    command = [sys.executable, "-m", "exactqat.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "--version" in done.stdout


def test_nothing_but_the_tools_is_needed_to_build() -> None:
    needed = {re.split(r"[<>=!~ ]", name)[0] for name in PROJECT["build-system"]["requires"]}
    assert needed == {"scikit-build-core", "nanobind"}
    sources = [ROOT / "CMakeLists.txt", *(ROOT / "src" / "exactqat" / "operators" / "cpu").glob("*.[ch]*")]
    for path in sources:
        if path.suffix in (".txt", ".cpp", ".h"):
            assert not re.search(r"#include\s*[<\"]xla/|jaxlib'", path.read_text("utf-8")), path


def test_every_python_that_is_promised_is_built_for() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    promised = {match[1] for name in classifiers if (match := re.search(r"Python :: 3\.(\d+)$", name))}
    built = {match[1] for name in PROJECT["tool"]["cibuildwheel"]["build"] if (match := re.match(r"cp3(\d+)-", name))}
    assert promised == built and PROJECT["project"]["requires-python"] == f">=3.{min(map(int, promised))}"


def test_kernels_are_tried_where_nothing_but_numpy_is() -> None:
    """What compares kernels with the reference and needs NumPy alone runs from the wheel and on ARM64 too."""
    lists = [(ROOT / name).read_text("utf-8") for name in ("release/kernel_tests.py", "tests/campaigns/run_arm64.py")]
    files = [
        path
        for path in (ROOT / "tests").glob("*/test_*.py")
        if re.search(r"^from conftest import .*ON_CPU", path.read_text("utf-8"), re.M)
    ]
    assert len(files) > 6
    for path in files:
        if re.search(r'^(\w+ = )?pytest.importorskip\("(torch|triton|hypothesis)"\)', path.read_text("utf-8"), re.M):
            continue
        name = path.stem.removeprefix("test_")
        assert all(re.search(rf'"(test_)?{name}(.py)?"', text) for text in lists), path.name
