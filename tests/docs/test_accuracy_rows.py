# SPDX-License-Identifier: Apache-2.0
"""The rows of bench/accuracy.py: kept line by line, compared within their interval, written as tables."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench" / "accuracy"))

import rows  # noqa: E402
from rows import Row  # noqa: E402

OURS = Row("digits8", 0, "w4a4", rows.OURS, "QAT", 0.9, 0.9, 0.02, 0, integers=1000)
PEER = Row("digits8", 0, "w4a4", "aimet", "PTQ", 0.93, 0.85, 0.02, 7)


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.jsonl"
    assert rows.read(path) == {}
    for row in (OURS, PEER, replace(OURS, runtime=0.91)):
        rows.append(path, row)
    # What was cut off in the middle of a line is measured again; of one key the last line counts.
    with path.open("a") as file:
        file.write(json.dumps({"network": "digits16"})[:-5])
    rows.append(path, replace(PEER, seed=1))
    records = rows.read(path)
    assert list(records.values()) == [replace(OURS, runtime=0.91), PEER, replace(PEER, seed=1)]


def test_rows_are_compared_within_their_interval() -> None:
    better = replace(PEER, tool="nncf", runtime=0.915)
    (match,) = rows.matches([OURS, PEER, better])
    assert match.best is better and match.difference == pytest.approx(-0.015) and not match.lost
    (match,) = rows.matches([OURS, replace(better, runtime=0.93)])
    assert match.lost
    (match,) = rows.matches([OURS, replace(PEER, methods={"PTQ": 0.95}), replace(better, methods={"PTQ": 0.9})])
    assert (match.best.tool, match.chosen.tool) == ("nncf", "aimet")
    # A peer without a runtime, another precision, and the float network are nothing to be compared with.
    others = [replace(PEER, runtime=None), replace(PEER, precision="w8a8"), replace(PEER, tool=rows.FLOAT)]
    assert rows.matches([OURS, *others]) == []
    # Nor is another float network, such as the one that another processor's training gives.
    assert rows.matches([replace(OURS, weights="1f"), PEER]) == []
    said = rows.verdict([OURS, PEER, replace(better, runtime=0.93)])
    assert said[0] == "significantly worse than the best peer in 1 of 1 rows, mean difference -3.00 points"
    assert "AIMET: 7 test examples answered otherwise than predicted, in 1 of 1 networks" in said
    assert "exactqat: 1,000 integers compared with LiteRT, 0 differ" in said
    assert said[-1] == "lost: digits8 seed 0 w4a4 by 3.0 points (interval 2.0) to NNCF"


def test_rows_with_more_bits_are_counted_apart() -> None:
    more = replace(OURS, seed=1, runtime=0.95, note="8 bits for means, as proposed")
    said = rows.verdict([OURS, more, PEER, replace(PEER, seed=1)])
    assert "w4a4: +7.50 points on average in 2 rows" in said
    assert "w4a4 without 8 bits for means: +5.00 points on average in 1 rows" in said


def test_tables_hold_means_over_seeds() -> None:
    plain = [Row("digits8", seed, "float", rows.FLOAT, "float", None, 0.95) for seed in range(2)]
    ours = [replace(OURS, seed=seed, predicted=0.9 + seed / 50, runtime=0.9 + seed / 50) for seed in range(2)]
    peers = [replace(PEER, seed=seed) for seed in range(2)]
    one = replace(PEER, tool="nncf")
    wide = replace(ours[0], note="results in 16 bits, as proposed")
    assert "| 91.0 * |" in rows.page_text([*plain, wide, ours[1], *peers], {"digits8": "digits"}, rows.PRECISIONS)
    both = replace(wide, note="results in 16 bits and 8 bits for means, as proposed")
    assert "| 91.0 * ‡ |" in rows.page_text([*plain, both, ours[1], *peers], {"digits8": "digits"}, rows.PRECISIONS)
    text = rows.page_text([*plain, *ours, *peers, one], {"digits8": "digits", "vit": "a ViT"}, rows.PRECISIONS)
    assert "## W4A4\n\n| network | seeds | float | exactqat | NNCF | AIMET |\n" in text
    # NNCF has one of two seeds.
    assert "| digits | 2 | 95.0 | 91.0 | 85.0 (predicted 93.0) (seed 0) | 85.0 (predicted 93.0) |\n" in text
    again = rows.page_text(
        [*plain, replace(ours[0], weights="1f"), peers[0], replace(one, weights="1f")],
        {"digits8": "d"},
        rows.PRECISIONS,
    )
    assert "| d | 1 | 95.0 | 90.0 | 85.0 (predicted 93.0) | 85.0 (predicted 93.0) † |\n" in again
    assert "ViT" not in text and text.startswith("- significantly worse than the best peer in 0 of 2 rows")


def test_tools_learn_from_a_teacher_by_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters run where this library is not, so the benchmark has the formula too."""
    torch = pytest.importorskip("torch")
    from exactqat import qat

    # By its path, as the tests have a module of this name.
    spec = importlib.util.spec_from_file_location("bench_networks", ROOT / "bench" / "accuracy" / "networks.py")
    assert spec is not None and spec.loader is not None
    networks = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, networks)
    spec.loader.exec_module(networks)
    outputs, answers = torch.randn(2, 16, 10, generator=torch.Generator().manual_seed(0)) * 5
    torch.testing.assert_close(networks.distillation(outputs, answers), qat.distillation_loss(outputs, answers))
