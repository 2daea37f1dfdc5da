# SPDX-License-Identifier: Apache-2.0
"""Real numbers whose codes and scales are a file's, bit for bit, until a training step moves them."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..kit.device.operator import need
from ..kit.planning.network import Constant
from ..kit.planning.plans import BatchNorm, Derived, Plan, Weights
from ..kit.planning.rules import Rule

# The largest code of a filter, with a narrow range.
_LARGEST = 127
# The smallest unit that weights are counted in: its inverse squared is a float32 number.
_SMALLEST_UNIT = 2.0**-60


def unit_of(size: Any) -> Any:
    """The power of two, at most 1, by which numbers of this size, float32, are divided to be near 1."""
    return np.clip(np.ldexp(np.float32(1), np.frexp(np.float32(size))[1]), np.float32(_SMALLEST_UNIT), np.float32(1))


@dataclass
class Trainable:
    """What a framework trains.

    Attributes:
        plan: what the device runs; all grids are given but those of `in_float`.
        parameters: by the names of the plan's constants, float32; the trained ones.
        buffers: likewise, the others.
        codes: by path of what is stored, what the file calls its codes, if it has them.
        in_float: grids of results that the file computes in float32 from quantized operands, with the layer that
            computes them.
        filters: by step, codes and zero point of filters that training does not write.
        untrainable: why the file's integers can be computed, but not trained, a sentence for each place.
    """

    plan: Plan
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)
    in_float: dict[str, str] = field(default_factory=dict)
    filters: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)
    untrainable: list[str] = field(default_factory=list)

    def add(
        self, constants: dict[str, Constant], name: str, values: np.ndarray, trained: bool = True, unit: Any = 1
    ) -> str:
        """The name of a new constant, which is added to those of the plan.

        unit: a power of two: the tensor `name` holds how many of it the constant is.
        """
        (self.parameters if trained else self.buffers)[name] = values / np.float32(unit)
        constants[name] = Constant(name, values.shape, trainable=trained)
        return name if unit == 1 else self.product(constants, name, np.asarray(unit, np.float32))

    def product(self, constants: dict[str, Constant], name: str, factor: np.ndarray) -> str:
        """The name of a new constant: a parameter times numbers."""
        real, shape = f"{name}.real", np.broadcast_shapes(constants[name].shape, factor.shape)
        constants[f"{name}.factor"] = Constant(f"{name}.factor", factor.shape, parameter=False, data=factor)
        expression = Derived(operator.mul, (name, f"{name}.factor"))
        constants[real] = Constant(
            real, shape, parameter=False, trainable=True, sources=(name,), expression=expression
        )  # fmt: skip
        return real


def weights_on_grid(
    trainable: Trainable,
    constants: dict[str, Constant],
    path: str,
    codes: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    input_scale: np.floating,
    channel_axis: int,
    single: bool,
) -> Weights:
    """The weights of a step; what they are made of is added to `trainable` and `constants`.

    A filter's codes times a power of two are the weight; a batch norm multiplies each channel by the factor missing
    from the file's scale. Weights are never small: then the norm's variance holds a power of two, too. Inputs of 0..255
    ask for weights near 1/1000, and a step that suits the next layer would replace them.

    Args:
        codes: of the filter, axes as a plan has them.
        scale: [1] or [channels]; single: whether it is one for all.
        bias: codes, [channels].

    Raises:
        Refusal: there are no such numbers.
    """
    need(int(codes.min(initial=0)) >= -_LARGEST, "its filter has codes of -128, and filters train in -127..127")
    channels = codes.shape[channel_axis]
    scale = np.broadcast_to(scale.astype(np.float32), (channels,))
    need(bool(np.all(scale > 0)), "its filter has a scale of 0")
    # scale = power * unit * rest, with 1 <= rest < 2; a single scale has one power and unit.
    power = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1).astype(np.float32)
    rest, unit = scale / power, unit_of(power * np.float32(_LARGEST))
    power = power / unit
    shape = [1] * codes.ndim
    shape[channel_axis] = channels
    weight = trainable.add(constants, f"{path}.weight", (codes * power.reshape(shape)).astype(np.float32))
    gain = trainable.add(constants, f"{path}.scale", rest[:1].copy() if single else rest.copy())
    gain = trainable.product(constants, gain, np.ones(channels, np.float32)) if single else gain
    # Real numbers that lie on the accumulator's grid, of these steps, at the file's codes.
    step, whole_steps = scale * np.float32(input_scale), bias.astype(np.float64)
    real = (whole_steps * step).astype(np.float32)
    for candidate in (np.nextafter(real, np.float32(-np.inf)), np.nextafter(real, np.float32(np.inf))):
        real = np.where(np.rint(real / step) == whole_steps, real, candidate)
    wrong = bias[np.rint(real / step) != whole_steps][:1].astype(np.int64).tolist()
    need(not wrong, f"its bias has codes beyond what float32 holds, such as {wrong}")
    # Of the size of a product of two large codes, and so of what the layer stores.
    size = unit_of(float(step.max()) * _LARGEST**2)
    offset = trainable.add(constants, f"{path}.bias", real.astype(np.float32), unit=size)
    mean = trainable.add(constants, f"{path}.mean", np.zeros(channels, np.float32), trained=False)
    variance = trainable.add(constants, f"{path}.variance", 1 / unit**2, trained=False)
    norm = BatchNorm(gain, offset, mean, variance, None, 0.0, None, training=False)
    rule = Rule(match=path, ranges="learned", per_channel=not single)
    end = np.float32(_LARGEST) * (power[0] if single else power)
    return Weights(weight, None, norm, rule, channel_axis, np.asarray(end, np.float32), codes.astype(np.int8))
