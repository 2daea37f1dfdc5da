# SPDX-License-Identifier: Apache-2.0
"""From the user's module to one that trains under the device's arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ....kit.device import DEFAULT_PROFILE, DeviceName, profile_named
from ....kit.planning import plan, warn_of_plan
from ....kit.planning.callers import users_line
from ....kit.planning.masks import with_examples
from ....kit.planning.network import Network
from ....kit.planning.rules import Rule, checked_rules
from ...capture.core.progress import at_work
from ...capture.proof import accept
from ...capture.torch.model import capture
from ..core import batches as loading
from ..core.frameworks import elsewhere
from ..core.trained import TrainedNetwork
from ..files import OpenedFile, preparing
from .collectives import gathered
from .prepared import PreparedModel
from .proof import compare_with_original
from .tree import SYNCHRONIZED


def prepare(
    model: nn.Module,
    example: object,
    rules: Iterable[Rule] = (Rule(),),
    *,
    device: DeviceName | str | None = DEFAULT_PROFILE,
    deployable: bool = True,
    keep_final_activation: bool | None = None,
    check: bool = True,
) -> PreparedModel:
    """A copy of `model` that trains under the device's arithmetic, in float32; its parameters and buffers are taken
    over, with ``requires_grad`` and the training mode. Arguments and errors as in `exactqat.qat.prepare`.

    `PreparedModel.proof` holds what `check` has compared.
    """
    device = None if device is None else profile_named(device).name
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}{elsewhere(model, 'torch')}")
    rules = checked_rules(rules)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TypeError("model is a torch.jit.ScriptModule, or holds one: give the torch.nn.Module that it was made of")
    if any(isinstance(module, PreparedModel) for module in model.modules()):
        raise ValueError("model is prepared already, or holds a model that is: give the one that prepare was given")
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        warnings.warn(
            f"the model's SyncBatchNorm trains like BatchNorm, by each process's own batches: {SYNCHRONIZED}",
            stacklevel=users_line(),
        )
    args, kwargs = loading.arguments(example)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
        raise ValueError(
            "example must be a tensor, or a tuple or dictionary of the model's arguments with a tensor among "
            f"them, got {type(example).__name__}; such as next(iter(loader))[0], torch.from_numpy(array) or "
            "torch.zeros(shape)"
        )
    with at_work("prepare reads the model"), _undisturbed():
        network = capture(model, args, kwargs)
    network = with_examples(network, [_ends(tensor) for tensor in network.input_tree.flatten(*args, **kwargs)])
    prepared = _planned(network, model, rules, device, deployable, keep_final_activation)
    if not any(True for _ in model.parameters()):  # it only has ranges: they go where the data is
        prepared.to(next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
    if check:
        with at_work("prepare compares what it made with the model"), _undisturbed():
            prepared.proof = compare_with_original(model, prepared, args, kwargs)
        accept(prepared.proof)
    return prepared


@preparing
def prepare_file(
    file: OpenedFile, device: str | None, options: dict[str, Any]
) -> tuple[PreparedModel, Callable[[], TrainedNetwork]]:
    tensors: dict[str, Tensor] = {name: torch.from_numpy(array.copy()) for name, array in file.buffers.items()}
    tensors |= {name: nn.Parameter(torch.from_numpy(array.copy())) for name, array in file.parameters.items()}
    model = PreparedModel(file.plan(device=device, **options), tensors, device).train()
    return model, model.trained


def prepare_again(
    prepared: PreparedModel, rules: Iterable[Rule], *, device: DeviceName | str | None = DEFAULT_PROFILE
) -> PreparedModel:
    """What `prepare` would make with other rules from the model that a prepared one was made from, with its current
    weights and buffers. Reading a model takes seconds, and does not depend on rules.

    Args:
        rules, device: as in `prepare`. A final activation is left to the program that runs the device.
    """
    with gathered(prepared):
        return _planned(prepared.plan.network, prepared, checked_rules(rules), device, True, False)


def _planned(
    network: Network,
    model: nn.Module,
    rules: Sequence[Rule],
    device: str | None,
    deployable: bool,
    keep_final_activation: bool | None,
) -> PreparedModel:
    """A network under rules, with the tensors and training mode of a model that has them under its names."""
    planned = plan(network, rules, deployable, keep_final_activation, device)
    warn_of_plan(planned, keep_final_activation)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    with _undisturbed():
        copy = PreparedModel(planned, tensors | dict(model.named_buffers(remove_duplicate=False)), device, model)
        copy.to(next((leaf.device for leaf in tensors.values()), None))  # ranges, on the device of the user's tensors
    return copy


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Float32 and recorded gradients, in whatever context `prepare` is called."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _ends(tensor: Tensor) -> list[float | int]:
    """The smallest and the largest number; none for booleans or an empty tensor."""
    if tensor.dtype == torch.bool or not tensor.numel():
        return []
    return [end.item() for end in tensor.detach().aminmax()]
