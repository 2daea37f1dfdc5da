# SPDX-License-Identifier: Apache-2.0
"""A `tune.Gate` in other people's training loops: one thin adapter for each.

`callbacks.keras`, `callbacks.lightning`, `callbacks.hugging_face` and `callbacks.accelerate`, each loaded on demand.
Your own loop calls the gate directly.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

__all__ = ["accelerate", "hugging_face", "keras", "lightning"]


def __getattr__(name: str) -> _Any:
    if name in __all__:
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
