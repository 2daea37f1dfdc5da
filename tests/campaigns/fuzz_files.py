# SPDX-License-Identifier: Apache-2.0
"""Damaged .tflite files through `read_tflite`, and some of them through `inspect`: refused in a sentence, or read.

    python tests/campaigns/fuzz_files.py --cases 20000 --inspected 100 [--seed 1]

Files of random graphs and those in tests/goldens/files lose bits, bytes and ends; offsets and sizes are swapped, and
become huge or negative. Whatever is not a `Refusal` (or of `inspect` a RuntimeError with a reason), takes longer than
`SLOW` seconds of this process or more than `LARGE` bytes is reported, with the file that did it.
"""

from __future__ import annotations

import argparse
import functools
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import _tests_folder
import numpy as np
from device_cases import NAMES, random_graph

from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.inspect import inspect
from exactqat.device import Refusal

# Seconds to read a file, and bytes for each byte of it and beside them.
SLOW, LARGE = 5.0, (200, 64 << 20)
GOLDENS = Path(_tests_folder.FOLDER) / "goldens" / "files"
WORDS = (0, 1, 2, 3, 8, 127, 128, 255, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4)


# What may become of an inspection.
FINE = ("refused", "nothing compared", "inspected, equal")


def sound_files(rng: np.random.Generator, count: int) -> list[bytes]:
    """Files of ours and of others."""
    names = [name for name in NAMES if ":int16" not in name]
    own = [tflite_bytes(random_graph(rng, str(name))) for name in rng.choice(names, count)]
    return [path.read_bytes() for path in sorted(GOLDENS.glob("*.tflite"))] + own


def damaged(rng: np.random.Generator, content: bytes) -> bytes:
    """The file with one to four kinds of damage."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        size = len(data)
        place = int(rng.integers(size // 4)) * 4
        match int(rng.integers(8)):
            case 0:  # bits
                for at in rng.integers(0, size, rng.integers(1, 9)):
                    data[at] ^= 1 << int(rng.integers(8))
            case 1:  # the end
                del data[int(rng.integers(size)) :]
            case 2 | 3:  # an offset, a size or a number
                struct.pack_into("<I", data, place, int(rng.choice(WORDS)))
            case 4:  # a small step
                (word,) = struct.unpack_from("<I", data, place)
                struct.pack_into("<I", data, place, (word + int(rng.integers(-64, 65))) % 2**32)
            case 5:  # swapped
                other = int(rng.integers(size // 4)) * 4
                data[place : place + 4], data[other : other + 4] = data[other : other + 4], data[place : place + 4]
            case 6:  # a stretch of another place
                length, other = int(rng.integers(1, 64)), int(rng.integers(size))
                data[place : place + length] = data[other : other + length]
            case 7:  # bytes that are missing, or too many
                if rng.integers(2):
                    del data[place : place + int(rng.integers(1, 16))]
                else:
                    data[place:place] = rng.integers(0, 256, int(rng.integers(1, 16)), np.uint8).tobytes()
        if len(data) < 8:
            break
    return bytes(data)


def cases(seed: int, count: int) -> Iterator[bytes]:
    """Damaged files, the same ones for a seed."""
    rng = np.random.default_rng(seed)
    files = sound_files(rng, 40)
    for _ in range(count):
        yield damaged(rng, files[int(rng.integers(len(files)))])


def read(content: bytes) -> str:
    """What became of a file: "read", "refused", or what should not be.

    Raises whatever is not a refusal.
    """
    tracemalloc.start()
    start = time.process_time()
    try:
        read_content(content)
        outcome = "read"
    except Refusal as refusal:
        outcome = "refused" if str(refusal) and "\n" not in str(refusal) else "refused without a sentence"
    seconds, (_, bytes_used) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if seconds > SLOW:
        return f"took {seconds:.0f} s"
    return outcome if bytes_used < LARGE[0] * len(content) + LARGE[1] else f"took {bytes_used:,} bytes"


def inspected(content: bytes, folder: Path, seconds: float) -> str:
    """Likewise, through all that `inspect` runs."""
    path = folder / "damaged.tflite"
    path.write_bytes(content)
    try:
        found = inspect(path, examples=1, seconds=seconds)
    except Refusal:
        return "refused"
    except RuntimeError as error:
        return f"not simulated: {error}"
    found.text()
    found.as_json()
    if not found.ran_on:
        return "nothing compared"
    return "inspected, equal" if found.equal else "inspected, differs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--inspected", type=int, default=100, help="of those that are read, how many are inspected")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each process of an inspection")
    parser.add_argument("--keep", type=Path, help="folder for the files that did what they should not")
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    inspections: Counter[str] = Counter()
    bad = 0

    def look(what: str, number: int, content: bytes, do: Callable[[], str], fine: Sequence[str]) -> str:
        """What became of a case, which is reported and kept if it is none of these."""
        nonlocal bad
        start = time.perf_counter()
        try:
            outcome = do()
        except Exception:  # noqa: BLE001 - what the campaign looks for
            outcome = f"traceback: {traceback.format_exc().splitlines()[-1]}"
            traceback.print_exc()
        if outcome not in fine:
            bad += what == "read" or outcome.startswith("traceback")
            print(f"case {number}, {what}: {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
            if arguments.keep is not None:
                (arguments.keep / f"{what}_{arguments.seed}_{number}.tflite").write_bytes(content)
        return outcome

    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(cases(arguments.seed, arguments.cases)):
            outcome = look("read", number, content, functools.partial(read, content), ("read", "refused"))
            outcomes[outcome] += 1
            if outcome == "read" and inspections.total() < arguments.inspected:
                run = functools.partial(inspected, content, Path(folder), arguments.seconds)
                inspections[look("inspected", number, content, run, FINE)] += 1
            if (number + 1) % 200 == 0 or number + 1 == arguments.cases:
                print(f"{number + 1} cases: {dict(outcomes)}; inspected: {dict(inspections)}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
