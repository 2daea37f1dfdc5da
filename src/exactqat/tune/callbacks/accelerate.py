# SPDX-License-Identifier: Apache-2.0
"""For loops that use Hugging Face's Accelerate."""

from __future__ import annotations

from typing import Any

from ..gate import Gate, Verdict
from ._modules import copied, prepared_in


class DeviceCheckpoint:
    """Scores the prepared model in what `Accelerator.prepare` returned, in the main process::

        checkpoint = DeviceCheckpoint(gate, accelerator)
        for epoch in range(epochs):
            ...
            checkpoint(model, epoch)
        checkpoint.restore(model)

    The score is logged as ``device_score`` where trackers are set up. All processes must call it.

    Attributes:
        verdicts: one for each call, in the main process.
    """

    def __init__(self, gate: Gate, accelerator: Any) -> None:
        self._gate, self._accelerator = gate, accelerator
        self.verdicts: list[Verdict] = []
        self._state: Any = None

    def __call__(self, model: Any, step: int) -> Verdict | None:
        """The verdict, None in other processes."""
        verdict = None
        if self._accelerator.is_main_process:
            prepared = prepared_in(self._accelerator.unwrap_model(model))
            verdict = self._gate(prepared, step)
            self.verdicts.append(verdict)
            if verdict.best:
                self._state = copied(prepared)
            self._accelerator.log({"device_score": verdict.score}, step=step)
        self._accelerator.wait_for_everyone()
        return verdict

    def restore(self, model: Any) -> None:
        """Gives the model the best state, in all processes."""
        state = self._state
        if self._accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            (state,) = broadcast_object_list([state])
        if state is not None:
            prepared_in(self._accelerator.unwrap_model(model)).load_state_dict(state)


__all__ = ["DeviceCheckpoint"]
