# SPDX-License-Identifier: Apache-2.0
"""Layers and functions of PyTorch with every argument that they take, other than its default: CALLS gives for a name a
module and its input. Each must compute what PyTorch does, down to the device's integers, or be refused by its argument.

    python tests/campaigns/arguments.py                all of them, integers compared with the runtimes (minutes)
    python tests/campaigns/arguments.py interpolate    those with one of these words in their name
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CALLS: dict[str, tuple[Callable[[], nn.Module], str]] = {}
INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "image": lambda: torch.randn(2, 6, 8, 8),
    "line": lambda: torch.randn(2, 6, 12),
    "sequence": lambda: torch.randn(2, 5, 8),
    "frames": lambda: torch.randn(2, 5, 8),  # its layers get them with the batch second
    "features": lambda: torch.randn(2, 8),
    "volume": lambda: torch.randn(2, 2, 4, 4, 4),
}


class Called(nn.Module):
    """A function as a module; `layer` is one that it calls."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.layer = layer
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer, x) if self.layer is not None else self.function(x)


def words(arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    parts = [*(getattr(part, "__name__", repr(part)) for part in arguments), *(f"{k}={v!r}" for k, v in named.items())]
    return ", ".join(parts)


def layers(kind: type[nn.Module], source: str, *hyperparameters: Any, **choices: list[Any]) -> None:
    """The layer as it is, and with each choice of each argument; a choice that is a dict gives several arguments."""
    sets: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        sets += [value if isinstance(value, dict) else {name: value} for value in values]
    for named in sets:
        CALLS[f"nn.{kind.__name__}({words(hyperparameters, named)})"] = (
            lambda named=named: kind(*hyperparameters, **named),
            source,
        )


def functions(function: Callable[..., Any], source: str, *hyperparameters: Any, **choices: list[Any]) -> None:
    """Likewise of a function of a tensor."""
    sets: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        sets += [value if isinstance(value, dict) else {name: value} for value in values]
    room = "F" if getattr(F, function.__name__, None) is function else "torch"
    for named in sets:
        CALLS[f"{room}.{function.__name__}({words(hyperparameters, named)})"] = (
            lambda named=named: Called(lambda x: function(x, *hyperparameters, **named)),
            source,
        )


def calls(name: str, layer: Callable[[], nn.Module] | None, source: str, function: Callable[..., Any]) -> None:
    """A call that takes more than a tensor."""
    CALLS[name] = (lambda: Called(function, layer() if layer is not None else None), source)


FLOATS, YES, NO = [0.3, 1.7], [True], [False]

for _kind, _source, _window in ((nn.Conv1d, "line", 3), (nn.Conv2d, "image", (3, 2))):
    layers(
        _kind, _source, 6, 6, _window,
        stride=[2], padding=[1, "same", "valid"], dilation=[2], groups=[2, 6], bias=NO,
        padding_mode=[{"padding": 1, "padding_mode": mode} for mode in ("reflect", "replicate", "circular")]
        + [{"padding": "same", "padding_mode": "reflect"}],
        device=["cpu"], dtype=[torch.float64, torch.float16],
    )  # fmt: skip
layers(nn.Conv2d, "image", 6, 6, 3, stride=[(2, 1)], padding=[(0, 2)], dilation=[(1, 2)])
layers(nn.Conv3d, "volume", 2, 2, 3)
for _kind, _source in ((nn.ConvTranspose1d, "line"), (nn.ConvTranspose2d, "image")):
    layers(
        _kind, _source, 6, 4, 3,
        stride=[2, 4], padding=[1], output_padding=[{"stride": 2, "output_padding": 1}], groups=[2], bias=NO,
        dilation=[2],
    )  # fmt: skip
for _kind, _source in ((nn.MaxPool1d, "line"), (nn.MaxPool2d, "image")):
    layers(_kind, _source, 3, stride=[1, 2], padding=[1], dilation=[2], return_indices=YES, ceil_mode=YES)
    calls(f"{_kind.__name__}(2, return_indices=True)[1]", lambda k=_kind: k(2, return_indices=True), _source,
          lambda layer, x: layer(x)[1])  # fmt: skip
layers(nn.AvgPool1d, "line", 3, stride=[1, 2], padding=[1], ceil_mode=YES,
       count_include_pad=[{"padding": 1, "count_include_pad": False}])  # fmt: skip
layers(nn.AvgPool2d, "image", 3, stride=[1, 2], padding=[1], ceil_mode=YES, divisor_override=[4],
       count_include_pad=[{"padding": 1, "count_include_pad": False}])  # fmt: skip
for _kind in (nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d):
    layers(_kind, "line", 4)
    layers(_kind, "line", 5)
for _kind in (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d):
    layers(_kind, "image", 4)
    layers(_kind, "image", (None, 3))
layers(nn.AdaptiveMaxPool2d, "image", 2, return_indices=YES)
layers(nn.AdaptiveMaxPool1d, "line", 2, return_indices=YES)
calls("nn.FractionalMaxPool2d(2, output_size=3)", lambda: nn.FractionalMaxPool2d(2, output_size=3), "image",
      lambda layer, x: layer(x))  # fmt: skip
layers(nn.LPPool1d, "line", 2, 3, stride=[1], ceil_mode=YES)
layers(nn.LPPool2d, "image", 2, 3, stride=[1], ceil_mode=YES)
layers(nn.LPPool2d, "image", 1, 2)
layers(nn.AvgPool3d, "volume", 2)
layers(nn.MaxPool3d, "volume", 2)

for _kind, _source in ((nn.BatchNorm1d, "line"), (nn.BatchNorm2d, "image")):
    layers(_kind, _source, 6, eps=[0.1], momentum=[0.5, None], affine=NO, track_running_stats=NO)
layers(nn.BatchNorm1d, "features", 8, affine=NO)
layers(nn.SyncBatchNorm, "image", 6, eps=[0.1])
for _kind, _source in ((nn.InstanceNorm1d, "line"), (nn.InstanceNorm2d, "image")):
    layers(_kind, _source, 6, eps=[0.1], momentum=[0.5], affine=YES, track_running_stats=YES)
layers(nn.GroupNorm, "image", 2, 6, eps=[0.1], affine=NO)
layers(nn.LayerNorm, "sequence", 8, eps=[0.1], elementwise_affine=NO, bias=NO)
layers(nn.LayerNorm, "image", (6, 8, 8))
layers(nn.RMSNorm, "sequence", 8, eps=[0.1], elementwise_affine=NO)
layers(nn.LocalResponseNorm, "image", 3, alpha=[0.1], beta=[0.5, 1.0], k=[2.0])
layers(nn.CrossMapLRN2d, "image", 3, alpha=[0.1])

layers(nn.ELU, "image", alpha=FLOATS, inplace=YES)
layers(nn.CELU, "image", alpha=FLOATS, inplace=YES)
layers(nn.SELU, "image", inplace=YES)
layers(nn.GELU, "image", approximate=["tanh"])
layers(nn.GLU, "image", dim=[1, 2])
layers(
    nn.Hardtanh, "image", min_val=[-0.5, 0.2], max_val=[0.4, 6.0], inplace=YES, both=[{"min_val": 0.0, "max_val": 6.0}]
)
layers(nn.Hardshrink, "image", lambd=FLOATS)
layers(nn.Softshrink, "image", lambd=FLOATS)
layers(nn.LeakyReLU, "image", negative_slope=[0.3, 1.7, -0.5, 0.0], inplace=YES)
layers(nn.PReLU, "image", num_parameters=[6], init=FLOATS)
layers(nn.RReLU, "image", lower=[0.01], upper=[0.9], inplace=YES)
layers(nn.Softplus, "image", beta=FLOATS, threshold=FLOATS)
layers(nn.Threshold, "image", 0.1, 0.7, inplace=YES)
layers(nn.Threshold, "image", 0.0, 0.0)
for _kind in (nn.ReLU, nn.ReLU6, nn.Hardsigmoid, nn.Hardswish, nn.SiLU, nn.Mish):
    layers(_kind, "image", inplace=YES)
for _kind in (nn.Sigmoid, nn.Tanh, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.Identity, nn.Softmax2d):
    layers(_kind, "image")
for _kind in (nn.Softmax, nn.Softmin, nn.LogSoftmax):
    layers(_kind, "image", dim=[1, 2, -1])
for _kind in (nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout):
    layers(_kind, "image", p=[0.0, 0.2, 1.0], inplace=YES)

layers(nn.Linear, "sequence", 8, 4, bias=NO, dtype=[torch.float64])
layers(nn.LazyLinear, "sequence", 4)
calls("nn.Bilinear(8, 8, 3)", lambda: nn.Bilinear(8, 8, 3), "features", lambda layer, x: layer(x, x))
for _dimensions, _source in ((1, "line"), (2, "image")):
    for _name in ("ReflectionPad", "ReplicationPad", "CircularPad", "ZeroPad"):
        layers(getattr(nn, f"{_name}{_dimensions}d"), _source, 2)
        layers(getattr(nn, f"{_name}{_dimensions}d"), _source, (1, 0, 2, 1)[: 2 * _dimensions])
    layers(getattr(nn, f"ConstantPad{_dimensions}d"), _source, 1, 0.5)
layers(nn.ZeroPad2d, "image", (-1, 1, 0, -2))
for _mode in ("nearest", "bilinear", "bicubic", "nearest-exact", "area"):
    functions(
        F.interpolate, "image",
        scale=[{"scale_factor": factor, "mode": _mode} for factor in (2, 3, 0.5, 1.5, (2, 1))]
        + [{"size": size, "mode": _mode} for size in ((16, 16), (5, 11), (4, 4), 8)]
        + [{"scale_factor": 1.7, "mode": _mode, "recompute_scale_factor": True}],
    ) if _mode else None  # fmt: skip
functions(
    F.interpolate, "image",
    align=[{"scale_factor": 2, "mode": mode, "align_corners": True} for mode in ("bilinear", "bicubic")],
    antialias=[{"size": (4, 4), "mode": mode, "antialias": True} for mode in ("bilinear", "bicubic")]
    + [{"scale_factor": 2, "mode": "bilinear", "antialias": True}],
)  # fmt: skip
functions(
    F.interpolate, "line", scale=[{"scale_factor": 2, "mode": "linear", "align_corners": yes} for yes in (True, False)]
)
layers(
    nn.Upsample, "image",
    scale_factor=[2, 2.0, (2, 3)], size=[(16, 16)],
    mode=[{"scale_factor": 2, "mode": "bilinear", "align_corners": corners} for corners in (None, True)],
)  # fmt: skip
layers(nn.UpsamplingNearest2d, "image", scale_factor=[2])
layers(nn.UpsamplingBilinear2d, "image", scale_factor=[2])
layers(nn.PixelShuffle, "image", 1)
calls("nn.PixelShuffle(2)", lambda: nn.PixelShuffle(2), "image", lambda layer, x: layer(x[:, :4]))
layers(nn.PixelUnshuffle, "image", 2)
layers(nn.ChannelShuffle, "image", 3)
layers(nn.Flatten, "image", start_dim=[2, 0], end_dim=[2])
layers(nn.Unflatten, "image", 1, (2, 3))
layers(nn.Unfold, "image", 3, dilation=[2], padding=[1], stride=[2])
calls("nn.Fold((8, 8), 2, stride=2)", lambda: nn.Fold((8, 8), 2, stride=2), "image",
      lambda layer, x: layer(x.reshape(x.shape[0], 24, 16)))  # fmt: skip
calls("nn.MaxUnpool2d(2)", lambda: nn.MaxUnpool2d(2), "image",
      lambda layer, x: layer(*F.max_pool2d(x, 2, return_indices=True)))  # fmt: skip

for _kind in (nn.RNN, nn.LSTM, nn.GRU):
    layers(
        _kind, "frames", 8, 6,
        num_layers=[2], bias=NO, dropout=[{"num_layers": 2, "dropout": 0.5}], bidirectional=YES,
        nonlinearity=["relu"] if _kind is nn.RNN else [], proj_size=[3] if _kind is nn.LSTM else [],
    )  # fmt: skip
    layers(_kind, "sequence", 8, 6, batch_first=YES)
layers(nn.RNNCell, "features", 8, 6, bias=NO, nonlinearity=["relu"])
layers(nn.GRUCell, "features", 8, 6, bias=NO)
layers(nn.LSTMCell, "features", 8, 6, bias=NO)


def attend(name: str, how: dict[str, Any], **call: Any) -> None:
    def function(layer: nn.Module, x: torch.Tensor) -> Any:
        results = layer(x, x, x, **call)
        return results if call.get("need_weights", True) else results[0]

    calls(f"nn.MultiheadAttention(8, 2, {words((), how)})({name})", lambda: nn.MultiheadAttention(8, 2, **how),
          "sequence" if how.get("batch_first") else "frames", function)  # fmt: skip


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
BATCH_FIRST = {"batch_first": True}
for _how in ({}, BATCH_FIRST, {"dropout": 0.3}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True},
             {"kdim": 8, "vdim": 8}, {"batch_first": True, "add_zero_attn": True}):  # fmt: skip
    attend("need_weights=False", _how, need_weights=False)
attend("", BATCH_FIRST)
attend("average_attn_weights=False", BATCH_FIRST, average_attn_weights=False)
attend("attn_mask=bool", BATCH_FIRST, need_weights=False, attn_mask=torch.ones(5, 5).triu(1).bool())
attend("attn_mask=float", BATCH_FIRST, need_weights=False, attn_mask=torch.linspace(-1, 1, 25).view(5, 5))
attend("is_causal=True", BATCH_FIRST, need_weights=False, is_causal=True,
       attn_mask=CAUSAL)  # fmt: skip
calls("nn.MultiheadAttention(key_padding_mask)", lambda: nn.MultiheadAttention(8, 2, batch_first=True), "sequence",
      lambda layer, x: layer(x, x, x, key_padding_mask=x[..., 0] > 0, need_weights=False)[0])  # fmt: skip
layers(nn.TransformerEncoderLayer, "frames", 8, 2, 16, dropout=[0.0, 0.4], activation=["gelu", F.silu],
       layer_norm_eps=[0.1], norm_first=YES, bias=NO)  # fmt: skip
layers(nn.TransformerEncoderLayer, "sequence", 8, 2, 16, batch_first=YES)
calls("nn.TransformerEncoder(2, norm)",
      lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, nn.LayerNorm(8)),
      "sequence", lambda layer, x: layer(x, mask=CAUSAL, is_causal=True))  # fmt: skip
calls("nn.TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), "sequence",
      lambda layer, x: layer(x, x[:, :3], tgt_is_causal=True, tgt_mask=CAUSAL))  # fmt: skip

for _word, _how in {
    "plain": {}, "is_causal": {"is_causal": True}, "scale": {"scale": 0.2}, "dropout_p": {"dropout_p": 0.3},
    "attn_mask": {"attn_mask": torch.linspace(-1, 1, 64).view(8, 8)},
    "attn_mask, bool": {"attn_mask": torch.ones(8, 8).tril().bool()},
}.items():  # fmt: skip
    calls(f"F.scaled_dot_product_attention({_word})", None, "image",
          lambda x, how=_how: F.scaled_dot_product_attention(x, x, x, **how))  # fmt: skip
calls("F.scaled_dot_product_attention(enable_gqa)", None, "image",
      lambda x: F.scaled_dot_product_attention(x, x[:, :3], x[:, :3], enable_gqa=True))  # fmt: skip
layers(nn.CosineSimilarity, "image")
for _how in ({}, {"dim": 2}, {"eps": 0.5}):
    calls(f"F.cosine_similarity({words((), _how)})", None, "image",
          lambda x, how=_how: F.cosine_similarity(x, 0.3 * x + 1, **how))  # fmt: skip
for _how in ({}, {"p": 1}, {"p": 3.0}, {"eps": 0.1}, {"keepdim": True}):
    calls(f"F.pairwise_distance({words((), _how)})", None, "features",
          lambda x, how=_how: F.pairwise_distance(x, 0.3 * x + 1, **how))  # fmt: skip

functions(F.normalize, "image", p=[1, 3.0, float("inf")], dim=[2, (2, 3)], eps=[2.0])
functions(F.softmax, "image", 1, dtype=[torch.float64])
functions(F.log_softmax, "image", 1, dtype=[torch.float64])
functions(F.gumbel_softmax, "features", hard=YES, tau=[0.5])
functions(F.lp_pool2d, "image", 2, 2)
functions(
    F.pad, "image", (1, 2, 0, 1), mode=["constant", "reflect", "replicate", "circular"], value=[0.5, float("-inf")]
)
functions(F.pad, "image", (0, 0, 1, 1, 2, 0), value=[0.5])
functions(F.batch_norm, "image", torch.linspace(-1, 1, 6), torch.linspace(0.5, 1, 6), eps=[0.1],
          weight=[torch.linspace(1, 2, 6)], bias=[torch.linspace(-1, 2, 6)], training=YES)  # fmt: skip
RUNNING = {"running_mean": torch.linspace(-1, 1, 6), "running_var": torch.linspace(0.5, 1, 6)}
functions(F.instance_norm, "image", eps=[0.1], use_input_stats=[{"use_input_stats": False, **RUNNING}])
functions(F.layer_norm, "image", (8,), weight=[torch.linspace(1, 2, 8)], bias=[torch.linspace(1, 2, 8)], eps=[0.1])
functions(F.rms_norm, "image", (8,), weight=[torch.linspace(1, 2, 8)], eps=[0.1])
functions(F.group_norm, "image", 3, weight=[torch.linspace(1, 2, 6)], bias=[torch.linspace(1, 2, 6)], eps=[0.1])
functions(F.prelu, "image", torch.linspace(0, 1, 6))
functions(F.rrelu, "image", training=YES, lower=[0.3])
functions(F.dropout, "image", p=[0.9], training=NO, inplace=YES)
functions(F.grid_sample, "image", torch.zeros(2, 4, 4, 2), mode=["nearest"])
functions(F.relu, "image", inplace=YES)
functions(F.hardtanh, "image", -0.4, 0.7, inplace=YES)

AXES: dict[str, list[Any]] = {"dim": [1, -1, (2, 3)], "keepdim": [{"dim": 1, "keepdim": True}]}
for _function in (torch.mean, torch.sum, torch.amax, torch.amin, torch.std, torch.var):
    functions(_function, "image", **AXES)
functions(torch.mean, "image", 1, dtype=[torch.float64])
functions(torch.sum, "image", 1, dtype=[torch.float64])
for _function in (torch.var, torch.std, torch.var_mean, torch.std_mean):
    functions(_function, "image", 1, unbiased=NO, correction=[0, 2])
functions(torch.norm, "image", p=[{"p": p, "dim": 1} for p in (0, 1, 2, 3, 0.5, float("inf"), -float("inf"), "fro")],
          dtype=[{"dim": 1, "dtype": torch.float64}], keepdim=[{"dim": 1, "keepdim": True}])  # fmt: skip
functions(torch.linalg.vector_norm, "image", ord=[{"ord": p, "dim": (1, 2)} for p in (0, 1, 2, 3, float("inf"))])
functions(torch.linalg.matrix_norm, "image", ord=["fro", "nuc", 1, float("inf")])
for _function in (torch.max, torch.min, torch.median, torch.mode):
    functions(_function, "image", 1, keepdim=YES)
for _function in (torch.argmax, torch.argmin):
    functions(_function, "image", 1, keepdim=YES)
functions(torch.logsumexp, "image", 1, keepdim=YES)
functions(torch.prod, "image", 1, keepdim=YES)
functions(torch.aminmax, "image", dim=[1], keepdim=[{"dim": 1, "keepdim": True}])
functions(torch.topk, "features", 3, dim=[1], largest=NO, sorted=NO)
functions(torch.sort, "features", dim=[1], descending=YES, stable=YES)
functions(torch.cumsum, "image", 1, dtype=[torch.float64])
functions(torch.roll, "image", 1, dims=[1, -1])
functions(torch.roll, "image", (1, -2), dims=[(1, 3), (2, 2)])
functions(torch.flip, "image", (1, -1))
functions(torch.rot90, "image", 1, (2, 3))
functions(torch.rot90, "image", 2, (1, 2))
functions(torch.diff, "image", n=[2], dim=[1], prepend=[torch.zeros(2, 6, 8, 1)])
functions(
    torch.clamp, "image", min=[-0.2, 0.3], max=[0.1, 6.0], both=[{"min": 0.0, "max": 6.0}, {"min": 0.5, "max": -0.5}]
)
functions(torch.clamp, "image", min=[torch.linspace(-1, 0, 8)], max=[torch.linspace(0, 1, 8)])
functions(torch.round, "image", decimals=[1, -1, 0])
functions(torch.div, "image", 3, rounding_mode=["floor", "trunc"])
functions(torch.div, "image", -0.3, rounding_mode=["floor"])
functions(torch.floor_divide, "image", 2)
functions(torch.remainder, "image", 2)
functions(torch.fmod, "image", 2)
functions(torch.add, "image", 2, alpha=[3])
functions(torch.sub, "image", 2, alpha=[0.5])
functions(torch.rsub, "image", 2, alpha=[0.5])
functions(torch.pow, "image", 3)
functions(torch.pow, "image", 2)
functions(torch.float_power, "image", 2)
functions(torch.nan_to_num, "image", nan=[1.0], posinf=[9.0], neginf=[-9.0])
functions(torch.tril, "image", diagonal=[1, -1])
functions(torch.triu, "image", diagonal=[1, -1])
functions(torch.diagonal, "image", dim1=[{"offset": 1, "dim1": 2, "dim2": 3}])
functions(torch.repeat_interleave, "image", 2, dim=[1, 3])
functions(
    torch.repeat_interleave,
    "image",
    torch.tensor([1, 2, 0, 1, 1, 3]),
    dim=[1],
    output_size=[{"dim": 1, "output_size": 8}],
)
functions(torch.chunk, "image", 3, dim=[1, 2])
functions(torch.split, "image", 3, dim=[1, 2])
functions(torch.split, "image", [1, 2, 3], dim=[1])
functions(torch.tensor_split, "image", (1, 4), dim=[1])
functions(torch.unbind, "image", 1)
functions(torch.unflatten, "image", 1, (2, -1))
functions(torch.squeeze, "image", (1, 2))
functions(torch.cdist, "image", torch.randn(1, 1, 4, 8), p=[1.0, 2.0])
functions(torch.gather, "image", 1, torch.zeros(2, 6, 8, 8, dtype=torch.int64))
functions(torch.take_along_dim, "image", torch.zeros(1, 1, 1, 1, dtype=torch.int64), 1)
functions(torch.index_select, "image", 1, torch.tensor([3, 1]))
functions(torch.masked_fill, "image", torch.eye(8).bool(), 2.0)
functions(torch.tensordot, "image", torch.randn(8, 4), dims=[1, ([2], [0])])
functions(torch.matmul, "image", torch.randn(8, 4))
functions(torch.logaddexp, "image", torch.ones(8))
functions(torch.hypot, "image", torch.ones(8))
functions(torch.copysign, "image", 1.0)
functions(torch.softmax, "image", 1, dtype=[torch.float64])
functions(torch.nanmean, "image", 1)
functions(torch.quantile, "features", 0.5, dim=[1])
functions(torch.histc, "features", bins=[4])
functions(torch.bucketize, "image", torch.linspace(-1, 1, 4), right=YES)
calls(
    "torch.baddbmm(alpha, beta)",
    None,
    "sequence",
    lambda x: torch.baddbmm(x, x, torch.ones(1, 8, 8).expand(x.shape[0], 8, 8), beta=0.5, alpha=2),
)
calls(
    "torch.addmm(alpha, beta)",
    None,
    "features",
    lambda x: torch.addmm(torch.ones(8), x, torch.eye(8), beta=0.5, alpha=2),
)
calls("torch.addcmul(value)", None, "features", lambda x: torch.addcmul(x, x, x + 1, value=0.3))
calls("torch.addcdiv(value)", None, "features", lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.3))
calls("torch.cat(dim)", None, "image", lambda x: torch.cat([x, x * 2], dim=-1))
calls("torch.stack(dim)", None, "image", lambda x: torch.stack([x, x * 2], dim=-1))
calls("torch.einsum", None, "image", lambda x: torch.einsum("bchw,bdhw->bcd", x, x))
calls(
    "torch.meshgrid(indexing)",
    None,
    "image",
    lambda x: x + torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="xy")[0],
)
calls("torch.cross(dim)", None, "image", lambda x: torch.cross(x[:, :3], x[:, 3:], dim=1))
calls("torch.lerp(weight)", None, "image", lambda x: torch.lerp(x, x * 2, torch.linspace(0, 1, 8)))
calls("Tensor.std(correction)", None, "image", lambda x: x.std(1, correction=0))
calls("Tensor.unfold", None, "image", lambda x: x.unfold(2, 3, 2))
calls("Tensor.index_add(alpha)", None, "image", lambda x: x.index_add(1, torch.tensor([0, 2]), x[:, :2], alpha=2))
calls("Tensor.scatter", None, "image", lambda x: x.scatter(1, torch.zeros(2, 1, 8, 8, dtype=torch.int64), 0.0))
calls("Tensor.repeat", None, "image", lambda x: x.repeat(1, 2, 1, 3))
calls("Tensor.to(dtype)", None, "image", lambda x: (x.to(torch.int32).float(), x.half() * 2))


def noise(name: str) -> bool:
    """Whether it draws random numbers in training, other ones each time."""
    return any(word in name for word in ("gumbel", "rrelu(training", "dropout", "Dropout", "Transformer"))


def examine(name: str, exact: bool) -> str:
    """ "exact", "agrees", the refusal ("refused: ..."), or what is wrong ("WRONG: ...")."""
    import _tests_folder  # noqa: F401
    from agreement import assert_exact, leaves, trained
    from network_interpreter import differences

    from exactqat import qat
    from exactqat.qat.train.torch.prepared import without_quantization

    build, source = CALLS[name]
    torch.manual_seed(0)
    try:
        model, batch = build(), INPUTS[source]()
        if source == "frames":
            model = Called(lambda layer, x: layer(x.transpose(0, 1)), model)
        batch = batch.to(next((p.dtype for p in model.parameters()), batch.dtype))
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model.eval()(batch.clone())
            model.train()
    except Exception as error:
        return f"not a call: {type(error).__name__}: {str(error).splitlines()[0]}"
    try:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            # PyTorch's gradient passes by the least length that it divides by, ours by the length itself: a small input
            # has another gradient, which the self-check refuses. Values agree.
            prepared = qat.prepare(model, batch, check="cosine_similarity(eps" not in name)
    except qat.UnsupportedOperator as refused:
        return f"refused: {refused}".split("\nSupported: ")[0]
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"
    with torch.no_grad(), without_quantization(prepared):
        ours = leaves(prepared(batch.clone()))
        theirs = leaves(model.eval()(batch.clone()))
        model.train()
    if [leaf.shape for leaf in ours] != [leaf.shape for leaf in theirs]:
        return f"WRONG: shapes {[leaf.shape for leaf in ours]} for {[leaf.shape for leaf in theirs]}"
    for mine, wanted in zip(ours, theirs, strict=True):
        scale = max(float(wanted.abs().max()), 1e-3) if wanted.numel() else 1.0
        if not (mine.double() - wanted.double()).abs().sum() <= 2e-3 * scale * wanted.numel():
            return f"WRONG: differs by {float((mine.double() - wanted.double()).abs().max()):g} of {scale:g}"
    # Where training is something else, which is said, it is evaluation that is captured.
    same = not any("training computes something else" in str(warning.message) for warning in raised)
    if same and not noise(name) and all(leaf.dtype == torch.float32 for leaf in theirs):
        difference = differences(prepared.plan.network, model, [batch], True)
        if not difference <= 1e-4:
            return f"WRONG: in training the network differs by {difference:g}"
    if not exact:
        return "agrees"
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_exact(trained(model, batch), batch, Path(folder))
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {str(error)[:300]}"
    return "exact"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--quick", action="store_true", help="without the runtimes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for name in CALLS:
        if chosen.words and not any(word in name for word in chosen.words):
            continue
        answer = examine(name, not chosen.quick)
        print(f"{name}: {answer}", flush=True)
        word = answer.split(":")[0]
        counts[word] = counts.get(word, 0) + 1
    print(counts)
    return int("WRONG" in counts)


if __name__ == "__main__":
    sys.exit(main())
