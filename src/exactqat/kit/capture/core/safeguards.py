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
        computed_weights: what a layer computes of its weights before they meet the input is followed.
        changed_layers: known layers that the user has changed in part are read as the user's own.
    """

    computed_weights: bool = True
    changed_layers: bool = True


SAFEGUARDS = Safeguards()
