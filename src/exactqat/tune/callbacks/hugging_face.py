# SPDX-License-Identifier: Apache-2.0
"""For Hugging Face's `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._modules import Checkpoint
from .accelerate import broadcast

if TYPE_CHECKING:
    from torch.nn import Module

    TrainerCallback: Any = object
else:
    from transformers import TrainerCallback


class DeviceCheckpoint(Checkpoint, TrainerCallback):
    """Scores the prepared model in the trainer's model on its devices at every evaluation, and restores its best state
    at the end.

    The score is in the metrics as ``eval_device_score``, which ``metric_for_best_model`` may name.
    """

    def on_evaluate(
        self, args: Any, state: Any, control: Any, model: Module, metrics: dict[str, float] | None = None, **others: Any
    ) -> None:
        verdict = self._score(model, state.global_step, state.is_world_process_zero, broadcast)
        if metrics is not None:
            metrics["eval_device_score"] = verdict.score

    def on_train_end(self, args: object, state: object, control: object, model: Module, **others: object) -> None:
        self._give_back(model, broadcast)
