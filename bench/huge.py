# SPDX-License-Identifier: Apache-2.0
"""One tensor with more elements than 32 bits can count, in float32 and in place: one buffer of 8.6 GB is enough.

The yardstick is a copy of its first half into its second. The first results are compared with the reference where the
count crosses 2**31, and at both ends.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from operations import make as make_array
from operations import values

ELEMENTS = 2**31 + 2**21
PIECE = 2**20  # the tensor repeats it; half the elements are a whole number of pieces
REPEATS = 3


def _available() -> int:
    """Bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def measure(threads: int, elements: int = ELEMENTS) -> dict[str, Any]:
    """Seconds of the copy, of fake quantization and of its gradient, in place.

    Raises:
        MemoryError: the machine has less memory left than the buffers take.
        RuntimeError: the result differs from the reference.
    """
    import torch

    import exactqat as eq
    from exactqat.operators import reference

    needed = 4 * elements + 2**29
    if _available() < needed:
        raise MemoryError(f"--huge needs {needed / 1e9:.1f} GB, and {_available() / 1e9:.1f} GB are available")
    before = torch.get_num_threads(), eq.get_num_threads()
    torch.set_num_threads(threads)
    eq.set_num_threads(threads)
    low, high = np.array(-1.5, np.float32), np.array(2.0, np.float32)
    piece = make_array(values((PIECE,), 1))
    x = np.empty(elements, np.float32)
    for start in range(0, elements, PIECE):
        x[start : start + PIECE] = piece
    sums = np.empty((), np.float32), np.empty((), np.float32)
    half = torch.from_numpy(x[: elements // 2]), torch.from_numpy(x[elements // 2 :])
    forward, gradient = eq.fake_quant_with_min_max_vars, eq.fake_quant_with_min_max_vars_gradient
    # By name: bytes moved for each element, and the call.
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (4, lambda: half[1].copy_(half[0])),
        "FakeQuantWithMinMaxVars, in place": (8, lambda: forward(x, low, high, out=x)),
        "FakeQuantWithMinMaxVarsGradient, of itself, in place": (8, lambda: gradient(x, x, low, high, out=(x, *sums))),
    }
    try:
        wanted = piece
        for name, operands in (
            ("FakeQuantWithMinMaxVars", ["inputs"]),
            ("FakeQuantWithMinMaxVarsGradient", ["gradients", "inputs"]),
        ):
            result = reference.call(name, {**dict.fromkeys(operands, wanted), "min": low, "max": high}, {})
            wanted = result[0] if isinstance(result, tuple) else result
            next(call for label, (_, call) in calls.items() if label.startswith(f"{name},"))()
            # Pieces at the start, about 2**31 elements, and at the end.
            for number in {0, (2**31 - 1) // PIECE, 2**31 // PIECE, elements // PIECE - 1}:
                part = x[number * PIECE : (number + 1) * PIECE]
                if part.size and not np.array_equal(part.view(np.uint32), wanted.view(np.uint32)):
                    raise RuntimeError(f"{name} of {elements} elements differs from the reference in piece {number}")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(REPEATS):
            for name, (_, call) in calls.items():
                begun = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begun)
                time.sleep(0.02)
    finally:
        torch.set_num_threads(before[0])
        eq.set_num_threads(before[1])
    rows = {
        name: {"seconds": times[name], "gigabytes_per_second": bytes * elements / statistics.median(times[name]) / 1e9}
        for name, (bytes, _) in calls.items()
    }
    lines = [f"{elements:,} elements of float32, {threads} threads, medians of {REPEATS}:"]
    lines += [
        f"  {name}: {statistics.median(row['seconds']):.2f} s, {row['gigabytes_per_second']:.1f} GB/s, "
        f"{row['gigabytes_per_second'] / rows['copy']['gigabytes_per_second']:.0%} of the copy"
        for name, row in rows.items()
    ]
    return {"elements": elements, "dtype": "float32", "threads": threads, "rows": rows, "lines": lines}
