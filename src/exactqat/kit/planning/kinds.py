# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a network's steps, one declaration each: what a step reads, and its attributes.

Axes are counted from 0 in the user's order. Spatial axes are all but the batch and channel axes, in the user's order;
`channel_axis` says where the channels are. A weight is [out, in / groups, *window]. The functions of one value are
declared in `device.functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..device.attribute import NUMBER, REQUIRED, Attribute, Attributes
from ..device.functions import FUNCTIONS
from ..device.primitives import NUMPY

# An operand of a pointwise step.
Number = np.ndarray | float


@dataclass(frozen=True)
class Kind:
    """One kind of step.

    Attributes:
        name: in `KINDS`.
        inputs: what it reads, in order; "bias?" may be None or left out, "*x" is any number of operands, at the end.
        attributes: by name.
        real: of a pointwise kind, where every value depends on one value of each operand, which broadcast as in NumPy:
            what it computes of (operands, attributes).
    """

    name: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    real: Callable[[Sequence[Number], Attributes], np.ndarray] | None = None

    @property
    def pointwise(self) -> bool:
        """Whether every value depends on one value of each operand."""
        return self.real is not None

    @property
    def operands(self) -> tuple[int, int | None]:
        """The smallest and the largest number of operands; None: any."""
        fixed = [name for name in self.inputs if not name.startswith("*")]
        fewest = sum(not name.endswith("?") for name in fixed)
        return fewest, len(fixed) if len(fixed) == len(self.inputs) else None

    def compute(self, operands: Sequence[Number], attributes: Attributes) -> np.ndarray:
        """What a pointwise step computes, in NumPy and the precision of its operands.

        Raises:
            NotImplementedError: it is another kind of step.
        """
        if self.real is None:
            raise NotImplementedError(f"a step {self.name!r} is not computed value by value")
        defaults = {name: entry.default for name, entry in self.attributes.items() if entry.default is not REQUIRED}
        return self.real(operands, defaults | dict(attributes))

    def check(self, inputs: Sequence[object], attributes: Attributes) -> None:
        """Refuses what a step of this kind cannot be.

        Raises:
            ValueError: naming what was given and what is allowed.
        """
        fewest, most = self.operands
        if len(inputs) < fewest or (most is not None and len(inputs) > most):
            raise ValueError(f"a step {self.name!r} reads {', '.join(self.inputs)}, got {len(inputs)} inputs")
        for name, operand in zip(self.inputs, inputs, strict=False):
            if operand is None and not name.endswith("?") and not name.startswith("*"):
                raise ValueError(f"input {name!r} of a step {self.name!r} must be there, got None")
        missing = [
            name for name, entry in self.attributes.items() if entry.default is REQUIRED and name not in attributes
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


INTEGER, INTEGERS, PAIRS = Attribute("an integer"), Attribute("integers"), Attribute("pairs of integers")
BOOLEAN, ANYTHING = Attribute("a boolean"), Attribute("anything", None)
FALSE, NO_DROPOUT = Attribute("a boolean", False), Attribute("a number", 0.0)
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
CHANNELS = {"channel_axis": INTEGER}
WINDOW = {"strides": INTEGERS, "padding": PAIRS, "dilations": INTEGERS, **CHANNELS}
AXES = {"axes": INTEGERS, "keep_dims": BOOLEAN}
DEVIATION = {**AXES, "correction": Attribute("a number", optional=True)}
COMPARISONS: dict[str, np.ufunc] = {
    "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
}  # fmt: skip
RECURRENT = {
    "layers": INTEGER,
    "bidirectional": BOOLEAN,
    "batch_first": BOOLEAN,
    "has_bias": BOOLEAN,
    # Which result: 0 the sequence, 1 the last hidden state, 2 the last cell state of an LSTM.
    "output": INTEGER,
    "dropout": NO_DROPOUT,
    # From the last time step to the first; the sequence stays in time order.
    "backwards": FALSE,
    # The gates of a GRU are ordered update, reset, new instead of reset, update, new.
    "update_first": FALSE,
}
# By name: what a step reads, and its attributes.
_DECLARED: dict[str, tuple[str, Mapping[str, Attribute]]] = {
    # weight [1] or [channels]
    "prelu": ("x weight", CHANNELS),
    # Products with weights.
    "conv": (
        "x weight bias?",
        {**WINDOW, "groups": INTEGER, "padding_mode": Attribute("a word", "zeros", words=PADDING_MODES)},
    ),
    # weight [in, out / groups, *window]
    "conv_transpose": ("x weight bias?", {**WINDOW, "output_padding": INTEGERS, "groups": INTEGER}),
    # weight [out, in]; over the last axis
    "linear": ("x weight bias?", {}),
    # Of rank 2 or more, leading axes broadcast; either may be a constant.
    "matmul": ("a b", {}),
    # Normalization.
    "batch_norm": (
        "x weight? bias? mean variance",
        {
            "epsilon": NUMBER,
            # None: cumulative.
            "momentum": Attribute("a number", optional=True),
            **CHANNELS,
            # False: the user has frozen its statistics.
            "training": BOOLEAN,
            # The buffer that counts batches, or "".
            "counter": Attribute("a word", ""),
            # The running variance is divided by the count.
            "biased": FALSE,
        },
    ),
    # Over the last axes.
    "layer_norm": ("x weight? bias?", {"axes": INTEGERS, "epsilon": NUMBER}),
    # epsilon None: the smallest step at 1 of the operand's dtype.
    "rms_norm": ("x weight?", {"axes": INTEGERS, "epsilon": Attribute("a number", optional=True)}),
    # Instance norm: as many groups as channels.
    "group_norm": ("x weight? bias?", {"groups": INTEGER, "epsilon": NUMBER, **CHANNELS}),
    # By its length, which is at least epsilon.
    "normalize": ("x", {"axis": INTEGER, "epsilon": NUMBER}),
    # Over axes.
    **dict.fromkeys(("mean", "sum", "amax", "amin", "prod"), ("x", AXES)),
    **dict.fromkeys(("var", "std"), ("x", DEVIATION)),
    # order 1 or 2
    "norm": ("x", {**AXES, "order": NUMBER}),
    "argmax": ("x", {"axis": INTEGER, "keep_dims": BOOLEAN}),
    **dict.fromkeys(("softmax", "log_softmax"), ("x", {"axis": INTEGER})),
    # Windows without weights. Padding after may be more than before where the last window of a max_pool reaches past
    # the end (ceil_mode).
    "max_pool": ("x", {"window": INTEGERS, **WINDOW}),
    "avg_pool": (
        "x",
        {
            "window": INTEGERS,
            "strides": INTEGERS,
            "padding": PAIRS,
            # How many rows the last window reaches past the padding, for each axis (ceil_mode); never counted.
            "over": INTEGERS,
            "count_include_pad": BOOLEAN,
            "divisor": Attribute("a number", optional=True),
            **CHANNELS,
        },
    ),
    **dict.fromkeys(("adaptive_avg_pool", "adaptive_max_pool"), ("x", {"size": INTEGERS, **CHANNELS})),
    # Moved values. shape: of the result, for a batch of one; for several, the value's batch axis decides.
    **dict.fromkeys(("reshape", "expand"), ("x", {"shape": INTEGERS})),
    **dict.fromkeys(("permute", "flip"), ("x", {"axes": INTEGERS})),
    "gather": ("x", {"axis": INTEGER, "indices": INTEGERS}),
    # indices: integers, weight [rows, features]; fixed_row: a row whose numbers training does not change (padding);
    # checked: the framework itself refuses integers beyond the table.
    "embedding": ("indices weight", {"fixed_row": Attribute("an integer", None, optional=True), "checked": FALSE}),
    # 1 where it holds, else 0; x: integers that the network is given, other: constants or a number.
    "compare": ("x other", {"how": Attribute("a word", words=tuple(COMPARISONS))}),
    # Values or constants.
    "concat": ("*x", {"axis": INTEGER}),
    # step at least 1
    "slice": ("x", {"axis": INTEGER, "start": INTEGER, "stop": INTEGER, "step": INTEGER}),
    # (before, after) for each axis; negative numbers crop.
    "pad": (
        "x",
        {
            "padding": PAIRS,
            "mode": Attribute("a word", "constant", words=("constant", *PADDING_MODES[1:])),
            "value": Attribute("a number", 0.0, optional=True),
        },
    ),
    # [batch, channels, height, width]
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), ("x", {"factor": INTEGER})),
    # The framework defines its meaning; the plan turns it into matrices.
    "resize": (
        "x",
        {
            "size": INTEGERS,
            "mode": Attribute("a word", words=("nearest", "nearest_exact", "bilinear", "bicubic")),
            "align_corners": BOOLEAN,
            # As they were given.
            "scales": Attribute("numbers", optional=True),
            **CHANNELS,
        },
    ),
    # Sequences; recurrent layers are unrolled by the plan.
    "attention": ("query key value mask?", {"causal": BOOLEAN, "scale": NUMBER, "dropout": NO_DROPOUT}),
    **dict.fromkeys(("lstm", "gru"), ("x *weights", RECURRENT)),
    # What only training does. `expression` is opaque, what training computes from x: dropout, stochastic depth.
    "dropout": ("x *others", {"expression": ANYTHING}),
    "identity": ("x", {"expression": ANYTHING, "stop_gradient": FALSE}),
    # The same real numbers, stored on their own grid: for a file whose grids are given.
    "stored_again": ("x", {"scale": NUMBER, "zero_point": INTEGER}),
    # What no other kind expresses; the plan refuses it with its label and reason.
    "unsupported": ("*x", {"reason": Attribute("a word", "")}),
}
# Of two operands: values, constants or numbers.
_BINARY: dict[str, np.ufunc] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "maximum": np.maximum,
    "minimum": np.minimum,
}  # fmt: skip


def _of_function(name: str) -> Kind:
    function = FUNCTIONS[name]

    def real(operands: Sequence[Number], attributes: Attributes) -> np.ndarray:
        return np.asarray(function(NUMPY, operands[0], *function.of_step(attributes).values()))

    return Kind(name, ("x",), function.attributes, real)


def _of_binary(name: str) -> Kind:
    def real(operands: Sequence[Number], attributes: Attributes) -> np.ndarray:
        return np.asarray(_BINARY[name](*operands))

    return Kind(name, ("a", "b"), {}, real)


# By name.
KINDS: dict[str, Kind] = {
    **{name: _of_function(name) for name, function in FUNCTIONS.items() if function.is_kind},
    **{name: _of_binary(name) for name in _BINARY},
    **{name: Kind(name, tuple(inputs.split()), attributes) for name, (inputs, attributes) in _DECLARED.items()},
}
