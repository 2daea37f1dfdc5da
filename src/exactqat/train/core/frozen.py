# SPDX-License-Identifier: Apache-2.0
"""What a step of a frozen plan makes on the device, or all of them, in NumPy: for kits whose own arithmetic rounds
otherwise.

Their compiled functions ask the host for it: in training step by step, where gradients stay those of the step in real
numbers, straight through all roundings (`docs/decisions/frozen.md`); in evaluation once for the whole network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ...deploy.lower import LoweredStep, Lowering, Stored, lower_step, on_device
from ...deploy.simulate import Compiled, compile, simulate_operator
from ...deploy.values import in_users_order
from ...device import Tensor
from ...device.operator import Layout
from ...device.tensor import CODE_RANGES
from ...planning.inputs import require_rows
from ...planning.plans import Numbers, Plan, PlanStep

NumbersOf = Callable[[Sequence[np.ndarray]], Numbers]
# Values that are quantized together, which stay in a core's own cache.
TOGETHER = 1 << 16


def codes_of(feature: np.ndarray, tensor: Tensor, layout: Layout) -> np.ndarray:
    """Codes in the device's order of axes of real numbers on a tensor's grid; those of NaN are real 0's."""
    if tensor.dtype not in CODE_RANGES:
        return np.ascontiguousarray(on_device(feature.astype(tensor.dtype), layout))
    scale, zero_point = tensor.quantization.scale[0], np.float32(tensor.quantization.zero_point[0])
    values = feature if feature.flags.c_contiguous else np.ascontiguousarray(feature)
    codes = np.empty(values.shape, tensor.dtype)
    flat, into = values.reshape(-1), codes.reshape(-1)
    for start in range(0, flat.size, TOGETHER):
        steps = flat[start : start + TOGETHER] / scale
        missing = np.isnan(steps)
        if missing.any():
            steps[missing] = 0
        np.rint(steps, out=steps)
        steps += zero_point
        into[start : start + TOGETHER] = np.clip(steps, *CODE_RANGES[tensor.dtype], out=steps)
    return np.ascontiguousarray(on_device(codes, layout))


def real_numbers(codes: np.ndarray, tensor: Tensor, layout: Layout) -> np.ndarray:
    """What the codes of a tensor stand for, float32, in the user's order of axes."""
    steps = codes.astype(np.float32) - np.float32(tensor.quantization.zero_point[0])
    return in_users_order(steps, layout) * tensor.quantization.scale[0]


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
            values[name] = codes_of(feature, graph.tensors[name], lowered.layouts[name])
        for operator in graph.operators:
            values[operator.outputs[0]] = simulate_operator(graph, operator, values, self.profile)
        name = lowered.stored.name
        result = real_numbers(values[name], graph.tensors[name], lowered.stored.layout)
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


class DeviceNetwork:
    """What a frozen network gives on the device, all steps at once, by its compiled graph: a function of NumPy arrays,
    which gives what `DeviceStep` gives step by step. May be called from several threads.

    Attributes:
        wanted: paths of the tensors that it gives: the network's outputs, before last steps that are not on the device.
        after: paths of those.
    """

    def __init__(self, plan: Plan, profile: str, numbers_of: NumbersOf) -> None:
        """
        Args:
            profile: whose integers, by the names of `deploy.PROFILES`.
            numbers_of: the numbers of all steps, from the arrays that training has changed.
        """
        self.plan = plan
        self.profile = profile
        self.numbers_of = numbers_of
        after: dict[str, None] = {}
        wanted = dict.fromkeys(plan.outputs)
        self._reached = {each.path: {each.path} for each in plan.inputs}
        for step in plan.steps:
            operands = [name for name in step.operands if plan.is_stored(name)]
            self._reached[step.path] = set().union(*(self._reached[name] for name in operands))
            if step.outside or any(name in after for name in operands):
                after[step.path] = None
                wanted |= dict.fromkeys(operands)
        self.after = tuple(after)
        self.wanted = tuple(path for path in wanted if path not in after)
        self._lock = threading.Lock()
        self._seen: list[np.ndarray] | None = None
        self._known: tuple[Compiled, dict[str, Layout], list[tuple[Tensor, Stored]]] | None = None

    def knows(self, trained: Sequence[np.ndarray]) -> bool:
        """Whether the last call, of this function or of the network, was with the same values: it then pays to prepare
        the whole network."""
        with self._lock:
            return self._is_known(trained)

    def _is_known(self, trained: Sequence[np.ndarray]) -> bool:
        seen = self._seen
        if seen is not None and all(np.array_equal(*pair) for pair in zip(seen, trained, strict=True)):
            return True
        self._seen = [array.copy() for array in trained]
        self._known = None
        return False

    def __call__(self, trained: Sequence[np.ndarray], features: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The wanted tensors in real numbers, float32, their axes in the user's order; of examples in which an input
        that they depend on has NaN, all of it is NaN.

        Args:
            trained: what `numbers_of` takes.
            features: real numbers on the grids of the plan's inputs.

        Raises:
            ValueError: what was trained has no graph, or the graph not all of what is wanted.
        """
        with self._lock:
            if not self._is_known(trained) or self._known is None:
                self._known = self._prepared(trained)
            compiled, layouts, wanted = self._known
        for each, feature in zip(self.plan.inputs, features, strict=True):
            if each.rows and feature.size:
                require_rows(each, int(feature.min()), int(feature.max()))
        codes = {
            each.path: codes_of(feature, compiled.tensor(each.path), layouts[each.path])
            for each, feature in zip(self.plan.inputs, features, strict=True)
        }
        found = compiled.run(codes, [stored.name for _, stored in wanted])
        results = [real_numbers(found[stored.name], tensor, stored.layout) for tensor, stored in wanted]
        for each, feature in zip(self.plan.inputs, features, strict=True):
            if not np.isfinite(feature.sum()) and np.isnan(feature).any():
                self._spread(each.path, np.isnan(feature), results)
        return results

    def _spread(self, path: str, missing: np.ndarray, results: Sequence[np.ndarray]) -> None:
        """NaN for all of the examples whose input has some."""
        given = self.plan.stored(path)
        examples = missing.shape[given.batch_axis] // given.shape[given.batch_axis]
        broken = np.moveaxis(missing, given.batch_axis, 0).reshape(examples, -1).any(1)
        for wanted, result in zip(self.wanted, results, strict=True):
            stored = self.plan.stored(wanted)
            if path in self._reached[wanted]:
                rows = np.repeat(broken, stored.shape[stored.batch_axis])
                np.moveaxis(result, stored.batch_axis, 0)[rows] = np.nan

    def _prepared(
        self, trained: Sequence[np.ndarray]
    ) -> tuple[Compiled, dict[str, Layout], list[tuple[Tensor, Stored]]]:
        lowering = Lowering(self.plan, self.numbers_of(trained))
        graph = lowering.run()
        wanted = [lowering.stored(path) for path in self.wanted]
        missing = [stored.name for stored in wanted if stored.name not in graph.tensors]
        if missing:
            raise ValueError(f"the graph does not compute {missing}")
        layouts = {each.path: lowering.layout(each.path) for each in self.plan.inputs}
        return compile(graph, self.profile), layouts, [(graph.tensors[stored.name], stored) for stored in wanted]
