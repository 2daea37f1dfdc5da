# SPDX-License-Identifier: Apache-2.0
"""Random graphs of every operator of the device, simulated and run.

    python tests/campaigns/sweep.py --count 3000 --write

An emulated ARM64 runs them as several processors, which choose different kernels; their counts are added up. With
--write the counts go to `exactqat/device/measured.json`, from which `deploy.EXACT` and `deploy.MEASURED` are read;
pairs of operator and profile that this machine cannot run keep what another machine wrote.

The simulation uses kernels (`exactqat.kit.engine`). With --engine they are compared with the operators' declarations,
for every profile and instruction set, without a runtime.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import _tests_folder  # noqa: F401
import numpy as np
from device_cases import NAMES as NAMES_IN_TFLITE
from device_cases import NAMES_IN_ONNX, random_codes, random_graph

import exactqat.kit.device
from exactqat.deploy import Graph, profiles_here, verify, write_onnx, write_tflite
from exactqat.deploy.runtimes import emulation
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.kit.device import OPERATORS, PROFILES, Refusal, profile_named
from exactqat.kit.device.operator import written
from exactqat.kit.engine import Compiled
from exactqat.operators import cpu

MEASURED = Path(exactqat.kit.device.__file__).parent / "measured.json"
NAMES = (*NAMES_IN_TFLITE, *NAMES_IN_ONNX)


@dataclass
class Outcome:
    """Codes compared; of those that differ how many, by how much at most, and the first graphs with such.

    refused: of the graphs, how many the runtime did not take, or have no form in its files; rejected: the former alone.
    """

    values: int = 0
    differing: int = 0
    largest: int = 0
    graphs: int = 0
    refused: int = 0
    rejected: int = 0
    examples: list[tuple[Graph, dict[str, np.ndarray]]] = field(default_factory=list)


def graphs(kind: str, profile: str, count: int) -> Iterator[tuple[Graph, dict[str, np.ndarray]]]:
    """`count` random graphs with an operator of that name (see `NAMES`), and codes for their inputs.

    The same ones every time.
    """
    rng = np.random.default_rng([*kind.encode(), list(PROFILES).index(profile)])
    for _ in range(count):
        graph = random_graph(rng, kind)
        yield graph, random_codes(rng, graph)


def sweep(kind: str, profile: str, count: int, folder: Path) -> Outcome:
    """Runs `count` random graphs on the profile's runtimes and compares every result with the simulation."""
    outcome = Outcome()
    for processor, (graph, codes) in itertools.product(processors(profile), graphs(kind, profile, count)):
        os.environ["EXACTQAT_ARM64_CPU"] = processor
        outcome.graphs += 1
        try:
            report = verify(graph, written_for(profile, graph, folder), codes, profile)
        except (RuntimeRefusal, NoForm) as error:
            outcome.refused += 1
            outcome.rejected += isinstance(error, RuntimeRefusal)
            continue
        rows = [row for row in report.operators if row.kind == kind]
        outcome.values += sum(row.values for row in rows)
        outcome.differing += sum(row.differing for row in rows)
        outcome.largest = max(outcome.largest, *(row.largest_difference for row in rows))
        if report.differing and len(outcome.examples) < 3:
            outcome.examples.append((graph, codes))
    return outcome


class NoForm(Exception):
    """The operator has no form in the profile's files."""


def written_for(profile: str, graph: Graph, folder: Path) -> Path:
    """The file that the profile runs."""
    is_tflite = PROFILES[profile].file == ".tflite"
    try:
        return write_tflite(graph, folder / "model.tflite") if is_tflite else write_onnx(graph, folder / "model.onnx")
    except Refusal as error:
        raise NoForm(str(error)) from error


def processors(profile: str) -> tuple[str, ...]:
    """Those that are emulated for a profile, one after the other; an empty name means this machine's own."""
    native = PROFILES[profile].runs_on(platform.machine())
    return tuple(emulation.CPUS) if PROFILES[profile].emulated and not native else ("",)


def version(profile: str) -> str:
    """What was run."""
    name = PROFILES[profile].runtime
    emulated = [emulation.CPUS[cpu] for cpu in processors(profile) if cpu]
    if emulated:
        return f"{name} {emulation.versions()[name]} on aarch64, emulated as {'; '.join(emulated)}"
    return f"{name} {importlib.metadata.version(name)} on {platform.machine()}"


def ways() -> list[tuple[str, str]]:
    """Instruction sets of this processor, and whether dot-product instructions are used."""
    dots = {"avx512": "10", "neon": "10"}
    return [(name, dot) for name in cpu.INSTRUCTION_SETS for dot in dots.get(name, "1")]


def sweep_engine(kind: str, profile: str, count: int) -> Outcome:
    """Computes `count` random graphs by kernels, on every instruction set, and compares every result with the
    declarations; no runtime is asked."""
    outcome, before = Outcome(), (cpu.kernels, os.environ.get("EXACTQAT_DOT_PRODUCTS", "1"))
    for graph, codes in graphs(kind, profile, count):
        outcome.graphs += 1
        expected = {**codes, **graph.initial_state(len(codes[graph.inputs[0]]))}
        try:
            for operator in graph.operators:
                sides = (operator.inputs, operator.outputs)
                inputs, outputs = ([graph.tensors[name] for name in names] for names in sides)
                operands = [expected[tensor.name] if tensor.data is None else tensor.data for tensor in inputs]
                device = profile_named(profile).for_unsigned() if operator.unsigned else profile_named(profile)
                arguments = (inputs, outputs, operator.attributes, device)
                results = OPERATORS[operator.kind].all_results(operands, *arguments)
                expected.update(zip(written(operator.kind, operator.inputs, operator.outputs), results, strict=True))
        except Refusal:
            outcome.refused += 1
            continue
        for name, dot in ways():
            cpu.kernels, os.environ["EXACTQAT_DOT_PRODUCTS"] = cpu.load(name), dot
            for tensor, result in Compiled(graph, profile).run(codes, graph.results()).items():
                # Real numbers among them: what DEQUANTIZE makes.
                wanted = expected[tensor]
                unequal = (result != wanted) & ~(np.isnan(result) & np.isnan(wanted))
                difference = np.abs(result[unequal].astype(np.float64) - wanted[unequal])
                outcome.values += result.size
                outcome.differing += int(np.count_nonzero(unequal))
                outcome.largest = max(outcome.largest, math.ceil(difference.max(initial=0)))
    cpu.kernels, os.environ["EXACTQAT_DOT_PRODUCTS"] = before
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000, help="graphs of each operator and profile")
    parser.add_argument("--kinds", nargs="+", default=list(NAMES), choices=list(NAMES), metavar="KIND")
    parser.add_argument("--profiles", nargs="+", choices=list(PROFILES), help="default: all that run here")
    parser.add_argument("--write", action="store_true", help="keep the counts")
    parser.add_argument("--engine", action="store_true", help="compare kernels with the declarations, without runtimes")
    arguments = parser.parse_args()
    if arguments.engine and arguments.write:
        parser.error("--write is for what runtimes computed, --engine asks none")
    runnable = tuple(PROFILES) if arguments.engine else (*profiles_here(), *profiles_here(".onnx"))
    missing = [name for name in arguments.profiles or () if name not in runnable]
    if missing:
        parser.error(f"--profiles must be among {', '.join(runnable)} on this machine, got {', '.join(missing)}")
    failed = 0
    for profile in arguments.profiles or runnable:
        for kind in arguments.kinds:
            if arguments.engine:
                outcome = sweep_engine(kind, profile, arguments.count)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    outcome = sweep(kind, profile, arguments.count, Path(folder))
            row = f"{outcome.values:>12,} compared, {outcome.differing:,} differ, by {outcome.largest} at most"
            refused = f"; {outcome.refused} of {outcome.graphs} graphs refused" if outcome.refused else ""
            print(f"{kind:30} {profile:14} {row}{refused}", flush=True)
            for graph, _ in outcome.examples:
                print(f"    {graph.operators}", flush=True)
            failed += outcome.differing > 0
            if arguments.write and (outcome.values or outcome.rejected):
                keep(kind, profile, [outcome.values, outcome.differing, outcome.largest])
    return int(failed > 0)


def keep(kind: str, profile: str, row: list[int]) -> None:
    """Enters one count; of no results: that the runtime has no such operator."""
    content = json.loads(MEASURED.read_text())
    content.setdefault("runtimes", {})[profile] = version(profile)
    absent = {name for name in content["absent"].get(profile, ()) if name in NAMES and name != kind}
    content["absent"][profile] = [name for name in NAMES if name in absent or (name == kind and not row[0])]
    content["results"].setdefault(kind, {}).pop(profile, None)
    if row[0]:
        content["results"][kind][profile] = row
    content["results"] = {
        name: {runtime: rows[runtime] for runtime in PROFILES if runtime in rows}
        for name in NAMES
        if (rows := content["results"].get(name))
    }
    # One line for each operator.
    lines = [f"    {json.dumps(name)}: {json.dumps(rows)}" for name, rows in content["results"].items()]
    runtimes = json.dumps(content["runtimes"], indent=2, sort_keys=True).replace("\n", "\n  ")
    absent = json.dumps(content["absent"], indent=2, sort_keys=True).replace("\n", "\n  ")
    head = f'{{\n  "runtimes": {runtimes},\n  "absent": {absent},\n  "results": {{\n'
    MEASURED.write_text(head + ",\n".join(lines) + "\n  }\n}\n")


if __name__ == "__main__":
    sys.exit(main())
