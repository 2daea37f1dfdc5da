# SPDX-License-Identifier: Apache-2.0
"""The meaning of every kernel, in NumPy: TensorFlow's order of operations, written to be read, never optimised."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exactqat.operators import OPERATORS, Operator
from exactqat.operators.declarations.specification import Lowering, TensorSpec, Value
from exactqat.operators.reference import (
    depthwise_conv2d,
    fake_quant,
    fake_quant_rows,
    fused_batch_norm,
    quantize_and_dequantize,
    rounded_sums,
)
from exactqat.operators.reference.arrays import namespace

KERNELS = {
    name: function
    for family in (
        depthwise_conv2d,
        fake_quant,
        fake_quant_rows,
        fused_batch_norm,
        quantize_and_dequantize,
        rounded_sums,
    )
    for name, function in vars(family).items()
    if getattr(function, "__module__", None) == family.__name__ and not name.startswith("_")
}


def _widened(array: Any) -> Any:
    """16-bit tensors are computed with as float32 ones; the results are rounded to 16 bits at the end."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def computed(lowered: Lowering, arrays: Sequence[Any]) -> list[Any]:
    """The results of a checked call, on arrays of any one library that follows the array API standard."""
    xp = namespace(*arrays)
    # By object, not by name: NumPy knows the name bfloat16 only through the package that defines it.
    named = {name: np.dtype(name) for name in ("float32", "float64", "uint8")} | {a.dtype.name: a.dtype for a in arrays}
    with np.errstate(all="ignore"):
        results = KERNELS[lowered.kernel](*(_widened(a) for a in arrays), **lowered.numbers)
        results = results if isinstance(results, tuple) else (results,)
        return [
            xp.asarray(r).astype(named[s.dtype]).reshape(s.shape)
            for r, s in zip(results, lowered.results, strict=False)
        ]


def call(op: str | Operator, operands: Mapping[str, np.ndarray], attributes: Mapping[str, Value]) -> Any:
    """Run an operator, by declaration, raw name or name, on NumPy arrays through the reference."""
    if isinstance(op, str):
        op = next(o for o in OPERATORS.values() if op in (o.name, o.raw_name))
    arrays, checked = op.bind((), {**operands, **attributes})
    lowered = op.lower(tuple(TensorSpec(a.shape, a.dtype.name) for a in arrays), tuple(checked.items()))
    return op.wrap(computed(lowered, arrays))
