# SPDX-License-Identifier: Apache-2.0
"""Tensors that are joined or added on one grid although their ranges differ much: the smallest of them loses its
signal, and no figure of the whole shows it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..kit.device import OPERATORS
from ..kit.device.real import real_numbers
from ..kit.device.tensor import CODE_RANGES
from ..kit.display import listed, shortened
from ..kit.planning.callers import users_line
from .graph import Graph, Operator

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
            if graph.tensors[name].data is None and graph.tensors[name].dtype in CODE_RANGES:
                width, part = _width(graph, makers, name)
                steps = width / float(whole.quantization.scale[0])
                if 0 < steps < STEPS / WIDEST:  # at 0 it has no signal
                    parts.append(UnequalPart(whole.name, part, 20 * math.log10(max(steps, 1e-3))))
    return tuple(parts)


def _width(graph: Graph, makers: Mapping[str, Operator], name: str) -> tuple[float, str]:
    """How far apart a tensor's values lie at most, and its name before it moved to another grid. That grid may be the
    whole's, so what the values are multiples and weighted sums of bounds them too."""
    width, gain, part = math.inf, 1.0, name
    while (tensor := graph.tensors[name]).dtype in CODE_RANGES:
        low, high = CODE_RANGES[tensor.dtype]
        width = min(width, gain * (high - low) * float(tensor.quantization.scale[0]))
        if name not in makers:
            break
        operands = [graph.tensors[operand] for operand in makers[name].inputs]
        declaration = OPERATORS[makers[name].kind]
        constant = next((operand for operand in operands if operand.data is not None), None)
        if constant is not None and (declaration.filter_axis is not None or declaration.float_kind == "mul"):
            factors = np.abs(real_numbers(np.asarray(constant.data), constant))
            axes = tuple(axis for axis in range(factors.ndim) if declaration.filter_axis not in (None, axis))
            gain *= float(factors.sum(axis=axes).max())
        elif len(operands) > 1 or not (declaration.changes_dtype or declaration.same_quantization):
            break
        name = next(operand.name for operand in operands if operand.data is None)
        part = name if math.isclose(gain, 1, rel_tol=1e-6) else part
    return width, part


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
