# SPDX-License-Identifier: Apache-2.0
"""Large results lie in blocks that are used again: page faults are counted in processes of their own."""

from __future__ import annotations

import gc
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exactqat as eq

COUNT_FAULTS = """
import resource, sys
import numpy as np
import exactqat as eq

if sys.argv[1] == "torch":
    import torch
    x = torch.zeros(8, 1024, 1024)
elif sys.argv[1] == "jax":
    import jax.numpy as jnp
    x = jnp.zeros((8, 1024, 1024), np.float32)
else:
    x = np.zeros((8, 1024, 1024), np.float32)
for _ in range(3):
    y = eq.fake_quant_with_min_max_args(x).sum()
# Other threads of the process can only add faults: the fewest of several rounds are those of the calls themselves.
rounds = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        y = eq.fake_quant_with_min_max_args(x).sum()
    rounds.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(rounds))
"""


def faults(framework: str, **environment: str) -> int:
    command = [sys.executable, "-c", COUNT_FAULTS, framework]
    environment = {**os.environ, **environment}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_freed_memory_is_used_again(framework: str) -> None:
    pytest.importorskip(framework)
    kept, given_back = faults(framework, EXACTQAT_KEEP_MIB="512"), faults(framework, EXACTQAT_KEEP_MIB="0")
    assert kept < 100  # the four results have 32768 pages
    assert given_back > kept  # few if the system has huge pages to give, but never none


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are glibc's")
def test_jax_uses_freed_memory_again_if_asked_to() -> None:
    pytest.importorskip("jax")
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    (line,) = re.findall(r"^ *(MALLOC_.*) python", page, re.M)
    assert faults("jax", **dict(setting.split("=") for setting in line.split())) < 100


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_result_keeps_its_memory_while_anything_looks_at_it(framework: str) -> None:
    ones: Any = np.ones((600, 600), np.float32)
    twos: Any = ones + 1
    if framework == "torch":
        torch = pytest.importorskip("torch")
        ones, twos = torch.from_numpy(ones), torch.from_numpy(twos)
    view = eq.fake_quant_with_min_max_args(ones, 0, 255)[::2, 5:]
    gc.collect()
    others = [eq.fake_quant_with_min_max_args(twos, 0, 255) for _ in range(5)]
    assert (view == 1).all()
    assert all((other == 2).all() for other in others)
    assert len({np.asarray(other).ctypes.data for other in others}) == len(others)


def test_results_can_be_changed_in_place() -> None:
    result = eq.fake_quant_with_min_max_args(np.ones((600, 600), np.float32), 0, 255)
    result += 1
    assert result.flags.writeable and (result == 2).all()


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(MemoryError):
        eq.raw_ops.DepthwiseConv2dNativeBackpropInput(
            input_sizes=(1, 1 << 29, 1 << 20, 1),
            filter=np.ones((1, 1, 1, 1), np.float32),
            out_backprop=np.ones((1, 1, 1, 1), np.float32),
            strides=(1, 1 << 29, 1 << 20, 1),
            padding="SAME",
        )
