# SPDX-License-Identifier: Apache-2.0
"""A quantized file's network as a PyTorch module that trains."""

from __future__ import annotations

import torch
from torch import nn

from ...deploy.graph import Graph, require_graph
from ...deploy.trainable import compare_with_file, trainable
from ...device import DEFAULT_PROFILE, profile_named
from .prepared import PreparedModel


def prepare_file(graph: Graph, device: str | None = DEFAULT_PROFILE, check: bool = True) -> PreparedModel:
    """A network that computes a file's integers, and trains from there; see `exactqat.qat.prepare`.

    Args:
        graph: of `deploy.read_tflite`.
        device: whose integers it computes once it is frozen; None: it stays fake quantized.
        check: compare its integers with the file's, those of `device`.

    Raises:
        TypeError: graph is no Graph.
        UnsupportedOperator: an operator cannot be trained so that its integers stay what they are; each is named.
    """
    require_graph(graph)
    device = None if device is None else profile_named(device).name
    made = trainable(graph)
    tensors: dict[str, torch.Tensor] = {name: torch.from_numpy(each.copy()) for name, each in made.buffers.items()}
    tensors |= {name: nn.Parameter(torch.from_numpy(each.copy())) for name, each in made.parameters.items()}
    model = PreparedModel(made.plan, tensors, device).train()
    if check:
        compare_with_file(graph, made.plan, model.numbers(), device or DEFAULT_PROFILE)
    return model
