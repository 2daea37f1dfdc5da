# SPDX-License-Identifier: Apache-2.0
"""Rows of tables by the integers that a network is given: embeddings of words and their like."""

from __future__ import annotations

from .maker import Maker
from .network import Step
from .planner import Planner, Stored, handles
from .refusals import Refused, word


@handles("embedding")
def embedding(planner: Planner, step: Step) -> Stored:
    indices, table = planner.tensor(step), planner.constant(step, 1)
    if not indices.grid.root().indices:
        raise Refused(
            f"{word(step)} by numbers that the network computes; the device looks up what it is given: make them an "
            "input of integers"
        )
    return Maker(planner, step, "embedding").look_up(indices, table, step.attributes.get("fixed_row"))
