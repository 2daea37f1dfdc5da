# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py; on several machines, torchrun --nnodes 2 ... on each."""

import os

import digits
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from exactqat import deploy, qat
from exactqat.qat.distributed import synchronized

dist.init_process_group()  # NCCL for GPUs, gloo for CPUs
rank, count = dist.get_rank(), dist.get_world_size()
cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
images, labels = digits.tensors()

model = qat.prepare(digits.network(), images[:2])
qat.calibrate(model, images[digits.train].split(digits.BATCH))  # all images, so that all processes have the same ranges
model.to(device)
with synchronized(model):  # batch norm and ranges are those of all processes' images
    replica = DistributedDataParallel(model, broadcast_buffers=False)  # buffers are equal everywhere
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for epoch in range(digits.EPOCHS):
        if epoch == digits.EPOCHS - digits.FROZEN:
            qat.freeze(model)
        replica.train()
        for batch in digits.batches(epoch):
            own = batch[rank::count]
            optimizer.zero_grad()
            cross_entropy(replica(images[own].to(device)), labels[own].to(device)).backward()
            optimizer.step()

model.cpu().eval()
digits.deliver(deploy.lower(model), model, images[digits.test], rank)
dist.destroy_process_group()
