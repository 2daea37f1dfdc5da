# SPDX-License-Identifier: Apache-2.0
"""The frozen network in PyTorch is the device: its codes, its gradients, and how it behaves as a module.

A sample; `python tests/campaigns/run_frozen.py` takes some 170 networks through.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import plain_networks  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from agreement import by_device, frozen_differences, leaves  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.deploy import PROFILES  # noqa: E402
from exactqat.deploy.lower import lower  # noqa: E402
from exactqat.qat.train.core.on_device import DeviceNetwork  # noqa: E402
from exactqat.qat.train.core.steps import Step, WeightedStep  # noqa: E402
from exactqat.qat.train.torch import primitives as primitives_torch  # noqa: E402

SAMPLE = (
    "unet_bilinear",
    "ds_cnn",
    "m5",
    "siamese",
    "tiny_vit",
    "squeeze_excite_net",
    "activations_leaky_elu",
    "activations_hard",
    "pads",
    "norms",
    "statistics_pooling",
    "weight_standardised",
    "tied_weights",
    "espcn",
    "lstm_time_first",
    "global_pools",
    "subclasses",
)
EIGHT = qat.Rule()
LARGE = ("unet_bilinear", "tiny_vit", "lstm_time_first")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def frozen(model: nn.Module, examples: Any, rule: qat.Rule = EIGHT, steps: int = 2, **options: Any) -> Any:
    """Prepared, calibrated, frozen, and trained for some steps."""
    batch = examples if isinstance(examples, tuple) else (examples,)
    prepared = qat.prepare(model, batch if len(batch) > 1 else batch[0], [rule], **options)
    qat.calibrate(prepared, [batch if len(batch) > 1 else batch[0]])
    prepared.train()
    prepared(*batch)
    qat.freeze(prepared)
    parameters = [parameter for parameter in prepared.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, 1e-3) if parameters else None
    for _ in range(steps if optimizer is not None else 0):
        optimizer.zero_grad()
        sum((result - torch.randn_like(result)).square().mean() for result in leaves(prepared(*batch))).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return prepared.eval()


def small() -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.Sigmoid()
    return nn.Sequential(*layers), torch.rand(6, 3, 5, 5)


def composed(model: qat.PreparedModel) -> qat.PreparedModel:
    """The same network in real numbers with fake quantization, as it was before the device's integers."""
    other = copy.deepcopy(model)
    other._core.profile = None
    # It stays so for every device that it is compared with.
    other._core.compute_as = lambda profile: None
    return other


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_ranges_that_no_device_takes_are_named() -> None:
    """Of a network that diverged after `freeze`; a step that the host computes has limits of its own."""
    for rule, value, message in (
        (EIGHT, math.inf, "the range of '0' contains NaN or infinity"),
        (qat.Rule(activation_bits=16), 1e12, "LOGISTIC .*: input scale must be in"),
    ):
        prepared = frozen(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.ReLU()), torch.rand(3, 4), rule)
        with torch.no_grad():
            prepared.get_submodule("quantization.0.output_quantizer.range").maximum.fill_(value)
        with pytest.raises(ValueError, match=message):
            prepared(torch.rand(3, 4))


# Codes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", SAMPLE)
def test_all_layers_have_the_devices_codes(name: str, bits: int) -> None:
    if bits == 4 and name in LARGE:
        pytest.skip("takes its time; in the campaign")
    model, examples = plain_networks.NETWORKS[name]()
    prepared = frozen(model, examples, qat.Rule(weight_bits=bits, activation_bits=bits))
    for profile in PROFILES:
        compared, differing, _ = frozen_differences(prepared, examples, profile)
        assert compared > 100 and not differing, profile


def test_a_learned_end_that_training_left_beyond_zero_is_the_devices() -> None:
    model, examples = small()
    prepared = qat.prepare(model, examples, [qat.Rule(ranges="learned", activation_bits=4)])
    qat.calibrate(prepared, [examples])
    with torch.no_grad():
        prepared.step("4").output_quantizer.range.minimum.fill_(0.01)
    qat.freeze(prepared)
    compared, differing, _ = frozen_differences(prepared.eval(), (examples,), prepared.profile)
    assert compared and not differing


@pytest.fixture
def whole_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Profiles of the evaluations that were computed by the compiled graph."""
    runs: list[str] = []
    compute = DeviceNetwork.__call__

    def counted(network: DeviceNetwork, *arguments: Any) -> Any:
        results = compute(network, *arguments)
        runs.append(network.profile)
        return results

    monkeypatch.setattr(DeviceNetwork, "__call__", counted)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_an_evaluation_computes_the_whole_network_at_once(name: str, whole_runs: list[str]) -> None:
    """From the second one with the same weights on, with the bits of the first one, layer by layer."""
    model, examples = plain_networks.NETWORKS[name]()
    prepared = frozen(model, examples)
    for profile in PROFILES:
        prepared.profile = profile
        with torch.no_grad():
            expected, results = leaves(prepared(*examples)), leaves(prepared(*examples))
        assert all(torch.equal(*pair) for pair in zip(expected, results, strict=True)), profile
    assert whole_runs == list(PROFILES)


class Recorder(TorchDispatchMode):
    """Names of PyTorch's operations, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_when_the_whole_network_is_not_computed_at_once(whole_runs: list[str]) -> None:
    model, batch = small()
    prepared = frozen(model, batch)
    prepared(batch).sum().backward()
    assert prepared(batch).requires_grad and not whole_runs
    with torch.no_grad():
        before = [prepared(batch) for _ in range(3)]
        assert len(whole_runs) == 2 and torch.equal(before[0], before[2])
        # Whatever changes a weight: nothing that was prepared for others is used.
        weight = next(prepared.parameters())
        weight.data.mul_(-1.0)
        after = [prepared(batch) for _ in range(2)]
        assert len(whole_runs) == 3 and torch.equal(*after) and not torch.equal(before[0], after[0])
        with Recorder() as recorder:
            assert torch.equal(prepared(batch), after[0])
        assert any("convolution" in name for name in recorder.names) and len(whole_runs) == 3
        # What has no code is said layer by layer.
        broken = batch.clone()
        broken[2, 0, 0, 0] = torch.nan
        missing = prepared(broken).isnan().any(1)
        assert missing.tolist() == [False, False, True, False, False, False] and len(whole_runs) == 3
        prepared.train()
        assert torch.equal(prepared(batch), after[0]) and len(whole_runs) == 4  # no layer here makes noise
    assert torch.equal(pickle.loads(pickle.dumps(prepared))(batch), after[0])


@pytest.mark.parametrize("rules", [[qat.Rule(activation_bits=16)], [qat.Rule("0", activation_bits=16), EIGHT]])
def test_sixteen_bits(rules: list[qat.Rule]) -> None:
    model, batch = small()
    prepared = qat.prepare(model, batch, rules)
    qat.calibrate(prepared, [batch])
    qat.freeze(prepared)
    prepared.train()(batch).sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.other_parameters())
    for profile in PROFILES:
        assert not frozen_differences(prepared.eval(), (batch,), profile)[1], profile


@pytest.mark.parametrize(
    ("name", "profile"), [("squeeze_excite_net", "micro"), ("activations_leaky_elu", "xnnpack-x86")]
)
def test_fake_quantization_does_not_do(name: str, profile: str) -> None:
    """The comparison notices: real numbers with fake quantization, as the frozen phase once was, are no device."""
    model, examples = plain_networks.NETWORKS[name]()
    prepared = frozen(model, examples)
    assert not frozen_differences(prepared, examples, profile)[1]
    assert frozen_differences(composed(prepared), examples, profile)[1]


def test_what_is_claimed_is_what_the_runtime_computes(tmp_path: Any) -> None:
    pytest.importorskip("ai_edge_litert")
    from exactqat.deploy import profiles_here, verify, write_tflite

    model, examples = plain_networks.NETWORKS["squeeze_excite_net"]()
    prepared = frozen(model, examples)
    for profile in profiles_here():
        _, differing, codes = frozen_differences(prepared, examples, profile)
        graph = lower(prepared)
        assert not differing
        assert verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes, profile).differing == 0


@pytest.mark.parametrize("profile", ["xnnpack-x86", "reference", "micro"])
def test_sums_that_float32_does_not_hold(profile: str) -> None:
    """Every part of a sum counts: many inputs, all weights large, the bias too."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3000, 12), nn.Conv1d(12, 6, 1, groups=2)
            with torch.no_grad():
                self.first.weight.uniform_(0.9, 1.0)
                self.first.weight[::2].neg_()
                self.first.bias.uniform_(-4000.0, 4000.0)
                self.second.bias.uniform_(-1e6, 1e6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)[:, :, None]).flatten(1)

    batch = torch.rand(16, 3000)
    prepared = frozen(Wide(), batch, steps=1, device=profile)
    assert not frozen_differences(prepared, (batch,), profile)[1]
    assert "first" in prepared._core._device_steps  # the host's


def test_no_transform_rounds_the_sums() -> None:
    """NNPACK takes large batches where oneDNN is off, and goes by Fourier's and Winograd's ways."""
    batch = torch.randn(16, 16, 12, 12)
    prepared = frozen(nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()), batch)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not frozen_differences(prepared, (batch,), "xnnpack-x86")[1]


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "conv"), reason="needs PyTorch 2.9")
def test_shorter_products_are_never_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program allows for speed rounds codes of 16 bits where the processor has such products."""
    batch, seen = torch.randn(2, 3, 8, 8), []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    prepared = frozen(model, batch, qat.Rule(activation_bits=16))
    units = (torch.backends.mkldnn.conv, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)

    def watched(function: Any) -> Any:
        def call(*operands: Any, **named: Any) -> Any:
            seen.append([unit.fp32_precision for unit in units])
            return function(*operands, **named)

        return call

    monkeypatch.setattr(primitives_torch, "linear", watched(F.linear))
    monkeypatch.setitem(primitives_torch._CONVOLUTIONS, 2, watched(F.conv2d))
    torch.set_float32_matmul_precision("medium")
    settings = [unit.fp32_precision for unit in units]
    try:
        prepared(batch).sum().backward()
        assert [unit.fp32_precision for unit in units] == settings != ["ieee"] * 3
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen and all(precision in ("ieee", "none") for call in seen for precision in call), seen


def test_the_profile_decides() -> None:
    """Where profiles part, so does the frozen network; the training before does not."""
    model, batch = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64)), torch.randn(256, 8)
    first, second = (frozen(copy.deepcopy(model), batch, steps=0, device=name) for name in ("xnnpack-x86", "micro"))
    second.load_state_dict({**first.state_dict(), "_extra_state": {"format": 2, "frozen": True}})
    assert (first.profile, second.profile) == ("xnnpack-x86", "micro")
    assert not torch.equal(first(batch), second(batch))
    first.profile = "micro"
    assert torch.equal(first(batch), second(batch))
    with pytest.raises(ValueError, match="device must be one of xnnpack-x86, .*, got 'arm'"):
        qat.prepare(model, batch, device="arm")
    first.profile = None  # frozen, and in real numbers with fake quantization
    assert torch.equal(first(batch), composed(second)(batch)) and not torch.equal(first(batch), second(batch))


# Gradients


def off_the_kinks(layer: Step, operands: list[torch.Tensor]) -> torch.Tensor | float:
    """Which results are at no end of what lets gradients through."""
    if layer.operator.same_quantization:
        return 1.0
    with torch.no_grad():
        weighted = isinstance(layer, WeightedStep)
        before = layer.compute_frozen(*operands) if weighted else layer.compute_real(layer.operands(operands))
        ends = [*map(float, layer.output_quantizer.ends()), 0.0, 6.0, *(layer.bounds or ())]
        near = 1e-3 * float(layer.output_quantizer.scale())
        return torch.stack([(before - end).abs() > near for end in ends]).all(0).float()


@pytest.mark.parametrize("name", [*SAMPLE, "two_inputs", "bi_fpn"])
def test_gradients_are_those_of_real_numbers(name: str) -> None:
    """Layer by layer, from the same operands and the same gradient of the result.

    But for results at a kink: sums of integers are exactly 0 where those of real numbers are next to it.
    """
    model, examples = plain_networks.NETWORKS[name]()
    prepared = frozen(model, examples, steps=0)
    values: dict[str, torch.Tensor] = {}
    prepared._run(examples, {}, values)
    compared = 0
    for step in prepared.plan.steps:
        layer = prepared.step(step.path)
        if not isinstance(layer, Step):
            continue
        read = [values[path].detach() for path in step.operands if prepared.plan.is_stored(path)]
        if not all(torch.isfinite(tensor).all() for tensor in (*read, values[step.path])):
            continue
        gradients = []
        torch.manual_seed(1)
        cotangent = torch.randn_like(values[step.path]) * off_the_kinks(layer, read)
        for compute in (functools.partial(by_device, prepared, step.path), layer.compose):
            operands = [tensor.clone().requires_grad_() for tensor in read]
            prepared.zero_grad()
            compute(*operands).backward(cotangent)
            slopes = {str(number): operand.grad for number, operand in enumerate(operands)}
            slopes |= {name: parameter.grad for name, parameter in prepared.named_parameters()}
            gradients.append({name: gradient for name, gradient in slopes.items() if gradient is not None})
        own, former = gradients
        assert own.keys() == former.keys()
        for key, gradient in own.items():
            largest = float(former[key].abs().max())
            torch.testing.assert_close(gradient, former[key], rtol=1e-4, atol=1e-5 * largest + 1e-12)
            compared += largest > 0
    assert compared > 3


def test_the_whole_networks_gradients_where_codes_agree() -> None:
    model, batch = small()
    prepared = frozen(model, batch).train()
    former = composed(prepared)
    for network in (prepared, former):
        network.zero_grad()
        network(batch).square().sum().backward()
    assert torch.allclose(prepared(batch), former(batch), atol=1e-6)
    for (name, parameter), other in zip(prepared.named_parameters(), former.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_it_trains_and_keeps_the_devices_codes() -> None:
    model, batch = small()
    prepared = frozen(model, batch, steps=0).train()
    optimizer, target = torch.optim.Adam(prepared.other_parameters(), 3e-2), torch.rand(6, 5).round()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(prepared(batch), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]
    assert not frozen_differences(prepared, (batch,), "xnnpack-x86")[1]


def test_gradients_of_gradients_and_functional_transforms() -> None:
    model, batch = small()
    prepared = frozen(model, batch)
    former = composed(prepared)
    slopes = []
    for network in (prepared, former):
        leaf = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(network(leaf).square().sum(), leaf, create_graph=True)
        gradient.square().sum().backward()
        slopes.append(leaf.grad)
    torch.testing.assert_close(*slopes, rtol=1e-3, atol=1e-6)
    parameters = {name: parameter.detach() for name, parameter in prepared.named_parameters()}
    gradients = [
        torch.func.grad(lambda p, network=network: torch.func.functional_call(network, p, (batch,)).sum())(parameters)
        for network in (prepared, former)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    tangents = [torch.func.jvp(network, (batch,), (torch.ones_like(batch),))[1] for network in (prepared, former)]
    torch.testing.assert_close(*tangents, rtol=1e-3, atol=1e-6)


# As a module


def test_before_freeze_nothing_is_new() -> None:
    model, batch = small()
    prepared = qat.prepare(model, batch)
    qat.calibrate(prepared, [batch])
    for training in (True, False):
        other = composed(prepared).train(training)
        assert torch.equal(prepared.train(training)(batch), other(batch))


def test_rules_without_a_device_train_as_before() -> None:
    model, batch = small()
    rule = qat.Rule(symmetric=False, narrow_range=False)
    prepared = frozen(model, batch, rule, deployable=False)
    assert torch.equal(prepared(batch), composed(prepared)(batch))


def test_dropout_in_the_frozen_phase_is_real() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    batch = torch.randn(16, 8)
    prepared = frozen(model, batch)
    assert not frozen_differences(prepared, (batch,), "xnnpack-x86")[1]
    # The layer before the noise is the device's, the one after it computes in real numbers.
    before = prepared.stored_tensors(batch)["0"][1]
    prepared.train()
    torch.manual_seed(3)
    result = prepared(batch)
    torch.manual_seed(3)
    assert torch.allclose(result, prepared.step("3").compose(F.dropout(before, 0.5)), atol=1e-6)
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.other_parameters())


def test_nan_is_not_hidden() -> None:
    model, batch = small()
    prepared = frozen(nn.Sequential(model, nn.Hardswish()), batch)
    broken = batch.clone()
    broken[2] = torch.nan
    assert prepared(broken)[2].isnan().all()
    with torch.no_grad():
        prepared.get_parameter("0.0.weight").fill_(torch.nan)
    assert prepared(batch).isnan().all()


class Inverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / x.abs()


@pytest.mark.parametrize("last", [nn.MaxPool2d(3, 2, 1), Inverse()])
def test_training_computes_what_evaluation_does_where_real_numbers_are_infinite(last: nn.Module) -> None:
    """Beside a padded pool, and where a table is asked for the code of zero."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), last, nn.Conv2d(4, 2, 1))
    batch = torch.randn(4, 3, 8, 8)
    prepared = frozen(model, batch, steps=1)
    expected = prepared(batch).detach()
    result = prepared.train()(batch)
    assert expected.isfinite().all() and torch.equal(result, expected)
    result.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in prepared.other_parameters())


def test_ranges_that_are_loaded_later_count() -> None:
    model, batch = small()
    prepared, other = frozen(copy.deepcopy(model), batch), frozen(model, 3 * batch)
    before = prepared(batch)
    prepared.load_state_dict(other.state_dict())
    assert torch.equal(prepared(batch), other(batch)) and not torch.equal(prepared(batch), before)


def test_copies_files_and_states() -> None:
    model, batch = small()
    prepared = frozen(copy.deepcopy(model), batch, device="reference")
    expected = prepared(batch)
    for other in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert other.profile == "reference" and torch.equal(other(batch), expected)
    again = qat.prepare(model, batch)
    file = io.BytesIO()
    torch.save(prepared.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.profile == "reference" and torch.equal(again.eval()(batch), expected)


@pytest.mark.parametrize(
    "run",
    [
        lambda model, batch: torch.compile(model, backend="eager")(batch),
        lambda model, batch: torch.inference_mode()(lambda: model(batch))(),
        lambda model, batch: torch.autocast("cpu")(lambda: model(batch))(),
        lambda model, batch: torch.cat([model(batch[:0]), model(batch)]),
        lambda model, batch: torch.cat([model(image[None]) for image in batch]),
    ],
    ids=["compiled", "inference mode", "autocast", "empty batch", "one by one"],
)
def test_the_same_integers_whatever_is_around(run: Callable[..., torch.Tensor]) -> None:
    model, batch = small()
    prepared = frozen(model, batch)
    assert torch.equal(run(prepared, batch), prepared(batch))


class _TwoBranches(nn.Module):
    """Two layers that share nothing but their input, side by side in one result or, "apart", in two."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.first, self.second = form, nn.Conv2d(3, 8, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.set_grad_enabled(self.form != "no_grad"):
            y = self.first(x)
        y = y.detach() if self.form == "detach" else y
        return (y, self.second(x)) if self.form == "apart" else torch.cat([y, self.second(x)], 1)


def _frozen_branches(form: str) -> tuple[qat.PreparedModel, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = qat.prepare(_TwoBranches(form), x)
    qat.calibrate(model, [x])
    qat.freeze(model)
    return model.train(), x


def test_a_layer_that_is_not_a_number_leaves_the_others_as_they_are() -> None:
    """What the channels of all layers of such a network need is computed for them together."""
    model, x = _frozen_branches("joined")

    def second() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        result = model(x)[:, 8:]
        result.square().sum().backward()
        return result, {name: x.grad for name, x in model.named_parameters() if "second" in name}

    expected, gradients = second()
    with torch.no_grad():
        model.get_parameter("first.weight")[0] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert model(x)[:, 0].isnan().all()
        result, others = second()
    assert torch.equal(result, expected)
    assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("form", ["no_grad", "detach", "apart"])
def test_a_layer_without_gradients_gets_none_beside_one_with_them(form: str) -> None:
    model, x = _frozen_branches(form)
    result = model(x)
    (result[1] if form == "apart" else result).square().sum().backward()
    lacking = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert sorted(name for name in lacking if "first" in name or "second" in name) == ["first.bias", "first.weight"]
