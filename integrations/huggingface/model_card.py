# SPDX-License-Identifier: Apache-2.0
"""A model card for the Hugging Face Hub with the proof that the file computes what was trained.

report = deploy.verify(graph, path, model=model, data=images)
verdict = tune.gate(graph, (images, classes), minimum=0.9)
Path("README.md").write_text(model_card("me/digits", path, report, verdict, license="apache-2.0"))
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import exactqat
from exactqat import deploy, tune


def model_card(
    name: str,
    path: str | os.PathLike[str],
    report: deploy.Report,
    verdict: tune.Verdict,
    *,
    metric: str = "accuracy",
    dataset: str = "test examples",
    task: str = "image-classification",
    **more: Any,
) -> str:
    """The text of README.md: metadata that the Hub reads, and the proof.

    Args:
        name: of the repository on the Hub.
        path: the .tflite file; its SHA-256 is in the card.
        report: of `deploy.verify` for this file.
        verdict: of `tune.gate` for the same network.
        metric, dataset, task: as the Hub calls them.
        more: more metadata of the card, such as license, base_model and language.
    """
    content = Path(path).read_bytes()
    graph = deploy.read_tflite(path)
    metrics = [
        {"type": metric, "value": grade.score, "name": f"{metric} in the integers of {grade.device}"}
        for grade in verdict.devices
    ]
    results = [{"task": {"type": task}, "dataset": {"name": dataset, "type": dataset}, "metrics": metrics}]
    front = {
        "library_name": "litert",
        "pipeline_tag": task,
        "tags": ["tflite", "quantized", "exactqat"],
        **more,
        "model-index": [{"name": name, "results": results}],
    }
    ends = [
        (side, port.name, graph.tensors[port.tensor])
        for side, ports in (("input", graph.signature.inputs), ("output", graph.signature.outputs))
        for port in ports
    ]
    rows = [
        f"| {side} | {word} | {tensor.dtype} {list(tensor.shape)} | {float(tensor.quantization.scale[0]):.9g} "
        f"| {int(tensor.quantization.zero_point[0])} |"
        for side, word, tensor in ends
    ]
    scores = [f"| {grade.device} | {grade.score:.4g} |" for grade in verdict.devices]
    equal = "no integer differs" if report.equal else f"{report.differing:,} integers differ"
    lines = [
        "---",
        # JSON is YAML, and needs no package.
        *(f"{key}: {json.dumps(value)}" for key, value in front.items()),
        "---",
        "",
        f"# {name}",
        "",
        f"`{Path(path).name}`, {len(content):,} bytes, trained with exactqat {exactqat.__version__} for "
        f"{graph.trained_for or report.profile}.",
        "",
        "## Proof",
        "",
        f"{report.values:,} integers of the file on {report.profile} were compared with the simulation: {equal}.",
        "",
        *(f"- {sentence}" for sentence in report.sentences()),
        f"- SHA-256 of the file: `{hashlib.sha256(content).hexdigest()}`",
        "",
        f"Check it yourself: `exactqat inspect {Path(path).name}`.",
        "",
        "## Scores",
        "",
        f"| device | {metric} |",
        "|---|---|",
        *scores,
        "",
        "## Inputs and outputs",
        "",
        "| | name | codes | scale | zero point |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)
