# SPDX-License-Identifier: Apache-2.0
"""Times every kernel beside TensorFlow, PyTorch, torch.compile and jax.jit on the layers of seven networks.

    python bench/run.py [--quick] [--save] [--page] [--only KEY ...] [--base REF] [--tensorflow PYTHON] [--huge]
                        [--halves]
    python bench/run.py --device cuda [--quick] [--save] [--only KEY ...]

First every operation is compared with the reference, bit for bit; if one differs nothing is timed. Then all contestants
of a row take turns, each in a process of its own with the same number of threads and the same operands (bench/timing.py
says what a turn is). Bytes and multiply-adds come from the operators' declarations; what they are compared with, the
bandwidth of a copy of as many bytes and the rate of a matrix product, is measured in the same run, the copy in the same
row. Machines are shared and noisy: read the ratios, and the spread beside them.

A layer that several networks have is timed once and counts for each. Operators on whole tensors see the number of
elements alone, so they get a spread of sizes; so do the compilers, which need seconds for each shape.

On a GPU (card.py says how a call is timed there) TensorFlow does not take part, JAX does if it has a CUDA device, and
the goals include a whole training step; calls on small tensors, memory and other commits are of the CPU's kernels.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [entry for entry in (str(HERE), str(HERE.parent / "tests")) if entry not in sys.path]

import card  # noqa: E402
import check  # noqa: E402
import layers  # noqa: E402
import others  # noqa: E402
import report  # noqa: E402
import saved  # noqa: E402
import summary  # noqa: E402
import timing  # noqa: E402
from operations import OPERATIONS, Call, Operation, of_largest_case, stored_shape, work  # noqa: E402
from worker import Worker  # noqa: E402

ROOT = HERE.parent
RESULTS = HERE / "results"
CPUINFO = Path("/proc/cpuinfo")
# Where `make oracle` and `make bench` put TensorFlow.
TENSORFLOW = ROOT / ".venv-tensorflow" / "bin" / "python"

# How many sizes operators on whole tensors get for each batch, and how many layers the compilers, at COMPILED_BATCH of
# the device, which is the one of quick runs too.
WHOLE_TENSOR_SIZES = 12
COMPILED = {"whole tensor": 3, "per channel": 6, "batch norm": 5, "depthwise": 3}
COMPILED_BATCH = {"cpu": 8, "cuda": 128}
QUICK_LAYERS = 3
# Images of the training step on a GPU: enough to keep it busy.
STEP_BATCH, STEP_REPEATS = 128, 10
# Cores that others may keep busy during a race; how often it is repeated if they have more, as long as there is time.
TOLERATED, REPEATS = 0.1, 2
seconds_for_repeats = 180.0


@dataclass
class Item:
    """One race to come. `calls`: by data format; `compiled`: the formats that compilers take part in."""

    operation: Operation
    tensor: str
    batch: int  # 0 for a test case, which has its own
    networks: list[str]
    calls: dict[str, Call]
    compiled: list[str] = field(default_factory=list)


def plan(quick: bool, only: Sequence[str] = (), device: str = "cpu") -> list[Item]:
    """What is timed, in order."""
    items = []
    middle = COMPILED_BATCH[device]
    activations, depthwise = layers.activations(), layers.depthwise_layers()
    for operation in OPERATIONS:
        if only and operation.key not in only:
            continue
        table: Any = depthwise if operation.group == "depthwise" else activations
        chosen = list(table)
        if operation.group == "whole tensor":
            table = layers.by_elements(activations)
            chosen = layers.spread(table, WHOLE_TENSOR_SIZES)
        if quick:
            chosen = layers.spread(chosen, QUICK_LAYERS)
        for_compilers = layers.spread(chosen, 1 if quick else COMPILED[operation.group])
        for batch in (middle,) if quick else layers.BATCHES[device]:
            for layer in chosen:
                calls = {form: operation.call(layer, batch, form) for form in operation.formats}
                item = Item(operation, str(layer), batch, table[layer], calls)
                if layer in for_compilers and batch == middle:
                    # On a CPU XLA's depthwise convolution takes a hundred times as long; in one layout it is seen.
                    slow = operation.group == "depthwise" and device == "cpu"
                    item.compiled = list(operation.formats[:1] if slow else operation.formats)
                items.append(item)
        case = of_largest_case(operation)
        if case is not None:
            name, (operands, attributes) = case
            form = attributes.get("data_format", "") if len(operation.formats) > 1 else ""
            items.append(Item(operation, f"case {name}", 0, [], {form: (operands, attributes)}))
    return items


def race(
    item: Item, workers: dict[str, Worker], threads: int, compilers: bool, gpu: card.Card | None = None
) -> list[summary.Row]:
    """The rows of one item: one for each layout."""
    operation = item.operation
    demands = {form: work(operation.raw, *call) for form, call in item.calls.items()}
    variants = {
        form: {"operands": operands, "attributes": attributes} for form, (operands, attributes) in item.calls.items()
    }
    demand = next(iter(demands.values()))
    formats = item.compiled if compilers else []
    request = {
        "key": operation.key,
        "raw": operation.raw,
        "variants": variants,
        "copied": demand.bytes,
        "eager": bool(item.batch),  # peers know the attributes of layers, not of every test case
        # A compiled convolution is the eager one.
        "formats": [] if operation.group == "depthwise" else formats,
        "sets": 1 if gpu is None else card.sets(demand.bytes, gpu.cache_bytes),
    }
    groups: dict[str, timing.Turns] = {}
    failures, clocks = {}, {}
    for name, worker in workers.items():
        if name == "jax" and not formats:
            continue
        arguments = request | {"formats": formats} if name == "jax" else request
        try:
            held = worker.hold(**arguments)
        except RuntimeError as error:
            if name == "exactqat":
                raise
            failures[name] = str(error)
        else:
            groups[name] = {contestant: partial(worker.turn, contestant) for contestant in held}
            clocks |= worker.clocks
            if worker.left_out:
                failures[name] = f"{name}: {'; '.join(worker.left_out)}"
    time.sleep(max(workers[name].pause for name in groups))
    watched = [(turns, workers[name].pause) for name, turns in groups.items()]
    if gpu is None:
        times, disturbed = undisturbed(watched, [worker.process for worker in workers.values()])
    else:  # whose time is not that of the cores
        times, disturbed = timing.race(watched), 0.0
    measured = {
        (name, contestant): spread
        for name, of_group in zip(groups, times, strict=True)
        for contestant, spread in of_group.items()
    }
    for worker in workers.values():
        worker.ask("drop")
    rows = []
    peers = {
        contestant: list(spread)
        for (name, contestant), spread in measured.items()
        if name not in ("exactqat", "base") and not contestant.startswith("copy")
    }
    copies = [spread for (_, contestant), spread in measured.items() if contestant.startswith("copy")]
    for form, (operands, _) in item.calls.items():
        row: summary.Row = {
            "operation": operation.key,
            "tensor": item.tensor,
            "batch": item.batch,
            "threads": threads,
            "format": form,
            "networks": item.networks,
            "bytes": demands[form].bytes,
            "multiply_adds": demands[form].multiply_adds,
            "tensor_bytes": 4 * max(math.prod(stored_shape(operand)) for operand in operands.values()),
            "copy": list(min(copies)),
            **{kind: list(measured["exactqat", f"{kind} {form}".strip()]) for kind in ("preallocated", "fresh")},
            "peers": peers,
        }
        if ("base", f"fresh {form}".strip()) in measured:
            row["base"] = {kind: list(measured["base", f"{kind} {form}".strip()]) for kind in ("preallocated", "fresh")}
        if clocks:
            row |= {"clocks": clocks, "sets": request["sets"]}
        if disturbed:
            row["disturbed"] = round(disturbed, 2)
        if failures:
            row["failures"] = failures
        rows.append(row)
    return rows


def undisturbed(
    groups: Sequence[tuple[timing.Turns, float]], processes: Sequence[int]
) -> tuple[list[dict[str, timing.Statistics]], float]:
    """The race, again if others were computing meanwhile, and how many cores they had if they were to the end."""
    global seconds_for_repeats
    best, least = None, math.inf
    for repeat in range(REPEATS + 1):
        begun, watch = time.monotonic(), others.Watch(processes)
        rounds = timing.race(groups)
        share = watch.share()
        if share < least:
            best, least = rounds, share
        if repeat:
            seconds_for_repeats -= time.monotonic() - begun
        if least <= TOLERATED or seconds_for_repeats <= 0:
            break
    assert best is not None
    return best, least if least > TOLERATED else 0.0


def start_workers(
    threads: int, options: argparse.Namespace, base: Path | None, console: Any
) -> Iterator[tuple[str, Worker]]:
    yield "exactqat", Worker("exactqat", threads, options.device)
    yield "torch", Worker("torch", threads, options.device)
    if options.compilers:
        try:
            yield "jax", Worker("jax", threads, options.device)
        except RuntimeError as error:
            if options.device == "cpu":
                raise
            reason = str(error).strip().splitlines()[-1]
            console.print(f"jax.jit is left out, it has no CUDA device: {reason}", markup=False, highlight=False)
    if options.tensorflow is not None:
        yield "tensorflow", Worker("tensorflow", threads, options.device, options.tensorflow)
    if base is not None:
        yield "base", Worker("exactqat", threads, options.device, base)


def machine(gpu: card.Card | None = None) -> str:
    """The GPU's name, or the processor's and its number of cores, as a file name."""
    if gpu is not None:
        return "-".join(re.findall(r"[A-Za-z0-9]+", gpu.name)).lower()
    model = next(
        (line for line in CPUINFO.read_text().splitlines() if line.startswith("model name")), platform.machine()
    )
    words = re.findall(r"[A-Za-z0-9]+", model.partition(":")[2] or model)
    return "-".join([*words, f"{os.cpu_count()}-cores"]).lower()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run.py", description=__doc__.splitlines()[0])
    cores = len(os.sched_getaffinity(0))
    keys = [operation.key for operation in OPERATIONS]
    parser.add_argument("--quick", action="store_true", help="a few layers of each operation at one batch size")
    parser.add_argument("--only", nargs="+", choices=keys, default=[], metavar="KEY", help=f"of {', '.join(keys)}")
    parser.add_argument("--threads", nargs="+", type=int, help="default: 1 and 2, as far as there are cores")
    parser.add_argument("--device", choices=list(layers.BATCHES), default="cpu", help="where the kernels run")
    parser.add_argument(
        "--tensorflow",
        type=Path,
        metavar="PYTHON",
        help="an interpreter that has TensorFlow; default: .venv-tensorflow",
    )
    parser.add_argument(
        "--no-compilers", dest="compilers", action="store_false", help="leave out torch.compile and jax.jit"
    )
    parser.add_argument("--no-overhead", dest="overhead", action="store_false", help="leave out calls on small tensors")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out a training step's memory")
    parser.add_argument("--base", metavar="REF", help="also time another commit, built into an environment of its own")
    parser.add_argument("--huge", action="store_true", help="also a tensor of more than 2**31 elements (needs 9.2 GB)")
    parser.add_argument("--halves", action="store_true", help="also tensors of 16 bits, beside a copy")
    parser.add_argument(
        "--save", action="store_true", help="write bench/results/<machine>.json and a picture beside it"
    )
    parser.add_argument("--page", action="store_true", help="write the saved results' table into docs; alone: no run")
    parser.add_argument("--json", type=Path, help="write (or, with --page, read) the results here instead")
    options = parser.parse_args(arguments)
    options.gpu = None
    if options.device == "cuda":
        _only_gpu(parser, options)
    options.threads = sorted(set(options.threads or [count for count in (1, 2) if count <= cores]))
    if min(options.threads) < 1 or max(options.threads) > cores:
        parser.error(f"--threads must be from 1 to {cores}, the cores there are, got {options.threads}")
    if options.tensorflow is not None and not options.tensorflow.exists():
        parser.error(f"--tensorflow: there is no {options.tensorflow}")
    if options.tensorflow is None and TENSORFLOW.exists() and options.gpu is None:
        options.tensorflow = TENSORFLOW
    return options


def _only_gpu(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses what has a meaning on the CPU alone, and leaves out what is measured there."""
    for name in ("threads", "tensorflow", "base", "huge", "halves", "page"):
        if getattr(options, name):
            parser.error(f"--{name} is for --device cpu, got --device cuda")
    try:
        options.gpu = card.find()
    except ValueError as error:
        parser.error(str(error))
    options.threads, options.overhead, options.memory = [1], False, False


def main(arguments: Sequence[str] | None = None, under_test: check.Evaluate | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    path = options.json or RESULTS / f"{machine(options.gpu)}.json"
    if options.page and not set(words) - {"--page", "--json", str(options.json)}:
        report.write_page(ROOT / "docs" / "performance.md", path)
        return 0
    console = report.console()
    started = time.monotonic()
    chosen = [operation for operation in OPERATIONS if not options.only or operation.key in options.only]
    try:
        if options.gpu is None:
            cases, tensors = check.run(options.threads, chosen, under_test or check.kernels)
        else:
            cases, tensors = check.run_on_card(chosen, under_test or check.on_card)
    except check.Red as error:
        console.print("[bold red]Not timed:[/] a result differs from the reference.", highlight=False)
        console.print(str(error), markup=False, highlight=False)
        return 1
    console.print(
        f"{cases:,} test cases and {tensors} layers' tensors have the reference's bits "
        f"({time.monotonic() - started:.0f} s).",
        highlight=False,
    )
    if options.gpu is not None:
        console.print(f"{options.gpu.name}; {card.SETTINGS}; TensorFlow is left out.", highlight=False)
    elif options.tensorflow is None:
        console.print(
            "[bold]TensorFlow is left out:[/] there is no .venv-tensorflow; give --tensorflow PYTHON.", highlight=False
        )
    results = collect(options, console)
    results["seconds"] = round(time.monotonic() - started)
    report.print_summary(console, results)
    if options.save or options.json:
        path.parent.mkdir(parents=True, exist_ok=True)
        saved.write(path, results)
        picture = path.with_suffix(".png")
        import roofline

        roofline.draw(results, picture)
        console.print(f"Written: {path} and {picture}", highlight=False)
        if options.page:
            report.write_page(ROOT / "docs" / "performance.md", path)
    return 0


def collect(options: argparse.Namespace, console: Any) -> dict[str, Any]:
    """Times everything. The results as they are saved."""
    import base as other

    results: dict[str, Any] = {
        "machine": machine(options.gpu),
        "device": options.device,
        "versions": {"python": platform.python_version()},
        "settings": {
            "threads": options.threads,
            "quick": options.quick,
            "turns": timing.TURNS,
            "burst_seconds": timing.BURST_SECONDS,
            "enough_seconds": timing.ENOUGH_SECONDS,
            "compilers": f"a spread of layers at batch {COMPILED_BATCH[options.device]}, {max(options.threads)} threads"
            if options.compilers
            else "left out",
            "pauses": {},
            "base": options.base,
        },
        "peak_multiply_adds": {},
        "rows": [],
        "overhead": {},
    }
    if options.gpu is not None:
        results["settings"] |= {"peers": card.SETTINGS, "cache_bytes": options.gpu.cache_bytes, "caches": card.CACHES}
        if not options.only:
            results["step"] = training_step()  # first, while nobody else needs the memory
    if options.memory:  # before what takes long
        import memory

        results["memory"] = memory.compare("mobilenet_v2")
    with other.environment(options.base) as base:
        for threads in options.threads:
            workers: dict[str, Worker] = {}
            try:
                workers.update(start_workers(threads, options, base, console))
                _collect(options, console, threads, workers, results)
            finally:
                for worker in workers.values():
                    worker.close()
    if options.huge:
        import huge

        results["huge"] = huge.measure(max(options.threads))
    if options.halves:
        import halves

        results["halves"] = [halves.measure(threads) for threads in options.threads]
    return results


def training_step() -> dict[str, Any]:
    """MobileNetV2's step on the GPU, float and quantization-aware, in turns."""
    import step
    import torch

    card.prepare(torch)
    case = step.task("mobilenet_v2", "cuda", STEP_BATCH)
    names = [step.TORCH_FLOAT, step.OUR_FLOAT, *(step.OUR_QAT.format(ranges) for ranges in ("ema", "learned"))]
    calls = {name: step.timed(step.step(step.CONTESTANTS[name](case), case)) for name in names}
    times = step.race(calls, STEP_REPEATS)
    calls.clear()
    torch.cuda.empty_cache()
    return {"network": "mobilenet_v2", "images": list(case.images.shape), "steps": step.rows_of(times)}


def _collect(
    options: argparse.Namespace, console: Any, threads: int, workers: dict[str, Worker], results: dict[str, Any]
) -> None:
    last = threads == max(options.threads)
    for name, worker in workers.items():
        if name != "base":
            results["versions"] |= worker.versions
        results["settings"]["pauses"][f"{name}, {threads} threads"] = round(worker.pause, 5)
    peak = workers["torch"].ask("peak")["seconds"]
    results["peak_multiply_adds"][str(threads)] = peak
    if options.overhead and threads == 1:
        for name, worker in workers.items():
            if name != "base":
                results["overhead"] |= worker.ask("overhead")["seconds"]
    pending: list[summary.Row] = []
    items = plan(options.quick, options.only, options.device)
    for number, item in enumerate(items):
        rows = [
            summary.finish(row, peak) for row in race(item, workers, threads, options.compilers and last, options.gpu)
        ]
        pending += rows
        results["rows"] += rows
        if number + 1 == len(items) or items[number + 1].operation is not item.operation:
            report.print_rows(console, item.operation, threads, pending)
            pending = []


if __name__ == "__main__":
    sys.exit(main())
