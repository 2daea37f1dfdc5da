# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a network's steps, one declaration each: what a step reads, its attributes, and what it computes.

Axes are counted from 0 in the user's order. Spatial axes are all but the batch and channel axes, in the user's order;
`channel_axis` says where the channels are. A weight is [out, in / groups, *window]. The functions of one value are
declared in `device.functions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..device.attribute import NUMBER, REQUIRED, Attribute
from ..device.functions import FUNCTIONS, NumPyPrimitives

Array = np.ndarray


@dataclass(frozen=True)
class Kind:
    """One kind of step.

    Attributes:
        name: in `KINDS`.
        inputs: what it reads, in order; "bias?" may be None or left out, "*x" is any number of operands, at the end.
        attributes: by name.
        pointwise: every value depends on one value of each operand, which broadcast as in NumPy.
        real: a function of (operands, attributes): what it computes in evaluation, in NumPy, for one example or several
            along the batch axis. None: only `expression` or the framework says it.
        reads: what the operands are, if their names do not say.
    """

    name: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    pointwise: bool = False
    real: Callable[[Sequence[Any], Mapping[str, Any]], Array] | None = None
    reads: str = ""

    @property
    def operands(self) -> tuple[int, int | None]:
        """The smallest and the largest number of operands; None: any."""
        fixed = [name for name in self.inputs if not name.startswith("*")]
        fewest = sum(not name.endswith("?") for name in fixed)
        return fewest, len(fixed) if len(fixed) == len(self.inputs) else None

    def given(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """A step's attributes, with defaults for those it does not name."""
        defaults = {name: each.default for name, each in self.attributes.items() if each.default is not REQUIRED}
        return defaults | dict(attributes)

    def compute(self, operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
        """What a step computes in evaluation, in NumPy and the precision of its operands.

        Raises:
            NotImplementedError: the declaration does not say.
        """
        if self.real is None:
            raise NotImplementedError(f"the declaration of {self.name!r} does not say what it computes")
        return self.real(operands, self.given(attributes))

    def check(self, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> None:
        """Refuses what a step of this kind cannot be.

        Raises:
            ValueError: naming what was given and what is allowed.
        """
        fewest, most = self.operands
        if len(inputs) < fewest or (most is not None and len(inputs) > most):
            raise ValueError(f"a step {self.name!r} reads {', '.join(self.inputs)}, got {len(inputs)} inputs")
        for name, given in zip(self.inputs, inputs, strict=False):
            if given is None and not name.endswith("?") and not name.startswith("*"):
                raise ValueError(f"input {name!r} of a step {self.name!r} must be there, got None")
        missing = [
            name for name, each in self.attributes.items() if each.default is REQUIRED and name not in attributes
        ]
        unknown = [name for name in attributes if name not in self.attributes]
        if missing or unknown:
            known = ", ".join(self.attributes) or "none"
            wrong = f"{', '.join(missing)} missing" if missing else f"got {', '.join(unknown)}"
            raise ValueError(f"the attributes of a step {self.name!r} are {known}: {wrong}")
        for name, value in attributes.items():
            if not self.attributes[name].allows(value):
                raise ValueError(
                    f"attribute {name!r} of a step {self.name!r} must be {self.attributes[name]}, got {value!r}"
                )


# By name.
KINDS: dict[str, Kind] = {}


def declare(
    name: str, inputs: str, attributes: Mapping[str, Attribute] | None = None, pointwise: bool = False, reads: str = ""
) -> Callable[[Callable[..., Any] | None], Any]:
    """Adds a kind to `KINDS`; the argument of the decorator it returns says what the kind computes."""
    if name in KINDS:
        raise ValueError(f"kind {name!r} is declared already")

    def enter(real: Callable[..., Any] | None) -> Any:
        KINDS[name] = Kind(name, tuple(inputs.split()), attributes or {}, pointwise, real, reads)
        return real

    return enter


INTEGER, INTEGERS, PAIRS = Attribute("an integer"), Attribute("integers"), Attribute("pairs of integers")
BOOLEAN, ANYTHING, SHAPE = Attribute("a boolean"), Attribute("anything", None), Attribute("integers")
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
WINDOW = {"strides": INTEGERS, "padding": PAIRS, "dilations": INTEGERS}
AXES = {"axes": INTEGERS, "keep_dims": BOOLEAN}

# --- value by value -------------------------------------------------------------------------------------------------


def _function(name: str) -> Callable[..., Array]:
    function = FUNCTIONS[name]

    def real(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
        parameters = function.of_step(attributes).values()
        return np.asarray(function(NumPyPrimitives, operands[0], *parameters))

    return real


for each in FUNCTIONS.values():
    if each.is_kind:
        declare(each.name, "x", each.attributes, pointwise=True)(_function(each.name))

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "maximum": np.maximum,
    "minimum": np.minimum,
}  # fmt: skip
for name, function in _BINARY.items():
    declare(name, "a b", pointwise=True, reads="values, constants or numbers")(
        lambda operands, attributes, function=function: function(*operands)
    )


def along(values: Array, rank: int, axis: int) -> Array:
    """One value for each channel, so that they broadcast along an axis."""
    return np.asarray(values).reshape([-1 if at == axis else 1 for at in range(rank)])


@declare("prelu", "x weight", {"channel_axis": INTEGER}, reads="weight [1] or [channels]")
def _prelu(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    x, weight = operands
    slope = weight if weight.size == 1 else along(weight, x.ndim, attributes["channel_axis"])
    return np.where(x >= 0, x, x * slope)


# --- products with weights ------------------------------------------------------------------------------------------


def channels_last(x: Array, axis: int) -> Array:
    return np.moveaxis(x, axis, -1)


def windows_of(x: Array, window: Sequence[int], attributes: Mapping[str, Any]) -> Array:
    """[batch, *places, channels, *window] of [batch, *spatial, channels]."""
    dilations = attributes.get("dilations") or (1,) * len(window)
    reach = [(size - 1) * apart + 1 for size, apart in zip(window, dilations, strict=True)]
    axes = tuple(range(1, 1 + len(window)))
    met = np.lib.stride_tricks.sliding_window_view(x, reach, axes)
    places = [slice(None, None, stride) for stride in attributes["strides"]]
    taps = [slice(None, None, apart) for apart in dilations]
    return met[(slice(None), *places, slice(None), *taps)]


def padded(x: Array, pairs: Sequence[Sequence[int]], value: float = 0.0, mode: str = "constant") -> Array:
    """x with (before, after) values added along each axis; negative numbers crop."""
    kept = [slice(max(-before, 0), size - max(-after, 0)) for (before, after), size in zip(pairs, x.shape, strict=True)]
    x, pairs = x[tuple(kept)], [(max(before, 0), max(after, 0)) for before, after in pairs]
    if mode in ("constant", "zeros"):
        return np.pad(x, pairs, constant_values=value)
    return np.pad(x, pairs, mode={"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode])  # type: ignore[call-overload]


@declare(
    "conv",
    "x weight bias?",
    {
        **WINDOW,
        "groups": INTEGER,
        "channel_axis": INTEGER,
        "padding_mode": Attribute("a word", "zeros", words=PADDING_MODES),
    },
)
def _conv(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    x, weight, bias = (*operands, None)[:3]
    axis, groups = attributes["channel_axis"], attributes["groups"]
    x = channels_last(x, axis)
    x = padded(x, [(0, 0), *attributes["padding"], (0, 0)], mode=attributes["padding_mode"])
    met = windows_of(x, weight.shape[2:], attributes)
    places = met.shape[: x.ndim - 1]
    met = met.reshape(*places, groups, -1)
    filters = weight.reshape(groups, weight.shape[0] // groups, -1)
    result = np.einsum("...gi,goi->...go", met, filters).reshape(*places, -1)
    return np.moveaxis(result if bias is None else result + bias, -1, axis)


@declare(
    "conv_transpose",
    "x weight bias?",
    {**WINDOW, "output_padding": INTEGERS, "groups": INTEGER, "channel_axis": INTEGER},
    reads="weight [in, out / groups, *window]",
)
def _conv_transpose(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    x, weight, bias = (*operands, None)[:3]
    axis, groups, strides = attributes["channel_axis"], attributes["groups"], attributes["strides"]
    x, window, dilations = channels_last(x, axis), weight.shape[2:], attributes["dilations"]
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    filters = weight.reshape(groups, -1, *weight.shape[1:])
    sizes = [
        (size - 1) * stride + (taps - 1) * apart + 1 + more
        for size, stride, taps, apart, more in zip(
            x.shape[1:-1], strides, window, dilations, attributes["output_padding"], strict=True
        )
    ]
    whole = np.zeros((x.shape[0], *sizes, groups, weight.shape[1]), x.dtype)
    for place in np.ndindex(*window):
        at = [
            slice(tap * apart, tap * apart + (size - 1) * stride + 1, stride)
            for tap, apart, size, stride in zip(place, dilations, x.shape[1:-1], strides, strict=True)
        ]
        whole[(slice(None), *at)] += np.einsum("...gi,gio->...go", grouped, filters[(..., *place)])
    result = padded(
        whole.reshape(*whole.shape[:-2], -1),
        [(0, 0), *((-before, -after) for before, after in attributes["padding"]), (0, 0)],
    )
    return np.moveaxis(result if bias is None else result + bias, -1, axis)


@declare("linear", "x weight bias?", reads="weight [out, in]; over the last axis")
def _linear(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    x, weight, bias = (*operands, None)[:3]
    result = x @ weight.T
    return np.asarray(result if bias is None else result + bias)


@declare("matmul", "a b", reads="of rank 2 or more, leading axes broadcast; either may be a constant")
def _matmul(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    return np.matmul(*operands)


# --- normalization --------------------------------------------------------------------------------------------------


@declare(
    "batch_norm",
    "x weight? bias? mean variance",
    {
        "epsilon": NUMBER,
        # None: cumulative.
        "momentum": Attribute("a number", optional=True),
        "channel_axis": INTEGER,
        # False: the user has frozen its statistics.
        "training": BOOLEAN,
        # The buffer that counts batches, or "".
        "counter": Attribute("a word", ""),
        # The running variance is divided by the count.
        "biased": Attribute("a boolean", False),
        # They begin at 0 and are debiased, as `counter` says.
        "debiased": Attribute("a boolean", False),
    },
)
def _batch_norm(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    x, axis = operands[0], attributes["channel_axis"]
    weight, bias, mean, variance = (None if each is None else along(each, x.ndim, axis) for each in operands[1:])
    assert mean is not None and variance is not None
    return scaled((x - mean) / np.sqrt(variance + attributes["epsilon"]), weight, bias)


def scaled(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def standardized(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


@declare("layer_norm", "x weight? bias?", {"axes": INTEGERS, "epsilon": NUMBER}, reads="the last axes")
def _layer_norm(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    x, weight, bias = (*operands, None, None)[:3]
    return scaled(standardized(x, tuple(attributes["axes"]), attributes["epsilon"]), weight, bias)


@declare("rms_norm", "x weight?", {"axes": INTEGERS, "epsilon": Attribute("a number", optional=True)})
def _rms_norm(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    x, weight = (*operands, None)[:2]
    epsilon = np.finfo(x.dtype).eps if attributes["epsilon"] is None else attributes["epsilon"]
    power = np.square(x).mean(tuple(attributes["axes"]), keepdims=True)
    return scaled(x / np.sqrt(power + epsilon), weight, None)


@declare(
    "group_norm",
    "x weight? bias?",
    {"groups": INTEGER, "epsilon": NUMBER, "channel_axis": INTEGER},
    reads="instance norm: as many groups as channels",
)
def _group_norm(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    x, weight, bias = (*operands, None, None)[:3]
    axis = attributes["channel_axis"]
    first = np.moveaxis(x, axis, 1)
    grouped = first.reshape(len(x), attributes["groups"], -1)
    made = np.moveaxis(standardized(grouped, (2,), attributes["epsilon"]).reshape(first.shape), 1, axis)
    return scaled(made, *(None if each is None else along(each, x.ndim, axis) for each in (weight, bias)))


@declare("normalize", "x", {"axis": INTEGER, "epsilon": NUMBER}, reads="by its length, which is at least epsilon")
def _normalize(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    (x,) = operands
    length = np.sqrt(np.square(x).sum(attributes["axis"], keepdims=True))
    return np.asarray(x / np.maximum(length, attributes["epsilon"]))


# --- over axes ------------------------------------------------------------------------------------------------------


def _reduced(function: Callable[..., Any]) -> Callable[..., Array]:
    def real(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
        return np.asarray(function(operands[0], axis=tuple(attributes["axes"]), keepdims=attributes["keep_dims"]))

    return real


_REDUCTIONS: dict[str, Callable[..., Any]] = {"mean": np.mean, "sum": np.sum, "amax": np.max, "amin": np.min}
for name, reduction in _REDUCTIONS.items():
    declare(name, "x", AXES)(_reduced(reduction))


@declare("var", "x", {**AXES, "correction": Attribute("a number", optional=True)})
def _var(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    (x,), axes = operands, tuple(attributes["axes"])
    count = math.prod(x.shape[axis] for axis in axes)
    squares = np.square(x - x.mean(axes, keepdims=True)).sum(axes, keepdims=attributes["keep_dims"])
    return np.asarray(squares / max(count - (attributes["correction"] or 0), 0))


@declare("std", "x", {**AXES, "correction": Attribute("a number", optional=True)})
def _std(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    return np.sqrt(_var(operands, attributes))


@declare("norm", "x", {**AXES, "order": NUMBER}, reads="order 1 or 2")
def _norm(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    (x,), how = operands, {"axis": tuple(attributes["axes"]), "keepdims": attributes["keep_dims"]}
    return np.abs(x).sum(**how) if attributes["order"] == 1 else np.sqrt(np.square(x).sum(**how))


@declare("argmax", "x", {"axis": INTEGER, "keep_dims": BOOLEAN})
def _argmax(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    return np.asarray(np.argmax(operands[0], attributes["axis"], keepdims=bool(attributes["keep_dims"])))


@declare("softmax", "x", {"axis": INTEGER})
def _softmax(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    return np.exp(_log_softmax(operands, attributes))


@declare("log_softmax", "x", {"axis": INTEGER})
def _log_softmax(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    x = operands[0] - operands[0].max(attributes["axis"], keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(attributes["axis"], keepdims=True)))


# --- windows without weights ----------------------------------------------------------------------------------------


def _pooled(
    x: Array, attributes: Mapping[str, Any], function: Callable[..., Any], fill: float, after: Sequence[int]
) -> Array:
    last = channels_last(x, attributes["channel_axis"])
    pairs = [(begin, end + more) for (begin, end), more in zip(attributes["padding"], after, strict=True)]
    met = windows_of(padded(last, [(0, 0), *pairs, (0, 0)], fill), attributes["window"], attributes)
    return np.asarray(np.moveaxis(function(met, axis=tuple(range(x.ndim, met.ndim))), -1, attributes["channel_axis"]))


@declare(
    "max_pool",
    "x",
    {"window": INTEGERS, **WINDOW, "channel_axis": INTEGER},
    reads="padding after may be more than before where the last window reaches past the end (ceil_mode)",
)
def _max_pool(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    return _pooled(operands[0], attributes, np.max, -np.inf, (0,) * len(attributes["window"]))


@declare(
    "avg_pool",
    "x",
    {
        "window": INTEGERS,
        "strides": INTEGERS,
        "padding": PAIRS,
        # How many rows the last window reaches past the padding, for each axis (ceil_mode); never counted.
        "over": INTEGERS,
        "count_include_pad": BOOLEAN,
        "divisor": Attribute("a number", optional=True),
        "channel_axis": INTEGER,
    },
)
def _avg_pool(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    (x,), over = operands, attributes["over"]
    total = _pooled(x, attributes, np.sum, 0.0, over)
    if attributes["divisor"] is not None:
        return np.asarray(total / attributes["divisor"])
    counted = np.ones_like(x)
    if attributes["count_include_pad"]:
        spatial = iter(attributes["padding"])
        pairs = [(0, 0) if at in (0, attributes["channel_axis"]) else tuple(next(spatial)) for at in range(x.ndim)]
        counted, attributes = padded(counted, pairs, 1.0), {**attributes, "padding": [(0, 0)] * len(over)}
    return np.asarray(total / _pooled(counted, attributes, np.sum, 0.0, over))


def _adaptive(function: Callable[..., Any]) -> Callable[..., Array]:
    def real(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
        x, sizes = operands[0], iter(attributes["size"])
        for axis in range(1, x.ndim):
            if axis != attributes["channel_axis"]:
                size, wanted = x.shape[axis], next(sizes)
                ends = [(at * size // wanted, -(-(at + 1) * size // wanted)) for at in range(wanted)]
                parts = [function(x.take(range(*end), axis), axis=axis, keepdims=True) for end in ends]
                x = np.concatenate(parts, axis)
        return np.asarray(x)

    return real


declare("adaptive_avg_pool", "x", {"size": INTEGERS, "channel_axis": INTEGER})(_adaptive(np.mean))
declare("adaptive_max_pool", "x", {"size": INTEGERS, "channel_axis": INTEGER})(_adaptive(np.max))

# --- moved values ---------------------------------------------------------------------------------------------------


# Of the result, for a batch of one; for several, the value's batch axis decides.
declare("reshape", "x", {"shape": SHAPE})(lambda operands, attributes: operands[0].reshape(attributes["shape"]))
declare("expand", "x", {"shape": SHAPE})(lambda operands, attributes: np.broadcast_to(operands[0], attributes["shape"]))
declare("permute", "x", {"axes": INTEGERS})(lambda operands, attributes: operands[0].transpose(attributes["axes"]))
declare("flip", "x", {"axes": INTEGERS})(lambda operands, attributes: np.flip(operands[0], tuple(attributes["axes"])))
declare("gather", "x", {"axis": INTEGER, "indices": INTEGERS})(
    lambda operands, attributes: operands[0].take(attributes["indices"], attributes["axis"])
)
# fixed_row: a row whose numbers training does not change (padding). checked: the framework itself refuses integers
# beyond the table.
declare(
    "embedding",
    "indices weight",
    {"fixed_row": Attribute("an integer", None, optional=True), "checked": Attribute("a boolean", False)},
    reads="indices: integers, weight [rows, features]",
)(lambda operands, attributes: operands[1][operands[0]])
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
}  # fmt: skip
# 1 where it holds, else 0.
declare(
    "compare",
    "x other",
    {"how": Attribute("a word", words=tuple(COMPARISONS))},
    reads="x: integers that the network is given; other: constants or a number",
)(lambda operands, attributes: COMPARISONS[attributes["how"]](*operands).astype(np.asarray(operands[0]).dtype))
declare("concat", "*x", {"axis": INTEGER}, reads="values or constants")(
    lambda operands, attributes: np.concatenate(operands, attributes["axis"])
)


@declare("slice", "x", {"axis": INTEGER, "start": INTEGER, "stop": INTEGER, "step": INTEGER}, reads="step at least 1")
def _slice(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    kept = slice(attributes["start"], attributes["stop"], attributes["step"])
    return np.asarray(operands[0][(slice(None),) * attributes["axis"] + (kept,)])


@declare(
    "pad",
    "x",
    {
        "padding": PAIRS,
        "mode": Attribute("a word", "constant", words=("constant", *PADDING_MODES[1:])),
        "value": Attribute("a number", 0.0, optional=True),
    },
)
def _pad(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    return padded(operands[0], attributes["padding"], attributes["value"] or 0.0, attributes["mode"])


@declare("pixel_shuffle", "x", {"factor": INTEGER}, reads="[batch, channels, height, width]")
def _pixel_shuffle(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    (x,), r = operands, attributes["factor"]
    n, c, h, w = x.shape
    apart = x.reshape(n, c // r**2, r, r, h, w).transpose(0, 1, 4, 2, 5, 3)
    return np.asarray(apart.reshape(n, c // r**2, h * r, w * r))


@declare("pixel_unshuffle", "x", {"factor": INTEGER}, reads="[batch, channels, height, width]")
def _pixel_unshuffle(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    (x,), r = operands, attributes["factor"]
    n, c, h, w = x.shape
    apart = x.reshape(n, c, h // r, r, w // r, r).transpose(0, 1, 3, 5, 2, 4)
    return np.asarray(apart.reshape(n, c * r**2, h // r, w // r))


# The framework defines its meaning; the plan turns it into matrices.
declare(
    "resize",
    "x",
    {
        "size": INTEGERS,
        "mode": Attribute("a word", words=("nearest", "nearest_exact", "bilinear", "bicubic")),
        "align_corners": BOOLEAN,
        # As they were given.
        "scales": Attribute("numbers", optional=True),
        "channel_axis": INTEGER,
    },
)(None)

# --- sequences ------------------------------------------------------------------------------------------------------


@declare(
    "attention",
    "query key value mask?",
    {"causal": BOOLEAN, "scale": NUMBER, "dropout": Attribute("a number", 0.0)},
)
def _attention(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Array:
    query, key, value, mask = (*operands, None)[:4]
    scores = query @ np.swapaxes(key, -1, -2) * attributes["scale"]
    if attributes["causal"]:
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    return np.asarray(_softmax([scores], {"axis": scores.ndim - 1}) @ value)


RECURRENT = {
    "layers": INTEGER,
    "bidirectional": BOOLEAN,
    "batch_first": BOOLEAN,
    "has_bias": BOOLEAN,
    # Which result: 0 the sequence, 1 the last hidden state, 2 the last cell state of an LSTM.
    "output": INTEGER,
    "dropout": Attribute("a number", 0.0),
    # From the last time step to the first; the sequence stays in time order.
    "backwards": Attribute("a boolean", False),
    # The gates of a GRU are ordered update, reset, new instead of reset, update, new.
    "update_first": Attribute("a boolean", False),
}
# The plan unrolls it into what is declared above.
declare("lstm", "x *weights", RECURRENT)(None)
declare("gru", "x *weights", RECURRENT)(None)

# --- what only training does ----------------------------------------------------------------------------------------

_first: Callable[..., Array] = lambda operands, attributes: operands[0]  # noqa: E731
# Dropout, stochastic depth: `expression` is opaque, what training computes from x.
declare("dropout", "x *others", {"expression": ANYTHING})(_first)
declare("identity", "x", {"expression": ANYTHING, "stop_gradient": Attribute("a boolean", False)})(_first)
# The same real numbers, stored on their own grid: for a file whose grids are given.
declare("stored_again", "x", {"scale": NUMBER, "zero_point": INTEGER})(_first)
# What no other kind expresses; the plan refuses it with its label and reason.
declare("unsupported", "*x", {"expression": ANYTHING, "reason": Attribute("a word", "")})(None)

__all__ = ["COMPARISONS", "KINDS", "Kind", "declare"]
