# SPDX-License-Identifier: Apache-2.0
"""What an export leaves out because it has no value: gradients of the user's own, and modes that stop gradients.

While a model is exported, calls of the user's `torch.autograd.Function`s and `Tensor.register_hook` leave marks in the
graph, operators of a library of our own. The converter makes training-only steps of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from ..core.refusals import CaptureError, Refused
from .contents import Content, View
from .custom import GradientHooks, UsersFunction, held_by
from .expression import Expression, Node
from .schema import is_random

NAMESPACE = "exactqat_capture"
_library = torch.library.Library(NAMESPACE, "DEF")
# What a call of a Function gave, and was given; and a tensor whose gradient has a hook.
_library.define("users_function(Tensor[] results, Tensor[] operands, int number) -> Tensor[]")
_library.define("gradient_hook(Tensor x, int number) -> ()")
_library.impl(
    "users_function", lambda results, operands, number: [x.clone() for x in results], "CompositeExplicitAutograd"
)
_library.impl("gradient_hook", lambda x, number: None, "CompositeExplicitAutograd")
_marks = getattr(torch.ops, NAMESPACE)
torch.fx.node.has_side_effect(_marks.gradient_hook.default)

# Classes of PyTorch are patched while a model is exported: one at a time.
_one_at_a_time = threading.RLock()


class Marked:
    """What the marks of an export are about, by the number that they carry.

    Attributes:
        functions, hooks: in order.
        notes: sentences on what the captured network does otherwise than PyTorch.
    """

    def __init__(self) -> None:
        self.functions: list[UsersFunction] = []
        self.hooks: list[Any] = []
        self.notes: list[str] = []
        self._checkpoints = 0

    # --- while the model runs -----------------------------------------------------------------------------------------

    def apply(self, original: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`Function.apply`."""
        if function is CheckpointFunction:
            run, _, *given = args
            if not any(isinstance(each, Tensor) and each.requires_grad for each in given):
                self.note(
                    "checkpoint(..., use_reentrant=True) trains nothing of what it runs on tensors that need no "
                    "gradient, such as the input; the captured network does"
                )
            with self.checkpoint():
                return run(*given)
        if function.__module__.split(".")[0] in ("torch", "exactqat"):
            return original(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        given = [leaves[index] for index in tensors]
        _refuse_hidden_tensors(function, leaves)
        made = original(*args, **kwargs)
        several = made if isinstance(made, tuple) else (made,)
        if any(result is each for result in several for each in given):
            raise Refused(
                f"{function.__name__} writes into what it is given (mark_dirty); let it return a tensor of its own"
            )
        results = [each for each in several if isinstance(each, Tensor)]
        if not results or not given:
            return made
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.functions.append(UsersFunction(function, spec, others, tensors))
        marked = iter(_marks.users_function(results, given, len(self.functions) - 1))
        several = tuple(next(marked) if isinstance(each, Tensor) else each for each in several)
        return several if isinstance(made, tuple) else several[0]

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """While something runs inside of a checkpoint."""
        self._checkpoints += 1
        try:
            yield
        finally:
            self._checkpoints -= 1

    def batch_norm(self, training: bool) -> None:
        """`F.batch_norm` is called."""
        if self._checkpoints and training:
            self.note(
                "checkpoint runs batch norms once more in the backward pass, which moves their statistics twice in a "
                "step; those of the captured network move once"
            )

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def register_hook(self, tensor: Tensor, hook: Any) -> Any:
        """`Tensor.register_hook`."""
        if isinstance(tensor, nn.Parameter):
            raise Refused("it registers a hook on a parameter, once more at every call; register it before prepare")
        refuse_read_tensors(hook, "the hook")
        self.hooks.append(hook)
        _marks.gradient_hook(tensor, len(self.hooks) - 1)
        return _Handle()


class _Handle:
    """What `register_hook` gives."""

    def remove(self) -> None:
        raise Refused("it removes a hook in forward")


def _refuse_hidden_tensors(function: Any, leaves: list[Any]) -> None:
    """A rule runs in training with the tensors that it is given: those it holds otherwise are not those of training."""
    name = function.__name__
    if any(isinstance(leaf, nn.Module) for leaf in leaves):
        raise Refused(f"{name} is given a module; give it the module's tensors, which training changes")
    for each in ("forward", "backward", "setup_context", "jvp", "vjp"):
        if any(isinstance(held, Tensor | nn.Module) for held in held_by(getattr(function, each, None))):
            raise Refused(f"{name}.{each} holds a tensor or a module of the model; give it to apply as an argument")


def refuse_read_tensors(hook: Any, what: str, state: Collection[Tensor] | None = None) -> None:
    """A hook may hold a module, but not read a parameter or a buffer, which would be that of before training.

    Args:
        state: the tensors that it may not hold; by default all.

    Raises:
        Refused: it does.
    """
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    names = set() if code is None else set(code.co_names)
    for held in held_by(hook):
        if isinstance(held, Tensor) and (state is None or any(held is each for each in state)):
            raise Refused(f"{what} holds a tensor of the model, which would be that of before training")
        if isinstance(held, nn.Module):
            paths = [path for path, _ in (*held.named_parameters(), *held.named_buffers())]
            read = next((path for path in paths if path.split(".")[0] in names), None)
            if read is not None:
                raise Refused(f"{what} reads {read!r}, which would be that of before training")


# What `Function.apply` calls, also where it was kept under another name: `reverse = Reverse.apply`.
_APPLIED = torch.autograd.function._SingleLevelFunction


@contextlib.contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes (owner, name, value) of PyTorch's for this thread, until the end; other threads see the originals."""
    thread = threading.get_ident()
    with _one_at_a_time:
        # None: it is inherited.
        originals = [owner.__dict__.get(name) for owner, name, _ in replacements]
        try:
            for (owner, name, function), original in zip(replacements, originals, strict=True):
                plain = isinstance(function, property)
                known = _inherited(owner, name) if original is None else original
                setattr(owner, name, function if plain else _in_thread(thread, function, known))
            yield
        finally:
            for (owner, name, _), original in zip(replacements, originals, strict=True):
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def _inherited(owner: Any, name: str) -> Any:
    """A class method that a class has from those above it."""
    return classmethod(lambda cls, *args, **kwargs: getattr(super(owner, cls), name)(*args, **kwargs))


def _in_thread(thread: int, function: Any, original: Any) -> Any:
    """`function(original, *args)` in one thread, the original in all others; of the same kind of method."""
    of_class = isinstance(original, classmethod)

    def called(*args: Any, **kwargs: Any) -> Any:
        plain = original.__get__(None, args[0]) if of_class else original
        if threading.get_ident() != thread:
            return plain(*args[of_class:], **kwargs)
        return function(plain, *args, **kwargs)

    return classmethod(called) if of_class else called


@contextlib.contextmanager
def marking() -> Iterator[Marked]:
    """Calls of the user's functions leave marks, so do hooks; `inference_mode` stops gradients as `no_grad` does."""
    marked = Marked()

    thread, plain = threading.get_ident(), cast(Any, torch._C.TensorBase.data)

    def data(self: Tensor) -> Any:
        # An export does not follow it.
        return (
            self.detach() if isinstance(self, FakeTensor) and threading.get_ident() == thread else plain.__get__(self)
        )

    def set_data(self: Tensor, value: Tensor) -> None:
        if isinstance(self, FakeTensor) and threading.get_ident() == thread:
            raise Refused("it gives a tensor other data; write into it (copy_, under torch.no_grad())")
        plain.__set__(self, value)

    def enter(original: Any, self: Any) -> None:
        self._instead = torch.no_grad() if self.mode else contextlib.nullcontext()
        self._instead.__enter__()

    def leave(original: Any, self: Any, *error: Any) -> Any:
        return self._instead.__exit__(*error)

    def batch_norm(original: Any, *args: Any, **kwargs: Any) -> Any:
        marked.batch_norm(bool(kwargs.get("training", args[5] if len(args) > 5 else False)))
        return original(*args, **kwargs)

    def without_reentrance(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with marked.checkpoint():
            yield

    with _replaced(
        (_APPLIED, "apply", lambda original, cls, *args, **kwargs: marked.apply(original, cls, args, kwargs)),
        (torch.Tensor, "register_hook", lambda original, self, hook: marked.register_hook(self, hook)),
        (torch.Tensor, "data", property(data, set_data)),
        (torch.inference_mode, "__enter__", enter),
        (torch.inference_mode, "__exit__", leave),
        (nn.functional, "batch_norm", batch_norm),
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", without_reentrance),
    ):
        yield marked


@contextlib.contextmanager
def checkpoints_run_once() -> Iterator[None]:
    """What checkpoints are given runs where they are called, and not again in the backward pass."""

    def apply(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0](*args[2:]) if cls is CheckpointFunction else original(*args, **kwargs)

    def without_reentrance(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    with _replaced(
        (_APPLIED, "apply", apply),
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", without_reentrance),
    ):
        yield


# --- while the graph is read ------------------------------------------------------------------------------------------


def read_mark(c: Any, node: Any, bound: dict[str, Any]) -> Any:
    """What the converter makes of a mark."""
    if node.target is _marks.users_function.default:
        return _users_function(c, node, bound)
    return _gradient_hook(c, node, bound["x"], c.marked.hooks[bound["number"]])


def _users_function(c: Any, node: Any, bound: dict[str, Any]) -> list[View]:
    call: UsersFunction = c.marked.functions[bound["number"]]
    name = call.function.__name__
    _refuse_what_is_not_given(c, node, name)
    try:
        for leaf in call.leaves:
            if isinstance(leaf, int | float) and not isinstance(leaf, bool):
                c.number(leaf)
        operands = [c.read(view) for view in bound["operands"]]
        results = []
        for index, view in enumerate(bound["results"]):
            content = c.read(view)
            if content.meta.dtype.is_floating_point:
                content = with_gradient(c, content, call, index, operands, name)
                call.results += 1
            results.append(c.view_of(node, node.target, {}, {}, content, index))
    except Refused as refused:
        raise CaptureError(f"{c.place()}: {name}: {refused}") from None
    return results


def with_gradient(c: Any, content: Content, call: Any, index: int, operands: list[Content], name: str) -> Content:
    """A content with the gradient that a call gives at its operands."""
    values = [each for each in operands if each.is_value]
    distinct = [each for at, each in enumerate(values) if all(each.name != other.name for other in values[:at])]
    numbers = {each.name: Node("operand", (at,)) for at, each in enumerate(distinct)}
    nodes = [numbers[each.name] if each.is_value else each.node for each in operands]
    if any(each.noise for each in operands) or content.noise:
        raise Refused("it has random numbers; its gradient would be that of others")
    node = Node("function", (call, index, *nodes))
    if not distinct:
        return Content(content.meta, node=node)
    if not content.is_value:
        raise Refused("its result does not depend on the input")
    axis = c.batch_axis(distinct[0]) or 0
    rows = max(c.for_one(distinct[0].shape)[axis] if distinct[0].shape else 1, 1)
    expression = Expression(node, c.prime, axis, rows)
    made: Content = c.emit("custom_gradient", [content, *distinct], content.meta, label=name, expression=expression)
    return made


def _gradient_hook(c: Any, node: Any, view: View, hook: Any) -> None:
    """The tensor itself, for all who read it from here on, with a hook on its gradient."""
    content = c.read(view)
    known = c.hooked.get(content.name or id(content.node))
    if known is not None:
        known.hooks.append(hook)
        return
    earlier = [user for user in node.args[0].users if user is not node and user in c.environment]
    if earlier:
        raise CaptureError(
            f"{c.place()}: the hook is registered after the tensor was used; register it as soon as the tensor is made"
        )
    hooks = GradientHooks(hook)
    try:
        view.content = with_gradient(c, content, hooks, 0, [content], "register_hook")
    except Refused as refused:
        raise CaptureError(f"{c.place()}: register_hook: {refused}") from None
    c.hooked[view.content.name or id(view.content.node)] = hooks


def _refuse_what_is_not_given(c: Any, node: Any, name: str) -> None:
    """A function that computes with more than its arguments, or with random numbers: its gradient cannot be kept."""
    results, operands, _ = node.args
    pending, seen = list(results), set(operands)
    specs = {spec.arg.name: spec for spec in c.program_of_export.graph_signature.input_specs}
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "placeholder":
            spec = specs[current.name]
            what = spec.target if spec.kind.name in ("PARAMETER", "BUFFER") else "the input"
            if spec.kind.name in ("PARAMETER", "BUFFER", "USER_INPUT"):
                raise CaptureError(
                    f"{c.place()}: {name} computes with {what!r}, which is no argument of it: its gradient would be "
                    "that of before training; give it to apply"
                )
        elif isinstance(current.target, torch._ops.OpOverload) and is_random(current.target):
            raise CaptureError(f"{c.place()}: {name} draws random numbers; its gradient would be that of others")
        pending += current.all_input_nodes


__all__ = [
    "NAMESPACE",
    "Marked",
    "checkpoints_run_once",
    "marking",
    "read_mark",
    "refuse_read_tensors",
    "with_gradient",
]
