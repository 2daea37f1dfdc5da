# SPDX-License-Identifier: Apache-2.0
"""What the device computes, in PyTorch: the forward pass of a frozen network, integer for integer.

Between layers there are whole steps from real 0 in float32 (codes less the zero point), so that the one convolution
which training differentiates gives the device's accumulators; then they are rounded as the device's profile says. What
has no fast way here is asked of the declarations themselves. Gradients are those of the same layers in real numbers,
straight through all roundings (`docs/decisions/frozen.md`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from exactqat.torch import fused, is_plain

from ...capture.torch.custom import is_differentiated, straight_through, unwrapped
from ...deploy.graph import Graph
from ...deploy.lower import LoweredStep, Lowering, lower_step, on_device
from ...deploy.simulate import simulate_operator
from ...deploy.values import in_users_order
from ...device import INT8_MAX, INT8_MIN, OPERATORS, Quantization, profile_named
from ...device import Tensor as DeviceTensor
from ...device.arithmetic import bounds, fixed_point, zero_point_of
from ...planning.plans import Numbers, Plan, PlanStep
from ..core.frozen import DeviceNetwork
from . import primitives as primitives_torch
from .layers import CustomGradient, Outside, QuantizedInput, QuantizedLayer, TrainingOnly, WeightedLayer
from .modules import FakeQuantize
from .primitives import per_channel

_round_sums = fused("rounded_sums")

# Below, float32 holds every sum of whole numbers. A little less, as the bounds are themselves summed in float32.
_EXACT = 2.0**24 * (1 - 2.0**-12)
# In steps: what still counts as the end of a grid, for gradients.
_SLACK = 2.0**-14
# Of float64, what a core's second-level cache holds beside the other things.
_CACHED_VALUES = 1 << 15
# Of float64, for products of a sum and a 31-bit multiplier that are not clamped anyway.
_LARGEST_EXACT_SHIFT = 12


class OnGrid:
    """A stored tensor.

    Attributes:
        steps: whole numbers in float32, 0 for real 0; indices in int64.
        scale: what one of them is.
    """

    __slots__ = ("_real", "scale", "steps")

    def __init__(self, steps: Tensor, scale: np.float32) -> None:
        self.steps = steps
        self.scale = scale
        self._real: Tensor | None = None

    def real(self) -> Tensor:
        """The real numbers, in float32."""
        if self._real is None:
            self._real = self.steps * float(self.scale) if self.steps.is_floating_point() else self.steps
        return self._real


NumbersOf = Callable[[PlanStep, dict[str, tuple[np.float32, int]]], Numbers]
Value = OnGrid | Tensor  # a plain tensor is off all grids: training's noise, or NaN


@dataclass(frozen=True)
class _Result:
    """How the device stores what a step computes; in steps.

    lowest, highest: what activation, placement and container let through. low, high: between them (exclusively) lies
    what gradients pass, in the result's own steps before rounding.
    """

    scale: np.float32
    lowest: float
    highest: float
    low: float
    high: float


class Device:
    """Runs a frozen plan as the device would. Keeps tables of its own, for the grids of the moment."""

    def __init__(
        self, plan: Plan, quantizers: Mapping[str, FakeQuantize], profile: str | None, numbers_of: NumbersOf
    ) -> None:
        """
        Args:
            quantizers: by grid.
            profile: None where no device is to be computed.
            numbers_of: a step's integers on given grids.
        """
        self.plan = plan
        self.quantizers = dict(quantizers)
        self.numbers_of = numbers_of
        self.change_profile(profile)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    _kept = ("_seen", "_grids", "_lowering", "_placements", "_results", "_lowered", "_tables", "_network")

    def _forget(self) -> None:
        self._seen: Tensor | None = None
        self._grids: dict[str, tuple[np.float32, int]] = {}
        self._lowering: Lowering | None = None
        self._placements: dict[str, Quantization] = {}
        self._results: dict[str, _Result] = {}
        self._lowered: dict[str, tuple[Any, LoweredStep]] = {}
        self._tables: dict[tuple[str, torch.device], tuple[Any, Tensor, Tensor | None]] = {}
        self._network: DeviceNetwork | None = None

    def change_profile(self, profile: str | None) -> None:
        """Computes as other devices do from here on."""
        self.profile = None if profile is None else profile_named(profile).name
        self.exists = self.plan.has_a_device and profile is not None
        self._forget()

    def ready(self) -> bool:
        """Whether it computes what is asked for: the quantized network, on grids that a device knows."""
        return self.exists and all(each.quantizing and not each.observing for each in self.quantizers.values())

    def refresh(self) -> None:
        """Follows the ranges, should somebody have set others.

        Their values are compared, all at once: neither a tensor's identity nor its version shows what was written
        through ``.data``.
        """
        ends = [end for each in self.quantizers.values() for end in (each.range.minimum, each.range.maximum)]
        with torch.no_grad():
            values = torch.stack([unwrapped(end) for end in ends])
        same = self._seen is not None and self._seen.device == values.device and torch.equal(values, self._seen)
        if same and self._lowering is not None:
            return
        grids = {name: each.scale_and_zero_point() for name, each in self.quantizers.items()}
        if grids != self._grids or self._lowering is None:
            self._forget()
            self._grids = grids
            self._lowering = Lowering(self.plan, Numbers(grids, {}))
        self._seen = values

    # --- a whole network --------------------------------------------------------------------------------------------

    @torch.compiler.disable  # what a compiler would fuse or sum in another way would be another number
    def run(
        self,
        steps: Mapping[str, nn.Module],
        order: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]],
        inputs: Mapping[str, Tensor],
        seen: dict[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Real numbers of what is left when all steps are done.

        Args:
            steps: modules by path.
            order: path, computed operands and results that nobody reads any more, for each step.
            inputs: float32.
            seen: gets every tensor, if given.
        """
        self.refresh()
        first = next(iter(inputs.values()))
        values: dict[str, Value] = {}
        broken: dict[str, Tensor] = {}
        with torch.autocast(first.device.type, enabled=False):
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
        steps: Mapping[str, nn.Module],
        inputs: Mapping[str, Tensor],
        trained: Callable[[], Sequence[np.ndarray]],
        numbers: Callable[[], Numbers],
    ) -> dict[str, Tensor] | None:
        """As `run`, by the compiled graph: several times as fast. None where something else than the results is asked
        for (gradients, hooks, noise), or weights have changed since the last call, so that preparing the graph may not
        pay.

        Args:
            trained: all that `numbers` are made of, in NumPy.
        """
        plain = all(is_plain(each) and each.device.type == "cpu" for each in inputs.values())
        if torch.is_grad_enabled() or not plain or _operations_are_watched():
            return None
        if any(_is_noisy(step) for step in steps.values()) or any(
            _is_watched(module) for step in steps.values() for module in step.modules()
        ):
            return None
        self.refresh()
        if self._network is None:
            self._network = DeviceNetwork(self.plan, cast(str, self.profile), lambda _: numbers())
        network, arrays = self._network, trained()
        if not network.knows(arrays):
            return None
        features = [cast(QuantizedInput, steps[path]).compose(each).numpy() for path, each in inputs.items()]
        if any(np.isnan(feature).any() for feature in features):
            return None
        try:
            found = network(arrays, features)
        except ValueError:  # said by the steps themselves, if they cannot be computed either
            return None
        values: dict[str, Value] = dict(zip(network.wanted, map(torch.from_numpy, found), strict=True))
        for path in network.after:
            operands = cast(PlanStep, self.plan.stored(path)).operands
            values[path] = self.step(path, steps[path], [values[name] for name in operands if name in values])
        return {path: real(values[path]) for path in self.plan.outputs}

    # --- NaN, for which there is no code ----------------------------------------------------------------------------

    def _without_nan(self, path: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """A tensor with zeros for NaN, and which of the examples had any."""
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
        """What is computed of an example with NaN is broken too."""
        for name in operands:
            if name in broken:
                broken[path] = broken[name] | broken[path] if path in broken else broken[name]

    def _with_nan(self, path: str, x: Tensor, broken: Mapping[str, Tensor]) -> Tensor:
        """A result with NaN for all of a broken example, whose gradients are then NaN too."""
        if path not in broken or not x.is_floating_point():
            return x
        stored = self.plan.stored(path)
        rows = broken[path].repeat_interleave(stored.shape[stored.batch_axis])
        # A factor, so that no gradient of a broken example is a number either.
        factor = torch.ones_like(rows, dtype=x.dtype).masked_fill(rows, math.nan)
        return x * per_channel(factor, x.dim(), stored.batch_axis)

    def step(self, path: str, module: nn.Module, given: Sequence[Value]) -> Value:
        """What one step of the plan makes of its operands."""
        if isinstance(module, TrainingOnly):
            return self._training_only(module, given[0])
        if isinstance(module, CustomGradient):
            return self._custom_gradient(module, given)
        if isinstance(module, Outside):
            return cast(Tensor, module(real(given[0])))
        layer = cast(QuantizedLayer, module)
        if _is_watched(layer):
            watched = cast(Tensor, layer(*map(real, given)))
            on_grid = all(isinstance(each, OnGrid) for each in given) or isinstance(layer, QuantizedInput)
            return self._on_grid(path, watched) if on_grid and not watched.isnan().any() else watched
        if isinstance(layer, QuantizedInput):
            return self._input(path, layer, real(given[0]))
        if not all(isinstance(each, OnGrid) for each in given):
            return self._off_grid(path, layer, given)
        result = self.compute(path, layer, cast(Sequence[OnGrid], given))
        if _is_watched(layer.output_quantizer) and not layer.operator.same_quantization:
            return self._on_grid(path, layer.output_quantizer(real(result)))
        return result

    def layer(self, path: str, layer: QuantizedLayer, features: Sequence[Tensor]) -> Tensor:
        """What a layer makes of real numbers that lie on the grids of its operands."""
        self.refresh()
        if isinstance(layer, QuantizedInput):
            return real(self._input(path, layer, features[0]))
        operands = [name for name in cast(PlanStep, self.plan.stored(path)).operands if self.plan.is_stored(name)]
        broken: dict[str, Tensor] = {}
        with torch.autocast(features[0].device.type, enabled=False):
            given = []
            for name, each in zip(operands, features, strict=True):
                feature, missing = self._without_nan(name, each)
                if missing is not None:
                    broken[name] = missing
                given.append(self._on_grid(name, feature))
            self._spread(path, operands, broken)
            return self._with_nan(path, real(self.compute(path, layer, given)), broken)

    def _training_only(self, module: TrainingOnly, x: Value) -> Value:
        noisy = module.training and (module.expression is not None or module.dropout > 0) and not module.stop_gradient
        if isinstance(x, OnGrid) and not noisy and not _is_watched(module):
            return OnGrid(x.steps.detach(), x.scale) if module.stop_gradient else x
        return cast(Tensor, module(real(x)))

    @staticmethod
    def _custom_gradient(module: CustomGradient, given: Sequence[Value]) -> Value:
        x, *operands = given
        if not isinstance(x, OnGrid) or _is_watched(module):
            return cast(Tensor, module(*map(real, given)))
        gradient_of = module.gradient_of([real(each) for each in operands])
        if gradient_of is None:
            return OnGrid(x.steps.detach(), x.scale)
        return OnGrid(straight_through(gradient_of, x.steps.detach(), factor=1 / float(x.scale)), x.scale)

    def _input(self, path: str, layer: QuantizedInput, given: Tensor) -> Value:
        stored = layer.compose(given)
        if layer.output_quantizer.indices:
            return OnGrid(stored, np.float32(1))
        # NaN has no code. As in all of the network's other phases it goes through, for the user to see.
        return stored if stored.isnan().any() else self._on_grid(path, stored)

    def _off_grid(self, path: str, layer: QuantizedLayer, given: Sequence[Value]) -> Value:
        """The layer in real numbers; its result is stored as any other."""
        result = layer.compose(*map(real, given))
        if layer.operator.same_quantization or result.isnan().any():
            return result
        return self._on_grid(path, result)

    def _on_grid(self, path: str, values: Tensor) -> OnGrid:
        """Real numbers that a quantizer made, or the device."""
        placement = self._placement(path)
        scale, zero_point = placement.scale[0], int(placement.zero_point[0])
        lowest, highest = (-math.inf, math.inf) if self._bits(path) > 8 else (INT8_MIN, INT8_MAX)
        with torch.no_grad():
            steps = (values / float(scale)).round_().clamp_(lowest - zero_point, highest - zero_point)
        return OnGrid(straight_through(values, steps, factor=1 / float(scale)), scale)

    # --- one layer --------------------------------------------------------------------------------------------------

    def compute(self, path: str, layer: QuantizedLayer, operands: Sequence[OnGrid]) -> Value:
        """The device's result of operands on their grids."""
        step = cast(PlanStep, self.plan.stored(path))
        operator = layer.operator
        if operator.moves_codes:
            scale = self._placement(path).scale[0]
            return OnGrid(self._moved(layer, operands, float(scale)), scale)
        in_int8 = all(self._bits(name) <= 8 for name in (path, *step.operands) if self.plan.is_stored(name))
        if isinstance(layer, WeightedLayer):
            if in_int8:
                return self._weighted(path, layer, operands[0])
            with torch.no_grad():
                steps = self._asked(step, operands, {}, self.numbers_of(step, self._grids).weights)
            return self._stored(path, layer, operands, steps)
        with torch.no_grad():
            found = self.numbers_of(step, self._grids).constants if layer.constants else {}
            constants = {position: each for (_, position), each in found.items()}
            if operator.pointwise and in_int8:
                steps = self._looked_up(step, operands, constants)
            else:
                steps = self._asked(step, operands, constants, {})
        return self._stored(path, layer, operands, steps)

    def _moved(self, layer: QuantizedLayer, operands: Sequence[OnGrid], scale: float) -> Tensor:
        moved = [each.steps for each in operands]
        for position in sorted(layer.constants):
            constant = layer.constants[position]()
            with torch.no_grad():
                steps = (constant / scale).round_()
            moved.insert(position, straight_through(constant, steps, factor=1 / scale))
        return cast(Tensor, layer.operator.real(primitives_torch, moved, layer.attributes))

    def _stored(self, path: str, layer: QuantizedLayer, operands: Sequence[OnGrid], steps: Tensor) -> OnGrid:
        """The device's steps with the gradient of the layer in real numbers."""
        scale = self._placement(path).scale[0]
        trained = torch.is_grad_enabled() and (isinstance(layer, WeightedLayer) or layer.constants)
        if not (trained or any(is_differentiated(each.steps) for each in operands)):
            return OnGrid(steps, scale)
        if isinstance(layer, WeightedLayer):
            values = layer.compute_frozen(operands[0].real())
        else:
            values = layer.compute_real(layer.operands([each.real() for each in operands]))
        if layer.operator.same_quantization:
            return OnGrid(straight_through(values, steps, factor=1 / float(scale)), scale)
        values, result, unit = layer.clamped(values), self._result(path), float(scale)
        # An activation has had its gradient.
        low = min(result.low, -_SLACK)
        return OnGrid(straight_through(values, steps, low * unit, result.high * unit, 1 / unit), scale)

    # --- operators with weights -------------------------------------------------------------------------------------

    def _weighted(self, path: str, layer: WeightedLayer, x: OnGrid) -> Value:
        stored = layer.stored_weight()
        weight = layer.weight_quantizer(stored)
        grid = layer.grid(stored)
        weight_scale = grid.weight_scale.detach()
        # One product: the folded weight in steps of its own.
        steps = weight * per_channel(grid.factor / weight_scale, weight.dim(), layer.weight_axis)
        codes = straight_through(steps, steps.detach().round()).float()
        bias = straight_through(grid.bias / (weight_scale * float(x.scale)), grid.bias_code).float()
        placement = self._placement(cast(PlanStep, self.plan.stored(path)).operands[0])
        zero_point = int(placement.zero_point[0])
        parts = _parts(layer, codes.detach(), bias.detach(), INT8_MIN - zero_point, INT8_MAX - zero_point)
        if parts is None:
            return layer.compose(x.real())
        sums = accumulated(layer, x.steps, codes, bias, parts)
        rounding = cast(Any, layer.operator).rounding(profile_named(cast(str, self.profile)))
        return self._requantized(path, layer, sums, x.scale, weight_scale, rounding)

    def _requantized(
        self, path: str, layer: WeightedLayer, sums: Tensor, input_scale: np.float32, scale: Tensor, rounding: str
    ) -> OnGrid:
        """scale: of the weight, [channels]."""
        result = self._result(path)
        axis = layer.channel_axis % sums.dim()
        scale = scale.float()
        # Not a division by a number, for which GPUs multiply with its inverse.
        multiplier = (scale * float(input_scale)) / torch.full_like(scale, float(result.scale))
        multiplier = per_channel(multiplier, sums.dim(), axis)
        differentiated = is_differentiated(sums)
        if rounding == "float32":
            # Sums beyond 2**24 come in float64; the one rounding to float32 is the device's. In place where nobody
            # else sees them.
            scaled = sums.float()
            scaled = scaled * multiplier if differentiated and scaled._base is not None else scaled.mul_(multiplier)
            with torch.no_grad():
                steps = (scaled.round() if differentiated else scaled.round_()).clamp_(result.lowest, result.highest)
        else:
            scaled = sums.float() * multiplier if differentiated else sums
            with torch.no_grad():
                widened = _array(scale).astype(np.float64)
                factor = np.float64(input_scale) * widened / np.float64(result.scale)
                round_ = _rounded_once if rounding == "float64" else _rounded_twice
                steps = round_(factor, sums.detach(), axis, result, not differentiated)
        if not differentiated:
            return OnGrid(steps, result.scale)
        return OnGrid(straight_through(scaled, steps, result.low, result.high), result.scale)

    # --- operators on single values ---------------------------------------------------------------------------------

    def _looked_up(
        self, step: PlanStep, operands: Sequence[OnGrid], constants: Mapping[int, tuple[np.ndarray, np.float32]]
    ) -> Tensor:
        """From a table of all pairs of codes, or of all codes."""
        paths = [name for name in step.operands if self.plan.is_stored(name)]
        device = operands[0].steps.device
        table, columns = self._table(step, paths, constants, device)
        index = self._index(paths[0], operands[0])
        if columns is not None:
            index = index * table.shape[1] + columns
        elif len(set(paths)) == 2:
            index = index * table.shape[1] + self._index(paths[1], operands[1])
        return _taken(table.reshape(-1), index)

    def _index(self, path: str, x: OnGrid) -> Tensor:
        first = int(self._placement(path).zero_point[0]) - INT8_MIN
        return (x.steps.detach() + float(first)).to(torch.uint8).to(torch.int32)

    def _table(
        self,
        step: PlanStep,
        paths: Sequence[str],
        constants: Mapping[int, tuple[np.ndarray, np.float32]],
        device: torch.device,
    ) -> tuple[Tensor, Tensor | None]:
        """Steps of the result for the codes of the first operand (rows) and of the second, or of the constant's
        different ones (columns); and which column every value of the constant has."""
        key = [(position, codes.tobytes(), scale) for position, (codes, scale) in constants.items()]
        known = self._tables.get((step.path, device))
        if known is not None and known[0] == key:
            return known[1], known[2]
        lowered = self._lowered_step(step, constants, {})
        every = np.arange(INT8_MIN, INT8_MAX + 1).astype(np.int8)
        different = list(dict.fromkeys(paths))
        values = {name: every.reshape((-1, 1) if number == 0 else (1, -1)) for number, name in enumerate(different)}
        tensors, columns = dict(lowered.graph.tensors), None
        for name, tensor in lowered.graph.tensors.items():
            if tensor.data is not None:
                (codes, _), *_ = constants.values()
                kept, places = np.unique(codes, return_inverse=True)
                columns = torch.from_numpy(places.reshape(codes.shape).astype(np.int32)).to(device)
                values[name] = (kept.reshape(1, -1) + zero_point_of(tensor)).astype(np.int8)
                tensors[name] = replace(tensor, data=None)
        results = self._simulated(replace(lowered.graph, tensors=tensors), values, moved=False)[lowered.stored.name]
        results = results.astype(np.float32) - zero_point_of(tensors[lowered.stored.name])
        table = torch.from_numpy(results).to(device)
        self._tables[(step.path, device)] = (key, table, columns)
        return table, columns

    # --- all others -------------------------------------------------------------------------------------------------

    def _asked(
        self,
        step: PlanStep,
        operands: Sequence[OnGrid],
        constants: Mapping[int, tuple[np.ndarray, np.float32]],
        weights: Mapping[str, Any],
    ) -> Tensor:
        """What the declarations say, in NumPy."""
        lowered = self._lowered_step(step, constants, weights)
        paths = [name for name in step.operands if self.plan.is_stored(name)]
        values = {}
        for path, x in zip(paths, operands, strict=True):
            tensor = lowered.graph.tensors[path]
            codes = (x.steps.detach() + float(zero_point_of(tensor))).to(getattr(torch, tensor.dtype))
            values[path] = np.ascontiguousarray(on_device(_array(codes), lowered.layouts[path]))
        results = self._simulated(lowered.graph, values)[lowered.stored.name]
        steps = results.astype(np.float32) - np.float32(zero_point_of(lowered.graph.tensors[lowered.stored.name]))
        return torch.from_numpy(in_users_order(steps, lowered.stored.layout)).to(operands[0].steps.device)

    def _simulated(self, graph: Graph, values: dict[str, np.ndarray], moved: bool = True) -> dict[str, np.ndarray]:
        """All results by name. moved: whether what moves codes is done; for a table places mean nothing."""
        for operator in graph.operators:
            if moved or not OPERATORS[operator.kind].moves_codes:
                values[operator.outputs[0]] = simulate_operator(graph, operator, values, cast(str, self.profile))
            else:
                values[operator.outputs[0]] = values[operator.inputs[0]]
        return values

    def _lowered_step(
        self,
        step: PlanStep,
        constants: Mapping[int, tuple[np.ndarray, np.float32]],
        weights: Mapping[str, Any],
    ) -> LoweredStep:
        key = [(codes.tobytes(), scale) for codes, scale in constants.values()]
        known = self._lowered.get(step.path)
        if known is not None and known[0] == key and not weights:
            return known[1]
        numbers = {(step.path, position): each for position, each in constants.items()}
        lowered = lower_step(self.plan, step, Numbers(self._grids, weights, numbers))
        self._lowered[step.path] = (key, lowered)
        return lowered

    def _bits(self, path: str) -> int:
        grid = self.plan.stored(path).grid
        if not grid:  # training's own steps store nothing
            return self._bits(cast(PlanStep, self.plan.stored(path)).operands[0])
        return self.plan.grids[grid].bits

    def _placement(self, path: str) -> Quantization:
        if path not in self._placements:
            assert self._lowering is not None
            self._placements[path] = self._lowering.placement(path)
        return self._placements[path]

    def _result(self, path: str) -> _Result:
        if path not in self._results:
            self._results[path] = self._result_of(cast(PlanStep, self.plan.stored(path)))
        return self._results[path]

    def _result_of(self, step: PlanStep) -> _Result:
        assert self._lowering is not None
        placements = self._lowering.placements(step)
        scale = placements[0].scale[0]
        fused = {"activation": step.activation if "activation" in OPERATORS[step.kind].attributes else "NONE"}
        tensor = DeviceTensor(step.path, (1,), "int8", placements[0])
        ends = [np.array(bounds(tensor, fused, profile_named(cast(str, self.profile)))) - zero_point_of(tensor)]
        ends += [np.array((INT8_MIN, INT8_MAX)) - int(each.zero_point[0]) for each in placements[1:]]
        lowest, highest = max(low for low, _ in ends), min(high for _, high in ends)
        _, zero = self._grids[step.grid]
        low, high = float(-zero), float(2 ** self.plan.grids[step.grid].bits - 1 - zero)
        if step.bounds is not None:
            low, high = max(low, step.bounds[0] / float(scale)), min(high, step.bounds[1] / float(scale))
        # Fake quantization passes gradients at its ends, activations do not.
        low, high = low - _SLACK, high + _SLACK
        if step.activation != "NONE":
            low = max(low, 0.0)
        if step.activation == "RELU6":
            high = min(high, 6 / float(scale))
        return _Result(scale, float(lowest), float(highest), low, high)


# --- tensors ----------------------------------------------------------------------------------------------------------


def real(value: Value) -> Tensor:
    """Real numbers of a tensor on a grid or off all of them."""
    return value.real() if isinstance(value, OnGrid) else value


def _operations_are_watched() -> bool:
    """Whether something records PyTorch's operations, or computes others in their place."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return modes > 0 or torch.jit.is_tracing()


def _is_noisy(module: nn.Module) -> bool:
    """Whether training makes something else of a tensor that stays as it is on the device."""
    return (
        isinstance(module, TrainingOnly) and module.training and (module.expression is not None or module.dropout > 0)
    )


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody's hooks want to see what a module is called with, or change it."""
    every = nn.modules.module
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
            every._global_forward_hooks,
            every._global_forward_pre_hooks,
            every._global_backward_hooks,
            every._global_backward_pre_hooks,
        )
    )


def _array(tensor: Tensor) -> np.ndarray:
    return unwrapped(tensor.detach().cpu()).numpy()


def _taken(table: Tensor, index: Tensor) -> Tensor:
    """table[index], in the memory order of the index: as a vector it is many times faster."""
    order = sorted(range(index.dim()), key=lambda axis: (-index.stride()[axis], axis))
    turned = index.permute(order)
    return table.index_select(0, turned.reshape(-1)).reshape(turned.shape).permute(list(np.argsort(order)))


# --- sums and their rounding ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parts:
    """How a sum is formed without rounding.

    ends: where the parts of the input channels end, each of which float32 can sum. whole: there is one, and float32
    holds the bias besides. wide: float64 is needed.
    """

    ends: tuple[int, ...] = ()
    whole: bool = True
    wide: bool = False


def _parts(layer: WeightedLayer, codes: Tensor, bias: Tensor, lowest: int, highest: int) -> _Parts | None:
    """For operands in lowest..highest. None: weights are not finite."""
    output_axis, input_axis = layer.weight_axis, 1 - layer.weight_axis
    others = [axis for axis in range(codes.dim()) if axis not in (output_axis, input_axis)]
    if not bias.numel():
        return _Parts()
    # One pass over the weights, which nearly always suffices. Of NaN the sum is NaN.
    sizes = torch.linalg.vector_norm(codes, 1, [input_axis, *others])
    total = float((sizes * max(-lowest, highest) + bias.abs()).amax())
    if math.isnan(total):
        return None
    if total < _EXACT:
        return _Parts()
    # Sums of any of the products, in any order, stay within the sum of the positive and that of the negative ones.
    magnitude = codes.abs().sum(others) if others else codes.abs()
    signed = codes.sum(others) if others else codes
    if output_axis == 1:
        magnitude, signed = magnitude.T, signed.T
    above, below = (magnitude + signed) / 2, (magnitude - signed) / 2
    reach = torch.stack([above * highest - below * lowest, below * highest - above * lowest])  # [2, out, in / groups]
    if float((reach.sum(2).amax(0) + bias.abs()).amax()) < _EXACT:
        return _Parts()
    if float(reach.sum(2).amax()) < _EXACT:
        return _Parts(whole=False)
    if layer.attributes.get("groups", 1) != 1:
        return _Parts(whole=False, wide=True)
    channels = reach.shape[2]
    for count in range(2, min(channels, 64) + 1):
        size = -(-channels // count)
        ends = tuple(min(end, channels) for end in range(size, channels + size, size))
        if all(float(part.sum(2).amax()) < _EXACT for part in reach.split(size, 2)):
            return _Parts(ends, whole=False)
    return _Parts(whole=False, wide=True)


def accumulated(layer: WeightedLayer, steps: Tensor, codes: Tensor, bias: Tensor, parts: _Parts) -> Tensor:
    """The device's accumulators: float32 where it holds them, else float64."""
    with _without_transforms(steps):
        return _accumulated(layer, steps, codes, bias, parts)


@contextmanager
def _without_transforms(like: Tensor) -> Iterator[None]:
    """Convolutions as sums of products: NNPACK and cuDNN may go by Winograd's or Fourier's way, which rounds."""
    with torch.backends.nnpack.flags(enabled=False):
        if not like.is_cuda:
            yield
            return
        with torch.backends.cudnn.flags(enabled=False):
            yield


def _accumulated(layer: WeightedLayer, steps: Tensor, codes: Tensor, bias: Tensor, parts: _Parts) -> Tensor:
    if parts.whole:
        return layer.compute(steps, codes, bias)
    axis = layer.channel_axis % steps.dim()
    if parts.wide:
        sums = layer.compute(steps.double(), codes.double(), None)
    elif not parts.ends:
        sums = layer.compute(steps, codes, None).double()
    else:
        starts = (0, *parts.ends[:-1])
        pieces = [
            layer.compute(
                steps.narrow(axis, start, end - start),
                codes.narrow(1 - layer.weight_axis, start, end - start),
                None,
            ).double()
            for start, end in zip(starts, parts.ends, strict=True)
        ]
        sums = torch.stack(pieces).sum(0) if len(pieces) > 2 else pieces[0] + pieces[1]
    return sums + per_channel(bias.double(), sums.dim(), layer.channel_axis % sums.dim())


def _rounded_once(factor: np.ndarray, sums: Tensor, axis: int, result: _Result, in_place: bool) -> Tensor:
    """`device.weighted.ROUNDINGS`: float64."""
    if _is_at_hand(sums):
        return _rounded_on_cpu(factor, np.zeros_like(factor), sums, axis, result, in_place, True)
    along = _along(factor, sums, axis)
    half = torch.full((), 0.5, dtype=torch.float64, device=sums.device)

    def rounded(block: Tensor) -> Tensor:
        scaled = block.double() * along
        scaled.add_(_with_sign(half, scaled))
        # The nearest integer towards 0; `trunc` takes many times as long.
        return scaled.abs().floor_().mul_(scaled.sign_())

    return _in_blocks(rounded, sums, result, in_place)


def _rounded_twice(factor: np.ndarray, sums: Tensor, axis: int, result: _Result, in_place: bool) -> Tensor:
    """`device.weighted.ROUNDINGS`: fixed_point.

    The doubled high product is rounded half up, what is then shifted out half away from zero. For shifts s > 0
    both together are floor(x + 1/2 + 2**-(s + 1)) of the exact product x, with the last term subtracted where x is
    negative. float64 holds all of that for results below 2**9 while the shift is small; larger ones are clamped.
    """
    significand, exponent = fixed_point(factor)
    if exponent.min(initial=0) < -_LARGEST_EXACT_SHIFT or exponent.max(initial=0) > 0:
        return _in_blocks(_rounding_twice_in_int64(significand, exponent, sums, axis), sums, result, in_place)
    product = np.ldexp(significand.astype(np.float64), exponent - 31)
    sign = np.where(exponent < 0, np.ldexp(1.0, exponent - 1), 0.0)
    if _is_at_hand(sums):
        return _rounded_on_cpu(product, sign, sums, axis, result, in_place, False)
    along, nudge = _along(product, sums, axis), _along(sign, sums, axis)

    def rounded(block: Tensor) -> Tensor:
        scaled = block.double() * along
        return scaled.add_(_with_sign(nudge, scaled)).add_(0.5).floor_()

    return _in_blocks(rounded, sums, result, in_place)


def _is_at_hand(sums: Tensor) -> bool:
    """Whether the kernel takes them."""
    return sums.is_cpu and sums.dtype == torch.float32 and is_plain(sums)


def _rounded_on_cpu(
    factor: np.ndarray,
    nudge: np.ndarray,
    sums: Tensor,
    axis: int,
    result: _Result,
    in_place: bool,
    away_from_zero: bool,
) -> Tensor:
    """All of it in one pass."""
    moved = sums.movedim(axis, -1)
    dense = moved.contiguous()
    vectors = [torch.from_numpy(np.array(np.broadcast_to(each, dense.shape[-1:]))) for each in (factor, nudge)]
    steps = dense if in_place else torch.empty_like(dense)
    _round_sums(dense, *vectors, result.lowest, result.highest, away_from_zero, out=steps)
    return steps.movedim(-1, axis)


def _with_sign(magnitude: Tensor, of: Tensor) -> Tensor:
    # In the other's order of memory, which PyTorch does not choose by itself.
    return torch.copysign(magnitude, of, out=torch.empty_like(of))


def _rounding_twice_in_int64(
    significand: np.ndarray, exponent: np.ndarray, sums: Tensor, axis: int
) -> Callable[[Tensor], Tensor]:
    left, right = (_along(shift, sums, axis) for shift in (np.maximum(exponent, 0), np.maximum(-exponent, 0)))
    factor, half = _along(significand, sums, axis), (1 << right) >> 1

    def rounded(block: Tensor) -> Tensor:
        shifted = (block.long() << left).to(torch.int32).long()  # int32 wraps in the kernels too
        high = (shifted * factor + 2**30) >> 31
        return (high + half - ((high < 0) & (right > 0)).long()) >> right

    return rounded


def _in_blocks(function: Callable[[Tensor], Tensor], sums: Tensor, end: _Result, in_place: bool) -> Tensor:
    """In float32 and clamped, a few rows at a time: what lies between in float64 stays in the cores' own caches."""
    result = sums if in_place and sums.dtype == torch.float32 else torch.empty_like(sums, dtype=torch.float32)
    # PyTorch shares out a block among its threads, always in the same way.
    together = _CACHED_VALUES * torch.get_num_threads() if sums.device.type == "cpu" else sums.numel()
    rows = max(together * sums.shape[0] // max(sums.numel(), 1), 1)
    for start in range(0, sums.shape[0], rows):
        block = result[start : start + rows]
        block.copy_(function(sums[start : start + rows])).clamp_(end.lowest, end.highest)
    return result


def _along(vector: np.ndarray, like: Tensor, axis: int) -> Tensor:
    """A vector [channels] along one axis; what is one for all channels too."""
    return per_channel(torch.from_numpy(np.ascontiguousarray(vector)).to(like.device), like.dim(), axis)


__all__ = ["Device", "OnGrid", "real", "straight_through"]
