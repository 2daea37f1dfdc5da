# SPDX-License-Identifier: Apache-2.0
"""The network whose weights move between frameworks; test_jax_kit.py and in_keras/test_weights.py build theirs."""

from __future__ import annotations

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, (10, 4), 2, (4, 1), bias=True)
        self.stem_norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(8)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.pointwise_norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 12 * 5, 4)
        for norm in (self.stem_norm, self.depthwise_norm, self.pointwise_norm):
            nn.init.normal_(norm.weight, 0.0, 1.0)  # some factors are negative
            nn.init.normal_(norm.bias)
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.1, 2.0)

    def forward(self, x):
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(self.depthwise_norm(self.depthwise(x)))
        x = nn.functional.relu6(self.pointwise_norm(self.pointwise(x)))
        return self.head(x.flatten(1))
