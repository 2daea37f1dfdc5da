# SPDX-License-Identifier: Apache-2.0
"""The kit for Keras 3 in processes of their own, each with one backend; in_keras/ has tests of the backend here."""

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
pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")


def run(backend: str, *arguments: str) -> str:
    """What a program prints; what it draws is the same every time."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    environment = {**os.environ, "KERAS_BACKEND": backend}
    if arguments[0] == "-c":
        arguments = ("-c", f"import keras\nkeras.utils.set_random_seed(0)\n{arguments[1]}")
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
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


def run_on_jax(*names: str) -> None:
    """Files of in_keras/, in one process; all of them: `KERAS_BACKEND=jax python -m pytest tests/kit/in_keras`."""
    files = [str(HERE / "in_keras" / f"test_{name}.py") for name in names]
    run("jax", "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:warnings", *files)


@pytest.mark.slow
def test_evaluation_files_and_weights_on_jax() -> None:
    run_on_jax("evaluation", "files", "weights")


@pytest.mark.campaign
def test_training_and_meaning_on_jax() -> None:
    run_on_jax("training", "meaning")


@pytest.mark.slow
def test_some_random_models() -> None:
    program = str(HERE.parent / "campaigns" / "fuzz_meaning_keras.py")
    assert "6 models" in run("torch", program, "--count", "6", "--seed", "7")


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
    backend = next((name for name in ("torch", "jax", "tensorflow") if importlib.util.find_spec(name)), "jax")
    last = run(backend, str(ROOT / "examples" / "digits_keras.py")).splitlines()[-1]
    assert float(last.split()[1].rstrip(";")) > 0.9 and last.endswith(" 0 differ")
    assert (tmp_path / "digits.tflite").exists()


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "keras-kit.md").read_text(), re.S)
    run("jax", "-c", program)
