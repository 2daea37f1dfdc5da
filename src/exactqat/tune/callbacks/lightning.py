# SPDX-License-Identifier: Apache-2.0
"""For PyTorch Lightning's `Trainer`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ._modules import Checkpoint

if TYPE_CHECKING:
    Callback: Any = object
elif find_spec("lightning") is not None:
    from lightning.pytorch.callbacks import Callback
else:
    from pytorch_lightning.callbacks import Callback


class DeviceCheckpoint(Checkpoint, Callback):
    """Scores the prepared model in the module on its devices after every validation, and restores its best state at the
    end.

    The score is logged as ``device_score``, which `EarlyStopping` and `ModelCheckpoint` may monitor.
    """

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            verdict = self._score(pl_module, trainer.current_epoch, trainer.is_global_zero, trainer.strategy.broadcast)
            # All processes log the same score: their maximum is exact, a mean might round.
            pl_module.log("device_score", verdict.score, sync_dist=True, reduce_fx="max")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._give_back(pl_module, trainer.strategy.broadcast)
