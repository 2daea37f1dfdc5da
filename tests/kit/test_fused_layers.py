# SPDX-License-Identifier: Apache-2.0
"""A layer as one operation of autograd has the bits of its parts one by one, and leaves to those what is unusual."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from exactqat import qat  # noqa: E402


def network(activation: type[nn.Module] = nn.ReLU6, **norm: object) -> nn.Sequential:
    """Convolutions of all kinds that are one operation; paddings and strides on both sides of what kernels like."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for convolution in (
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        qat.Conv2d(8, 12, 3, 2, bias=False),
        qat.DepthwiseConv2d(12, 3, 1, channel_multiplier=2, bias=False),
        nn.Conv2d(24, 16, 1, bias=False),
        nn.Conv2d(16, 16, 3, 1, 2, dilation=2, groups=16, bias=False),
        nn.Conv2d(16, 8, 1, groups=2, bias=False),
    ):
        layers += [convolution, nn.BatchNorm2d(convolution.out_channels, **norm), activation()]  # type: ignore[arg-type]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def prepared(rule: qat.Rule | None = None, last: bool = True, **settings: object) -> tuple[nn.Module, Tensor]:
    """In training, calibrated, and images. last: channels are."""
    images = torch.randn(4, 3, 17, 14, generator=torch.Generator().manual_seed(1))
    model = network(**settings)  # type: ignore[arg-type]
    model = model.to(memory_format=torch.channels_last) if last else model
    model = qat.prepare(model, images[:2], [rule or qat.Rule()])
    qat.calibrate(model, [images])
    return model.train(), images


def without_fusing(model: nn.Module) -> nn.Module:
    clone = copy.deepcopy(model)
    clone._fused_calls = clone._calls
    return clone


def nodes(result: Tensor) -> Iterator[str]:
    """The names of autograd's operations."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node.name()
        waiting += [source for source, _ in node.next_functions]


def trained(model: nn.Module, images: Tensor, call: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """All that two steps give, and all that is left in the model."""
    optimizer = torch.optim.SGD([tensor for tensor in model.parameters() if tensor.requires_grad], 0.1)
    tensors = []
    for _ in range(2):
        x = images.clone().requires_grad_()
        optimizer.zero_grad()
        result = model(x) if call is None else call(model, x)
        result.square().sum().backward()
        optimizer.step()
        tensors += [result.detach(), x.grad]
    gradients = [tensor.grad for tensor in model.parameters() if tensor.grad is not None]
    return [*tensors, *gradients, *(tensor for tensor in model.state_dict().values() if isinstance(tensor, Tensor))]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU6, nn.ReLU, nn.Identity])
@pytest.mark.parametrize("ranges", ["ema", "learned", "last_batch", "min_max", "percentile"])
def test_the_same_bits(ranges: str, activation: type[nn.Module], last: bool) -> None:
    model, images = prepared(qat.Rule(ranges=ranges), last, activation=activation)  # type: ignore[arg-type]
    fused = [name for name in nodes(model(images)) if name == "_LayerBackward"]
    assert len(fused) == (0 if ranges == "percentile" else 6)
    assert_same(trained(copy.deepcopy(model), images), trained(without_fusing(model), images))


@pytest.mark.parametrize(
    "norm", [{"affine": False}, {"momentum": None}, {"eps": 0.1, "momentum": 0.5}], ids=["affine", "mean", "other"]
)
def test_other_batch_norms(norm: dict[str, object]) -> None:
    model, images = prepared(None, **norm)
    assert "_LayerBackward" in set(nodes(model(images)))
    assert_same(trained(copy.deepcopy(model), images), trained(without_fusing(model), images))


class Joined(nn.Module):
    """Two layers whose results are joined, so that they share a range."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = network()[:3], network()[:3]
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.first(x), 2 * self.second(x)], 1))


@pytest.mark.parametrize("ranges", ["ema", "learned"])
def test_ranges_with_several_writers(ranges: str) -> None:
    images = torch.randn(4, 3, 17, 14)
    model = qat.prepare(Joined(), images[:2], [qat.Rule(ranges=ranges)])
    qat.calibrate(model, [images])
    model.train()
    assert sum(name == "_LayerBackward" for name in nodes(model(images))) == 2
    assert_same(trained(copy.deepcopy(model), images), trained(without_fusing(model), images))


def test_weights_whose_largest_value_rounds_beyond_its_range_get_the_same_gradient() -> None:
    """Channels of many magnitudes, denormal, zero, and not finite ones: those whose gradients may not just pass."""
    model, images = prepared()
    with torch.no_grad():
        weight = model.get_parameter("9.weight")
        weight *= torch.logspace(-3, 3, len(weight))[:, None, None, None]
        weight[2], weight[5, 3:] = 0.0, 1e-41
    assert_same(trained(copy.deepcopy(model), images), trained(without_fusing(model), images))
    with torch.no_grad():
        weight[7, 1] = torch.nan
    both = [trained(copy.deepcopy(model), images), trained(without_fusing(model), images)]
    assert_same(*([tensor.nan_to_num(7.0) for tensor in tensors] for tensors in both))


def test_partly_frozen_networks() -> None:
    model, images = prepared()
    model.get_submodule("4").eval()
    model.get_parameter("0.weight").requires_grad_(False)
    model.get_parameter("7.weight").requires_grad_(False)
    model.get_parameter("10.bias").requires_grad_(False)
    assert sum(name == "_LayerBackward" for name in nodes(model(images))) == 5
    assert_same(trained(copy.deepcopy(model), images), trained(without_fusing(model), images))


def test_gradients_of_gradients() -> None:
    model, images = prepared(qat.Rule(ranges="learned"))

    def second(model: nn.Module) -> list[Tensor]:
        x = images.clone().requires_grad_()
        parameters = [tensor for tensor in model.parameters() if tensor.requires_grad]
        first = torch.autograd.grad(model(x).square().sum(), [x, *parameters], create_graph=True)
        loss = sum((gradient * gradient).sum() for gradient in first)
        again = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
        return [gradient for gradient in (*first, *again) if gradient is not None]

    assert_same(second(copy.deepcopy(model)), second(without_fusing(model)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    model, images = prepared()

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    assert_same(trained(copy.deepcopy(model), images, call), trained(without_fusing(model), images))


def test_hooks_see_gradients_that_stay_theirs() -> None:
    model, images = prepared()

    def seen(model: nn.Module) -> list[Tensor]:
        kept: dict[str, list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(kept.setdefault(name, []).append)
        loss = model(images).square().sum()
        loss.backward(retain_graph=True)
        first = [gradients[0].clone() for gradients in kept.values()]
        loss.backward()
        assert_same(first, [gradients[0] for gradients in kept.values()])
        return [gradient for gradients in kept.values() for gradient in gradients]

    assert_same(seen(copy.deepcopy(model)), seen(without_fusing(model)))


def test_who_watches_sees_the_parts() -> None:
    """Modes, transforms, autocast and forward mode see each operator."""
    from torch.utils._python_dispatch import TorchDispatchMode

    model, images = prepared()
    names = set()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: object, types: object, args: tuple = (), kwargs: dict | None = None):  # type: ignore[no-untyped-def, type-arg]
            names.add(str(function))
            return function(*args, **(kwargs or {}))  # type: ignore[operator]

    with Watching():
        model(images)
    assert {"exactqat.fake_quant_rows.default", "exactqat.quantized_batch_norm_training.default"} <= names
    with torch.autocast("cpu", torch.bfloat16):
        assert "_LayerBackward" not in set(nodes(model(images)))


def test_vectors_in_other_places_are_looked_at() -> None:
    model, images = prepared()
    model(images)
    model.get_submodule("1").weight.data = torch.ones(3)
    with pytest.raises((ValueError, RuntimeError)):
        model(images)
