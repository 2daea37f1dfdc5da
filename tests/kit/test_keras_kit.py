# SPDX-License-Identifier: Apache-2.0
"""The kit for Keras 3. A process has one backend, so every backend has processes of its own.

The longest programs run on PyTorch, which compiles nothing; `KERAS_BACKEND=jax` (or tensorflow) runs them elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "kit"
BACKEND = os.environ.get("KERAS_BACKEND", "torch")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")


def run(backend: str, *arguments: str) -> str:
    """What a program prints; what it draws is the same every time."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    environment = {**os.environ, "KERAS_BACKEND": backend}
    if arguments[0] == "-c":
        arguments = ("-c", f"import keras\nkeras.utils.set_random_seed(0)\n{arguments[1]}")
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("backend", "name", "options"),
    [
        ("jax", "ds_cnn", []),
        ("torch", "functional", ["--learned"]),
        ("torch", "recurrent", []),
        ("tensorflow", "ds_cnn", []),
    ],
)
def test_a_network_goes_to_the_device(backend: str, name: str, options: list[str]) -> None:
    """Prepared, fitted, frozen, saved, loaded, verified; the others: `python tests/campaigns/keras_networks.py`."""
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    assert run(backend, str(HERE.parent / "campaigns" / "keras_networks.py"), *options, name).endswith(
        "integers compared, 0 differ\n"
    )


<<<<<<< HEAD
@pytest.mark.parametrize(
    ("backend", "module", "count"),
    [
        ("jax", "keras_training.py", 4),
        pytest.param(BACKEND, "keras_arguments.py", 1, marks=pytest.mark.slow),
        pytest.param(BACKEND, "keras_use.py", 9, marks=pytest.mark.slow),
    ],
=======
EVALUATION = """
import numpy as np
from keras import layers
from exactqat import qat
import exactqat.qat.keras
from exactqat.train.core.frozen import DeviceNetwork, DeviceStep

def count(kind, calls):
    compute = kind.__call__
    def counted(self, *arguments):
        calls.append(kind.__name__)
        return compute(self, *arguments)
    kind.__call__ = counted

x = np.random.default_rng(0).standard_normal((6, 12, 12, 3)).astype("f")
given = keras.Input((12, 12, 3))
y = layers.Conv2D(8, 3, activation="relu")(given)
y = layers.Dense(5, activation="softmax")(layers.Flatten()(layers.DepthwiseConv2D(3)(y)))
model = qat.keras.prepare(keras.Model(given, y), device="micro")
qat.keras.calibrate(model, [x])
qat.keras.freeze(model)
model.compile(loss="mse")
calls = []
count(DeviceNetwork, calls)
count(DeviceStep, calls)
whole = model.predict(x, verbose=0)
assert calls and set(calls) == {"DeviceNetwork"}, calls
exactqat.train.keras.primitives.network_on_host = lambda *arguments: None
model.predict_function = None
assert np.array_equal(model.predict(x, verbose=0), whole) and "DeviceStep" in calls
print("equal")
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_an_evaluation_asks_the_host_once(backend: str) -> None:
    """For the whole network, with the bits that it gives step by step."""
    assert run(backend, "-c", EVALUATION).endswith("equal\n")


CHECKS = """
import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_networks import ds_cnn

from exactqat import qat

x = np.random.default_rng(0).standard_normal((8, 25, 10, 1)).astype("f")
model = ds_cnn()
nodes = [len(layer._inbound_nodes) for layer in model.layers]
prepared = qat.keras.prepare(model, [qat.Rule(ranges="learned")])
assert [len(layer._inbound_nodes) for layer in model.layers] == nodes  # the user's graph is as it was
steps = {step.path: step for step in prepared.plan.steps}
assert steps["conv2d"].activation == "RELU" and steps["conv2d"].weights.batch_norm is not None
assert any(step.expression is not None for step in prepared.plan.steps)  # dropout trains
with pytest.raises(ValueError, match="call calibrate first"):
    prepared(x)
broken = x.copy()
broken[1, 2, 3] = np.nan
with pytest.raises(ValueError, match="batch 2 of batches gives NaN or infinity in 'input'"):
    qat.keras.calibrate(prepared, [x, broken], restart=True)
qat.keras.calibrate(prepared, [x])
before = [float(variable.numpy()) for variable in prepared.range_parameters() if variable.value.ndim == 0]
assert before and any(before)
qat.keras.calibrate(prepared, [x * 100])
other = [float(variable.numpy()) for variable in prepared.range_parameters() if variable.value.ndim == 0]
with pytest.raises(ValueError, match="batches is empty"):
    qat.keras.calibrate(prepared, [], restart=True)
assert other == [float(variable.numpy()) for variable in prepared.range_parameters() if variable.value.ndim == 0]
assert other != before
qat.keras.calibrate(prepared, [x], restart=True)
assert before == [float(variable.numpy()) for variable in prepared.range_parameters() if variable.value.ndim == 0]
prepared.compile("adam", "mse")
prepared.fit(x, np.zeros((8, 4), "f"), verbose=0)
after = [float(variable.numpy()) for variable in prepared.range_parameters() if variable.value.ndim == 0]
assert before != after  # ranges are trained
mean = next(v for v in prepared.non_trainable_variables if "moving_mean" in v.name)
assert np.abs(mean.numpy()).max() > 0  # statistics follow
qat.keras.freeze(prepared)
kept = mean.numpy().copy()
prepared.fit(x, np.zeros((8, 4), "f"), verbose=0)
assert np.array_equal(mean.numpy(), kept)
assert [float(v.numpy()) for v in prepared.range_parameters() if v.value.ndim == 0] == after
prepared.save("model.keras")
loaded = keras.saving.load_model("model.keras")
assert loaded.frozen and np.array_equal(loaded.predict(x, verbose=0), prepared.predict(x, verbose=0))
assert len(loaded.trainable_variables) == len(prepared.trainable_variables)
with pytest.raises(ValueError, match="before freeze"):
    qat.keras.calibrate(prepared, [x])
with pytest.raises(TypeError, match="must be a keras.Model"):
    qat.keras.prepare(3)
any_size = keras.Sequential([keras.Input((None, None, 3)), layers.Conv2D(4, 3)])
with pytest.raises(ValueError, match="give example"):
    qat.keras.prepare(any_size)
assert qat.keras.prepare(any_size, example=np.zeros((1, 8, 8, 3), "f")).plan.inputs[0].shape == (1, 8, 8, 3)
words = keras.Sequential([keras.Input((8, 4)), layers.Lambda(lambda x: ops.sort(x, axis=-1))])
with pytest.raises(qat.UnsupportedOperator, match="Sort has no int8 operator"):
    qat.keras.prepare(words)


class Squared(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), name="w")

    def call(self, x):
        return x * ops.square(self.w)


squared = qat.keras.prepare(keras.Sequential([keras.Input((4, 4)), Squared()]))
assert squared.proof is not None and len(squared.trainable_variables) == 1


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = layers.Dense(4), layers.BatchNormalization()

    def call(self, x, training=False):
        return ops.relu(self.norm(self.dense(x), training=training))


subclassed = Subclassed()
made = qat.keras.prepare(subclassed, example=np.zeros((2, 6), "f"))
assert [(step.kind, step.activation) for step in made.plan.steps] == [("FULLY_CONNECTED", "RELU")]

# Activations that leave keras.ops before they compute.
for word, kinds in (("hard_swish", ["HARD_SWISH", "DEPTHWISE_CONV_2D"]), ("mish", ["TABLE"])):
    for ones in ([layers.Dense(4), layers.Activation(word)], [layers.Dense(4, activation=word)]):
        steps = qat.keras.prepare(keras.Sequential([keras.Input((6,)), *ones])).plan.steps
        assert steps[0].kind == "FULLY_CONNECTED" and steps[1].kind in kinds, (word, steps)
"""


def test_training_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("jax", "-c", CHECKS)


# What people do with a model of Keras, each of which once went wrong without a word, or in the middle of `fit`.
USE = """
import warnings
import keras
import numpy as np
import pytest
from keras import layers, ops

from exactqat import qat
from exactqat.deploy.lower import lower

rng = np.random.default_rng(0)
x = rng.standard_normal((16, 6)).astype("f")
images = rng.standard_normal((8, 8, 8, 3)).astype("f")


def prepared_by(model, data, *rules, **more):
    prepared = qat.keras.prepare(model, rules or [qat.Rule()], **more)
    qat.keras.calibrate(prepared, [data])
    return prepared


def head(**more):
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, **more)])


def predict(model, data=x):
    return model.predict(data, verbose=0)


# Regularizers and constraints of weights train as they did; losses of results are told to be left out.
regular = prepared_by(head(kernel_regularizer="l2", kernel_constraint=keras.constraints.NonNeg()), x)
assert len(regular.losses) == 1
regular.compile("sgd", "mse")
regular.fit(x, np.zeros((16, 4)), verbose=0)
assert ops.convert_to_numpy(regular.trainable_variables[0]).min() >= 0
with pytest.warns(UserWarning, match="left out: .*dense"):
    adding = head(activity_regularizer="l2")
    qat.keras.prepare(adding)
assert adding.losses == []  # nothing symbolic stays in the user's layers

# Mixed precision is a policy of the float model; the device's arithmetic is told in float32.
keras.mixed_precision.set_global_policy("mixed_float16")
half = prepared_by(keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(4)]), x)
half.compile("adam", "mse")
assert np.isfinite(half.fit(x, np.zeros((16, 4)), verbose=0).history["loss"]).all() and predict(half).dtype == "float32"
keras.mixed_precision.set_global_policy("float32")

# Inputs by name, as Keras takes them; others are refused, and so are other sizes.
first, second = keras.Input((6,), name="b"), keras.Input((6,), name="a")
network = layers.Concatenate()([layers.Dense(3)(first), layers.Dense(2)(second)])
for inputs in ([first, second], {"b": first, "a": second}):
    two = keras.Model(inputs, network)
    given = {"b": x, "a": 5 * x, "more": x}
    named = {"b": x, "a": 5 * x}
    prepared = prepared_by(two, named)
    wanted = predict(two, named)
    assert np.abs(predict(prepared, given) - wanted).max() < 0.05 * np.abs(wanted).max()
    with pytest.raises(TypeError, match="called"):
        prepared({"b": x, "other": x})
one = prepared_by(keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(2, 3), layers.GlobalMaxPooling2D()]), images)
with pytest.raises(ValueError, match="must have shape .batch, 8, 8, 3., .*got .8, 8, 7, 3."):
    one(images[:, :, 1:])
with pytest.raises(TypeError, match="got an array"):
    qat.keras.calibrate(one, images)
line = prepared_by(keras.Sequential([keras.Input((1,)), layers.Dense(2)]), np.ones((4, 1), "f"))
assert predict(line, np.ones(4, "f")).shape == (4, 2)  # Keras adds the last axis


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, position):
        return images[:4], np.zeros((4, 2))


qat.keras.calibrate(one, Data())

# Weights move between prepared models, learned ranges too, whichever of them are trained.
learned = prepared_by(head(name="one"), x, qat.Rule(ranges="learned"))
learned.save_weights("learned.weights.h5")
other = head(name="two")
other.layers[0].trainable = False
again = qat.keras.prepare(other, [qat.Rule(ranges="learned")])
again.load_weights("learned.weights.h5")
assert np.array_equal(predict(again), predict(learned))
fresh = qat.keras.prepare(head(), [qat.Rule(ranges="learned")])
fresh.set_weights(learned.get_weights())
assert np.array_equal(predict(fresh), predict(learned))
with pytest.raises(ValueError, match="the same network by the same rules"):
    qat.keras.prepare(head(activation="sigmoid")).load_weights("learned.weights.h5")

# Trainable or not is kept; a frozen range is not trained again.
learned.trainable = False
assert learned.trainable_variables == []
before = learned.get_weights()
learned(100 * x, training=True)
assert all(map(np.array_equal, before, learned.get_weights()))
learned.save("still.keras")
assert keras.saving.load_model("still.keras").trainable_variables == []
qat.keras.freeze(again)
again.trainable = True
assert not [variable for variable in again.trainable_variables if "ranges" in variable.name]

# What `adapt` has found is kept in files.
normal = layers.Normalization()
normal.adapt(3 * x + 2)
adapted = prepared_by(keras.Sequential([keras.Input((6,)), normal, layers.Dense(3)]), 3 * x + 2)
adapted.save("adapted.keras")
assert np.array_equal(predict(keras.saving.load_model("adapted.keras")), predict(adapted))

# Random layers do in training what Keras' do, with random numbers of their own, and nothing on the device.
some = [layers.RandomFlip(), layers.GaussianNoise(0.5), layers.Dropout(0.5, noise_shape=(None, 1, 1, 3))]
random = prepared_by(keras.Sequential([keras.Input((8, 8, 3)), *some, layers.Conv2D(2, 3), layers.Flatten()]), images)
assert np.array_equal(predict(random, images), predict(random, images))
random.compile("sgd", "mse")
random.fit(images, np.zeros((8, 72)), verbose=0)
one_, two_ = (ops.convert_to_numpy(random(images, training=True)) for _ in range(2))
assert np.abs(one_ - two_).max() > 0.1
qat.keras.freeze(random)
assert [operator.kind for operator in lower(random).operators] == ["CONV_2D", "RESHAPE"]

# Images as they come; layers that prepare them; layers that convolve by keras.ops.
bytes_ = rng.integers(0, 256, (8, 8, 8, 3)).astype("uint8")
start = [keras.Input((8, 8, 3), dtype="uint8"), layers.Rescaling(1 / 127.5, -1), layers.CenterCrop(6, 6)]


class Convolve(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, shape[-1], 4), name="kernel")

    def call(self, x):
        return ops.conv(x, self.kernel, strides=2, padding="same")


plain = keras.Sequential([*start, layers.Resizing(12, 12), Convolve()])
prepared = prepared_by(plain, bytes_)
assert [step.kind for step in prepared.plan.steps][-2:] == ["RESIZE_BILINEAR", "CONV_2D"]
assert np.abs(predict(prepared, bytes_) - predict(plain, bytes_)).max() < 0.05 * np.abs(predict(plain, bytes_)).max()

# Refusals name the layer and say what to do.
for layer, shape, word in (
    (layers.RNN(layers.StackedRNNCells([layers.LSTMCell(4)])), (8, 6), "RNN: only LSTM, GRU and SimpleRNN"),
    (layers.LSTM(4, recurrent_dropout=0.5), (8, 6), "LSTM: with recurrent_dropout=0.5; .*=0.0"),
    (layers.Masking(), (8, 6), "Masking: its mask depends on the input"),
    (layers.SpectralNormalization(layers.Dense(4)), (6,), "SpectralNormalization: .*give the layer inside"),
    (layers.LayerNormalization(axis=1), (8, 6), "LayerNormalization: with axis=.1. of 3 axes"),
    (layers.Softmax(axis=[1, 2]), (8, 6), "Softmax: with axis=.1, 2.; .*one axis"),
    (layers.ReLU(2.0, 0.1, 0.5), (6,), "ReLU: with negative_slope=0.1, max_value=2.0, threshold=0.5"),
    (layers.Lambda(lambda x: ops.max(x, axis=-1, initial=0.5)), (8, 6), "Max: with initial=0.5"),
    (layers.Resizing(4, 4, crop_to_aspect_ratio=True), (8, 8, 3), "Resizing: with crop_to_aspect_ratio=True"),
    (layers.MelSpectrogram(), (4000,), "MelSpectrogram: it prepares data"),
    (layers.Embedding(9, 4), (8,), "Embedding .*outside the device"),
    (layers.RandomCrop(4, 4), (8, 8, 3), "RandomCrop: it prepares images; do it to the data"),
):
    with pytest.raises(qat.UnsupportedOperator, match=word):
        qat.keras.prepare(keras.Sequential([keras.Input(shape), layer]))
for change, word in (("enable_lora", "save the model and load it"), ("quantize", "give the float model")):
    other = head()
    other.layers[0].enable_lora(2) if change == "enable_lora" else other.quantize("int8")
    with pytest.raises(qat.UnsupportedOperator, match=word):
        qat.keras.prepare(other)
with pytest.raises(TypeError, match="prepared already"):
    qat.keras.prepare(line)
with pytest.raises(NotImplementedError, match="freeze"):
    line.quantize("int8")

# Callbacks, weights of examples, a summary, a clone.
words = []
line.summary(print_fn=words.append)
assert any("FULLY_CONNECTED" in word for word in words) and "2 stored tensors" in words[0]
assert "1 W8A8" in words[0] and "<td style='text-align:left'>FULLY_CONNECTED</td>" in line._repr_html_()
assert np.array_equal(predict(keras.models.clone_model(learned), x).shape, (16, 4))
learned.trainable = True
learned.compile("adam", "mse", metrics=["mae"])
calls = [
    keras.callbacks.EarlyStopping("val_loss", patience=0, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau(patience=0),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    keras.callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True),
]
history = learned.fit(
    x, x[:, :4], validation_data=(x, x[:, :4]), sample_weight=np.ones(16), epochs=2, verbose=0, callbacks=calls
>>>>>>> engine
)
def test_checks(backend: str, module: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(backend, str(HERE / module)) == f"{count} checks passed\n"


def test_names_of_tfmot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    monkeypatch.chdir(tmp_path)
    assert run("jax", str(HERE / "keras_tfmot.py")).endswith("tfmot's names: ok\n")


@pytest.mark.slow
def test_weights_move_between_pytorch_and_keras() -> None:
    """As `test_jax_kit.test_weights_move_between_frameworks`: with PyTorch's graph that is one for all three."""
    pytest.importorskip("torch")
    assert run("jax", str(HERE / "keras_weights.py")).endswith("integers of weights, one graph\n")


def test_keras_own_fake_quantization() -> None:
    page = (ROOT / "docs" / "keras-fake-quant.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(programs) == 6
    run("jax", "-c", "\n".join(programs))


def test_the_table_of_applications_is_what_was_measured() -> None:
    import run_applications

    page = run_applications.PAGE.read_text()
    assert run_applications.with_table(page, json.loads(run_applications.ROWS.read_text())) == page


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("ai_edge_litert", "sklearn"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    backend = next((each for each in ("jax", "torch", "tensorflow") if importlib.util.find_spec(each)), "jax")
    last = run(backend, str(ROOT / "examples" / "digits_keras.py")).splitlines()[-1]
    assert float(last.split()[1].rstrip(";")) > 0.9 and last.endswith(" 0 differ")
    assert (tmp_path / "digits.tflite").exists()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "keras-kit.md").read_text(), re.S)
    run("jax", "-c", program)
