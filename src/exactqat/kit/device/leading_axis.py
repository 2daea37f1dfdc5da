# SPDX-License-Identifier: Apache-2.0
"""Operators of files with an axis of size 1 before all axes of their tensors: the batch that such a file leaves out.

Graphs take a batch of examples, files need not: their first axis may be the length of a signal, they may
reduce or join along it, and a scalar has no axis at all. With one more axis in front, all of these are operators that a
graph has.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from .file_forms import FileOperator, Unreadable
from .tensor import Tensor

# What becomes of a constant operand: its values, and the rank of the first operand without the new axis.
Constant = Callable[[np.ndarray, int], np.ndarray]


def _axes(values: np.ndarray, rank: int) -> np.ndarray:
    return np.asarray(values + (values >= 0))


def _permutation(values: np.ndarray, rank: int) -> np.ndarray:
    return np.concatenate([[0], values % rank + 1])


def _first(number: int) -> Constant:
    """Of a constant with an entry for each axis: that of the new one."""
    return lambda values, rank: np.concatenate([[number], values.reshape(-1)])


def _pairs(values: np.ndarray, rank: int) -> np.ndarray:
    return np.concatenate([np.zeros((1, 2), values.dtype), values.reshape(-1, 2)])


def _places(values: np.ndarray, rank: int) -> np.ndarray:
    return np.concatenate([np.zeros_like(values[..., :1]), values], -1)[None]


# The operands, in the order of the declarations, that count or list axes.
CONSTANTS: dict[str, dict[int, Constant]] = {
    **{
        kind: {1: _axes}
        for kind in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "ARG_MAX", "ARG_MIN", "EXPAND_DIMS", "REVERSE_V2",
                     "CUMSUM", "REDUCE_PROD", "REDUCE_ANY", "REDUCE_ALL")
    },
    "SCATTER_ND": {1: _places, 2: _first(1)},
    "SPLIT": {1: _axes},
    "SPLIT_V": {2: _axes},
    "TRANSPOSE": {1: _permutation},
    "RESHAPE": {1: _first(1)},
    "BROADCAST_TO": {1: _first(1)},
    "TILE": {1: _first(1)},
    "SLICE": {1: _first(0), 2: _first(1)},
    "STRIDED_SLICE": {1: _first(0), 2: _first(1), 3: _first(1)},
    **{kind: {1: _pairs} for kind in ("PAD", "PADV2", "MIRROR_PAD")},
}  # fmt: skip


def _axis(value: Any) -> Any:
    return value + 1 if (value or 0) >= 0 and value is not None else value


def _moved(value: Any) -> int:
    return int(value or 0) << 1


# Likewise options.
OPTIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "CONCATENATION": {"axis": lambda value: _axis(value or 0)},
    "PACK": {"axis": lambda value: _axis(value or 0)},
    "UNPACK": {"axis": lambda value: _axis(value or 0)},
    "GATHER": {"axis": lambda value: _axis(value or 0)},
    "RESHAPE": {"newShape": lambda value: None if value is None else [1, *value]},
    "FULLY_CONNECTED": {"keepNumDims": lambda value: True},
    "STRIDED_SLICE": {
        **{name: lambda value: _moved(value) | 1 for name in ("beginMask", "endMask")},
        **{name: _moved for name in ("ellipsisMask", "newAxisMask", "shrinkAxisMask")},
    },
}
# Operands that are joined with others, and so need the axis if they are constants, too.
_JOINED = ("CONCATENATION", "PACK")
# Those that have a meaning of their own for the first axis.
BY_BATCH = ("SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND", "GATHER_ND", "DYNAMIC_UPDATE_SLICE", "CODED_EMBEDDING",
            "EMBEDDING", "UNIDIRECTIONAL_SEQUENCE_LSTM", "SVDF")  # fmt: skip


def with_leading_axis(word: str, step: FileOperator, whole: Callable[[Tensor, int], Tensor]) -> FileOperator:
    """The same operator of tensors with one more axis.

    Args:
        whole: gives a computed tensor with so many axes, those in front of size 1.

    Raises:
        Unreadable: the file says it in a way that has no such form.
    """
    if word in BY_BATCH or (word == "GATHER" and step.option("batchDims")):
        raise Unreadable(f"{word} knows its batch")
    constants = {tensor.name for tensor in step.inputs if tensor is not None and tensor.data is not None}
    constants.update(
        tensor.name for tensor in step.inputs if tensor is not None and (tensor.name in step.known or 0 in tensor.shape)
    )
    computed = [tensor for tensor in step.inputs if tensor is not None and tensor.name not in constants]
    first = next(iter(computed), step.output)
    most = max((len(tensor.shape) for tensor in computed), default=0)
    known: dict[str, np.ndarray] = {}
    inputs: list[Tensor | None] = []
    for position, tensor in enumerate(step.inputs):
        change = CONSTANTS.get(word, {}).get(position)
        if tensor is None:
            inputs.append(None)
        elif tensor.name in constants:
            values = step.values(position) if tensor.data is None else tensor.data
            if change is not None:
                changed = change(values, len(first.shape)).astype(values.dtype)
                # Others may read the same constant as it is.
                tensor = replace(tensor, name=f"{tensor.name}#axes", shape=changed.shape, data=changed)
                known[tensor.name] = changed
            elif word in _JOINED:
                tensor = replace(tensor, name=f"{tensor.name}#1", shape=(1, *values.shape), data=values[None])
                known[tensor.name] = values[None]
            inputs.append(tensor)
        else:
            inputs.append(whole(tensor, 1 + (len(tensor.shape) if word in _JOINED else most)))
    outputs = tuple(replace(tensor, shape=(1, *tensor.shape)) for tensor in step.outputs)
    changes = OPTIONS.get(word, {})
    if word == "SQUEEZE":
        if not first.shape:
            raise Unreadable(f"{word} of a scalar, which has no axis to leave out")
        ones = [axis for axis, size in enumerate(first.shape) if size == 1]
        changes = {"squeezeDims": lambda value: [axis % len(first.shape) + 1 for axis in (value or ones)]}

    def option(field: str) -> Any:
        value = step.option(field)
        return changes[field](value) if field in changes else value

    values_by_name = ChainMap(known, cast("dict[str, np.ndarray]", step.known))
    return replace(step, inputs=tuple(inputs), outputs=outputs, option=option, known=values_by_name)


# What gives a tensor the axes in front, or takes them away: it moves no code.
RESHAPED = "RESHAPE"


def lacks_a_batch(shape: Sequence[int]) -> bool:
    """Whether an input of this shape has no axis for a batch of one."""
    return not shape or shape[0] != 1
