# SPDX-License-Identifier: Apache-2.0
"""The prepared model as a module: what it takes over from the user's model and how it behaves in PyTorch's hands."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.kit.planning.ends import Ends  # noqa: E402
from exactqat.kit.planning.network import Constant, Network, Step, Value  # noqa: E402
from exactqat.kit.planning.plans import Grid, Plan, PlanInput, PlanStep  # noqa: E402
from exactqat.qat.train.core.steps import WeightedStep  # noqa: E402
from exactqat.qat.train.torch.state import TrainingOnly  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    """Differs in its forward and its layers only."""

    def __init__(self, forward: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.compute = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


def float_results(model: nn.Module, prepared: qat.PreparedModel, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What the model gives in evaluation, and what the prepared one gives without quantization."""
    prepared.quantizing = False
    with torch.no_grad():
        return model.eval()(*args, **kwargs), prepared.eval()(*args, **kwargs)


# What it takes and gives


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(5, 4)

    def forward(self, image: Any, others: Any, scale: Any = None, flag: bool = True) -> Any:
        features = self.conv(image).mean((2, 3)) + self.linear(others["vector"])
        if scale is not None:
            features = features * scale
        return {"both": [features, features.relu()], "raw": (image.flatten(1), None, 3)} if flag else features


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_arguments_and_results_nest_as_the_users(batch: int) -> None:
    model = Nested()
    example = {"image": torch.rand(3, 3, 6, 6), "others": {"vector": torch.rand(3, 5)}, "scale": torch.rand(3, 4)}
    prepared = qat.prepare(model, example)
    qat.calibrate(prepared, [example])
    inputs = {
        "image": torch.rand(batch, 3, 6, 6),
        "others": {"vector": torch.rand(batch, 5)},
        "scale": torch.rand(batch, 4),
    }
    expected, result = float_results(model, prepared, **inputs)
    assert result["raw"][1:] == (None, 3) and isinstance(result["both"], list)
    torch.testing.assert_close(result, expected)
    # By position too, as the model itself does.
    torch.testing.assert_close(prepared(*inputs.values()), expected)
    with pytest.raises(TypeError, match="must nest"):
        prepared(inputs["image"], inputs["others"])


@pytest.mark.parametrize("rows", [1, 5])
def test_shapes_follow_the_batch(rows: int) -> None:
    def forward(self: Any, x: Any) -> Any:
        n, t = x.shape[:2]
        frames = self.conv(x.flatten(0, 1)).view(n, t, -1)
        return self.linear(frames.transpose(1, 2).reshape(n, 4, -1)[:, 1:]).flatten(1)

    model = Net(forward, conv=nn.Conv2d(2, 4, 3), linear=nn.Linear(27, 2))
    prepared = qat.prepare(model, torch.rand(2, 3, 2, 5, 5))
    batch = torch.rand(rows, 3, 2, 5, 5)
    qat.calibrate(prepared, [torch.rand(4, 3, 2, 5, 5)])
    expected, result = float_results(model, prepared, batch)
    torch.testing.assert_close(result, expected)


def test_a_model_may_be_a_single_layer() -> None:
    for model, batch in ((nn.Conv2d(3, 4, 3), torch.rand(2, 3, 5, 5)), (nn.Linear(3, 2), torch.rand(4, 3))):
        prepared = qat.prepare(model, batch)
        qat.calibrate(prepared, [batch])
        assert set(model.state_dict()) < set(prepared.state_dict())
        expected, result = float_results(model, prepared, batch)
        torch.testing.assert_close(result, expected)


# Parameters


def awkward_names() -> Net:
    """Names that a prepared model has uses for itself."""

    def forward(self: Any, x: Any) -> Any:
        x = self.quantization(self.layers(x)) + self.mean
        return self.plan(self.frozen(x).mean((2, 3)))

    return Net(
        forward,
        layers=nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()),
        quantization=nn.Conv2d(4, 4, 1),
        frozen=nn.Conv2d(4, 4, 1),
        plan=nn.Linear(4, 2),
        mean=nn.Parameter(torch.rand(1, 4, 1, 1)),
    )


def test_parameters_keep_their_names_and_go_back_into_the_users_model() -> None:
    model = awkward_names()
    batch = torch.rand(4, 3, 5, 5)
    prepared = qat.prepare(model, batch)
    qat.calibrate(prepared, [batch])
    state = prepared.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name
    optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
    prepared(batch).square().sum().backward()
    optimizer.step()
    again = copy.deepcopy(model)
    again.load_state_dict(
        {name: tensor for name, tensor in prepared.state_dict().items() if name in model.state_dict()}
    )
    assert not torch.equal(again.frozen.weight, model.frozen.weight)
    expected, result = float_results(again, prepared, batch)
    torch.testing.assert_close(result, expected)


def test_tied_weights_are_one_parameter_with_one_grid() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    batch = torch.rand(4, 6)
    prepared = qat.prepare(model, batch, [qat.Rule(ranges="learned")])
    qat.calibrate(prepared, [batch])
    first, second = (layer for _, layer in prepared.layers() if isinstance(layer, WeightedStep))
    assert first.weight_source() is second.weight_source()
    assert first.weight_quantizer is second.weight_quantizer
    names = [name for name, parameter in prepared.named_parameters() if parameter.shape == (6, 6)]
    assert names == ["0.weight"]
    prepared(batch).sum().backward()
    model(batch).sum().backward()
    assert first.weight_source().grad.abs().sum() > 0
    qat.freeze(prepared)
    codes = [prepared.numbers().weights[path].codes for path in ("0", "2")]
    assert np.array_equal(*codes)


def test_a_module_called_twice_has_ranges_of_its_own_for_each_call() -> None:
    shared = nn.Conv2d(3, 3, 1, bias=False)
    with torch.no_grad():
        shared.weight.copy_(torch.eye(3).reshape(3, 3, 1, 1) * 10)
    prepared = qat.prepare(nn.Sequential(shared, shared), torch.rand(2, 3, 4, 4))
    qat.calibrate(prepared, [torch.rand(2, 3, 4, 4)])
    widths = [float(layer.output_quantizer.ends()[1]) for _, layer in prepared.layers()]
    assert widths[1] / widths[0] == pytest.approx(10, rel=0.1) and widths[2] / widths[1] == pytest.approx(10, rel=0.1)
    assert [name for name, _ in prepared.named_parameters()] == ["0.weight"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_train_in_float32(dtype: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)).to(dtype)
    batch = torch.rand(4, 3, 5, 5, dtype=dtype)
    prepared = qat.prepare(model, batch)
    qat.calibrate(prepared, [batch])
    assert {tensor.dtype for tensor in prepared.parameters()} == {torch.float32}
    assert model[0].weight.dtype == dtype
    expected, result = float_results(copy.deepcopy(model).float(), prepared, batch.float())
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    prepared.train()
    assert prepared(batch).dtype == torch.float32
    prepared(batch).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rule",
    [{"ranges": policy} for policy in ("ema", "learned", "last_batch", "min_max", "percentile")]
    + [{"fold_batch_norm": True}, {"activation_bits": 16}],
    ids=lambda rule: str(*rule.values()),
)
def test_training_under_autocast(rule: dict[str, Any], dtype: Any) -> None:
    """Layers compute, and the operators get, tensors of 16 bits; parameters and ranges stay float32."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    batch, labels = torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    losses = {}
    for autocast in (False, True):
        prepared = qat.prepare(model, batch, [qat.Rule(**rule)])
        qat.calibrate(prepared, [batch])
        prepared.train()
        optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=autocast):
                loss = torch.nn.functional.cross_entropy(prepared(batch), labels)
            loss.backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in prepared.parameters())
            optimizer.step()
        assert {p.dtype for p in prepared.parameters()} == {torch.float32}
        assert {b.dtype for b in prepared.buffers() if b.is_floating_point()} == {torch.float32}
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            stored = prepared.stored_tensors(batch).values()
        assert (dtype in {value.dtype for _, value in stored}) == autocast
        losses[autocast] = loss.item()
    assert losses[True] == pytest.approx(losses[False], abs=0.02)
    prepared.eval()
    qat.freeze(prepared)
    expected = prepared(batch)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(prepared(batch), expected)


def test_what_the_user_froze_stays_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[0].weight.requires_grad_(False)
    model.train()
    model[1].eval()
    batch = torch.rand(4, 3, 8, 8)
    prepared = qat.prepare(model, batch)
    qat.calibrate(prepared, [batch])
    assert prepared.training
    before = {
        name: tensor.clone() for name, tensor in prepared.state_dict().items() if isinstance(tensor, torch.Tensor)
    }
    prepared(batch).square().sum().backward()
    after = prepared.state_dict()
    assert torch.equal(after["1.running_mean"], before["1.running_mean"])
    assert not torch.equal(after["3.running_mean"], before["3.running_mean"])
    parameters = dict(prepared.named_parameters())
    assert not parameters["0.weight"].requires_grad and parameters["0.weight"].grad is None
    assert parameters["1.weight"].grad is not None
    # And nothing moves it to training again.
    prepared.eval()
    prepared.train()
    prepared(batch)
    assert torch.equal(prepared.state_dict()["1.running_mean"], before["1.running_mean"])


def test_weight_norm_and_standardised_weights_are_trained_through() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: Any) -> Any:
            mean = self.weight.mean((1, 2, 3), keepdim=True)
            deviation = self.weight.std((1, 2, 3), keepdim=True)
            return F.conv2d(x, (self.weight - mean) / (deviation + 1e-5), self.bias)

    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), Standardised(4, 4, 3), nn.BatchNorm2d(4)
    )
    batch = torch.rand(4, 3, 8, 8)
    prepared = qat.prepare(model, batch)
    qat.calibrate(prepared, [batch])
    assert {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1", "2.weight"} <= set(
        prepared.state_dict()
    )
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    before = prepared(batch).detach()
    prepared(batch).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in prepared.named_parameters()}
    assert all(
        gradient is not None and gradient.abs().sum() > 0 for name, gradient in gradients.items() if name != "2.bias"
    )
    optimizer.step()
    assert not torch.equal(prepared(batch), before)
    again = copy.deepcopy(model)
    again.load_state_dict(
        {name: tensor for name, tensor in prepared.state_dict().items() if name in model.state_dict()}
    )
    expected, result = float_results(again, prepared, batch)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_buffers_and_parameters_as_operands_follow_the_state() -> None:
    model = Net(lambda self, x: (x - self.mean) * self.gain, mean=None, gain=nn.Parameter(torch.rand(1, 3, 1, 1) + 0.5))
    del model.mean
    model.register_buffer("mean", torch.rand(1, 3, 1, 1))
    batch = torch.rand(4, 3, 5, 5)
    prepared = qat.prepare(model, batch)
    qat.calibrate(prepared, [batch])
    assert {"mean", "gain"} <= set(prepared.state_dict())
    prepared(batch).sum().backward()
    assert dict(prepared.named_parameters())["gain"].grad.abs().sum() > 0
    state = prepared.state_dict()
    state["mean"] = torch.full((1, 3, 1, 1), 0.25)
    prepared.load_state_dict(state)
    model.mean.fill_(0.25)
    expected, result = float_results(model, prepared, batch)
    torch.testing.assert_close(result, expected)


def test_a_norm_shared_by_two_convolutions_counts_both() -> None:
    layers = {"one": nn.Conv2d(3, 4, 1), "two": nn.Conv2d(3, 4, 1), "norm": nn.BatchNorm2d(4)}
    model = Net(lambda self, x: self.norm(self.one(x)) + self.norm(self.two(x)), **layers).train()
    batch = torch.rand(4, 3, 5, 5)
    for folded in (False, True):
        prepared = qat.prepare(model, batch, [qat.Rule(fold_batch_norm=folded)])
        prepared.quantizing = False
        prepared(batch).square().sum().backward()
        original = copy.deepcopy(model)
        original(batch).square().sum().backward()
        assert int(prepared.state_dict()["norm.num_batches_tracked"]) == 2
        for name, parameter in original.named_parameters():
            gradient = dict(prepared.named_parameters())[name].grad
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=2e-3, msg=name)
        torch.testing.assert_close(prepared.state_dict()["norm.running_var"], original.norm.running_var)


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (8, 3, 9)),
        (nn.Linear(3, 4), nn.BatchNorm1d(4), (8, 3)),
        (nn.ConvTranspose2d(3, 4, 2, 2), nn.BatchNorm2d(4), (8, 3, 5, 5)),
    ],
)
@pytest.mark.parametrize("folded", [False, True])
def test_batch_norm_of_any_rank_trains_as_torchs(layer: nn.Module, norm: nn.Module, shape: Any, folded: bool) -> None:
    model = nn.Sequential(copy.deepcopy(layer), copy.deepcopy(norm)).train()
    batch = torch.randn(shape)
    prepared = qat.prepare(model, batch, [qat.Rule(fold_batch_norm=folded)])
    prepared.quantizing = False
    original = copy.deepcopy(model)
    results = [module(batch) for module in (prepared, original)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    for result in results:
        result.pow(3).sum().backward()
    own = dict(prepared.named_parameters())
    # That of a bias in front of batch norm is nothing but rounding.
    largest = max(float(parameter.grad.abs().max()) for parameter in original.parameters())
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-3, atol=1e-3 * largest, msg=name)
    for name, buffer in original.named_buffers():
        torch.testing.assert_close(prepared.state_dict()[name], buffer, rtol=1e-4, atol=1e-5, msg=name)


# Noise


@pytest.mark.parametrize("noise, shape", [(nn.Dropout3d, (16, 3, 4, 4)), (nn.Dropout1d, (16, 3))], ids=["3d", "1d"])
def test_whole_channels_drop_as_the_model_drops_them(noise: type[nn.Module], shape: tuple[int, ...]) -> None:
    """With an axis too few PyTorch adds one, and whole examples, or numbers, drop."""
    layer = nn.Conv2d(3, 8, 1) if len(shape) == 4 else nn.Linear(3, 8)
    model = nn.Sequential(layer, nn.Sigmoid(), noise(0.5)).train()
    x = torch.rand(shape)
    prepared = qat.prepare(model, x).train()
    kept = []
    for network in (model, prepared):
        torch.manual_seed(0)
        kept.append(network(x) != 0)
    assert kept[0].any() and not kept[0].all()
    torch.testing.assert_close(kept[1], kept[0])


def test_dropout_is_there_in_training_only() -> None:
    def forward(self: Any, x: Any) -> Any:
        x = F.dropout(self.linear(x), 0.5, self.training)
        x = self.drop(x)
        return x * x.new_empty((x.shape[0], 1)).bernoulli_(0.5) if self.training else x

    model = Net(forward, linear=nn.Linear(5, 400), drop=nn.Dropout(0.25)).train()
    batch = torch.rand(64, 5)
    prepared = qat.prepare(model, batch)
    qat.calibrate(prepared, [batch])
    assert sum(isinstance(prepared.step(step.path), TrainingOnly) for step in prepared.plan.steps) == 3
    prepared.train()
    zeros = float((prepared(batch) == 0).float().mean())
    assert zeros == pytest.approx(1 - 0.5 * 0.75 * 0.5, abs=0.08)
    prepared.eval()
    assert torch.equal(prepared(batch), prepared(batch))
    assert (prepared(batch) == 0).float().mean() < 0.05


# In PyTorch's hands


def trained_pair() -> tuple[qat.PreparedModel, torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    batch = torch.rand(4, 3, 5, 5)
    prepared = qat.prepare(model, batch, [qat.Rule(ranges="learned")])
    qat.calibrate(prepared, [batch])
    return prepared, batch


def test_copies_are_independent() -> None:
    prepared, batch = trained_pair()
    for other in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(other.eval()(batch), prepared.eval()(batch))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert prepared(batch).abs().sum() > 0
        assert not other(batch).any()
        assert len(other.range_parameters()) == len(prepared.range_parameters()) > 0


def test_state_through_a_file() -> None:
    prepared, batch = trained_pair()
    qat.freeze(prepared)
    file = io.BytesIO()
    torch.save(prepared.state_dict(), file)
    file.seek(0)
    other, _ = trained_pair()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.frozen and torch.equal(other.eval()(batch), prepared.eval()(batch))


def test_a_state_of_an_earlier_version_is_refused_with_a_sentence() -> None:
    prepared, _ = trained_pair()
    with pytest.raises(ValueError, match="saved by an earlier version of exactqat"):
        prepared.load_state_dict({"network.0.operation.weight": torch.zeros(1), "_extra_state": {"frozen": False}})
    with pytest.raises(ValueError, match="saved by a later version"):
        prepared.load_state_dict({"_extra_state": {"format": 99, "frozen": False}})


def test_hooks_and_functional_calls_see_the_model() -> None:
    prepared, batch = trained_pair()
    prepared.eval()
    seen = []
    prepared.register_forward_hook(lambda module, inputs, result: seen.append(result))
    result = prepared(batch)
    assert seen[0] is result
    zeros = {name: torch.zeros_like(tensor) for name, tensor in prepared.named_parameters()}
    assert not torch.func.functional_call(prepared, zeros, (batch,)).any()
    assert torch.equal(prepared(batch), result)
    assert len(repr(prepared)) < 120 and "not frozen" in repr(prepared)


def test_parameters_are_divided_into_ranges_and_others() -> None:
    model = Net(lambda self, x: self.range(x), range=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    prepared = qat.prepare(model, torch.rand(2, 4), [qat.Rule(ranges="learned")])
    others = {id(parameter) for parameter in prepared.other_parameters()}
    named = {name for name, parameter in prepared.named_parameters() if id(parameter) in others}
    assert named == {"range.0.weight", "range.0.bias"}
    assert len(prepared.range_parameters()) == len(list(prepared.parameters())) - 2
    qat.calibrate(prepared, [torch.rand(2, 4)])
    qat.freeze(prepared)
    assert not any(parameter.requires_grad for parameter in prepared.range_parameters())


def test_constants_lie_on_grids() -> None:
    gain = nn.Parameter(torch.tensor([[0.3], [-1.27], [0.0]]))
    model = Net(lambda self, x: torch.cat([x * self.gain, self.token.expand(x.shape[0], -1, -1)], 1), gain=gain)
    model.token = nn.Parameter(torch.linspace(2.0, 9.0, 8).reshape(1, 2, 4))
    batch = torch.rand(5, 3, 4)
    prepared = qat.prepare(model, batch)
    qat.calibrate(prepared, [batch])
    result = prepared.eval()(batch)
    assert result.shape == (5, 5, 4)
    # The grid of what is joined covers the constant.
    torch.testing.assert_close(result[:, 3:], model.token.expand(5, 2, 4), rtol=0, atol=0.05)
    qat.freeze(prepared)
    constants = prepared.numbers().constants
    ((codes, scale),) = (entry for entry in constants.values() if entry[0].shape == (3, 1))
    assert codes.ravel().tolist() == [30, -127, 0] and scale == pytest.approx(0.01)
    prepared.train()
    prepared(batch).sum().backward()
    assert dict(prepared.named_parameters())["token"].grad.abs().sum() > 0


def test_constants_of_operators_that_compare_codes_lie_on_their_grid() -> None:
    floor = nn.Parameter(torch.tensor([0.5, -0.25, 20.0]))
    grid = Grid("input", qat.Rule())
    step = PlanStep("maximum", "MAXIMUM", ("input", "floor"), {}, "input", (1, 3))
    constants = {"floor": Constant("floor", (3,), trainable=True)}
    values = {name: Value(name, (1, 3)) for name in ("input", "maximum")}
    maximum = Step("maximum", ("input", "floor"), "maximum")
    ends = Ends(["input"], ["maximum"])
    network = Network(("input",), ("maximum",), values, constants, (maximum,), input_tree=ends, output_tree=ends)
    feature = PlanInput("input", "input", (1, 3))
    plan = Plan(network, (feature,), (step,), {"input": grid}, constants, ("maximum",), ("maximum",))
    prepared = qat.PreparedModel(plan, {"floor": floor})
    batch = torch.randn(6, 3)
    qat.calibrate(prepared, [batch])
    result = prepared.eval()(batch)
    # The input's grid covers the constant, which no value of the input comes near.
    torch.testing.assert_close(result, torch.maximum(batch, floor), rtol=0, atol=0.06)
    layers = dict(prepared.layers())
    assert layers["maximum"].output_quantizer is layers["input"].output_quantizer
    qat.freeze(prepared)
    numbers = prepared.numbers()
    codes, scale = numbers.constants[("maximum", 1)]
    assert scale == numbers.grids["input"][0]
    np.testing.assert_allclose(codes * scale, floor.detach(), atol=float(scale) / 2)
    prepared.train()(batch).sum().backward()
    assert dict(prepared.named_parameters())["floor"].grad[0] > 0


def test_everything_goes_where_the_model_goes() -> None:
    mask = torch.tril(torch.ones(3, 3))

    def forward(self: Any, x: Any) -> Any:
        x = self.linear(self.normed(x).transpose(1, 2)) + mask[:, :2].repeat(2, 1)
        return F.gelu(x * torch.tensor([0.5, 2.0])) + 0.25

    layers = {"normed": nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 3, 1)), "linear": nn.Linear(3, 2)}
    batch = torch.rand(4, 3, 6)
    prepared = qat.prepare(Net(forward, **layers), batch)
    qat.calibrate(prepared, [batch])
    prepared.to("meta")
    for _, layer in prepared.layers():
        sources = [constant.source for constant in layer.constants.values()]
        if isinstance(layer, WeightedStep):
            sources += [source for source in (layer.weight_source, layer.bias_source) if source is not None]
        assert all(source().device.type == "meta" for source in sources)
    assert {tensor.device.type for tensor in (*prepared.parameters(), *prepared.buffers())} == {"meta"}


@pytest.mark.slow
def test_pytorchs_own_kernels_stay_within_their_memory() -> None:
    """Convolutions of one position with strides and few channels, and a transposed one with strides beyond its window:
    oneDNN's gradients of these write elsewhere when channels are last, as this kit hands them over."""
    script = Path(__file__).parents[1] / "campaigns" / "fuzz_steps.py"
    deadly = ["15", "116", "166", "178", "229", "283"]
    command = [sys.executable, str(script), "--seed", "1", "--case", *deadly]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def shrinking(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.ReLU(), nn.Conv2d(4, classes, 1, 2))


def test_a_job_keeps_channels_first_where_channels_last_are_deadly() -> None:
    from exactqat.application.job.models import new_model

    def last(model: nn.Module) -> bool:
        return any(
            p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
            for p in model.parameters()
            if p.dim() == 4
        )

    assert last(new_model("resnet8", (3, 16, 16), 4))
    assert not last(new_model(f"{__name__}:shrinking", (3, 16, 16), 4))


class Residual(nn.Module):
    """A branch of `scale` beside small numbers, as layers that begin as nothing are early in training."""

    def __init__(self, scale: float, nonnegative: bool) -> None:
        super().__init__()
        self.first, self.branch = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.full((4, 1, 1), scale))
        self.activation = nn.ReLU() if nonnegative else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.first(images) * 1e-4
        return features + self.activation(self.branch(features) * self.scale)


@pytest.mark.parametrize("ranges", ["ema", "learned"])
@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-4])
def test_a_branch_that_is_nearly_nothing_goes_through(scale: float, nonnegative: bool, ranges: str) -> None:
    deploy = pytest.importorskip("exactqat.deploy")
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    images = torch.randn(4, 3, 6, 6)
    prepared = qat.prepare(Residual(scale, nonnegative).train(), images, [qat.Rule(ranges=ranges)])
    qat.calibrate(prepared, [images])
    qat.freeze(prepared)
    prepared.eval()
    graph = deploy.lower(prepared)
    codes = np.random.default_rng(0).integers(-128, 128, (8, 6, 6, 3)).astype(np.int8)
    with tempfile.TemporaryDirectory() as folder:
        path = deploy.write_tflite(graph, Path(folder) / "model.tflite")
        assert deploy.verify(graph, path, codes).differing == 0
    # The stand-in of a tensor that is always zero is as fine as the sum, and loses nothing of it.
    (total,) = (step.path for step in prepared.plan.steps if step.kind == "ADD")
    assert torch.isfinite(prepared(images)).all() and prepared(images).abs().max() > 0, total


class NarrowSum(nn.Module):
    """A branch of `scale`, of few bits, beside a sum of eight bits that is about `width` wide."""

    def __init__(self, scale: float, width: float, nonnegative: bool) -> None:
        super().__init__()
        self.first, self.branch = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.full((4, 1, 1), scale))
        self.activation = nn.ReLU() if nonnegative else nn.Identity()
        self.width = width

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.first(images)
        features = features * (self.width / 4)
        return features + self.activation(self.branch(features) * self.scale)


@pytest.mark.slow
@pytest.mark.parametrize("ranges", ["ema", "learned"])
@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize(("bits", "scale", "width"), [(4, 0.0, 0.03), (2, 0.0, 0.2), (2, 1e-4, 0.05), (4, 1e-9, 0.01)])
def test_a_dead_branch_of_few_bits_goes_through(
    bits: int, scale: float, width: float, nonnegative: bool, ranges: str
) -> None:
    deploy = pytest.importorskip("exactqat.deploy")
    pytest.importorskip("ai_edge_litert")
    from exactqat.deploy import values

    torch.manual_seed(0)
    images = torch.randn(4, 3, 6, 6)
    model = NarrowSum(scale, width, nonnegative).train()
    plan = qat.prepare(model, images).plan
    (total,) = (step for step in plan.steps if step.kind == "ADD")
    # The branch: what the sum reads beside the features.
    rules = [qat.Rule(total.operands[1], activation_bits=bits, ranges=ranges), qat.Rule(ranges=ranges)]
    for profile in ("xnnpack-x86", "xnnpack-arm64", "reference", "micro"):
        prepared = qat.prepare(model, images, rules, device=profile)
        assert {prepared.plan.grids[prepared.plan.stored(name).grid].bits for name in total.operands} == {bits, 8}
        qat.calibrate(prepared, [images])
        qat.freeze(prepared)
        prepared.eval()
        lowered = deploy.lower(prepared)
        with torch.no_grad():
            own = values.device_codes(prepared, images)
        codes = own[lowered.inputs[0]]
        integers = deploy.simulate(lowered, codes, profile, tensors=list(own))
        assert all(np.array_equal(value, integers[name]) for name, value in own.items())
        if profile in deploy.profiles_here():
            with tempfile.TemporaryDirectory() as folder:
                path = deploy.write_tflite(lowered, Path(folder) / "model.tflite")
                assert deploy.verify(lowered, path, codes, profile).differing == 0


class Vanishing(nn.Module):
    """A residual block as in MobileNetV2 of values as small as `width`, each layer of the branch smaller by `gain`."""

    def __init__(self, width: float, gain: float, nonnegative: bool) -> None:
        super().__init__()
        self.first, self.expand, self.project = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.activation = nn.ReLU() if nonnegative else nn.Identity()
        with torch.no_grad():
            self.first.weight.mul_(width)
            self.first.bias.mul_(width)
            for layer in (self.expand, self.depthwise, self.project):
                layer.weight.mul_(gain)
                layer.bias.zero_()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.first(images)
        branch = self.project(torch.relu(self.depthwise(torch.relu(self.expand(features)))))
        return features + self.activation(branch)


@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize(
    ("width", "gain", "bits"),
    [(1e-6, 1.0, (4, 4)), (1e-6, 1.0, (4, 8)), (1e-5, 0.1, (3, 2)), (1e-5, 1.0, (2, 8)), (1e-4, 0.01, (8, 8))],
)
def test_a_block_that_nobody_trained_goes_through(
    width: float, gain: float, bits: tuple[int, int], nonnegative: bool
) -> None:
    deploy = pytest.importorskip("exactqat.deploy")
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    images = torch.randn(4, 3, 8, 8)
    rule = qat.Rule(weight_bits=bits[0], activation_bits=bits[1])
    prepared = qat.prepare(Vanishing(width, gain, nonnegative).train(), images, [rule])
    qat.calibrate(prepared, [images])
    qat.freeze(prepared)
    graph = deploy.lower(prepared)
    codes = np.random.default_rng(0).integers(-128, 128, (8, 8, 8, 3)).astype(np.int8)
    with tempfile.TemporaryDirectory() as folder:
        path = deploy.write_tflite(graph, Path(folder) / "model.tflite")
        assert deploy.verify(graph, path, codes).differing == 0
