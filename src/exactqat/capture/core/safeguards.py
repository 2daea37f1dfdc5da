# SPDX-License-Identifier: Apache-2.0
"""What capturing looks for so that a network is the user's model.

Tests switch one off at a time: the self-check of `prepare` has to notice what it prevents.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Safeguards:
    """
    Attributes:
        batch: numbers that follow the size of the batch are refused.
        training: what a model computes in training is compared with what it computes in evaluation.
        custom_gradients: gradient rules of the user's own are kept.
        stopped_gradients: parameters under `stop_gradient` are constant for gradients.
        computed_weights: what a layer computes of its weights before they meet the input is followed.
        changed_layers: known layers that the user has changed in part are read as the user's own.
    """

    batch: bool = True
    training: bool = True
    custom_gradients: bool = True
    stopped_gradients: bool = True
    computed_weights: bool = True
    changed_layers: bool = True


SAFEGUARDS = Safeguards()
