# SPDX-License-Identifier: Apache-2.0
"""A frozen network as a program with quantize and dequantize nodes: its grids are the file's, its results the kit's."""

from __future__ import annotations

from typing import Any

import numpy as np
import plain_networks
import pytest
import torch
from torch import nn

from exactqat import deploy, qat

# One batch is enough for what is shown here.
pytestmark = pytest.mark.filterwarnings("ignore::exactqat.qat.UnsettledStatisticsWarning")


def frozen(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, example = plain_networks.NETWORKS[name]()
    (example,) = example if isinstance(example, tuple) else (example,)
    prepared = qat.prepare(model.train(), example)
    prepared(example)
    qat.freeze(prepared)
    return prepared.eval(), example


@pytest.mark.parametrize("name", ["ds_cnn", "pads", pytest.param("yolo_v8", marks=pytest.mark.slow)])
def test_its_grids_are_the_files_and_its_results_the_kits(name: str) -> None:
    model, example = frozen(name)
    program = qat.exported_program(model, len(example))
    with torch.no_grad():
        expected = [each for each in torch.utils._pytree.tree_leaves(model(example)) if isinstance(each, torch.Tensor)]
    found = program.module()(example)
    assert [each.shape for each in found] == [each.shape for each in expected]
    values = sum(each.numel() for each in expected)
    # Float32 sums round otherwise than the device in rare codes.
    assert sum(int((ours != theirs).sum()) for ours, theirs in zip(found, expected, strict=True)) <= 0.01 * values

    graph = deploy.lower(model)
    nodes = [node for node in program.graph.nodes if "quantized_decomposed.quantize_per_tensor" in str(node.target)]
    grids = {(float(np.float32(node.args[1])), node.args[2]) for node in nodes}
    stored = [graph.tensors[name] for name in (*graph.inputs, *graph.results())]
    placed = {(float(each.quantization.scale[0]), int(each.quantization.zero_point[0])) for each in stored}
    assert grids == placed
    # Weights are the file's codes, and so are their scales.
    filters = [each.data for each in graph.tensors.values() if each.data is not None and each.dtype == "int8"]
    ours = [np.asarray(each) for each in program.state_dict.values() if each.dtype == torch.int8]
    assert sorted(int(np.abs(each.astype(int)).sum()) for each in ours) == sorted(
        int(np.abs(each.astype(int)).sum()) for each in filters
    )


@pytest.mark.slow
def test_each_reader_has_a_dequantize_node_of_its_own() -> None:
    """Tools that look for operators between such nodes take no other network apart."""
    model, example = frozen("yolo_v8")
    program = qat.exported_program(model, len(example))
    nodes = [node for node in program.graph.nodes if "dequantize_per_tensor" in str(node.target)]
    assert nodes and all(len(node.users) == 1 for node in nodes)


def test_what_cannot_be_exported_is_refused() -> None:
    prepared = qat.prepare(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.rand(2, 4))
    with pytest.raises(TypeError, match="model must come from exactqat.qat.prepare of a PyTorch module, got Linear"):
        qat.exported_program(nn.Linear(4, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model must be frozen before it is exported"):
        qat.exported_program(prepared)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        qat.exported_program(prepared, 0)
    with pytest.raises(TypeError, match="batch must be an integer, got float"):
        qat.exported_program(prepared, 1.0)  # type: ignore[arg-type]
