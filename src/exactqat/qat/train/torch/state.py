# SPDX-License-Identifier: Apache-2.0
"""The numbers of a prepared model: a `State` of the training core, bound once to the modules that hold the tensors.

Ranges and statistics move in place. Where PyTorch has one operator for several steps (`fused`), it is used here; the
bits are those of the steps one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from exactqat.operators.torch import fused, is_plain

from ....kit.display import shortened
from ....kit.planning.plans import SMALLEST_WIDTH, BatchNorm, Derived, MissingData, PlanStep, Weights, without_data
from ..core import ranges as core
from ..core.arrays import ENDS, Arrays, Mode, weights_of
from ..core.engine import Functional
from ..core.state import Normalization, State, StoredGrid, WeightGrid
from ..core.steps import Input
from ..core.weights import factor_and_offset, step_width, weight_codes
from . import collectives
from . import primitives as p
from .layers import BatchNormTensors, normalized, require_several, scale_and_offset, share_of_batch
from .primitives import channels_first_view, channels_last_view, fake_quantize
from .tree import BEFORE

# A tensor that does not depend on the input, at its current value.
Source = Callable[[], Tensor]
# From here on, differences are infinite in float32.
_TOO_WIDE = 2.0**128 - 2.0**103

_fake_quant_rows = fused("fake_quant_rows")
_fake_quant_rows_within = fused("fake_quant_rows_within")
_batch_norm_statistics = fused("batch_norm_statistics")
_quantized_batch_norm = fused("quantized_batch_norm")


class ModuleTensor:
    """The parameter or buffer that a module holds under a name."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self) -> Tensor:
        held: Tensor | None = self.owner._parameters.get(self.name)
        if held is None:
            held = self.owner._buffers.get(self.name)
        if held is None:
            raise RuntimeError(
                f"'{self.name}' of the prepared model's {type(self.owner).__name__} was taken away: {BEFORE}"
            )
        return held


class Computed:
    """What a function computes from other such tensors, recomputed at every call so that gradients reach them."""

    def __init__(self, function: Callable[..., Tensor], sources: Sequence[Source]) -> None:
        self.function, self.sources = function, tuple(sources)

    def __call__(self) -> Tensor:
        return self.function(*(source() for source in self.sources))


class ModuleGrid(StoredGrid):
    """A grid whose range is held by a module: ``minimum``, ``maximum`` (parameters if they are trained, else buffers)
    and ``batches``, the number of batches seen, so that a range without data is noticed; all rank 0.

    Attributes:
        range: the module.
    """

    state: ModuleState

    def __init__(self, state: ModuleState, name: str, held: nn.Module) -> None:
        super().__init__(state, name)
        self.range = held
        parameters, self._buffers = held._parameters, held._buffers
        self._low, self._high = (
            cast(dict[str, Tensor], parameters if end in parameters else self._buffers) for end in ENDS
        )
        self.policy = self.rule.ranges
        # What a batch has shown so far: tensors that several layers store count together, as one.
        self._shown: list[tuple[Tensor, Tensor]] = []
        # `batches` and its version once there were some.
        self._counted: tuple[Tensor | None, int] = (None, -1)

    @property
    def batches(self) -> Tensor:
        return cast(Tensor, self._buffers["batches"])

    def held(self) -> tuple[Tensor, Tensor, Tensor]:
        """Minimum, maximum and the number of batches, as stored."""
        return self._low["minimum"], self._high["maximum"], self.batches

    def forget_shown(self) -> None:
        """Discards what an unfinished batch has shown."""
        self._shown.clear()

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Takes one tensor of a batch into account; a fixed range stays as it is."""
        if self.policy == "fixed":
            return
        low, high = self._extremes(x)
        if self.policy == "learned":
            dtype = self._low["minimum"].dtype
            low, high = core.with_zero(p, low.to(dtype), high.to(dtype), self.declared.nonnegative)
            low, high = core.learned_start(p, x.to(dtype), low, high, self.bits, self.rule.is_int16)
        self.observe_ends(low, high)

    def observe_ends(self, low: Tensor, high: Tensor) -> None:
        """`observe` from a batch's extremes, rank 0 and without gradients, if no policy has to see more of it."""
        minimum, maximum, batches = self.held()
        if self.writers == 1 and _are_at_hand(minimum, maximum) and is_plain(low):
            # A few numbers: a small layer takes less time than PyTorch's operators on them.
            ends = core.with_zero(core.scalars, low.item(), high.item(), self.declared.nonnegative)
            if not ends[1] - ends[0] < _TOO_WIDE:
                return
            shown, before = ((np.float32(a), np.float32(b)) for a, b in (ends, (minimum.item(), maximum.item())))
            moved = core.observed(core.scalars, self.policy, self.rule.ema_decay, [shown], 1, before, batches.item())
            for held, value in zip((minimum, maximum, batches), moved, strict=True):
                held.fill_(value)
        else:
            self._observe_tensors(low, high)

    @torch.no_grad()
    def _observe_tensors(self, low: Tensor, high: Tensor) -> None:
        # Nothing is read from a tensor here: that would end a compiled graph, and wait for a GPU.
        # Under autocast an activation may have 16 bits; ranges never do.
        minimum, maximum, batches = self.held()
        low, high = (end.to(minimum.dtype) for end in (low, high))
        had_data = self._is_known_to_have_data()
        self._shown.append(core.with_zero(p, low, high, self.declared.nonnegative))
        before = (minimum, maximum)
        moved = core.observed(p, self.policy, self.rule.ema_decay, self._shown, self.writers, before, batches)
        if len(self._shown) == self.writers:
            self._shown.clear()
        for held, value in zip((minimum, maximum, batches), moved, strict=True):
            held.copy_(value)
        if had_data:
            self._remember_data()

    def _extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and largest value of a tensor, rank 0; under "percentile" without those beyond it."""
        percentile = self.rule.percentile if self.policy == "percentile" else None
        if self.state.synchronized and self.policy != "learned":
            return collectives.extremes(x, percentile)
        if percentile is None:
            # After a ReLU there is nothing below zero to look for.
            return x.new_zeros(()) if self.declared.nonnegative else x.amin(), x.amax()
        values = x.flatten()
        rank = core.rank_of_ends(percentile, values.numel())
        return values.kthvalue(rank).values, values.kthvalue(values.numel() + 1 - rank).values

    def ends(self) -> tuple[Tensor, Tensor]:
        # Copies of what the next batch may move: an operator may keep them for its backward pass.
        kept = (self._low["minimum"], self._high["maximum"])
        low, high = (
            end.clone() if end is held and not end.requires_grad else end
            for end, held in zip(self.at_this_moment(), kept, strict=True)
        )
        return low, high

    def at_this_moment(self) -> tuple[Tensor, Tensor]:
        """`ends` for callers that keep neither: the next batch may move them."""
        minimum, maximum = self._low["minimum"], self._high["maximum"]
        at_hand = _are_at_hand(minimum, maximum)
        if self.policy != "fixed" and not self._shown:
            if torch.compiler.is_compiling():  # where values must not decide what is called
                torch._assert_async(self.batches > 0, without_data([f"'{shortened(self.name)}'"]))
            elif not self._has_data():
                raise MissingData(without_data([f"'{shortened(self.name)}'"]))
        if self.policy == "learned":
            if not at_hand or minimum.item() > 0:
                minimum = core.below_zero(p, minimum)
            if not at_hand or maximum.item() < 0:
                maximum = core.above_zero(p, maximum)
        if not (at_hand and maximum.item() - minimum.item() > 2 * SMALLEST_WIDTH):
            minimum, maximum = core.with_width(p, minimum, maximum)
        return core.symmetric(p, minimum, maximum) if self.rule.is_int16 else (minimum, maximum)

    def _has_data(self) -> bool:
        """Whether a batch was seen. Asking a GPU means waiting for it, so it is done once for each state of the
        count."""
        if self._is_known_to_have_data():
            return True
        if self.batches.item() == 0:
            return False
        self._remember_data()
        return True

    def _is_known_to_have_data(self) -> bool:
        held, version = self._counted
        return held is self.batches and version == held._version

    def _remember_data(self) -> None:
        batches = self.batches
        if not (batches.is_cpu or batches.is_inference() or torch.compiler.is_compiling()):
            self._counted = (batches, batches._version)

    @torch.no_grad()
    def so_far(self) -> tuple[Tensor, Tensor]:
        minimum, maximum, batches = self.held()
        ends = core.usable(p, minimum.clamp(max=0.0), maximum.clamp(min=0.0), self.rule.is_int16)
        seen = torch.ones_like(batches) if self.policy == "fixed" else batches
        return step_width(ends, self.bits, False), seen > 0

    def quantize(self, x: Tensor) -> Tensor:
        minimum, maximum = self.ends()
        # Images stay in channels_last; what an operator left in the user's order is not permuted for this.
        if x.dim() == 4 and not (x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)):
            return channels_first_view(fake_quantize(channels_last_view(x), minimum, maximum, self.bits, False))
        return fake_quantize(x, minimum, maximum, self.bits, False)

    def scale_and_zero_point(self) -> tuple[np.float32, int]:
        """The nudged grid: real = scale * (code - zero_point), codes 0..2**bits - 1, in TensorFlow's float32 steps."""
        low, high = (bound.item() for bound in self.ends())
        return core.nudged(low, high, self.bits)

    def codes(self, quantized: Tensor) -> np.ndarray:
        """Codes 0..2**bits - 1 of stored values, int64, same shape."""
        return core.codes_of(quantized.detach().cpu().numpy(), *self.scale_and_zero_point())


def _are_at_hand(minimum: Tensor, maximum: Tensor) -> bool:
    """Whether numbers can be read for next to nothing."""
    return not torch.compiler.is_compiling() and minimum.is_cpu and is_plain(minimum) and is_plain(maximum)


class ModuleWeightGrid(WeightGrid):
    """The grid of a weight; its learned range is held by a module.

    Attributes:
        range: the module; None: the range is the weight's largest magnitude.
    """

    def __init__(self, state: ModuleState, path: str, weights: Weights, held: nn.Module | None) -> None:
        super().__init__(state, path, weights)
        self.range = held
        self.bits = self.rule.weight_bits
        self._rows = self.channel_axis == 0 and self.rule.symmetric and self.rule.per_channel

    def learned(self) -> Mapping[str, Any] | None:
        return None if self.range is None else self.range._parameters

    def __call__(self, weight: Tensor, /) -> Tensor:
        if not self.state.mode.quantizing:
            return weight
        rule = self.rule
        if self._rows and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0:
            # Every dense weight has its output channels outermost: nothing is permuted, unlike in the general case.
            rows = weight.dim() == 4 and not weight.is_contiguous()
            dense = weight.permute(0, 2, 3, 1).contiguous() if rows else weight.contiguous()
            if self.range is None:
                quantized = _fake_quant_rows(dense, self.bits, rule.narrow_range)
            else:
                high = core.above_zero(p, self.range._parameters["maximum"])
                quantized = _fake_quant_rows_within(dense, high, self.bits, rule.narrow_range)
            return channels_first_view(quantized) if rows else quantized
        return cast(Tensor, super().__call__(weight))

    def scale(self, weight: Tensor, /) -> Tensor:
        return self._width(weight).expand(weight.shape[self.channel_axis])

    @torch.no_grad()
    def codes(self, weight: Tensor) -> np.ndarray:
        """Integer codes around zero, int64, shape of `weight`; for symmetric narrow rules only."""
        quantized, scale = (each.cpu().numpy() for each in (self(weight), self.scale(weight)))
        return weight_codes(quantized, scale, self.channel_axis)


class ModuleNormalization(Normalization):
    """A batch norm by TensorFlow's fused operator. It reads `training`, `momentum`, `eps` and `track_running_stats` of
    the user's module at each call, as that module would."""

    state: ModuleState

    def __init__(self, state: ModuleState, step: PlanStep, norm: BatchNorm) -> None:
        super().__init__(state, step, norm)
        self._sources = tuple(
            state.source(name) if name else None
            for name in (norm.weight, norm.bias, norm.mean, norm.variance, norm.counter)
        )
        mean = self._sources[2]
        # Whoever holds the running mean is the user's batch norm, or a module that calls the function.
        self._module = mean.owner if isinstance(mean, ModuleTensor) else None
        self._settings = self._module if isinstance(self._module, _NormBase) else None

    def tensors(self) -> BatchNormTensors:
        """The current parameters and statistics."""
        return BatchNormTensors(*(None if source is None else source() for source in self._sources))  # type: ignore[arg-type]

    @property
    def training(self) -> bool:
        followed = self.norm.training and not self.state.mode.frozen
        return followed and self._module is not None and self._module.training

    @property
    def epsilon(self) -> float:
        return self.norm.epsilon if self._settings is None else self._settings.eps

    def _share(self, x: Tensor, tensors: BatchNormTensors) -> float | None:
        """The share of this training batch in the running statistics; None: they stay."""
        if not self.state.synchronized:
            require_several(x, tensors)
        if self._settings is None:
            return share_of_batch(tensors, self.norm.momentum)
        return share_of_batch(tensors, self._settings.momentum) if self._settings.track_running_stats else None

    def __call__(self, x: Tensor, channel_axis: int = 1, /) -> Tensor:
        tensors, training = self.tensors(), self.training
        share = self._share(x, tensors) if training else None
        if training and self.state.synchronized:
            return collectives.normalized(x, tensors, self.epsilon, share, channel_axis)
        return normalized(x, tensors, self.epsilon, training, share, channel_axis)

    def stored(self, x: Tensor, activation: str, grid: ModuleGrid, channel_axis: int, /) -> Tensor | None:
        """In two passes over memory instead of six: in training on the CPU in float32."""
        if not self._can_be_stored(x, grid):
            return None
        tensors = self.tensors()
        mean, variance = tensors.mean, tensors.variance
        scale, offset = scale_and_offset(tensors)
        share = self._share(x, tensors)
        image = x.dim() == 4 and channel_axis == 1
        x = channels_last_view(x) if image else x.movedim(channel_axis, -1).contiguous()
        epsilon = self.epsilon
        with torch.no_grad():
            new_mean, new_variance, precise_mean, precise_variance, low, high = _batch_norm_statistics(
                x, scale, offset, mean, variance, epsilon, share or 0.0, activation
            )
            if share is not None:
                mean.copy_(new_mean)
                variance.copy_(new_variance)
        if grid.observes:
            grid.observe_ends(low, high)
        minimum, maximum = grid.at_this_moment()
        trained = minimum.requires_grad or maximum.requires_grad
        operands = x, scale, offset, precise_mean, precise_variance, minimum, maximum
        outputs = _quantized_batch_norm(*operands, epsilon, activation, grid.bits, False, trained)
        return channels_first_view(outputs) if image else outputs.movedim(-1, channel_axis)

    def _can_be_stored(self, x: Tensor, grid: ModuleGrid) -> bool:
        mode = self.state.mode
        return (
            self.training
            and x.device.type == "cpu"
            and x.dtype == torch.float32
            and mode.quantizing
            and not (mode.observing or self.state.synchronized)
            # Percentiles do not follow from the extremes.
            and not (grid.policy == "percentile" and grid.observes)
        )

    def factor_and_offset(self) -> tuple[Tensor, Tensor]:
        """Inference as ``factor * x + offset`` for each channel, both [channels]; a gamma of 0 gives a factor of 0."""
        weight, bias, mean, variance, _ = self.tensors()
        # A copy in training, as the statistics change before the backward pass.
        mean = mean.clone() if self.training else mean
        return factor_and_offset(p, weight, bias, mean, variance, self.epsilon)

    def statistics(self) -> list[ModuleTensor]:
        """Where the running statistics and their count are held."""
        return [each for each in self._sources[2:] if isinstance(each, ModuleTensor)]

    def batches(self) -> int:
        """How many training batches the statistics have seen; 0 if there is no count."""
        counted = self.tensors().batches
        return 0 if counted is None else int(counted)


class ModuleState(State):
    """The numbers of a prepared model.

    Attributes:
        mode: of the current call.
        norms: batch norms by the paths of their steps.
        synchronized: whether ranges and statistics are those of all processes (`qat.distributed.synchronized`).
        of_all_processes: whether they must be; off if each process runs on the same data.
    """

    def __init__(
        self, functional: Functional, source: Callable[[str], Source], held: Callable[[str], nn.Module | None]
    ) -> None:
        """
        Args:
            source: by the name of a tensor or constant, what returns it.
            held: the module at a path within those of the ranges, if there is one.
        """
        super().__init__(functional, Arrays(), Mode(), cast(Any, p))
        self._source, self._held = source, held
        self._sources: dict[str, Source] = {}
        self.norms: dict[str, ModuleNormalization] = {}
        self._weight_grids: dict[str, ModuleWeightGrid] = {}
        self.synchronized, self.of_all_processes = False, True

    def source(self, name: str) -> Source:
        if name not in self._sources:
            constant = self.plan.constants.get(name)
            if constant is not None and isinstance(constant.expression, Derived):
                operands = [self.source(operand) for operand in constant.expression.operands]
                self._sources[name] = Computed(constant.expression.function, operands)
            else:
                self._sources[name] = self._source(name)
        return self._sources[name]

    def constant(self, name: str) -> Tensor:
        return self.source(name)()

    def new_grid(self, name: str) -> ModuleGrid:
        held = self._held(f"{name}.output_quantizer.range")
        assert held is not None
        return ModuleGrid(self, name, held)

    def weight_grid(self, path: str, weights: Weights) -> ModuleWeightGrid:
        """Steps with the same weight share one."""
        owner = self.functional.weight_owner[path]
        if owner not in self._weight_grids:
            held = self._held(f"{owner}.weight_quantizer.range")
            self._weight_grids[owner] = ModuleWeightGrid(self, owner, weights, held)
        return self._weight_grids[owner]

    def normalization(self, step: PlanStep, norm: BatchNorm) -> ModuleNormalization:
        if step.path not in self.norms:
            self.norms[step.path] = ModuleNormalization(self, step, norm)
        return self.norms[step.path]

    def knows(self, name: str) -> bool:
        """Whether a step reads the constant of that name, or what is derived from it."""
        return name in self._sources

    def moves(self) -> bool:
        """Whether calls now move ranges or statistics."""
        mode = self.mode
        return (mode.training and not mode.frozen) or any(norm.training for norm in self.norms.values())

    def moving(self) -> list[tuple[dict[str, Tensor], str]]:
        """Where the buffers are that training moves without gradients: dictionaries and names."""
        homes = [(grid.range, end) for grid in self.grids().values() for end in (*ENDS, "batches")]
        homes += [(home.owner, home.name) for norm in self.norms.values() for home in norm.statistics()]
        # Several batch norms may share their statistics.
        held = {(id(owner), name): (cast(dict[str, Tensor], owner._buffers), name) for owner, name in homes}
        return [(buffers, name) for buffers, name in held.values() if buffers.get(name) is not None]

    def grids(self) -> dict[str, ModuleGrid]:
        """All of them, by name."""
        return {name: self.grid(name) for name in self.functional.grids}

    def learned_weight_grids(self) -> dict[str, ModuleWeightGrid]:
        """Those of weights with learned ranges, by the path of the first step with the weight."""
        return {path: grid for path, grid in self._weight_grids.items() if grid.range is not None}

    @torch.no_grad()
    def in_numpy(self, steps: Sequence[PlanStep] | None = None) -> Arrays:
        """What the core computes integers from, in NumPy; only the tensors of the given steps."""
        names = dict.fromkeys(name for step in steps or self.plan.steps for name in self.functional.tensors_read(step))
        arrays = Arrays({name: p.to_numpy(self.constant(name)) for name in names})
        for name, grid in self.grids().items():
            held = zip((*ENDS, "batches"), map(p.to_numpy, grid.held()), strict=True)
            arrays.ranges[name] = dict(held)
        for path, weight_grid in self.learned_weight_grids().items():
            ends = cast(Mapping[str, Tensor], weight_grid.learned())
            arrays.learned[weights_of(path)] = {end: p.to_numpy(value) for end, value in ends.items()}
        self.functional.epsilons = {norm.norm.mean: norm.epsilon for norm in self.norms.values()}
        return arrays

    def all_in_numpy(self, steps: Sequence[PlanStep]) -> list[np.ndarray]:
        """As `in_numpy`, what can change as one list."""
        arrays = self.in_numpy(steps).leaves()
        return [np.array(list(self.functional.epsilons.values())), *arrays]

    def statistics(self, raw: Tensor, axes: Sequence[int], channel_axis: int) -> tuple[Tensor, Tensor]:
        if self.synchronized:
            return collectives.statistics(raw, axes, channel_axis)
        if self.of_all_processes and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "Rule.fold_batch_norm needs the statistics of all processes: train inside qat.distributed.synchronized"
            )
        # Under autocast `raw` may have 16 bits, too few for statistics.
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        variance, mean = torch.var_mean(raw, list(axes), unbiased=False)
        return mean, variance


# --- steps that PyTorch computes in its own way: inputs, and what no device has ---------------------------------------


class ModuleInput(Input):
    """An input of the network as the device gets it."""

    def compose(self, *features: Tensor) -> Tensor:
        (x,) = features
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return cast(Tensor, self.output_quantizer(x))


class TrainingOnly:
    """What exists in training alone, such as dropout; what is stored stays stored.

    Attributes:
        module: of the user's; it decides whether this is training.
        expression: computes what training continues with, from `sources` and the tensor itself.
        dropout: share of dropped values.
        stop_gradient: no gradient passes.
    """

    def __init__(
        self,
        module: nn.Module,
        expression: nn.Module | None = None,
        sources: Sequence[Source] = (),
        dropout: float = 0.0,
        stop_gradient: bool = False,
    ) -> None:
        self.module, self.expression, self.sources = module, expression, tuple(sources)
        self.dropout, self.stop_gradient = dropout, stop_gradient

    @property
    def noisy(self) -> bool:
        """Whether it changes a tensor that stays as it is on the device."""
        return self.module.training and (self.expression is not None or self.dropout > 0) and not self.stop_gradient

    def __call__(self, features: Tensor) -> Tensor:
        if self.stop_gradient:
            return features.detach()
        if not self.noisy:
            return features
        if self.expression is None:
            return F.dropout(features, self.dropout)
        if not self.expression.training:
            self.expression.training = True
        return cast(Tensor, self.expression(*(source() for source in self.sources), features))


class Outside:
    """A final function of the device's results: computed in training, left to the program that runs the device."""

    def __init__(self, kind: str, attributes: Mapping[str, Any]) -> None:
        self.kind, self.attributes = kind, dict(attributes)

    def __call__(self, features: Tensor) -> Tensor:
        return getattr(p, self.kind)(features, **self.attributes)
