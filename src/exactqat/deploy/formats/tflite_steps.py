# SPDX-License-Identifier: Apache-2.0
"""What a .tflite file says, safely: its tensors and the operators of its subgraphs, by their names.

A file is untrusted data: every list is counted before it is read, and the same bytes cannot be read over and over, so a
damaged or hostile file costs no more memory and time than its size allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ...kit.device import OPERATORS
from ...kit.device.file_forms import FileOperator
from ...kit.device.operator import BOOL, FLOAT, Refusal
from ...kit.device.tensor import CODE_RANGES, INDICES, INT4, RAW, Quantization, Tensor
from ...kit.display import shortened
from .read_variables import WITHOUT_RESULTS
from .tflite import IDENTIFIER, Table, file_schema, import_deploy, with_first_subgraph, words_of

# Bytes per value, where there are several.
_WIDTHS = {"int16": 2, "float16": 2, "int32": 4, "uint32": 4, FLOAT: 4, "int64": 8, "uint64": 8, "float64": 8}
# The most values and bytes in a tensor, and its most axes.
MOST_VALUES, MOST_AXES = 2**31 - 1, 8
# How often a file may read its own bytes; files that runtimes accept read most of them once.
MOST_READS = 8
# Likewise its constants, by all operators together.
MOST_LOOKS = 64
# The dtypes that a graph's tensors may have.
DTYPES = (*CODE_RANGES, "int32", "int64", FLOAT, BOOL, INT4)
# Also allowed for constants, which the file converts to float32.
HALF = "float16"

# What has subgraphs of its own: these are run by an operator, and that one represents a subgraph.
CONTROL_FLOW, COMPOSITE = ("WHILE", "IF", "CALL", "STABLEHLO_WHILE", "STABLEHLO_CASE"), "STABLEHLO_COMPOSITE"
MOST_COMPOSITES = 1000
# A field of an operator's options by name; None where the file does not have it.
Option = Callable[[str], Any]
# What Google's compiler for the Edge TPU leaves of a network, in code for that chip.
EDGE_TPU = "edgetpu-custom-op"
# Operators that the schema lacks, by their names in files.
CUSTOM = {declaration.custom_code: kind for kind, declaration in OPERATORS.items() if declaration.custom_code}


def unpacked(content: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """int8 codes of a constant that holds two per byte, the first one in the lower four bits."""
    count = math.prod(shape)
    if content.nbytes != -(-count // 2):
        raise Refusal(f"it is damaged: constant {shortened(name)!r} of {INT4} and shape {list(shape)} has "
                      f"{content.nbytes:,} bytes")  # fmt: skip
    pairs = np.stack([content << 4, content], -1).view(np.int8) >> 4
    return pairs.reshape(-1)[:count].reshape(shape)


def names_of(tensors: Sequence[Tensor]) -> set[str]:
    """Names of tensors."""
    return {tensor.name for tensor in tensors}


def word_of(enumeration: str, code: int) -> str:
    """The name of an enumeration's value."""
    return words_of(enumeration).get(int(code), f"number {int(code)}")


class Subgraphs:
    """Reads the subgraphs of one file."""

    def __init__(self, content: bytes, name: str, signature: str) -> None:
        if len(content) < 8 or content[4:8] != IDENTIFIER:
            raise Refusal("it is not a .tflite file, which has TFL3 in bytes 4 to 7")
        self.schema = file_schema()
        self.name, self.content = name, content
        self.left = MOST_READS * len(content) + 4096
        self.looks = MOST_LOOKS * len(content) + (64 << 20)
        self.model = self.schema.Model.GetRootAs(content, 0)
        self.signatures = {
            self.text(entry.SignatureKey()): (entry, int(entry.SubgraphIndex()))
            for entry in self.entries(self.model, "SignatureDefs")
        }
        if signature and signature not in self.signatures:
            raise Refusal(f"it has no signature {signature!r}", remedy=f"it has {', '.join(self.signatures) or 'none'}")
        self.chosen = self.signatures[signature][1] if signature else 0
        self.signature = signature or next((name for name, (_, at) in self.signatures.items() if at == 0), "")
        self.content = with_first_subgraph(content, self.chosen)
        self.model = self.schema.Model.GetRootAs(self.content, 0)
        # What cannot be read: the reasons, each with its places.
        self.problems: dict[str, list[str]] = {}
        # Of composites: how many were read, and their own tensors.
        self.depth = 0
        self.parts: list[Tensor] = []
        # Of the subgraph being read.
        self.subgraph: Table = None
        self.tensors: list[Tensor] = []
        self.open_batch: set[str] = set()
        self.unknown_shape: set[str] = set()
        # Names of tensors whose codes the file holds in uint8.
        self.unsigned: set[str] = set()
        # Constants of dtypes that a graph's tensors may not have.
        self.unread: set[str] = set()
        self.known: dict[str, np.ndarray] = {}
        self.codes = self.entries(self.model, "OperatorCodes")
        self.subgraphs = self.entries(self.model, "Subgraphs")
        if not self.subgraphs:
            raise Refusal("it has no subgraph")

    def problem(self, reason: str, place: str) -> None:
        self.problems.setdefault(reason, []).append(place)

    # --- safe access ----------------------------------------------------------------------------------------------

    def counted(self, length: int, size: int) -> int:
        """The length of a list whose elements take `size` bytes each, once it is known to fit."""
        if length * size > len(self.content):
            raise Refusal(f"it is damaged: a list of {length:,} does not fit into {len(self.content):,} bytes")
        self.left -= length * size
        if self.left < 0:
            raise Refusal("it is damaged: it refers to the same bytes from too many places")
        return length

    def entries(self, table: Table, name: str) -> list[Table]:
        """The tables of a list."""
        length = self.counted(getattr(table, f"{name}Length")(), 4)
        return [getattr(table, name)(at) for at in range(length)]

    def numbers(self, table: Table, name: str) -> np.ndarray:
        """The numbers of a list, without a copy; empty if it is left out."""
        length = getattr(table, f"{name}Length")()
        if not length:
            return np.zeros(0, np.int32)
        array = np.asarray(getattr(table, f"{name}AsNumpy")())
        self.counted(length, array.dtype.itemsize)
        return array

    def text(self, value: bytes | None) -> str:
        self.counted(len(value or b""), 1)
        return (value or b"").decode("utf-8", "replace")

    def buffer(self, at: int) -> np.ndarray | None:
        """The bytes of a buffer; None for those without content."""
        if not 0 <= at < self.model.BuffersLength():
            raise Refusal(f"it is damaged: buffer {at} does not exist")
        buffer = self.model.Buffers(at)
        if buffer.Offset() > 1:
            # Constants of large models lie after it.
            start, end = int(buffer.Offset()), int(buffer.Offset() + buffer.Size())
            if end > len(self.content):
                raise Refusal(f"it is damaged: a buffer ends at byte {end:,} of {len(self.content):,}")
            return np.frombuffer(self.content, np.uint8)[start:end] if end > start else None
        length = buffer.DataLength()
        if not length:
            return None
        # Buffers may be shared, and are not copied.
        if length > len(self.content):
            raise Refusal(f"it is damaged: a buffer of {length:,} bytes does not fit into {len(self.content):,}")
        return np.asarray(buffer.DataAsNumpy())

    def subgraph_at(self, number: int) -> Table:
        if not 0 < number < len(self.subgraphs):
            raise Refusal(f"it is damaged: subgraph {number} does not exist beside the one that is run")
        return self.subgraphs[number]

    @contextmanager
    def another_subgraph(self) -> Iterator[None]:
        """Within it, another subgraph can be read."""
        main = self.subgraph, self.tensors, self.open_batch, self.unknown_shape, self.unread, self.known
        yield
        self.subgraph, self.tensors, self.open_batch, self.unknown_shape, self.unread, self.known = main

    def read_subgraph(self, subgraph: Table) -> list[tuple[str, FileOperator]]:
        """Its operators; `tensors` and everything else that belongs to a subgraph are then its own."""
        self.subgraph = subgraph
        self.tensors = self.read_tensors()
        steps = [step for entry in self.entries(subgraph, "Operators") for step in self.read_step_or_parts(entry)]
        self.need_results(self.ends("Inputs"), steps)
        return steps

    def read_step_or_parts(self, entry: Table) -> list[tuple[str, FileOperator]]:
        """An operator, or those of the subgraph that a composite represents: runtimes run them where no accelerator
        knows the composite."""
        word, step = self.read_step(entry)
        if word in CONTROL_FLOW:
            raise Refusal(f"it has control flow ({word}), which no graph can say")
        table = entry.BuiltinOptions2()
        if word != COMPOSITE or table is None:
            return [(word, step)]
        self.depth += 1
        if self.depth > MOST_COMPOSITES:
            raise Refusal("its composites hold one another")
        options = self.schema.StableHLOCompositeOptions()
        options.Init(table.Bytes, table.Pos)
        outside = (self.open_batch, self.unknown_shape, self.unread, self.known)
        with self.another_subgraph():
            parts = self.read_subgraph(self.subgraph_at(options.DecompositionSubgraphIndex()))
            inner = [*self.ends("Inputs"), *self.ends("Outputs")]
            within = (self.open_batch, self.unknown_shape, self.unread, self.known)
        outer = [tensor for tensor in (*step.inputs, *step.outputs) if tensor is not None]
        if [tensor.shape for tensor in inner] != [tensor.shape for tensor in outer]:
            raise Refusal(f"it is damaged: {word} has other shapes than its subgraph {list(map(str, inner))}")
        ends = {tensor.name: end for tensor, end in zip(inner, outer, strict=True)}
        renamed: dict[str, Tensor] = {}

        def named(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or tensor.name in ends:
                return tensor and ends[tensor.name]
            return renamed.setdefault(tensor.name, replace(tensor, name=f"{step.output.name}/{tensor.name}"))

        steps = [
            (part, replace(operator, inputs=tuple(map(named, operator.inputs)), known=self.known,
                           outputs=tuple(cast("Tensor", named(tensor)) for tensor in operator.outputs)))
            for part, operator in parts
        ]  # fmt: skip
        for before, inside in zip(outside[:3], within[:3], strict=True):
            before.update(renamed[name].name for name in inside if name in renamed)
        self.known.update((renamed[name].name, data) for name, data in within[3].items() if name in renamed)
        self.parts += renamed.values()
        return steps

    def ends(self, side: str) -> list[Tensor]:
        """The subgraph's "Inputs" or "Outputs"."""
        return [self.at(index) for index in self.numbers(self.subgraph, side)]

    def need_results(self, inputs: Sequence[Tensor], steps: Sequence[tuple[str, FileOperator]]) -> None:
        """Refuses tensors that are written twice, or read before they are written: runtimes keep other tensors there in
        between. For operators that a graph lacks, nothing else checks this. Likewise inputs and results that are
        constants: TFLite-Micro overwrites them in the file. And results without values: LiteRT's delegates leave their
        operators to other kernels."""
        fixed = {*self.known, *self.unread}
        for tensor in inputs:
            if tensor.name in fixed:
                raise Refusal(f"input {shortened(tensor.name)!r} is also a constant, which runtimes overwrite")
        names = {*names_of(inputs), *fixed}
        later = {tensor.name for _, step in steps for tensor in step.outputs} - names
        for _, step in steps:
            for read in step.inputs:
                if read is not None and read.name in later:
                    what = f"tensor {shortened(read.name)!r} is read before it is computed"
                    raise Refusal(f"it is damaged: {what}")
            later.difference_update(tensor.name for tensor in step.outputs)
            for tensor in step.outputs:
                if 0 in tensor.shape and tensor.dtype not in ("int32", "int64"):  # a shape may have no axes
                    what = f"tensor {shortened(tensor.name)!r} has the shape {list(tensor.shape)}"
                    raise Refusal(f"{what}, no values, where something is computed")
                if tensor.name in names:
                    raise Refusal(f"tensor {shortened(tensor.name)!r} is written twice, which no graph can say")
                names.add(tensor.name)

    def at(self, index: int) -> Tensor:
        if not 0 <= index < len(self.tensors):
            raise Refusal(f"it is damaged: tensor {index} does not exist")
        return self.tensors[index]

    def read_tensors(self) -> list[Tensor]:
        """All tensors, by distinct names."""
        tensors: list[Tensor] = []
        taken: set[str] = set()
        self.open_batch, self.unknown_shape, self.unread, self.known = set(), set(), set(), {}
        for index, entry in enumerate(self.entries(self.subgraph, "Tensors")):
            name = self.text(entry.Name()) or f"tensor_{index}"
            name = name if name not in taken else f"{name}#{index}"
            taken.add(name)
            shape = tuple(int(size) for size in self.numbers(entry, "Shape"))
            values = math.prod(shape)
            if len(shape) > MOST_AXES or min(shape, default=1) < 0 or values > MOST_VALUES:
                detail = f"tensor {shortened(name)!r} has the shape {list(shape[:MOST_AXES])}"
                raise Refusal(detail, remedy=f"runtimes take at most {MOST_AXES} axes and {MOST_VALUES:,} values")
            signature = [int(size) for size in self.numbers(entry, "ShapeSignature")]
            if any(size not in (-1, *shape[at : at + 1]) for at, size in enumerate(signature)):
                detail = f"tensor {shortened(name)!r} has the shape {list(shape)} and the signature {signature}"
                raise Refusal(f"it is damaged: {detail}")
            if signature[:1] == [-1]:
                self.open_batch.add(name)
            if -1 in signature:
                self.unknown_shape.add(name)
            if entry.Sparsity() is not None:
                raise Refusal(f"constant {shortened(name)!r} is sparse, which is not supported")
            dtype = word_of("TensorType", entry.Type()).lower()
            if values * _WIDTHS.get(dtype, 1) > MOST_VALUES:
                detail = f"tensor {shortened(name)!r} of {dtype} has the shape {list(shape)}"
                raise Refusal(detail, remedy=f"runtimes take at most {MOST_VALUES:,} bytes")
            data = self.data(entry, name, dtype, shape)
            grid = self.quantization(entry, name, dtype, data is not None)
            if dtype == RAW and grid is not INDICES:
                # Codes of TensorFlow 1, which are 128 above those of a graph.
                dtype, grid = "int8", replace(grid, zero_point=grid.zero_point - 128)
                data = None if data is None else (data ^ 128).view(np.int8)
                self.unsigned.add(name)
            if data is not None:
                self.known[name] = data
            elif entry.Buffer() and self.buffer(entry.Buffer()) is not None:
                self.unread.add(name)
            if data is not None and not shape:
                shape, data = (1,), data.reshape(1)
            if entry.IsVariable() and data is not None:
                raise Refusal(f"it is damaged: tensor {shortened(name)!r} is a variable and a constant at once")
            tensors.append(Tensor(name, shape, dtype, grid, data, bool(entry.IsVariable())))
        return tensors

    def data(self, entry: Table, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """A constant, as stored in the file."""
        content = self.buffer(entry.Buffer()) if entry.Buffer() else None
        if content is None or dtype not in (*DTYPES, HALF, RAW):
            return None
        if dtype == INT4:
            return unpacked(content, name, shape)
        kind = np.dtype(dtype).newbyteorder("<")
        if content.nbytes != math.prod(shape) * kind.itemsize:
            raise Refusal(f"it is damaged: constant {shortened(name)!r} of {dtype} and shape {list(shape)} has "
                          f"{content.nbytes:,} bytes")  # fmt: skip
        return np.asarray(np.frombuffer(content, kind).reshape(shape).astype(dtype, copy=False))

    def quantization(self, entry: Table, name: str, dtype: str, constant: bool) -> Quantization:
        """A tensor's grid; `INDICES` if it has none."""
        table = entry.Quantization()
        scale = self.numbers(table, "Scale") if table is not None else np.zeros(0)
        zero_point = self.numbers(table, "ZeroPoint") if table is not None else np.zeros(0)
        not_affine = table is not None and table.DetailsType()
        if not_affine:
            self.problem("a quantization that is not affine", name)
        if dtype in (FLOAT, BOOL) or dtype not in (*DTYPES, "uint8") or not scale.size:
            if dtype in CODE_RANGES and not not_affine:
                self.problem(f"{dtype} without a scale", name)
            return INDICES
        dimension = table.QuantizedDimension()
        # Filters in uint8 have one scale, whatever axis they name.
        axis = dimension if constant and (scale.size > 1 or (dimension and dtype != RAW)) else None
        if dimension and not constant:
            # XNNPACK does not take such tensors, and leaves operators to kernels that round differently.
            self.problem("a result with a scale for each channel", name)
        if not constant and np.any((scale > 0) & (scale < np.finfo(np.float32).tiny)):
            # XNNPACK rejects subnormal numbers, and others divide by them.
            self.problem(f"the subnormal scale {scale[0]}", name)
        if zero_point.size not in (1, scale.size):
            zero_point = np.zeros(1, np.int64)
            self.problem("another number of zero points than of scales", name)
        try:
            return Quantization(scale, zero_point, axis, dtype if dtype in CODE_RANGES else "int8")
        except ValueError as error:
            self.problem(str(error), name)
            return INDICES

    def read_step(self, entry: Table) -> tuple[str, FileOperator]:
        """An operator's name, and what the file says about it."""
        index = entry.OpcodeIndex()
        if not 0 <= index < len(self.codes):
            raise Refusal(f"it is damaged: operator code {index} does not exist")
        code = self.codes[index]
        # The deprecated byte is all that old files have, and stops at 127.
        word = word_of("BuiltinOperator", max(code.BuiltinCode(), code.DeprecatedBuiltinCode()))
        option, meaning = self.options(entry, word)
        if code.CustomCode():
            custom = self.text(code.CustomCode())
            if custom == EDGE_TPU:
                raise Refusal("it is compiled for the Edge TPU", remedy="inspect the file it was compiled from")
            word = CUSTOM.get(custom, f"the custom operator {shortened(custom)}")
            option = self.custom_options(entry)
        indices = [int(at) for at in self.numbers(entry, "Inputs")]
        inputs = [None if at == -1 else self.at(at) for at in indices]
        outputs = tuple(self.at(int(at)) for at in self.numbers(entry, "Outputs"))
        if not outputs and word not in WITHOUT_RESULTS:
            raise Refusal(f"it is damaged: {word} has no result")
        declaration = OPERATORS.get(word)
        if declaration is not None and declaration.order is not None:
            # In the order of the declaration, including those omitted at the end.
            inputs += [None] * (len(declaration.order) - len(inputs))
            places = {position: tensor for position, tensor in zip(declaration.order, inputs, strict=False)}
            inputs = [places[position] for position in sorted(places)]
        between = tuple(self.at(int(at)) for at in self.numbers(entry, "Intermediates"))
        return word, FileOperator(tuple(inputs), outputs, option, meaning, self.known, between)

    def options(self, entry: Table, word: str) -> tuple[Option, Callable[[str, str], str]]:
        """How to read the options of an operator of that name: fields, and names of enumeration values."""
        kind, table = entry.BuiltinOptionsType(), entry.BuiltinOptions()
        name = word_of("BuiltinOptions", kind)
        maker = getattr(self.schema, name, None) if kind else None
        options = None
        if maker is not None and table is not None:
            options = maker()
            options.Init(table.Bytes, table.Pos)
        declaration = OPERATORS.get(word)
        own = declaration.options if declaration is not None else ""

        def option(field: str) -> Any:
            # Omitted fields have the schema's defaults; a table without any fields has them too.
            if options is None:
                return None
            known = f"{field[0].upper()}{field[1:]}"
            if own and name != own:
                # Others may have a field of that name, too.
                raise Refusal(f"it is damaged: {word} has {name}, which runtimes take for missing, not {own}")
            if hasattr(options, f"{known}AsNumpy"):
                values = self.numbers(options, known)
                return [int(value) for value in values] if values.size else None
            if not hasattr(options, known):
                # Runtimes treat the options as missing, and compute with zeros or not at all.
                raise Refusal(f"it is damaged: an operator that asks for {field!r} has {name}, which has none")
            return getattr(options, known)()

        def meaning(field: str, enumeration: str) -> str:
            value = option(field)
            return word_of(enumeration, 0 if value is None else value)

        return option, meaning

    def custom_options(self, entry: Table) -> Option:
        """Likewise for an operator that the schema lacks: numbers by name."""
        content = bytes(self.numbers(entry, "CustomOptions"))

        def option(field: str) -> Any:
            if not content:
                return None
            options = import_deploy("flatbuffers.flexbuffers").GetRoot(content).AsMap
            try:
                number = options[field]
            except KeyError:
                return None
            return number.AsFloat if number.IsFloat else number.AsBool if number.IsBool else number.AsInt

        return option
