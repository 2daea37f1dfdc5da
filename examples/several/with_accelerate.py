# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Accelerate: accelerate launch --num_processes 2 with_accelerate.py (on CPUs: torchrun)."""

import digits
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from exactqat import deploy, qat
from exactqat.qat.distributed import synchronized

# Without cpu=True, Accelerate takes the processes on CPUs for single ones.
options = [DistributedDataParallelKwargs(broadcast_buffers=False)]
accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=options)
images, labels = digits.tensors()
data = TensorDataset(images[digits.train], labels[digits.train])

model = qat.prepare(digits.network(), images[:2])
qat.calibrate(model, images[digits.train].split(digits.BATCH))
with synchronized(model):
    loader = DataLoader(data, digits.BATCH // accelerator.num_processes, shuffle=True)
    replica, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 5e-3), loader)
    for epoch in range(digits.EPOCHS):
        if epoch == digits.EPOCHS - digits.FROZEN:
            qat.freeze(model)
        replica.train()
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(replica(x), y))
            optimizer.step()

model.cpu().eval()
digits.deliver(deploy.lower(model), model, images[digits.test], accelerator.process_index)
accelerator.end_training()
