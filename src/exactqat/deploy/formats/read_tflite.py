# SPDX-License-Identifier: Apache-2.0
"""Reads a quantized .tflite file from any writer as a Graph.

Each declaration in `exactqat.kit.device` reads what it writes; nothing here knows an operator. What a graph cannot
express (control flow, custom operators, ...) is refused in one sentence that lists all of it with its place.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...kit.device.file_forms import OFF_A_GRID, ONTO_A_GRID, without_packing, without_wrapping
from ...kit.device.leading_axis import lacks_a_batch
from ...kit.device.operator import FLOAT, Refusal
from ...kit.device.tensor import CODE_RANGES, PLAIN, RAW, Tensor, dequantize
from ...kit.display import listed, shortened
from ..graph import Graph, Operator
from ..signature import METADATA, Port, Signature
from .read_variables import Variables, assigned, called_once
from .tflite import with_outputs_at
from .tflite_metadata import attached_files
from .tflite_operators import GraphOperators, is_known
from .tflite_steps import MOST_READS, names_of


class UnsupportedFile(Refusal):
    """A file holds what a graph cannot say; `reasons`: each of them, with all its places."""

    def __init__(self, name: str, reasons: Mapping[str, Sequence[str]]) -> None:
        parts = [f"{reason} (at {listed(places, 4)})" for reason, places in reasons.items()]
        what = "one thing in it is" if len(parts) == 1 else f"{len(parts)} things in it are"
        super().__init__(f"{what} not supported: {'; '.join(parts)}", f"{shortened(name)} cannot be read")
        self.reasons = reasons


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


class _Reader(GraphOperators):
    """Reads one file."""

    def read(self) -> TfliteFile:
        all_steps = self.read_subgraph(self.subgraphs[0])
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
        self.used = {tensor.name: tensor for tensor in (*self.tensors, *self.parts)}
        self.led, self.reshaped = set(), {}
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
        description = self.text(self.model.Description())
        return TfliteFile(graph, inputs, outputs, positions, words, description, tuple(self.signatures), self.content)

    def without_constants(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs that the file computes; interpreters are not asked for the others, whose values it holds."""
        computed = [at for at, tensor in enumerate(outputs) if tensor.data is None]
        if len(computed) in (0, len(outputs)):
            return outputs
        positions = self.numbers(self.subgraph, "Outputs")
        self.content = with_outputs_at(self.content, [int(positions[at]) for at in computed])
        return [outputs[at] for at in computed]

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
