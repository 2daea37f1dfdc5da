# SPDX-License-Identifier: Apache-2.0
"""The user's module tree in a prepared model: modules of the user's classes, at their paths, with their tensors and
flags.

They compute nothing; the steps of the plan read from them. What PyTorch lets a training loop do to modules means what
it means in the user's model: `train` and `eval` of any of them, a batch norm's `momentum`, `eps` and
`track_running_stats`, `requires_grad`. Anything that would change nothing here is refused when it happens: calling such
a module, hooks on it, its other settings, replacing it, pruning it, a weight norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import new_class
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .primitives import is_exporting

BEFORE = "change the float model and prepare it again; pruning, weight norm and the like are taken over from there"
SYNCHRONIZED = (
    "inside `with exactqat.qat.distributed.synchronized(model):` a prepared model's batch norms see the batches of all "
    "processes, as SyncBatchNorm would"
)
# What steps read of a batch norm at each call.
_LIVE = ("momentum", "eps", "track_running_stats")
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size)


class Owner(nn.Module):
    """Holds parameters, buffers and kept modules, and keeps them there once it is closed."""

    # Names of the parameters and buffers, once it is closed.
    kept: frozenset[str] | None = None
    # Whether `fully_shard` has put whole parameters in the place of divided ones, for a while.
    unsharded = False

    def close(self) -> None:
        """From here on nothing can be replaced."""
        vars(self)["kept"] = frozenset((*self._parameters, *self._buffers))

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if self.kept is not None:
            self._require_same(name, value)
            held: Tensor | None = self._parameters.get(name)
            held = self._buffers.get(name) if held is None else held
            if held is not None:
                _require_alike(name, held, value)
                if hasattr(held, "full_tensor") != hasattr(value, "full_tensor"):
                    vars(self)["unsharded"] = hasattr(held, "full_tensor")
        super().__setattr__(name, value)

    def _require_same(self, name: str, value: object) -> None:
        if name in self._modules and value is not self._modules[name]:
            instead = SYNCHRONIZED if isinstance(value, nn.SyncBatchNorm) else BEFORE
            raise TypeError(f"'{name}' of a prepared model cannot be replaced: {instead}")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if self.kept is not None:
            self._require_same(name, module)
        super().add_module(name, module)

    def __delattr__(self, name: str) -> None:
        if self.kept is not None and (name in self.kept or name in self._modules):
            raise TypeError(f"'{name}' of a prepared model cannot be taken away: {BEFORE}")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # What PyTorch's utilities put in a parameter's place: weight_orig, weight_g, weight_u.
        taken = next((held for held in self.kept or () if name.startswith(f"{held}_")), None)
        if taken is not None:
            raise TypeError(f"'{taken}' of a prepared model cannot be computed from '{name}': {BEFORE}")
        super().register_parameter(name, param)


class Kept(Owner):
    """A module of the user's tree, or a place for ranges.

    Attributes:
        users: the user's class.
        settings: names of the user's attributes, which nothing reads.
        fixed: whether the network is frozen, and with it the statistics of batch norms.
    """

    users: type[nn.Module] = nn.Module
    settings: frozenset[str] = frozenset()
    fixed = False

    def __init_subclass__(cls) -> None:
        """A user's class may register its subclasses; those made here are not for its registry."""

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            f"a prepared model's {type(self).__name__} cannot be called on its own: call the prepared model, whose "
            "stored_tensors returns what its layers store"
        )

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        live = isinstance(self, _NormBase) and name in _LIVE
        if self.kept is not None and name in self.settings and not live and value is not vars(self).get(name):
            raise TypeError(
                f"'{name}' of a prepared model's {type(self).__name__} is a setting that nothing reads: {BEFORE}"
            )
        super().__setattr__(name, value)

    def reset_running_stats(self) -> None:
        """As batch norms have it; a frozen network's statistics are fixed."""
        if self.fixed:
            raise TypeError("the statistics of a frozen network are fixed: update them before freeze")
        for name, value in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            held = self._buffers.get(name)
            if held is not None:
                held.fill_(value)

    def __reduce_ex__(self, protocol: object) -> Any:
        return _empty, (self.users,), vars(self)


def _refused_hook(self: nn.Module, *args: object, **kwargs: object) -> NoReturn:
    raise TypeError(
        f"hooks on a prepared model's {type(self).__name__} would never be called: register them on the prepared model "
        "or on parameters; stored_tensors returns what layers store; torch's fully_shard takes the whole prepared model"
    )


def _as_plain_modules() -> None:
    """What users' classes make of a module's own methods (a `train` that merges weights, say) stays out."""
    own = {name: value for name, value in vars(nn.Module).items() if callable(value)}
    for name, value in own.items():
        if name not in (*vars(Kept), *vars(Owner), "extra_repr", "__class__"):
            setattr(Kept, name, _refused_hook if name in _HOOKS else value)


_HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_backward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)
_as_plain_modules()


@cache
def _kind(users: type[nn.Module]) -> type[Kept]:
    """The class of kept modules that are also the user's."""
    if users is nn.Module:
        return Kept
    try:
        subclass: Any = new_class(users.__name__, (Kept, users))
    except TypeError:  # a class that cannot be extended
        return Kept
    subclass.users, subclass.__module__, subclass.__qualname__ = users, users.__module__, users.__qualname__
    return cast(type[Kept], subclass)


def _empty(users: type[nn.Module]) -> Kept:
    kind = _kind(cast(Any, users))
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def kept_module(module: nn.Module | None = None) -> Kept:
    """A module of the same class, with the same flags and settings as far as these are numbers or words, and none of
    its tensors, children and hooks. None: of no class in particular."""
    if module is None:
        return _empty(nn.Module)
    users = module.users if isinstance(module, Kept) else type(module)
    if hasattr(module, "_orig_mod"):  # what torch.compile has made is a holder of a module
        users = nn.Module
    if nn.utils.parametrize.is_parametrized(module):  # PyTorch has given it a class of its own
        users = users.__bases__[0]
    shell = _empty(users)
    own = {name: value for name, value in vars(module).items() if name not in vars(shell)}
    state = {name: value for name, value in own.items() if _is_plain(value)}
    vars(shell).update(state, training=module.training)
    shell._parameters.update(dict.fromkeys(module._parameters))
    shell._buffers.update(dict.fromkeys(module._buffers))
    names = frozenset(own) | (module.settings if isinstance(module, Kept) else frozenset())
    vars(shell)["settings"] = names - {"settings", "kept", "fixed"}
    return shell


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def kept_tree(root: nn.Module, models: nn.Module, without: str = "") -> None:
    """Puts kept modules at the paths of a model's modules, in their order; one that has several paths under each.

    Args:
        root: gets them.
        without: the name of a child to leave out.
    """
    copies: dict[int, nn.Module] = {id(models): root}

    def place(target: nn.Module, source: nn.Module) -> None:
        for name, child in source._modules.items():
            if child is None or (source is models and name == without):
                continue
            known = id(child) in copies
            copies.setdefault(id(child), kept_module(child))
            target._modules[name] = copies[id(child)]
            if not known:
                place(copies[id(child)], child)

    place(root, models)


def node_at(root: nn.Module, path: str, make: Callable[[], nn.Module] = nn.Module) -> nn.Module:
    """The module at a path, made if needed; through `_modules`, as names may be those of a module's own attributes."""
    node = root
    for name in filter(None, path.split(".")):
        child = node._modules.get(name)
        if child is None:
            child = node._modules[name] = make()
        node = child
    return node


def with_hooks(parameter: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """A parameter with the hooks of another, and trained if that is."""
    parameter.requires_grad_(True)  # else it takes none
    for hook in (original._backward_hooks or {}).values():
        parameter.register_hook(hook)
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        parameter.register_post_accumulate_grad_hook(hook)
    return cast(nn.Parameter, parameter.requires_grad_(original.requires_grad))


def _require_alike(name: str, held: Tensor, value: object) -> None:
    if isinstance(value, Tensor) and value.shape == held.shape and value.dtype == held.dtype:
        return
    wanted = f"shape {list(held.shape)} in {str(held.dtype).removeprefix('torch.')}"
    kind = type(value).__name__
    if isinstance(value, Tensor):
        kind = f"shape {list(value.shape)} in {str(value.dtype).removeprefix('torch.')}"
    raise TypeError(f"'{name}' of a prepared model has {wanted}, got {kind}")


def require_float32(convert: Callable[[Tensor], Tensor]) -> None:
    """Refuses to `convert` a prepared model's tensors to another type of numbers."""
    converted = convert(torch.empty(0))
    if converted.dtype != torch.float32:
        dtype = str(converted.dtype).removeprefix("torch.")
        raise TypeError(
            f"a prepared model computes in float32, not in {dtype}: for mixed precision train it under "
            "torch.autocast; inputs of other types are converted"
        )


def require_called_plainly(args: object, frozen: bool) -> None:
    """Refuses anything that would record one call of a prepared model as if that were the whole model."""
    if torch.compiler.is_compiling():
        if frozen and is_exporting():
            raise TypeError(f"a frozen model, which computes the device's integers, cannot be exported: {FILE}")
        return
    if not isinstance(args, tuple):
        raise TypeError(f"a prepared model cannot be traced by torch.fx: {FILE}")
    if torch.jit.is_tracing():
        raise TypeError(f"a prepared model cannot be traced by torch.jit: {FILE}")
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels):
        raise TypeError(
            "a prepared model cannot run under torch.func.vmap (or jacfwd, which uses it): it takes whole batches; "
            "give one, and use torch.func.jacrev or autograd for gradients"
        )


FILE = "exactqat.deploy.lower, then write_tflite or write_onnx make the file of a frozen model"
