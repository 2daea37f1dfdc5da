# SPDX-License-Identifier: Apache-2.0
"""Operators of codes (QLinearConv and its kin) as what they stand for: DequantizeLinear, the operator in real numbers,
QuantizeLinear. So files of either format are read the same way; the codes keep their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx

# By operator: the one in real numbers. Operands come as (codes, scale, zero point), then the result's scale and zero
# point.
_ALIKE = {
    "QLinearAdd": "Add",
    "QLinearMul": "Mul",
    "QLinearSigmoid": "Sigmoid",
    "QLinearLeakyRelu": "LeakyRelu",
    "QLinearAveragePool": "AveragePool",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "QLinearSoftmax": "Softmax",
    "QLinearMatMul": "MatMul",
    "QLinearConcat": "Concat",
    "QLinearConv": "Conv",
    "QGemm": "Gemm",
}
# What the operator in real numbers has no word for.
_DROPPED = ("channels_last", "opset")


def in_real_numbers(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without operators of codes that are known here; others stay."""
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    copy = type(model)()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    for node in model.graph.node:
        copy.graph.node.extend(_written_out(node, held, copy.graph))
    return copy


def _written_out(
    node: onnx.NodeProto, held: Mapping[str, onnx.TensorProto], graph: onnx.GraphProto
) -> list[onnx.NodeProto]:
    from onnx import helper, numpy_helper

    names, output = list(node.input), node.output[0] if node.output else ""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if attributes.get("channels_last"):
        return [node]
    attributes = {name: value for name, value in attributes.items() if name not in _DROPPED}
    kind, biases, axis = node.op_type, list[str](), -1  # a product's weight has a scale for each column, its last axis
    weighted = len(names) >= 8 and {names[1], names[4]} <= set(held)
    if kind == "QLinearConv" and weighted:
        operands, (scale, zero_point), biases, axis = names[:6], names[6:8], names[8:9], 0
    elif kind == "QGemm" and weighted:
        operands, biases, (scale, zero_point) = names[:6], names[6:7], (*names[7:9], "", "")[:2]
        axis = 0 if attributes.get("transB") else 1
    elif kind == "QLinearConcat" and len(names) >= 5:
        scale, zero_point, *operands = names
    elif kind in _ALIKE and kind not in ("QLinearConv", "QGemm") and len(names) >= 5:
        *operands, scale, zero_point = names
    else:
        return [node]
    kind, nodes, reals = _ALIKE[kind], list["onnx.NodeProto"](), list[str]()
    for at in range(0, len(operands) - 2, 3):
        reals.append(f"{output}/operand_{len(nodes)}")
        nodes.append(helper.make_node("DequantizeLinear", operands[at : at + 3], reals[-1:], axis=axis))
    for codes in filter(None, biases):  # those of an accumulator
        factors = [numpy_helper.to_array(held[name]).astype(np.float32) for name in (names[1], names[4])]
        grid = np.asarray(factors[0].reshape(-1)[0] * factors[1].reshape(-1))
        grid = grid if grid.size > 1 else grid.reshape(())
        graph.initializer.append(numpy_helper.from_array(grid, f"{output}/bias_scale"))
        reals.append(f"{output}/bias")
        nodes.append(helper.make_node("DequantizeLinear", [codes, f"{output}/bias_scale"], reals[-1:], axis=0))
    if not scale:
        return [*nodes, helper.make_node(kind, reals, [output], name=node.name, **attributes)]
    computed = f"{output}/computed"
    nodes.append(helper.make_node(kind, reals, [computed], name=node.name, **attributes))
    nodes.append(helper.make_node("QuantizeLinear", [computed, scale, zero_point], [output]))
    return nodes
