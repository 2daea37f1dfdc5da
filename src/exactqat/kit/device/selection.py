# SPDX-License-Identifier: Apache-2.0
"""Operators of others' files that choose codes: the largest ones, and those at given places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .file_forms import InOperand
from .movement import Movement
from .operator import REQUIRED, Attributes, Call, FileOperator, Shape, need, register

PURPOSE = "files: no plan makes it"


@register
class TopK(Movement):
    """The `count` largest codes of the last axis in falling order, of equal ones the first first; and int32 indices."""

    kind = "TOPK_V2"
    attributes = {"count": REQUIRED}
    in_file = {"count": InOperand(1, FileOperator.integer)}
    version = 2
    wide_version = 3
    options = "TopKV2Options"
    purpose = PURPOSE

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        return self.shapes(shapes, attributes)[0]

    def shapes(self, shapes: Sequence[Shape], attributes: Attributes) -> tuple[Shape, ...]:
        (first,), count = shapes, attributes["count"]
        need(len(first) >= 2, f"the operand must have an axis beside the batch, got {first}")
        need(1 <= count <= first[-1], f"count must be in 1..{first[-1]}, got {count}")
        return ((*first[:-1], count),) * 2

    def result_dtypes(self, attributes: Attributes, stored: str, count: int) -> tuple[str, ...]:
        return (stored, "int32")

    def integers(self, call: Call) -> np.ndarray:
        return self.all_results(call)[0]

    def all_results(self, call: Call) -> tuple[np.ndarray, ...]:
        x = call.codes[0]
        # -128 has no opposite in int8.
        falling = -x.astype(np.int64) if x.dtype != np.float32 else -x
        order = np.argsort(falling, -1, kind="stable")[..., : call.attributes["count"]]
        return np.take_along_axis(x, order, -1), order.astype(np.int32)


@register
class GatherNd(Movement):
    """What lies at `indices` [..., n]: places in the first n axes of one example, its rows included."""

    kind = "GATHER_ND"
    attributes = {"indices": REQUIRED}
    in_file = {"indices": InOperand(1, lambda read, at: _nested(read.values(at).tolist()))}
    wide_version = 3
    options = "GatherNdOptions"
    moves_axes = True
    any_batch = False
    purpose = PURPOSE

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), indices = shapes, np.asarray(attributes["indices"])
        fits = indices.ndim >= 2 and indices.size > 0 and np.issubdtype(indices.dtype, np.integer)
        need(fits, f"indices must be integers [..., n], got {indices.dtype} {list(indices.shape)}")
        axes = indices.shape[-1]
        need(axes <= len(first), f"indices must name at most {len(first)} axes, got {axes}")
        fits = bool(np.all(indices >= 0) and np.all(indices < np.array(first[:axes])))
        need(fits, f"indices must lie in the axes {list(first[:axes])}")
        return (*indices.shape[:-1], *first[axes:])

    def integers(self, call: Call) -> np.ndarray:
        places = tuple(np.moveaxis(np.asarray(call.attributes["indices"]), -1, 0))
        examples = call.codes[0].reshape(-1, *call.inputs[0].shape)
        return np.concatenate([example[places] for example in examples])


def _nested(values: Any) -> Any:
    return tuple(map(_nested, values)) if isinstance(values, list) else values


__all__ = ["GatherNd", "TopK"]
