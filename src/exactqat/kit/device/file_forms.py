# SPDX-License-Identifier: Apache-2.0
"""What a .tflite file says of an operator, as declarations read it, and the operators that only files have.

Files hold more than a network's arithmetic: operators that bring real numbers or unsigned codes onto a grid at a
network's ends, and others that compute shapes. Neither rounds anything, so a graph has none of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .refusals import Unreadable
from .tensor import Tensor

# Of TensorFlow Lite: what brings an input onto a grid, and what takes an output off it.
TO_CODES, TO_REAL = "QUANTIZE", "DEQUANTIZE"
ONTO_A_GRID = (TO_CODES,)
OFF_A_GRID = (TO_CODES, TO_REAL)


# Of an options table; enumerations by the name of their value, as ("Padding", "SAME").
FieldValue = bool | int | float | str | tuple[str, str] | Sequence[int] | bytes | None


@dataclass(frozen=True)
class FileOperator:
    """One operator of a .tflite file.

    Attributes:
        inputs: its operands in the order of the declaration; None: left out.
        outputs: its results.
        option: a field of its options table by name; None where the file does not have it.
        word: likewise, the name of an enumeration's value: ``word("padding", "Padding")``.
        known: values of what is computed from shapes alone, and of constants, by tensor name.
        intermediates: tensors that only give it grids.
    """

    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    option: Callable[[str], Any]
    word: Callable[[str, str], str]
    known: Mapping[str, np.ndarray]
    intermediates: tuple[Tensor, ...] = ()

    @property
    def output(self) -> Tensor:
        """The first result; most operators have no other."""
        return self.outputs[0]

    def operand(self, position: int) -> Tensor:
        """An operand that has to be there."""
        tensor = self.inputs[position] if position < len(self.inputs) else None
        if tensor is None:
            raise Unreadable(f"operand {position} is missing")
        return tensor

    def values(self, position: int) -> np.ndarray:
        """The integers of an operand that has to be a constant."""
        tensor = self.operand(position)
        if 0 in tensor.shape:  # the shape of a scalar
            return np.zeros(0, np.int64)
        if tensor.name not in self.known:
            raise Unreadable(f"operand {position} must be a constant")
        return self.known[tensor.name]

    def integers(self, position: int) -> tuple[int, ...]:
        """Likewise, as a row."""
        return tuple(int(value) for value in self.values(position).reshape(-1))

    def axes(self, position: int) -> tuple[int, ...]:
        """Likewise, as axes of the first operand, none of them negative."""
        return tuple(self.axis(axis) for axis in self.integers(position))

    def integer(self, position: int) -> int:
        """Likewise, of a constant with one value."""
        (value,) = self.integers(position)
        return value

    def one_axis(self, position: int) -> int:
        """Likewise, as the only axis of the first operand."""
        axes = self.axes(position)
        if len(axes) != 1:
            raise Unreadable(f"operand {position} must be one axis, got {len(axes)}")
        return axes[0]

    def axis(self, axis: int, rank: int | None = None) -> int:
        """An axis of the first operand, counted from the front."""
        rank = len(self.operand(0).shape) if rank is None else rank
        if not -rank <= axis < rank:
            raise Unreadable(f"axis must be in {-rank}..{rank - 1}, got {axis}")
        return axis % rank

    def need_count(self, field: str, count: int) -> None:
        """Refuses an option that says another number of operands or results than there are: runtimes follow either."""
        if self.option(field) != count:
            raise Unreadable(f"{field} is {self.option(field)}, where there are {count}")

    def pairs(self, position: int) -> tuple[tuple[int, int], ...]:
        """Likewise, as pairs."""
        values = self.integers(position)
        if len(values) % 2:
            raise Unreadable(f"operand {position} must be pairs of integers, got {len(values)} integers")
        return tuple(zip(values[::2], values[1::2], strict=True))

    def activation(self) -> str:
        """The fused activation."""
        return self.word("fusedActivationFunction", "ActivationFunctionType")

    def need_no_activation(self) -> None:
        """For operators whose declaration has none."""
        word = self.activation()
        if word != "NONE":
            raise Unreadable(f"a fused {word} is not supported here")


@dataclass(frozen=True)
class Option:
    """How files hold an attribute: in a field of the operator's options.

    Attributes:
        field: its name.
        write: the field's value, of the attribute's.
        read: the attribute's value, of the operator and the field's value, which is None where the file has none.
        enumeration: the field's type, if its values have names.
    """

    field: str
    write: Callable[[Any], FieldValue] = lambda value: value
    read: Callable[[FileOperator, Any], object] = lambda read, value: value
    enumeration: str = ""

    def written(self, value: object) -> FieldValue:
        return (self.enumeration, str(value)) if self.enumeration else self.write(value)

    def of(self, read: FileOperator) -> object:
        """The attribute's value in a file."""
        return read.word(self.field, self.enumeration) if self.enumeration else self.read(read, read.option(self.field))


@dataclass(frozen=True)
class InOperand:
    """How files hold an attribute: as an operand, a constant of int32.

    Attributes:
        position: among all operands in the order of the declaration.
        read: the attribute's value, of the operator and the position.
    """

    position: int
    read: Callable[[FileOperator, int], object] = FileOperator.integers

    def of(self, read: FileOperator) -> object:
        """The attribute's value in a file."""
        return self.read(read, self.position)


ACTIVATION = Option("fusedActivationFunction", enumeration="ActivationFunctionType")
Arithmetic = Callable[[Sequence[np.ndarray], Callable[[str], Any]], np.ndarray]


def _slice(operands: Sequence[np.ndarray], option: Callable[[str], Any]) -> np.ndarray:
    x, *ends = operands
    if any(option(name) for name in ("ellipsisMask", "newAxisMask")):
        raise Unreadable("only plain slices of shapes are supported")

    def has(mask: str, axis: int) -> bool:
        return bool(int(option(mask) or 0) >> axis & 1)

    places = [
        begin if has("shrinkAxisMask", axis)
        else slice(None if has("beginMask", axis) else begin, None if has("endMask", axis) else end, step)
        for axis, (begin, end, step) in enumerate(zip(*(part.reshape(-1).tolist() for part in ends), strict=True))
    ]  # fmt: skip
    return np.asarray(x[tuple(places)])


def _plain(option: Callable[[str], Any], field: str) -> None:
    if option(field):
        raise Unreadable(f"shapes are computed with {field} {option(field)}")


def _value_by_value(function: Callable[..., np.ndarray]) -> Arithmetic:
    def computed(operands: Sequence[np.ndarray], option: Callable[[str], Any]) -> np.ndarray:
        _plain(option, "fusedActivationFunction")
        return np.asarray(function(*operands))

    return computed


def _gathered(operands: Sequence[np.ndarray], option: Callable[[str], Any]) -> np.ndarray:
    _plain(option, "batchDims")
    return np.asarray(operands[0].take(operands[1], int(option("axis") or 0)))


# What the file computes from shapes: operands and options -> the result. SHAPE itself takes the shape as its operand.
SHAPE_ARITHMETIC: dict[str, Arithmetic] = {
    "SHAPE": lambda operands, option: operands[0],
    "STRIDED_SLICE": _slice,
    "PACK": lambda operands, option: np.stack(operands, int(option("axis") or 0)),
    "CONCATENATION": lambda operands, option: np.concatenate(operands, int(option("axis") or 0)),
    "GATHER": _gathered,
    "REDUCE_PROD": lambda operands, option: np.asarray(math.prod(map(int, operands[0].reshape(-1)))),
    **{
        kind: _value_by_value(function)
        for kind, function in (("ADD", np.add), ("SUB", np.subtract), ("MUL", np.multiply), ("FLOOR_MOD", np.mod))
    },
    "CAST": lambda operands, option: operands[0],
    "RESHAPE": lambda operands, option: operands[0].reshape(operands[1]),
    "SQUEEZE": lambda operands, option: operands[0].squeeze(),
}
# The one of them that begins.
SHAPE_OF = "SHAPE"


def without_wrapping(steps: Sequence[tuple[str, FileOperator]]) -> list[tuple[str, FileOperator]]:
    """Leaves out what brings a negative index to the end of a table (x < 0 ? x + rows : x): graphs take none."""
    makers = {step.output.name: (word, step) for word, step in steps}
    same: dict[str, Tensor] = {}
    passed: list[FileOperator] = []
    for word, step in steps:
        if word not in ("SELECT", "SELECT_V2") or len(step.inputs) != 3 or None in step.inputs:
            continue
        condition, other, index = (step.operand(at) for at in range(3))
        compared, added = makers.get(condition.name), makers.get(other.name)
        if compared is None or added is None or (compared[0], added[0]) != ("LESS", "ADD"):
            continue
        whole = index.dtype in ("int32", "int64") and index.data is None
        if not whole or compared[1].inputs[0] is not index or added[1].inputs[0] is not index:
            continue
        bound, rows = compared[1].operand(1).data, added[1].operand(1).data
        if not all(has_room(maker.output, math.prod(index.shape)) for maker in (step, compared[1], added[1])):
            continue
        if bound is not None and rows is not None and not np.any(bound):
            same[step.output.name] = index
            passed += [step, compared[1], added[1]]
    return reading_others(steps, same, passed)


def without_packing(
    steps: Sequence[tuple[str, FileOperator]], outputs: Collection[str]
) -> list[tuple[str, FileOperator]]:
    """Leaves out what takes joined tensors apart again, as recurrent layers in a row do, and what joined them if
    nothing else reads that; outputs: the file's."""
    readers = Counter(tensor.name for _, step in steps for tensor in step.inputs if tensor is not None)
    makers = {step.output.name: step for word, step in steps if word == "PACK"}
    same: dict[str, Tensor] = {}
    passed: list[FileOperator] = []
    for word, step in steps:
        packed = makers.get(step.operand(0).name) if word == "UNPACK" and step.inputs and step.inputs[0] else None
        if packed is None or len(packed.inputs) != len(step.outputs):
            continue
        rank = max(len(packed.output.shape), 1)
        if int(packed.option("axis") or 0) % rank != int(step.option("axis") or 0) % rank:
            continue
        if not has_room(packed.output, sum(math.prod(tensor.shape) for tensor in step.outputs)):
            continue
        pairs = list(zip(packed.inputs, step.outputs, strict=True))
        alike = all(
            before and are_alike(before, after) and before.quantization.equals(packed.output.quantization)
            for before, after in pairs
        )
        if alike and not any(after.name in outputs for after in step.outputs):
            same.update((after.name, before) for before, after in pairs if before)
            passed.append(step)
            readers[packed.output.name] -= 1
            if not readers[packed.output.name] and packed.output.name not in outputs:
                passed.append(packed)
    return reading_others(steps, same, passed)


def has_room(tensor: Tensor, values: int) -> bool:
    """Whether the file's shape is that of so many values. TFLite-Micro reserves what the file says, whatever is
    computed; beyond it lie other tensors."""
    return math.prod(tensor.shape) == values


def are_alike(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors that are computed have one shape and one grid."""
    computed = first.data is None and second.data is None and first.dtype == second.dtype
    return computed and first.shape == second.shape and first.quantization.equals(second.quantization)


def reading_others(
    steps: Sequence[tuple[str, FileOperator]], same: Mapping[str, Tensor], passed: Sequence[FileOperator]
) -> list[tuple[str, FileOperator]]:
    """The steps without `passed`; what reads a tensor of `same` reads the other one."""
    left = {id(step) for step in passed}
    return [
        (word, replace(step, inputs=tuple(tensor and same.get(tensor.name, tensor) for tensor in step.inputs)))
        for word, step in steps
        if id(step) not in left
    ]


# What makes a constant of such a shape.
FILLED = "FILL"
# Of more numbers, it is not a shape.
MOST_SHAPE_NUMBERS = 1 << 10
