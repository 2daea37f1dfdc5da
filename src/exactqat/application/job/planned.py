# SPDX-License-Identifier: Apache-2.0
"""A job's network and its quantization rules, known before any training."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ... import qat
from ...kit.train.torch.prepare import prepare_again
from ..report.results import Dataset
from .models import new_model
from .options import distillation_parts
from .settings import Settings


def make_rules(
    bits: tuple[int, int],
    ranges: qat.RangePolicy,
    value_range: tuple[float, float],
    last: str,
    given: Sequence[qat.Rule] = (),
) -> list[qat.Rule]:
    """Input and logits stay at 8 bits: the input is the data itself, and the logits' order is the answer. Given rules
    decide this themselves; the input's range is that of the data whatever they say.

    Args:
        bits: of weights and activations.
        last: path of the layer that stores the logits.
        given: of all layers. If they leave ranges at the default, `ranges` decides.
    """
    if given:
        of_input = next((rule for rule in given if rule.match == "input"), qat.Rule())
        others = [rule for rule in given if rule.match != "input"] or [qat.Rule()]
        return [
            qat.Rule("input", activation_bits=of_input.activation_bits, ranges="fixed", fixed_range=value_range),
            *(replace(rule, ranges=ranges) if rule.ranges == qat.Rule().ranges else rule for rule in others),
        ]
    weight_bits, activation_bits = bits
    return [
        qat.Rule("input", ranges="fixed", fixed_range=value_range),
        qat.Rule(glob.escape(last), weight_bits=weight_bits, activation_bits=8, ranges=ranges),
        qat.Rule("*", weight_bits=weight_bits, activation_bits=activation_bits, ranges=ranges),
    ]


def last_layer(prepared: qat.PreparedModel) -> str:
    """The path of the layer that stores the logits."""
    return list(prepared.layers())[-1][0]


def untrained_network(settings: Settings, dataset: Dataset) -> tuple[nn.Module, str]:
    """A new network, after making sure that the device can run it by the rules of the job, and the path of its last
    layer.

    Raises:
        ValueError: it does not fit the images, or settings name layers it does not have.
        qat.UnsupportedOperator: the device cannot run it; better known before training than after.
    """
    torch.manual_seed(settings.seed)
    model = new_model(settings.model, dataset.train.images.shape[1:], dataset.outputs)
    try:
        prepared = qat.prepare(model, dataset.train.images[:2], keep_final_activation=False)
    except RuntimeError as error:
        shape = list(dataset.train.images.shape[1:])
        raise ValueError(f"model {settings.model} does not fit images of shape {shape}: {error}") from error
    _require_layers(settings, dataset, model, prepared)
    return model, last_layer(prepared)


def _require_layers(settings: Settings, dataset: Dataset, model: nn.Module, prepared: qat.PreparedModel) -> None:
    """Refuses settings that name layers the network does not have.

    Raises:
        ValueError: the rules or the layers of distillation do not fit it.
    """
    if settings.rules is None and settings.distill is None:
        return
    (bits, *_), value_range = settings.precisions.values(), dataset.value_range
    rules = make_rules(bits, "ema", value_range, last_layer(prepared), settings.layer_rules)
    try:
        prepared = prepare_again(prepared, rules, device=settings.device)
    except (ValueError, qat.UnsupportedOperator) as error:
        raise ValueError(f"rules do not fit model {settings.model}: {error}") from error
    if settings.distill is not None:
        try:
            qat.Distillation(prepared, model, distillation_parts(settings.distill)[2])
        except ValueError as error:
            raise ValueError(f"distill does not fit model {settings.model}: {error}") from error


__all__ = ["last_layer", "make_rules", "untrained_network"]
