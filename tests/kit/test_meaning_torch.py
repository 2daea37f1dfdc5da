# SPDX-License-Identifier: Apache-2.0
"""What is trained is the user's own network: a prepared model without quantization gives what the original gives."""

from __future__ import annotations

import copy
import itertools
import math
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.qat.capture.torch import model as capture_torch  # noqa: E402
from exactqat.qat.train.torch import state as state_torch  # noqa: E402
from exactqat.qat.train.torch.proof import copied_with_hooks  # noqa: E402

EXAMPLES = (1, 2, 3)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Model(nn.Module):
    """Two linear layers, a few tensors, and a forward that is given."""

    def __init__(self, function: Callable, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight, self.factor = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("table", torch.linspace(0.5, 1, 8))
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


@contextmanager
def unquantized(model):
    """The prepared network in real numbers, in the mode that it is in."""
    model.quantizing = False
    yield
    model.quantizing = True


def run(model, *inputs):
    """Results, gradients and buffers of one call."""
    inputs = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    for parameter in model.parameters():
        parameter.grad = None
    results = [leaf for leaf in torch.utils._pytree.tree_leaves(model(*inputs)) if isinstance(leaf, torch.Tensor)]
    total = sum((result * torch.linspace(-1, 2, result.numel()).reshape(result.shape)).sum() for result in results)
    if total.requires_grad:
        total.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    gradients |= {f"input {index}": tensor.grad for index, tensor in enumerate(inputs)}
    return results, {name: tensor for name, tensor in gradients.items() if tensor is not None and bool(tensor.any())}


def prepared_quietly(model, *inputs, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        return qat.prepare(model, inputs, **how)


def assert_same(model, *inputs, modes=(True, False)) -> qat.PreparedModel:
    """Prepares a model and compares it with the original: results, gradients, buffers. `inputs`: of three examples."""
    prepared = prepared_quietly(model, *inputs)
    state = copy.deepcopy(prepared.state_dict())
    for training in modes:
        for count in EXAMPLES:
            original = copied_with_hooks(model).train(training)
            prepared.load_state_dict(state)
            ours = prepared.train(training)
            batch = [tensor[:count] for tensor in inputs]
            expected, gradients_of_original = run(original, *batch)
            with unquantized(ours):
                results, found_gradients = run(ours, *batch)
            assert len(results) == len(expected)
            for one, other in zip(results, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            assert found_gradients.keys() == gradients_of_original.keys()
            for name, gradient in gradients_of_original.items():
                torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
            buffers = dict(ours.named_buffers())
            for name, buffer in original.named_buffers():
                if name in buffers:
                    torch.testing.assert_close(buffers[name], buffer, rtol=1e-4, atol=1e-5, msg=name)
    return prepared.train()


def refused(model, *inputs, match: str, **how) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(qat.UnsupportedOperator, match=match) as error:
            qat.prepare(model, inputs, **how)
    return str(error.value)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))


# --- gradients of the user's own ------------------------------------------------------------------------------------


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1.5)


class Round(torch.autograd.Function):
    """In the form that torch.func takes."""

    @staticmethod
    def forward(x):
        return (x * 4).round() / 4

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.sigmoid(4 * x)


class Product(torch.autograd.Function):
    """Two inputs."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return 2 * gradient * y, -gradient * x


def made_here(x):
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 7

    return Local.apply(x)


def test_rows_of_length_one_unless_they_are_zero_are_refused_by_name() -> None:
    def forward(m, x):
        y = m.first(x)
        return m.last(torch.where(y.abs().amax(1, keepdim=True) == 0, torch.zeros_like(y), F.normalize(y, dim=1)))

    refused(Model(forward), rows(8), match="torch.eq has no int8 operator")


class Plain(torch.autograd.Function):
    """The gradient of the value."""

    @staticmethod
    def forward(ctx, x, strength):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


FUNCTIONS = {
    "reversal": lambda m, x: m.last(Reversal.apply(m.first(x), 2.0)),
    "reversal of the input": lambda m, x: m.last(m.first(Reversal.apply(x, 0.5))),
    "round": lambda m, x: m.last(Round.apply(m.first(x))),
    "sign": lambda m, x: m.last(Sign.apply(m.first(x))),
    "two inputs": lambda m, x: m.last(Product.apply(m.first(x), x)),
    "sign of a weight": lambda m, x: m.last(F.linear(x, Sign.apply(m.weight))),
    "made in forward": lambda m, x: m.last(made_here(m.first(x))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_of_the_users_own_is_refused_by_its_name(name: str) -> None:
    match = (
        r"the captured network is not the model.*gradient.*by rules of its own \((Reversal|Round|Sign|Product|Local)\)"
    )
    refused(Model(FUNCTIONS[name]), rows(8), match=match)


def test_a_function_with_the_gradient_of_its_value_is_read_by_its_forward() -> None:
    assert_same(Model(lambda m, x: m.last(F.relu(Plain.apply(m.first(x), 2.0)))), rows(8))


# --- hooks ----------------------------------------------------------------------------------------------------------


def hooked(*hooks, of=lambda m, x: m.first(x), after=lambda m, y: m.last(y)):
    def forward(m, x):
        y = of(m, x)
        if y.requires_grad:
            for hook in hooks:
                y.register_hook(hook)
        return after(m, y)

    return forward


class Wide(torch.autograd.Function):
    """A clip whose gradient passes a little beyond its ends."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0].abs() <= 2)


def test_a_gradient_of_the_users_own_is_refused_where_two_examples_do_not_show_it() -> None:
    """A batch norm makes one less and one more of any two examples: nothing is beyond the clip."""
    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)

    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.last = nn.Sequential(*layers), nn.Linear(8, 2)

        def forward(self, x):
            return self.last(Wide.apply(self.layers(x)))

    refused(Clipped(), torch.randn(2, 4) / 8, match=r"8 examples, the gradient of .* by rules of its own \(Wide\)")


def test_a_module_that_counts_its_calls_is_refused_by_the_gradients_of_the_second() -> None:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.last = 0, nn.Linear(4, 2)

        def forward(self, x):
            self.calls += 1
            x = x * (1 + 0.1 * self.calls)
            return self.last(x + (torch.sign(x) - x).detach())

    refused(Counting(), rows(4), match="the gradient of 'input 0 .evaluated after a step.' differs")


def test_hooks_on_tensors_in_forward_are_refused() -> None:
    refused(
        Model(hooked(lambda gradient: gradient * 3)),
        rows(8),
        match="the captured network is not the model.*gradient.*Hooks that forward registers",
    )
    assert_same(Model(hooked(lambda gradient: None)), rows(8))


def test_hooks_of_parameters_are_kept() -> None:
    model = Model(lambda m, x: m.last(m.first(x) * m.factor))
    model.first.weight.register_hook(lambda gradient: gradient * 3)
    model.first.weight.register_hook(lambda gradient: gradient + 1)
    model.factor.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model.last.bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", parameter.grad * 2))
    prepared = assert_same(model, rows(8))
    qat.calibrate(prepared, [rows(8)])
    qat.freeze(prepared)
    _, gradients = run(prepared, rows(8))
    assert gradients["factor"].abs().max() <= 0.1 < run(Model(model.function), rows(8))[1]["factor"].abs().max()


def test_hooks_of_a_parameter_that_is_not_trained_yet_are_kept() -> None:
    model = Model(lambda m, x: m.last(m.first(x)))
    model.first.weight.register_hook(lambda gradient: gradient * 3)
    model.first.weight.requires_grad_(False)
    prepared = prepared_quietly(model, rows(8))
    assert not prepared.first.weight.requires_grad
    model.first.weight.requires_grad_(True)
    prepared.first.weight.requires_grad_(True)
    with unquantized(prepared):
        torch.testing.assert_close(run(prepared, rows(8))[1], run(model, rows(8))[1])


def test_hooks_of_tied_and_of_parametrized_weights_are_kept() -> None:
    model = Model(lambda m, x: m.last(F.relu(m.first(m.second(x)))))
    model.second = nn.Linear(8, 8)
    model.second.weight = model.first.weight
    model.first.weight.register_hook(lambda gradient: gradient * 3)
    nn.utils.parametrizations.weight_norm(model.last)
    model.last.parametrizations.weight.original0.register_hook(lambda gradient: gradient * 2)
    assert_same(model, rows(8))


def test_without_their_mend_hooks_of_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_torch, "with_hooks", lambda parameter, original: parameter)
    model = Model(lambda m, x: m.last(m.first(x)))
    model.first.weight.register_hook(lambda gradient: gradient * 3)
    refused(model, rows(8), match="the captured network is not the model.*the gradient of 'first.weight'")


def test_forward_hooks_and_parametrizations_are_captured() -> None:
    model = Model(lambda m, x: m.last(m.first(x)))
    model.first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    model.first.register_forward_hook(lambda module, inputs, result: result + inputs[0])
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    model.register_forward_hook(lambda module, inputs, result: result * 0.5)
    nn.utils.parametrize.register_parametrization(model.last, "weight", nn.Softplus())
    assert_same(model, rows(8))


def test_global_hooks_are_refused() -> None:
    from torch.nn.modules import module

    for register in (module.register_module_forward_hook, module.register_module_full_backward_hook):
        handle = register(lambda *arguments: None)
        try:
            refused(Model(lambda m, x: m.last(m.first(x))), rows(8), match="all modules have a (forward|backward) hook")
        finally:
            handle.remove()


# --- modes that stop gradients, checkpoints -------------------------------------------------------------------------


def stopped(context):
    def forward(m, x):
        with context():
            y = m.first(x)
        return m.last(y * m.factor)

    return forward


@torch.no_grad()
def decorated(m, x):
    return m.first(x)


def detached_in_place(m, x):
    y = m.first(x) * 1.0
    y.detach_()
    return m.last(y + x)


STOPPED = {
    "no_grad": stopped(torch.no_grad),
    "set_grad_enabled": stopped(lambda: torch.set_grad_enabled(False)),
    "decorator": lambda m, x: m.last(decorated(m, x) + x),
    "detach": lambda m, x: m.last(m.first(x).detach() + x),
    "detach_": detached_in_place,
    "straight through": lambda m, x: m.last(x + (m.first(x).round() - x).detach()),
    "weight": lambda m, x: m.last(F.linear(x, m.weight.detach() * m.factor)),
}


@pytest.mark.parametrize("name", STOPPED)
def test_what_stops_gradients_stops_them(name: str) -> None:
    assert_same(Model(STOPPED[name]), rows(8))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_of_a_model(reentrant: bool) -> None:
    model = Model(
        lambda m, x: m.last(checkpoint(lambda y: m.first(y).relu() * m.factor, m.first(x), use_reentrant=reentrant))
    )
    assert_same(model, rows(8))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_with_batch_norm(reentrant: bool) -> None:
    """PyTorch moves statistics twice; all else is the same."""
    model = Model(lambda m, x: m.last(checkpoint(m.middle, m.first(x), use_reentrant=reentrant)))
    model.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    prepared = prepared_quietly(model, rows(8))
    original = copied_with_hooks(model)
    expected = run(original, rows(8))
    with unquantized(prepared):
        result = run(prepared, rows(8))
    torch.testing.assert_close(result, expected)
    once, twice = (dict(network.named_buffers())["middle.1.running_mean"] for network in (prepared, original))
    torch.testing.assert_close(twice, once * 1.9)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_prepared_model_moves_ranges_once(reentrant: bool) -> None:
    model = Model(lambda m, x: m.last(F.relu(m.first(x))))
    states, gradients = [], []
    for around in (False, True):
        prepared = prepared_quietly(model, rows(8))
        qat.calibrate(prepared, [rows(8)])
        for step in range(3):
            x = (rows(8) * (2 + step)).requires_grad_()
            result = checkpoint(prepared, x, use_reentrant=reentrant) if around else prepared(x)
            result.sum().backward()
        states.append({name: buffer.clone() for name, buffer in prepared.named_buffers()})
        gradients.append({name: parameter.grad for name, parameter in prepared.named_parameters()})
    torch.testing.assert_close(*states, rtol=0, atol=0)
    torch.testing.assert_close(*gradients)


def test_without_its_mend_a_checkpoint_moves_ranges_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exactqat.qat.train.torch.repeats._is_recomputing", lambda: False)
    with pytest.raises(AssertionError):
        test_a_checkpoint_around_a_prepared_model_moves_ranges_once(True)


# --- the number of examples -----------------------------------------------------------------------------------------

OF_THE_BATCH = {
    "root": lambda m, x: m.last(m.first(x) / math.sqrt(x.shape[0])),
    "half": lambda m, x: m.last(m.first(x) * (0.5 * len(x))),
    "number": lambda m, x: m.last(m.first(x) * float(x.size(0))),
    "length": lambda m, x: m.last(m.first(x) / len(x)),
    "one more": lambda m, x: m.last(m.first(x) * (x.shape[0] + 1)),
    "larger": lambda m, x: m.last(m.first(x) * 2 if x.shape[0] > 100 else m.first(x)),
    "even": lambda m, x: m.last(m.first(x).relu() if x.shape[0] % 2 == 0 else m.first(x)),
    "sevens": lambda m, x: m.last(m.first(x) * 2 if x.shape[0] % 7 == 0 else m.first(x)),
    "a multiple of 32": lambda m, x: m.last(m.first(x).relu() if len(x) % 32 == 0 else m.first(x)),
    "another layer": lambda m, x: m.last(m.first(x) if x.shape[0] > 64 else x),
    "range": lambda m, x: m.last(m.first(x) * torch.arange(x.shape[0])[:, None]),
    "full": lambda m, x: m.last(m.first(x) * torch.full((x.shape[0], 1), x.shape[0])),
    "constant": lambda m, x: m.last(m.first(x) * torch.tensor([math.log(x.shape[0])])),
    "slope": lambda m, x: m.last(F.leaky_relu(m.first(x), 1 / (1 + x.shape[0]))),
    "switch": lambda m, x: m.last(m.first(x).mean(1, keepdim=x.shape[0] > 100).reshape(-1, 1) + x),
    "in training": lambda m, x: m.last(m.first(x) * (math.sqrt(x.shape[0]) if m.training else 1.0)),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_what_depends_on_the_number_of_examples_is_refused(name: str) -> None:
    text = refused(Model(OF_THE_BATCH[name]), rows(8), match="test_meaning_torch.py, line")
    assert "captured network is not the model" not in text
    assert any(
        words in text for words in ("size of the batch", "number of examples", "between the examples", "SymBool")
    )


# Which answer alike for all sizes of the self-check.
ASKED = {
    "one size": lambda x: x.shape[0] == 16,
    "its length": lambda x: len(x) == 16,
    "a shape": lambda x: x.shape == (16, 8),
    "a window": lambda x: 10 < x.size(0) < 20,
    "two sizes": lambda x: x.shape[0] in (4, 16),
    "nines": lambda x: x.shape[0] % 9 == 0,
    "64": lambda x: len(x) == 64,
    "more than 2000": lambda x: x.shape[0] > 2000,
    "more than 9000": lambda x: x.shape[0] > 9000,
    "first a large one": lambda x: x.shape[0] <= 50 and x.shape[0] == 19,
    "numbers in it": lambda x: x.numel() == 128,
    "of a view": lambda x: x.reshape(-1, 2).shape[0] == 64,
    "half of it": lambda x: 0.5 * x.shape[0] == 8,
    "half of it, otherwise": lambda x: x.shape[0] / 2 == 8.0,
    "its root": lambda x: math.sqrt(x.shape[0]) == 4,
    "a plain number": lambda x: int(x.shape[0]) == 16,
}


@pytest.mark.parametrize("name", ASKED)
def test_a_branch_on_some_sizes_of_batches_is_refused(name: str) -> None:
    asks = ASKED[name]
    text = refused(Model(lambda m, x: m.last(m.first(x) * (2.0 if asks(x) else 1.0))), rows(8), match="the batch")
    assert "test_meaning_torch.py, line" in text


def test_questions_whose_answer_is_the_same_for_all_batches_are_let_be() -> None:
    def forward(m: Any, x: Any) -> Any:
        if x.shape[0] < 1 or x.shape[0] * 2 % 2:
            raise ValueError("no examples")
        return m.last(m.first(x).reshape(x.shape[0] * 2 // 2, -1))

    assert_same(Model(forward), rows(8))


class Long(nn.Module):
    """Sizes and numbers of its own."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv1d(2, 3, 3, padding=1), nn.Linear(3, 2)
        self.register_buffer("table", torch.linspace(0, 1, 2018))
        self.plain = torch.linspace(0, 1, 1013)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self, x).mean(2))


OWN_NUMBERS = {
    "a length": (lambda m, x: m.conv(x), 1009),
    "two lengths": (lambda m, x: F.pad(m.conv(x), (0, 4)), 1009),
    "a factor": (lambda m, x: m.conv(x) * 1009 / 1013, 16),
    "an inverse": (lambda m, x: m.conv(x) * (1 / 2018), 16),
    "a slice": (lambda m, x: m.conv(x)[:, :, :1009], 1200),
    "a buffer": (lambda m, x: m.conv(x) * m.table[:1009], 1009),
    "a buffer in part": (lambda m, x: m.conv(x) * m.table[::2018], 16),
    "an attribute": (lambda m, x: m.conv(x) * m.plain, 1013),
    "a constant": (lambda m, x: m.conv(x) + torch.ones(1009), 1009),
    "a loop": (lambda m, x: m.conv(x) + sum(torch.ones(n).mean() for n in (1009, 1013, 1019)), 16),
}


@pytest.mark.parametrize("name", OWN_NUMBERS)
def test_numbers_of_the_models_own_are_not_the_batch(name: str) -> None:
    function, length = OWN_NUMBERS[name]
    assert_same(Long(function), rows(2, length))


def test_what_an_assertion_would_say_is_not_computed() -> None:
    def asserting(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.dim() == 2, f"expected two axes, got {x.shape}")
        torch._assert(condition=x.shape[1] == 8, message=f"expected eight features, got {x.shape}")
        assert x.is_floating_point(), f"got {x.shape} of {x.dtype}"
        return model.last(model.first(x))

    assert_same(Model(asserting), rows(8))


# --- what forward changes -------------------------------------------------------------------------------------------


def spectral(kind: Callable) -> nn.Module:
    model = Model(lambda m, x: m.last(F.relu(m.first(x))))
    kind(model.first)
    return model


@pytest.mark.parametrize("kind", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_trains_with_the_vectors_it_has(kind: Callable) -> None:
    refused(spectral(kind), rows(8), match="training changes .*call model.eval")
    model = spectral(kind).eval()
    prepared = qat.prepare(model, rows(8))
    with unquantized(prepared):
        torch.testing.assert_close(run(prepared.train(), rows(8))[1], run(model, rows(8))[1], rtol=1e-4, atol=1e-5)


def before_it_is_read(m, x):
    if m.training:
        with torch.no_grad():
            m.table.add_(1.0)
    return m.last(m.first(x) * m.table)


def after_it_is_read(m, x):
    y = m.last(m.first(x) * m.table.clone())
    if m.training:
        with torch.no_grad():
            m.table.mul_(0.9)
    return y


def from_a_parameter(m, x):
    """An average of a weight."""
    if m.training:
        with torch.no_grad():
            m.table.mul_(0.9).add_(0.1 * m.factor)
    return m.last(m.first(x) * m.table)


def a_parameter(m, x):
    if m.training:
        with torch.no_grad():
            m.factor.clamp_(-0.75, 0.75)
    return m.last(m.first(x) * m.factor)


def assigned(m, x):
    if m.training:
        m.table = m.table * 0.9
    return m.last(m.first(x) * m.table)


def running_mean(m, x):
    if m.training:
        with torch.no_grad():
            m.table.mul_(0.9).add_(0.1 * x.mean(0))
    return m.last(m.first(x) * m.table)


def at_every_call(m, x):
    m.table.mul_(0.9)
    return m.last(m.first(x) * m.table)


def branches_too(m, x):
    if m.training:
        m.table.mul_(0.9)
        return m.last(m.first(x) * m.table + 1)
    return m.last(m.first(x) * m.table)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (running_mean, "torch.mean: it mixes the examples of a batch"),
        (at_every_call, r"line \d+\)?: training changes 'table', with which the model computes"),
        *(
            (function, r"line \d+\)?: training changes '(table|factor)', with which the model computes")
            for function in (branches_too, before_it_is_read, after_it_is_read, from_a_parameter, a_parameter, assigned)
        ),
    ],
)
def test_what_cannot_be_kept_of_it_is_refused_by_name(function: Callable, match: str) -> None:
    refused(Model(function), rows(8), match=match)


@pytest.mark.parametrize("function", [before_it_is_read, at_every_call])
def test_without_their_mend_changes_are_refused(function: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_torch.Program, "_refuse_changes", lambda reader, network, training: None)
    refused(Model(function), rows(8), match="is not the model|in evaluation it computes something else")


def test_a_model_in_evaluation_trains_with_what_its_buffers_are() -> None:
    prepared = qat.prepare(Model(running_mean).eval(), rows(8))
    with unquantized(prepared.train()):
        prepared(rows(8))
    torch.testing.assert_close(dict(prepared.named_buffers())["table"], torch.linspace(0.5, 1, 8))


def test_a_buffer_that_nothing_reads_is_named() -> None:
    def count(m, x):
        m.table.add_(1)
        return m.last(m.first(x))

    with pytest.warns(UserWarning, match="changes table, which nothing in the captured network reads"):
        qat.prepare(Model(count), rows(8))


def counted(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return m.last(m.first(x) * m.calls)


def remembered(m, x):
    m.previous = m.first(x).detach() + getattr(m, "previous", 0)
    return m.last(m.previous)


@pytest.mark.parametrize("function", [counted, remembered])
def test_a_forward_that_computes_with_earlier_calls_is_refused(function: Callable) -> None:
    match = "is not the model|in evaluation it computes something else|makes a tensor of its input"
    refused(Model(function), rows(8), match=match)


def test_caches_and_notes_of_forward_are_let_be() -> None:
    def forward(m, x):
        if getattr(m, "cache", None) is None:
            m.cache = torch.linspace(0, 1, 8) ** 2
        m.seen = m.first(x) * m.cache
        return m.last(m.seen)

    assert_same(Model(forward), rows(8))

    def count(m, x):
        m.calls += 1
        return m.last(m.first(x))

    model = Model(count)
    model.calls = 0
    assert_same(model, rows(8))
    assert model.calls == 0


class Normed(Model):
    """Its own train() leaves batch norm in evaluation."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.last(m.norm(m.first(x))))
        self.norm = nn.BatchNorm1d(8)
        self.norm.running_mean.fill_(0.3)

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize("mode", [True, False])
def test_a_train_of_the_models_own_decides_what_trains(mode: bool) -> None:
    prepared = assert_same(Normed().train(mode), rows(8))
    with unquantized(prepared.train()):
        prepared(rows(8))
    torch.testing.assert_close(dict(prepared.named_buffers())["norm.running_mean"], torch.full((8,), 0.3))


def test_an_eval_that_leaves_dropout_on_is_refused() -> None:
    class Sampled(Model):
        def eval(self):
            super().eval()
            self.drop.train()
            return self

    model = Sampled(lambda m, x: m.last(m.drop(m.first(x))))
    model.drop = nn.Dropout(0.5)
    refused(model, rows(8), match="'drop' stays in training when eval")


def test_random_numbers_of_python_are_refused() -> None:
    import random

    def forward(m, x):
        y = m.first(x)
        return m.last(y if m.training and random.random() < 0.5 else y * 2)

    refused(Model(forward), rows(8), match="draws random numbers with Python's")


def test_data_that_is_replaced_is_refused() -> None:
    def forward(m, x):
        m.weight.data = m.weight.data.clamp(-0.5, 0.5)
        return m.last(x @ m.weight)

    refused(Model(forward), rows(8), match=r"\.data \(take detach\(\)\)")


def test_a_gradient_computed_in_forward_is_refused() -> None:
    def forward(m, x):
        x = x if x.requires_grad else x.clone().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(m.first(x).square().sum(), x, create_graph=True)
        return m.last(gradient)

    refused(Model(forward), rows(8), match="torch.autograd.grad")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_prepare_where_gradients_are_off(context: Callable) -> None:
    model = Model(lambda m, x: m.last(F.relu(m.first(x))))
    with context():
        prepared = prepared_quietly(model, rows(8))
    with unquantized(prepared):
        torch.testing.assert_close(run(prepared, rows(8)), run(model, rows(8)))


def test_a_tensor_that_is_an_attribute_and_changes_is_refused() -> None:
    def forward(m, x):
        m.plain.mul_(0.5)
        return m.last(m.first(x) * m.plain)

    model = Model(forward)
    model.plain = torch.ones(8)
    refused(model, rows(8), match=r"line \d+\)?: training changes 'plain', with which the model computes")


def test_copies_of_buffers_may_be_written_into() -> None:
    def forward(m, x):
        weight, table = m.weight.clone(), m.table.clone()
        weight.mul_(2)
        table[0] = 3.0
        return m.last((x @ weight) * table)

    assert_same(Model(forward), rows(8))


def test_a_compiled_model_does_not_depend_on_the_number_of_examples() -> None:
    """torch.compile notes sizes in guards and calls other functions after a while: it is read as it was written."""
    model = torch.compile(Model(lambda m, x: m.last(m.first(x))))
    assert prepared_quietly(model, rows(8)).proof.trials


TRANSFORMED = {
    "of every example": lambda m, x: m.last(torch.vmap(lambda row: row * row.sum().sigmoid())(m.first(x))),
    "of weights": lambda m, x: torch.vmap(lambda w: x @ w, out_dims=1)(m.weight.reshape(2, 8, 4)).flatten(1),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transform_in_forward_is_refused_and_leaves_pytorch_as_it_was(name: str) -> None:
    refused(Model(TRANSFORMED[name]), rows(8), match="torch.vmap|transforms of torch.func")
    assert torch._C._functorch.maybe_current_level() is None
    assert_same(Model(lambda m, x: m.last(m.first(x))), rows(8), modes=(True,))


class Doubling(torch.Tensor):
    """A class of the user's own whose sine is another."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is torch.sin else result

    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone().as_subclass(Doubling).requires_grad_()


def test_a_tensor_of_a_class_of_the_users_own_is_compared() -> None:
    model = Model(lambda m, x: m.last(torch.sin(m.first(x)) * torch.sin(m.own)))
    own = torch.rand(8).as_subclass(Doubling).requires_grad_()
    own._is_param = True
    model.own = nn.Parameter(own)
    refused(model, rows(8), match="the captured network is not the model")


SIMILARITIES = {
    "of rows": lambda m, x: F.cosine_similarity(m.first(x), x),
    "with a parameter": lambda m, x: F.cosine_similarity(m.first(x), m.factor, dim=1),
    "with a row of parameters": lambda m, x: F.cosine_similarity(m.first(x)[:, None], m.weight[None], 2, 0.1),
    "along what is repeated": lambda m, x: F.cosine_similarity(x[:, :, None], m.first(x)[:, None], dim=-1),
}


@pytest.mark.parametrize("name", SIMILARITIES)
def test_the_gradient_of_a_cosine_similarity_is_that_of_pytorch(name: str) -> None:
    assert_same(Model(SIMILARITIES[name]), rows(8))


def test_the_gradient_below_the_least_length_of_a_cosine_similarity_is_refused() -> None:
    """PyTorch's goes through the least length that it divides by, as if it were not cut off."""
    model = Model(lambda m, x: F.cosine_similarity(m.first(x) * 1e-4, x, eps=1e-2))
    refused(model, rows(8), match="the captured network is not the model.*gradient")


def test_hooks_that_need_gradients_are_compared() -> None:
    """Forward may ask for gradients of what it computes, which raises where there are none: that is no training."""

    def forward(m, x):
        y = m.first(x)
        y.retain_grad()
        return m.last(y)

    proof = prepared_quietly(Model(forward), rows(8)).proof
    assert {trial.training for trial in proof.trials} == {True, False}
    assert len(proof.not_run) == 1


@pytest.mark.parametrize("held", [threading.Lock(), [(number for number in range(3))]])
def test_what_cannot_be_copied_is_said(held: object) -> None:
    model = Model(lambda m, x: m.last(m.first(x)))
    model.first.held = held
    refused(model, rows(8), match="the model cannot be copied.*TypeError: .*(lock|generator)")


# --- what is said ---------------------------------------------------------------------------------------------------


class Held(nn.Module):
    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.first, self.held = nn.Linear(8, 8), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held(self.first(x))


@pytest.mark.parametrize("held", [nn.Dropout(0.5), nn.BatchNorm1d(8)])
def test_what_is_in_evaluation_while_its_model_trains_stays_so_and_is_named(held: nn.Module) -> None:
    with pytest.warns(UserWarning, match="held is in evaluation while the model trains"):
        prepared = qat.prepare(Held(copy.deepcopy(held).eval()), rows(8))
    x = rows(8)
    with unquantized(prepared.train()):
        one = prepared(x)
        assert torch.equal(one, prepared(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qat.prepare(Held(held).train(), rows(8))
        qat.prepare(Held(held).eval(), rows(8))


HALVES = {
    "autocast": lambda m, x: _autocast(m, x).float(),
    "a cast": lambda m, x: m.last(m.first(x.half().float())),
}


def _autocast(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.last(m.first(x))


@pytest.mark.parametrize("name", HALVES)
def test_half_precision_in_forward_is_named(name: str) -> None:
    with pytest.warns(qat.HalfPrecisionWarning, match="float16 in part"):
        qat.prepare(Model(HALVES[name]), rows(8))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_along_the_batch_is_refused(kind: type[nn.Module]) -> None:
    def forward(m: Any, x: Any) -> Any:
        return m.recurrent(x)[0]

    model = Model(forward)
    model.recurrent = kind(6, 4)
    refused(model, rows(2, 6), match="recurrent layers along the batch .without batch_first=True")


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("steps", [2, 5])
def test_a_recurrent_layer_along_a_sequence_is_kept(kind: type[nn.Module], steps: int) -> None:
    model = Model(lambda m, x: m.recurrent(x.transpose(0, 1))[0].transpose(0, 1))
    model.recurrent = kind(6, 4)
    assert_same(model, rows(steps, 6))


def test_a_clock_is_not_called_the_size_of_the_batch() -> None:
    ticks = itertools.count()
    text = refused(Model(lambda m, x: m.last(m.first(x) * next(ticks))), rows(8), match="each time it is called")
    assert "size of the batch" not in text


def test_a_hook_on_an_input_is_named() -> None:
    def forward(m: Any, x: Any) -> Any:
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return m.last(m.first(x))

    refused(Model(forward), rows(8), match="the captured network is not the model")
