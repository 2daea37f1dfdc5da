# SPDX-License-Identifier: Apache-2.0
"""The numbers of a prepared model: a `State` of the training core whose arrays are the model's parameters and buffers.

The user's tensors are at the user's paths, ranges and constants in a child of their own. Ranges and statistics move in
place. Where PyTorch has one operator for several steps (`fused`), it is used here; the bits are those of the steps one
by one.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from exactqat.operators.torch import declared, is_plain, move_range, row_magnitudes

from ....kit.display import shortened
from ....kit.planning.plans import SMALLEST_WIDTH, BatchNorm, Derived, MissingData, PlanStep, Weights, without_data
from ..core import ranges as core
from ..core.arrays import ENDS, Arrays, Mode, is_learned, weights_of
from ..core.engine import Functional
from ..core.freezing import are_initial
from ..core.primitives import Array
from ..core.state import Normalization, State, StoredGrid, WeightGrid
from ..core.steps import Step
from ..core.weights import NormArrays, learned_ends, step_width, weight_codes
from . import collectives
from . import primitives as p
from .layers import BatchNormTensors, normalized, require_several, scale_and_offset, share_of_batch
from .primitives import channels_first_view, channels_last_view, fake_quantize
from .tree import BEFORE, Kept, Owner, kept_module, node_at, with_hooks

# A tensor that does not depend on the input, at its current value.
Source = Callable[[], Tensor]
# How ranges follow from a batch's extremes, by the numbers of moved_range.h; all others as averages.
_FOLLOWING = {"last_batch": 1, "min_max": 2}

_ZERO = torch.zeros(())
_fake_quant_rows = declared("fake_quant_rows")
_fake_quant_rows_within = declared("fake_quant_rows_within")
_batch_norm_statistics = declared("batch_norm_statistics")
_quantized_batch_norm = declared("quantized_batch_norm")


class HeldRange(Kept):
    """Holds a range: ``minimum``, ``maximum`` (parameters if they are trained, else buffers) and, of what is stored,
    ``batches``, the number of batches seen, so that a range without data is noticed. Buffers have rank 0; parameters
    have one dimension, as ``fully_shard`` divides no scalars. One with min > max is refused when it is loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        low, high = state_dict.get(prefix + "minimum"), state_dict.get(prefix + "maximum")
        if low is not None and high is not None and low.numel() == 1 == high.numel():
            least, most = float(p.whole(low)), float(p.whole(high))
            if self._parameters:  # training may have left an end beyond zero; it counts as zero
                least, most = min(least, 0.0), max(most, 0.0)
            if not least <= 0 <= most:
                raise ValueError(
                    f"{prefix}minimum and {prefix}maximum must hold min <= 0 <= max, got {least:g}, {most:g}"
                )
        for name, own in (self._parameters | self._buffers).items():
            saved = state_dict.get(prefix + name)
            if own is not None and saved is not None and own.numel() == 1 == saved.numel():
                state_dict[prefix + name] = saved.reshape(own.shape)  # trained in one of the two models only
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol)


class Scalars(UserDict[str, Tensor]):
    """The trained ends of a range of rank 0, whose parameters have one dimension."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.data = parameters

    def __getitem__(self, end: str) -> Tensor:
        return self.data[end].view(())


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


def computed(function: Callable[..., Tensor], sources: Sequence[Source]) -> Source:
    """What a function computes from other such tensors, recomputed at every call so that gradients reach them."""
    return lambda: function(*(source() for source in sources))


class ModuleGrid(StoredGrid):
    """A grid whose range a module holds.

    Attributes:
        range: the module.
    """

    state: ModuleState

    def __init__(self, state: ModuleState, name: str) -> None:
        super().__init__(state, name)
        self.range = state.range_at(f"{name}.output_quantizer")
        self._low, self._high = (cast(Mapping[str, Tensor], state.arrays.holder(name, end)) for end in ENDS)
        # Trained ends with the one dimension that parameters have.
        self._raw = [ends.data if isinstance(ends, Scalars) else ends for ends in (self._low, self._high)]
        self._buffers = cast(dict[str, Tensor], self.range._buffers)
        self.policy = self.rule.ranges
        self._following = _FOLLOWING.get(self.policy, 0)
        # `batches` and its version once there were some.
        self._counted: tuple[Tensor | None, int] = (None, -1)

    @property
    def batches(self) -> Tensor:
        return self._buffers["batches"]

    def held(self) -> tuple[Tensor, Tensor, Tensor]:
        """Minimum, maximum and the number of batches, as stored."""
        return self._low["minimum"], self._high["maximum"], self._buffers["batches"]

    def raw(self) -> tuple[Tensor, Tensor, Tensor]:
        """As `held`, but trained ends are the parameters, [1]."""
        low, high = self._raw
        return low["minimum"], high["maximum"], self._buffers["batches"]

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        if self.policy == "learned":  # under autocast an activation may have 16 bits; ranges never do
            self.take(*self.asked(x.float()))
        elif self.policy != "fixed":
            self.observe_extremes(*self.extremes(x))

    def observe_extremes(self, low: Tensor, high: Tensor) -> None:
        """`observe` from a batch's extremes, rank 0 and without gradients, if no policy has to see more of it."""
        minimum, maximum, batches = self.held()
        if self.writers == 1 and _are_at_hand(minimum, maximum) and low.dtype == torch.float32 and is_plain(low):
            self.move(low.data_ptr(), high.data_ptr(), *(end.data_ptr() for end in (minimum, maximum, batches)))
        else:
            self.take(*core.with_zero(p, low.float(), high.float(), self.declared.nonnegative))

    def move(self, *places: int) -> bool:
        """`observe_extremes` for the only writer of a range on the CPU: a small layer takes less time than PyTorch's
        operators on a few numbers. Returns whether the ends can be used as they are held.

        places: addresses of the extremes, float32, and of what `held` returns.
        """
        width = move_range(*places, self._following, self.rule.ema_decay, self.declared.nonnegative)
        ends = self.held()
        if not ends[0].is_inference():
            torch.autograd.graph.increment_version(ends)
        return width > 2 * SMALLEST_WIDTH and not self.rule.is_int16

    @torch.no_grad()
    def keep(self, moved: Sequence[Tensor]) -> None:
        # Nothing is read from a tensor here: that would end a compiled graph, and wait for a GPU.
        had_data = self._is_known_to_have_data()
        for held, value in zip(self.held(), moved, strict=True):
            held.copy_(value)
        if had_data:
            self._remember_data()

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        percentile = self.rule.percentile if self.policy == "percentile" else None
        if self.state.synchronized and self.policy != "learned":
            return collectives.extremes(x, percentile)
        if percentile is None:
            # After a ReLU there is nothing below zero to look for.
            return (x.new_zeros(()), x.amax()) if self.declared.nonnegative else tuple(torch.aminmax(x))  # type: ignore[return-value]
        values = x.flatten()
        rank = core.rank_of_ends(percentile, values.numel())
        return values.kthvalue(rank).values, values.kthvalue(values.numel() + 1 - rank).values

    def ends(self) -> tuple[Tensor, Tensor]:
        # Copies of what the next batch may move: an operator may keep them for its backward pass.
        kept = self._low["minimum"], self._high["maximum"]
        low, high = (
            end.clone() if end is held and not end.requires_grad else end
            for end, held in zip(self._usable(*kept), kept, strict=True)
        )
        return low, high

    def at_this_moment(self) -> tuple[Tensor, Tensor]:
        """`ends` for callers that keep neither: the next batch may move them."""
        return self._usable(self._low["minimum"], self._high["maximum"])

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`at_this_moment` in two parts: the tensors that gradients of the ends go to, of rank 0 or 1, and others with
        their values."""
        minimum, maximum, _ = self.raw()
        if self.policy == "learned" and not self.rule.is_int16 and _are_at_hand(minimum, maximum):
            self._require_data()
            low, high = minimum.item(), maximum.item()
            if min(low, 0.0) + 2 * SMALLEST_WIDTH < max(high, 0.0) and math.isfinite(high - low):
                return minimum, maximum, minimum if low <= 0 else _ZERO, maximum if high >= 0 else _ZERO
        ends = self.at_this_moment()
        return *ends, *ends

    def _usable(self, minimum: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
        if self.policy != "fixed" and self.name not in self.state.shown:
            self._require_data()
        at_hand = _are_at_hand(minimum, maximum)
        low, high = (minimum.item(), maximum.item()) if at_hand else (math.inf, -math.inf)
        if self.policy == "learned":
            if low > 0:
                minimum, low = core.below_zero(p, minimum), 0.0
            if high < 0:
                maximum, high = core.above_zero(p, maximum), 0.0
        if not (at_hand and high - low > 2 * SMALLEST_WIDTH):
            minimum, maximum = core.with_width(p, minimum, maximum)
        return core.symmetric(p, minimum, maximum) if self.rule.is_int16 else (minimum, maximum)

    def _require_data(self) -> None:
        """Asking a GPU means waiting for it, so it is done once for each state of the count."""
        if torch.compiler.is_compiling():  # where values must not decide what is called
            torch._assert_async(self.batches > 0, without_data([f"'{shortened(self.name)}'"]))
        elif not self._is_known_to_have_data():
            if self.batches.item() == 0:
                raise MissingData(without_data([f"'{shortened(self.name)}'"]))
            self._remember_data()

    def _is_known_to_have_data(self) -> bool:
        held, version = self._counted
        return held is self.batches and version == held._version

    def _remember_data(self) -> None:
        batches = self.batches
        if not (batches.is_cpu or batches.is_inference() or torch.compiler.is_compiling()):
            self._counted = (batches, batches._version)

    def quantize(self, x: Tensor) -> Tensor:
        minimum, maximum = self.ends()
        # Images stay in channels_last; what an operator left in the user's order is not permuted for this.
        if x.dim() == 4 and not (x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)):
            return channels_first_view(fake_quantize(channels_last_view(x), minimum, maximum, self.bits, False))
        return fake_quantize(x, minimum, maximum, self.bits, False)

    def codes(self, quantized: Tensor) -> np.ndarray:
        """Codes 0..2**bits - 1 of stored values, int64, same shape."""
        return core.codes_of(quantized.detach().cpu().numpy(), *self.scale_and_zero_point())


def rows_of(weight: Tensor, like: Tensor | None = None) -> Tensor:
    """A dense weight with its output channels outermost, the others as they are in memory. like: as they are in another
    one."""
    rows = weight.dim() == 4 and not (weight if like is None else like).is_contiguous()
    return weight.permute(0, 2, 3, 1).contiguous() if rows else weight.contiguous()


def with_layout_of(weight: Tensor, rows: Tensor) -> Tensor:
    """What `rows_of` returns for a weight, with its axes."""
    return channels_first_view(rows) if weight.dim() == 4 and not weight.is_contiguous() else rows


def scales_of_rows(weights: Sequence[Tensor], bits: int, narrow_range: bool) -> Sequence[Tensor]:
    """As `ModuleWeightGrid.scale`, of several weights at once that follow their rows."""
    highs = row_magnitudes(weights)
    return step_width((-highs, highs), bits, narrow_range).split([len(weight) for weight in weights])


def _are_at_hand(minimum: Tensor, maximum: Tensor) -> bool:
    """Whether numbers can be read for next to nothing."""
    return not torch.compiler.is_compiling() and minimum.is_cpu and is_plain(minimum) and is_plain(maximum)


class ModuleWeightGrid(WeightGrid):
    """The grid of a weight; its learned range is held by a module."""

    state: ModuleState

    def __init__(self, state: ModuleState, path: str, weights: Weights) -> None:
        super().__init__(state, path, weights)
        self._rows = self.channel_axis == 0 and self.rule.symmetric and self.rule.per_channel

    def __call__(self, weight: Tensor, /) -> Tensor:
        rule = self.rule
        if not self.state.mode.quantizing:
            return weight
        if self._rows and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0:
            # Every dense weight has its output channels outermost: nothing is permuted, unlike in the general case.
            magnitudes = self.learned_magnitudes()
            if magnitudes is None:
                quantized = _fake_quant_rows(rows_of(weight), rule.weight_bits, rule.narrow_range)
            else:
                quantized = _fake_quant_rows_within(rows_of(weight), magnitudes, rule.weight_bits, rule.narrow_range)
            return with_layout_of(weight, quantized)
        return cast(Tensor, super().__call__(weight))

    def learned_magnitudes(self) -> Tensor | None:
        """The learned upper ends of a symmetric range; None if it is the weight's largest magnitude."""
        learned = self.state.learned.get(self.owner)
        if learned is None:
            return None
        high = cast(Tensor, learned["maximum"])
        if not _are_at_hand(high, high) or high.detach().amin().item() < 0:
            high = core.above_zero(p, high)
        return high

    def scale(self, weight: Tensor, /) -> Tensor:
        return self._width(weight).expand(weight.shape[self.channel_axis])

    def follows_rows(self, weight: Tensor) -> bool:
        """Whether its scales follow from the largest magnitudes of the weight's rows in memory alone."""
        dense = weight.is_contiguous() or (
            weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
        )
        plain = weight.dtype == torch.float32 and weight.is_cpu and is_plain(weight) and weight.numel() > 0
        return self._rows and dense and plain and self.owner not in self.state.learned

    @torch.no_grad()
    def codes(self, weight: Tensor) -> np.ndarray:
        """Integer codes around zero, int64, shape of `weight`; for symmetric narrow rules only."""
        quantized, scale = (tensor.cpu().numpy() for tensor in (self(weight), self.scale(weight)))
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
        return BatchNormTensors(*[None if source is None else source() for source in self._sources])  # type: ignore[arg-type]

    @property
    def training(self) -> bool:
        followed = self.norm.training and not self.state.mode.frozen
        return followed and self._module is not None and self._module.training

    @property
    def epsilon(self) -> float:
        return self.norm.epsilon if self._settings is None else self._settings.eps

    def share(self, x: Tensor, tensors: BatchNormTensors) -> float | None:
        """The share of this training batch in the running statistics; None: they stay."""
        if not self.state.synchronized:
            require_several(x, tensors)
        if self._settings is None:
            return share_of_batch(tensors, self.norm.momentum)
        return share_of_batch(tensors, self._settings.momentum) if self._settings.track_running_stats else None

    def __call__(self, x: Tensor, channel_axis: int = 1, /) -> Tensor:
        tensors, training = self.tensors(), self.training
        share = self.share(x, tensors) if training else None
        if training and self.state.synchronized:
            return collectives.normalized(x, tensors, self.epsilon, share, channel_axis)[0]
        return normalized(x, tensors, self.epsilon, training, share, channel_axis)

    def stored(self, x: Tensor, activation: str, grid: ModuleGrid, channel_axis: int, /) -> Tensor | None:
        """In two passes over memory instead of six: in training on the CPU in float32. In several processes, the range
        follows from what they exchange about the batch anyway."""
        mode = self.state.mode
        # Percentiles do not follow from the extremes.
        percentile = grid.policy == "percentile" and grid.observes
        if not (self.training and mode.quantizing) or mode.observing or percentile:
            return None
        tensors = self.tensors()
        if self.state.synchronized:
            share = self.share(x, tensors)
            y, *ends = collectives.normalized(x, tensors, self.epsilon, share, channel_axis)
            if activation != "NONE":
                y, *ends = (p.relu6(x) if activation == "RELU6" else p.relu(x) for x in (y, *ends))
            if grid.observes:
                grid.observe_extremes(*ends)
            return grid.quantize(y)
        if not (x.dtype == torch.float32 and x.device.type == "cpu"):
            return None
        mean, variance = tensors.mean, tensors.variance
        scale, offset = scale_and_offset(tensors)
        share = self.share(x, tensors)
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
            grid.observe_extremes(low, high)
        minimum, maximum = grid.at_this_moment()
        trained = minimum.requires_grad or maximum.requires_grad
        operands = x, scale, offset, precise_mean, precise_variance, minimum, maximum
        outputs = _quantized_batch_norm(*operands, epsilon, activation, grid.bits, False, trained)
        return channels_first_view(outputs) if image else outputs.movedim(-1, channel_axis)

    def in_evaluation(self) -> NormArrays:
        weight, bias, mean, variance, _ = self.tensors()
        # A copy in training, as the statistics change before the backward pass.
        return NormArrays(weight, bias, mean.clone() if self.training else mean, variance, self.epsilon)

    def statistics(self) -> list[ModuleTensor]:
        """Where the running statistics and their count are held."""
        return [source for source in self._sources[2:] if isinstance(source, ModuleTensor)]

    def batches(self) -> int:
        """How many training batches the statistics have seen; 0 if there is no count."""
        counted = self.tensors().batches
        return 0 if counted is None else int(counted)

    def is_initial(self) -> bool:
        """Whether the statistics are those that training begins with."""
        tensors = self.tensors()
        return self.norm.training and self._module is not None and are_initial(tensors.mean, tensors.variance)


class ModulePlan(Functional):
    """A plan whose constants PyTorch computes: its expressions take no NumPy arrays."""

    def tensors_of(self, steps: Sequence[PlanStep]) -> list[str]:
        return list(dict.fromkeys(name for step in steps for name in self.tensors_read(step)))


class ModuleState(State):
    """The numbers of a prepared model.

    Attributes:
        model: has the tensors.
        root: its child that holds ranges and constants; the others are the user's.
        mode: of the current call.
        sources: what returns the tensors and constants that steps read, by name.
        trained_ranges: what holds learned ranges, by the names of `learned`.
        together: whether ranges and statistics are those of all processes (`qat.distributed.synchronized`).
        of_all_processes: whether they must be; off if each process runs on the same data.
        warned: whether it was said that they are not.
        callers: each DistributedDataParallel that has called the model before `freeze` and waits for all gradients.
    """

    functional: ModulePlan
    norms: dict[str, ModuleNormalization]
    stored_grid, grid_of_weight, norm_of_step = ModuleGrid, ModuleWeightGrid, ModuleNormalization

    def __init__(
        self, functional: ModulePlan, model: Owner, places: dict[str, str], tensors: Mapping[str, Tensor]
    ) -> None:
        """
        Args:
            places: where a model holds the tensors of its plan: by "", the name of `root`; by the path of a parameter
                or buffer, the path that it has, one of several for a shared one; by the name of a constant, the name of
                a buffer or a module in `root`. Completed here.
            tensors: the user's, by path, which are copied; none if they are in the model.
        """
        super().__init__(functional, Arrays(), Mode(), cast(Any, p))
        self.after, self.learned, self.ranges = self.arrays, self.arrays.learned, self.arrays.ranges
        self.model, self.root = model, cast(nn.Module, model._modules[places[""]])
        self._places, self._given, self._paths = places, tensors, dict[int, str]()
        self.sources: dict[str, Source] = {}
        self.trained_ranges: dict[str, HeldRange] = {}
        self.together, self.of_all_processes, self.warned = False, True, False
        self.callers: WeakSet[nn.Module] = WeakSet()
        for name, grid in functional.grids.items():
            held = self.range_at(f"{name}.output_quantizer")
            self.ranges[name] = cast(dict[str, Array], held._buffers)
            if grid.trained:
                self._learn(name, held, rank=0)
            if not held._buffers:
                low, high = grid.rule.fixed_range if grid.rule.fixed_range is not None else (0.0, 0.0)
                held.register_buffer("batches", torch.tensor(0))
                for end, value in (("maximum", high), ("minimum", low)):
                    if is_learned(grid, end):
                        held.register_parameter(end, nn.Parameter(torch.tensor([float(value)])))
                    else:
                        held.register_buffer(end, torch.tensor(float(value)))
        for path in dict.fromkeys(functional.weight_owner.values()):
            weights = cast(PlanStep, self.plan.stored(path)).weights
            assert weights is not None
            if weights.rule.ranges == "learned":
                held = self.range_at(f"{path}.weight_quantizer")
                if not held._parameters:
                    self._start(held, weights)
                self._learn(weights_of(path), held, rank=int(weights.rule.per_channel))

    def _learn(self, name: str, held: HeldRange, rank: int) -> None:
        ends = cast(dict[str, Array], held._parameters)
        self.trained_ranges[name], self.learned[name] = held, ends if rank else cast(Any, Scalars(ends))

    @torch.no_grad()
    def _start(self, held: HeldRange, weights: Weights) -> None:
        """Where the learned range of a weight starts."""
        weight = self.stored_weight(weights).detach().movedim(weights.channel_axis, -1)
        start = None if weights.range_end is None else torch.as_tensor(weights.range_end).to(weight.device)
        for name, value in learned_ends(p, weights.rule, weight, start).items():
            held.register_parameter(name, nn.Parameter(value.reshape(-1).clone()))

    def range_at(self, path: str) -> HeldRange:
        """The module that holds the range of what is at a path."""
        return cast(HeldRange, node_at(node_at(self.root, path, kept_module), "range", HeldRange))

    # --- where tensors are --------------------------------------------------------------------------------------------

    def source(self, name: str) -> Source:
        if name not in self.sources:
            self.sources[name] = self._source_of(name)
        return self.sources[name]

    def _source_of(self, name: str) -> Source:
        constant = self.plan.constants.get(name)
        if constant is None or constant.parameter:
            return self.holder(name)
        expression = constant.expression
        if isinstance(expression, Derived):
            return computed(expression.function, [self.source(operand) for operand in expression.operands])
        if expression is not None:  # a module, whose numbers move with the model
            same = next((at for at, child in self.root._modules.items() if child is expression), None)
            number = sum(at.startswith("expression_") for at in self.root._modules) + 1
            at = self._places.setdefault(f"constant {name}", same or f"expression_{number}")
            module = self.root._modules.setdefault(at, cast(nn.Module, expression))
            return computed(cast(nn.Module, module), [self.holder(path) for path in expression.sources])
        at = self._places.setdefault(f"constant {name}", f"constant_{len(self.root._buffers)}")
        if at not in self.root._buffers:
            # A buffer, so that it moves with the model; not in the state dict, as `prepare` recreates it.
            data = constant.data
            values = torch.as_tensor(np.asarray(data)) if isinstance(data, np.ndarray) else cast(Tensor, data)
            values = values.to(torch.float32) if values.is_floating_point() else values
            device = next((tensor.device for tensor in self._given.values()), torch.device("cpu"))
            self.root.register_buffer(at, values.detach().clone().to(device), persistent=False)
        return ModuleTensor(self.root, at)

    def holder(self, path: str) -> ModuleTensor:
        """The place of a user's parameter or buffer."""
        places = self._places
        if path not in places:
            original = self._given[path]
            places[path] = self._paths.setdefault(id(original), path)
            if places[path] == path:
                self._place(path, original)
        parent, _, name = places[path].rpartition(".")
        return ModuleTensor(node_at(self.model, parent, kept_module), name)

    def _place(self, path: str, original: Tensor) -> None:
        parent, _, name = path.rpartition(".")
        owner = node_at(self.model, parent, kept_module)
        copied = original.detach().clone()
        copied = copied.to(torch.float32) if copied.is_floating_point() else copied
        if isinstance(original, nn.Parameter):
            owner._parameters[name] = with_hooks(nn.Parameter(copied), original)
        else:
            owner._buffers[name] = copied

    def expression_of(self, step: PlanStep) -> tuple[nn.Module, list[ModuleTensor]]:
        """What a step of training computes, and the sources of its first operands."""
        node = node_at(self.root, step.path, kept_module)
        expression = node._modules.setdefault("expression", step.expression)
        return cast(nn.Module, expression), [self.holder(path) for path in step.expression.sources]

    # --- what steps read ----------------------------------------------------------------------------------------------

    def constant(self, name: str) -> Tensor:
        return self.source(name)()

    def moves(self) -> bool:
        """Whether calls now move ranges or statistics."""
        mode = self.mode
        return (mode.training and not mode.frozen) or any(norm.training for norm in self.norms.values())

    def moving(self) -> list[tuple[MutableMapping[str, Tensor], str]]:
        """Where the buffers are that training moves without gradients: dictionaries and names."""
        homes = [(ends, end) for ends in self.ranges.values() for end in ends]
        homes += [(home.owner._buffers, home.name) for norm in self.norms.values() for home in norm.statistics()]
        # Several batch norms may share their statistics.
        held = {(id(buffers), name): (buffers, name) for buffers, name in homes}
        return [(buffers, name) for buffers, name in held.values() if buffers.get(name) is not None]

    def grids(self) -> dict[str, ModuleGrid]:
        """All of them, by name."""
        return {name: self.grid(name) for name in self.functional.grids}

    @torch.no_grad()
    def in_numpy(self) -> Arrays:
        """What the core computes integers from, in NumPy."""
        names = self.functional.tensors_of(self.plan.steps)
        with collectives.gathered(self.model):
            arrays = self.arrays.map(p.to_numpy)
            arrays.tensors = {name: p.to_numpy(self.constant(name)) for name in names}
        self.epsilons()
        return arrays

    def epsilons(self) -> np.ndarray:
        """Those of batch norms, which may be others now than the plan's."""
        self.functional.epsilons = {norm.norm.mean: norm.epsilon for norm in self.norms.values()}
        return np.array(list(self.functional.epsilons.values()))

    @property
    def synchronized(self) -> bool:
        """Whether this process exchanges ranges and statistics with others."""
        return self.together and collectives.several_processes()

    def statistics(self, raw: Tensor, axes: Sequence[int], channel_axis: int) -> tuple[Tensor, Tensor]:
        if self.synchronized:
            mean, variance, *_ = collectives.moments(raw, axes, channel_axis)
            return mean.to(raw.dtype), variance.to(raw.dtype)
        if self.of_all_processes and collectives.several_processes():
            raise RuntimeError(
                "Rule.fold_batch_norm needs the statistics of all processes: train inside qat.distributed.synchronized"
            )
        # Under autocast `raw` may have 16 bits, too few for statistics.
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        variance, mean = torch.var_mean(raw, list(axes), unbiased=False)
        return mean, variance


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


# A step of the plan, bound to the numbers of a model.
Bound = Step | TrainingOnly | Callable[[Tensor], Tensor]
