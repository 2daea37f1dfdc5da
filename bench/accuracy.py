# SPDX-License-Identifier: Apache-2.0
"""Accuracy after quantization, beside other people's: what each predicts, what its file gives on the runtime, and ours.

    python bench/accuracy.py --peers PYTHON [--peer torchao=PYTHON] [--networks digits8,vit] [--seeds 3] [--quick]
    python bench/accuracy.py --page

The networks (`bench/accuracy/networks.py`) are small and trained here on made-up data, once: --work keeps them. Peers
run in environments of their own: an interpreter with torch, onnx, onnxoptimizer, onnxruntime, nncf, brevitas, torchao,
aimet-onnx, litert-torch, ai-edge-quantizer and tensorflow, or some of them; --peer names another one for one of them.
Each decides by the validation part which of its methods it shows, as we do: by the metric, then by the loss. A row
that a peer has nothing for says why.

Rows go to --rows, one line each. A run that was stopped goes on where it was: rows that are there are not measured
again, except of the tools that --again names and of other float networks: processors round differently, so that
training on another one gives other weights. --page writes the tables of docs/accuracy.md from the rows.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "accuracy"
PAGE = ROOT / "docs" / "accuracy.md"
PEER_SECONDS = 3600

# The folder has no package of its own: adapters run as programs, by another Python.
sys.path[:0] = [str(FOLDER), str(ROOT / "bench")]
from networks import TASKS, Parts, Task, fingerprint, fit, judged, kept, outputs_of, qat_rates, resettled, teacher  # noqa: E402
from report import with_table  # noqa: E402
from rows import FLOAT, OURS, PEERS, PRECISIONS, PROPOSED, Row, append, page_text, printed, read, verdict  # noqa: E402

from exactqat import deploy, qat, tune  # noqa: E402


@dataclass(frozen=True)
class Case:
    """One network to be quantized.

    Attributes:
        folder: what adapters read, see `networks.kept`.
        parts: inputs and targets to train on, to decide by, to judge by.
        ways: rows that it gets: of all methods together (""), or of those without ("PTQ") and with training ("QAT").
    """

    name: str
    seed: int
    precision: str
    folder: Path
    model: torch.nn.Module
    parts: Parts
    ways: Sequence[str] = ("",)

    @property
    def task(self) -> Task:
        return TASKS[self.name]

    @property
    def calibration(self) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = self.parts[0]
        return inputs[: self.task.calibration], targets[: self.task.calibration]

    @property
    def rates(self) -> tuple[float, ...]:
        """Of quantization-aware training."""
        bits = {"mixed": (8, 4), "float": (8, 8)}.get(self.precision) or bits_of(self.precision)
        return qat_rates(self.task, *bits)

    @property
    def order(self) -> int:
        """The seed of the order of examples in quantization-aware training."""
        return 0 if self.task.trained_by_seed else self.seed

    def label(self, way: str) -> str:
        return f"{self.precision} {way}".strip()

    def row(self, tool: str, way: str, note: str = "", **fields: Any) -> Row:
        columns = {"note": note, "weights": fingerprint(self.model), **fields}
        return Row(self.name, self.seed, self.label(way), tool, **columns)

    def compared(
        self, tool: str, way: str, method: str, predicted: np.ndarray | None, runtime: np.ndarray | None, **fields: Any
    ) -> Row:
        """A row from the outputs on the test examples."""
        targets = self.parts[2][1]
        scores = [None if outputs is None else self.task.metric(outputs, targets) for outputs in (predicted, runtime)]
        unlike = None
        if predicted is not None and runtime is not None:
            differ = answers(predicted) != answers(runtime)
            unlike = int(differ.reshape(len(differ), -1).any(1).sum())
        best = runtime if runtime is not None else predicted
        spread = None if best is None else interval(self.task, best, targets)
        columns = {"predicted": scores[0], "runtime": scores[1], "interval": spread, "unlike": unlike, **fields}
        return self.row(tool, way, method=method, **columns)


def interval(task: Task, outputs: np.ndarray, targets: np.ndarray) -> float:
    """Half of the metric's 95 % interval: 1.96 standard errors of its mean over examples."""
    scores = [task.metric(outputs[at : at + 1], targets[at : at + 1]) for at in range(len(targets))]
    return 1.96 * float(np.std(scores)) / len(scores) ** 0.5


def answers(outputs: np.ndarray) -> np.ndarray:
    """What decisions are made by; of a detector the class's."""
    return outputs[:, :3].argmax(1) if outputs.shape[1] == 7 else outputs.argmax(1)


def trained_in_float(case: Case) -> Row:
    """The float network after the training that quantized ones get, at the rate that the validation examples choose."""
    began, networks = time.monotonic(), {}
    for rate in case.rates:
        network = copy.deepcopy(case.model)
        torch.manual_seed(case.order)
        fit(case.task, network, *case.parts[0], case.task.qat_epochs, rate, warm_up=True)
        networks[f"float {rate:g}"] = network.eval()
        again = resettled(case.task, network, case.parts[0][0])
        if again is not None:
            networks[f"float {rate:g}, statistics again"] = again.eval()
    inputs, targets = case.parts[1]
    scores = {name: judged(case.task, outputs_of(network, inputs), targets) for name, network in networks.items()}
    best = max(scores, key=lambda name: scores[name])
    columns = {"methods": {name: score[0] for name, score in scores.items()}, "note": case.task.title}
    seconds = round(time.monotonic() - began, 1)
    return case.compared(
        FLOAT, "QAT", best, None, outputs_of(networks[best], case.parts[2][0]), seconds=seconds, **columns
    )


# --- ours -------------------------------------------------------------------------------------------------------------


def rules_of(case: Case, prepared: Callable[[Any], Any], quick: bool) -> tuple[dict[str, list[qat.Rule]], str]:
    """The rules of a precision by their name, with what `tune` proposes for some results, and a note on that. Inputs
    keep 8 bits, as on every device. For mixed bits plans with the multiply-adds of weights of four bits throughout.

    prepared: calibrates the network by rules.
    """
    last = prepared([qat.Rule()]).plan.device_outputs[0]
    weights, activations = (8, 8) if case.precision == "mixed" else bits_of(case.precision)
    rules = [
        qat.Rule("input", activation_bits=8),
        qat.Rule(last, weight_bits=weights, activation_bits=8),
        qat.Rule(weight_bits=weights, activation_bits=activations),
    ]
    proposal = tune.search(prepared(rules), case.calibration, case.task.metric, budget=1, progress=False).proposal
    note, kept = "", ["input"]
    if proposal is not None:
        rules, kept = list(proposal.rules), [*kept, *(f"{layer} (result)" for layer in proposal.layers)]
        arena = "" if proposal.arena is None else f", {proposal.arena:+,} of arena"
        what = [said for bits, said in PROPOSED.items() if bits in proposal.layers.values()]
        note = f"{' and '.join(what)}, as proposed: {proposal.flash:+,} bytes of flash{arena}"
    if case.precision != "mixed":
        return {"": rules}, note
    judges, metric = case.parts[1], case.task.metric
    four = prepared([replace(rule, weight_bits=4) for rule in rules])
    work = tune.plan(four, judges, metric, multiply_adds="1G", weight_bits=[4], activation_bits=[8], keep=kept,
                     candidates=1, progress=False).chosen.multiply_adds  # fmt: skip
    plan = tune.plan(
        prepared(rules), judges, metric, multiply_adds=math.ceil(work), activation_bits=[4, 8], keep=kept,
        candidates=8 if quick else 24, progress=False,
    )  # fmt: skip
    return {name: list(point.rules) for name, point in zip(("", " even"), plan.to_train, strict=False)}, note


def bits_of(precision: str) -> tuple[int, int]:
    weights, activations = precision.removeprefix("w").split("a")
    return int(weights), int(activations)


def few_bits(precision: str) -> bool:
    """Whether something has fewer than 8 bits."""
    return precision == "mixed" or min(bits_of(precision)) < 8


@dataclass(frozen=True)
class Start:
    """What training starts from: the plans that are worth it, with what the search gave for each.

    Attributes:
        results: of each plan by its name, its rules and the search's result.
        note: on what was proposed.
        seconds: that this took.
    """

    results: dict[str, tuple[list[qat.Rule], tune.Search]]
    note: str
    seconds: float


_starts: dict[tuple[str, str, str, bool], Start] = {}


def prepared(case: Case, rules: Any) -> Any:
    """The network, calibrated by rules."""
    inputs = torch.from_numpy(case.parts[0][0][: case.task.calibration])
    model = qat.prepare(case.model, inputs[:2], rules, check=False)
    qat.calibrate(model, inputs.split(64))
    return model


def start_of(case: Case, quick: bool) -> Start:
    """One for all seeds that differ in the order of examples alone."""
    key = (case.name, case.precision, fingerprint(case.model), quick)
    if key not in _starts:
        began = time.monotonic()
        plans, note = rules_of(case, functools.partial(prepared, case), quick)
        options: dict[str, Any] = {"budget": 30 if quick else 80, "progress": False}
        results = {
            name: (rules, tune.search(prepared(case, rules), case.calibration, case.task.metric, **options))
            for name, rules in plans.items()
        }
        _starts[key] = Start(results, note, time.monotonic() - began)
    return _starts[key]


def quantized(case: Case, quick: bool) -> dict[str, deploy.Graph]:
    """A searched PTQ and QAT from there, by their names, of each of the plans that are worth training."""
    graphs: dict[str, deploy.Graph] = {}
    for name, (rules, result) in start_of(case, quick).results.items():
        graphs[f"PTQ{name}"] = result.graph
        rates = case.rates if case.ways != ("PTQ",) else ()
        by_rate = {rate: trainings(case, rules, result, rate, quick, name) for rate in rates}
        for versions in by_rate.values():
            graphs |= versions
        if rates and case.task.taught and few_bits(case.precision):
            scores = {rate: max(score(case, graph) for graph in versions.values())
                      for rate, versions in by_rate.items()}  # fmt: skip
            best = max(rates, key=lambda rate: scores[rate])
            graphs |= trainings(case, rules, result, best, quick, name, taught=True)
    return graphs


def trainings(
    case: Case,
    rules: Sequence[qat.Rule],
    result: tune.Search,
    rate: float,
    quick: bool,
    name: str,
    taught: bool = False,
) -> dict[str, deploy.Graph]:
    """QAT at one rate from what was searched; it learns the ranges too, and from `teacher` where it is taught."""
    network = result.apply(prepared(case, [replace(rule, ranges="learned") for rule in rules]))
    # The ranges of weights are trained more slowly.
    groups = qat.parameter_groups(network, rate, range_lr=rate)
    tutor = teacher(case.task, case.folder, case.model, case.parts) if taught else None
    epochs = 1 if quick else case.task.qat_epochs
    torch.manual_seed(case.order)
    fit(case.task, network.train(), *case.parts[0], epochs, rate, groups, warm_up=True, teacher=tutor)
    versions = {"": network, ", statistics again": resettled(case.task, network, case.parts[0][0])}
    loss = ", taught" if taught else ""
    graphs: dict[str, deploy.Graph] = {}
    for way, version in versions.items():
        if version is not None:
            qat.freeze(version)
            graphs[f"QAT {rate:g}{way}{loss}{name}"] = deploy.lower(version.eval())
    return graphs


def score(case: Case, graph: deploy.Graph) -> Any:
    """On the validation examples, by the device's integers."""
    inputs, targets = case.parts[1]
    return judged(case.task, on_device(graph, inputs), targets)


def ours(case: Case, quick: bool) -> Iterator[Row]:
    """The best one, by the validation part on the device's integers, of each way."""
    start = start_of(case, quick)
    began = time.monotonic()
    graphs = quantized(case, quick)
    seconds = round(start.seconds + time.monotonic() - began, 1)
    scores = {method: score(case, graph) for method, graph in graphs.items()}
    for way in case.ways:
        methods = methods_of(way, scores)
        if not methods:
            yield case.row(OURS, way, "too few examples to train on")
            continue
        best = max(methods, key=lambda method: scores[method])
        graph, test = graphs[best], case.parts[2][0]
        with tempfile.TemporaryDirectory() as folder:
            path = deploy.write_tflite(graph, Path(folder) / "model.tflite")
            report = deploy.verify(graph, path, device="xnnpack-x86", data=test)
            runtime = on_litert(graph, path, test)
        counts = {"integers": int(report.values), "differing": int(report.differing), "seconds": seconds}
        metrics = {method: scores[method][0] for method in methods}
        footprint = deploy.footprint(graph)
        sizes = {"flash": footprint.flash_bytes, "arena": footprint.arena_bytes, "work": footprint.multiply_accumulates}
        columns = {"methods": metrics, "note": start.note, **counts, **sizes}
        yield case.compared(OURS, way, best, on_device(graph, test), runtime, **columns)


def methods_of(way: str, methods: Iterable[str]) -> list[str]:
    return [method for method in methods if way in ("", "QAT" if method.startswith("QAT") else "PTQ")]


def on_device(graph: deploy.Graph, inputs: np.ndarray) -> np.ndarray:
    """What we predict: the outputs from the device's integers."""
    codes = deploy.simulate(graph, deploy.input_codes(graph, inputs), "xnnpack-x86", progress=False)
    (port,) = graph.signature.outputs
    return np.asarray(deploy.output_values(graph, codes)[port.name])


def on_litert(graph: deploy.Graph, path: Path, inputs: np.ndarray) -> np.ndarray:
    """What the file itself gives."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    (source,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    (codes,) = deploy.input_codes(graph, inputs).values()
    results = []
    for example in codes:
        interpreter.set_tensor(source["index"], example[None])
        interpreter.invoke()
        results.append(interpreter.get_tensor(result["index"])[0])
    (output,) = graph.outputs
    (values,) = deploy.output_values(graph, {output: np.stack(results)}).values()
    return np.asarray(values)


# --- theirs -----------------------------------------------------------------------------------------------------------


def theirs(peer: str, python: str, cases: Sequence[Case], quick: bool) -> Iterator[Row]:
    """Rows of a peer, as they come. One process works on all cases; another takes over where one died."""
    left = [(case, case.folder / f"{peer}_{case.precision}.npz") for case in cases]
    for _, out in left:
        out.unlink(missing_ok=True)
    while left:
        command = [python, str(FOLDER / f"peer_{peer}.py"), *(["--quick"] if quick else [])]
        command += ["--untrained"] if left[0][0].ways == ("PTQ",) else []
        command += [f"{case.folder},{case.precision},{case.order},{out}" for case, out in left]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
            began, why = time.monotonic(), ""
            while left:
                ended = process.poll() is not None
                if left[0][1].exists():
                    case, out = left.pop(0)
                    now = time.monotonic()
                    for row in _answers(case, peer, out):
                        yield replace(row, seconds=round(now - began, 1))
                    began = now
                elif ended or time.monotonic() - began > PEER_SECONDS:
                    process.kill()
                    said.seek(0)
                    lines = [line for line in said.read().splitlines() if line.strip()]
                    last = lines[-1] if lines else f"exit status {process.returncode}"
                    why = f"fails: {last}" if ended else f"more than {PEER_SECONDS} s"
                    break
                else:
                    time.sleep(0.2)
            process.wait()
        if left:
            case, _ = left.pop(0)
            yield from (case.row(peer, way, why[:500]) for way in case.ways)


def _answers(case: Case, peer: str, out: Path) -> Iterator[Row]:
    """The best method of a peer for each way, by the validation part on its runtime, or as it predicts where it has
    none."""
    with np.load(out) as held:
        arrays = {key: held[key] for key in held}
    for key, words in (("not offered", ""), ("fails", "fails: ")):
        if key in arrays:
            yield from (case.row(peer, way, words + str(arrays[key])) for way in case.ways)
            return
    scores = {}
    for method in dict.fromkeys(key.split("/")[0] for key in arrays):
        best = arrays.get(f"{method}/runtime/validation", arrays.get(f"{method}/predicted/validation"))
        assert best is not None
        scores[method] = judged(case.task, best, case.parts[1][1])
    for way in case.ways:
        methods = methods_of(way, scores)
        if not methods:
            yield case.row(peer, way, f"it has no {way} here")
            continue
        method = max(methods, key=lambda name: scores[name])
        predicted, runtime = (arrays.get(f"{method}/{how}/test") for how in ("predicted", "runtime"))
        metrics = {method: scores[method][0] for method in methods}
        yield case.compared(peer, way, method, predicted, runtime, methods=metrics)


def of_half_the_work(row: Row) -> Row:
    """A peer's row of mixed bits: none takes a budget of work, but weights of four bits throughout keep to ours."""
    note = row.note or "weights of 4 bits throughout, as much work as our plan may have"
    return replace(row, precision=row.precision.replace("w4a8", "mixed"), note=note, seconds=0.0)


# --- the run ----------------------------------------------------------------------------------------------------------


def run(flags: Any, tools: Sequence[str], pythons: dict[str, str], comparison: Comparison) -> None:
    names, precisions = flags.networks.split(","), flags.precisions.split(",")
    known = read(flags.rows)
    again = set(flags.again.split(",")) if flags.again else set()

    def wanted(case: Case, tool: str) -> bool:
        rows = [known.get((case.name, case.seed, case.label(way), tool)) for way in case.ways]
        return tool in again or any(row is None or row.weights != fingerprint(case.model) for row in rows)

    def drawn(name: str, seed: int, way: str) -> bool:
        """Whether a seed changes anything: without training and with one float network all rows are the same."""
        return seed == 0 or way != "PTQ" or TASKS[name].trained_by_seed

    def add(row: Row) -> None:
        append(flags.rows, row)
        known[row.key] = row
        print(printed([row]).splitlines()[1], f"({row.seconds:.0f} s)", flush=True)

    for seed in range(flags.first_seed, flags.seeds):
        held = {name: kept(name, seed, flags.work) for name in names}
        ways = tuple(flags.ways.split(",")) if flags.ways else comparison.ways
        due_ways = {name: tuple(way for way in ways if drawn(name, seed, way)) for name in names}
        names = [name for name in names if due_ways[name]]
        cases = [Case(name, seed, bits, *held[name], due_ways[name]) for name in names for bits in precisions]
        for name in names:
            case = Case(name, seed, "float", *held[name])
            if wanted(case, FLOAT):
                outputs = outputs_of(case.model, case.parts[2][0])
                add(case.compared(FLOAT, "", "float", None, outputs, note=case.task.title))
            case = replace(case, ways=("QAT",))
            if "QAT" in due_ways[name] and case.rates and wanted(case, FLOAT):
                add(trained_in_float(case))
        for tool in tools:
            due = [case for case in cases if wanted(case, tool)]
            if tool == OURS:
                for case in due:
                    for row in ours(case, flags.quick):
                        add(row)
                continue
            if tool not in pythons:
                continue
            for row in theirs(tool, pythons[tool], [case for case in due if case.precision != "mixed"], flags.quick):
                add(row)
            for case in (case for case in due if case.precision == "mixed"):
                for way in case.ways:
                    key = (case.name, seed, replace(case, precision="w4a8").label(way), tool)
                    if key in known:
                        add(of_half_the_work(known[key]))


@dataclass(frozen=True)
class Comparison:
    """What is compared, and where its rows and tables are.

    Attributes:
        names: of the networks; precisions: bits.
        ways: see `Case`.
        rows: the file's name in bench/results.
        part: of docs/accuracy.md, between marks of this name.
        peers: which tools besides ours.
    """

    names: Sequence[str]
    precisions: Sequence[str] = PRECISIONS
    ways: Sequence[str] = ("",)
    rows: str = "accuracy.jsonl"
    part: str = "bench/accuracy.py --page"
    peers: Sequence[str] = PEERS


def add_options(parser: argparse.ArgumentParser, comparison: Comparison) -> None:
    parser.add_argument("--peers", metavar="PYTHON", help="the peers' environment; without it only ours is measured")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="another one, for one peer")
    parser.add_argument("--only", default=",".join((OURS, *comparison.peers)), help="tools, between commas")
    parser.add_argument("--networks", default=",".join(comparison.names))
    parser.add_argument("--precisions", default=",".join(comparison.precisions))
    parser.add_argument("--ways", help="PTQ or QAT: only these rows, of a comparison that has both")
    parser.add_argument("--seeds", type=int, default=3, help="from 0 on")
    parser.add_argument("--first-seed", type=int, default=0, help="instead of 0")
    parser.add_argument("--quick", action="store_true", help="fewer methods, evaluations and epochs")
    parser.add_argument("--rows", type=Path, default=ROOT / "bench" / "results" / comparison.rows)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "accuracy", help="trained networks are kept here")
    parser.add_argument("--again", metavar="TOOL[,TOOL]", help="measure the rows of these tools again")
    parser.add_argument("--page", action="store_true", help="write docs/accuracy.md's tables from the saved rows")


def start(parser: argparse.ArgumentParser, flags: argparse.Namespace, comparison: Comparison) -> None:
    """Measures what is missing, or writes the page."""
    allowed = {"networks": comparison.names, "precisions": comparison.precisions, "only": (OURS, *comparison.peers)}
    for option, values in allowed.items():
        unknown = [word for word in getattr(flags, option).split(",") if word not in values]
        if unknown:
            parser.error(f"--{option} must be some of {', '.join(values)}, got {', '.join(unknown)}")
    if flags.page:
        rows = list(read(flags.rows).values())
        if not rows:
            parser.error(f"there are no rows in {flags.rows}")
        titles = {name: TASKS[name].title for name in comparison.names}
        labels = [f"{bits} {way}".strip() for bits in comparison.precisions for way in comparison.ways]
        text = page_text(rows, titles, labels)
        begin, end = (f"<!-- {comparison.part}: {word} -->" for word in ("begin", "end"))
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), text, begin, end), encoding="utf-8")
        return
    own = dict(peer.partition("=")[::2] for peer in flags.peer)
    pythons = {peer: python for peer in comparison.peers if (python := own.get(peer, flags.peers))}
    torch.set_num_threads(1)
    run(flags, flags.only.split(","), pythons, comparison)
    print("\n".join(verdict(list(read(flags.rows).values()))))


def main() -> None:
    comparison = Comparison(tuple(TASKS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, comparison)
    start(parser, parser.parse_args(), comparison)


if __name__ == "__main__":
    main()
