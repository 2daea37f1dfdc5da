# SPDX-License-Identifier: Apache-2.0
"""A frozen network as an `ExportedProgram` with quantize and dequantize nodes, for tools that lower such programs.

    from exported_program import exported_program
    program = exported_program(model)                      # frozen, of qat.prepare of a PyTorch module
    program = exported_program(model, flow="cortex-m")     # for microcontrollers

Nothing in exactqat needs it: copy both files into a program that lowers its networks by ExecuTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from cortex_m import mark_for_cmsis_nn
from torch import Tensor, nn
from torch.nn import functional as F

from exactqat.kit.device import OPERATORS
from exactqat.kit.planning.plans import Grid, Numbers, Plan, PlanStep
from exactqat.qat.train.core.steps import attributes_of
from exactqat.qat.train.torch import primitives
from exactqat.qat.train.torch.prepared import PreparedModel

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


class _Plain:
    """The kit's primitives, with convolutions as PyTorch's own operator, which lowering tools look for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(primitives, name)

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilations: Sequence[int],
        groups: int = 1,
        channel_axis: int = 1,
    ) -> Tensor:
        """See `primitives.conv`."""
        if channel_axis != 1:
            moved = self.conv(x.movedim(channel_axis, 1), weight, bias, strides, padding, dilations, groups)
            return moved.movedim(1, channel_axis)
        if weight.dim() == 2 and groups == 1:
            return F.linear(x, weight, bias)
        if weight.dim() == 2:
            return self.conv(x[:, :, None], weight[:, :, None], bias, (1,), ((0, 0),), (1,), groups)[:, :, 0]
        amounts = [before for before, _ in padding]
        if any(before != after for before, after in padding):
            x, amounts = F.pad(x, [side for pair in reversed(padding) for side in pair]), [0] * len(amounts)
        convolve = cast(Any, _CONVOLUTIONS[len(amounts) - 1])
        return cast(Tensor, convolve(x, weight, bias, tuple(strides), tuple(amounts), tuple(dilations), groups))


class _Pooled(_Plain):
    """For CMSIS-NN, which implements a mean as a pool over the whole image."""

    def mean(self, x: Tensor, axes: Sequence[int], keep_dims: bool = False) -> Tensor:
        """See `primitives.mean`."""
        if x.dim() != 4 or tuple(axes) != (2, 3):
            return primitives.mean(x, axes, keep_dims)
        pooled = F.avg_pool2d(x, tuple(x.shape[2:]))
        return pooled if keep_dims else pooled.flatten(1)


FLOWS = {"xnnpack": _Plain(), "cortex-m": _Pooled()}


def _limits(grid: Grid) -> tuple[int, int, torch.dtype]:
    if grid.rule.is_int16:
        return -(2**15), 2**15 - 1, torch.int16
    return -(2 ** (grid.bits - 1)), 2 ** (grid.bits - 1) - 1, torch.int8


class _Program(nn.Module):
    """The network in real numbers: every stored tensor passes a quantize node with its grid, and a separate dequantize
    node for each reader, as tools expect."""

    def __init__(self, plan: Plan, numbers: Numbers, flow: str) -> None:
        super().__init__()
        self.plan, self.numbers, self.flow = plan, numbers, flow
        self.nodes: Any = torch.ops.quantized_decomposed
        for number, step in enumerate(plan.steps):
            if step.weights is not None:
                weights, scale = numbers.weights[step.path], self.scale(plan.stored(step.operands[0]).grid)
                held = torch.from_numpy(weights.codes.astype(np.int8))
                if flow == "cortex-m" and held.dim() == 4:
                    held = held.contiguous(memory_format=torch.channels_last)
                self.register_buffer(f"codes_{number}", held)
                self.register_buffer(f"scales_{number}", torch.from_numpy(weights.scale.copy()))
                self.register_buffer(f"zero_points_{number}", torch.zeros(len(weights.scale), dtype=torch.int64))
                steps = np.float64(scale) * weights.scale.astype(np.float64)
                if self.flow == "cortex-m":
                    self.register_buffer(f"bias_{number}", torch.from_numpy(weights.bias.astype(np.int32)))
                    if len(steps) == 1:
                        setattr(self, f"bias_steps_{number}", float(steps[0]))
                    else:
                        self.register_buffer(f"bias_steps_{number}", torch.from_numpy(steps.astype(np.float32)))
                else:
                    bias = weights.bias * steps
                    self.register_buffer(f"bias_{number}", torch.from_numpy(bias.astype(np.float32)))
            for position, name in enumerate(step.operands):
                if (step.path, position) in numbers.constants and not plan.is_stored(name):
                    codes, _ = numbers.constants[(step.path, position)]
                    dtype = np.int16 if plan.grids[step.grid].rule.is_int16 else np.int8
                    self.register_buffer(f"constant_{number}_{position}", torch.from_numpy(codes.astype(dtype)))

    def scale(self, grid: str) -> float:
        fixed = self.plan.grids[grid].fixed
        return float(self.numbers.grids[grid][0] if fixed is None else fixed[0])

    def place(self, name: str) -> tuple[float, int, int, int, torch.dtype]:
        grid = self.plan.grids[name]
        lowest, highest, dtype = _limits(grid)
        # The code of real 0 is counted from the lowest one.
        zero_point = self.numbers.grids[name][1] + lowest if grid.fixed is None else grid.fixed[1]
        return self.scale(name), int(zero_point), lowest, highest, dtype

    def stored(self, x: Tensor, name: str) -> Tensor:
        return x if self.plan.grids[name].indices else self.nodes.quantize_per_tensor.default(x, *self.place(name))

    def read(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        name = self.plan.stored(path).grid
        if values[path].dtype not in (torch.int8, torch.int16):  # indices, and what is computed outside the device
            return values[path]
        return cast(Tensor, self.nodes.dequantize_per_tensor.default(values[path], *self.place(name)))

    def weight(self, number: int, step: PlanStep) -> Tensor:
        assert step.weights is not None
        codes, scales, zero_points = (getattr(self, f"{name}_{number}") for name in ("codes", "scales", "zero_points"))
        if len(scales) == 1:
            scale = float(self.numbers.weights[step.path].scale[0])
            return self.nodes.dequantize_per_tensor.default(codes, scale, 0, -127, 127, torch.int8)
        axis = step.weights.channel_axis
        return self.nodes.dequantize_per_channel.default(codes, scales, zero_points, axis, -127, 127, torch.int8)

    def bias(self, number: int) -> Tensor:
        held: Tensor = getattr(self, f"bias_{number}")
        if self.flow != "cortex-m":
            return held
        steps, zero_points = (getattr(self, f"{name}_{number}") for name in ("bias_steps", "zero_points"))
        limits = -(2**31), 2**31 - 1, torch.int32
        if isinstance(steps, float):
            return cast(Tensor, self.nodes.dequantize_per_tensor.default(held, steps, 0, *limits))
        return cast(Tensor, self.nodes.dequantize_per_channel.default(held, steps, zero_points, 0, *limits))

    def operand(self, number: int, step: PlanStep, position: int, values: dict[str, Tensor]) -> Tensor:
        name = step.operands[position]
        if name in values:
            return self.read(name, values)
        scale = float(self.numbers.constants[(step.path, position)][1])
        codes, is_int16 = getattr(self, f"constant_{number}_{position}"), self.plan.grids[step.grid].rule.is_int16
        limits = (-(2**15), 2**15 - 1, torch.int16) if is_int16 else (-128, 127, torch.int8)
        return self.nodes.dequantize_per_tensor.default(codes, scale, 0, *limits)

    def step(self, number: int, step: PlanStep, values: dict[str, Tensor]) -> Tensor:
        if step.outside:
            return primitives.FUNCTIONS[step.kind](self.read(step.operands[0], values), **step.attributes)
        if step.expression is not None or not step.kind:  # for training only
            return values[step.operands[0]]
        operator, attributes = OPERATORS[step.kind], attributes_of(step)
        operands = [self.operand(number, step, position, values) for position in range(len(step.operands))]
        if step.weights is not None:
            operands += [self.weight(number, step), self.bias(number)]
        if operator.uses_operand_scale:
            attributes["operand_scale"] = self.scale(self.plan.stored(step.operands[0]).grid)
        result = operator.real(FLOWS[self.flow], operands, attributes)
        if step.activation != "NONE":
            result = F.relu6(result) if step.activation == "RELU6" else F.relu(result)
        if step.bounds is not None:
            result = result.clamp(*step.bounds)
        return self.stored(result, step.grid)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        values = {source.path: self.stored(x, source.grid) for source, x in zip(self.plan.inputs, inputs, strict=True)}
        for number, step in enumerate(self.plan.steps):
            values[step.path] = self.step(number, step, values)
        return [self.read(path, values) for path in self.plan.outputs]


def exported_program(model: PreparedModel, batch: int = 1, flow: str = "xnnpack") -> torch.export.ExportedProgram:
    """A frozen PyTorch network as a program of ATen operators between `quantized_decomposed` nodes, in the user's order
    of axes: what `convert_pt2e` produces, with the ranges, weights and biases that training ended with.

    ExecuTorch lowers such programs (`executorch.exir.to_edge_transform_and_lower`), and so do other tools. The program
    itself computes in float32, and rounds rare codes differently than the device; what a backend computes from it is
    the backend's arithmetic (see docs/bring-your-model.md).

    Args:
        model: prepared by `qat.prepare` from a PyTorch module, and frozen.
        batch: how many examples the program takes.
        flow: the ExecuTorch flow that lowers the program. "xnnpack": biases are float32. "cortex-m": biases are int32
            with a dequantize node, images have channels last in memory, and operators that CMSIS-NN supports are marked
            as by Arm's quantizer.

    Returns:
        Its inputs are the model's tensors, its results the model's tensors in order, as a list.

    Raises:
        TypeError: `model` is not a prepared PyTorch model, or `batch` is not an integer.
        ValueError: the model is not frozen, `batch` is below 1, or there is no such flow.
    """
    if not isinstance(model, PreparedModel):
        raise TypeError(f"model must come from exactqat.qat.prepare of a PyTorch module, got {type(model).__name__}")
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise TypeError(f"batch must be an integer, got {type(batch).__name__}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    if flow not in FLOWS:
        raise ValueError(f"flow must be one of {', '.join(FLOWS)}, got {flow!r}")
    if not model.frozen:
        raise ValueError(
            "model must be frozen before it is exported: call exactqat.qat.freeze and train its last phase"
        )
    import torch.ao.quantization.fx._decomposed  # noqa: F401 - registers the operators

    examples = []
    for source in model.plan.inputs:
        shape = [batch * size if axis == source.batch_axis else size for axis, size in enumerate(source.shape)]
        example = torch.zeros(shape, dtype=torch.int64 if source.rows else torch.float32)
        if flow == "cortex-m" and example.dim() == 4:
            example = example.contiguous(memory_format=torch.channels_last)
        examples.append(example)
    program = torch.export.export(_Program(model.plan, model.numbers(), flow).eval(), tuple(examples), strict=False)
    if flow == "cortex-m":
        mark_for_cmsis_nn(program.graph_module)
    return program


__all__ = ["exported_program"]
