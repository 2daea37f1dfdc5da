# SPDX-License-Identifier: Apache-2.0
"""`inspect` for a quantized .onnx file: what is in it, and whether onnxruntime computes it as simulated.

The file runs unchanged, and with its own codes as further outputs. Each operator is simulated from onnxruntime's own
operands; where the file has no codes for a tensor, from their simulation.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..device import OPERATORS, PROFILES, Profile, Refusal
from ..device.operator import Layout
from ..device.profile import that_run
from ..device.tensor import CODE_RANGES
from ..display import shortened
from .axes import on_device
from .codes import as_codes, as_real
from .comparison import Comparison
from .formats.read_onnx import OnnxModel
from .formats.read_tflite import FileEnd, TfliteFile
from .formats.tflite import import_deploy
from .graph import Graph
from .inspect import (
    DeviceFindings,
    Inspection,
    compare_in_a_child,
    layers_of,
    need_a_bounded_size,
    on_one_line,
    random_codes,
    read_codes,
)
from .runtimes import profile_here, profiles_here
from .runtimes.onnxruntime import run_with_codes
from .runtimes.trial import RuntimeRefusal, try_in_a_child
from .signature import Port

FILE = ".onnx"


@dataclass(frozen=True)
class OnnxNetwork:
    """A quantized .onnx file as the device's integers.

    Attributes:
        model: the file.
        graph: what onnxruntime computes from it.
        codes: by the graph's tensor, what the file calls its codes, and where the file's axes are in it.
        in_float: results that the file computes in float32, and the graph on its own grids.
    """

    model: OnnxModel
    graph: Graph
    codes: Mapping[str, tuple[str, Layout]]
    in_float: frozenset[str] = frozenset()


def inspect_onnx(
    network: OnnxNetwork,
    data: Any,
    examples: int,
    devices: Sequence[str | Profile] | None,
    seed: int,
    seconds: float,
    progress: Callable[[str], None] | None,
) -> Inspection:
    """What `qat.inspect_onnx` returns, which describes the arguments."""
    if examples < 1:
        raise ValueError(f"examples must be 1 or more, got {examples}")
    say = progress or (lambda text: None)
    model, graph = network.model, network.graph
    need_a_bounded_size(graph, model.name, examples)
    wanted = profiles_here(FILE) if devices is None else tuple(dict.fromkeys(map(profile_here, devices)))
    others = [name for name in wanted if name not in that_run(FILE)]
    if others:
        raise ValueError(f"devices must run {FILE} files, which {others[0]} does not: {', '.join(that_run(FILE))}")
    ends = [_end(graph, port, name) for port, name in zip(graph.signature.inputs, model.inputs, strict=True)]
    given = TfliteFile(graph, tuple(ends), (), {}, {}, "")
    codes = random_codes(graph, examples, seed) if data is None else read_codes(given, data, examples)
    with tempfile.TemporaryDirectory() as folder:
        arrays: dict[str, Any] = {str(at): codes[name] for at, name in enumerate(graph.inputs)}
        np.savez(Path(folder) / "codes.npz", **arrays)
        reasons = {}
        for profile in wanted:
            say(f"running {PROFILES[profile].title}")
            reasons[profile] = _run_in_a_child(network, profile, folder, seconds)
        say("simulating the device")
        ran = tuple(profile for profile in wanted if not reasons[profile])
        counts = compare_in_a_child(graph, folder, ran, seconds, FILE)
        in_uint8 = {name: (Path(folder) / name / "in_uint8").exists() for name in ran}
    absent = "onnxruntime is not on this machine, or computes otherwise on this processor"
    missing = {name: "it was not asked for" if name in profiles_here(FILE) else absent for name in that_run(FILE)}
    found = []
    for name in that_run(FILE):
        rows = _claimed(
            network, [Comparison(*row) for row in counts["operators"].get(name, ())], in_uint8.get(name, False)
        )
        results = [Comparison(*row) for row in counts["outputs"].get(name, ())]
        results = [
            replace(each, exact=each.exact and each.name not in network.in_float and all(row.exact for row in rows))
            for each in results
        ]
        said, refused = {**missing, **reasons}[name], counts["refused"].get(name, "")
        found.append(DeviceFindings(name, PROFILES[name].title, said, tuple(rows), tuple(results), refused))
    onnx: Any = import_deploy("onnx", "onnx")
    file = onnx.load_model_from_string(model.content)
    made_by = " ".join(filter(None, map(_text, (file.producer_name, file.producer_version))))
    return Inspection(
        model.name,
        "; ".join(filter(None, (made_by, _text(file.doc_string)))),
        len(model.content),
        sum(tensor.data.nbytes for tensor in graph.tensors.values() if tensor.data is not None),
        None,
        f"an {FILE} file has none",
        tuple(_described(graph, port, name) for port, name in zip(graph.signature.inputs, model.inputs, strict=True)),
        tuple(
            _described(graph, port, name, port.tensor in network.in_float)
            for port, name in zip(graph.signature.outputs, model.outputs, strict=True)
        ),
        dict(Counter(_text(node.op_type) for node in file.graph.node)),
        tuple(layers_of(graph)),
        len(next(iter(codes.values()))),
        tuple(found),
        (),
    )


def _text(given: str | bytes) -> str:
    """The text of a file's string, which is bytes if it is not UTF-8."""
    return given if isinstance(given, str) else given.decode("utf-8", "replace")


def _claimed(network: OnnxNetwork, rows: Sequence[Comparison], in_uint8: bool) -> list[Comparison]:
    """Comparisons of what the file has codes for, claimed to be equal where an operator is as others write it too, and
    its operands are onnxruntime's or follow from those through such operators.

    in_uint8: whether all codes are uint8; with int8 not every operator reaches onnxruntime's integer kernels.
    """
    claimed, known = {}, {*network.graph.inputs, *network.codes}
    for operator in network.graph.operators:
        constant = {name for name in operator.inputs if network.graph.tensors[name].data is not None}
        exact = OPERATORS[operator.kind].as_in_onnx and known | constant >= set(operator.inputs)
        claimed.update(dict.fromkeys(operator.outputs, exact))
        known |= set(operator.outputs) if exact else set()
    return [replace(row, exact=row.exact and in_uint8 and claimed[row.name]) for row in rows if row.values]


def _end(graph: Graph, port: Port, name: str) -> FileEnd:
    tensor = graph.tensors[port.tensor]
    dtype = "float32" if tensor.dtype in CODE_RANGES else tensor.dtype
    return FileEnd(name, tensor.shape, dtype, port.tensor, True)


def _described(graph: Graph, port: Port, name: str, in_float: bool = False) -> str:
    """In the file's axes. in_float: the file does not quantize it."""
    tensor = graph.tensors[port.tensor]
    sizes: list[object] = ["N", *tensor.shape[1:]]
    lies = ", ".join(str(sizes[at]) for at in port.order)
    if tensor.dtype not in CODE_RANGES or in_float:
        return f"{shortened(name)} {'float32' if in_float else tensor.dtype} [{lies}]"
    grid = tensor.quantization
    on = f"scale {float(grid.scale[0]):.6g}, zero point {int(grid.zero_point[0])}"
    return f"{shortened(name)} float32 as {tensor.dtype} [{lies}], {on}"


def _run_in_a_child(network: OnnxNetwork, profile: str, folder: str, seconds: float) -> str:
    """Runs the file and writes what the device computed into the folder; returns why it did not, or ""."""
    try:
        said = try_in_a_child(_run, network, profile, folder, seconds=seconds)
    except RuntimeRefusal as error:
        return on_one_line(error)
    into = Path(folder) / profile
    if (into / "done").exists():
        return ""
    lines = [line for line in said.splitlines() if line.strip()] or ["no reason given"]
    reason = into / "reason"
    return on_one_line(reason.read_text("utf-8", "replace") if reason.exists() else lines[-1])


def _run(network: OnnxNetwork, profile: str, folder: str) -> None:
    """Runs one example after the other, as files may fix their batch."""
    into, graph, model = Path(folder) / profile, network.graph, network.model
    into.mkdir()
    try:
        with np.load(Path(folder) / "codes.npz") as archive:
            codes = {name: archive[str(at)] for at, name in enumerate(graph.inputs)}
        computed = [name for name in network.codes if name in graph.tensors]
        runs = run_with_codes(model.content, model.outputs, [network.codes[name][0] for name in computed])
        ports = graph.signature
        for example in range(len(codes[graph.inputs[0]])):
            batch = {name: array[example : example + 1] for name, array in codes.items()}
            real = [_real(graph, port, batch[port.tensor]) for port in ports.inputs]
            plain, inner = runs(dict(zip(model.inputs, real, strict=True)))
            arrays: dict[str, Any] = {}
            if all(array.dtype == np.uint8 for array in inner):
                (into / "in_uint8").touch()
            for at, (name, array) in enumerate(zip(computed, inner, strict=True)):
                arrays[f"t{at}"] = _in_graph(graph, name, on_device(array, network.codes[name][1]))
            for at, (port, array) in enumerate(zip(ports.outputs, plain, strict=True)):
                tensor = graph.tensors[port.tensor]
                arrays[f"o{at}"] = as_codes(port.to_graph(array), tensor.dtype, tensor.quantization)
            np.savez(into / f"{example}.npz", **arrays)
        (into / "names").write_text(json.dumps(computed), "utf-8")
        (into / "ends").write_text(json.dumps([port.tensor for port in ports.outputs]), "utf-8")
        (into / "done").write_text("", "utf-8")
    except (RuntimeError, ValueError, ImportError) as error:
        (into / "reason").write_text(str(error), "utf-8", "replace")


def _real(graph: Graph, port: Port, codes: np.ndarray) -> np.ndarray:
    tensor = graph.tensors[port.tensor]
    return port.to_user(as_real(codes, tensor.dtype, tensor.quantization))


def _in_graph(graph: Graph, name: str, codes: np.ndarray) -> np.ndarray:
    """Codes of the graph for those of the file."""
    found = (codes.astype(np.int16) - 128).astype(np.int8) if codes.dtype == np.uint8 else codes
    if found.shape != graph.tensors[name].shape:
        raise Refusal(f"'{shortened(name)}' has the shape {list(found.shape)}, not {list(graph.tensors[name].shape)}")
    return found


__all__ = ["OnnxNetwork", "inspect_onnx"]
