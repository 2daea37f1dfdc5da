# SPDX-License-Identifier: Apache-2.0
"""Sensitivities and searches of networks of many kinds: everything in 16 bits is the float network, and what is found
can be given to the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from exactqat import deploy, qat, tune  # noqa: E402


class Residual(nn.Module):
    """Depthwise, transposed and residual layers; concatenation, slicing, pooling, a sigmoid within."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.pointwise = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Linear(256, 5)

    def forward(self, x: Any) -> Any:
        x = nn.functional.relu6(self.first(x))
        y = self.pointwise(nn.functional.relu6(self.norm(self.depthwise(x))))
        x = nn.functional.max_pool2d(torch.cat([x + y, y], 1)[:, :8], 2)
        return self.last(torch.sigmoid(self.up(x)).flatten(1))


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.wide, self.narrow, self.last = (
            nn.LayerNorm(8),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            nn.Linear(8, 4),
        )

    def forward(self, x: Any) -> Any:
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2) / 3, -1)
        x = self.norm(x + weights @ self.value(x))
        return self.last((x + self.narrow(nn.functional.gelu(self.wide(x)))).mean(1))


class Functions(nn.Module):
    """Activations of many kinds; one clamps by its range; a last step outside of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv1d(2, 6, 3), nn.Conv1d(6, 6, 3), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        x = nn.functional.leaky_relu(self.second(nn.functional.hardswish(self.first(x))))
        x = nn.functional.hardtanh(x * torch.tanh(x), -1, 2.0)
        return nn.functional.log_softmax(self.last(x.mean(2)), 1)


class TwoInputs(nn.Module):
    """A product of two inputs' features."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 8), nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Any, y: Any) -> Any:
        return self.last(torch.relu(self.left(x) * self.right(y)))


COARSE, MIXED = [qat.Rule(weight_bits=4, activation_bits=4)], [qat.Rule("first", activation_bits=16), qat.Rule()]


@pytest.mark.parametrize(
    ("kind", "shapes", "rules"),
    [
        (Residual, [(3, 8, 8)], [qat.Rule()]),
        (Residual, [(3, 8, 8)], COARSE),
        (Residual, [(3, 8, 8)], MIXED),
        (Residual, [(3, 8, 8)], [qat.Rule(per_channel=False, fold_batch_norm=True)]),
        (Residual, [(3, 8, 8)], [qat.Rule(ranges="learned")]),
        (Attention, [(5, 8)], [qat.Rule()]),
        (Functions, [(2, 12)], [qat.Rule()]),
        (TwoInputs, [(4,), (3,)], [qat.Rule()]),
    ],
    ids=["residual", "few bits", "16 bits", "folded", "learned", "attention", "functions", "two inputs"],
)
def test_networks_of_many_kinds(kind: Any, shapes: list[tuple[int, ...]], rules: list[qat.Rule]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    rng = np.random.default_rng(0)
    inputs = [rng.normal(0, 1, (64, *shape)).astype(np.float32) for shape in shapes]
    tensors: Any = tuple(map(torch.from_numpy, inputs)) if len(inputs) > 1 else torch.from_numpy(inputs[0])
    with torch.no_grad():
        classes = model(*map(torch.from_numpy, inputs)).argmax(1).numpy()
    data = (inputs if len(inputs) > 1 else inputs[0], classes)
    prepared = qat.prepare(model, tensors, rules, check=False, keep_final_activation=False)
    qat.calibrate(prepared, [tensors])
    analysis = tune.sensitivity(prepared, data, device="micro")
    # Of classes that the float network gives.
    assert analysis.reference is not None and analysis.reference >= 0.95
    assert min(part.decibels for part in analysis.parts) >= analysis.decibels - 1
    assert analysis.parts[-1].cumulative == analysis.device_metric
    searched = tune.search(prepared, data, budget=25)
    assert not searched.before.better_than(searched.after, True)
    searched.apply(prepared)
    qat.freeze(prepared)
    lowered = deploy.lower(prepared)
    for one, other in zip(lowered.tensors.values(), searched.graph.tensors.values(), strict=True):
        assert one.quantization.equals(other.quantization)
        assert one.data is other.data is None or np.array_equal(one.data, other.data)
