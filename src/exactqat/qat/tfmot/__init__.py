# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow Model Optimization toolkit's names for Keras 3: `from exactqat.qat import tfmot`.

model = tfmot.quantization.keras.quantize_model(network)  # also tfmot.quantize_model
model.compile(...); model.fit(...)
qat.keras.freeze(model)
graph = deploy.lower(model)

Names, arguments and defaults are those of tfmot 0.8. They give a `qat.keras.PreparedModel`; docs/from-tfmot.md says for
each name what is the same here, what is different, and why, and what to use in place of names that are not here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from glob import escape
from types import SimpleNamespace
from typing import Any, NoReturn

from ..train.keras import prepared as kit
from ..train.keras.prepare import prepare

# isort: split
import keras

from ...kit.device import OPERATORS
from ...kit.planning.rules import UnusedRuleWarning
from . import quantizers
from .rules import Default8BitQuantizeScheme, DefaultNBitQuantizeScheme, Scheme, rule_of

__all__ = [
    "QuantizeAnnotate",
    "QuantizeConfig",
    "default_8bit",
    "experimental",
    "quantize_annotate_layer",
    "quantize_annotate_model",
    "quantize_apply",
    "quantize_model",
    "quantize_scope",
    "quantizers",
]


def __dir__() -> list[str]:
    return __all__


class QuantizeConfig:
    """How a layer is quantized; subclasses give its quantizers. It is read when the model is prepared, as a `Rule`.

    Nothing is added to the layer: `set_quantize_weights` and `set_quantize_activations` are not called.
    """

    def get_weights_and_quantizers(self, layer: keras.Layer) -> list[tuple[keras.Variable, quantizers.Quantizer]]:
        """Pairs of a weight and its quantizer, all alike within a layer."""
        raise NotImplementedError(f"{type(self).__name__} has no get_weights_and_quantizers")

    def get_activations_and_quantizers(self, layer: keras.Layer) -> list[tuple[keras.Variable, quantizers.Quantizer]]:
        """Pairs of an activation and its quantizer."""
        raise NotImplementedError(f"{type(self).__name__} has no get_activations_and_quantizers")

    def set_quantize_weights(self, layer: keras.Layer, quantize_weights: list[keras.Variable]) -> None:
        """Not called."""

    def set_quantize_activations(self, layer: keras.Layer, quantize_activations: list[object]) -> None:
        """Not called."""

    def get_output_quantizers(self, layer: keras.Layer) -> list[quantizers.Quantizer]:
        """The quantizers of the results; what a layer stores has one, of its activation or of its result."""
        raise NotImplementedError(f"{type(self).__name__} has no get_output_quantizers")

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizeConfig:
        return cls(**config)


@keras.saving.register_keras_serializable(package="exactqat", name="QuantizeAnnotate")
class QuantizeAnnotate(keras.layers.Wrapper):
    """What `quantize_annotate_layer` returns: the unchanged layer with its configuration."""

    def __init__(
        self, layer: keras.Layer, quantize_config: QuantizeConfig | dict[str, Any] | None = None, **kwargs: object
    ) -> None:
        super().__init__(layer, **kwargs)
        self.quantize_config = (
            keras.saving.deserialize_keras_object(quantize_config)
            if isinstance(quantize_config, dict)
            else quantize_config
        )

    def call(self, inputs: object, *args: object, **kwargs: object) -> Any:
        return self.layer(inputs, *args, **kwargs)

    def compute_output_spec(self, *args: object, **kwargs: object) -> Any:
        return self.layer.compute_output_spec(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        config = self.quantize_config
        return {
            **super().get_config(),
            "quantize_config": None if config is None else keras.saving.serialize_keras_object(config),
        }


def quantize_scope(*args: dict[str, type]) -> Any:
    """A scope in which Keras finds `QuantizeAnnotate`, the quantizers and what is given, as `{name: class}`."""
    known: dict[str, type] = {name: getattr(quantizers, name) for name in quantizers.__all__}
    known |= {"QuantizeAnnotate": QuantizeAnnotate, "PreparedModel": kit.PreparedModel}
    return keras.saving.custom_object_scope({**known, **{name: classes[name] for classes in args for name in classes}})


def quantize_annotate_layer(
    to_annotate: keras.Layer, quantize_config: QuantizeConfig | None = None
) -> QuantizeAnnotate:
    """A layer to be quantized as its configuration says.

    Raises:
        ValueError: no layer is given, or no `QuantizeConfig`.
    """
    if not isinstance(to_annotate, keras.layers.Layer) or isinstance(to_annotate, keras.Model):
        raise ValueError(f"to_annotate must be a keras.layers.Layer and no model, got {type(to_annotate).__name__}")
    if quantize_config is not None and not isinstance(quantize_config, QuantizeConfig):
        raise ValueError(f"quantize_config must be a QuantizeConfig, got {type(quantize_config).__name__}")
    return QuantizeAnnotate(to_annotate, quantize_config)


def quantize_annotate_model(to_annotate: keras.Model) -> keras.Model:
    """The model with all of its layers annotated; those that already are keep their configuration.

    Raises:
        ValueError: the model is neither functional nor Sequential.
    """
    _check_model(to_annotate, "to_annotate")

    def annotated(layer: keras.Layer, copy: keras.Layer) -> keras.Layer:
        return QuantizeAnnotate(copy, getattr(layer, "quantize_config", None), name=layer.name)

    return _copied(to_annotate, annotated)


def quantize_apply(
    model: keras.Model,
    scheme: Scheme | None = None,
    quantized_layer_name_prefix: str | None = "quant_",
    keep_final_activation: bool | None = None,
) -> kit.PreparedModel:
    """The prepared form of a model whose layers are annotated.

    Args:
        scheme: settings for layers without a `QuantizeConfig`; `Default8BitQuantizeScheme()` if none is given.
        quantized_layer_name_prefix: layers keep their names here; a custom prefix is refused.
        keep_final_activation: see `qat.keras.prepare`.

    Raises:
        ValueError: no layer is annotated, or one is not; a `QuantizeConfig` asks for what no device has.
        TypeError: the scheme is not one of this library's.
    """
    _check_model(model, "model")
    scheme = Default8BitQuantizeScheme() if scheme is None else scheme
    if not isinstance(scheme, Scheme):
        raise TypeError(
            f"scheme must be Default8BitQuantizeScheme or DefaultNBitQuantizeScheme, got {type(scheme).__name__}; "
            "settings of your own are rules: qat.keras.prepare(model, rules)"
        )
    if quantized_layer_name_prefix not in ("quant_", "", None):
        raise ValueError(
            f"quantized_layer_name_prefix={quantized_layer_name_prefix!r}: layers keep their names here; leave it out"
        )
    configurations: dict[str, QuantizeConfig | None] = {}
    plain: list[str] = []

    def stripped(layer: keras.Layer, copy: keras.Layer) -> keras.Layer:
        if isinstance(layer, QuantizeAnnotate):
            configurations[layer.layer.name] = layer.quantize_config
        else:
            plain.append(layer.name)
        return copy

    network = _copied(model, stripped)
    if not configurations:
        raise ValueError("model must have a layer that is annotated; quantize_annotate_model annotates all of them")
    rules = []
    for layer in _leaves(network):
        if configurations.get(layer.name) is not None:
            rule = rule_of(configurations[layer.name], layer, scheme.rule)
            rules += [
                replace(rule, match=pattern) for path in _paths(network, layer) for pattern in (path, f"{path}.*")
            ]
    with warnings.catch_warnings():
        # A layer that computes nothing of its own has patterns that match nothing.
        warnings.simplefilter("ignore", UnusedRuleWarning)
        prepared = prepare(network, rules=[*rules, scheme.rule], keep_final_activation=keep_final_activation)
    _check_complete(network, prepared, plain)
    return prepared


def quantize_model(
    to_quantize: keras.Model,
    quantized_layer_name_prefix: str | None = "quant_",
    keep_final_activation: bool | None = None,
) -> kit.PreparedModel:
    """The prepared model, all of it quantized by `Default8BitQuantizeScheme()`. The original model does not change.

    Raises:
        ValueError: the model is neither functional nor Sequential.
        UnsupportedOperator: lists every operation the device cannot run, with what to do.
    """
    _check_model(to_quantize, "to_quantize")
    return quantize_apply(
        quantize_annotate_model(to_quantize), None, quantized_layer_name_prefix, keep_final_activation
    )


def _check_model(model: keras.Model, what: str) -> None:
    if not isinstance(model, keras.Sequential) and not hasattr(model, "_inputs_struct"):
        raise ValueError(
            f"{what} must be a functional or Sequential model of Keras 3, got {type(model).__name__}; "
            "qat.keras.prepare takes subclassed ones"
        )
    if not model.built:
        raise ValueError(f"{what} must be built: give it a keras.Input, or call build")


def _copied(model: keras.Model, maker: Callable[[keras.Layer, keras.Layer], keras.Layer]) -> keras.Model:
    """A copy of a model with copies of its weights; `maker(layer, copy)` gives the copy of a layer."""
    pairs: list[tuple[keras.Layer, keras.Layer]] = []

    def copied(layer: keras.Layer) -> keras.Layer:
        if not isinstance(layer, keras.Layer):
            return type(layer).from_config(layer.get_config())
        inner = layer.layer if isinstance(layer, QuantizeAnnotate) else layer
        copy = _copied(inner, maker) if isinstance(inner, keras.Model) else type(inner).from_config(inner.get_config())
        pairs.append((inner, copy))
        return copy if isinstance(inner, keras.Model) else maker(layer, copy)

    result = keras.models.clone_model(model, clone_function=copied)
    for layer, copy in pairs:
        copy.set_weights(layer.get_weights())
        if isinstance(copy, keras.layers.Normalization):
            copy.finalize_state()
    return result


def _leaves(model: keras.Model) -> list[keras.Layer]:
    return [
        layer
        for layer in model._flatten_layers(include_self=False)
        if not isinstance(layer, keras.Model | keras.layers.InputLayer)
    ]


def _paths(network: keras.Model, layer: keras.Layer) -> list[str]:
    """Globs of what the layer stores: its path with and without the model's name in front."""
    path = str(layer.path).replace("/", ".")
    own = path.removeprefix(f"{network.name}.")
    return [escape(pattern) for pattern in dict.fromkeys([own, path, f"*.{own}"])]


def _check_complete(network: keras.Model, prepared: kit.PreparedModel, plain: list[str]) -> None:
    """A layer that is not annotated would stay float, which no file of this library can hold."""
    computing = []
    for step in prepared.plan.steps:
        only_moves = step.weights is None and step.kind and OPERATORS[step.kind].same_quantization
        if step.kind and not step.outside and not only_moves:
            parts = step.path.split(".")
            computing += [name for name in plain if name in parts]
    if computing:
        raise ValueError(
            f"layers that are not annotated would stay float, which this library's files do not hold: "
            f"{', '.join(dict.fromkeys(computing))}; annotate the others by quantize_annotate_model(model), or "
            "give them a QuantizeConfig with 16 bits where 8 are too few"
        )


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"tfmot's {name} has no meaning in this library: docs/from-tfmot.md says what to use instead")


default_8bit = SimpleNamespace(Default8BitQuantizeScheme=Default8BitQuantizeScheme)
experimental = SimpleNamespace(default_n_bit=SimpleNamespace(DefaultNBitQuantizeScheme=DefaultNBitQuantizeScheme))
# As tfmot is written: tfmot.quantization.keras.quantize_model.
quantization = SimpleNamespace(keras=sys.modules[__name__])
