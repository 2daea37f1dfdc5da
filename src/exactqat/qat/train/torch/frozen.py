# SPDX-License-Identifier: Apache-2.0
"""What the device computes, in PyTorch: the forward pass of a frozen network, integer for integer.

Layers with weights in eight bits are sums of whole steps from real 0 (codes less the zero point), as in all frameworks
(`core.accumulators`); the host computes all other steps. Gradients are those of the same layers in real numbers,
straight through all roundings (`docs/decisions/frozen.md`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from exactqat.operators.torch import is_plain

from ....deploy.axes import on_device
from ....deploy.values import in_users_order
from ....kit.device import profile_named
from ....kit.device.tensor import CODE_RANGES
from ....kit.planning.plans import PlanStep
from ..core.accumulators import BrokenExamples, layer_steps
from ..core.arrays import ENDS, Arrays
from ..core.integers import nudged_grids
from ..core.on_device import DeviceSteps, Integers, bits_of
from ..core.steps import Input, Step, WeightedStep
from . import primitives as p
from .frozen_layers import FrozenLayer
from .image_layers import is_unwatched
from .joined_vectors import JoinedVectors
from .primitives import straight_through, to_numpy, unwrapped, with_gradient_of
from .state import Bound, ModuleState, TrainingOnly

# What multiplies float32 and may be allowed to use lower precision.
_on_cpu: Any = torch.backends.mkldnn
_UNITS: tuple[Any, ...] = (torch.backends.cuda.matmul, _on_cpu.matmul, _on_cpu.conv)


class OnGrid:
    """A stored tensor, in whole steps from real 0 or in real numbers, float32; the other one is computed when it is
    asked for.

    Attributes:
        scale: the size of one step.
        finite: whether it is known to have no NaN, as layers have whose weights are not finite.
    """

    def __init__(
        self, scale: np.float32, steps: Tensor | None = None, real: Tensor | None = None, finite: bool = False
    ) -> None:
        self.scale, self._steps, self._real, self.finite = float(scale), steps, real, finite

    @property
    def real(self) -> Tensor:
        """The real numbers."""
        if self._real is None:
            self._real = cast(Tensor, self._steps) * self.scale
        return self._real

    @property
    def steps(self) -> Tensor:
        """Whole numbers, 0 for real 0."""
        if self._steps is None:
            real = cast(Tensor, self._real)
            steps = (real.detach() / self.scale).round_()
            self._steps = straight_through(steps, real * (1 / self.scale)) if is_differentiated(real) else steps
        return self._steps

    def is_differentiated(self) -> bool:
        return is_differentiated(cast(Tensor, self._steps if self._real is None else self._real))


Value = OnGrid | Tensor  # a plain tensor is off all grids: training's noise, NaN, or indices


def real(value: Value) -> Tensor:
    """Real numbers of a tensor on a grid or off all of them."""
    return value.real if isinstance(value, OnGrid) else value


def is_differentiated(tensor: Tensor) -> bool:
    return (torch.is_grad_enabled() and tensor.requires_grad) or forward_ad._current_level >= 0


class _WithGradient(_SingleLevelFunction):
    """The first one's value with the gradient of a factor times the second one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient_of: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradients[0] * ctx.factor, None


_with_gradient = cast(Any, _WithGradient).apply


def is_plain_float32(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_cpu and is_plain(tensor)


class Device:
    """Runs a frozen plan as the device would."""

    placed: DeviceSteps  # on the grids that `refresh` has found

    def __init__(self, state: ModuleState, steps: Mapping[str, Bound]) -> None:
        """steps: by path."""
        self.state, self.functional, self.plan = state, state.functional, state.plan
        self._fused = {path: FrozenLayer.of(step) for path, step in steps.items()}
        self._homes = [(state.arrays.holder(name, end), end) for name in self.functional.grids for end in ENDS]
        self._ends: Tensor | None = None
        self._epsilons = np.zeros(0)
        self._known: dict[str, Integers] = {}  # of steps that nothing changes but the grids
        self._runs = threading.local()  # several threads may run it
        # Where a layer may get no gradient at all, its parameters must not get zeros from other layers' operations.
        branches = any("stop_gradient" in step.attributes for step in self.plan.steps)
        apart = branches or len(self.plan.outputs) > 1
        layers = [
            layer for path, layer in steps.items() if isinstance(layer, WeightedStep) and self._in_eight_bits(path)
        ]
        self._vectors = JoinedVectors(state, [] if apart else layers)

    def ready(self) -> bool:
        """Whether it can compute what is wanted: the quantized network, on grids that a device supports."""
        mode = self.state.mode
        return self.functional.profile is not None and mode.quantizing and not mode.observing

    @torch.no_grad()
    def refresh(self) -> None:
        """Follows the ranges, the profile and batch norms' epsilons, in case others have been set.

        The ranges' values are compared, all at once: neither a tensor's identity nor its version reveals writes through
        ``.data``.
        """
        ends = torch.stack([unwrapped(home[end]) for home, end in self._homes])
        profile = cast(str, self.functional.profile)
        known = self._ends is not None and self._ends.device == ends.device and torch.equal(ends, self._ends)
        if not known or self.placed.profile != profile:
            self._ends, self.placed = ends, DeviceSteps(self.plan, nudged_grids(self.state), profile)
            self._vectors.place(self.placed, ends.device)
            self._known = {}
        self._epsilons = self.state.epsilons()

    @torch.no_grad()
    def _source(self, steps: Sequence[PlanStep]) -> list[np.ndarray]:
        """All that the integers of some steps depend on."""
        tensors = {name: self.state.constant(name) for name in self.functional.tensors_of(steps)}
        source = self.functional.numbers_source(steps, Arrays(tensors, self.state.learned), self._ends)
        return [*map(to_numpy, source), self._epsilons]

    # --- a whole network ----------------------------------------------------------------------------------------------

    @torch.compiler.disable  # fusing or reordering sums would change the numbers
    def run(
        self,
        steps: Mapping[str, Bound],
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
        values: dict[str, Value] = {}
        broken = BrokenExamples(self.state)

        def keep(path: str, value: Value) -> None:
            values[path] = value
            if seen is not None:
                seen[path] = broken.marked(path, real(value))

        with in_full_float32(next(iter(inputs.values())).device.type), self._vectors_together():
            for path, feature in inputs.items():
                missing = feature.isnan()
                if missing.any():
                    broken.look_for_nan(path, feature)
                    feature = feature.masked_fill(missing, 0.0)
                keep(path, self.step(path, steps[path], [feature]))
            for path, operands, finished in order:
                broken.spread(cast(PlanStep, self.plan.stored(path)))
                keep(path, self.step(path, steps[path], [values[name] for name in operands]))
                for name in finished:
                    del values[name]
            return {path: broken.marked(path, real(value)) for path, value in values.items()}

    @torch.compiler.disable
    def run_whole(self, steps: Mapping[str, Bound], inputs: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """As `run`, by the compiled graph: several times as fast. None if more than the results is wanted
        (gradients, noise), or weights have changed since the last call, so that preparing the graph may not pay off."""
        plain = all(is_plain(tensor) and tensor.device.type == "cpu" for tensor in inputs.values())
        # Whatever records PyTorch's operations, or replaces them, is to see them.
        watched = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() or torch.jit.is_tracing()
        noisy = any(isinstance(step, TrainingOnly) and step.noisy for step in steps.values())
        if torch.is_grad_enabled() or not plain or watched or noisy:
            return None
        self.refresh()
        network, source = self.functional.device_network, self._source(self.plan.steps)
        if not network.knows(source):
            return None
        features = [cast(Input, steps[path]).compose(tensor).numpy() for path, tensor in inputs.items()]
        if any(np.isnan(feature).any() for feature in features):
            return None
        try:
            results = network(source, features)
        except ValueError:  # reported by the steps themselves, if they cannot be computed either
            return None
        values: dict[str, Value] = dict(zip(network.wanted, map(torch.from_numpy, results), strict=True))
        for path in network.after:
            operands = cast(PlanStep, self.plan.stored(path)).operands
            values[path] = self.step(path, steps[path], [values[name] for name in operands if name in values])
        return {path: real(values[path]) for path in self.plan.outputs}

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self, path: str, step: Bound, operands: Sequence[Value]) -> Value:
        """What one step of the plan computes from its operands."""
        if isinstance(step, TrainingOnly):
            (x,) = operands
            if isinstance(x, OnGrid) and not step.noisy:
                return OnGrid(np.float32(x.scale), steps=x.steps.detach(), finite=x.finite) if step.stop_gradient else x
            return step(real(x))
        if not isinstance(step, Step):  # outside of the device
            return step(real(operands[0]))
        if isinstance(step, Input) or not all(isinstance(operand, OnGrid) for operand in operands):
            # In real numbers; its result is stored like any other. NaN has no code: it propagates for the user to see.
            result = step.compose(*map(real, operands))
            moved = not isinstance(step, Input) and step.operator.same_quantization
            return result if moved or result.isnan().any() else self.on_grid(path, result, finite=True)
        return self.compute(path, step, cast(Sequence[OnGrid], operands))

    def on_grid(self, path: str, values: Tensor, finite: bool = False) -> OnGrid:
        """Real numbers from a quantizer, or from the device; indices are their own steps."""
        if not values.is_floating_point():
            return OnGrid(np.float32(1), values, values)
        return OnGrid(self.placed.scale(path), real=values, finite=finite)

    def compute(self, path: str, layer: Step, operands: Sequence[OnGrid]) -> Value:
        """The device's result for operands on their grids."""
        step = cast(PlanStep, self.plan.stored(path))
        if layer.operator.moves_codes:
            return self._moved(path, layer, operands)
        if isinstance(layer, WeightedStep) and self._in_eight_bits(path):
            return self._weighted(step, layer, operands[0])
        steps = self._steps_on_host(step, operands)
        finite = steps is not None
        if steps is None:
            result = self.on_grid(path, self._on_host(step, operands))
            if not result.real.is_floating_point():
                return result
            steps = result.steps
        trained = torch.is_grad_enabled() and (isinstance(layer, WeightedStep) or layer.constants)
        if trained or any(operand.is_differentiated() for operand in operands):
            composed = layer.compose(*(operand.real for operand in operands))
            factor = 1 / float(self.placed.scale(path))
            if is_unwatched():
                steps = cast(Tensor, _with_gradient(steps, composed, factor))
            else:
                steps = with_gradient_of(steps, composed * factor)
        return OnGrid(self.placed.scale(path), steps=steps, finite=finite)

    def _moved(self, path: str, layer: Step, operands: Sequence[OnGrid]) -> OnGrid:
        scale = self.placed.scale(path)
        moved = [operand.steps for operand in operands]
        for position in sorted(layer.constants):
            moved.insert(position, OnGrid(scale, real=layer.constants[position]()).steps)
        finite = not layer.constants and all(operand.finite for operand in operands)
        return OnGrid(scale, steps=layer.operator.real(p, moved, layer.attributes), finite=finite)

    def _in_eight_bits(self, path: str) -> bool:
        step = self.plan.stored(path)
        operands = step.operands if isinstance(step, PlanStep) else ()
        return all(bits_of(self.plan, name) <= 8 for name in (path, *operands) if self.plan.is_stored(name))

    @contextmanager
    def _vectors_together(self) -> Iterator[None]:
        self._runs.vectors = self._vectors.together()
        try:
            yield
        finally:
            del self._runs.vectors

    def _weighted(self, step: PlanStep, layer: WeightedStep, x: OnGrid) -> Value:
        numbers = torch.from_numpy(self.placed.rounded_by(step))

        def on_host(sums: Tensor) -> Tensor:
            # Weights that are not finite have no codes.
            return layer.compose(x.real) if sums.isnan().any() else self._on_host(step, [x])

        known = getattr(self._runs, "vectors", {}).get(step.path)
        vectors, fits = known or self._vectors.of(layer)
        fused, device = self._fused[step.path], profile_named(self.placed.profile).of(step.kind)
        steps = None
        if fused is not None and device.arithmetic is None and is_unwatched():
            rounding = layer.operator.rounding(device)  # type: ignore[attr-defined]
            steps = fused(x.steps, vectors, numbers, rounding, fits)
        finite = steps is not None and x.finite  # as the sums fit
        if steps is None:
            steps = layer_steps(layer, vectors, x.steps, numbers, self.placed.profile, on_host, fits)
        return OnGrid(self.placed.scale(step.path), steps=steps, finite=finite)

    def _steps_on_host(self, step: PlanStep, operands: Sequence[OnGrid]) -> Tensor | None:
        """What the declarations compute, from steps to steps; None if it has to go by real numbers: for what has no
        codes, and for those who watch."""
        steps = [operand.steps.detach() for operand in operands]
        if not is_unwatched() or not all(is_plain_float32(tensor) for tensor in steps):
            return None
        if not all(operand.finite or operand.steps.detach().sum().isfinite() for operand in operands):
            return None
        known = self._known
        integers = known.get(step.path)
        if integers is None:
            integers = self.functional.device_step(step).integers(self._source([step]))
            if not self.functional.tensors_of([step]):
                known[step.path] = integers
        graph, layouts, (stored,), run = integers
        names = [name for name in step.operands if self.plan.is_stored(name)]
        if any(graph.tensors[name].dtype not in CODE_RANGES for name in (*names, stored.name)):
            return None
        codes = {}
        for name, tensor in zip(names, steps, strict=True):
            zero_point = int(graph.tensors[name].quantization.zero_point[0])
            own = (tensor + zero_point).to(getattr(torch, graph.tensors[name].dtype))
            codes[name] = np.ascontiguousarray(on_device(own.numpy(), layouts[name]))
        result = torch.from_numpy(in_users_order(run(codes)[stored.name], stored.layout)).to(torch.float32)
        return result.sub_(int(graph.tensors[stored.name].quantization.zero_point[0]))

    def _on_host(self, step: PlanStep, operands: Sequence[OnGrid]) -> Tensor:
        """What the declarations compute, in real numbers."""
        features = [to_numpy(operand.real) for operand in operands]
        result = self.functional.device_step(step)(self._source([step]), features)
        return torch.from_numpy(result).to(operands[0].real.device)


@contextmanager
def in_full_float32(device_type: str) -> Iterator[None]:
    """True float32, in which sums of whole numbers are exact: without autocast, matrix products in TF32 or bfloat16,
    and convolutions by NNPACK and cuDNN, which may transform (Winograd, Fourier) before they sum."""
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.backends.nnpack.flags(enabled=False))
        if device_type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        for unit in _UNITS:
            precision = unit.fp32_precision
            if precision not in ("none", "ieee"):
                stack.callback(setattr, unit, "fp32_precision", precision)
                unit.fp32_precision = "ieee"
        yield
