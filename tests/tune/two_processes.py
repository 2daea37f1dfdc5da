# SPDX-License-Identifier: Apache-2.0
"""A training by two processes in somebody's loop, run by torchrun: two_processes.py LOOP FOLDER. The second epoch ruins
the model; both processes have the same verdicts, and the best state in the end."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from networks import examples
from test_callbacks import classifier, lightning_module, prepared, require_best, rows, ruin
from torch.utils.data import DataLoader, TensorDataset

from exactqat import tune
from exactqat.qat.distributed import synchronized

DATA = examples(128, 1)


def batches() -> DataLoader[Any]:
    images, classes = (torch.from_numpy(array) for array in examples(64, 3))
    return DataLoader(TensorDataset(images, classes), batch_size=16)


def lightning(gate: tune.Gate, model: Any, folder: str) -> list[tune.Verdict]:
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.strategies import DDPStrategy

    checkpoint = tune.callbacks.lightning.DeviceCheckpoint(gate)
    trainer = L.Trainer(
        max_epochs=4, limit_train_batches=1, accelerator="cpu", devices=2, num_sanity_val_steps=0, logger=False,
        callbacks=[checkpoint, EarlyStopping("device_score", mode="max", patience=1)], enable_checkpointing=False,
        strategy=DDPStrategy(broadcast_buffers=False, process_group_backend="gloo"), enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(lightning_module(model), batches(), batches())
    assert float(trainer.callback_metrics["device_score"]) < 0.9 and trainer.current_epoch < 3
    return checkpoint.verdicts


def hugging_face(gate: tune.Gate, model: Any, folder: str) -> list[tune.Verdict]:
    import transformers

    checkpoint = tune.callbacks.hugging_face.DeviceCheckpoint(gate)
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="no", use_cpu=True,
        per_device_train_batch_size=16, learning_rate=1e-5, report_to=[], disable_tqdm=True, ddp_backend="gloo",
        metric_for_best_model="eval_device_score", ddp_broadcast_buffers=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        classifier(model), arguments, train_dataset=rows(), eval_dataset=rows(), callbacks=[checkpoint]
    )
    trainer.train()
    return checkpoint.verdicts


def accelerate(gate: tune.Gate, model: Any, folder: str) -> list[tune.Verdict]:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    wrapped, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-4), batches())
    checkpoint = tune.callbacks.accelerate.DeviceCheckpoint(gate, accelerator)
    for epoch in range(2):
        for images, classes in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(wrapped(images), classes))
            optimizer.step()
        if epoch == 1:
            ruin(model)
        checkpoint(wrapped, epoch)
    checkpoint.restore(wrapped)
    return checkpoint.verdicts


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _, loop, folder = sys.argv
    gate, model = tune.Gate(DATA), prepared()
    with synchronized(model):
        verdicts = {"lightning": lightning, "hugging_face": hugging_face, "accelerate": accelerate}[loop](
            gate, model, folder
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    everything: list[Any] = [None, None]
    state = {name: value.tolist() for name, value in model.state_dict().items() if hasattr(value, "tolist")}
    dist.all_gather_object(everything, ([verdict.as_json() for verdict in verdicts], state))
    assert everything[0] == everything[1]
    if dist.get_rank() == 0:
        require_best(gate, verdicts, model, 2)
