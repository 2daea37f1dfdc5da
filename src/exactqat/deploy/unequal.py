# SPDX-License-Identifier: Apache-2.0
"""Tensors that are joined or added on one grid although their ranges differ much: the smallest of them loses its
signal, and no figure of the whole shows it."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

from ..kit.device import OPERATORS
from ..kit.device.tensor import CODE_RANGES
from ..kit.display import listed, shortened
from ..kit.planning.callers import users_line
from .graph import Graph

# How many times wider than a part a whole of 8 bits may be, and how many steps it has; one of 16 bits leaves more.
WIDEST, STEPS = 2**5, 255


class UnequalPartsWarning(UserWarning):
    """A tensor is stored on the grid of a much wider one, where little of its signal is left."""


class UnequalPart(NamedTuple):
    """The result that is joined or a sum, the operand, and what signal to noise this keeps on the grid of the whole if
    it fills its own."""

    whole: str
    part: str
    decibels: float


def unequal_parts(graph: Graph) -> tuple[UnequalPart, ...]:
    """The operands of joined tensors and of sums to which the result's grid leaves few steps."""
    makers = {name: operator for operator in graph.operators for name in operator.outputs}
    parts = []
    for operator in graph.operators:
        declaration = OPERATORS[operator.kind]
        joins = declaration.same_quantization and declaration.operands[1] is None
        whole = graph.tensors[operator.outputs[0]]
        if not (joins or declaration.adds) or whole.dtype not in CODE_RANGES:
            continue
        for name in dict.fromkeys(operator.inputs):
            # The tensor before it moved to the grid of what it joins.
            while name in makers and OPERATORS[makers[name].kind].changes_dtype:
                name = makers[name].inputs[0]
            part = graph.tensors[name]
            if part.data is not None or part.dtype not in CODE_RANGES:
                continue
            codes = CODE_RANGES[part.dtype][1] - CODE_RANGES[part.dtype][0]
            steps = codes * float(part.quantization.scale[0]) / float(whole.quantization.scale[0])
            if steps < STEPS / WIDEST:
                parts.append(UnequalPart(whole.name, part.name, 20 * math.log10(max(steps, 1e-3))))
    return tuple(parts)


def warn_of_unequal_parts(graph: Graph) -> None:
    """One warning for all of them."""
    parts = unequal_parts(graph)
    words = [f"{shortened(part)} in {shortened(whole)} ({left:.0f} dB left)" for whole, part, left in parts]
    if parts:
        warnings.warn(
            f"the whole's range is more than {WIDEST} times that of a part, and its grid leaves that little: "
            f"{listed(words, length=160)}. Return the parts as separate outputs, scale them "
            f"alike before they meet, or give the whole 16 bits: qat.Rule({parts[0].whole!r}, activation_bits=16)",
            UnequalPartsWarning,
            stacklevel=users_line(),
        )
