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
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...display import listed
from ...planning.callers import users_line
from ...planning.network import Constant, Network, Step
from ..core.comparison import first_difference
from ..core.refusals import CaptureError, Refused
from .draft import Draft, copied_with, draft_of
from .expression import Expression, identical
from .gradients import refuse_read_tensors


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
        by_train, training = training, {path: flag and training[path] for path, flag in _flags(model).items()}
        _warn_of_evaluating(model, by_train, training)
    left = next((path for path, flag in evaluating.items() if flag), None)
    if left is not None:
        raise CaptureError(
            f"{left or 'the model'!r} stays in training when eval() is called; what the device computes is evaluation"
        )
    drafted: Draft | None = None
    try:
        drafted = draft_of(model, args, kwargs, training)
    except CaptureError as error:
        if wanted:
            raise _only_in_training(error, model, args, kwargs) from error
    try:
        evaluation = draft_of(model, args, kwargs, evaluating, drafted)
    except CaptureError as error:
        if not wanted or drafted is None:
            raise
        warnings.warn(
            f"the network is that of training: in evaluation it cannot be captured: {error}", stacklevel=users_line()
        )
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
            stacklevel=users_line(),
        )
    # The results of evaluation, with the noise of training as far as it changes nothing else.
    noisy = set() if drafted is None else _noise_modules(model, drafted)
    partly = {
        path: training[path] and (isinstance(module, _TRAINED_IN_EVALUATION) or path in noisy)
        for path, module in model.named_modules(remove_duplicate=False)
    }
    with contextlib.suppress(CaptureError):
        noise = draft_of(model, args, kwargs, partly, evaluation)
        if _difference(noise.network, evaluation.network) is None:
            evaluation = noise
    network = _with_statistics(evaluation.network, drafted, partly, model)
    return _warned(replace(evaluation, network=network), partly)


def _flags(model: nn.Module, mode: bool | None = None) -> dict[str, bool]:
    """The modules' training flags; after the model's own train() or eval(), if a mode is given."""
    flags = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    if mode is None:
        return flags
    copied = copied_with(model, flags)
    # Either may be the user's own.
    copied.train() if mode else copied.eval()
    return {path: module.training for path, module in copied.named_modules(remove_duplicate=False)}


def _warn_of_evaluating(model: nn.Module, by_train: Mapping[str, bool], training: Mapping[str, bool]) -> None:
    """Names what is in evaluation in a model that trains, where its `train` would change that."""
    held = [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if by_train[path] and not training[path] and isinstance(module, _TRAINED_IN_EVALUATION)
    ]
    if held:
        one = len(held) == 1
        warnings.warn(
            f"{listed(held)} {'is' if one else 'are'} in evaluation while the model trains, and "
            f"{'stays' if one else 'stay'} so in the prepared model, whose train() keeps what you set by hand; the "
            "model's own train() would switch training on: call model.train() before prepare if that is meant",
            stacklevel=users_line(),
        )


def _hooks(parameter: nn.Parameter, kind: str = "_backward_hooks") -> list[Any]:
    return list((getattr(parameter, kind, None) or {}).values())


def _only_in_training(
    error: CaptureError, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CaptureError:
    """What to say where training cannot be captured: perhaps evaluation can."""
    try:
        draft_of(model, args, kwargs, _flags(model, False))
    except CaptureError:
        return error
    return CaptureError(
        f"{error}. Only a branch of training is in the way: call model.eval() before prepare, and what evaluation "
        "computes is trained, with the batch norms and dropouts of training"
    )


def _with_statistics(network: Network, trained: Draft | None, flags: Mapping[str, bool], model: nn.Module) -> Network:
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


def _read_by(*drafts: Draft | None) -> set[str]:
    """Paths of the parameters and buffers that networks compute with."""
    networks = [draft.network for draft in drafts if draft is not None]
    constants = [constant for network in networks for constant in network.constants.values()]
    expressions = [step.attributes.get("expression") for network in networks for step in network.steps]
    named = {constant.name for constant in constants if constant.parameter}
    named |= {path for constant in constants for path in constant.sources}
    return named | {path for each in expressions for path in getattr(each, "sources", ())}


def _refuse_changes(trained: Draft | None, evaluation: Draft) -> None:
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


def _with_updates(drafted: Draft, evaluation: Draft, network: Network, first: bool) -> Draft:
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


def _settled(model: nn.Module, drafted: Draft, evaluation: Draft) -> Network | None:
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


def _warned(draft: Draft, flags: Mapping[str, bool]) -> Network:
    draft.network.input_tree.flags = flags
    left = sorted(set(draft.mutated) - {path for path, _ in draft.network.input_tree.updates})
    if left:
        warnings.warn(
            f"the model's forward changes {', '.join(left)}, which nothing in the captured network reads; there it "
            "stays as it is",
            stacklevel=users_line(),
        )
    for sentence in draft.notes:
        warnings.warn(sentence, stacklevel=users_line())
    return draft.network


def _noise_modules(model: nn.Module, draft: Draft) -> set[str]:
    """Modules that make noise and nothing else."""
    kinds: dict[str, set[str]] = {}
    for step in draft.network.steps:
        kinds.setdefault(step.place.path, set()).add(step.kind)
    leaves = {
        path for path, module in model.named_modules(remove_duplicate=False) if path and not any(module.children())
    }
    return {path for path, found in kinds.items() if found == {"dropout"} and path in leaves}


# What training may say otherwise.
_IGNORED = ("training", "dropout", "counter", "momentum")


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

    def same(ours: Any, theirs: Any) -> bool:
        return identical(ours, theirs) or (not isinstance(ours, Expression) and bool(ours == theirs))

    def same_constant(ours: Constant, theirs: Constant) -> bool:
        if matched is not None:
            matched[ours.name] = theirs.name
        if equal is not None:
            return equal(ours, theirs)
        if ours.parameter or theirs.parameter:
            return ours.parameter == theirs.parameter and ours.name == theirs.name
        return identical(ours.expression, theirs.expression) and identical(ours.data, theirs.data)

    if training.output_names != evaluation.output_names:
        return f"results {', '.join(training.output_names)} against {', '.join(evaluation.output_names)}"
    found = first_difference(training, evaluation, same, same_constant, _IGNORED, dropout=False)
    if found is None:
        return None
    step = found.other or found.one
    if step is None:
        return "its results are others"
    where = f"{step.label} at {step.place}"
    return where if found.one and found.other else f"{where} only in {'evaluation' if found.other else 'training'}"
