# SPDX-License-Identifier: Apache-2.0
"""Operators without a form, computed by their declarations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..device import Tensor
from ..device.operator import Attributes, Call, DeviceOperator
from ..device.profile import Profile

# From this many results on, a table of all codes is used; below that it costs more than it saves.
RESULTS_PER_ENTRY = 2


def by_declaration(
    declaration: DeviceOperator,
    codes: Sequence[np.ndarray],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    attributes: Attributes,
    profile: Profile,
) -> tuple[np.ndarray, ...]:
    """Codes of an operator's results as its declaration computes them, or looks them up."""

    def compute(operands: Sequence[np.ndarray]) -> np.ndarray:
        return declaration.results(Call(operands, inputs, (outputs[0],), attributes, profile))

    int8 = outputs[0].dtype == "int8" and all(code.dtype == np.int8 for code in codes)
    if declaration.pointwise and int8 and max(code.size for code in codes) > RESULTS_PER_ENTRY * 256 ** len(codes):
        return (from_table(compute, codes),)
    return declaration.all_results(Call(codes, inputs, outputs, attributes, profile))


def from_table(compute: Callable[[Sequence[np.ndarray]], np.ndarray], codes: Sequence[np.ndarray]) -> np.ndarray:
    """What `compute` returns for int8 operands value by value, looked up among its results for all pairs of codes."""
    all_codes = np.arange(-128, 128).astype(np.int8)
    table = compute(np.meshgrid(*[all_codes] * len(codes), indexing="ij")).ravel()
    first, *others = (code.view(np.uint8) ^ np.uint8(128) for code in codes)
    return table.take((first.astype(np.uint16) << 8) | others[0] if others else first)
