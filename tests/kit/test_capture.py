# SPDX-License-Identifier: Apache-2.0
"""A captured network computes what its model does, in training and in evaluation, and says where everything is."""

from __future__ import annotations

import functools
import math
import os
import re
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from network_interpreter import differences, run  # noqa: E402
from plain_networks import NETWORKS  # noqa: E402
from torch import nn  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.kit.planning import sequence  # noqa: E402
from exactqat.kit.planning.network import KINDS  # noqa: E402
from exactqat.qat.capture.torch.model import CaptureError, capture  # noqa: E402

# The others run where EXACTQAT_ALL_NETWORKS is set (a minute).
SAMPLE = (
    *("ssd_shared_head", "ds_cnn", "causal_tcn", "lstm_time_first", "crnn", "shuffle_units", "face_landmarks"),
    *(
        "tiny_vit",
        "keyword_transformer_with_weights",
        "sdpa_encoder",
        "learned_queries",
        "cbam",
        "dynamic_same",
        "scalar_arithmetic",
    ),
    *("layer_scale_net", "bi_fpn", "weight_standardised", "weight_normed", "pieces", "functional", "subclasses"),
    *("optional_argument_given", "shape_branches", "bare_linear", "tied_weights", "binary_gates", "learned_memory"),
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def captured(model: nn.Module, *examples: object):
    """The network, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return capture(model, tuple(examples))


def agree(model: nn.Module, *examples: object, tolerance: float = 1e-5):
    """Captures a model and compares it in both modes, and with another batch than the example's."""
    network = captured(model, *examples)
    check(network, model, *examples, tolerance=tolerance)
    return network


def check(network, model: nn.Module, *examples: object, tolerance: float = 1e-5) -> None:
    assert {step.kind for step in network.steps} <= KINDS.keys() - {"unsupported"}, [
        (step.label, step.attributes.get("reason")) for step in network.steps if step.kind == "unsupported"
    ]
    larger = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t, t.flip(0), t * 0.5]), examples)
    for training in (False, True):
        assert differences(network, model, larger, training) <= tolerance, training


def one_kind(function) -> str:
    """The kind of the step that a function of one value is."""
    (step,) = captured(Function(function), IMAGE).steps
    return step.kind


def kinds(network) -> list[str]:
    return [step.kind for step in network.steps]


class Function(nn.Module):
    """A module whose forward is a function of (module, *inputs), with a few layers at hand."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.conv, self.linear = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(8, 8)
        self.bn, self.identity, self.drop = nn.BatchNorm2d(6), nn.Identity(), nn.Dropout(0.5)
        self.act = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 6))
        self.register_buffer("table", torch.linspace(0.1, 1, 6))

    def forward(self, *inputs):
        return self.function(self, *inputs)


IMAGE = (torch.linspace(-2, 2, 2 * 6 * 8 * 8).sin() * 2).reshape(2, 6, 8, 8)
SEQUENCE = torch.linspace(-2, 2, 2 * 5 * 8).cos().reshape(2, 5, 8)
ROW = torch.linspace(0.1, 1, 8)
MASK = torch.eye(8).bool()


@pytest.mark.parametrize("name", NETWORKS if os.environ.get("EXACTQAT_ALL_NETWORKS") else SAMPLE)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_plain_networks(name: str) -> None:
    model, examples = NETWORKS[name]()
    agree(model, *examples)


def test_the_sample_is_of_the_networks() -> None:
    assert set(SAMPLE) <= NETWORKS.keys()


# --- functions, each as people write it -----------------------------------------------------------------------------

MOVEMENT = [
    lambda m, x: (x.cumsum(1), torch.cumsum(x, -1).flip(3).cumsum(3), x.transpose(0, 1).cumsum(0).transpose(0, 1)),
    lambda m, x: x.roll(3, 2) + torch.roll(x, (1, -1), (2, 3)),
    lambda m, x: (x.tile(1, 1, 2, 2), x.repeat(1, 2, 1, 1), x.repeat_interleave(2, dim=2), x[:, :1].repeat(1, 4, 1, 1)),
    lambda m, x: (x[:, [0, 2, 1]], x[:, :, [0, 1], [1, 2]], x[..., None].squeeze(-1), x[:, 1:5:2], x[:, -2:], x[:, -1]),
    lambda m, x: (
        x.narrow(1, 2, 3),
        x.index_select(1, torch.tensor([5, 0])),
        x[:, None, ..., 0],
        x[:, :, MASK[0].int()],
    ),
    lambda m, x: torch.gather(x, 1, torch.tensor([1, 0]).view(1, 2, 1, 1).expand(x.shape[0], 2, 8, 8)),
    lambda m, x: torch.gather(x, 3, (torch.arange(144).view(1, 6, 8, 3) * 5 % 8).expand(x.shape[0], 6, 8, 3)),
    lambda m, x: torch.gather(x, 1, (torch.arange(256).view(1, 4, 8, 8) * 5 % 6).expand(x.shape[0], 4, 8, 8)),
    lambda m, x: torch.gather(x.flatten(0, 1), 2, (torch.arange(96).view(6, 8, 2) * 3 % 8).repeat(x.shape[0], 1, 1)),
    lambda m, x: x.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2),
    lambda m, x: (x.movedim(1, -1), torch.moveaxis(x, (1, 2), (2, 3)), x.swapaxes(1, 2), x.swapdims(1, 2), x.mT),
    lambda m, x: (x.flatten(1).T.t(), torch.flip(x, [2, 3]), torch.rot90(x, 1, [2, 3]), x.unbind(1)[2]),
    lambda m, x: (x.split(2, 1)[1], *x.chunk(4, 1), *torch.tensor_split(x, 4, 1), torch.hstack([x, x])),
    lambda m, x: (torch.stack([x, x + 1], 2), torch.concat([x, x], dim=-1), F.pixel_unshuffle(x, 2)),
    lambda m, x: (F.pixel_shuffle(x[:, :4], 2), F.channel_shuffle(x, 3), torch.broadcast_to(x[:, :1], x.shape)),
    lambda m, x: nn.Flatten(0, 1)(x).view(-1, 6, 8, 8)[:, :, 1:],
    lambda m, x: x.reshape(x.shape[0] * 6, 1, 8, 8)[:, :, 1:].view(x.shape[0], 6, 7, 8),
    lambda m, x: x.view(math.floor(x.shape[0] * 64 / 8 / 8), -1, 8),
    lambda m, x: (x.mean((2, 3), True).expand_as(x), torch.squeeze(x[:, :1]), x.ravel().view(x.shape)),
    lambda m, x: torch.cat([x, torch.zeros_like(x), x.new_ones(x.shape[0], 1, 8, 8)], 1),
    lambda m, x: torch.cat([x.flatten(0, 1), x.new_ones(x.shape[0] * 6, 2, 8)], 1),
    lambda m, x: torch.cat([x, m.table.view(1, 6, 1, 1).expand(x.shape[0], 6, 8, 8)], axis=1),
    lambda m, x: torch.cat((x, torch.arange(8.0).view(1, 1, 1, 8).repeat(x.shape[0], 1, 8, 1)), 1),
    lambda m, x: x * m.table.to(x.device, torch.float32).cos().to(x.device, copy=True).view(1, 6, 1, 1),
    lambda m, x: (x.transpose(0, 1).reshape(-1, 8) * 2).view(6, -1, 8, 8).transpose(0, 1),
    lambda m, x: (x.unfold(2, 2, 2).unfold(3, 3, 1), x.unfold(-1, 3, 2), x.unfold(1, 6, 1), F.unfold(x, 3, 1, 1, 2)),
    lambda m, x: (F.fold(x.flatten(2)[:, :, :20], (8, 10), (1, 2), stride=(2, 2)), F.fold(F.unfold(x, 2), (8, 8), 2)),
    lambda m, x: F.fold(F.unfold(x, (3, 2), 1, 1, 2), (8, 8), (3, 2), padding=1, stride=2),
    lambda m, x: F.fold(x.reshape(x.shape[0], 24, 16), (8, 8), 2, stride=2),
]
PADS = [
    *(lambda m, x, k=mode: F.pad(x, (1, 2, 0, 1), mode=k) for mode in ("constant", "reflect", "replicate", "circular")),
    lambda m, x: (F.pad(x, (-1, 2, 0, -2), value=3), F.pad(x, (0, 0, 0, 0, 1, 1)), F.pad(x, (-1, -1))),
]
RESIZES = [
    *(
        lambda m, x, k=mode, how=how: F.interpolate(x, mode=k, **how)
        for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
        for how in ({"scale_factor": 2}, {"size": (5, 11)}, {"scale_factor": (1.3, 2.6)}, {"scale_factor": 0.5})
    ),
    lambda m, x: F.interpolate(x, scale_factor=1.7, recompute_scale_factor=True),
    lambda m, x: F.interpolate(x, size=(16, 16), mode="bilinear", align_corners=True),
    lambda m, x: F.interpolate(x[:, 0], scale_factor=2, mode="linear"),
]
POOLS = [
    *(
        lambda m, x, how=how: (
            *(F.max_pool2d(x, *how[:3], ceil_mode=how[3]), F.avg_pool2d(x, *how[:3], ceil_mode=how[3])),
            F.avg_pool2d(x, *how[:3], ceil_mode=how[3], count_include_pad=False),
            *(F.max_pool1d(x[:, 0], *how[:3], ceil_mode=how[3]), F.avg_pool1d(x[:, 0], *how[:3], ceil_mode=how[3])),
        )
        for how in (
            (2, 2, 0, False),
            (3, 2, 1, False),
            (3, 2, 1, True),
            (3, 3, 0, True),
            (5, 1, 2, False),
            (4, 3, 2, True),
        )
    ),
    lambda m, x: (F.max_pool2d(x, 3, 1, 1, 2), F.avg_pool2d(x, 3, divisor_override=5), F.adaptive_max_pool2d(x, 2)),
    lambda m, x: (
        F.adaptive_avg_pool2d(x, (3, 5)),
        F.adaptive_avg_pool2d(x, (None, 1)),
        F.adaptive_avg_pool1d(x[:, 0], 3),
    ),
    lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0],
]
REDUCTIONS = [
    lambda m, x: (x.var((2, 3)), x.std(1, keepdim=True), x.var(2, unbiased=False), torch.mean(x, axis=1)),
    lambda m, x: (*torch.var_mean(x, dim=1, unbiased=False), *torch.std_mean(x, (2, 3), keepdim=True)),
    lambda m, x: (x.norm(dim=1), x.norm(p=1, dim=1), torch.linalg.norm(x, dim=(2, 3)), F.normalize(x, dim=1)),
    lambda m, x: (
        torch.linalg.vector_norm(x, dim=1, ord=math.inf),
        F.normalize(x, p=1, dim=1),
        F.normalize(x, dim=(2, 3)),
    ),
    lambda m, x: (
        F.cosine_similarity(x, x + 1, dim=1),
        torch.logsumexp(x, 1),
        x.max(1).values,
        x.min(1)[0],
        x.argmax(1),
    ),
    lambda m, x: (
        *x.max(dim=1),
        x.sum(-1).mean(dim=1, keepdim=True),
        x.sum(axis=(1, 2)),
        x.amax(1),
        x.amin((2,), True),
    ),
]
ELEMENTWISE = [
    lambda m, x: tuple(f(x) for f in (F.relu, F.relu6, F.gelu, F.silu, F.mish, F.elu, F.selu, F.celu, F.leaky_relu)),
    lambda m, x: tuple(f(x) for f in (F.softplus, F.softsign, F.tanhshrink, F.hardtanh, F.hardswish, F.hardsigmoid)),
    lambda m, x: tuple(f(x) for f in (F.logsigmoid, F.sigmoid, F.tanh, torch.exp, torch.erf, torch.sin, torch.cos)),
    lambda m, x: (torch.asinh(x), torch.arcsinh(3 * x), torch.cosh(x)),
    lambda m, x: tuple(f(x) for f in (torch.abs, torch.neg, torch.sign, torch.floor, torch.round, torch.ceil)),
    lambda m, x: tuple(f(x) for f in (torch.square, torch.reciprocal, torch.exp2, torch.expm1, torch.positive)),
    lambda m, x: (F.gelu(x, approximate="tanh"), F.glu(x, 1), F.softmin(x, 1), F.threshold(x, 0, 0), x * x),
    lambda m, x: (F.hardshrink(x, 0.3), F.softshrink(x, 0.2), F.threshold(x, 0.1, -0.4), nn.Threshold(-1, 2)(x)),
    lambda m, x: tuple(
        f(x.abs() + 1) for f in (torch.sqrt, torch.rsqrt, torch.log, torch.log1p, torch.log2, torch.log10)
    ),
    lambda m, x: (
        x**2,
        x.pow(3),
        2**x,
        x.abs() ** 0.5,
        torch.clamp(x, -1),
        x.clip(max=1),
        x.clamp_min(0),
        x.clamp(0, 6),
    ),
    lambda m, x: (x + m.scale.view(1, -1, 1, 1), m.table.view(6, 1, 1) * x, x - 0.5, 1 - x, 3 / (x.abs() + 1), x // 2),
    lambda m, x: (torch.sub(x, x, alpha=0.5), torch.add(1, x), torch.add(x, x * 2, alpha=2), torch.true_divide(x, 3)),
    lambda m, x: (
        torch.rsub(x, x * 3, alpha=0.5),
        torch.div(x, 2, rounding_mode="floor"),
        torch.mul(input=x, other=x + 1),
    ),
    lambda m, x: (
        torch.maximum(x, -x),
        torch.minimum(x, torch.tensor(0.3)),
        torch.max(x, x * 0.5),
        torch.multiply(x, 2),
    ),
    lambda m, x: (torch.lerp(x, x * 2, 0.3), torch.addcmul(x, x, x, value=0.5), torch.addcdiv(x, x, x.abs() + 1)),
    lambda m, x: (x.masked_fill(MASK, 0), x.masked_fill(MASK, -1e9), x.masked_fill(MASK, -math.inf).softmax(-1)),
    lambda m, x: (torch.where(MASK, x, 0.0), torch.where(MASK, x, x * 2), torch.where(MASK, m.scale.view(6, 1, 1), x)),
    lambda m, x: (x.tril(), x * (torch.ones(8) > 0), F.one_hot(torch.arange(8), 8).float() @ x, x.double().float()),
    lambda m, x: (F.prelu(x, m.scale), F.prelu(x, m.scale[:1]), x.softmax(1), F.log_softmax(x, -1)),
]
# Functions of one value that compare it.
COMPARED = [
    lambda m, x: torch.where(x > 0.3, x.sin(), x.cos()),
    lambda m, x: (x.masked_fill(x < 0.1, 0.5) + x.masked_fill((x < 0.1).logical_not(), 2), x * (x > 0.2).int()),
    lambda m, x: torch.where((x > -1) & (x < 1), x**3, x.sign()) * (x > -1.5),
    lambda m, x: torch.where(torch.logical_or(x >= 1, ~(x > -0.5)), x.abs(), 0.0),
    lambda m, x: torch.where(x > 0.5, 1.0, 0.0) * 2 + x.exp() * (x <= 0) - (x.clamp(0, 0.5) != 0.5).float(),
    lambda m, x: (x > 0).float() - x.sigmoid().detach() + x.sigmoid(),
    lambda m, x: ((x > 0).float() - x).detach() + x,
    lambda m, x: torch.where(x.abs() > 1e-3, x.tanh() / x, 1.0),
    lambda m, x: torch.heaviside(x - 0.1, torch.tensor(0.5)) + torch.where(x == x.relu(), F.gelu(x), x.pow(2)),
    lambda m, x: F.leaky_relu(x * (x > 0.1) + torch.minimum(x, torch.full_like(x, 0.3)) * (x.ge(0) ^ x.lt(1))),
    lambda m, x: (x > 0).float() * m.conv(x),  # a mask of another value is a value
]
# What the device knows better than by a table: the words of other frameworks for it.
RECOGNISED = {
    "relu": [
        lambda m, x: x * (x > 0),
        lambda m, x: (x > 0).float() * x,
        lambda m, x: x.masked_fill(x < 0, 0),
        lambda m, x: torch.where(x > 0, x, torch.zeros_like(x)),
        lambda m, x: (lambda y: (y.__setitem__(y < 0, 0.0), y)[1])(x.clone()),
    ],
    "leaky_relu": [
        lambda m, x: torch.where(x > 0, x, 0.1 * x),
        lambda m, x: x * (x > 0) + 0.1 * x * (x <= 0),
        lambda m, x: x * torch.where(x < 0, 0.2, 1.0),
    ],
    "prelu": [
        lambda m, x: torch.where(x > 0, x, x * m.scale.view(6, 1, 1)),
        lambda m, x: torch.where(x >= 0, x, m.scale[0] * x),
    ],
    "elu": [lambda m, x: torch.where(x > 0, x, x.exp() - 1)],
    "clamp": [lambda m, x: torch.where(x > 1, 1.0, torch.where(x < -1, -1.0, x))],
    "hardswish": [lambda m, x: torch.where(x < -3, 0.0, torch.where(x < 3, x * (x + 3) / 6, x))],
    "composition": [
        # Corners between the points at which functions are sampled.
        lambda m, x: torch.where(x > 0.01, x, 0.0),
        lambda m, x: torch.where(x > 5e-5, x, 0.0),
        lambda m, x: torch.where(x < 20000, x, 0.0),
        lambda m, x: torch.where((x > 0.001) & (x < 0.03), 5.0, x.relu()),
    ],
}
PRODUCTS = [
    lambda m, x: (
        torch.matmul(x, x.transpose(2, 3)),
        x @ torch.outer(ROW, ROW[:3]),
        torch.outer(ROW[:4], ROW) @ x,
        x @ ROW,
    ),
    lambda m, x: (
        x @ m.linear.weight,
        m.linear.weight.t() @ x,
        x.matmul(m.linear.weight.T),
        torch.inner(x, m.linear.weight),
    ),
    lambda m, x: (
        x.flatten(0, 1) * ROW[:6].repeat(x.shape[0]).view(-1, 1, 1) + m.table.repeat(x.shape[0]).view(-1, 1, 1),
        torch.bmm(x.flatten(0, 1), m.linear.weight.view(1, 8, 8).expand(6, 8, 8).repeat(x.shape[0], 1, 1)),
        torch.maximum(m.scale.repeat(x.shape[0]).view(-1, 1), x.flatten(0, 1).mean(1)),
    ),
    lambda m, x: (torch.bmm(x[:, 0], x[:, 1].mT), torch.baddbmm(torch.zeros(1), x[:, 0], x[:, 1], beta=0.5, alpha=2)),
    lambda m, x: (
        torch.addmm(m.linear.bias, x[:, 0, 0], m.linear.weight, alpha=0.5),
        torch.mm(x[:, 0, 0], m.linear.weight),
    ),
    lambda m, x: (torch.tensordot(x, m.linear.weight, dims=([2], [0])),),
    lambda m, x: (torch.einsum("bchw->bhwc", x), torch.einsum("bchw,c->bhw", x, m.scale), torch.einsum("bchw->bc", x)),
    lambda m, x: (torch.einsum("b c h w, b c h v -> b h w v", x, x), torch.einsum("...hw,...hv->...wv", x, x)),
    lambda m, x: (torch.einsum("bchw,bc->bhw", x, x.mean((2, 3))), torch.einsum("bchw,c,h->bw", x, m.table, ROW)),
    lambda m, x: (F.scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.outer(ROW, ROW)),
    lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=MASK, scale=0.3),
    lambda m, x: F.scaled_dot_product_attention(x, x[:, :3], x[:, :3], enable_gqa=True),
]
LAYERS = [
    lambda m, x: (
        F.layer_norm(x, (8,)),
        F.layer_norm(x, (6, 8, 8)),
        F.rms_norm(x, (8,)),
        F.group_norm(x, 2),
        F.instance_norm(x),
    ),
    lambda m, x: F.batch_norm(x, m.table * 0, m.table),
    lambda m, x: (m.linear(x), m.linear(x.transpose(0, 1)).transpose(0, 1), m.conv(x)),
    lambda m, x: (
        F.conv2d(x, m.conv.weight, padding="same"),
        F.conv2d(x, m.conv.weight[..., :2, :2], padding="same", dilation=2),
    ),
    lambda m, x: (
        F.conv2d(x, m.conv.weight[:, :1], groups=6, stride=2),
        F.conv1d(x[:, 0:6, 0], m.conv.weight[..., 0], dilation=2),
    ),
    lambda m, x: F.conv_transpose2d(x, m.conv.weight[:, :2], None, 2, 1, 1, 2, 2),
    lambda m, x: F.conv_transpose1d(x[:, :, 0], m.conv.weight[..., 0], stride=2),
]
IN_PLACE = [
    lambda m, x: (lambda y: y + F.relu(m.identity(y), inplace=True))(m.bn(x)),
    lambda m, x: (lambda y: (lambda z: y + z.view_as(y))(F.relu(y.contiguous().flatten(1), inplace=True)))(m.bn(x)),
    lambda m, x: (lambda y: (m.act(y.transpose(1, 2)), y, y.detach().add_(1), y))(m.bn(x)),
]
GROUPS = {
    "movement": MOVEMENT,
    "pads": PADS,
    "resizes": RESIZES,
    "pools": POOLS,
    "reductions": REDUCTIONS,
    "elementwise": ELEMENTWISE,
    "compared": COMPARED,
    "recognised": [function for functions in RECOGNISED.values() for function in functions],
    "products": PRODUCTS,
    "layers": LAYERS,
    "in place": IN_PLACE,
}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_functions(group: str) -> None:
    agree(Function(lambda m, x: [function(m, x) for function in GROUPS[group]]), IMAGE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECOGNISED)
def test_comparisons_that_are_known_functions(kind: str) -> None:
    for function in RECOGNISED[kind]:
        assert one_kind(function) == kind


NO_FUNCTION_OF_ONE_VALUE = {
    r"on the result of Conv2d in 'conv' and on the input 'inputs_0'": lambda m, x: torch.where(m.conv(x) > 0, x, -x),
    "on the result of torch.mean and on the input": lambda m, x: torch.where(x > x.mean(1, keepdim=True), x, 0.0),
    "on 'table' beside it": lambda m, x: torch.where(x > m.table.view(6, 1, 1), x, 0.0),
    r"on a constant of shape \[8\] beside it": lambda m, x: x.masked_fill(x > ROW, 0.0),
    "it computes with -inf; a number that": lambda m, x: x.masked_fill(x > 0.5, -math.inf).softmax(-1),
    "its condition depends on the input": lambda m, x: torch.where(x.isnan(), 0.0, x),
}


@pytest.mark.parametrize("message", NO_FUNCTION_OF_ONE_VALUE)
def test_what_chooses_by_another_value_is_said(message: str) -> None:
    model = Function(NO_FUNCTION_OF_ONE_VALUE[message])
    network = captured(model, IMAGE)
    reasons = [step.attributes["reason"] for step in network.steps if step.attributes.get("reason")]
    assert len(reasons) == 1 and re.search(message, reasons[0]), reasons


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.cell = nn.GRUCell(8, 6), nn.LSTMCell(8, 6), nn.RNNCell(8, 6)
        self.rnn = nn.RNN(8, 6, 2, batch_first=True, bidirectional=True, nonlinearity="relu")

    def forward(self, x):
        a = b = c = d = x.new_zeros(x.shape[0], 6)
        for time in range(x.shape[1]):
            a, (b, c), d = self.gru(x[:, time], a), self.lstm(x[:, time], (b, c)), self.cell(x[:, time], d)
        return a, b, d, *self.rnn(x)


def test_recurrent_cells() -> None:
    assert {"lstm", "gru"}.isdisjoint(kinds(agree(Recurrent(), SEQUENCE)))


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_across(batch_first: bool) -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=batch_first, norm_first=batch_first)

        def forward(self, x, memory):
            mask = nn.Transformer.generate_square_subsequent_mask(5)
            if batch_first:
                return self.decoder(x, memory, tgt_mask=mask)
            return self.decoder(x.transpose(0, 1), memory.transpose(0, 1), tgt_mask=mask).transpose(0, 1)

    agree(Across(), SEQUENCE, torch.cat([SEQUENCE, SEQUENCE[:, :2] * 0.3], 1))


def test_a_layer_without_a_shape_and_arguments_that_do_not_fit() -> None:
    with pytest.raises(CaptureError, match="weight has no shape yet"):
        capture(nn.Sequential(nn.LazyConv2d(4, 3)), IMAGE)
    with pytest.raises(CaptureError, match="does not fit forward: too many positional"):
        capture(nn.ReLU(), (IMAGE, IMAGE))


def in_slices(m, x):
    y = m.bn(x)
    z = y.transpose(1, 2)
    z[:, 1:].mul_(2)
    y[:, 0] = 0
    y[:, :, ::2] += 1
    y[:, torch.tensor([0, 2])] = 1.0
    y.clamp_(-1, 1)
    return y, z


def into_zeros(m, x):
    out = torch.zeros(x.shape[0], 6, 10, 10)
    out[:, :, 1:9, 1:9] = x
    product = torch.empty_like(x)
    torch.mul(x, 2, out=product)
    for index in range(3):
        product[:, index] = x[:, 2 - index]
    return out, product


def into_the_input(m, x):
    x -= 0.5
    x.div_(2)
    return x


@pytest.mark.parametrize("function", [in_slices, into_zeros, into_the_input])
def test_writing_in_place_is_seen_through_every_view(function) -> None:
    agree(Function(function), IMAGE)


UNKNOWN = {
    "torch.cumprod": lambda m, x: torch.cumprod(x, 1),
    "torch.sort": lambda m, x: torch.sort(x, 1)[0],
    "torch.atan2": lambda m, x: torch.atan2(x, x + 3),
    "torch.gt": lambda m, x: x > 0,
    "torch.topk": lambda m, x: x.topk(2, 1)[0],
    "F.interpolate": lambda m, x: F.interpolate(x, size=(4, 4), mode="bilinear", antialias=True),
    "torch.div": lambda m, x: torch.div(x, 2, rounding_mode="trunc"),
}


def test_what_no_kind_says_is_there_by_its_name() -> None:
    model = Function(lambda m, x: [function(m, x) for function in UNKNOWN.values()])
    network = captured(model, IMAGE)
    makers = {step.output: step for step in network.steps}
    assert [makers[name].label for name in network.outputs] == list(UNKNOWN)
    assert {makers[name].kind for name in network.outputs} == {"unsupported"}
    assert all(makers[name].place.line and makers[name].place.file == __file__ for name in network.outputs)


MIXING = {
    "torch.mean": lambda x: x.mean(),
    "indexing": lambda x: x[0] + x,
    "torch.softmax": lambda x: x.softmax(0),
    "torch.flip": lambda x: x.flip(0),
    "torch.div": lambda x: x / x.shape[0],
    "torch.add": lambda x: x + torch.arange(x.shape[0]).view(-1, 1, 1, 1),
    "torch.dropout": lambda x: F.dropout(x),
    "torch.cat": lambda x: torch.cat([x.flatten(0, 1), ROW[:6].repeat(x.shape[0]).view(-1, 1, 1).expand(-1, 8, 1)], 2),
}


@pytest.mark.parametrize("label", MIXING)
def test_what_depends_on_other_examples_is_said(label: str) -> None:
    network = capture(Function(lambda m, x: MIXING[label](x)).eval(), IMAGE)
    step = next(step for step in network.steps if step.kind == "unsupported")
    assert step.label == label
    assert "batch" in step.attributes["reason"] or "random" in step.attributes["reason"]


# --- training and evaluation ----------------------------------------------------------------------------------------


def test_noise_is_of_training() -> None:
    def function(m, x):
        x = F.dropout(m.bn(x), 0.3, m.training)
        if m.training:
            x = x + torch.randn_like(x) * 0.1
        keep = 0.8
        return m.drop(F.dropout2d(x, 0.2, m.training)), x.div(1.0), keep

    network = agree(Function(function), IMAGE)
    assert kinds(network) == ["batch_norm", "dropout", "dropout", "dropout", "dropout"]
    assert network.steps[1].attributes["expression"](torch.ones(3, 6, 8, 8)).unique().numel() == 2


def softmax_in_evaluation(m, x):
    x = m.drop(m.bn(x))
    return x if m.training else x.softmax(1)


def auxiliary_in_training(m, x):
    x = m.drop(m.bn(x))
    return (x.exp(), m.conv(x)) if m.training else x.exp()


@pytest.mark.parametrize("function", [softmax_in_evaluation, auxiliary_in_training])
def test_a_model_is_read_as_it_is_given(function) -> None:
    model = Function(function)
    trained = captured(model, IMAGE)
    assert differences(trained, model, [IMAGE], True) <= 1e-6
    with pytest.raises(
        qat.UnsupportedOperator,
        match=r"(not the model|computes something else).*[Cc]all model\.eval\(\) before prepare",
    ):
        qat.prepare(model, IMAGE)
    evaluated = captured(model.eval(), IMAGE)
    assert differences(evaluated, model, [IMAGE], False) <= 1e-6
    norm = next(step for step in evaluated.steps if step.kind == "batch_norm")
    assert norm.attributes["training"] and norm.attributes["counter"] == "bn.num_batches_tracked"
    assert "dropout" in kinds(evaluated)


def test_frozen_parts_stay_frozen() -> None:
    model = Function(lambda m, x: m.conv(m.bn(x)))
    model.bn.eval()
    model.bn.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="bn is in evaluation while the model trains"):
        network = capture(model, IMAGE)
    assert network.steps[0].attributes["training"] is False
    trainable = {name: constant.trainable for name, constant in network.constants.items()}
    assert trainable["bn.weight"] is False and trainable["bn.bias"] and not trainable["bn.running_mean"]


def test_statistics_without_momentum() -> None:
    network = captured(nn.Sequential(nn.BatchNorm2d(6, momentum=None)), IMAGE)
    assert network.steps[0].attributes["momentum"] is None


def test_what_forward_changes_is_said() -> None:
    def function(m, x):
        m.table += 1
        return m.conv(x)

    with pytest.warns(UserWarning, match="changes table, which nothing in the captured network reads"):
        capture(Function(function), IMAGE)


def test_spectral_norm_is_that_of_evaluation() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)))
    with pytest.raises(CaptureError, match=r"training changes '0\.parametrizations.*call model\.eval\(\)"):
        capture(model, SEQUENCE)
    network = captured(model.eval(), SEQUENCE)
    assert differences(network, model, [SEQUENCE], False) <= 1e-6
    (weight,) = [constant for constant in network.constants.values() if not constant.parameter]
    assert weight.trainable and weight.name == "0.weight"


def test_the_model_stays_as_it_is() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.calls, self.cache = nn.BatchNorm2d(6), 0, {}

        def forward(self, x):
            self.calls += 1
            self.cache["last"] = x
            return self.bn(x)

    model = Keeps()
    model.bn.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.warns(UserWarning, match="bn is in evaluation while the model trains"):
        capture(model, IMAGE)
    assert (model.calls, model.cache, model.training, model.bn.training) == (0, {}, True, False)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# --- constants ------------------------------------------------------------------------------------------------------


@functools.lru_cache
def places(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(size, dtype=dtype) / size


def test_a_table_that_a_function_keeps_is_the_models_own_again() -> None:
    class Placed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 + places(x.shape[1], x.dtype)

    for _ in range(2):  # without and with a table of the model's own
        network, x = captured(Placed(), torch.rand(3, 6)), torch.rand(2, 6)
        torch.testing.assert_close(Placed()(x), x * 2 + torch.arange(6) / 6)
        assert differences(network, Placed(), [x], training=False) < 1e-6


def test_expressions_are_differentiable_and_follow_their_sources() -> None:
    network = captured(Function(lambda m, x: x * (m.scale.softmax(0) * m.table).view(1, -1, 1, 1)), IMAGE)
    (constant,) = network.constants.values()
    assert (constant.parameter, constant.trainable, constant.shape) == (False, True, (1, 6, 1, 1))
    assert set(constant.sources) == {"scale", "table"}
    tensors = {"scale": torch.zeros(6, requires_grad=True), "table": torch.arange(6.0)}
    result = constant.expression(*(tensors[path] for path in constant.sources))
    assert torch.allclose(result.flatten(), torch.arange(6.0) / 6)
    result.sum().backward()
    assert tensors["scale"].grad.abs().sum() > 0


def test_tied_weights_are_one_constant() -> None:
    model, examples = NETWORKS["tied_weights"]()
    network = captured(model, *examples)
    assert "a.weight" in network.constants and "b.weight" not in network.constants
    assert network.constants["encode.weight"].parameter


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_of_numbers(dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 2, 1))
    )
    network = captured(model.to(dtype), IMAGE.to(dtype))
    assert kinds(network) == ["conv", "batch_norm", "conv"]
    assert {value.dtype for value in network.values.values()} == {"float32"}
    assert differences(network, model, [IMAGE.to(dtype)], False) <= 1e-2


# --- names, trees, places -------------------------------------------------------------------------------------------


def test_trees_of_arguments_and_results() -> None:
    class Model(nn.Module):
        def forward(self, images, extra=None, *, factor=2.0):
            total = images["left"] + images["right"][0]
            total = total if extra is None else total + extra
            return {"sum": total * factor, "rest": [images["left"], None, "name", torch.arange(3)]}

    model, images = Model(), {"left": IMAGE, "right": [IMAGE * 2]}
    network = capture(model, (images,), {"factor": 3.0})
    assert network.input_names == ("images_left", "images_right_0")
    assert network.output_names == ("sum", "rest_0")
    inputs = network.input_tree.flatten(images, factor=3.0)
    result = network.output_tree.unflatten(run(network, model, inputs))
    assert torch.allclose(result["sum"], IMAGE * 9) and result["rest"][1:3] == [None, "name"]
    assert torch.equal(result["rest"][3], torch.arange(3))
    with pytest.raises(TypeError, match="captured for extra = None, got a tensor"):
        network.input_tree.flatten(images, IMAGE, factor=3.0)
    with pytest.raises(TypeError, match="captured for factor = 3.0, got 2.0"):
        network.input_tree.flatten(images)
    with pytest.raises(TypeError, match="nest as those of the example"):
        network.input_tree.flatten({"left": IMAGE, "right": [IMAGE, IMAGE]}, factor=3.0)
    variant = capture(model, (images,), {"extra": IMAGE})
    assert variant.input_names == ("images_left", "images_right_0", "extra")


def test_places_labels_and_modules() -> None:
    class Model(Function):
        def forward(self, x):
            return F.relu(self.act(self.bn(self.conv(x))))

    network = captured(Model(None), IMAGE)
    assert [(step.kind, step.module, step.label) for step in network.steps] == [
        ("conv", "conv", "Conv2d"),
        ("batch_norm", "bn", "BatchNorm2d"),
        ("relu", "act", "ReLU"),
        ("relu", "", "torch.relu"),
    ]
    line = test_places_labels_and_modules.__code__.co_firstlineno + 3
    assert {(step.place.file, step.place.line) for step in network.steps} == {(__file__, line)}
    assert [step.place.path for step in network.steps] == ["conv", "bn", "act", ""]


def test_hooks() -> None:
    model = Function(lambda m, x: m.conv(x))
    model.conv.register_forward_hook(lambda module, inputs, result: result * 3)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    assert kinds(agree(model, IMAGE)) == ["add", "conv", "mul"]
    model.conv.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="'conv' has a backward hook"):
        capture(model, IMAGE)


def test_rows_of_an_example() -> None:
    """Inputs may have several rows for each example; another batch than the example's is no matter."""
    network = agree(Function(lambda m, x, y: x.mean((1, 2, 3)) + y.view(-1, 3).sum(1)), IMAGE, torch.ones(6))
    assert network.values[network.inputs[1]].shape == (3,)


def shifted_windows(m: Function, x: torch.Tensor) -> torch.Tensor:
    """Attention in four windows of each image, each with a mask of its own, as in Swin."""
    windows = x.reshape(-1, 6, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 1, 16, 6)
    mask = torch.arange(4.0).view(1, 4, 1, 1, 1).expand(x.shape[0], -1, -1, -1, -1).reshape(-1, 1, 1, 1)
    mask = mask * torch.eye(16)
    return torch.nn.functional.scaled_dot_product_attention(windows, windows, windows, mask).reshape(x.shape)


def test_attention_in_windows_of_each_image() -> None:
    assert "attention" in kinds(agree(Function(shifted_windows), IMAGE))


def test_product_with_what_is_repeated_for_each_example() -> None:
    def product(m: Function, x: torch.Tensor) -> torch.Tensor:
        table = m.linear.weight[:, None].expand(-1, x.shape[0], -1)
        return torch.einsum("bcij,ibj->bci", x, table)

    agree(Function(product), IMAGE)


def test_empty_slices_are_nothing() -> None:
    """Rotary embeddings of all features leave no others."""
    network = agree(Function(lambda m, x: torch.cat([x[..., :8] * 2, x[..., 8:]], -1) + x), IMAGE)
    assert "concat" not in kinds(network)


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED = {
    "depends on the values of a tensor": lambda m, x: x if x.sum() > 0 else -x,
    "a Python number is made of a tensor": lambda m, x: x * x.max().item(),
    "no result of the model depends on its input": lambda m, x: torch.ones(3),
    "computed from parameters alone": lambda m, x: (x + 1, m.scale * 2),
    "depends on the number of examples in the batch": lambda m, x: x.view(2, -1, 8, 8),
    "as a plain number, as len": lambda m, x: x / len(x),
    "one by one": lambda m, x: torch.stack([m.conv(example[None])[0] for example in x]),
    "the size of a result depends": lambda m, x: x[:, m.table > 0.5],
    "same reduction dim": lambda m, x: m.linear(x[..., :4]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_say_where(message: str) -> None:
    with pytest.raises(CaptureError, match=message) as refusal:
        capture(Function(REFUSED[message]), IMAGE)
    if "no result" not in message and "alone" not in message:
        assert os.path.basename(__file__) in str(refusal.value) and ", line " in str(refusal.value)


def test_fourier_transforms_are_refused_by_name() -> None:
    step, *_ = captured(Function(lambda m, x: torch.fft.fft2(x).real), IMAGE).steps
    assert (step.kind, step.label) == ("unsupported", "torch.fft.fft2")
    assert "products with cosines and sines" in step.attributes["reason"]


def test_a_number_has_no_batch() -> None:
    with pytest.raises(CaptureError, match="must have a batch"):
        capture(Function(lambda m, x, y: x * y), (IMAGE, torch.tensor(2.0)))


# --- what all frameworks share ----------------------------------------------------------------------------------------


class InNumPy:
    """A recurrent cell of one example, by PyTorch's weights; arrays are [1, gates * units]."""

    reset_after, update_first = True, False

    def __init__(self, cell: nn.Module) -> None:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self.w, self.back, self.input_bias, self.bias = (getattr(cell, name).detach().numpy() for name in names)
        self.units = self.back.shape[1]
        if not isinstance(cell, nn.GRUCell):
            # Of a state of zero only a GRU's bias is a sum of its own.
            self.input_bias, self.bias = self.input_bias + self.bias, 0 * self.bias

    def entry(self, x: np.ndarray) -> np.ndarray:
        return x @ self.w.T + self.input_bias

    def combine(self, kind: str, one: np.ndarray, other: np.ndarray, role: str) -> np.ndarray:
        return {"add": np.add, "sub": np.subtract, "mul": np.multiply}[kind](one, other)

    def part(self, x: np.ndarray, first: int, count: int, role: str) -> np.ndarray:
        return x[..., first * self.units : (first + count) * self.units]

    def product(self, state: np.ndarray, first: int, count: int) -> np.ndarray:
        return self.part(state @ self.back.T + self.bias, first, count, "")

    def function(self, x: np.ndarray, role: str) -> np.ndarray:
        return np.tanh(x)

    def gate(self, x: np.ndarray, role: str) -> np.ndarray:
        return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(("kind", "make"), [("lstm", nn.LSTMCell), ("gru", nn.GRUCell), ("rnn", nn.RNNCell)])
@pytest.mark.parametrize("backwards", [False, True])
def test_cells_compute_what_pytorch_computes(kind: str, make: type, backwards: bool) -> None:
    module, x = make(3, 4).double(), torch.randn(5, 1, 3, dtype=torch.float64)
    cell = InNumPy(module)
    states, last, memory = sequence.over_time(kind, cell, lambda at, starts: cell.entry(x[at].numpy()), 5, backwards)
    held = None
    with torch.no_grad():
        for at in range(5)[::-1] if backwards else range(5):
            held = module(x[at], held)
            state = held[0] if kind == "lstm" else held
            np.testing.assert_allclose(states[at], state, rtol=1e-12)
    np.testing.assert_array_equal(last, states[0 if backwards else 4])
    assert (memory is not None) == (kind == "lstm")


def test_gates_in_other_orders_and_a_reset_before_the_product() -> None:
    module, x = nn.GRUCell(3, 4).double(), torch.randn(2, 1, 3, dtype=torch.float64)
    cell = InNumPy(module)
    expected = sequence.over_time("gru", cell, lambda at, starts: cell.entry(x[at].numpy()), 2, False)[1]
    swapped = np.r_[4:8, 0:4, 8:12]
    for name in ("w", "back", "input_bias", "bias"):
        setattr(cell, name, getattr(cell, name)[swapped])
    cell.update_first = True
    result = sequence.over_time("gru", cell, lambda at, starts: cell.entry(x[at].numpy()), 2, False)[1]
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    # (U h) r is U (h r) where U is diagonal and has no bias.
    cell.back[8:], cell.bias[8:] = np.eye(4), 0
    after = sequence.over_time("gru", cell, lambda at, starts: cell.entry(x[at].numpy()), 2, False)[1]
    assert np.abs(after - expected).max() > 1e-3
    cell.reset_after = False
    cell.input_bias, cell.bias, back = cell.input_bias + cell.bias, None, cell.back
    cell.product = lambda state, begin, count: cell.part(state @ back.T, begin, count, "")  # type: ignore[method-assign]
    before = sequence.over_time("gru", cell, lambda at, starts: cell.entry(x[at].numpy()), 2, False)[1]
    np.testing.assert_allclose(before, after, rtol=1e-12)
