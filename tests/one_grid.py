# SPDX-License-Identifier: Apache-2.0
"""A prepared network that stores its input and nothing else: to look at one grid."""

from __future__ import annotations

from typing import Any

from exactqat import qat
from exactqat.kit.planning.ends import Ends
from exactqat.kit.planning.network import Network, Value
from exactqat.kit.planning.plans import Grid, Plan, PlanInput
from exactqat.qat.train.torch.prepared import PreparedModel


def one_grid(rule: qat.Rule, nonnegative: bool = False) -> tuple[PreparedModel, Any]:
    """The network, in training, and its grid."""
    ends = Ends(["x"], ["x"])
    network = Network(("x",), ("x",), {"x": Value("x", (1, 4), 0)}, {}, (), input_tree=ends, output_tree=ends)
    grids = {"input": Grid("input", rule, nonnegative)}
    model = PreparedModel(
        Plan(network, (PlanInput("input", "input", (1, 4)),), (), grids, {}, ("input",), ("input",)), {}
    )
    return model, model.step("input").output_quantizer
