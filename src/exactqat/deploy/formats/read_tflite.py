# SPDX-License-Identifier: Apache-2.0
"""Reads a quantized .tflite file from any writer as a Graph.

Each declaration in `exactqat.kit.device` reads what it writes; nothing here knows an operator. What a graph cannot
express (control flow, custom operators, ...) is refused in one sentence that lists all of it with its place.

A file is untrusted data: every list is counted before it is read, and the same bytes cannot be read over and over, so a
damaged or hostile file costs no more memory and time than its size allows.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...kit.device import OPERATORS
from ...kit.device.arithmetic import zero_point_of
from ...kit.device.file_forms import (
    FILLED,
    MOST_SHAPE_NUMBERS,
    OFF_A_GRID,
    ONTO_A_GRID,
    SHAPE_ARITHMETIC,
    SHAPE_OF,
    TO_REAL,
    FileOperator,
    Unreadable,
    has_room,
    without_packing,
    without_wrapping,
)
from ...kit.device.leading_axis import RESHAPED, lacks_a_batch, with_leading_axis
from ...kit.device.operator import BOOL, FLOAT, Attributes, DeviceOperator, Refusal, in_float, is_wide, need
from ...kit.device.profile import MICRO, REFERENCE, X86
from ...kit.device.tensor import CODE_RANGES, INDICES, INT4, PLAIN, RAW, Quantization, Tensor, code_range, dequantize
from ...kit.display import listed, shortened
from ...kit.engine.declared import by_declaration
from ..graph import Graph, Operator, check_operator
from ..signature import METADATA, Port, Signature
from .read_variables import WITHOUT_RESULTS, Variables, assigned, called_once
from .tflite import IDENTIFIER, Table, file_schema, import_deploy, with_first_subgraph, with_outputs_at, words_of
from .tflite_metadata import attached_files

# Bytes per value, where there are several.
_WIDTHS = {"int16": 2, "float16": 2, "int32": 4, "uint32": 4, FLOAT: 4, "int64": 8, "uint64": 8, "float64": 8}
# The most values and bytes in a tensor, and its most axes.
MOST_VALUES, MOST_AXES = 2**31 - 1, 8
# How often a file may read its own bytes; files that runtimes accept read most of them once.
MOST_READS = 8
# Likewise its constants, by all operators together.
MOST_LOOKS = 64
# Codes with which zero initial states are tried, by one operator (some hundred MiB) and by all together.
MOST_FOLDED_AT_ONCE, MOST_FOLDED = 2**22, 2**26
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


class UnsupportedFile(Refusal):
    """A file holds what a graph cannot say; `reasons`: each of them, with all its places."""

    def __init__(self, name: str, reasons: Mapping[str, Sequence[str]]) -> None:
        parts = [f"{reason} (at {listed(places, 4)})" for reason, places in reasons.items()]
        what = "one thing in it is" if len(parts) == 1 else f"{len(parts)} things in it are"
        super().__init__(f"{what} not supported: {'; '.join(parts)}", f"{shortened(name)} cannot be read")
        self.reasons = reasons


def is_known(tensor: Tensor) -> bool:
    """Whether a graph's tensors may have its dtype; uint8 may not be on a grid."""
    return tensor.dtype in DTYPES or (tensor.dtype == RAW and tensor.quantization is INDICES)


@dataclass(frozen=True)
class FileEnd:
    """An input or output of a file, and the graph's tensor that holds its codes.

    Attributes:
        name, shape, dtype: of the file's tensor; dtype "float32" or "uint8" where the file converts it to the grid.
        tensor: of the graph.
        any_batch: whether the file leaves the batch open.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tensor: str
    any_batch: bool


@dataclass(frozen=True)
class TfliteFile:
    """A file as read.

    Attributes:
        graph: the network; its inputs and outputs are codes, whatever the file's are.
        inputs, outputs: the file's, in its order.
        positions: of the graph's computed tensors in the file, which lacks some that only move codes.
        words: the number of the file's operators by name, including those that the graph lacks.
        description: as its writer gave it.
        signatures: names of all its signatures; the graph is one of them.
        content: the file, with the graph's subgraph in front, which is what interpreters run.
    """

    graph: Graph
    inputs: tuple[FileEnd, ...]
    outputs: tuple[FileEnd, ...]
    positions: Mapping[str, int]
    words: Mapping[str, int]
    description: str
    signatures: tuple[str, ...] = ()
    content: bytes = b""


def to_file(graph: Graph, codes: np.ndarray, end: FileEnd) -> np.ndarray:
    """What the file takes for codes of one example: at a grid's points, every rounding returns the code."""
    if graph.tensors[end.tensor].shape == (1, *end.shape):
        codes = codes.reshape(end.shape)
    if end.dtype == FLOAT and codes.dtype != np.float32:
        return dequantize(codes, graph.tensors[end.tensor].quantization)
    return (codes.astype(np.int16) + 128).astype(np.uint8) if end.dtype == RAW != str(codes.dtype) else codes


def path_of_file(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the path of a file, got {type(path).__name__}")
    return Path(path)


def read_tflite(path: str | os.PathLike[str], signature: str = "") -> Graph:
    """Reads a quantized .tflite file from any writer.

    Inputs and outputs of the graph are codes: where the file takes or returns real numbers (QUANTIZE and DEQUANTIZE at
    its ends) or uint8, the graph begins and ends on the adjacent grid. The batch size is 1, as in all graphs. What the
    file computes from shapes alone is computed here. Inputs and outputs have the names in the file's signature, if it
    has one (`Graph.signature`); other metadata is kept (`Graph.metadata`). Where the file's first axis is not a batch
    of one, one example is all that the file takes at a time, with one more axis in front.

    Args:
        signature: the name of the signature to read, where the file has several; "": the one that interpreters run.

    Raises:
        OSError: the file cannot be read. TypeError: `path` is not a path.
        Refusal: the file is damaged, or holds something that cannot be computed exactly; the message lists all of it.
    """
    path = path_of_file(path)
    file = read_content(path.read_bytes(), path.name, signature)
    object.__setattr__(file.graph, "file", file.content)
    return file.graph


def read_content(content: bytes, name: str = "the file", signature: str = "") -> TfliteFile:
    """As `read_tflite`, from a file's content; `name` is what messages call it."""
    try:
        # A damaged file's scales may have no quotient; the checks catch that.
        with np.errstate(all="ignore"):
            return _Reader(content, name, signature).read()
    except (UnsupportedFile, ImportError):
        raise
    except Refusal as error:
        raise Refusal(str(error), f"{shortened(name)} cannot be read") from None
    except Exception as error:  # noqa: BLE001 - the schema's classes trust all that they read
        detail = shortened(str(error) or type(error).__name__, 120)
        raise Refusal(f"{shortened(name)} cannot be read: it is damaged ({detail})") from None


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


class _Reader:
    """One file."""

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

    # --- parts ----------------------------------------------------------------------------------------------------

    def read(self) -> TfliteFile:
        model = self.model
        self.codes = self.entries(model, "OperatorCodes")
        subgraphs = self.entries(model, "Subgraphs")
        if not subgraphs:
            raise Refusal("it has no subgraph")
        self.subgraphs = subgraphs
        all_steps = self.read_subgraph(subgraphs[0])
        variables = Variables()
        for number in sorted(called_once(all_steps)):
            with self.another_subgraph():
                name = self.text(self.subgraph_at(number).Name()) or f"number {number}"
                variables.begun |= assigned(self.read_subgraph(self.subgraph_at(number)), name)
        steps = variables.without(all_steps)
        for tensor in self.ends("Outputs"):
            if tensor.name in variables.tensors:
                raise Refusal(f"output {shortened(tensor.name)!r} is what a variable holds, which is not supported")
        self.tensors = [variables.tensors.get(tensor.name, tensor) for tensor in self.tensors]
        self.known |= {name: tensor.data for name, tensor in variables.tensors.items() if tensor.data is not None}
        ends = [self.ends("Inputs"), self.without_constants(self.ends("Outputs"))]
        self.used: dict[str, Tensor] = {tensor.name: tensor for tensor in (*self.tensors, *self.parts)}
        # Names of tensors of the graph with one axis more than in the file, and of what else has the same values, by
        # the name and whether it has more axes.
        self.led: set[str] = set()
        self.reshaped: dict[tuple[str, int], Tensor] = {}
        self.steps = without_packing(without_wrapping(steps), names_of(ends[1]))
        self.readers = Counter(tensor.name for _, step in self.steps for tensor in step.inputs if tensor is not None)
        self.readers.update(tensor.name for tensor in ends[1])
        self.readers.update(tensor.successor for tensor in variables.tensors.values() if tensor.successor)
        inputs, outputs, ending = self.find_ends(*ends)
        for end in inputs:
            # Whoever runs the file writes it.
            tensor = self.used[end.tensor] = replace(self.used[end.tensor], variable=False)
            if lacks_a_batch(tensor.shape):
                self.used[tensor.name] = replace(tensor, shape=(1, *tensor.shape))
                self.led.add(tensor.name)
        for tensor in variables.tensors.values():
            if tensor.successor and lacks_a_batch(tensor.shape):
                begun = None if tensor.initial is None else tensor.initial[None]
                self.used[tensor.name] = replace(tensor, shape=(1, *tensor.shape), initial=begun)
                self.led.add(tensor.name)
        operators = self.read_operators(ending)
        for side, file_ends in (("input", inputs), ("output", outputs)):
            for end in file_ends:
                tensor, taken = self.used[end.tensor], (*CODE_RANGES, FLOAT, *PLAIN)
                if not is_known(tensor) or (side == "input" and tensor.dtype not in taken):
                    self.problem(f"an {side} in {tensor.dtype}", end.name)
                if not tensor.shape and not self.problems:
                    self.problem(f"an {side} without axes", end.name)
        results = {name for operator in operators for name in operator.outputs}
        if self.problems:
            # The results of an operator that cannot be read are not a problem of their own.
            results.update(tensor.name for _, step in self.steps for tensor in step.outputs)
        for end in outputs:
            if end.tensor not in results and end.tensor not in {source.tensor for source in inputs}:
                self.problem("an output that no operator computes", end.name)
        if self.problems:
            raise UnsupportedFile(self.name, self.problems)
        graph = self.graph(operators, inputs, outputs)
        computed = {*graph.inputs, *graph.results()}
        positions = {tensor.name: at for at, tensor in enumerate(self.tensors) if tensor.name in computed}
        words = dict(Counter(word for word, _ in all_steps))
        description = self.text(model.Description())
        return TfliteFile(graph, inputs, outputs, positions, words, description, tuple(self.signatures), self.content)

    def without_constants(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs that the file computes; interpreters are not asked for the others, whose values it holds."""
        computed = [at for at, tensor in enumerate(outputs) if tensor.data is None]
        if len(computed) in (0, len(outputs)):
            return outputs
        positions = self.numbers(self.subgraph, "Outputs")
        self.content = with_outputs_at(self.content, [int(positions[at]) for at in computed])
        return [outputs[at] for at in computed]

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

    # --- ends -----------------------------------------------------------------------------------------------------

    def find_ends(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[tuple[FileEnd, ...], tuple[FileEnd, ...], set[int]]:
        """The file's ends, and the numbers of the operators that only quantize or dequantize them."""
        passed: set[int] = set()
        beyond: dict[str, str] = {}
        sides = [(names_of(inputs), ONTO_A_GRID), (names_of(outputs), OFF_A_GRID)]
        for number, (word, step) in enumerate(self.steps):
            source = step.inputs[0] if step.inputs else None
            if source is None:
                continue
            pairs = ((source, step.output), (step.output, source))
            for (names, words), (outer, inner) in zip(sides, pairs, strict=True):
                at_an_end = outer.name in names and word in words and outer.name not in beyond
                # Its other readers would have no operand.
                alone = self.readers[outer.name] == 1
                if at_an_end and alone and outer.data is None and self.only_names(outer, inner):
                    passed.add(number)
                    beyond[outer.name] = inner.name

        def end_of(outer: Tensor) -> FileEnd:
            name, dtype = outer.name, RAW if outer.name in self.unsigned else outer.dtype
            return FileEnd(name, outer.shape, dtype, beyond.get(name, name), name in self.open_batch)

        return tuple(map(end_of, inputs)), tuple(map(end_of, outputs)), passed

    def only_names(self, outer: Tensor, inner: Tensor) -> bool:
        """Whether the codes of `inner` are those of `outer` under another name: real numbers, or uint8 128 above."""
        if inner.dtype not in CODE_RANGES or outer.shape != inner.shape:
            return False
        if outer.dtype == "float32":
            # Whose codes are all real numbers.
            return bool(np.all(inner.quantization.scale < 2.0**111))
        converted = outer.name in self.unsigned and inner.name not in self.unsigned and inner.dtype == "int8"
        return converted and outer.quantization.equals(inner.quantization)

    # --- operators ------------------------------------------------------------------------------------------------

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

    # --- the whole ------------------------------------------------------------------------------------------------

    def graph(self, operators: Sequence[Operator], inputs: Sequence[FileEnd], outputs: Sequence[FileEnd]) -> Graph:
        takes, returns = (tuple(dict.fromkeys(end.tensor for end in side)) for side in (inputs, outputs))
        needed = {name for operator in operators for name in (*operator.inputs, *operator.outputs)}
        needed.update(takes, returns)
        variables = [self.used[name] for name in needed if self.used[name].successor]
        self.between = []
        for tensor in variables:
            successor = self.with_rank(self.used[tensor.successor], len(tensor.shape))
            self.used[tensor.name] = replace(tensor, successor=successor.name)
            needed.update((self.used[tensor.successor].name, successor.name))
        operators = [*operators, *self.between]
        tensors = {name: self.used[name] for name in self.used if name in needed}
        signature, metadata = self.read_signature(inputs, outputs), self.read_metadata()
        attached = attached_files(self.content, MOST_READS * len(self.content))
        graph = Graph(tensors, tuple(operators), takes, returns, "", signature, metadata, attached)
        try:
            graph.validate()
        except ValueError as error:
            # The file's description of its ends may be useless even if its network is sound.
            graph = replace(graph, ports=None)
            try:
                graph.validate()
            except ValueError as other:
                raise Refusal(str(other if signature is not None else error)) from None
        return graph

    def read_metadata(self) -> dict[str, bytes]:
        """All metadata except what this package writes itself."""
        metadata: dict[str, bytes] = {}
        for entry in self.entries(self.model, "Metadata"):
            name, content = self.text(entry.Name()), self.buffer(entry.Buffer())
            if name and name not in metadata:
                self.counted(0 if content is None else content.nbytes, 1)
                metadata[name] = b"" if content is None else content.tobytes()
        return metadata

    def read_signature(self, inputs: Sequence[FileEnd], outputs: Sequence[FileEnd]) -> Signature | None:
        """The names of the file's ends: ours with axes, or those of its first signature."""
        own = self.read_metadata().get(METADATA)
        if own is not None and not self.chosen:
            try:
                return Signature.from_json(own)
            except ValueError:
                return None
        if self.signature not in self.signatures:
            return None
        signature, _ = self.signatures[self.signature]
        sides = []
        for name, ends in (("Inputs", inputs), ("Outputs", outputs)):
            tensors = {end.name: end.tensor for end in ends}
            ports = []
            for entry in self.entries(signature, name):
                tensor = tensors.get(self.at(entry.TensorIndex()).name)
                if tensor is None:
                    return None
                ports.append(Port(self.text(entry.Name()), tensor, tuple(range(len(self.used[tensor].shape)))))
            sides.append(tuple(ports))
        return Signature(*sides)
