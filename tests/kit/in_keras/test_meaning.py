# SPDX-License-Identifier: Apache-2.0
"""The network that trains is the user's own, or it is refused: models that once trained as others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from fuzz_meaning_keras import (
    AbsoluteKernel,
    AlwaysDropping,
    Attended,
    Branching,
    Counted,
    Damped,
    Divided,
    Doubled,
    DroppingScale,
    EvaluatedNorm,
    Even,
    Fifth,
    HalfConvolution,
    Large,
    Mixed,
    Noisy,
    NoisyScale,
    Observed,
    OtherMoments,
    RectifiedDense,
    RepeatedWeight,
    Reversed,
    RunningMean,
    Seventh,
    ShiftedNorm,
    SignedWeight,
    Small,
    SoftmaxWeight,
    StoppedWeight,
    SummedWeight,
    ThirtySecond,
    of,
    patched,
)
from keras import layers

from exactqat import qat

pytestmark = pytest.mark.slow


@keras.ops.custom_gradient
def opposed(x: Any) -> Any:
    """tanh, whose gradient is turned round."""

    def gradient(*args: Any, upstream: Any = None) -> Any:
        return -(args[0] if upstream is None else upstream)

    return keras.ops.tanh(x), gradient


X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)


def around(*parts: Any, shape: tuple[int, ...] = (6,)) -> Any:
    return keras.Sequential([keras.Input(shape), *parts])


class Placed(layers.Layer):
    """An embedding of fixed places, as vision transformers add them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(4, 4)

    def call(self, x: Any) -> Any:
        return x + keras.ops.sum(self.table(np.array([[3, 0, 2]])), 1)


class LearnedRow(layers.Layer):
    """A row of weights beside the input's, as class tokens are; the sum has a constant on its left."""

    def build(self, shape: Any) -> None:
        self.row = self.add_weight(shape=(1, shape[-1]), name="row")

    def call(self, x: Any) -> Any:
        row = keras.ops.zeros((1, x.shape[-1])) + self.row
        return keras.ops.concatenate([x, keras.ops.zeros_like(x[:, :1]) + row, x], axis=1)


KEPT: dict[str, Callable[[], Any]] = {
    "a learned row among columns": lambda: around(LearnedRow(), layers.Dense(2)),
    "softmax of a weight": lambda: around(SoftmaxWeight()),
    "a weight without gradient": lambda: around(StoppedWeight()),
    "a sum of a weight without gradient": lambda: around(SummedWeight()),
    "a weight for every example": lambda: around(RepeatedWeight()),
    "weights that meet": lambda: around(Mixed("product")),
    "twice as much in training": lambda: around(layers.Dense(4), Doubled()),
    "noise in training": lambda: around(layers.Dense(4), Noisy()),
    "a kernel of its own": lambda: around(AbsoluteKernel(3)),
    "a convolution of its own": lambda: around(HalfConvolution(2, 3), shape=(8, 8, 3)),
    "a call around batch norm's": lambda: around(layers.Dense(4), ShiftedNorm()),
    "batch norm in evaluation": lambda: around(layers.Dense(4), EvaluatedNorm()),
    "a call around dense": lambda: around(RectifiedDense(4)),
    "an object's own call": lambda: around(patched(layers.Dense(4), (6,), 3.0)),
    "attention with dropout": lambda: around(Attended(layers.Attention(dropout=0.5)), shape=(5, 6)),
    "additive attention": lambda: around(Attended(layers.AdditiveAttention()), shape=(5, 6)),
    "heads with dropout": lambda: around(
        Attended(layers.MultiHeadAttention(2, 3, dropout=0.5), two=True), shape=(5, 6)
    ),
    "a size that is the stand-in": lambda: around(layers.RepeatVector(1009), layers.Dense(2)),
    "an epsilon under a root": lambda: around(
        of("Root", lambda x: x * keras.ops.rsqrt(keras.ops.mean(keras.ops.square(x), -1, keepdims=True) + 1e-6))()
    ),
    "a floor under a logarithm": lambda: around(of("Floor", lambda x: keras.ops.log(keras.ops.maximum(x, 1e-6)))()),
    "places of learned rows": lambda: around(layers.Dense(4), Placed()),
    "entries of an axis": lambda: around(
        of("Unstacked", lambda x: keras.ops.unstack(x, axis=1)[2] * 2)(), shape=(5, 6)
    ),
    "an axis turned round and round": lambda: around(
        of("Rolled", lambda x: keras.ops.roll(x, (1, -2), (1, 2)))(), layers.Dense(3), shape=(5, 6)
    ),
    "sums along an axis": lambda: around(
        of("Summed", lambda x: keras.ops.cumsum(x, axis=1))(), layers.Dense(3), shape=(5, 6)
    ),
    "frequencies": lambda: around(
        of("Real", lambda x: keras.ops.fft2((x, keras.ops.zeros_like(x)))[0])(), layers.Dense(3), shape=(5, 6)
    ),
    "frequencies of frequencies": lambda: around(
        of("Twice", lambda x: sum(keras.ops.fft(keras.ops.fft2((x, keras.ops.zeros_like(x))))))(), shape=(5, 6)
    ),
    "an uneven pool": lambda: around(layers.AveragePooling2D(3, 2, padding="same"), shape=(6, 6, 2)),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    proof = qat.keras.prepare(KEPT[name]()).proof
    assert proof is not None and not proof.not_run and proof.seconds > 0
    assert len([trial for trial in proof.trials if not trial.results_only]) == 5


NOT_THE_MODEL = "the captured network is not the model"
ON_JAX = keras.backend.backend() == "jax"
# JAX calls no function with a gradient of its own on symbols.
OTHER_GRADIENT = "computes by other means than keras.ops" if ON_JAX else "gradient of"
# The model, and what is said.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "divided by the batch": (lambda: around(Divided()), "size of the batch"),
    "a branch on a large batch": (lambda: around(Large()), "size of the batch"),
    "a branch on an even batch": (lambda: around(Even()), "size of the batch"),
    "a branch on a batch of sevens": (lambda: around(Seventh()), "size of the batch"),
    "a branch on a batch of fives": (lambda: around(Fifth()), "size of the batch"),
    "a branch on a batch of 32": (lambda: around(ThirtySecond()), "size of the batch"),
    "a branch on a small batch": (lambda: around(Small()), "size of the batch"),
    "a branch of training": (
        lambda: around(Branching()),
        f"{NOT_THE_MODEL}: in training.*compute in training what",
    ),
    "a gradient of its own": (
        lambda: around(of("Own", lambda x: opposed(x))(), layers.Dense(3)),
        OTHER_GRADIENT if ON_JAX else "gradient of 'input 0'.*keras.ops.custom_gradient",
    ),
    "noise and more": (lambda: around(NoisyScale()), f"{NOT_THE_MODEL}: in training"),
    "dropout by keras.random": (lambda: around(DroppingScale()), f"{NOT_THE_MODEL}: in training"),
    "dropout in evaluation": (lambda: around(AlwaysDropping()), "in evaluation, too"),
    "a running mean": (lambda: around(RunningMean()), f"{NOT_THE_MODEL}: in training"),
    "a counter": (lambda: around(Counted()), "it changes its weight 'own'"),
    "a record": (lambda: around(Observed()), f"{NOT_THE_MODEL}: in training"),
    "a gradient that is turned round": (
        lambda: around(layers.Dense(4), Reversed(), layers.Dense(2)),
        OTHER_GRADIENT,
    ),
    "a gradient of two operands": (lambda: around(Damped(), layers.Dense(2)), OTHER_GRADIENT),
    "a sign with a gradient, of a weight": (lambda: around(SignedWeight()), OTHER_GRADIENT),
    "moments of its own": (lambda: around(layers.Dense(4), OtherMoments()), NOT_THE_MODEL),
}


BY_SIZE = {16: 2.0}
ASKED: dict[str, Callable[[Any], Any]] = {
    "one size": lambda examples: examples == 16,
    "a window": lambda examples: 10 < examples < 20,
    "two sizes": lambda examples: examples in (5, 16),
    "a dictionary": lambda examples: BY_SIZE.get(examples, 1.0) == 2,
    "nines": lambda examples: examples % 9 == 0,
    "a sum": lambda examples: examples + 1,
    "a root": lambda examples: examples**0.5,
    "a number": lambda examples: float(examples) + int(examples),
}


def skip_where_keras_builds_no_model(name: str) -> None:
    names = ("a window", "a root", "a number", "a branch on a large batch", "a branch on a small batch")
    if ON_JAX and name in names:
        pytest.skip("Keras on JAX builds no such model: its size of the batch has no value and no order")


@pytest.mark.parametrize("name", ASKED)
def test_what_is_decided_or_computed_by_the_size_of_the_batch_is_refused(name: str) -> None:
    skip_where_keras_builds_no_model(name)
    asks = ASKED[name]
    for sizes in (keras.ops.shape, lambda x: x.shape):
        layer = of("Asking", lambda x, sizes=sizes: x * (2.0 if asks(sizes(x)[0]) else 1.0))
        with pytest.raises(qat.UnsupportedOperator, match=r"asking.*size of the batch"):
            qat.keras.prepare(around(layer()))


def test_shapes_made_of_the_size_of_the_batch_are_kept() -> None:
    def folded(x: Any) -> Any:
        batch, length, size = keras.ops.shape(x)
        rows = keras.ops.reshape(x, (batch * length, size)) * 2.0
        places = keras.ops.broadcast_to(keras.ops.arange(size, dtype="float32"), (batch, length, size))
        return keras.ops.reshape(rows, (-1, length, size)) + places + keras.ops.ones((batch, 1, size))

    proof = qat.keras.prepare(around(of("Folded", folded)(), shape=(5, 6))).proof
    assert proof is not None and not proof.refusal and len(proof.trials) >= 5


class DoubledSoftmax(layers.Softmax):
    def call(self, x: Any, mask: Any = None) -> Any:
        return super().call(x * 2.0, mask=mask) * 3.0


class Counting(layers.Layer):
    calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x * (1.0 + self.calls)


def test_a_call_around_softmax_is_kept() -> None:
    prepared = qat.keras.prepare(around(layers.Dense(4), DoubledSoftmax(), layers.Dense(2)))
    assert not prepared.proof.refusal and prepared.proof.trials


def test_what_differs_at_each_call_is_refused() -> None:
    # Compiled, it differs at each compilation.
    words = NOT_THE_MODEL if ON_JAX else "each time it is called"
    with pytest.raises(qat.UnsupportedOperator, match=words):
        qat.keras.prepare(around(Counting(), layers.Dense(2)))


def test_half_precision_is_named() -> None:
    policy = keras.mixed_precision.DTypePolicy("mixed_bfloat16")
    with pytest.warns(qat.HalfPrecisionWarning, match="computes in bfloat16 in part"):
        qat.keras.prepare(around(layers.Dense(4, dtype=policy)))


def test_layers_that_write_into_their_input_are_compared_in_training() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", qat.NotComparedWarning)
        proof = qat.keras.prepare(around(layers.RandomBrightness(0.2), layers.Flatten(), shape=(4, 4, 3))).proof
    assert proof is not None and not proof.not_run


@pytest.mark.skipif(ON_JAX, reason="JAX calls layers with symbols only, which this one cannot tell from Keras'")
def test_what_others_say_is_quoted_without_colors() -> None:
    class Raising(layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            if training and "meta" not in str(getattr(x, "device", "meta")):
                raise ValueError("\x1b[1mnot\x1b[0m in training")
            return x

    with pytest.warns(qat.NotComparedWarning, match="raises ValueError: not in training"):
        qat.keras.prepare(around(Raising(), layers.Dense(2)))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    skip_where_keras_builds_no_model(name)
    model, words = REFUSED[name]
    with pytest.raises(qat.UnsupportedOperator, match=words):
        qat.keras.prepare(model())


def test_nothing_of_the_model_changes() -> None:
    model = around(layers.Dense(4), Noisy(), layers.BatchNormalization(), RunningMean())
    model(X, training=True)
    before = [keras.ops.convert_to_numpy(variable.value).copy() for variable in model.variables]
    with pytest.raises(qat.UnsupportedOperator):
        qat.keras.prepare(model)
    model.pop()
    qat.keras.prepare(model)
    for variable, value in zip(model.variables, before, strict=False):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable.value), value, variable.path)


def test_named_losses() -> None:
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [layers.Dense(3, name="a")(inputs), layers.Dense(2, name="b")(inputs)])
    prepared = qat.keras.prepare(model)
    qat.keras.calibrate(prepared, [X])
    prepared.compile("sgd", loss={"a": "mse", "b": "mae"})
    targets = {"a": np.zeros((8, 3), np.float32), "b": np.zeros((8, 2), np.float32)}
    assert np.isfinite(prepared.fit(X, targets, verbose=0).history["loss"]).all()


class OwnStep(keras.Model):
    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


def test_steps_of_its_own_are_not_left_out_without_a_word() -> None:
    inputs = keras.Input((6,))
    with pytest.warns(UserWarning, match="OwnStep has its own train_step"):
        prepared = qat.keras.prepare(OwnStep(inputs, layers.Dense(2)(inputs)))
    qat.keras.calibrate(prepared, [X])
    prepared.compile("sgd", "mse")
    assert np.isfinite(prepared.evaluate(X, np.zeros((8, 2), np.float32), verbose=0))
    with pytest.raises(NotImplementedError, match="OwnStep has its own train_step"):
        prepared.fit(X, np.zeros((8, 2), np.float32), verbose=0)


class OwnFunction(keras.Model):
    def make_train_function(self, force: bool = False) -> Any:
        return super().make_train_function(force)


class OwnFit(keras.Model):
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit(*args, **kwargs)


@pytest.mark.parametrize(("kind", "name"), [(OwnFunction, "make_train_function"), (OwnFit, "fit")])
def test_a_loop_of_its_own_is_not_left_out_without_a_word(kind: Any, name: str) -> None:
    inputs = keras.Input((6,))
    with pytest.warns(UserWarning, match=f"has its own {name}"):
        prepared = qat.keras.prepare(kind(inputs, layers.Dense(2)(inputs)))
    qat.keras.calibrate(prepared, [X])
    prepared.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match=f"has its own {name}"):
        prepared.fit(X, np.zeros((8, 2), np.float32), verbose=0)


class TrainingLoss(layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(keras.ops.mean(x))
        return x


def test_a_loss_of_training_alone_is_not_left_out_without_a_word() -> None:
    with pytest.warns(UserWarning, match="left out: .*training_loss"):
        prepared = qat.keras.prepare(around(layers.Dense(4), TrainingLoss(name="training_loss")))
    assert len(prepared.losses_left_out) == 1


def test_layers_made_trainable_after_prepare() -> None:
    base = around(layers.Dense(4))
    base.trainable = False
    prepared = qat.keras.prepare(around(base, layers.Dense(2)))
    qat.keras.calibrate(prepared, [X])
    prepared.compile("sgd", "mse")
    assert len(prepared.trainable_variables) == 2
    base.trainable = True
    with pytest.raises(ValueError, match="compile it"):
        prepared.fit(X, np.zeros((8, 2), np.float32), verbose=0)
    prepared.compile("sgd", "mse")
    assert len(prepared.trainable_variables) == 4
    prepared.fit(X, np.zeros((8, 2), np.float32), verbose=0)
    base.trainable = False
    with pytest.raises(ValueError, match="compile it"):
        prepared.fit(X, np.zeros((8, 2), np.float32), verbose=0)
    norm = layers.BatchNormalization(trainable=False)
    prepared = qat.keras.prepare(around(layers.Dense(4), norm))
    norm.trainable = True
    with pytest.raises(ValueError, match="prepare the model again"):
        prepared.compile("sgd", "mse")


def test_a_step_that_fails_loses_no_weights() -> None:
    prepared = qat.keras.prepare(around(layers.Dense(4), layers.Dense(2)))
    qat.keras.calibrate(prepared, [X])
    prepared.compile("sgd", "mse")
    prepared.fit(X, np.zeros((8, 2), np.float32), verbose=0)
    before = [keras.ops.convert_to_numpy(variable).copy() for variable in prepared.trainable_variables]
    for x, y in ((X[:, :3], np.zeros((8, 2), np.float32)), (X, np.zeros((8, 5), np.float32))):
        with pytest.raises(Exception):  # noqa: B017
            prepared.fit(x, y, verbose=0)
        after = map(keras.ops.convert_to_numpy, prepared.trainable_variables)
        assert all(map(np.array_equal, before, after))
    prepared.fit(X, np.zeros((8, 2), np.float32), verbose=0)


def test_refused_calls(tmp_path: Path) -> None:
    model = around(layers.Dense(2))
    prepared = qat.keras.prepare(model)
    if keras.backend.backend() == "torch":
        with pytest.raises(ValueError, match="jit_compile=True"):
            prepared.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(NotImplementedError, match="write_tflite"):
        prepared.export(tmp_path / "model")
    model.save_weights(tmp_path / "float.weights.h5")
    with pytest.raises(ValueError, match="before it is prepared"):
        prepared.load_weights(tmp_path / "float.weights.h5")


def test_without_the_check() -> None:
    prepared = qat.keras.prepare(around(layers.Dense(2)), check=False)
    assert prepared.proof is None
