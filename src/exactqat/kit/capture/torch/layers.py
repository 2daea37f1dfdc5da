# SPDX-License-Identifier: Apache-2.0
"""Convolutions, products, normalizations, pools and resizes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from ..core.refusals import Refused
from ..core.windows import each, windows
from .contents import Content, Meta
from .expression import Node
from .reader import CUMULATIVE, Reader, handles, require_fixed
from .schema import base_name

aten = torch.ops.aten


def _batched(c: Reader, x: Content, rank: int) -> None:
    if len(x.shape) != rank or c.batch_axis(x) not in (0, None):
        raise Refused("the batch must be the first axis")


@handles("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
def _conv(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    require_fixed(a.weight, "weight")
    require_fixed(a.bias, "bias")
    spatial = len(a.weight.shape) - 2
    _batched(c, a.input, spatial + 2)
    strides, dilations = each(a.stride, spatial), each(a.dilation, spatial)
    if getattr(a, "transposed", False):
        return _transposed(c, a, meta, spatial)
    if isinstance(a.padding, str):
        totals = [
            0 if a.padding == "valid" else d * (k - 1) for d, k in zip(dilations, a.weight.shape[2:], strict=True)
        ]
        padding = tuple((total // 2, total - total // 2) for total in totals)
    else:
        padding = tuple((p, p) for p in each(a.padding, spatial))
    how = windows(strides, padding, dilations)
    operands, roles = [a.input, a.weight, a.bias], ("", "weight", "bias")
    return c.emit("conv", operands, meta, roles, **how, groups=a.groups, channel_axis=1)


@handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    require_fixed(a.weight, "weight")
    require_fixed(a.bias, "bias")
    _batched(c, a.input, len(a.weight.shape))
    return _transposed(c, a, meta, len(a.weight.shape) - 2)


def _transposed(c: Reader, a: SimpleNamespace, meta: Meta, spatial: int) -> Content:
    padding = [(side, side) for side in each(a.padding, spatial)]
    how = windows(each(a.stride, spatial), padding, each(a.dilation, spatial))
    how |= {"output_padding": each(a.output_padding, spatial), "groups": a.groups, "channel_axis": 1}
    return c.emit("conv_transpose", [a.input, a.weight, a.bias], meta, ("", "weight", "bias"), **how)


@handles("linear")
def _linear(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x, weight, bias = a.input, a.weight, a.bias
    if weight.is_value or (bias is not None and bias.is_value) or len(weight.shape) != 2 or not x.is_value:
        result = c.call(aten.matmul.default, x, c.call(aten.permute.default, weight, [1, 0][: len(weight.shape)]))
        return result if bias is None else c.call(aten.add.Tensor, result, bias)
    c.keep_batch(x, [len(x.shape) - 1])
    if x.outer > 1:
        # Axes joined in front of the batch (as in nn.MultiheadAttention) are taken apart again: the last alone counts.
        axis = c.batch_axes(x.shape)[0]
        apart = [*x.shape[:axis], x.outer, x.shape[axis] // x.outer, *x.shape[axis + 1 :]]
        x = c.call(aten.reshape.default, x, apart)
        result = c.emit(
            "linear", [x, weight, bias], Meta((*x.shape[:-1], meta.shape[-1]), meta.dtype), ("", "weight", "bias")
        )
        return c.call(aten.reshape.default, result, list(meta.shape))
    return c.emit("linear", [x, weight, bias], meta, ("", "weight", "bias"))


def _as_linear_weight(node: Node | None) -> Any:
    """The transpose of a program, where it is one by its last instruction."""
    if node is None:
        return None
    name = node.operator.split(".")[1] if node.operator.startswith("aten.") else ""
    rest = tuple(node.args[1:])
    if name in ("t", "numpy_T") or (
        name in ("transpose", "permute") and rest in (([1, 0],), (0, 1), (1, 0), (-1, -2), (-2, -1))
    ):
        return node.args[0]
    return None


@handles("matmul", "mm", "bmm")
def _matmul(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x, y = a.self, getattr(a, "other", None) or a.mat2
    if len(x.shape) == 1 or len(y.shape) == 1:
        x = c.call(aten.unsqueeze.default, x, 0) if len(x.shape) == 1 else x
        y = c.call(aten.unsqueeze.default, y, 1) if len(y.shape) == 1 else y
        return c.call(aten.reshape.default, c.call(aten.matmul.default, x, y), list(meta.shape))
    c.keep_batch(x, [len(x.shape) - 1])
    c.keep_batch(y, [len(y.shape) - 2])
    weight = _as_linear_weight(y.node) if len(y.shape) == 2 else None
    if weight is not None:
        transposed = Content(Meta(y.shape[::-1], y.meta.dtype), node=weight)
        return c.emit("linear", [x, transposed, None], meta, ("", "weight"))
    return c.emit("matmul", [x, y], meta)


@handles("addmm", "baddbmm", "addbmm", "addmv")
def _addmm(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if hasattr(a, "mat1") or hasattr(a, "batch1"):
        x, y = (a.mat1, a.mat2) if hasattr(a, "mat1") else (a.batch1, a.batch2)
    else:
        x, y = a.mat, a.vec
    if base_name(c.applied) == "addbmm":
        raise Refused("")
    product = c.call(aten.matmul.default, x, y)
    product = product if a.alpha == 1 else c.call(aten.mul.Tensor, product, a.alpha)
    if a.beta == 0:
        return product
    return c.call(aten.add.Tensor, product, a.self if a.beta == 1 else c.call(aten.mul.Tensor, a.self, a.beta))


@handles("dot", "mv", "inner", "vdot")
def _dot(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    name = base_name(c.applied)
    if name != "inner":
        return c.call(aten.matmul.default, a.self, a.vec if name == "mv" else getattr(a, "tensor", None) or a.other)
    if len(a.other.shape) > 2:
        raise Refused(f"its second operand has {len(a.other.shape)} axes, at most 2 are allowed")
    other = c.call(aten.permute.default, a.other, [1, 0]) if len(a.other.shape) == 2 else a.other
    return c.call(aten.matmul.default, a.self, other)


@handles("einsum")
def _einsum(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    terms, _, result = a.equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if "..." in a.equation:
        operands, result = _without_ellipsis(operands, result, [len(t.shape) for t in a.tensors], "->" in a.equation)
    elif "->" not in a.equation:
        letters = "".join(operands)
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if any(len(set(term)) != len(term) for term in operands):
        raise Refused.argument("equation", a.equation, "each letter is allowed once in an operand (no diagonals)")
    pairs = list(zip(a.tensors, operands, strict=True))
    left, letters = pairs[0]
    for position, (right, others) in enumerate(pairs[1:], 2):
        needed = set(result).union(*(term for _, term in pairs[position:]))
        left, letters = _contract(c, left, letters, right, others, needed)
    surplus = [letters.index(letter) for letter in letters if letter not in result]
    if surplus:
        left = c.call(aten.sum.dim_IntList, left, surplus, False)
        letters = "".join(letter for letter in letters if letter in result)
    return c.call(aten.permute.default, left, [letters.index(letter) for letter in result])


def _without_ellipsis(operands: list[str], result: str, ranks: list[int], arrow: bool) -> tuple[list[str], str]:
    """The equation with letters for the axes that '...' means."""
    free = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in "".join(operands) + result]
    counts = [rank - len(term.replace("...", "")) for term, rank in zip(operands, ranks, strict=True)]
    longest = "".join(free[: max(c for c, term in zip(counts, operands, strict=True) if "..." in term)])
    expanded = [term.replace("...", longest[len(longest) - n :]) for term, n in zip(operands, counts, strict=True)]
    if arrow:
        return expanded, result.replace("...", longest)
    letters = "".join(operands).replace(".", "")
    return expanded, longest + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))


def _contract(c: Reader, x: Content, xs: str, y: Content, ys: str, needed: set[str]) -> tuple[Content, str]:
    """One product of two operands of an einsum: what both have and the result needs leads, and matmul does the rest."""
    for name in [letter for letter in xs if letter not in ys and letter not in needed]:
        x, xs = c.call(aten.sum.dim_IntList, x, [xs.index(name)], False), xs.replace(name, "")
    for name in [letter for letter in ys if letter not in xs and letter not in needed]:
        y, ys = c.call(aten.sum.dim_IntList, y, [ys.index(name)], False), ys.replace(name, "")
    both = [letter for letter in xs if letter in ys and letter in needed]
    summed = [letter for letter in xs if letter in ys and letter not in needed]
    only_x = [letter for letter in xs if letter not in ys]
    only_y = [letter for letter in ys if letter not in xs]
    sizes = {**dict(zip(ys, y.shape, strict=True)), **dict(zip(xs, x.shape, strict=True))}
    # The batch stays an axis of its own among the leading ones wherever only one operand has it.
    for own, other, letters in ((only_x, "y", only_x), (only_y, "x", only_y)):
        batch = next((letter for letter in own if sizes[letter] % c.prime == 0), None)
        if batch is not None and len(letters) > 1:
            own.remove(batch)
            both.insert(0, batch)
            if other == "y":
                y, ys = c.call(aten.unsqueeze.default, y, 0), batch + ys
            else:
                x, xs = c.call(aten.unsqueeze.default, x, 0), batch + xs

    def arranged(tensor: Content, letters: str, order: list[str], groups: list[list[str]]) -> Content:
        moved = c.call(aten.permute.default, tensor, [letters.index(letter) for letter in order])
        lead = list(moved.shape[: len(both)])
        tail = [math.prod(sizes[letter] for letter in group) for group in groups]
        return c.call(aten.reshape.default, moved, [*lead, *tail])

    left = arranged(x, xs, [*both, *only_x, *summed], [only_x, summed])
    right = arranged(y, ys, [*both, *summed, *only_y], [summed, only_y])
    product = c.call(aten.matmul.default, left, right)
    order = [*both, *only_x, *only_y]
    return c.call(aten.reshape.default, product, [sizes[letter] for letter in order]), "".join(order)


@handles("batch_norm", "_native_batch_norm_legit", "native_batch_norm", "_batch_norm_impl_index")
def _batch_norm(c: Reader, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        return [_batch_norm(c, a, meta[0]), *[None] * (len(meta) - 1)]
    if a.running_mean is None or a.running_var is None:
        raise Refused("it has no running statistics: what it computes depends on the other examples of the batch")
    if a.training and not c.noise_is_training:
        allowed = "in evaluation too, where False is allowed: the statistics of a batch depend on its other examples"
        raise Refused.argument("training", True, allowed)
    for name in ("weight", "bias", "running_mean", "running_var"):
        if getattr(a, name) is not None:
            require_fixed(getattr(a, name), name)
    x = a.input
    c.keep_batch(x, [1])
    mean = a.running_mean.node
    prefix = mean.args[0].rpartition("running_mean")[0] if mean is not None and mean.operator == "source" else None
    counter = f"{prefix}num_batches_tracked"
    return c.emit(
        "batch_norm",
        [x, a.weight, a.bias, a.running_mean, a.running_var],
        meta,
        ("", "weight", "bias", "running_mean", "running_var"),
        epsilon=a.eps,
        momentum=None if a.momentum == CUMULATIVE else a.momentum,
        channel_axis=1,
        training=bool(a.training),
        counter=counter if counter in c.counters else "",
    )


@handles("layer_norm", "native_layer_norm")
def _layer_norm(c: Reader, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        return [_layer_norm(c, a, meta[0]), None, None]
    rank = len(a.input.shape)
    axes = tuple(range(rank - len(a.normalized_shape), rank))
    c.keep_batch(a.input, axes)
    require_fixed(a.weight, "weight")
    require_fixed(a.bias, "bias")
    return c.emit("layer_norm", [a.input, a.weight, a.bias], meta, ("", "weight", "bias"), axes=axes, epsilon=a.eps)


@handles("rms_norm")
def _rms_norm(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    rank = len(a.input.shape)
    axes = tuple(range(rank - len(a.normalized_shape), rank))
    c.keep_batch(a.input, axes)
    require_fixed(a.weight, "weight")
    epsilon = torch.finfo(a.input.meta.dtype).eps if a.eps is None else a.eps
    return c.emit("rms_norm", [a.input, a.weight], meta, ("", "weight"), axes=axes, epsilon=epsilon)


@handles("group_norm")
def _group_norm(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if c.batch_axis(a.input) not in (0, None):
        raise Refused("the batch must be the first axis")
    operands = [a.input, a.weight, a.bias]
    return c.emit(
        "group_norm", operands, meta, ("", "weight", "bias"), groups=a.num_groups, epsilon=a.eps, channel_axis=1
    )


@handles("instance_norm")
def _instance_norm(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    if c.batch_axis(a.input) not in (0, None):
        raise Refused("the batch must be the first axis")
    if not a.use_input_stats:
        return c.call(
            aten.batch_norm.default, a.input, a.weight, a.bias, a.running_mean, a.running_var, False, 0.0, a.eps, False
        )
    operands = [a.input, a.weight, a.bias]
    groups = a.input.shape[1]
    return c.emit("group_norm", operands, meta, ("", "weight", "bias"), groups=groups, epsilon=a.eps, channel_axis=1)


def _pool_attributes(a: SimpleNamespace, spatial: int) -> tuple[Any, ...]:
    window = each(a.kernel_size, spatial)
    strides = each(a.stride, spatial) if a.stride else window
    return window, strides, each(a.padding, spatial), each(getattr(a, "dilation", 1), spatial)


_INDICES = (
    "return_indices=True is given, and the indices are read; False is allowed: only the largest values are computed"
)


@handles("max_pool1d", "max_pool2d", "max_pool2d_with_indices", "max_pool1d_with_indices")
def _max_pool(c: Reader, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        indices = c.unsupported_part(a, meta, 1, _INDICES)
        return [_max_pool(c, a, meta[0]), indices]
    x, spatial = a.self, 1 if "1d" in base_name(c.applied) else 2
    _batched(c, x, spatial + 2)
    window, strides, before, dilations = _pool_attributes(a, spatial)
    padding = tuple(
        (p, max(p, (out - 1) * s + d * (w - 1) + 1 - size - p))
        for p, out, s, d, w, size in zip(before, meta.shape[2:], strides, dilations, window, x.shape[2:], strict=True)
    )
    how = windows(strides, padding, dilations)
    return c.emit("max_pool", [x], meta, window=window, **how, channel_axis=1)


@handles("avg_pool3d")
def _avg_pool_of_channels(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    """A window over the first of three axes only, as local response normalization takes it."""
    window, strides, padding, _ = _pool_attributes(a, 3)
    if len(a.self.shape) != 5 or (window[1:], strides[1:], padding[1:]) != ((1, 1), (1, 1), (0, 0)):
        raise Refused("")
    batch, channels, depth, height, width = a.self.shape
    x = c.call(aten.reshape.default, a.self, [batch, channels, depth, height * width])
    rest = (a.ceil_mode, a.count_include_pad, a.divisor_override)
    x = c.call(aten.avg_pool2d.default, x, [window[0], 1], [strides[0], 1], [padding[0], 0], *rest)
    return c.call(aten.reshape.default, x, list(meta.shape))


@handles("avg_pool1d", "avg_pool2d")
def _avg_pool(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    x, spatial = a.self, 1 if "1d" in base_name(c.applied) else 2
    _batched(c, x, spatial + 2)
    window, strides, before, _ = _pool_attributes(a, spatial)
    over = tuple(
        max(0, (out - 1) * s + w - size - 2 * p)
        for p, out, s, w, size in zip(before, meta.shape[2:], strides, window, x.shape[2:], strict=True)
    )
    return c.emit(
        "avg_pool",
        [x],
        meta,
        window=window,
        strides=strides,
        padding=tuple((p, p) for p in before),
        over=over,
        count_include_pad=bool(a.count_include_pad),
        divisor=getattr(a, "divisor_override", None),
        channel_axis=1,
    )


@handles(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d"
)
def _adaptive_pool(c: Reader, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        indices = c.unsupported_part(a, meta, 1, _INDICES)
        return [_adaptive_pool(c, a, meta[0]), indices]
    name = base_name(c.applied).lstrip("_")
    _batched(c, a.self, 4 if name.endswith("2d") else 3)
    return c.emit(name[:-2] if name.endswith("d") else name, [a.self], meta, size=tuple(meta.shape[2:]), channel_axis=1)


@handles("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _resize_smoothly(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    raise Refused.argument("antialias", True, "False is allowed (pool before making it smaller)")


_UPSAMPLES = {"nearest": "nearest", "linear": "bilinear", "bilinear": "bilinear", "bicubic": "bicubic"}


@handles(*(f"upsample_{mode}" for mode in ("nearest1d", "nearest2d", "linear1d", "bilinear2d", "bicubic2d")))
@handles("_upsample_nearest_exact1d", "_upsample_nearest_exact2d")
def _resize(c: Reader, a: SimpleNamespace, meta: Meta) -> Content:
    name = base_name(c.applied)
    x = getattr(a, "input", None) or a.self
    _batched(c, x, 3 if name.endswith("1d") else 4)
    sizes = meta.shape[2:]
    scales = getattr(a, "scale_factors", None)
    if scales is None:
        scales = [getattr(a, key, None) for key in (["scales"] if name.endswith("1d") else ["scales_h", "scales_w"])]
    whole = False
    if "exact" in name:
        # At whole factors both kinds of nearest take the same pixels.
        whole = all(size % old == 0 for size, old in zip(sizes, x.shape[2:], strict=True))
        mode = "nearest" if whole else "nearest_exact"
    else:
        mode = _UPSAMPLES[name.removeprefix("upsample_")[:-2]]
    return c.emit(
        "resize",
        [x],
        meta,
        size=tuple(sizes),
        mode=mode,
        align_corners=bool(getattr(a, "align_corners", False)),
        scales=tuple(scales) if scales and None not in scales and not whole else None,
        channel_axis=1,
    )
