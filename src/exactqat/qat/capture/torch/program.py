# SPDX-License-Identifier: Apache-2.0
"""An exported program as a network: walks its graph, sees what is written in place through every view, and keeps the
steps that somebody reads."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputSpec
from torch.utils import _pytree as pytree

from ....kit.planning.callers import users_line
from ....kit.planning.files import short_names
from ....kit.planning.network import Network, Place, Step
from ..core.naming import input_names, result_name
from ..core.refusals import CaptureError, Refused, first_line
from .converter import Converter
from .export import NOT_FOLLOWED
from .expression import Node, leaves, tree_map
from .items import Fixed, Item, Meta, Storage, Traced, View, ViewStep
from .movement import placed
from .operators import (
    DROPOUTS,
    IDENTITIES,
    PERMUTES,
    RESHAPES,
    Bound,
    Operator,
    arguments,
    base_name,
    call_form,
    is_random,
    permutation,
    slice_bounds,
    without_out,
)
from .sizes import Sizes
from .tree import Tree

aten = torch.ops.aten


class Program(Converter):
    """Reads a program node by node.

    Attributes:
        mutated: the parameters, buffers and other tensors of the model's own that forward writes into, and where first.
    """

    def __init__(self, model: nn.Module, exported: torch.export.ExportedProgram, sizes: Sizes) -> None:
        super().__init__(model)
        self.exported, self.sizes = exported, sizes
        self.mutated: dict[str, Place] = {}
        self._environment: dict[fx.Node, Any] = {}
        self._storages: dict[int, Storage] = {}
        # Those of the model's own tensors, by path.
        self._own: dict[str, Storage] = {}

    def network(self, argument_paths: Sequence[Sequence[str]], tree: Tree, training: bool) -> Network:
        """Reads all of it.

        Args:
            argument_paths: ways to the tensors among the arguments.
            tree: of the arguments; gets the results.
            training: whether it is a program of training.

        Raises:
            CaptureError: a part of it cannot be read, or no result follows from the input.
        """
        graph = self.exported.graph
        specs = {spec.arg.name: spec for spec in self.exported.graph_signature.input_specs}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        tensors = [self._placeholder(node, specs[node.name]) for node in placeholders]
        inputs = tuple(self.values)
        try:
            results = self._walk(graph, self.exported.graph_module, tensors)
        except CaptureError:
            raise
        except Exception as error:
            what = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
            raise CaptureError(
                f"the model cannot be captured: {self.place()}: {self.word_of()}: {what}{first_line(error)}"
            ) from error
        outputs = self._results(results, tree)
        network = Network(
            inputs=inputs,
            outputs=tuple(name for name, _ in outputs),
            values=self.values,
            constants=self.constants,
            steps=tuple(self.steps),
            input_names=input_names(argument_paths),
            output_names=tuple(word for _, word in outputs),
            argument_names=short_names(argument_paths),
            input_tree=tree,
            output_tree=tree,
        )
        network = self._finished(network)
        self._refuse_changes(network, training)
        return network

    # --- what the graph begins and ends with --------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node, spec: InputSpec) -> Any:
        value, kind, target, own = node.meta.get("val"), spec.kind.name, spec.target or "", ""
        if not isinstance(value, torch.Tensor):
            return value
        meta = self._meta_of(value)
        if kind == "USER_INPUT":
            item: Item = self.input(node.name, *meta)
        elif kind in ("PARAMETER", "BUFFER") and target in self.paths:
            own = self.paths[target]
            item = Fixed(Node("source", (own,)), *meta)
            if kind == "BUFFER" and target.endswith("num_batches_tracked"):
                self.counters.add(target)
        else:
            tensor = self.exported.constants.get(target)
            tensor = self.exported.state_dict.get(target) if tensor is None else tensor
            if isinstance(tensor, FakeTensor):
                raise CaptureError(f"the model cannot be captured: {NOT_FOLLOWED}")
            item = Fixed(Node("data", (tensor.detach(),)), *meta)
            # One that forward makes itself is not a tensor of the model's.
            own = "" if target.startswith("lifted_tensor") else target
        storage = Storage(item)
        if own:
            self._own[own] = storage
        self._storages[value.untyped_storage()._cdata] = storage
        return View(storage, (), item)

    def _results(self, flat: Sequence[Any], tree: Tree) -> list[tuple[str, str]]:
        """The values that are results, and what these are called; gives the tree all results."""
        spec = self.exported.call_spec.out_spec
        places = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(flat))), spec))[0]
        outputs: list[tuple[str, str]] = []
        results: list[tuple[bool, Any]] = []
        for (path, _), leaf in zip(places, flat, strict=True):
            item = self._read(leaf) if isinstance(leaf, View) else leaf
            if isinstance(item, Traced):
                results.append((True, len(outputs)))
                outputs.append((item.name, result_name(path)))
            elif isinstance(item, Fixed) and self.sources(item):
                raise CaptureError(f"result {result_name(path)} is computed from parameters alone, not from the input")
            else:
                results.append((False, self.data(item) if isinstance(item, Fixed) else item))
        if not outputs:
            raise CaptureError("no result of the model depends on its input")
        tree.results = (spec, results)
        return outputs

    def _finished(self, network: Network) -> Network:
        """Without what nobody reads, and with the modules that are one step."""
        read, kept = set(network.outputs), list[Step]()
        for step in reversed(network.steps):
            if step.output in read:
                kept.insert(0, step)
                read.update(name for name in step.inputs if isinstance(name, str))
        counts = Counter(call for step in kept for call in self.calls[step.output])
        # What a module is for, though there may be other steps, such as a pad before a convolution.
        own_weight = {s.output for s in kept if f"{s.place.path}.weight" in self.parameters.intersection(s.inputs)}
        weighted = Counter(self.calls[name][-1] for name in own_weight)
        for at, step in enumerate(kept):
            calls = self.calls[step.output]
            own = step.output in own_weight and weighted[calls[-1]] == 1
            if calls and (own or counts[calls[-1]] == 1) and step.place.path:
                module = self.modules.get(step.place.path)
                name = type(module).__name__.removeprefix("Parametrized") if module is not None else step.label
                kept[at] = replace(step, module=step.place.path, label=name)
        values = {name: value for name, value in network.values.items() if name in read or name in network.inputs}
        constants = {name: constant for name, constant in network.constants.items() if name in read}
        return replace(network, steps=tuple(kept), values=values, constants=constants)

    def _refuse_changes(self, network: Network, training: bool) -> None:
        """Refuses what forward changes if the network computes with it; warns of the rest.

        Raises:
            CaptureError: it does.
        """
        constants = network.constants.values()
        read = {path for constant in constants for path in (constant.name, *constant.sources)}
        read |= {path for step in network.steps for path in getattr(step.attributes.get("expression"), "sources", ())}
        changed = {path: place for path, place in self.mutated.items() if path not in self.counters}
        for path, place in changed.items():
            if path in read or path not in self.paths.values():
                mode, remedy = "evaluation", "what the device computes does not change"
                if training:
                    mode = "training"
                    remedy = (
                        "call model.eval() before prepare to train with what it is now, or compute it from parameters "
                        "alone"
                    )
                raise CaptureError(
                    f"the model cannot be captured: {place}: {mode} changes {path!r}, with which the model computes; "
                    f"{remedy}"
                )
        if changed:
            warnings.warn(
                f"the model's forward changes {', '.join(sorted(changed))}, which nothing in the captured network "
                "reads; there it stays as it is",
                stacklevel=users_line(),
            )

    # --- the graph ----------------------------------------------------------------------------------------------------

    def _walk(self, graph: fx.Graph, owner: nn.Module, tensors: Sequence[Any]) -> Any:
        """Walks a graph with what its placeholders stand for; returns its outputs."""
        remaining = iter(tensors)
        for node in graph.nodes:
            self.current, outer = node, self.current
            if node.op == "placeholder":
                result = next(remaining)
            elif node.op == "get_attr":
                result = functools.reduce(getattr, node.target.split("."), owner)
            elif node.op == "output":
                self.current = outer
                return self._fetched(node.args[0])
            else:
                result = self._executed(node)
            self._environment[node] = result
        raise AssertionError("a graph without an output")

    def _fetched(self, value: object) -> Any:
        return tree_map(fx.Node, self._environment.__getitem__, value)

    def _executed(self, node: fx.Node) -> Any:
        target, value = node.target, node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and "item" not in str(target):
            number = self.sizes.of(value)
            if number is None:
                raise CaptureError(f"{self.place()}: {self.word_of()}: a size depends on the values of a tensor")
            return number
        args, kwargs = self._fetched(tuple(node.args)), self._fetched(dict(node.kwargs))
        if isinstance(target, Operator):
            return self._operator(node, target, arguments(target, args, kwargs))
        name = getattr(target, "__name__", str(target))
        if name == "getitem":
            return args[0][args[1]]
        if "wrap_with_set_grad_enabled" in str(target):
            enabled, graph, *rest = args
            results = self._walk(graph.graph, graph, rest)
            return results if enabled else tree_map(View, self._detached, results)
        if "wrap_with_autocast" in str(target):
            graph = next(value for value in args if isinstance(value, fx.GraphModule))
            return self._walk(graph.graph, graph, args[args.index(graph) + 1 :])
        if getattr(target, "__module__", "").startswith("torch._functorch"):
            # To call them would leave PyTorch in the middle of a transform.
            raise CaptureError(
                f"{self.place()}: torch.vmap and the other transforms of torch.func cannot be captured in forward: "
                "compute with the whole batch, as layers do"
            )
        if not leaves(View, (args, kwargs)) and callable(target):
            return target(*args, **kwargs)
        raise CaptureError(
            f"{self.place()}: {name} is not understood: the model must be a fixed sequence of operations"
        )

    def _detached(self, view: View) -> View:
        item = self._read(view)
        result = self.apply(aten.detach.default, {"self": item}, Meta(item.shape, item.dtype))
        return View(Storage(result), (), result)

    def _operator(self, node: fx.Node, operator: Operator, bound: Bound) -> Any:
        name = base_name(operator)
        if name.startswith(("_assert", "sym_constrain")) or node.meta.get("val", 0) is None:
            return None
        if name in ("item", "_local_scalar_dense"):
            try:
                return self.data(self._read(bound["self"])).item()
            except Refused:
                raise CaptureError(
                    f"{self.place()}: a Python number is made of a tensor that depends on the input; a network that is "
                    "deployed does the same for every input: keep it a tensor, or make it a constant"
                ) from None
        if name in DROPOUTS and not (bound["train"] and bound["p"]):
            # PyTorch gives the tensor itself; its export pretends a copy.
            return bound["input"]
        written = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        items = tree_map(View, self._read, bound)
        if written and isinstance(bound[written[0]], View):
            return self._in_place(operator, bound, items, written[0])
        result = self.apply(operator, items, self._metas_of(node))
        if isinstance(result, list):
            return [self._view_of(node, operator, bound, items, item, at) for at, item in enumerate(result)]
        return self._view_of(node, operator, bound, items, result, None)

    def _metas_of(self, node: fx.Node) -> Any:
        metas = tree_map(torch.Tensor, self._meta_of, node.meta.get("val"))
        return metas if isinstance(metas, Meta) or not isinstance(metas, tuple) else list(metas)

    def _meta_of(self, tensor: torch.Tensor) -> Meta:
        shape = tuple(map(self.sizes.of, tensor.shape))
        if None in shape:
            raise CaptureError(
                f"{self.place()}: the size of a result depends on the values of a tensor ({self.word_of()}); give the "
                "indices or counts as numbers instead, such as x[:, [0, 2, 2]]"
            )
        return Meta(shape, torch.float32 if tensor.dtype.is_floating_point else tensor.dtype)

    # --- views and writing in place -----------------------------------------------------------------------------------

    def _read(self, view: View) -> Item:
        if view.version != view.storage.version:
            item = view.storage.item
            for step in view.chain:
                item = self._look(step, item)
            view.item, view.version = item, view.storage.version
        return view.item

    def _look(self, step: ViewStep, item: Item) -> Item:
        result = self.apply(step.operator, {**step.arguments, step.source: item}, step.meta)
        return result if step.index is None else result[step.index]

    def _view_of(
        self, node: fx.Node, operator: Operator, bound: Bound, items: Bound, result: Any, at: int | None
    ) -> View:
        """A result as a view of the storage that PyTorch says it shares, or of a new one."""
        fake = node.meta["val"] if at is None else node.meta["val"][at]
        if not isinstance(fake, torch.Tensor):
            return View(Storage(result), (), result)
        identity = fake.untyped_storage()._cdata
        storage = self._storages.get(identity)
        for key, source in bound.items():
            if storage is not None and isinstance(source, View) and source.storage is storage:
                others = {name: value for name, value in items.items() if name != key}
                step = ViewStep(operator, key, others, self._metas_of(node), at)
                return View(storage, (*source.chain, step), result)
        memory = Storage(result)
        self._storages.setdefault(identity, memory)
        return View(memory, (), result)

    def _in_place(self, operator: Operator, bound: Bound, items: Bound, written: str) -> View:
        """Gives the storage that is written into what it has once the view was replaced."""
        view, name, before = bound[written], base_name(operator), items[written]
        if name in ("requires_grad_", "set_"):
            return view
        path = next((path for path, storage in self._own.items() if storage is view.storage), None)
        if path is not None and name != "detach_":
            self.mutated.setdefault(path, self.place())
        item = self._replacing(operator, name, items, written)
        parents = [view.storage.item]
        for step in view.chain[:-1]:
            parents.append(self._look(step, parents[-1]))
        content = item if item.shape == before.shape else self.call(aten.expand.default, item, list(before.shape))
        view.item = content
        for step, parent in zip(reversed(view.chain), reversed(parents), strict=True) if view.chain else ():
            content = self._scattered(step, parent, content)
        view.storage.item = content
        view.version = view.storage.version = view.storage.version + 1
        return view

    def _replacing(self, operator: Operator, name: str, items: Bound, written: str) -> Item:
        """What an operator writes."""
        before = items[written]
        meta = Meta(before.shape, before.dtype)
        if name == "copy_":
            return items["src"]
        if name == "detach_":
            return self.call(aten.detach.default, before)
        if name in ("zero_", "fill_"):
            value = items.get("value", 0)
            tensor = isinstance(value, Traced | Fixed)
            return value if tensor else self.call(aten.full.default, list(before.shape), value, dtype=before.dtype)
        if written == "out":
            others = {key: value for key, value in items.items() if key != "out"}
            return self.apply(without_out(operator), others, meta)
        tensors = leaves((Traced, Fixed), items)
        if not any(isinstance(tensor, Traced) for tensor in tensors):
            noise = any(tensor.noise for tensor in tensors) or is_random(operator)
            return self.program(operator, items, meta, noise, in_place=True)
        packet = getattr(aten, name.rstrip("_"), None)
        if packet is not None and operator._overloadname in packet.overloads():
            functional = getattr(packet, operator._overloadname)
            args, kwargs = call_form(operator, items)
            return self.apply(functional, arguments(functional, args, kwargs), meta)
        raise CaptureError(f"{self.place()}: {self.word_of(operator)} in place is not understood")

    def _scattered(self, step: ViewStep, parent: Item, part: Item) -> Item:
        """The parent of a view once the view was replaced."""
        name, a = base_name(step.operator), SimpleNamespace(**step.arguments)
        rank = len(parent.shape)
        if name in RESHAPES:
            return self.reshape(part, parent.shape)
        if name in IDENTITIES or name == "detach":
            return part
        if name in PERMUTES:
            axes = permutation(step.operator, step.arguments, rank)
            return self.permute(part, [axes.index(axis) for axis in range(rank)])
        axis = int(getattr(a, "dim", 0) or 0) % max(rank, 1)
        size, stride = parent.shape[axis] if rank else 1, 1
        if name == "slice":
            start, stop, stride = slice_bounds(a.start, a.end, a.step, size)
        elif name == "narrow":
            start = a.start % size if size else 0
            stop = start + a.length
        elif name in ("select", "unbind"):
            start = int((a.index if name == "select" else step.index) or 0) % size
            stop = start + 1
            part = self.call(aten.unsqueeze.default, part, axis)
        elif name in ("split", "chunk", "split_with_sizes"):
            start = sum(meta.shape[axis] for meta in step.meta[: step.index])
            stop = start + step.meta[step.index or 0].shape[axis]
        else:
            raise CaptureError(
                f"{self.place()}: writing in place through {self.word_of(step.operator)} is not understood"
            )
        if stride != 1:
            return placed(self, parent, axis, list(range(start, stop, stride)), part)
        if (start, stop) == (0, size):
            return part
        pieces = [(0, start, None), (start, stop, part), (stop, size, None)]
        kept = [
            self.call(aten.slice.Tensor, parent, axis, first, last, 1) if piece is None else piece
            for first, last, piece in pieces
            if first != last
        ]
        return self.call(aten.cat.default, kept, axis) if len(kept) > 1 else part
