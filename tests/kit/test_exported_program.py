# SPDX-License-Identifier: Apache-2.0
"""A frozen network as a program with quantize and dequantize nodes: its grids are the file's, its results the kit's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import plain_networks
import pytest
import torch
from torch import nn

from exactqat import deploy, qat

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "executorch"))

from cortex_m import mark_for_cmsis_nn  # noqa: E402
from exported_program import exported_program  # noqa: E402

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
    program = exported_program(model, len(example))
    with torch.no_grad():
        expected = [leaf for leaf in torch.utils._pytree.tree_leaves(model(example)) if isinstance(leaf, torch.Tensor)]
    results = program.module()(example)
    assert [tensor.shape for tensor in results] == [tensor.shape for tensor in expected]
    values = sum(tensor.numel() for tensor in expected)
    # Float32 sums round otherwise than the device in rare codes.
    assert sum(int((ours != theirs).sum()) for ours, theirs in zip(results, expected, strict=True)) <= 0.01 * values

    graph = deploy.lower(model)
    nodes = [node for node in program.graph.nodes if "quantized_decomposed.quantize_per_tensor" in str(node.target)]
    grids = {(float(np.float32(node.args[1])), node.args[2]) for node in nodes}
    stored = [graph.tensors[name] for name in (*graph.inputs, *graph.results())]
    placed = {(float(tensor.quantization.scale[0]), int(tensor.quantization.zero_point[0])) for tensor in stored}
    assert grids == placed
    # Weights are the file's codes, and so are their scales.
    filters = [tensor.data for tensor in graph.tensors.values() if tensor.data is not None and tensor.dtype == "int8"]
    ours = [np.asarray(tensor) for tensor in program.state_dict.values() if tensor.dtype == torch.int8]
    assert sorted(int(np.abs(array.astype(int)).sum()) for array in ours) == sorted(
        int(np.abs(array.astype(int)).sum()) for array in filters
    )


@pytest.mark.slow
def test_each_reader_has_a_dequantize_node_of_its_own() -> None:
    """Tools that look for operators between such nodes take no other network apart."""
    model, example = frozen("yolo_v8")
    program = exported_program(model, len(example))
    nodes = [node for node in program.graph.nodes if "dequantize_per_tensor" in str(node.target)]
    assert nodes and all(len(node.users) == 1 for node in nodes)


def test_for_cortex_m_integer_operators_are_marked() -> None:
    model, example = frozen("ds_cnn")
    with torch.no_grad():
        expected = model(example)
    program = exported_program(model, len(example), flow="cortex-m")
    (result,) = program.module()(example)
    assert int((result != expected).sum()) <= 0.01 * expected.numel()
    called = [node for node in program.graph.nodes if node.op == "call_function"]
    marked = [node for node in called if node.meta.get("custom", {}).get("_arm_annotation_info")]
    # The dense layer has a scale for each output, which the kernel does not take, and the mean another grid.
    targets = [str(node.target) for node in marked]
    assert targets.count("aten.conv2d.default") == targets.count("aten.relu.default") == 5
    assert not any("linear" in target or "pool" in target for target in targets)
    held = [bias.dtype for name, bias in program.state_dict.items() if name.startswith("bias_") and "steps" not in name]
    assert held and set(held) == {torch.int32}
    xnnpack = exported_program(model, len(example))
    assert not [node for node in xnnpack.graph.nodes if node.meta.get("custom", {}).get("_arm_annotation_info")]


class Marked(nn.Module):
    """A function between quantize and dequantize nodes."""

    def __init__(self, function: Any, result: tuple[float, int]) -> None:
        super().__init__()
        self.function, self.result = function, result

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        nodes, codes = torch.ops.quantized_decomposed, (-128, 127, torch.int8)
        stored = [nodes.quantize_per_tensor.default(tensor, 0.1, 3, *codes) for tensor in tensors]
        read = [nodes.dequantize_per_tensor.default(tensor, 0.1, 3, *codes) for tensor in stored]
        result = nodes.quantize_per_tensor.default(self.function(*read), *self.result, *codes)
        return nodes.dequantize_per_tensor.default(result, *self.result, *codes)


SAME, OTHER, SHARES, FROM_ZERO = (0.1, 3), (0.2, 3), (1 / 256, -128), (0.1, -128)


@pytest.mark.parametrize(
    ("function", "shapes", "result", "is_marked"),
    [
        (torch.add, [(1, 4), (1, 4)], OTHER, True),
        (torch.add, [(1, 4), (4,)], OTHER, False),
        (lambda a, b: torch.add(a, b, alpha=2), [(1, 4), (1, 4)], OTHER, False),
        (lambda a, b: torch.relu(a + b), [(1, 4), (1, 4)], FROM_ZERO, True),
        (lambda a, b: torch.relu(a + b), [(1, 4), (1, 4)], OTHER, False),
        (lambda a, b: torch.clamp(a - b, 0.0, 20.0), [(1, 4), (1, 4)], FROM_ZERO, False),
        (lambda a, b: torch.clamp(a - b, 0.0, 30.0), [(1, 4), (1, 4)], FROM_ZERO, True),
        (torch.mul, [(1, 4), (1, 4)], OTHER, True),
        (lambda a, b: torch.relu(a * b), [(1, 4), (1, 4)], FROM_ZERO, False),
        (torch.sigmoid, [(1, 4)], SHARES, True),
        (lambda a: torch.softmax(a, -1), [(1, 4)], SHARES, True),
        (lambda a: torch.softmax(a, -1), [(1, 4)], OTHER, False),
        (lambda a: torch.softmax(a, 0), [(1, 4)], SHARES, False),
        (lambda a: nn.functional.max_pool2d(a, 2), [(1, 3, 4, 4)], SAME, True),
        (lambda a: nn.functional.max_pool2d(a, 2), [(1, 3, 4, 4)], OTHER, False),
        (lambda a: nn.functional.avg_pool2d(a, 2), [(1, 3, 4, 4)], SAME, True),
        (lambda a: nn.functional.avg_pool2d(a, 2), [(1, 3, 4, 4)], OTHER, False),
        (lambda a: nn.functional.avg_pool2d(a, 2, padding=1), [(1, 3, 4, 4)], SAME, False),
        (lambda a: a.reshape(2, 2), [(1, 4)], SAME, True),
        (lambda a: a.reshape(2, 2), [(1, 4)], OTHER, False),
        (torch.exp, [(1, 4)], SAME, False),
    ],
)
def test_only_what_the_kernel_computes_is_marked(
    function: Any, shapes: list[tuple[int, ...]], result: tuple[float, int], is_marked: bool
) -> None:
    inputs = [torch.rand(shape) for shape in shapes]
    inputs = [array.contiguous(memory_format=torch.channels_last) if array.dim() == 4 else array for array in inputs]
    program = torch.export.export(Marked(function, result), tuple(inputs), strict=False)
    mark_for_cmsis_nn(program.graph_module)
    marked = [node for node in program.graph.nodes if node.meta.get("custom", {}).get("_arm_annotation_info")]
    assert bool(marked) == is_marked


def test_what_cannot_be_exported_is_refused() -> None:
    prepared = qat.prepare(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.rand(2, 4))
    with pytest.raises(TypeError, match="model must come from exactqat.qat.prepare of a PyTorch module, got Linear"):
        exported_program(nn.Linear(4, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model must be frozen before it is exported"):
        exported_program(prepared)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        exported_program(prepared, 0)
    with pytest.raises(ValueError, match="flow must be one of xnnpack, cortex-m, got 'vulkan'"):
        exported_program(prepared, 1, flow="vulkan")
    with pytest.raises(TypeError, match="batch must be an integer, got float"):
        exported_program(prepared, 1.0)  # type: ignore[arg-type]
