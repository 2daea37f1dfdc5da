# SPDX-License-Identifier: Apache-2.0
"""A network of one export of a model, with these training flags."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from ...planning.files import short_names
from ...planning.inputs import misfit_of_example, with_own_sizes
from ...planning.network import Network, Place, Value
from ..core.naming import input_names, result_name, words_of
from ..core.progress import now_at
from ..core.refusals import CaptureError, Refused, first_line
from ..core.watched import Watch

# Their handlers enter themselves into the converter's table.
from . import batch, elementwise, fourier, layers, movement, reduction, sequence  # noqa: F401
from .caches import Caches
from .contents import Content, Meta, Storage, View
from .converter import CUMULATIVE, Converter
from .export import exported, takes
from .expression import Expression, Node
from .finite import Finite
from .one_by_one import OneByOne
from .tree import Tree, argument_order, leaf_name


@dataclass
class Change:
    """What forward makes of a parameter or a buffer.

    Attributes:
        place: where it writes.
        expression: the new values from those of before; None where they depend on the input, or are random.
        registered: whether it is a parameter or a buffer; else a tensor that is an attribute; nobody says who
            reads it.
    """

    place: Place
    expression: Expression | None
    registered: bool = True


@dataclass
class Draft:
    """A network under construction, of one export."""

    network: Network
    mutated: Mapping[str, Change]
    notes: Sequence[str] = ()
    run: batch.Run | None = None


def read(
    c: Converter,
    argument_paths: Sequence[Sequence[str]],
    tree: Tree,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: nn.Module,
) -> Draft:
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
            c.values[node.name] = Value(node.name, c.for_one(meta.shape), 0, dtype)
            content = Content(meta, node.name)
            if dtype != "float32":
                c.integers.add(node.name)
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
                    "such as torch.vmap, torch.autograd.grad, numpy() or tolist() in forward"
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
        reason = first_line(error)
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
            output_names.append(result_name(path))
        else:
            if c.sources(content):
                raise CaptureError(f"result {result_name(path)} is computed from parameters alone, not from the input")
            results.append((False, c.data(content)))
    if not outputs:
        raise CaptureError("no result of the model depends on its input")
    order = argument_order(tree, args, kwargs, model, user)
    tree.results = (spec, results)
    network = Network(
        inputs=tuple(order),
        outputs=tuple(outputs),
        values=c.values,
        constants=c.constants,
        steps=tuple(c.steps),
        input_names=input_names(argument_paths),
        output_names=tuple(output_names),
        argument_names=short_names(argument_paths),
        input_tree=tree,
        output_tree=tree,
    )
    changes = {path: Change(place, _update(c, path), path in c.paths.values()) for path, place in c.mutated.items()}
    changes = {path: change for path, change in changes.items() if path not in c.counters}
    return Draft(_finished(c, network), changes, c.marked.notes)


def _update(c: Converter, path: str) -> Expression | None:
    """What a parameter or buffer holds in the end, where that follows from such alone."""
    content = c.own[path].content
    if content.node is None or content.noise or path not in c.paths.values():
        return None
    expression = Expression(content.node, c.prime)
    return None if expression.follows_the_batch else expression


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


def draft_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: Mapping[str, bool],
    known: Draft | None = None,
) -> Draft:
    """One export of a copy of the model with these training flags, as a network; where none is set, without noise.

    known: another draft of the model.
    """
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"{path} has no shape yet: call the model once with an example")
    copied = copied_with(model, training)
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

    watch, caches = Watch(taken), Caches()

    def recorded(count: int, watching: bool = False) -> batch.Run | None:
        make, watched = partial(copied_with, model, training), (watch, count) if watching else None
        try:
            return batch.recorded(make, partial(given, count), watched)
        finally:
            caches.forget_tensors_without_values()

    few = recorded(batch.FEW)
    prime = batch.stand_in(taken, few)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given_args, given_kwargs = given(prime)
    if along := batch.along_the_batch(few, partial(recorded, batch.FEW + 1)):
        raise CaptureError(f"the model cannot be captured: {along}")
    now_at(f"torch.export, in {'training' if any(training.values()) else 'evaluation'}")
    try:
        with OneByOne(prime), Finite():
            program, marked = exported(copied, given_args, given_kwargs)
    except CaptureError as error:
        if isinstance(error.__cause__, Refused):
            raise  # which knows what the matter is
        text = with_own_sizes(str(error), prime, first)
        shapes = {
            leaf_name(key): tuple(leaf.shape)
            for key, leaf in pytree.tree_flatten_with_path(arguments)[0]
            if isinstance(leaf, torch.Tensor)
        }
        reason = text.partition(": ")[2]
        misfit = misfit_of_example(reason, shapes, partial(takes, copied, args, kwargs))
        raise CaptureError(text if misfit is None else misfit) from error.__cause__
    finally:
        caches.forget_tensors_without_values()
    converter = Converter(copied, program, prime, any(training.values()), marked)
    paths = [
        words_of(key) for key, leaf in pytree.tree_flatten_with_path(arguments)[0] if isinstance(leaf, torch.Tensor)
    ]
    draft = read(converter, paths, Tree(signature, leaves, spec), args, kwargs, copied)
    runs = {batch.FEW: few, prime: recorded(prime, watching=True)}
    depends = batch.dependence(runs)
    # What the other draft calls has been looked at.
    if not depends and not (known is not None and batch.alike(few, known.run)):
        # What only holds for multiples of a number shows where the batch is one.
        depends = batch.dependence({**runs, batch.MULTIPLE: recorded(batch.MULTIPLE)})
    for asked in watch.to_try(runs):
        # Where the model raises an error for so many examples, it computes nothing else.
        for watching in (True, False) if watch.strict else (True,):
            depends = depends or batch.dependence({**runs, asked.examples: recorded(asked.examples, watching)})
    if depends:
        if few is not None and not batch.alike(few, recorded(batch.FEW)):
            depends = f"{depends.partition(': ')[0]}: {batch.EACH_TIME}"
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


def copied_with(model: nn.Module, training: Mapping[str, bool]) -> nn.Module:
    """A copy of a model with these training flags."""
    # The copy shares the tensors; a forward that keeps things (caches) keeps them there.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = value
    shared = dict(memo)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"the model cannot be copied, so as to leave it as it is: {_holder(model, shared)}{type(error).__name__}: "
            f"{error}; keep such a thing outside of the model, or give its class a __deepcopy__"
        ) from error
    for path, module in copied.named_modules(remove_duplicate=False):
        module.training = training[path]
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            module.momentum = CUMULATIVE
    return copied


def _holder(model: nn.Module, shared: Mapping[int, Any]) -> str:
    """The attribute that cannot be copied, as the beginning of a sentence; empty if it is none of Python's own."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, dict(shared))
            except Exception:  # noqa: BLE001 - whatever the value raises
                return f"{'.'.join(filter(None, (path, name)))}, of {type(value).__name__}: "
    return ""
