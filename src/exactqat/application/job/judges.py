# SPDX-License-Identifier: Apache-2.0
"""How a network's outputs become answers: the most likely class, or whether an example could be reconstructed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...deploy.graph import Graph

# This share of the training examples, which are all normal, counts as normal.
NORMAL_SHARE = 0.95


def errors(outputs: np.ndarray, images: np.ndarray) -> np.ndarray:
    """How badly each example was reconstructed: the mean squared error, float64 [n].

    Args:
        outputs: real numbers [n, features]; images: [n, ...], as many numbers each.
    """
    difference = outputs.astype(np.float64) - images.reshape(len(images), -1)
    return np.asarray((difference**2).mean(1))


def threshold(found: np.ndarray) -> float:
    """The error above which an example counts as an anomaly, from the errors of normal ones."""
    return float(np.quantile(found, NORMAL_SHARE))


@dataclass(frozen=True)
class Judge:
    """Turns what a device returns into answers.

    Attributes:
        threshold: of the error; None: outputs are logits.
    """

    threshold: float | None = None

    def answers(self, graph: Graph, codes: np.ndarray, images: np.ndarray) -> np.ndarray:
        """The class of each example, [n]; 1 is an anomaly.

        Args:
            codes: of the graph's only output, [n, outputs]; images: as the user has them, [n, ...].
        """
        if self.threshold is None:
            return np.asarray(codes.argmax(1))
        return (self.scores(graph, codes, images) > self.threshold).astype(np.int64)

    def scores(self, graph: Graph, codes: np.ndarray, images: np.ndarray) -> np.ndarray:
        """How much of an anomaly each example is, [n]; nothing for logits."""
        if self.threshold is None:
            return np.zeros(0)
        grid = graph.tensors[graph.outputs[0]].quantization
        values = (codes.astype(np.float64) - float(grid.zero_point[0])) * float(grid.scale[0])
        return errors(values, images)
