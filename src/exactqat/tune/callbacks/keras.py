# SPDX-License-Identifier: Apache-2.0
"""For `keras.Model.fit`."""

from __future__ import annotations

from typing import Any

import keras

from ..gate import Gate, Verdict


class DeviceCheckpoint(keras.callbacks.Callback):
    """Scores the prepared model on its devices after every epoch, and restores its best weights at the end.

    The score is in the logs as ``device_score``, which other callbacks may monitor: list them after this one.

    Attributes:
        verdicts: one for each epoch.
    """

    def __init__(self, gate: Gate, restore_best: bool = True) -> None:
        """restore_best: False leaves the model as it is after the last epoch."""
        super().__init__()
        self._gate, self._restore = gate, restore_best
        self.verdicts: list[Verdict] = []
        self._weights: Any = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        verdict = self._gate(self.model, epoch)
        self.verdicts.append(verdict)
        if logs is not None:
            logs["device_score"] = verdict.score
        if verdict.best:
            self._weights = self.model.get_weights()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._restore and self._weights is not None:
            self.model.set_weights(self._weights)
