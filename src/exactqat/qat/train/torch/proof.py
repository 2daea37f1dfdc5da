# SPDX-License-Identifier: Apache-2.0
"""The self-check's PyTorch side: runs the user's module, and the prepared one without quantization."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...capture.proof import AFTERWARDS, Evidence, Proof, Subject, Trial, cotangent, nudged, prove
from ...capture.torch.export import checkpoints_run_once
from .frozen import in_full_float32
from .prepared import PreparedModel, without_quantization
from .tree import with_hooks

aten = torch.ops.aten

# The value of random numbers while both sides run.
_CONSTANT = 0.25


class _Settled(TorchDispatchMode):
    """Randomness that does not depend on the order or the memory layout it is drawn in: dropout keeps all values,
    uniform and normal numbers are constant, other random operators start from the same seed. And float32 where the
    model asks for 16 bits, as the prepared network trains in float32."""

    def __init__(self, seen: dict[str, Tensor] | None = None) -> None:
        """seen: filled with what operators compute."""
        super().__init__()
        self.halves, self.seen = "", seen

    def __torch_dispatch__(
        self, operator: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._settled(operator, args, kwargs or {})
        if self.seen is not None and isinstance(result, Tensor):
            self.seen[f"{operator} {len(self.seen)}"] = result.detach().clone()
        return result

    def _settled(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operator._schema.name.removeprefix("aten::")
        if kwargs.get("dtype") in (torch.float16, torch.bfloat16):
            self.halves = str(kwargs["dtype"]).removeprefix("torch.")
            kwargs = {**kwargs, "dtype": torch.float32}
        if name == "native_dropout" and args[2] is not False and args[1] < 1:
            return args[0] / (1 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        if name in ("bernoulli", "bernoulli_"):
            probability = args[1] if len(args) > 1 else kwargs.get("p", args[0] if name == "bernoulli" else 0.5)
            kept = probability > 0
            result = args[0] if name == "bernoulli_" else torch.empty_like(args[0])
            return result.copy_(kept) if isinstance(kept, Tensor) else result.fill_(float(kept))
        if name in ("uniform_", "normal_", "exponential_", "log_normal_"):
            return args[0].fill_(_CONSTANT)
        if name in ("rand", "randn", "rand_like", "randn_like"):
            return torch.full_like(operator(*args, **kwargs), _CONSTANT)
        if name.startswith("rrelu_with_noise"):
            slope = (args[2] + args[3]) / 2
            args = (*args[:2], slope, slope, *args[4:])
        elif torch.Tag.nondeterministic_seeded in operator.tags:
            torch.manual_seed(0)
        return operator(*args, **kwargs)


class _Sides(Subject):
    """The user's module, and what `prepare` made from it."""

    own_gradients = "Hooks that forward registers on tensors are not kept"

    def __init__(
        self, model: nn.Module, prepared: PreparedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        network = prepared.plan.network
        self.model, self.prepared = model, prepared
        # The modules' training flags with which the model computes what the network's training does.
        self.flags: Mapping[str, bool] = network.input_tree.flags
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        known = zip(network.input_tree.flatten(*args, **kwargs), prepared.plan.inputs, strict=True)
        tables = {id(leaf): known.rows for leaf, known in known}
        super().__init__(network, [_array(leaf) for leaf in tensors], [tables.get(id(leaf), 0) for leaf in tensors])
        self.device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self.ranges = {id(parameter) for parameter in prepared.range_parameters()}
        names = ({name for name, _ in module.named_buffers()} for module in (model, prepared))
        self.buffers = set.intersection(*names)
        if model.training:
            self.remedy = (
                "call model.eval() before prepare: what evaluation computes is trained then, with its batch norms and "
                "dropouts"
            )

    def original(self, trial: Trial, inputs: Sequence[np.ndarray], nudge: int) -> Evidence:
        with checkpoints_run_once():
            evidence, results = self._evidence(self._copied(trial, nudge), trial, inputs, nudge)
        self.rules = self.rules or _own_rules(results.values())
        return evidence

    def captured(self, trial: Trial, inputs: Sequence[np.ndarray]) -> Evidence:
        with _plain(self.prepared, trial.training):
            return self._evidence(self.prepared, trial, inputs)[0]

    def layers(self, original: bool, trial: Trial) -> dict[str, np.ndarray]:
        seen: dict[str, Tensor] = {}
        args, kwargs, _ = self._arguments(trial, self.arrays(trial))
        if original:
            with checkpoints_run_once(), _Settled(seen):
                self._copied(trial)(*args, **kwargs)
        else:
            with _plain(self.prepared, trial.training), torch.no_grad(), _Settled():
                self.prepared._run(args, kwargs, seen)
        return {name: _array(value) for name, value in seen.items()}

    def _copied(self, trial: Trial, nudge: int = 0) -> nn.Module:
        """The user's module, in the mode of a trial and in float32."""
        model = copied_with_hooks(self.model)
        for path, module in model.named_modules(remove_duplicate=False):
            module.training = trial.training and self.flags[path]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and (nudge or tensor.dtype != torch.float32):
                tensor.data = torch.as_tensor(nudged(_array(tensor), name, nudge), device=tensor.device)
        return model

    def _arguments(
        self, trial: Trial, inputs: Sequence[np.ndarray]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
        """Arguments, and the leaves whose gradients are compared."""
        arrays, followed = iter(inputs), dict[str, Tensor]()

        def argument(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            tensor = torch.as_tensor(next(arrays), device=self.device)
            if not tensor.is_floating_point():
                return tensor
            followed[str(len(followed))] = tensor.requires_grad_(trial.gradients)
            return tensor.clone()  # the model may write into it

        args, kwargs = pytree.tree_unflatten([argument(leaf) for leaf in self.leaves], self.spec)
        return args, kwargs, followed

    def _evidence(
        self, model: nn.Module, trial: Trial, inputs: Sequence[np.ndarray], nudge: int = 0
    ) -> tuple[Evidence, dict[str, Tensor]]:
        """What a model gives, and its results as tensors."""
        random.seed(0)
        np.random.seed(0)
        with torch.set_grad_enabled(trial.gradients), _Settled() as settled:
            args, kwargs, followed = self._arguments(trial, inputs)
            results = _tensors(model(*args, **kwargs))
            self.halves = self.halves or settled.halves
            evidence = Evidence({name: _array(value) for name, value in results.items()})
            if trial.gradients:
                if sums := _weighted_sums(results):
                    torch.stack(sums).sum().backward()
                leaves: list[tuple[str, Tensor]] = [
                    (name, x) for name, x in model.named_parameters() if id(x) not in self.ranges
                ]
                leaves += [(f"input {name}", x) for name, x in followed.items()]
                evidence.gradients = {name: _array(x.grad) for name, x in leaves if x.grad is not None}
                for _, x in leaves:
                    x.grad = None
        evidence.state = {name: _array(tensor) for name, tensor in model.named_buffers() if name in self.buffers}
        if trial.training:
            model.eval()
            # With gradients, as forward hooks raise without them; evaluation alone is another trial.
            with torch.set_grad_enabled(trial.gradients), _Settled():
                args, kwargs, followed = self._arguments(trial, self.arrays(trial.afterwards, nudge))
                after = _tensors(model(*args, **kwargs))
                sums = _weighted_sums(after)
                # Of a second call, in which a module that counts its calls does something else. Not of one example:
                # PyTorch's own batch norm in evaluation (2.13) then has wrong gradients, depending on strides.
                if sums and followed and trial.afterwards.examples > 1:
                    slopes = torch.autograd.grad(sums, list(followed.values()), allow_unused=True)
                    named = zip(followed, slopes, strict=True)
                    evidence.gradients |= {f"input {name}{AFTERWARDS}": _array(x) for name, x in named if x is not None}
            evidence.results |= {f"{name}{AFTERWARDS}": _array(x) for name, x in after.items()}
        return evidence, results


def _weighted_sums(results: Mapping[str, Tensor]) -> list[Tensor]:
    """The sum of each result times `cotangent`: that of normalized values alone is nothing but rounding."""
    weights = {name: torch.as_tensor(cotangent(name, x.shape), device=x.device) for name, x in results.items()}
    return [(x * weights[name]).sum() for name, x in results.items() if x.requires_grad]


def _array(tensor: Tensor) -> np.ndarray:
    """Values in NumPy; zeros for tensors without values (fake and meta tensors)."""
    tensor = tensor.detach()
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        kind = np.float32 if tensor.is_floating_point() else np.int64
        return np.zeros(tuple(tensor.shape), kind)
    # A user's own class would interfere with what follows.
    tensor = tensor.as_subclass(Tensor)
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype).numpy(force=True).copy()


def _tensors(results: Any) -> dict[str, Tensor]:
    """A model's results by their places."""
    leaves = pytree.tree_flatten_with_path(results)[0]
    return {pytree.keystr(path) or "output": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _own_rules(results: Iterable[Tensor]) -> set[str]:
    """Names of the `torch.autograd.Function`s, but PyTorch's, that results follow from."""
    names: set[str] = set()
    pending: list[Any] = [result.grad_fn for result in results]
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            function = getattr(node, "_forward_cls", None)
            if function is not None and function.__module__.split(".")[0] not in ("torch", "exactqat"):
                names.add(function.__name__)
    return names


def copied_with_hooks(model: nn.Module) -> nn.Module:
    """A copy that shares nothing and keeps the hooks of parameters, which `copy.deepcopy` leaves out."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value
    copied = copy.deepcopy(model, memo)
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    for original, parameter in pairs:
        with_hooks(parameter, original)
        parameter.grad = None
    return copied


@contextmanager
def _plain(model: PreparedModel, training: bool) -> Iterator[None]:
    """The prepared network without quantization and alone in its process; leaves it as it was."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    values = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    model._state.of_all_processes = False
    try:
        with without_quantization(model):
            model.train(training)
            yield
    finally:
        model._state.of_all_processes = True
        with torch.no_grad():
            for tensor, kept in (*buffers, *values):
                tensor.copy_(kept)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def compare_with_original(
    model: nn.Module, prepared: PreparedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Proof:
    """Runs the user's model alongside the prepared one; see `proof`."""
    sides = _Sides(model, prepared, args, kwargs)
    python, numbers = random.getstate(), np.random.get_state()
    devices = [] if sides.device.type == "cpu" else [sides.device]
    try:
        # In TF32, the default for some GPU operators, rounding would hide a difference in meaning; that of cuDNN's
        # recurrent layers would look like one.
        with (
            torch.random.fork_rng(devices=devices),
            in_full_float32(sides.device.type),
        ):
            return prove(sides)
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
