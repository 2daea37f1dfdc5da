# SPDX-License-Identifier: Apache-2.0
"""Writes docs/devices.md from the declarations of the device's operators and from what the sweep measured.

`python docs/device_page.py`; a test compares the page with what this gives.
"""

from __future__ import annotations

import json
from pathlib import Path

from exactqat.deploy.simulate import MEASURED
from exactqat.device import OPERATORS, PROFILES

PAGE = Path(__file__).resolve().parent / "devices.md"
HEAD = """# What the device runs

Made by `docs/device_page.py`; do not edit. One row for each operator of the device, as its declaration in
`src/exactqat/device` says it. A number is how many results of random graphs were compared with the runtime of that
profile without one difference (`python tests/sweep.py --write`); *n of m* says how many of m differed, and nothing is
claimed then; an empty field was not compared.

| profile | what computes so |
|---|---|
"""


WIDE = """
## With int16 activations

What [a rule of 16 bits](bring-your-model.md#sixteen-bits-for-what-eight-cannot-hold) asks for: int8 weights, int64
biases, zero points of 0. LiteRT's own kernels compute all of it, also where int8 would be XNNPACK's. QUANTIZE stands
for both directions between int8 and int16 as well. Operators that are not here have no int16 form in the runtimes, or
none of use.

"""

UNCHECKED = """
## Not compared

- 32-bit ARM (armhf). The last runtime for it on PyPI is `tflite-runtime` 2.14 of 2023; `ai-edge-litert` has none. Its
  kernels have not been run, so nothing is claimed; `xnnpack-arm64` does not speak for it.
- ARM64 on macOS and Windows, and hardware: ARM64 was emulated, as the processors named below.
"""


def table(dtype: str) -> list[str]:
    """One row for each operator that has activations in that dtype."""
    lines = [f"| operator | result lies on | {' | '.join(f'`{profile}`' for profile in PROFILES)} |"]
    lines.append("|---" * (2 + len(PROFILES)) + "|")
    for kind, operator in OPERATORS.items():
        if dtype not in operator.dtypes:
            continue
        fixed = operator.grid_fixed_in(dtype)
        if fixed is not None:
            scale, zero_point = fixed
            grid = f"1/{round(1 / scale)}, zero at {zero_point}"
        else:
            grid = "its operands' grid" if operator.same_quantization else "a grid of its own"
        fields = []
        for profile in PROFILES:
            name = kind if dtype == "int8" else f"{kind}:{dtype}"
            compared, differing, _ = MEASURED.get((name, profile), (0, 0, 0))
            claim = f"{compared:,}" if compared and not differing else ""
            fields.append(claim or (f"{differing:,} of {compared:,}" if compared else ""))
        lines.append(f"| {kind} | {grid} | {' | '.join(fields)} |")
    return lines


def page() -> str:
    profiles = [f"| `{profile}` | {profile.description} |" for profile in PROFILES.values()]
    lines = [*profiles, "", *table("int8"), WIDE.rstrip("\n"), "", *table("int16")]
    path = PAGE.parent.parent / "src" / "exactqat" / "device" / "measured.json"
    runtimes = sorted(set(json.loads(path.read_text()).get("runtimes", {}).values()))
    return HEAD + "\n".join(lines) + "\n" + UNCHECKED + (f"\nRuntimes: {'; '.join(runtimes)}.\n" if runtimes else "")


if __name__ == "__main__":
    PAGE.write_text(page())
