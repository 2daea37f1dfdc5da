# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the reference's answers, and the devices on which kernels are compared with them.

Adding a device is one more entry in DEVICES: a name and a function (operator, operands, attributes) -> result arrays,
which fills the results with NaN before the kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from cases import Case

from exactqat import cpu, reference
from exactqat.spec import OPERATORS, Operator
from exactqat.spec.op import Lowering, TensorSpec

BY_RAW_NAME = {op.raw_name: op for op in OPERATORS.values() if op.raw_name}


@lru_cache(maxsize=256)
def expected_of(case: Case) -> tuple[np.ndarray, ...] | Exception:
    """The reference's results for a case, or the error it answers with."""
    try:
        results = reference.call(case.op, case.operands, case.attributes)
    except (ValueError, TypeError) as error:
        return error
    return results if isinstance(results, tuple) else (results,)


# Ranges and statistics stay float32 beside 16-bit tensors.
WIDE = {"min", "max", "scale", "offset", "mean", "variance", "reserve_space_1", "reserve_space_2", "reserve_space_3"}


def in_halves(case: Case, dtype: np.dtype) -> Case:
    """A float32 case with its tensors in 16 bits."""
    operands = {n: a if n in WIDE else a.astype(dtype) for n, a in case.operands.items()}
    return replace(case, name=f"{case.name} in {dtype}", operands=operands, expected={})


def unwritten(lowered: Lowering, operands: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Arrays for the results, filled with what no kernel should leave in them."""
    dtypes = {array.dtype.name: array.dtype for array in operands}
    return [
        np.full(spec.shape, 0xAA if spec.dtype == "uint8" else np.nan, dtypes.get(spec.dtype, spec.dtype))
        for spec in lowered.results
    ]


def _on_instruction_set(name: str) -> Callable[[Operator, list[np.ndarray], dict[str, Any]], list[np.ndarray]]:
    def run(op: Operator, operands: list[np.ndarray], attributes: dict[str, Any]) -> list[np.ndarray]:
        specs = tuple(TensorSpec(a.shape, a.dtype.name) for a in operands)
        lowered = op.lower(specs, tuple(attributes.items()))
        results = unwritten(lowered, operands)
        memory = [a.view(np.uint16) if a.itemsize == 2 else a for a in (*operands, *results)]
        cpu.plan(cpu.load(name), specs, lowered)(*memory)
        return results

    return run


DEVICES = {f"cpu-{name}": _on_instruction_set(name) for name in cpu.INSTRUCTION_SETS}
