# SPDX-License-Identifier: Apache-2.0
"""Blind proofs of `deploy.identify`: devices are asked without their names, and what was found is then compared with
them on other random graphs.

    python tests/campaigns/identify.py
    python tests/campaigns/identify.py --devices micro "64 entries" --operators CONV_2D ADD
    python tests/campaigns/identify.py --devices tosa --tosa ENVIRONMENT --write src/exactqat/kit/device/tosa.json

ENVIRONMENT: see `tosa_model`; the file declares the device that was found.

The devices are the runtimes of this machine and those of `made_up_devices.py`, one of them also with noise in one code
of 10,000, where nothing must be called explained. The exit status is 1 if something else was found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import _tests_folder  # noqa: F401
import numpy as np
from device_cases import random_codes, random_graph
from made_up_devices import DEVICES, Noisy
from tosa_model import ReferenceModel

from exactqat.deploy import Graph, Identification, identify, profiles_here, simulate
from exactqat.deploy.comparing import Run
from exactqat.deploy.formats.onnx import onnx_bytes
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.identify import OperatorFindings, names
from exactqat.deploy.runtimes import open_runtime
from exactqat.deploy.runtimes.onnxruntime import OnnxRuntime, in_real_numbers, written_network
from exactqat.kit.device import Profile, Refusal, declare, profile
from exactqat.kit.device.hypotheses import Hypothesis

NOISY, TOSA = "noise in 1 of 10,000", "tosa"
ABOUT = {
    "name": TOSA,
    "title": "TOSA's reference model",
    "description": "TOSA's reference model (tosa-tools 2026.8.0): RESCALE rounds sums twice and operands once",
}


class Plain(Identification):
    """As the plainest kernels compute it, which have no limits of a runtime's own, or as stated."""

    like = "reference"

    def chosen(self, row: OperatorFindings) -> Hypothesis | None:
        def rank(entry: Hypothesis) -> tuple[bool, bool, bool]:
            return entry != Hypothesis("reference"), entry != Hypothesis("micro"), entry.arithmetic is None

        return min(row.explanations, key=rank, default=row.hypothesis)


def runtime(name: str) -> Run:
    """A runtime of this machine, which does not say which one it is."""

    def run(content: bytes, codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return open_runtime(content, list(codes), ["y"], name).run(codes)

    def run_onnx(content: bytes, numbers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": in_real_numbers(content, numbers)[0]}

    return run_onnx if name in profiles_here(".onnx") else run


def on_other_graphs(
    run: Run, file: str, found: Profile, row: OperatorFindings, count: int, seed: int
) -> tuple[int, int]:
    """Of other random graphs of an operator, one example each: codes compared, and those that differ."""
    rng, values, differing = np.random.default_rng([seed, *row.name.encode()]), 0, 0
    for _ in range(count):
        graph = random_graph(rng, row.name)
        codes = {name: array[:1] for name, array in random_codes(rng, graph).items()}
        if len(graph.operators) > 1:  # a QUANTIZE before it
            continue
        graph = graph.with_outputs(graph.operators[0].outputs[:1])
        try:
            device = answer(run, file, graph, codes)
            simulated = simulate(graph, codes, found, progress=False)[graph.outputs[0]]
        except (RuntimeError, Refusal, KeyError, ValueError):
            continue
        values += device.size
        differing += int(np.count_nonzero(device != simulated))
    return values, differing


def answer(run: Run, file: str, graph: Graph, codes: Mapping[str, np.ndarray]) -> np.ndarray:
    if file == ".onnx":
        return OnnxRuntime(written_network(graph, onnx_bytes(graph))).run(codes)[1][graph.outputs[0]]
    return np.asarray(run(tflite_bytes(graph), dict(codes))[graph.outputs[0]])


def proof(name: str, arguments: argparse.Namespace) -> tuple[Identification, dict[str, tuple[int, int]]]:
    """What was found of a device, operator by operator, and the comparison of it with other graphs."""
    file = ".onnx" if name in profiles_here(".onnx") else ".tflite"
    run: Run = Noisy(DEVICES["float32"]) if name == NOISY else DEVICES.get(name) or runtime(name)
    if name == TOSA:
        run = ReferenceModel(arguments.tosa)
    rows = []
    for entry in names(file) if arguments.operators is None else arguments.operators:
        if entry in names(file):
            rows += identify(run, "blind", file, [entry], arguments.codes, arguments.seed).operators
            if arguments.details:
                row = rows[-1]
                words = f"{row.hypothesis}; {len(row.rivals)} rivals; {row.codes:,} codes, {row.differing:,} differ"
                print(f"    {row.name:24} {words}; {row.seconds:.1f} s {row.reason}", flush=True)
    found = (Plain if name == TOSA else Identification)("blind", file, tuple(rows), sum(row.seconds for row in rows))
    device = declare(found.profile)
    try:
        again = {
            row.name: on_other_graphs(run, file, device, row, arguments.count, arguments.seed)
            for row in found.operators
            if row.explained
        }
    finally:
        del profile._PROFILES[device.name]
    return found, again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*profiles_here(), *profiles_here(".onnx"), *DEVICES, NOISY]
    parser.add_argument("--devices", nargs="+", default=known, choices=[*known, TOSA], metavar="DEVICE")
    parser.add_argument("--tosa", type=Path, metavar="ENVIRONMENT", help="of tosa-tools")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="declare the last device here, as the reference model"
    )
    parser.add_argument("--operators", nargs="+", choices=names(), metavar="OPERATOR")
    parser.add_argument("--codes", type=int, default=100_000, help="of each operator, at least")
    parser.add_argument("--count", type=int, default=200, help="other graphs of each operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--details", action="store_true", help="print what was found of each operator")
    arguments = parser.parse_args()
    failed = 0
    print(
        "| device | most as on | explained | unexplained | absent | codes | seconds | on other graphs: codes, differ |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in arguments.devices:
        found, again = proof(name, arguments)
        ran = [row for row in found.operators if row.hypothesis is not None]
        explained = sum(row.explained for row in ran)
        values, differing = (sum(pair[side] for pair in again.values()) for side in (0, 1))
        unexplained = ", ".join(row.name for row in found.unexplained)
        cells = [name, found.like, f"{explained} of {len(ran)}", unexplained, str(len(found.operators) - len(ran))]
        cells += [f"{found.codes:,}", f"{found.seconds:.0f}", f"{values:,}, {differing:,}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        wrong = {kind: f"{pair[1]:,} of {pair[0]:,}" for kind, pair in again.items() if pair[1]}
        for kind, words in wrong.items():
            print(f"    differs on other graphs: {kind}: {words}", flush=True)
        if arguments.write is not None:
            claimed = {kind: count for kind, count in found.as_data()["compared"].items() if kind not in wrong}
            data = {**found.as_data(), **ABOUT, "compared": claimed}
            del data["identified"], data["unexplained"]  # which are for people
            arguments.write.write_text(f"{json.dumps(data, indent=2)}\n")
        failed += bool(wrong) or (explained > 0 if name == NOISY else explained < len(ran))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
