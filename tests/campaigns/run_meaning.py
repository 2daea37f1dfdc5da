# SPDX-License-Identifier: Apache-2.0
"""The self-check of `prepare` on whole networks, and what it costs: no training, no files.

    python tests/campaigns/run_meaning.py                    all networks of run_zoo.py, in training and in evaluation
    python tests/campaigns/run_meaning.py mobilenet plain    those with one of these words in their name
    python tests/campaigns/run_meaning.py --rows FILE        also keeps the rows, as JSON lines

A network that is refused here because it differs from its original is either captured wrongly or a false alarm.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from pathlib import Path
from typing import Any

import _tests_folder  # noqa: F401
import torch
from run_zoo import networks


def row(name: str, training: bool) -> dict[str, Any]:
    from exactqat import qat

    torch.manual_seed(0)
    model, examples = networks()[name]()
    began = time.perf_counter()
    fields: dict[str, Any] = {"name": name, "training": training}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            example = examples if isinstance(examples, tuple) and len(examples) > 1 else examples
            prepared = qat.prepare(model.train(training), example)
        except qat.UnsupportedOperator as refusal:
            differs = "is not the model" in str(refusal)
            return {**fields, "outcome": "differs" if differs else "refused", "reason": str(refusal)}
        except Exception as error:
            return {**fields, "outcome": "error", "reason": f"{type(error).__name__}: {error}"}
    proof = prepared.proof
    assert proof is not None
    fields |= {"outcome": "equal", "seconds": round(time.perf_counter() - began, 2), "check": round(proof.seconds, 2)}
    return fields | {"tensors": proof.tensors, "undecided": len(proof.undecided), "not_run": proof.not_run}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    rows = []
    for name in networks():
        if options.words and not any(word in name for word in options.words):
            continue
        for training in (True, False):
            rows.append(row(name, training))
            gc.collect()
            print(json.dumps(rows[-1]), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    counts = {outcome: sum(case["outcome"] == outcome for case in rows) for outcome in ("equal", "refused", "differs")}
    errors = len(rows) - sum(counts.values())
    share = sum(case.get("check", 0) for case in rows) / max(sum(case.get("seconds", 0) for case in rows), 1e-9)
    print(f"{counts}, {errors} errors; the check took {share:.0%} of prepare's time")
    return int(bool(counts["differs"] or errors))


if __name__ == "__main__":
    raise SystemExit(main())
