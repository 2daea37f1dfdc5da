# SPDX-License-Identifier: Apache-2.0
"""What the adapters for PyTorch loops share: they score the prepared model in a module, and keep its best state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..gate import Gate, Verdict

if TYPE_CHECKING:
    from torch.nn import Module

Shared = TypeVar("Shared")


class Broadcast(Protocol):
    """Returns the first process's object in all processes; all have to call it."""

    def __call__(self, value: Shared, /) -> Shared: ...


def prepared_in(module: Module) -> Module:
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
    """Scores the prepared model in a module in the first process, and restores its best state in all of them.

    Attributes:
        verdicts: one for each time, the same in all processes.
    """

    def __init__(self, gate: Gate, restore_best: bool = True) -> None:
        """restore_best: False leaves the model as it is at the end."""
        super().__init__()
        self._gate, self._restore = gate, restore_best
        self.verdicts: list[Verdict] = []
        self._state: dict[str, Any] | None = None

    def _score(self, module: Module, step: int, is_first: bool, broadcast: Broadcast) -> Verdict:
        verdict, model = None, prepared_in(module)
        if hasattr(type(model), "reshard") or any(hasattr(tensor, "full_tensor") for tensor in model.parameters()):
            raise TypeError(
                "DeviceCheckpoint scores in the first process, which holds a part of what fully_shard has divided: "
                "call the gate in every process instead, gate(model, step)"
            )
        if is_first:
            verdict = self._gate(model, step)
            if verdict.best:
                # On the CPU: other processes have other devices.
                self._state = {
                    name: value.detach().cpu().clone() if hasattr(value, "detach") else value
                    for name, value in model.state_dict().items()
                }
        verdict = broadcast(verdict)
        assert verdict is not None
        self.verdicts.append(verdict)
        return verdict

    def _give_back(self, module: Module, broadcast: Broadcast) -> None:
        state = broadcast(self._state) if self._restore else None
        if state is not None:
            prepared_in(module).load_state_dict(state)
