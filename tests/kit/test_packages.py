# SPDX-License-Identifier: Apache-2.0
"""`make packages`, on networks that need no package."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
pytest.importorskip("onnxruntime", reason="needs exactqat[onnx]")

import packages  # noqa: E402
import run_packages  # noqa: E402
from torch import nn  # noqa: E402


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.choosing = nn.Linear(6, 4), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x.topk(2, dim=1)[0] if self.choosing else x


def built(choosing: bool):
    model = Chooses()
    model.choosing = choosing
    return model.train(), (torch.randn(2, 6),)


ENTRIES = {
    "plain": packages.Entry(lambda: built(False)),
    "helped": packages.Entry(lambda: built(True), "model.choosing = False", lambda model, examples: built(False)),
    "refused": packages.Entry(lambda: built(True)),
}


@pytest.mark.slow
def test_a_row_says_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "networks", lambda: ENTRIES)
    rows = [run_packages.one(name) for name in ENTRIES]
    assert [row["outcome"] for row in rows] == ["as it is", "with help", "refused"]
    assert rows[0]["values"] == rows[1]["values"] > 0 and rows[0]["differing"] == rows[1]["differing"] == 0
    assert "topk" in rows[1]["refusal"] and "topk" in rows[2]["reason"]
    text = run_packages.table(rows)
    assert text.startswith(f"1 of 3 as they are, 1 with help, 1 refused, 0 failed; {2 * rows[0]['values']:,} integers")
    assert "| helped | with help |" in text and "model.choosing = False" in text
