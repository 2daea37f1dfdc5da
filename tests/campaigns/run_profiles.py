# SPDX-License-Identifier: Apache-2.0
"""Trained for each device, verified on each.

    python tests/campaigns/run_profiles.py [--epochs-float 6] [--epochs-qat 4]

A job as a user starts it for each of the four devices, then `exactqat verify` on all four: a table of sixteen with the
integers of the outputs that are not training's, and the exit status. It is 0 where the file ran and everything is
equal, 1 where the device computes something else than was trained, and 2 where it would be equal but its runtime is not
on this machine (the emulation of ARM64, for one). The status of this program is 1 if a device does not compute what was
trained for it, or if any exit status is not what the figures say.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from exactqat.deploy import PROFILES, profiles_here

COMMAND = [sys.executable, "-m", "exactqat.cli"]


def run(*arguments: str) -> tuple[int, str]:
    """The exit status, and what was printed."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def verified(directory: Path, device: str) -> tuple[int, dict[str, int], bool, str]:
    """The exit status, the outputs' integers that differ by precision, whether all stored ones are equal, the text."""
    status, text = run("verify", str(directory), "--device", device, "--quiet")
    matches = re.findall(r"^(W\dA\d): .*?: (none|[\d,]+) of [\d,]+ integers of the outputs", text, re.M)
    differing = {network: 0 if count == "none" else int(count.replace(",", "")) for network, count in matches}
    return status, differing, "something other than was trained" not in text, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs-float", default="6")
    parser.add_argument("--epochs-qat", default="4")
    parser.add_argument("--out", type=Path, help="where the jobs go, and stay; else they are removed")
    arguments = parser.parse_args()
    console = Console(width=180)
    table = Table("trained for", *(f"on {device}" for device in PROFILES), title="not training's; exit status")
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        for trained in PROFILES:
            out = (arguments.out or Path(scratch)) / trained
            epochs = ["--epochs-float", arguments.epochs_float, "--epochs-qat", arguments.epochs_qat]
            status, text = run("train", "--out", str(out), "--device", trained, "--quiet", "--resume", *epochs)
            if status:
                console.print(text)
                wrong.append(f"training for {trained} ended with {status}")
                continue
            cells = []
            for device in PROFILES:
                status, differing, equal, text = verified(out, device)
                figures = ", ".join(f"{network} {count:,}" for network, count in differing.items())
                cells.append(f"{figures or text.strip()}; {status}")
                expected = 1 if not equal else 0 if device in profiles_here() else 2
                if status != expected or len(differing) != len(list(out.glob("w*"))):
                    wrong.append(f"trained for {trained}, on {device}: status {status}, expected {expected}: {text}")
                if device == trained and not equal:
                    wrong.append(f"{trained} does not compute what was trained for it")
            table.add_row(trained, *cells)
    console.print(table)
    console.print(f"runtimes on this machine: {', '.join(profiles_here())}")
    for sentence in wrong:
        console.print(sentence)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
