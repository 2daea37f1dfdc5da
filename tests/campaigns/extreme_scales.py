# SPDX-License-Identifier: Apache-2.0
"""Every operator on grids of extreme scales: refused, or equal on the runtimes where that is claimed.

    python tests/campaigns/extreme_scales.py [KIND ...]

Damaged files hold such scales, and kernels make whole numbers of 32 bits of what is too large for them.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import _tests_folder  # noqa: F401
import numpy as np
from device_cases import NAMES, random_codes, random_graph

from exactqat import deploy
from exactqat.deploy import Graph
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.formats.tflite import tflite_bytes

SCALES = (1e-30, 1e-20, 1e-12, 1e-9, 1e-6, 1e3, 1e6, 1e9, 1e12, 1e20, 1e30)
DEVICES = ("xnnpack-x86", "reference", "micro")
SEEDS = 2


def files(kind: str, seed: int) -> Iterator[tuple[str, bytes]]:
    """A graph of the kind with one grid moved: of what it reads first, or of its result."""
    graph = random_graph(np.random.default_rng(seed), kind)
    stored = [name for name, array in graph.tensors.items() if array.data is None and array.dtype in ("int8", "int16")]
    for name in dict.fromkeys((stored[0], stored[-1])) if stored else ():
        for scale in SCALES:
            held = graph.tensors[name]
            grid = replace(held.quantization, scale=np.full_like(held.quantization.scale, scale))
            try:
                moved = replace(graph, tensors={**graph.tensors, name: replace(held, quantization=grid)})
                yield f"{name} {scale:g}", tflite_bytes(moved)
            except ValueError:
                yield f"{name} {scale:g}", b""


def differing(graph: Graph, content: bytes, seed: int, device: str) -> int | None:
    """Codes that differ on the runtime; None where it does not run, or equality is not claimed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.tflite"
        path.write_bytes(content)
        try:
            return deploy.verify(graph, path, random_codes(np.random.default_rng(seed), graph), device).differing
        except (ValueError, RuntimeError):
            return None


def main() -> int:
    warnings.simplefilter("ignore")
    total: Counter[str] = Counter()
    for kind in sys.argv[1:] or NAMES:
        for seed in range(SEEDS):
            for what, content in files(kind, seed):
                try:
                    graph = read_content(content).graph if content else None
                except ValueError:
                    graph = None
                if graph is None:
                    total["refused"] += 1
                    continue
                for device in DEVICES:
                    count = differing(graph, content, seed, device)
                    total["compared" if count is not None else "not run"] += 1
                    if count:
                        total["differ"] += 1
                        print(f"{kind} on {device}, {what}: {count} codes differ", flush=True)
        print(f"{kind}: {dict(total)}", flush=True)
    return int(total["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
