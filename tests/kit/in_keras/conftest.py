# SPDX-License-Identifier: Apache-2.0
"""Tests of the kit for Keras, on the backend that KERAS_BACKEND names, or else on PyTorch, which compiles nothing:

KERAS_BACKEND=jax python -m pytest tests/kit/in_keras

A process has one backend; test_keras_kit.py runs some of these in a process of JAX.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_pycollect_makemodule() -> None:
    """Skips the folder where Keras or its backend is missing."""
    pytest.importorskip("keras")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same random numbers for each test, names of layers from the first on, and an empty folder for files."""
    import keras

    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    monkeypatch.chdir(tmp_path)
    yield
    keras.utils.clear_session(free_memory=False)
