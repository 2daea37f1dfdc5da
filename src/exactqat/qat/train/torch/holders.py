# SPDX-License-Identifier: Apache-2.0
"""Where a prepared model holds the tensors of its plan: the user's at the user's paths, ranges and constants in a child
of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ....kit.planning.plans import Plan, PlanStep
from ..core.arrays import is_learned
from ..core.engine import Functional
from ..core.weights import learned_ends
from . import primitives
from .state import Computed, ModuleState, ModuleTensor, Source
from .tree import Kept, Owner, kept_module, node_at, with_hooks

# The child that holds ranges; the others are the user's.
LAYERS = "quantization"


@dataclass
class Places:
    """Where a model holds the tensors of its plan.

    Attributes:
        root: the name of the child that holds ranges.
        homes: by the path of a parameter or buffer, the path that it has: one of several for a shared one.
        data, expressions: by the name of a constant, the name of a buffer or a module in `root`.
    """

    root: str = ""
    homes: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    expressions: dict[str, str] = field(default_factory=dict)


class HeldRange(Kept):
    """Holds a range. One with min > max is refused when it is loaded."""

    learned = False

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        low, high = state_dict.get(prefix + "minimum"), state_dict.get(prefix + "maximum")
        if low is not None and high is not None and low.dim() == 0 == high.dim():
            if self.learned:  # training may have left an end beyond zero; it counts as zero
                low, high = low.clamp(max=0.0), high.clamp(min=0.0)
            if not low <= 0 <= high:
                raise ValueError(f"{prefix}minimum and {prefix}maximum must hold min <= 0 <= max, got {low}, {high}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol)


class Holders:
    """Finds the tensors of a plan in its model, and puts them there when the model is made."""

    def __init__(self, model: Owner, plan: Plan, places: Places, tensors: Mapping[str, Tensor]) -> None:
        """
        Args:
            places: what is known of them; completed here.
            tensors: the user's, by path; none if they are in the model.
        """
        self.model, self.plan, self.places, self.tensors = model, plan, places, tensors
        self._shared: dict[int, str] = {}
        if not self.places.root:
            name, number = LAYERS, 1
            while name in model._modules:
                number += 1
                name = f"{LAYERS}_{number}"
            self.places.root = name
            root = model._modules[name] = kept_module()
            paths = [*(given.path for given in self.plan.inputs), *(step.path for step in self.plan.steps)]
            for path in sorted(paths, key=lambda path: path.count(".")):
                node_at(root, path, kept_module)
        self.root = cast(nn.Module, model._modules[self.places.root])

    def holder(self, path: str) -> ModuleTensor:
        """The place of a user's parameter or buffer."""
        homes = self.places.homes
        if path not in homes:
            original = self.tensors[path]
            homes[path] = self._shared.setdefault(id(original), path)
            if homes[path] == path:
                self._place(path, original)
        parent, _, name = homes[path].rpartition(".")
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

    def source(self, name: str) -> Source:
        """The source of the constant with that name, which planning has not derived from others."""
        constant = self.plan.constants.get(name)
        if constant is None or constant.parameter:
            return self.holder(name)
        if constant.expression is not None:
            # A module, whose numbers move with the model.
            expression = self._registered(name, constant.expression)
            return Computed(expression, [self.holder(path) for path in constant.expression.sources])
        if name not in self.places.data:
            # A buffer, so that it moves with the model; not in the state dict, as `prepare` recreates it.
            buffer = self.places.data[name] = f"constant_{len(self.places.data)}"
            data = constant.data
            values = torch.as_tensor(np.asarray(data)) if isinstance(data, np.ndarray) else cast(Tensor, data)
            values = values.to(torch.float32) if values.is_floating_point() else values
            device = next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))
            self.root.register_buffer(buffer, values.detach().clone().to(device), persistent=False)
        return ModuleTensor(self.root, self.places.data[name])

    def _registered(self, name: str, expression: nn.Module) -> nn.Module:
        known = self.places.expressions
        if name not in known:
            same = next((at for at, each in self.root._modules.items() if each is expression), None)
            known[name] = same or f"expression_{len(set(known.values())) + 1}"
            self.root._modules[known[name]] = expression
        return cast(nn.Module, self.root._modules[known[name]])

    def expression_of(self, step: PlanStep) -> tuple[nn.Module, list[Source]]:
        """What a step of training computes, and the sources of its first operands."""
        node = node_at(self.root, step.path, kept_module)
        expression = node._modules.setdefault("expression", step.expression)
        return cast(nn.Module, expression), [self.holder(path) for path in step.expression.sources]

    def held(self, path: str) -> nn.Module | None:
        """The module that holds a range, if there is one."""
        node: nn.Module | None = self.root
        for name in path.split("."):
            node = None if node is None else node._modules.get(name)
        return node

    def place_ranges(self, core: Functional, state: ModuleState) -> None:
        """Makes the modules that hold ranges, where there are none yet."""
        for name, grid in core.grids.items():
            if self.held(f"{name}.output_quantizer.range") is None:
                ends = grid.rule.fixed_range if grid.rule.fixed_range is not None else (0.0, 0.0)
                held = self._range(f"{name}.output_quantizer")
                held.learned = grid.rule.ranges == "learned"
                held.register_buffer("batches", torch.tensor(0))
                for end, value in (("maximum", ends[1]), ("minimum", ends[0])):
                    if is_learned(grid, end):
                        held.register_parameter(end, nn.Parameter(torch.tensor(float(value))))
                    else:
                        held.register_buffer(end, torch.tensor(float(value)))
        for path in dict.fromkeys(core.weight_owner.values()):
            weights = cast(PlanStep, self.plan.stored(path)).weights
            assert weights is not None
            if weights.rule.ranges == "learned" and self.held(f"{path}.weight_quantizer.range") is None:
                held = self._range(f"{path}.weight_quantizer")
                with torch.no_grad():
                    weight = state.stored_weight(weights).detach().movedim(weights.channel_axis, -1)
                    start = None if weights.range_end is None else torch.as_tensor(weights.range_end).to(weight.device)
                    for name, value in learned_ends(primitives, weights.rule, weight, start).items():
                        held.register_parameter(name, nn.Parameter(value.clone()))

    def _range(self, path: str) -> HeldRange:
        held = HeldRange()
        node_at(self.root, path, kept_module)._modules["range"] = held
        return held
