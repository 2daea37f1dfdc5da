# SPDX-License-Identifier: Apache-2.0
"""QuantizeLinear and DequantizeLinear: they make no steps, and say on which grids values and constants lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..core.builder import MOVEMENTS, Moving
from ..core.functions import ITSELF
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
    _need_a_grid(node, scale, zero_point.astype(np.int64) - shift)
    return float(np.float32(scale.reshape(()))), int(zero_point.reshape(())) - shift


def _need_a_grid(node: Any, scale: np.ndarray, zero_point: np.ndarray) -> None:
    """Refuses what is no grid of codes."""
    usable = np.isfinite(scale).all() and (scale > 0).all() and (np.abs(zero_point + 0.5) < 128).all()
    if not usable:
        raise CaptureError(
            f"'{node.output[0]}' has a scale that is not positive and finite, or a zero point that is no code"
        )


@handles("QuantizeLinear")
def _quantize(c: Any, node: Any) -> Any:
    x, grid = c.item(node, 0), _grid(c, node)
    if c.grids.get(x.name, grid) != grid:
        x = _stored_again(c, x, grid)
    elif x.name not in c.grids:
        x = _joined_on(c, x, grid)
    c.grids[x.name] = grid
    c.codes.setdefault(x.name, node.output[0])
    # No function is known by what it makes of real numbers where codes lie in between.
    return replace(x, samples={x.name: ITSELF})


def _joined_on(c: Any, x: Moving, grid: tuple[float, int]) -> Moving:
    """What a step joins on a grid: devices join what is on one grid, so operands on others are stored once more."""
    step = c.made_by.get(x.name)
    if step is None or step.kind != "concat" or not c.items.keys() >= set(step.inputs):
        return x
    operands = [c.items[name] for name in step.inputs]
    on_it = [each if _grid_of(c, each) in (None, grid) else _stored_again(c, each, grid) for each in operands]
    return c.emit(step.kind, on_it, x.shape, **step.attributes)


def _grid_of(c: Any, x: Moving) -> tuple[float, int] | None:
    """Of what was stored, and moved at most since then."""
    while x.name not in c.grids and x.name in c.made_by and c.made_by[x.name].kind in (*MOVEMENTS, "max_pool"):
        x = c.items[c.made_by[x.name].inputs[0]]
    found: tuple[float, int] | None = c.grids.get(x.name)
    return found


def _stored_again(c: Any, x: Moving, grid: tuple[float, int]) -> Moving:
    again = c.emit("stored_again", [x], x.shape, scale=grid[0], zero_point=grid[1])
    c.grids[again.name] = grid
    return again


@handles(DEQUANTIZE)
def _dequantize(c: Any, node: Any) -> Any:
    x, grid = c.item(node, 0), _grid(c, node)
    if not isinstance(x, Moving) or _grid_of(c, x) not in (None, grid):
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
    shift = 128 if codes.dtype == np.uint8 else 0
    if codes.dtype in (np.int8, np.uint8):
        _need_a_grid(node, scale, zero_point - shift)
    grid = scale.reshape(-1).astype(np.float32), zero_point.reshape(-1) - shift
    return Fixed(node.output[0], steps * scale.astype(np.float32).reshape(shape), grid=grid)
