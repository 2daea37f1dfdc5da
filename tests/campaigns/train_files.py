# SPDX-License-Identifier: Apache-2.0
"""Files of others, trained: read as networks, compared with their own runtime, trained, and the new file compared with
training's integers.

    python tests/campaigns/train_files.py FOLDER           .tflite and .onnx files, each in a process of its own
    python tests/campaigns/train_files.py --one FILE       one file here; prints its row as JSON
    python tests/campaigns/train_files.py --export FOLDER  tests/plain_networks.py as .onnx files, by PyTorch
    python tests/campaigns/train_files.py FOLDER --quantize OTHER   its .onnx files by onnxruntime's quantize_static

A float file's real numbers are compared with those of LiteRT or onnxruntime; a quantized file's integers, frozen before
the first step, with LiteRT's or onnxruntime's.

`record_files.py --all FOLDER --ways float32` writes what TensorFlow's converter makes of 60 models. The export by
torch.export (--dynamo) needs onnxscript.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import _tests_folder  # noqa: F401
import numpy as np
import torch
from kit.test_from_file import on_litert, on_the_grid, results_of

from exactqat.qat.capture.files.graph import is_float

SECONDS = 900


def on_the_runtime(path: Path, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What LiteRT or onnxruntime makes of a float file, for one example."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return list(session.run(None, {port.name: x for port, x in zip(session.get_inputs(), inputs, strict=True)}))
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=1)
    details = interpreter.get_input_details()
    for detail, x in zip(details, inputs, strict=True):
        interpreter.resize_tensor_input(detail["index"], x.shape)
    interpreter.allocate_tensors()
    for detail, x in zip(details, inputs, strict=True):
        interpreter.set_tensor(detail["index"], x.astype(detail["dtype"]))
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


def trained(path: Path) -> dict[str, Any]:
    """What became of one file; `apart`: how far its real numbers are from the runtime's, of the largest of a result."""
    from exactqat import deploy, qat

    file = deploy.read_onnx(path) if path.suffix == ".onnx" else deploy.read_tflite(path)
    if path.suffix == ".onnx" and b"QuantizeLinear" in path.read_bytes():
        return on_its_grids(path, qat.prepare(file, device="onnxruntime-x86"))
    if not is_float(file):
        return on_the_files_integers(path, qat.prepare(file, device="xnnpack-x86"))
    model = qat.prepare(file, keep_final_activation=True, device="xnnpack-x86")
    rng = np.random.default_rng(1)

    def drawn(source: Any, count: int) -> np.ndarray:
        shape = (count, *source.shape[1:])
        return rng.integers(0, source.rows, shape) if source.rows else rng.standard_normal(shape).astype(np.float32)

    one = [drawn(source, 1) for source in model.plan.inputs]
    apart = max(
        float(np.abs(ours - theirs).max(initial=0) / max(np.abs(theirs).max(initial=0), 1e-30))
        for ours, theirs in zip(model.trained().float_results(*one), on_the_runtime(path, one), strict=True)
    )
    batch = [torch.from_numpy(drawn(source, 4)) for source in model.plan.inputs]
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for number in range(3):
        if number == 2:
            qat.freeze(model)
        optimizer.zero_grad()
        results = model(*batch)
        results = list(results.values()) if isinstance(results, dict) else [results]
        real = [result.square().mean() for result in results if result.dtype.is_floating_point]
        if real:  # indices have no gradient
            sum(real).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    graph = deploy.lower(model.eval())
    codes = {}
    for name in graph.inputs:
        lowest, highest = graph.limits(name)
        values = rng.integers(lowest, highest + 1, (2, *graph.tensors[name].shape[1:]))
        codes[name] = values.astype(graph.tensors[name].dtype)
    with tempfile.TemporaryDirectory() as folder:
        written = deploy.write_tflite(graph, Path(folder) / "trained.tflite")
        reports = [deploy.verify(graph, written, codes, device) for device in ("xnnpack-x86", "reference")]
    return {
        "apart": apart,
        "values": sum(report.values for report in reports),
        "differing": sum(report.differing for report in reports),
    }


def train_a_step(model: Any, batch: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    real = [leaf for leaf in torch.utils._pytree.tree_leaves(model.train()(*batch)) if leaf.dtype.is_floating_point]
    sum(leaf.square().mean() for leaf in real).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def on_the_files_integers(path: Path, model: Any) -> dict[str, Any]:
    """Likewise of a quantized .tflite file: LiteRT's integers before the first step, and after one those that training
    computes, of the file that is written then."""
    from exactqat import deploy, qat

    reals = on_the_grid(model.plan)
    batch = [torch.from_numpy(real) for real in reals]
    qat.freeze(model.eval())
    pairs = [*zip(results_of(model(*batch)), on_litert(path, reals, "xnnpack-x86"), strict=True)]
    train_a_step(model, batch)
    graph = deploy.lower(model.eval())
    with tempfile.TemporaryDirectory() as folder:
        written = deploy.write_tflite(graph, Path(folder) / "trained.tflite")
        pairs += zip(results_of(model(*batch)), on_litert(written, reals, "xnnpack-x86"), strict=True)
    return {
        "apart": 0.0,
        "values": sum(ours.size for ours, _ in pairs),
        "differing": sum(int((ours != theirs).sum()) for ours, theirs in pairs),
    }


def on_its_grids(path: Path, model: Any) -> dict[str, Any]:
    """Likewise of a quantized .onnx file: integers before the first step, and of the file that is written after it."""
    from exactqat import deploy, qat

    rng, reals = np.random.default_rng(1), []
    for source in model.plan.inputs:
        scale, zero_point = model.plan.grids[source.grid].fixed
        codes = rng.integers(-128, 128, (8, *source.shape[1:]))
        reals.append((codes - zero_point).astype(np.float32) * np.float32(scale))
    model.eval()
    qat.freeze(model)
    results = model(*map(torch.from_numpy, reals))
    results = list(results.values()) if isinstance(results, dict) else [results]
    rows = [on_the_runtime(path, [real[row : row + 1] for real in reals]) for row in range(8)]
    before = [(ours.detach().numpy(), np.concatenate(theirs)) for ours, theirs in zip(results, zip(*rows, strict=True),
                                                                                      strict=True)]  # fmt: skip
    train_a_step(model, [torch.from_numpy(real) for real in reals])
    graph = deploy.lower(model.eval())
    with tempfile.TemporaryDirectory() as folder:
        written = deploy.write_onnx(graph, Path(folder) / "trained.onnx")
        codes = {
            port.tensor: deploy.quantize(port.to_graph(x), graph.tensors[port.tensor].quantization)
            for port, x in zip(graph.signature.inputs, reals, strict=True)
        }
        report = deploy.verify(graph, written, codes)
    return {
        "apart": 0.0,
        "values": report.values + sum(ours.size for ours, _ in before),
        "differing": report.differing + sum(int((ours != theirs).sum()) for ours, theirs in before),
    }


def quantize(folder: Path, into: Path) -> None:
    """The .onnx files of a folder by onnxruntime's own quantization, per channel and per tensor."""
    from onnxruntime import quantization as tools

    into.mkdir(parents=True, exist_ok=True)

    class Batches:
        def __init__(self, path: Path) -> None:
            import onnxruntime

            session, rng = onnxruntime.InferenceSession(str(path)), np.random.default_rng(0)
            shapes = {port.name: (2, *port.shape[1:]) for port in session.get_inputs()}
            self.batches = iter(
                [{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in "12"]
            )

        def get_next(self) -> Any:
            return next(self.batches, None)

    for path in sorted(folder.glob("*.onnx")):
        for word, per_channel in (("channels", True), ("tensor", False)):
            try:
                ready = into / f"{path.stem}.ready"
                tools.shape_inference.quant_pre_process(str(path), str(ready), skip_symbolic_shape=True)
                types = {"activation_type": tools.QuantType.QUInt8, "weight_type": tools.QuantType.QInt8}
                target = into / f"{path.stem}.{word}.onnx"
                tools.quantize_static(str(ready), str(target), Batches(ready), per_channel=per_channel, **types)
            except Exception as error:  # noqa: BLE001 - the tool's own
                print(f"{path.name}: onnxruntime does not quantize it: {str(error).splitlines()[0][:120]}", flush=True)
            finally:
                ready.unlink(missing_ok=True)


def one(path: Path) -> dict[str, Any]:
    from exactqat.deploy import Refusal
    from exactqat.qat import UnsupportedOperator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return {"name": path.name, "outcome": "trained", **trained(path)}
        except (UnsupportedOperator, Refusal) as refusal:
            return {"name": path.name, "outcome": "refused", "reason": " ".join(str(refusal).split())}
        except Exception as error:
            return {"name": path.name, "outcome": "error", "reason": f"{type(error).__name__}: {error}"}


def in_a_process(path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(path)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"name": path.name, "outcome": "error", "reason": f"no answer after {SECONDS} s"}
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        return {"name": path.name, "outcome": "error", "reason": f"exit status {run.returncode}: {run.stderr[-300:]}"}
    return dict(json.loads(lines[-1]))


def export(folder: Path, dynamo: bool) -> None:
    """The plain networks as PyTorch exports them, for any batch."""
    import plain_networks

    folder.mkdir(parents=True, exist_ok=True)
    for name, build in plain_networks.NETWORKS.items():
        model, examples = build()
        path = folder / f"{name}{'.dynamo' if dynamo else ''}.onnx"
        words = [f"input_{number}" for number in range(len(examples))]
        how: dict[str, Any] = {"opset_version": 17, "dynamic_axes": {word: {0: "batch"} for word in words}}
        if dynamo:
            how = {"dynamic_shapes": tuple({0: torch.export.Dim.DYNAMIC} for _ in examples)}
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                torch.onnx.export(model.eval(), examples, str(path), dynamo=dynamo, input_names=words, **how)
        except Exception as error:  # noqa: BLE001 - the exporter's own
            print(f"{name}: PyTorch does not export it: {str(error).splitlines()[0][:120]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--one", type=Path)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--dynamo", action="store_true")
    parser.add_argument("--quantize", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return 0
    if options.export:
        export(options.export, options.dynamo)
        return 0
    if options.quantize:
        quantize(options.folder, options.quantize)
        return 0
    rows = []
    for path in sorted([*options.folder.glob("*.tflite"), *options.folder.glob("*.onnx")]):
        row = in_a_process(path)
        rows.append(row)
        said = row.get("reason", "")[:300]
        if row["outcome"] == "trained":
            said = f"{row['apart']:.1e} apart, {row['values']:,} integers, {row['differing']} differ"
        print(f"{row['outcome']:8} {row['name']}: {said}", flush=True)
    done = [row for row in rows if row["outcome"] == "trained"]
    errors = [row for row in rows if row["outcome"] == "error"]
    apart, values, differing = ([row[word] for row in done] for word in ("apart", "values", "differing"))
    print(f"{len(done)} of {len(rows)} trained, {len(rows) - len(done) - len(errors)} refused, {len(errors)} failed")
    print(f"{max(apart, default=0):.1e} apart at most; {sum(values):,} integers, {sum(differing)} differ")
    return int(bool(errors) or any(row["differing"] for row in done))


if __name__ == "__main__":
    sys.exit(main())
