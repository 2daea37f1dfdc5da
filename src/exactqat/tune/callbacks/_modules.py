# SPDX-License-Identifier: Apache-2.0
"""What the adapters for PyTorch loops share: the prepared model in a module, and its state."""

from __future__ import annotations

from typing import Any


def prepared_in(module: Any) -> Any:
    """The prepared model that a module is or holds.

    Raises:
        TypeError: there is none, or several.
    """
    found = [each for each in module.modules() if hasattr(each, "plan") and hasattr(each, "trained")]
    if len(found) != 1:
        raise TypeError(
            f"{type(module).__name__} must be or hold one model that exactqat.qat.prepare made, it holds {len(found)}"
        )
    return found[0]


def copied(module: Any) -> dict[str, Any]:
    """A copy of a module's state."""
    return {
        name: value.detach().clone() if hasattr(value, "detach") else value
        for name, value in module.state_dict().items()
    }


__all__ = ["copied", "prepared_in"]
