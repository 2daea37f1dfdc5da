# SPDX-License-Identifier: Apache-2.0
"""JAX where there are no kernels: XLA compiles the reference, and it gives the reference's bits.

`EXACTQAT_PORTABLE=all` compiles every case; otherwise a few of each operator, as XLA takes a second for each.
"""

from __future__ import annotations

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

import exactqat as eq
from exactqat import reference
from exactqat.operators import OPERATORS, Operator
from exactqat.operators.op import TensorSpec

jax = pytest.importorskip("jax")
jnp = jax.numpy
frontend = pytest.importorskip("exactqat.jax")

ALL = os.environ.get("EXACTQAT_PORTABLE") == "all"


def chosen(op: str) -> list[Case]:
    """Of each kind of case that an operator has, by tags, the first."""
    every = cases(op)
    return list(every) if ALL else list({(frozenset(case.tags) & {"empty", "float64"}): case for case in every}.values())


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
