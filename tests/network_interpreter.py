# SPDX-License-Identifier: Apache-2.0
"""Runs a captured `Network` step by step with PyTorch's own functions: a second definition of every kind of step.

    results = run(network, model, inputs, training=False)

Nothing of the kit computes here but the constants' and the noise's own expressions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

UNARY = {
    **{name: getattr(torch, name) for name in ("relu", "sigmoid", "tanh", "abs", "neg", "exp", "log", "sqrt", "rsqrt")},
    **{name: getattr(torch, name) for name in ("square", "reciprocal", "erf", "sin", "cos", "selu", "floor", "round")},
    **{name: getattr(F, name) for name in ("relu6", "silu", "mish", "hardsigmoid", "hardswish", "softsign")},
    "asinh": torch.asinh,
    "cosh": torch.cosh,
    "log_sigmoid": F.logsigmoid,
    "sign": torch.sign,
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
TRUTHS = {
    **{name: getattr(torch, name) for name in ("gt", "ge", "lt", "le", "eq", "ne", "where")},
    **{name: getattr(torch, f"logical_{name}") for name in ("and", "or", "xor", "not")},
    "stop_gradient": torch.Tensor.detach,
}
REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "amax": torch.amax, "amin": torch.amin}


def flat(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """(before, after) per axis as F.pad takes them: the last axis first."""
    return [size for pair in reversed(pairs) for size in pair]


class Run:
    def __init__(self, network: Any, model: nn.Module, training: bool) -> None:
        self.network, self.training = network, training
        self.tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.values: dict[str, torch.Tensor] = {}
        self.batch = 1

    def read(self, operand: Any) -> Any:
        if operand is None or not isinstance(operand, str):
            return operand
        if operand in self.values:
            return self.values[operand]
        constant = self.network.constants[operand]
        if constant.parameter:
            tensor = self.tensors[operand]
        elif constant.expression is not None:
            tensor = constant.expression(*(self.tensors[path] for path in constant.sources))
        else:
            tensor = constant.data
        assert tuple(tensor.shape) == constant.shape, operand
        return tensor

    def shape(self, step: Any, shape: Sequence[int]) -> list[int]:
        """A shape for one example as one for the batch."""
        sizes = list(shape)
        sizes[self.network.values[step.output].batch_axis] *= self.batch
        return sizes

    def step(self, step: Any) -> Any:
        a, inputs = step.attributes, [self.read(operand) for operand in step.inputs]
        kind, x = step.kind, inputs[0] if inputs else None
        if kind in UNARY:
            return UNARY[kind](x)
        if kind in BINARY:
            return BINARY[kind](*(torch.as_tensor(v, dtype=self.dtype) for v in inputs))
        if kind in REDUCTIONS:
            return REDUCTIONS[kind](x, dim=a["axes"], keepdim=a["keep_dims"])
        if kind == "prod":  # PyTorch's is over one axis
            for axis in sorted(a["axes"], reverse=True):
                x = x.prod(axis, keepdim=a["keep_dims"])
            return x
        return getattr(self, f"do_{kind}")(step, a, *inputs)

    def do_conv(self, step, a, x, weight, bias):
        assert a["channel_axis"] == 1 and a.get("padding_mode", "zeros") == "zeros"
        convolve = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
        x = F.pad(x, flat(a["padding"]))
        return convolve(x, weight, bias, a["strides"], 0, a["dilations"], a["groups"])

    def do_conv_transpose(self, step, a, x, weight, bias):
        convolve = (F.conv_transpose1d, F.conv_transpose2d)[x.dim() - 3]
        assert all(before == after for before, after in a["padding"])
        padding = [before for before, _ in a["padding"]]
        return convolve(x, weight, bias, a["strides"], padding, a["output_padding"], a["groups"], a["dilations"])

    def do_linear(self, step, a, x, weight, bias):
        return F.linear(x, weight, bias)

    def do_matmul(self, step, a, x, y):
        assert x.dim() >= 2 and y.dim() >= 2
        return torch.matmul(x, y)

    def do_batch_norm(self, step, a, x, weight, bias, mean, variance):
        training = self.training and a["training"]
        if training:
            mean, variance = mean.clone(), variance.clone()
        return F.batch_norm(x, mean, variance, weight, bias, training, a["momentum"] or 0.1, a["epsilon"])

    def do_layer_norm(self, step, a, x, weight, bias):
        assert a["axes"] == tuple(range(x.dim() - len(a["axes"]), x.dim()))
        return F.layer_norm(x, x.shape[a["axes"][0] :], weight, bias, a["epsilon"])

    def do_rms_norm(self, step, a, x, weight):
        return F.rms_norm(x, x.shape[a["axes"][0] :], weight, a["epsilon"])

    def do_group_norm(self, step, a, x, weight, bias):
        return F.group_norm(x, a["groups"], weight, bias, a["epsilon"])

    def do_clamp(self, step, a, x):
        return torch.clamp(x, a["min"], a["max"])

    def do_gelu(self, step, a, x):
        return F.gelu(x, approximate=a["approximate"])

    def do_softplus(self, step, a, x):
        return F.softplus(x, a["beta"], a["threshold"])

    def do_hardshrink(self, step, a, x):
        return F.hardshrink(x, a["width"])

    def do_softshrink(self, step, a, x):
        return F.softshrink(x, a["width"])

    def do_threshold(self, step, a, x):
        return F.threshold(x, a["least"], a["value"])

    def do_composition(self, step, a, x):
        results = [x]
        for kind, operands, parameters in a["instructions"]:
            terms = [results[term] if isinstance(term, int) else torch.tensor(term, dtype=x.dtype) for term in operands]
            if kind in TRUTHS:
                results.append(TRUTHS[kind](*terms))
            elif kind in BINARY or kind in UNARY:
                results.append((BINARY.get(kind) or UNARY[kind])(*terms))
            else:
                names = {"clamp": ("min", "max"), "pow": ("exponent",), "gelu": (), "leaky_relu": ("slope",)}[kind]
                words = dict(zip(names, parameters, strict=True)) if kind != "gelu" else {"approximate": "none"}
                results.append(getattr(self, f"do_{kind}")(step, words, *terms))
        return results[-1]

    def do_elu(self, step, a, x):
        return torch.ops.aten.elu(x, a["alpha"], a["scale"], a["input_scale"])

    def do_leaky_relu(self, step, a, x):
        return F.leaky_relu(x, a["slope"])

    def do_pow(self, step, a, x):
        return torch.pow(x, a["exponent"])

    def do_prelu(self, step, a, x, weight):
        return F.prelu(x, weight)

    def do_softmax(self, step, a, x):
        return torch.softmax(x, a["axis"])

    def do_log_softmax(self, step, a, x):
        return torch.log_softmax(x, a["axis"])

    def do_var(self, step, a, x):
        return torch.var(x, dim=a["axes"], keepdim=a["keep_dims"], correction=a["correction"])

    def do_std(self, step, a, x):
        return torch.std(x, dim=a["axes"], keepdim=a["keep_dims"], correction=a["correction"])

    def do_norm(self, step, a, x):
        return torch.linalg.vector_norm(x, a["order"], dim=a["axes"], keepdim=a["keep_dims"])

    def do_normalize(self, step, a, x):
        return F.normalize(x, dim=a["axis"], eps=a["epsilon"])

    def do_argmax(self, step, a, x):
        return torch.argmax(x, dim=a["axis"], keepdim=a["keep_dims"])

    def do_max_pool(self, step, a, x):
        pool = (F.max_pool1d, F.max_pool2d)[x.dim() - 3]
        x = F.pad(x, flat(a["padding"]), value=-torch.inf)
        return pool(x, a["window"], a["strides"], 0, a["dilations"])

    def do_avg_pool(self, step, a, x):
        """Sums over the windows of what counts, divided by how many do."""
        axes = x.dim() - 2
        pool = (F.avg_pool1d, F.avg_pool2d)[axes - 1]
        area = torch.tensor(a["window"]).prod().item()
        over = [(0, size) for size in a["over"]]
        padded = F.pad(F.pad(x, flat(a["padding"])), flat(over))
        sums = pool(padded, a["window"], a["strides"]) * area
        if a["divisor"] is not None:
            return sums / a["divisor"]
        counted = F.pad(torch.ones_like(x), flat(a["padding"]), value=float(a["count_include_pad"]))
        return sums / (pool(F.pad(counted, flat(over)), a["window"], a["strides"]) * area)

    def do_adaptive_avg_pool(self, step, a, x):
        return (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[x.dim() - 3](x, a["size"])

    def do_adaptive_max_pool(self, step, a, x):
        return (F.adaptive_max_pool1d, F.adaptive_max_pool2d)[x.dim() - 3](x, a["size"])

    def do_reshape(self, step, a, x):
        return x.reshape(self.shape(step, a["shape"]))

    def do_permute(self, step, a, x):
        return x.permute(a["axes"])

    def do_expand(self, step, a, x):
        return x.expand(self.shape(step, a["shape"]))

    def do_slice(self, step, a, x):
        assert 0 <= a["start"] <= a["stop"] <= x.shape[a["axis"]] and a["step"] >= 1
        return x[(slice(None),) * a["axis"] + (slice(a["start"], a["stop"], a["step"]),)]

    def do_concat(self, step, a, *pieces):
        value = self.network.values[step.output]
        rank = len(value.shape)
        sizes = self.shape(step, value.shape)
        joined = []
        for piece in pieces:
            wanted = [*sizes[: a["axis"]], -1, *sizes[a["axis"] + 1 :]]
            rows = piece.shape[value.batch_axis]
            if rows not in (1, sizes[value.batch_axis]):
                repeats = [1] * rank
                repeats[value.batch_axis] = self.batch
                piece = piece.repeat(repeats)
            joined.append(piece.expand(wanted))
        return torch.cat(joined, a["axis"])

    def do_flip(self, step, a, x):
        return torch.flip(x, a["axes"])

    def do_pad(self, step, a, x):
        if a["mode"] == "constant":
            return F.pad(x, flat(a["padding"]), value=a["value"])
        axes = [axis for axis, pair in enumerate(a["padding"]) if any(pair)]
        first = axes[0] if x.dim() - axes[0] <= 2 else 2
        return F.pad(x, flat(a["padding"][first:]), mode=a["mode"])

    def do_resize(self, step, a, x):
        mode = "linear" if a["mode"] == "bilinear" and x.dim() == 3 else a["mode"].replace("_", "-")
        corners = None if mode.startswith("nearest") else a["align_corners"]
        scales = a["scales"]
        extent = {"size": a["size"]} if scales is None else {"scale_factor": scales}
        result = F.interpolate(x, mode=mode, align_corners=corners, **extent)
        assert tuple(result.shape[2:]) == a["size"]
        return result

    def do_embedding(self, step, a, indices, table):
        return table[indices.long()]

    def do_gather(self, step, a, x):
        return torch.index_select(x, a["axis"], torch.tensor(a["indices"]))

    def do_pixel_shuffle(self, step, a, x):
        return F.pixel_shuffle(x, a["factor"])

    def do_pixel_unshuffle(self, step, a, x):
        return F.pixel_unshuffle(x, a["factor"])

    def do_attention(self, step, a, query, key, value, mask):
        dropout = a["dropout"] if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, a["causal"], scale=a["scale"])

    def recurrent(self, step, a, x, weights):
        kind = {"lstm": nn.LSTM, "gru": nn.GRU}[step.kind]
        hidden = weights[1].shape[1]
        layer = kind(
            x.shape[-1],
            hidden,
            a["layers"],
            bias=a["has_bias"],
            batch_first=a["batch_first"],
            bidirectional=a["bidirectional"],
            dropout=a["dropout"],
            dtype=x.dtype,
        ).train(self.training)
        names = [name for group in layer._all_weights for name in group]
        parameters = dict(zip(names, weights, strict=True))
        sequence, state = torch.func.functional_call(layer, parameters, (x,))
        return [sequence, *(state if isinstance(state, tuple) else (state,))][a["output"]]

    def do_lstm(self, step, a, x, *weights):
        return self.recurrent(step, a, x, weights)

    do_gru = do_lstm

    def do_dropout(self, step, a, x):
        return a["expression"](x) if self.training else x

    def do_identity(self, step, a, x):
        return x.detach() if a.get("stop_gradient") else x


def run(network: Any, model: nn.Module, inputs: Sequence[torch.Tensor], training: bool = False) -> list[torch.Tensor]:
    """Values of the network's outputs; checks the shape and the dtype that each step says it makes."""
    state = Run(network, model, training)
    first = network.values[network.inputs[0]]
    state.batch = inputs[0].shape[first.batch_axis] // first.shape[first.batch_axis]
    state.dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.float32)
    state.values.update(zip(network.inputs, inputs, strict=True))
    for step in network.steps:
        result = state.step(step)
        value = network.values[step.output]
        expected = list(value.shape)
        if expected:
            expected[value.batch_axis] *= state.batch
        assert list(result.shape) == expected, (step.kind, step.place, list(result.shape), expected)
        assert result.is_floating_point() == (value.dtype == "float32"), (step.kind, value.dtype)
        state.values[step.output] = result
    return [state.values[name] for name in network.outputs]


def differences(network: Any, model: nn.Module, args: Mapping[str, Any] | Sequence[Any], training: bool) -> float:
    """Largest difference between a model and its network, relative to the results' size."""
    import torch.utils._pytree as pytree

    was = model.training
    flags = {module: module.training for module in model.modules()}
    try:
        if not training:
            model.eval()
        with torch.no_grad():
            inputs = [tensor.clone() for tensor in network.input_tree.flatten(*args)]
            state = [(tensor, tensor.clone()) for tensor in (*model.parameters(), *model.buffers())]
            # Noise draws the same numbers in the same order.
            torch.manual_seed(1)
            ours = network.output_tree.unflatten(run(network, model, inputs, training))
            torch.manual_seed(1)
            theirs = model(*pytree.tree_map_only(torch.Tensor, torch.clone, tuple(args)))
            for tensor, before in state:
                tensor.copy_(before)
    finally:
        for module, flag in flags.items():
            module.training = flag
        assert model.training == was
    first, spec = pytree.tree_flatten(ours)
    second, other = pytree.tree_flatten(theirs)
    assert spec == other, (spec, other)
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
        a, b = a.double(), b.double()
        scale = max(b.abs().max().item(), 1e-6) if b.numel() else 1.0
        worst = max(worst, ((a - b).abs().max().item() / scale) if b.numel() else 0.0)
    return worst
