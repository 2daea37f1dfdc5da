# SPDX-License-Identifier: Apache-2.0
"""FSDP2, which divides parameters, gradients and what the optimizer keeps: torchrun --nproc-per-node 2 fsdp.py."""

import os

import digits
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from exactqat import deploy, qat
from exactqat.qat.distributed import synchronized

kind = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))  # and the group of processes
rank, count = dist.get_rank(), dist.get_world_size()
images, labels = digits.tensors()

model = qat.prepare(digits.network(), images[:2])
qat.calibrate(model, images[digits.train].split(digits.BATCH))
model.to(device)
with synchronized(model):
    fully_shard(model, mesh=mesh)  # the model as a whole
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for epoch in range(digits.EPOCHS):
        if epoch == digits.EPOCHS - digits.FROZEN:
            qat.freeze(model)
        model.train()
        for batch in digits.batches(epoch):
            own = batch[rank::count]
            optimizer.zero_grad()
            cross_entropy(model(images[own].to(device)), labels[own].to(device)).backward()
            optimizer.step()

model.eval()
graph = deploy.lower(model)  # gathers the parameters, in every process
digits.deliver(graph, model, images[digits.test], rank)
dist.destroy_process_group()
