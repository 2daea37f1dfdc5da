# SPDX-License-Identifier: Apache-2.0
"""What the device will run, and on which grids: `plan` makes a `Plan` of a `Network` and the user's rules.

`network` is a model in float steps, `rules` are the user's words on bits and ranges, `plans` is the result: what a kit
trains and `deploy` lowers. One file for each family of float operations says what they become; `planner` holds what
they have in common. Nothing here knows a framework.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import activations, elementwise, movement, normalization, pooling, reduction, sequence, weights
from .network import Network
from .planner import HANDLERS, Planner
from .plans import Plan
from .refusals import UnsupportedOperator
from .rules import Rule


def plan(network: Network, rules: Iterable[Rule] = (Rule(),), deployable: bool = True) -> Plan:
    """Decides what the device runs for each step of a network, which tensors share a grid, and what cannot be run.

    Args:
        network: the model, as captured.
        rules: the first that matches a layer decides it.
        deployable: refuse rules that the device cannot run.

    Raises:
        UnsupportedOperator: lists every place that the device cannot run, with what to do instead.
        ValueError: no rule matches a layer, or a rule cannot be deployed.
    """
    return Planner(network, rules, deployable).run()


__all__ = [
    "HANDLERS",
    "UnsupportedOperator",
    "activations",
    "elementwise",
    "movement",
    "normalization",
    "plan",
    "pooling",
    "reduction",
    "sequence",
    "weights",
]
