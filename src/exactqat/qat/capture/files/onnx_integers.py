# SPDX-License-Identifier: Apache-2.0
"""Operators of codes (QLinearConv and its kin) as what they stand for: DequantizeLinear, the operator in real numbers,
QuantizeLinear. So files of either format are read the same way; the codes keep their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
}
# What the operator in real numbers has no word for.
_DROPPED = ("channels_last", "opset")


def in_real_numbers(onnx: Any, model: Any) -> Any:
    """The model without operators of codes that are known here; others stay."""
    graph = model.graph
    held = {each.name: each for each in graph.initializer}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    for node in graph.node:
        made.graph.node.extend(_written_out(onnx, node, held, made.graph))
    return made


def _written_out(onnx: Any, node: Any, held: Mapping[str, Any], graph: Any) -> list[Any]:
    helper, given, output = onnx.helper, list(node.input), node.output[0] if node.output else ""
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if attributes.get("channels_last"):
        return [node]
    attributes = {name: value for name, value in attributes.items() if name not in _DROPPED}
    nodes: list[Any] = []

    def real(codes_and_grid: Sequence[str], axis: int = 0) -> str:
        name = f"{output}/operand_{len(nodes)}"
        nodes.append(helper.make_node("DequantizeLinear", list(codes_and_grid), [name], axis=axis))
        return name

    def bias(codes: str, scales: Sequence[str]) -> str:
        """Whose codes are those of an accumulator."""
        name = f"{output}/bias_scale"
        factors = [onnx.numpy_helper.to_array(held[each]).astype(np.float32) for each in scales]
        scale = np.asarray(factors[0].reshape(-1)[0] * factors[1].reshape(-1))
        scale = scale if scale.size > 1 else scale.reshape(())
        graph.initializer.append(onnx.numpy_helper.from_array(scale, name))
        real_bias = f"{output}/bias"
        nodes.append(helper.make_node("DequantizeLinear", [codes, name], [real_bias], axis=0))
        return real_bias

    kind = node.op_type
    if kind in _ALIKE and len(given) >= 5:
        kind, (*operands, scale, zero_point) = _ALIKE[kind], given
        triples = [operands[at : at + 3] for at in range(0, len(operands), 3)]
        # A product's weight has a scale for each column, its last axis.
        reals = [real(triple, axis=-1) for triple in triples if len(triple) == 3]
    elif kind == "QLinearConcat" and len(given) >= 5:
        kind, (scale, zero_point, *operands) = "Concat", given
        reals = [real(operands[at : at + 3]) for at in range(0, len(operands), 3)]
    elif kind in ("QLinearConv", "QGemm") and len(given) >= 8 and {given[1], given[4]} <= set(held):
        x, weight, scales = given[:3], given[3:6], (given[1], given[4])
        if kind == "QLinearConv":
            kind, (scale, zero_point), biases = "Conv", given[6:8], given[8:9]
            axis = 0
        else:
            kind, biases, (scale, zero_point) = "Gemm", given[6:7], (*given[7:9], "", "")[:2]
            axis = 0 if attributes.get("transB") else 1
        reals = [real(x), real(weight, axis=axis), *(bias(each, scales) for each in biases if each)]
    else:
        return [node]
    if not scale:
        return [*nodes, helper.make_node(kind, reals, [output], name=node.name, **attributes)]
    computed = f"{output}/computed"
    nodes.append(helper.make_node(kind, reals, [computed], name=node.name, **attributes))
    nodes.append(helper.make_node("QuantizeLinear", [computed, scale, zero_point], [output]))
    return nodes


__all__ = ["in_real_numbers"]
