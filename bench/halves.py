# SPDX-License-Identifier: Apache-2.0
"""Tensors of 16 bits beyond the caches: every operation beside a copy of as many bytes, results preallocated.

    python bench/halves.py [--threads 1] [--mib 64]

Few others compute these operators in 16 bits, and none gives the same bits, so the copy is all they are raced with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path += [entry for entry in (str(HERE), str(HERE.parent / "tests")) if entry not in sys.path]

import timing  # noqa: E402
from operations import OPERATIONS, Operation, lowered, make  # noqa: E402

SIDE, CHANNELS = 56, 64
MIB = 64  # of the image
GOAL = 0.8  # of the copy's rate, for operations that do the same to every element
DTYPES = ("bfloat16", "float16")
ELEMENTWISE = ("whole tensor", "per channel")


def _calls(operation: Operation, data_format: str, images: int, dtype: np.dtype) -> tuple[Callable[[], Any], int]:
    """The call, and the bytes of its operands and results."""
    import exactqat as eq

    layer = SimpleNamespace(size=(SIDE, SIDE, CHANNELS), kernel=(3, 3), stride=1)
    operands, attributes = operation.call(layer, images, data_format)
    arrays = {name: make(description) for name, description in operands.items()}
    arrays = {name: array.astype(dtype) if array.ndim == 4 else array for name, array in arrays.items()}
    _, plan = lowered(operation.raw, operands, attributes)
    wide = np.dtype(np.float32)
    out = tuple(np.ones(spec.shape, dtype if len(spec.shape) == 4 and spec.size > 9 * CHANNELS else wide)
                for spec in plan.results)  # fmt: skip
    if operation.key == "depthwise_filter":
        out = (np.ones(plan.results[0].shape, dtype),)
    call = partial(getattr(eq.raw_ops, operation.raw), **arrays, **attributes, out=out if len(out) > 1 else out[0])
    return call, sum(array.nbytes for array in (*arrays.values(), *out))


def measure(threads: int, mib: int = MIB, turns: int = timing.TURNS) -> dict[str, Any]:
    """Seconds of each operation, layout and dtype, and the part of the copy's rate that this is."""
    import ml_dtypes
    import torch

    import exactqat as eq

    before = torch.get_num_threads(), eq.get_num_threads()
    torch.set_num_threads(threads)
    eq.set_num_threads(threads)
    images = max(1, (mib << 20) // (2 * SIDE * SIDE * CHANNELS))
    rows = []
    try:
        for operation in OPERATIONS:
            for data_format in operation.formats:
                for name in DTYPES:
                    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
                    call, moved = _calls(operation, data_format, images, dtype)
                    source, target = torch.ones(moved // 8), torch.ones(moved // 8)
                    contestants = {"kernel": call, "copy": partial(target.copy_, source)}
                    pair = {who: partial(timing.turn, function) for who, function in contestants.items()}
                    (results,) = timing.race([(pair, 0.0)], turns)
                    rows.append(
                        {
                            "operation": operation.key,
                            "format": data_format,
                            "dtype": name,
                            "bytes": moved,
                            "seconds": results["kernel"].median,
                            "of_copy": results["copy"].median / results["kernel"].median,
                            "goal": GOAL if operation.group in ELEMENTWISE else None,
                        }
                    )
    finally:
        torch.set_num_threads(before[0])
        eq.set_num_threads(before[1])
    lines = [f"16-bit tensors of {mib} MiB, {threads} threads: of the rate of a copy"]
    for operation in OPERATIONS:
        among = [row for row in rows if row["operation"] == operation.key]
        cells = [f"{' '.join(filter(None, (row['dtype'], row['format'])))} {row['of_copy']:.0%}" for row in among]
        goal = among[0]["goal"]
        met = (
            ""
            if goal is None
            else f" (goal {goal:.0%}: {'met' if min(r['of_copy'] for r in among) >= goal else 'missed'})"
        )
        lines.append(f"  {operation.title}: {', '.join(cells)}{met}")
    return {"threads": threads, "mib": mib, "rows": rows, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mib", type=int, default=MIB)
    options = parser.parse_args()
    print("\n".join(measure(options.threads, options.mib)["lines"]))


if __name__ == "__main__":
    main()
