# SPDX-License-Identifier: Apache-2.0
"""What an operator of the device computes in real numbers, for training, is what its integers represent."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sweep import graphs  # noqa: E402

from exactqat.deploy import Graph, Operator, simulate  # noqa: E402
from exactqat.kit.device import OPERATORS, Refusal, Tensor  # noqa: E402
from exactqat.kit.device.arithmetic import same_padding  # noqa: E402
from exactqat.kit.device.operator import DeviceOperator  # noqa: E402
from exactqat.qat.train.torch import primitives as primitives_torch  # noqa: E402

TO_FIRST, TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def real_numbers(codes: np.ndarray, tensor: Tensor) -> Any:
    scale = tensor.quantization.scale.astype(np.float64)
    if tensor.quantization.axis is not None:
        scale = scale.reshape([-1 if axis == tensor.quantization.axis else 1 for axis in range(codes.ndim)])
    return torch.from_numpy(((codes.astype(np.float64) - tensor.quantization.zero_point[0]) * scale).astype(np.float32))


def in_users_order(operator: Operator, operands: list[Any], inputs: list[Tensor], output: Tensor) -> dict[str, Any]:
    """Attributes as a plan has them, for a user with channels first; `operands` are turned in place."""
    declaration = OPERATORS[operator.kind]
    attributes = {"axis": len(output.shape) - 1, **operator.attributes}
    if "new_shape" in attributes:
        attributes["new_shape"] = (-1, *attributes["new_shape"][1:])
    if not declaration.spatial:
        return attributes
    operands[0] = operands[0].permute(TO_FIRST)
    attributes["channel_axis"] = 1
    if not declaration.weights:
        return attributes
    strides, dilations = attributes["strides"], attributes.get("dilations", (1, 1))
    size, window = inputs[0].shape[1:3], inputs[1].shape[1:3]
    # [out, height, width, in / groups] or [1, height, width, out] to [out, in / groups, height, width]
    operands[1] = operands[1].permute(TO_FIRST if declaration.filter_axis == 0 else (3, 0, 1, 2))
    attributes["groups"] = inputs[0].shape[3] // operands[1].shape[1]
    pads = [(0, 0), (0, 0)]
    if "output_size" in attributes:
        operands[1] = operands[1].permute(1, 0, 2, 3)
        whole = [(n - 1) * stride + side for n, stride, side in zip(size, strides, window, strict=True)]
        beyond = [reach - result for reach, result in zip(whole, attributes["output_size"], strict=True)]
        pads = [(max(cut, 0) // 2, max(cut, 0) - max(cut, 0) // 2) for cut in beyond]
        attributes["output_padding"] = tuple(max(-cut, 0) for cut in beyond)
    elif attributes["padding"] == "SAME":
        pads = [same_padding(*axis) for axis in zip(size, window, strides, dilations, strict=True)]
    attributes.update(dilations=dilations, padding=tuple(pads))
    return attributes


def computed(graph: Graph, codes: dict[str, np.ndarray], operator: Operator) -> tuple[np.ndarray, Any, Any]:
    """Codes by the integers, real numbers by `real`, and by `real_on_grid` or None; axes as on the device."""
    declaration, output = OPERATORS[operator.kind], graph.tensors[operator.outputs[0]]
    values = {**codes, **simulate(graph, codes, tensors=list(graph.results()))}
    inputs = [graph.tensors[name] for name in operator.inputs]
    operands = []
    for tensor in inputs:
        held = values[tensor.name] if tensor.data is None else tensor.data
        # Indices stand for themselves.
        are_indices = tensor.dtype == "int32" and tensor.data is None
        operands.append(torch.from_numpy(held) if are_indices else real_numbers(held, tensor))
    attributes = in_users_order(operator, operands, inputs, output)
    grid = SimpleNamespace(scale=float(output.quantization.scale[0]), zero_point=int(output.quantization.zero_point[0]))
    known = dict(attributes)
    if declaration.uses_operand_scale:  # as training gives it
        known["operand_scale"] = torch.tensor(float(inputs[0].quantization.scale[0]))
    if operator.kind == "LOOKUP":  # as it is trained from a file
        grids = [tensor.quantization for tensor in (inputs[0], output)]
        known["grids"] = tuple((float(end.scale[0]), int(end.zero_point[0])) for end in grids)
    real = declaration.real(primitives_torch, operands, known)
    on_grid = declaration.real_on_grid(primitives_torch, operands, attributes, grid)
    if declaration.spatial:
        real = real.permute(TO_LAST)
        on_grid = None if on_grid is None else on_grid.permute(TO_LAST)
    return values[output.name], real, on_grid


@pytest.mark.parametrize("kind", OPERATORS)
def test_real_numbers_and_integers_mean_the_same(kind: str) -> None:
    if type(OPERATORS[kind]).real is DeviceOperator.real:
        assert OPERATORS[kind].purpose.startswith("files"), f"{kind} is planned and has no real numbers to train with"
        pytest.skip("only files that others wrote have it; nothing trains with it")
    for graph, codes in graphs(kind, "xnnpack-x86", 20):
        operator = next(operator for operator in graph.operators if operator.kind == kind)
        output = graph.tensors[operator.outputs[0]]
        stored, real, on_grid = computed(graph, codes, operator)
        assert tuple(real.shape) == stored.shape, operator
        if output.dtype != "int8":
            np.testing.assert_array_equal(stored, real.numpy())
            continue
        scale, zero_point = float(output.quantization.scale[0]), int(output.quantization.zero_point[0])
        steps = np.clip(real.double().numpy() / scale + zero_point, -128, 127)
        off = np.abs(steps - stored)
        if kind == "DIV":  # runtimes give the largest or smallest code where a quotient is too small for them
            off[np.abs(real.double().numpy()) < scale] = 0
        if (
            kind == "REDUCE_PROD"
            and math.prod(graph.tensors["x"].shape[axis] for axis in operator.attributes["axes"]) != 2
        ):
            continue  # the kernels round after each factor, and copy the code of an only one
        # Rounding costs half a step, multipliers of few bits another half.
        assert off.max() <= 1.01, (off.max(), operator, [graph.tensors[name].quantization for name in operator.inputs])
        if on_grid is not None:
            rounded = np.clip(np.rint(on_grid.double().numpy() / scale) + zero_point, -128, 127)
            np.testing.assert_array_equal(rounded, stored)


@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_an_average_is_one_pass(strides: tuple[int, int]) -> None:
    """How many values a window counts follows from the shape alone."""
    passes = []

    def noted(x: Any, *arguments: Any) -> Any:
        passes.append(tuple(x.shape))
        return primitives_torch.sum_pool(x, *arguments)

    primitives = SimpleNamespace(**{**vars(primitives_torch), "sum_pool": noted})
    attributes = {"filter_size": (3, 2), "strides": strides, "padding": "SAME", "channel_axis": 1}
    x = torch.rand(2, 4, 7, 6)
    average = OPERATORS["AVERAGE_POOL_2D"].real(primitives, [x], attributes)
    assert passes == [(2, 4, 7, 6)]
    ones = OPERATORS["AVERAGE_POOL_2D"].sums(primitives_torch, torch.ones(1, 1, 7, 6), attributes)
    assert torch.equal(average, OPERATORS["AVERAGE_POOL_2D"].sums(primitives_torch, x, attributes) / ones)


def test_windows_that_leave_gaps_are_written_with_valid() -> None:
    """SAME would be LiteRT's own kernel on XNNPACK, whose rounding is another."""
    operator = OPERATORS["TRANSPOSE_CONV"]
    shapes = [(1, 4, 4, 3), (6, 2, 3, 3), (6,)]
    same = {"strides": (3, 3), "padding": "SAME", "output_size": (11, 12)}
    with pytest.raises(Refusal, match="strides of 3 leave gaps between windows of 2: use VALID"):
        operator.shape(shapes, same)
    assert operator.shape(shapes, {**same, "padding": "VALID"}) == (1, 11, 12, 6)
