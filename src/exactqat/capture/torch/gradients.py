# SPDX-License-Identifier: Apache-2.0
"""What an export leaves out because it has no value: gradients of the user's own, and modes that stop gradients.

While a model is exported, calls of the user's `torch.autograd.Function`s and `Tensor.register_hook` leave marks in the
graph, operators of a library of our own. The converter makes training-only steps of them.
"""

from __future__ import annotations

import contextlib
import functools
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

# What runs before and after a checkpointed function: since PyTorch 2.15 another one.
_WITHOUT_REENTRANCE = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_WITHOUT_REENTRANCE}_impl"):
    _WITHOUT_REENTRANCE += "_impl"
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

    def forward(self, original: Any, function: type, *args: Any) -> Any:
        """`function.forward`, which `apply` calls: it gives marked results."""
        given = args if _has_setup_context(function) else args[1:]
        leaves, spec = pytree.tree_flatten((given, {}))
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        operands = [leaves[index] for index in tensors]
        _refuse_hidden_tensors(function, original, leaves)
        versions = [each._version for each in operands]
        made = original(*args)
        if versions != [each._version for each in operands]:
            raise Refused(
                f"{function.__name__} writes into what it is given (mark_dirty); let it return a tensor of its own"
            )
        several = made if isinstance(made, tuple) else (made,)
        results = [each for each in several if isinstance(each, Tensor)]
        if not results or not operands:
            return made
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.functions.append(UsersFunction(function, spec, others, tensors))
        marked = iter(_marks.users_function(results, operands, len(self.functions) - 1))
        several = tuple(next(marked) if isinstance(each, Tensor) else each for each in several)
        return several if isinstance(made, tuple) else several[0]

    def run_checkpoint(self, run: Any, *given: Any) -> Any:
        """`CheckpointFunction.apply`."""
        if not any(isinstance(each, Tensor) and each.requires_grad for each in given):
            self.note(
                "checkpoint(..., use_reentrant=True) trains nothing of what it runs on tensors that need no "
                "gradient, such as the input; the captured network does"
            )
        with self.checkpoint():
            return run(*given)

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


def _refuse_hidden_tensors(function: Any, forward: Any, leaves: list[Any]) -> None:
    """A rule runs in training with the tensors that it is given: those it holds otherwise are not those of training."""
    name = function.__name__
    if any(isinstance(leaf, nn.Module) for leaf in leaves):
        raise Refused(f"{name} is given a module; give it the module's tensors, which training changes")
    rules = {each: getattr(function, each, None) for each in ("backward", "setup_context", "jvp", "vjp")}
    for each, rule in {"forward": forward, **rules}.items():
        if any(isinstance(held, Tensor | nn.Module) for held in held_by(rule)):
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


def _has_setup_context(function: Any) -> bool:
    """Whether forward is not given what `setup_context` is: the context."""
    return function.setup_context is not torch.autograd.Function.setup_context


def _functions(base: Any = torch.autograd.Function) -> Iterator[Any]:
    """All classes of the user's and of other packages."""
    for each in base.__subclasses__():
        if each.__module__.split(".")[0] not in ("torch", "exactqat"):
            yield each
        yield from _functions(each)


@contextlib.contextmanager
def _forwards_marked(marked: Marked) -> Iterator[None]:
    """What `Function.apply` calls, also where that was kept under another name: `reverse = Reverse.apply`."""
    thread = threading.get_ident()
    running: list[Any] = []

    def called_by_apply(function: Any, args: tuple[Any, ...]) -> bool:
        """And not by the user, who may call the forward of a class that another one extends."""
        if threading.get_ident() != thread:
            return False
        if _has_setup_context(function):
            extended = running and running[-1] is not function and issubclass(running[-1], function)
            return not torch.is_grad_enabled() and not extended
        return getattr(args[0] if args else None, "_forward_cls", None) is function

    def instead(function: Any, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if kwargs or not called_by_apply(function, args):  # apply gives no keywords
                return original(*args, **kwargs)
            running.append(function)
            try:
                return marked.forward(original, function, *args)
            finally:
                running.pop()

        return staticmethod(functools.wraps(original)(forward))

    def begin(plain: Any, function: Any, **kwargs: Any) -> None:
        """A class that is made while the model runs."""
        plain(**kwargs)
        own = function.__dict__.get("forward")
        if threading.get_ident() == thread and function.__module__.split(".")[0] not in ("torch", "exactqat"):
            made.append((function, own))
            function.forward = instead(function, function.forward)

    made: list[tuple[Any, Any]] = []
    known = [(each, each.forward) for each in _functions()]  # before one that another extends is another
    with _one_at_a_time:
        try:
            for function, original in known:
                made.append((function, function.__dict__.get("forward")))
                function.forward = instead(function, original)
            with _replaced((torch.autograd.Function, "__init_subclass__", begin)):
                yield
        finally:
            for function, own in made:
                if own is None:
                    del function.forward
                else:
                    function.forward = own


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

    with (
        _forwards_marked(marked),
        _replaced(
            (CheckpointFunction, "apply", lambda _, cls, run, preserve, *given: marked.run_checkpoint(run, *given)),
            (torch.Tensor, "register_hook", lambda original, self, hook: marked.register_hook(self, hook)),
            (torch.Tensor, "data", property(data, set_data)),
            (torch.inference_mode, "__enter__", enter),
            (torch.inference_mode, "__exit__", leave),
            (nn.functional, "batch_norm", batch_norm),
            (torch.utils.checkpoint, _WITHOUT_REENTRANCE, without_reentrance),
        ),
    ):
        yield marked


@contextlib.contextmanager
def checkpoints_run_once() -> Iterator[None]:
    """What checkpoints are given runs where they are called, and not again in the backward pass."""

    def without_reentrance(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    with _replaced(
        (CheckpointFunction, "apply", lambda _, cls, run, preserve, *given: run(*given)),
        (torch.utils.checkpoint, _WITHOUT_REENTRANCE, without_reentrance),
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
