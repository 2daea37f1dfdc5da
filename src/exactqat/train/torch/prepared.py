# SPDX-License-Identifier: Apache-2.0
"""A prepared network in PyTorch: a module that computes what the device will.

The module runs the plan's steps one after the other; the device's declarations say what each of them computes. The
user's parameters stay under the user's names, quantizers and ranges are next to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...capture.proof import Proof
from ...device import DEFAULT_PROFILE
from ...display import shortened, table
from ...planning.fitting import constant_limits
from ...planning.inputs import require_examples, require_input, require_rows
from ...planning.plans import BatchNorm, Derived, Numbers, Plan, PlanInput, PlanStep
from ..core import batches as loading
from ..core.arrays import Arrays, weights_of
from ..core.frameworks import elsewhere
from ..core.freezing import fresh_norms
from ..core.functional import Functional
from ..core.run_steps import attributes_of
from ..core.steps import folded_weight
from ..core.trained import TrainedNetwork
from ..core.weights import constant_rule, folds
from . import primitives as primitives_torch
from .layers import (
    Computed,
    ConstantOperand,
    CustomGradient,
    ModuleTensor,
    Outside,
    QuantizedInput,
    QuantizedLayer,
    SharedConstant,
    Source,
    TrainingOnly,
    WeightedLayer,
)
from .modules import FakeQuantize, LayerBatchNorm, WeightFakeQuantize
from .owners import FILE, Owner, require_called_plainly, require_float32
from .ranges import ActivationRange, ConstantRange, WeightRange
from .straight_through import unwrapped, with_hooks

STATE_FORMAT = 2
# The child that holds the layers; the others are the user's.
_LAYERS = "quantization"


class Watched(dict[str, Tensor]):
    """Tensors of one call, which are neither copied with a model nor saved."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Watched, ()


class PreparedModel(Owner):
    """A model under the device's arithmetic. Trains like any module; `freeze` starts its last phase.

    Takes and returns what the user's model does, with any number of examples in a batch. Its parameters and buffers
    have the same names as in the user's model; those of quantizers begin with ``quantization.`` and the layer's path.
    It trains in float32, whatever the model was in.

    Attributes:
        plan: what the device runs.
        unused_rules: one sentence for every rule that has no effect.
        frozen: whether the last phase has begun; part of the state dict. From then on the device's integers are
            computed, in training and in evaluation: what is stored is exactly ``(code - zero point) * scale``.
        profile: whose integers, by the names of `deploy.PROFILES`; part of the state dict. It may be set. None: it
            stays fake quantized.
        proof: what `prepare` compared with the user's model; None if it was not asked to.
    """

    def __init__(self, plan: Plan, tensors: Mapping[str, Tensor], profile: str | None = DEFAULT_PROFILE) -> None:
        """
        Args:
            plan: what to run.
            tensors: the user's parameters and buffers by path, those with several paths under each. They are copied.
            profile: see the attribute.
        """
        # Here, as it imports PyTorch's compiler, which is slow to import.
        from .frozen import Device

        super().__init__()
        self.plan = plan
        self.unused_rules = list(plan.unused_rules)
        self.proof: Proof | None = None
        self._frozen = False
        self._observing = False
        self._watched: Watched | None = None
        building = _Building(self, plan, tensors)
        # In a dictionary, as they are registered at their paths.
        self._steps: dict[str, nn.Module] = building.run()
        self._order = _order(plan)
        self._core = building.core
        self._sources = building.sources
        self._weight_quantizers = building.weight_quantizers
        self._device = Device(plan, building.quantizers, profile, self._numbers_of)
        # Training batches that the batch norms of layers had seen before.
        self._counted: dict[str, int] = {}
        for path, step in self._steps.items():
            if isinstance(step, QuantizedLayer):
                step.compute_with(self._device, path)
            if isinstance(step, WeightedLayer) and step.batch_norm is not None:
                counted = step.batch_norm.tensors().batches
                self._counted[path] = 0 if counted is None else int(counted)
        self._core.fresh_norms = fresh_norms(plan, tensors)
        for module in self.modules():
            if isinstance(module, Owner):
                module.close()

    @property
    def frozen(self) -> bool:
        return self._frozen

    @property
    def profile(self) -> str | None:
        return self._device.profile

    @profile.setter
    def profile(self, profile: str | None) -> None:
        self._device.change_profile(profile)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        require_called_plainly(args, self._frozen)
        seen = self._watched if self.training and torch.is_grad_enabled() else None
        if seen is not None:
            seen.clear()
        return self._run(args, kwargs, seen)

    def watch(self) -> None:
        """From here on, calls in training keep what the layers store, for `watched`."""
        self._watched = Watched()

    def watched(self) -> dict[str, Tensor]:
        """What the layers stored in the last call in training, by path, with gradients; empty if there was none.
        Nothing is kept afterwards."""
        values = dict(self._watched or {})
        if self._watched is not None:
            self._watched.clear()
        return values

    def _apply(self, fn: Any, recurse: bool = True) -> PreparedModel:
        require_float32(fn)
        return super()._apply(fn, recurse)

    def __prepare_scriptable__(self) -> PreparedModel:
        """What `torch.jit.script` calls first."""
        raise TypeError(f"a prepared model cannot be scripted by torch.jit: {FILE}")

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: dict[str, Tensor] | None = None) -> Any:
        network = self.plan.network
        given = list(args) if network.input_tree is None else network.input_tree.flatten(*args, **kwargs)
        for each, tensor in zip(self.plan.inputs, given, strict=True):
            require_input(each, tuple(tensor.shape), tensor.dtype, tensor.dtype.is_floating_point)
            # With several processes, some may have an empty batch if others do not.
            if (self._observing or (self.training and not self._frozen)) and not _shares_batches():
                require_examples(each, tuple(tensor.shape))
        if not (torch.compiler.is_compiling() or is_captured(given)):
            self.require_rows(given)
        inputs = {
            each.path: tensor.to(torch.int64 if each.rows else torch.float32)
            for each, tensor in zip(self.plan.inputs, given, strict=True)
        }
        if self._frozen and self._device.ready():
            values = None
            if seen is None:
                values = self._device.run_whole(self._steps, inputs, self._trained, self.numbers)
            if values is None:
                values = self._device.run(self._steps, self._order, inputs, seen)
        else:
            values = self._composed(inputs, seen)
        results = [values[path] for path in self.plan.outputs]
        if network.output_tree is None:
            return results[0] if len(results) == 1 else tuple(results)
        return network.output_tree.unflatten(results)

    def require_rows(self, given: Sequence[Tensor]) -> None:
        """Refuses indices that are not rows of a table; `given`: the inputs in the plan's order."""
        for each, tensor in zip(self.plan.inputs, given, strict=True):
            if each.rows and tensor.numel():
                require_rows(each, *(int(end) for end in tensor.aminmax()))

    @property
    def keeps_nothing(self) -> bool:
        """Whether calls in training compute fake quantization and keep nothing for `watched` or `calibrate`."""
        return not (self._frozen or self._observing or self._watched is not None)

    def _composed(self, inputs: Mapping[str, Tensor], seen: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Real numbers and fake quantization, layer after layer."""
        values: dict[str, Tensor] = {}
        for path, given in inputs.items():
            values[path] = self._steps[path](given)
            if seen is not None:
                seen[path] = values[path]
        for path, operands, finished in self._order:
            values[path] = self._steps[path](*[values[name] for name in operands])
            if seen is not None:
                seen[path] = values[path]
            for name in finished:
                del values[name]
        return values

    def step(self, path: str) -> nn.Module:
        """The module of an input or a step of the plan; `forward` calls it with the computed operands."""
        return self._steps[path]

    def layers(self) -> Iterator[tuple[str, QuantizedLayer]]:
        """Paths and layers in order of execution: those whose results the device stores under these names."""
        for path, step in self._steps.items():
            if isinstance(step, QuantizedLayer) and not (step.kind and step.operator.moves_axes):
                yield path, step

    @torch.no_grad()
    def stored_tensors(self, *args: Any, **kwargs: Any) -> dict[str, tuple[FakeQuantize, Tensor]]:
        """Runs the model and returns, by layer path, the quantizer and the value of every tensor the device stores."""
        seen: dict[str, Tensor] = {}
        self._run(args, kwargs, seen)
        return {path: (layer.output_quantizer, seen[path]) for path, layer in self.layers()}

    def float_tensors(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """As `stored_tensors`, for the same network without quantization."""
        with _without_quantization(self):
            return {name: value for name, (_, value) in self.stored_tensors(*args, **kwargs).items()}

    @torch.no_grad()
    def evaluated(self, batch: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The inputs and results of one call in evaluation, flat, for `deploy.verify`; without final steps that the
        device's network leaves out.

        Args:
            batch: a tensor or an array, or a tuple of positional or a dictionary of keyword arguments.
        """
        inputs, outputs, _ = self.traced(batch, codes=False)
        return inputs, outputs

    @torch.no_grad()
    def traced(
        self, batch: Any, codes: bool = True
    ) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, np.ndarray]]:
        """As `evaluated`, and the codes of every tensor that the device stores, as `stored_codes` has them."""
        was_training, tree = self.training, self.plan.network.input_tree
        args, kwargs = self._beside(loading.arguments(batch))
        given = list(args) if tree is None else tree.flatten(*args, **kwargs)
        seen: dict[str, Tensor] = {}
        self.eval()
        try:
            self._run(args, kwargs, seen)
        finally:
            self.train(was_training)
        results = [seen[path] for path in self.plan.device_outputs]
        inputs, outputs = ([each.cpu().numpy() for each in side] for side in (given, results))
        layers = self.layers() if codes else ()
        return inputs, outputs, {path: layer.output_quantizer.codes(seen[path]) for path, layer in layers}

    def _beside(self, batch: Any) -> Any:
        """Arrays and tensors, however nested, as tensors on the model's device."""
        device = next((each.device for each in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        tensors = tree_map_only(np.ndarray, torch.from_numpy, batch)
        return tree_map_only(Tensor, lambda each: each.to(device), tensors)

    def layer_values(self, *args: Any, **kwargs: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What the float and the fake-quantized network store, by layer path, in the user's order of axes.

        The float network is the one with the same weights, without quantization.
        """
        trained = {name: value.cpu().numpy() for name, (_, value) in self.stored_tensors(*args, **kwargs).items()}
        return {name: value.cpu().numpy() for name, value in self.float_tensors(*args, **kwargs).items()}, trained

    def stored_codes(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Codes of every tensor that the device stores, by layer path, in the user's order of axes.

        int64, 0..2**bits - 1; zero is the code that `numbers` names.
        """
        stored = self.stored_tensors(*args, **kwargs)
        return {path: quantizer.codes(values) for path, (quantizer, values) in stored.items()}

    @torch.no_grad()
    def numbers(self) -> Numbers:
        """The numbers that training ended with, for `deploy.lower`.

        Raises:
            RuntimeError: a range has seen no data.
            ValueError: a range or a weight is not finite.
        """
        return self._core.numbers(self._arrays())

    def trained(self) -> TrainedNetwork:
        """The network with its numbers in NumPy, as they are now."""

        def run(inputs: tuple[Any, ...], quantizing: bool) -> dict[str, np.ndarray]:
            seen: dict[str, Tensor] = {}
            was_training = self.training
            self.eval()
            try:
                with torch.no_grad(), nullcontext() if quantizing else _without_quantization(self):
                    self._run(self._beside(inputs), {}, seen)
            finally:
                self.train(was_training)
            return {path: value.cpu().numpy() for path, value in seen.items()}

        def called(batch: Any) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
            inputs, _ = self.evaluated(batch)
            return inputs, run(tuple(inputs), True)

        functional, arrays = Functional(self.plan, profile=self.profile), self._arrays()
        own = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        # Also what constants are computed from, as in the other frameworks.
        users = {name: own[name] for name in functional.tensors if name in own}
        # PyTorch's expressions take no NumPy arrays: what they give is known, too.
        computed = {name: self._sources[name]() for name in self.plan.constants if name in self._sources}
        given = {name: unwrapped(tensor.detach().cpu()).numpy() for name, tensor in (computed | users).items()}
        arrays = replace(arrays, tensors={**given, **arrays.tensors})
        return TrainedNetwork(functional, arrays, self._frozen, run, called)

    @torch.no_grad()
    def take_over(self, tensors: Mapping[str, np.ndarray], ranges: Mapping[str, tuple[float, float]]) -> None:
        """Takes over parameters and buffers, by the user's names, and the ranges of grids, by the grids' names.

        Raises:
            ValueError: the model is frozen, or it has no such tensor.
        """
        if self._frozen:
            raise ValueError("a frozen model takes over no ranges: do it before freeze")
        own = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        unknown = [name for name in tensors if name not in own]
        if unknown:
            raise ValueError(f"the model has no parameter or buffer {unknown[0]!r}")
        for name, value in tensors.items():
            own[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))
        for name, ends in ranges.items():
            kept = self._device.quantizers[name].range
            kept.minimum.fill_(ends[0])
            kept.maximum.fill_(ends[1])

    def _numbers_of(self, step: PlanStep, grids: dict[str, tuple[np.float32, int]]) -> Numbers:
        return self._core.numbers_of(step, self._arrays([step]), grids)

    @torch.no_grad()
    def _arrays(self, steps: Sequence[PlanStep] | None = None) -> Arrays:
        """What the core computes integers from, in NumPy; only the tensors of the given steps."""

        def array(tensor: Tensor) -> np.ndarray:
            return unwrapped(tensor.detach().cpu()).numpy()

        steps = self.plan.steps if steps is None else steps
        names = dict.fromkeys(name for step in steps for name in self._core.tensors_read(step))
        arrays = Arrays({name: array(self._sources[name]()) for name in names})
        for name, quantizer in self._device.quantizers.items():
            minimum, maximum, batches = map(array, quantizer.range.state())
            arrays.ranges[name] = {"minimum": minimum, "maximum": maximum, "batches": batches}
        for path, of_weight in self._weight_quantizers.items():
            if of_weight.range.learned:
                arrays.learned[weights_of(path)] = {
                    end: array(each) for end, each in of_weight.range.named_parameters(recurse=False)
                }
        return arrays

    def _trained(self) -> list[np.ndarray]:
        """All that `numbers` are computed from."""
        arrays = self._arrays()
        ends = [*arrays.ranges.values(), *arrays.learned.values()]
        return [*arrays.tensors.values(), *(each[end] for each in ends for end in each)]

    def _batches_seen(self) -> dict[str, int]:
        """By path, how many batches have moved the range of a tensor."""
        ranges = {
            path: each.output_quantizer.range for path, each in self._steps.items() if isinstance(each, QuantizedLayer)
        }
        return {shortened(path): int(each.batches) for path, each in ranges.items() if each.policy != "fixed"}

    def range_parameters(self) -> list[nn.Parameter]:
        """The learned ranges, for a parameter group of their own."""
        return [
            parameter
            for module in self.modules()
            if isinstance(module, ActivationRange | WeightRange)
            for parameter in module.parameters(recurse=False)
        ]

    def other_parameters(self) -> list[nn.Parameter]:
        """All parameters that are not ranges."""
        ranges = {id(parameter) for parameter in self.range_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in ranges]

    def train(self, mode: bool = True) -> PreparedModel:
        super().train(mode)
        if self._frozen:
            for module in self.modules():
                if isinstance(module, LayerBatchNorm):
                    module.training = False
        return self

    def get_extra_state(self) -> dict[str, Any]:
        return {"format": STATE_FORMAT, "frozen": self._frozen, "profile": self.profile}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        found = state.get("format", 1)
        if found != STATE_FORMAT:
            age = "an earlier" if found < STATE_FORMAT else "a later"
            raise ValueError(
                f"this state was saved by {age} version of exactqat (format {found}, this one reads {STATE_FORMAT}): "
                "its layers have other names; load it with that version, or train again"
            )
        # State dicts from before profiles existed keep the profile that was prepared for.
        self.profile = state.get("profile", self.profile)
        self._set_frozen(state["frozen"])

    def _set_frozen(self, frozen: bool) -> None:
        self._frozen = frozen
        for module in self.modules():
            if isinstance(module, QuantizedLayer | FakeQuantize):
                module.frozen = frozen
        for parameter in self.range_parameters():
            parameter.requires_grad_(not frozen)
        self.train(self.training)

    def __repr__(self) -> str:
        weighted = [layer for layer in self._steps.values() if isinstance(layer, WeightedLayer)]
        bits = Counter(
            (layer.weight_quantizer.rule.weight_bits, self.plan.grids[self.plan.stored(path).grid].bits)
            for path, layer in self._steps.items()
            if isinstance(layer, WeightedLayer)
        )
        precisions = "".join(f", {count} W{weight}A{result}" for (weight, result), count in bits.most_common(3))
        phase = "frozen" if self._frozen else "not frozen"
        count = sum(1 for _ in self.layers())
        profile = "" if self.profile is None else f", {self.profile}"
        layers = f"{len(weighted)} layers with weights{precisions}"
        return f"PreparedModel({count} stored tensors, {layers}, {phase}{profile})"

    def _repr_html_(self) -> str:
        header = (
            "layer", "operator", "activation", "shape", "ranges", "range", "weights", "bits of weights",
            "bits of result",
        )  # fmt: skip
        stored: list[PlanInput | PlanStep] = [*self.plan.inputs, *self.plan.steps]
        return table(repr(self), header, map(self._row, stored), 7)

    def _row(self, stored: PlanInput | PlanStep) -> list[object]:
        layer = self._steps[stored.path]
        shape = "x".join(map(str, stored.shape))
        if isinstance(stored, PlanInput):
            kind, activation = "input", None
        else:
            kind, activation = stored.kind or "in training only", stored.activation
        if not isinstance(layer, QuantizedLayer):
            outside = isinstance(stored, PlanStep) and stored.left_out
            return [stored.path, f"{kind}, not on the device" if outside else kind, activation, shape, *[None] * 5]
        grid = self.plan.grids[stored.grid]
        observed = layer.output_quantizer.range
        seen = observed.policy == "fixed" or int(observed.batches) > 0
        ends = f"{float(observed.minimum):.4g} .. {float(observed.maximum):.4g}" if seen else "no data seen yet"
        weights = weight_bits = None
        if isinstance(layer, WeightedLayer):
            weights = "x".join(map(str, layer.weight_source().shape))
            weight_bits = layer.weight_quantizer.rule.weight_bits
        return [stored.path, kind, activation, shape, observed.policy, ends, weights, weight_bits, grid.bits]


def _order(plan: Plan) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """For each step, its path, the computed operands, and the results that nothing reads after it."""
    computed = {each.path for each in plan.inputs} | {step.path for step in plan.steps}
    last: dict[str, str] = {}
    for step in plan.steps:
        last.update(dict.fromkeys((name for name in step.operands if name in computed), step.path))
    finished: dict[str, list[str]] = {}
    for name, path in last.items():
        if name not in plan.outputs:
            finished.setdefault(path, []).append(name)
    return [
        (step.path, tuple(name for name in step.operands if name in computed), tuple(finished.get(step.path, ())))
        for step in plan.steps
    ]


class _Building:
    """Makes the modules of a plan and places them, and the tensors they need, in a model."""

    def __init__(self, model: nn.Module, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
        self.model = model
        self.plan = plan
        self.tensors = tensors
        self.held: dict[int, ModuleTensor] = {}
        self.layers: dict[str, nn.Module] = {}
        self.root = nn.Module()
        self.core = Functional(plan)
        self.quantizers = {name: self._quantizer(name) for name in plan.grids}
        # By the path of the first layer with the weight.
        self.weight_quantizers: dict[str, WeightFakeQuantize] = {}
        self.grid_of = self.core.grid_of
        self.sources: dict[str, Source] = {}
        self.data: dict[str, ModuleTensor] = {}
        self.expressions: list[Any] = []

    def run(self) -> dict[str, nn.Module]:
        for given in self.plan.inputs:
            self.layers[given.path] = QuantizedInput(self.quantizers[given.grid])
        for step in self.plan.steps:
            self.layers[step.path] = self._layer(step)
        self._place()
        return self.layers

    def _place(self) -> None:
        """Registers the layers at their paths; a path may lead through another layer's."""
        for path in sorted(self.layers, key=lambda path: path.count(".")):
            parent, _, name = path.rpartition(".")
            _node(self.root, parent)._modules[name] = self.layers[path]
        for name, quantizer in self.quantizers.items():
            _node(self.root, name)._modules["output_quantizer"] = quantizer
        for path, weight_quantizer in self.weight_quantizers.items():
            self.layers[path]._modules["weight_quantizer"] = weight_quantizer
        name, number = _LAYERS, 1
        while name in self.model._modules:
            number += 1
            name = f"{_LAYERS}_{number}"
        self.model._modules[name] = self.root

    # --- tensors ----------------------------------------------------------------------------------------------------

    def holder(self, path: str) -> ModuleTensor:
        """The place of a user's parameter or buffer, created on first request."""
        original = self.tensors[path]
        if id(original) not in self.held:
            parent, _, name = path.rpartition(".")
            owner = _node(self.model, parent, Owner)
            copied = original.detach().clone()
            copied = copied.to(torch.float32) if copied.is_floating_point() else copied
            if isinstance(original, nn.Parameter):
                owner._parameters[name] = with_hooks(nn.Parameter(copied), original)
            else:
                owner._buffers[name] = copied
            self.held[id(original)] = ModuleTensor(owner, name)
        return self.held[id(original)]

    def source(self, name: str) -> Source:
        """The source of the constant with that name."""
        if name not in self.sources:
            self.sources[name] = self._source(name)
        return self.sources[name]

    def _source(self, name: str) -> Source:
        constant = self.plan.constants.get(name)
        if constant is None or constant.parameter:
            return self.holder(name)
        expression = constant.expression
        if isinstance(expression, Derived):
            return Computed(expression.function, [self.source(operand) for operand in expression.operands])
        if expression is not None:
            # A module, whose numbers move with the model.
            if expression not in self.expressions:
                self.expressions.append(expression)
                self.root._modules[f"expression_{len(self.expressions)}"] = expression
            return Computed(expression, [self.holder(path) for path in expression.sources])
        if name not in self.data:
            # A buffer, so that it moves with the model; not in the state dict, as `prepare` recreates it.
            buffer = f"constant_{len(self.data)}"
            values = (
                torch.as_tensor(np.asarray(constant.data)) if isinstance(constant.data, np.ndarray) else constant.data
            )
            values = values.to(torch.float32) if values.is_floating_point() else values
            self.root.register_buffer(buffer, values.detach().clone().to(self._device()), persistent=False)
            self.data[name] = ModuleTensor(self.root, buffer)
        return self.data[name]

    def optional(self, name: str | None) -> Source | None:
        return None if name is None else self.source(name)

    def _device(self) -> torch.device:
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    # --- layers -----------------------------------------------------------------------------------------------------

    def _layer(self, step: PlanStep) -> nn.Module:
        if step.attributes.get("custom_gradient"):
            return CustomGradient(step.expression, [self.holder(path) for path in step.expression.sources])
        if step.expression is not None:
            return TrainingOnly(step.expression, [self.holder(path) for path in step.expression.sources])
        if not step.kind:
            return TrainingOnly(**step.attributes)
        if step.outside:
            return Outside(step.kind, step.attributes)
        attributes = attributes_of(step)
        common: dict[str, Any] = {
            "source": self._read(step),
            "activation": step.activation,
            "bounds": step.bounds,
            "high": step.high,
            "constants": self._constants(step),
        }
        quantizer = self.quantizers[step.grid]
        if step.weights is None:
            return QuantizedLayer(step.kind, attributes, quantizer, **common)
        return self._weighted(step, attributes, quantizer, common)

    def _read(self, step: PlanStep) -> FakeQuantize:
        """The quantizer of the first tensor that a step reads."""
        return self.quantizers[next(self.grid_of[name] for name in step.operands if name in self.grid_of)]

    def _constants(self, step: PlanStep) -> dict[int, ConstantOperand | SharedConstant]:
        constants: dict[int, ConstantOperand | SharedConstant] = {}
        for position, name in enumerate(step.operands):
            if name in self.grid_of:
                continue
            source = self.source(name)
            grid = self.plan.grid_of_constant(step, position)
            if grid:
                constants[position] = SharedConstant(source, self.quantizers[grid])
                continue
            rule = constant_rule(self.plan.grids[step.grid].rule)
            with torch.no_grad():
                # It is stored like the other operand.
                bits = self.plan.grids[step.grid].constant_bits
                quantizer = WeightFakeQuantize(rule, source(), bits=bits)
                limited = constant_limits(self.plan, step, position)
                if limited is not None:
                    limits, other = limited
                    others = self.quantizers[other].range, self.quantizers[step.grid].range
                    quantizer.range = ConstantRange(rule, source(), bits, limits, others)
            constants[position] = ConstantOperand(source, quantizer, self.quantizers[step.grid])
        return constants

    def _weighted(
        self, step: PlanStep, attributes: dict[str, Any], quantizer: FakeQuantize, common: dict[str, Any]
    ) -> WeightedLayer:
        weights = step.weights
        assert weights is not None
        weight = self.source(weights.weight)
        norm = None if weights.batch_norm is None else self._batch_norm(weights.batch_norm)
        folded = folds(weights)
        owner = self.core.weight_owner[step.path]
        if owner not in self.weight_quantizers:
            with torch.no_grad():
                value = weight()
                if folded and norm is not None:
                    value = folded_weight(primitives_torch, value, norm.factor_and_offset(), weights.channel_axis)
            self.weight_quantizers[owner] = WeightFakeQuantize(
                weights.rule, value, weights.channel_axis, range_end=weights.range_end
            )
        return WeightedLayer(
            step.kind,
            attributes,
            quantizer,
            weight=weight,
            bias=self.optional(weights.bias),
            weight_quantizer=self.weight_quantizers[owner],
            batch_norm=norm,
            folded=folded,
            **common,
        )

    def _quantizer(self, name: str) -> FakeQuantize:
        grid = self.core.grids[name]
        quantizer = FakeQuantize(grid.rule, grid.nonnegative, grid.trained)
        quantizer.range.writers = self.core.writers[name]
        quantizer.range.name = name
        quantizer.indices = bool(grid.indices)
        return quantizer

    def _batch_norm(self, norm: BatchNorm) -> LayerBatchNorm:
        return LayerBatchNorm(
            self.optional(norm.weight),
            self.optional(norm.bias),
            self.source(norm.mean),
            self.source(norm.variance),
            self.optional(norm.counter or None),
            norm.epsilon,
            norm.momentum,
            norm.training,
        )


def _node(root: nn.Module, path: str, kind: type[nn.Module] = nn.Module) -> nn.Module:
    """The module at a path, made if needed; through `_modules`, as names may be those of a module's own attributes."""
    node = root
    for name in filter(None, path.split(".")):
        if name not in node._modules:
            node._modules[name] = kind()
        node = cast(nn.Module, node._modules[name])
    return node


def _prepared(model: Any) -> PreparedModel:
    """The prepared model, also from what `torch.compile` returned.

    Raises:
        TypeError: it is not one.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, PreparedModel):
        return model
    if isinstance(model, nn.Module):
        inside = next((path for path, each in model.named_modules() if isinstance(each, PreparedModel)), None)
        what = "which was not prepared: model = exactqat.qat.prepare(model, example)"
        what = what if inside is None else f"give the prepared model within it, model.{inside}"
        raise TypeError(f"model must come from exactqat.qat.prepare, got {type(model).__name__}, {what}")
    given = f"{type(model).__name__}{elsewhere(model, 'torch')}"
    raise TypeError(f"model must come from exactqat.qat.prepare, got {given}")


def freeze(model: PreparedModel) -> None:
    """Starts the last phase of training: batch-norm statistics and ranges are fixed, biases are on the int32 grid.

    From here on the model computes what the device computes, integer for integer, by the arithmetic of its `profile`;
    weights, gamma, beta and biases may still be trained, with the gradients of real numbers. A weight range that is not
    learned keeps following the weight's largest magnitude. Only what dropout has changed is computed in real numbers.

    Warns (`UnsettledStatisticsWarning`) of batch norms whose running statistics have seen too few training batches, and
    (`RangesMovedWarning`) where it had to move ranges, because the device's operators cannot take them together.

    Raises:
        ValueError: a range or a batch norm's statistics are not finite.
        RuntimeError: ranges have seen no data.
        TypeError: the model does not come from `prepare`.
    """
    model = _prepared(model)
    arrays, core = model._arrays(), model._core
    core.require_finite_state(arrays.ranges, {}, arrays.tensors)
    core.require_data(arrays.ranges)
    for path, layer in model._steps.items():
        norm = layer.batch_norm if isinstance(layer, WeightedLayer) else None
        if norm is not None and norm.follows:
            counted = norm.tensors().batches
            trained = 0 if counted is None else int(counted) - model._counted[path]
            arrays.ranges[model.plan.stored(path).grid]["trained"] = trained
    ranges, _ = core.frozen_ranges(arrays.ranges, arrays.learned, arrays.tensors)
    with torch.no_grad():
        for name, quantizer in model._device.quantizers.items():
            for end, held in zip(("minimum", "maximum"), quantizer.range.state(), strict=False):
                if ranges[name][end] is not arrays.ranges[name][end]:
                    held.fill_(ranges[name][end].item())
    model._set_frozen(True)


@torch.no_grad()
def calibrate(model: PreparedModel, batches: Iterable[Any], restart: bool = False) -> None:
    """Sets all activation ranges from data: runs the float network, in evaluation mode, over `batches` of inputs.

    Args:
        batches: each a tensor, or a tuple of positional or a dictionary of keyword arguments. A loader of ``(x, y)``
            will do for a model that takes one argument: `y` is left out.
        restart: forget what ranges have seen in training or calibration; otherwise that counts as earlier batches.
            Learned ranges start over, too.

    Raises:
        ValueError: the model is frozen, there is no batch, or one gives values that are not finite. The ranges then
            stay as they were.
        TypeError: batches is one tensor, one of them is not what the model takes, or the model is not prepared.
    """
    model = _prepared(model)
    batches = loading.checked(batches, isinstance(batches, Tensor | np.ndarray))
    if model.frozen:
        raise ValueError("calibrate before freeze: the ranges of a frozen model are fixed")
    ranges = [module for module in model.modules() if isinstance(module, ActivationRange) and module.policy != "fixed"]
    before = [(each, [end.detach().clone() for end in each.state()]) for each in ranges]

    def see(batch: Any) -> None:
        args, kwargs = _fitting_arguments(model, batch)
        model(*args, **kwargs)

    try:
        for each in ranges if restart else ():
            for end in each.state():
                end.zero_()
        with _without_quantization(model, observing=True):
            loading.show(batches, see, model._batches_seen)
    except BaseException:
        for each in ranges:
            each.forget_shown()
        for each, kept in before:
            for end, value in zip(each.state(), kept, strict=True):
                end.copy_(value)
        raise


def _fitting_arguments(model: PreparedModel, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of a batch that the model takes.

    Raises:
        TypeError: it is something else.
    """
    tree = model.plan.network.input_tree
    args, kwargs = loading.arguments(batch, None if tree is None else loading.places(tree.signature))
    if tree is not None:
        try:
            tree.flatten(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{error}; {loading.ALONE}") from None
    return args, kwargs


def is_captured(tensors: Sequence[Tensor]) -> bool:
    """Whether a CUDA graph is capturing computations on them: no number can be read."""
    return any(each.is_cuda for each in tensors) and torch.cuda.is_current_stream_capturing()


@contextmanager
def _without_quantization(model: PreparedModel, observing: bool = False) -> Iterator[None]:
    """The float network, in evaluation mode; `observing` lets ranges see its tensors."""
    was_training = model.training
    quantizers = [m for m in model.modules() if isinstance(m, FakeQuantize | WeightFakeQuantize)]
    model.eval()
    model._observing = observing
    for quantizer in quantizers:
        quantizer.quantizing = False
        if isinstance(quantizer, FakeQuantize):
            quantizer.observing = observing
    try:
        yield
    finally:
        model._observing = False
        for quantizer in quantizers:
            quantizer.quantizing = True
            if isinstance(quantizer, FakeQuantize):
                quantizer.observing = False
        model.train(was_training)


def _shares_batches() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
