# SPDX-License-Identifier: Apache-2.0
"""Instructions that ARM64 kernels execute for each element, with `_neon` and with `_baseline`.

    python bench/instructions.py [--folder build/arm64]

Under emulation nothing can be timed, but every executed instruction can be counted: the emulator writes a line for
each. A program without Python runs a kernel once on `rows` x 64 float32; what twice as many rows take more, divided by
the elements that these are, is the number printed. Needs what `tests/campaigns/run_arm64.py` has built in the folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from exactqat.deploy.runtimes import emulation

ROOT = Path(__file__).resolve().parent.parent
KERNELS = (
    "fake_quant_with_min_max_vars",
    "fake_quant_with_min_max_vars_per_channel",
    "fake_quant_with_min_max_vars_gradient",
    "fake_quant_with_min_max_vars_per_channel_gradient",
    "fused_batch_norm",
    "fused_batch_norm_grad",
    "depthwise_conv2d_native",
    "depthwise_conv2d_native_backprop_input",
    "depthwise_conv2d_native_backprop_filter",
)
ROWS, CHANNELS = 128, 64


def program(folder: Path, isa: str) -> Path:
    """The kernels' objects and a main function, linked."""
    built = [folder / "cmake" / "CMakeFiles" / f"{part}.dir" for part in (f"_{isa}", "any_processor")]
    objects = sorted(path for part in built for path in (part / "src" / "exactqat" / "operators" / "cpu").glob("*.o"))
    of_kernels = [str(path) for path in objects if path.name.split(".")[0] not in ("bind", "xla")]
    if not of_kernels:
        sys.exit(f"{folder} holds no built kernels: python tests/campaigns/run_arm64.py --isa {isa} builds them")
    target = folder / f"instructions-{isa}"
    source = ROOT / "bench" / "instructions.cpp"
    command = ["aarch64-linux-gnu-g++", "-std=c++20", "-O1", "-static", f"-I{ROOT / 'src' / 'exactqat' / 'cpu'}"]
    subprocess.run([*command, str(source), *of_kernels, "-o", str(target)], check=True, stderr=subprocess.DEVNULL)
    return target


def executed(path: Path, *arguments: str) -> int:
    """How many instructions a run of the program takes."""
    with tempfile.NamedTemporaryFile() as log:
        command = [emulation.versions()["emulator"], "-one-insn-per-tb", "-d", "exec,nochain", "-D", log.name]
        environment = {"EXACTQAT_NUM_THREADS": "1", "QEMU_CPU": "cortex-a53"}
        subprocess.run([*command, str(path), *arguments], check=True, env=environment)
        with open(log.name, "rb") as lines:
            return sum(block.count(b"\n") for block in iter(lambda: lines.read(1 << 20), b""))


def of_kernel(path: Path, kernel: str, rows: int) -> int:
    """Instructions of the kernel alone."""
    return executed(path, kernel, str(rows), "1") - executed(path, kernel, str(rows), "0")


def main() -> None:
    parser = argparse.ArgumentParser(description="Instructions for each element, counted under emulation.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "arm64", help="where run_arm64.py builds")
    folder = parser.parse_args().folder.resolve()
    paths = [program(folder, isa) for isa in ("neon", "baseline")]
    print("| kernel | `_neon` | `_baseline` |\n|---|---|---|")
    for kernel in KERNELS:
        more = [of_kernel(path, kernel, 2 * ROWS) - of_kernel(path, kernel, ROWS) for path in paths]
        print(f"| `{kernel}` | {' | '.join(f'{count / (ROWS * CHANNELS):.1f}' for count in more)} |", flush=True)


if __name__ == "__main__":
    main()
