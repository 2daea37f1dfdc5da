# SPDX-License-Identifier: Apache-2.0
"""Functions of one value: known where they are, wherever they turn, or refused; never dropped."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import one_value
import pytest

from exactqat.qat.capture.core.functions import ITSELF, Curve, identify

HERE = Path(__file__).resolve().parent


def clip(x: Curve, low: float, high: float) -> Curve:
    return Curve(lambda x: np.clip(x, low, high), [x], [low, high])


def hole(x: Curve, low: float, high: float) -> Curve:
    """0 between two numbers."""
    inside = Curve(lambda x: (x > low) & (x < high), [x], [low, high])
    return Curve(lambda inside, x: np.where(inside, 0, x), [inside, x])


@pytest.mark.parametrize("size", [1e-6, 3e-3, 1.0, 77.0, 12345.0, 1e7])
def test_the_bounds_of_a_clip_are_exact(size: float) -> None:
    assert identify(clip(ITSELF, -size, 2 * size)) == ("clamp", {"min": -size, "max": 2 * size})
    scaled = Curve(np.multiply, [clip(Curve(np.multiply, [ITSELF, 0.3]), -size, size), 1 / 0.3])
    assert identify(scaled) == ("clamp", {"min": pytest.approx(-size / 0.3), "max": pytest.approx(size / 0.3)})


@pytest.mark.parametrize("low", [1e-6, 21.0, 4e5])
@pytest.mark.parametrize("width", [1e-4, 1.0])
@pytest.mark.parametrize("scale", [1.0, -1e-4, 30.0])
def test_holes_between_and_beyond_the_points_are_seen(low: float, width: float, scale: float) -> None:
    curve = hole(Curve(np.multiply, [ITSELF, scale]), low, low * (1 + width))
    assert identify(Curve(np.multiply, [curve, 1 / scale])) is None
    for bound in (low, low * (1 + width)):
        assert np.abs(curve.corners() * scale / bound - 1).min() < 2e-6


def test_a_clip_beyond_every_point_is_not_the_operand() -> None:
    assert identify(ITSELF) == ("", {})
    assert identify(clip(ITSELF, -1e12, 1e12)) is None


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_random_functions_are_right_or_refused(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(framework)
    parts = one_value.in_torch() if framework == "torch" else one_value.in_jax()
    assert not one_value.check(30, 1, *parts)
    refused = int(capsys.readouterr().out.split()[2])
    assert refused < 20


def test_random_functions_in_keras_are_right_or_refused() -> None:
    if importlib.util.find_spec("keras") is None or importlib.util.find_spec("torch") is None:
        pytest.skip("needs Keras and PyTorch")
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    command = [sys.executable, str(HERE / "one_value.py"), "keras", "30"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
