# SPDX-License-Identifier: Apache-2.0
"""The device's integers, as fast as runtimes compute their own: the bits of `exactqat.kit.device`, from the kernels of
`exactqat.operators.cpu`.

`Compiled` compiles a network for one profile; `forms` says which operators have kernels, by their kinds.
"""

from . import elementwise, movement, rows, weighted  # noqa: F401 - registers its forms
from .compiled import Compiled, compiled_for
from .declared import by_declaration
from .numbers import dequantized, quantized

__all__ = ["Compiled", "by_declaration", "compiled_for", "dequantized", "quantized"]
