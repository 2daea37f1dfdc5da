# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: `prepare` a model by rules, `calibrate`, train, `freeze`, train on, deploy.

`prepare` takes PyTorch, Keras and JAX models; `qat.torch`, `qat.keras` and `qat.jax` are the kits by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..kit.planning import FinalActivationWarning, UnsupportedOperator
    from ..kit.planning.fitting import RangesMovedWarning
    from ..kit.planning.moved import WeightsMovedWarning
    from ..kit.planning.parts import UnequalPartsWarning
    from ..kit.planning.plans import MissingData
    from ..kit.planning.rule_text import load_rules, save_rules
    from ..kit.planning.rules import RangePolicy as RangePolicy
    from ..kit.planning.rules import Rule, UnusedRuleWarning
    from . import distributed as distributed
    from . import jax as jax
    from . import keras as keras
    from . import tfmot as tfmot
    from . import torch as torch
    from .adjusting import correct_biases, equalize, reestimate, round_weights
    from .capture.proof import HalfPrecisionWarning, NotComparedWarning
    from .dry_run import Explanation, explain
    from .surface import calibrate, freeze, prepare
    from .train.core.freezing import UnsettledStatisticsWarning
    from .train.torch.graphed import GraphedModel, graphed
    from .train.torch.layers import Conv2d, DepthwiseConv2d, FusedBatchNorm2d
    from .train.torch.oscillations import Oscillations
    from .train.torch.prepared import PreparedModel
    from .train.torch.recovery import Distillation, distillation_loss, parameter_groups

# Where the names are, loaded when first asked for: rules, networks and plans need no PyTorch.
_ROOMS = {
    ".adjusting": ("correct_biases", "equalize", "reestimate", "round_weights"),
    ".dry_run": ("Explanation", "explain"),
    ".train.torch.graphed": ("GraphedModel", "graphed"),
    ".train.torch.layers": ("Conv2d", "DepthwiseConv2d", "FusedBatchNorm2d"),
    "..kit.planning": ("FinalActivationWarning", "UnsupportedOperator"),
    "..kit.planning.fitting": ("RangesMovedWarning",),
    "..kit.planning.moved": ("WeightsMovedWarning",),
    "..kit.planning.parts": ("UnequalPartsWarning",),
    ".train.core.freezing": ("UnsettledStatisticsWarning",),
    "..kit.planning.plans": ("MissingData",),
    "..kit.planning.rule_text": ("load_rules", "save_rules"),
    "..kit.planning.rules": ("RangePolicy", "Rule", "UnusedRuleWarning"),
    ".capture.proof": ("HalfPrecisionWarning", "NotComparedWarning"),
    ".train.torch.oscillations": ("Oscillations",),
    ".train.torch.recovery": ("Distillation", "distillation_loss", "parameter_groups"),
    ".surface": ("calibrate", "freeze", "prepare"),
    ".train.torch.prepared": ("PreparedModel",),
}
# Whole modules: `qat.jax.prepare`.
_MODULES = ("distributed", "jax", "keras", "tfmot", "torch")
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Conv2d",
    "DepthwiseConv2d",
    "Distillation",
    "Explanation",
    "FinalActivationWarning",
    "FusedBatchNorm2d",
    "GraphedModel",
    "HalfPrecisionWarning",
    "MissingData",
    "NotComparedWarning",
    "Oscillations",
    "PreparedModel",
    "RangesMovedWarning",
    "Rule",
    "UnequalPartsWarning",
    "UnsettledStatisticsWarning",
    "UnsupportedOperator",
    "UnusedRuleWarning",
    "WeightsMovedWarning",
    "calibrate",
    "correct_biases",
    "distillation_loss",
    "equalize",
    "explain",
    "freeze",
    "graphed",
    "load_rules",
    "parameter_groups",
    "prepare",
    "reestimate",
    "round_weights",
    "save_rules",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        member = import_module(_ROOM_OF.get(name, f".{name}"), __name__)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ModuleNotFoundError(
            f"exactqat.qat.{name} needs PyTorch: pip install 'exactqat[torch]' (exactqat.qat.jax is the kit for JAX, "
            f"exactqat.qat.keras that for Keras) ({error})",
            name=error.name,
        ) from error
    if name in _ROOM_OF:
        member = globals()[name] = getattr(member, name)
    return member


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES))
