# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning: python with_lightning.py, which starts the processes itself."""

import digits
import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from exactqat import deploy, qat
from exactqat.qat.distributed import synchronized

PROCESSES = 2


class Module(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def on_train_epoch_start(self):
        if self.current_epoch == digits.EPOCHS - digits.FROZEN:
            qat.freeze(self.model)

    def training_step(self, batch, number):
        return cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 5e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    images, labels = digits.tensors()
    data = TensorDataset(images[digits.train], labels[digits.train])
    model = qat.prepare(digits.network(), images[:2])
    qat.calibrate(model, images[digits.train].split(digits.BATCH))
    trainer = L.Trainer(
        max_epochs=digits.EPOCHS, devices=PROCESSES, accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy=DDPStrategy(broadcast_buffers=False), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with synchronized(model):
        trainer.fit(Module(model), DataLoader(data, digits.BATCH // PROCESSES, shuffle=True))
    model.cpu().eval()
    digits.deliver(deploy.lower(model), model, images[digits.test], trainer.global_rank)
