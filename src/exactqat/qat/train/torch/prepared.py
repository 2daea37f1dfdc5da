# SPDX-License-Identifier: Apache-2.0
"""A prepared network in PyTorch: the user's module tree, and the training core bound to its tensors.

The plan's steps run one after the other; the device's declarations say what each of them computes. The user's
parameters stay under the user's names, ranges are next to them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ....kit.device import DEFAULT_PROFILE, profile_named
from ....kit.display import table
from ....kit.planning.callers import users_line
from ....kit.planning.inputs import require_examples, require_input, require_rows
from ....kit.planning.plans import ROW_HEADER, Numbers, Plan, PlanStep
from ...capture.proof import Proof
from ..core import batches as loading
from ..core.arrays import Mode
from ..core.engine import Functional
from ..core.frameworks import elsewhere
from ..core.freezing import frozen
from ..core.steps import Input, Step, WeightedStep
from ..core.trained import TrainedNetwork
from . import collectives, primitives
from .fused_layers import FusedLayer, trains_plainly
from .repeats import Repeats
from .state import Bound, HeldRange, ModuleGrid, ModulePlan, ModuleState, TrainingOnly
from .tree import FILE, Kept, Owner, kept_module, kept_tree, node_at, require_called_plainly, require_float32

STATE_FORMAT = 2


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
        quantizing: on; off for the float network with the same weights, whose training moves no range.
        proof: what `prepare` compared with the user's model; None if it was not asked to.
    """

    _places: dict[str, str]  # see `ModuleState`

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        profile: str | None = DEFAULT_PROFILE,
        model: nn.Module | None = None,
    ) -> None:
        """
        Args:
            plan: what to run.
            tensors: the user's parameters and buffers by path, those with several paths under each. They are copied.
            profile: see the attribute.
            model: has the tree of modules, with their flags.
        """
        super().__init__()
        self.plan = plan
        self.unused_rules = list(plan.unused_rules)
        self.proof: Proof | None = None
        self._profile = None if profile is None else profile_named(profile).name
        self._frozen = False
        self.quantizing, self._observing = True, False
        # Ranges that were trained before `freeze`.
        self._trained_ranges: list[nn.Parameter] = []
        if model is not None:
            kept_tree(self, model, model._places[""] if isinstance(model, PreparedModel) else "")
            for name in (*model._parameters, *model._buffers):  # in the user's order
                (self._parameters if name in model._parameters else self._buffers).setdefault(name, None)
        name, number = "quantization", 1
        while name in self._modules:
            name, number = f"quantization_{number + 1}", number + 1
        self._places = {"": name}
        root = self._modules[name] = kept_module()
        paths = [*(plan_input.path for plan_input in plan.inputs), *(step.path for step in plan.steps)]
        for path in sorted(paths, key=lambda path: path.count(".")):
            node_at(root, path, kept_module)
        self._bind(tensors)
        # Training batches that the batch norms of layers had counted before, of those whose statistics are initial.
        self._counted = {path: norm.batches() for path, norm in self._state.norms.items() if norm.is_initial()}
        if model is not None:
            self.training = model.training
        for module in root.modules():
            module.training = self.training
        for module in self.modules():
            if isinstance(module, Owner):
                module.close()

    def _bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes the steps, which read and move the tensors where they are held. tensors: the user's, if they are not in
        this model yet."""
        # Here, as it imports PyTorch's compiler, which is slow to import.
        from .frozen import Device

        plan = self.plan
        self._core = ModulePlan(plan, profile=self._profile)
        self._state: ModuleState = ModuleState(self._core, self, self._places, tensors)
        self._steps: dict[str, Bound] = {plan_input.path: Input(self._state, plan_input) for plan_input in plan.inputs}
        modules = dict(self.named_modules(remove_duplicate=False))
        for step in plan.steps:
            self._steps[step.path] = self._bound(step, modules.get(step.place.path, self))
        self._calls = {path: step.compose if isinstance(step, Step) else step for path, step in self._steps.items()}
        fused = {path: FusedLayer.of(step) for path, step in self._steps.items()}
        self._fused_calls = self._calls | {path: layer for path, layer in fused.items() if layer is not None}
        self._order = _order(plan)
        self._device = Device(self._state, self._steps)
        self._repeats = Repeats()

    def _bound(self, step: PlanStep, module: nn.Module) -> Bound:
        """A step. module: of the user's, where the step is in the model."""
        if step.expression is not None:
            return TrainingOnly(module, *self._state.expression_of(step))
        if not step.kind:
            return TrainingOnly(module, **step.attributes)
        if step.outside:  # a final function of the device's results, left to the program that runs the device
            return partial(getattr(primitives, step.kind), **step.attributes)
        return (Step if step.weights is None else WeightedStep)(self._state, step)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _BOUND}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind({})

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedModel:
        memo[id(self.plan)] = self.plan
        clone = memo[id(self)] = type(self).__new__(type(self))
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return clone

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        super().__setattr__(name, value)
        if name in ("training", "quantizing", "_frozen", "_observing", "_state") and "_state" in vars(self):
            # Steps compute in the model's mode from here on.
            self._state.mode = Mode(self.training, self._frozen, self.quantizing, self._observing)

    @property
    def frozen(self) -> bool:
        return self._frozen

    @property
    def profile(self) -> str | None:
        return self._profile

    @profile.setter
    def profile(self, profile: str | None) -> None:
        self._profile = None if profile is None else profile_named(profile).name
        self._core.compute_as(self._profile)

    def forward(self, *args: object, **kwargs: object) -> Any:
        require_called_plainly(args, self._frozen)
        if self.training and not torch.compiler.is_compiling() and collectives.several_processes():
            self._require_together()
        with self._repeats.as_before(self._state, (args, kwargs)):
            return self._run(args, kwargs)

    def _require_together(self) -> None:
        """In one of several processes that train the model: where they would part, warns once or refuses."""
        state, caller = self._state, nn.parallel.DistributedDataParallel._active_ddp_module
        if not self._frozen:
            if caller is not None and not caller.find_unused_parameters:
                state.callers.add(caller)
            if not (state.warned or state.together) and state.of_all_processes:
                state.warned = any(norm.training for norm in state.norms.values())
                state.warned |= any(grid.observes for grid in state.grids().values())
                if state.warned:
                    warnings.warn(
                        "several processes train this model, and each moves batch norm's statistics and ranges by its "
                        "own batches: they end with different networks. Train inside `with "
                        "exactqat.qat.distributed.synchronized(model):`",
                        stacklevel=users_line(),
                    )
        elif self._trained_ranges and torch.is_grad_enabled() and caller in state.callers:
            raise RuntimeError(
                "DistributedDataParallel waits for gradients of learned ranges, which end at freeze: wrap the model "
                "again after freeze, or wrap it with find_unused_parameters=True from the beginning"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PreparedModel:
        require_float32(fn)
        return super()._apply(fn, recurse)

    def __prepare_scriptable__(self) -> PreparedModel:
        """What `torch.jit.script` calls first."""
        raise TypeError(f"a prepared model cannot be scripted by torch.jit: {FILE}")

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: dict[str, Tensor] | None = None) -> Any:
        mode, tensors = self._state.mode, self._flat(args, kwargs)
        for plan_input, tensor in zip(self.plan.inputs, tensors, strict=True):
            require_input(plan_input, tuple(tensor.shape), tensor.dtype, tensor.dtype.is_floating_point)
            # With several processes, some may have an empty batch if others do not.
            alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
            if alone and (mode.observing or (mode.training and not mode.frozen)):
                require_examples(plan_input, tuple(tensor.shape))
        # A CUDA graph that captures computations lets no number be read.
        captured = any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing()
        if not (torch.compiler.is_compiling() or captured):
            self.require_rows(tensors)
        inputs = {}
        for plan_input, tensor in zip(self.plan.inputs, tensors, strict=True):
            tensor = tensor.to(torch.int64 if plan_input.rows else torch.float32)
            image = tensor.dim() == 4
            inputs[plan_input.path] = tensor.contiguous(memory_format=torch.channels_last) if image else tensor
        self._state.shown.clear()  # by a call that failed
        if self._frozen and self._device.ready():
            values = None
            if seen is None:
                values = self._device.run_whole(self._steps, inputs)
            if values is None:
                values = self._device.run(self._steps, self._order, inputs, seen)
        else:
            values = self._composed(inputs, seen)
        return self.plan.network.output_tree.unflatten([values[path] for path in self.plan.outputs])

    def require_rows(self, tensors: Sequence[Tensor]) -> None:
        """Refuses indices that are not rows of a table; `tensors`: the inputs in the plan's order."""
        for plan_input, tensor in zip(self.plan.inputs, tensors, strict=True):
            if plan_input.rows and tensor.numel():
                require_rows(plan_input, *(int(end) for end in tensor.aminmax()))

    @property
    def keeps_nothing(self) -> bool:
        """Whether calls in training compute fake quantization and keep nothing for `calibrate`."""
        return not (self._frozen or self._state.mode.observing)

    def _composed(self, inputs: Mapping[str, Tensor], seen: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Real numbers and fake quantization, layer after layer."""
        values: dict[str, Tensor] = {}
        calls = self._fused_calls if trains_plainly(self._state) else self._calls
        for path, tensor in inputs.items():
            values[path] = calls[path](tensor)
            if seen is not None:
                seen[path] = values[path]
        for path, operands, finished in self._order:
            values[path] = calls[path](*[values[name] for name in operands])
            if seen is not None:
                seen[path] = values[path]
            for name in finished:
                del values[name]
        return values

    def step(self, path: str) -> Bound:
        """An input or a step of the plan, to look at: usually a `Step`, with the grids of its result and weight."""
        return self._steps[path]

    def layers(self) -> Iterator[tuple[str, Step]]:
        """Paths and layers in order of execution, to look at: those whose results the device stores under these
        names."""
        for path, step in self._steps.items():
            if isinstance(step, Step) and not (step.kind and step.operator.moves_axes):
                yield path, step

    @torch.no_grad()
    def stored_tensors(self, *args: object, **kwargs: object) -> dict[str, tuple[ModuleGrid, Tensor]]:
        """Runs the model and returns, by layer path, the grid and the value of every tensor the device stores."""
        seen: dict[str, Tensor] = {}
        with collectives.gathered(self):
            self._run(args, kwargs, seen)
        return {path: (layer.output_quantizer, seen[path]) for path, layer in self.layers()}

    def _beside(self, batch: object) -> Any:
        """Arrays and tensors, however nested, as tensors on the model's device."""
        device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        tensors = tree_map_only(np.ndarray, torch.from_numpy, batch)
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), tensors)

    def numbers(self) -> Numbers:
        """The numbers that training ended with, for `deploy.lower`.

        Raises:
            RuntimeError: a range has seen no data.
            ValueError: a range or a weight is not finite.
        """
        return self._core.numbers(self._state.in_numpy())

    def trained(self) -> TrainedNetwork:
        """The network with its numbers in NumPy, as they are now."""

        def computed(batch: object, quantizing: bool) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
            args, kwargs = self._beside(loading.arguments(batch))
            inputs = [tensor.cpu().numpy() for tensor in self._flat(args, kwargs)]
            seen: dict[str, Tensor] = {}
            mode = _in_evaluation(self) if quantizing else without_quantization(self)
            with torch.no_grad(), mode, collectives.gathered(self):
                self._run(args, kwargs, seen)
            return inputs, {path: value.cpu().numpy() for path, value in seen.items()}

        functional, arrays = Functional(self.plan, profile=self.profile), self._state.in_numpy()
        functional.epsilons = self._core.epsilons
        # Also what constants are computed from, as in the other frameworks.
        with collectives.gathered(self):
            own = self._tensors()
            users = {name: own[name] for name in functional.tensors if name in own}
            # PyTorch's expressions take no NumPy arrays: what they give is known, too.
            known = {name: self._state.constant(name) for name in self.plan.constants if name in self._state.sources}
            numbers = {name: primitives.to_numpy(tensor) for name, tensor in (known | users).items()}
        arrays = replace(arrays, tensors={**numbers, **arrays.tensors})
        return TrainedNetwork(functional, arrays, self._frozen, computed)

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by all of their paths."""
        parameters: dict[str, Tensor] = dict(self.named_parameters(remove_duplicate=False))
        return parameters | dict(self.named_buffers(remove_duplicate=False))

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """A call's tensors in the order of the plan's inputs."""
        return cast(list[Tensor], self.plan.network.input_tree.flatten(*args, **kwargs))

    @torch.no_grad()
    def take_over(
        self,
        tensors: Mapping[str, np.ndarray],
        ranges: Mapping[str, tuple[float, float]],
        learned: Mapping[str, Mapping[str, np.ndarray]],
    ) -> None:
        """Takes over parameters and buffers, by the user's names, the ranges of grids, by the grids' names, and learned
        ranges of weights, as `Arrays.learned` has them.

        Raises:
            ValueError: the model is frozen, or it has no such tensor.
        """
        if self._frozen:
            raise ValueError("a frozen model takes over no ranges: do it before freeze")
        with collectives.gathered(self, writing=True):
            own = self._tensors()
            unknown = [name for name in tensors if name not in own]
            if unknown:
                raise ValueError(f"the model has no parameter or buffer {unknown[0]!r}")
            for name, value in tensors.items():
                own[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))
            for name, ends in ranges.items():
                for held, end in zip(self._state.grid(name).held(), ends, strict=False):
                    held.fill_(end)
            for name, arrays in learned.items():
                for word, array in arrays.items():
                    self._state.trained_ranges[name].get_parameter(word).copy_(torch.from_numpy(array.reshape(-1)))

    def _batches_seen(self) -> dict[str, int]:
        """By grid, how many batches have moved its range."""
        return self._core.batches_seen(self._state.ranges)

    def range_parameters(self) -> list[nn.Parameter]:
        """The learned ranges, for a parameter group of their own."""
        return [
            parameter
            for module in self.modules()
            if isinstance(module, HeldRange)
            for parameter in module.parameters(recurse=False)
        ]

    def weight_range_parameters(self) -> list[nn.Parameter]:
        """Those of them that are ranges of weights."""
        grids, learned = self._state.functional.grids, self._state.trained_ranges
        return [end for name, held in learned.items() if name not in grids for end in held.parameters()]

    def other_parameters(self) -> list[nn.Parameter]:
        """All parameters that are not ranges."""
        ranges = {id(parameter) for parameter in self.range_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in ranges]

    def get_extra_state(self) -> dict[str, Any]:
        profile = None if self.profile is None else profile_named(self.profile).stored
        return {"format": STATE_FORMAT, "frozen": self._frozen, "profile": profile}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        version = state.get("format", 1)
        if version != STATE_FORMAT:
            age = "an earlier" if version < STATE_FORMAT else "a later"
            raise ValueError(
                f"this state was saved by {age} version of exactqat (format {version}, this one reads {STATE_FORMAT}): "
                "its layers have other names; load it with that version, or train again"
            )
        # State dicts from before profiles existed keep the profile that was prepared for.
        self.profile = state.get("profile", self.profile)
        self._set_frozen(state["frozen"])

    def _set_frozen(self, frozen: bool) -> None:
        if frozen != self._frozen:
            ranges = self._trained_ranges
            if frozen:
                ranges = self._trained_ranges = [tensor for tensor in self.range_parameters() if tensor.requires_grad]
            for parameter in ranges:
                parameter.requires_grad_(not frozen)
        self._frozen = frozen
        for module in self.modules():
            if isinstance(module, Kept):
                vars(module)["fixed"] = frozen

    def __repr__(self) -> str:
        count, layers = sum(1 for _ in self.layers()), len(self._core.weight_owner)
        phase = "frozen" if self._frozen else "not frozen"
        profile = "" if self.profile is None else f", {self.profile}"
        weighted = f"{layers} layers with weights{self.plan.precisions()}"
        return f"PreparedModel({count} stored tensors, {weighted}, {phase}{profile})"

    def _repr_html_(self) -> str:
        header = (*ROW_HEADER[:4], "ranges", "range", "weights", *ROW_HEADER[4:])
        cells = [(row.path, row.cells()) for row in self.plan.rows()]
        with collectives.gathered(self):
            return table(repr(self), header, [(*row[:4], *self._held(path), *row[4:]) for path, row in cells], 7)

    def _held(self, path: str) -> tuple[object, ...]:
        """What is shown of a stored tensor's range and of the layer's weight."""
        step = self._steps[path]
        if not isinstance(step, Step):
            return (None,) * 3
        minimum, maximum, batches = step.output_quantizer.held()
        seen = step.output_quantizer.policy == "fixed" or int(batches) > 0
        ends = f"{float(minimum):.4g} .. {float(maximum):.4g}" if seen else "no data seen yet"
        weight = "x".join(map(str, step.weight_source().shape)) if isinstance(step, WeightedStep) else None
        return step.output_quantizer.policy, ends, weight


def _order(plan: Plan) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """For each step, its path, the computed operands, and the results that nothing reads after it."""
    computed = {plan_input.path for plan_input in plan.inputs} | {step.path for step in plan.steps}
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


def prepared_model(model: object) -> PreparedModel:
    """The prepared model, also from what `torch.compile` returned.

    Raises:
        TypeError: it is not one.
    """
    if not isinstance(model, PreparedModel):  # which may have a compiled model inside
        model = getattr(model, "_orig_mod", model)
    if isinstance(model, PreparedModel):
        return model
    if isinstance(model, nn.Module):
        inside = next((path for path, module in model.named_modules() if isinstance(module, PreparedModel)), None)
        what = "which was not prepared: model = exactqat.qat.prepare(model, example)"
        what = what if inside is None else f"give the prepared model within it, model.{inside}"
        raise TypeError(f"model must come from exactqat.qat.prepare, got {type(model).__name__}, {what}")
    kind = f"{type(model).__name__}{elsewhere(model, 'torch')}"
    raise TypeError(f"model must come from exactqat.qat.prepare, got {kind}")


def freeze(model: PreparedModel) -> None:
    """Starts the last phase of training; see `exactqat.qat.freeze`.

    A weight range that is not learned keeps following the weight's largest magnitude. Only what dropout has changed is
    computed in real numbers.
    """
    model = prepared_model(model)
    arrays, core = model._state.in_numpy(), model._core
    core.fresh_norms = frozenset(model._counted)
    for path, counted in model._counted.items():
        trained = model._state.norms[path].batches() - counted
        arrays.ranges[model.plan.stored(path).grid]["trained"] = trained
    after = frozen(core, arrays)
    with torch.no_grad(), collectives.gathered(model, writing=True):
        for name, grid in model._state.grids().items():
            for end, held in zip(("minimum", "maximum"), grid.held(), strict=False):
                if after.end(name, end) is not arrays.end(name, end):
                    held.fill_(after.end(name, end).item())
    model._set_frozen(True)


def calibrate(model: PreparedModel, batches: Iterable[object], restart: bool = False) -> None:
    """Sets all activation ranges from data; see `exactqat.qat.calibrate`."""
    model = prepared_model(model)
    batches = loading.checked(batches, isinstance(batches, Tensor | np.ndarray), model.frozen)
    tree = model.plan.network.input_tree
    with collectives.gathered(model, writing=True) as divided:
        ranges = [grid for grid in model._state.grids().values() if grid.policy != "fixed"]
        before = [(grid, [end.detach().clone() for end in grid.held()]) for grid in ranges]
        call = model.forward if divided else model  # whose hooks would put the divided parameters back

        def see(batch: object) -> None:
            args, kwargs = loading.fitting(batch, tree, loading.places(tree.signature))
            call(*args, **kwargs)

        try:
            with torch.no_grad(), without_quantization(model, observing=True):
                for end in [end for grid in ranges for end in grid.held()] if restart else ():
                    end.zero_()
                loading.show(batches, see, model._batches_seen, model._core.parts)
        except BaseException:
            for grid, kept in before:
                for end, value in zip(grid.held(), kept, strict=True):
                    end.detach().copy_(value)
            raise


@contextmanager
def _in_evaluation(model: PreparedModel) -> Iterator[None]:
    """Evaluation for a while; then every module is as it was."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def without_quantization(model: PreparedModel, observing: bool = False) -> Iterator[None]:
    """The float network, in evaluation mode; `observing` lets ranges see its tensors."""
    before = model.quantizing, model._observing
    with _in_evaluation(model):
        model.quantizing, model._observing = False, observing
        try:
            yield
        finally:
            model.quantizing, model._observing = before


# What `PreparedModel._bind` makes.
_BOUND = ("_core", "_state", "_steps", "_calls", "_fused_calls", "_order", "_device", "_repeats")
