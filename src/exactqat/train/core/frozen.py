# SPDX-License-Identifier: Apache-2.0
"""What a step of a frozen plan makes on the device, in NumPy: for kits whose own arithmetic rounds otherwise.

Their compiled functions ask the host for it, step by step; gradients stay those of the step in real numbers, straight
through all roundings (`docs/decisions/frozen.md`). What PyTorch's kit computes by itself in `frozen_torch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ...deploy.lower import LoweredStep, lower_step, on_device
from ...deploy.simulate import simulate_operator
from ...deploy.values import in_users_order
from ...device.tensor import CODE_RANGES
from ...planning.plans import Numbers, Plan, PlanStep

NumbersOf = Callable[[Sequence[np.ndarray]], Numbers]


class DeviceStep:
    """One step as the device computes it, a function of NumPy arrays. May be called from several threads."""

    def __init__(self, plan: Plan, step: PlanStep, profile: str, numbers_of: NumbersOf) -> None:
        """
        Args:
            profile: whose integers, by the names of `deploy.PROFILES`.
            numbers_of: the numbers of this step, from the arrays that training has changed.
        """
        self.plan = plan
        self.step = step
        self.profile = profile
        self.numbers_of = numbers_of
        self.operands = tuple(name for name in step.operands if plan.is_stored(name))
        self._lock = threading.Lock()
        self._known: tuple[list[bytes], LoweredStep] | None = None

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray]) -> np.ndarray:
        """The stored tensor in real numbers, float32, its axes in the user's order; of examples in which an operand
        has NaN, for which there is no code, all of it is NaN.

        Args:
            trained: what `numbers_of` takes.
            features: real numbers on the grids of the operands.
        """
        lowered = self._lowered(trained)
        graph, values = lowered.graph, {}
        for name, feature in zip(self.operands, features, strict=True):
            tensor = graph.tensors[name]
            scale, zero_point = tensor.quantization.scale[0], int(tensor.quantization.zero_point[0])
            steps = np.rint(np.nan_to_num(feature, nan=0.0, posinf=np.inf, neginf=-np.inf) / scale)
            codes = np.clip(steps + zero_point, *CODE_RANGES[tensor.dtype]).astype(tensor.dtype)
            values[name] = np.ascontiguousarray(on_device(codes, lowered.layouts[name]))
        for operator in graph.operators:
            values[operator.outputs[0]] = simulate_operator(graph, operator, values, self.profile)
        stored = graph.tensors[lowered.stored.name]
        steps = values[stored.name].astype(np.float32) - np.float32(stored.quantization.zero_point[0])
        result = in_users_order(steps, lowered.stored.layout) * stored.quantization.scale[0]
        return self._with_nan(result, features)

    def _with_nan(self, result: np.ndarray, features: Sequence[np.ndarray]) -> np.ndarray:
        broken: np.ndarray | bool = False
        for name, feature in zip(self.operands, features, strict=True):
            stored, missing = self.plan.stored(name), np.isnan(feature)
            if missing.any():
                # One example after the other, each with all of its rows.
                examples = feature.shape[stored.batch_axis] // stored.shape[stored.batch_axis]
                broken = broken | np.moveaxis(missing, stored.batch_axis, 0).reshape(examples, -1).any(1)
        if broken is False:
            return result
        own = np.repeat(np.asarray(broken), self.step.shape[self.step.batch_axis])
        np.moveaxis(result, self.step.batch_axis, 0)[own] = np.nan
        return result

    def _lowered(self, trained: Sequence[np.ndarray]) -> LoweredStep:
        key = [array.tobytes() for array in trained]
        with self._lock:
            if self._known is None or self._known[0] != key:
                self._known = (key, lower_step(self.plan, self.step, self.numbers_of(trained)))
            return self._known[1]
