# SPDX-License-Identifier: Apache-2.0
"""Sums in which one operand is so much smaller that the result's grid leaves little of it."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from exactqat import deploy, qat  # noqa: E402
from exactqat.deploy.unequal import UnequalPartsWarning, unequal_parts  # noqa: E402


class Sum(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.large, self.small, self.factor = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.large(x)) * self.factor + torch.relu(self.small(x))


@pytest.mark.parametrize(("factor", "bits", "said"), [(1, 8, False), (8, 8, False), (640, 8, True), (640, 16, False)])
def test_a_part_that_loses_its_signal_is_named(factor: float, bits: int, said: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    rules = [qat.Rule("add*", activation_bits=bits), qat.Rule()]
    model = qat.prepare(Sum(factor), x[:2], rules)
    qat.calibrate(model, [x])
    qat.freeze(model)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        graph = deploy.lower(model.eval())
    notes = [warning for warning in heard if issubclass(warning.category, UnequalPartsWarning)]
    assert len(notes) == said == bool(unequal_parts(graph))
    if said:
        (part,) = unequal_parts(graph)
        assert (
            part.decibels < 20 and part.part in str(notes[0].message) and "activation_bits=16" in str(notes[0].message)
        )
        assert notes[0].filename == __file__
