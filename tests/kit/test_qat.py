# SPDX-License-Identifier: Apache-2.0
"""The QAT kit: modules against plain PyTorch, rules and errors, lowered networks against the device runtime."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from bits import assert_same_bits  # noqa: E402
from one_grid import one_grid  # noqa: E402
from torch import nn  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.deploy.graph import Graph  # noqa: E402
from exactqat.deploy.lower import lower, lower_with_layouts  # noqa: E402
from exactqat.deploy.simulate import simulate  # noqa: E402
from exactqat.deploy.values import device_codes, layer_values  # noqa: E402
from exactqat.qat.train.core.steps import WeightedStep  # noqa: E402
from exactqat.qat.train.core.weights import channel_grid  # noqa: E402
from exactqat.qat.train.torch import primitives as primitives_torch  # noqa: E402
from exactqat.qat.train.torch.graphed import Replay  # noqa: E402

FIXED_INPUT = qat.Rule("input", ranges="fixed", fixed_range=(-1.0, 1.0))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Residual(nn.Module):
    """A plain model with everything the device runs: dense, depthwise, strided, residual, pooled, dropped out."""

    def __init__(self, channels: int = 3, multiplier: int = 1) -> None:
        super().__init__()
        wide = 8 * multiplier
        self.stem = nn.Conv2d(channels, 8, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(8)
        self.filter = nn.Conv2d(8, wide, 3, padding=1, groups=8)
        self.filter_norm = nn.BatchNorm2d(wide)
        self.mix = nn.Conv2d(wide, 8, 1, bias=False)
        self.mix_norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU6()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.stem_norm(self.stem(images)))
        mixed = self.mix_norm(self.mix(self.relu(self.filter_norm(self.filter(features)))))
        features = self.relu(features + mixed)
        return self.classifier(self.dropout(torch.flatten(self.pool(features), 1)))


def images(count: int = 16, channels: int = 3, size: int = 9) -> torch.Tensor:
    return torch.rand(count, channels, size, size) * 2 - 1


def prepared(model: nn.Module, batch: torch.Tensor, *rules: qat.Rule) -> qat.PreparedModel:
    result = qat.prepare(model, batch, [FIXED_INPUT, *rules])
    qat.calibrate(result, [batch])
    return result


def assert_device_agrees(model: qat.PreparedModel, batch: torch.Tensor, folder: Path) -> Graph:
    """Lowers, writes, runs and compares: no integer may differ, those that training computes included."""
    pytest.importorskip("ai_edge_litert")
    from exactqat.deploy.formats.tflite import write_tflite
    from exactqat.deploy.verify import verify

    model.eval()
    lowered = lower_with_layouts(model)
    graph, _ = lowered
    trained = device_codes(model, batch, lowered=lowered)
    report = verify(graph, write_tflite(graph, folder / "model.tflite"), trained["input"])
    assert report.differing == 0, report.table()
    assert report.values > 0
    integers = simulate(graph, trained["input"], tensors=[name for name in trained if name != "input"])
    for name, codes in integers.items():
        assert np.array_equal(trained[name], codes), name
    return graph


# Modules


@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize(("stride", "dilation", "padding"), [(1, 1, 1), (2, 1, 0), (1, 2, 2)])
def test_depthwise_is_torchs_grouped_convolution(multiplier: int, stride: int, dilation: int, padding: int) -> None:
    ours = qat.DepthwiseConv2d(6, 3, stride, padding, dilation, multiplier)
    theirs = nn.Conv2d(6, 6 * multiplier, 3, stride, padding, dilation, groups=6)
    theirs.load_state_dict(ours.state_dict())
    first, second = (images(4, 6, 9).contiguous(memory_format=torch.channels_last) for _ in range(2))
    second = first.clone().requires_grad_()
    first = first.requires_grad_()
    torch.testing.assert_close(ours(first), theirs(second), rtol=1e-5, atol=1e-5)
    ours(first).square().sum().backward()
    theirs(second).square().sum().backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kind", [qat.Conv2d, qat.DepthwiseConv2d])
def test_same_padding_has_a_result_at_every_strided_position(kind: type, stride: int, size: int) -> None:
    module = kind(4, 4, 3, stride) if kind is qat.Conv2d else kind(4, 3, stride)
    batch = images(2, 4, size)
    result = module(batch)
    total = max((-(-size // stride) - 1) * stride + 3 - size, 0)
    before = total // 2
    padded = F.pad(batch, (before, total - before, before, total - before))
    expected = F.conv2d(padded, module.weight, module.bias, stride, groups=module.groups)
    assert result.shape[2:] == (-(-size // stride),) * 2
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_same_padding_puts_the_surplus_zero_after() -> None:
    module = qat.Conv2d(1, 1, 3, stride=2, bias=False)
    with torch.no_grad():
        module.weight.zero_()
        module.weight[0, 0, 0, 0] = 1.0
    batch = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert module(batch).flatten().tolist() == [0.0, 2.0, 8.0, 10.0]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_fused_batch_norm_is_torchs(momentum: float | None) -> None:
    ours, theirs = qat.FusedBatchNorm2d(5, momentum=momentum), nn.BatchNorm2d(5, momentum=momentum)
    with torch.no_grad():
        ours.weight.uniform_(-1, 1)
        ours.bias.normal_()
    theirs.load_state_dict(ours.state_dict())
    for _ in range(3):
        first = (images(8, 5) * 3 + 1).requires_grad_()
        second = first.detach().clone().requires_grad_()
        torch.testing.assert_close(ours(first), theirs(second), rtol=1e-4, atol=1e-5)
        ours(first).pow(3).sum().backward()
        theirs(second).pow(3).sum().backward()
        torch.testing.assert_close(first.grad, second.grad, rtol=1e-3, atol=1e-3)
    # Two training forwards per round above; the running statistics have seen the same batches on both sides.
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)
    ours.eval(), theirs.eval()
    batch = images(8, 5)
    torch.testing.assert_close(ours(batch), theirs(batch), rtol=1e-4, atol=1e-5)


def test_fused_batch_norm_refuses_one_value_per_channel_and_missing_statistics() -> None:
    with pytest.raises(ValueError, match="more than one value per channel"):
        qat.FusedBatchNorm2d(3)(torch.rand(1, 3, 1, 1))
    with pytest.raises(ValueError, match="track_running_stats"):
        qat.FusedBatchNorm2d(3, track_running_stats=False)


# Ranges


def test_ema_range_starts_with_the_first_batch_and_then_follows() -> None:
    model, quantizer = one_grid(qat.Rule(ema_decay=0.75))
    quantizer(torch.tensor([-1.0, 3.0]))
    assert [float(bound) for bound in quantizer.ends()] == [-1.0, 3.0]
    quantizer.range.batches.fill_(1000)
    quantizer(torch.tensor([-5.0, 7.0]))
    assert [float(bound) for bound in quantizer.ends()] == [-2.0, 4.0]
    model.eval()
    quantizer(torch.tensor([-50.0, 70.0]))
    assert [float(bound) for bound in quantizer.ends()] == [-2.0, 4.0]


def test_last_batch_range_forgets_and_percentile_leaves_outliers_out() -> None:
    _, last = one_grid(qat.Rule(ranges="last_batch"))
    for low, high in ((-9.0, 9.0), (-1.0, 3.0)):
        last(torch.tensor([low, high]))
    assert [float(bound) for bound in last.ends()] == [-1.0, 3.0]
    values = torch.arange(1000.0)[torch.randperm(1000)] - 300
    _, percentile = one_grid(qat.Rule(ranges="percentile", percentile=99.0))
    percentile(values)
    # 990 of the 1000 values lie at or below the maximum, and at or above the minimum.
    assert [float(bound) for bound in percentile.ends()] == [-290.0, 689.0]
    percentile(values * 2)
    assert [float(bound) for bound in percentile.ends()] == [-435.0, 1033.5]
    _, everything = one_grid(qat.Rule(ranges="percentile", percentile=100))
    everything(values)
    assert [float(bound) for bound in everything.ends()] == [-300.0, 699.0]


def test_learned_ranges_get_the_gradients_of_what_they_clip() -> None:
    _, quantizer = one_grid(qat.Rule(ranges="learned"))
    quantizer.range.load_state_dict(
        {"minimum": torch.tensor(-1.0), "maximum": torch.tensor(2.0), "batches": torch.tensor(1)}
    )
    quantizer(torch.tensor([-9.0, -8.0, 0.5, 7.0])).sum().backward()
    assert quantizer.range.minimum.grad == 2.0
    assert quantizer.range.maximum.grad == 1.0


def test_learned_weight_ranges_are_trained_through_prepare() -> None:
    model = prepared(Residual(), images(), qat.Rule(weight_bits=3, activation_bits=4, ranges="learned"))
    model.train()
    model(images()).square().sum().backward()
    names = [name for name, parameter in model.named_parameters() if ".range." in name]
    assert any("weight_quantizer" in name for name in names) and any("output_quantizer" in name for name in names)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if ".range." in name}
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients.values())
    assert sum(float(gradient.abs().sum()) for gradient in gradients.values()) > 0
    assert len(model.range_parameters()) + len(model.other_parameters()) == len(list(model.parameters()))


@pytest.mark.parametrize(("bits", "trained"), [(4, True), (8, False), (16, False)])
def test_in_8_bits_no_gradient_goes_to_the_data(bits: int, trained: bool) -> None:
    model = qat.prepare(Residual(), images(), [qat.Rule(activation_bits=bits, ranges="learned")])
    qat.calibrate(model, [images()])
    model.train()
    seen = model.step("input").compose(images())
    assert seen.requires_grad == trained
    names = {name for name, _ in model.named_parameters()}
    assert ("quantization.input.output_quantizer.range.maximum" in names) == trained
    assert {"quantization.input.output_quantizer.range.maximum", *names} <= set(model.state_dict())
    # It starts where all learned ranges do.
    assert 0 < float(model.step("input").output_quantizer.range.maximum) <= float(images().max())


@pytest.mark.parametrize("ranges", ["ema", "last_batch", "min_max", "percentile"])
@pytest.mark.parametrize("nonnegative", [False, True])
def test_ranges_move_by_numbers_as_by_tensors(ranges: str, nonnegative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [torch.randn(50, generator=torch.Generator().manual_seed(n)) * (n + 1) - 0.3 for n in range(30)]
    batches += [torch.full((50,), value) for value in (0.0, 1e-42, 3e38)]
    # Values that are not finite move no range; after a ReLU nothing below zero counts, -inf included.
    odd = [torch.full((50,), value) for value in (torch.inf, torch.nan, -torch.inf)]
    count = len(batches) + int(nonnegative)
    batches = [*odd[: 1 if ranges == "ema" else 0], *batches[:3], *odd, *batches[3:]]
    bounds = []
    for at_hand in (True, False):
        if not at_hand:
            monkeypatch.setattr("exactqat.qat.train.torch.state._are_at_hand", lambda *ends: False)
        _, followed = one_grid(qat.Rule(ranges=ranges, ema_decay=0.8), nonnegative)
        ends = []
        for batch in batches:
            followed.observe(batch)
            if int(followed.batches):
                ends += [*followed.ends(), *(end.clone() for end in followed.held()[:2])]
        bounds.append(torch.stack(ends).numpy())
        assert int(followed.batches) == count and np.isfinite(bounds[-1]).all()
    assert_same_bits(bounds[0], bounds[1], what=ranges)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ema", "last_batch", "min_max", "percentile", "learned"])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_what_is_not_finite_is_reported_when_it_comes(policy: str, odd: float) -> None:
    batch = images()
    broken = batch.clone()
    broken[3, 1, 2, 2] = odd
    model = prepared(Residual(), batch, qat.Rule(ranges=policy))
    before = {name: value.clone() for name, value in model.state_dict().items() if ".range." in name}
    with pytest.raises(ValueError, match="batch 2 of batches gives NaN or infinity in 'stem'"):
        qat.calibrate(model, [2 * batch, broken, batch])
    assert before and all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    free = qat.prepare(Residual(), batch, [qat.Rule(ranges=policy)])
    with pytest.raises(ValueError, match="batch 1 of batches gives NaN or infinity in 'input'"):
        qat.calibrate(free, [broken])
    qat.calibrate(free, [batch])
    ranges = {name: value for name, value in free.state_dict().items() if ".range.m" in name}
    assert ranges and all(torch.isfinite(value).all() for value in ranges.values())


def test_what_is_not_finite_is_refused_before_and_after_the_last_phase() -> None:
    from exactqat.deploy import lower

    model = prepared(Residual(), images(), qat.Rule(ranges="learned"))
    for spoil, message in (
        (model.step("stem").output_quantizer.range.maximum, "the range of 'stem' contains NaN"),
        (dict(model.named_buffers())["stem_norm.running_var"], "the statistics of 'stem' contains NaN"),
    ):
        kept = spoil.detach().clone()
        spoil.data.fill_(torch.nan)
        with pytest.raises(ValueError, match=message):
            qat.freeze(model)
        assert not model.frozen
        spoil.data.copy_(kept)
    qat.freeze(model)
    lower(model)
    for name in ("stem.weight", "mix_norm.bias", "classifier.bias"):
        spoil = dict(model.named_parameters())[name]
        kept = spoil.detach().clone()
        spoil.data.view(-1)[0] = torch.inf
        with pytest.raises(
            ValueError, match=f"the layer '{name.split('.')[0].removesuffix('_norm')}' contains NaN or inf"
        ):
            lower(model)
        spoil.data.copy_(kept)
    lower(model)


def test_models_that_cannot_be_prepared_say_what_they_are() -> None:
    model = prepared(Residual(), images(), qat.Rule())
    for network in (model, nn.Sequential(model)):
        with pytest.raises(ValueError, match="prepared already"):
            qat.prepare(network, images())
    with pytest.raises(TypeError, match="ScriptModule"):
        qat.prepare(torch.jit.script(nn.Sequential(nn.ReLU())), images())
    with pytest.raises(TypeError, match=r"iterable of batches, got an array of shape \[16, 3, 9, 9\]"):
        qat.calibrate(model, images())


@pytest.mark.parametrize("ranges", ["ema", "learned"])
def test_one_backward_after_two_forwards(ranges: str) -> None:
    """As with two views of a batch: the second forward moves what the first has used."""
    model = prepared(Residual(), images(), qat.Rule(ranges=ranges)).train()
    (model(images()).sum() + model(2 * images()).square().sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_range_of_an_activation_that_is_always_zero_is_zero_to_one() -> None:
    _, quantizer = one_grid(qat.Rule())
    assert quantizer(torch.zeros(4)).tolist() == [0.0] * 4
    assert [float(bound) for bound in quantizer.ends()] == [0.0, 1.0]
    scale, zero_point = quantizer.scale_and_zero_point()
    assert (scale, zero_point) == (np.float32(1) / np.float32(255), 0)


def test_ranges_refuse_min_above_max_and_use_without_data() -> None:
    with pytest.raises(ValueError, match="min <= 0 <= max"):
        qat.Rule(ranges="fixed", fixed_range=(2.0, 1.0))
    _, grid = one_grid(qat.Rule())
    with pytest.raises(ValueError, match="min <= 0 <= max"):
        grid.range.load_state_dict(
            {"minimum": torch.tensor(2.0), "maximum": torch.tensor(1.0), "batches": torch.tensor(1)}
        )
    with pytest.raises(RuntimeError, match="calibrate"):
        grid.ends()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_the_grid_of_the_operator(bits: int) -> None:
    model, quantizer = one_grid(qat.Rule(activation_bits=bits))
    quantizer(torch.tensor([-0.7, 2.9]))
    model.eval()
    scale, zero_point = quantizer.scale_and_zero_point()
    values = quantizer(torch.linspace(-2, 4, 500))
    codes = quantizer.codes(values)
    assert codes.min() == 0 and codes.max() == 2**bits - 1
    assert np.array_equal((codes - zero_point).astype(np.float32) * scale, values.numpy())


# Rules and errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_bits": 1}, "weight_bits must be an integer from 2 to 8"),
        ({"activation_bits": 17}, "activation_bits must be an integer from 2 to 16"),
        ({"activation_bits": True}, "activation_bits"),
        ({"ranges": "magic"}, "ema, last_batch, percentile, min_max, learned, fixed"),
        ({"percentile": 50}, "percentile"),
        ({"ranges": "fixed"}, "fixed_range must be given if and only if"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"match": ""}, "match"),
        ({"symmetric": False}, "also set symmetric=True"),
    ],
)
def test_rules_say_what_is_wrong(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qat.Rule(**arguments)


def test_the_first_matching_rule_decides_and_unused_ones_are_reported() -> None:
    rules = [
        qat.Rule("classifier", weight_bits=8),
        qat.Rule("classfier", weight_bits=2),
        qat.Rule("*", weight_bits=4),
        qat.Rule("stem"),
    ]
    with pytest.warns(qat.UnusedRuleWarning) as caught:
        model = qat.prepare(Residual(), images(), rules)
    texts = [str(warning.message) for warning in caught]
    assert [("classfier" in text, "'stem'" in text) for text in texts] == [(True, False), (False, True)]
    assert (
        "matches no layer; names near it: 'classifier'" in texts[0] and "earlier rules already match stem" in texts[1]
    )
    assert model.unused_rules == texts
    bits = {
        path: layer.weight_quantizer.rule.weight_bits
        for path, layer in model.layers()
        if isinstance(layer, WeightedStep)
    }
    assert bits == {"stem": 4, "filter": 4, "mix": 4, "classifier": 8}


@pytest.mark.slow
def test_a_layer_without_a_rule_and_a_rule_the_device_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match="no rule matches layer 'input'"):
        qat.prepare(Residual(), images(), [qat.Rule("stem")])
    wide = [qat.Rule(activation_bits=12)]
    with pytest.raises(ValueError, match="activation_bits=12"):
        qat.prepare(Residual(), images(), wide)
    qat.prepare(Residual(), images(), wide, deployable=False)


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        products = torch.cumprod(self.body(batch), 1)
        ordered, _ = torch.sort(torch.cumprod(torch.relu(products), 2), dim=1)
        return torch.sigmoid(ordered) * 2.0


def test_every_unsupported_operator_is_named_with_its_place() -> None:
    with pytest.raises(qat.UnsupportedOperator) as caught:
        qat.prepare(Unsupported(), images())
    text = str(caught.value)
    # What is done to a result that cannot be had is no problem of its own.
    assert text.startswith("3 place(s)"), text
    assert "cumprod, 2 places, first at" in text and "sort has no int8 operator" in text
    assert "test_qat.py, line" in text and "Supported: " in text


class Called(nn.Module):
    """What follows differs in its forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.linear = nn.Linear(3, 4)


def called(forward: object) -> nn.Module:
    return type("Model", (Called,), {"forward": forward})()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: x.cumprod(1), "cumprod has no int8 operator"),
        (lambda self, x: self.conv(x) - x.mean(), "it mixes the examples of a batch"),
        (lambda self, x: self.conv(x) if x.sum() > 0 else x, "what it does depends on the values of a tensor"),
        (lambda self, x: torch.bmm(x[:, 0], x[:, 1]).sort(-1)[0], "sort has no int8 operator"),
    ],
)
def test_unsupported_calls(forward: object, message: str) -> None:
    with pytest.raises(qat.UnsupportedOperator, match=message):
        qat.prepare(called(forward), images())


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.conv(torch.sigmoid(x)),
        lambda self, x: x * self.conv.weight.sum(),
        lambda self, x: torch.add(x, x, alpha=2),
        lambda self, x: x + x.mean((2, 3), keepdim=True),
        lambda self, x: x * x.mean(1, keepdim=True),
        lambda self, x: x * x[:, :, :1],
        lambda self, x: 2.0 / (x + 3.0),
        lambda self, x: self.conv(self.conv(x)),
        lambda self, x: self.norm(self.norm(x)),
        lambda self, x: torch.cat([x, x], 2),
        lambda self, x: F.max_pool2d(x, 4, 2, 0, ceil_mode=True),
        lambda self, x: F.avg_pool2d(x, 4, 4, 1, ceil_mode=True),
        lambda self, x: F.max_pool2d(x, 2, 2, 1),
        lambda self, x: F.avg_pool2d(x, 2, 2, 1, count_include_pad=False),
        lambda self, x: F.avg_pool2d(x, 2, divisor_override=3),
        lambda self, x: F.adaptive_avg_pool2d(x, 2),
        lambda self, x: F.relu(torch.flatten(x, 1)),
        lambda self, x: self.conv(x).flatten(1),
        lambda self, x: x.view(x.size(0), 9, -1),
        lambda self, x: self.conv(x).mean(1),
        lambda self, x: self.linear(x.permute(0, 2, 3, 1)),
        lambda self, x: self.conv(x).flatten(0, 1),
    ],
)
def test_calls_of_all_kinds(forward: object, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    from agreement import assert_exact, trained

    batch = images(4)
    assert_exact(trained(called(forward), batch), batch, tmp_path)


class Autoencoder(nn.Module):
    """Its image comes out of a Linear, and passes activations on its way to the convolution."""

    def __init__(self, dimensions: int = 2) -> None:
        super().__init__()
        Conv, Back = (nn.Conv2d, nn.ConvTranspose2d) if dimensions == 2 else (nn.Conv1d, nn.ConvTranspose1d)
        self.shape = (6, *[4] * dimensions)
        count = math.prod(self.shape)
        self.inside = nn.Sequential(Conv(3, 6, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(count, 7), nn.ReLU())
        self.outside = nn.Sequential(nn.Linear(7, count), nn.ReLU(), nn.Unflatten(1, self.shape), nn.Hardtanh(0, 2))
        self.last = nn.Sequential(nn.LeakyReLU(0.2), Back(6, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.outside(self.inside(x)))


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_an_autoencoder_moves_nothing(dimensions: int, bits: int, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    from agreement import assert_exact, trained

    batch = torch.rand(4, 3, *[8] * dimensions)
    rules = [qat.Rule("input"), qat.Rule("*", weight_bits=bits, activation_bits=bits)]
    graph = assert_exact(trained(Autoencoder(dimensions), batch, *rules), batch, tmp_path)
    moved = [operator.kind for operator in graph.operators].count("TRANSPOSE")
    assert moved == (0 if dimensions == 2 else 2)  # signals come and leave with their channels before the time


def test_prepare_leaves_the_model_alone_and_takes_its_weights_over() -> None:
    model = Residual()
    before = copy.deepcopy(model.state_dict())
    result = prepared(model, images(), qat.Rule())
    result.train()
    result(images()).sum().backward()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(result.stem.weight, model.stem.weight, rtol=0, atol=0)
    assert type(model.stem) is nn.Conv2d


def test_eight_bits_stay_close_to_float() -> None:
    model, batch = Residual().eval(), images(64)
    result = prepared(model, batch, qat.Rule(ranges="min_max")).eval()
    error = (result(batch) - model(batch)).abs().max()
    assert error < 0.05 * model(batch).abs().max()


@pytest.mark.slow
def test_the_report_tells_noise_by_layer(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    from exactqat.deploy import verify, write_tflite

    batch = images(40)
    ratios = {}
    for bits in (8, 4):
        model = prepared(Residual(), batch, qat.Rule(weight_bits=bits, activation_bits=bits, ranges="min_max")).eval()
        qat.freeze(model)
        graph = lower(model)
        codes = device_codes(model, batch)["input"]
        before = model(batch)
        float_values, trained_values = layer_values(model, batch)
        assert torch.equal(model(batch), before), "looking at the float network must not change the quantized one"
        path = write_tflite(graph, tmp_path / "model.tflite")
        report = verify(graph, path, codes, float_values=float_values, trained_values=trained_values)
        assert report.differing == 0
        ratios[bits] = {row.name: row for row in report.operators if row.device_sqnr is not None}
        first = [{name: values[:9] for name, values in every.items()} for every in (float_values, trained_values)]
        of_first = verify(graph, path, codes, float_values=first[0], trained_values=first[1])
        of_nine = verify(graph, path, codes[:9], float_values=first[0], trained_values=first[1])
        for row, other in zip(of_first.operators, of_nine.operators, strict=True):
            assert (row.trained_sqnr, row.device_sqnr) == (other.trained_sqnr, other.device_sqnr)
        assert set(ratios[bits]) == {name for name, _ in model.layers()} - {"input"}
        stem = float_values["stem"]
        noise = np.square(stem - trained_values["stem"]).mean()
        assert ratios[bits]["stem"].trained_sqnr == pytest.approx(
            10 * np.log10(np.square(stem).mean() / noise), rel=1e-4
        )
    for name, row in ratios[8].items():
        assert abs(row.trained_sqnr - row.device_sqnr) < 0.1, name
        # A bit is worth 6 dB: four of them about 24.
        assert 15 < row.device_sqnr - ratios[4][name].device_sqnr < 33, name
        assert row.device_sqnr > 25, name


# State and the last phase


@pytest.mark.slow
@pytest.mark.parametrize("ranges", ["ema", "last_batch", "percentile", "min_max", "learned"])
@pytest.mark.parametrize("frozen", [False, True])
def test_state_dict_round_trip(ranges: str, frozen: bool) -> None:
    rules = [FIXED_INPUT, qat.Rule(weight_bits=4, activation_bits=4, ranges=ranges)]
    batch = images()
    first = qat.prepare(Residual(), batch, rules)
    qat.calibrate(first, [batch])
    if frozen:
        qat.freeze(first)
    second = qat.prepare(Residual(), batch, rules)
    second.load_state_dict(first.state_dict())
    assert second.frozen is frozen
    assert torch.equal(first.eval()(batch), second.eval()(batch))


def test_freezing_fixes_statistics_and_ranges_and_leaves_weights_to_train() -> None:
    model = prepared(Residual(), images(), qat.Rule())
    qat.freeze(model)
    model.train()
    fixed = {name: entry.clone() for name, entry in model.named_buffers()}
    model(images() * 3).square().sum().backward()
    assert all(torch.equal(entry, fixed[name]) for name, entry in model.named_buffers())
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {
        "stem.weight",
        "stem_norm.weight",
        "stem_norm.bias",
    } <= trained
    assert not any(".range." in name for name in trained)
    with pytest.raises(ValueError, match="calibrate before freeze"):
        qat.calibrate(model, [images()])


def chain(momentum: float, depth: int = 6) -> nn.Module:
    """As denoisers have it: convolution, batch norm and ReLU, again and again."""
    layers: list[nn.Module] = []
    for position in range(depth):
        layers += [
            nn.Conv2d(8 if position else 1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8, momentum=momentum),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


def least_decibels(model: qat.PreparedModel, batch: torch.Tensor) -> float:
    """Of all stored tensors beside the same network's without quantization."""
    exact, trained = model.eval().trained().layer_values(batch)
    return min(float(10 * np.log10((exact[n] ** 2).sum() / ((exact[n] - trained[n]) ** 2).sum())) for n in exact)


def shown_to(model: qat.PreparedModel, batches: int) -> qat.PreparedModel:
    """A model that has seen some pairs of images in training."""
    model.train()
    with torch.no_grad():
        for _ in range(batches):
            model(images(2, channels=1))
    return model


@pytest.mark.parametrize("policy", ["ema", "last_batch"])
def test_statistics_that_are_not_settled_are_named_and_ranges_can_be_made_to_fit(policy: str) -> None:
    batch = images(channels=1)
    model = shown_to(qat.prepare(chain(momentum=0.05), batch, [qat.Rule(ranges=policy)]), 3)
    again = copy.deepcopy(model)
    with pytest.warns(
        qat.UnsettledStatisticsWarning,
        match=r"6 .* batch norms .* 86%.* 3 training batches at momentum 0.05.*restart=True",
    ):
        qat.freeze(model)
    qat.calibrate(again, [batch], restart=True)
    with pytest.warns(qat.UnsettledStatisticsWarning):
        qat.freeze(again)
    assert least_decibels(model, batch) < 15
    assert least_decibels(again, batch) > 30


@pytest.mark.parametrize(
    ("momentum", "batches", "variance"),
    [(0.05, 0, 1.0), (0.05, 40, 1.0), (0.95, 1, 1.0), (0.05, 3, 0.01), (0.05, 3, 4)],
)
def test_statistics_that_are_settled_are_frozen_without_a_word(
    momentum: float, batches: int, variance: float, recwarn: pytest.WarningsRecorder
) -> None:
    batch = images(channels=1)
    network = chain(momentum, depth=2)
    for norm in (network[1], network[4]):
        nn.init.constant_(norm.running_var, variance)  # loaded, from a file that holds no count
    model = prepared(network, batch, qat.Rule())
    qat.freeze(shown_to(model, batches))
    assert not recwarn.list


@pytest.mark.slow
def test_calibration_from_the_start_forgets_and_its_failure_does_not() -> None:
    batch = images()
    model, fresh = (
        prepared(Residual(), batch * 100, qat.Rule()),
        qat.prepare(Residual(), batch, [FIXED_INPUT, qat.Rule()]),
    )
    fresh.load_state_dict({**fresh.state_dict(), **dict(model.named_parameters())}, strict=False)
    state = {name: entry.clone() for name, entry in model.state_dict().items() if isinstance(entry, torch.Tensor)}
    for nothing, message in (([], "empty"), ([batch, batch[:, :1]], "must have shape")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            qat.calibrate(model, nothing, restart=True)
        assert all(torch.equal(model.state_dict()[name], entry) for name, entry in state.items())
    qat.calibrate(model, [batch], restart=True)
    qat.calibrate(fresh, [batch])
    for name, entry in fresh.state_dict().items():
        if ".range." in name:
            assert torch.equal(model.state_dict()[name], entry), name


def test_bias_on_the_grid_has_the_gradient_of_the_bias() -> None:
    bias = torch.tensor([0.1234, -3.3], requires_grad=True)
    scales = torch.tensor([0.01, 0.02]), torch.tensor(0.5), torch.tensor(0.1)
    grid = channel_grid(primitives_torch, torch.ones(2), bias, *scales)
    assert torch.equal(grid.bias, grid.bias_code * (torch.tensor(0.5) * grid.weight_scale))
    assert torch.equal(grid.bias_code, torch.round(bias / torch.tensor([0.005, 0.01])))
    grid.bias.sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [1.0, 1.0]


# On the device


@pytest.mark.parametrize("ranges", ["ema", "learned"])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_a_trained_network_is_what_the_device_computes(bits: int, ranges: str, tmp_path: Path) -> None:
    batch = images(32)
    model = prepared(Residual(), batch, qat.Rule(weight_bits=bits, activation_bits=bits, ranges=ranges))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    labels = torch.randint(0, 5, (32,))
    model.train()
    for step in range(12):
        if step == 8:
            qat.freeze(model)
        optimizer.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    assert_device_agrees(model, batch, tmp_path)


@pytest.mark.parametrize("ranges", ["ema", "learned"])
def test_one_scale_for_a_whole_weight(ranges: str, tmp_path: Path) -> None:
    batch = images(24)
    model = prepared(Residual(multiplier=2), batch, qat.Rule(weight_bits=5, per_channel=False, ranges=ranges))
    qat.freeze(model)
    graph = assert_device_agrees(model, batch, tmp_path)
    assert (
        graph.tensors["classifier/filter"].quantization.scale.min()
        == graph.tensors["classifier/filter"].quantization.scale.max()
    )


@pytest.mark.parametrize("ranges", ["ema", "learned"])
def test_folded_batch_norm_leaves_one_scale_for_each_layer(ranges: str, tmp_path: Path) -> None:
    batch = images(32)
    rule = qat.Rule(weight_bits=6, per_channel=False, fold_batch_norm=True, ranges=ranges)
    model = prepared(Residual(multiplier=2), batch, rule)
    with torch.no_grad():
        model.stem_norm.weight[:2] = torch.tensor([0.0, -1.0])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model.train()
    for step in range(8):
        if step == 5:
            qat.freeze(model)
        optimizer.zero_grad()
        F.cross_entropy(model(batch), torch.arange(32) % 5).backward()
        optimizer.step()
    graph = assert_device_agrees(model, batch, tmp_path)
    filters = [tensor for name, tensor in graph.tensors.items() if name.endswith("/filter")]
    assert len(filters) == 4
    assert all(filter_.quantization.axis is None and filter_.quantization.scale.size == 1 for filter_ in filters)
    assert not graph.tensors["stem/filter"].data[0].any()


@pytest.mark.slow
def test_folded_batch_norm_is_batch_norm_but_for_the_quantized_weight() -> None:
    batch, network = images(16), Residual()
    models = [prepared(network, batch, qat.Rule(fold_batch_norm=folded, ranges="min_max")) for folded in (False, True)]
    results = []
    for model in models:
        model.quantizing = False
        model.train()
        model.dropout.eval()
        results.append([model(batch + shift) for shift in (0.0, 0.3)])
        results[-1].append(model.eval()(batch))
        results[-1][0].square().sum().backward()
    for plain, folded in zip(*results, strict=True):
        torch.testing.assert_close(folded, plain, rtol=1e-4, atol=1e-5)
    for (name, plain_parameter), folded_parameter in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        plain_gradient, folded_gradient = plain_parameter.grad, folded_parameter.grad
        assert (plain_gradient is None) == (folded_gradient is None), name
        if plain_gradient is not None:
            torch.testing.assert_close(folded_gradient, plain_gradient, rtol=1e-3, atol=1e-4)
    for plain_buffer, folded_buffer in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(folded_buffer, plain_buffer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_negative_zero_and_dead_channels(bits: int, tmp_path: Path) -> None:
    model, batch = Residual(multiplier=2), images(24)
    with torch.no_grad():
        for norm in (model.stem_norm, model.filter_norm, model.mix_norm):
            norm.weight.uniform_(-1.5, 1.5)
            norm.bias.uniform_(0.1, 0.5)
            norm.running_var.uniform_(0.05, 0.5)
            norm.running_mean.normal_(0, 0.1)
            norm.weight[0] = 0.0
            norm.weight[1] = -1.0
            norm.weight[2] = 1e-30
        model.mix.weight[3] = 0.0
        model.filter.weight[4] = 0.0
    quantized = prepared(model, batch, qat.Rule(weight_bits=bits, activation_bits=bits))
    qat.freeze(quantized)
    graph = assert_device_agrees(quantized, batch, tmp_path)
    for name in ("stem", "filter", "mix"):
        filter_ = graph.tensors[f"{name}/filter"]
        channel_axis = 3 if name == "filter" else 0
        by_channel = np.moveaxis(filter_.data, channel_axis, 0)
        assert not by_channel[[0, 2]].any(), "a channel with gamma = 0 holds its bias only"
        raw = np.asarray(quantized.get_submodule(name).weight.detach())[1]
        codes = by_channel[1].transpose(2, 0, 1) if name != "filter" else by_channel[1]
        moved = np.abs(codes.ravel()) > 0
        assert moved.any() and np.all(np.sign(codes.ravel()[moved]) == -np.sign(raw.ravel()[moved]))


def test_an_activation_that_is_always_zero(tmp_path: Path) -> None:
    model, batch = Residual(), images()
    with torch.no_grad():
        model.filter_norm.bias.fill_(-100.0)
    quantized = prepared(model, batch, qat.Rule())
    qat.freeze(quantized)
    assert_device_agrees(quantized, batch, tmp_path)
    assert not quantized.stored_tensors(batch)["filter"][1].any()


def test_flatten_of_a_feature_map_and_a_dense_network(tmp_path: Path) -> None:
    convolutional = nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 25, 4))
    dense = nn.Sequential(nn.Linear(6, 7), nn.ReLU6(), nn.Identity(), nn.Linear(7, 3))
    for model, batch in ((convolutional, images(8, 2, 5)), (dense, torch.rand(8, 6))):
        quantized = prepared(model, batch, qat.Rule())
        qat.freeze(quantized)
        assert_device_agrees(quantized, batch, tmp_path)


@pytest.mark.parametrize("size", [5, 8])
def test_padding_is_lowered_to_what_was_trained(size: int, tmp_path: Path) -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.torch_style = nn.Conv2d(2, 4, 3, stride=2, padding=1)
            self.tensorflow_style = qat.DepthwiseConv2d(4, 3, 2)
            self.none = qat.Conv2d(4, 3, 1, padding="VALID")

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.none(self.tensorflow_style(self.torch_style(batch))).mean((2, 3))

    batch = images(8, 2, size)
    quantized = prepared(Strided(), batch, qat.Rule())
    qat.freeze(quantized)
    graph = assert_device_agrees(quantized, batch, tmp_path)
    kinds = [operator.kind for operator in graph.operators]
    # On an odd size one zero on either side is TensorFlow's SAME; on an even size it is not.
    assert kinds.count("PAD") == (0 if size == 5 else 1)


def test_lowering_asks_for_a_frozen_model_and_a_bias_that_fits() -> None:
    batch = images()
    quantized = prepared(Residual(), batch, qat.Rule())
    with pytest.raises(ValueError, match="freeze"):
        lower(quantized)
    qat.freeze(quantized)
    with torch.no_grad():
        quantized.classifier.bias.fill_(1e9)
    with pytest.raises(ValueError, match="classifier"):
        lower(quantized)


def test_graphs_are_made_of_a_model_on_a_gpu_in_training() -> None:
    model, images = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    prepared = qat.prepare(model, images)
    with pytest.raises(ValueError, match="model and inputs must be on one GPU, got tensors on cpu$"):
        qat.graphed(prepared, images)
    with pytest.raises(ValueError, match="got tensors on cpu, meta"):
        qat.graphed(prepared, images.to("meta"))
    with pytest.raises(TypeError, match="got nothing"):
        qat.graphed(prepared)
    with pytest.raises(TypeError, match="got dict"):
        qat.graphed(prepared, {"x": images})
    with pytest.raises(TypeError, match="got Sequential"):
        qat.graphed(model, images)


class OneProduct:
    """In place of graphs on a card: the values of one call, x * weight."""

    def __init__(self) -> None:
        self.parameters, self.has_gradient, self.calls = [nn.Parameter(torch.tensor(3.0))], [True, False], 0

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        self.calls += 1
        self.x = inputs[0].detach().clone()
        return [self.x * self.parameters[0].detach(), self.x.argmax()]

    def replay_backward(self, gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [(gradients[0] * self.x).sum()]


def test_graphs_refuse_a_backward_pass_after_another_call() -> None:
    captured: Any = OneProduct()
    weight = captured.parameters[0]

    def call(x: torch.Tensor) -> torch.Tensor:
        result, place = Replay.apply(captured, 1, x, weight)
        assert not place.requires_grad
        return result

    call(torch.tensor([1.0, 2.0])).sum().backward()
    call(torch.tensor([4.0, 2.0])).sum().backward()
    assert weight.grad == 9
    earlier, later = call(torch.ones(2)), call(torch.zeros(2))
    later.sum().backward()
    with pytest.raises(RuntimeError, match="must come before the next call and before parameters change"):
        earlier.sum().backward()
    result = call(torch.ones(2))
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="before parameters change"):
        result.sum().backward()
