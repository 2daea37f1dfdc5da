# SPDX-License-Identifier: Apache-2.0
"""What the device will run, and on which grids: `plan` makes a `Plan` from a `Network` and the user's rules.

`network` is a model in float steps, `rules` are the user's choices of bits and ranges, `plans` is the result: what a
kit trains and `deploy` lowers. One file for each family of float operations says what they become; `planner` holds what
these share. Nothing here knows a framework.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from ..device import Profile, profile_named
from ..display import shortened
from . import (
    activations,
    comparison,
    elementwise,
    embedding,
    movement,
    normalization,
    pooling,
    reduction,
    sequence,
    weights,
)
from .callers import users_line
from .network import Network
from .planner import HANDLERS, Planner
from .plans import Plan, PlanStep
from .refusals import UnsupportedOperator
from .rules import Rule, UnusedRuleWarning


def plan(
    network: Network,
    rules: Iterable[Rule] = (Rule(),),
    deployable: bool = True,
    keep_final_activation: bool | None = None,
    device: str | Profile | None = None,
) -> Plan:
    """Decides what the device runs for each step of a network, which tensors share a grid, and what cannot be run.

    Args:
        network: the model, as captured.
        rules: the first that matches a layer decides it.
        deployable: refuse rules that the device cannot run.
        keep_final_activation: whether a final softmax, log-softmax, sigmoid or argmax is part of the device's network.
            Otherwise it is left to the program that runs the device; see `warn_of_logits`.
        device: what its runtime lacks is replaced or, if `deployable`, refused; None: any device.

    Raises:
        UnsupportedOperator: lists every place that the device cannot run, with what to do instead.
        ValueError: no rule matches a layer, or a rule cannot be deployed.
    """
    profile = None if device is None else profile_named(device)
    return Planner(network, rules, deployable, bool(keep_final_activation), device=profile).run()


class FinalActivationWarning(UserWarning):
    """A final softmax, sigmoid or argmax stays outside the file, which returns what it is computed from (logits)."""


def warn_of_plan(plan: Plan, keep_final_activation: bool | None) -> None:
    """Warns of rules without an effect (UnusedRuleWarning), and as `warn_of_logits`."""
    for sentence in plan.unused_rules:
        warnings.warn(sentence, UnusedRuleWarning, stacklevel=users_line())
    warn_of_logits(plan, keep_final_activation)


def warn_of_logits(plan: Plan, keep_final_activation: bool | None) -> None:
    """Emits a FinalActivationWarning if a plan leaves a final step out and that was not chosen explicitly (None)."""
    steps = [(result.name, plan.stored(path)) for result in plan.results for path in result.outside]
    if not steps or keep_final_activation is not None:
        return
    said = ", ".join(f"{step.kind} of '{shortened(name)}'" for name, step in steps if isinstance(step, PlanStep))
    warnings.warn(
        f"the model ends with {said}, which stays outside of the file: the model returns its results, the file what "
        "they are computed from (logits). keep_final_activation=True makes it a part of the file; False says that this "
        "is meant",
        FinalActivationWarning,
        stacklevel=users_line(),
    )


__all__ = [
    "HANDLERS",
    "FinalActivationWarning",
    "UnsupportedOperator",
    "activations",
    "comparison",
    "elementwise",
    "embedding",
    "movement",
    "normalization",
    "plan",
    "pooling",
    "reduction",
    "sequence",
    "warn_of_logits",
    "warn_of_plan",
    "weights",
]
