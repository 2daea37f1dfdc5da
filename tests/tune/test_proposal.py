# SPDX-License-Identifier: Apache-2.0
"""More bits are proposed where what a network returns shares a grid badly and where few codes are averaged, with what
they cost, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from networks import examples, trained  # noqa: E402

from exactqat import deploy, qat, tune  # noqa: E402
from exactqat.deploy.footprint import arena_of  # noqa: E402
from exactqat.deploy.formats.tflite import tflite_bytes  # noqa: E402

IMAGES, CLASSES = examples(256, 1)
# What a box is: the means of the image's halves, small beside the scores.
BOXES = IMAGES.reshape(-1, 2, 32).mean(2)
TARGETS = np.concatenate([CLASSES[:, None], BOXES], 1)


class Heads(torch.nn.Module):
    """Scores of up to 100 and boxes of up to 0.5: of one layer, or of two that are joined."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.body, self.joined = trained(), joined
        self.scores, self.boxes = torch.nn.Linear(64, 4), torch.nn.Linear(64, 2)
        self.both = torch.nn.Linear(64, 6)
        with torch.no_grad():
            self.boxes.weight.zero_()
            for half in range(2):
                self.boxes.weight[half, half * 32 : half * 32 + 32] = 1 / 32
            self.boxes.bias.zero_()
            # A quarter of the image is brighter.
            place = torch.arange(64).reshape(8, 8)
            for quarter in range(4):
                row, column = divmod(quarter, 2)
                chosen = place[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4].reshape(-1)
                self.scores.weight[quarter] = -1.0
                self.scores.weight[quarter, chosen] = 3.0
            self.scores.bias.zero_()
            self.both.weight.copy_(torch.cat([self.scores.weight, self.boxes.weight]))
            self.both.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return torch.cat([self.scores(x), self.boxes(x)], 1) if self.joined else self.both(x)


def found_well(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The share of examples whose box is near."""
    return float((np.abs(outputs[:, 4:] - targets[:, 1:]).max(1) < 0.1).mean())


def calibrated(model: Any, rules: Any) -> Any:
    prepared = qat.prepare(model.eval(), torch.from_numpy(IMAGES[:2]), rules)
    qat.calibrate(prepared, [torch.from_numpy(IMAGES)])
    return prepared


@pytest.mark.parametrize(
    "joined", [pytest.param(False, id="one layer"), pytest.param(True, id="two joined", marks=pytest.mark.slow)]
)
def test_16_bits_are_proposed_and_keep_what_they_promise(joined: bool, tmp_path: Path) -> None:
    model = Heads(joined)
    search = tune.search(calibrated(model, qat.Rule(weight_bits=4)), (IMAGES, TARGETS), found_well, budget=10)
    proposal = search.proposal
    assert proposal is not None and proposal.alone < proposal.reference - 0.2
    assert set(proposal.layers) <= ({"cat", "scores", "boxes"} if joined else {"both"})
    assert set(proposal.layers.values()) == {16} and proposal.then > proposal.alone
    assert {rule.weight_bits for rule in proposal.rules} == {4}
    assert "16" in proposal.text() and max(map(len, search.text().splitlines())) <= 80
    assert json.loads(search.as_json())["proposal"]["layers"] == proposal.layers
    contents = [tflite_bytes(graph) for graph in (search.graph, proposal.graph)]
    assert len(contents[1]) - len(contents[0]) == proposal.flash
    arenas = [arena_of(content)[0] for content in contents]
    assert proposal.arena == (None if None in arenas else arenas[1] - arenas[0])
    # Prepared as proposed, the network is as good as its weights let it be, and is what the runtime computes.
    prepared = calibrated(model, proposal.rules)
    again = tune.search(prepared, (IMAGES, TARGETS), found_well, budget=10)
    assert again.proposal is None and again.after.metric > search.after.metric + 0.1
    again.apply(prepared)
    qat.freeze(prepared)
    graph = deploy.lower(prepared)
    (output,) = graph.outputs
    assert graph.tensors[output].dtype == "int16"
    pytest.importorskip("ai_edge_litert")
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    assert deploy.verify(graph, path, data=IMAGES).differing == 0


class Means(torch.nn.Module):
    """The quarter of an image, or the channel of four, whose pool is largest: averages lie between the codes of what
    they are averages of."""

    def __init__(self, pool: torch.nn.Module, channels: int) -> None:
        super().__init__()
        self.pixels = torch.nn.Conv2d(channels, channels, 1, groups=channels)
        self.pool, self.scores = pool, torch.nn.Linear(4, 4)
        with torch.no_grad():
            self.pixels.weight.fill_(1.0)
            self.scores.weight.copy_(torch.eye(4))
            for layer in (self.pixels, self.scores):
                assert layer.bias is not None
                layer.bias.zero_()

    def forward(self, x: torch.Tensor) -> Any:
        return self.scores(self.pool(torch.relu(self.pixels(x))).flatten(1))


RNG = np.random.default_rng(0)
BRIGHTNESS = RNG.permuted(np.tile([0.7, 0.8, 0.9, 1.0], (256, 1)), axis=1).reshape(256, 1, 2, 2)
NOISE = (RNG.uniform(0, 1, (256, 1, 8, 8)) * BRIGHTNESS.repeat(4, 2).repeat(4, 3)).astype(np.float32)
CHANNELS = (RNG.uniform(0, 1, (256, 4, 8, 8)) * BRIGHTNESS.reshape(256, 4, 1, 1)).astype(np.float32)


def searched_means(pool: torch.nn.Module, rules: Any, images: np.ndarray = NOISE) -> tuple[Any, Any]:
    """The prepared network and what its search found; its classes are the float network's."""
    model = Means(pool, images.shape[1]).eval()
    with torch.no_grad():
        classes = model(torch.from_numpy(images)).argmax(1).numpy()
    prepared = qat.prepare(model, torch.from_numpy(images[:2]), rules)
    qat.calibrate(prepared, [torch.from_numpy(images)])
    return prepared, tune.search(prepared, (images, classes), budget=3)


FEW = (qat.Rule("input", activation_bits=8), qat.Rule("scores", weight_bits=4, activation_bits=8),
       qat.Rule(weight_bits=4, activation_bits=4))  # fmt: skip


def test_8_bits_are_proposed_where_few_codes_are_averaged(tmp_path: Path) -> None:
    _, search = searched_means(torch.nn.AvgPool2d(4), FEW)
    proposal = search.proposal
    assert proposal is not None and proposal.layers == {"pixels": 8}
    assert proposal.alone < proposal.reference - 0.1 and proposal.then > proposal.reference - 0.05
    assert proposal.flash <= 0 and proposal.arena in (0, None)
    assert "where results are averaged" in " ".join(proposal.text().split()) and "network ends" not in proposal.text()
    assert max(map(len, search.text().splitlines())) <= 80
    prepared, again = searched_means(torch.nn.AvgPool2d(4), proposal.rules)
    assert again.proposal is None and again.after.metric > search.after.metric + 0.1
    assert [prepared.plan.grids[name].bits for name in ("input", "pixels", "scores")] == [8, 8, 8]
    assert {step.weights.rule.weight_bits for step in prepared.plan.steps if step.weights is not None} == {4}
    again.apply(prepared)
    qat.freeze(prepared)
    graph = deploy.lower(prepared)
    pytest.importorskip("ai_edge_litert")
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    assert deploy.verify(graph, path, data=NOISE).differing == 0


def test_8_bits_are_proposed_for_a_mean_of_the_whole_map() -> None:
    """It has a grid of its own, and what is averaged keeps its 4 bits."""
    proposal = searched_means(torch.nn.AvgPool2d(8), FEW, CHANNELS)[1].proposal
    assert proposal is not None and proposal.layers == {"pool": 8}
    assert proposal.alone < proposal.reference - 0.05 and proposal.then > proposal.reference - 0.02
    assert proposal.flash <= 0 and (proposal.arena is None or proposal.arena <= 0)
    prepared, again = searched_means(torch.nn.AvgPool2d(8), proposal.rules, CHANNELS)
    assert again.proposal is None
    assert [prepared.plan.grids[name].bits for name in ("input", "pixels", "pool")] == [8, 4, 8]


def test_8_bits_are_proposed_for_nothing_else() -> None:
    """A largest value is one of the codes, and 8 bits are enough for means."""
    assert searched_means(torch.nn.MaxPool2d(4), FEW)[1].proposal is None
    assert searched_means(torch.nn.AvgPool2d(4), qat.Rule(weight_bits=4))[1].proposal is None


def test_nothing_is_proposed_for_classes() -> None:
    search = tune.search(calibrated(trained(), qat.Rule()), (IMAGES, CLASSES), budget=3)
    assert search.proposal is None and json.loads(search.as_json())["proposal"] is None


def test_nothing_is_proposed_that_is_not_shown_to_be_exact() -> None:
    """onnxruntime computes 16 bits in real numbers."""
    prepared = qat.prepare(Heads(False).eval(), torch.from_numpy(IMAGES[:2]), device="onnxruntime-x86")
    qat.calibrate(prepared, [torch.from_numpy(IMAGES)])
    assert tune.search(prepared, (IMAGES, TARGETS), found_well, budget=2).proposal is None
    plan = tune.plan(prepared, (IMAGES, TARGETS), found_well, max_drop=1, candidates=1)
    assert any("FULLY_CONNECTED:int16" in why and "has not been shown" in why for why in plan.left_out.values())
