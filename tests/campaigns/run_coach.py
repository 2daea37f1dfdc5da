# SPDX-License-Identifier: Apache-2.0
"""What `exactqat.tune` says of a network, compared with the user's own network and with what its rules give.

    python tests/campaigns/run_coach.py                  all networks of networks.txt and tests/plain_networks.py
    python tests/campaigns/run_coach.py mobilenet plain  those with one of these words in their name
    python tests/campaigns/run_coach.py --one NAME       one network here; prints its row as JSON

Of each network, calibrated on noise:

- everything in 16 bits is the float network: signal to noise beside the user's own model;
- a search does not make it worse, its graph is what the model has after `apply`, and its file gives these integers on
  LiteRT's reference kernels; that file, read, is no worse in 16 bits than on the device;
- a precision plan: the network that is prepared by the rules of the smallest one has the file and the metric that
  were promised.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import run_zoo
import torch

EXAMPLES = 16
DEVICE = "micro"
# Beside the user's network, in dB: 16 bits have some 50 to 90, the device's 8 some 15 to 50. Less where an operator
# without a form in 16 bits stays in 8, such as PReLU.
LEAST = 30.0
# Networks with more parts have no plan here: it takes minutes.
MOST_PARTS = 150


def decibels(wanted: np.ndarray, result: np.ndarray) -> float:
    noise = float(np.square(wanted.astype(np.float64) - result).sum())
    power = float(np.square(wanted.astype(np.float64)).sum())
    return 10 * np.log10(power / noise) if noise and power else 200.0


class Beside:
    """A metric: signal to noise beside the outputs of the user's network, of the worst output.

    Attributes:
        outputs: of the user's network. Targets are the examples' numbers.
    """

    def __init__(self, outputs: list[np.ndarray]) -> None:
        self.outputs = outputs

    def __call__(self, results: Any, targets: Any) -> float:
        arrays = list(results.values()) if isinstance(results, dict) else [results]
        wanted = [output[targets] for output in self.outputs]
        if [leaf.shape for leaf in arrays] != [leaf.shape for leaf in wanted]:
            raise NotComparable(f"{[leaf.shape for leaf in arrays]}, the model's are {[leaf.shape for leaf in wanted]}")
        return min(decibels(*pair) for pair in zip(wanted, arrays, strict=True))


class NotComparable(Exception):
    """The file has other outputs than the model."""


def coached(model: torch.nn.Module, examples: tuple[Any, ...]) -> dict[str, Any]:
    from exactqat import deploy, qat, tune
    from exactqat.deploy.formats.tflite import tflite_bytes

    batch = tuple(
        torch.randn(EXAMPLES, *example.shape[1:])
        if example.dtype.is_floating_point
        else torch.cat([example] * EXAMPLES)[:EXAMPLES]
        for example in examples
    )
    arrays = [tensor.numpy() for tensor in batch]
    with torch.no_grad():
        beside = Beside([leaf.numpy() for leaf in run_zoo.leaves(model(*batch))])
    data: Any = (arrays if len(arrays) > 1 else arrays[0], np.arange(EXAMPLES))

    def calibrated(rules: Any = None) -> Any:
        torch.manual_seed(0)
        example = examples if len(examples) > 1 else examples[0]
        prepared = qat.prepare(model, example, rules, check=False, device=DEVICE, keep_final_activation=True)
        qat.calibrate(prepared, [batch if len(batch) > 1 else batch[0]])
        return prepared

    def measured(graph: Any) -> float:
        values = deploy.output_values(graph, deploy.simulate(graph, deploy.input_codes(graph, data[0]), DEVICE))
        return beside(values if len(values) > 1 else next(iter(values.values())), data[1])

    prepared = calibrated()
    analysis = tune.sensitivity(prepared, data, beside, measure=["fine"], progress=False)
    row: dict[str, Any] = {"parts": len(analysis.parts), "fine": analysis.reference, "device": analysis.device_metric}
    fine, on_device = analysis.reference or 0.0, analysis.device_metric or 0.0
    wrong = [] if fine >= max(LEAST, on_device) else ["not the float network in 16 bits"]

    searched = tune.search(prepared, data, beside, budget=14, progress=False)
    row |= {"before": searched.before.metric, "after": searched.after.metric}
    if searched.before.better_than(searched.after, True):
        wrong.append("worse after the search")
    with tempfile.TemporaryDirectory() as folder:
        path = deploy.write_tflite(searched.graph, Path(folder) / "model.tflite")
        codes = {name: array[:2] for name, array in deploy.input_codes(searched.graph, data[0]).items()}
        report = deploy.verify(searched.graph, path, codes, "reference", batch_size=2)
        row["integers"] = report.values
        if any(operator.differing and (operator.kind, "reference") in deploy.EXACT for operator in report.operators):
            wrong.append("its file gives other integers")
        of_file = tune.sensitivity(
            deploy.read_tflite(path), data, beside, device=DEVICE, measure=["fine"], progress=False
        )
        row |= {"file_fine": of_file.reference, "file_device": of_file.device_metric}
        if of_file.reference < of_file.device_metric - 1:
            wrong.append("its file is further from the float network in 16 bits than on the device")
    try:
        searched.apply(prepared)
    except ValueError as refusal:
        row["refused"] = str(refusal)
    else:
        qat.freeze(prepared)
        pairs = zip(deploy.lower(prepared).tensors.values(), searched.graph.tensors.values(), strict=True)
        if not all(
            one.quantization.equals(other.quantization) and np.array_equal(one.data, other.data) for one, other in pairs
        ):
            wrong.append("applied, it is another network")

    if len(analysis.parts) <= MOST_PARTS:
        plans = tune.plan(calibrated(), data, beside, flash="1000M", candidates=6, progress=False)
        smallest = min(plans.points, key=lambda point: point.flash)
        again = calibrated(list(smallest.rules))
        qat.freeze(again)
        graph = deploy.packed(deploy.lower(again))
        row |= {"flash": len(tflite_bytes(graph)), "metric": measured(graph), "promised": smallest.flash}
        if row["flash"] != smallest.flash or abs(row["metric"] - smallest.metric) > 1e-9:
            wrong.append(
                f"its rules give {row['flash']} bytes and {row['metric']}, not {smallest.flash} and {smallest.metric}"
            )
    return {"outcome": "wrong: " + "; ".join(wrong) if wrong else "right", **row}


def one(name: str) -> dict[str, Any]:
    from exactqat.qat import UnsupportedOperator

    start = time.monotonic()
    torch.manual_seed(0)
    model, examples = run_zoo.networks()[name]()
    warnings.simplefilter("ignore")
    try:
        inputs = examples if isinstance(examples, tuple) else (examples,)
        row = coached(model.eval(), tuple(map(torch.as_tensor, inputs)))
    except (UnsupportedOperator, NotComparable) as refusal:
        row = {"outcome": "left out", "reason": f"{type(refusal).__name__}: {refusal}"}
    except Exception as error:
        row = {"outcome": "error", "reason": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return {"name": name, **row, "seconds": round(time.monotonic() - start)}


def line(row: dict[str, Any]) -> str:
    head = f"{row['outcome']}: {row['name']} ({row['seconds']} s)"
    if "fine" not in row:
        return f"{head}: {row['reason'][:500]}"
    plan = f", plan {row['flash']:,} bytes, {row['metric']:.1f} dB" if "flash" in row else ""
    return (
        f"{head}: {row['parts']} parts, {row['fine']:.1f} dB in 16 bits, {row['device']:.1f} on the device, search "
        f"{row['before']:.1f} -> {row['after']:.1f}{plan}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--rows", type=Path, help="also keep the rows here, as JSON lines; those there stay")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one), default=float))
        return 0
    rows, kept = [], {}
    if options.rows and options.rows.exists():
        kept = {row["name"]: row for row in map(json.loads, options.rows.read_text().splitlines())}
    for name in run_zoo.networks():
        if options.words and not any(word in name for word in options.words):
            continue
        rows.append(kept.get(name) or run_zoo.in_a_process(name, program=__file__))
        if options.rows and name not in kept:
            with options.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        print(line(rows[-1]), flush=True)
    count = {word: sum(row["outcome"].startswith(word) for row in rows) for word in ("right", "left out")}
    print(f"{count['right']} of {len(rows)} right, {count['left out']} left out")
    return int(sum(count.values()) < len(rows))


if __name__ == "__main__":
    sys.exit(main())
