# SPDX-License-Identifier: Apache-2.0
"""A file's network as a trainable PyTorch module."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ....deploy.formats.read_onnx import OnnxModel
from ....deploy.graph import Graph
from ...device import DEFAULT_PROFILE, profile_named
from ...planning.rules import Rule
from ..files import OpenedFile
from .prepared import PreparedModel


def prepare_file(
    graph: Graph | OnnxModel,
    device: str | None = DEFAULT_PROFILE,
    check: bool = True,
    rules: Iterable[Rule] = (Rule(),),
    *,
    deployable: bool = True,
    keep_final_activation: bool | None = None,
) -> PreparedModel:
    """A network that computes what a file does, and trains from there; see `exactqat.qat.prepare`.

    Args:
        graph: from `deploy.read_tflite` or `deploy.read_onnx`.
        check: compare it with the file: integers with those of `device`, real numbers within float32's order of sums.
        rules, deployable: for a file in float32, which gets its ranges from training or calibration.
        keep_final_activation: likewise; of a file in integers that ends with a softmax, None warns that the model
            returns what that gives, True says that this is meant.

    Raises:
        TypeError: graph is not from a file, or has its own grids and rules are given, or ends with a softmax and
            keep_final_activation is False.
        UnsupportedOperator: an operator cannot be trained, or not with its integers unchanged; each is named.
    """
    device = None if device is None else profile_named(device).name
    file = OpenedFile(graph)
    plan = file.plan(rules, deployable, keep_final_activation, device)
    tensors: dict[str, torch.Tensor] = {name: torch.from_numpy(each.copy()) for name, each in file.buffers.items()}
    tensors |= {name: nn.Parameter(torch.from_numpy(each.copy())) for name, each in file.parameters.items()}
    model = PreparedModel(plan, tensors, device).train()
    if check:
        file.compare(model.trained(), device)
    return model
