# SPDX-License-Identifier: Apache-2.0
"""Which operators of an exported program ExecuTorch's Cortex-M flow may compute in integers, by CMSIS-NN.

The flow trusts Arm's quantizer, which marks the operators that the kernels support, on grids for which they are
correct: a wrongly marked one is silently computed wrongly. Unmarked operators stay float32 between a dequantize and a
quantize node. The conditions are those of executorch 1.5's `backends/cortex_m/quantizer/pattern_checkers.py` and its
lowering.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # noqa: F401 - registers the operators
from torch.fx import GraphModule, Node

_ATEN, _NODES = torch.ops.aten, torch.ops.quantized_decomposed
_QUANTIZE = _NODES.quantize_per_tensor.default
_DEQUANTIZE = _NODES.dequantize_per_tensor.default
_PER_CHANNEL = _NODES.dequantize_per_channel.default
_MARK = {"_arm_annotation_info": {"quantized": True}}
_CONVOLUTIONS = (_ATEN.conv2d.default, _ATEN.conv2d.padding)
_SUMS = (_ATEN.add.Tensor, _ATEN.sub.Tensor)
_TABLES = (_ATEN.sigmoid.default, _ATEN.tanh.default)
# These return codes from their operands.
_MOVES = (_ATEN.reshape.default, _ATEN.view.default, _ATEN.flatten.using_ints, _ATEN.permute.default)
_ACTIVATIONS = (_ATEN.relu.default, _ATEN.relu6.default, _ATEN.hardtanh.default, _ATEN.clamp.default)
_CODES = (-128, 127, torch.int8)


def mark_for_cmsis_nn(module: GraphModule) -> None:
    """Marks operators between quantize and dequantize nodes, and activations fused into them."""
    for node in module.graph.nodes:
        activation = _activation_of(node)
        last = activation or node
        if node.op == "call_function" and _result_grid(last) and _is_computed(node, activation):
            for part in dict.fromkeys((node, last)):
                part.meta["custom"] = {**part.meta.get("custom", {}), **_MARK}


def _activation_of(node: Node) -> Node | None:
    """An activation that is the node's only reader."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if user is not None and user.target in _ACTIVATIONS else None


def _result_grid(node: Node) -> tuple[Any, ...]:
    """Scale, zero point, ends and dtype of the stored result; empty if it is not stored, or not in int8."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    if user is None or user.target is not _QUANTIZE or user.args[3:] != _CODES:
        return ()
    return tuple(user.args[1:])


def _operand_grid(argument: Any) -> tuple[Any, ...]:
    if not isinstance(argument, Node) or argument.target is not _DEQUANTIZE or argument.args[-1] != torch.int8:
        return ()
    return tuple(argument.args[1:])


def _is_computed(node: Node, activation: Node | None) -> bool:
    arguments: list[Any] = list(node.args)
    grid, result = _operand_grid(arguments[0]) if arguments else (), _result_grid(activation or node)
    if not grid or (activation is not None and not _is_fused(activation, result)):
        return False
    shapes = [tuple(operand.meta["val"].shape) for operand in node.all_input_nodes]
    if node.target in _CONVOLUTIONS:
        return _are_weights(arguments[1]) and _has_channels_last(arguments[0]) and _has_integer_bias(node)
    if node.target is _ATEN.linear.default:
        # The kernel takes one scale for all weights.
        return _operand_grid(arguments[1]) != () and _has_integer_bias(node)
    if node.target in _SUMS:
        # Both are the same node if a node is added to itself.
        return _operand_grid(arguments[1]) != () and len(set(shapes)) == 1 and not node.kwargs
    if activation is not None:
        return False
    if node.target is _ATEN.mul.Tensor:
        return _operand_grid(arguments[1]) != () and len(set(shapes)) == 1
    if node.target in _TABLES:
        return True
    if node.target is _ATEN.softmax.int:
        return arguments[1] in (-1, len(shapes[0]) - 1) and len(shapes[0]) < 4 and result[:2] == (1 / 256, -128)
    if node.target is _ATEN.max_pool2d.default:
        plain = len(arguments) < 5 or (tuple(arguments[4]) in ((1, 1), (1,)) and not any(arguments[5:]))
        return plain and result[:2] == grid[:2] and _has_channels_last(arguments[0])
    if node.target is _ATEN.avg_pool2d.default:
        # The kernel cannot requantize from one grid to another.
        unpadded = len(arguments) < 4 or not any(arguments[3])
        return unpadded and not any(arguments[4:]) and result[:2] == grid[:2] and _has_channels_last(arguments[0])
    return node.target in _MOVES and result[:2] == grid[:2]


def _are_weights(argument: Any) -> bool:
    if isinstance(argument, Node) and argument.target is _PER_CHANNEL:
        return bool(argument.args[3] == 0)
    return _operand_grid(argument) != ()


def _has_integer_bias(node: Node) -> bool:
    bias = node.args[2] if len(node.args) > 2 else None
    return bias is None or (isinstance(bias, Node) and bias.target in (_DEQUANTIZE, _PER_CHANNEL))


def _has_channels_last(argument: Any) -> bool:
    tensor: torch.Tensor = argument.meta["val"]
    if tensor.dim() != 4:
        return False
    return tensor.shape[1] == 1 or tensor.is_contiguous(memory_format=torch.channels_last)


def _is_fused(activation: Node, grid: tuple[Any, ...]) -> bool:
    """Whether the limits of the codes do the same as the activation."""
    if not grid:
        return False
    scale, zero_point, lowest, highest, _ = grid
    low, high = _bounds(activation)
    # ExecuTorch requires equality at the lower end.
    below = low is None or round(low / scale + zero_point) == lowest
    above = high is None or round(high / scale + zero_point) >= highest
    return bool(below and above)


def _bounds(activation: Node) -> tuple[Any, Any]:
    if activation.target is _ATEN.relu.default:
        return 0.0, None
    if activation.target is _ATEN.relu6.default:
        return 0.0, 6.0
    bounds = [*activation.args[1:], None, None]
    if activation.target is _ATEN.hardtanh.default:
        return (bounds[0], bounds[1]) if len(activation.args) > 2 else (-1.0, 1.0)
    return bounds[0], bounds[1]
