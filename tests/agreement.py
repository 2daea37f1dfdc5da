# SPDX-License-Identifier: Apache-2.0
"""Training beside the device: helpers of the tests that take whole networks from `prepare` to the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from exactqat import qat
from exactqat.deploy import EXACT, Graph, dequantize, profiles_here, simulate, verify, write_tflite
from exactqat.deploy.lower import lower_with_layouts, on_device
from exactqat.deploy.values import device_codes, in_users_order, layer_values

# Share of codes of trained tensors, computed in float, that may miss those of the integers by one: float sums in
# another order, and the device's multipliers of limited width.
OFF_BY_ONE = 0.005
# How far from the middle between two codes a value counts as a tie, in steps: training rounds those up, the device to
# even or away from zero, and after a product with 0.5 every other code is one.
TIE = 0.01
# XNNPACK's multipliers of leaky ReLU have eight fractional bits: in steps of the result.
COARSE = {"LEAKY_RELU": 0.15}


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


def frozen_differences(
    model: qat.PreparedModel, inputs: tuple[Any, ...], profile: str
) -> tuple[int, dict[str, int], dict[str, np.ndarray]]:
    """Codes compared of all tensors that a frozen model stores, how many are not the simulated device's, by name, and
    the codes of the network's inputs. Stored real numbers are compared bit by bit."""
    model.profile = profile
    graph, layouts = lower_with_layouts(model)
    own = device_codes(model, *inputs, lowered=(graph, layouts))
    given = {name: own[name] for name in graph.inputs}
    integers = simulate(graph, given, profile, tensors=list(own))
    _, stored = layer_values(model, *inputs, lowered=(graph, layouts))
    compared, differing = 0, {}
    for name, codes in own.items():
        compared += codes.size
        different = (codes != integers[name]) | (stored[name] != dequantize(integers[name], graph.tensors[name].quantization))
        if different.any():
            differing[name] = int(np.count_nonzero(different))
    return compared, differing, given


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
                operands = [real[name] for name in step.operands if name in real]
                computed = model.step(path)(*operands)
            if path not in layers:
                real[path] = computed
                continue
            quantization = graph.tensors[path].quantization
            if computed is not None:
                layer, zero_point = layers[path], int(quantization.zero_point[0])
                shift = zero_point - zeros[step.grid]
                own = on_device(layer.output_quantizer.codes(computed), layouts[path]) + shift
                difference = np.abs(own - integers[path])
                differ = difference > 0
                if differ.any() and not layer.operator.same_quantization:
                    before = on_device(before_rounding(layer, operands), layouts[path])
                    off = np.abs(before / quantization.scale[0] + zero_point - integers[path])
                    differ &= off > 0.5 + COARSE.get(step.kind, TIE)
                share = np.count_nonzero(differ) / differ.size
                what = f"{step.kind} {path}: {share:.2%} of {differ.size} differ, by up to {difference.max()}"
                assert difference.max() <= 1, what
                assert np.count_nonzero(differ) <= max(1, OFF_BY_ONE * differ.size), what
            steps = in_users_order(integers[path], layouts[path]).astype(np.float32)
            values = torch.from_numpy((steps - np.float32(quantization.zero_point[0])) * quantization.scale[0])
            four = values.dim() == 4
            real[path] = values.contiguous(memory_format=torch.channels_last) if four else values.contiguous()


def before_rounding(layer: qat.QuantizedLayer, operands: list[torch.Tensor]) -> np.ndarray:
    """A layer's result before it is put on its grid."""
    layer.output_quantizer.quantizing = False
    try:
        return layer(*operands).numpy()
    finally:
        layer.output_quantizer.quantizing = True
