# SPDX-License-Identifier: Apache-2.0
"""QuantizeLinear and DequantizeLinear: they make no steps, and say on which grids values and constants lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.builder import Moving
from ..core.refusals import CaptureError, Refused
from .onnx_nodes import handles
from .reader import Fixed

DEQUANTIZE = "DequantizeLinear"


def _grid(c: Any, node: Any) -> tuple[float, int]:
    """Scale and int8 zero point, of a whole tensor."""
    scale, zero_point = c.operand_numbers(node, 1), c.operand_numbers(node, 2)
    zero_point = np.zeros(1, np.uint8) if zero_point is None else zero_point
    if scale.size != 1 or zero_point.size != 1:
        raise Refused("an activation has a scale for each channel")
    if zero_point.dtype not in (np.int8, np.uint8):
        raise Refused(f"an activation is in {zero_point.dtype}; int8 and uint8 train")
    shift = 128 if zero_point.dtype == np.uint8 else 0
    return float(np.float32(scale.reshape(()))), int(zero_point.reshape(())) - shift


@handles("QuantizeLinear")
def _quantize(c: Any, node: Any) -> Any:
    x, grid = c.item(node, 0), _grid(c, node)
    if c.grids.setdefault(x.name, grid) == grid:
        c.codes.setdefault(x.name, node.output[0])
        return x
    # Stored once more, on another grid: a step of its own, which computes nothing.
    again = c.step("mul", [x, Fixed(f"{node.output[0]}/one", np.ones(1, np.float32), trained=False)], x.shape)
    c.grids[again.name], c.codes[again.name] = grid, node.output[0]
    return again


@handles(DEQUANTIZE)
def _dequantize(c: Any, node: Any) -> Any:
    x, grid = c.item(node, 0), _grid(c, node)
    if not isinstance(x, Moving) or c.grids.get(x.name, grid) != grid:
        raise Refused("codes are read on another grid than they were stored on")
    return x


def on_its_grid(c: Any, node: Any) -> Fixed:
    """A constant of real numbers that the file holds as codes."""
    codes, scale, zero_point = (c.operand_numbers(node, position) for position in range(3))
    zero_point = np.zeros(scale.shape, np.int64) if zero_point is None else zero_point.astype(np.int64)
    if c.attributes(node).get("block_size"):
        raise CaptureError(f"'{node.output[0]}' has a scale for each block of numbers")
    axis = int(c.attributes(node).get("axis", 1)) % max(codes.ndim, 1)
    shape = [-1 if at == axis else 1 for at in range(codes.ndim)] if scale.size > 1 else [1] * codes.ndim
    steps = (codes.astype(np.int64) - zero_point.reshape(shape)).astype(np.float32)
    grid = scale.reshape(-1).astype(np.float32), zero_point.reshape(-1)
    return Fixed(node.output[0], steps * scale.astype(np.float32).reshape(shape), grid=grid)
