# SPDX-License-Identifier: Apache-2.0
"""JAX on 8 devices: `shard_map` and sharded arrays give what one device gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

import jax_devices  # noqa: E402


@pytest.fixture(scope="module")
def found() -> dict[str, str | None]:
    script = Path(__file__).parent / "jax_devices.py"
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", jax_devices.CHECKS)
def test_on_devices(name: str, found: dict[str, str | None]) -> None:
    assert found[name] is None, found[name]
