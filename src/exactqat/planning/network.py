# SPDX-License-Identifier: Apache-2.0
"""A model as the kit sees it, whatever framework it was written in: float steps from inputs to outputs.

`capture` (one file for each framework) makes a `Network`, `plan` reads it. Nothing here knows a framework: parameters
are known by the user's names, what is computed from parameters alone is opaque.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    """The place of a step in the user's model: path of the innermost module, file and line; empty where unknown."""

    path: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = f"{self.file}, line {self.line}" if self.file else ""
        return " ".join(filter(None, (self.path or "the model's forward", f"({where})" if where else "")))


@dataclass(frozen=True)
class Value:
    """A tensor that depends on the input.

    Attributes:
        shape: for a batch of one. The batch's axis holds the number of rows that one example takes: 1, or more where
            the model folds other axes into the batch.
        batch_axis: the axis of the batch.
        dtype: "float32", or "int64" for an index such as argmax's.
    """

    name: str
    shape: tuple[int, ...]
    batch_axis: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the input.

    Attributes:
        name: unique among values and constants; of a parameter or buffer its path in the user's model.
        parameter: whether it is an unchanged parameter or buffer; otherwise it is computed from `sources` by
            `expression`, or is `data`.
        trainable: some parameter it depends on requires gradients.
        sources: paths of the parameters and buffers that an expression reads.
        expression: opaque; the framework's `train` computes it from the sources at every step.
        data: opaque; the framework's own array, where it depends on no parameter.
    """

    name: str
    shape: tuple[int, ...]
    parameter: bool = True
    trainable: bool = False
    sources: tuple[str, ...] = ()
    expression: Any = None
    data: Any = None


@dataclass(frozen=True)
class Step:
    """One float operation.

    Attributes:
        kind: from the vocabulary of `KINDS`.
        inputs: names of values or constants, Python numbers, or None for an optional operand that is absent.
        output: name of the value it makes.
        attributes: as `KINDS` lists them. Axes are counted from 0 in the user's order, never negative.
        place: its place in the user's model.
        module: path of the user's module that this step is the whole of (a convolution, a ReLU), else "".
        label: the word for it in messages, as the user wrote it: "SiLU", "Conv2d", "torch.cumsum".
    """

    kind: str
    inputs: tuple[str | float | None, ...]
    output: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    place: Place = Place()
    module: str = ""
    label: str = ""


@dataclass(frozen=True)
class Network:
    """A whole model.

    Attributes:
        inputs: names of the values it gets, in the order of its arguments (flattened).
        outputs: names of what it returns, flattened.
        values, constants: by name.
        steps: in order of execution.
        input_tree, output_tree: opaque; the framework's own description of how inputs and outputs nest.
        output_names: a name for each output made from its place in the tree: "output", "output_0", "logits", ...
        input_names: likewise: "input" for a single one, else the argument's name. Rules know inputs by these.
        argument_names: what the user calls the inputs, a single one too: arguments, keys, input layers; files do so.
            Empty: as input_names.
        channels_first: whether images are [N, C, H, W] in its framework; see `files`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Constant]
    steps: tuple[Step, ...]
    input_names: tuple[str, ...] = ("input",)
    output_names: tuple[str, ...] = ("output",)
    input_tree: Any = None
    output_tree: Any = None
    argument_names: tuple[str, ...] = ()
    channels_first: bool = True


_WINDOW = "strides, dilations: one integer per spatial axis; padding: (before, after) per spatial axis"
# The vocabulary: kind -> inputs; attributes. Spatial axes are those behind the batch and the channels, in the user's
# order; `channel_axis` says where the channels are. A weight is always [out, in / groups, *window].
KINDS: dict[str, str] = {
    "conv": f"x, weight, bias|None; {_WINDOW}; groups; channel_axis; padding_mode: zeros, reflect, replicate, circular",
    "conv_transpose": f"x, weight [in, out / groups, *window], bias|None; {_WINDOW}; output_padding; groups; "
    "channel_axis",
    "linear": "x, weight [out, in], bias|None; over the last axis",
    "matmul": "a, b, of rank 2 or more, leading axes broadcast; either may be a constant",
    "batch_norm": "x, weight|None, bias|None, mean, variance; epsilon, momentum (None: cumulative), channel_axis, "
    "training (False: the user has frozen its statistics), counter (name of the buffer that counts batches, or ''); "
    "optional: biased (the running variance is)",
    "layer_norm": "x, weight|None, bias|None; axes (the last ones), epsilon",
    "rms_norm": "x, weight|None; axes, epsilon",
    "group_norm": "x, weight|None, bias|None; groups, epsilon, channel_axis (instance norm: groups = channels)",
    "relu": "x",
    "relu6": "x",
    "sigmoid": "x",
    "tanh": "x",
    "silu": "x",
    "mish": "x",
    "hardsigmoid": "x",
    "hardswish": "x",
    "abs": "x",
    "neg": "x",
    "exp": "x",
    "log": "x",
    "sqrt": "x",
    "rsqrt": "x",
    "square": "x",
    "reciprocal": "x",
    "erf": "x",
    "sin": "x",
    "cos": "x",
    "selu": "x",
    "log_sigmoid": "x",
    "softsign": "x",
    "sign": "x",
    "floor": "x",
    "round": "x",
    "clamp": "x; min (number or None), max (number or None)",
    "hardshrink": "x; width",
    "softshrink": "x; width",
    "threshold": "x; least, value (what is not above `least` becomes `value`)",
    "composition": "x; instructions: (kind, operands, parameters) each, of one value (see `device.activation`)",
    "gelu": "x; approximate: none, tanh",
    "softplus": "x; beta, threshold",
    "elu": "x; alpha, scale, input_scale (ELU, SELU, CELU in the form of aten.elu)",
    "leaky_relu": "x; slope",
    "pow": "x; exponent (a number)",
    "prelu": "x, weight [1] or [channels]; channel_axis",
    "add": "a, b (values, constants or numbers; broadcast as NumPy does)",
    "sub": "a, b",
    "mul": "a, b",
    "div": "a, b",
    "maximum": "a, b",
    "minimum": "a, b",
    "softmax": "x; axis",
    "log_softmax": "x; axis",
    "mean": "x; axes, keep_dims",
    "sum": "x; axes, keep_dims",
    "amax": "x; axes, keep_dims",
    "amin": "x; axes, keep_dims",
    "var": "x; axes, keep_dims, correction",
    "std": "x; axes, keep_dims, correction",
    "norm": "x; axes, keep_dims, order (2 or 1)",
    "normalize": "x; axis, epsilon (L2, F.normalize)",
    "argmax": "x; axis, keep_dims",
    "max_pool": f"x; window; {_WINDOW}; channel_axis (padding after may be more where the window reaches over: "
    "ceil_mode)",
    "avg_pool": "x; window, strides; padding; over (rows by which the last window reaches past the padding, per axis: "
    "ceil_mode; never counted); count_include_pad; divisor (None or a number); channel_axis",
    "adaptive_avg_pool": "x; size; channel_axis",
    "adaptive_max_pool": "x; size; channel_axis",
    "reshape": "x; shape (of the result, for a batch of one)",
    "permute": "x; axes",
    "expand": "x; shape",
    "slice": "x; axis, start, stop, step (non-negative, step >= 1)",
    "concat": "*x (values or constants); axis",
    "flip": "x; axes",
    "pad": "x; padding ((before, after) per axis), mode: constant, reflect, replicate, circular; value",
    "resize": "x; size (per spatial axis), mode: nearest, bilinear, bicubic; align_corners; scales (as given, or "
    "None); channel_axis",
    "gather": "x; axis, indices (tuple of ints)",
    "pixel_shuffle": "x; factor (channels [c * r * r] to [c], channel_axis 1)",
    "pixel_unshuffle": "x; factor",
    "attention": "query, key, value, mask|None; causal, scale (number)",
    "lstm": "x, *weights; layers, bidirectional, batch_first, has_bias, output: 0 (sequence), 1 (h_n), 2 (c_n); "
    "backwards: from the last time to the first (the sequence stays in the order of time)",
    "gru": "x, *weights; as lstm, without c_n; update_first: gates as update, reset, new instead of reset, update, new",
    "dropout": "x; expression: opaque, what training makes of x; nothing in evaluation (dropout, stochastic depth)",
    "custom_gradient": "y, *operands; expression: opaque, the user's own gradient rule: the value is y's, the gradient "
    "that of the rule at the operands; y in evaluation",
    "identity": "x; expression: None",
    "unsupported": "*x; expression: what no other kind says; refused by the plan with its label",
}
