# SPDX-License-Identifier: Apache-2.0
"""How `capture` reads what `torch.export` shows.

`converter` walks it; one function for each operator says which steps it is (`movement`, `layers`, ...).
"""

from ..core.refusals import CaptureError, Refused
from . import elementwise, layers, movement, reduction, sequence
from .converter import CUMULATIVE, Converter

__all__ = ["CUMULATIVE", "CaptureError", "Converter", "Refused"]
__all__ += ["elementwise", "layers", "movement", "reduction", "sequence"]
