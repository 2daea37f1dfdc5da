# SPDX-License-Identifier: Apache-2.0
"""Inspects every .tflite file of some folders: files, integers, differing, by runtime, and what is refused and why.

    python tests/campaigns/run_files.py FOLDER ... [--examples 4] [--fork]
    python tests/campaigns/run_files.py FOLDER ... --read          what is refused and why, in seconds

The last table counts reasons, names and numbers left out, so that two versions can be compared line by line.

`python tests/campaigns/record_files.py --all FOLDER` makes such files with TensorFlow's converter.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from pathlib import Path

import _tests_folder  # noqa: F401
from fuzz_files import prepare_to_fork

from exactqat.deploy.formats.read_tflite import UnsupportedFile
from exactqat.deploy.inspect import inspect, read_file


def reasons_of(error: Exception) -> list[str]:
    """Why a file was refused, without its own names and numbers."""
    said = [*error.reasons] if isinstance(error, UnsupportedFile) else [str(error).split("cannot be read: ")[-1]]
    return [re.sub(r"'[^']*'|\([\d, ]*\)|\[[\d, -]*\]|(?<![\w.])-?\d[\d.,]*", "…", reason) for reason in said]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--examples", type=int, default=4)
    parser.add_argument("--fork", action="store_true", help="fork the processes of runtimes, which is much faster")
    parser.add_argument("--read", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if arguments.fork:
        prepare_to_fork()
    ran: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    read = refused = 0
    paths = sorted(path for folder in arguments.folders for path in folder.glob("*.tflite"))
    for path in paths:
        start = time.perf_counter()
        try:
            if arguments.read:
                read_file(path)
                read += 1
                continue
            inspection = inspect(path, examples=arguments.examples)
        except (ValueError, RuntimeError) as error:
            refused += 1
            reasons.update({*reasons_of(error)})
            print(f"{path.name}: refused: {error}", flush=True)
            continue
        read += 1
        words = []
        for device in inspection.devices:
            counts = ran.setdefault(device.profile, Counter())
            counts["files"] += bool(device.values)
            counts["not run"] += not device.values
            counts["compared"] += device.values
            counts["differing"] += device.differing
            counts["differing as claimed"] += device.differing_as_claimed
            words.append(f"{device.profile} {device.differing:,} of {device.values:,}")
        print(f"{path.name}: {'; '.join(words)} ({time.perf_counter() - start:.1f} s)", flush=True)
        for device in inspection.devices:
            if device.not_run and "not on this machine" not in device.not_run:
                print(f"    {device.profile}: {device.not_run}", flush=True)
            for row in (*device.operators, *device.outputs):
                if row.differing:
                    print(f"    {device.profile}: {row}", flush=True)
    print(f"{len(paths)} files, {read} read, {refused} refused")
    for profile, counts in ran.items():
        print(f"{profile}: {dict(counts)}")
    for reason, count in reasons.most_common():
        print(f"refused {count:3}: {reason}")
    return int(any(counts["differing as claimed"] for counts in ran.values()))


if __name__ == "__main__":
    sys.exit(main())
