# SPDX-License-Identifier: Apache-2.0
"""`torch.export` of a model for a batch of any size, and why it failed, where in the user's code."""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ....kit.display import shortened
from ....kit.planning.network import Place
from ..core.refusals import CaptureError, Refused, first_line
from .converter import NOT_USERS
from .sizes import Sizes

NOT_FOLLOWED = (
    "it makes a tensor of its input or its parameters in a way that cannot be followed, such as .data (take detach()), "
    "torch.vmap, torch.autograd.grad, numpy() or tolist() in forward"
)


# What is true of every finite number; truth values of such are combined by "not", "all", "any" and "or".
_OF_FINITE = {"isfinite": True, "isinf": False, "isnan": False}
_OF_TRUTHS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("all", "any", "__bool__"), lambda truth: truth),
    **dict.fromkeys(("logical_not", "bitwise_not", "__invert__"), lambda truth: not truth),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), lambda one, other: one or other),
}


class _Finite(TorchFunctionMode):
    """While it lasts, guards as `if not torch.isfinite(x).all(): ...` take the branch for finite numbers, which all of
    a device's are."""

    def __init__(self) -> None:
        super().__init__()
        # By the identity of a tensor, which is kept so that no other one gets it: what it holds everywhere.
        self.known: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        holds = _OF_FINITE.get(name)
        if name in _OF_TRUTHS and args and all(id(argument) in self.known for argument in args):
            holds = _OF_TRUTHS[name](*(self.known[id(argument)][1] for argument in args))
            if name == "__bool__":
                return holds
        result = func(*args, **(kwargs or {}))
        if holds is not None and isinstance(result, torch.Tensor):
            self.known[id(result)] = result, holds
        return result


# Libraries whose tables keep no tensors of a model, but are many and large.
_OTHERS = {"exactqat", "jax", "mpmath", "numpy", "scipy", "sympy", "torch", *sys.stdlib_module_names} - {"__main__"}


def _tables() -> dict[Any, int]:
    """How often the tables of `functools.lru_cache` that may be a model's were added to."""
    kind, counts = type(functools.lru_cache(len)), {}
    for name, module in list(sys.modules.items()):
        values = [] if name.partition(".")[0] in _OTHERS else list(getattr(module, "__dict__", {}).values())
        for value in values:
            for member in (value, *(vars(value).values() if isinstance(value, type) else ())):
                function = member.__func__ if type(member) in (staticmethod, classmethod) else member
                if type(function) is kind:
                    counts[function] = function.cache_info().misses
    return counts


@contextlib.contextmanager
def caches_left_alone() -> Iterator[None]:
    """Empties the tables that were added to: tensors without values must not stay there, where the user's next call
    would find them."""
    before = _tables()
    try:
        yield
    finally:
        for cache, misses in _tables().items():
            if misses != before.get(cache, 0):
                cache.cache_clear()


class _Plain:
    """Files that say nothing about where a user's model is: PyTorch's and this package's."""

    def __contains__(self, file: str) -> bool:
        return file.startswith((*NOT_USERS, "<"))


def _place_of(location: object) -> Place:
    frame: Any = getattr(location, "framework_loc", None)
    file = getattr(frame, "filename", "")
    return Place("", file, frame.lineno) if file and file not in _Plain() else Place("")


@caches_left_alone()
def takes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changed: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> bool:
    """Whether a model runs on the example with other shapes; nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _nothing_computed():

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(changed(tuple(tensor.shape)), dtype=tensor.dtype, device=tensor.device)

        given_args, given_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
        try:
            model(*given_args, **given_kwargs)
        except Exception as error:  # noqa: BLE001 - the user's model may raise anything
            # What depends on values is another matter than shapes.
            return any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutputShape"))
    return True


@caches_left_alone()
def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.export.ExportedProgram, Sizes]:
    """A model's program for a batch of any size, and what its sizes are.

    Args:
        args, kwargs: with `EXAMPLES` examples; the first axis of every tensor is the batch.

    Raises:
        CaptureError: PyTorch cannot export it, or what it computes depends on the number of examples.
    """
    shapes = torch.export.ShapesCollection()
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    for tensor in leaves:
        shapes[tensor] = {0: torch.export.Dim.AUTO}
    try:
        with (
            _nothing_computed(),
            checkpoints_run_once(),
            # It chooses an order of products by the sizes as numbers.
            torch.backends.opt_einsum.flags(enabled=False),
            # What PyTorch notes about sizes carries the place in the user's files.
            mock.patch.object(symbolic_shapes, "uninteresting_files", _Plain),
        ):
            dynamic = shapes.dynamic_shapes(model, args, kwargs or None)
            program = torch.export.export(model, args, kwargs or None, dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        if "fake tensor" in str(error):
            raise CaptureError(f"the model cannot be captured: {NOT_FOLLOWED}") from None
        raise CaptureError(_explained(model, error)) from error
    inputs = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    tensors = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    sizes = Sizes(tensors)
    environment = tensors[0].fake_mode.shape_env
    if (size := next((int(t.shape[0]) for t in tensors if not sizes.is_free(t.shape[0])), None)) is not None:
        guards = (guard for guard in environment.guards if size in {n for n in guard.expr.atoms() if n.is_Integer})
        place = next((_place_of(guard.sloc) for guard in guards), Place(""))
        raise CaptureError(
            f"the model cannot be captured: {place}: it needs the number of examples in the batch as a plain number, "
            "as len(...), int(...), range(...), loops that go through the examples one by one and recurrent layers "
            "along the batch (without batch_first=True) do; the device computes every example by itself: compute sizes "
            "from x.shape[0] with *, // and math.floor"
        )
    values = (node.meta.get("val") for node in program.graph.nodes)
    if (branch := sizes.branch(environment.guards, (t for t in values if isinstance(t, torch.Tensor)))) is not None:
        guard, examples = branch
        raise CaptureError(
            f"the model cannot be captured: {_place_of(guard.sloc)}: what it computes depends on the number of "
            f"examples in the batch: PyTorch assumes {guard.expr}, where {' and '.join(sizes.rows)} is the size of the "
            f"batch, which does not hold for {examples}; the device computes every example by itself"
        )
    return program, sizes


# What runs before and after a checkpointed function: since PyTorch 2.15 another one.
_WITHOUT_REENTRANCE = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_WITHOUT_REENTRANCE}_impl"):
    _WITHOUT_REENTRANCE += "_impl"


@contextlib.contextmanager
def checkpoints_run_once() -> Iterator[None]:
    """What checkpoints are given runs where they are called, and not again in the backward pass."""
    checkpoint = torch.utils.checkpoint
    with (
        mock.patch.object(checkpoint.CheckpointFunction, "apply", lambda run, preserve, *args: run(*args)),
        mock.patch.object(checkpoint, _WITHOUT_REENTRANCE, lambda *args, **kwargs: iter([None])),
    ):
        yield


@contextlib.contextmanager
def _nothing_computed() -> Iterator[None]:
    """What a model runs under that is followed without values.

    PyTorch prints the graph and its advice on its own exceptions; ours says what matters. What torch.compile has made
    runs as it was written: what is compiled once calls something else next time.
    """
    logger, silence = logging.getLogger("torch"), io.StringIO()
    level = logger.level
    compiler = sys.modules.get("torch._dynamo")
    eager = contextlib.nullcontext() if compiler is None else torch.compiler.set_stance("force_eager")
    try:
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            warnings.simplefilter("ignore")
            with eager, _states_of_lstm(), _Finite():
                yield
    finally:
        logger.setLevel(level)


def _states_of_lstm() -> Any:
    """PyTorch before 2.12 says of `nn.LSTM`'s last states, where it only follows shapes, that they have a dimension
    more than they have when it runs, unless the batch has one example: `[layers, 1, batch, units]`."""
    original = getattr(decompositions, "one_layer_lstm", None)
    if original is None:
        return contextlib.nullcontext()

    def corrected(*args: object, **kwargs: object) -> Any:
        sequence, states = original(*args, **kwargs)
        return sequence, tuple(state.reshape(state.shape[-2:]) for state in states)

    return mock.patch.object(decompositions, "one_layer_lstm", corrected)


def _explained(model: nn.Module, error: BaseException) -> str:
    """Why an export failed, where in the user's code, and what to do."""
    paths = {id(module): path for path, module in model.named_modules()}
    file, line, code, path = "", 0, "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            path = paths[id(owner)]
        if not name.startswith((*NOT_USERS, "<")):
            file, line = name, number
            code = linecache.getline(name, number).strip()
    place = Place(path, file, line)
    text = first_line(error)
    kind = type(error).__name__
    if isinstance(error, Refused):
        reason = text
    elif "DataDependent" in kind or "data-dependent" in text or "dynamo.exc" in type(error).__module__:
        reason = (
            "what it does depends on the values of a tensor; a network that is deployed does the same for every input: "
            "take the branch or the number out of forward (torch.where, a mask, a constant)"
        )
    elif "register a pytree" in text:
        reason = (
            f"{text.split(',')[0]}: return tensors, tuples, lists, dictionaries or named tuples, or register the class "
            "(torch.export.register_dataclass) before"
        )
    else:
        reason = f"{kind}: {text}"
    return f"the model cannot be captured: {place}{f': {shortened(code, 100)}' if code else ''}: {reason}"
