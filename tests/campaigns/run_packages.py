# SPDX-License-Identifier: Apache-2.0
"""Networks of public packages end to end, each in a process of its own, as they are or with a user's line of help.

    python tests/campaigns/run_packages.py              all networks of packages.py
    python tests/campaigns/run_packages.py yolo11 Bert  those with one of these words in their name
    python tests/campaigns/run_packages.py --one NAME   one network here; prints its row as JSON

`make packages` installs the packages into an environment of their own. What is done with each network says run_zoo.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import packages
import torch
from run_zoo import end_to_end

SECONDS = 900


def one(name: str) -> dict[str, Any]:
    """What becomes of a network as it is, and of the helped one if that is refused."""
    start, entry = time.monotonic(), packages.networks()[name]
    torch.manual_seed(0)
    row = tried("as it is", *entry.build())
    if row["outcome"] == "refused" and entry.helped is not None:
        torch.manual_seed(0)
        helped = tried("with help", *entry.helped(*entry.build()))
        row = {**helped, "help": entry.help, "refusal": row["reason"]} if "values" in helped else row
    return {"name": name, **row, "seconds": round(time.monotonic() - start)}


def tried(outcome: str, model: torch.nn.Module, examples: tuple[Any, ...]) -> dict[str, Any]:
    from exactqat.qat import UnsupportedOperator

    with tempfile.TemporaryDirectory() as folder:
        try:
            return {"outcome": outcome, **end_to_end(model, examples, Path(folder), training=model.training)}
        except UnsupportedOperator as refusal:
            return {"outcome": "refused", "reason": str(refusal)}
        except Exception as error:
            return {"outcome": "error", "reason": f"{type(error).__name__}: {error}"}


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
    lines = [
        f"{plain} of {len(rows)} as they are, {helped} with help, {refused} refused, {failed} failed; "
        f"{sum(row['values'] for row in through):,} integers compared, "
        f"{sum(row['differing'] for row in through):,} differ",
        "",
        "| network | what happened | integers | differ | help, or why |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        why = row.get("help") or " ".join(row.get("reason", "").split())[:400].replace("|", "/")
        numbers = f"{row['values']:,} | {row['differing']}" if "values" in row else " | "
        lines.append(f"| {row['name']} | {row['outcome']} | {numbers} | {why} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--rows", type=Path, help="keep the rows here, as JSON lines; those present are not run again")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return 0
    kept = {}
    if options.rows and options.rows.exists():
        kept = {row["name"]: row for row in map(json.loads, options.rows.read_text().splitlines())}
    rows = []
    for name in packages.networks():
        if options.words and not any(word in name for word in options.words):
            continue
        row = kept.get(name) or in_a_process(name)
        rows.append(row)
        if options.rows and name not in kept:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{name}: {row['outcome']}", file=sys.stderr, flush=True)
    print(table(rows))
    return int(any(row.get("differing") or row["outcome"] == "error" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
