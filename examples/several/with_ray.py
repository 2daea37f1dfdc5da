# SPDX-License-Identifier: Apache-2.0
"""Ray Train: python with_ray.py, on this machine or on the cluster that `ray start` has made."""

import digits
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from exactqat import deploy, qat
from exactqat.qat.distributed import synchronized


def work():
    context = ray.train.get_context()
    images, labels = digits.tensors()
    data = TensorDataset(images[digits.train], labels[digits.train])
    model = qat.prepare(digits.network(), images[:2])
    qat.calibrate(model, images[digits.train].split(digits.BATCH))
    model.to(get_device())
    with synchronized(model):
        replica = prepare_model(model, parallel_strategy_kwargs={"broadcast_buffers": False})
        loader = DataLoader(data, digits.BATCH // context.get_world_size(), shuffle=True)
        loader = prepare_data_loader(loader)
        optimizer = torch.optim.Adam(model.parameters(), 5e-3)
        for epoch in range(digits.EPOCHS):
            if epoch == digits.EPOCHS - digits.FROZEN:
                qat.freeze(model)
            replica.train()
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(replica(x), y).backward()
                optimizer.step()
    model.cpu().eval()
    digits.deliver(deploy.lower(model), model, images[digits.test], context.get_world_rank())


if __name__ == "__main__":
    TorchTrainer(work, scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())).fit()
