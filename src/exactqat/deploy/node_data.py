# SPDX-License-Identifier: Apache-2.0
"""What `inspect` found as node data for Model Explorer, which draws it into the picture of the file's network.

Model Explorer (https://github.com/google-ai-edge/model-explorer) finds operators by the names of their results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .formats.tflite import write_whole
from .inspect import Inspection

_AGREE = "no difference begins here"
# From the worst to the best layer.
_GRADIENT = [{"stop": 0, "bgColor": "#d73027"}, {"stop": 0.5, "bgColor": "#fee08b"}, {"stop": 1, "bgColor": "#1a9850"}]


def node_data(inspection: Inspection) -> dict[str, dict[str, Any]]:
    """For each kind of finding, by a word, the content of a file that Model Explorer reads: "devices" says at which
    layer two devices begin to differ, "runtimes" how many integers of runtimes differ from their simulation, and
    "decibels", if a float network was given, how much of each layer's signal is left."""
    differing: dict[str, list[str]] = {}
    for pair in inspection.disagreements:
        differing.setdefault(pair.layer, []).append(
            f"{' and '.join(pair.profiles)} differ in {pair.differing:,} of {pair.values:,} codes"
        )
    devices = {
        layer.result: {"value": "; ".join(differing[layer.result]), "bgColor": "#fdae61"}
        if layer.result in differing
        else {"value": _AGREE}
        for layer in inspection.layers
    }
    counts: dict[str, int] = {}
    for device in inspection.devices:
        for row in device.operators:
            counts[row.name] = counts.get(row.name, 0) + row.differing
    runtimes = {name: {"value": count, **({"bgColor": "#d73027"} if count else {})} for name, count in counts.items()}
    series = {
        "devices": _series("Devices that begin to differ here", devices),
        "runtimes": _series("Integers of runtimes that differ from the simulation", runtimes),
    }
    left = {row.result: {"value": round(row.cumulative, 2)} for row in inspection.beside_float
            if row.cumulative is not None}  # fmt: skip
    if left:
        series["decibels"] = _series("Signal to noise up to here (dB)", left) | {"gradient": _GRADIENT}
    return series


def write_node_data(inspection: Inspection, path: str | os.PathLike[str]) -> list[Path]:
    """Writes each kind of finding to a file of its own, ``<path without suffix>-<kind>.json``; returns these."""
    path = Path(path)
    return [
        write_whole(path.with_name(f"{path.stem}-{kind}.json"), json.dumps(content, indent=2).encode())
        for kind, content in node_data(inspection).items()
    ]


def _series(name: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {"results": dict(results), "name": name}
