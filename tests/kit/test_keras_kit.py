# SPDX-License-Identifier: Apache-2.0
"""The kit for Keras 3. A process has one backend, so every backend has processes of its own.

The longest programs run on PyTorch, which compiles nothing; `KERAS_BACKEND=jax` (or tensorflow) runs them elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "kit"
BACKEND = os.environ.get("KERAS_BACKEND", "torch")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")


def run(backend: str, *arguments: str) -> str:
    """What a program prints; what it draws is the same every time."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    environment = {**os.environ, "KERAS_BACKEND": backend}
    if arguments[0] == "-c":
        arguments = ("-c", f"import keras\nkeras.utils.set_random_seed(0)\n{arguments[1]}")
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("backend", "name", "options"),
    [
        pytest.param("jax", "ds_cnn", [], marks=pytest.mark.campaign),
        ("torch", "functional", ["--learned"]),
        pytest.param("torch", "recurrent", [], marks=pytest.mark.slow),
        ("tensorflow", "ds_cnn", []),
    ],
)
def test_a_network_goes_to_the_device(backend: str, name: str, options: list[str]) -> None:
    """Prepared, fitted, frozen, saved, loaded, verified; the others: `python tests/campaigns/keras_networks.py`."""
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    assert run(backend, str(HERE.parent / "campaigns" / "keras_networks.py"), *options, name).endswith(
        "integers compared, 0 differ\n"
    )


@pytest.mark.parametrize(
    ("backend", "module", "count"),
    [
        pytest.param("jax", "keras_training.py", 5, marks=pytest.mark.campaign),
        pytest.param("torch", "keras_training.py", 5, marks=pytest.mark.slow),
        pytest.param("jax", "keras_evaluation.py", 2, marks=pytest.mark.slow),
        ("torch", "keras_evaluation.py", 2),
        pytest.param(BACKEND, "keras_arguments.py", 1, marks=pytest.mark.slow),
        pytest.param(BACKEND, "keras_use.py", 10, marks=pytest.mark.slow),
    ],
)
def test_checks(backend: str, module: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(backend, str(HERE / module)) == f"{count} checks passed\n"


@pytest.mark.slow
def test_names_of_tfmot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    monkeypatch.chdir(tmp_path)
    assert run(BACKEND, str(HERE / "keras_tfmot.py")).endswith("tfmot's names: ok\n")


@pytest.mark.slow
def test_weights_move_between_pytorch_and_keras() -> None:
    """As `test_jax_kit.test_weights_move_between_frameworks`: with PyTorch's graph that is one for all three."""
    pytest.importorskip("torch")
    assert run("jax", str(HERE / "keras_weights.py")).endswith("integers of weights, one graph\n")


@pytest.mark.slow
def test_keras_own_fake_quantization() -> None:
    page = (ROOT / "docs" / "keras-fake-quant.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(programs) == 6
    run("jax", "-c", "\n".join(programs))


def test_the_table_of_applications_is_what_was_measured() -> None:
    import run_applications

    page = run_applications.PAGE.read_text()
    assert run_applications.with_table(page, json.loads(run_applications.ROWS.read_text())) == page


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("ai_edge_litert", "sklearn"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    backend = next((each for each in ("torch", "jax", "tensorflow") if importlib.util.find_spec(each)), "jax")
    last = run(backend, str(ROOT / "examples" / "digits_keras.py")).splitlines()[-1]
    assert float(last.split()[1].rstrip(";")) > 0.9 and last.endswith(" 0 differ")
    assert (tmp_path / "digits.tflite").exists()


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "keras-kit.md").read_text(), re.S)
    run("jax", "-c", program)
