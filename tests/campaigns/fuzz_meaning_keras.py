# SPDX-License-Identifier: Apache-2.0
"""Random legal Keras models, prepared and compared with themselves: is the network that trains the user's?

    KERAS_BACKEND=torch python tests/campaigns/fuzz_meaning_keras.py --count 500 --seed 1
    KERAS_BACKEND=torch python tests/campaigns/fuzz_meaning_keras.py --one 1234      one model, in words
    KERAS_BACKEND=torch python tests/campaigns/fuzz_meaning_keras.py --no-check      without `prepare`'s self-check

Every model is a chain of ordinary layers, Sequential, functional or subclassed, with one to three things in between
that make trouble: custom gradients, gradients that stop, tied weights, functions of weights, branches of training,
weights that a call changes, sizes of the batch in numbers and branches, parts of Keras' layers that are the user's
own. Either `prepare` refuses it, or two steps of plain SGD and evaluations before and after them are the
original's, with numbers of examples that the self-check does not use: 5, 7 and 130, and 1 in evaluation. Quantization
and randomness are off on both sides. The original is built a second time from its seed.
"""

from __future__ import annotations

import argparse
import collections
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

Shape = tuple[int, ...]
EXAMPLES = (5, 7)


# --- functions with gradients of their own ----------------------------------------------------------------------------


def upstream_of(args: Any, upstream: Any) -> Any:
    return args[0] if upstream is None else upstream


@ops.custom_gradient
def reversed_(x: Any) -> Any:
    return x * 1.0, lambda *args, upstream=None: -upstream_of(args, upstream)


@ops.custom_gradient
def signed(x: Any) -> Any:
    return ops.sign(x), lambda *args, upstream=None: upstream_of(args, upstream)


@ops.custom_gradient
def relu_of_its_own(x: Any) -> Any:
    return ops.relu(x), lambda *args, upstream=None: 0.5 * upstream_of(args, upstream)


@ops.custom_gradient
def damped_product(x: Any, w: Any) -> Any:
    return x * w, lambda *args, upstream=None: (
        upstream_of(args, upstream) * 0.25 * ops.stop_gradient(w),
        ops.sum(upstream_of(args, upstream) * ops.stop_gradient(x), tuple(range(len(x.shape) - 1))),
    )


# --- layers that make trouble -----------------------------------------------------------------------------------------


class Of(layers.Layer):
    """A function of the input."""

    function: Any = None

    def call(self, x: Any) -> Any:
        return type(self).function(x)


def of(name: str, function: Callable[[Any], Any]) -> type:
    return type(name, (Of,), {"function": staticmethod(function)})


class Weighted(layers.Layer):
    """A function of the input and a weight for each channel."""

    function: Any = None

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1],), name="w", initializer="random_normal")

    def call(self, x: Any) -> Any:
        return type(self).function(x, self.w)


def weighted(name: str, function: Callable[[Any, Any], Any]) -> type:
    return type(name, (Weighted,), {"function": staticmethod(function)})


class Phased(layers.Layer):
    """One thing in training, another in evaluation."""

    function: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x: Any, training: Any = False) -> Any:
        return type(self).function(x, training, self.seed)


def phased(name: str, function: Callable[[Any, Any, Any], Any]) -> type:
    return type(name, (Phased,), {"function": staticmethod(function)})


class Stateful(layers.Layer):
    """A weight that calls change."""

    function: Any = None

    def build(self, shape: Any) -> None:
        self.own = self.add_weight(shape=(shape[-1],), name="own", initializer="zeros", trainable=False)

    def call(self, x: Any, training: Any = False) -> Any:
        return type(self).function(x, self.own, training)


def stateful(name: str, function: Callable[[Any, Any, Any], Any]) -> type:
    return type(name, (Stateful,), {"function": staticmethod(function)})


def means(x: Any) -> Any:
    return ops.mean(x, tuple(range(len(x.shape) - 1)))


def running_mean(x: Any, own: Any, training: Any) -> Any:
    if training:
        own.assign(0.5 * own + 0.5 * ops.stop_gradient(means(x)))
    return x - own


def counted(x: Any, own: Any, training: Any) -> Any:
    own.assign_add(ops.ones(own.shape))
    return x


def observed(x: Any, own: Any, training: Any) -> Any:
    if training:
        own.assign(means(x))
    return x


class AbsoluteKernel(layers.Dense):
    @property
    def kernel(self) -> Any:
        return ops.abs(self._kernel)


class HalfConvolution(layers.Conv2D):
    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        return super().convolution_op(inputs, kernel * 0.5)


class OtherMoments(layers.BatchNormalization):
    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        return mean, variance * 2


class ShiftedNorm(layers.BatchNormalization):
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return super().call(inputs, training=training) + 1.0


class EvaluatedNorm(layers.BatchNormalization):
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return super().call(inputs, training=False)


class RectifiedDense(layers.Dense):
    def call(self, inputs: Any, training: Any = None) -> Any:
        return ops.relu(super().call(inputs))


class NormalizedDense(layers.Dense):
    def call(self, inputs: Any, training: Any = None) -> Any:
        kernel = self.kernel / ops.sqrt(ops.sum(ops.square(self.kernel), 0, keepdims=True) + 1e-3)
        return ops.matmul(inputs, kernel) + self.bias


class LeakyRectifier(layers.ReLU):
    def call(self, inputs: Any) -> Any:
        return super().call(inputs) + 0.1 * inputs


class HalfDropout(layers.Dropout):
    def call(self, inputs: Any, training: Any = False) -> Any:
        return super().call(inputs * 0.5, training=training)


class ScaledNorm(layers.LayerNormalization):
    def call(self, inputs: Any) -> Any:
        return super().call(inputs) * 2.0


class InnerNorm(layers.Layer):
    """Calls batch norm in evaluation, whatever it does itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalization()

    def build(self, shape: Any) -> None:
        self.norm.build(shape)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.norm(x, training=False)


class InnerDropout(layers.Layer):
    """Calls dropout in training, whatever it does itself, or as it is called."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.drop = always, layers.Dropout(0.4)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.drop(x, training=True if self.always else training)


class Twice(layers.Layer):
    """One layer of weights for two products, the second one with the kernel turned round."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned

    def build(self, shape: Any) -> None:
        self.inner = layers.Dense(shape[-1])
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        y = ops.relu(self.inner(x))
        return ops.matmul(y, ops.transpose(self.inner.kernel)) if self.turned else self.inner(y)


class Mixed(layers.Layer):
    """Several weights that meet before the input."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def build(self, shape: Any) -> None:
        size = shape[-1]
        self.both = [self.add_weight(shape=(size, size), name=f"part_{at}") for at in range(2)]
        self.scale = self.add_weight(shape=(), name="scale", initializer="ones")

    def call(self, x: Any) -> Any:
        one, other = self.both
        if self.way == "sum":
            return ops.matmul(x, one + other * self.scale)
        if self.way == "product":
            return ops.matmul(x, ops.matmul(one, other)) * self.scale
        if self.way == "stopped":
            return ops.matmul(x, one + ops.stop_gradient(other)) * ops.stop_gradient(self.scale)
        return ops.matmul(x, ops.concatenate([one[:, :1], other[:, 1:]], 1)) + self.scale


class Frozen(layers.Layer):
    """Inner layers that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalization(trainable=False)

    def build(self, shape: Any) -> None:
        self.inner = layers.Dense(shape[-1], trainable=False)
        self.inner.build(shape)
        self.norm.build(shape)

    def call(self, x: Any) -> Any:
        return self.norm(self.inner(x))


def patched(layer: Any, shape: Shape, factor: float) -> Any:
    """An object whose `call` is its own."""
    layer.build((None, *shape))
    original = layer.call
    layer.call = lambda inputs, training=None: original(inputs) * factor
    return layer


Reversed, Signed = of("Reversed", reversed_), of("Signed", signed)
OwnRelu = of("OwnRelu", relu_of_its_own)
Detached = of("Detached", lambda x: x + ops.stop_gradient(ops.tanh(x)))
StraightThrough = of("StraightThrough", lambda x: x + ops.stop_gradient(ops.round(x * 4) / 4 - x))
Damped = weighted("Damped", lambda x, w: damped_product(x, w + 0.0))
SignedWeight = weighted("SignedWeight", lambda x, w: x * signed(ops.convert_to_tensor(w) + 0.0))
SignedVariable = weighted("SignedVariable", lambda x, w: x * signed(w) + x * w)
SoftmaxWeight = weighted("SoftmaxWeight", lambda x, w: x * ops.softmax(w))
SquaredWeight = weighted("SquaredWeight", lambda x, w: x * ops.square(w) + ops.exp(w))
StoppedWeight = weighted("StoppedWeight", lambda x, w: x * w + ops.stop_gradient(w))
SummedWeight = weighted("SummedWeight", lambda x, w: x * w * ops.stop_gradient(ops.sum(w)))
RepeatedWeight = weighted(
    "RepeatedWeight", lambda x, w: x + ops.broadcast_to(ops.reshape(w, (1,) * (len(x.shape) - 1) + (-1,)), ops.shape(x))
)
Divided = of("Divided", lambda x: x / ops.shape(x)[0])
Root = of("Root", lambda x: x / float(ops.shape(x)[0]) ** 0.5)
Large = of("Large", lambda x: x * 2.0 if ops.shape(x)[0] > 100 else x)
Small = of("Small", lambda x: x * 2.0 if ops.shape(x)[0] < 6 else x)
Even = of("Even", lambda x: x * 2.0 if ops.shape(x)[0] % 2 == 0 else x)
Seventh = of("Seventh", lambda x: x * 2.0 if ops.shape(x)[0] % 7 == 0 else x)
Fifth = of("Fifth", lambda x: x * 2.0 if ops.shape(x)[0] % 5 == 0 else x)
ThirtySecond = of("ThirtySecond", lambda x: x * 2.0 if ops.shape(x)[0] % 32 == 0 else x)
OneSize = of("OneSize", lambda x: x * 2.0 if ops.shape(x)[0] == 130 else x)
Window = of("Window", lambda x: x * 2.0 if 100 < x.shape[0] < 200 else x)
InTable = of("InTable", lambda x: x * {7: 2.0, 130: 0.5}.get(x.shape[0], 1.0))
HalfSize = of("HalfSize", lambda x: x * 2.0 if 0.5 * x.shape[0] == 65 else x)
OfItsClass = of("OfItsClass", lambda x: x * 2.0 if type(x.shape[0]) is int and x.shape[0] == 130 else x)
AskedInVain = of("AskedInVain", lambda x: x * (1.0 if ops.shape(x)[0] in (7, 130) else 1.0))
SmallRoot = of(
    "SmallRoot",
    lambda x: (x * 1e-3) * ops.rsqrt(ops.mean(ops.square(x * 1e-3), -1, keepdims=True) + 1e-6),
)
SmallFloor = of("SmallFloor", lambda x: ops.log(ops.maximum(x * 1e-3, 1e-6)) / 10.0)
SmallLogarithm = of("SmallLogarithm", lambda x: ops.log(ops.relu(x * 1e-3) + 1e-5) / 10.0)
Centered = of("Centered", lambda x: x - ops.mean(x, 0, keepdims=True))
Folded = of("Folded", lambda x: ops.reshape(ops.reshape(x, (-1, x.shape[-1])) * 2.0, (-1, *x.shape[1:])))
Doubled = phased("Doubled", lambda x, training, seed: x * 2.0 if training else x)
Branching = phased("Branching", lambda x, training, seed: x * (2.0 if training else 3.0))
Noisy = phased("Noisy", lambda x, training, seed: x + keras.random.normal(ops.shape(x), seed=seed) if training else x)
NoisyScale = phased(
    "NoisyScale", lambda x, training, seed: (x + keras.random.normal(ops.shape(x), seed=seed) if training else x) * 3.0
)
Dropping = phased("Dropping", lambda x, training, seed: keras.random.dropout(x, 0.3, seed=seed) if training else x)
AlwaysDropping = phased("AlwaysDropping", lambda x, training, seed: keras.random.dropout(x, 0.3, seed=seed))
DroppingScale = phased(
    "DroppingScale", lambda x, training, seed: 2.0 * (keras.random.dropout(x, 0.3, seed=seed) if training else x)
)
Ignoring = phased("Ignoring", lambda x, training, seed: x * 1.5)
RunningMean, Counted, Observed = (
    stateful("RunningMean", running_mean),
    stateful("Counted", counted),
    stateful("Observed", observed),
)

Piece = Callable[[random.Random, Shape], Any]
# Ordinary layers by the rank of an example; they keep the rank.
PLAIN: dict[int, list[Piece]] = {
    1: [
        lambda r, s: layers.Dense(r.choice((4, 6)), activation=r.choice((None, "relu", "tanh", "swish"))),
        lambda r, s: layers.BatchNormalization(),
        lambda r, s: layers.LayerNormalization(),
        lambda r, s: layers.Dropout(0.25),
        lambda r, s: layers.Activation(r.choice(("relu", "sigmoid", "gelu"))),
    ],
    2: [
        lambda r, s: layers.Dense(r.choice((4, 6)), activation=r.choice((None, "relu"))),
        lambda r, s: layers.Conv1D(4, 3, padding="same", activation="relu"),
        lambda r, s: layers.LayerNormalization(),
        lambda r, s: layers.GRU(4, return_sequences=True),
        lambda r, s: layers.SpatialDropout1D(0.25),
    ],
    3: [
        lambda r, s: layers.Conv2D(4, 3, padding="same", activation=r.choice((None, "relu"))),
        lambda r, s: layers.DepthwiseConv2D(3, padding="same"),
        lambda r, s: layers.BatchNormalization(),
        lambda r, s: layers.AveragePooling2D(2, padding="same"),
        lambda r, s: layers.ReLU(6.0),
    ],
}
_SIMPLE = {kind.__name__: kind for kind in (
    Reversed, Signed, OwnRelu, Detached, StraightThrough, Damped, SignedWeight, SignedVariable, SoftmaxWeight,
    SquaredWeight, StoppedWeight, SummedWeight, RepeatedWeight, Divided, Root, Large, Small, Even, Seventh, Centered,
    OneSize, Window, InTable, HalfSize, OfItsClass, AskedInVain, SmallRoot, SmallFloor, SmallLogarithm,
    Folded, Doubled, Noisy, NoisyScale, Dropping, AlwaysDropping, DroppingScale, Ignoring, RunningMean, Counted,
    Branching, Observed, OtherMoments, ShiftedNorm, EvaluatedNorm, LeakyRectifier, InnerNorm, Frozen,
)}  # fmt: skip
TROUBLE: dict[str, Piece] = {name: lambda r, s, kind=kind: kind() for name, kind in _SIMPLE.items()}
TROUBLE |= {
    "AbsoluteKernel": lambda r, s: AbsoluteKernel(4),
    "RectifiedDense": lambda r, s: RectifiedDense(4),
    "NormalizedDense": lambda r, s: NormalizedDense(4),
    "ScaledNorm": lambda r, s: ScaledNorm(),
    "HalfDropout": lambda r, s: HalfDropout(0.3),
    "InnerDropout": lambda r, s: InnerDropout(r.random() < 0.5),
    "Twice": lambda r, s: Twice(r.random() < 0.5),
    "Mixed": lambda r, s: Mixed(r.choice(("sum", "product", "stopped", "joined"))),
    "patched": lambda r, s: patched(layers.Dense(4), s, 3.0),
    "noise": lambda r, s: r.choice((layers.GaussianNoise, layers.GaussianDropout, layers.AlphaDropout))(0.2),
    "BatchNormalization(trainable=False)": lambda r, s: layers.BatchNormalization(trainable=False),
}
OF_SEQUENCES: dict[str, Piece] = {
    "LSTM(dropout)": lambda r, s: layers.LSTM(4, dropout=0.3, return_sequences=True),
    "GRU(recurrent_dropout)": lambda r, s: layers.GRU(4, recurrent_dropout=0.3, return_sequences=True),
    "TimeDistributed": lambda r, s: layers.TimeDistributed(r.choice((SoftmaxWeight, Reversed, Noisy))()),
    "Attention(dropout)": lambda r, s: Attended(layers.Attention(dropout=0.4)),
    "AdditiveAttention": lambda r, s: Attended(layers.AdditiveAttention()),
    "MultiHeadAttention(dropout)": lambda r, s: Attended(layers.MultiHeadAttention(2, 3, dropout=0.3), two=True),
    "MultiHeadAttention": lambda r, s: Attended(layers.MultiHeadAttention(2, 3), two=True),
}
OF_IMAGES: dict[str, Piece] = {
    "HalfConvolution": lambda r, s: HalfConvolution(4, 3, padding="same"),
    "SpatialDropout2D": lambda r, s: layers.SpatialDropout2D(0.3),
}


class Attended(layers.Layer):
    """Attention of a sequence to itself."""

    def __init__(self, inner: Any, two: bool = False) -> None:
        super().__init__()
        self.inner, self.two = inner, two

    def build(self, shape: Any) -> None:
        self.inner.build(shape, shape) if self.two else self.inner.build([shape, shape])

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, x: Any, training: Any = None) -> Any:
        operands = (x, x) if self.two else ([x, x],)
        return x + self.inner(*operands, training=training)


class Chain(keras.Model):
    """A subclassed model; way: what it does otherwise than to call its layers."""

    def __init__(self, parts: Sequence[Any], way: str) -> None:
        super().__init__()
        self.parts, self.way = list(parts), way

    def call(self, x: Any, training: Any = None) -> Any:
        for at, part in enumerate(self.parts):
            x = part(x)
            if at == 0 and self.way == "branch" and training:
                x = x * 2.0
            if at == 0 and self.way == "stopped":
                x = x + ops.stop_gradient(ops.relu(x))
        return x


def drawn(seed: int) -> tuple[Shape, str, list[str], random.Random]:
    """The input's shape, the way it is built, names of what makes trouble, and what draws the rest."""
    r = random.Random(seed)
    shape: Shape = r.choice(((6,), (6,), (5, 6), (8, 8, 3)))
    pool = [*TROUBLE] * 2 + [*(OF_SEQUENCES if len(shape) == 2 else OF_IMAGES if len(shape) == 3 else ())] * 4
    way = r.choice(("sequential", "sequential", "functional", "nested", "subclassed", "branch", "stopped", "off"))
    return shape, way, r.sample(pool, r.randint(1, 3)), r


def built(seed: int) -> tuple[Any, Shape]:
    """The model, the same from the same seed, and its input's shape."""
    shape, way, names, r = drawn(seed)
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    plan: list[Piece] = [r.choice(PLAIN[len(shape)]) for _ in range(r.randint(1, 3))]
    every = TROUBLE | OF_SEQUENCES | OF_IMAGES
    for name in names:
        plan.insert(r.randint(0, len(plan)), every[name])
    x = start = keras.Input(shape)
    parts: list[Any] = []
    for piece in plan:
        part = piece(r, tuple(x.shape[1:]))
        parts.append(part)
        y = part(x)
        x = y + x if way == "functional" and y.shape == x.shape and r.random() < 0.5 else y
    if r.random() < 0.5:
        x = layers.Dense(3)(layers.Flatten()(x))
    whole = keras.Model(start, x)
    if way in ("functional", "sequential") or len(parts) < 2:
        return whole, shape
    if way == "nested":
        outer = keras.Input(shape)
        return keras.Model(outer, keras.Sequential([whole])(outer)), shape
    if way == "off":
        outer = keras.Input(shape)
        return keras.Model(outer, whole(outer, training=False)), shape
    model = Chain(parts, way)
    model(np.zeros((2, *shape), np.float32))
    return model, shape


# --- both sides -------------------------------------------------------------------------------------------------------


def settled() -> None:
    """Dropout keeps all values, other random numbers are constant, for good."""
    from keras.src.backend import random as drawing

    drawing.dropout = lambda inputs, rate, noise_shape=None, seed=None: inputs / (1 - rate)
    for name in ("normal", "uniform", "truncated_normal"):
        setattr(drawing, name, lambda shape, *a, dtype=None, **k: ops.full(tuple(shape), 0.3, dtype or "float32"))


def trained(call: Callable[..., Any], variables: dict[str, Any], shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Evaluations, two steps of plain SGD, evaluations. variables: those that are trained, by name."""
    import torch

    rng = np.random.default_rng(seed)

    def batch(rows: int) -> Any:
        return ops.convert_to_tensor(rng.standard_normal((rows, *shape)).astype(np.float32))

    history: dict[str, np.ndarray] = {}

    def evaluate(word: str) -> None:
        for rows in (1, 7, 130):
            with torch.no_grad():
                history[f"{word}, {rows}"] = ops.convert_to_numpy(call(batch(rows), False))

    evaluate("before")
    for number, rows in enumerate(EXAMPLES):
        x = batch(rows).requires_grad_()
        with torch.enable_grad():
            y = call(x, True)
            total = (y * ops.convert_to_tensor(rng.standard_normal(tuple(y.shape)).astype(np.float32))).sum()
        leaves = [variable.value for variable in variables.values()]
        grown = [leaf for leaf in (x, *leaves) if leaf.requires_grad]
        gradients = torch.autograd.grad(total, grown, allow_unused=True) if total.requires_grad else [None] * len(grown)
        by_leaf = {id(leaf): gradient for leaf, gradient in zip(grown, gradients, strict=True)}
        history[f"result {number}"] = ops.convert_to_numpy(y)
        for name, leaf in (("the input", x), *zip(variables, leaves, strict=True)):
            gradient = by_leaf.get(id(leaf))
            history[f"gradient of {name} {number}"] = (
                np.zeros(tuple(leaf.shape), np.float32) if gradient is None else ops.convert_to_numpy(gradient)
            )
        # Steps of one length: some of these models have gradients with which plain descent runs into infinity.
        length = max([float(np.abs(history[f"gradient of {name} {number}"]).max()) for name in variables] + [1.0])
        for name, variable in variables.items():
            step = np.float32(0.05 / length) * history[f"gradient of {name} {number}"]
            variable.assign(variable.value.detach() - ops.convert_to_tensor(step))
    evaluate("after")
    return history


def of_original(seed: int, draw: int, moved: bool = False) -> dict[str, np.ndarray]:
    """moved: from weights that are 2**-20 larger or smaller, to see what rounding does."""
    from exactqat.qat.capture.keras.model import variable_names

    model, shape = built(seed)
    names = variable_names(model)
    variables = {names[id(variable)]: variable for variable in model.trainable_variables}
    signs = np.random.default_rng(draw)
    for variable in variables.values() if moved else ():
        value = ops.convert_to_numpy(variable.value)
        variable.assign(value * (1 + 2.0**-20 * signs.choice((-1.0, 1.0), value.shape)).astype(np.float32))
    results = trained(lambda x, training: model(x, training=training), variables, shape, draw)
    state = {names[id(variable)]: variable for variable in model.non_trainable_variables if "seed" not in variable.path}
    return results | {f"state {name}": ops.convert_to_numpy(variable.value) for name, variable in state.items()}


def of_prepared(prepared: Any, shape: Shape, draw: int) -> dict[str, np.ndarray]:
    from exactqat.qat.train.core.arrays import Mode

    held = prepared._held.variables
    variables = {name: variable for name, variable in held.tensors.items() if variable.trainable}

    def call(x: Any, training: bool) -> Any:
        return prepared._run(x, Mode(training=training, quantizing=False))

    results = trained(call, variables, shape, draw)
    others = {name: variable for name, variable in held.tensors.items() if name not in variables}
    return results | {f"state {name}": ops.convert_to_numpy(variable.value) for name, variable in others.items()}


def differs(
    ours: dict[str, np.ndarray],
    theirs: dict[str, np.ndarray],
    start: dict[str, np.ndarray],
    moved: dict[str, np.ndarray] | None = None,
) -> str:
    """Where the prepared model is another one; empty where it is not. moved: the original's, after a small move."""
    largest = max([float(np.abs(value).max()) for name, value in ours.items() if "gradient" in name] + [1e-6])
    for name, value in ours.items():
        other = theirs.get(name)
        if other is None:
            if "gradient" in name and not value.any():
                continue
            if "state" in name and np.array_equal(value, start[name.removeprefix("state ")]):
                continue
            return f"{name} is missing"
        if value.shape != other.shape:
            return f"{name} has shape {other.shape} instead of {value.shape}"
        scale = max(float(np.abs(value).max()), 1e-3 * largest if "gradient" in name else 1e-3)
        error = float(np.abs(value - other).max()) / scale
        noise = 0.0 if moved is None else float(np.abs(value - moved[name]).max()) / scale
        if not error <= max(2e-3, 16 * noise) and not np.array_equal(value, other, equal_nan=True):
            return f"{name} differs by {error:.2g}"
    return ""


def outcome(seed: int, check: bool = True) -> tuple[str, str]:
    """(kept, refused, differing, died or illegal; why)."""
    from exactqat import qat
    from exactqat.qat.capture.keras.model import variable_names

    try:
        model, shape = built(seed)
        of_original(seed, seed)
    except Exception as error:
        return "illegal", f"{type(error).__name__}: {error}"
    reasons = []
    # What rounding turns in one run (a ReLU near zero) it does not turn in the next.
    for draw in (seed, seed + 100_000, seed + 200_000):
        model, shape = built(seed)
        example = np.zeros((4, *shape), np.float32)
        names = variable_names(model)
        start = {names[id(variable)]: ops.convert_to_numpy(variable.value) for variable in model.variables}
        try:
            prepared = qat.keras.prepare(model, example=example, check=check)
            for variable in model.variables:
                if "seed" not in variable.path and not np.array_equal(
                    ops.convert_to_numpy(variable.value), start[names[id(variable)]]
                ):
                    return "differing", f"prepare changed the model's own '{variable.path}'"
            theirs = of_prepared(prepared, shape, draw)
        except qat.UnsupportedOperator as refusal:
            return "refused", str(refusal)
        except Exception as error:
            return "died", f"{type(error).__name__}: {error}"
        ours = of_original(seed, draw)
        reasons.append(differs(ours, theirs, start))
        if reasons[-1]:
            reasons[-1] = differs(ours, theirs, start, of_original(seed, draw, moved=True))
        if not reasons[-1]:
            return "kept", ""
    return "differing", reasons[0]


def kind_of(refusal: str) -> str:
    """Who refused: the self-check, the size of the batch, or the operators that are missing."""
    if "the captured network is not the model" in refusal:
        return "by the self-check"
    for words in ("computes with the size of the batch", "mixes the examples", "in training than in evaluation"):
        if words in refusal:
            return words
    for words in ("changes its weight", "draws random numbers", "training=True in evaluation", "drops values in"):
        if words in refusal:
            return words
    return "other"


# What a model may do without being refused, as it was decided (docs/decisions/one-front.md): a size is not an int, and
# cannot know that it is asked for its class.
DECIDED = {"OfItsClass"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", type=int)
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    settled()
    if options.one is not None:
        print(*drawn(options.one)[:3], *outcome(options.one, not options.no_check), sep="\n")
        return 0
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    pieces: dict[str, collections.Counter[str]] = {}
    for seed in range(options.seed, options.seed + options.count):
        word, reason = outcome(seed, not options.no_check)
        if word == "differing" and DECIDED.intersection(drawn(seed)[2]):
            word = "as decided"
        counts[word] += 1
        for name in drawn(seed)[2]:
            pieces.setdefault(name, collections.Counter())[word] += 1
        if word == "refused":
            reasons[kind_of(reason)] += 1
        if word not in ("kept", "refused") or kind_of(reason) == "by the self-check":
            print(seed, word, *drawn(seed)[1:3], " ".join(reason.split())[:300], flush=True)
        if seed % 20 == 19:
            print(f"... {seed}: {dict(counts)}", flush=True)
    for name, outcomes in sorted(pieces.items()):
        print(f"{name:36}", dict(outcomes))
    print(f"refused: {dict(reasons)}")
    print(f"{options.count} models: {dict(counts)}")
    return int(bool(counts["differing"] or counts["died"]))


if __name__ == "__main__":
    raise SystemExit(main())
