# SPDX-License-Identifier: Apache-2.0
"""Runs a written file on the real runtime and compares every integer with the simulation and with training.

A file that runs as simulated need not match what was trained: devices round differently. So a report also says how many
of the integers that this device computes equal those of training. Examples are read once, some at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..kit.device import OPERATORS, PROFILES, Profile, Refusal, profile_named
from ..kit.device.profile import DEFAULT_KERNELS, ONNXRUNTIME_X86, REFERENCE
from ..kit.device.tensor import CODE_RANGES, dequantize
from ..kit.progress import Clock
from .codes import Intake
from .comparing import Codes, Comparing, Opened, OpenedTflite, Run
from .comparison import Comparison, Report
from .examples import Data, batches_of, examples_in, unless_file
from .formats import onnx, tflite
from .graph import Graph
from .lower import lower_with_layouts
from .packing import packed
from .runtimes import profile_here, profiles_here
from .runtimes.onnxruntime import OnnxRuntime, written_network
from .runtimes.trial import try_in_a_child
from .simulate import check_inputs, simulate
from .values import placed_codes

# The most examples at a time, and the bytes of the results of those.
TOGETHER, BYTES_TOGETHER = 64, 1 << 26
# Bytes of codes that another process tries before this one.
BYTES_TRIED = 1 << 26
# In steps; float32 holds the steps of all grids more precisely than that.
_OFF_GRID = 1e-2


def verify(
    graph: Graph,
    path: str | os.PathLike[str],
    x: np.ndarray | Mapping[str, np.ndarray] | None = None,
    device: str | Profile | None = None,
    batch_size: int | None = None,
    float_values: Mapping[str, np.ndarray] | None = None,
    trained_values: Mapping[str, np.ndarray] | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    trained_codes: Mapping[str, np.ndarray] | None = None,
    model: Any = None,
    data: Data = None,
    run: Run | None = None,
) -> Report:
    """Compares the .tflite or .onnx file at `path` with `graph`, integer for integer, and what the device computes with
    what was trained; see `Report`, which is true if everything agrees.

    Give codes x [batch, ...] (or one array per input name), or `data`: your own inputs, with or without targets, as
    arrays, a loader, a generator or the path of a file. Memory is that of some examples at a time.

    model: the frozen model (in JAX ``prepared.trained(params, state)``). All codes that it stores for `data`, in
    evaluation, are then compared with the device's, and its results with the file's; what the file leaves out, such as
    a final softmax, is left out of both.

    device: one of `profiles_here`, or "xnnpack" for the runtime's default kernels on this processor. By default the
    device that the graph was trained for; if it cannot run here, the file is run on the default kernels. An .onnx file
    runs on onnxruntime; where this processor is not "onnxruntime-x86", nothing is claimed. float_values and
    trained_values: what the float and the fake-quantized network compute for the same examples, or for the first of
    them, by tensor name, channels last (`deploy.layer_values` returns both); the report then contains signal-to-noise
    ratios for these tensors. progress: called with the number of comparisons done and the total (0: unknown, as of a
    generator); True: a line on standard error; None: likewise if that is a terminal and it takes more than a moment;
    False: nothing. trained_codes: what the trained network stores for x, or for the first of x, by tensor name
    (`deploy.device_codes`), in place of a model. Without either, a graph trained for another device is compared with
    its simulation on that one; for a graph trained for this one nothing more is compared. batch_size: examples at a
    time; by default as many as fit in some memory.

    What the file says of scales, zero points, shapes, names and axes is compared, too (`Report.declared`). A file that
    differs from what `write_tflite` writes for the graph is run in another process first, because runtimes trust what
    they read. Raises ValueError if the file has no tensor for a result of the graph, RuntimeRefusal if the runtime
    rejects the file or crashes on it, Refusal if it would crash the process at these codes. Needs
    `pip install 'exactqat[deploy]'`.

    run: how a .tflite file runs on a device that is declared by a file (`deploy.identify`): from its content and codes
    by input, one example at a time, to codes by output. It may be asked for results inside the network.

    For a network with variables (`Graph.variables`), the examples are successive calls of one stream.
    """
    if data is None and (x is None or model is not None):
        raise TypeError("verify needs x (codes) or data (arrays as the model takes them); with model it needs data")
    data = unless_file(data, [port.name for port in graph.signature.inputs])
    content = Path(path).read_bytes()
    if batch_size is None:
        codes = sum(math.prod(graph.tensors[name].shape) for name in (*graph.inputs, *graph.results()))
        batch_size = max(1, min(TOGETHER, BYTES_TOGETHER // max(codes, 1)))
    if graph.variables or not all(OPERATORS[operator.kind].any_batch for operator in graph.operators):
        batch_size = 1
    network = model if model is None or hasattr(model, "traced") else model.trained()
    target = _target(graph, content, Path(path), device, run)
    verifying = _Verifying(graph, content, *target, float_values or {}, trained_values or {}, trained_codes, run)
    if network is None and trained_codes is None and graph.trained_for != verifying.device.name:
        verifying.elsewhere = graph.trained_for
    users = iter(()) if data is None else _users(graph, data, batch_size, network)
    if x is None:
        verifying.compare(users, examples_in(data, len(graph.inputs)), batch_size, progress)
        return verifying.report()
    inputs = check_inputs(graph, x)
    total = len(next(iter(inputs.values())))
    if total == 0:
        raise ValueError("x contains no images, so there is nothing to compare")
    starts = range(0, total, batch_size)
    parts = (_Part({name: codes[at : at + batch_size] for name, codes in inputs.items()}) for at in starts)
    verifying.compare(parts, total, batch_size, progress)
    if network is not None:
        for part in verifying.tried(users):
            verifying.add_results(part, verifying.opened.run(part.codes)[1])
    return verifying.report()


def _target(
    graph: Graph, content: bytes, path: Path, device: str | Profile | None, run: Run | None
) -> tuple[Profile, Profile, bool]:
    """The device in question, the one whose runtime runs the file, and whether that is claimed to be exact."""
    is_tflite = content[4:8] == tflite.IDENTIFIER
    file = ".tflite" if is_tflite or path.suffix != ".onnx" else ".onnx"
    if device is not None and run is None:
        named = profile_named(profile_here(device))
        if is_tflite != (named.file == ".tflite") and (is_tflite or path.suffix == ".onnx"):
            kind = "a .tflite" if is_tflite else "an .onnx"
            raise ValueError(f"{named.title} runs {named.file} files, and path is {kind} file: {path.name}")
        return named, named, True
    own = PROFILES.get(graph.trained_for) if device is None else profile_named(device)
    if run is not None:
        if own is None or own.file != ".tflite" or not is_tflite:
            raise ValueError("run is for .tflite files, and needs the device that it runs them on")
        return own, own, True
    if file == ".onnx":
        return ONNXRUNTIME_X86, ONNXRUNTIME_X86, ONNXRUNTIME_X86.name in profiles_here(file)
    if own is None or own.file != file:
        default = profile_named(profile_here(DEFAULT_KERNELS))
        return default, default, True
    if own.name in profiles_here(file):
        return own, own, True
    # XNNPACK computes weights of four bits otherwise; LiteRT's reference kernels do not.
    four_bits = packed(graph) is not graph
    return own, profile_named(profile_here(REFERENCE.name if four_bits else DEFAULT_KERNELS)), True


@dataclass(frozen=True)
class _Part:
    """Some examples: their codes and, of a model, what it returns and the codes of everything that it stores."""

    codes: Codes
    results: Sequence[np.ndarray] = ()
    stored: Codes = field(default_factory=dict)


def _users(graph: Graph, data: Data, batch_size: int, network: Any) -> Iterator[_Part]:
    """A user's examples; `network`: what was trained, or None."""
    intake = Intake(graph)
    lowered = None if network is None else lower_with_layouts(network)
    for rows in batches_of(data, len(graph.signature.inputs), batch_size):
        if lowered is None:
            yield _Part(intake.codes(rows))
        else:
            inputs, results, stored = network.traced(intake.as_model_takes(rows))
            yield _Part(intake.codes(inputs), results, placed_codes(network, stored, lowered))


@dataclass
class _Verifying:
    """One file beside one graph; `elsewhere`: the device whose simulation replaces training, where it left no codes."""

    graph: Graph
    content: bytes
    device: Profile
    ran: Profile
    claims: bool
    float_values: Codes
    trained_values: Codes
    trained_codes: Codes | None
    run: Run | None = None
    elsewhere: str = ""
    training: dict[str, Comparison] = field(default_factory=dict)
    predictions: dict[str, Comparison] = field(default_factory=dict)
    states: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    @functools.cached_property
    def opened(self) -> Opened:
        """The file on its runtime."""
        if self.ran.file == ".onnx":
            return OnnxRuntime(written_network(self.graph, self.content))
        return OpenedTflite(self.graph, self.content, self.ran, run=self.run)

    @functools.cached_property
    def comparing(self) -> Comparing:
        return Comparing(self.graph, self.ran, self.claims)

    def compare(
        self,
        parts: Iterable[_Part],
        total: int | None,
        batch_size: int,
        progress: Callable[[int, int], None] | bool | None,
    ) -> None:
        """Compares everything, part by part."""
        graph, rows_of = self.graph, self.comparing.operators
        steps = 0 if total is None else -(-total // batch_size) * len(graph.operators)
        tell = progress if callable(progress) else Clock.counting("comparing with the runtime", progress)
        counts = itertools.count(1)
        deadly = any(
            OPERATORS[operator.kind].may_end_the_process(
                [graph.tensors[name] for name in operator.inputs], operator.attributes, self.ran
            )
            for operator in graph.operators
        )
        start = 0
        for part in self.tried(parts):
            if deadly:  # raises what the runtime would not survive
                simulate(graph, part.codes, self.ran, progress=False)
            end = start + len(next(iter(part.codes.values())))

            def of_these(name: str, values: np.ndarray, start: int = start, end: int = end) -> np.ndarray:
                rows = graph.tensors[name].shape[0]  # of one example
                return values[start * rows : end * rows]

            known: Codes = part.stored
            if self.elsewhere:
                try:
                    known = self._simulated(self.elsewhere, part.codes, graph.results())
                except Refusal:  # a device that would not survive these inputs gives nothing to compare with
                    self.elsewhere = ""
                    self.training.clear()
            elif self.trained_codes is not None:
                known = {name: of_these(name, codes) for name, codes in self.trained_codes.items() if name in rows_of}
            trained = {name: codes for name, codes in known.items() if name in rows_of}
            device, returned = self.opened.run(part.codes)
            also = tuple(name for name in trained if name not in graph.outputs)
            whole = self.comparing.add(part.codes, device, returned, also, lambda: tell(next(counts), steps))
            if self.device is not self.ran and trained:
                whole = dict(self._simulated(self.device.name, part.codes, tuple(trained)))
            for name, codes in trained.items():
                # A device computes what was trained if the profile is the same; otherwise no equality is claimed.
                exact = rows_of[name].exact and self.device.name == graph.trained_for
                row = self.training.get(name) or Comparison(name, rows_of[name].kind, exact=exact)
                self.training[name] = row.counting(whole[name][: len(codes)], codes, "training")
            for name in self.float_values.keys() & rows_of.keys():
                signal, own = of_these(name, self.float_values[name]), self.trained_values.get(name)
                values = dequantize(device[name][: len(signal)], graph.tensors[name].quantization)
                rows_of[name] = rows_of[name].with_noise(signal, values, None if own is None else of_these(name, own))
            self.add_results(part, returned)
            start = end

    def tried(self, parts: Iterable[_Part]) -> Iterator[_Part]:
        """The parts, which another process has run before, unless the file is the graph's own."""
        if self.run is not None or self.ran.file == ".onnx" or tflite.is_file_of(self.graph, self.content):
            yield from parts
            return
        waiting: list[_Part] = []
        for part in itertools.chain(parts, [None]):
            waiting += [] if part is None else [part]
            held = sum(codes.nbytes for batch in waiting for codes in batch.codes.values())
            if waiting and (part is None or held >= BYTES_TRIED):
                batches = [dict(batch.codes) for batch in waiting]
                try_in_a_child(_run, self.graph, self.content, self.ran.name, batches)
                yield from waiting
                waiting = []

    def _simulated(self, device: str, codes: Codes, names: Sequence[str]) -> Codes:
        state = self.states.setdefault(device, {})
        return simulate(self.graph, codes, device, names, progress=False, state=state if self.graph.variables else None)

    def add_results(self, part: _Part, returned: Codes) -> None:
        """Compares the file's results with the model's, on its own device."""
        if not part.results or self.device is not self.ran:
            return
        for port, own in zip(self.graph.signature.outputs, part.results, strict=True):
            tensor, codes = self.graph.tensors[port.tensor], port.to_user(returned[port.tensor]).astype(np.int64)
            trained = own
            if tensor.dtype in CODE_RANGES:
                steps = own.astype(np.float64) / float(tensor.quantization.scale[0])
                trained = np.rint(np.nan_to_num(steps))
                # A value between two codes is not a code, however it would be rounded; nor is one that is not finite.
                trained += np.where(np.abs(steps - trained) <= _OFF_GRID, 0, 0.5)
                trained += int(tensor.quantization.zero_point[0])
            row = self.predictions.get(port.name) or Comparison(port.name, "the model's predict")
            self.predictions[port.name] = row.counting(codes, trained)

    def report(self) -> Report:
        declared = tflite.declared_differences if self.ran.file == ".tflite" else onnx.declared_differences
        return Report(
            self.device.name,
            tuple(self.comparing.operators.values()),
            tuple(self.comparing.outputs.values()),
            self.graph.trained_for,
            tuple(self.training.values()),
            "" if self.device is self.ran else self.ran.name,
            tuple(self.predictions.values()),
            declared(self.graph, self.content),
        )


def _run(graph: Graph, content: bytes, profile: str, batches: Sequence[Codes]) -> None:
    """All that `verify` asks of the runtime."""
    opened = OpenedTflite(graph, content, profile)
    for batch in batches:
        opened.run(batch)
