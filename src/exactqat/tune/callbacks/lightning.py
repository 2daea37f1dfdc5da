# SPDX-License-Identifier: Apache-2.0
"""For PyTorch Lightning's `Trainer`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..gate import Gate, Verdict
from ._modules import copied, prepared_in

if TYPE_CHECKING:
    Callback: Any = object
elif find_spec("lightning") is not None:
    from lightning.pytorch.callbacks import Callback
else:
    from pytorch_lightning.callbacks import Callback


class DeviceCheckpoint(Callback):
    """Scores the prepared model in the module on its devices after every validation, and restores its best state at the
    end.

    The score is logged as ``device_score``, which `EarlyStopping` and `ModelCheckpoint` may monitor.

    Attributes:
        verdicts: one for each validation.
    """

    def __init__(self, gate: Gate, restore_best: bool = True) -> None:
        """restore_best: False leaves the model as it is at the end."""
        super().__init__()
        self._gate, self._restore = gate, restore_best
        self.verdicts: list[Verdict] = []
        self._state: Any = None

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        model = prepared_in(pl_module)
        verdict = self._gate(model, trainer.current_epoch)
        self.verdicts.append(verdict)
        pl_module.log("device_score", verdict.score, rank_zero_only=True)
        if verdict.best:
            self._state = copied(model)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._restore and self._state is not None:
            prepared_in(pl_module).load_state_dict(self._state)


__all__ = ["DeviceCheckpoint"]
