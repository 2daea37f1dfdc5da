# SPDX-License-Identifier: Apache-2.0
"""Training beside the device: helpers of the tests that take whole networks from `prepare` to the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from exactqat import qat
from exactqat.deploy import EXACT, Graph, profiles_here, simulate, verify, write_tflite
from exactqat.deploy.lower import lower_with_layouts, on_device
from exactqat.deploy.values import device_codes, in_users_order

# Codes of trained tensors, computed in float, that may miss those of the integers, by one: float sums in another order.
OFF_BY_ONE = 0.005


def leaves(result: Any) -> list[torch.Tensor]:
    """The tensors of real numbers of a model's result, however it nests."""
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def trained(model: nn.Module, batch: Any, *rules: qat.Rule, steps: int = 3) -> qat.PreparedModel:
    """A few steps towards random targets, the last of them frozen. batch: a tensor, or a tuple of them."""
    prepared = qat.prepare(model, batch, rules or [qat.Rule()])
    qat.calibrate(prepared, [batch])
    parameters = [parameter for parameter in prepared.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, 1e-3) if parameters else None
    prepared.train()
    for step in range(steps):
        if step == steps - 1:
            qat.freeze(prepared)
        results = leaves(prepared(*(batch if isinstance(batch, tuple) else (batch,))))
        if optimizer is not None:
            optimizer.zero_grad()
            sum((result - torch.randn_like(result)).square().mean() for result in results).backward()
            optimizer.step()
    return prepared.eval()


def assert_exact(model: qat.PreparedModel, batch: Any, folder: Path) -> Graph:
    """Writes the network, runs it under every profile, compares every operator, and training with the integers."""
    inputs = batch if isinstance(batch, tuple) else (batch,)
    graph, layouts = lower_with_layouts(model)
    codes = device_codes(model, *inputs, lowered=(graph, layouts))
    given = {name: codes[name] for name in graph.inputs}
    path = write_tflite(graph, folder / "model.tflite")
    for profile in profiles_here():
        assert all((operator.kind, profile) in EXACT for operator in graph.operators)
        report = verify(graph, path, given, profile)
        assert report.differing == 0, (profile, [row for row in report.table() if row["differing"]])
        assert [row.name for row in report.operators] == list(graph.results())
        values = sum(np.prod(graph.tensors[name].shape) for name in graph.results()) * len(inputs[0])
        assert report.values >= values
    assert_training_computed_it(model, graph, layouts, given)
    return graph


def assert_training_computed_it(
    model: qat.PreparedModel, graph: Graph, layouts: dict[str, Any], codes: dict[str, np.ndarray]
) -> None:
    """Every step of the trained network, fed with the device's own operands, gives the device's codes."""
    layers = {path: layer for path, layer in model.layers() if path in layouts}
    integers = simulate(graph, codes, tensors=list(layers))
    zeros = {name: zero for name, (_, zero) in model.numbers().grids.items()}
    real: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for step in (*model.plan.inputs, *model.plan.steps):
            path = step.path
            computed = None
            if path not in graph.inputs:
                computed = model.step(path)(*[real[name] for name in step.operands if name in real])
            if path not in layers:
                real[path] = computed
                continue
            quantization = graph.tensors[path].quantization
            if computed is not None:
                shift = int(quantization.zero_point[0]) - zeros[step.grid]
                own = on_device(layers[path].output_quantizer.codes(computed), layouts[path]) + shift
                difference = np.abs(own - integers[path])
                assert difference.max() <= 1, path
                assert np.count_nonzero(difference) <= max(1, OFF_BY_ONE * difference.size), path
            steps = in_users_order(integers[path], layouts[path]).astype(np.float32)
            values = torch.from_numpy((steps - np.float32(quantization.zero_point[0])) * quantization.scale[0])
            four = values.dim() == 4
            real[path] = values.contiguous(memory_format=torch.channels_last) if four else values.contiguous()
