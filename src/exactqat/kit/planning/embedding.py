# SPDX-License-Identifier: Apache-2.0
"""Rows of tables by a network's integer inputs: word embeddings and the like."""

from __future__ import annotations

from . import masks
from .maker import Maker
from .network import Step
from .planner import Planner, handles
from .refusals import Refused, word
from .stored import Stored


@handles("embedding")
def embedding(planner: Planner, step: Step) -> Stored:
    indices, table = planner.tensor(step), planner.constant(step, 1)
    maker, ends = Maker(planner, step, "embedding"), planner.whole.get(str(step.inputs[0]))
    if not indices.grid.now.indices:
        rows = planner.constants[table].shape[0]
        if ends is None:
            raise Refused(
                f"{word(step)} by numbers that the network computes; the device looks up what it is given, and what is "
                "counted of masks: make them an input of integers"
            )
        if (ends[0] < 0 or ends[1] >= rows) and not step.attributes.get("checked"):
            raise Refused(
                f"{word(step)} by numbers that can be {ends[0]}..{ends[1]}, of a table of {rows} rows; give the table "
                f"a row for each of them"
            )
        if not masks.is_on_whole_grid(indices.grid.now.rule):
            indices = maker.affine(indices, 1.0, 0.0, "rows", rule=masks.on_whole_grid(maker.rule(maker.path), ends))
    return maker.look_up(indices, table, step.attributes.get("fixed_row"))
