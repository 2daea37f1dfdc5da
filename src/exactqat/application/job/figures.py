# SPDX-License-Identifier: Apache-2.0
"""Writes metrics.json and report.html of a job, and reads the figures of finished jobs for comparison."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ..report import findings, job_page
from ..report.comparison import FIGURES, LATER, FinishedJob
from ..report.results import Outcome, Results
from ..report.text import shortened
from . import files
from .devices import current_settings
from .fields import NUMBER, OBJECT, SHARE, TEXT, WHOLE, Kind, check_fields, optional
from .options import MIXED


def metrics(results: Results) -> dict[str, Any]:
    """What DIR/metrics.json holds."""
    dataset, settings = results.dataset, results.settings
    return {
        "data": {
            "name": dataset.name,
            "train": len(dataset.train),
            "validation": len(dataset.validation),
            "test": len(dataset.test),
            "classes": list(dataset.class_names),
            "skipped": list(dataset.skipped),
        },
        "settings": settings.stored(),
        "device": settings.device,
        "formerly_trained_for": results.formerly or None,
        "ran_as": results.ran_as,
        "seconds": round(results.seconds, 2),
        "resumed": results.resumed,
        "runs": results.runs,
        "recipe": [{"passes": passes, "sentence": sentence} for passes, sentence in findings.passing(results)],
        "weights": results.fit and results.fit.stored(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "ai-edge-litert")},
        },
        "float": {
            "validation_accuracy": results.float_validation_accuracy,
            "test_accuracy": results.float_test_accuracy,
            "answers": results.float_predictions.tolist(),
            "parameter_bytes": results.float_bytes,
            "history": asdict(results.float_history),
        },
        "networks": {
            precision: {
                "chosen": results.chosen(precision).method.name,
                **{outcome.method.name: _outcome_metrics(results, outcome) for outcome in results.of(precision)},
            }
            for precision in settings.precisions
        },
        "widths": [asdict(width) for width in findings.widths(results)],
        "values_compared": results.values_compared,
        "values_differing": results.values_differing,
        "training_values": results.training_values,
        "training_differing": results.training_differing,
        "labels": dataset.test.labels.tolist(),
        "guessing": findings.guessing(dataset),
        "warnings": findings.warnings_on(results),
        "classes": findings.per_class(results),
        "mistakes": findings.mistakes(results),
    }


def _outcome_metrics(results: Results, outcome: Outcome) -> dict[str, Any]:
    assert outcome.report is not None
    taken: dict[str, Any] = {} if outcome.footprint is None else {"footprint": asdict(outcome.footprint)}
    beside = results.beside_float(outcome.device_predictions)
    logits_differing, logits = outcome.report.outputs_beside_training
    if outcome.elsewhere:
        taken["devices"] = {
            device: {"not_simulated": found} if isinstance(found, str) else found.stored()
            for device, found in outcome.elsewhere.items()
        }
    return taken | {
        "title": outcome.method.title,
        "validation_accuracy": outcome.validation_accuracy,
        "validation_loss": outcome.validation_loss,
        "test_accuracy": outcome.test_accuracy,
        "device_accuracy": outcome.device_accuracy,
        "file_bytes": outcome.file_bytes,
        "compressed_file_bytes": outcome.compressed_bytes,
        "values_compared": outcome.report.values,
        "values_differing": outcome.report.differing,
        "predictions_values": sum(row.values for row in outcome.report.predictions),
        "predictions_differing": outcome.report.predictions_differing,
        "training_values": outcome.report.training_values,
        "training_differing": outcome.report.training_differing,
        "training_logits": logits,
        "training_logits_differing": logits_differing,
        "beside_float": asdict(beside) | {"may_be_luck": beside.may_be_luck},
        "answers": outcome.device_predictions.tolist(),
        "packed_parameter_bytes": findings.packed_bytes(outcome),
        "layers": _layers(outcome),
        "history": asdict(outcome.history) if outcome.history else None,
    }


def _layers(outcome: Outcome) -> list[dict[str, Any]]:
    """A row for each operator and for the whole network, with its multiply-adds for one image."""
    assert outcome.report is not None
    work = [int(row["multiply_accumulates"]) for row in outcome.graph.summary()]
    counts = work + [sum(work)] * len(outcome.report.outputs)
    rows = [dict(row) for row in outcome.report.table()[: len(counts)]]
    for row, count in zip(rows, counts, strict=True):
        row["multiply_accumulates"] = count
    return rows


def write_metrics(results: Results) -> Path:
    """Writes DIR/metrics.json and returns its path."""
    path = results.settings.out / "metrics.json"
    text = json.dumps(metrics(results), indent=2)
    # Long lists of numbers, such as the answers, would hide everything else at one per line. Strings hold no line
    # breaks.
    text = re.sub(r"\[\n\s+-?\d+(,\n\s+-?\d+)*\n\s*\]", lambda found: re.sub(r"\n\s*", "", found[0]), text)
    files.write_atomically(path, (text + "\n").encode())
    return path


def write_report(results: Results) -> Path:
    """Writes DIR/report.html and returns its path."""
    path = results.settings.out / "report.html"
    files.write_atomically(path, job_page.written(results).encode("utf-8", "backslashreplace"))
    return path


def read(directory: Path) -> FinishedJob:
    """The finished job in a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        ValueError: it is unfinished, or its files are damaged; the message says which.
    """
    files.check_there(directory)
    if not (directory / "job.json").exists():
        raise FileNotFoundError(f"{directory} contains no job.json, so it is not a job; `exactqat train` writes one")
    job = files.read_json(directory / "job.json")
    path = directory / "metrics.json"
    if not path.exists():
        raise ValueError(f"{directory} contains an unfinished job, which has no figures to compare: continue it first")
    metrics = files.read_json(path)
    check_fields(job, directory / "job.json", {"settings": OBJECT, "images": TEXT})
    try:
        settings = current_settings(job["settings"])
    except ValueError as error:
        raise ValueError(f"{directory / 'job.json'}: {error}") from error
    check_fields(metrics, path, {"data": OBJECT, "float": OBJECT, "networks": OBJECT, "seconds": NUMBER})
    check_fields(metrics["float"], path, {"test_accuracy": SHARE})
    tests = check_fields(metrics["data"], path, {"test": WHOLE})["test"]
    if tests < 1:
        raise ValueError(f"{path}: test must be at least 1, got {tests}")
    delivered = {}
    answers = {"float32": metrics["float"].get("answers")}
    for precision, methods in metrics["networks"].items():
        where = f"{path}: networks.{shortened(precision, 20)}"
        if not re.fullmatch(rf"w\da\d+|{MIXED}", precision):
            raise ValueError(f"{where} is not a precision such as w8a8")
        name = check_fields(methods, where, {"chosen": TEXT})["chosen"]
        chosen = check_fields(methods.get(name), where, {"title": TEXT})
        footprint = chosen["footprint"] if isinstance(chosen.get("footprint"), dict) else {}
        figures = check_fields({**footprint, **chosen}, where, _KINDS)
        delivered[precision] = {"method": chosen["title"], **{name: figures.get(name) for name in _KINDS}}
        answers[precision] = chosen.get("answers")
    right = _right(metrics.get("labels"), answers, tests, path)
    accuracy, device = metrics["float"]["test_accuracy"], shortened(settings["device"], 40)
    return FinishedJob(
        str(directory), settings, job["images"], tests, accuracy, metrics["seconds"], delivered, device, right
    )


def _kind(name: str, whole: bool) -> Kind:
    kind = WHOLE if whole else SHARE
    return optional(kind) if name in LATER else kind


_KINDS = {name: _kind(name, whole) for name, (_, whole) in FIGURES.items()}


def _right(labels: Any, answers: Mapping[str, Any], images: int, path: Path) -> dict[str, np.ndarray]:
    """Whether each test image was right, by network; nothing for a job from before answers were kept.

    Raises:
        ValueError: answers or labels are not a list of that many whole numbers.
    """
    if labels is None:
        return {}
    arrays = {}
    for name, given in {"labels": labels, **answers}.items():
        if given is None:
            continue
        if not isinstance(given, list) or len(given) != images or not all(type(answer) is int for answer in given):
            raise ValueError(
                f"{path}: answers and labels must be {images:,} whole numbers each, those of {name} are not"
            )
        arrays[name] = np.array(given, dtype=object)
    truth = arrays.pop("labels")
    return {name: (given == truth).astype(bool) for name, given in arrays.items()}
