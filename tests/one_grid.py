# SPDX-License-Identifier: Apache-2.0
"""A prepared network that stores its input and nothing else: to look at one grid."""

from __future__ import annotations

from typing import Any

from exactqat import qat
from exactqat.kit.planning.network import Network, Value
from exactqat.kit.planning.plans import Grid, Plan, PlanInput
from exactqat.qat.train.torch.prepared import PreparedModel


def one_grid(rule: qat.Rule, nonnegative: bool = False) -> tuple[PreparedModel, Any]:
    """The network, in training, and its grid."""
    network = Network(("x",), ("x",), {"x": Value("x", (1, 4), 0)}, {}, ())
    grids = {"input": Grid("input", rule, nonnegative)}
    model = PreparedModel(
        Plan(network, (PlanInput("input", "input", (1, 4)),), (), grids, {}, ("input",), ("input",)), {}
    )
    return model, model.step("input").output_quantizer
