# SPDX-License-Identifier: Apache-2.0
"""Compares two builds of the CPU kernels: how long each layer of the bench takes with the old modules and the new ones.

    python bench/modules.py BEFORE [AFTER] [--isa avx512] [--threads 1] [--batch 8] [--only KEY ...] [--worst 30]

BEFORE and AFTER are folders with the compiled modules (`_avx512.*.so` and so on); AFTER is the one of the sources if it
is not named. Each build has a process of its own with the Python sources of this tree, and the two take turns
(timing.py). Printed is the time before over the time after: below 1 it has become slower. Bits: see the tests.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [entry for entry in (str(HERE), str(HERE.parent / "tests")) if entry not in sys.path]

import layers  # noqa: E402
import timing  # noqa: E402
from operations import OPERATIONS  # noqa: E402
from worker import Worker  # noqa: E402

SOURCES = HERE.parent / "src" / "exactqat"
# How many sizes operators on whole tensors get.
WHOLE_TENSOR_SIZES = 4
# Below this a layer has become slower.
TOLERATED = 0.95


def worker(modules: Path, folder: Path, instruction_set: str | None, threads: int) -> Worker:
    """A process that computes with the modules in a folder."""
    if not list(modules.glob("_features.*")):
        raise SystemExit(f"there are no compiled modules in {modules}")
    shutil.copytree(SOURCES, folder / "exactqat", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in modules.glob("_*.so"):
        shutil.copy(module, folder / "exactqat" / "cpu")
    os.environ["PYTHONPATH"] = str(folder)
    if instruction_set is not None:
        os.environ["EXACTQAT_ISA"] = instruction_set
    return Worker("exactqat", threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=SOURCES / "cpu")
    parser.add_argument("--isa", metavar="NAME", help="an instruction set; default: the best one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY", choices=[op.key for op in OPERATIONS])
    parser.add_argument("--worst", type=int, default=30, help="how many layers are printed")
    options = parser.parse_args()
    activations, depthwise = layers.activations(), layers.depthwise_layers()
    rows: list[tuple[float, str, str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        builds = {
            name: worker(modules, Path(folder) / name, options.isa, options.threads)
            for name, modules in (("before", options.before), ("after", options.after))
        }
        for operation in OPERATIONS:
            if options.only and operation.key not in options.only:
                continue
            chosen = list(depthwise if operation.group == "depthwise" else activations)
            if operation.group == "whole tensor":
                chosen = layers.spread(layers.by_elements(activations), WHOLE_TENSOR_SIZES)
            for layer in chosen:
                calls = {form: operation.call(layer, options.batch, form) for form in operation.formats}
                variants = {form: {"operands": call[0], "attributes": call[1]} for form, call in calls.items()}
                groups: list[tuple[timing.Turns, float]] = []
                for build in builds.values():
                    held = [name for name in build.hold(raw=operation.raw, variants=variants) if "preallocated" in name]
                    groups.append(({contestant: partial(build.turn, contestant) for contestant in held}, build.pause))
                before, after = timing.race(groups)
                for contestant in before:
                    old, new = before[contestant].median, after[contestant].median
                    form = contestant.removeprefix("preallocated").strip()
                    rows.append((old / new, operation.key, f"{layer} {form}".strip(), new))
        for build in builds.values():
            build.close()
    print("| operation | layers | geometric mean | worst | below 0.95 |\n|---|---|---|---|---|")
    for key in dict.fromkeys(row[1] for row in rows):
        ratios = [row[0] for row in rows if row[1] == key]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        below = sum(ratio < TOLERATED for ratio in ratios)
        print(f"| {key} | {len(ratios)} | {mean:.2f} | {min(ratios):.2f} | {below} |")
    print(f"\n| before / after | operation | layer, batch {options.batch} | now, microseconds |\n|---|---|---|---|")
    for ratio, key, tensor, seconds in sorted(rows)[: options.worst]:
        print(f"| {ratio:.2f} | {key} | {tensor} | {seconds * 1e6:.0f} |")


if __name__ == "__main__":
    main()
