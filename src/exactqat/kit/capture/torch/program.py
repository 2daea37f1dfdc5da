# SPDX-License-Identifier: Apache-2.0
"""An exported program as a network: its inputs, its results, and the steps that somebody reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...planning.files import short_names
from ...planning.network import Network, Step, Value
from ..core.naming import input_names, result_name
from ..core.refusals import CaptureError, Refused, first_line
from .contents import Content, Storage, View
from .export import NOT_FOLLOWED
from .expression import Node
from .reader import Reader
from .tree import Tree, argument_order


def network_of(
    c: Reader, argument_paths: Sequence[Sequence[str]], tree: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Network:
    """Reads all of a program.

    Args:
        argument_paths: ways to the tensors among the arguments.
        tree: of the arguments; gets the results.
        args, kwargs: the example.

    Raises:
        CaptureError: a part of it cannot be read, or no result follows from the input.
    """
    program = c.program_of_export
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    given = [_placeholder(c, node, specs[node.name]) for node in placeholders]
    user = [node.name for node in placeholders if node.name in c.values]
    try:
        flat = c.run(program.graph, program.graph_module, given)
    except CaptureError:
        raise
    except Exception as error:
        reason = first_line(error)
        what = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
        raise CaptureError(f"the model cannot be captured: {c.place()}: {c.label()}: {what}{reason}") from error
    outputs = _results(c, flat, tree)
    network = Network(
        inputs=tuple(argument_order(tree, args, kwargs, user)),
        outputs=tuple(name for name, _ in outputs),
        values=c.values,
        constants=c.constants,
        steps=tuple(c.steps),
        input_names=input_names(argument_paths),
        output_names=tuple(word for _, word in outputs),
        argument_names=short_names(argument_paths),
        input_tree=tree,
        output_tree=tree,
    )
    return _finished(c, network)


def _placeholder(c: Reader, node: Any, spec: Any) -> Any:
    """What a placeholder of the program is."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    meta, kind, source = c.meta_of_tensor(value), spec.kind.name, ""
    if kind == "USER_INPUT":
        dtype = "float32" if value.dtype.is_floating_point else str(value.dtype).removeprefix("torch.")
        c.values[node.name] = Value(node.name, c.for_one(meta.shape), 0, dtype)
        content = Content(meta, node.name)
        if dtype != "float32":
            c.integers.add(node.name)
    elif kind in ("PARAMETER", "BUFFER") and spec.target in c.paths:
        source = c.paths[spec.target]
        content = Content(meta, node=Node("source", (source,)))
        if kind == "BUFFER" and spec.target.endswith("num_batches_tracked"):
            c.counters.add(spec.target)
    else:
        program = c.program_of_export
        held = program.constants.get(spec.target)
        held = program.state_dict.get(spec.target) if held is None else held
        if isinstance(held, FakeTensor):
            raise CaptureError(f"the model cannot be captured: {NOT_FOLLOWED}")
        content = Content(meta, node=Node("data", (held.detach(),)))
        # One that forward makes itself is not a tensor of the model's.
        source = "" if spec.target.startswith("lifted_tensor") else spec.target
    storage = Storage(content)
    if source:
        c.own[source] = storage
    c.storages[value.untyped_storage()._cdata] = storage
    return View(storage, (), content)


def _results(c: Reader, flat: Sequence[Any], tree: Tree) -> list[tuple[str, str]]:
    """The values that are results, and what these are called; gives the tree all results."""
    spec = c.program_of_export.call_spec.out_spec
    paths = [key for key, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(flat))), spec))[0]]
    outputs: list[tuple[str, str]] = []
    results: list[tuple[bool, Any]] = []
    for path, leaf in zip(paths, flat, strict=True):
        if not isinstance(leaf, View):
            results.append((False, leaf))
            continue
        content = c.read(leaf)
        if content.is_value:
            results.append((True, len(outputs)))
            outputs.append((content.name, result_name(path)))
        else:
            if c.sources(content):
                raise CaptureError(f"result {result_name(path)} is computed from parameters alone, not from the input")
            results.append((False, c.data(content)))
    if not outputs:
        raise CaptureError("no result of the model depends on its input")
    tree.results = (spec, results)
    return outputs


def _computes_with_own_weight(c: Reader, step: Step) -> bool:
    """Whether a step is what its module is for, though there may be others, such as a pad before a convolution."""
    weight = f"{step.place.path}.weight"
    return weight in c.parameters and weight in step.inputs


def _finished(c: Reader, network: Network) -> Network:
    """Without what nobody reads, and with the modules that are one step."""
    read = set(network.outputs)
    kept = []
    for step in reversed(network.steps):
        if step.output in read:
            kept.append(step)
            read.update(name for name in step.inputs if isinstance(name, str))
    kept.reverse()
    counts = Counter(call for step in kept for call in c.calls[step.output])
    weighted = Counter(c.calls[step.output][-1] for step in kept if _computes_with_own_weight(c, step))
    steps = []
    for step in kept:
        calls = c.calls[step.output]
        own = _computes_with_own_weight(c, step) and weighted[calls[-1]] == 1
        if calls and (own or counts[calls[-1]] == 1) and step.place.path:
            module = c.modules.get(step.place.path)
            name = type(module).__name__.removeprefix("Parametrized") if module is not None else step.label
            step = replace(step, module=step.place.path, label=name)
        steps.append(step)
    values = {name: value for name, value in network.values.items() if name in read or name in network.inputs}
    constants = {name: constant for name, constant in network.constants.items() if name in read}
    return replace(network, steps=tuple(steps), values=values, constants=constants)
