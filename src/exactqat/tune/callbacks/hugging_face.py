# SPDX-License-Identifier: Apache-2.0
"""For Hugging Face's `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._modules import Checkpoint

if TYPE_CHECKING:
    TrainerCallback: Any = object
else:
    from transformers import TrainerCallback


class DeviceCheckpoint(Checkpoint, TrainerCallback):
    """Scores the prepared model in the trainer's model on its devices at every evaluation, and restores its best state
    at the end.

    The score is in the metrics as ``eval_device_score``, which ``metric_for_best_model`` may name.
    """

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, metrics: Any = None, **others: Any) -> None:
        if state.is_world_process_zero:
            verdict = self._score(model, state.global_step)
            if metrics is not None:
                metrics["eval_device_score"] = verdict.score

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
        self._give_back(model)


__all__ = ["DeviceCheckpoint"]
