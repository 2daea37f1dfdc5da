# SPDX-License-Identifier: Apache-2.0
"""Networks end to end, each in a process of its own: prepare, two steps, freeze, a step, lower, the .tflite file on
LiteRT's default and reference kernels, the ONNX file on onnxruntime.

    python tests/campaigns/run_zoo.py                    all networks of networks.txt and tests/plain_networks.py
    python tests/campaigns/run_zoo.py mobilenet plain    those with one of these words in their name
    python tests/campaigns/run_zoo.py --write            also writes docs/networks.md
    python tests/campaigns/run_zoo.py --one NAME         one network here; prints its row as JSON
    python tests/campaigns/run_zoo.py --round-trip       instead of runtimes: the .tflite file is read as a graph, which
                                                         is written in the same bytes and computes the same integers on
                                                         all devices of such files, and trained from there

torchvision and timm are needed for networks.txt; `make zoo` installs them into an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "networks.md"
PROFILES = ("xnnpack-x86", "reference")
SECONDS = 900


def leaves(outputs: Any) -> Iterator[torch.Tensor]:
    import torch.utils._pytree as pytree

    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point:
            yield leaf


def end_to_end(
    model: torch.nn.Module,
    examples: tuple[Any, ...],
    folder: Path,
    images: int = 2,
    training: bool = True,
    reading: bool = False,
) -> dict[str, Any]:
    """What became of one network. Refusals raise `UnsupportedOperator`.

    Args:
        training: the mode it is prepared in.
        reading: its file is read, and not run.
    """
    from exactqat import deploy, qat
    from exactqat.deploy.lower import lower_with_layouts
    from exactqat.deploy.simulate import EXACT

    torch.manual_seed(0)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = examples if len(examples) > 1 else examples[0]
        try:
            prepared = qat.prepare(model.train(training), example)
        except qat.UnsupportedOperator as error:
            if not training or "model.eval() before prepare" not in str(error):
                raise
            prepared = qat.prepare(model.eval(), example)  # training computes something else: as it says
    prepare_seconds = time.process_time() - began
    prepared.train()
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-4)
    for number in range(3):
        if number == 2:
            qat.freeze(prepared)
        optimizer.zero_grad()
        loss = sum(leaf.square().mean() for leaf in leaves(prepared(*examples)))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
    prepared.eval()
    graph, layouts = lower_with_layouts(prepared)
    rng = np.random.default_rng(0)
    codes = {}
    for name in graph.inputs:
        tensor = graph.tensors[name]
        lowest, highest = graph.limits(name)
        values = rng.integers(lowest, highest + 1, (images * tensor.shape[0], *tensor.shape[1:]))
        codes[name] = values.astype(tensor.dtype)
    path = deploy.write_tflite(graph, folder / "model.tflite")
    counts = Counter(operator.kind for operator in graph.operators)
    row: dict[str, Any] = {
        "operators": len(graph.operators),
        "transposes": counts["TRANSPOSE"],
        "kinds": dict(counts),
        "values": 0,
        "differing": 0,
        "unclaimed": {},
        "differing_kinds": {},
        "prepare_seconds": round(prepare_seconds, 1),
    }
    if reading:
        return row | read_again(graph, path, codes)
    for profile in PROFILES:
        report = deploy.verify(graph, path, codes, profile, batch_size=images)
        for comparison in report.operators:
            row["values"] += comparison.values
            if (comparison.kind, profile) in EXACT:
                row["differing"] += comparison.differing
                if comparison.differing:
                    row["differing_kinds"][f"{comparison.kind}/{profile}"] = comparison.name
            elif comparison.differing:
                key = f"{comparison.kind}/{profile}"
                row["unclaimed"][key] = row["unclaimed"].get(key, 0) + comparison.differing
    onnx_path = deploy.write_onnx(graph, folder / "model.onnx")
    onnx_report = deploy.verify(graph, onnx_path, codes, batch_size=images)
    row["onnx_values"], row["onnx_differing"] = onnx_report.values, onnx_report.differing
    return row


def read_again(graph: Any, path: Path, codes: dict[str, np.ndarray]) -> dict[str, Any]:
    """A graph's file, read: whether it is written in the same bytes, results compared and differing on all devices that
    run such files, and whether the network trains from there with the file's integers."""
    from exactqat import deploy, qat
    from exactqat.kit.device import PROFILES as DEVICES
    from exactqat.kit.device import Refusal

    again = deploy.read_tflite(path)
    row: dict[str, Any] = {
        "same_bytes": deploy.write_tflite(again, path.with_name("again.tflite")).read_bytes() == path.read_bytes(),
        "values": 0,
        "differing": 0,
        "differing_kinds": {},
    }
    kinds = {operator.outputs[0]: operator.kind for operator in graph.operators}
    for device in (name for name, profile in DEVICES.items() if profile.file == path.suffix):
        try:
            expected = deploy.simulate(graph, codes, device, graph.results())
            results = deploy.simulate(again, codes, device, graph.results())
        except Refusal as refusal:  # codes at which a runtime ends the process
            row["differing_kinds"][f"no results/{device}"] = str(refusal)
            continue
        for name in graph.results():
            row["values"] += expected[name].size
            differing = int((expected[name] != results[name]).sum())
            row["differing"] += differing
            if differing:
                row["differing_kinds"].setdefault(f"{kinds.get(name)}/{device}", name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            qat.prepare(again)
        row["trains"] = "yes"
    except qat.UnsupportedOperator as refusal:
        row["trains"] = str(refusal)
    return row


def networks() -> dict[str, Any]:
    """Name -> function that builds (model, examples)."""
    import _tests_folder  # noqa: F401
    import plain_networks

    builders: dict[str, Any] = {f"plain {name}": build for name, build in plain_networks.NETWORKS.items()}
    if find_spec("torchvision") and find_spec("timm"):
        import zoo

        builders.update(zoo.builders())
    return builders


def one(name: str, reading: bool = False) -> dict[str, Any]:
    from exactqat.qat import UnsupportedOperator

    start = time.monotonic()
    torch.manual_seed(0)
    model, examples = networks()[name]()
    examples = examples if isinstance(examples, tuple) else (examples,)
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = {"outcome": "through", **end_to_end(model, examples, Path(folder), reading=reading)}
        except UnsupportedOperator as refusal:
            row = {"outcome": "refused", "reason": str(refusal)}
        except Exception as error:
            row = {"outcome": "error", "reason": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return {"name": name, **row, "seconds": round(time.monotonic() - start)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--round-trip", action="store_true")
    parser.add_argument(
        "--rows", type=Path, help="also keep the rows here, as JSON lines; those present are not run again"
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.round_trip)))
        return 0
    rows = []
    kept = {}
    if options.rows and options.rows.exists():
        kept = {row["name"]: row for row in map(json.loads, options.rows.read_text().splitlines())}
    for name in networks():
        if options.words and not any(word in name for word in options.words):
            continue
        row = kept.get(name) or in_a_process(name, *(["--round-trip"] if options.round_trip else []))
        rows.append(row)
        if options.rows and name not in kept:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(line_of_reading(row) if options.round_trip else line(row), flush=True)
    through = [row for row in rows if row["outcome"] == "through"]
    exact = [row for row in through if row["differing"] == 0]
    print(f"{len(through)} of {len(rows)} went through, {len(exact)} of them without a difference in what is claimed; ")
    print(f"{sum(row['values'] for row in through):,} integers compared")
    if options.round_trip:
        same, trained = (sum(bool(flag) for flag in flags) for flags in (
            [row["same_bytes"] for row in through], [row["trains"] == "yes" for row in through]
        ))  # fmt: skip
        print(f"{same} were written in the same bytes, {trained} train from their files")
        return int(len(exact) < len(rows) or same < len(rows))
    if options.write:
        PAGE.write_text(page(rows))
    return 0


def in_a_process(name: str, *options: str, program: str = __file__) -> dict[str, Any]:
    """The row of a network that a campaign's `program` prints with ``--one``."""
    command = [sys.executable, program, "--one", name, *options]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"name": name, "outcome": "error", "reason": f"no answer after {SECONDS} s", "seconds": SECONDS}
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        return {
            "name": name,
            "outcome": "error",
            "reason": f"exit status {run.returncode}: {run.stderr[-600:]}",
            "seconds": 0,
        }
    return dict(json.loads(lines[-1]))


def line(row: dict[str, Any]) -> str:
    head = f"{row['outcome']:8} {row['name']} ({row['seconds']} s)"
    if row["outcome"] != "through":
        return f"{head}: {row['reason'][:700]}"
    claimed = f"{row['values']:,} integers, {row['differing']} differ {row['differing_kinds'] or ''}"
    unclaimed = f" (not claimed: {row['unclaimed']})" if row["unclaimed"] else ""
    onnx = f"ONNX {row['onnx_differing']:,} of {row['onnx_values']:,}"
    return f"{head}: {row['operators']} operators, {row['transposes']} TRANSPOSE, {claimed}{unclaimed}; {onnx}"


def line_of_reading(row: dict[str, Any]) -> str:
    if row["outcome"] != "through":
        return line(row)
    same = "same bytes" if row["same_bytes"] else "OTHER BYTES"
    trains = "trains" if row["trains"] == "yes" else f"does not train: {row['trains'].splitlines()[-1][:200]}"
    differ = f"{row['values']:,} integers, {row['differing']} differ {row['differing_kinds'] or ''}"
    return f"{row['outcome']:8} {row['name']} ({row['seconds']} s): {same}, {differ}; {trains}"


def page(rows: list[dict[str, Any]]) -> str:
    through = [row for row in rows if row["outcome"] == "through"]
    text = [
        "<!-- Generated by `make zoo`; do not edit. -->",
        "# Networks that were tested",
        "",
        "Each network as its author wrote it, with random weights: prepare, two",
        "training steps, freeze, one step, lower, the .tflite file on LiteRT's default and reference kernels, ONNX on",
        "onnxruntime. *Integers*: results of single operators compared with those kernels; *differ*: results that",
        "differ, of operators that are claimed to be exact. *ONNX differs*: the share of the .onnx file's results that",
        "onnxruntime computes otherwise than the device `onnxruntime-x86` is declared to.",
        "",
        f"{len(through)} of {len(rows)} work; {sum(row['values'] for row in through):,} integers compared, "
        f"{sum(row['differing'] for row in through):,} differ.",
        "",
        "| network | operators | TRANSPOSE | integers | differ | not claimed, differ | ONNX differs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in through:
        unclaimed = ", ".join(f"{key} {count:,}" for key, count in sorted(row["unclaimed"].items()))
        share = row["onnx_differing"] / max(row["onnx_values"], 1)
        text.append(
            f"| {row['name']} | {row['operators']} | {row['transposes']} | {row['values']:,} | {row['differing']} | "
            f"{unclaimed} | {share:.2e} |"
        )
    refused = [row for row in rows if row["outcome"] != "through"]
    if refused:
        text += ["", "| refused | why |", "|---|---|"]
        for row in refused:
            why = " ".join(part.strip() for part in row["reason"].splitlines() if part.strip())
            text.append(f"| {row['name']} | {why[:400].replace('|', '/')} |")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
