# SPDX-License-Identifier: Apache-2.0
"""Training beside the device: helpers of the tests that take whole networks from `prepare` to the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from exactqat import qat
from exactqat.deploy import Graph, dequantize, profiles_here, simulate, unclaimed, verify, write_tflite
from exactqat.deploy.axes import on_device
from exactqat.deploy.lower import lower_with_layouts
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.deploy.values import device_codes, in_users_order, layer_values
from exactqat.qat.train.core.steps import Step
from exactqat.qat.train.torch.frozen import real as in_real_numbers


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
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    return prepared.eval()


def assert_exact(model: qat.PreparedModel, batch: Any, folder: Path) -> Graph:
    """Writes the network, runs it under every profile, compares every operator, and training with the integers."""
    inputs = batch if isinstance(batch, tuple) else (batch,)
    graph, layouts = lower_with_layouts(model)
    codes = device_codes(model, *inputs, lowered=(graph, layouts))
    input_codes = {name: codes[name] for name in graph.inputs}
    path = write_tflite(graph, folder / "model.tflite")
    integers = simulate(graph, input_codes, model.profile, tensors=list(codes))
    assert not [name for name, own in codes.items() if not np.array_equal(own, integers[name])]
    for profile in profiles_here():
        claimed = not unclaimed(graph, profile)
        # LiteRT runs whatever the library writes; microcontrollers lack some operators.
        assert claimed or profile in ("xnnpack-arm64", "micro")
        try:
            report = verify(graph, path, input_codes, profile)
        except RuntimeRefusal:
            assert profile == "micro"
            continue
        assert not claimed or report.differing == 0, (profile, [row for row in report.table() if row["differing"]])
        assert [row.name for row in report.operators] == list(graph.results())
        values = sum(np.prod(graph.tensors[name].shape) for name in graph.results()) * len(inputs[0])
        assert report.values >= values
    assert_training_computed_it(model, graph, layouts, input_codes)
    return graph


def frozen_differences(
    model: qat.PreparedModel, inputs: tuple[Any, ...], profile: str
) -> tuple[int, dict[str, int], dict[str, np.ndarray]]:
    """Codes compared of all tensors that a frozen model stores, how many are not the simulated device's, by name, and
    the codes of the network's inputs. Stored real numbers are compared bit by bit."""
    model.profile = profile
    graph, layouts = lower_with_layouts(model)
    own = device_codes(model, *inputs, lowered=(graph, layouts))
    input_codes = {name: own[name] for name in graph.inputs}
    integers = simulate(graph, input_codes, profile, tensors=list(own))
    _, stored = layer_values(model, *inputs, lowered=(graph, layouts))
    compared, differing = 0, {}
    for name, codes in own.items():
        compared += codes.size
        different = (codes != integers[name]) | (
            stored[name] != dequantize(integers[name], graph.tensors[name].quantization)
        )
        if different.any():
            differing[name] = int(np.count_nonzero(different))
    return compared, differing, input_codes


def by_device(model: qat.PreparedModel, path: str, *features: torch.Tensor) -> torch.Tensor:
    """What a frozen network's step makes of real numbers on the grids of its operands."""
    step, device = model.step(path), model._device
    if not isinstance(step, Step):
        return step(*features)
    device.refresh()
    names = [name for name in model.plan.stored(path).operands if model.plan.is_stored(name)]
    operands = [device.on_grid(name, feature) for name, feature in zip(names, features, strict=True)]
    return in_real_numbers(device.compute(path, step, operands))


def assert_training_computed_it(
    model: qat.PreparedModel, graph: Graph, layouts: dict[str, Any], codes: dict[str, np.ndarray]
) -> None:
    """Every step of the frozen network, fed with the device's own operands, gives the device's codes."""
    layers = {path: layer for path, layer in model.layers() if path in layouts}
    integers = simulate(graph, codes, model.profile, tensors=list(layers))
    zeros = {name: zero for name, (_, zero) in model.numbers().grids.items()}
    real: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for step in (*model.plan.inputs, *model.plan.steps):
            path = step.path
            computed = None
            if path not in graph.inputs:
                operands = [real[name] for name in step.operands if name in real]
                computed = by_device(model, path, *operands)
            if path not in layers:
                real[path] = computed
                continue
            quantization = graph.tensors[path].quantization
            if computed is not None:
                shift = int(quantization.zero_point[0]) - zeros[step.grid]
                own = on_device(layers[path].output_quantizer.codes(computed), layouts[path]) + shift
                assert np.array_equal(own, integers[path]), f"{step.kind} {path}"
            steps = in_users_order(integers[path], layouts[path]).astype(np.float32)
            values = torch.from_numpy((steps - np.float32(quantization.zero_point[0])) * quantization.scale[0])
            four = values.dim() == 4
            real[path] = values.contiguous(memory_format=torch.channels_last) if four else values.contiguous()
