# SPDX-License-Identifier: Apache-2.0
"""Ranges that the device's operators cannot take beside one another; the campaign is campaigns/extremes.py."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import plan_sketch
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactqat.kit.planning import plan
from exactqat.kit.planning.fitting import RangesMovedWarning, constant_limits, constant_step, fitting_ranges, limits_of
from exactqat.kit.planning.plans import Plan
from exactqat.kit.planning.rules import Rule

torch = pytest.importorskip("torch")
from test_plan import MEANINGS  # noqa: E402

from exactqat import deploy, qat  # noqa: E402


def scale(grid, ends) -> np.float32:
    """In float32, as the device has it."""
    if grid.fixed is not None:
        return np.float32(grid.fixed[0])
    low, high = map(np.float32, ends)
    if high - low < np.float32(2.0**-60):
        low, high = np.float32(0), np.float32(1)
    return np.float32(max(-low, high) / 32767) if grid.rule.is_int16 else np.float32((high - low) / (2**grid.bits - 1))


def beyond_limits(case_plan: Plan, ends, constants) -> list[str]:
    """Steps whose operator would be refused, with constants as training keeps them."""
    paths = []
    scales = {name: scale(grid, ends.get(name)) for name, grid in case_plan.grids.items()}
    for step in case_plan.steps:
        names = [case_plan.stored(operand).grid if case_plan.is_stored(operand) else None for operand in step.operands]
        if not any(names):
            continue
        grids = [case_plan.grids[name] for name in names if name is not None]
        limits = limits_of(step, grids, case_plan.grids[step.grid])
        if limits is None:
            continue
        known = [np.float32(constants[(step.path, len(names))])] if step.weights is not None else []
        for position, name in enumerate(names):
            if name is not None:
                known.append(scales[name])
                continue
            limited = constant_limits(case_plan, step, position)
            assert limited is not None
            least, most = constant_step(limited[0], scales[limited[1]], scales[step.grid])
            known.append(np.float32(min(max(constants[(step.path, position)], least), most)))
        # Channels with weights that are too small are constant ones, on a grid that fits.
        least = 0.0 if step.weights is not None else limits.lowest
        if not all(least <= value < limits.highest for value in limits.bounded(known, scales[step.grid])):
            paths.append(step.path)
    return paths


WITH_LIMITS = (
    "matmul by a weight",
    "lstm memory",
    "gru 0 2 True False True",
    "attention, masked by a tensor",
    "layer norm",
    "layer norm by length",
    "group norm 2",
    "matmul of two",
    "constant of higher rank",
    "mish",
    "hardswish",
)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", WITH_LIMITS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_ranges_of_all_sizes_fit_one_another(name: str, bits: int, seed: int) -> None:
    sketch = plan_sketch.Sketch()
    case_plan = plan(sketch.network(MEANINGS[name](sketch)), [Rule(activation_bits=bits)])
    rng = np.random.default_rng(seed)
    ends = {}
    for grid_name, grid in case_plan.grids.items():
        # Products of sigmoids, whose grids are fixed, have no larger ranges.
        low, high = -(10 ** rng.uniform(-14, 1)), 10 ** rng.uniform(-14, 1)
        ends[grid_name] = (0.0, high) if grid.nonnegative else (low, high)
        if grid.fixed_range is not None:
            ends[grid_name] = grid.fixed_range
    constants = {
        (step.path, position): 10 ** rng.uniform(-9, 2)
        for step in case_plan.steps
        for position, operand in enumerate(step.operands)
        if not case_plan.is_stored(operand)
    }
    constants |= {(step.path, len(step.operands)): 10 ** rng.uniform(-7, 4) for step in case_plan.steps if step.weights}
    moved = fitting_ranges(case_plan, ends, constants)
    assert not beyond_limits(case_plan, {**ends, **moved}, constants)
    assert not fitting_ranges(case_plan, {**ends, **moved}, constants)
    for moved_name, (low, high) in moved.items():
        assert case_plan.grids[moved_name].fixed is None
        assert low <= 0 <= high


def test_ranges_that_fit_stay_what_they_are() -> None:
    sketch = plan_sketch.Sketch()
    lstm_plan = plan(sketch.network(MEANINGS["lstm memory"](sketch)), [Rule()])
    assert not fitting_ranges(lstm_plan, dict.fromkeys(lstm_plan.grids, (-1.0, 1.0)), {})


HARD = [
    ("gru_keywords", "after"),
    ("keyword_transformer", "before"),
    ("norms", "before"),
    ("bi_fpn", "before"),
    ("statistics_pooling", "before"),
    ("ds_cnn", "before"),
    ("unet_nearest", "wide"),
    ("activations_that_cut", "wide"),
]


@pytest.mark.parametrize(("name", "how"), HARD)
def test_whatever_training_makes_of_the_numbers(name: str, how: str, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    from agreement import assert_exact
    from extremes import driven

    pair = driven(name, how, 0)
    assert pair is not None
    assert_exact(*pair, tmp_path)


def test_relu6_on_a_grid_whose_int32_does_not_reach_6(tmp_path: Path) -> None:
    """LiteRT refuses the file of such an int16 layer, though no code comes near 6."""
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    from agreement import assert_exact

    layer = torch.nn.Conv2d(3, 4, 3)
    with torch.no_grad():
        layer.weight.mul_(1e-5)
        layer.bias.mul_(1e-5)  # type: ignore[union-attr]
    x = torch.randn(2, 3, 6, 6)
    prepared = qat.prepare(torch.nn.Sequential(layer, torch.nn.ReLU6()), x, [qat.Rule(activation_bits=16)])
    qat.calibrate(prepared, [x])
    qat.freeze(prepared)
    graph = assert_exact(prepared.eval(), x, tmp_path)
    (step,) = graph.operators
    assert step.attributes["activation"] == "RELU6"
    assert 6 / graph.tensors[step.outputs[0]].quantization.scale[0] > 2**31


def test_freeze_says_what_it_moved() -> None:
    class Cancels(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.last(y - (y + 1e-4 * x))

    x = torch.randn(8, 6)
    prepared = qat.prepare(Cancels(), x)
    qat.calibrate(prepared, [x])
    before = {name: buffer.detach().clone() for name, buffer in prepared.named_buffers()}
    with pytest.warns(qat.RangesMovedWarning, match=r"changed that of 'sub' from -\S+ to -\S+: few codes"):
        qat.freeze(prepared)
    changed = {name for name, buffer in prepared.named_buffers() if not torch.equal(buffer, before[name])}
    assert changed == {f"quantization.sub.output_quantizer.range.{end}" for end in ("minimum", "maximum")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", qat.UnequalPartsWarning)  # 1e-4 * x is nothing beside y, and stays so
        qat.freeze(prepared)  # nothing is left to move


SIZES = [3e-13, 1e-9, 1e-7, 1e-5, 1e4]


@pytest.mark.parametrize("framework", ["torch", "jax", "keras"])
@pytest.mark.parametrize("size", SIZES)
def test_small_tensors_keep_their_ranges(framework: str, size: float) -> None:
    """Currents in microamperes, 24-bit samples over their peak: as many decibels as values near one."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 3)).astype(np.float32)
    x = (rng.uniform(0.1, 1, (64, 8)) * size).astype(np.float32)
    factor = 1 / size
    if framework == "jax":
        pytest.importorskip("jax")
        prepared = qat.jax.prepare(lambda p, x: (x * factor) @ p["w"], {"w": weight}, x[:2])
        state = prepared.freeze(*prepared.calibrate(*prepared.init(), [x]))
        result = np.asarray(prepared.apply(*state, x)[0])
    elif framework == "keras":
        keras = pytest.importorskip("keras")
        inputs = keras.Input((8,))
        network = keras.Model(inputs, keras.layers.Dense(3, use_bias=False)(inputs * factor))
        network.layers[-1].kernel.assign(weight)
        model = qat.keras.prepare(network)
        qat.keras.calibrate(model, [x])
        qat.keras.freeze(model)
        result = np.asarray(keras.ops.convert_to_numpy(model(x)))
    else:
        layer = torch.nn.Linear(8, 3, bias=False)
        layer.weight.data = torch.from_numpy(weight.T.copy())

        class Scaled(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer
                self.register_buffer("factor", torch.tensor(factor))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x * self.factor)

        prepared = qat.prepare(Scaled(), torch.from_numpy(x[:2]))
        qat.calibrate(prepared, [torch.from_numpy(x)])
        qat.freeze(prepared)
        result = prepared.eval()(torch.from_numpy(x)).detach().numpy()
    expected = (x.astype(np.float64) / size) @ weight
    assert 10 * np.log10((expected**2).sum() / ((expected - result) ** 2).sum()) > 35


def test_values_too_small_for_any_range_are_named() -> None:
    prepared = qat.prepare(torch.nn.Linear(4, 2, bias=False), torch.randn(2, 4) * 1e-19)
    qat.calibrate(prepared, [torch.randn(8, 4) * 1e-22])
    with pytest.warns(qat.RangesMovedWarning, match="all values of 'input', .* are below 9e-19"):
        qat.freeze(prepared)


def test_a_mean_of_nothing_runs_on_onnxruntime(tmp_path: Path) -> None:
    """Values that all but vanish are a range of zeros, which must not be much wider than what is averaged."""
    pytest.importorskip("onnxruntime", reason="needs exactqat[deploy]")
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 1, bias=False), torch.nn.AdaptiveAvgPool2d(1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1e-16], [-1e-16]]).repeat(4, 1, 1)[..., None])
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images = torch.cat([images, images.flip(-1)], 1)
    prepared = qat.prepare(model, images, device="onnxruntime-x86")
    qat.calibrate(prepared, [images])
    with pytest.warns(RangesMovedWarning, match="count as zero"):
        qat.freeze(prepared)
    graph = deploy.lower(prepared)
    codes = np.random.default_rng(0).integers(-128, 128, (4, 8, 8, 2)).astype(np.int8)
    assert deploy.verify(graph, deploy.write_onnx(graph, tmp_path / "model.onnx"), codes).equal
