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
from ..kit.device.tensor import CODE_RANGES
from ..kit.progress import Clock
from .codes import Intake
from .comparing import Codes, Comparing, Opened, OpenedTflite
from .comparison import Report, Tally
from .examples import batches_of, examples_in, unless_file
from .formats import onnx, tflite
from .graph import Graph
from .lower import lower_with_layouts
from .packing import packed
from .runtimes import profile_here, profiles_here
from .runtimes.onnxruntime import OnnxRuntime, written_network
from .runtimes.trial import try_in_a_child
from .simulate import check_inputs, dequantize, simulate
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
    data: Any = None,
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

    For a network with variables (`Graph.variables`), the examples are successive calls of one stream.
    """
    if data is None and (x is None or model is not None):
        raise TypeError("verify needs x (codes) or data (arrays as the model takes them); with model it needs data")
    data = unless_file(data, [port.name for port in graph.signature.inputs])
    content = Path(path).read_bytes()
    target = _target(graph, content, Path(path), device)
    if batch_size is None:
        codes = sum(math.prod(graph.tensors[name].shape) for name in (*graph.inputs, *graph.results()))
        batch_size = max(1, min(TOGETHER, BYTES_TOGETHER // max(codes, 1)))
    if graph.variables or not all(OPERATORS[operator.kind].any_batch for operator in graph.operators):
        batch_size = 1
    network = model if model is None or hasattr(model, "traced") else model.trained()
    verifying = _Verifying(graph, content, target, float_values, trained_values, trained_codes, network)
    users = iter(()) if data is None else _users(graph, data, batch_size, network)
    if x is None:
        verifying.compare(users, examples_in(data, len(graph.inputs)), batch_size, progress)
    else:
        inputs = check_inputs(graph, x)
        total = len(next(iter(inputs.values())))
        if total == 0:
            raise ValueError("x contains no images, so there is nothing to compare")
        starts = range(0, total, batch_size)
        parts = (_Part({name: codes[at : at + batch_size] for name, codes in inputs.items()}) for at in starts)
        verifying.compare(parts, total, batch_size, progress)
        if network is not None:
            verifying.compare_results(users)
    return verifying.report()


@dataclass(frozen=True)
class _Target:
    """The device in question, the one whose runtime runs the file, and whether that is claimed to be exact."""

    device: Profile
    ran: Profile
    claims: bool = True


def _target(graph: Graph, content: bytes, path: Path, device: str | Profile | None) -> _Target:
    is_tflite = content[4:8] == tflite.IDENTIFIER
    file = ".tflite" if is_tflite or path.suffix != ".onnx" else ".onnx"
    if device is not None:
        named = profile_named(profile_here(device))
        if is_tflite != (named.file == ".tflite") and (is_tflite or path.suffix == ".onnx"):
            kind = "a .tflite" if is_tflite else "an .onnx"
            raise ValueError(f"{named.title} runs {named.file} files, and path is {kind} file: {path.name}")
        return _Target(named, named)
    own = PROFILES.get(graph.trained_for)
    if file == ".onnx":
        return _Target(ONNXRUNTIME_X86, ONNXRUNTIME_X86, ONNXRUNTIME_X86.name in profiles_here(file))
    if own is not None and own.file == file and own.name in profiles_here(file):
        return _Target(own, own)
    # XNNPACK computes weights of four bits otherwise; LiteRT's reference kernels do not.
    four_bits = own is not None and own.file == file and packed(graph) is not graph
    default = profile_named(profile_here(REFERENCE.name if four_bits else DEFAULT_KERNELS))
    return _Target(default if own is None or own.file != file else own, default)


@dataclass(frozen=True)
class _Part:
    """Some examples: their codes and, of a model, what it returns and the codes of everything that it stores."""

    codes: Codes
    results: Sequence[np.ndarray] = ()
    stored: Codes = field(default_factory=dict)


def _users(graph: Graph, data: Any, batch_size: int, network: Any) -> Iterator[_Part]:
    """A user's examples; `network`: what was trained, or None."""
    intake = Intake(graph)
    lowered = None if network is None else lower_with_layouts(network)
    for rows in batches_of(data, len(graph.signature.inputs), batch_size):
        if network is None or lowered is None:
            yield _Part(intake.codes(rows))
        else:
            given, results, stored = network.traced(intake.as_model_takes(rows))
            yield _Part(intake.codes(given), results, placed_codes(network, stored, lowered))


class _Verifying:
    """One file beside one graph."""

    def __init__(
        self,
        graph: Graph,
        content: bytes,
        target: _Target,
        float_values: Mapping[str, np.ndarray] | None,
        trained_values: Mapping[str, np.ndarray] | None,
        trained_codes: Mapping[str, np.ndarray] | None,
        network: Any,
    ) -> None:
        self.graph, self.content, self.target = graph, content, target
        self.comparing = Comparing(graph, target.ran, target.claims)
        self.float_values, self.trained_values = float_values or {}, trained_values or {}
        self.trained_codes = trained_codes
        same = graph.trained_for in ("", target.device.name)
        # In place of training where it left no codes: the simulation of the device that was trained for.
        self.elsewhere = "" if same or network is not None or trained_codes is not None else graph.trained_for
        self.from_model = network is not None and trained_codes is None
        self.training: dict[str, Tally] = {}
        self.predictions: dict[str, Tally] = {}
        self.states: dict[str, dict[str, np.ndarray]] = {}
        self.deadly = any(
            OPERATORS[operator.kind].may_end_the_process(
                [graph.tensors[name] for name in operator.inputs], operator.attributes, target.ran
            )
            for operator in graph.operators
        )

    @functools.cached_property
    def opened(self) -> Opened:
        """The file on its runtime."""
        if self.target.ran.file == ".onnx":
            return OnnxRuntime(written_network(self.graph, self.content))
        return OpenedTflite(self.graph, self.content, self.target.ran)

    def compare(
        self,
        parts: Iterable[_Part],
        total: int | None,
        batch_size: int,
        progress: Callable[[int, int], None] | bool | None,
    ) -> None:
        """Compares everything, part by part."""
        steps = 0 if total is None else -(-total // batch_size) * len(self.graph.operators)
        tell = progress if callable(progress) else Clock.counting("comparing with the runtime", progress)
        counts = itertools.count(1)
        start = 0
        for part in self._tried(parts):
            if self.deadly:  # raises what the runtime would not survive
                simulate(self.graph, part.codes, self.target.ran, progress=False)
            rows = slice(start, start + len(next(iter(part.codes.values()))))
            start = rows.stop
            trained = self._trained(part, rows)
            device, returned = self.opened.run(part.codes)
            also = tuple(name for name in trained if name not in self.graph.outputs)
            whole = self.comparing.add(part.codes, device, returned, also, lambda: tell(next(counts), steps))
            if self.target.device is not self.target.ran and trained:
                whole = self._simulated(self.target.device.name, part.codes, tuple(trained))
            for name, codes in trained.items():
                tally = self.training.setdefault(name, Tally())
                tally.add(whole[name][: len(codes)], codes, "training")
            self._add_noise(device, rows)
            self._add_results(part, returned)

    def compare_results(self, parts: Iterable[_Part]) -> None:
        """The model's results beside the file's, of further examples."""
        for part in self._tried(parts):
            self._add_results(part, self.opened.run(part.codes)[1])

    def _tried(self, parts: Iterable[_Part]) -> Iterator[_Part]:
        """The parts, which another process has run before, unless the file is the graph's own."""
        if self.target.ran.file == ".onnx" or tflite.is_file_of(self.graph, self.content):
            yield from parts
            return
        waiting: list[_Part] = []
        for part in itertools.chain(parts, [None]):
            waiting += [] if part is None else [part]
            held = sum(codes.nbytes for each in waiting for codes in each.codes.values())
            if waiting and (part is None or held >= BYTES_TRIED):
                batches = [dict(each.codes) for each in waiting]
                try_in_a_child(_run, self.graph, self.content, self.target.ran.name, batches)
                yield from waiting
                waiting = []

    def _trained(self, part: _Part, rows: slice) -> Codes:
        """What training stored for these examples, or for the first of them."""
        if self.elsewhere:
            try:
                return self._simulated(self.elsewhere, part.codes, self.graph.results())
            except Refusal:  # a device that would not survive these inputs gives nothing to compare with
                self.elsewhere = ""
                self.training.clear()
        known = {*self.graph.results()}
        if self.from_model:
            return {name: codes for name, codes in part.stored.items() if name in known}
        return {
            name: codes[self._rows_of(name, rows)]
            for name, codes in (self.trained_codes or {}).items()
            if name in known
        }

    def _simulated(self, device: str, codes: Codes, names: Sequence[str]) -> dict[str, np.ndarray]:
        state = self.states.setdefault(device, {})
        return simulate(self.graph, codes, device, names, progress=False, state=state if self.graph.variables else None)

    def _rows_of(self, name: str, rows: slice) -> slice:
        """Of a tensor that holds several rows for each example."""
        count = self.graph.tensors[name].shape[0]
        return slice(rows.start * count, rows.stop * count)

    def _add_noise(self, device: Codes, rows: slice) -> None:
        for name in self.float_values.keys() & self.comparing.operators.keys():
            own = self._rows_of(name, rows)
            signal, trained = self.float_values[name][own], self.trained_values.get(name)
            values = dequantize(device[name][: len(signal)], self.graph.tensors[name].quantization)
            self.comparing.operators[name].add_noise(signal, values, None if trained is None else trained[own])

    def _add_results(self, part: _Part, returned: Codes) -> None:
        """Compares the file's results with the model's."""
        if not part.results:
            return
        for port, own in zip(self.graph.signature.outputs, part.results, strict=True):
            tensor, tally = self.graph.tensors[port.tensor], self.predictions.setdefault(port.name, Tally())
            codes = port.to_user(returned[port.tensor]).astype(np.int64)
            if tensor.dtype not in CODE_RANGES:
                tally.add(codes, own)
                continue
            steps = own.astype(np.float64) / float(tensor.quantization.scale[0])
            trained = np.rint(np.nan_to_num(steps))
            # A value between two codes is not a code, however it would be rounded; nor is one that is not finite.
            trained += np.where(np.abs(steps - trained) <= _OFF_GRID, 0, 0.5) + int(tensor.quantization.zero_point[0])
            tally.add(codes, trained)

    def report(self) -> Report:
        device, ran, kinds = self.target.device.name, self.target.ran.name, self.comparing.kinds
        declared = tflite.declared_differences if self.target.ran.file == ".tflite" else onnx.declared_differences
        # A device computes what was trained if the profile is the same; otherwise no equality is claimed.
        same = device == self.graph.trained_for
        return Report(
            device,
            self.comparing.rows(),
            self.comparing.output_rows("whole graph"),
            self.graph.trained_for,
            tuple(
                tally.comparison(name, kinds[name], same and self.comparing.claimed(name))
                for name, tally in self.training.items()
            ),
            "" if device == ran else ran,
            tuple(tally.comparison(name, "the model's predict", False) for name, tally in self.predictions.items()),
            declared(self.graph, self.content),
        )


def _run(graph: Graph, content: bytes, profile: str, batches: Sequence[Codes]) -> None:
    """All that `verify` asks of the runtime."""
    opened = OpenedTflite(graph, content, profile)
    for batch in batches:
        opened.run(batch)
