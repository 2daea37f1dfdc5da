# SPDX-License-Identifier: Apache-2.0
"""Tensors of a graph that are joined or added on one grid although their ranges differ much, from the grids alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..kit.device import OPERATORS
from ..kit.device.real import real_numbers
from ..kit.device.tensor import CODE_RANGES
from ..kit.planning.parts import UnequalPart, meets, unequal
from .graph import Graph, Operator


def unequal_parts(graph: Graph) -> tuple[UnequalPart, ...]:
    """The operands of joined tensors and of sums to which the result's grid leaves few steps."""
    makers = {name: operator for operator in graph.operators for name in operator.outputs}
    parts: list[UnequalPart] = []
    for operator in graph.operators:
        whole = graph.tensors[operator.outputs[0]]
        if not meets(operator.kind) or whole.dtype not in CODE_RANGES:
            continue
        for name in dict.fromkeys(operator.inputs):
            if graph.tensors[name].data is None and graph.tensors[name].dtype in CODE_RANGES:
                width, part = _width(graph, makers, name)
                parts += unequal(whole.name, part, width / float(whole.quantization.scale[0]))
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
