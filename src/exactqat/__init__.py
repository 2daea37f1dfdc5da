# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's quantization-aware-training operators, exact, for NumPy, PyTorch and JAX.

`eq.raw_ops`, `eq.quantization`, `eq.nn` and the TensorFlow 1 top-level names take arrays of any of the three and
return the same bits; on TensorFlow's tensors its own operators run where they support the call. The README explains
what "exact" means. `eq.qat` (the training kit), `eq.deploy` (deployment) and `eq.tune` (accuracy on the device) are
loaded on first use.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from exactqat import nn, quantization, raw_ops
from exactqat.operators import OPERATORS as _OPERATORS
from exactqat.operators import frontends as _frontends
from exactqat.operators.cpu import get_num_threads, set_num_threads
from exactqat.operators.gradients import grad_pass_through

__version__ = "0.1.0"

_top_level = {name: op for op in _OPERATORS.values() for name in op.exports if "." not in name}
globals().update(_top_level)

__all__ = [
    "get_num_threads",
    "grad_pass_through",
    "nn",
    "quantization",
    "raw_ops",
    "set_num_threads",
    *sorted(_top_level),
]

# Operators alone should not pay for loading the kit.
_LATER = ("deploy", "qat", "tune")


def __getattr__(name: str) -> _Any:
    if name in _LATER:
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__, *_LATER})


_frontends.load_early()
