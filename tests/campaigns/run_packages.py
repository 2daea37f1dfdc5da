# SPDX-License-Identifier: Apache-2.0
"""Networks of public packages end to end, each in a process of its own, as they are or with a user's line of help.

    python tests/campaigns/run_packages.py              all networks of packages.py and of packages_jax.py,
                                                        packages_keras.py
    python tests/campaigns/run_packages.py --write      also writes docs/packages.md
    python tests/campaigns/run_packages.py yolo11 Bert  those with one of these words in their name
    python tests/campaigns/run_packages.py --one NAME   one network here; prints its row as JSON

`make packages` installs the packages into an environment of their own. What is done with each network says run_zoo.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packages
import torch
from run_zoo import end_to_end

SECONDS = 300
# Of `prepare`, processor time; beyond it, the table names the network.
PREPARING = 30
PAGE = Path(__file__).resolve().parents[2] / "docs" / "packages.md"
# Where a file of a package is on this machine.
_PLACE = re.compile(r"/\S*/site(?:-packages)?/|/\S*/(?=torchaudio/)")
# Packages of other frameworks than PyTorch, and the file that lists their networks.
LIBRARIES = {**dict.fromkeys(("flax", "equinox", "haiku"), "packages_jax"), "keras_hub": "packages_keras"}


def one(name: str) -> dict[str, Any]:
    """What becomes of a network as it is, and of the helped one if that is refused."""
    start = time.monotonic()
    word = name.partition(" ")[0]
    if word in LIBRARIES:
        library = importlib.import_module(LIBRARIES[word])
        row = tried("as it is", lambda folder: library.end_to_end(library.networks()[name](), folder))
        return {"name": name, **row, "seconds": round(time.monotonic() - start)}
    entry = packages.networks()[name]
    row = of_torch("as it is", entry.build)
    if row["outcome"] == "refused" and (help_ := entry.helped) is not None:
        helped = of_torch("with help", lambda: help_(*entry.build()))
        row = {**helped, "help": entry.help, "refusal": row["reason"]} if "values" in helped else row
    return {"name": name, **row, "seconds": round(time.monotonic() - start)}


def of_torch(outcome: str, build: Callable[[], packages.Built]) -> dict[str, Any]:
    torch.manual_seed(0)
    model, examples = build()
    return tried(outcome, lambda folder: end_to_end(model, examples, folder, training=model.training))


def tried(outcome: str, run: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    from exactqat.qat import UnsupportedOperator

    with tempfile.TemporaryDirectory() as folder:
        try:
            return {"outcome": outcome, **run(Path(folder))}
        except UnsupportedOperator as refusal:
            return {"outcome": "refused", "reason": str(refusal)}
        except Exception as error:
            return {"outcome": "error", "reason": f"{type(error).__name__}: {error}"}


def names() -> list[str]:
    """All networks whose packages are there."""
    networks = list(packages.networks())
    for module in dict.fromkeys(LIBRARIES.values()):
        with contextlib.suppress(ImportError):
            networks += importlib.import_module(module).networks()
    return networks


def in_a_process(name: str) -> dict[str, Any]:
    try:
        run = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"name": name, "outcome": "error", "reason": f"no answer after {SECONDS} s"}
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        return {"name": name, "outcome": "error", "reason": f"exit status {run.returncode}: {run.stderr[-300:]}"}
    return dict(json.loads(lines[-1]))


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, with the sums above it."""
    through = [row for row in rows if "values" in row]
    plain, helped, refused, failed = (
        sum(row["outcome"] == outcome for row in rows) for outcome in ("as it is", "with help", "refused", "error")
    )
    slow = [f"{row['name']} {row['prepare_seconds']:.0f} s" for row in through if row["prepare_seconds"] > PREPARING]
    lines = [
        f"{plain} of {len(rows)} as they are, {helped} with help, {refused} refused, {failed} failed; "
        f"{sum(row['values'] for row in through):,} integers compared, "
        f"{sum(row['differing'] for row in through):,} differ",
        "",
        *([f"`prepare` took more than {PREPARING} s of processor time for: {', '.join(slow)}.", ""] if slow else []),
        "| network | what happened | integers | differ | help, or why |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        reason = row.get("reason", "").partition("\nSupported: ")[0]
        why = row.get("help") or " ".join(_PLACE.sub("", reason).split())[:400].replace("|", "/")
        numbers = f"{row['values']:,} | {row['differing']}" if "values" in row else " | "
        lines.append(f"| {row['name']} | {row['outcome']} | {numbers} | {why} |")
    return "\n".join(lines)


def page(rows: list[dict[str, Any]]) -> str:
    done = {row["name"] for row in rows}
    missing = [name for name in names() if name not in done]
    return "\n".join(
        [
            "<!-- Generated by `make packages`; do not edit. -->",
            "# Networks of public packages",
            "",
            "Each network as its package builds it, in small, with random",
            "weights: prepare, two training steps, freeze, one step, lower, the .tflite file on LiteRT's default and",
            "reference kernels. JAX's networks are also compared with a training step of the user's own function.",
            "*Integers*: results of single operators compared with those kernels. *As it is*: nothing was changed;",
            "*with help*: with the line that the last column gives.",
            "",
            table(rows),
            "",
            *([f"Listed, and not run for this page: {', '.join(missing)}.", ""] if missing else []),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    parser.add_argument("--rows", type=Path, help="keep the rows here, as JSON lines; those present are not run again")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return 0
    kept = {}
    if options.rows and options.rows.exists():
        kept = {row["name"]: row for row in map(json.loads, options.rows.read_text().splitlines())}
    rows = []
    for name in names():
        if options.words and not any(word in name for word in options.words):
            continue
        row = kept.get(name) or in_a_process(name)
        rows.append(row)
        if options.rows and name not in kept:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{name}: {row['outcome']}", file=sys.stderr, flush=True)
    print(table(rows))
    if options.write:
        PAGE.write_text(page(rows))
    return int(any(row.get("differing") or row["outcome"] == "error" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
