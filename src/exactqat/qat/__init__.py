# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: `prepare` a plain PyTorch model by rules, train, `freeze`, train on, deploy.

`exactqat.qat.jax` is the same for JAX and Flax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..planning import UnsupportedOperator
    from ..planning.fitting import RangesMovedWarning
    from ..planning.rules import RangePolicy as RangePolicy
    from ..planning.rules import Rule, UnusedRuleWarning
    from .layers import QuantizedInput, QuantizedLayer, WeightedLayer
    from .modules import Conv2d, DepthwiseConv2d, FakeQuantize, FusedBatchNorm2d, WeightFakeQuantize
    from .ranges import ActivationRange, WeightRange
    from .train_torch import PreparedModel, UnsettledStatisticsWarning, calibrate, freeze, prepare

# Where the names are, loaded when first asked for: rules, networks and plans need no PyTorch.
_ROOMS = {
    ".layers": ("QuantizedInput", "QuantizedLayer", "WeightedLayer"),
    ".modules": ("Conv2d", "DepthwiseConv2d", "FakeQuantize", "FusedBatchNorm2d", "WeightFakeQuantize"),
    "..planning": ("UnsupportedOperator",),
    "..planning.fitting": ("RangesMovedWarning",),
    "..planning.rules": ("RangePolicy", "Rule", "UnusedRuleWarning"),
    ".ranges": ("ActivationRange", "WeightRange"),
    ".train_torch": ("PreparedModel", "UnsettledStatisticsWarning", "calibrate", "freeze", "prepare"),
}
# Modules, whole: `qat.jax.prepare`.
_MODULES = ("distributed", "jax", "keras", "tfmot")
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "ActivationRange",
    "Conv2d",
    "DepthwiseConv2d",
    "FakeQuantize",
    "FusedBatchNorm2d",
    "PreparedModel",
    "QuantizedInput",
    "QuantizedLayer",
    "RangesMovedWarning",
    "Rule",
    "UnsettledStatisticsWarning",
    "UnsupportedOperator",
    "UnusedRuleWarning",
    "WeightFakeQuantize",
    "WeightRange",
    "WeightedLayer",
    "calibrate",
    "freeze",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_ROOM_OF[name], __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
