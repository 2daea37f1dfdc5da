# SPDX-License-Identifier: Apache-2.0
"""Sweeps every operator against several released versions of each runtime, and writes docs/runtime-versions.md.

    python tests/campaigns/run_versions.py --count 4 --write

Each version is installed from PyPI into a folder of its own under build/versions, which comes first on the path of the
processes that use it; everything else is this environment's. Counts are kept there too, so that a campaign can be
continued; remove the folder to compare again. The graphs are the first ones of `sweep.py`, the
same for every version. A runtime that crashes on a graph ends its process only: its operator is marked, the others are
still compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import _tests_folder  # noqa: F401
from device_cases import NAMES
from sweep import sweep

from exactqat.deploy.runtimes import micro
from exactqat.kit.device import OPERATORS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "runtime-versions.md"

# The oldest and the newest release that installs for Python 3.11, and some between; newest last.
VERSIONS = {
    "ai-edge-litert": ("2.0.2", "2.1.0", "2.1.3", "2.1.6", "2.2.0", "2.3.0"),
    "tflite-micro": ("0.dev20260930204519", "0.dev20261017155528", "0.dev20261023182759"),
    "onnxruntime": ("1.20.0", "1.24.4", "1.27.0", "1.31.1", "1.32.0"),
}
PROFILES = {
    "ai-edge-litert": ("xnnpack-x86", "reference"),
    "tflite-micro": ("micro",),
    "onnxruntime": ("onnxruntime-x86",),
}
MODULES = {"ai-edge-litert": "ai_edge_litert", "tflite-micro": "tflite_micro", "onnxruntime": "onnxruntime"}


@dataclass(frozen=True)
class Row:
    """What one version computed for one operator: see `sweep.Outcome`. crashed: its process died."""

    kind: str
    profile: str
    values: int = 0
    differing: int = 0
    largest: int = 0
    graphs: int = 0
    refused: int = 0
    crashed: bool = False

    def cell(self) -> str:
        if self.crashed:
            return "crashes"
        if not self.values:
            return "refused"
        differing = f"**{self.differing:,}**" if self.differing else "0"
        return differing + (f" ({self.refused} refused)" if self.refused else "")


def installed(name: str, version: str) -> Path:
    """The folder with that version; installed if it is not there."""
    folder = FOLDER / f"{name}-{version}"
    if not (folder / MODULES[name]).exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--only-binary", ":all:", "--target", str(folder), f"{name}=={version}"], check=True)
    return folder


def compare_here(profile: str, kinds: Sequence[str], count: int) -> None:
    """Prints a row of JSON for each operator, computed by the runtime that this process imports."""
    # It asks another process why TFLite-Micro refuses a graph; here it only counts that it does.
    micro.try_in_a_child = lambda *arguments, **options: ""
    for kind in kinds:
        print(json.dumps({"begins": kind}), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            outcome = sweep(kind, profile, count, Path(folder))
        counts = (outcome.values, outcome.differing, outcome.largest, outcome.graphs, outcome.refused)
        print(json.dumps(asdict(Row(kind, profile, *map(int, counts)))), flush=True)


def compare(folder: Path, profile: str, count: int) -> Iterator[Row]:
    """One row for each operator that the profile has, by processes that import the runtime from `folder`.

    Raises:
        RuntimeError: a process failed before its first operator, such as for a runtime that cannot be imported.
    """
    # onnxruntime computes 16 bits in float: no integers to compare.
    left = [name for name in NAMES if profile != "onnxruntime-x86" or not name.endswith(":int16")]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    while left:
        command = [sys.executable, __file__, "--here", profile, "--count", str(count), "--kinds", *left]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        begun = None
        for line in done.stdout.splitlines():
            content = json.loads(line)
            begun = content.get("begins")
            if begun is None:
                yield Row(**content)
                left.remove(content["kind"])
        if done.returncode == 0:
            return
        if begun is None or done.returncode > 0:
            raise RuntimeError(f"{folder.name}, {profile}, {begun}: {done.stderr[-2000:]}")
        yield Row(begun, profile, crashed=True)
        left.remove(begun)


def table(by_version: Mapping[str, Sequence[Row]]) -> list[str]:
    """Operators by versions. Operators that no version takes are left out."""
    cells = {version: {row.kind: row for row in rows} for version, rows in by_version.items()}
    values = {kind: max(row.get(kind, Row(kind, "")).values for row in cells.values()) for kind in NAMES}
    lines = [f"| operator | compared | {' | '.join(by_version)} |", "|---" * (2 + len(by_version)) + "|"]
    for kind in NAMES:
        if values[kind] or any(rows[kind].crashed for rows in cells.values() if kind in rows):
            fields = [rows[kind].cell() if kind in rows else "" for rows in cells.values()]
            lines.append(f"| {kind} | {values[kind]:,} | {' | '.join(fields)} |")
    return lines


def sentence(by_version: Mapping[str, Sequence[Row]]) -> str:
    """Which versions agree with the simulation in everything."""
    differing = {
        version: [row.kind for row in rows if row.differing or row.crashed] for version, rows in by_version.items()
    }
    agree = [version for version, kinds in differing.items() if not kinds]
    parts = [f"No differences: {', '.join(agree)}." if agree else "No version is without differences."]
    parts += [f"{version} differs or crashes in {', '.join(names)}." for version, names in differing.items() if names]
    return " ".join(parts)


TITLES = {
    "xnnpack-x86": "`ai-edge-litert`, default kernels (`xnnpack-x86`)",
    "reference": "`ai-edge-litert`, reference kernels (`reference`)",
    "micro": "`tflite-micro` (`micro`)",
    "onnxruntime-x86": "`onnxruntime` (`onnxruntime-x86`)",
}
NOTES = {
    "xnnpack-x86": "2.1.3's BATCH_MATMUL differs from run to run. `full_range` are weights of -128.",
    "micro": "Earlier releases could not be compared: 0.dev20251002174034 and 0.dev20260203175027 import TensorFlow, "
    "and the wheels of 0.dev20260811145345 and 0.dev20260901203916 for Python 3.11 lack symbols of that Python.",
    "onnxruntime-x86": "SUM, TRANSPOSE_CONV and LOG_SOFTMAX are not claimed.",
}


def page(results: Mapping[str, Mapping[str, Sequence[Row]]], count: int) -> str:
    """docs/runtime-versions.md. results: rows by profile and version."""
    lines = [
        "<!-- Generated by `make versions`; do not edit. -->",
        "# Runtime versions",
        "",
        "Check here which released runtime versions compute the integers of exactqat's simulation, before an update.",
        "",
        f"**The sample is small**: {count} random graphs for each operator, dtype and device, the same for every",
        f"version, on {platform.machine()}. Each number counts the results that differ from the simulation. *Compared*",
        "is the largest number of results over the versions; *n refused* counts the graphs that the version does not",
        "run. [Operators by device](devices.md) has the full sweep of the tested versions,",
        "`tests/campaigns/run_versions.py --count N` a larger sample of this page. A zero does not prove equality: 20",
        "graphs found 1,584 mismatches in the reference kernels of 2.0.2, where 4 and 8 graphs find none.",
        "",
        "The extras `deploy` and `micro` require the oldest release without a mismatch in claimed operators, here and",
        "in later releases: `ai-edge-litert` 2.2 and `tflite-micro` 0.dev20261017. onnxruntime has no such floor:",
        "every version below agrees in 8 bits, and in 16 it computes in float.",
    ]
    for profile, by_version in results.items():
        lines += ["", f"## {TITLES[profile]}", ""]
        lines += [*textwrap.wrap(f"{sentence(by_version)} {NOTES.get(profile, '')}", 119), "", *table(by_version)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4, help="graphs of each operator and profile")
    parser.add_argument("--runtimes", nargs="+", default=list(VERSIONS), choices=list(VERSIONS))
    parser.add_argument("--write", action="store_true", help="write docs/runtime-versions.md")
    parser.add_argument("--here", choices=list(TITLES), help=argparse.SUPPRESS)
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=list(NAMES),
        choices=[*dict.fromkeys((*NAMES, *OPERATORS))],
        help=argparse.SUPPRESS,
    )
    arguments = parser.parse_args()
    if arguments.here:
        compare_here(arguments.here, arguments.kinds, arguments.count)
        return 0
    if arguments.write and arguments.runtimes != list(VERSIONS):
        parser.error("--write needs all runtimes")
    results: dict[str, dict[str, list[Row]]] = {}
    for name in arguments.runtimes:
        for version in VERSIONS[name]:
            folder = installed(name, version)
            for profile in PROFILES[name]:
                kept = folder / f"{profile}-{arguments.count}.json"
                if kept.exists():
                    rows = [Row(**content) for content in json.loads(kept.read_text())]
                else:
                    rows = list(compare(folder, profile, arguments.count))
                    kept.write_text(json.dumps([asdict(row) for row in rows]))
                results.setdefault(profile, {})[version] = rows
                differing, values = sum(row.differing for row in rows), sum(row.values for row in rows)
                crashed = [row.kind for row in rows if row.crashed]
                ends = f"; crashes: {', '.join(crashed)}" if crashed else ""
                print(f"{name} {version} {profile}: {values:,} compared, {differing:,} differ{ends}", flush=True)
    if arguments.write:
        PAGE.write_text(page(results, arguments.count), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
