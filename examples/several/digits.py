# SPDX-License-Identifier: Apache-2.0
"""What the programs in this folder share: handwritten digits, a network, and what each process does in the end."""

import hashlib

import numpy as np
from sklearn.datasets import load_digits

from exactqat import deploy

EPOCHS, FROZEN, BATCH = 4, 1, 60  # of the epochs the last ones; of all processes together
_digits = load_digits()
images, labels = (_digits.images / 16).astype(np.float32), _digits.target
train, test = slice(0, 1440), slice(1440, None)


def network():
    """In PyTorch, for images [n, 1, 8, 8]."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, 2, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip


def tensors():
    """Images [n, 1, 8, 8] and labels in PyTorch."""
    import torch

    return torch.from_numpy(images)[:, None], torch.from_numpy(labels)


def batches(epoch):
    """The numbers of the images of each batch, the same in every process."""
    return np.random.default_rng(epoch).permutation(len(images[train])).reshape(-1, BATCH)


def deliver(graph, model, data, process):
    """Writes the file and compares it with the model, which all processes have."""
    path = deploy.write_tflite(graph, f"digits-{process}.tflite")
    report = deploy.verify(graph, path, model=model, data=data)
    scores = deploy.simulate(graph, deploy.input_codes(graph, data), progress=False)[graph.outputs[0]]
    accuracy = f"{(scores.argmax(1) == labels[test]).mean():.3f} right"
    compared = f"{report.differing} of {report.values} integers differ"
    print(f"process {process}: {accuracy}, {compared}, file {hashlib.sha256(path.read_bytes()).hexdigest()}")
    assert report.equal, report
