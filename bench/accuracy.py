# SPDX-License-Identifier: Apache-2.0
"""Accuracy after quantization, beside other people's: what each predicts, what its file gives on the runtime, and ours.

    python bench/accuracy.py --peers PYTHON [--networks digits8,vit] [--seeds 3] [--precisions w8a8,w4a4] [--quick]

The networks (`bench/accuracy/networks.py`) are small and trained here on made-up data. Peers run in an environment of
their own, PYTHON: an interpreter with torch, onnx, onnxoptimizer, onnxruntime, nncf, brevitas, torchao, aimet-onnx,
litert-torch and ai-edge-quantizer, or some of them. Each decides by the validation part which of its methods it shows,
as we do. A row that a peer has nothing for says why.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

PEERS = ("onnxruntime", "nncf", "brevitas", "torchao", "aimet", "ai_edge")
FOLDER = Path(__file__).resolve().parent / "accuracy"
PRECISIONS = ("w8a8", "w4a8", "w4a4", "mixed")
PEER_SECONDS = 1800

# The folder has no package of its own: adapters run as programs, by another Python.
sys.path.insert(0, str(FOLDER))
from networks import TASKS, Task, fit, outputs_of, trained  # noqa: E402

from exactqat import deploy, qat, tune  # noqa: E402


@dataclass
class Row:
    """One network, quantized by one tool.

    Attributes:
        predicted, runtime: the metric on the test examples as the tool says beforehand, and as its file gives; None:
            it does not.
        interval: half of the 95 % interval of the runtime's metric (or the prediction's).
        unlike: how many test examples the runtime answers otherwise than was predicted.
        note: why there is nothing, or what was chosen.
    """

    network: str
    seed: int
    precision: str
    tool: str
    method: str
    predicted: float | None
    runtime: float | None
    interval: float | None
    unlike: int | None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        def number(value: float | None) -> str:
            return "-" if value is None else f"{100 * value:.1f}"

        unlike = "-" if self.unlike is None else str(self.unlike)
        measured = (number(self.predicted), number(self.runtime), number(self.interval), unlike)
        return (self.network, str(self.seed), self.precision, self.tool, self.method, *measured, self.note[:60])


HEADER = ("network", "seed", "bits", "tool", "method", "predicted", "runtime", "+-", "unlike", "")


def interval(task: Task, outputs: np.ndarray, targets: np.ndarray) -> float:
    """Half of the metric's 95 % interval: 1.96 standard errors of its mean over examples."""
    each = [task.metric(outputs[at : at + 1], targets[at : at + 1]) for at in range(len(targets))]
    return 1.96 * float(np.std(each)) / math.sqrt(len(each))


def answers(outputs: np.ndarray) -> np.ndarray:
    """What decisions are made by; of a detector the class's."""
    return outputs[:, :3].argmax(1) if outputs.shape[1] == 7 else outputs.argmax(1)


def compared(
    case: Any, tool: str, method: str, predicted: np.ndarray | None, runtime: np.ndarray | None, note: str = ""
) -> Row:
    """A row from the outputs on the test examples."""
    name, seed, precision, parts = case
    task, targets = TASKS[name], parts[2][1]
    scores = [None if each is None else task.metric(each, targets) for each in (predicted, runtime)]
    unlike = None
    if predicted is not None and runtime is not None:
        differ = answers(predicted) != answers(runtime)
        unlike = int(differ.reshape(len(differ), -1).any(1).sum())
    best = runtime if runtime is not None else predicted
    spread = None if best is None else interval(task, best, targets)
    return Row(name, seed, precision, tool, method, *scores, spread, unlike, note)


# --- ours -------------------------------------------------------------------------------------------------------------


def rules_of(precision: str, prepared: Any, model: torch.nn.Module, judges: Any, metric: Any, quick: bool) -> Any:
    """The rules of a precision; inputs and results keep 8 bits, as on every device. For mixed ones a plan: half the
    multiply-adds of 8 by 8 bits."""
    if precision == "mixed":
        work = tune.plan(prepared, judges, metric, multiply_adds="1G", weight_bits=[8], activation_bits=[8],
                         candidates=1).chosen.multiply_adds  # fmt: skip
        found = tune.plan(
            prepared, judges, metric, multiply_adds=int(work / 2), activation_bits=[4, 8], keep=["input"],
            candidates=8 if quick else 40,
        )  # fmt: skip
        return found.rules
    weights, activations = (int(bits) for bits in precision[1:].split("a"))
    last = prepared.plan.stored(prepared.plan.device_outputs[0]).path
    return [
        qat.Rule("input", activation_bits=8),
        qat.Rule(last, weight_bits=weights, activation_bits=8),
        qat.Rule(weight_bits=weights, activation_bits=activations),
    ]


def ours(case: Any, model: torch.nn.Module, quick: bool) -> Row:
    """The better one, by the validation part on the device's integers, of a searched PTQ and of QAT."""
    name, _, precision, parts = case
    task = TASKS[name]
    inputs = torch.from_numpy(parts[0][0])
    calibration = (parts[0][0][:512], parts[0][1][:512])

    def prepared(rules: Any) -> Any:
        made = qat.prepare(model, inputs[:2], rules)
        qat.calibrate(made, [inputs[:256]])
        return made

    rules = rules_of(precision, prepared([qat.Rule()]), model, parts[1], task.metric, quick)
    found: dict[str, deploy.Graph] = {}
    searched = tune.search(prepared(rules), calibration, task.metric, budget=30 if quick else 300)
    found["PTQ"] = searched.graph
    network = searched.apply(prepared(rules))
    torch.manual_seed(0)
    epochs = 2 if quick else 8
    fit(task, network.train(), *parts[0], epochs, 2e-3)
    qat.freeze(network)
    fit(task, network, *parts[0], max(1, epochs // 2), 2e-4)
    found["QAT"] = deploy.lower(network.eval())
    scores = {method: tune.gate(graph, parts[1], metric=task.metric).score for method, graph in found.items()}
    best = max(scores, key=lambda method: scores[method])
    graph = found[best]
    test = parts[2][0]
    (port,) = graph.signature.outputs
    codes = deploy.simulate(graph, deploy.input_codes(graph, test), "xnnpack-x86")
    predicted = deploy.output_values(graph, codes)[port.name]
    with tempfile.TemporaryDirectory() as folder:
        path = deploy.write_tflite(graph, Path(folder) / "model.tflite")
        report = deploy.verify(graph, path, device="xnnpack-x86", data=test)
        runtime = on_litert(graph, path, test)
    size = f"{report.differing} of {report.values} integers differ"
    return compared(case, "exactqat", best, predicted, runtime, size)


def on_litert(graph: deploy.Graph, path: Path, inputs: np.ndarray) -> np.ndarray:
    """What the file itself gives."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    (codes,) = deploy.input_codes(graph, inputs).values()
    found = []
    for example in codes:
        interpreter.set_tensor(given["index"], example[None])
        interpreter.invoke()
        found.append(interpreter.get_tensor(made["index"])[0])
    (output,) = graph.outputs
    (values,) = deploy.output_values(graph, {output: np.stack(found)}).values()
    return np.asarray(values)


# --- theirs -----------------------------------------------------------------------------------------------------------


def theirs(case: Any, peer: str, python: str, folder: Path, quick: bool) -> Row:
    """The best method of a peer, by the validation part on its runtime, or as it predicts where it has none."""
    name, seed, precision, parts = case
    if precision == "mixed":
        return Row(name, seed, precision, peer, "-", None, None, None, None, "nothing that takes a budget of work")
    work = folder / f"{peer}_{precision}"
    work.mkdir()
    out = work / "out.npz"
    command = [python, str(FOLDER / f"peer_{peer}.py"), str(folder), precision, str(out)]
    try:
        done = subprocess.run([*command, *(["--quick"] if quick else [])], capture_output=True, text=True,
                              timeout=PEER_SECONDS)  # fmt: skip
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    except subprocess.TimeoutExpired:
        return Row(name, seed, precision, peer, "-", None, None, None, None, f"more than {PEER_SECONDS} s")
    if done.returncode or not out.exists():
        why = said[-1] if said else f"exit status {done.returncode}"
        return Row(name, seed, precision, peer, "-", None, None, None, None, f"fails: {why}")
    with np.load(out) as held:
        arrays = {key: held[key] for key in held}
    if "not offered" in arrays:
        return Row(name, seed, precision, peer, "-", None, None, None, None, str(arrays["not offered"]))
    task = TASKS[name]

    def judged(method: str) -> float:
        best = arrays.get(f"{method}/runtime/validation", arrays.get(f"{method}/predicted/validation"))
        assert best is not None
        return task.metric(best, parts[1][1])

    method = max(dict.fromkeys(key.split("/")[0] for key in arrays), key=judged)
    predicted, runtime = (arrays.get(f"{method}/{how}/test") for how in ("predicted", "runtime"))
    return compared(case, peer, method, predicted, runtime)


# --- the table --------------------------------------------------------------------------------------------------------


def printed(rows: list[Row]) -> str:
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in cells)  # fmt: skip


def verdict(rows: list[Row]) -> str:
    """In how many rows we are at least as good as the best peer, within the interval; and the mean difference."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.network, row.seed, row.precision), []).append(row)
    differences, lost = [], []
    for key, group in groups.items():
        mine = next((row for row in group if row.tool == "exactqat" and row.runtime is not None), None)
        peers = [row for row in group if row.tool in PEERS and row.runtime is not None]
        if mine is None or not peers or mine.runtime is None:
            continue
        best = max(peers, key=lambda row: row.runtime or 0.0)
        assert best.runtime is not None
        differences.append(mine.runtime - best.runtime)
        if differences[-1] < -max(mine.interval or 0, best.interval or 0):
            lost.append(f"{'/'.join(map(str, key))} by {-100 * differences[-1]:.1f} points to {best.tool}")
    unlike = {tool: sum(row.unlike or 0 for row in rows if row.tool == tool) for tool in ("exactqat", *PEERS)}
    judged = {tool: sum(row.unlike is not None for row in rows if row.tool == tool) for tool in unlike}
    lines = [f"{tool}: {unlike[tool]} answers unlike the prediction in {judged[tool]} networks" for tool in unlike]
    if differences:
        lines.insert(0, f"{len(differences) - len(lost)} of {len(differences)} rows at least as good as the best peer "
                     f"within the interval; on average {100 * float(np.mean(differences)):+.2f} points")  # fmt: skip
    return "\n".join([*lines, *(f"lost: {each}" for each in lost)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", help="Python of the peers' environment; without it only ours is shown")
    parser.add_argument("--only", default=",".join(PEERS), help="peers, between commas")
    parser.add_argument("--networks", default=",".join(TASKS), help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help=f"some of {', '.join(PRECISIONS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer methods, evaluations and epochs")
    parser.add_argument("--save", type=Path, help="write all rows to this JSON file")
    given = parser.parse_args()
    names, precisions, peers = (each.split(",") for each in (given.networks, given.precisions, given.only))
    unknown = [*set(names) - set(TASKS), *set(precisions) - set(PRECISIONS), *set(peers) - set(PEERS)]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in names:
        for seed in range(given.seeds):
            parts = TASKS[name].data(seed)
            model = trained(name, seed, parts)
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                (folder / "task.json").write_text(json.dumps({"name": name}))
                arrays = {f"{word}{at}": part[side] for at, part in enumerate(parts) for side, word in enumerate("xy")}
                np.savez(folder / "data.npz", **arrays)
                torch.save(model.state_dict(), folder / "weights.pt")
                plain = outputs_of(model, parts[2][0])
                added = [compared((name, seed, "float", parts), "PyTorch", "float", None, plain, TASKS[name].title)]
                for precision in precisions:
                    case = name, seed, precision, parts
                    began = time.monotonic()
                    added.append(ours(case, model, given.quick))
                    for peer in peers if given.peers else ():
                        added.append(theirs(case, peer, given.peers, folder, given.quick))
                    print(f"{name} seed {seed} {precision}: {time.monotonic() - began:.0f} s", file=sys.stderr)
                    if given.save is not None:
                        content = [asdict(row) for row in [*rows, *added]]
                        given.save.write_text(json.dumps(content, indent=1) + "\n")
                rows += added
                print(printed(added), flush=True)
    print(verdict(rows))


if __name__ == "__main__":
    main()
