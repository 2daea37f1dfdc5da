# SPDX-License-Identifier: Apache-2.0
"""Whether two networks differ by more than chance, judged on the same images, pair by pair.

On most images both are right or both are wrong, which does not show which is better. McNemar's exact test looks only at
the others: if the networks were equally good, each of these images would be as likely to favor one as the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# A difference counts if equally good networks would differ this much in fewer than one of twenty test sets.
SIGNIFICANCE = 0.05
NOTE = (
    "the difference in accuracy on the same test images, with its 95 % interval, and the probability p that "
    "equally good networks differ this much (McNemar's exact test, on the images that only one of them gets "
    "right). Training varies from seed to seed too: compare more than one."
)


@dataclass(frozen=True)
class Paired:
    """Two networks on the same images.

    Attributes:
        images: how many there are.
        gained, lost: images that the network gets right and the other does not, and vice versa.
        difference: of the accuracies.
        low, high: differences that McNemar's exact test does not reject, given on how many images the networks
            disagree: the 95 % interval.
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
        if not self.gained + self.lost:
            return "0.0"
        low, high = (round(100 * end, 1) + 0.0 for end in (self.low, self.high))
        return f"{round(100 * self.difference, 1) + 0.0:+.1f} ({low:+.1f} to {high:+.1f})"

    def verdict(self) -> str:
        """Whether it may be chance, in a few words for a table."""
        if not self.gained + self.lost:
            return "none"
        return f"{'may be chance' if self.may_be_luck else 'not chance'}, {self.probability()}"

    def probability(self) -> str:
        """p as written next to a figure."""
        return "p<0.001" if self.p < 0.001 else f"p {self.p:.2g}"


def paired(right: Sequence[bool] | np.ndarray, other: Sequence[bool] | np.ndarray) -> Paired:
    """Compares a network with another.

    Args:
        right, other: whether each image was right, [n], for the network and for the other.

    Raises:
        ValueError: they do not cover the same images, or there are none.
    """
    own, others = np.asarray(right, bool), np.asarray(other, bool)
    if own.shape != others.shape or own.ndim != 1 or not own.size:
        raise ValueError(f"right and other must cover the same images, got shapes {own.shape} and {others.shape}")
    gained, lost = int((own & ~others).sum()), int((others & ~own).sum())
    disagree = gained + lost
    p = min(1.0, 2 * _at_most(min(gained, lost), disagree, 0.5)) if disagree else 1.0
    # The share of these images that favors the network, by Clopper and Pearson: the same test for other shares.
    tail = SIGNIFICANCE / 2
    least = _share(lambda share: 1 - _at_most(gained - 1, disagree, share) < tail) if gained else 0.0
    most = _share(lambda share: _at_most(gained, disagree, share) >= tail) if lost else 1.0
    low, high = ((2 * share - 1) * disagree / own.size for share in (least, most))
    return Paired(own.size, gained, lost, (gained - lost) / own.size, low, high, p)


def _at_most(count: int, trials: int, share: float) -> float:
    """Probability of at most `count` successes among independent trials."""
    if count < 0 or share >= 1:
        return 0.0 if count < trials else 1.0
    if count >= trials or share <= 0:
        return 1.0
    logs = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(share) + (trials - k) * math.log1p(-share)
        for k in range(count + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, logs)))


def _share(holds_below: Callable[[float], bool]) -> float:
    """Where a condition on a share, which holds up to some share, stops holding."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds_below(middle) else (low, middle)
    return (low + high) / 2
