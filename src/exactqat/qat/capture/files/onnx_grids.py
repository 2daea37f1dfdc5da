# SPDX-License-Identifier: Apache-2.0
"""QuantizeLinear and DequantizeLinear: they make no steps, and say on which grids values and constants lie."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..core.builder import MOVEMENTS, Moving
from ..core.functions import ITSELF
from ..core.refusals import CaptureError, Refused
from .onnx_nodes import Attributes, handles
from .reader import Fixed, Item, Result

if TYPE_CHECKING:
    from .onnx import OnnxReader

DEQUANTIZE = "DequantizeLinear"
# Steps that join the one before where both are on one grid.
_CUTS = ("relu", "relu6", "clamp")
# Steps whose results devices have on their operand's grid.
_ON_ITS_GRID = (*MOVEMENTS, "max_pool", "avg_pool", "resize")


def _grid(c: OnnxReader, *operands: Item | None) -> tuple[float, int]:
    """Scale and int8 zero point, of a whole tensor. operands: both, or the scale alone."""
    scale, zero_point = map(c.fixed, operands if len(operands) > 1 else (*operands, None))
    zero_point = np.zeros(1, np.uint8) if zero_point is None else zero_point
    assert scale is not None
    if scale.size != 1 or zero_point.size != 1:
        raise Refused("an activation has a scale for each channel")
    if zero_point.dtype not in (np.int8, np.uint8):
        raise Refused(f"an activation is in {zero_point.dtype}; int8 and uint8 train")
    shift = 128 if zero_point.dtype == np.uint8 else 0
    _need_a_grid(c, scale, zero_point.astype(np.int64) - shift)
    return float(np.float32(scale.reshape(()))), int(zero_point.reshape(())) - shift


def _need_a_grid(c: OnnxReader, scale: np.ndarray, zero_point: np.ndarray) -> None:
    """Refuses what is no grid of codes."""
    usable = np.isfinite(scale).all() and (scale > 0).all() and (np.abs(zero_point + 0.5) < 128).all()
    if not usable:
        raise CaptureError(
            f"'{c.outputs[0]}' has a scale that is not positive and finite, or a zero point that is no code"
        )


@handles("QuantizeLinear")
def _quantize(c: OnnxReader, node: Attributes, x: Moving, *grid_of: Item | None) -> Result:
    grid = _grid(c, *grid_of)
    if c.grids.get(x.name, grid) != grid:
        x = _stored_again(c, x, grid)
    elif x.name not in c.grids:
        step = c.made_by.get(x.name)
        if step is not None and step.kind == "concat" and c.items.keys() >= set(step.inputs):
            # Devices join what is on one grid, so operands on others are stored once more.
            operands = [c.items[str(name)] for name in step.inputs]
            on_it = [item if _grid_of(c, item) in (None, grid) else _stored_again(c, item, grid) for item in operands]
            x = c.emit(step.kind, on_it, x.shape, **step.attributes)
        elif step is not None and step.kind in _CUTS and _is_apart(c, source := c.items[str(step.inputs[0])], grid):
            cut = (step.kind, (0,), tuple(step.attributes.values()))
            x = c.emit("composition", [source], x.shape, instructions=(cut,))
        elif _grid_of(c, x) not in (None, grid):
            x = _stored_again(c, x, grid)
    c.grids[x.name] = grid
    c.codes.setdefault(x.name, c.outputs[0])
    # No function is known by what it makes of real numbers where codes lie in between.
    return replace(x, samples={x.name: ITSELF})


def _grid_of(c: OnnxReader, x: Moving) -> tuple[float, int] | None:
    """Of what was stored, or would be on the same grid."""
    while x.name not in c.grids and x.name in c.made_by and c.made_by[x.name].kind in _ON_ITS_GRID:
        if c.made_by[x.name].kind == "avg_pool" and math.prod(map(int, x.shape[2:])) == 1:
            return None  # a mean, with a grid of its own
        x = c.items[str(c.made_by[x.name].inputs[0])]
    return c.grids.get(x.name)


def _is_apart(c: OnnxReader, x: Moving, grid: tuple[float, int]) -> bool:
    """Whether something is stored on another grid, or is not computed where an activation could join it."""
    moved = x.name not in c.made_by or c.made_by[x.name].kind in (*_ON_ITS_GRID, "stored_again")
    own = _grid_of(c, x)
    return own is not None and (moved or own != grid)


def _stored_again(c: OnnxReader, x: Moving, grid: tuple[float, int]) -> Moving:
    again = c.emit("stored_again", [x], x.shape, scale=grid[0], zero_point=grid[1])
    c.grids[again.name] = grid
    return again


@handles(DEQUANTIZE)
def _dequantize(c: OnnxReader, node: Attributes, x: Item, *grid_of: Item | None) -> Result:
    grid = _grid(c, *grid_of)
    if not isinstance(x, Moving) or _grid_of(c, x) not in (None, grid):
        raise Refused("codes are read on another grid than they were stored on")
    return x


def on_its_grid(c: OnnxReader, node: Attributes, *operands: Item | None) -> Fixed:
    """A constant of real numbers that the file holds as codes. operands: codes, scale and zero point."""
    codes, scale, *zero_points = map(c.fixed, operands)
    assert codes is not None and scale is not None
    zero_point = np.zeros(scale.shape, np.int64)
    zero_point = next((point.astype(np.int64) for point in zero_points if point is not None), zero_point)
    if node["block_size"]:
        raise CaptureError(f"'{c.outputs[0]}' has a scale for each block of numbers")
    axis = (1 if node["axis"] is None else node["axis"]) % max(codes.ndim, 1)
    shape = [-1 if at == axis else 1 for at in range(codes.ndim)] if scale.size > 1 else [1] * codes.ndim
    steps = (codes.astype(np.int64) - zero_point.reshape(shape)).astype(np.float32)
    shift = 128 if codes.dtype == np.uint8 else 0
    if codes.dtype in (np.int8, np.uint8):
        _need_a_grid(c, scale, zero_point - shift)
    grid = scale.reshape(-1).astype(np.float32), zero_point.reshape(-1) - shift
    return Fixed(c.outputs[0], steps * scale.astype(np.float32).reshape(shape), grid=grid)
