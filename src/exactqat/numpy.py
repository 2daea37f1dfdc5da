# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays in, NumPy arrays out: how any declared operator runs on them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from exactqat.cpu import planned
from exactqat.spec.op import Operator, TensorSpec

_NAMES: dict[np.dtype, str] = {}  # `dtype.name` is slow


def _name(dtype: np.dtype) -> str:
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = dtype.name
    return name


def _arrays(operands: list[Any]) -> list[np.ndarray]:
    """Dense native arrays; numbers and lists take the dtype of the first array, or float32."""
    dtype = next((v.dtype for v in operands if isinstance(v, np.ndarray)), np.dtype("float32"))
    arrays = []
    for value in operands:
        if type(value) is not np.ndarray:
            value = np.asarray(value, None if isinstance(value, np.ndarray) else dtype)
        if not (value.flags.c_contiguous and value.flags.aligned and value.dtype.isnative):
            value = np.array(value, value.dtype.newbyteorder("="), order="C")
        arrays.append(value)
    return arrays


def call(op: Operator, operands: list[Any], attributes: dict[str, Any]) -> Any:
    """Run `op` on NumPy arrays."""
    arrays = _arrays(operands)
    specs = tuple([TensorSpec(a.shape, _name(a.dtype)) for a in arrays])
    lowered, plan = planned(op, specs, tuple(attributes.items()))
    results = [np.empty(spec.shape, spec.dtype) for spec in lowered.results]
    plan(*arrays, *results)
    return op.wrap(results)


def pass_through(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """NumPy has no gradients to pass."""
    return function(*arrays)
