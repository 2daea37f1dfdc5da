# SPDX-License-Identifier: Apache-2.0
"""tfmot's names on a model of Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from exactqat import deploy, qat
from exactqat.deploy.lower import lower
from exactqat.qat import tfmot

pytestmark = pytest.mark.slow
pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

names = tfmot.quantization.keras
LastValueQuantizer = names.quantizers.LastValueQuantizer
MovingAverageQuantizer = names.quantizers.MovingAverageQuantizer
IMAGES = np.random.default_rng(0).standard_normal((16, 8, 8, 3)).astype("f")
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


def network(last: Callable[[Any], Any] = lambda layer: layer, first: Callable[[Any], Any] = lambda layer: layer) -> Any:
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


def annotated_head(config: Any) -> Any:
    """A network of one layer with a configuration."""
    return keras.Sequential([keras.Input((4,)), names.quantize_annotate_layer(layers.Dense(3, name="head"), config)])


def through_the_device(model: Any) -> None:
    """Trains and freezes a model, and compares its file with LiteRT."""
    model.compile("sgd", "mse")
    model.fit(IMAGES, TARGETS, verbose=0)
    qat.keras.freeze(model)
    graph = lower(model)
    codes = deploy.quantize(IMAGES, graph.tensors["input"].quantization)
    assert deploy.verify(graph, deploy.write_tflite(graph, "model.tflite"), codes).differing == 0


def rules(model: Any) -> dict[str, qat.Rule]:
    return {step.path: step.weights.rule for step in model.plan.steps if step.weights is not None}


def test_quantize_model_takes_the_weights_over_and_leaves_the_model_alone() -> None:
    plain = network()
    model = names.quantize_model(plain)
    assert model._held.original is not plain and [layer.name for layer in plain.layers][0] == "conv"
    assert {rule.ema_decay for rule in rules(model).values()} == {0.999} and not model.unused_rules
    kernel = keras.ops.convert_to_numpy(model._held.variables.tensors["head.kernel"])
    assert np.array_equal(kernel, keras.ops.convert_to_numpy(plain.layers[-1].kernel))
    through_the_device(model)


def layer_before_model() -> Any:
    return names.quantize_annotate_model(
        network(lambda layer: names.quantize_annotate_layer(layer, Config(WEIGHTS, RESULTS)))
    )


def model_before_layer() -> Any:
    return keras.models.clone_model(
        names.quantize_annotate_model(network()),
        clone_function=lambda layer: (
            names.quantize_annotate_layer(layer.layer, Config(WEIGHTS, RESULTS))
            if layer.layer.name == "head"
            else layer
        ),
    )


@pytest.mark.parametrize("annotate", [layer_before_model, model_before_layer])
def test_a_configuration_for_one_layer_and_the_scheme_for_the_others(annotate: Callable[[], Any]) -> None:
    """The order of the calls is free."""
    model = annotate()
    with names.quantize_scope({"Config": Config}):
        model = names.quantize_apply(model)
    head, conv = rules(model)["head"], rules(model)["conv"]
    assert (head.weight_bits, head.activation_bits, head.per_channel) == (4, 6, False)
    assert (conv.weight_bits, conv.activation_bits, conv.per_channel) == (8, 8, True)
    through_the_device(model)


def test_annotated_models_are_saved_and_loaded_in_the_scope() -> None:
    names.quantize_annotate_model(network()).save("annotated.keras")
    with names.quantize_scope():
        loaded = names.quantize_apply(keras.models.load_model("annotated.keras"))
    assert set(rules(loaded)) == {"conv", "head"}


def test_functional_models_and_models_in_models() -> None:
    inputs = keras.Input((8, 8, 3))
    inner = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(2, 3)], name="inner")
    y = layers.Flatten(name="flat")(inner(inputs))
    through_the_device(names.quantize_model(keras.Model(inputs, layers.Dense(3)(y) + 1.0)))


def test_layers_without_numbers_need_no_annotation() -> None:
    dense = names.quantize_annotate_layer(layers.Dense(3, name="dense"))
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), dense])
    assert list(rules(names.quantize_apply(model))) == ["dense"]


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (LastValueQuantizer(8, False, False, False), {"ranges": "last_batch"}),
        (names.quantizers.AllValuesQuantizer(8, False, False, False), {"ranges": "min_max"}),
        (names.quantizers.FixedQuantizer(8, -1.0, 3.0, False), {"ranges": "fixed", "fixed_range": (-1.0, 3.0)}),
        (RESULTS, {"ranges": "ema", "ema_decay": 0.999, "activation_bits": 6}),
    ],
    ids=lambda value: getattr(type(value), "__name__", None),
)
def test_quantizers_are_rules(quantizer: Any, expected: dict[str, Any]) -> None:
    model = names.quantize_apply(annotated_head(Config(WEIGHTS, quantizer)))
    rule = model.plan.grids[model.plan.stored("head").grid].rule
    assert {key: getattr(rule, key) for key in expected} == expected, rule


def test_the_wide_range_of_tfmots_guide_is_warned_of() -> None:
    guide = Config(LastValueQuantizer(8, False, True, False), MovingAverageQuantizer(8, False, False, False))
    model = names.quantize_annotate_model(network(lambda layer: names.quantize_annotate_layer(layer, guide)))
    with pytest.warns(UserWarning, match="the device stores -127 to 127"):
        through_the_device(names.quantize_apply(model))


def test_schemes() -> None:
    scheme = names.experimental.default_n_bit.DefaultNBitQuantizeScheme(num_bits_weight=4, num_bits_activation=6)
    few = names.quantize_apply(names.quantize_annotate_model(network()), scheme)
    assert {(rule.weight_bits, rule.activation_bits) for rule in rules(few).values()} == {(4, 6)}
    whole = names.default_8bit.Default8BitQuantizeScheme(disable_per_axis=True)
    through_the_device(names.quantize_apply(names.quantize_annotate_model(network()), whole))


# What has no meaning says so, and what to do.


class Own(names.quantizers.Quantizer):
    pass


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (Config(WEIGHTS, MovingAverageQuantizer(8, True, False, False)), ValueError, "on the device.*give "),
        (Config(WEIGHTS, MovingAverageQuantizer(8, False, True, False)), ValueError, "on the device.*give "),
        (Config(WEIGHTS, MovingAverageQuantizer(8, False, False, True)), ValueError, "on the device.*give "),
        (Config(None, RESULTS), ValueError, "would stay float"),
        (Config(LastValueQuantizer(8, True, False, False), RESULTS), ValueError, "give symmetric=True"),
        (Config(MovingAverageQuantizer(8, True, True, True), RESULTS), ValueError, "LastValueQuantizer"),
        (Config(WEIGHTS, Own()), TypeError, "no integers on the device"),
    ],
)
def test_refused_configurations(config: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        names.quantize_apply(annotated_head(config))


def test_refused_calls() -> None:
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


@pytest.mark.parametrize(
    "name", ["QuantizeWrapper", "QuantizeScheme", "QuantizeRegistry", "graph_transformations", "remove_input_range"]
)
def test_names_that_are_missing_say_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match="from-tfmot.md says what to use instead"):
        getattr(names, name)
