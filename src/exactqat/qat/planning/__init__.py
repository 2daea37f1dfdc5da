# SPDX-License-Identifier: Apache-2.0
"""What the device will run, and on which grids: `plan` makes a `Plan` of a `Network` and the user's rules.

One file for each family of float operations says what they become; `planner` holds what they have in common.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..network import Network
from ..plan import Plan
from ..rules import Rule
from . import activations, elementwise, movement, normalization, pooling, reduction, sequence, weights
from .planner import HANDLERS, Planner
from .refusals import UnsupportedOperator


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
