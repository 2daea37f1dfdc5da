# SPDX-License-Identifier: Apache-2.0
"""Convolutions, products, normalizations, pools and resizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ..core.products import einsum
from ..core.refusals import Refused
from ..core.windows import each, windows
from .converter import CUMULATIVE, HANDLERS, Converter, handles, require_fixed
from .expression import Node
from .items import Fixed, Item, Meta, Traced
from .operators import base_name

aten = torch.ops.aten


def _batch_first(c: Converter, x: Item, rank: int | None = None) -> None:
    if rank not in (None, len(x.shape)) or c.batch_of(x) not in (0, None):
        raise Refused("the batch must be the first axis")


@handles("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
@handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    require_fixed(a.weight, "weight")
    require_fixed(a.bias, "bias")
    spatial = len(a.weight.shape) - 2
    _batch_first(c, a.input, spatial + 2)
    strides, dilations = each(a.stride, spatial), each(a.dilation, spatial)
    operands, kind = [a.input, a.weight, a.bias], "conv"
    how: dict[str, Any] = {"groups": a.groups, "channel_axis": 1}
    if isinstance(a.padding, str):
        reaches = [d * (k - 1) for d, k in zip(dilations, a.weight.shape[2:], strict=True)]
        padding = [(0, 0) if a.padding == "valid" else (reach // 2, reach - reach // 2) for reach in reaches]
    else:
        padding = [(side, side) for side in each(a.padding, spatial)]
    if getattr(a, "transposed", "transpose" in base_name(c.applied)):
        kind, how = "conv_transpose", {"output_padding": each(a.output_padding, spatial), **how}
    return c.emit(kind, operands, meta.shape, **windows(strides, padding, dilations), **how)


@handles("linear")
def _linear(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x, weight, bias = a.input, a.weight, a.bias
    if isinstance(weight, Traced) or isinstance(bias, Traced) or len(weight.shape) != 2 or isinstance(x, Fixed):
        result = c.call(aten.matmul.default, x, c.permute(weight, [1, 0][: len(weight.shape)]))
        return result if bias is None else c.call(aten.add.Tensor, result, bias)
    c.keep_batch(x, [len(x.shape) - 1])
    if x.outer > 1:
        # Axes joined in front of the batch (as in nn.MultiheadAttention) are taken apart again: the last alone counts.
        axis = c.batch_axes(x.shape)[0]
        x = c.reshape(x, [*x.shape[:axis], x.outer, x.shape[axis] // x.outer, *x.shape[axis + 1 :]])
    shape = (*x.shape[:-1], meta.shape[-1])
    return c.reshape(c.emit("linear", [x, weight, bias], shape), meta.shape)


def _before_transpose(y: Item) -> Node | None:
    """What a program transposes, where that is its last instruction."""
    node = y.node if isinstance(y, Fixed) and len(y.shape) == 2 else None
    if node is None or not node.operator.startswith("aten."):
        return None
    name, rest = node.operator.split(".")[1], tuple(node.args[1:])
    swapped = rest in (([1, 0],), (0, 1), (1, 0), (-1, -2), (-2, -1))
    transposes = name in ("t", "numpy_T") or (name in ("transpose", "permute") and swapped)
    return node.args[0] if transposes else None


@handles("matmul", "mm", "bmm")
def _matmul(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x, y = a.self, getattr(a, "other", None) or a.mat2
    if len(x.shape) == 1 or len(y.shape) == 1:
        x = c.call(aten.unsqueeze.default, x, 0) if len(x.shape) == 1 else x
        y = c.call(aten.unsqueeze.default, y, 1) if len(y.shape) == 1 else y
        return c.reshape(c.call(aten.matmul.default, x, y), meta.shape)
    c.keep_batch(x, [len(x.shape) - 1])
    c.keep_batch(y, [len(y.shape) - 2])
    if (weight := _before_transpose(y)) is not None:
        transposed = Fixed(weight, y.shape[::-1], y.dtype)
        return c.emit("linear", [x, transposed, None], *meta)
    return c.emit("matmul", [x, y], *meta)


# Operators that are products in disguise, by the names of their factors.
_FACTORS = {
    **{"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")},
    **{"mv": ("self", "vec"), "dot": ("self", "tensor"), "vdot": ("self", "other")},
}


@handles(*_FACTORS)
def _addmm(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    product = c.call(aten.matmul.default, *(getattr(a, name) for name in _FACTORS[base_name(c.applied)]))
    if not hasattr(a, "alpha"):
        return product
    product = product if a.alpha == 1 else c.call(aten.mul.Tensor, product, a.alpha)
    if a.beta == 0:
        return product
    return c.call(aten.add.Tensor, product, a.self if a.beta == 1 else c.call(aten.mul.Tensor, a.self, a.beta))


HANDLERS["einsum"] = lambda c, a, meta: einsum(c, a.equation, a.tensors)


@handles(*(f"fft_{kind}fft{axes}" for kind in ("", "i", "r", "ir") for axes in ("", "2", "n")))
def _fourier(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    raise Refused("it makes complex numbers; compute it outside of the model, or as products with cosines and sines")


@handles("batch_norm", "_native_batch_norm_legit", "native_batch_norm", "_batch_norm_impl_index")
def _batch_norm(c: Converter, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        return [_batch_norm(c, a, meta[0]), *[None] * (len(meta) - 1)]
    if a.running_mean is None or a.running_var is None:
        raise Refused("it has no running statistics: what it computes depends on the other examples of the batch")
    if a.training and not c.noise_is_training:
        allowed = "in evaluation too, where False is allowed: the statistics of a batch depend on its other examples"
        raise Refused.argument("training", True, allowed)
    roles = ("weight", "bias", "running_mean", "running_var")
    tensors = [getattr(a, role) for role in roles]
    for role, tensor in zip(roles, tensors, strict=True):
        require_fixed(tensor, role)
    c.keep_batch(a.input, [1])
    mean = a.running_mean.node
    prefix = mean.args[0].rpartition("running_mean")[0] if mean.operator == "source" else None
    counter = f"{prefix}num_batches_tracked"
    return c.emit(
        "batch_norm",
        [a.input, *tensors],
        *meta,
        epsilon=a.eps,
        momentum=None if a.momentum == CUMULATIVE else a.momentum,
        channel_axis=1,
        training=bool(a.training),
        counter=counter if counter in c.counters else "",
    )


@handles("layer_norm", "native_layer_norm", "rms_norm")
def _layer_norm(c: Converter, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        return [_layer_norm(c, a, meta[0]), None, None]
    rank = len(a.input.shape)
    axes = tuple(range(rank - len(a.normalized_shape), rank))
    c.keep_batch(a.input, axes)
    require_fixed(a.weight, "weight")
    if base_name(c.applied) == "rms_norm":
        epsilon = torch.finfo(a.input.dtype).eps if a.eps is None else a.eps
        return c.emit("rms_norm", [a.input, a.weight], *meta, axes=axes, epsilon=epsilon)
    require_fixed(a.bias, "bias")
    tensors = [a.input, a.weight, a.bias]
    return c.emit("layer_norm", tensors, *meta, axes=axes, epsilon=a.eps)


@handles("group_norm", "instance_norm")
def _group_norm(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    _batch_first(c, a.input)
    if not getattr(a, "use_input_stats", True):
        tensors = a.input, a.weight, a.bias, a.running_mean, a.running_var
        return c.call(aten.batch_norm.default, *tensors, False, 0.0, a.eps, False)
    groups = getattr(a, "num_groups", a.input.shape[1])
    how = {"groups": groups, "epsilon": a.eps, "channel_axis": 1}
    return c.emit("group_norm", [a.input, a.weight, a.bias], *meta, **how)


# --- pools and resizes ------------------------------------------------------------------------------------------------


def _without_indices(c: Converter, a: SimpleNamespace, meta: list[Meta], values: Item) -> list[Item]:
    reason = (
        "return_indices=True is given, and the indices are read; False is allowed: only the largest values are computed"
    )
    return [values, c.refused(vars(a), meta, reason)[1]]


def _pool_attributes(a: SimpleNamespace, spatial: int) -> tuple[Any, ...]:
    window = each(a.kernel_size, spatial)
    strides = each(a.stride, spatial) if a.stride else window
    return window, strides, each(a.padding, spatial), each(getattr(a, "dilation", 1), spatial)


@handles("max_pool1d", "max_pool2d", "max_pool2d_with_indices", "max_pool1d_with_indices")
def _max_pool(c: Converter, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        return _without_indices(c, a, meta, _max_pool(c, a, meta[0]))
    x, spatial = a.self, 1 if "1d" in base_name(c.applied) else 2
    _batch_first(c, x, spatial + 2)
    window, strides, before, dilations = _pool_attributes(a, spatial)
    padding = tuple(
        (p, max(p, (out - 1) * s + d * (w - 1) + 1 - size - p))
        for p, out, s, d, w, size in zip(before, meta.shape[2:], strides, dilations, window, x.shape[2:], strict=True)
    )
    return c.emit("max_pool", [x], *meta, window=window, **windows(strides, padding, dilations), channel_axis=1)


@handles("avg_pool3d")
def _avg_pool_of_channels(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    """A window over the first of three axes only, as local response normalization takes it."""
    window, strides, padding, _ = _pool_attributes(a, 3)
    if len(a.self.shape) != 5 or (window[1:], strides[1:], padding[1:]) != ((1, 1), (1, 1), (0, 0)):
        raise Refused("")
    batch, channels, depth, height, width = a.self.shape
    x = c.reshape(a.self, [batch, channels, depth, height * width])
    rest = (a.ceil_mode, a.count_include_pad, a.divisor_override)
    result = c.call(aten.avg_pool2d.default, x, [window[0], 1], [strides[0], 1], [padding[0], 0], *rest)
    return c.reshape(result, meta.shape)


@handles("avg_pool1d", "avg_pool2d")
def _avg_pool(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    x, spatial = a.self, 1 if "1d" in base_name(c.applied) else 2
    _batch_first(c, x, spatial + 2)
    window, strides, before, _ = _pool_attributes(a, spatial)
    over = tuple(
        max(0, (out - 1) * s + w - size - 2 * p)
        for p, out, s, w, size in zip(before, meta.shape[2:], strides, window, x.shape[2:], strict=True)
    )
    return c.emit(
        "avg_pool",
        [x],
        *meta,
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
def _adaptive_pool(c: Converter, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        return _without_indices(c, a, meta, _adaptive_pool(c, a, meta[0]))
    name = base_name(c.applied).lstrip("_")
    _batch_first(c, a.self, 4 if name.endswith("2d") else 3)
    return c.emit(name[:-2], [a.self], *meta, size=tuple(meta.shape[2:]), channel_axis=1)


@handles("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _resize_smoothly(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    raise Refused.argument("antialias", True, "False is allowed (pool before making it smaller)")


_UPSAMPLES = {
    **{"upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest", "upsample_linear1d": "bilinear"},
    **{"upsample_bilinear2d": "bilinear", "upsample_bicubic2d": "bicubic"},
    **{"_upsample_nearest_exact1d": "nearest_exact", "_upsample_nearest_exact2d": "nearest_exact"},
}


@handles(*_UPSAMPLES)
def _resize(c: Converter, a: SimpleNamespace, meta: Meta) -> Item:
    name = base_name(c.applied)
    x, mode = getattr(a, "input", None) or a.self, _UPSAMPLES[name]
    _batch_first(c, x, 3 if name.endswith("1d") else 4)
    sizes = meta.shape[2:]
    scales = getattr(a, "scale_factors", None)
    if scales is None:
        scales = [getattr(a, key, None) for key in (["scales"] if name.endswith("1d") else ["scales_h", "scales_w"])]
    scales = tuple(scales) if scales and None not in scales else None
    if mode == "nearest_exact" and all(size % old == 0 for size, old in zip(sizes, x.shape[2:], strict=True)):
        # At whole factors both kinds of nearest take the same pixels.
        mode, scales = "nearest", None
    how: dict[str, Any] = {
        "size": tuple(sizes),
        "mode": mode,
        "align_corners": bool(getattr(a, "align_corners", False)),
    }
    return c.emit("resize", [x], *meta, **how, scales=scales, channel_axis=1)
