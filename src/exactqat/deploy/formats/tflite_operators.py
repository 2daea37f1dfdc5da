# SPDX-License-Identifier: Apache-2.0
"""The operators of a .tflite file as those of a graph: in the forms of the declarations, with the axes of a graph, and
without what only computes shapes and constants."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from ...kit.device import OPERATORS
from ...kit.device.arithmetic import zero_point_of
from ...kit.device.file_forms import (
    FILLED,
    MOST_SHAPE_NUMBERS,
    OFF_A_GRID,
    SHAPE_ARITHMETIC,
    SHAPE_OF,
    TO_REAL,
    FileOperator,
    Unreadable,
    has_room,
)
from ...kit.device.leading_axis import RESHAPED, with_leading_axis
from ...kit.device.operator import FLOAT, Attributes, DeviceOperator, Refusal, in_float, is_wide, need
from ...kit.device.profile import MICRO, REFERENCE, X86
from ...kit.device.tensor import CODE_RANGES, INDICES, INT4, PLAIN, RAW, Tensor, code_range, dequantize
from ...kit.display import shortened
from ...kit.engine.declared import by_declaration
from ..graph import Operator, check_operator
from .tflite_steps import DTYPES, HALF, MOST_AXES, Subgraphs, names_of

# Codes with which zero initial states are tried, by one operator (some hundred MiB) and by all together.
MOST_FOLDED_AT_ONCE, MOST_FOLDED = 2**22, 2**26


def is_known(tensor: Tensor) -> bool:
    """Whether a graph's tensors may have its dtype; uint8 may not be on a grid."""
    return tensor.dtype in DTYPES or (tensor.dtype == RAW and tensor.quantization is INDICES)


class GraphOperators(Subgraphs):
    """Reads the operators of one file.

    Attributes:
        steps: what is to be read, with the names of the file's operators; readers: how often tensors are read.
        used: the graph's tensors, by name.
        led: names of those with one axis more than in the file.
        reshaped: what else has the same values, by the name and the number of axes.
    """

    steps: list[tuple[str, FileOperator]]
    readers: Counter[str]
    used: dict[str, Tensor]
    led: set[str]
    reshaped: dict[tuple[str, int], Tensor]

    def read_operators(self, passed: set[int]) -> list[Operator]:
        """The graph's operators; what is wrong with the file's becomes a problem."""
        operators: list[Operator] = []
        # By name: whether delegates and built-in kernels may differ in them.
        self.folded: dict[str, bool] = {}
        self.left_to_fold = MOST_FOLDED
        self.of_the_file = set(map(id, (*self.tensors, *self.parts)))
        number = 0
        while number < len(self.steps):
            word, step = self.steps[number]
            if number in passed or self.is_shape_arithmetic(word, step) or self.is_real_constant(word, step):
                number += 1
                continue
            problems, length = [], 1
            # With the file's axes, or else with one more in front, and what reshapes its operands.
            for leading in (False, True):
                self.between: list[Operator] = []
                try:
                    length, layer = self.read_operator(number, leading)
                except (Unreadable, Refusal) as error:
                    problems.append(str(error))
                    for operator in self.between:
                        del self.used[operator.outputs[0]]
                    self.reshaped = {key: tensor for key, tensor in self.reshaped.items() if tensor.name in self.used}
                    continue
                if layer is not None and leading:
                    self.led.update(layer.outputs)
                operators += self.between + ([] if layer is None else [layer])
                break
            else:
                self.problem(next(filter(None, problems)), step.output.name)
            number += length
        return operators

    def with_rank(self, tensor: Tensor, rank: int | None) -> Tensor:
        """A tensor of the graph with the values of a computed one of the file: with the file's axes, or with so many,
        those in front of size 1."""
        # What the file lacks may have the name of another one.
        tensor = self.used.get(tensor.name, tensor) if id(tensor) in self.of_the_file else tensor
        shape = tensor.shape[1:] if tensor.name in self.led else tensor.shape
        shape = shape if rank is None else (*[1] * (rank - len(shape)), *shape)
        if shape == tensor.shape:
            return tensor
        if not shape:
            raise Unreadable("")  # with one more axis it has one, and what is wrong then is said
        if tensor.variable and not tensor.successor:
            raise Unreadable(f"{shortened(tensor.name)!r} is a variable, whose axes are the file's")
        key = tensor.name, len(shape)
        if key not in self.reshaped:
            name = next(alias for number in count(len(shape)) if (alias := f"{tensor.name}#{number}") not in self.used)
            view = self.reshaped[key] = self.used[name] = replace(tensor, name=name, shape=shape)
            unsigned = tensor.name in self.unsigned
            self.unsigned.update([name] if unsigned else [])
            self.between.append(Operator(RESHAPED, (tensor.name,), (name,), {"new_shape": shape}, unsigned=unsigned))
            check_operator(self.between[-1], {tensor.name: tensor, name: view}, {tensor.name}, RESHAPED)
        return self.reshaped[key]

    def as_real(self, tensor: Tensor) -> Tensor:
        """Codes of uint8 as the real numbers that they stand for."""
        if tensor.name not in self.unsigned:
            return tensor
        name = f"{tensor.name}#real"
        real = replace(tensor, name=name, dtype=FLOAT, quantization=INDICES)
        if tensor.data is not None:
            return replace(real, data=dequantize(tensor.data, tensor.quantization))
        if name not in self.used:
            self.between.append(Operator(TO_REAL, (tensor.name,), (name,), {}, unsigned=True))
            check_operator(self.between[-1], {tensor.name: tensor, name: real}, {tensor.name}, TO_REAL)
            self.used[name] = real
        return self.used[name]

    def with_all_axes(self, pointwise: bool, step: FileOperator) -> tuple[Tensor | None, ...]:
        """The operands with the file's axes, and those that broadcast with all of the result's, as a graph's have.

        Only in files with a fixed batch: in others a missing axis could be the batch.
        """
        broadcasts = pointwise and len(step.inputs) > 1 and step.output.shape[:1] == (1,) and not self.open_batch
        inputs: list[Tensor | None] = []
        for tensor in step.inputs:
            if tensor is not None:
                grows = broadcasts and tensor.dtype in (*CODE_RANGES, FLOAT, *PLAIN)
                grows = grows and self.used.get(tensor.name, tensor).data is None
                tensor = self.with_rank(tensor, len(step.output.shape) if grows else None)
            inputs.append(tensor)
        return tuple(inputs)

    def is_shape_arithmetic(self, word: str, step: FileOperator) -> bool:
        """Whether the operator computes with shapes alone; its result is then known."""
        if word == FILLED and step.output.dtype in DTYPES:
            # A constant whose size depends on the batch.
            try:
                shape, (value,) = step.integers(0), step.values(1).reshape(-1)
            except (Unreadable, ValueError):
                return False
            if not shape or len(shape) > MOST_AXES or min(shape) < 1 or math.prod(shape) > MOST_SHAPE_NUMBERS:
                return False
            data = np.full(shape, value, step.values(1).dtype)
            self.check_room(step.output, data.size)
            self.known[step.output.name] = data
            self.used[step.output.name] = replace(step.output, shape=shape, data=data)
            return True
        if word not in SHAPE_ARITHMETIC or step.output.dtype not in ("int32", "int64"):
            return False
        operands = []
        for position, tensor in enumerate(step.inputs):
            if tensor is None:
                return False
            if word == SHAPE_OF and position == 0:
                shape = self.used[tensor.name].shape[tensor.name in self.led :]
                operands.append(np.array(shape, np.int64))
            elif tensor.name in self.known and tensor.dtype in ("int32", "int64"):
                operands.append(self.known[tensor.name].astype(np.int64))
            else:
                return False
        if sum(operand.size for operand in operands) > MOST_SHAPE_NUMBERS:
            return False
        try:
            array = np.asarray(SHAPE_ARITHMETIC[word](operands, step.option))
        except (ValueError, IndexError, TypeError):
            return False
        self.known[step.output.name] = array
        self.check_room(step.output, array.size)
        return True

    def check_room(self, tensor: Tensor, values: int) -> None:
        """Notes a tensor for which the file has another number of values."""
        if tensor.name not in self.unknown_shape and not has_room(tensor, values):
            self.problem(f"a tensor of the shape {list(tensor.shape)}, where {values} values are computed", tensor.name)

    def is_real_constant(self, word: str, step: FileOperator) -> bool:
        """Whether the operator dequantizes a constant or converts it from float16; the result is then a constant of
        real numbers."""
        source = step.inputs[0] if len(step.inputs) == 1 else None
        if word not in OFF_A_GRID or source is None or source.data is None or step.output.dtype != FLOAT:
            return False
        if source.dtype == HALF:
            real = source.data.astype(np.float32)
        elif source.dtype in (*CODE_RANGES, INT4) and source.quantization is not INDICES:
            grid, shape = source.quantization, [1] * source.data.ndim
            if grid.axis is not None:
                if not 0 <= grid.axis < len(shape) or source.data.shape[grid.axis] != len(grid.scale):
                    return False
                shape[grid.axis] = -1
            scale, zero_point = (
                array if array.size == 1 else array.reshape(shape) for array in (grid.scale, grid.zero_point)
            )
            real = (source.data.astype(np.int32) - zero_point.astype(np.int32)).astype(np.float32) * scale
        else:
            return False
        self.look_at(real)
        self.check_room(step.output, real.size)
        self.used[step.output.name] = replace(step.output, shape=real.shape, data=real)
        return True

    def look_at(self, *constants: np.ndarray) -> None:
        """Counts what checks look at: every value of a constant, which many operators may share."""
        self.looks -= sum(constant.nbytes for constant in constants)
        if self.looks < 0:
            raise Refusal("it is damaged: too many operators share its constants")

    def read_operator(self, number: int, leading: bool = False) -> tuple[int, Operator | None]:
        """How many of the file's operators make up the graph's next one, and that one; None if they make constants.

        leading: with one axis more in front of those that the file says.

        Raises:
            Unreadable, Refusal: it cannot be read.
        """
        for declaration in () if leading else OPERATORS.values():
            for form in declaration.other_forms:
                steps = self.chain(number, form)
                match = declaration.read_steps(steps) if steps else None
                if match is not None:
                    known, attributes = [self.with_rank(tensor, None) for tensor in match[0]], match[1]
                    return len(form), self.checked(declaration.kind, known, attributes, steps[-1].outputs)
        word, step = self.steps[number]
        for tensor in (*step.inputs, *step.outputs):
            if tensor is not None and not is_known(tensor):
                raise Unreadable(f"{word} in {tensor.dtype}")
        if word not in OPERATORS:
            raise Unreadable(word if " " in word else f"the operator {word}")
        declaration = OPERATORS[word]
        present = [tensor for tensor in step.inputs if tensor is not None]
        if in_float(present, step.output) and not declaration.floats and word not in OFF_A_GRID:
            raise Unreadable(f"{word} in {FLOAT}")
        computed = any(
            tensor is not None and tensor.data is None and tensor.name in self.known for tensor in step.inputs
        )
        if leading:
            step = with_leading_axis(word, step, self.with_rank)
        else:
            step = replace(step, inputs=self.with_all_axes(declaration.pointwise, step))
        try:
            operands, attributes = declaration.read_operands(step), declaration.read_attributes(step)
        except (TypeError, ValueError, OverflowError) as error:
            raise Unreadable(f"{word}: {error}") from None
        if declaration.dequantizes:
            operands = tuple(map(self.as_real, operands))
        states = names_of([operands[position] for position in declaration.states])
        others = (*step.inputs, *step.outputs, *step.intermediates)
        alone = [tensor for tensor in others if tensor is not None and tensor.variable and not tensor.successor]
        if any(tensor.name not in states for tensor in alone):
            raise Unreadable(f"{word} with a variable, which it is not known to have")
        attributes = {
            name: declaration.attributes[name] if value is None else value for name, value in attributes.items()
        }
        filled = computed or any(tensor.name in self.folded for tensor in operands)
        if filled and not leading and self.fold(declaration, operands, attributes, step.outputs, computed):
            return 1, None
        operator = self.checked(word, operands, attributes, step.outputs)
        # Operators that only move codes give the same ones in all kernels, and delegates leave int16 anyway.
        left = computed or any(self.folded.get(tensor.name) for tensor in operands)
        left = left and not declaration.moves_codes and not is_wide(operands, step.output)
        in_uint8 = [
            tensor.name in self.unsigned
            for tensor in (*self.steps[number][1].inputs, *step.outputs)
            if tensor is not None and tensor.dtype == "int8"
        ]
        if any(in_uint8) and not all(in_uint8):
            raise Unreadable(f"{word} between uint8 and int8")
        return 1, replace(operator, built_in=left)

    def fold(
        self,
        declaration: DeviceOperator,
        operands: Sequence[Tensor],
        attributes: Attributes,
        outputs: Sequence[Tensor],
        built_in: bool,
    ) -> bool:
        """Whether an operator's results are constants now: the file fills an operand with zeros, as the initial state
        of a recurrent layer, and what other operands hold does not matter, on any device.

        built_in: delegates leave it to built-in kernels.
        """
        open_ones = [tensor for tensor in operands if tensor.data is None]
        dtypes = CODE_RANGES if open_ones else (*CODE_RANGES, FLOAT)
        if not all(tensor.dtype in dtypes and is_known(tensor) for tensor in (*operands[:1], *outputs)):
            return False
        if len(open_ones) > 1 or (open_ones and not declaration.pointwise):
            return False
        lowest, highest = code_range(open_ones[0]) if open_ones else (0, 0)
        tried = (highest - lowest + 1) * max(math.prod(tensor.shape) for tensor in operands)
        self.left_to_fold -= tried
        if tried > MOST_FOLDED_AT_ONCE or self.left_to_fold < 0:
            return False
        # All codes that the open operand can have, one after the other.
        every = np.arange(lowest, highest + 1)
        codes = [
            tensor.data if tensor.data is not None
            else np.broadcast_to(every.reshape(-1, *[1] * (len(tensor.shape) - 1)), (len(every), *tensor.shape[1:]))
            for tensor in operands
        ]  # fmt: skip
        codes = [array.astype(tensor.dtype) for array, tensor in zip(codes, operands, strict=True)]
        try:
            shapes = declaration.checked_shapes([tensor.shape for tensor in operands], attributes)
            if len(shapes) != len(outputs):
                return False
            destinations = [replace(tensor, shape=shape) for tensor, shape in zip(outputs, shapes, strict=True)]
            first, *others = (
                by_declaration(declaration, codes, operands, destinations, attributes, profile)
                for profile in ((REFERENCE, MICRO) if built_in else (REFERENCE, MICRO, X86))
            )
        except (ValueError, TypeError, OverflowError, IndexError):
            return False
        agree = all(np.array_equal(*pair) for other in others for pair in zip(first, other, strict=True))
        if not agree or not all(np.all(result == result[:1]) for result in first):
            return False
        for tensor, result in zip(destinations, first, strict=True):
            self.used[tensor.name] = replace(tensor, data=result[:1])
            # LiteRT's built-in kernels round sums of biases in their own way; zero stays zero.
            settled = not built_in or is_wide(operands, tensor) or bool(np.all(result == zero_point_of(tensor)))
            self.folded[tensor.name] = not settled
        return True

    def chain(self, number: int, form: Sequence[str]) -> list[FileOperator]:
        """The next operators, if they have these names and each is the only reader of the one before."""
        steps = self.steps[number : number + len(form)]
        if tuple(word for word, _ in steps) != tuple(form):
            return []
        # All these forms only move values, or replace them one by one.
        values = sum(math.prod(tensor.shape) for tensor in steps[-1][1].outputs)
        for (_, before), (_, after) in zip(steps, steps[1:], strict=False):
            reads = any(tensor is before.output for tensor in after.inputs)
            if before.output.name not in self.unknown_shape and not has_room(before.output, values):
                return []
            if not reads or self.readers[before.output.name] != 1 or len(before.outputs) > 1:
                return []
        return [step for _, step in steps]

    def checked(
        self, word: str, operands: Sequence[Tensor], attributes: Attributes, outputs: Sequence[Tensor]
    ) -> Operator:
        """The graph's operator, once its declaration accepts it."""
        declaration = OPERATORS[word]
        operands = list(operands)
        for position, tensor in enumerate(operands):
            taken = self.used.get(tensor.name)
            # What the file lacks may have the name of another one.
            if taken is not None and taken is not tensor and id(tensor) not in self.of_the_file:
                name = next(alias for number in count(2) if (alias := f"{tensor.name}#{number}") not in self.used)
                operands[position] = replace(tensor, name=name)
        tensors = {tensor.name: self.used.get(tensor.name, tensor) for tensor in operands}
        self.look_at(*(tensor.data for tensor in operands if tensor.data is not None))
        names = tuple(tensor.name for tensor in outputs)
        # TFLite-Micro, which reserves what the file says, lacks some operators.
        lacked = in_float(operands, outputs[0]) and declaration.absent_from(MICRO, f"{word}:{FLOAT}", len(operands))
        unnamed = bool(declaration.custom_code or lacked) and not all(tensor.shape for tensor in outputs)
        if unnamed or self.unknown_shape.intersection(names):
            # Where the writer left sizes open, the sizes in their place need not be those of one example.
            operand_shapes = [tensors[tensor.name].shape for tensor in operands]
            try:
                shapes = declaration.checked_shapes(operand_shapes, attributes)
            except Refusal as error:
                raise Unreadable(f"{word}: {error}") from None
            if len(shapes) == len(outputs):
                outputs = [replace(tensor, shape=shape) for tensor, shape in zip(outputs, shapes, strict=True)]
        tensors.update(zip(names, outputs, strict=True))
        unsigned = any(tensor.name in self.unsigned for tensor in outputs)
        unsigned |= any(tensor.name in self.unsigned for tensor in operands)
        operator = Operator(word, tuple(tensor.name for tensor in operands), names, attributes, unsigned=unsigned)
        try:
            on_a_grid = outputs[0].dtype in CODE_RANGES and not declaration.changes_dtype
            for tensor in operands if on_a_grid else ():
                need(tensor.dtype != RAW, f"{word}: {tensor.name!r} has no scale, and the result has one")
            check_operator(operator, tensors, {tensor.name for tensor in operands}, word)
            own = declaration.has_own_grid([tensors[name] for name in operator.inputs], outputs[0])
            need(not own, f"{word} must have its result on the grid {declaration.fixed_grid or 'of its operand'}")
        except (ValueError, TypeError, OverflowError, IndexError) as error:
            raise Unreadable(re.sub(r"\bint8", "uint8", str(error)) if unsigned else str(error)) from None
        self.used.update(zip(names, outputs, strict=True))
        self.used.update((tensor.name, tensor) for tensor in operands if tensor.name not in self.used)
        return operator
