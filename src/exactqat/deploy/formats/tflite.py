# SPDX-License-Identifier: Apache-2.0
"""Writes a Graph as a .tflite file.

The schema classes come from the module inside ai-edge-litert (`schema_py_generated`), which is installed anyway to run
the file: writer and runtime thus use the same version of the format, and the repository contains no generated code.
flatbuffers and ai-edge-litert are imported on first use: `pip install 'exactqat[deploy]'`.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ...kit.device import OPERATORS
from ...kit.device.file_forms import TO_CODES, TO_REAL
from ...kit.device.operator import FLOAT, FileStep, Refusal, need
from ...kit.device.tensor import CODE_RANGES, INDICES, INT4, RAW, initial_codes
from ...kit.display import listed, shortened
from ..graph import Graph, Operator, Quantization, Tensor, require_graph
from ..packing import packed as with_four_bits
from ..signature import KEY, METADATA, Signature

IDENTIFIER = b"TFL3"
# A table of the file format: its classes are generated, and have no types.
Table = Any
_METADATA = METADATA.encode()
# What a file may take or return in place of the graph's codes; part of the names of these tensors.
End = Literal["int8", "uint8", "float32"]


def write_tflite(
    graph: Graph,
    path: str | os.PathLike[str],
    description: str = "",
    packed: bool = True,
    *,
    inputs: End | None = None,
    outputs: End | None = None,
) -> Path:
    """Validates `graph` and writes it to `path`; the same graph always gives the same bytes.

    Filters that fit into four bits are stored in four bits if the device that the graph was trained for computes the
    same with them (`deploy.packed`); packed=False keeps a byte for each weight, for other runtimes.

    The batch size is 1 in the file; `interpreter.resize_tensor_input` accepts any other. The file's signature
    ``serving_default`` has the user's names of inputs and outputs; its metadata ``exactqat`` also has the axes (JSON;
    see `Graph.signature`). The file is written completely or not at all. What `with_metadata` added is written, too.

    inputs, outputs: what the file takes and returns where the graph has codes; None: these codes. "float32": real
    numbers, which a QUANTIZE at the beginning rounds to codes and a DEQUANTIZE at the end makes of them; "uint8": codes
    128 higher, of a graph in int8. A number halfway between two codes may get either (in int8 about one in 200,000
    random numbers gets another one than `input_codes` gives). The graph within, and what it computes, stays the same:
    `read_tflite` returns it, and `verify` compares it.

    Raises:
        Refusal: the graph is not sound, or was trained for a device whose runtime lacks one of its operators.
        ValueError: inputs or outputs is something else, or the graph's codes have no such form; real numbers are
            refused for an input of fewer bits than its dtype.
    """
    require_graph(graph)
    missing = graph.absent_from(graph.trained_for) if graph.trained_for else ()
    if missing:
        raise Refusal(f"{graph.trained_for} does not run it: {'; '.join(missing)}")
    return write_whole(Path(path), tflite_bytes(graph, description, packed, inputs, outputs))


def write_whole(path: Path, content: bytes, prefix: str = "") -> Path:
    """Writes a file completely or not at all, even if power fails, and returns its path. prefix: of the name of what is
    left if the process is killed."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix or path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a model is as readable as any file the user creates.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def tflite_bytes(
    graph: Graph, description: str = "", packed: bool = True, inputs: End | None = None, outputs: End | None = None
) -> bytes:
    """The content of the .tflite file of `graph`; see `write_tflite`."""
    require_graph(graph)
    graph.validate()
    if packed and graph.trained_for:
        graph = with_four_bits(graph)
    content = _TfliteWriter(graph, inputs, outputs).finish("; ".join(filter(None, ("exactqat", description))))
    return archive_of(graph.attached, content) if graph.attached else content


def is_file_of(graph: Graph, content: bytes) -> bool:
    """Whether this is byte for byte what `write_tflite` writes for the graph, with any description."""
    try:
        description = file_schema().Model.GetRootAs(content, 0).Description().decode()
        own = description.removeprefix("exactqat").removeprefix("; ")
        ends = ends_in(graph, content)
        return any(tflite_bytes(graph, own, packed, **ends) == content for packed in (True, False))
    except Exception:  # noqa: BLE001 - the reader trusts all that it reads
        return False


def declared_differences(graph: Graph, content: bytes) -> tuple[str, ...]:
    """What a file says of the graph's tensors, inputs and outputs that the graph does not say, a sentence each: the
    runtime computes the same codes whatever a file calls their scale.

    Raises:
        ValueError: the file is damaged.
    """
    if is_file_of(graph, content):
        return ()
    lowered = bool(graph.trained_for)
    own, file = (_declared(model) for model in (tflite_bytes(graph, **ends_in(graph, content)), content))
    differences = []
    for (name, word), ours in own.items():
        theirs, tensor = file.get((name, word)), graph.tensors.get(name)
        if theirs == ours or (name and (theirs is None or tensor is None or (tensor.data is not None and not lowered))):
            continue
        if name:
            differences.append(f"tensor {shortened(name)!r} has the {word} {theirs} in the file, {ours} in the graph")
        elif word != METADATA:
            differences.append(f"the file's {word} are {listed(theirs or ())}, the graph's {listed(ours)}")
        elif lowered or theirs is not None:
            what = "says nothing" if theirs is None else "says something else"
            differences.append(f"the file's metadata {what} about names and axes of inputs and outputs")
    return tuple(differences)


def _declared(content: bytes) -> dict[tuple[str, str], Any]:
    """What a file says of its tensors by name, and of itself by no name."""
    words = words_of("TensorType")

    def numbers(values: Table) -> list[int | float]:
        return [] if np.isscalar(values) else list(values.tolist())

    said: dict[tuple[str, str], Any] = {}
    with _undamaged():
        model = file_schema().Model.GetRootAs(content, 0)
        subgraph = model.Subgraphs(0)
        for at in range(subgraph.TensorsLength()):
            tensor = subgraph.Tensors(at)
            name = (tensor.Name() or b"").decode("utf-8", "replace")
            grid, shape = tensor.Quantization(), numbers(tensor.ShapeAsNumpy())
            said[name, "shape"] = shape if tensor.Buffer() else shape[1:]
            said[name, "dtype"] = words.get(tensor.Type(), "UNKNOWN").lower()
            said[name, "scale"] = [] if grid is None else numbers(grid.ScaleAsNumpy())
            said[name, "zero point"] = [] if grid is None else numbers(grid.ZeroPointAsNumpy())
            said[name, "channel axis"] = 0 if grid is None else grid.QuantizedDimension()
        said["", "inputs"], said["", "outputs"] = end_names(content)
        entries = [model.Metadata(at) for at in range(model.MetadataLength())]
        own = [bytes(model.Buffers(entry.Buffer()).DataAsNumpy()) for entry in entries if entry.Name() == _METADATA]
    try:
        said["", METADATA] = Signature.from_json(own[0]).as_json() if len(own) == 1 else None
    except ValueError:
        said["", METADATA] = None
    return said


def import_deploy(name: str, extra: str = "deploy") -> Any:
    """Imports a module that only this package needs, or says which extra to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this needs {name}: pip install 'exactqat[{extra}]'") from error


def file_schema() -> Table:
    """The classes of the file format."""
    return import_deploy("ai_edge_litert.schema_py_generated")


@functools.cache
def words_of(enumeration: str) -> dict[int, str]:
    """The names of an enumeration's values in the format."""
    values = vars(getattr(file_schema(), enumeration)).items()
    return {value: word for word, value in values if isinstance(value, int)}


@contextmanager
def _undamaged() -> Iterator[None]:
    """What goes wrong within is the file's fault: the schema's classes trust all that they read."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"the file is damaged: {error or type(error).__name__}") from error


def end_names(content: bytes) -> tuple[list[str], list[str]]:
    """The names of a file's inputs and of its outputs, in its order.

    Raises:
        ValueError: the file is damaged.
    """
    with _undamaged():
        subgraph = file_schema().Model.GetRootAs(content, 0).Subgraphs(0)
        sides = (subgraph.Inputs, subgraph.InputsLength), (subgraph.Outputs, subgraph.OutputsLength)
        inputs, outputs = (
            [(subgraph.Tensors(entry(at)).Name() or b"").decode("utf-8", "replace") for at in range(length())]
            for entry, length in sides
        )
    return inputs, outputs


def ends_in(graph: Graph, content: bytes) -> dict[str, Any]:
    """What a file that was written from the graph takes and returns, as `write_tflite` takes it; None where that is the
    graph's codes."""
    sides = zip((graph.inputs, graph.outputs), end_names(content), strict=True)
    forms = [
        [form for form in get_args(End) if any(end_name(name, form) in names for name in own)] for own, names in sides
    ]
    return {side: form[0] if form else None for side, form in zip(("inputs", "outputs"), forms, strict=True)}


def end_name(name: str, form: str) -> str:
    """What a file calls the tensor with which it begins or ends, beside the graph's."""
    return f"{name}/{form}"


_RELU, _RELU6 = (("ActivationFunctionType", name) for name in ("RELU", "RELU6"))


class _TfliteWriter:
    """Collects buffers, tensors and operator codes of one model in the graph's order."""

    def __init__(self, graph: Graph, inputs: End | None = None, outputs: End | None = None) -> None:
        self.graph = graph
        self.unsigned = set(graph.in_uint8())
        self.schema = file_schema()
        self.buffers = [self.table("Buffer")]  # by convention buffer 0 is the empty one
        self.tensors: list[Table] = []
        self.codes: dict[tuple[str, int], int] = {}
        self.indices = {name: self.add_tensor(tensor) for name, tensor in graph.tensors.items()}
        # What the file takes and returns, by the graph's tensors.
        self.taken = {name: self.add_end("inputs", graph.tensors[name], inputs) for name in graph.inputs}
        self.returned = {name: self.add_end("outputs", graph.tensors[name], outputs) for name in graph.outputs}

    def table(self, kind: str, **fields: object) -> Table:
        """A table of the file. The classes of ai-edge-litert 2.0 take no arguments."""
        entry = getattr(self.schema, f"{kind}T")()
        unknown = sorted(set(fields) - set(vars(entry)))
        if unknown:
            raise TypeError(f"the schema's {kind} has no fields {unknown}")
        for name, value in fields.items():
            setattr(entry, name, value)
        return entry

    def finish(self, description: str) -> bytes:
        kept = [tensor for tensor in self.graph.tensors.values() if tensor.successor]
        handles = [self.handle(tensor) for tensor in kept]
        before = [self.bare("CALL_ONCE", [], [], "CallOnceOptions", initSubgraphIndex=1)] if kept else []
        before += [entry for _, entry in handles]
        after = []
        for (handle, _), tensor in zip(handles, kept, strict=True):
            before.append(self.bare("READ_VARIABLE", [handle], [self.indices[tensor.name]], "ReadVariableOptions"))
            following = self.indices[tensor.successor]
            after.append(self.bare("ASSIGN_VARIABLE", [handle, following], [], "AssignVariableOptions"))
        operators = [entry for operator in self.graph.operators for entry in self.operator(operator)]
        for name, end in self.taken.items():
            before += [self.conversion(name, end, self.indices[name])] if end != self.indices[name] else []
        for name, end in self.returned.items():
            after += [self.conversion(name, self.indices[name], end)] if end != self.indices[name] else []
        subgraph = self.table(
            "SubGraph",
            name="main",
            tensors=self.tensors,
            operators=[*before, *operators, *after],
            inputs=list(self.taken.values()),
            outputs=list(self.returned.values()),
        )
        codes = []
        for kind, version in self.codes:
            custom = OPERATORS[kind].custom_code if kind in OPERATORS else ""
            code = getattr(self.schema.BuiltinOperator, "CUSTOM" if custom else kind)
            # Readers from before the 32-bit field look at the deprecated byte, which stops at 127.
            fields = {"builtinCode": code, "deprecatedBuiltinCode": min(code, 127), "customCode": custom or None}
            codes.append(self.table("OperatorCode", version=version, **fields))
        model = self.table(
            "Model",
            version=3,
            description=description,
            subgraphs=[subgraph, *([self.first_values(kept)] if kept else [])],
            buffers=self.buffers,
            operatorCodes=codes,
            signatureDefs=[self.signature()],
            metadata=self.metadata(),
        )
        builder = import_deploy("flatbuffers").Builder(1 << 16)
        builder.Finish(model.Pack(builder), IDENTIFIER)
        return bytes(builder.Output())

    def add_end(self, side: str, tensor: Tensor, form: End | None) -> int:
        """The number of the tensor that the file takes or returns for one of the graph."""
        index, dtype = self.indices[tensor.name], RAW if tensor.name in self.unsigned else tensor.dtype
        if form is not None and form not in get_args(End):
            raise ValueError(f"{side} must be one of {', '.join(get_args(End))}, got {form!r}")
        if form in (None, dtype) or tensor.dtype not in CODE_RANGES:
            return index
        if form != FLOAT and (form, dtype) != (RAW, "int8"):
            raise ValueError(f"{side} cannot be {form}: the codes of {tensor.name!r} are {dtype}")
        name = end_name(tensor.name, form)
        if name in self.graph.tensors:
            raise ValueError(f"{side} cannot be {form}: the graph has a tensor {name!r} already")
        if (
            form == FLOAT
            and side == "inputs"
            and (limits := self.graph.limits(tensor.name)) != CODE_RANGES[tensor.dtype]
        ):
            raise ValueError(f"{side} cannot be {form}: the codes of {tensor.name!r} stay within "
                             f"{limits[0]}..{limits[1]}, which QUANTIZE does not keep to")  # fmt: skip
        if form == FLOAT:
            return self.add_tensor(Tensor(name, tensor.shape, FLOAT, INDICES))
        self.unsigned.add(name)
        return self.add_tensor(replace(tensor, name=name))

    def conversion(self, name: str, source: int, result: int) -> Table:
        """The operator between a tensor of the graph and the one with which the file begins or ends."""
        real, wide = self.schema.TensorType.FLOAT32, self.graph.tensors[name].dtype == "int16"
        if self.tensors[result].type == real:
            version = 3 if wide else 1 if name in self.unsigned else 2
            return self.bare(TO_REAL, [source], [result], "DequantizeOptions", version)
        return self.bare(TO_CODES, [source], [result], "QuantizeOptions", 2 if wide else 1)

    def bare(
        self, word: str, operands: list[int], results: list[int], options: str, version: int = 1, **fields: object
    ) -> Table:
        """An operator that a graph lacks."""
        return self.table(
            "Operator",
            opcodeIndex=self.codes.setdefault((word, version), len(self.codes)),
            inputs=operands,
            outputs=results,
            builtinOptionsType=getattr(self.schema.BuiltinOptions, options),
            builtinOptions=self.table(options, **fields),
        )

    def handle(self, variable: Tensor) -> tuple[int, Table]:
        """The number of a variable's handle among the collected tensors, and the operator that makes it."""
        resource = self.schema.TensorType.RESOURCE
        entry = self.table("Tensor", name=f"{variable.name}/handle", shape=[], type=resource, hasRank=True)
        number = self.append(entry)
        return number, self.bare("VAR_HANDLE", [], [number], "VarHandleOptions", container="", sharedName=variable.name)

    def first_values(self, variables: Sequence[Tensor]) -> Table:
        """The subgraph that runs once."""
        self.tensors, operators = [], []
        for variable in variables:
            handle, entry = self.handle(variable)
            codes = initial_codes(variable, 1)
            value = self.add_tensor(Tensor(f"{variable.name}/initial", variable.shape, variable.dtype,
                                           variable.quantization, codes))  # fmt: skip
            assign = self.bare("ASSIGN_VARIABLE", [handle, value], [], "AssignVariableOptions")
            operators += [entry, assign]
        return self.table(
            "SubGraph", name="first_values", tensors=self.tensors, operators=operators, inputs=[], outputs=[]
        )

    def signature(self) -> Table:
        """The user's names, by which runtimes accept arrays (`interpreter.get_signature_runner()`)."""
        signature = self.graph.signature
        inputs, outputs = (
            [self.table("TensorMap", name=port.name, tensorIndex=ends[port.tensor]) for port in ports]
            for ports, ends in ((signature.inputs, self.taken), (signature.outputs, self.returned))
        )
        return self.table("SignatureDef", inputs=inputs, outputs=outputs, signatureKey=KEY, subgraphIndex=0)

    def metadata(self) -> list[Table]:
        """The whole signature, axes included, and the metadata of the file that the graph was read from."""
        contents = {METADATA: self.graph.signature.as_json().encode()}
        contents |= {name: content for name, content in self.graph.metadata.items() if name != METADATA}
        return [
            self.table("Metadata", name=name, buffer=self.add_buffer(np.frombuffer(content, np.uint8)))
            for name, content in contents.items()
        ]

    def add_tensor(self, tensor: Tensor) -> int:
        schema, dtype = self.schema, tensor.dtype
        if tensor.name in self.unsigned:
            # As the file held them that the graph was read from: 128 above the graph's.
            grid, dtype = tensor.quantization, RAW
            data = None if tensor.data is None else tensor.data.view(np.uint8) ^ 128
            tensor = replace(tensor, data=data, quantization=Quantization(grid.scale, grid.zero_point + 128))
        # A bias may have this scale by chance, so identity decides.
        plain = tensor.quantization is INDICES or (tensor.data is None and tensor.dtype not in CODE_RANGES)
        entry = self.table(
            "Tensor",
            name=tensor.name,
            shape=list(tensor.shape),
            type=getattr(schema.TensorType, dtype.upper()),
            quantization=None if plain else self.quantization(tensor.quantization),
            hasRank=True,
        )
        if tensor.variable:
            entry.isVariable = not tensor.successor
        elif tensor.data is None:
            entry.shapeSignature = [-1, *tensor.shape[1:]]
        else:
            data = tensor.data
            if tensor.dtype == INT4:  # two codes per byte, the first one in the lower four bits
                flat = data.reshape(-1).view(np.uint8) & 15
                even = np.pad(flat, (0, len(flat) % 2))
                data = even[::2] | (even[1::2] << 4)
            entry.buffer = self.add_buffer(data)
        return self.append(entry)

    def append(self, entry: Table) -> int:
        self.tensors.append(entry)
        return len(self.tensors) - 1

    def add_buffer(self, data: np.ndarray) -> int:
        little_endian = data.astype(data.dtype.newbyteorder("<"))
        self.buffers.append(self.table("Buffer", data=np.frombuffer(little_endian.tobytes(), np.uint8)))
        return len(self.buffers) - 1

    def quantization(self, quantization: Quantization) -> Table:
        return self.table(
            "QuantizationParameters",
            scale=quantization.scale,
            zeroPoint=quantization.zero_point,
            quantizedDimension=quantization.axis or 0,
        )

    def operator(self, operator: Operator) -> list[Table]:
        """The operators of the file for one operator of the graph."""
        tensors = [self.graph.tensors[name] for name in operator.inputs]
        output = self.graph.tensors[operator.outputs[0]]
        declaration = OPERATORS[operator.kind]
        need(not declaration.has_own_grid(tensors, output), f"no runtime of .tflite has {output.name!r} on its grid")
        steps = declaration.tflite_steps(tensors, output, operator.attributes)
        inner_indices: dict[str, int] = {}
        return [self.step(operator, step, output, inner_indices) for step in steps]

    def step(self, operator: Operator, step: FileStep, output: Tensor, inner_indices: dict[str, int]) -> Table:
        schema, inputs = self.schema, []
        for operand in step.operands:
            if operand is None:
                inputs.append(-1)
            elif isinstance(operand, int):
                inputs.append(self.indices[operator.inputs[operand]])
            elif isinstance(operand, str):
                inputs.append(inner_indices[operand])
            else:
                operand = replace(operand, name=f"{output.name}/{operand.name}")
                self.unsigned.update([operand.name] if operator.unsigned and operand.dtype == "int8" else [])
                inputs.append(self.add_tensor(operand))
        if step.name:
            grid = output.quantization if step.dtype == output.dtype else INDICES
            between = Tensor(f"{output.name}/{step.name}", step.shape or output.shape, step.dtype, grid)
            inner_indices[step.name] = self.add_tensor(between)
            results = [inner_indices[step.name]]
        else:
            results = [self.indices[name] for name in operator.outputs]
        fields: dict[str, Any] = {}
        for name, value in step.fields.items():
            if value == _RELU6 and 6 / float(output.quantization.scale[0]) >= 2.0**31:
                # No code of a grid this fine comes near 6, and the code of 6 exceeds LiteRT's int32.
                value = _RELU
            fields[name] = getattr(getattr(schema, value[0]), value[1]) if isinstance(value, tuple) else value
        entry = self.table(
            "Operator",
            opcodeIndex=self.codes.setdefault((step.kind, step.version), len(self.codes)),
            inputs=inputs,
            outputs=results,
        )
        if step.intermediates:
            entry.intermediates = [
                self.add_tensor(replace(tensor, name=f"{output.name}/{tensor.name}")) for tensor in step.intermediates
            ]
        if step.kind in OPERATORS and OPERATORS[step.kind].custom_code:
            options = import_deploy("flatbuffers.flexbuffers").Dumps(fields)
            entry.customOptions = np.frombuffer(options, np.uint8)
        elif step.options:
            entry.builtinOptionsType = getattr(schema.BuiltinOptions, step.options)
            entry.builtinOptions = self.table(step.options, **fields)
        return entry


def archive_of(files: Mapping[str, bytes], content: bytes) -> bytes:
    """A file with other files in a ZIP archive after it, not compressed, as applications map them."""
    whole = io.BytesIO(content)
    whole.seek(0, os.SEEK_END)
    with zipfile.ZipFile(whole, "a") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # of 1980: the same files are the same bytes
    return whole.getvalue()


# Where a table of type Model says where its subgraphs are: in the third field.
_SUBGRAPHS = 4 + 2 * 2
# Where a table of type SubGraph says where its outputs are: in the third field, after two numbers of two bytes.
_OUTPUTS = 4 + 2 * 2


def with_outputs(content: bytes, names: tuple[str, ...]) -> bytes:
    """The same model with the named tensors as its outputs: a list appended at the end, to which the model points.

    Raises:
        ValueError: the file has no such tensors, or is damaged.
    """
    positions = positions_of(content, names)
    with _undamaged():
        return with_outputs_at(content, positions)


def positions_of(content: bytes, names: tuple[str, ...]) -> list[int]:
    """The numbers that a file has for tensors of these names.

    The file is not unpacked: a small file may refer to one table or list from so many places that it fills all memory.

    Raises:
        ValueError: the file has no such tensors, or is damaged.
    """
    with _undamaged():
        subgraph = file_schema().Model.GetRootAs(content, 0).Subgraphs(0)
        # A name may be missing in a damaged file, and a tensor without one may stay so.
        pairs = ((position, subgraph.Tensors(position).Name()) for position in range(subgraph.TensorsLength()))
        positions = {name.decode(): position for position, name in pairs if name is not None}
    missing = [name for name in names if name not in positions]
    if missing:
        raise ValueError(f"the file has no tensors {missing}; was it written from another graph?")
    return [positions[name] for name in names]


def with_first_subgraph(content: bytes, number: int) -> bytes:
    """The same model with that subgraph in place of the first, which is what interpreters run."""
    model = file_schema().Model.GetRootAs(content, 0)
    if not 0 < number < model.SubgraphsLength():
        return content
    first = model._tab.Vector(model._tab.Offset(_SUBGRAPHS))
    changed = bytearray(content)
    places = [first, first + 4 * number]
    # A list of tables holds how far each of them lies from its place in the list.
    tables = [place + struct.unpack_from("<I", content, place)[0] for place in places]
    struct.pack_into("<I", changed, places[0], tables[1] - places[0])
    if tables[0] > places[1]:
        struct.pack_into("<I", changed, places[1], tables[0] - places[1])
    return bytes(changed)


def with_outputs_at(content: bytes, positions: Sequence[int]) -> bytes:
    """The same model with the tensors of these numbers as its outputs."""
    table = file_schema().Model.GetRootAs(content, 0).Subgraphs(0)._tab
    field = table.Offset(_OUTPUTS)
    if not field:
        raise ValueError("it has no outputs")
    place = table.Pos + field
    start = -(-len(content) // 4) * 4
    changed = bytearray(content.ljust(start, b"\0"))
    struct.pack_into("<I", changed, place, start - place)
    return bytes(changed) + struct.pack(f"<{1 + len(positions)}I", len(positions), *positions)
