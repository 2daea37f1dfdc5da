# SPDX-License-Identifier: Apache-2.0
"""What is in a quantized .tflite or .onnx file, and whether the devices agree on it.

The file runs unchanged on every runtime of this machine, with the result of every operator as an output. Each operator
is simulated from the device's own operands, which finds the one that differs instead of all that follow it. The
simulations of all devices, including those this machine lacks, are then compared with each other: from which layer on
they differ, and in how many codes.

Runtimes trust what they read, and so do kernels: both run in other processes, with limits on memory and time.
"""

from __future__ import annotations

import functools
import json
import math
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from importlib import import_module
from itertools import combinations
from typing import Any

import numpy as np

from ..kit.device import DEFAULT_PROFILE, OPERATORS, PROFILES, Profile, Refusal
from ..kit.device.operator import FLOAT
from ..kit.device.profile import that_run
from ..kit.device.tensor import CODE_RANGES, RAW, Tensor
from ..kit.display import Finding, aligned, listed, printable, shell_word, shortened
from .beside_float import LOST, LayerBesideFloat, beside_float, collapse
from .codes import Intake, by_name
from .comparing import Comparing, Opened, OpenedTflite
from .comparison import Comparison
from .examples import Data, batches_of, unless_file
from .footprint import arena_of
from .formats.read_onnx import read_onnx
from .formats.read_tflite import FileEnd, TfliteFile, UnsupportedFile, path_of_file, read_content
from .formats.tflite import import_deploy
from .graph import Graph, Operator
from .mechanism import Mechanism, mechanism_of
from .random_inputs import differing_examples, random_codes, tried_by_default
from .runtimes import profile_here, profiles_here
from .runtimes.onnxruntime import OnnxNetwork, OnnxRuntime
from .runtimes.trial import Answer, RuntimeRefusal, answer_of, forking
from .simulate import simulate

# Number of examples if no data is given.
EXAMPLES = 8
SECONDS = 600.0
# Limits for one example: bytes of all results together, which are kept for each device, and multiply-accumulates. Small
# files can ask for any amount of either.
MOST_BYTES, MOST_WORK = 1 << 30, 1 << 40
# Bytes of one device's results of all random examples.
MOST_RESULTS = 1 << 29
# How many random examples are simulated at a time, at most.
TOGETHER = 256
# Of what `Inspection.as_json` writes, as docs/inspect.md says: another number if a name goes or changes its meaning.
SCHEMA = 1
# Operators of an .onnx file that choose grids while it runs.
DYNAMIC = {"DynamicQuantizeLinear", "ConvInteger", "MatMulInteger"}


@dataclass(frozen=True)
class Layer:
    """One operator: its result, kind, shape and dtype, the bits of its weights, its multiply-accumulates for one
    example, and the share of its result's codes that the inputs reached."""

    result: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    weight_bits: int | None
    multiply_accumulates: int
    reached: float | None = None


@dataclass(frozen=True)
class DeviceFindings:
    """What one device computed from the file.

    Attributes:
        profile, title: the device.
        not_run: why its runtime did not run the file here; "": it did.
        operators: each result of the runtime compared with its simulation from the device's own operands.
        outputs: the unchanged file's results compared with the simulation of the whole network.
        not_simulated: why there is no simulation; "": there is.
    """

    profile: str
    title: str
    not_run: str = ""
    operators: tuple[Comparison, ...] = ()
    outputs: tuple[Comparison, ...] = ()
    not_simulated: str = ""

    @property
    def values(self) -> int:
        """Number of integers compared."""
        return sum(row.values for row in (*self.operators, *self.outputs))

    @property
    def differing(self) -> int:
        """Number of integers that differ between the runtime and its simulation."""
        return sum(row.differing for row in (*self.operators, *self.outputs))

    @property
    def differing_as_claimed(self) -> int:
        """Likewise, among those claimed to be equal."""
        return sum(row.differing for row in (*self.operators, *self.outputs) if row.exact)


@dataclass(frozen=True)
class Disagreement:
    """Two devices that compute different codes.

    Attributes:
        profiles: the two.
        layer, kind: the first operator whose results differ.
        values, differing: codes of its result, and how many of them differ.
        output_values, outputs_differing: likewise for the network's outputs.
        largest: the largest difference of the outputs.
        mechanism: why, from the same operands.
    """

    profiles: tuple[str, str]
    layer: str
    kind: str
    values: int
    differing: int
    output_values: int
    outputs_differing: int
    largest: int
    mechanism: Mechanism


@dataclass(frozen=True, repr=False)
class Inspection(Finding):
    """What `inspect` found. It is true if the file runs as simulated wherever that is claimed (`equal`).

    Attributes:
        name, description: of the file.
        flash_bytes: its size; weight_bytes: that of its constants.
        arena_bytes: the smallest arena in which TFLite-Micro runs it; None if `no_arena` says why not.
        inputs, outputs: its ends in words.
        words: number of its operators by name, including those that no graph has.
        layers: the network's operators.
        examples: how many examples were run.
        tried: how many random examples these were chosen from; 0: they are the user's.
        devices: what each device computed from it.
        disagreements: pairs of devices whose simulations differ.
        beside_float: each layer compared with the float network, if one was given.
    """

    name: str
    description: str
    flash_bytes: int
    weight_bytes: int
    arena_bytes: int | None
    no_arena: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    words: Mapping[str, int]
    layers: tuple[Layer, ...]
    examples: int
    tried: int
    devices: tuple[DeviceFindings, ...]
    disagreements: tuple[Disagreement, ...]
    beside_float: tuple[LayerBesideFloat, ...] = ()

    @property
    def multiply_accumulates(self) -> int:
        """Of one example."""
        return sum(layer.multiply_accumulates for layer in self.layers)

    @property
    def equal(self) -> bool:
        """Whether every integer claimed to be equal is equal, on every runtime that ran the file. False if none did:
        nothing was compared."""
        return self.ran_on != () and not any(device.differing_as_claimed for device in self.devices)

    @property
    def ran_on(self) -> tuple[str, ...]:
        """Names of the devices whose integers were compared."""
        return tuple(device.profile for device in self.devices if device.values)

    def __bool__(self) -> bool:
        return self.equal

    def in_short(self) -> str:
        return f"{shortened(self.name)}: {len(self.layers):,} operators. {_verdict(self)}"

    def as_json(self) -> str:
        """All of it, as docs/inspect.md describes."""
        totals = {"multiply_accumulates": self.multiply_accumulates, "equal": self.equal}
        return json.dumps({"schema": SCHEMA, **asdict(self), **totals}, indent=2)

    def text(self, width: int = 80) -> str:
        """All of it for a terminal of `width` columns."""
        return _text(self, width)


def refused_as_json(path: str | os.PathLike[str], refusal: Refusal) -> str:
    """Why a file is not inspected: every reason with all its places."""
    reasons = refusal.reasons if isinstance(refusal, UnsupportedFile) else {str(refusal): ()}
    return json.dumps({"schema": SCHEMA, "name": os.path.basename(path), "refused": reasons}, indent=2)


@dataclass(frozen=True)
class InspectedFile:
    """A file of either kind, from any writer.

    Attributes:
        name, content, description: of the file.
        graph: the device's integers.
        ends: what it takes.
        inputs, outputs: its ends in words.
        words: number of its operators by name.
        held: how the file holds the graph.
    """

    name: str
    content: bytes
    description: str
    graph: Graph
    ends: tuple[FileEnd, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    words: Mapping[str, int]
    held: TfliteFile | OnnxNetwork

    @property
    def suffix(self) -> str:
        """How the file's name ends."""
        return ".tflite" if isinstance(self.held, TfliteFile) else ".onnx"

    def opened(self, profile: str) -> Opened:
        """The file on a runtime of this machine."""
        if isinstance(self.held, OnnxNetwork):
            return OnnxRuntime(self.held)
        return OpenedTflite(self.graph, self.content, profile, self.held)


def read_file(path: str | os.PathLike[str], signature: str = "") -> InspectedFile:
    """The file at a path.

    Raises:
        OSError, Refusal, UnsupportedOperator: as `inspect`.
    """
    path = path_of_file(path)
    if path.suffix.lower() in (".keras", ".h5"):
        remedy = f"exactqat check {shell_word(path)} says what becomes of it on a device"
        raise Refusal(f"{shortened(path.name)} is a model of Keras, which has no integers", remedy=remedy)
    if path.suffix.lower() != ".onnx":
        file = read_content(path.read_bytes(), path.name, signature)
        inputs, outputs = (
            tuple(
                _described(end.name, end.dtype, tensor, ["N" if end.any_batch else tensor.shape[0], *tensor.shape[1:]])
                for end in side
                for tensor in (file.graph.tensors[end.tensor],)
            )
            for side in (file.inputs, file.outputs)
        )
        return InspectedFile(
            path.name, file.content, file.description, file.graph, file.inputs, inputs, outputs, file.words, file
        )
    if signature:
        raise ValueError(f"signature is for .tflite files, and {shortened(path.name)} is an .onnx file")
    # Its integers are those of the network that would be trained from it; `qat` imports `deploy`, so not at the top.
    files: Any = import_module("exactqat.qat.train.files")
    model = read_onnx(path)
    onnx: Any = import_deploy("onnx", "onnx")
    dynamic = DYNAMIC & {_decoded(node.op_type) for node in onnx.load_model_from_string(model.content).graph.node}
    if dynamic:
        what = f"{shortened(path.name)} chooses its grids while it runs ({listed(sorted(dynamic))})"
        raise Refusal(what, remedy="so there are no integers to compare; quantize_static writes files that have some")
    return file_of_onnx(files.OpenedFile(model).on_onnxruntime())


def file_of_onnx(network: OnnxNetwork) -> InspectedFile:
    onnx: Any = import_deploy("onnx", "onnx")
    model, graph = network.model, network.graph
    file = onnx.load_model_from_string(model.content)
    ends: list[FileEnd] = []
    inputs: list[str] = []
    outputs: list[str] = []
    for names, ports, words in (
        (model.inputs, graph.signature.inputs, inputs),
        (model.outputs, graph.signature.outputs, outputs),
    ):
        for name, port in zip(names, ports, strict=True):
            tensor = graph.tensors[port.tensor]
            in_float = words is outputs and port.tensor in network.in_float
            dtype = FLOAT if tensor.dtype in CODE_RANGES else tensor.dtype
            sizes: list[object] = ["N", *tensor.shape[1:]]
            words.append(_described(name, dtype, tensor, [sizes[at] for at in port.order], in_float))
            ends += [FileEnd(name, tensor.shape, dtype, port.tensor, True)] if words is inputs else []
    described = map(_decoded, (file.producer_name, file.producer_version))
    return InspectedFile(
        model.name,
        model.content,
        "; ".join(filter(None, (" ".join(filter(None, described)), _decoded(file.doc_string)))),
        graph,
        tuple(ends),
        tuple(inputs),
        tuple(outputs),
        dict(Counter(_decoded(node.op_type) for node in file.graph.node)),
        network,
    )


def _decoded(text: str | bytes) -> str:
    """The text of a file's string, which is bytes if it is not UTF-8."""
    return text if isinstance(text, str) else text.decode("utf-8", "replace")


def _described(name: str, dtype: str, tensor: Tensor, sizes: Sequence[object], in_float: bool = False) -> str:
    """An end of a file in words. in_float: the file does not quantize it."""
    stored = f" as {tensor.dtype}" if dtype != tensor.dtype and not in_float else ""
    grid, on_a_grid = tensor.quantization, ""
    if tensor.dtype in CODE_RANGES and not in_float:
        on_a_grid = f", scale {float(grid.scale[0]):.6g}, zero point {int(grid.zero_point[0])}"
    return f"{shortened(name)} {dtype}{stored} [{', '.join(map(str, sizes))}]{on_a_grid}"


def inspect(
    path: str | os.PathLike[str] | InspectedFile,
    data: Data = None,
    examples: int = EXAMPLES,
    devices: Sequence[str | Profile] | None = None,
    seed: int = 0,
    seconds: float = SECONDS,
    progress: Callable[[str], None] | None = None,
    float_file: str | os.PathLike[str] | None = None,
    signature: str = "",
    candidates: int | None = None,
) -> Inspection:
    """Says what is in a quantized .tflite or .onnx file from any writer, and compares the devices on it, integer for
    integer.

    Of an .onnx file (QDQ or QOperator), equality is claimed for operators that other tools write as
    `deploy.write_onnx` does, where codes are uint8.

    Args:
        path: the file, or one that is read already (`read_file`).
        data: inputs to run: an array for a network with one input, a mapping by the inputs' names (`Graph.signature`,
            or the file's tensors), a sequence in their order, each with the batch first; a loader of these, or the path
            of a file. Real numbers are quantized; integers of the input's type are codes (`deploy.codes`), channels
            last. None: of so many `candidates`, which are random, those that show all results in which devices differ,
            and some others.
        examples: how many random ones are run, more if only more show all differences, and fewer of large networks; at
            most how many of `data`.
        devices: whose runtimes run the file; by default all of `profiles_here`.
        seed: for the random codes.
        seconds: time limit for a process that runs a device, or simulates all of them.
        progress: called with what is done next.
        float_file: the float network that a .tflite file was made from, a .tflite or an .onnx file:
            `Inspection.beside_float` then says how much of each layer's signal is left. It needs realistic `data` to
            be useful.
        candidates: how many random examples are simulated on all devices; None: 8,192, or as many as two billion
            multiply-accumulates allow.
        signature: which of a .tflite file's signatures; "": the one that interpreters run.

    Raises:
        OSError: the file cannot be read.
        Refusal: the file is damaged, or holds something that cannot be computed exactly; the message lists all of it.
        UnsupportedOperator: a part of an .onnx file cannot be computed here in its integers; every such part is named.
        ValueError: the data or another argument does not fit.
    """
    say = progress or (lambda text: None)
    if isinstance(path, InspectedFile):
        subject = path
    else:
        say("reading")
        subject = read_file(path, signature)
    for argument, number in (("examples", examples), ("candidates", candidates)):
        if number is not None and number < 1:
            raise ValueError(f"{argument} must be 1 or more, got {number}")
    suffix, graph, is_tflite = subject.suffix, subject.graph, subject.suffix == ".tflite"
    profiles, here = that_run(suffix), profiles_here(suffix)
    if float_file is not None and not is_tflite:
        raise ValueError(f"float_file is for .tflite files, and {shortened(subject.name)} is an .onnx file")
    wanted = here if devices is None else tuple(dict.fromkeys(map(profile_here, devices)))
    others = [name for name in wanted if name not in profiles]
    if others:
        raise ValueError(f"devices must run {suffix} files, which {others[0]} does not: {', '.join(profiles)}")
    with forking():
        if data is None:
            say("choosing inputs")
        codes, tried = codes_of(subject, data, examples, seed, seconds, candidates)
        arena, no_arena = None, f"an {suffix} file has none"
        if is_tflite:
            say("measuring the arena")
            arena, no_arena = arena_of(subject.content, seconds)
        findings = {}
        for name in profiles:
            not_run = "it was not asked for" if name in here else "its runtime is not on this machine"
            findings[name] = DeviceFindings(name, PROFILES[name].title, not_run)
            if name in wanted:
                say(f"running {PROFILES[name].title}")
                findings[name] = _on_device(subject, codes, name, seconds)
        say("simulating all devices")
        simulated = _simulating(_simulated, graph, codes, profiles, seconds=seconds)
        beside: tuple[LayerBesideFloat, ...] = ()
        if float_file is not None:
            say("computing the float network")
            beside = beside_float(graph, codes, float_file, wanted[0] if wanted else DEFAULT_PROFILE, seconds)
    return Inspection(
        name=subject.name,
        description=subject.description,
        flash_bytes=len(subject.content),
        weight_bytes=sum(tensor.data.nbytes for tensor in graph.tensors.values() if tensor.data is not None),
        arena_bytes=arena,
        no_arena=no_arena,
        inputs=subject.inputs,
        outputs=subject.outputs,
        words=subject.words,
        layers=tuple(_layer(graph, operator, simulated["reached"]) for operator in graph.operators),
        examples=len(next(iter(codes.values()))),
        tried=tried,
        devices=tuple(
            replace(device, not_simulated=simulated["refused"].get(name, device.not_simulated))
            for name, device in findings.items()
        ),
        disagreements=tuple(
            Disagreement(
                profiles=tuple(row.pop("profiles")),
                mechanism=Mechanism(tuple(row["mechanism"].pop("properties")), **row.pop("mechanism")),
                **row,
            )
            for row in simulated["disagreements"]
        ),
        beside_float=beside,
    )


def _on_device(subject: InspectedFile, codes: Mapping[str, np.ndarray], profile: str, seconds: float) -> DeviceFindings:
    title = PROFILES[profile].title
    try:
        answer = answer_of(_compared, subject, codes, profile, seconds=seconds)
    except RuntimeRefusal as error:
        return DeviceFindings(profile, title, str(error))
    rows, outputs = ([Comparison(*row) for row in answer[side]] for side in ("operators", "outputs"))
    network = subject.held
    if isinstance(network, OnnxNetwork):
        # Equality is claimed of what the file has codes for, where an operator is as others write it too, and its
        # operands are onnxruntime's or follow from those through such operators; with int8 not every operator reaches
        # onnxruntime's integer kernels.
        claimed: dict[str, bool] = {}
        known = {*network.graph.inputs, *network.codes}
        for operator in network.graph.operators:
            constant = {name for name in operator.inputs if network.graph.tensors[name].data is not None}
            exact = OPERATORS[operator.kind].as_in_onnx and known | constant >= set(operator.inputs)
            claimed.update(dict.fromkeys(operator.outputs, exact))
            known |= set(operator.outputs) if exact else set()
        in_uint8 = answer["in_uint8"]
        rows = [replace(row, exact=row.exact and in_uint8 and claimed[row.name]) for row in rows if row.values]
        exact = all(row.exact for row in rows)
        outputs = [replace(row, exact=row.exact and row.name not in network.in_float and exact) for row in outputs]
    return DeviceFindings(profile, title, "", tuple(rows), tuple(outputs), answer["refused"])


def need_a_bounded_size(graph: Graph, name: str, examples: int) -> None:
    """Refuses networks that could take all memory, or hours, to run."""

    held = _bytes(graph, (*graph.inputs, *graph.results(), *graph.variables))
    inputs = examples * _bytes(graph, graph.inputs)
    work = sum(graph.multiply_accumulates(operator) for operator in graph.operators)
    for amount, most, what in (
        (held, MOST_BYTES, "bytes of results for one example"),
        (work, MOST_WORK, "multiply-accumulates for one example"),
        (inputs, MOST_BYTES, f"bytes of inputs for {examples} examples"),
    ):
        if amount > most:
            raise Refusal(f"{shortened(name)} has {amount:,} {what}", remedy=f"at most {most:,} are inspected")


def _bytes(graph: Graph, names: Iterable[str]) -> int:
    held = [graph.tensors[name] for name in names]
    return sum(math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize for tensor in held)


def _layer(graph: Graph, operator: Operator, reached: Mapping[str, float]) -> Layer:
    output = graph.tensors[operator.outputs[0]]
    constants = [graph.tensors[name].data for name in operator.inputs]
    weights = [data.astype(int) for data in constants if data is not None and data.dtype == np.int8]
    # -128 is a code of eight bits.
    bits = min(max(int(np.abs(codes).max()) for codes in weights).bit_length() + 1, 8) if weights else None
    work = graph.multiply_accumulates(operator)
    return Layer(output.name, operator.kind, output.shape, output.dtype, bits, work, reached.get(output.name))


# --- inputs ----------------------------------------------------------------------------------------------------------


def codes_of(
    subject: InspectedFile, data: Data, examples: int, seed: int, seconds: float, candidates: int | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """The codes to run: the user's, at most so many examples, or random ones, of a .tflite file as many as fill
    `MOST_RESULTS` for a device; and how many random ones these were chosen from."""
    graph, profiles = subject.graph, that_run(subject.suffix)
    fitting = max(1, MOST_RESULTS // max(_bytes(graph, (*graph.inputs, *graph.results())), 1))
    if data is None and subject.suffix == ".tflite":
        examples = min(examples, fitting)
    need_a_bounded_size(graph, subject.name, examples)
    if data is None:
        if graph.variables or len(profiles) == 1:  # all are calls of one stream, or no two devices differ
            return random_codes(graph, range(examples), seed), examples
        alone = not all(OPERATORS[operator.kind].any_batch for operator in graph.operators)
        together = 1 if alone else max(1, min(TOGETHER, fitting // len(profiles)))
        tried = max(examples, tried_by_default(graph) if candidates is None else candidates)
        arguments = graph, examples, profiles, seed, together, max(examples, fitting), tried
        return random_codes(graph, _simulating(differing_examples, *arguments, seconds=seconds), seed), tried
    ports = graph.signature.inputs
    names = [port.name for port in ports]
    batch = next(batches_of(unless_file(data, names), len(ports), examples))
    if isinstance(batch, Mapping):  # the file's own names will do too
        aliases = {end.name: port.name for end in subject.ends for port in ports if port.tensor == end.tensor}
        batch = {aliases.get(str(name), str(name)): array for name, array in batch.items()}
    arrays = {name: np.asarray(array) for name, array in by_name(names, batch).items()}
    stored = {end.tensor: end.dtype for end in subject.ends}
    for port in ports:
        # Codes of a file in uint8.
        if arrays[port.name].dtype == np.uint8 and stored[port.tensor] == RAW != graph.tensors[port.tensor].dtype:
            arrays[port.name] = (arrays[port.name].astype(np.int16) - 128).astype(np.int8)
    return Intake(graph).codes(arrays), 0


# --- in processes of their own ---------------------------------------------------------------------------------------


def _simulating(function: Callable[..., object], *arguments: object, seconds: float) -> Answer:
    try:
        return answer_of(function, *arguments, seconds=seconds)
    except RuntimeRefusal as error:
        raise RuntimeError(f"the file could not be simulated: {error}") from None


def _compared(subject: InspectedFile, codes: Mapping[str, np.ndarray], profile: str) -> Answer:
    """Runs one example after the other, as files fix their batch, and counts what differs."""
    opened, comparing = subject.opened(profile), Comparing(subject.graph, profile, all_reals=False)
    refused = ""
    for example in range(len(codes[subject.graph.inputs[0]])):
        batch = {name: array[example : example + 1] for name, array in codes.items()}
        device, returned = opened.run(batch)
        try:
            comparing.add(batch, device, returned)
        except ValueError as error:
            refused = str(error)
            break
    return {
        "operators": [] if refused else [astuple(row) for row in comparing.operators.values()],
        "outputs": [] if refused else [astuple(row) for row in comparing.outputs.values()],
        "refused": refused,
        "in_uint8": getattr(opened, "in_uint8", False),
    }


def _simulated(graph: Graph, codes: Mapping[str, np.ndarray], profiles: Sequence[str]) -> Answer:
    """What devices cannot compute, and where their simulations differ, example by example."""
    results = tuple(graph.results())
    states = {profile: graph.initial_state() for profile in profiles}
    pairs = {pair: _Pair({name: Comparison(name, "") for name in results}) for pair in combinations(profiles, 2)}
    refused: dict[str, str] = {}
    reached: dict[str, set[int]] = {name: set() for name in results if graph.tensors[name].dtype in CODE_RANGES}
    for example in range(len(codes[graph.inputs[0]])):
        batch = {name: array[example : example + 1] for name, array in codes.items()}
        simulated: dict[str, dict[str, np.ndarray]] = {}
        before = {profile: dict(state) for profile, state in states.items()}
        for profile in profiles:
            try:
                simulated[profile] = simulate(graph, batch, profile, results, state=states[profile], progress=False)
            except ValueError as error:
                refused[profile] = str(error)
        for name, seen in reached.items() if simulated else ():
            seen.update(np.unique(next(iter(simulated.values()))[name]).tolist())
        for names, pair in pairs.items():
            if all(profile in simulated for profile in names):
                first, second = (before[profile] for profile in names)
                # Differences caused by differing states are not an operator's own.
                same = all(np.array_equal(held, second[name]) for name, held in first.items())
                pair.add(graph, {**batch, **first, **simulated[names[0]]}, simulated[names[1]], same)
    disagreements = [pair.disagreement(graph, names) for names, pair in pairs.items()]
    shares = {name: len(seen) / 256 ** np.dtype(graph.tensors[name].dtype).itemsize for name, seen in reached.items()}
    differing = [answer for answer in disagreements if answer is not None]
    return {"refused": refused, "disagreements": differing, "reached": shares}


# How many examples of one operator are searched for a mechanism.
MOST_EXAMPLES = 8


@dataclass
class _Pair:
    """Two devices' simulations: how far they differ, the first operator in which they do, and its operands in examples
    where they do."""

    rows: dict[str, Comparison]
    number: int | None = None
    examples: list[dict[str, np.ndarray]] = field(default_factory=list)

    def add(
        self, graph: Graph, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], same_state: bool
    ) -> None:
        """ours: with the codes of inputs and variables."""
        before = dict(self.rows)
        for name, row in before.items():
            if graph.tensors[name].dtype != FLOAT:
                self.rows[name] = row.counting(ours[name], theirs[name])
        if not same_state or all(row.differing == before[name].differing for name, row in self.rows.items()):
            return
        for number, operator in enumerate(graph.operators):
            if self.number is not None and number > self.number:
                return
            names = [name for name in operator.outputs if graph.tensors[name].dtype != FLOAT]
            if all(np.array_equal(ours[name], theirs[name]) for name in names):
                continue
            if number != self.number:
                self.number, self.examples = number, []
            if len(self.examples) < MOST_EXAMPLES:
                operands = [name for name in operator.inputs if graph.tensors[name].data is None]
                self.examples.append({name: ours[name] for name in operands})
            return

    def disagreement(self, graph: Graph, profiles: tuple[str, str]) -> Answer | None:
        """The fields of a `Disagreement`."""
        if self.number is None:
            return None
        operator, rows = graph.operators[self.number], self.rows
        first = next(name for name in operator.outputs if rows[name].differing)
        operands = {name: np.concatenate([example[name] for example in self.examples]) for name in self.examples[0]}
        mechanism = mechanism_of(graph, operator, operands, *profiles)
        if mechanism is None:
            return None
        ends = [rows[name] for name in graph.outputs if name in rows]
        return {
            "profiles": profiles,
            "layer": first,
            "kind": graph.measured_as(operator),
            "values": rows[first].values,
            "differing": rows[first].differing,
            "output_values": sum(end.values for end in ends),
            "outputs_differing": sum(end.differing for end in ends),
            "largest": max((end.largest_difference for end in ends), default=0),
            "mechanism": asdict(mechanism),
        }


# --- in words --------------------------------------------------------------------------------------------------------

# Width of a name in a table.
NAME = 28


def name_in_short(name: str, length: int = NAME) -> str:
    """TensorFlow's names list paths of all that was fused: the end of the first one says most."""
    first = printable(name).split(";")[0].replace("\n", " ")
    return first if len(first) <= length else f"…{first[1 - length :]}"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]], texts: int) -> list[str]:
    """Columns as wide as necessary; the first `texts` hold text."""
    lines = aligned([header, *rows], range(texts))
    return [lines[0], "─" * max(map(len, lines)), *lines[1:]]


def _text(file: Inspection, width: int) -> str:
    wrapped = functools.partial(textwrap.wrap, width=width, subsequent_indent="  ", break_long_words=True)
    lines = [*wrapped(f"{file.name} ({printable(file.description) or 'no description'})")]
    for side, ends in (("takes", file.inputs), ("returns", file.outputs)):
        for end in ends:
            lines += wrapped(f"{side} {end}")
    words = ", ".join(f"{count} {printable(word)}" for word, count in sorted(file.words.items()))
    lines += wrapped(f"operators: {words}")
    arena = f"{file.arena_bytes:,} bytes of arena (TFLite-Micro)" if file.arena_bytes else f"no arena: {file.no_arena}"
    lines += wrapped(
        f"{file.multiply_accumulates:,} multiply-adds; {file.flash_bytes:,} bytes of flash, "
        f"{file.weight_bytes:,} of them weights; {arena}"
    )
    length, table = NAME, [""]
    for _ in range(2):  # names make room for the other columns
        length = max(length - max(max(map(len, table)) - width, 0), 8)
        rows = [
            (number, name_in_short(layer.result, length), layer.kind, "x".join(map(str, layer.shape)),
             "–" if layer.weight_bits is None else layer.weight_bits, f"{layer.multiply_accumulates:,}",
             "–" if layer.reached is None else f"{layer.reached:.0%}")
            for number, layer in enumerate(file.layers)
        ]  # fmt: skip
        table = _table(("", "result", "operator", "shape", "bits", "multiply-adds", "codes"), rows, 4)
    lines += ["", *table, ""]
    real = sum(layer.dtype == FLOAT and OPERATORS[layer.kind].floats for layer in file.layers)
    if real:
        noun = "operator computes" if real == 1 else "operators compute"
        lines += wrapped(f"{real} {noun} in float32: their results are not compared, the codes made of them are.")
    counts: list[tuple[str, ...]] = []
    for device in file.devices:
        ran = not device.not_run and not device.not_simulated
        claimed = "yes" if ran and all(row.exact for row in device.operators) else "not all" if ran else "–"
        counts.append((device.profile, f"{device.values:,}" if ran else "not run",
                       f"{device.differing:,}" if ran else "–", claimed))  # fmt: skip
    which = f", chosen from {file.tried:,} random ones" if file.tried > file.examples else ""
    reach = "The last column of the table says what share of a result's codes they reach."
    lines += wrapped(f"Integers of the runtimes beside the simulation, {file.examples} examples{which}. {reach}")
    lines += _table(("device", "compared", "differ", "equality is claimed"), counts, 1)
    for device in file.devices:
        reason = device.not_run or device.not_simulated
        if reason:
            lines += wrapped(f"{device.profile} was not {'run' if device.not_run else 'simulated'}: {reason}")
        for row in (*device.operators, *device.outputs):
            if row.differing:
                claim = "" if row.exact else "; equality is not claimed"
                lines += wrapped(
                    f"{device.profile}: {row.kind} {name_in_short(row.name)!r} differs in {row.differing:,} of "
                    f"{row.values:,} codes, by {row.largest_difference} at most{claim}"
                )
    lines.append("")
    if file.disagreements:
        lines += wrapped("Devices that compute different codes from the same inputs:")
    alike: dict[str, list[str]] = {}
    for case in file.disagreements:
        why = case.mechanism.sentence
        alike.setdefault(
            f"from {case.kind} {name_in_short(case.layer, 24)!r} on ({case.differing:,} of {case.values:,} codes); "
            f"{case.outputs_differing:,} of {case.output_values:,} codes of the outputs. {why[0].upper()}{why[1:]}.",
            [],
        ).append(" / ".join(case.profiles))
    for text, names in alike.items():
        lines += wrapped(f"{', '.join(names)}: {text}")
    simulated = [device.profile for device in file.devices if not device.not_simulated]
    in_codes = any(layer.dtype in CODE_RANGES for layer in file.layers)
    if in_codes and not file.disagreements and len(simulated) > 1:
        lines += wrapped(f"Simulated from these inputs, {', '.join(simulated)} compute the same codes.")
    if file.beside_float:

        def number(value: float | None, form: str) -> str:
            return "–" if value is None else format(value, form)

        beside = [
            (name_in_short(layer.result, NAME - 8), layer.kind, number(layer.own, ".1f"),
             number(layer.cumulative, ".1f"), number(layer.clipped, ".1%"), number(layer.wasted, ".0%"),
             f"{layer.dead_channels} of {layer.channels}") for layer in file.beside_float
        ]  # fmt: skip
        header = ("result", "operator", "own dB", "dB so far", "clipped", "unused codes", "dead channels")
        first, unknown = collapse(file.beside_float), sum(not layer.of for layer in file.beside_float)
        lost = f"No layer falls below {LOST:g} dB beside the float network."
        if first is not None:
            where = f"{first.kind} {name_in_short(first.result)!r}"
            lost = f"The first layer below {LOST:g} dB beside the float network is {where}."
        if file.tried:
            lost += " The inputs were random codes, not the network's real inputs: give those as data."
        if unknown:
            lost += f" {unknown} of {len(file.beside_float)} layers have no partner in it."
        lines += ["", *_table(header, beside, 2), *wrapped(lost), ""]
    lines += wrapped(_verdict(file))
    return "\n".join(lines)


def _verdict(inspection: Inspection) -> str:
    if not inspection.ran_on:
        ran_in_float = any(not device.not_run and not device.not_simulated for device in inspection.devices)
        if ran_in_float:
            return "The file computes in float32: no integer was compared, so nothing was compared."
        return "The file was run on no device: nothing was compared."
    ran = [device for device in inspection.devices if device.values]
    total, names = sum(device.values for device in ran), ", ".join(inspection.ran_on)
    if not inspection.equal:
        return f"The file does not run as simulated where that is claimed ({names})."
    unclaimed = sum(device.differing for device in ran)
    rest = f"; where it is not claimed, {unclaimed:,} differ" if unclaimed else ""
    counted = f"{total:,} integers compared, none differs where equality is claimed{rest}"
    return f"The file runs as simulated on {names}: {counted}."
