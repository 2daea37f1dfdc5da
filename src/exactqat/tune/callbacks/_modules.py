# SPDX-License-Identifier: Apache-2.0
"""What the adapters for PyTorch loops share: they score the prepared model in a module, and keep its best state."""

from __future__ import annotations

from typing import Any

from ..gate import Gate, Verdict


def prepared_in(module: Any) -> Any:
    """The prepared model that a module is or holds.

    Raises:
        TypeError: there is none, or several.
    """
    models = [part for part in module.modules() if hasattr(part, "plan") and hasattr(part, "trained")]
    if len(models) != 1:
        raise TypeError(
            f"{type(module).__name__} must be or hold one model that exactqat.qat.prepare made, it holds {len(models)}"
        )
    return models[0]


class Checkpoint:
    """Scores the prepared model in a module, and restores its best state.

    Attributes:
        verdicts: one for each time.
    """

    def __init__(self, gate: Gate, restore_best: bool = True) -> None:
        """restore_best: False leaves the model as it is at the end."""
        super().__init__()
        self._gate, self._restore = gate, restore_best
        self.verdicts: list[Verdict] = []
        self._state: dict[str, Any] | None = None

    def _score(self, module: Any, step: int) -> Verdict:
        model = prepared_in(module)
        verdict = self._gate(model, step)
        self.verdicts.append(verdict)
        if verdict.best:
            state = model.state_dict().items()
            self._state = {name: value.clone() if hasattr(value, "clone") else value for name, value in state}
        return verdict

    def _give_back(self, module: Any) -> None:
        if self._restore and self._state is not None:
            prepared_in(module).load_state_dict(self._state)


__all__ = ["Checkpoint", "prepared_in"]
