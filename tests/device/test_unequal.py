# SPDX-License-Identifier: Apache-2.0
"""Sums in which one operand is so much smaller that the result's grid leaves little of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exactqat import deploy, qat  # noqa: E402
from exactqat.deploy.unequal import unequal_parts  # noqa: E402


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
    notes = [warning for warning in heard if issubclass(warning.category, qat.UnequalPartsWarning)]
    assert len(notes) == said == bool(unequal_parts(graph))
    if said:
        (part,) = unequal_parts(graph)
        assert (
            part.decibels < 20 and part.part in str(notes[0].message) and "activation_bits=16" in str(notes[0].message)
        )
        assert notes[0].filename == __file__


def assert_said(do: Callable[[], object], words: str) -> None:
    """A single warning with these words, at the line that calls; none: it does not warn."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        do()
    notes = [warning for warning in heard if issubclass(warning.category, qat.UnequalPartsWarning)]
    assert len(notes) == bool(words)
    assert all(words in str(note.message) and note.filename == __file__ for note in notes)


class Joined(torch.nn.Module):
    """Boxes and scores in one tensor."""

    def __init__(self, factor: float, with_sigmoid: bool) -> None:
        super().__init__()
        self.box, self.score = torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(3, 4, 1)
        self.factor, self.with_sigmoid = factor, with_sigmoid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.score(x)
        return torch.cat([torch.relu(self.box(x)) * self.factor, score.sigmoid() if self.with_sigmoid else score], 1)


@pytest.mark.parametrize("with_sigmoid", [True, False])
@pytest.mark.parametrize(("factor", "bits", "lost"), [(1, 8, False), (640, 8, True), (640, 16, False)])
def test_a_part_may_be_stored_on_the_grid_of_the_whole(
    factor: float, bits: int, lost: bool, with_sigmoid: bool
) -> None:
    """By a product that rescales it, or by the layer that makes it."""
    torch.manual_seed(0)
    x = torch.randn(16, 3, 4, 4)
    model = qat.prepare(Joined(factor, with_sigmoid), x[:2], qat.Rule(activation_bits=bits))
    part = "sigmoid" if with_sigmoid else "score"
    assert_said(lambda: qat.calibrate(model, [x[:8], x[8:]]), f"{part} in cat" if lost else "")
    assert_said(lambda: qat.freeze(model), f"{part} in cat" if lost else "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qat.UnequalPartsWarning)
        parts = unequal_parts(deploy.lower(model.eval()))
    assert [named.part for named in parts] == [part] * lost
    assert all(named.decibels < 20 for named in parts)


def test_a_calibration_says_what_it_has_seen_itself() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 4, 4)
    model = qat.prepare(Joined(640, False), x[:2])
    assert_said(lambda: qat.calibrate(model, [x]), "score in cat")
    with torch.no_grad():
        model.get_parameter("score.weight").mul_(640)
        model.get_parameter("score.bias").mul_(640)
    assert_said(lambda: qat.calibrate(model, [x], restart=True), "")


@pytest.mark.parametrize("factor", [1, 640])
def test_jax_says_the_same(factor: int) -> None:
    jax = pytest.importorskip("jax")
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)

    def network(weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        return jax.numpy.concatenate([factor * jax.nn.relu(x @ weights["box"]), x @ weights["score"]], 1)

    prepared = qat.jax.prepare(network, dict.fromkeys(("box", "score"), np.eye(4, dtype=np.float32)), x[:2])
    state = prepared.init()
    assert_said(lambda: prepared.calibrate(*state, [x, x]), "dB left" if factor > 1 else "")


@pytest.mark.parametrize("factor", [1, 640])
def test_keras_says_the_same(factor: int) -> None:
    keras = pytest.importorskip("keras")
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    inputs = keras.Input((4,))
    box = keras.layers.Dense(4, activation="relu", kernel_initializer="identity", name="box")(inputs)
    score = keras.layers.Dense(4, kernel_initializer="identity", name="score")(inputs)
    model = qat.keras.prepare(keras.Model(inputs, keras.layers.Concatenate(name="both")([factor * box, score])))
    assert_said(lambda: qat.keras.calibrate(model, [x, x]), "score in both" if factor > 1 else "")


@pytest.mark.parametrize(("factor", "lost"), [(1, False), (1 / 640, True)])
def test_a_file_that_multiplies_by_a_constant(factor: float, lost: bool) -> None:
    builder = deploy.Builder()
    box, score = (builder.input(name, (1, 4), deploy.per_tensor(1.0, 0)) for name in ("box", "score"))
    constant = builder.constant("factor", np.full((1, 4), 100, np.int8), deploy.per_tensor(factor / 100, 0))
    scaled = builder.mul(score, constant, deploy.per_tensor(1.0, 0), name="scaled")
    graph = builder.graph([builder.concatenation([box, scaled], deploy.per_tensor(1.0, 0), name="whole", axis=1)])
    assert [part.part for part in unequal_parts(graph)] == ["scaled"] * lost
