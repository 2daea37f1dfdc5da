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

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..device import OPERATORS, Profile, Refusal, profile_named
from ..device.tensor import CODE_RANGES
from ..progress import Clock
from .codes import as_codes, input_codes
from .comparison import Comparison, Noise, Report, Tally
from .formats.tflite import is_file_of, read_grids, read_signature, with_outputs
from .graph import Graph
from .runtimes import onnxruntime, open_runtime, profile_here, profiles_here
from .runtimes.trial import try_in_a_child
from .simulate import EXACT, check_inputs, dequantize, simulate, simulate_results


def verify(
    graph: Graph,
    path: str | os.PathLike[str],
    x: np.ndarray | Mapping[str, np.ndarray] | None = None,
    device: str | Profile = "xnnpack",
    batch_size: int = 8,
    float_values: Mapping[str, np.ndarray] | None = None,
    trained_values: Mapping[str, np.ndarray] | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    trained_codes: Mapping[str, np.ndarray] | None = None,
    model: Any = None,
    data: Any = None,
) -> Report:
    """Compares the file at `path` with `graph` on input codes x [batch, ...] (or one array per input name), and what
    the device computes with what was trained; see `Report`, whose `equal` says whether everything agrees.

    model, data: the frozen model (in JAX ``prepared.trained(params, state)``) and a batch of the user's own inputs. The
    file then gets these arrays too, as its metadata describes (names, axes, grids), and its results are compared with
    the model's in evaluation, integer for integer; what the file leaves out, such as a final softmax, is left out of
    both. Without x, the codes of `data` are used for all other comparisons.

    device: one of `profiles_here`, or "xnnpack" for the runtime's default kernels on this processor. float_values and
    trained_values: what the float and the fake-quantized network compute for the same images, or for the first of them,
    by tensor name, channels last (`deploy.layer_values` returns both); the report then contains signal-to-noise ratios
    for these tensors, over these images. progress: called with the number of comparisons done and the total; True: a
    line on standard error; None: likewise if that is a terminal and it takes more than a moment; False: nothing.
    trained_codes: what the trained network itself stores for x, or for the first of x, by tensor name
    (`deploy.device_codes` returns it), to be compared with this device. Without them, a graph trained for another
    device is compared with its simulation on that one; for a graph trained for this one nothing more is compared.

    A file that differs from what `write_tflite` writes for the graph is run in another process first, because runtimes
    trust what they read. Raises ValueError if the file has no tensor for a result of the graph, RuntimeRefusal if the
    runtime rejects the file or crashes on it, Refusal if it would crash the process at these codes. Needs
    `pip install 'exactqat[deploy]'`.

    For a network with variables (`Graph.variables`), the examples of x are successive calls of one stream.
    """
    target = profile_named(profile_here(device))
    if data is None and (x is None or model is not None):
        raise TypeError("verify needs x (codes) or data (arrays as the model takes them); with model it needs data")
    if x is None:
        x = input_codes(graph, data if model is None else model.evaluated(data)[0])
    return _compared(
        graph, path, x, target, batch_size, float_values, trained_values, progress, trained_codes, model, data
    )


def _compared(
    graph: Graph,
    path: str | os.PathLike[str],
    x: np.ndarray | Mapping[str, np.ndarray],
    target: Profile,
    batch_size: int,
    float_values: Mapping[str, np.ndarray] | None = None,
    trained_values: Mapping[str, np.ndarray] | None = None,
    progress: Callable[[int, int], None] | bool | None = None,
    trained_codes: Mapping[str, np.ndarray] | None = None,
    model: Any = None,
    data: Any = None,
    claims: bool = True,
) -> Report:
    """What `verify` returns. claims: whether operators may be claimed to be exact here."""
    profile = target.name
    inputs = check_inputs(graph, x)
    total = next(iter(inputs.values())).shape[0]
    if total == 0:
        raise ValueError("x contains no images, so there is nothing to compare")
    content = Path(path).read_bytes()
    is_tflite = content[4:8] == b"TFL3"
    if is_tflite != (target.file == ".tflite") and (is_tflite or Path(path).suffix == ".onnx"):
        kind = "a .tflite" if is_tflite else "an .onnx"
        raise ValueError(f"{target.title} runs {target.file} files, and path is {kind} file: {Path(path).name}")
    names = graph.results()
    if graph.variables or not all(OPERATORS[operator.kind].any_batch for operator in graph.operators):
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
    plain, opened = _opened(graph, content, target, batches)
    operators = {name: Tally() for name in names}
    noises = {name: (Noise(), Noise()) for name in float_values or () if name in operators}
    outputs = {name: Tally() for name in graph.outputs}
    elsewhere = "" if trained_codes is not None or graph.trained_for == profile else graph.trained_for
    training = {name: Tally() for name in (names if elsewhere else trained_codes or ()) if name in operators}
    # What variables hold: as each operator leaves them from the device's operands, and in the whole simulation.
    memory, whole = graph.initial_state(), graph.initial_state()
    done, steps = 0, len(batches) * len(graph.operators)
    tell = progress if callable(progress) else Clock.counting("comparing with the runtime", progress)
    for batch, start in zip(batches, range(0, total, batch_size), strict=True):
        stored = {**batch, **opened.run(batch)}
        agree = True
        for operator in graph.operators:
            for name, codes in simulate_results(graph, operator, {**stored, **memory}, profile).items():
                if name in memory:
                    memory[name] = codes
                else:
                    agree &= operators[name].add(stored[name], codes)
            done += 1
            tell(done, steps)
            name = operator.outputs[0]
            if float_values is not None and name in noises:
                per_example = graph.tensors[name].shape[0]
                images = slice(start * per_example, (start + batch_size) * per_example)
                trained_noise, device_noise = noises[name]
                signal = float_values[name][images]
                quantization = graph.tensors[name].quantization
                device_noise.add(signal, dequantize(stored[name][: len(signal)], quantization))
                if trained_values is not None and name in trained_values:
                    trained_noise.add(signal, trained_values[name][images])
        memory |= graph.succeeding({**stored, **memory})
        # If every operator agrees from the device's operands, the whole simulation is what the device had.
        wanted = [*dict.fromkeys((*graph.outputs, *training))]
        same = agree and not memory
        end_to_end = stored if same else simulate(graph, batch, profile, wanted, state=whole)
        for name, codes in plain.run(batch).items():
            outputs[name].add(codes, end_to_end[name])
        if elsewhere and training:
            try:
                trained = simulate(graph, batch, elsewhere, names, batch_size, progress=False)
            except Refusal:  # a device that would not survive these inputs gives nothing to compare with
                training = {}
        else:
            trained = {}
            for name in training:
                each = graph.tensors[name].shape[0]
                trained[name] = (trained_codes or {})[name][start * each : (start + batch_size) * each]
        for name, tally in training.items():
            tally.add(end_to_end[name][: len(trained[name])], trained[name], "training")
    kinds = {name: graph.measured_as(operator) for operator in graph.operators for name in operator.outputs}
    exact = {name: claims and (kind, profile) in EXACT for name, kind in kinds.items()}
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
        # A device computes what was trained if the profile is the same; otherwise no equality is claimed.
        tuple(
            tally.comparison(name, kinds[name], profile == graph.trained_for and exact[name])
            for name, tally in training.items()
        ),
        predictions=() if model is None else _predictions(graph, content, model, data, target, batch_size),
    )


def _opened(
    graph: Graph, content: bytes, target: Profile, batches: Sequence[Mapping[str, np.ndarray]]
) -> tuple[Any, Any]:
    """The file on its runtime unchanged, and with the codes of all results as its outputs."""
    if target.file == ".onnx":
        return onnxruntime.opened(graph, content)
    names = graph.results()
    files = (content, graph.inputs, graph.outputs), (with_outputs(content, names), graph.inputs, names)
    if not is_file_of(graph, content):
        try_in_a_child(_run, files, target.name, batches)
    plain, opened = (open_runtime(*file, target.name) for file in files)
    return plain, opened


def _predictions(
    graph: Graph, content: bytes, model: Any, data: Any, target: Profile, batch_size: int
) -> tuple[Comparison, ...]:
    """Compares the file's results on the user's arrays with the model's; a .tflite file itself says how they are laid
    out, and an .onnx file takes real numbers in the user's axes."""
    runtime: Any
    if target.file == ".onnx":
        signature, runtime = graph.signature, onnxruntime.opened(graph, content)[0]
        tensors = {port.tensor: graph.tensors[port.tensor] for port in (*signature.inputs, *signature.outputs)}
        grids = {name: (tensor.dtype, tensor.quantization) for name, tensor in tensors.items()}
    else:
        signature, grids = read_signature(content), read_grids(content)
        given, results = (
            tuple(dict.fromkeys(port.tensor for port in side)) for side in (signature.inputs, signature.outputs)
        )
        runtime = open_runtime(content, given, results, target.name)
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
            # A value between two codes is not a code, however it would be rounded; nor is one that is not finite.
            trained += np.where(np.abs(steps - trained) <= _OFF_GRID, 0, 0.5) + int(quantization.zero_point[0])
            tallies[port.name].add(device, trained)
    return tuple(tally.comparison(name, "the model's predict", False) for name, tally in tallies.items())


# In steps; float32 holds the steps of all grids more precisely than that.
_OFF_GRID = 1e-2


def _batches(data: Any, batch_size: int) -> Iterator[Any]:
    """The user's arrays, however nested, some rows at a time."""
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


def verify_onnx(
    graph: Graph, path: str | os.PathLike[str], x: np.ndarray | Mapping[str, np.ndarray], batch_size: int = 8
) -> Report:
    """`verify` for an .onnx file, on onnxruntime: with its device, "onnxruntime-x86", if this processor is one;
    elsewhere (ARM, x86 without VNNI instructions) the same comparison, without any claim.

    x: codes [batch, ...] in the graph's order of axes, or one array per input name; the file gets the real numbers
    that they represent.
    """
    target = profile_named("onnxruntime-x86")
    return _compared(graph, path, x, target, batch_size, claims=target.name in profiles_here(target.file))
