# SPDX-License-Identifier: Apache-2.0
"""The model card, read by the Hub's own package where it is installed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from exactqat import deploy, tune  # noqa: E402
from exactqat.deploy import Builder, per_tensor  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integrations" / "huggingface"))

from model_card import model_card  # noqa: E402


@pytest.fixture
def card(tmp_path: Path) -> tuple[str, Path]:
    builder = Builder()
    builder.input("x", (1, 4), per_tensor(0.02, 3))
    graph = builder.graph(
        [builder.fully_connected("x", np.diag([90] * 4), [0.1], [0] * 4, per_tensor(0.1, 0), name="y")]
    )
    path = deploy.write_tflite(graph, tmp_path / "m.tflite")
    x = np.eye(4, dtype=np.float32)
    report = deploy.verify(graph, path, data=x)
    verdict = tune.gate(graph, (x, np.arange(4)), devices=["xnnpack-x86", "micro"], minimum=0.9)
    return model_card("me/digits", path, report, verdict, license="apache-2.0"), path


def test_it_holds_the_proof(card: tuple[str, Path]) -> None:
    text, path = card
    assert "32 integers of the file" in text and "no integer differs" in text
    assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    assert "| micro | 1 |" in text and "| input | x | int8 [1, 4] | 0.0199999996 | 3 |" in text


def test_the_hub_reads_its_metadata(card: tuple[str, Path]) -> None:
    hub = pytest.importorskip("huggingface_hub")
    known = hub.ModelCard(card[0]).data
    assert (known.license, known.library_name, known.model_name) == ("apache-2.0", "litert", "me/digits")
    assert {(row.metric_type, row.metric_value, row.metric_name) for row in known.eval_results} == {
        ("accuracy", 1.0, f"accuracy in the integers of {device}") for device in ("xnnpack-x86", "micro")
    }
