# SPDX-License-Identifier: Apache-2.0
"""Operators of others' files that choose codes: the largest ones, and those at given places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .file_forms import InOperand
from .floating import Floating
from .movement import Movement
from .operator import REQUIRED, Attributes, Call, FileOperator, Shape, need, register
from .tensor import Tensor

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


@register
class DynamicUpdateSlice(Movement):
    """The first tensor with the second in it, whose first value is at the indices [axes] of one example, rows included;
    indices at which it does not fit are moved as far as it takes."""

    kind = "DYNAMIC_UPDATE_SLICE"
    operands = (3, 3)
    index_operands = (2,)
    index_dtypes = ("int32", "int64")
    constants = True
    options = "DynamicUpdateSliceOptions"
    any_batch = False
    purpose = PURPOSE

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        x, update, starts = map(tuple, shapes)
        fits = len(x) == len(update) and all(size <= whole for size, whole in zip(update, x, strict=True))
        need(fits, f"the update must fit into {list(x)}, got {list(update)}")
        need(starts == (len(x),), f"there must be an index for each axis of {list(x)}, got {list(starts)}")
        return x

    def rows(self, inputs: Sequence[Tensor]) -> int:
        return max(inputs[0].shape)

    def integers(self, call: Call) -> np.ndarray:
        sizes = [tensor.shape[0] for tensor in call.inputs]
        examples = max(len(code) // rows for code, rows in zip(call.codes, sizes, strict=True))
        x, updates, starts = (
            np.broadcast_to(code.reshape(-1, *tensor.shape), (examples, *tensor.shape))
            for code, tensor in zip(call.codes, call.inputs, strict=True)
        )
        result = x.copy()
        for example, update, indices in zip(result, updates, starts, strict=True):
            first = np.clip(indices, 0, np.subtract(example.shape, update.shape))
            example[tuple(map(slice, first, first + update.shape))] = update
        return result.reshape(-1, *call.output.shape[1:])


@register
class ScatterNd(Floating):
    """Zeros of `new_shape` and, at `indices` [1, ..., n], places in the first n axes of one example, the sum of the
    operand's values that belong there."""

    kind = "SCATTER_ND"
    attributes = {"indices": REQUIRED, "new_shape": REQUIRED}
    in_file = {"indices": InOperand(1, lambda read, at: _nested(read.values(at).tolist())), "new_shape": InOperand(2)}
    order = (1, 0, 2)
    plain = ("int32", "int64")
    options = "ScatterNdOptions"
    any_batch = False

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        (first,), whole, indices = shapes, tuple(attributes["new_shape"]), np.asarray(attributes["indices"])
        fits = indices.ndim >= 2 and whole[:1] == indices.shape[:1] == (1,) and indices.shape[-1] <= len(whole)
        need(fits, f"indices must be [1, ..., n] places of one example, got {list(indices.shape)} of {list(whole)}")
        axes = indices.shape[-1]
        within = bool(np.all(indices >= 0) and np.all(indices < np.array(whole[:axes])))
        need(within and min(whole) >= 1, f"indices must lie in the axes {list(whole[:axes])}")
        wanted = (*indices.shape[:-1], *whole[axes:])
        need(tuple(first) == wanted, f"the operand must have the shape {wanted}, got {first}")
        return whole

    def float_results(self, call: Call) -> np.ndarray:
        places = tuple(np.moveaxis(np.asarray(call.attributes["indices"]), -1, 0))
        result = np.zeros((len(call.codes[0]), *call.output.shape[1:]), call.output.dtype)
        for at, values in enumerate(call.codes[0]):
            np.add.at(result[at : at + 1], places, values[None])
        return result

    plain_integers = float_results


def _nested(values: object) -> Any:
    return tuple(map(_nested, values)) if isinstance(values, list) else values
