# SPDX-License-Identifier: Apache-2.0
"""Compares two builds of the CPU kernels: how long each layer of the bench takes with the old modules and the new ones.

    python bench/modules.py BEFORE [AFTER] [--minutes 10] [--rounds 4] [--isa avx512] [--threads 1] [--batch 8]
                            [--only KEY ...] [--worst 30]

BEFORE and AFTER are folders with the compiled modules (`_avx512.*.so` and so on); AFTER is the one of the sources if it
is not named. They are run with the Python sources of this tree. Printed is the time before over the time after: below 1
it has become slower. Bits: see the tests.

How long a call takes depends on where its process happened to get its memory, and on what else the machine does, for
seconds at a time. So in every round each build gets a new process, the processes take turns at every layer, and what
counts for a layer is the shortest time of all rounds. BEFORE takes part twice: what differs between the two is noise,
and is printed beside the rest. What a machine cannot tell apart there it cannot tell apart here.

The first round takes its share of the minutes and decides how many layers there is time for, in an order that spreads
them over all operations and sizes; the other rounds time the same ones, as many rounds as there is time for.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path += [entry for entry in (str(HERE), str(HERE.parent / "tests")) if entry not in sys.path]

import layers  # noqa: E402
from operations import OPERATIONS, Operation  # noqa: E402
from timing import geometric_mean  # noqa: E402
from worker import Worker  # noqa: E402

SOURCES = HERE.parent / "src" / "exactqat"
# How many sizes operators on whole tensors get.
WHOLE_TENSOR_SIZES = 4
# Below this a layer has become slower.
TOLERATED = 0.95
SIDES = ("before", "again", "after")
# Turns of a layer in a round.
TURNS = 3
FEWEST_ROUNDS = 2

# Shortest seconds so far, by operation, layer and format, of each side.
Shortest = dict[tuple[str, str], dict[str, float]]


class Row(NamedTuple):
    """A layer: times before over times after, over times before again (noise), and seconds now."""

    ratio: float
    noise: float
    key: str
    layer: str
    seconds: float


def install(modules: Path, folder: Path) -> None:
    """Puts the package with the compiled modules of a folder into another."""
    if not list(modules.glob("_features.*")):
        raise SystemExit(f"there are no compiled modules in {modules}")
    shutil.copytree(SOURCES, folder / "exactqat", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in modules.glob("_*.so"):
        shutil.copy(module, folder / "exactqat" / "cpu")


def worker(folder: Path, threads: int) -> Worker:
    """A process that computes with the package in a folder."""
    os.environ["PYTHONPATH"] = str(folder)
    return Worker("exactqat", threads)


def tasks(only: list[str]) -> list[tuple[Operation, Any]]:
    """Operations and layers, spread so that any number of the first ones is a sample of all."""
    activations, depthwise = layers.activations(), layers.depthwise_layers()
    pairs = []
    for operation in OPERATIONS:
        if only and operation.key not in only:
            continue
        chosen = list(depthwise if operation.group == "depthwise" else activations)
        if operation.group == "whole tensor":
            chosen = layers.spread(layers.by_elements(activations), WHOLE_TENSOR_SIZES)
        # Shuffled within an operation, whose places are then spread evenly over all of them.
        random.Random(operation.key).shuffle(chosen)
        pairs += [((place + 0.5) / len(chosen), operation, layer) for place, layer in enumerate(chosen)]
    return [(operation, layer) for _, operation, layer in sorted(pairs, key=lambda pair: pair[0])]


def time_layer(sides: dict[str, Worker], operation: Operation, layer: Any, batch: int, shortest: Shortest) -> None:
    """Takes turns at a layer, with and without fresh results, and keeps what was shortest."""
    calls = {form: operation.call(layer, batch, form) for form in operation.formats}
    variants = {form: {"operands": call[0], "attributes": call[1]} for form, call in calls.items()}
    held = {}
    for name, side in sides.items():
        held[name] = [call for call in side.hold(raw=operation.raw, variants=variants) if "preallocated" in call]
    names = list(sides)
    for turn in range(TURNS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for contestant in held[name]:
                form = contestant.removeprefix("preallocated").strip()
                best = shortest.setdefault((operation.key, f"{layer} {form}".strip()), {})
                best[name] = min(best.get(name, float("inf")), sides[name].turn(contestant))
            time.sleep(sides[name].pause)


def compare(
    folders: dict[str, Path], work: list[tuple[Operation, Any]], options: argparse.Namespace
) -> tuple[Shortest, int]:
    """Times all sides round by round until the minutes are over. Returns the times and the number of rounds."""
    begun, share = time.monotonic(), options.minutes * 60 / options.rounds
    shortest: Shortest = {}
    done = 0
    longest = 0.0
    while done < FEWEST_ROUNDS or time.monotonic() - begun + longest < options.minutes * 60:
        start = time.monotonic()
        order = SIDES[done % len(SIDES) :] + SIDES[: done % len(SIDES)]
        sides = {name: worker(folders[name], options.threads) for name in order}
        timed = 0
        for operation, layer in work:
            if done == 0 and timed and time.monotonic() - start > share:
                break
            time_layer(sides, operation, layer, options.batch, shortest)
            timed += 1
        work = work[:timed]
        for side in sides.values():
            side.close()
        longest = max(longest, time.monotonic() - start)
        done += 1
        print(f"round {done}: {timed} layers, {time.monotonic() - start:.0f} seconds", file=sys.stderr, flush=True)
    return shortest, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=SOURCES / "cpu")
    parser.add_argument("--minutes", type=float, default=10, help="for the whole")
    parser.add_argument("--rounds", type=int, default=4, help="how many rounds there is to be time for")
    parser.add_argument("--isa", metavar="NAME", help="an instruction set; default: the best one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY", choices=[op.key for op in OPERATIONS])
    parser.add_argument("--worst", type=int, default=30, help="how many layers are printed")
    options = parser.parse_args()
    if options.minutes <= 0 or options.rounds < 1:
        parser.error("--minutes must be above 0 and --rounds at least 1")
    if options.isa is not None:
        os.environ["EXACTQAT_ISA"] = options.isa
    work = tasks(options.only)
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder) / name for name in SIDES}
        for name, path in folders.items():
            install(options.after if name == "after" else options.before, path)
        shortest, rounds = compare(folders, work, options)
    rows = [
        Row(best["before"] / best["after"], best["before"] / best["again"], key, layer, best["after"])
        for (key, layer), best in shortest.items()
    ]
    print(f"{len(rows)} layers and formats, {rounds} rounds; before / after, and in brackets before / before again\n")
    print("| operation | layers | geometric mean | worst | below 0.95 |\n|---|---|---|---|---|")
    for key in [operation.key for operation in OPERATIONS if any(row.key == operation.key for row in rows)]:
        ratios = [[row.ratio for row in rows if row.key == key], [row.noise for row in rows if row.key == key]]
        cells = [
            f"{render(ratios[0])} ({render(ratios[1])})"
            for render in (
                lambda values: f"{geometric_mean(values):.3f}",
                lambda values: f"{min(values):.2f}",
                lambda values: f"{sum(value < TOLERATED for value in values)}",
            )
        ]
        print(f"| {key} | {len(ratios[0])} | {' | '.join(cells)} |")
    print(
        f"\n| before / after | before / before again | operation | layer, batch {options.batch} | now, microseconds |"
    )
    print("|---|---|---|---|---|")
    for row in sorted(rows)[: options.worst]:
        print(f"| {row.ratio:.2f} | {row.noise:.2f} | {row.key} | {row.layer} | {row.seconds * 1e6:.0f} |")


if __name__ == "__main__":
    main()
