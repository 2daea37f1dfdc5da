# SPDX-License-Identifier: Apache-2.0
"""A PyTorch model as a `Network`: `capture` reads what `torch.export` shows of it.

The model is exported once, for a batch of any size: every size that follows the batch is PyTorch's expression of it,
and the network's shapes are for one example. It is read as it is given. Of a model that trains, dropout, stochastic
depth and batch norms are steps of training, and the self-check of `prepare` compares what evaluation computes. Of one
in evaluation, the layers that PyTorch has for these train nevertheless.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ....kit.display import listed
from ....kit.planning.callers import users_line
from ....kit.planning.inputs import misfit_of_example
from ....kit.planning.network import Network
from ..core.naming import words_of
from ..core.refusals import CaptureError, Refused

# Their handlers enter themselves into the reader's table.
from . import elementwise, movement, products, reduction, sequence  # noqa: F401
from .converter import CUMULATIVE
from .export import export, takes
from .program import Program
from .sizes import EXAMPLES
from .tree import Tree, leaf_name

# Layers whose training flag changes random numbers and statistics, not what is computed.
_MARKERS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RReLU,
)
# Likewise, as torchvision and timm call them.
_MARKERS_BY_NAME = ("DropPath", "StochasticDepth")


def capture(model: nn.Module, example_inputs: object, example_kwargs: Mapping[str, Any] | None = None) -> Network:
    """The network that a model computes, for a batch of any size.

    Args:
        model: stays as it is. One that trains is captured with what training does, which must be what evaluation does
            but for noise and batch norms (the self-check of `prepare` compares both). One in evaluation is captured in
            evaluation; its batch norms and dropouts train nevertheless.
        example_inputs: the arguments: a tensor or a tuple of anything that nests tensors. The first axis of every
            tensor is the batch; its size in the example does not matter. Values are not read.
        example_kwargs: arguments by name.

    Raises:
        CaptureError: the model does not do the same for every input, or has hooks that would be lost, or no tensor
            among its arguments has a batch.
    """
    args = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    kwargs = dict(example_kwargs or {})
    _refuse_hooks(model)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"{path} has no shape yet: call the model once with an example")
    evaluating = _flags_of_evaluation(model)
    flags = _training_flags(model) if model.training else evaluating
    signature = inspect.signature(model.forward)
    try:
        arguments = Tree.bind(signature, args, kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the example does not fit forward: {error}; give the model's arguments alone, without targets"
        ) from None
    # In the order of forward, which is that of the export's inputs.
    bound = signature.bind(*args, **kwargs)
    args, kwargs = bound.args, bound.kwargs
    leaves, spec = pytree.tree_flatten(arguments)
    named = [(key, leaf) for key, leaf in pytree.tree_flatten_with_path(arguments)[0] if isinstance(leaf, torch.Tensor)]
    blank = _of_zeros(args, kwargs, [tensor for _, tensor in named])
    drawn, copied = _random_state(), _copied_with(model, flags)
    try:
        exported, sizes = export(copied, *blank)
    except CaptureError as error:
        why, misfit = str(error), None
        if error.__cause__ is not None and not isinstance(error.__cause__, Refused):
            shapes = {leaf_name(key): tuple(tensor.shape) for key, tensor in named}
            misfit = misfit_of_example(why.partition(": ")[2], shapes, partial(takes, copied, args, kwargs))
        if model.training:
            why += ". If only training does this, call model.eval() before prepare"
        raise CaptureError(misfit or why) from error.__cause__
    if _random_state() != drawn:
        raise CaptureError(
            "the model cannot be captured: forward draws random numbers with Python's or NumPy's random, and the "
            "network would go on with those of one call; draw with torch (torch.rand) where noise is meant"
        )
    program, tree = Program(copied, exported, sizes), Tree(signature, leaves, spec)
    tree.flags = flags
    return program.network([words_of(key) for key, _ in named], tree, model.training)


def _refuse_hooks(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"module {path or 'itself'!r} has a backward hook: gradients of the captured network do not pass "
                "through modules; remove the hook"
            )
    hooks = {name: value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")}
    for name in ("backward", "backward_pre", "forward", "forward_pre"):
        if hooks[f"_global_{name}_hooks"]:
            raise CaptureError(
                f"all modules have a {name.partition('_')[0]} hook (torch.nn.modules.module), which the captured "
                "network would not call; remove it"
            )


def _flags_of_evaluation(model: nn.Module) -> dict[str, bool]:
    """The modules' training flags under which evaluation is read: the layers for noise and statistics train.

    Raises:
        CaptureError: the model's own eval() leaves one in training.
    """
    if (left := next((path for path, flag in _flags(model, False).items() if flag), None)) is not None:
        raise CaptureError(
            f"{left or 'the model'!r} stays in training when eval() is called; what the device computes is evaluation"
        )
    markers = _markers(model)
    return {path: flag and path in markers for path, flag in _flags(model, True).items()}


def _training_flags(model: nn.Module) -> dict[str, bool]:
    """The flags under which training is read: what the user has set by hand and what the model's own train() sets,
    which may not have been called yet. Names what is in evaluation by hand."""
    by_train, markers = _flags(model, True), _markers(model)
    flags = {path: flag and by_train[path] for path, flag in _flags(model).items()}
    held = [path for path in by_train if by_train[path] and not flags[path] and path in markers]
    if held:
        one = len(held) == 1
        warnings.warn(
            f"{listed(held)} {'is' if one else 'are'} in evaluation while the model trains, and "
            f"{'stays' if one else 'stay'} so in the prepared model, whose train() keeps what you set by hand; the "
            "model's own train() would switch training on: call model.train() before prepare if that is meant",
            stacklevel=users_line(),
        )
    return flags


def _markers(model: nn.Module) -> set[str]:
    return {
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _MARKERS) or type(module).__name__ in _MARKERS_BY_NAME
    }


def _flags(model: nn.Module, mode: bool | None = None) -> dict[str, bool]:
    """The modules' training flags; after the model's own train() or eval(), if a mode is given."""
    flags = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    if mode is None:
        return flags
    copied = _copied_with(model, flags)
    # Either may be the user's own.
    copied.train() if mode else copied.eval()
    return {path: module.training for path, module in copied.named_modules(remove_duplicate=False)}


def _copied_with(model: nn.Module, training: Mapping[str, bool]) -> nn.Module:
    """A copy of a model with these training flags."""
    # The copy shares the tensors; a forward that keeps things (caches) keeps them there.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = value
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        remedy = "keep such a thing outside of the model, or give its class a __deepcopy__"
        if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            remedy = "prepare it first and call fully_shard on the prepared model"
        raise CaptureError(
            f"the model cannot be copied, so as to leave it as it is: {type(error).__name__}: {error}; {remedy}"
        ) from error
    for path, module in copied.named_modules(remove_duplicate=False):
        module.training = training[path]
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            module.momentum = CUMULATIVE
    return copied


def _random_state() -> Any:
    """Where Python's and NumPy's random numbers go on."""
    _, words, *rest = np.random.get_state()
    return random.getstate(), np.asarray(words).tobytes(), rest


def _of_zeros(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with `EXAMPLES` examples, of zeros."""
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        raise CaptureError(
            "the example's tensors must have a batch: their first axis; a number is not a tensor of the batch"
        )
    first = tensors[0].shape[0]

    def blank(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.shape[0] // first if first and tensor.shape[0] % first == 0 else 0
        if not rows:
            raise CaptureError(
                f"the first axis of every tensor is the batch; the example has {first} and {tensor.shape[0]} there"
            )
        return torch.zeros((rows * EXAMPLES, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(torch.Tensor, blank, (args, kwargs))
    return arguments
