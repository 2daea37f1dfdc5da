# SPDX-License-Identifier: Apache-2.0
"""Rules: how each layer is quantized. They are separate from the model, so the user's model is never edited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, get_args

from ..display import listed

# How a range is determined; see `Rule`.
RangePolicy = Literal["ema", "last_batch", "percentile", "min_max", "learned", "fixed"]
RANGE_POLICIES = get_args(RangePolicy)


class UnusedRuleWarning(UserWarning):
    """A rule had no effect: its pattern matches no layer, or earlier rules match all of its layers."""


@dataclass(frozen=True, repr=False)
class Rule:
    """Settings for all layers whose module path matches a glob. The first rule that matches a layer applies.

    Attributes:
        match: glob over module paths as in `model.named_modules()`; the network's input is called ``"input"`` and a sum
            or another function without a module is called by its name in the traced graph, e.g. ``"add"``.
        weight_bits: 2..8. Weights are exported in int8 containers whatever their bits.
        activation_bits: 2..8 or 16, for the tensor that the layer stores; 9..15 for training only. With 16 the device
            stores int16 and multiplies it by int8 weights (TensorFlow Lite's 16x8), for signals such as audio and
            images that need more than 8 bits. Such a range is symmetric, ``[-a, a]``, whatever the tensor's values.
            Tensors are converted where layers of 8 and 16 bits meet.
        per_channel: one weight scale per output channel; otherwise one per tensor.
        symmetric: weight range is ``[-a, a]``; the device requires it.
        narrow_range: the lowest weight code is not used, so codes are symmetric; the device requires it.
        ranges: how activation ranges are determined. ``"ema"``: moving average of each batch's extremes.
            ``"last_batch"``: the extremes of the last batch. ``"percentile"``: moving average of each batch's
            `percentile`, which ignores outliers. ``"min_max"``: extremes of all calibration data. ``"learned"``:
            parameters trained through the operators' min/max gradients (then the weights' ranges are learned too); that
            of an input in 8 bits and more stays as calibrated. ``"fixed"``: `fixed_range`. Unless learned, a weight's
            range follows its largest magnitude.
        fixed_range: ``(min, max)`` in the activation's unit, with ``min <= 0 <= max`` and ``min < max``; only for
            ``"fixed"``.
        ema_decay: in (0, 1); weight of the old range after each batch, for moving averages. The first batch sets the
            range, and the first 1 / (1 - ema_decay) batches have equal weight.
        percentile: in (50, 100]; share of a batch's values, in percent, at or below the maximum, and at or above the
            minimum; for ``"percentile"``.
        fold_batch_norm: quantize the weight times batch norm's factor, as the device stores it, instead of the weight
            itself. This is required for a single weight scale (``per_channel=False``) on the device; with per-channel
            scales the codes are the same either way. Until `freeze`, the running statistics are folded and the batch's
            statistics correct the result (TensorFlow's scheme; its freeze delay is the step at which `freeze` is
            called). It costs a second convolution per step. Several processes need
            `exactqat.qat.distributed.synchronized`.

    Raises:
        ValueError: a value is not allowed.
    """

    match: str = "*"
    weight_bits: int = 8
    activation_bits: int = 8
    per_channel: bool = True
    symmetric: bool = True
    narrow_range: bool = True
    ranges: RangePolicy = "ema"
    fixed_range: tuple[float, float] | None = None
    ema_decay: float = 0.99
    percentile: float = 99.99
    fold_batch_norm: bool = False

    def __repr__(self) -> str:
        """What is not the default, as it would be written."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        other = [f"{name}={value!r}" for name, value in settings.items() if value != type(self).__dict__[name]]
        return f"Rule({', '.join(other)})"

    def __post_init__(self) -> None:
        if not isinstance(self.match, str) or not self.match:
            raise ValueError(f"Rule.match must be a non-empty glob such as 'features.*', got {self.match!r}")
        for name, low, high in (("weight_bits", 2, 8), ("activation_bits", 2, 16)):
            bits = getattr(self, name)
            if not isinstance(bits, int) or isinstance(bits, bool) or not low <= bits <= high:
                raise ValueError(f"Rule.{name} must be an integer from {low} to {high}, got {bits!r}")
        if self.ranges not in RANGE_POLICIES:
            raise ValueError(f"Rule.ranges must be one of {', '.join(RANGE_POLICIES)}, got {self.ranges!r}")
        if (self.ranges == "fixed") != (self.fixed_range is not None):
            raise ValueError(
                f"Rule.fixed_range must be given if and only if ranges is 'fixed', got ranges={self.ranges!r}, "
                f"fixed_range={self.fixed_range!r}"
            )
        if self.fixed_range is not None:
            low_end, high_end = self.fixed_range
            if not (low_end <= 0 <= high_end and low_end < high_end):
                raise ValueError(
                    f"Rule.fixed_range must satisfy min <= 0 <= max and min < max, got ({low_end!r}, {high_end!r})"
                )
        if not 0 < self.ema_decay < 1:
            raise ValueError(f"Rule.ema_decay must be between 0 and 1, got {self.ema_decay!r}")
        if not 50 < self.percentile <= 100:
            raise ValueError(f"Rule.percentile must be above 50 and at most 100, got {self.percentile!r}")
        if self.narrow_range and not self.symmetric:
            raise ValueError("Rule.narrow_range=True drops a code to make the grid symmetric: also set symmetric=True")

    @property
    def is_int16(self) -> bool:
        """Whether what the layer stores is int16 on the device."""
        return self.activation_bits == 16

    def deployment_obstacle(self) -> str | None:
        """Why a device with integer kernels cannot run a layer under this rule, or None if it can."""
        if self.activation_bits > 8 and not self.is_int16:
            return f"activation_bits={self.activation_bits}, but the device's tensors have 2 to 8 bits, or 16"
        if not self.symmetric or not self.narrow_range:
            return "weights must be symmetric with a narrow range (zero point 0, codes -127..127)"
        return None


def checked_rules(rules: Rule | Iterable[Rule] | None) -> tuple[Rule, ...]:
    """Rules as a tuple; a single rule becomes a tuple of one, None the defaults for all layers.

    Raises:
        TypeError: something else is given.
        ValueError: there is none.
    """
    if rules is None or isinstance(rules, Rule):
        return (rules or Rule(),)
    if isinstance(rules, str | bytes | Mapping | type) or not isinstance(rules, Iterable):
        description = f"the class {rules.__name__}" if isinstance(rules, type) else type(rules).__name__
        raise TypeError(f"rules must be a list of Rule, such as [Rule(match='*')], got {description}")
    entries = tuple(rules)
    for position, rule in enumerate(entries):
        if not isinstance(rule, Rule):
            how = ": write Rule(**settings)" if isinstance(rule, Mapping) else ""
            how = ": write Rule()" if rule is Rule else how
            raise TypeError(f"rules[{position}] must be a Rule, got {type(rule).__name__}{how}")
    if not entries:
        raise ValueError("rules is empty: pass [Rule()] or omit it (a generator that was already consumed is empty)")
    return entries


class RuleBook:
    """Finds the rule for a layer and remembers which rules were used.

    Attributes:
        of_layers: the rules that were found, by path.
    """

    def __init__(self, rules: Rule | Iterable[Rule]) -> None:
        self.rules = checked_rules(rules)
        self._decided: dict[int, list[str]] = {position: [] for position in range(len(self.rules))}
        self._shadowed: dict[int, set[str]] = {position: set() for position in range(len(self.rules))}
        self.of_layers: dict[str, Rule] = {}

    def find(self, path: str, owner: str = "") -> Rule:
        """The first rule that matches `path`, or its `owner`: the layer that `path` is a part or another call of.

        Raises:
            ValueError: no rule matches; a layer without settings cannot be quantized.
        """
        chosen: int | None = None
        for position, rule in enumerate(self.rules):
            if fnmatchcase(path, rule.match) or (owner and fnmatchcase(owner, rule.match)):
                if chosen is None:
                    chosen = position
                    self._decided[position].append(path)
                else:
                    self._shadowed[position].add(path)
        if chosen is None:
            patterns = ", ".join(repr(rule.match) for rule in self.rules) or "none given"
            raise ValueError(f"no rule matches layer '{path}' (rules: {patterns}); end the list with Rule(match='*')")
        self.of_layers[path] = self.rules[chosen]
        return self.rules[chosen]

    def unused(self) -> list[str]:
        """One sentence for every rule that has no effect."""
        sentences = []
        for position, rule in enumerate(self.rules):
            if not self._decided[position]:
                shadowed = sorted(self._shadowed[position])
                why = f"earlier rules already match {', '.join(shadowed)}"
                if not shadowed:  # with the names of layers that may be meant
                    pattern = rule.match.strip("*?.")
                    inside = [path for path in self.of_layers if pattern and (pattern in path or path in pattern)]
                    near = list(dict.fromkeys([*inside, *get_close_matches(pattern, self.of_layers)]))
                    names = listed([repr(path) for path in near or self.of_layers], 5)
                    why = f"its pattern matches no layer; {'names near it' if near else 'the layers'}: {names}"
                sentences.append(f"rules[{position}] (match={rule.match!r}) has no effect: {why}")
        return sentences
