# SPDX-License-Identifier: Apache-2.0
"""One tensor with more elements than 32 bits can count, in float16 and in place, so that it fits an ordinary machine.

Two buffers of 4.3 GB: the copy between them is the yardstick. The first result is compared with the reference where the
count crosses 2**31, and at both ends.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from operations import values
from operations import make as make_array

ELEMENTS = 2**31 + 2**21
PIECE = 2**20  # the tensor repeats it
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
    from exactqat import reference

    needed = 2 * 2 * elements + 2**28
    if _available() < needed:
        raise MemoryError(f"--huge needs {needed / 1e9:.1f} GB, and {_available() / 1e9:.1f} GB are available")
    before = torch.get_num_threads(), eq.get_num_threads()
    torch.set_num_threads(threads)
    eq.set_num_threads(threads)
    low, high = np.float32(-1.5), np.float32(2.0)
    piece = make_array(values((PIECE,), 1)).astype(np.float16)
    x, g = np.resize(piece, elements), np.ones(elements, np.float16)
    sums = np.empty((), np.float32), np.empty((), np.float32)
    # As integers: halves would be copied by way of float32.
    source, target = (torch.from_numpy(array.view(np.int16)) for array in (x, g))
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (4, lambda: target.copy_(source)),
        "FakeQuantWithMinMaxVars, in place": (4, lambda: eq.fake_quant_with_min_max_vars(x, low, high, out=x)),
        "FakeQuantWithMinMaxVarsGradient, in place": (
            6,
            lambda: eq.fake_quant_with_min_max_vars_gradient(g, x, low, high, out=(g, *sums)),
        ),
    }
    try:
        calls["FakeQuantWithMinMaxVars, in place"][1]()
        wanted = reference.call(
            "FakeQuantWithMinMaxVars", {"inputs": piece, "min": np.array(low), "max": np.array(high)}, {}
        )
        for start in (0, elements // 2 // PIECE * PIECE, (elements - 1) // PIECE * PIECE):
            found = x[start : start + PIECE]
            if not np.array_equal(found.view(np.uint16), wanted[: found.size].view(np.uint16)):
                raise RuntimeError(f"fake quantization of {elements} elements differs from the reference after {start}")
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
    lines = [f"{elements:,} elements of float16, {threads} threads, medians of {REPEATS}:"]
    lines += [
        f"  {name}: {statistics.median(row['seconds']):.2f} s, {row['gigabytes_per_second']:.1f} GB/s, "
        f"{row['gigabytes_per_second'] / rows['copy']['gigabytes_per_second']:.0%} of the copy"
        for name, row in rows.items()
    ]
    return {"elements": elements, "dtype": "float16", "threads": threads, "rows": rows, "lines": lines}
