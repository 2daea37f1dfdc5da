# SPDX-License-Identifier: Apache-2.0
"""Networks put together by hand, and plans computed in real numbers, so that planning is tested without capture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import network_interpreter
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from exactqat.kit.device import OPERATORS
from exactqat.kit.planning.network import Constant, Network, Place, Step, Value
from exactqat.kit.planning.plans import Derived, Plan, PlanStep
from exactqat.qat.train.torch import primitives as primitives_torch


class Sketch:
    """Adds one float step after the other; shapes come from running them."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.constants: dict[str, Constant] = {}
        self.steps: list[Step] = []
        self.inputs: list[str] = []
        self._run = network_interpreter.Run(
            SimpleNamespace(values=self.values, constants=self.constants), nn.Module(), training=False
        )
        self._run.dtype = torch.float32

    def _enter(self, name: str, result: torch.Tensor, batch_axis: int, dtype: str) -> None:
        self._run.values[name] = result
        self.values[name] = Value(name, tuple(result.shape), batch_axis, dtype)

    def input(self, *shape: int, batch_axis: int = 0, dtype: str = "float32") -> str:
        name = f"in{len(self.inputs)}"
        self.inputs.append(name)
        self._enter(name, torch.rand(shape) + 0.5, batch_axis, dtype)
        return name

    def parameter(self, name: str, *shape: int, scale: float = 1.0) -> str:
        self.constants[name] = Constant(name, shape, trainable=True)
        self._run.tensors[name] = torch.randn(shape) * scale
        return name

    def data(self, values: Any) -> str:
        """A constant that depends on no parameter."""
        name = f"data{len(self.constants)}"
        tensor = torch.as_tensor(values)
        self.constants[name] = Constant(name, tuple(tensor.shape), parameter=False, data=tensor)
        return name

    def add(
        self,
        kind: str,
        *inputs: Any,
        module: str = "",
        path: str = "",
        label: str = "",
        batch_axis: int = 0,
        **attributes: Any,
    ) -> str:
        name = f"v{len(self.steps)}"
        place = Place(module or path, "model.py", len(self.steps) + 1)
        step = Step(kind, inputs, name, attributes, place, module, label or kind)
        self.steps.append(step)
        if kind == "unsupported":
            result = self._run.values[inputs[0]]
        else:
            shapes = [self.values[source].shape for source in inputs if source in self.values]
            self.values[name] = Value(name, shapes[0], batch_axis)
            result = self._run.step(step)
        self._enter(name, result, batch_axis, "float32" if result.is_floating_point() else "int64")
        return name

    def conv(
        self, x: str, outputs: int, window: int = 1, *, bias: bool = True, module: str = "conv", **how: Any
    ) -> str:
        """A convolution over all axes after the channels."""
        shape = self.values[x].shape
        axes, groups = len(shape) - 2, how.get("groups", 1)
        weight = self.parameter(f"{module}.weight", outputs, shape[1] // groups, *[window] * axes)
        offset = self.parameter(f"{module}.bias", outputs)
        return self.add(
            "conv",
            x,
            weight,
            offset,
            module=module,
            label=f"Conv{axes}d",
            strides=how.get("strides", (1,) * axes),
            padding=how.get("padding", ((0, 0),) * axes),
            dilations=(1,) * axes,
            groups=groups,
            channel_axis=1,
            padding_mode="zeros",
        )

    def linear(self, x: str, outputs: int, module: str = "linear") -> str:
        weight = self.parameter(f"{module}.weight", outputs, self.values[x].shape[-1])
        return self.add("linear", x, weight, self.parameter(f"{module}.bias", outputs), module=module, label="Linear")

    def batch_norm(self, x: str, module: str = "norm", channel_axis: int = 1, training: bool = True) -> str:
        channels = self.values[x].shape[channel_axis]
        names = [self.parameter(f"{module}.{name}", channels) for name in ("weight", "bias", "running_mean")]
        variance = self.parameter(f"{module}.running_var", channels)
        self._run.tensors[variance] = torch.rand(channels) + 0.5
        how = {"epsilon": 1e-5, "momentum": 0.1, "channel_axis": channel_axis, "training": training}
        return self.add("batch_norm", x, *names, variance, module=module, label="BatchNorm2d", counter="", **how)

    def network(self, *outputs: str) -> Network:
        names = ("input",) if len(self.inputs) == 1 else tuple(f"input_{at}" for at in range(len(self.inputs)))
        return Network(
            tuple(self.inputs),
            outputs,
            self.values,
            self.constants,
            tuple(self.steps),
            names,
            tuple(f"output_{at}" for at in range(len(outputs))),
        )

    def examples(self, batch: int = 2, low: float = -2.0) -> list[torch.Tensor]:
        """Inputs for several examples."""
        result = []
        for name in self.inputs:
            shape = list(self.values[name].shape)
            shape[self.values[name].batch_axis] *= batch
            result.append(torch.rand(shape) * (2 - low) + low)
        return result

    def expected(self, network: Network, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the network computes."""
        model = nn.Module()
        run = network_interpreter.Run
        tensors = self._run.tensors

        class Known(run):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self.tensors = tensors

        network_interpreter.Run = Known  # type: ignore[misc]
        try:
            return network_interpreter.run(network, model, inputs)
        finally:
            network_interpreter.Run = run  # type: ignore[misc]

    def computed(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the plan computes, in real numbers."""
        values = {feature.path: tensor for feature, tensor in zip(plan.inputs, inputs, strict=True)}

        def read(name: str) -> torch.Tensor:
            return values[name] if name in values else self.constant(plan, name)

        for step in plan.steps:
            result = self._step(plan, step, [read(name) for name in step.operands])
            expected = list(step.shape)
            assert len(expected) == result.dim(), step.path
            assert all(size == result.shape[at] or at == step.batch_axis for at, size in enumerate(expected)), step
            assert result.shape[step.batch_axis] % step.shape[step.batch_axis] == 0, step.path
            values[step.path] = result
        return [values[path] for path in plan.outputs]

    def constant(self, plan: Plan, name: str) -> torch.Tensor:
        constant = plan.constants[name]
        if constant.parameter:
            tensor = self._run.tensors[name]
        elif isinstance(constant.expression, Derived):
            tensor = constant.expression.function(*(self.constant(plan, path) for path in constant.expression.operands))
        else:
            tensor = torch.as_tensor(np.asarray(constant.data))
        assert tuple(tensor.shape) == constant.shape, name
        return tensor

    def _step(self, plan: Plan, step: PlanStep, operands: list[torch.Tensor]) -> torch.Tensor:
        if not step.kind:
            return operands[0]
        if step.outside:
            network_step = Step(step.kind, tuple(operands), "", step.attributes)
            return network_interpreter.Run(None, nn.Module(), False).step(network_step)
        attributes = {**step.attributes, "activation": step.activation}
        if "new_shape" in attributes:
            shape = list(attributes["new_shape"])
            shape[step.batch_axis] = -1
            attributes["new_shape"] = tuple(shape)
        operator = OPERATORS[step.kind]
        if step.weights is not None:
            weights = step.weights
            operands.append(self.constant(plan, weights.weight))
            operands.append(None if weights.bias is None else self.constant(plan, weights.bias))  # type: ignore[arg-type]
            if weights.batch_norm is not None:
                result = operator.real(primitives_torch, operands, {**attributes, "activation": "NONE"})
                result = self._batch_norm(plan, step, result)
                return (
                    result.relu()
                    if step.activation == "RELU"
                    else F.relu6(result)
                    if step.activation != "NONE"
                    else result
                )
        result = operator.real(primitives_torch, operands, attributes)
        return result if step.bounds is None else result.clamp(*step.bounds)

    def _batch_norm(self, plan: Plan, step: PlanStep, x: torch.Tensor) -> torch.Tensor:
        assert step.weights is not None and step.weights.batch_norm is not None
        norm = step.weights.batch_norm
        axis = step.attributes.get("channel_axis", x.dim() - 1)
        mean, variance = self.constant(plan, norm.mean), self.constant(plan, norm.variance)
        weight = None if norm.weight is None else self.constant(plan, norm.weight)
        bias = None if norm.bias is None else self.constant(plan, norm.bias)
        moved = x.movedim(axis, 1)
        return F.batch_norm(moved, mean, variance, weight, bias, False, 0.0, norm.epsilon).movedim(1, axis)


def kinds(plan: Plan) -> list[str]:
    return [step.kind for step in plan.steps]


def paths(plan: Plan) -> list[str]:
    return [step.path for step in plan.steps]


def close(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> bool:
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=2e-3, atol=2e-3):
            return False
    return True
