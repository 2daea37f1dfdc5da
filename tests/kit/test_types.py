# SPDX-License-Identifier: Apache-2.0
"""What a type checker and an editor know of a user's program."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from exactqat import qat
from exactqat.kit.device import DeviceName, profile

PROGRAM = """
import torch
{imports}
from exactqat import deploy, qat

images = torch.zeros(2, 3)
reveal_type(qat.prepare(torch.nn.Linear(3, 2), images, device="micro"))
reveal_type(qat.prepare(deploy.read_tflite("m.tflite"), check=False))
reveal_type(qat.torch.prepare(torch.nn.Linear(3, 2), images, rules=[qat.Rule()], device=None))
"""
TORCH = ["exactqat.qat.train.torch.prepared.PreparedModel"] * 3
OF_JAX = """

def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ params["w"]


reveal_type(qat.prepare(apply, images, variables={}))
reveal_type(qat.prepare(flax.linen.Dense(3), images, [qat.Rule()], variables={}, device="reference"))
reveal_type(qat.prepare(flax.nnx.Linear(3, 2, rngs=flax.nnx.Rngs(0)), images))
reveal_type(qat.jax.prepare(apply, {}, images, rules=[qat.Rule()], device=None))
"""
JAX = ["exactqat.qat.train.jax.prepared.Prepared"] * 4
# mypy finds no types in Keras, so only what the kit by name returns.
OF_KERAS = """
reveal_type(qat.keras.prepare(keras.Sequential(), rules=[qat.Rule()], device=None))
"""
KERAS = ["exactqat.qat.train.keras.prepared.PreparedModel"]


def has(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


@pytest.mark.slow
@pytest.mark.skipif(not has("mypy", "torch"), reason="needs exactqat[torch,check]")
def test_mypy_knows_what_prepare_returns(tmp_path: Path) -> None:
    imports, body, expected = [], "", list(TORCH)
    for names, part, types in ((("jax", "flax"), OF_JAX, JAX), (("keras",), OF_KERAS, KERAS)):
        if has(*names):
            imports += [f"import {name}" for name in names]
            body, expected = body + part, [*expected, *types]
    imports += ["import flax.linen", "import flax.nnx"] * ("import flax" in imports)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(imports="\n".join(imports)) + body)
    # The package may be installed so that only Python finds it.
    environment = {**os.environ, "MYPYPATH": str(Path(qat.__file__).parents[2])}
    checker = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--no-error-summary", str(program)]
    done = subprocess.run(checker, env=environment, cwd=tmp_path, capture_output=True, text=True)
    revealed = [line.partition("Revealed type is ")[2].strip('"') for line in done.stdout.splitlines()]
    assert revealed == expected, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not has("torch", "keras"), reason="needs exactqat[torch,keras]")
def test_pyright_knows_it_of_keras_too(tmp_path: Path) -> None:
    checker = shutil.which("pyright") or shutil.which("basedpyright")
    if checker is None:
        pytest.skip("needs pyright")
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM.format(imports="import keras") + "reveal_type(qat.prepare(keras.Sequential(), rules=[qat.Rule()]))\n"
    )
    done = subprocess.run(
        [checker, "--pythonpath", sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True
    )
    revealed = [line.rpartition(" is ")[2].strip('"') for line in done.stdout.splitlines() if "reveal_type" not in line]
    assert [name for name in revealed if name.endswith("PreparedModel")] == ["PreparedModel"] * 4, done.stdout


def test_editors_offer_the_devices() -> None:
    assert get_args(DeviceName) == (*(own.name for own in profile.with_runtimes()), *profile.PACKAGED)


def test_dir_shows_the_kits_and_the_public_names() -> None:
    kits = {"distributed", "jax", "keras", "tfmot", "torch"}
    assert set(dir(qat)) == {*qat.__all__, *kits}
    assert all(has(f"exactqat.qat.{kit}") for kit in kits)
