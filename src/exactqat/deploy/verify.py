# SPDX-License-Identifier: Apache-2.0
"""Runs a written .tflite file on the real runtime and compares every integer with the simulation.

Tensors inside a delegate cannot be read, and the interpreter's option to preserve them splits the delegate into single
operators. So the file itself is read back, every operator's result becomes an output of the model, and that model runs
delegated like the original file. Each operator is then simulated from the operands the device had, which identifies the
faulty operator instead of all that follow it; the unchanged file is compared end to end.

A file that runs as simulated need not match what was trained: devices round differently. So a report also says how many
of the integers that this device computes equal those of training.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import platform
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..device import OPERATORS, PROFILES, Profile, Refusal, profile_named
from ..device.profile import with_alias
from ..device.tensor import CODE_RANGES
from ..display import shortened, table
from .emulation import SET_UP, EmulatedInterpreter, is_set_up
from .graph import Graph
from .signature import as_codes, input_codes
from .simulate import EXACT, check_inputs, dequantize, simulate, simulate_results
from .tflite import import_deploy, is_file_of, read_grids, read_signature
from .trial import RuntimeRefusal, try_in_a_child


@dataclass(frozen=True)
class Comparison:
    """Codes of one tensor: how many were compared, how many differ, by how much at most, and whether 0 is claimed.

    kind: the operator; with int16 activations as "CONV_2D:int16".

    trained_sqnr, device_sqnr: signal to quantization noise in dB, of the fake-quantized and of the device's tensor
    against the float network's; None where no values were given, or where there is no signal or no noise.
    """

    name: str
    kind: str
    values: int
    differing: int
    largest_difference: int
    exact: bool
    trained_sqnr: float | None = None
    device_sqnr: float | None = None


@dataclass(frozen=True)
class Report:
    """Answers three questions: does the file run on a device as simulated, does the device compute what was trained,
    and for which device was it trained?

    Attributes:
        profile: the device in question.
        operators: each result of the runtime compared with its simulation from the device's own operands; outputs: the
            unchanged file compared with the simulation of the whole graph. Without values if the file was not run.
        trained_for: the profile of the trained network, if known.
        training: what the device computes, by simulation, compared with what training computed, tensor by tensor,
            including the graph's outputs. Empty if it was not compared.
        ran_as: the profile whose runtime ran the file, if not the device's own; the file was then compared with that
            profile's simulation.
        predictions: the file's results on the user's arrays, fed as its metadata describes, compared with the trained
            model's, by result name. Empty if no model was given.
    """

    profile: str
    operators: tuple[Comparison, ...]
    outputs: tuple[Comparison, ...]
    trained_for: str = ""
    training: tuple[Comparison, ...] = ()
    ran_as: str = ""
    predictions: tuple[Comparison, ...] = ()

    @property
    def differing(self) -> int:
        """Number of codes that differ between runtime and simulation, over all operators and outputs."""
        return sum(comparison.differing for comparison in (*self.operators, *self.outputs))

    @property
    def values(self) -> int:
        """Number of codes compared between runtime and simulation."""
        return sum(comparison.values for comparison in (*self.operators, *self.outputs))

    @property
    def predictions_differing(self) -> int:
        """Number of integers in which the file differs from the model's own results on the user's arrays."""
        return sum(comparison.differing for comparison in self.predictions)

    @property
    def training_differing(self) -> int:
        """Number of codes in which this device differs from training, over all tensors compared."""
        return sum(comparison.differing for comparison in self.training)

    @property
    def training_values(self) -> int:
        """Number of codes compared with training's."""
        return sum(comparison.values for comparison in self.training)

    @property
    def equal(self) -> bool:
        """Whether the file ran as simulated and the device computes what was trained, on the user's arrays too; if the
        graph's training is unknown, only the former."""
        as_simulated = self.values > 0 and self.differing == 0 and self.predictions_differing == 0
        if not self.training:
            return as_simulated and self.trained_for in ("", self.profile)
        return as_simulated and self.training_differing == 0

    def sentences(self) -> tuple[str, str, str]:
        """The three answers in words: the file on the device, the device compared with training, what it was trained
        for."""
        names = self.profile, self.ran_as or self.profile
        device, runtime = (PROFILES[name].title if name in PROFILES else shortened(name) for name in names)
        if self.values:
            where = f"On {runtime}" + (f" ({device} was not run here)" if self.ran_as else "")
            runs = "does not run" if self.differing else "runs"
            ran = f"{where} the file {runs} as simulated: {_share(self.differing, self.values, 'integers')}"
        else:
            ran = f"On {runtime} the file was not run"
        if self.predictions:
            total = sum(row.values for row in self.predictions)
            gives = "something other than" if self.predictions_differing else "what"
            ran += (
                f"; fed with the user's arrays as its metadata describes, it returns {gives} the model returns: "
                f"{_share(self.predictions_differing, total, 'integers')}"
            )
        computes = f"What {device} computes was not compared with what was trained"
        if self.training:
            what = "something other than" if self.training_differing else "what"
            count, whole = self.outputs_beside_training, (self.training_differing, self.training_values)
            computes = (
                f"{device} computes {what} was trained: {_share(*count, 'integers of the outputs')}, "
                f"{_share(*whole, 'of all stored tensors')}"
            )
        if not self.trained_for:
            return ran, computes, "The device it was trained for is unknown"
        same = "this device" if self.trained_for == self.profile else f"and not for {shortened(self.profile)}"
        return ran, computes, f"It was trained for {shortened(self.trained_for)}, {same}"

    @property
    def outputs_beside_training(self) -> tuple[int, int]:
        """How many codes of the graph's outputs differ from training's, and how many were compared."""
        names = {each.name for each in self.outputs}
        found = [each for each in self.training if each.name in names]
        return sum(each.differing for each in found), sum(each.values for each in found)

    def __repr__(self) -> str:
        rows = (*self.operators, *self.outputs)
        worst = max(rows, key=lambda row: row.differing, default=None)
        if worst is None or not self.values:
            found = "not run"
        else:
            found = f"{len(self.operators):,} operators, {self.values:,} integers compared, "
            found += (
                f"{self.differing:,} differ, most of them in {shortened(worst.name)}"
                if worst.differing
                else "none differs"
            )
        if self.training:
            found += f"; from training {_share(self.training_differing, self.training_values, 'integers')}"
        elif self.trained_for not in ("", self.profile):
            found += "; not compared with training"
        if self.predictions:
            total = sum(row.values for row in self.predictions)
            found += f"; from the model's own results {_share(self.predictions_differing, total, 'integers')}"
        ran = f" run as {shortened(self.ran_as)}" if self.ran_as else ""
        device = f", trained for {shortened(self.trained_for)}" if self.trained_for not in ("", self.profile) else ""
        return f"Report({shortened(self.profile)}{ran}{device}: {found})"

    def _repr_html_(self) -> str:
        rows = self.table()
        noise = any(row["device_sqnr"] is not None for row in rows)

        def decibels(ratio: Any) -> str | None:
            return None if ratio is None else f"{ratio:.1f}"

        header = ["tensor", "operator", "integers", "differ", "by at most", "equality is claimed"]
        cells = [
            [row["tensor"], row["operator"], f"{row['values']:,}", f"{row['differing']:,}", row["largest_difference"],
             "yes" if row["promise"] == "exact" else "no"]
            + [decibels(row[name]) for name in ("trained_sqnr", "device_sqnr") if noise]
            for row in rows
        ]  # fmt: skip
        header += ["dB in training", "dB on the device"] if noise else []
        trained = {each.name: each for each in self.training}
        if trained:
            header.append("differ from training")
            whole = len(self.operators)
            for position, (row, line) in enumerate(zip(rows, cells, strict=True)):
                found = trained.get(str(row["tensor"])) if position < whole else None
                line.append(None if found is None else f"{found.differing:,} of {found.values:,}")
        for each in self.predictions:
            line = [each.name, each.kind, f"{each.values:,}", f"{each.differing:,}", each.largest_difference, "no"]
            cells.append(line + [None] * (len(header) - len(line)))
        return table(f"{self!r}. {'. '.join(self.sentences())}.", header, cells, 2)

    def table(self) -> list[dict[str, str | int | float | None]]:
        """One row per operator, then one per output: tensor, operator, values, differing, largest, promise, SQNR."""
        return [
            {
                "tensor": comparison.name,
                "operator": comparison.kind,
                "values": comparison.values,
                "differing": comparison.differing,
                "largest_difference": comparison.largest_difference,
                "promise": "exact" if comparison.exact else "none",
                "trained_sqnr": comparison.trained_sqnr,
                "device_sqnr": comparison.device_sqnr,
            }
            for comparison in (*self.operators, *self.outputs)
        ]


def verify(
    graph: Graph,
    path: str | os.PathLike[str],
    x: np.ndarray | Mapping[str, np.ndarray] | None = None,
    profile: str | Profile = "xnnpack",
    batch_size: int = 8,
    float_values: Mapping[str, np.ndarray] | None = None,
    trained_values: Mapping[str, np.ndarray] | None = None,
    progress: Callable[[int, int], None] | None = None,
    trained_codes: Mapping[str, np.ndarray] | None = None,
    model: Any = None,
    data: Any = None,
) -> Report:
    """Compares the file at `path` with `graph` on input codes x [batch, ...] (or one array per input name), and what
    the device computes with what was trained; see `Report`, whose `equal` says whether everything agrees.

    model, data: the frozen model (in JAX ``prepared.trained(params, state)``) and a batch of the user's own inputs. The
    file then gets these arrays too, as its metadata describes (names, axes, grids), and its results are compared with
    the model's in evaluation, integer for integer; what the file leaves out, such as a last softmax, is left out of
    both. Without x, the codes of `data` are used for all other comparisons.

    profile: one of `profiles_here`, or "xnnpack" for the runtime's default kernels on this processor. float_values and
    trained_values: what the float and the fake-quantized network compute for the same images, or for the first of them,
    by tensor name, channels last (`deploy.layer_values` returns both); the report then contains signal-to-noise ratios
    for these tensors, over these images. progress: called with the number of comparisons done and the total.
    trained_codes: what the trained network itself stores for x, or for the first of x, by tensor name
    (`deploy.device_codes` returns it), to be compared with this device. Without them, a graph that was trained for
    another profile is compared with its simulation under that profile; for a graph trained for this one nothing more
    is compared.

    A file that differs from what `write_tflite` writes for the graph is run in another process first, because runtimes
    trust what they read. Raises ValueError if the file has no tensor for a result of the graph, RuntimeRefusal if the
    runtime rejects the file or crashes on it, Refusal if it would crash the process at these codes. Needs
    `pip install 'exactqat[deploy]'`.
    """
    target = profile_named(profile_here(profile))
    profile = target.name
    if data is None and (x is None or model is not None):
        raise TypeError("verify needs x (codes) or data (arrays as the model takes them); with model it needs data")
    if x is None:
        x = input_codes(graph, data if model is None else model.evaluated(data)[0])
    inputs = check_inputs(graph, x)
    total = next(iter(inputs.values())).shape[0]
    if total == 0:
        raise ValueError("x contains no images, so there is nothing to compare")
    content = Path(path).read_bytes()
    names = graph.results()
    if not all(OPERATORS[operator.kind].any_batch for operator in graph.operators):
        batch_size = 1
    batches = [
        {name: codes[start : start + batch_size] for name, codes in inputs.items()}
        for start in range(0, total, batch_size)
    ]
    deadly = any(
        OPERATORS[operator.kind].may_end_the_process(
            [graph.tensors[name] for name in operator.inputs], operator.attributes, target
        )
        for operator in graph.operators
    )
    if deadly:
        for batch in batches:
            simulate(graph, batch, profile)  # raises what the runtime would not survive
    files = (content, graph.inputs, graph.outputs), (_with_outputs(content, names), graph.inputs, names)
    if not is_file_of(graph, content):
        try_in_a_child(_run, files, profile, batches)
    plain, opened = (open_runtime(*file, profile) for file in files)
    operators = {name: Tally() for name in names}
    noises = {name: (_Noise(), _Noise()) for name in float_values or () if name in operators}
    outputs = {name: Tally() for name in graph.outputs}
    if trained_codes is None and graph.trained_for not in ("", profile):
        # A device that would not survive these inputs gives nothing to compare with.
        with contextlib.suppress(Refusal):
            trained_codes = simulate(graph, inputs, graph.trained_for, names, batch_size)
    training = {name: Tally() for name in trained_codes or () if name in operators}
    done, steps = 0, len(batches) * len(graph.operators)
    for batch, start in zip(batches, range(0, total, batch_size), strict=True):
        device = {**batch, **opened.run(batch)}
        agree = True
        for operator in graph.operators:
            for name, codes in simulate_results(graph, operator, device, profile).items():
                agree &= operators[name].add(device[name], codes)
            done += 1
            if progress is not None:
                progress(done, steps)
            name = operator.outputs[0]
            if float_values is not None and name in noises:
                per_example = graph.tensors[name].shape[0]
                images = slice(start * per_example, (start + batch_size) * per_example)
                trained_noise, device_noise = noises[name]
                signal = float_values[name][images]
                quantization = graph.tensors[name].quantization
                device_noise.add(signal, dequantize(device[name][: len(signal)], quantization))
                if trained_values is not None and name in trained_values:
                    trained_noise.add(signal, trained_values[name][images])
        # Where every operator agrees from the device's operands, the whole simulation is what the device had.
        wanted = [*dict.fromkeys((*graph.outputs, *training))]
        end_to_end = device if agree else simulate(graph, batch, profile, wanted)
        for name, codes in plain.run(batch).items():
            outputs[name].add(codes, end_to_end[name])
        for name, tally in training.items():
            assert trained_codes is not None
            each = graph.tensors[name].shape[0]
            own = trained_codes[name][start * each : (start + batch_size) * each]
            tally.add(end_to_end[name][: len(own)], own, "training")
    kinds = {name: graph.measured_as(operator) for operator in graph.operators for name in operator.outputs}
    exact = {name: (kind, profile) in EXACT for name, kind in kinds.items()}
    rows = []
    for name, kind in kinds.items():
        row = operators[name].comparison(name, kind, exact[name])
        if name in noises:
            trained_noise, device_noise = noises[name]
            row = replace(row, trained_sqnr=trained_noise.decibels(), device_sqnr=device_noise.decibels())
        rows.append(row)
    return Report(
        profile,
        tuple(rows),
        tuple(tally.comparison(name, "whole graph", all(exact.values())) for name, tally in outputs.items()),
        graph.trained_for,
        # A device computes what was trained where that is the same profile; elsewhere no equality is claimed.
        tuple(
            tally.comparison(name, kinds[name], profile == graph.trained_for and exact[name])
            for name, tally in training.items()
        ),
        predictions=() if model is None else _predictions(content, model, data, profile, batch_size),
    )


def _predictions(content: bytes, model: Any, data: Any, profile: str, batch_size: int) -> tuple[Comparison, ...]:
    """Compares the file's results on the user's arrays with the model's, using only file, model and arrays."""
    signature, grids = read_signature(content), read_grids(content)
    given, results = (
        tuple(dict.fromkeys(port.tensor for port in side)) for side in (signature.inputs, signature.outputs)
    )
    runtime = open_runtime(content, given, results, profile)
    tallies = {port.name: Tally() for port in signature.outputs}
    for rows in _batches(data, batch_size):
        arrays, wanted = model.evaluated(rows)
        codes = {
            port.tensor: as_codes(port.to_graph(array), *grids[port.tensor], port.limits)
            for port, array in zip(signature.inputs, arrays, strict=True)
        }
        found = runtime.run(codes)
        for port, own in zip(signature.outputs, wanted, strict=True):
            dtype, quantization = grids[port.tensor]
            device = port.to_user(found[port.tensor]).astype(np.int64)
            if dtype not in CODE_RANGES:
                tallies[port.name].add(device, own)
                continue
            steps = own.astype(np.float64) / float(quantization.scale[0])
            trained = np.rint(np.nan_to_num(steps))
            # What lies between two codes is none, wherever it would be rounded to; so is what is not finite.
            trained += np.where(np.abs(steps - trained) <= _OFF_GRID, 0, 0.5) + int(quantization.zero_point[0])
            tallies[port.name].add(device, trained)
    return tuple(tally.comparison(name, "the model's predict", False) for name, tally in tallies.items())


# In steps; float32 holds the steps of all grids closer than that.
_OFF_GRID = 1e-2


def _batches(data: Any, batch_size: int) -> Iterator[Any]:
    """The user's arrays, however they nest, some rows at a time."""
    sizes: list[int] = []

    def rows(each: Any, start: int) -> Any:
        if isinstance(each, Mapping):
            return {key: rows(value, start) for key, value in each.items()}
        if isinstance(each, tuple | list):
            return type(each)(rows(value, start) for value in each)
        if not getattr(each, "ndim", 0):
            return each
        sizes.append(each.shape[0])
        return each[start : start + batch_size]

    first = rows(data, 0)
    if not sizes or min(sizes) == 0:
        raise ValueError("data contains no examples, so there is nothing to compare")
    if len(set(sizes)) > 1:
        raise ValueError(f"data must contain the same number of examples for every input, got {sizes}")
    yield first
    for start in range(batch_size, sizes[0], batch_size):
        yield rows(data, start)


class Tally:
    """Running counts of one comparison."""

    def __init__(self) -> None:
        self.values = self.differing = self.largest = 0

    def add(self, device: np.ndarray, simulated: np.ndarray, other: str = "the graph") -> bool:
        """Counts, and says whether all were equal; `other` is what the device is compared with."""
        if device.shape != simulated.shape:
            raise ValueError(f"the device returns shape {device.shape} but {other} has {simulated.shape}")
        if device.dtype == np.float32 and simulated.dtype == np.float32:
            # Real numbers are equal bit for bit, or not.
            difference = (device.view(np.int32) != simulated.view(np.int32)).astype(np.int64)
        else:
            difference = np.abs(device.astype(np.int64) - simulated)
        differing = int(np.count_nonzero(difference))
        self.values += difference.size
        self.differing += differing
        self.largest = max(self.largest, math.ceil(difference.max(initial=0)))
        return not differing

    def comparison(self, name: str, kind: str, exact: bool) -> Comparison:
        return Comparison(name, kind, self.values, self.differing, self.largest, exact)


def _share(differing: int, values: int, what: str) -> str:
    """How many of them differ, in words."""
    return f"{differing:,} of {values:,} {what} differ" if differing else f"none of {values:,} {what} differs"


class _Noise:
    """Running sums of squares: a signal, and what a quantized version of it adds."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, signal: np.ndarray, quantized: np.ndarray) -> None:
        if signal.shape != quantized.shape:
            raise ValueError(f"float and trained values must have shape {quantized.shape}, got {signal.shape}")
        exact = signal.astype(np.float64)
        self.signal += float(np.square(exact).sum())
        self.noise += float(np.square(exact - quantized).sum())

    def decibels(self) -> float | None:
        if self.signal == 0 or self.noise == 0:
            return None
        return 10 * math.log10(self.signal / self.noise)


def profiles_here() -> tuple[str, ...]:
    """The profiles whose runtime this machine has: those that it runs itself, then those that it emulates."""
    machine = platform.machine()
    installed = [
        profile
        for profile in PROFILES.values()
        if profile.runtime in RUNTIMES and importlib.util.find_spec(RUNTIMES[profile.runtime].module) is not None
    ]
    native = [profile.name for profile in installed if profile.runs_on(machine)]
    emulated = [profile.name for profile in installed if profile.emulated and is_set_up()]
    return tuple(dict.fromkeys((*native, *emulated)))


def profile_here(profile: str | Profile) -> str:
    """The name of the profile, or of the one that "xnnpack" means on this machine.

    Raises:
        ValueError: no profile has that name, or this machine cannot run it.
        ImportError: its runtime is not installed.
    """
    here = profiles_here()
    shared = with_alias(profile) if isinstance(profile, str) else ()
    wanted = next((each for each in shared if each.name in here), None) or profile_named(profile)
    if wanted.name in here:
        return wanted.name
    if wanted.runtime not in RUNTIMES:
        raise ValueError(f"profile {wanted.name!r} has no runtime that can run here; available here: {', '.join(here)}")
    RUNTIMES[wanted.runtime].interpreters()
    if wanted.emulated:
        raise ValueError(
            f"profile {wanted.name!r} needs an ARM64 processor or its emulation; to set that up, run: {SET_UP}"
        )
    raise ValueError(f"profile {wanted.name!r} cannot run on this machine; available here: {', '.join(here)}")


def _run(
    files: Sequence[tuple[bytes, tuple[str, ...], tuple[str, ...]]],
    profile: str,
    batches: Sequence[Mapping[str, np.ndarray]],
) -> None:
    """All that `verify` asks of the runtime."""
    for file in files:
        runtime = open_runtime(*file, profile)
        for batch in batches:
            runtime.run(batch)


def open_runtime(
    content: bytes, inputs: tuple[str, ...], outputs: tuple[str, ...], profile: str | Profile, in_order: bool = False
) -> _LiteRT | _Micro | _Emulated:
    """The profile's runtime on a model: its method `run` takes and returns codes by tensor name.

    in_order: inputs and outputs are names for all of the file's, in its order, whatever it calls them.
    """
    wanted = profile_named(profile)
    if wanted.emulated and not wanted.runs_on(platform.machine()):
        return _Emulated(content, inputs, outputs, in_order)
    return RUNTIMES[wanted.runtime](content, inputs, outputs, wanted, in_order)


class _LiteRT:
    """The interpreter on one model, addressed by tensor names and resized to the batch at hand."""

    module = "ai_edge_litert"

    def __init__(
        self,
        content: bytes,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        profile: Profile,
        in_order: bool = False,
    ) -> None:
        runtime = self.interpreters()
        resolvers = runtime.OpResolverType
        resolver = resolvers.AUTO if profile.optimized else resolvers.BUILTIN_REF
        try:
            self.interpreter: Any = runtime.Interpreter(
                model_content=content, experimental_op_resolver_type=resolver, num_threads=1
            )
        except ValueError as error:
            raise RuntimeRefusal(f"LiteRT rejects the file: {' '.join(str(error).split())}") from error
        self.inputs = _indices(self.interpreter.get_input_details(), inputs, in_order)
        self.outputs = _indices(self.interpreter.get_output_details(), outputs, in_order)
        self.batch = 0

    @staticmethod
    def interpreters() -> Any:
        """The module that holds the interpreter, or an ImportError that says how to install it."""
        return import_deploy("ai_edge_litert.interpreter")

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        size = next(iter(batch.values())).shape[0]
        if size != self.batch:
            for name, index in self.inputs.items():
                self.interpreter.resize_tensor_input(index, batch[name].shape)
            try:
                self.interpreter.allocate_tensors()
            except RuntimeError as error:
                raise RuntimeRefusal(f"LiteRT rejects the file: {error}") from error
            self.batch = size
        for name, index in self.inputs.items():
            self.interpreter.set_tensor(index, batch[name])
        try:
            self.interpreter.invoke()
        except RuntimeError as error:
            raise RuntimeRefusal(f"LiteRT fails to run the file: {error}") from error
        return {name: self.interpreter.get_tensor(index) for name, index in self.outputs.items()}


class _Emulated:
    """LiteRT on an emulated processor, addressed by tensor names."""

    def __init__(
        self, content: bytes, inputs: tuple[str, ...], outputs: tuple[str, ...], in_order: bool = False
    ) -> None:
        self.interpreter = EmulatedInterpreter(content)
        self.inputs = _indices(self.interpreter.inputs, inputs, in_order)
        self.outputs = _indices(self.interpreter.outputs, outputs, in_order)

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {index: np.ascontiguousarray(batch[name]) for name, index in self.inputs.items()}
        try:
            results = self.interpreter.run(given, list(self.outputs.values()))
        except RuntimeError as error:
            raise RuntimeRefusal(f"LiteRT rejects the file on ARM64: {error}") from error
        if not self.interpreter.delegated():
            raise RuntimeError("LiteRT runs without XNNPACK on the emulated processor, unlike on any phone")
        return dict(zip(self.outputs, results, strict=True))


class _Micro:
    """TFLite-Micro's interpreter, which takes one example at a time and identifies tensors by position."""

    module = "tflite_micro"

    def __init__(
        self,
        content: bytes,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        profile: Profile,
        in_order: bool = False,
    ) -> None:
        runtime = self.interpreters()
        schema = import_deploy("ai_edge_litert.schema_py_generated")
        subgraph = schema.ModelT.InitFromPackedBuf(content).subgraphs[0]
        names = [(tensor.name or b"").decode("utf-8", "replace") for tensor in subgraph.tensors]
        self.inputs = _positions([names[index] for index in subgraph.inputs], inputs, in_order)
        self.outputs = _positions([names[index] for index in subgraph.outputs], outputs, in_order)
        try:
            self.interpreter: Any = runtime.Interpreter.from_bytes(content, arena_size=_arena(subgraph))
        except RuntimeError as error:
            # What it raises names nothing; it says why on the process's standard error.
            said = try_in_a_child(_take_on_micro, content, _arena(subgraph)).splitlines()
            reason = next((line for line in said if line.strip()), str(error))
            raise RuntimeRefusal(f"TFLite-Micro rejects the file: {reason}") from error

    @staticmethod
    def interpreters() -> Any:
        """TFLite-Micro's interpreter, which no extra installs: it only has pre-releases."""
        try:
            return importlib.import_module("tflite_micro").runtime
        except ImportError as error:
            raise ImportError(f"this needs tflite_micro: pip install --pre tflite-micro ({error})") from error

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self.outputs}
        for example in range(next(iter(batch.values())).shape[0]):
            for name, position in self.inputs.items():
                self.interpreter.set_input(np.ascontiguousarray(batch[name][example : example + 1]), position)
            try:
                self.interpreter.invoke()
            except RuntimeError as error:
                raise RuntimeRefusal(f"TFLite-Micro fails to run the file: {error}") from error
            for name, position in self.outputs.items():
                parts[name].append(np.array(self.interpreter.get_output(position)))
        return {name: np.concatenate(part) for name, part in parts.items()}


# By the distribution that brings it; `device.Profile.runtime` names one of them.
RUNTIMES: dict[str, type[_LiteRT] | type[_Micro]] = {"ai-edge-litert": _LiteRT, "tflite-micro": _Micro}


def _take_on_micro(content: bytes, arena: int) -> None:
    _Micro.interpreters().Interpreter.from_bytes(content, arena_size=arena)


def _arena(subgraph: Any) -> int:
    """Bytes for all tensors at once, with their bookkeeping."""
    sizes = [math.prod(tensor.shape) * 8 if tensor.shape is not None else 8 for tensor in subgraph.tensors]
    return int(sum(sizes)) + 1024 * len(sizes) + (1 << 20)


def _positions(present: list[str], names: tuple[str, ...], in_order: bool) -> dict[str, int]:
    return _indices([{"name": name, "index": position} for position, name in enumerate(present)], names, in_order)


def _indices(details: list[dict[str, Any]], names: tuple[str, ...], in_order: bool) -> dict[str, int]:
    if in_order:
        return {name: int(detail["index"]) for name, detail in zip(names, details, strict=True)}
    found = {detail["name"]: int(detail["index"]) for detail in details}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"the file does not have {missing} where the graph does; it has {sorted(found)}")
    return {name: found[name] for name in names}


# Where a table of type SubGraph says where its outputs are: in the third field, after two numbers of two bytes.
_OUTPUTS = 4 + 2 * 2


def _with_outputs(content: bytes, names: tuple[str, ...]) -> bytes:
    """The same model with the named tensors as its outputs: a list appended at the end, to which the model points.

    The file is not unpacked: a small file may refer to one table or list from so many places that it fills all memory.

    Raises:
        ValueError: the file has no such tensors, or is damaged.
    """
    schema = import_deploy("ai_edge_litert.schema_py_generated")
    try:
        subgraph = schema.Model.GetRootAs(content, 0).Subgraphs(0)
        # A name may be missing in a damaged file, and a tensor without one may stay so.
        found = ((position, subgraph.Tensors(position).Name()) for position in range(subgraph.TensorsLength()))
        positions = {name.decode(): position for position, name in found if name is not None}
        missing = [name for name in names if name not in positions]
        if not missing:
            return with_outputs_at(content, [positions[name] for name in names])
    except Exception as error:  # noqa: BLE001 - the reader trusts all that it reads
        raise ValueError(f"the file is damaged: {error or type(error).__name__}") from error
    raise ValueError(f"the file has no tensors {missing}; was it written from another graph?")


def with_outputs_at(content: bytes, positions: Sequence[int]) -> bytes:
    """The same model with the tensors of these numbers as its outputs."""
    schema = import_deploy("ai_edge_litert.schema_py_generated")
    table = schema.Model.GetRootAs(content, 0).Subgraphs(0)._tab
    field = table.Offset(_OUTPUTS)
    if not field:
        raise ValueError("it has no outputs")
    place = table.Pos + field
    start = -(-len(content) // 4) * 4
    changed = bytearray(content.ljust(start, b"\0"))
    struct.pack_into("<I", changed, place, start - place)
    return bytes(changed) + struct.pack(f"<{1 + len(positions)}I", len(positions), *positions)
