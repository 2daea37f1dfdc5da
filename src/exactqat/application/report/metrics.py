# SPDX-License-Identifier: Apache-2.0
"""DIR/metrics.json: all figures of a job."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from ..job import files
from ..job.files import Record
from ..job.results import Outcome, Results
from . import findings


def metrics(results: Results) -> Record:
    """What DIR/metrics.json holds."""
    dataset, settings = results.dataset, results.settings
    return {
        "data": {
            "name": dataset.name,
            **{part: len(getattr(dataset, part)) for part in ("train", "validation", "test")},
            "classes": list(dataset.class_names),
            "skipped": list(dataset.skipped),
        },
        "settings": settings.stored(),
        "device": settings.device,
        "ran_as": results.ran_as,
        "seconds": round(results.seconds, 2),
        "resumed": results.runs > 1,
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
                **{outcome.method.name: _network(results, outcome) for outcome in results.of(precision)},
            }
            for precision in settings.precisions
        },
        "values_compared": results.simulation.values,
        "values_differing": results.simulation.differing,
        "training_values": results.training.values,
        "training_differing": results.training.differing,
        "labels": dataset.test.labels.tolist(),
        "guessing": findings.chance(dataset.test),
        "warnings": findings.warnings_on(results),
        "classes": findings.per_class(results),
        "mistakes": findings.mistakes(results),
    }


def _network(results: Results, outcome: Outcome) -> Record:
    report, beside = outcome.report, findings.beside_float(results, outcome)
    logits_differing, logits = report.outputs_beside_training
    devices = {
        device: {"not_simulated": beside} if isinstance(beside, str) else beside.stored()
        for device, beside in outcome.elsewhere.items()
    }
    # A row for each operator and for the whole network, with its multiply-adds for one image.
    work = [int(row["multiply_accumulates"]) for row in outcome.graph.summary()]
    rows = zip(report.table(), work + [sum(work)] * len(report.outputs), strict=False)
    names = ("validation_accuracy", "validation_loss", "test_accuracy", "device_accuracy", "file_bytes")
    return {
        **({} if outcome.footprint is None else {"footprint": asdict(outcome.footprint)}),
        **({"devices": devices} if devices else {}),
        "title": outcome.method.title,
        **{name: getattr(outcome, name) for name in names},
        "compressed_file_bytes": outcome.compressed_bytes,
        "values_compared": report.values,
        "values_differing": report.differing,
        "predictions_values": report.predictions_values,
        **{name: getattr(report, name) for name in ("predictions_differing", "training_values", "training_differing")},
        "training_logits": logits,
        "training_logits_differing": logits_differing,
        "beside_float": asdict(beside) | {"may_be_luck": beside.may_be_luck},
        "answers": outcome.device_predictions.tolist(),
        "packed_parameter_bytes": findings.packed_bytes(outcome),
        "layers": [{**row, "multiply_accumulates": count} for row, count in rows],
        "history": asdict(outcome.history) if outcome.history else None,
    }


def write_metrics(results: Results) -> Path:
    """Writes DIR/metrics.json and returns its path."""
    path = results.settings.out / "metrics.json"
    text = json.dumps(metrics(results), indent=2)
    # Long lists of numbers, such as the answers, would hide everything else at one per line. Strings hold no line
    # breaks.
    text = re.sub(r"\[\n\s+-?\d+(,\n\s+-?\d+)*\n\s*\]", lambda match: re.sub(r"\n\s*", "", match[0]), text)
    files.write_atomically(path, (text + "\n").encode())
    return path


def write_report(results: Results) -> Path:
    """Writes DIR/report.html and returns its path."""
    from . import job_page

    path = results.settings.out / "report.html"
    files.write_atomically(path, job_page.written(results).encode("utf-8", "backslashreplace"))
    return path
