# SPDX-License-Identifier: Apache-2.0
"""What is in a quantized .tflite file, and whether the devices agree on it.

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
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ..device import DEFAULT_PROFILE, OPERATORS, PROFILES, Profile, Refusal
from ..device.operator import FLOAT
from ..device.profile import profile_named, that_run
from ..device.tensor import CODE_RANGES, RAW, dequantize
from ..display import printable, shortened
from .beside_float import LOST, LayerBesideFloat, beside_float, collapse
from .codes import input_codes
from .comparison import Comparison, Tally
from .footprint import arena_of
from .formats.read_tflite import FileEnd, TfliteFile, path_of_file, read_content, to_file
from .formats.tflite import with_outputs_at
from .graph import Graph, Operator
from .mechanism import Mechanism, mechanism_of
from .runtimes import open_runtime, profile_here, profiles_here
from .runtimes.trial import RuntimeRefusal, try_in_a_child
from .simulate import EXACT, check_inputs, simulate, simulate_results

# Number of examples if no data is given.
EXAMPLES = 8
SECONDS = 600.0
# Limits for one example: bytes of all results together, which are kept for each device, and multiply-accumulates. Small
# files can ask for any amount of either.
MOST_BYTES, MOST_WORK = 1 << 30, 1 << 40
# Bytes of one device's results of all random examples.
MOST_IN_FILES = 1 << 29
DRAWN_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Layer:
    """One operator: its result, kind, shape and dtype, the bits of its weights, and its multiply-accumulates for one
    example."""

    result: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    weight_bits: int | None
    multiply_accumulates: int


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
        return sum(each.values for each in (*self.operators, *self.outputs))

    @property
    def differing(self) -> int:
        """Number of integers that differ between the runtime and its simulation."""
        return sum(each.differing for each in (*self.operators, *self.outputs))

    @property
    def differing_as_claimed(self) -> int:
        """Likewise, among those claimed to be equal."""
        return sum(each.differing for each in (*self.operators, *self.outputs) if each.exact)


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


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        name, description: of the file.
        flash_bytes: its size; weight_bytes: that of its constants.
        arena_bytes: the smallest arena in which TFLite-Micro runs it; None if `no_arena` says why not.
        inputs, outputs: its ends in words.
        words: number of its operators by name, including those that no graph has.
        layers: the network's operators.
        examples: how many examples were run.
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

    def as_json(self) -> str:
        """All of it."""
        totals = {"multiply_accumulates": self.multiply_accumulates, "equal": self.equal}
        return json.dumps({**asdict(self), **totals}, indent=2)

    def text(self, width: int = 80) -> str:
        """All of it for a terminal of `width` columns."""
        return _text(self, width)


def inspect(
    path: str | os.PathLike[str],
    data: Any = None,
    examples: int = EXAMPLES,
    devices: Sequence[str | Profile] | None = None,
    seed: int = 0,
    seconds: float = SECONDS,
    progress: Callable[[str], None] | None = None,
    float_file: str | os.PathLike[str] | None = None,
) -> Inspection:
    """Says what is in a quantized .tflite file from any writer, and compares the devices on it, integer for integer.

    Args:
        data: inputs to run: an array for a network with one input, a mapping by the inputs' names (`Graph.signature`,
            or the file's tensors), or a sequence in their order, each with the batch first. Real numbers are quantized;
            integers are codes. None: random codes.
        examples: how many random examples, or at most how many of `data`: for large networks fewer random ones are run,
            as each device's results are kept in files until they are compared.
        devices: whose runtimes run the file; by default all of `profiles_here`.
        seed: for the random codes.
        seconds: time limit for a process that runs a device, or simulates all of them.
        progress: called with what is done next.
        float_file: the float network it was made from, a .tflite or an .onnx file: `Inspection.beside_float` then says
            how much of each layer's signal is left. It needs realistic `data` to be useful.

    Raises:
        OSError: the file cannot be read.
        Refusal: the file is damaged, or holds something that cannot be computed exactly; the message lists all of it.
        ValueError: the data or another argument does not fit.
    """
    if examples < 1:
        raise ValueError(f"examples must be 1 or more, got {examples}")
    say = progress or (lambda text: None)
    path = path_of_file(path)
    if path.suffix.lower() == ".onnx":
        raise Refusal(f"{shortened(path.name)} is an .onnx file; qat.inspect_onnx inspects it")
    content = path.read_bytes()
    file = read_content(content, path.name)
    graph = file.graph
    if data is None:
        examples = examples_that_fit(graph, examples)
    need_a_bounded_size(graph, path.name, examples)
    wanted = profiles_here() if devices is None else tuple(dict.fromkeys(map(profile_here, devices)))
    others = [name for name in wanted if profile_named(name).file != ".tflite"]
    if others:
        raise ValueError(
            f"devices must run .tflite files, which {others[0]} does not: {', '.join(that_run('.tflite'))}"
        )
    codes = random_codes(graph, examples, seed) if data is None else read_codes(file, data, examples)
    say("measuring the arena")
    arena, no_arena = arena_of(content, seconds)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {str(at): codes[name] for at, name in enumerate(graph.inputs)}
        np.savez(Path(folder) / "codes.npz", **given)
        reasons = {}
        for profile in wanted:
            say(f"running {PROFILES[profile].title}")
            reasons[profile] = _run_in_a_child(content, file, profile, folder, seconds)
        say("simulating all devices")
        ran = tuple(profile for profile in wanted if not reasons[profile])
        counts = compare_in_a_child(graph, folder, ran, seconds)
    beside: tuple[LayerBesideFloat, ...] = ()
    if float_file is not None:
        say("computing the float network")
        beside = beside_float(graph, codes, float_file, wanted[0] if wanted else DEFAULT_PROFILE, seconds)
    here, absent = profiles_here(), "its runtime is not on this machine"
    missing = {
        name: "it was not asked for" if name in here else absent for name in that_run(".tflite") if name not in wanted
    }
    found = [
        DeviceFindings(
            name,
            PROFILES[name].title,
            {**missing, **reasons}[name],
            tuple(Comparison(*row) for row in counts["operators"].get(name, ())),
            tuple(Comparison(*row) for row in counts["outputs"].get(name, ())),
            counts["refused"].get(name, ""),
        )
        for name in that_run(".tflite")
    ]
    pairs = [
        Disagreement(
            profiles=tuple(row.pop("profiles")), mechanism=Mechanism(**_with_tuples(row.pop("mechanism"))), **row
        )
        for row in counts["disagreements"]
    ]
    return Inspection(
        path.name,
        file.description,
        len(content),
        sum(tensor.data.nbytes for tensor in graph.tensors.values() if tensor.data is not None),
        arena,
        no_arena,
        tuple(_described(graph, end) for end in file.inputs),
        tuple(_described(graph, end) for end in file.outputs),
        file.words,
        tuple(layers_of(graph)),
        len(next(iter(codes.values()))),
        tuple(found),
        tuple(pairs),
        beside,
    )


def need_a_bounded_size(graph: Graph, name: str, examples: int) -> None:
    """Refuses networks that could take all memory, or hours, to run."""

    held = _bytes(graph, (*graph.inputs, *graph.results(), *graph.variables))
    inputs = examples * _bytes(graph, graph.inputs)
    work = sum(graph.multiply_accumulates(operator) for operator in graph.operators)
    for given, most, what in (
        (held, MOST_BYTES, "bytes of results for one example"),
        (work, MOST_WORK, "multiply-accumulates for one example"),
        (inputs, MOST_BYTES, f"bytes of inputs for {examples} examples"),
    ):
        if given > most:
            raise Refusal(f"{shortened(name)} has {given:,} {what}; at most {most:,} are inspected")


def _bytes(graph: Graph, names: Iterable[str]) -> int:
    held = [graph.tensors[each] for each in names]
    return sum(math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize for tensor in held)


def examples_that_fit(graph: Graph, examples: int) -> int:
    """As many examples as fill `MOST_IN_FILES` for a device, at least one."""
    each = _bytes(graph, (*graph.inputs, *graph.results()))
    return max(1, min(examples, MOST_IN_FILES // max(each, 1)))


def _with_tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    """A dataclass' fields from JSON, which has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def _described(graph: Graph, end: FileEnd) -> str:
    tensor = graph.tensors[end.tensor]
    sizes: list[object] = ["N" if end.any_batch else tensor.shape[0], *tensor.shape[1:]]
    grid = tensor.quantization
    stored = f" as {tensor.dtype}" if end.dtype != tensor.dtype else ""
    scale = f", scale {float(grid.scale[0]):.6g}, zero point {int(grid.zero_point[0])}"
    on_a_grid = scale if tensor.dtype in CODE_RANGES else ""
    return f"{shortened(end.name)} {end.dtype}{stored} [{', '.join(map(str, sizes))}]{on_a_grid}"


def layers_of(graph: Graph) -> list[Layer]:
    found = []
    for operator in graph.operators:
        output = graph.tensors[operator.outputs[0]]
        constants = [graph.tensors[name].data for name in operator.inputs]
        largest = [
            int(np.abs(data.astype(np.int64)).max()) for data in constants if data is not None and data.dtype == np.int8
        ]
        bits = max((each.bit_length() + 1 for each in largest), default=None)
        # -128 is a code of eight bits.
        bits = None if bits is None else min(bits, 8)
        work = graph.multiply_accumulates(operator)
        found.append(Layer(output.name, operator.kind, output.shape, output.dtype, bits, work))
    return found


# --- inputs ----------------------------------------------------------------------------------------------------------


def random_codes(graph: Graph, examples: int, seed: int) -> dict[str, np.ndarray]:
    """Every other example stays near the zero points, where little saturates."""
    rng, codes = np.random.default_rng(seed), {}
    for name in graph.inputs:
        tensor = graph.tensors[name]
        if tensor.dtype == FLOAT:
            codes[name] = rng.normal(size=(examples, *tensor.shape[1:])).astype(np.float32)
            continue
        lowest, highest = graph.limits(name)
        codes[name] = np.empty((examples, *tensor.shape[1:]), tensor.dtype)
        for number, example in enumerate(codes[name].reshape(examples, -1)):
            # Some at a time: they are drawn in 64 bits.
            for start in range(0, example.size, DRAWN_AT_ONCE):
                values = rng.integers(lowest, highest + 1, example[start : start + DRAWN_AT_ONCE].shape)
                if number % 2:
                    values = np.clip(values // 8 + tensor.quantization.zero_point[0], lowest, highest)
                example[start : start + DRAWN_AT_ONCE] = values
    return codes


def read_codes(file: TfliteFile, data: Any, examples: int) -> dict[str, np.ndarray]:
    """The graph's codes for the user's arrays."""
    graph = file.graph
    names = [port.name for port in graph.signature.inputs]
    if not isinstance(data, Mapping):
        given = list(data) if isinstance(data, tuple | list) else [data]
        if len(given) != len(names):
            raise ValueError(f"the file has the inputs {names}, got {len(given)} arrays")
        data = dict(zip(names, given, strict=True))
    # The file's own names do too.
    aliases = {
        end.name: port.name for end in file.inputs for port in graph.signature.inputs if port.tensor == end.tensor
    }
    arrays = {aliases.get(str(name), str(name)): np.asarray(array)[:examples] for name, array in data.items()}
    if set(arrays) != set(names):
        raise ValueError(f"the file's inputs are {names}, got {sorted(arrays)}")
    ends = {end.tensor: end for end in file.inputs}
    real, codes = {}, {}
    for port in graph.signature.inputs:
        array, dtype = arrays[port.name], graph.tensors[port.tensor].dtype
        if np.issubdtype(array.dtype, np.floating):
            real[port.name] = array
        elif array.dtype == np.uint8 and ends[port.tensor].dtype == RAW != dtype:
            codes[port.tensor] = (array.astype(np.int16) - 128).astype(np.int8)
        elif array.dtype == dtype:
            codes[port.tensor] = array
        else:
            allowed = "uint8 codes" if ends[port.tensor].dtype == "uint8" else f"{dtype} codes"
            raise ValueError(f"input {port.name!r} must be real numbers or {allowed}, got {array.dtype}")
    if real and codes:
        raise ValueError("inputs must be all real numbers or all codes")
    found = input_codes(graph, real) if real else check_inputs(graph, codes)
    if not len(next(iter(found.values()))):
        raise ValueError("data contains no examples")
    return found


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray] | np.ndarray:
    """The arrays of an .npz file by name, or the array of an .npy file, for `inspect`.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        with open(path, "rb") as file:
            content = np.load(file, allow_pickle=False)
            return content if isinstance(content, np.ndarray) else {name: content[name] for name in content.files}
    except (ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{shortened(Path(path).name)} is not an .npz or .npy file of arrays ({error})") from None


# --- the runtimes, in processes of their own ------------------------------------------------------------------------


def _from_file(array: np.ndarray, end: FileEnd, graph: Graph) -> np.ndarray:
    """Codes for what the file returns; a value between two codes is not a code."""
    tensor = graph.tensors[end.tensor]
    if end.dtype == FLOAT and tensor.dtype != FLOAT:
        grid = tensor.quantization
        codes = np.rint(array.astype(np.float64) / float(grid.scale[0])) + int(grid.zero_point[0])
        ends = CODE_RANGES[tensor.dtype]
        codes = np.clip(np.nan_to_num(codes, nan=ends[0]), *ends).astype(tensor.dtype)
        if not np.array_equal(dequantize(codes, grid), array):
            raise RuntimeRefusal(f"output {end.name!r} is not on its grid")
        return codes
    shifted = end.dtype == RAW != tensor.dtype
    return (array.astype(np.int16) - 128).astype(np.int8) if shifted else array


def _run_in_a_child(content: bytes, file: TfliteFile, profile: str, folder: str, seconds: float) -> str:
    """Runs the file and writes what the device computed into the folder; returns why it did not, or ""."""
    arguments = content, file.graph, file.inputs, file.outputs, dict(file.positions), profile, folder
    try:
        said = try_in_a_child(_run, *arguments, seconds=seconds)
    except RuntimeRefusal as error:
        return on_one_line(error)
    folder_of = Path(folder) / profile
    if (folder_of / "done").exists():
        return ""
    reason = folder_of / "reason"
    lines = [line for line in said.splitlines() if line.strip()]
    return on_one_line(reason.read_text("utf-8", "replace") if reason.exists() else (lines or ["no reason given"])[-1])


def on_one_line(text: object) -> str:
    return shortened(" ".join(str(text).split()), 300)


def _need_shapes(graph: Graph, found: Mapping[str, np.ndarray], names: Sequence[str]) -> None:
    """Refuses results to which a runtime gave other shapes: TFLite-Micro infers none that the file leaves open."""
    for name in names:
        given, whole = found[name].shape, graph.tensors[name].shape
        if given != whole:
            raise RuntimeRefusal(
                f"it takes {list(given)} for the shape of {shortened(name)!r}, which is {list(whole)} (convert the "
                "model with a fixed batch)"
            )


def _run(
    content: bytes,
    graph: Graph,
    inputs: Sequence[FileEnd],
    outputs: Sequence[FileEnd],
    positions: Mapping[str, int],
    profile: str,
    folder: str,
) -> None:
    """Runs one example after the other, as files fix their batch."""
    into = Path(folder) / profile
    into.mkdir()
    try:
        with np.load(Path(folder) / "codes.npz") as archive:
            codes = {name: archive[str(at)] for at, name in enumerate(graph.inputs)}
        given, results = (tuple(end.name for end in side) for side in (inputs, outputs))
        # An input that is the file's own is not computed.
        own = {end.tensor for end in inputs if end.tensor == end.name}
        computed = tuple(name for name in (*graph.inputs, *graph.results()) if name not in own and name in positions)
        opened = with_outputs_at(content, [positions[name] for name in computed])
        plain = open_runtime(content, given, results, profile, True)
        whole = open_runtime(opened, given, computed, profile, True)
        for example in range(len(codes[graph.inputs[0]])):
            batch = {end.name: to_file(graph, codes[end.tensor][example : example + 1], end) for end in inputs}
            found = whole.run(batch)
            _need_shapes(graph, found, computed)
            arrays: dict[str, Any] = {f"t{at}": found[name] for at, name in enumerate(computed)}
            found = plain.run(batch)
            arrays |= {f"o{at}": _from_file(found[end.name], end, graph) for at, end in enumerate(outputs)}
            np.savez(into / f"{example}.npz", **arrays)
        (into / "names").write_text(json.dumps(computed), "utf-8")
        (into / "ends").write_text(json.dumps([end.tensor for end in outputs]), "utf-8")
        (into / "done").write_text("", "utf-8")
    except (RuntimeError, ValueError, ImportError) as error:
        (into / "reason").write_text(str(error), "utf-8", "replace")


# --- the simulations, in a process of their own ---------------------------------------------------------------------


def compare_in_a_child(
    graph: Graph, folder: str, ran: Sequence[str], seconds: float, file: str = ".tflite"
) -> dict[str, Any]:
    """The counts of an `Inspection`.

    Args:
        folder: holds the codes of the inputs, and for each of `ran` what the device computed.
        file: the kind of file; all devices that run this kind are simulated.
    """
    try:
        said = try_in_a_child(_compare, graph, folder, tuple(ran), that_run(file), seconds=seconds)
    except RuntimeRefusal as error:
        raise RuntimeError(f"the file could not be simulated: {on_one_line(error)}") from None
    counts = Path(folder) / "counts.json"
    if not counts.exists():
        lines = [line for line in said.splitlines() if line.strip()]
        raise RuntimeError(f"the file could not be simulated: {on_one_line((lines or ['no reason given'])[-1])}")
    found: dict[str, Any] = json.loads(counts.read_text())
    return found


def _compare(graph: Graph, folder: str, ran: Sequence[str], simulating: Sequence[str]) -> None:
    """Counts, example by example, what `Inspection` holds."""
    with np.load(Path(folder) / "codes.npz") as archive:
        codes = {name: archive[str(at)] for at, name in enumerate(graph.inputs)}
    results = tuple(graph.results())
    kinds = {name: graph.measured_as(operator) for operator in graph.operators for name in operator.outputs}
    operators = {profile: {name: Tally() for name in results} for profile in ran}
    outputs = {profile: {name: Tally() for name in graph.outputs} for profile in ran}
    pairs = {pair: {name: Tally() for name in results} for pair in combinations(simulating, 2)}
    firsts: dict[tuple[str, str], _First] = {}
    refused: dict[str, str] = {}
    # What variables hold: in each whole simulation, and as left by the operators of each device that ran.
    states = {profile: graph.initial_state() for profile in simulating}
    memories = {profile: graph.initial_state() for profile in ran}
    for example in range(len(codes[graph.inputs[0]])):
        batch = {name: array[example : example + 1] for name, array in codes.items()}
        simulated: dict[str, dict[str, np.ndarray]] = {}
        before = {profile: dict(state) for profile, state in states.items()}
        for profile in simulating:
            try:
                simulated[profile] = simulate(graph, batch, profile, results, state=states[profile], progress=False)
            except ValueError as error:
                refused[profile] = str(error)
        for pair, tallies in pairs.items():
            if all(profile in simulated for profile in pair):
                ours, theirs = (simulated[profile] for profile in pair)
                equal = [
                    tally.add(ours[name], theirs[name])
                    for name, tally in tallies.items()
                    if graph.tensors[name].dtype != FLOAT
                ]
                # Differences caused by differing states are not an operator's own.
                same = all(np.array_equal(codes, before[pair[1]][name]) for name, codes in before[pair[0]].items())
                if same and not all(equal):
                    _keep_first(graph, pair, firsts, {**batch, **before[pair[0]], **ours}, theirs)
        for profile in ran:
            if profile in simulated:
                _count(graph, Path(folder) / profile, example, batch, simulated[profile], operators[profile],
                       outputs[profile], profile, memories[profile])  # fmt: skip
    content = {
        "operators": {
            profile: [_row(tally, name, kinds[name], [kinds[name]], profile) for name, tally in tallies.items()]
            for profile, tallies in operators.items()
        },
        "outputs": {
            profile: [
                _row(tally, name, "whole file", tuple(kinds.values()), profile) for name, tally in tallies.items()
            ]
            for profile, tallies in outputs.items()
        },
        "refused": refused,
        "disagreements": [
            each
            for pair, tallies in pairs.items()
            if pair in firsts and (each := _disagreement(graph, pair, tallies, kinds, firsts[pair]))
        ],
    }
    (Path(folder) / "counts.json").write_text(json.dumps(content))


def _row(tally: Tally, name: str, kind: str, all_of: Sequence[str], profile: str) -> tuple[Any, ...]:
    exact = all((each, profile) in EXACT for each in all_of)
    return name, kind, tally.values, tally.differing, tally.largest, exact


def _count(
    graph: Graph,
    folder: Path,
    example: int,
    batch: Mapping[str, np.ndarray],
    simulated: Mapping[str, np.ndarray],
    operators: Mapping[str, Tally],
    outputs: Mapping[str, Tally],
    profile: str,
    memory: dict[str, np.ndarray],
) -> None:
    """Compares one example's codes on one device with its simulation; memory: what variables hold, which is changed."""
    computed, ends = (json.loads((folder / part).read_text("utf-8")) for part in ("names", "ends"))
    with np.load(folder / f"{example}.npz") as archive:
        device = {**batch, **{name: archive[f"t{at}"] for at, name in enumerate(computed)}}
        found = {name: archive[f"o{at}"] for at, name in enumerate(ends)}
    for operator in graph.operators:
        if operator.outputs[0] in device and not _compared(graph, operator, profile):
            continue
        for name, codes in simulate_results(graph, operator, {**device, **memory}, profile).items():
            if name in memory:
                memory[name] = codes
            elif name in device:
                operators[name].add(device[name], codes)
            else:  # the file has no codes of it
                device[name] = codes
    memory |= graph.succeeding({**device, **memory})
    for name, tally in outputs.items():
        if graph.tensors[name].dtype != FLOAT:
            tally.add(found[name], simulated[name] if name in simulated else batch[name])


def _compared(graph: Graph, operator: Operator, profile: str) -> bool:
    """Whether an operator's results are compared: real numbers are if their equality is claimed."""
    real = graph.tensors[operator.outputs[0]].dtype == FLOAT
    return not real or (graph.measured_as(operator), profile) in EXACT


@dataclass
class _First:
    """The first operator in which two devices differ, and its operands in the examples where they do."""

    number: int
    examples: list[dict[str, np.ndarray]]


# How many examples of one operator are searched for a mechanism.
MOST_EXAMPLES = 8


def _keep_first(
    graph: Graph,
    pair: tuple[str, str],
    firsts: dict[tuple[str, str], _First],
    ours: Mapping[str, np.ndarray],
    theirs: Mapping[str, np.ndarray],
) -> None:
    """Records the first operator that differs in an example, unless an earlier one is known to differ."""
    for number, operator in enumerate(graph.operators):
        if pair in firsts and number > firsts[pair].number:
            return
        codes = [name for name in operator.outputs if graph.tensors[name].dtype != FLOAT]
        if all(np.array_equal(ours[name], theirs[name]) for name in codes):
            continue
        operands = {name: ours[name] for name in operator.inputs if graph.tensors[name].data is None}
        if pair not in firsts or number < firsts[pair].number:
            firsts[pair] = _First(number, [])
        if len(firsts[pair].examples) < MOST_EXAMPLES:
            firsts[pair].examples.append(operands)
        return


def _disagreement(
    graph: Graph, pair: tuple[str, str], tallies: Mapping[str, Tally], kinds: Mapping[str, str], kept: _First
) -> dict[str, Any] | None:
    operator = graph.operators[kept.number]
    first = next(name for name in operator.outputs if tallies[name].differing)
    operands = {name: np.concatenate([each[name] for each in kept.examples]) for name in kept.examples[0]}
    mechanism = mechanism_of(graph, operator, operands, *pair)
    if mechanism is None:
        return None
    ends = [tallies[name] for name in graph.outputs if name in tallies]
    return {
        "profiles": pair,
        "layer": first,
        "kind": kinds[first],
        "values": tallies[first].values,
        "differing": tallies[first].differing,
        "output_values": sum(each.values for each in ends),
        "outputs_differing": sum(each.differing for each in ends),
        "largest": max((each.largest for each in ends), default=0),
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
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        parts = [
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return [lines[0], "─" * max(map(len, lines)), *lines[1:]]


def _layer_rows(found: Inspection, length: int) -> list[tuple[object, ...]]:
    return [
        (number, name_in_short(layer.result, length), layer.kind, "x".join(map(str, layer.shape)),
         "–" if layer.weight_bits is None else layer.weight_bits, f"{layer.multiply_accumulates:,}")
        for number, layer in enumerate(found.layers)
    ]  # fmt: skip


def _text(found: Inspection, width: int) -> str:
    wrapped = functools.partial(textwrap.wrap, width=width, subsequent_indent="  ", break_long_words=True)
    lines = [*wrapped(f"{found.name} ({printable(found.description) or 'no description'})")]
    for side, ends in (("takes", found.inputs), ("returns", found.outputs)):
        for end in ends:
            lines += wrapped(f"{side} {end}")
    words = ", ".join(f"{count} {printable(word)}" for word, count in sorted(found.words.items()))
    lines += wrapped(f"operators: {words}")
    arena = (
        f"{found.arena_bytes:,} bytes of arena (TFLite-Micro)" if found.arena_bytes else f"no arena: {found.no_arena}"
    )
    lines += wrapped(
        f"{found.multiply_accumulates:,} multiply-adds; {found.flash_bytes:,} bytes of flash, "
        f"{found.weight_bytes:,} of them weights; {arena}"
    )
    header = ("", "result", "operator", "shape", "bits", "multiply-adds")
    table = _table(header, _layer_rows(found, NAME), 4)
    # Names make room for the other columns.
    excess = max(map(len, table)) - width
    if excess > 0:
        table = _table(header, _layer_rows(found, max(NAME - excess, 8)), 4)
    lines += ["", *table, ""]
    real = sum(layer.dtype == FLOAT and OPERATORS[layer.kind].floats for layer in found.layers)
    if real:
        noun = "operator computes" if real == 1 else "operators compute"
        lines += wrapped(f"{real} {noun} in float32: their results are not compared, the codes made of them are.")
    rows: list[tuple[str, ...]] = []
    for device in found.devices:
        ran = not device.not_run and not device.not_simulated
        claimed = "yes" if ran and all(each.exact for each in device.operators) else "not all" if ran else "–"
        rows.append((device.profile, f"{device.values:,}" if ran else "not run",
                     f"{device.differing:,}" if ran else "–", claimed))  # fmt: skip
    lines += [*wrapped(f"Integers of the runtimes beside the simulation, {found.examples} examples:")]
    lines += _table(("device", "compared", "differ", "equality is claimed"), rows, 1)
    for device in found.devices:
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
    if found.disagreements:
        lines += wrapped("Devices that compute different codes from the same inputs:")
    alike: dict[str, list[str]] = {}
    for each in found.disagreements:
        why = each.mechanism.sentence
        alike.setdefault(
            f"from {each.kind} {name_in_short(each.layer, 24)!r} on ({each.differing:,} of {each.values:,} codes); "
            f"{each.outputs_differing:,} of {each.output_values:,} codes of the outputs. {why[0].upper()}{why[1:]}.",
            [],
        ).append(" / ".join(each.profiles))
    for text, names in alike.items():
        lines += wrapped(f"{', '.join(names)}: {text}")
    simulated = [device.profile for device in found.devices if not device.not_simulated]
    in_codes = any(layer.dtype in CODE_RANGES for layer in found.layers)
    if in_codes and not found.disagreements and len(simulated) > 1:
        lines += wrapped(f"Simulated from these inputs, {', '.join(simulated)} compute the same codes.")
    if found.beside_float:
        lines += ["", *_beside_float_lines(found, NAME), *wrapped(collapse_in_words(found)), ""]
    lines += wrapped(_verdict(found))
    return "\n".join(lines)


def beside_float_rows(found: Inspection, length: int) -> list[tuple[str, ...]]:
    """Cells of a table of `BESIDE_FLOAT`."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [
        (name_in_short(each.result, length), each.kind, number(each.own, ".1f"), number(each.cumulative, ".1f"),
         number(each.clipped, ".1%"), number(each.wasted, ".0%"), f"{each.dead_channels} of {each.channels}")
        for each in found.beside_float
    ]  # fmt: skip


BESIDE_FLOAT = ("result", "operator", "own dB", "dB so far", "clipped", "unused codes", "dead channels")


def _beside_float_lines(found: Inspection, length: int) -> list[str]:
    return _table(BESIDE_FLOAT, beside_float_rows(found, length - 8), 2)


def collapse_in_words(found: Inspection) -> str:
    """Where the float network's signal is lost first."""
    first = collapse(found.beside_float)
    unknown = sum(not each.of for each in found.beside_float)
    without = f" {unknown} of {len(found.beside_float)} layers have no partner in it." if unknown else ""
    if first is None:
        return f"No layer falls below {LOST:g} dB beside the float network.{without}"
    where = f"{first.kind} {name_in_short(first.result)!r}"
    return f"The first layer below {LOST:g} dB beside the float network is {where}.{without}"


def _verdict(found: Inspection) -> str:
    if not found.ran_on:
        ran_in_float = any(not device.not_run and not device.not_simulated for device in found.devices)
        if ran_in_float:
            return "The file computes in float32: no integer was compared, so nothing was compared."
        return "The file was run on no device: nothing was compared."
    ran = [device for device in found.devices if device.values]
    total, names = sum(device.values for device in ran), ", ".join(found.ran_on)
    if not found.equal:
        return f"The file does not run as simulated where that is claimed ({names})."
    unclaimed = sum(device.differing for device in ran)
    rest = f"; where it is not claimed, {unclaimed:,} differ" if unclaimed else ""
    counted = f"{total:,} integers compared, none differs where equality is claimed{rest}"
    return f"The file runs as simulated on {names}: {counted}."


__all__ = ["DeviceFindings", "Disagreement", "Inspection", "Layer", "inspect", "name_in_short", "read_arrays"]
