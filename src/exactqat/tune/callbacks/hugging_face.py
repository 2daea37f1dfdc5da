# SPDX-License-Identifier: Apache-2.0
"""For Hugging Face's `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..gate import Gate, Verdict
from ._modules import copied, prepared_in

if TYPE_CHECKING:
    TrainerCallback: Any = object
else:
    from transformers import TrainerCallback


class DeviceCheckpoint(TrainerCallback):
    """Scores the prepared model in the trainer's model on its devices at every evaluation, and restores its best state
    at the end.

    The score is in the metrics as ``eval_device_score``, which ``metric_for_best_model`` may name.

    Attributes:
        verdicts: one for each evaluation.
    """

    def __init__(self, gate: Gate, restore_best: bool = True) -> None:
        """restore_best: False leaves the model as it is at the end."""
        self._gate, self._restore = gate, restore_best
        self.verdicts: list[Verdict] = []
        self._state: Any = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not state.is_world_process_zero:
            return
        model = prepared_in(given["model"])
        verdict = self._gate(model, state.global_step)
        self.verdicts.append(verdict)
        if given.get("metrics") is not None:
            given["metrics"]["eval_device_score"] = verdict.score
        if verdict.best:
            self._state = copied(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._restore and self._state is not None:
            prepared_in(given["model"]).load_state_dict(self._state)


__all__ = ["DeviceCheckpoint"]
