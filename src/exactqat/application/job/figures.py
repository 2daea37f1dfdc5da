# SPDX-License-Identifier: Apache-2.0
"""Writes metrics.json and report.html of a job, and reads the figures of finished jobs for comparison."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ..report import findings
from ..report.comparison import Delivered, FinishedJob
from ..report.results import Outcome, Results
from ..report.text import shortened
from . import files
from .fields import OBJECT, SHARE, TEXT, WHOLE, Kind, check_fields
from .settings import PRECISION
from .store import read_job


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
        "ran_as": results.ran_as,
        "seconds": round(results.seconds, 2),
        "resumed": results.resumed,
        "runs": results.runs,
        "recipe": [{"passes": passes, "sentence": sentence} for passes, sentence in findings.passing(results)],
        "weights": results.fit and {"digest": results.fit.digest, "sentences": list(results.fit.sentences)},
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
        "guessing": findings.chance(dataset.test),
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
    from ..report import job_page

    path = results.settings.out / "report.html"
    files.write_atomically(path, job_page.written(results).encode("utf-8", "backslashreplace"))
    return path


def read(directory: Path) -> FinishedJob:
    """The finished job in a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        ValueError: it is unfinished, or its files are damaged; the message says which.
    """
    settings, images, _ = read_job(directory)
    path = directory / "metrics.json"
    if not path.exists():
        raise ValueError(f"{directory} contains an unfinished job, which has no figures to compare: continue it first")
    numbers = ("a list of whole numbers", lambda value: isinstance(value, list) and all(type(n) is int for n in value))
    kinds = {"float": OBJECT, "networks": OBJECT, "labels": numbers}
    content = check_fields(files.read_json(path), path, kinds)
    labels = np.array(content["labels"], dtype=object)
    answers: Kind = (
        f"a list of {len(labels)} whole numbers",
        lambda value: numbers[1](value) and len(value) == len(labels),
    )
    if not len(labels):
        raise ValueError(f"{path}: labels must be at least one")
    held = check_fields(content["float"], f"{path}: float", {"test_accuracy": SHARE, "answers": answers})
    networks = {"float32": Delivered(held["test_accuracy"], np.array(held["answers"], dtype=object) == labels)}
    for precision, methods in content["networks"].items():
        where = f"{path}: networks.{shortened(precision, 20)}"
        if not re.fullmatch(PRECISION, precision):
            raise ValueError(f"{where} is not a precision such as w8a8")
        name = check_fields(methods, where, {"chosen": TEXT})["chosen"]
        figures = ("file_bytes", "values_differing", "training_differing")
        kinds = {"device_accuracy": SHARE, "answers": answers} | dict.fromkeys(figures, WHOLE)
        chosen = check_fields(methods.get(name), where, kinds)
        right = np.array(chosen["answers"], dtype=object) == labels
        networks[precision] = Delivered(chosen["device_accuracy"], right, tuple(chosen[figure] for figure in figures))
    return FinishedJob(str(directory), settings, images, networks)
