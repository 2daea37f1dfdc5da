# SPDX-License-Identifier: Apache-2.0
"""For loops that use Hugging Face's Accelerate."""

from __future__ import annotations

from typing import Any

from ..gate import Gate, Verdict
from ._modules import Checkpoint


class DeviceCheckpoint(Checkpoint):
    """Scores the prepared model in what `Accelerator.prepare` returned, in the main process::

        checkpoint = DeviceCheckpoint(gate, accelerator)
        for epoch in range(epochs):
            ...
            checkpoint(model, epoch)
        checkpoint.restore(model)

    The score is logged as ``device_score`` where trackers are set up. All processes must call it.
    """

    def __init__(self, gate: Gate, accelerator: Any) -> None:
        super().__init__(gate)
        self._accelerator = accelerator

    def __call__(self, model: Any, step: int) -> Verdict | None:
        """The verdict, None in other processes."""
        verdict = None
        if self._accelerator.is_main_process:
            verdict = self._score(self._accelerator.unwrap_model(model), step)
            self._accelerator.log({"device_score": verdict.score}, step=step)
        self._accelerator.wait_for_everyone()
        return verdict

    def restore(self, model: Any) -> None:
        """Gives the model the best state, in all processes."""
        if self._accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            (self._state,) = broadcast_object_list([self._state])
        self._give_back(self._accelerator.unwrap_model(model))


__all__ = ["DeviceCheckpoint"]
