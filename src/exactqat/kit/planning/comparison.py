# SPDX-License-Identifier: Apache-2.0
"""Comparisons of network inputs: masks, word numbers, lengths.

The device compares nothing here: a mask is its own answer, and the answer for any other integer is looked up exactly in
a table of 0 and 1.
"""

from __future__ import annotations

import numpy as np

from . import masks
from .kinds import COMPARISONS
from .maker import Maker
from .network import Constant, Step
from .planner import Operand, Planner, handles
from .refusals import Refused, word
from .stored import Stored


@handles("compare")
def compare(planner: Planner, step: Step) -> Stored:
    x, other, how = planner.tensor(step), planner.read(step.inputs[1]), str(step.attributes["how"])
    maker = Maker(planner, step, "compare")
    if x.grid.now.indices:
        return _looked_up(planner, maker, x, other, how)
    holds = masks.HOLDS.get((how, other)) if isinstance(other, float) else None
    if holds is None:
        raise Refused(
            f"{word(step)} of numbers that the network computes; the device computes with numbers only: give what is "
            "compared as an input of integers, or the answer, 0 or 1, as one"
        )
    if holds and masks.is_truth(x):
        return x
    return maker.affine(x, 1.0 if holds else -1.0, 0.0 if holds else 1.0, bounds=masks.TRUTH)


def _looked_up(planner: Planner, maker: Maker, x: Stored, other: Operand, how: str) -> Stored:
    """By a table [rows, numbers], which has a row for each possible integer."""
    shape, rows = planner.shape(maker.step), x.grid.now.indices
    data = other.data if isinstance(other, Constant) else other
    values = np.zeros((0, 0)) if data is None or isinstance(data, Stored) else np.asarray(data, np.float64)
    if values.size != 1 and not (x.shape[-1] == 1 and values.size and values.shape[-1] == values.size):
        raise Refused(
            f"{word(maker.step)} of an input of integers with weights, or with numbers of other axes than the last "
            "one; compare one integer for each example with a row of numbers, or all with one number"
        )
    table = COMPARISONS[how](np.arange(rows)[:, None], values.reshape(1, -1))
    truth = maker.look_up(x, maker.array(table, "table"), bounds=masks.TRUTH)
    return truth if truth.shape == shape else maker.reshape(truth, shape, x.batch_axis + len(shape) - x.rank, "answers")
