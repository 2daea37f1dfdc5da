# SPDX-License-Identifier: Apache-2.0
"""JAX where there are no kernels: XLA compiles the reference, and it gives the reference's bits.

`EXACTQAT_PORTABLE=all` compiles every case; otherwise a few of each operator, as XLA takes a second for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from cases import Case, cases
from conftest import BY_RAW_NAME, expected_of, in_halves

from exactqat.operators import OPERATORS, Operator, reference
from exactqat.operators.declarations.specification import TensorSpec

jax = pytest.importorskip("jax")
jnp = jax.numpy
frontend = pytest.importorskip("exactqat.operators.jax")

ALL = os.environ.get("EXACTQAT_PORTABLE") == "all"

# What XLA's simplifications would change if the reference let them: a sum of -0, division by a number it knows.
TREACHEROUS = {
    "FusedBatchNormGradV3/one_row_channels_5",
    "QuantizeAndDequantizeV3/shape_5_axis_0_auto_float64",
}


def chosen(op: str) -> list[Case]:
    """Of each kind of case that an operator has the last, and treacherous ones."""
    every = cases(op)
    kinds = {(frozenset(case.tags) & {"empty", "float64"}): case for case in every}
    return [case for case in every if ALL or case in kinds.values() or case.name in TREACHEROUS]


def compiled(op: Operator, operands: list[Any], attributes: dict[str, Any]) -> list[np.ndarray]:
    """The call as XLA compiles it for platforms without kernels, here for the CPU."""
    specs = tuple(TensorSpec(a.shape, a.dtype.name) for a in operands)
    with jax.enable_x64(True):
        results = frontend._traced(op, tuple(attributes.items()), specs)(*map(jnp.asarray, operands))
    return [np.asarray(result) for result in results]


def compare(case: Case) -> None:
    op = BY_RAW_NAME[case.op]
    operands, attributes = op.bind((), {**case.operands, **case.attributes})
    expected = expected_of(case)
    try:
        results = compiled(op, [np.array(operand, order="C") for operand in operands], attributes)
    except (ValueError, TypeError) as error:  # what shapes and attributes alone tell
        assert type(error) is type(expected), error
        return
    if isinstance(expected, Exception):  # values that are known on the device only
        assert all(np.isnan(result).all() for result in results), case.name
        return
    for name, result, wanted in zip(op.results, results, expected, strict=True):
        assert_same_bits(result, wanted, what=f"{case.name} {name}", operands=case.operands)


@pytest.mark.parametrize("case", [case for op in sorted(BY_RAW_NAME) for case in chosen(op)], ids=repr)
def test_compiled_reference_is_the_reference(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["FakeQuantWithMinMaxVarsGradient", "FusedBatchNormV3", "DepthwiseConv2dNative"])
def test_in_16_bits(op: str, dtype: str) -> None:
    bits = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    plain = [case for case in cases(op) if not case.tags & {"float64", "empty"}]
    for case in plain if ALL else plain[3:4]:
        compare(in_halves(case, bits))


@pytest.mark.slow
def test_operators_that_tensorflow_does_not_have() -> None:
    """Those that gradients and training are made of."""
    random = np.random.Generator(np.random.PCG64(3))
    x, dy = (random.standard_normal((3, 2, 5, 3)).astype(np.float32) for _ in range(2))
    low, high = np.float32([-1, -0.5, 0]), np.float32([1, 2, 0])
    vector = np.abs(random.standard_normal(3)).astype(np.float32)
    for name, operands, attributes in (
        ("channel_sum", [x], {}),
        ("fake_quant_rows", [x], {}),
        ("fake_quant_rows_gradient", [dy, x], {}),
        ("fake_quant_rows_within", [x, vector], {}),
        ("fake_quant_rows_within_gradient", [dy, x, vector], {}),
        ("fake_quant_with_min_max_vars_per_channel_training", [x, low, high], {}),
        ("fake_quant_with_min_max_vars_gradient_transpose", [dy, low, high, x, low, high], {}),
        ("batch_norm_statistics", [x, vector, -vector, low, vector], {"activation": "RELU6"}),
    ):
        run_and_compare(name, operands, attributes)
    (_, mask) = run_and_compare("fake_quant_with_min_max_args_training", [x], {})
    run_and_compare("fake_quant_with_min_max_args_gradient_from_mask", [dy, mask], {})
    statistics = [x.mean((0, 1, 2), dtype=np.float64), x.var((0, 1, 2), dtype=np.float64)]
    ends = [np.float32(0), np.float32(1.5)]
    layer = [x, vector, vector, *statistics]
    (_, mask) = run_and_compare("quantized_batch_norm_training", [*layer, *ends], {"activation": "RELU"})
    run_and_compare("quantized_batch_norm_gradient", [dy, x, vector, *statistics, mask], {})
    run_and_compare("quantized_batch_norm_states", [mask, x], {})
    results = compiled(OPERATORS["quantized_batch_norm"], [*layer, *ends[::-1]], bound("quantized_batch_norm", 7, {}))
    assert np.isnan(results[0]).all()  # a range that the reference refuses


def bound(name: str, count: int, attributes: dict[str, Any]) -> dict[str, Any]:
    return OPERATORS[name].bind((None,) * 0, {**dict.fromkeys(OPERATORS[name].operands[:count], 0.0), **attributes})[1]


def run_and_compare(name: str, operands: list[Any], attributes: dict[str, Any]) -> list[np.ndarray]:
    op = OPERATORS[name]
    expected = reference.call(op, dict(zip(op.operands, operands, strict=True)), attributes)
    operands = [np.asarray(operand) for operand in operands]
    results = compiled(op, operands, bound(name, len(operands), attributes))
    for result, wanted in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert_same_bits(result, wanted, what=name)
    return results


IN_A_PROCESS = """
import jax, jax.numpy as jnp, numpy as np, jax_table
assert "@exactqat(" not in jax.jit(jax_table.function_of("FakeQuantWithMinMaxVars")[0]).lower(
    *jax_table.function_of("FakeQuantWithMinMaxVars")[1]).as_text()
jax_table.ALONE["`grad`"]("FakeQuantWithMinMaxVars")
jax_table.ALONE["`vmap`"]("FakeQuantWithMinMaxArgs")
"""


def portable(*arguments: str) -> str:
    """What a program prints whose calls are all portable."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "EXACTQAT_JAX": "portable"}
    folder = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


IN_A_LONG_PROCESS = """
for name in ("FakeQuantWithMinMaxVars", "DepthwiseConv2dNative", "FusedBatchNormV3"):
    for column in jax_table.ALONE:
        if column not in ("`jit`", "donated"):
            jax_table.ALONE[column](name)
"""


@pytest.mark.slow
def test_transformations_of_portable_calls() -> None:
    portable("-c", IN_A_PROCESS + IN_A_LONG_PROCESS * ALL)


@pytest.mark.slow
def test_portable_calls_on_devices() -> None:
    checks = (
        "shard_map_over_some_axes_of_the_mesh",
        "fixed range, over batch",
        "depthwise, over batch and channels",
    )
    errors = json.loads(portable("jax_devices.py", *checks).splitlines()[-1])
    assert errors == dict.fromkeys(checks)


def test_the_switch_is_checked() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import exactqat.operators.jax"],
        env={**os.environ, "EXACTQAT_JAX": "wrong"},
        capture_output=True,
        text=True,
    )
    assert "EXACTQAT_JAX must be 'kernels' or 'portable', got 'wrong'" in run.stderr
