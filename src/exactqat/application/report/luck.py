# SPDX-License-Identifier: Apache-2.0
"""Whether two networks differ by more than chance, judged on the same images, pair by pair.

On most images both are right or both are wrong, which does not show which is better. McNemar's exact test looks only at
the others: if the networks were equally good, each of these images would be as likely to favor one as the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A difference counts if equally good networks would differ this much in fewer than one of twenty test sets.
SIGNIFICANCE = 0.05
NOTE = (
    "the difference in accuracy on the same test examples, with its 95 % interval, and the probability p that "
    "equally good networks differ this much (McNemar's exact test, on those that only one of them gets "
    "right). Training varies from seed to seed too: compare more than one."
)


@dataclass(frozen=True)
class Paired:
    """Two networks on the same images.

    Attributes:
        images: how many there are; gained, lost: of those, how many only the network gets right, or only the other.
        difference: of the accuracies.
        low, high: its 95 % interval: what McNemar's exact test does not reject, given how often the networks disagree.
        p: probability that equally good networks differ this much or more.
    """

    images: int
    gained: int
    lost: int
    difference: float
    low: float
    high: float
    p: float

    @property
    def may_be_luck(self) -> bool:
        """Whether the test cannot distinguish the networks."""
        return self.p >= SIGNIFICANCE

    def points(self) -> str:
        """The difference in percentage points, and its interval."""
        points = (round(100 * share, 1) + 0.0 for share in (self.difference, self.low, self.high))
        return "{:+.1f} ({:+.1f} to {:+.1f})".format(*points)

    def in_short(self) -> str:
        """The difference in percentage points, and p."""
        return f"{round(100 * self.difference, 1) + 0.0:+.1f}, {'p<0.001' if self.p < 0.001 else f'p {self.p:.2g}'}"


def paired(right: Sequence[bool] | np.ndarray, other: Sequence[bool] | np.ndarray) -> Paired:
    """Compares a network with another.

    Args:
        right, other: whether each image was right, [n], for the network and for the other.
    """
    from scipy.stats import binomtest

    own, others = np.asarray(right, bool), np.asarray(other, bool)
    if own.shape != others.shape or own.ndim != 1 or not own.size:
        raise ValueError(f"right and other must cover the same images, got shapes {own.shape} and {others.shape}")
    gained, lost = int((own & ~others).sum()), int((others & ~own).sum())
    disagree = gained + lost
    if not disagree:
        return Paired(own.size, 0, 0, 0.0, 0.0, 0.0, 1.0)
    test = binomtest(gained, disagree)
    interval = test.proportion_ci(1 - SIGNIFICANCE, "exact")
    low, high = (float((2 * share - 1) * disagree / own.size) for share in (interval.low, interval.high))
    return Paired(own.size, gained, lost, (gained - lost) / own.size, low, high, float(test.pvalue))
