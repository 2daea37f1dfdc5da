# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of the GPU kernels. No GPU is needed, and it shows what interpreting them cannot: that they
compile, and that nothing is fused, approximated, flushed or added atomically without our knowledge.

Compiling takes most of a minute for each target, so one is tried; `EXACTQAT_TARGETS=all` tries all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

# Cards: H100 and H200 compile all dtypes, A100 the one that most use.
EVERY_TARGET = [("90", "float32"), ("90", "bfloat16"), ("90", "float64"), ("80", "float32")]
TARGETS = EVERY_TARGET if os.environ.get("EXACTQAT_TARGETS") == "all" else EVERY_TARGET[:1]
# A rounding of its own is what the reference has everywhere but in the taps of the depthwise convolution.
MAY_FUSE = {"depthwise_conv2d"}


class Program(NamedTuple):
    kernel: str
    instructions: Counter[str]
    error: str


@lru_cache
def all_programs(capability: str, dtype: str) -> list[Program]:
    """What typical calls launch, and last the first of them compiled with fusion allowed."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("ptx.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, capability, dtype], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    instruction = re.compile(r"^\s+(?:@!?%p\d+ )?([a-z]+\.[a-z0-9_.:]+)", re.M)
    return [
        Program(program["kernel"], Counter(instruction.findall(program["ptx"])), program["error"])
        for program in json.loads(done.stdout)
    ]


def programs(capability: str, dtype: str) -> list[tuple[str, Counter[str]]]:
    return [(program.kernel, program.instructions) for program in all_programs(capability, dtype)[:-1]]


def check(capability: str, dtype: str, forbidden: str, allowed: str = "(?!)") -> None:
    for kernel, instructions in programs(capability, dtype):
        matches = [name for name in instructions if re.search(forbidden, name) and not re.search(allowed, name)]
        assert not matches, f"{kernel} for sm_{capability} and {dtype} has {matches}"


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
def test_every_kernel_compiles(capability: str, dtype: str) -> None:
    errors = [f"{program.kernel}: {program.error}" for program in all_programs(capability, dtype) if program.error]
    assert not errors, "\n".join(errors)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
def test_products_and_sums_are_rounded_one_by_one(capability: str, dtype: str) -> None:
    for kernel, instructions in programs(capability, dtype):
        if kernel.split(".")[0] in MAY_FUSE:
            continue
        fused = [name for name in instructions if re.match(r"(fma|mad)\..*f(16|32|64)", name)]
        # Without .rn the assembler may contract it.
        loose = [name for name in instructions if re.match(r"(add|sub|mul)\.(ftz\.)?(bf16|f16|f32|f64)", name)]
        assert not fused and not loose, f"{kernel} for sm_{capability} and {dtype} has {fused + loose}"


@pytest.mark.slow
def test_the_compiler_would_fuse_if_it_were_allowed_to() -> None:
    assert all_programs("90", "float32")[-1].instructions["fma.rn.f32"]


@pytest.mark.slow
def test_taps_are_fused() -> None:
    counts = Counter[str]()
    for kernel, instructions in programs("90", "float32"):
        counts[kernel] += instructions["fma.rn.f32"]
    fused = {kernel for kernel, count in counts.items() if count}
    assert len(fused) >= 2 and {kernel.split(".")[0] for kernel in fused} == MAY_FUSE, fused


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
def test_nothing_is_approximated_or_flushed(capability: str, dtype: str) -> None:
    # Rounding to whole numbers is the same with and without denormals, as a tiny number was flushed before.
    check(capability, dtype, r"\.approx|\.full|\.ftz", allowed=r"^cvt\.rmi\.ftz\.f32\.f32$")


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
def test_nothing_is_added_in_the_order_of_arrival(capability: str, dtype: str) -> None:
    check(capability, dtype, r"^(atom|red)\.")


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
def test_sums_are_in_float64(capability: str, dtype: str) -> None:
    kernels = dict(programs(capability, dtype))
    for kernel in (
        "fake_quant._gradient",
        "fake_quant._range_gradients",
        "fused_batch_norm._moment_sums",
        "fused_batch_norm._gradient_sums",
        "depthwise_conv2d._filter_sums",
        "reduce._fold",
    ):
        assert kernels[kernel]["add.rn.f64"], f"{kernel} for sm_{capability} and {dtype}"


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
def test_memory_is_read_16_bytes_at_a_time(capability: str, dtype: str) -> None:
    wide = re.compile(r"^ld\.global\.(v4\.b32|v2\.b64)")
    kernels = {kernel for kernel, instructions in programs(capability, dtype) if any(map(wide.match, instructions))}
    for kernel in (
        "fake_quant._fake_quant",
        "fake_quant._fixed_gradient",
        "quantize_and_dequantize._extremes",
        "fused_batch_norm._normalize",
        "fused_batch_norm._x_backprop",
        "depthwise_conv2d._depthwise",
        "depthwise_conv2d._backprop_input",
    ):
        assert kernel in kernels, f"{kernel} for sm_{capability} and {dtype}"
