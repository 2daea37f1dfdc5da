# SPDX-License-Identifier: Apache-2.0
"""A PyTorch model as a `Network`: `capture` reads what `torch.export` shows of it.

The model is exported without a concrete batch: its inputs are fake tensors whose batch is a large prime, so that
every size that follows the batch is a multiple of that prime and nothing else is. Sizes computed in Python, windows
folded into the batch and `int(...)` of a quotient are then no different from `x.shape[0]`, and the network's shapes are
for one example.

It is exported twice, in training and in evaluation. Where the two differ in nothing but noise (dropout, stochastic
depth) and batch norms, they are one network. Where the model branches on `training` otherwise, evaluation is what the
device has to compute, and it is captured, with a warning.

Operators in place are made functional here: a tensor is a view (a chain of slices, reshapes, ...) of a storage, as in
PyTorch, and writing through any view of a storage gives the storage a new content, which every later reader of it sees.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import linecache
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from ...display import listed, shortened
from ...planning.files import short_names
from ...planning.inputs import misfit_of_example, with_own_sizes
from ...planning.network import Constant, Network, Place, Step, Value
from ..core.progress import now_at
from . import CUMULATIVE, CaptureError, Converter, Refused, batch
from .contents import Content, Meta, Storage, View
from .converter import NOT_USERS
from .expression import Expression, Node, identical
from .gradients import Marked, marking, refuse_read_tensors
from .one_by_one import OneByOne


class Tree:
    """How a model's arguments and results nest."""

    def __init__(self, signature: inspect.Signature, leaves: Sequence[Any], spec: Any) -> None:
        self.signature, self.spec = signature, spec
        self.tensors = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        # What the network was captured for: its values are fixed in it.
        self.others = {index: leaf for index, leaf in enumerate(leaves) if index not in self.tensors}
        self.results: tuple[Any, list[tuple[bool, Any]]] = (None, [])
        # The modules' training flags under which the model computes what the network does in training.
        self.flags: Mapping[str, bool] = {}
        # What a step of training makes of parameters and buffers beside gradients: paths and expressions, all of the
        # values of before; and whether before the network runs, or after it.
        self.updates: list[tuple[str, Expression]] = []
        self.updates_first = False

    @staticmethod
    def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name; those left out by their defaults.

        Raises:
            TypeError: they are not what the model takes.
        """
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            takes = ", ".join(map(str, signature.parameters.values())) or "nothing"
            given = [f"{len(args)} argument{'s' * (len(args) != 1)} by position"] if args or not kwargs else []
            given += [f"by name {', '.join(map(shortened, kwargs))}"] if kwargs else []
            raise TypeError(f"{error}: the model takes ({takes}), got {' and '.join(given)}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def flatten(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The tensors among a call's arguments, in the order of `Network.inputs`.

        Raises:
            TypeError: the arguments nest otherwise than the example's, or what is no tensor has another value.
        """
        leaves, spec = pytree.tree_flatten(self.bind(self.signature, args, kwargs))
        if spec != self.spec:
            raise TypeError(
                "the arguments must nest as those of the example did: the same tensors, None where it had None; "
                f"{self._difference(leaves, spec)}"
            )
        for index in self.tensors:
            if not isinstance(leaves[index], torch.Tensor):
                kind = f"{type(leaves[index]).__module__}.{type(leaves[index]).__qualname__}".removeprefix("builtins.")
                how = "; torch.from_numpy makes one" if kind == "numpy.ndarray" else ""
                raise TypeError(
                    "the arguments must nest as those of the example did: "
                    f"'{self._names(leaves, spec)[index]}' must be a torch.Tensor, got {kind}{how}"
                )
        for index, value in self.others.items():
            if isinstance(leaves[index], torch.Tensor) or leaves[index] != value:
                given = "a tensor" if isinstance(leaves[index], torch.Tensor) else shortened(repr(leaves[index]))
                name = self._names(leaves, spec)[index]
                raise TypeError(f"the network was captured for {name} = {value!r}, got {given}")
        return [leaves[index] for index in self.tensors]

    @staticmethod
    def _names(leaves: Sequence[Any], spec: Any) -> list[str]:
        return [_leaf_name(path) for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, spec))[0]]

    def _difference(self, leaves: Sequence[Any], spec: Any) -> str:
        """What a call has that the example did not have, or the other way round."""
        wanted = self._names([None] * self.spec.num_leaves, self.spec)
        given = self._names(leaves, spec)
        return f"the example had {listed(wanted)}, this call has {listed(given)}"

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's result from the values of `Network.outputs`."""
        spec, leaves = self.results
        return pytree.tree_unflatten([outputs[leaf] if is_output else leaf for is_output, leaf in leaves], spec)


@dataclass
class Change:
    """What forward makes of a parameter or a buffer.

    Attributes:
        place: where it writes.
        expression: the new values from those of before; None where they depend on the input, or are random.
        registered: whether it is a parameter or a buffer; else a tensor that is an attribute, of which nobody says who
            reads it.
    """

    place: Place
    expression: Expression | None
    registered: bool = True


@dataclass
class _Draft:
    """A network under construction, of one export."""

    network: Network
    mutated: Mapping[str, Change]
    notes: Sequence[str] = ()
    run: batch.Run | None = None


def capture(model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None) -> Network:
    """The network that a model computes, for a batch of any size.

    Args:
        model: stays as it is. One in training is captured with what training does; if its training does more than
            noise and batch norms (auxiliary outputs, a softmax left out), the network is that of evaluation, with a
            warning. One in evaluation is captured as in evaluation; its batch norms and dropouts train nevertheless.
        example_inputs: the arguments: a tensor or a tuple of anything that nests tensors. The first axis of every
            tensor is the batch; its size in the example does not matter. Values are not read.
        example_kwargs: arguments by name.

    Raises:
        CaptureError: the model does not do the same for every input, or has backward hooks, or no tensor among its
            arguments has a batch.
    """
    args = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    kwargs = dict(example_kwargs or {})
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"module {path or 'itself'!r} has a backward hook: gradients of the captured network do not pass "
                "through modules; remove the hook"
            )
    every = nn.modules.module
    if every._global_backward_hooks or every._global_backward_pre_hooks:
        raise CaptureError("all modules have a backward hook (torch.nn.modules.module); remove it")
    if every._global_forward_hooks or every._global_forward_pre_hooks:
        raise CaptureError(
            "all modules have a forward hook (torch.nn.modules.module), those of the captured network, too; remove it"
        )
    state = [*model.parameters(), *model.buffers()]
    for path, parameter in model.named_parameters():
        for hook in (*_hooks(parameter), *_hooks(parameter, "_post_accumulate_grad_hooks")):
            try:
                refuse_read_tensors(hook, f"the hook of the parameter {path!r}", state)
            except Refused as refused:
                raise CaptureError(f"{refused}; let it read the parameter that the prepared model has") from None
    wanted = model.training
    training, evaluating = _flags(model, True), _flags(model, False)
    if wanted:
        # Both what the user has set by hand and what the model's own train() sets, which may not have been called yet.
        training = {path: flag and training[path] for path, flag in _flags(model).items()}
    left = next((path for path, flag in evaluating.items() if flag), None)
    if left is not None:
        raise CaptureError(
            f"{left or 'the model'!r} stays in training when eval() is called; what the device computes is evaluation"
        )
    drafted: _Draft | None = None
    try:
        drafted = _draft(model, args, kwargs, training)
    except CaptureError as error:
        if wanted:
            raise _only_in_training(error, model, args, kwargs) from error
    try:
        evaluation = _draft(model, args, kwargs, evaluating, drafted)
    except CaptureError as error:
        if not wanted or drafted is None:
            raise
        warnings.warn(f"the network is that of training: in evaluation it cannot be captured: {error}", stacklevel=2)
        return _warned(drafted, training)
    difference = None if drafted is None else _difference(drafted.network, evaluation.network)
    if drafted is not None and difference is None:
        return _warned(_with_updates(drafted, evaluation, drafted.network, first=False), training)
    if drafted is not None and wanted and drafted.mutated:
        settled = _settled(model, drafted, evaluation)
        if settled is not None:
            return _warned(_with_updates(drafted, evaluation, settled, first=True), training)
    _refuse_changes(drafted if wanted else None, evaluation)
    if wanted:
        warnings.warn(
            f"training computes something else than evaluation ({difference}); the network is that of evaluation. "
            "Call model.eval() before to say that this is meant",
            stacklevel=2,
        )
    # The results of evaluation, with the noise of training as far as it changes nothing else.
    noisy = set() if drafted is None else _noise_modules(model, drafted)
    partly = {
        path: training[path] and (isinstance(module, _TRAINED_IN_EVALUATION) or path in noisy)
        for path, module in model.named_modules(remove_duplicate=False)
    }
    with contextlib.suppress(CaptureError):
        noise = _draft(model, args, kwargs, partly, evaluation)
        if _difference(noise.network, evaluation.network) is None:
            evaluation = noise
    network = _with_statistics(evaluation.network, drafted, partly, model)
    return _warned(replace(evaluation, network=network), partly)


def _flags(model: nn.Module, mode: bool | None = None) -> dict[str, bool]:
    """The modules' training flags; after the model's own train() or eval(), if a mode is given."""
    flags = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    if mode is None:
        return flags
    copied = _copied(model, flags)
    # Either may be the user's own.
    copied.train() if mode else copied.eval()
    return {path: module.training for path, module in copied.named_modules(remove_duplicate=False)}


def _hooks(parameter: nn.Parameter, kind: str = "_backward_hooks") -> list[Any]:
    return list((getattr(parameter, kind, None) or {}).values())


def _only_in_training(
    error: CaptureError, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CaptureError:
    """What to say where training cannot be captured: perhaps evaluation can."""
    try:
        _draft(model, args, kwargs, _flags(model, False))
    except CaptureError:
        return error
    return CaptureError(
        f"{error}. Only a branch of training is in the way: call model.eval() before prepare, and what evaluation "
        "computes is trained, with the batch norms and dropouts of training"
    )


def _with_statistics(network: Network, trained: _Draft | None, flags: Mapping[str, bool], model: nn.Module) -> Network:
    """The network of evaluation whose batch norms train as they do in training."""
    found = [] if trained is None else [step for step in trained.network.steps if step.kind == "batch_norm"]
    statistics = {step.inputs[3]: step for step in found}
    own = {
        f"{path}.running_mean".lstrip("."): {"training": flags[path], "momentum": module.momentum}
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }

    def changed(step: Step) -> Step:
        if step.kind != "batch_norm":
            return step
        mean = step.inputs[3]
        new = _trained(statistics[mean]) if mean in statistics else own.get(str(mean), {})
        return replace(step, attributes={**step.attributes, **new})

    return replace(network, steps=tuple(changed(step) for step in network.steps))


# Whose training flag changes numbers, not what is computed.
_TRAINED_IN_EVALUATION = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
)


def _trained(step: Step) -> dict[str, Any]:
    return {key: step.attributes[key] for key in ("training", "counter", "momentum")}


def _read_by(*drafts: _Draft | None) -> set[str]:
    """Paths of the parameters and buffers that networks compute with."""
    networks = [draft.network for draft in drafts if draft is not None]
    constants = [constant for network in networks for constant in network.constants.values()]
    expressions = [step.attributes.get("expression") for network in networks for step in network.steps]
    named = {constant.name for constant in constants if constant.parameter}
    named |= {path for constant in constants for path in constant.sources}
    return named | {path for each in expressions for path in getattr(each, "sources", ())}


def _refuse_changes(trained: _Draft | None, evaluation: _Draft) -> None:
    """Refuses what forward changes if the network computes with it and it cannot be kept."""
    read = _read_by(trained, evaluation)
    remedies = {
        "evaluation": "what the device computes does not change",
        "training": "the network that is trained would not. Compute it from parameters alone, or call model.eval() "
        "before prepare to train with what it is now",
    }
    for (mode, remedy), draft in zip(remedies.items(), (evaluation, trained), strict=True):
        for path, change in () if draft is None else draft.mutated.items():
            if path in read or not change.registered:
                raise CaptureError(
                    f"the model cannot be captured: {change.place}: {mode} changes {path!r}, with which the model "
                    f"computes; {remedy}"
                )


def _with_updates(drafted: _Draft, evaluation: _Draft, network: Network, first: bool) -> _Draft:
    """The draft of training, which changes parameters and buffers as the model does."""
    read = _read_by(drafted, evaluation)
    kept = [
        (path, change.expression) for path, change in drafted.mutated.items() if path in read or not change.registered
    ]
    found = [(path, expression) for path, expression in kept if expression is not None]
    if len(found) < len(kept) or any(path in read or not each.registered for path, each in evaluation.mutated.items()):
        _refuse_changes(drafted, evaluation)
    network.input_tree.updates, network.input_tree.updates_first = found, first
    return replace(drafted, network=network)


def _settled(model: nn.Module, drafted: _Draft, evaluation: _Draft) -> Network | None:
    """The network of training with the constants of evaluation, if these are equal once training's changes are made.

    So is spectral norm: training improves its vectors, and computes with them as evaluation does.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))

    def value(constant: Constant, state: Mapping[str, Any]) -> torch.Tensor:
        if constant.parameter:
            return state[constant.name]
        return constant.data if constant.expression is None else constant.expression(*map(state.get, constant.sources))

    changes = {path: change.expression for path, change in drafted.mutated.items()}
    with torch.no_grad():
        after = dict(tensors)
        for path, expression in changes.items():
            if expression is not None:
                after[path] = expression(*(tensors[source] for source in expression.sources))

    def same(ours: Constant, theirs: Constant) -> bool:
        with torch.no_grad():
            one, other = value(ours, tensors), value(theirs, after)
        return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-5, atol=1e-7)

    matched: dict[str, str] = {}
    if _difference(drafted.network, evaluation.network, same, matched) is not None:
        return None
    steps = [
        replace(step, inputs=tuple(matched.get(name, name) if isinstance(name, str) else name for name in step.inputs))
        for step in drafted.network.steps
    ]
    constants = {name: evaluation.network.constants[name] for name in matched.values()}
    return replace(drafted.network, steps=tuple(steps), constants=constants)


def _warned(draft: _Draft, flags: Mapping[str, bool]) -> Network:
    draft.network.input_tree.flags = flags
    left = sorted(set(draft.mutated) - {path for path, _ in draft.network.input_tree.updates})
    if left:
        warnings.warn(
            f"the model's forward changes {', '.join(left)}, which nothing in the captured network reads; there it "
            "stays as it is",
            stacklevel=3,
        )
    for sentence in draft.notes:
        warnings.warn(sentence, stacklevel=4)
    return draft.network


def _noise_modules(model: nn.Module, draft: _Draft) -> set[str]:
    """Modules that make noise and nothing else."""
    kinds: dict[str, set[str]] = {}
    for step in draft.network.steps:
        kinds.setdefault(step.place.path, set()).add(step.kind)
    leaves = {
        path for path, module in model.named_modules(remove_duplicate=False) if path and not any(module.children())
    }
    return {path for path, found in kinds.items() if found == {"dropout"} and path in leaves}


def _difference(
    training: Network,
    evaluation: Network,
    equal: Callable[[Constant, Constant], bool] | None = None,
    matched: dict[str, str] | None = None,
) -> str | None:
    """What evaluation computes otherwise than training without its noise; None where they are the same.

    Args:
        equal: decides about constants that are computed otherwise.
        matched: gets the names of training's constants and of evaluation's.
    """
    renamed: dict[Any, Any] = {}
    renamed.update(zip(training.inputs, evaluation.inputs, strict=True))
    ignored = {"training", "dropout", "counter", "momentum"}

    def significant(step: Step) -> dict[str, Any]:
        return {key: value for key, value in step.attributes.items() if key not in ignored}

    def same_operand(ours: Any, theirs: Any) -> bool:
        if not isinstance(ours, str) or not isinstance(theirs, str):
            return identical(ours, theirs) or ours == theirs
        if ours in training.values:
            return renamed.get(ours) == theirs
        first, second = training.constants[ours], evaluation.constants.get(theirs)
        if second is None:
            return False
        if matched is not None:
            matched[ours] = theirs
        alike = first.parameter == second.parameter and (
            ours == theirs
            if first.parameter
            else identical(first.expression, second.expression) and identical(first.data, second.data)
        )
        return alike if equal is None else equal(first, second)

    def without_noise(network: Network) -> tuple[list[Step], dict[str, str]]:
        source: dict[str, str] = {}
        steps = []
        for step in network.steps:
            inputs = tuple(source.get(name, name) if isinstance(name, str) else name for name in step.inputs)
            if step.kind == "dropout":
                source[step.output] = str(inputs[0])
            else:
                steps.append(replace(step, inputs=inputs))
        return steps, source

    if training.output_names != evaluation.output_names:
        return f"results {', '.join(training.output_names)} against {', '.join(evaluation.output_names)}"
    ours, our_noise = without_noise(training)
    theirs, their_noise = without_noise(evaluation)
    # In order of their operands: an export may list independent steps in another order.
    for first, second in zip(ours, theirs, strict=False):
        same = first.kind == second.kind and len(first.inputs) == len(second.inputs)
        same = same and identical(significant(first), significant(second))
        if not same or not all(same_operand(a, b) for a, b in zip(first.inputs, second.inputs, strict=True)):
            return f"{second.label} at {second.place}"
        renamed[first.output] = second.output
    if len(ours) != len(theirs):
        extra = (ours if len(ours) > len(theirs) else theirs)[min(len(ours), len(theirs))]
        return (
            f"{extra.label} at {extra.place} {'only in training' if len(ours) > len(theirs) else 'only in evaluation'}"
        )
    left = [renamed.get(our_noise.get(name, name)) for name in training.outputs]
    right = [their_noise.get(name, name) for name in evaluation.outputs]
    return None if left == right else "its results are others"


def _draft(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: Mapping[str, bool],
    known: _Draft | None = None,
) -> _Draft:
    """One export of a copy of the model with these training flags, as a network; where none is set, without noise.

    known: another draft of the model.
    """
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"{path} has no shape yet: call the model once with an example")
    copied = _copied(model, training)
    signature = inspect.signature(copied.forward)
    try:
        arguments = Tree.bind(signature, args, kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the example does not fit forward: {error}; give the model's arguments alone, without targets"
        ) from None
    leaves, spec = pytree.tree_flatten(arguments)
    positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not positions or any(leaves[index].dim() == 0 for index in positions):
        raise CaptureError(
            "the example's tensors must have a batch: their first axis; a number is no tensor of the batch"
        )
    first = leaves[positions[0]].shape[0]
    taken = {size for tensor in (*copied.parameters(), *copied.buffers()) for size in tensor.shape}
    taken |= {size for index in positions for size in leaves[index].shape}

    def given(count: int, device: torch.device | None = None) -> batch.Arguments:
        """The arguments without values, with so many examples."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor.shape[0] // first if first and tensor.shape[0] % first == 0 else 0
            if not rows:
                raise CaptureError(
                    f"the first axis of every tensor is the batch; the example has {first} and {tensor.shape[0]} there"
                )
            shape = (rows * count, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device=device or tensor.device)

        made: batch.Arguments = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
        return made

    def recorded(count: int) -> batch.Run | None:
        return batch.recorded(partial(_copied, model, training), partial(given, count))

    few = recorded(batch.FEW)
    prime = batch.stand_in(taken, few)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given_args, given_kwargs = given(prime)
    now_at(f"torch.export, in {'training' if any(training.values()) else 'evaluation'}")
    try:
        with OneByOne(prime):
            program, marked = _export(copied, given_args, given_kwargs)
    except CaptureError as error:
        if isinstance(error.__cause__, Refused):
            raise  # which knows what the matter is
        text = with_own_sizes(str(error), prime, first)
        shapes = {
            _leaf_name(key): tuple(leaf.shape)
            for key, leaf in pytree.tree_flatten_with_path(arguments)[0]
            if isinstance(leaf, torch.Tensor)
        }
        reason = text.partition(": ")[2]
        misfit = misfit_of_example(reason, shapes, partial(_takes, copied, args, kwargs))
        raise CaptureError(text if misfit is None else misfit) from error.__cause__
    converter = Converter(copied, program, prime, any(training.values()), marked)
    paths = [_words(key) for key, leaf in pytree.tree_flatten_with_path(arguments)[0] if isinstance(leaf, torch.Tensor)]
    draft = _read(converter, paths, Tree(signature, leaves, spec), args, kwargs, copied)
    # What the other draft calls has been looked at.
    same = known is not None and batch.alike(few, known.run)
    depends = "" if same else batch.dependence({batch.FEW: few, prime: recorded(prime)})
    if depends:
        raise CaptureError(f"the model cannot be captured: {depends}")
    if few is not None and few.draws:
        raise CaptureError(
            "the model cannot be captured: forward draws random numbers with Python's or NumPy's random, and the "
            "network would go on with those of one call; draw with torch (torch.rand) where noise is meant"
        )
    if few is not None and few.state:
        raise CaptureError(f"the model cannot be captured: {few.state}; the device computes the same at every call")
    counted = (
        [] if few is None else [f"forward counts in {path!r}, the captured network does not" for path in few.counted]
    )
    return replace(draft, run=few, notes=[*draft.notes, *counted])


def _copied(model: nn.Module, training: Mapping[str, bool]) -> nn.Module:
    """A copy of a model with these training flags."""
    # The copy shares the tensors; a forward that keeps things (caches) keeps them there.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = value
    copied = copy.deepcopy(model, memo)
    for path, module in copied.named_modules(remove_duplicate=False):
        module.training = training[path]
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            module.momentum = CUMULATIVE
    return copied


def _takes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changed: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> bool:
    """Whether a model runs on the example with other shapes; nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _silent():

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(changed(tuple(tensor.shape)), dtype=tensor.dtype, device=tensor.device)

        given_args, given_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
        try:
            model(*given_args, **given_kwargs)
        except Exception as error:  # noqa: BLE001 - the user's model may raise anything
            # What depends on values is another matter than shapes.
            return "DataDependent" in type(error).__name__
    return True


def _leaf_name(path: Sequence[Any]) -> str:
    """A name for a place in a tree: keys, attributes and positions."""
    return "_".join(_words(path))


def _words(path: Sequence[Any]) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]


def _result_name(path: Sequence[Any]) -> str:
    name = _leaf_name(path)
    return f"output_{name}".rstrip("_") if not name or name[0].isdigit() else name


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Marked]:
    try:
        with _silent(), marking() as marked:
            return torch.export.export(model, args, kwargs or None, strict=False), marked
    except Exception as error:
        raise CaptureError(_explained(model, error)) from error


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """PyTorch prints the graph and its advice on its own exceptions; ours says what matters."""
    logger, silence = logging.getLogger("torch"), io.StringIO()
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


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
    text = str(error).strip().split("\n")[0]
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


def _read(
    c: Converter,
    argument_paths: Sequence[Sequence[str]],
    tree: Tree,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: nn.Module,
) -> _Draft:
    program = c.program_of_export
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    c.counters = _counters(program, placeholders, specs)
    given, user = [], []
    for node in placeholders:
        spec, value = specs[node.name], node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            given.append(value)
            continue
        meta = Meta(tuple(int(size) for size in value.shape), value.dtype)
        kind, source = spec.kind.name, ""
        if kind == "USER_INPUT":
            dtype = "float32" if value.dtype.is_floating_point else str(value.dtype).removeprefix("torch.")
            c.values[node.name] = Value(node.name, c.example(meta.shape), 0, dtype)
            content = Content(meta, node.name)
            user.append(node.name)
        elif kind in ("PARAMETER", "BUFFER") and spec.target in c.paths:
            content = Content(meta, node=Node("source", (c.paths[spec.target],)))
            source = c.paths[spec.target]
        else:
            held = program.constants.get(spec.target)
            held = program.state_dict.get(spec.target) if held is None else held
            if isinstance(held, FakeTensor):
                raise CaptureError(
                    "the model cannot be captured: it makes a tensor of its input in a way that cannot be followed, "
                    "such as torch.autograd.grad, numpy() or tolist() in forward"
                )
            content = Content(meta, node=Node("data", (held.detach(),)))
            # One that forward makes itself is no tensor of the model's.
            source = "" if spec.target.startswith("lifted_tensor") else spec.target
        storage = Storage(content)
        if source:
            c.own[source] = storage
        c.storages[value.untyped_storage()._cdata] = storage
        given.append(View(storage, (), content))
    try:
        flat = c.run(program.graph, program.graph_module, given)
    except CaptureError:
        raise
    except Exception as error:
        reason = str(error).split("\n")[0]
        what = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
        raise CaptureError(f"the model cannot be captured: {c.place()}: {c.label()}: {what}{reason}") from error
    spec = program.call_spec.out_spec
    paths = [key for key, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(flat))), spec))[0]]
    outputs: list[str] = []
    output_names: list[str] = []
    results: list[tuple[bool, Any]] = []
    for path, leaf in zip(paths, flat, strict=True):
        if not isinstance(leaf, View):
            results.append((False, leaf))
            continue
        content = c.read(leaf)
        if content.is_value:
            results.append((True, len(outputs)))
            outputs.append(content.name)
            output_names.append(_result_name(path))
        else:
            if c.sources(content):
                raise CaptureError(f"result {_result_name(path)} is computed from parameters alone, not from the input")
            results.append((False, c.data(content)))
    if not outputs:
        raise CaptureError("no result of the model depends on its input")
    order = _argument_order(tree, args, kwargs, model, user)
    tree.results = (spec, results)
    network = Network(
        inputs=tuple(order),
        outputs=tuple(outputs),
        values=c.values,
        constants=c.constants,
        steps=tuple(c.steps),
        input_names=("input",) if len(argument_paths) == 1 else tuple(map("_".join, argument_paths)),
        output_names=tuple(output_names),
        argument_names=short_names(argument_paths),
        input_tree=tree,
        output_tree=tree,
    )
    changes = {path: Change(place, _update(c, path), path in c.paths.values()) for path, place in c.mutated.items()}
    changes = {path: change for path, change in changes.items() if path not in c.counters}
    return _Draft(_finished(c, network), changes, c.marked.notes)


def _update(c: Converter, path: str) -> Expression | None:
    """What a parameter or buffer holds in the end, where that follows from such alone."""
    content = c.own[path].content
    if content.node is None or content.noise or path not in c.paths.values():
        return None
    expression = Expression(content.node, c.prime)
    return None if expression.follows_the_batch else expression


def _argument_order(
    tree: Tree, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module, user: Sequence[str]
) -> list[str]:
    """The export's inputs in the order of the model's arguments."""
    exported = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ordered = [
        leaf for leaf in pytree.tree_leaves(tree.bind(tree.signature, args, kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    remaining = list(zip(exported, user, strict=True))
    names = []
    for leaf in ordered:
        index = next(i for i, (tensor, _) in enumerate(remaining) if tensor is leaf)
        names.append(remaining.pop(index)[1])
    return names


def _counters(program: Any, placeholders: Sequence[Any], specs: Mapping[str, Any]) -> set[str]:
    """Buffers that count batches: their one use is that one is added to them."""
    found = set()
    for node in placeholders:
        spec = specs[node.name]
        if spec.kind.name == "BUFFER" and spec.target.endswith("num_batches_tracked"):
            found.add(spec.target)
    return found


def _finished(c: Converter, network: Network) -> Network:
    """Without what nobody reads, and with the modules that are one step."""
    read = set(network.outputs)
    kept = []
    for step in reversed(network.steps):
        if step.output in read:
            kept.append(step)
            read.update(name for name in step.inputs if isinstance(name, str))
    kept.reverse()
    counts: dict[str, int] = {}
    for step in kept:
        for call in c.calls[step.output]:
            counts[call] = counts.get(call, 0) + 1
    steps = []
    for step in kept:
        calls = c.calls[step.output]
        if calls and counts[calls[-1]] == 1 and step.place.path:
            module = c.modules.get(step.place.path)
            name = type(module).__name__.removeprefix("Parametrized") if module is not None else step.label
            step = replace(step, module=step.place.path, label=name)
        steps.append(step)
    values = {name: value for name, value in network.values.items() if name in read or name in network.inputs}
    constants = {name: constant for name, constant in network.constants.items() if name in read}
    return replace(network, steps=tuple(steps), values=values, constants=constants)
