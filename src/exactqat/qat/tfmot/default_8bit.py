# SPDX-License-Identifier: Apache-2.0
"""The scheme of `quantize_apply` under tfmot's name."""

from __future__ import annotations

from .rules import Scheme

__all__ = ["Default8BitQuantizeScheme"]


class Default8BitQuantizeScheme(Scheme):
    """Eight bits everywhere. disable_per_axis: one range for each weight instead of one for each of its channels."""

    def __init__(self, disable_per_axis: bool = False) -> None:
        super().__init__(8, 8, disable_per_axis)
