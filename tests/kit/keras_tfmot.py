# SPDX-License-Identifier: Apache-2.0
"""tfmot's names on a model of Keras 3; test_keras_kit.py runs it."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from exactqat import deploy, qat
from exactqat.deploy.lower import lower
from exactqat.qat import tfmot

keras.utils.set_random_seed(0)
names = tfmot.quantization.keras
LastValueQuantizer = names.quantizers.LastValueQuantizer
MovingAverageQuantizer = names.quantizers.MovingAverageQuantizer
x = np.random.default_rng(0).standard_normal((16, 8, 8, 3)).astype("f")
TARGETS = np.zeros((16, 3), "f")


class Config(names.QuantizeConfig):
    """As tfmot's guide writes one for Dense."""

    def __init__(self, weights, results):
        self.weights, self.results = weights, results

    def get_weights_and_quantizers(self, layer):
        return [(layer.kernel, self.weights)] if self.weights else []

    def get_activations_and_quantizers(self, layer):
        return [(layer.activation, self.results)] if self.results else []

    def set_quantize_weights(self, layer, quantize_weights):
        layer.kernel = quantize_weights[0]

    def set_quantize_activations(self, layer, quantize_activations):
        layer.activation = quantize_activations[0]

    def get_output_quantizers(self, layer):
        return []


WEIGHTS, RESULTS = LastValueQuantizer(4, False, True, True), MovingAverageQuantizer(6, False, False, False)


def network(last=lambda layer: layer, first=lambda layer: layer):
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            first(layers.Conv2D(4, 3, name="conv")),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(name="relu"),
            layers.GlobalAveragePooling2D(name="pool"),
            last(layers.Dense(3, name="head")),
        ]
    )


def compared(model):
    model.compile("sgd", "mse")
    model.fit(x, TARGETS, verbose=0)
    qat.keras.freeze(model)
    graph = lower(model)
    codes = deploy.quantize(x, graph.tensors["input"].quantization)
    assert deploy.verify(graph, deploy.write_tflite(graph, "model.tflite"), codes).differing == 0
    return graph


def rules(model):
    return {step.path: step.weights.rule for step in model.plan.steps if step.weights is not None}


# quantize_model: the whole model, its weights taken over, itself unchanged.
plain = network()
model = names.quantize_model(plain)
assert model._held.original is not plain and [layer.name for layer in plain.layers][0] == "conv"
assert {rule.ema_decay for rule in rules(model).values()} == {0.999} and not model.unused_rules
assert np.array_equal(model._held.variables.tensors["head.kernel"].numpy(), plain.layers[-1].kernel.numpy())
compared(model)

# A configuration for one layer, the scheme for the others; the order of the calls is free.
for built in (
    names.quantize_annotate_model(
        network(lambda layer: names.quantize_annotate_layer(layer, Config(WEIGHTS, RESULTS)))
    ),
    keras.models.clone_model(
        names.quantize_annotate_model(network()),
        clone_function=lambda layer: (
            names.quantize_annotate_layer(layer.layer, Config(WEIGHTS, RESULTS))
            if layer.layer.name == "head"
            else layer
        ),
    ),
):
    with names.quantize_scope({"Config": Config}):
        model = names.quantize_apply(built)
    found = rules(model)
    assert (found["head"].weight_bits, found["head"].activation_bits, found["head"].per_channel) == (4, 6, False)
    assert (found["conv"].weight_bits, found["conv"].activation_bits, found["conv"].per_channel) == (8, 8, True)
compared(model)

# Annotated models are saved and loaded in the scope, as tfmot's.
annotated = names.quantize_annotate_model(network())
annotated.save("annotated.keras")
with names.quantize_scope():
    loaded = names.quantize_apply(keras.models.load_model("annotated.keras"))
assert set(rules(loaded)) == {"conv", "head"}

# Functional models, models in models, layers without numbers that nobody annotated.
inputs = keras.Input((8, 8, 3))
y = layers.Flatten(name="flat")(keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(2, 3)], name="inner")(inputs))
compared(names.quantize_model(keras.Model(inputs, layers.Dense(3)(y) + 1.0)))
some = keras.Sequential(
    [keras.Input((8, 8, 3)), layers.Flatten(), names.quantize_annotate_layer(layers.Dense(3, name="dense"))]
)
assert list(rules(names.quantize_apply(some))) == ["dense"]

# Quantizers as rules.
for results, wanted in (
    (LastValueQuantizer(8, False, False, False), {"ranges": "last_batch"}),
    (names.quantizers.AllValuesQuantizer(8, False, False, False), {"ranges": "min_max"}),
    (names.quantizers.FixedQuantizer(8, -1.0, 3.0, False), {"ranges": "fixed", "fixed_range": (-1.0, 3.0)}),
    (RESULTS, {"ranges": "ema", "ema_decay": 0.999, "activation_bits": 6}),
):
    head = names.quantize_annotate_layer(layers.Dense(3, name="head"), Config(WEIGHTS, results))
    made = names.quantize_apply(keras.Sequential([keras.Input((4,)), head]))
    rule = made.plan.grids[made.plan.stored("head").grid].rule
    assert {key: getattr(rule, key) for key in wanted} == wanted, rule
with warnings.catch_warnings(record=True) as raised:
    warnings.simplefilter("always")
    guide = Config(LastValueQuantizer(8, False, True, False), MovingAverageQuantizer(8, False, False, False))
    compared(names.quantize_apply(names.quantize_annotate_model(
        network(lambda layer: names.quantize_annotate_layer(layer, guide))
    )))  # fmt: skip
assert any("the device stores -127 to 127" in str(each.message) for each in raised)

# Schemes.
scheme = names.experimental.default_n_bit.DefaultNBitQuantizeScheme(num_bits_weight=4, num_bits_activation=6)
few = names.quantize_apply(names.quantize_annotate_model(network()), scheme)
assert {(rule.weight_bits, rule.activation_bits) for rule in rules(few).values()} == {(4, 6)}
whole = names.default_8bit.Default8BitQuantizeScheme(disable_per_axis=True)
graph = compared(names.quantize_apply(names.quantize_annotate_model(network()), whole))

# Ranges from outside.
fixed = names.fix_input_output_range(
    names.quantize_model(network()), input_min=-4, input_max=4, output_min=-2, output_max=2
)
ends = [fixed.plan.grids[fixed.plan.stored(path).grid].rule.fixed_range for path in ("input", "head")]
assert ends == [(-4.0, 4.0), (-2.0, 2.0)]
compared(fixed)

# What has no meaning says so, and what to do.
for results in (
    MovingAverageQuantizer(8, True, False, False),
    MovingAverageQuantizer(8, False, True, False),
    MovingAverageQuantizer(8, False, False, True),
):
    with pytest.raises(ValueError, match="on the device.*give "):
        names.quantize_apply(keras.Sequential(
            [keras.Input((4,)), names.quantize_annotate_layer(layers.Dense(3), Config(WEIGHTS, results))]
        ))  # fmt: skip


class Own(names.quantizers.Quantizer):
    pass


for config, error, word in (
    (Config(None, RESULTS), ValueError, "would stay float"),
    (Config(LastValueQuantizer(8, True, False, False), RESULTS), ValueError, "give symmetric=True"),
    (Config(MovingAverageQuantizer(8, True, True, True), RESULTS), ValueError, "LastValueQuantizer"),
    (Config(WEIGHTS, Own()), TypeError, "no integers on the device"),
):
    with pytest.raises(error, match=word):
        names.quantize_apply(keras.Sequential(
            [keras.Input((4,)), names.quantize_annotate_layer(layers.Dense(3), config)]
        ))  # fmt: skip
with pytest.raises(ValueError, match="would stay float.*: conv, pool; annotate"):
    names.quantize_apply(network(names.quantize_annotate_layer))
with pytest.raises(ValueError, match="must have a layer that is annotated"):
    names.quantize_apply(network())
with pytest.raises(ValueError, match="layers keep their names"):
    names.quantize_model(network(), "my_")
with pytest.raises(ValueError, match="functional or Sequential"):
    names.quantize_model(None)
with pytest.raises(ValueError, match="no model"):
    names.quantize_annotate_layer(network())
with pytest.raises(ValueError, match="must be a QuantizeConfig"):
    names.quantize_annotate_layer(layers.Dense(3), 8)
with pytest.raises(TypeError, match="scheme must be"):
    names.quantize_apply(names.quantize_annotate_model(network()), 8)
for missing in ("QuantizeWrapper", "QuantizeScheme", "QuantizeRegistry", "graph_transformations", "remove_input_range"):
    with pytest.raises(AttributeError, match="from-tfmot.md says what to use instead"):
        getattr(names, missing)
print("tfmot's names: ok")
