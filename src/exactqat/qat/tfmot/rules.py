# SPDX-License-Identifier: Apache-2.0
"""tfmot's schemes and layer configurations as a `Rule`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...kit.planning.rules import RangePolicy, Rule
from .quantizers import AllValuesQuantizer, FixedQuantizer, LastValueQuantizer, MovingAverageQuantizer, Quantizer

# What MovingAverageQuantizer takes.
DECAY = 0.999


class Scheme:
    """Settings for layers that have no `QuantizeConfig`."""

    def __init__(self, weight_bits: int, activation_bits: int, disable_per_axis: bool) -> None:
        self.rule = Rule(
            weight_bits=weight_bits,
            activation_bits=activation_bits,
            per_channel=not disable_per_axis,
            # Only then does a weight with batch norm after it have one scale on the device.
            fold_batch_norm=bool(disable_per_axis),
            ema_decay=DECAY,
        )


class Default8BitQuantizeScheme(Scheme):
    """Eight bits everywhere. disable_per_axis: one range for each weight instead of one for each of its channels."""

    def __init__(self, disable_per_axis: bool = False) -> None:
        super().__init__(8, 8, disable_per_axis)


class DefaultNBitQuantizeScheme(Scheme):
    """Any number of bits: 2 to 8 for weights, 2 to 8 or 16 for activations."""

    def __init__(self, disable_per_axis: bool = False, num_bits_weight: int = 8, num_bits_activation: int = 8) -> None:
        super().__init__(num_bits_weight, num_bits_activation, disable_per_axis)


def rule_of(config: Any, layer: Any, default: Rule) -> Rule:
    """What a layer's `QuantizeConfig` asks for.

    Args:
        default: for what the configuration leaves open.

    Raises:
        TypeError: a quantizer is not one of this library's.
        ValueError: the device cannot do what is asked for; the message says what to use instead.
    """
    rule = default
    weights = config.get_weights_and_quantizers(layer) or []
    results = [quantizer for _, quantizer in config.get_activations_and_quantizers(layer) or []]
    results += list(config.get_output_quantizers(layer) or [])
    where = f"{type(config).__name__} for layer '{layer.name}'"
    own = [variable for variable in layer.weights if "kernel" in variable.name]
    if own and not weights:
        raise ValueError(
            f"{where} gives no quantizer of the weight '{own[0].name}', which would stay float; the device has no "
            f"float weights: return [(layer.{own[0].name}, LastValueQuantizer(8, True, True, True))]"
        )
    if weights:
        rule = _with_weights(rule, _single([quantizer for _, quantizer in weights], f"{where}: weights"), where)
    if results:
        rule = _with_results(rule, _single(results, f"{where}: activations"), where)
    return rule


def _single(quantizers: Sequence[Any], what: str) -> Quantizer:
    for quantizer in quantizers:
        if type(quantizer) not in (LastValueQuantizer, MovingAverageQuantizer, AllValuesQuantizer, FixedQuantizer):
            raise TypeError(
                f"{what} are quantized by {type(quantizer).__name__}; a quantizer of one's own has no integers on the "
                "device: use LastValueQuantizer, MovingAverageQuantizer, AllValuesQuantizer or FixedQuantizer"
            )
    if any(quantizer != quantizers[0] for quantizer in quantizers):
        raise ValueError(f"{what} of one layer are quantized alike on the device, got {list(quantizers)}")
    return quantizers[0]


def _with_weights(rule: Rule, quantizer: Any, where: str) -> Rule:
    if not isinstance(quantizer, LastValueQuantizer):
        raise ValueError(
            f"{where}: a weight's range follows the weight here, which is LastValueQuantizer; got {quantizer!r}"
        )
    if not quantizer.symmetric:
        raise ValueError(f"{where}: weights on the device are symmetric, with zero point 0; give symmetric=True")
    if not quantizer.narrow_range:
        warnings.warn(
            f"{where}: narrow_range=False for weights is taken as True: the device stores -127 to 127",
            UserWarning,
            stacklevel=2,
        )
    per_channel = bool(quantizer.per_axis)
    return replace(rule, weight_bits=quantizer.num_bits, per_channel=per_channel, fold_batch_norm=not per_channel)


def _with_results(rule: Rule, quantizer: Any, where: str) -> Rule:
    if quantizer.narrow_range:
        raise ValueError(f"{where}: activations on the device take all codes; give narrow_range=False")
    if isinstance(quantizer, FixedQuantizer):
        ends = (float(quantizer.init_min), float(quantizer.init_max))
        return replace(rule, activation_bits=quantizer.num_bits, ranges="fixed", fixed_range=ends)
    if quantizer.per_axis:
        raise ValueError(f"{where}: an activation has one range on the device; give per_axis=False")
    if quantizer.symmetric and quantizer.num_bits != 16:
        raise ValueError(
            f"{where}: activations on the device have a zero point; give symmetric=False, num_bits=16, whose range is "
            "symmetric, or FixedQuantizer with the range that is wanted"
        )
    ranges: dict[type, RangePolicy] = {
        LastValueQuantizer: "last_batch",
        MovingAverageQuantizer: "ema",
        AllValuesQuantizer: "min_max",
    }
    return replace(
        rule, activation_bits=quantizer.num_bits, ranges=ranges[type(quantizer)], fixed_range=None, ema_decay=DECAY
    )
