# SPDX-License-Identifier: Apache-2.0
"""The Keras network that trains is the user's own: kept or refused, on two backends, and for some random models."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")


def run(backend: str, *arguments: str) -> str:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.slow
def test_models_are_kept_or_refused_on_pytorch() -> None:
    run("torch", "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(HERE / "meaning_keras.py"))


@pytest.mark.campaign
def test_models_are_kept_or_refused_on_jax() -> None:
    # Keras on JAX does not build the branches itself.
    sample = "(gradient or losses or row or dropout or own or trainable or loses) and not branch"
    program = str(HERE / "meaning_keras.py")
    run("jax", "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", program, "-k", sample)


@pytest.mark.slow
def test_some_random_models() -> None:
    assert "6 models" in run(
        "torch", str(HERE.parent / "campaigns" / "fuzz_meaning_keras.py"), "--count", "6", "--seed", "7"
    )
