# SPDX-License-Identifier: Apache-2.0
"""How `capture` reads a jaxpr: one file for each family of primitives, entered into the converter's table."""

from __future__ import annotations

from . import custom, elementwise, layers, movement, reduction, weights
from .converter import HANDLERS, Converter
from .custom import Traces
from .items import Fixed, Node
from .sizes import Sizes
from .tidy import Tidying

__all__ = [
    "HANDLERS",
    "Converter",
    "Fixed",
    "Node",
    "Sizes",
    "Tidying",
    "Traces",
    "custom",
    "elementwise",
    "layers",
    "movement",
    "reduction",
    "weights",
]
