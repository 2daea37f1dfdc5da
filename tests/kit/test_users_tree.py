# SPDX-License-Identifier: Apache-2.0
"""What a training loop does to modules of a prepared PyTorch model means what it means in the user's own model."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from exactqat import deploy, qat  # noqa: E402


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.depth = 1

    def forward(self, x: Any) -> Any:
        return self.drop(torch.relu(self.norm(self.conv(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x).mean((2, 3)))


X = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1)) * 2 + 1


def pair(**rule: Any) -> tuple[Network, qat.PreparedModel]:
    """A model, and the prepared one, which computes the same as it does not quantize."""
    model = Network().train()
    prepared = qat.prepare(model, X, [qat.Rule(**rule)])
    prepared.quantizing = False
    return model, prepared


def assert_alike(model: nn.Module, prepared: nn.Module, **near: float) -> None:
    """Results, gradients and buffers of one call."""
    results = []
    for network in (model, prepared):
        network.zero_grad()
        torch.manual_seed(3)
        results.append(network(X))
        if results[-1].requires_grad:
            results[-1].square().sum().backward()
    near = near or {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(*results, **near)
    state, own = dict(model.named_buffers()), dict(prepared.named_buffers())
    for name, value in state.items():
        torch.testing.assert_close(own[name], value, **near, msg=name)
    parameters = dict(prepared.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameters[name].grad
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-2, atol=1e-3, msg=name)


def _frozen_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def _without_momentum(model: nn.Module) -> None:  # as the SAM optimizer does for its second step
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.backup_momentum, module.momentum = module.momentum, 0


def _averaged(model: nn.Module) -> None:
    torch.optim.swa_utils.update_bn([X, X * 2, X - 1], model)


def _without_tracking(model: nn.Module) -> None:
    model.backbone.norm.track_running_stats = False


def _other_epsilon(model: nn.Module) -> None:
    model.backbone.norm.eps = 0.5


def _evaluated_backbone(model: nn.Module) -> None:
    model.backbone.requires_grad_(False).eval()


def _without_dropout(model: nn.Module) -> None:
    model.backbone.drop.eval()


def _all_in_evaluation(model: nn.Module) -> None:
    model.eval()


LOOPS: dict[str, Callable[[nn.Module], None]] = {
    loop.__name__.strip("_"): loop
    for loop in (
        _frozen_norms, _without_momentum, _averaged, _without_tracking, _other_epsilon, _evaluated_backbone,
        _without_dropout, _all_in_evaluation,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("folded", [False, True])
def test_modules_mean_what_they_mean_in_the_users_model(name: str, folded: bool) -> None:
    model, prepared = pair(fold_batch_norm=folded)
    for network in (model, prepared):
        network.get_submodule("backbone.drop").eval()  # random numbers are drawn in another order
    for _ in range(2):
        for network in (model, prepared):
            LOOPS[name](network)
            network.get_submodule("backbone.drop").eval()
        assert_alike(model, prepared)
    for network in (model, prepared):
        network.train()
        network.get_submodule("backbone.drop").eval()
    assert_alike(model, prepared)


def test_dropout_follows_its_module() -> None:
    _, prepared = pair()
    prepared.backbone.norm.eval()
    assert not torch.equal(prepared(X), prepared(X))
    prepared.backbone.drop.eval()
    assert torch.equal(prepared(X), prepared(X))


def test_integers_follow_an_epsilon() -> None:
    results = []
    for late in (False, True):
        torch.manual_seed(0)
        model = Network().eval()
        model.backbone.norm.eps = 1e-5 if late else 0.25
        prepared = qat.prepare(model, X)
        prepared.backbone.norm.eps = 0.25
        qat.calibrate(prepared, [X])
        qat.freeze(prepared)
        graph = deploy.lower(prepared)
        results.append([tensor.data for tensor in graph.tensors.values() if tensor.data is not None])
    assert all((a == b).all() for a, b in zip(*results, strict=True))


def test_the_tree_is_the_users() -> None:
    model, prepared = pair()
    assert isinstance(prepared.backbone, Backbone) and isinstance(prepared.backbone.norm, nn.BatchNorm2d)
    users = [(name, type(module)) for name, module in model.named_modules() if name]
    own = [(name, module) for name, module in prepared.named_modules() if name and not name.startswith("quantization")]
    assert [name for name, _ in own] == [name for name, _ in users]
    assert all(isinstance(module, kind) for (_, module), (_, kind) in zip(own, users, strict=True))
    names = [name for name, _ in prepared.named_parameters() if not name.startswith("quantization.")]
    assert names == [name for name, _ in model.named_parameters()]
    assert prepared.backbone.conv.stride == (1, 1) and "BatchNorm2d(4, eps=1e-05" in repr(prepared.backbone.norm)


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_that_would_never_be_called_are_refused(register: str) -> None:
    _, prepared = pair()
    for module in (prepared.backbone, prepared.head):
        with pytest.raises(TypeError, match="would never be called.*stored_tensors"):
            getattr(module, register)(lambda *arguments: None)


def test_what_nothing_reads_is_refused_and_own_notes_are_not() -> None:
    _, prepared = pair()
    with pytest.raises(TypeError, match="'padding' of a prepared model's Conv2d is a setting that nothing reads"):
        prepared.backbone.conv.padding = (0, 0)
    with pytest.raises(TypeError, match="'p' of a prepared model's Dropout"):
        prepared.backbone.drop.p = 0.1
    with pytest.raises(TypeError, match="'depth' of a prepared model's Backbone"):
        prepared.backbone.depth = 2
    with pytest.raises(TypeError, match="Backbone cannot be called on its own"):
        prepared.backbone(X)
    prepared.backbone.note = "mine"
    prepared.backbone.depth = 1  # as it is
    assert prepared.backbone.note == "mine"


def test_a_frozen_networks_statistics_are_fixed() -> None:
    _, prepared = pair()
    qat.calibrate(prepared, [X])
    qat.freeze(prepared)
    before = prepared.backbone.norm.running_var.clone()
    with pytest.raises(TypeError, match="the statistics of a frozen network are fixed"):
        torch.optim.swa_utils.update_bn([X], prepared)
    prepared.train()(X)
    assert torch.equal(prepared.backbone.norm.running_var, before)


def test_calibration_and_evaluation_leave_every_flag_as_it_was() -> None:
    _, prepared = pair()
    prepared.backbone.norm.eval()
    flags = [module.training for module in prepared.modules()]
    qat.calibrate(prepared, [X])
    prepared.trained().traced(X)
    prepared.trained().layer_values(X)
    assert [module.training for module in prepared.modules()] == flags


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Sharing(nn.Module):
    """Tensors that share a grid, a layer norm, a batch norm and a pooled mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(16), nn.Linear(16, 5)
        self.batch = nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.batch(self.first(x)))
        return self.last(self.norm(torch.cat([y, x * 3], 1)))


RULES: dict[str, dict[str, Any]] = {
    "ema": {},
    "last_batch": {"ranges": "last_batch"},
    "percentile": {"ranges": "percentile", "percentile": 90.0},
    "learned": {"ranges": "learned", "weight_bits": 4, "activation_bits": 4},
    "min_max": {"ranges": "min_max"},
    "folded": {"fold_batch_norm": True},
}


def trained(prepared: nn.Module, call: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Gradients of three steps, the second with two calls before its backward pass, and all buffers."""
    tensors = []
    for step in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)) * (1 + step)
        prepared.zero_grad()
        loss = call(x.requires_grad_()).square().sum()
        if step == 1:
            loss = loss + (call((x.detach() * 2 + 1).requires_grad_()) * 3).square().sum()
        loss.backward()
        tensors += [parameter.grad.clone() for parameter in prepared.parameters() if parameter.grad is not None]
    return [*tensors, *(buffer.clone() for buffer in prepared.buffers())]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_checkpoint_changes_no_bit(rule: str, reentrant: bool, inner: bool) -> None:
    """inner: the prepared network gets what another module in the checkpoint has computed."""
    first = qat.prepare(Sharing().train(), torch.randn(4, 8), [qat.Rule(**RULES[rule])])
    qat.calibrate(first, [torch.randn(16, 8)])
    second, scale = copy.deepcopy(first), nn.Parameter(torch.tensor(1.5))

    def through(model: nn.Module) -> Callable[[Any], Any]:
        return (lambda x: model(x * scale)) if inner else model

    expected = trained(first, through(first))
    results = trained(second, lambda x: checkpoint(through(second), x, use_reentrant=reentrant))
    assert len(results) == len(expected) > 12
    # A reentrant one adds a weight's gradients in another order, where it is used more than once.
    near = {"rtol": 1e-5, "atol": 1e-6} if reentrant else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(results, expected, **near)


def test_a_backward_pass_on_other_inputs_is_refused() -> None:
    prepared = qat.prepare(Sharing().train(), torch.randn(4, 8))
    x = torch.randn(16, 8).requires_grad_()
    calls = []

    def noisy(x: Any) -> Any:
        calls.append(1)
        return prepared(x + len(calls))

    with pytest.raises(RuntimeError, match="on inputs that none of its recent calls had"):
        checkpoint(noisy, x, use_reentrant=False).sum().backward()


# --- state and copies -----------------------------------------------------------------------------------------------


def test_loading_a_state_leaves_requires_grad_alone() -> None:
    x = torch.randn(8, 5)
    prepared = qat.prepare(nn.Linear(5, 3), x, [qat.Rule(ranges="learned")])
    qat.calibrate(prepared, [x])
    before = {name: leaf.clone() for name, leaf in prepared.state_dict().items() if isinstance(leaf, torch.Tensor)}
    unfrozen = {**before, "_extra_state": prepared.get_extra_state()}
    ranges = prepared.range_parameters()
    ranges[0].requires_grad_(False)
    prepared.load_state_dict(prepared.state_dict())
    assert [end.requires_grad for end in ranges] == [False] + [True] * (len(ranges) - 1)
    qat.freeze(prepared)
    assert not any(end.requires_grad for end in ranges)
    prepared.load_state_dict(prepared.state_dict())
    assert not any(end.requires_grad for end in ranges)
    prepared.load_state_dict(unfrozen)
    assert [end.requires_grad for end in ranges] == [False] + [True] * (len(ranges) - 1)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_norm_is_copied_saved_and_differentiated(frozen: bool) -> None:
    x = torch.randn(6, 4)
    prepared = qat.prepare(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), x)
    qat.calibrate(prepared, [x])
    if frozen:
        qat.freeze(prepared)
    prepared.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(prepared)
    saved = io.BytesIO()
    torch.save(prepared, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    again = pickle.loads(pickle.dumps(copied))
    assert all(torch.equal(network(x), prepared(x)) for network in (copied, loaded, again))
    with torch.no_grad():
        prepared.get_parameter("0.weight").mul_(2)
    assert not torch.equal(copied(x), prepared(x)) and torch.equal(copied(x), again(x))
    jacobian = torch.func.jacrev(prepared)(x)
    wanted = torch.autograd.functional.jacobian(prepared, x)
    torch.testing.assert_close(jacobian, wanted, rtol=1e-4, atol=1e-5)
