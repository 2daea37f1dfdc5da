# SPDX-License-Identifier: Apache-2.0
"""What the device computes, in PyTorch: the forward pass of a frozen network, integer for integer.

Between layers there are whole steps from real 0 in float32 (codes less the zero point), so that the one convolution
that training differentiates gives the device's accumulators; these are then rounded as the device's profile says. What
has no fast path here is computed by the declarations themselves. Gradients are those of the same layers in real
numbers, straight through all roundings (`docs/decisions/frozen.md`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from exactqat.operators.torch import is_plain

from ...device import INT8_MAX, INT8_MIN, profile_named
from ...planning.plans import Numbers, Plan, PlanStep
from ..core.on_device import SLACK, Clamp, Constants, DeviceNetwork, DeviceSteps
from ..core.steps import Input, Step, WeightedStep
from . import primitives as primitives_torch
from .on_grid import OnGrid, Value, real, taken
from .primitives import per_channel, to_numpy
from .state import ModuleGrid
from .steps import Outside, TrainingOnly
from .straight_through import is_differentiated, straight_through, unwrapped
from .sums import (
    accumulated,
    in_full_float32,
    is_at_hand,
    parts_of,
    rounded,
    rounded_once,
    rounded_twice,
)

NumbersOf = Callable[[PlanStep, dict[str, tuple[np.float32, int]]], Numbers]


class Device:
    """Runs a frozen plan as the device would. Keeps its own tables for the current grids."""

    def __init__(self, plan: Plan, grids: Mapping[str, ModuleGrid], profile: str | None, numbers_of: NumbersOf) -> None:
        """
        Args:
            grids: by name.
            profile: None if no device is to be computed.
            numbers_of: a step's integers on given grids.
        """
        self.plan = plan
        self.grids = dict(grids)
        self.numbers_of = numbers_of
        self.change_profile(profile)

    def _forget(self) -> None:
        self._seen: Tensor | None = None
        self._known_steps: DeviceSteps | None = None
        self._tables: dict[tuple[str, torch.device], tuple[np.ndarray, Tensor, Tensor | None]] = {}
        self._network: DeviceNetwork | None = None

    def change_profile(self, profile: str | None) -> None:
        """Computes as another device does from here on."""
        self.profile = None if profile is None else profile_named(profile).name
        self.exists = self.plan.has_a_device and profile is not None
        self._forget()

    def ready(self) -> bool:
        """Whether it can compute what is wanted: the quantized network, on grids that a device supports."""
        mode = next(iter(self.grids.values())).state.mode
        return self.exists and mode.quantizing and not mode.observing

    def refresh(self) -> None:
        """Follows the ranges, in case others have been set.

        Their values are compared, all at once: neither a tensor's identity nor its version reveals writes through
        ``.data``.
        """
        ends = [end for grid in self.grids.values() for end in grid.held()[:2]]
        with torch.no_grad():
            values = torch.stack([unwrapped(end) for end in ends])
        same = self._seen is not None and self._seen.device == values.device and torch.equal(values, self._seen)
        if same and self._known_steps is not None:
            return
        grids = {name: grid.scale_and_zero_point() for name, grid in self.grids.items()}
        if self._known_steps is None or grids != self._known_steps.grids:
            self._forget()
            self._known_steps = DeviceSteps(self.plan, grids, cast(str, self.profile))
        self._seen = values

    @property
    def _steps(self) -> DeviceSteps:
        """The steps on the grids that `refresh` has found."""
        assert self._known_steps is not None
        return self._known_steps

    # --- a whole network --------------------------------------------------------------------------------------------

    @torch.compiler.disable  # fusing or reordering sums would change the numbers
    def run(
        self,
        steps: Mapping[str, Any],
        order: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]],
        inputs: Mapping[str, Tensor],
        seen: dict[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Real numbers of what remains when all steps are done.

        Args:
            steps: by path.
            order: path, computed operands and results no longer needed, for each step.
            inputs: float32.
            seen: gets every tensor, if given.
        """
        self.refresh()
        first = next(iter(inputs.values()))
        values: dict[str, Value] = {}
        broken: dict[str, Tensor] = {}
        with in_full_float32(first.device.type):
            for path, given in inputs.items():
                given, missing = self._without_nan(path, given)
                if missing is not None:
                    broken[path] = missing
                values[path] = self.step(path, steps[path], [given])
                if seen is not None:
                    seen[path] = self._with_nan(path, real(values[path]), broken)
            for path, operands, finished in order:
                values[path] = self.step(path, steps[path], [values[name] for name in operands])
                if broken:
                    self._spread(path, operands, broken)
                if seen is not None:
                    seen[path] = self._with_nan(path, real(values[path]), broken)
                for name in finished:
                    del values[name]
            return {path: self._with_nan(path, real(value), broken) for path, value in values.items()}

    @torch.compiler.disable
    def run_whole(
        self,
        steps: Mapping[str, Any],
        inputs: Mapping[str, Tensor],
        trained: Callable[[], Sequence[np.ndarray]],
        numbers: Callable[[], Numbers],
    ) -> dict[str, Tensor] | None:
        """As `run`, by the compiled graph: several times as fast. None if more than the results is wanted
        (gradients, noise), or weights have changed since the last call, so that preparing the graph may not pay off.

        Args:
            trained: all that `numbers` are computed from, in NumPy.
        """
        plain = all(is_plain(each) and each.device.type == "cpu" for each in inputs.values())
        if torch.is_grad_enabled() or not plain or _operations_are_watched():
            return None
        if any(isinstance(step, TrainingOnly) and step.noisy for step in steps.values()):
            return None
        self.refresh()
        if self._network is None:
            self._network = DeviceNetwork(self.plan, cast(str, self.profile), lambda _: numbers())
        network, arrays = self._network, trained()
        if not network.knows(arrays):
            return None
        features = [steps[path].compose(each).numpy() for path, each in inputs.items()]
        if any(np.isnan(feature).any() for feature in features):
            return None
        try:
            found = network(arrays, features)
        except ValueError:  # reported by the steps themselves, if they cannot be computed either
            return None
        values: dict[str, Value] = dict(zip(network.wanted, map(torch.from_numpy, found), strict=True))
        for path in network.after:
            operands = cast(PlanStep, self.plan.stored(path)).operands
            values[path] = self.step(path, steps[path], [values[name] for name in operands if name in values])
        return {path: real(values[path]) for path in self.plan.outputs}

    # --- NaN, for which there is no code ----------------------------------------------------------------------------

    def _without_nan(self, path: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """A tensor with zeros for NaN, and which examples had any."""
        missing = x.isnan()
        if not missing.any():
            return x, None
        stored = self.plan.stored(path)
        rows = stored.shape[stored.batch_axis]
        # One example after the other, each with all of its rows.
        examples = missing.movedim(stored.batch_axis, 0).reshape(x.shape[stored.batch_axis] // rows, -1).any(1)
        return x.masked_fill(missing, 0.0), examples

    @staticmethod
    def _spread(path: str, operands: Sequence[str], broken: dict[str, Tensor]) -> None:
        """Whatever is computed from an example with NaN is broken too."""
        for name in operands:
            if name in broken:
                broken[path] = broken[name] | broken[path] if path in broken else broken[name]

    def _with_nan(self, path: str, x: Tensor, broken: Mapping[str, Tensor]) -> Tensor:
        """A result with NaN everywhere in a broken example, so that its gradients are NaN too."""
        if path not in broken or not x.is_floating_point():
            return x
        stored = self.plan.stored(path)
        rows = broken[path].repeat_interleave(stored.shape[stored.batch_axis])
        # A factor, so that no gradient of a broken example is a number either.
        factor = torch.ones_like(rows, dtype=x.dtype).masked_fill(rows, math.nan)
        return x * per_channel(factor, x.dim(), stored.batch_axis)

    def step(self, path: str, step: Any, given: Sequence[Value]) -> Value:
        """What one step of the plan computes from its operands."""
        if isinstance(step, TrainingOnly):
            return self._training_only(step, given[0])
        if isinstance(step, Outside):
            return step(real(given[0]))
        if isinstance(step, Input):
            return self._input(path, step, real(given[0]))
        if not all(isinstance(each, OnGrid) for each in given):
            return self._off_grid(path, step, given)
        return self.compute(path, step, cast(Sequence[OnGrid], given))

    def _training_only(self, module: TrainingOnly, x: Value) -> Value:
        if isinstance(x, OnGrid) and not module.noisy:
            return OnGrid(x.steps.detach(), x.scale) if module.stop_gradient else x
        return module(real(x))

    def _input(self, path: str, layer: Input, given: Tensor) -> Value:
        stored = layer.compose(given)
        if layer.output_quantizer.indices:
            return OnGrid(stored, np.float32(1))
        # NaN has no code. As in the network's other phases, it propagates for the user to see.
        return stored if stored.isnan().any() else self._on_grid(path, stored)

    def _off_grid(self, path: str, layer: Step, given: Sequence[Value]) -> Value:
        """The layer in real numbers; its result is stored like any other."""
        result = layer.compose(*map(real, given))
        if layer.operator.same_quantization or result.isnan().any():
            return result
        return self._on_grid(path, result)

    def _on_grid(self, path: str, values: Tensor) -> OnGrid:
        """Real numbers from a quantizer, or from the device."""
        scale, zero_point = self._steps.placement(path).scale[0], self._steps.zero_point(path)
        lowest, highest = (-math.inf, math.inf) if self._steps.bits(path) > 8 else (INT8_MIN, INT8_MAX)
        with torch.no_grad():
            steps = (values / float(scale)).round_().clamp_(lowest - zero_point, highest - zero_point)
        return OnGrid(straight_through(values, steps, factor=1 / float(scale)), scale)

    # --- one layer --------------------------------------------------------------------------------------------------

    def compute(self, path: str, layer: Step, operands: Sequence[OnGrid]) -> Value:
        """The device's result for operands on their grids."""
        step = cast(PlanStep, self.plan.stored(path))
        operator = layer.operator
        if operator.moves_codes:
            scale = self._steps.placement(path).scale[0]
            return OnGrid(self._moved(layer, operands, float(scale)), scale)
        in_int8 = all(self._steps.bits(name) <= 8 for name in (path, *step.operands) if self.plan.is_stored(name))
        if isinstance(layer, WeightedStep):
            if in_int8:
                return self._weighted(path, layer, operands[0])
            with torch.no_grad():
                steps = self._asked(step, operands, {}, self.numbers_of(step, self._steps.grids).weights)
            return self._stored(path, layer, operands, steps)
        with torch.no_grad():
            found = self.numbers_of(step, self._steps.grids).constants if layer.constants else {}
            constants = {position: each for (_, position), each in found.items()}
            if operator.pointwise and in_int8:
                steps = self._looked_up(step, operands, constants)
            else:
                steps = self._asked(step, operands, constants, {})
        return self._stored(path, layer, operands, steps)

    def _moved(self, layer: Step, operands: Sequence[OnGrid], scale: float) -> Tensor:
        moved = [each.steps for each in operands]
        for position in sorted(layer.constants):
            constant = layer.constants[position]()
            with torch.no_grad():
                steps = (constant / scale).round_()
            moved.insert(position, straight_through(constant, steps, factor=1 / scale))
        return cast(Tensor, layer.operator.real(primitives_torch, moved, layer.attributes))

    def _stored(self, path: str, layer: Step, operands: Sequence[OnGrid], steps: Tensor) -> OnGrid:
        """The device's steps with the gradient of the layer in real numbers."""
        scale = self._steps.placement(path).scale[0]
        trained = torch.is_grad_enabled() and (isinstance(layer, WeightedStep) or layer.constants)
        if not (trained or any(is_differentiated(each.steps) for each in operands)):
            return OnGrid(steps, scale)
        if isinstance(layer, WeightedStep):
            values = layer.compute_frozen(operands[0].real())
        else:
            values = layer.compute_real(layer.operands([each.real() for each in operands]))
        if layer.operator.same_quantization:
            return OnGrid(straight_through(values, steps, factor=1 / float(scale)), scale)
        values, result, unit = layer.clamped(values), self._steps.clamp(path), float(scale)
        # The activation's gradient is already included.
        low = min(result.low, -SLACK)
        return OnGrid(straight_through(values, steps, low * unit, result.high * unit, 1 / unit), scale)

    # --- operators with weights -------------------------------------------------------------------------------------

    def _weighted(self, path: str, layer: WeightedStep, x: OnGrid) -> Value:
        stored = layer.stored_weight()
        weight = layer.weight_quantizer(stored)
        grid = layer.grid(stored)
        weight_scale = grid.weight_scale.detach()
        # One product: the folded weight in steps of its own.
        steps = weight * per_channel(grid.factor / weight_scale, weight.dim(), layer.weight_axis)
        codes = straight_through(steps, steps.detach().round()).float()
        bias = straight_through(grid.bias / (weight_scale * float(x.scale)), grid.bias_code).float()
        zero_point = self._steps.zero_point(cast(PlanStep, self.plan.stored(path)).operands[0])
        parts = parts_of(layer, codes.detach(), bias.detach(), INT8_MIN - zero_point, INT8_MAX - zero_point)
        if parts is None:
            return layer.compose(x.real())
        sums = accumulated(layer, x.steps, codes, bias, parts)
        rounding = cast(Any, layer.operator).rounding(profile_named(cast(str, self.profile)))
        return self._requantized(path, layer, sums, x.scale, weight_scale, rounding)

    def _requantized(
        self, path: str, layer: WeightedStep, sums: Tensor, input_scale: np.float32, scale: Tensor, rounding: str
    ) -> OnGrid:
        """scale: of the weight, [channels]."""
        result = self._steps.clamp(path)
        axis = layer.channel_axis % sums.dim()
        scale = scale.float()
        differentiated = is_differentiated(sums)
        if is_at_hand(sums) and forward_ad._current_level < 0:
            steps = rounded(sums, scale, axis, float(input_scale), result, rounding, differentiated)
            return OnGrid(steps, result.scale)
        # Not a division by a number, which GPUs replace with multiplication by its inverse.
        multiplier = (scale * float(input_scale)) / torch.full_like(scale, float(result.scale))
        multiplier = per_channel(multiplier, sums.dim(), axis)
        if rounding == "float32":
            # Sums beyond 2**24 come in float64; the one rounding to float32 is the device's. In place where nothing
            # else reads them.
            scaled = sums.float()
            scaled = scaled * multiplier if differentiated and scaled._base is not None else scaled.mul_(multiplier)
            with torch.no_grad():
                steps = (scaled.round() if differentiated else scaled.round_()).clamp_(result.lowest, result.highest)
        else:
            scaled = sums.float() * multiplier if differentiated else sums
            steps = _in_float64(sums, axis, input_scale, scale, rounding, result, not differentiated)
        if not differentiated:
            return OnGrid(steps, result.scale)
        return OnGrid(straight_through(scaled, steps, result.low, result.high), result.scale)

    # --- operators on single values ---------------------------------------------------------------------------------

    def _looked_up(self, step: PlanStep, operands: Sequence[OnGrid], constants: Constants) -> Tensor:
        """From a table of all pairs of codes, or of all codes."""
        paths = [name for name in step.operands if self.plan.is_stored(name)]
        device = operands[0].steps.device
        table, columns = self._table(step, constants, device)
        index = self._index(paths[0], operands[0])
        if columns is not None:
            index = index * table.shape[1] + columns
        elif len(set(paths)) == 2:
            index = index * table.shape[1] + self._index(paths[1], operands[1])
        return taken(table.reshape(-1), index)

    def _index(self, path: str, x: OnGrid) -> Tensor:
        first = self._steps.zero_point(path) - INT8_MIN
        return (x.steps.detach() + float(first)).to(torch.uint8).to(torch.int32)

    def _table(self, step: PlanStep, constants: Constants, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """`DeviceSteps.table`, on a device of PyTorch's."""
        table, columns = self._steps.table(step, constants)
        known = self._tables.get((step.path, device))
        if known is not None and known[0] is table:
            return known[1], known[2]
        places = None if columns is None else torch.from_numpy(columns).to(device)
        known = (table, torch.from_numpy(table).to(device), places)
        self._tables[(step.path, device)] = known
        return known[1], known[2]

    # --- all others -------------------------------------------------------------------------------------------------

    def _asked(
        self, step: PlanStep, operands: Sequence[OnGrid], constants: Constants, weights: Mapping[str, Any]
    ) -> Tensor:
        """What the declarations compute, in NumPy."""
        found = self._steps.results(step, [to_numpy(each.steps) for each in operands], constants, weights)
        return torch.from_numpy(found).to(operands[0].steps.device)


def _in_float64(
    sums: Tensor, axis: int, input_scale: np.float32, scale: Tensor, rounding: str, result: Clamp, in_place: bool
) -> Tensor:
    """Steps of profiles that multiply in float64 or in fixed point; scale: of the weight, float32 [channels]."""
    with torch.no_grad():
        factor = np.float64(input_scale) * to_numpy(scale).astype(np.float64) / np.float64(result.scale)
        round_ = rounded_once if rounding == "float64" else rounded_twice
        return round_(factor, sums.detach(), axis, result, in_place)


def _operations_are_watched() -> bool:
    """Whether something records PyTorch's operations, or replaces them."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return modes > 0 or torch.jit.is_tracing()


__all__ = ["Device", "straight_through"]
