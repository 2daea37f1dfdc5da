# SPDX-License-Identifier: Apache-2.0
"""Fast forms of the device's operators: which kernels of `exactqat.operators.cpu` compute them, on what.

A form gives the same bits as `integers` of the operator's declaration, which defines it and tests it. An operator
without a form is computed by its declaration.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...operators import cpu
from ..device import Refusal, Tensor
from ..device.operator import Attributes, DeviceOperator, in_float
from ..device.profile import Profile
from ..device.tensor import CODE_RANGES, INT4

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Part:
    """An operand of the operator (by its position), or a result (-1, further ones -2 and so on), as a kernel takes it.

    shape: one entry may be -1, which follows from the number of values.
    """

    position: int
    shape: tuple[int, ...]

    def shape_of(self, values: int) -> tuple[int, ...]:
        """The shape for that many values."""
        known = -math.prod(self.shape)
        return tuple(values // known if size == -1 else size for size in self.shape)


RESULT = -1


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel: operands (arrays are constants), then the result."""

    kernel: str
    operands: tuple[Part | np.ndarray, ...]
    result: Part
    numbers: Mapping[str, int | float] = field(default_factory=dict)


Form = tuple[KernelCall, ...]
Maker = Callable[[DeviceOperator, Tensors, Tensor, Attributes, Profile], Form | None]

# By the kind of the operator.
MAKERS: dict[str, Maker] = {}
FALLBACKS: list[Maker] = []


def form_of(kind: str) -> Callable[[Maker], Maker]:
    """Registers what makes forms for one kind of operator; None where a form does not apply."""

    def enter(maker: Maker) -> Maker:
        MAKERS[kind] = maker
        return maker

    return enter


def fallback_form(maker: Maker) -> Maker:
    """Registers what makes forms for all other kinds."""
    FALLBACKS.append(maker)
    return maker


def is_int8(inputs: Tensors, output: Tensor) -> bool:
    """Whether all operands and the result are int8."""
    return all(tensor.dtype == "int8" for tensor in (*inputs, output))


def in_one_dtype(inputs: Tensors, output: Tensor) -> bool:
    """Whether all operands and the result are int8, or all int16."""
    return output.dtype in CODE_RANGES and all(tensor.dtype == output.dtype for tensor in inputs)


def make(
    declaration: DeviceOperator, inputs: Tensors, output: Tensor, attributes: Attributes, profile: Profile
) -> Form:
    """The calls that compute an operator; none if its declaration has to do it."""
    if not has_kernels(cpu.kernels) or in_float(inputs, output) or any(tensor.dtype == INT4 for tensor in inputs):
        return ()
    try:  # sums fit into 32 bits, shifts into a word
        declaration.check(inputs, output, attributes)
    except Refusal:
        return ()
    # Kernels know the declared devices' arithmetic; what a user's device states, the declaration computes.
    own = declaration.kind in MAKERS and profile.arithmetic is None
    for maker in [MAKERS[declaration.kind]] if own else FALLBACKS:
        form = maker(declaration, inputs, output, attributes, profile)
        if form:
            return form
    return ()


@functools.cache
def has_kernels(module: Any) -> bool:
    """Whether a module has the kernels: an editable installation may use one built before they existed."""
    return hasattr(module, "Program") and "integer_quantize" in module.kernels()


def may_use_dot_products() -> int:
    """1, or 0 if `EXACTQAT_DOT_PRODUCTS` is 0: the sums are then formed as on processors without such instructions."""
    return int(os.environ.get("EXACTQAT_DOT_PRODUCTS", "1") != "0")


def run(kernel: str, operands: Sequence[np.ndarray], result: Sequence[np.ndarray], **numbers: object) -> None:
    """Calls a kernel on dense arrays in C order."""
    arrays = [*operands, *result]
    described = [(str(array.dtype), list(array.shape)) for array in arrays]
    cpu.kernels.plan(kernel, described, len(operands), numbers)(*(array.ctypes.data for array in arrays))
