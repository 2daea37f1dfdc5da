# SPDX-License-Identifier: Apache-2.0
"""For loops that use Hugging Face's Accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list

from ..gate import Gate, Verdict
from ._modules import Checkpoint, Shared

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.nn import Module


def broadcast(value: Shared, /) -> Shared:
    """The first process's object, in all processes."""
    shared: list[Shared] = broadcast_object_list([value])
    return shared[0]


class DeviceCheckpoint(Checkpoint):
    """Scores the prepared model in what `Accelerator.prepare` returned, in the main process::

        checkpoint = DeviceCheckpoint(gate, accelerator)
        for epoch in range(epochs):
            ...
            checkpoint(model, epoch)
        checkpoint.restore(model)

    The score is logged as ``device_score`` where trackers are set up. All processes must call it.
    """

    def __init__(self, gate: Gate, accelerator: Accelerator) -> None:
        super().__init__(gate)
        self._accelerator = accelerator

    def __call__(self, model: Module, step: int) -> Verdict:
        """The verdict, in all processes."""
        verdict = self._score(model, step, self._accelerator.is_main_process, broadcast)
        self._accelerator.log({"device_score": verdict.score}, step=step)
        return verdict

    def restore(self, model: Module) -> None:
        """Gives the model the best state, in all processes."""
        self._give_back(model, broadcast)
