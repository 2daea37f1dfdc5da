# SPDX-License-Identifier: Apache-2.0
"""A file's network as a trainable PyTorch module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core.trained import TrainedNetwork
from ..files import OpenedFile, preparing
from .prepared import PreparedModel


@preparing
def prepare_file(
    file: OpenedFile, device: str | None, options: dict[str, Any]
) -> tuple[PreparedModel, Callable[[], TrainedNetwork]]:
    plan = file.plan(device=device, **options)
    tensors: dict[str, torch.Tensor] = {name: torch.from_numpy(array.copy()) for name, array in file.buffers.items()}
    tensors |= {name: nn.Parameter(torch.from_numpy(array.copy())) for name, array in file.parameters.items()}
    model = PreparedModel(plan, tensors, device).train()
    return model, model.trained


__all__ = ["prepare_file"]
