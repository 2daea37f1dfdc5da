# SPDX-License-Identifier: Apache-2.0
"""Files of others, inspected: equal on the runtimes that are here, and a difference is found."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from test_read_tflite import FILES, READ

from exactqat.deploy import profiles_here
from exactqat.deploy.inspect import inspect
from exactqat.device import Refusal


@pytest.mark.parametrize("name", READ)
def test_files_of_others_run_as_simulated(name: str) -> None:
    found = inspect(FILES / f"{name}.tflite", examples=2)
    here = [device for device in found.devices if device.profile in profiles_here()]
    # TFLite-Micro and LiteRT's reference kernels lack the TILE of this version.
    assert all("Didn't find op for builtin opcode 'TILE'" in device.not_run for device in here if device.not_run)
    ran = [device for device in here if not device.not_run]
    assert ran and all(device.values and not device.differing for device in ran)
    assert found.equal and json.loads(found.as_json())["equal"]
    assert max(map(len, found.text(80).splitlines())) <= 80


def test_data_are_codes_or_real_numbers() -> None:
    path = FILES / "convolutions.float_ends.tflite"
    real = np.random.default_rng(0).normal(size=(3, 10, 10, 3)).astype(np.float32)
    assert inspect(path, real, devices=["reference"]).examples == 3
    with pytest.raises(ValueError, match="must be real numbers or int8 codes, got int64"):
        inspect(path, real.astype(np.int64))
    with pytest.raises(ValueError, match="the file's inputs are"):
        inspect(path, {"other": real})
    with pytest.raises(Refusal, match="CONV_2D in float32"):
        inspect(FILES / "convolutions.dynamic_range.tflite")


def test_devices_that_disagree_are_named() -> None:
    """From the first layer on that they round otherwise."""
    found = inspect(FILES / "branches.int8.tflite", examples=4)
    pairs = {each.profiles for each in found.disagreements}
    assert ("xnnpack-x86", "reference") in pairs
    first = next(each for each in found.disagreements if each.profiles == ("xnnpack-x86", "reference"))
    assert first.layer in {layer.result for layer in found.layers} and first.differing > 0
