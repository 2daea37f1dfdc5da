# SPDX-License-Identifier: Apache-2.0
"""Reads an exported program node by node: contents, views and steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ..core.builder import entering
from ..core.progress import now_at
from ..core.refusals import MIXES, SIZE_OF_BATCH, CaptureError, Refused
from .contents import Content, Meta, Storage, View, ViewStep
from .expression import InTraining, Node, leaves, tree_map
from .schema import (
    DROPOUTS,
    FORM_OF_OTHER,
    IDENTITIES,
    PERMUTES,
    RESHAPES,
    SHAPE_ONLY,
    arguments,
    base_name,
    call_form,
    is_random,
    permutation,
    slice_bounds,
    without_out,
)
from .sizes import FOLLOWS, FollowsTheBatch
from .steps import StepBuilder

aten = torch.ops.aten


# A momentum that no user gives: it means None, whose export would need the counter's value.
CUMULATIVE = -0.123456789

HANDLERS: dict[str, Callable[..., Any]] = {}
handles = entering(HANDLERS)


class Reader(StepBuilder):
    """Reads an exported program node by node."""

    # --- one operator -------------------------------------------------------------------------------------------------

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies an operator to tensors and numbers as a handler has them; shapes follow from PyTorch."""
        bound = arguments(operator, args, kwargs)
        blank = tree_map(Content, lambda t: torch.empty(t.shape, dtype=t.meta.dtype, device="meta"), dict(bound))
        positional, keywords = call_form(operator, blank)
        if "device" in keywords:
            keywords["device"] = torch.device("meta")
        result = operator(*positional, **keywords)
        meta = tree_map(torch.Tensor, lambda t: Meta(tuple(t.shape), t.dtype), result)
        return self.apply(
            operator, bound, list(meta) if isinstance(meta, tuple) and not isinstance(result, torch.Tensor) else meta
        )

    def apply(self, operator: Any, bound: dict[str, Any], meta: Any) -> Any:
        """What an operator makes of contents: steps, or a program."""
        name, overload = base_name(operator), operator._overloadname
        shape_only = SHAPE_ONLY.get(name)
        if shape_only is not None and isinstance(bound.get("self"), Content) and bound["self"].is_value:
            operator, bound = shape_only(bound, meta)
        form_of_other = FORM_OF_OTHER.get(name)
        if form_of_other is not None and isinstance(bound.get("other"), Content):
            operator, bound = form_of_other(bound, meta)
            name, overload = base_name(operator), operator._overloadname
        tensors = leaves(Content, bound)
        if not any(tensor.is_value for tensor in tensors) and leaves(FollowsTheBatch, bound):
            raise CaptureError(f"{self.place()}: {self.label(operator)}: {SIZE_OF_BATCH}")
        noise = any(tensor.noise for tensor in tensors)
        if not any(tensor.is_value for tensor in tensors):
            random = is_random(operator, bound)
            probability = "p" if operator is aten.dropout.default else "dropout_p"
            if random and self.noise_is_training and bound.get(probability):
                # Of learned queries: a constant that training computes with dropout, evaluation without.
                bound, random = {**bound, probability: InTraining(bound[probability])}, False
            return self.program(operator, bound, meta, noise or random)
        outer_operator, self.operator = self.operator, self.operator or operator
        outer_applied, self.applied = self.applied, operator
        growing: tuple[dict[Any, Any], ...] = (self.values, self.constants, self.constant_of, self.calls)
        before = len(self.steps), [len(each) for each in growing]
        try:
            handler = HANDLERS.get(f"{name}.{overload}") or HANDLERS.get(name)
            if leaves(FollowsTheBatch, bound):
                raise Refused(SIZE_OF_BATCH)
            if any(each.mixed for each in leaves(Meta, meta)):
                raise Refused(MIXES)
            if noise:
                return self.noisy(operator, bound, meta)
            if handler is not None:
                return handler(self, SimpleNamespace(**bound), meta)
            return self.decompose(operator, bound, meta)
        except Refused as refused:
            if outer_operator is not None:
                raise
            del self.steps[before[0] :]
            for each, size in zip(growing, before[1], strict=True):
                while len(each) > size:
                    each.popitem()
            return self.unsupported(operator, bound, meta, str(refused))
        finally:
            self.operator, self.applied = outer_operator, outer_applied

    def decompose(self, operator: Any, bound: dict[str, Any], meta: Any) -> Any:
        """An operator without a handler, by what PyTorch says it consists of."""
        from torch._decomp import core_aten_decompositions
        from torch.fx.experimental.proxy_tensor import make_fx

        table = core_aten_decompositions()
        if operator not in table and not operator._can_decompose():
            raise Refused("")
        tensors = leaves(Content, bound)

        def function(*given: torch.Tensor) -> Any:
            replacements = iter(given)
            args, kwargs = call_form(operator, tree_map(Content, lambda _: next(replacements), bound))
            return operator(*args, **kwargs)

        blank = [torch.empty(t.shape, dtype=t.meta.dtype, device="meta") for t in tensors]
        selected = {operator: table[operator]} if operator in table else {}
        try:
            graph = make_fx(function, decomposition_table=selected, tracing_mode="real")(*blank).graph
        except Exception as error:
            raise Refused("") from error
        environment: dict[Any, Any] = {}
        remaining = iter(tensors)
        for node in graph.nodes:
            if node.op == "placeholder":
                environment[node] = next(remaining)
            elif node.op == "output":
                result = tree_map(torch.fx.Node, environment.__getitem__, node.args[0])
                return list(result) if isinstance(result, (list, tuple)) else result
            elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                if node.target is operator or node.target._schema.is_mutable:
                    raise Refused("")
                args = tree_map(torch.fx.Node, environment.__getitem__, tuple(node.args))
                kwargs = tree_map(torch.fx.Node, environment.__getitem__, dict(node.kwargs))
                environment[node] = self.call(node.target, *args, **kwargs)
            elif node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
                environment[node] = environment[node.args[0]][node.args[1]]
            else:
                raise Refused("")
        raise Refused("")

    # --- views and writes ---------------------------------------------------------------------------------------------

    def read(self, view: View) -> Content:
        if view.version != view.storage.version:
            content = view.storage.content
            for step in view.chain:
                content = self.look(step, content)
            view.content, view.version = content, view.storage.version
        return view.content

    def look(self, step: ViewStep, content: Content) -> Content:
        result = self.apply(step.operator, {**step.arguments, step.source: content}, step.meta)
        return result if step.index is None else result[step.index]

    def write(self, view: View, content: Content) -> None:
        """Gives the storage the content that it has once a view of it was replaced."""
        storage = view.storage
        parents = [storage.content]
        for step in view.chain[:-1]:
            parents.append(self.look(step, parents[-1]))
        made = content
        for step, parent in zip(reversed(view.chain), reversed(parents), strict=True) if view.chain else ():
            made = self.scatter(step, parent, made)
        storage.content, storage.version = made, storage.version + 1
        view.content, view.version = content, storage.version

    def scatter(self, step: ViewStep, parent: Content, part: Content) -> Content:
        """The parent of a view once the view was replaced."""
        name, a = base_name(step.operator), SimpleNamespace(**step.arguments)
        rank = len(parent.shape)
        if name in RESHAPES:
            return self.call(aten.reshape.default, part, list(parent.shape))
        if name in IDENTITIES or name == "detach":
            return part
        if name in PERMUTES:
            axes = permutation(name, a, rank)
            return self.call(aten.permute.default, part, [axes.index(axis) for axis in range(rank)])
        axis = int(getattr(a, "dim", 0) or 0) % max(rank, 1)
        size = parent.shape[axis] if rank else 1
        if name == "slice":
            start, stop, stride = slice_bounds(a.start, a.end, a.step, size)
        elif name == "narrow":
            start = a.start % size if size else 0
            stop, stride = start + a.length, 1
        elif name in ("select", "unbind"):
            start = int((a.index if name == "select" else step.index) or 0) % size
            stop, stride = start + 1, 1
            part = self.call(aten.unsqueeze.default, part, axis)
        elif name in ("split", "chunk", "split_with_sizes"):
            before = sum(meta.shape[axis] for meta in step.meta[: step.index])
            start, stop, stride = before, before + step.meta[step.index or 0].shape[axis], 1
        else:
            raise CaptureError(
                f"{self.place()}: writing in place through {self.label(step.operator)} is not understood"
            )
        if stride == 1:
            pieces = [part]
            if start > 0:
                pieces.insert(0, self.call(aten.slice.Tensor, parent, axis, 0, start, 1))
            if stop < size:
                pieces.append(self.call(aten.slice.Tensor, parent, axis, stop, size, 1))
            return self.call(aten.cat.default, pieces, axis) if len(pieces) > 1 else part
        return self.put(parent, axis, list(range(start, stop, stride)), part)

    def put(self, x: Content, axis: int, indices: Sequence[int], part: Content) -> Content:
        """A tensor that holds `part` at these indices of an axis."""
        size = x.shape[axis]
        order = list(range(size))
        for position, index in enumerate(indices):
            order[index % size] = size + position
        return self.gather(self.call(aten.cat.default, [x, part], axis), axis, order)

    def gather(self, x: Content, axis: int, indices: Sequence[int]) -> Content:
        meta = Meta((*x.shape[:axis], len(indices), *x.shape[axis + 1 :]), x.meta.dtype)
        if not x.is_value:
            index = Content(Meta((len(indices),), torch.int64), node=Node("data", (torch.tensor(indices),)))
            return self.call(aten.index_select.default, x, axis, index)
        self.keep_batch(x, [axis])
        if list(indices) == list(range(x.shape[axis])):
            return x
        steps = {b - a for a, b in zip(indices, indices[1:], strict=False)} or {1}
        if len(steps) == 1 and min(steps) > 0:
            step = steps.pop()
            return self.emit("slice", [x], meta, axis=axis, start=indices[0], stop=indices[-1] + 1, step=step)
        if list(indices) == list(range(x.shape[axis] - 1, -1, -1)):
            return self.emit("flip", [x], meta, axes=(axis,))
        return self.emit("gather", [x], meta, axis=axis, indices=tuple(int(index) for index in indices))

    # --- the graph ----------------------------------------------------------------------------------------------------

    def run(self, graph: Any, owner: Any, given: Sequence[Any]) -> Any:
        """Walks a graph with what its placeholders stand for; returns its outputs."""
        remaining = iter(given)
        count = len(graph.nodes)
        for position, node in enumerate(graph.nodes):
            self.current, outer = node, self.current
            now_at(f"operation {position} of {count}, {node.name}")
            if node.op == "placeholder":
                self.environment[node] = next(remaining)
            elif node.op == "get_attr":
                self.environment[node] = functools.reduce(getattr, node.target.split("."), owner)
            elif node.op == "output":
                self.current = outer
                return tree_map(torch.fx.Node, self.environment.__getitem__, node.args[0])
            else:
                self.environment[node] = self.execute(node)
        raise AssertionError("a graph without an output")

    def fetch(self, value: Any) -> Any:
        return tree_map(torch.fx.Node, self.environment.__getitem__, value)

    def execute(self, node: Any) -> Any:
        target, value = node.target, node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and "item" not in str(target):
            number = self.sizes.of(value)
            if number is None:
                raise CaptureError(f"{self.place()}: {self.label()}: a size depends on the values of a tensor")
            return number
        args, kwargs = self.fetch(tuple(node.args)), self.fetch(dict(node.kwargs))
        if isinstance(target, torch._ops.OpOverload):
            return self.execute_operator(node, target, arguments(target, args, kwargs))
        name = getattr(target, "__name__", str(target))
        if name == "getitem":
            return args[0][args[1]]
        if "wrap_with_set_grad_enabled" in str(target):
            enabled, graph, *rest = args
            results = self.run(graph.graph, graph, rest)
            return results if enabled else tree_map(View, self.detached, results)
        if "wrap_with_autocast" in str(target):
            graph = next(value for value in args if isinstance(value, torch.fx.GraphModule))
            return self.run(graph.graph, graph, args[args.index(graph) + 1 :])
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

    def detached(self, view: View) -> View:
        content = self.read(view)
        made = self.apply(aten.detach.default, {"self": content}, content.meta)
        return View(Storage(made), (), made)

    def execute_operator(self, node: Any, operator: Any, bound: dict[str, Any]) -> Any:
        name = base_name(operator)
        if name.startswith(("_assert", "sym_constrain")) or node.meta.get("val", 0) is None:
            return None
        if name in ("item", "_local_scalar_dense"):
            return self.item(bound["self"])
        if name in DROPOUTS and not (bound["train"] and bound["p"]):
            # PyTorch gives the tensor itself; its export pretends a copy.
            return bound["input"]
        schema = operator._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        contents = tree_map(View, self.read, bound)
        meta = self.meta_of(node)
        if written and isinstance(bound[written[0]], View):
            return self.execute_in_place(node, operator, bound, contents, written[0])
        result = self.apply(operator, contents, meta)
        if isinstance(result, list):
            return [self.view_of(node, operator, bound, contents, r, i) for i, r in enumerate(result)]
        return self.view_of(node, operator, bound, contents, result, None)

    def item(self, view: View) -> float:
        content = self.read(view)
        try:
            data = self.data(content)
        except Refused:
            raise CaptureError(
                f"{self.place()}: a Python number is made of a tensor that depends on the input; a network that is "
                "deployed does the same for every input: keep it a tensor, or make it a constant"
            ) from None
        return data.item()

    def meta_of(self, node: Any) -> Any:
        made = tree_map(torch.Tensor, self.meta_of_tensor, node.meta.get("val"))
        return list(made) if isinstance(made, (list, tuple)) else made

    def meta_of_tensor(self, tensor: torch.Tensor) -> Meta:
        """Of a tensor of the export."""
        shape = tuple(map(self.sizes.of, tensor.shape))
        if None in shape:
            raise CaptureError(
                f"{self.place()}: the size of a result depends on the values of a tensor ({self.label()}); give the "
                "indices or counts as numbers instead, such as x[:, [0, 2, 2]]"
            )
        return Meta(tuple(1 if size is FOLLOWS else size for size in shape), tensor.dtype, FOLLOWS in shape)

    def view_of(
        self,
        node: Any,
        operator: Any,
        bound: Mapping[str, Any],
        contents: Mapping[str, Any],
        result: Content,
        index: int | None,
    ) -> View:
        """A result as a view of the storage that PyTorch says it shares, or of a new one."""
        fake = node.meta["val"] if index is None else node.meta["val"][index]
        if not isinstance(fake, torch.Tensor):
            return View(Storage(result), (), result)
        identity = fake.untyped_storage()._cdata
        storage = self.storages.get(identity)
        for key, source in bound.items():
            if storage is not None and isinstance(source, View) and source.storage is storage:
                others = {name: value for name, value in contents.items() if name != key}
                step = ViewStep(operator, key, others, self.meta_of(node), index)
                return View(storage, (*source.chain, step), result)
        made = Storage(result)
        self.storages.setdefault(identity, made)
        return View(made, (), result)

    def execute_in_place(
        self, node: Any, operator: Any, bound: dict[str, Any], contents: dict[str, Any], written: str
    ) -> View:
        view, name = bound[written], base_name(operator)
        before = contents[written]
        meta = before.meta
        path = next((path for path, storage in self.own.items() if storage is view.storage), None)
        if path is not None and name not in ("detach_", "requires_grad_"):
            self.mutated.setdefault(path, self.place())
        if name == "copy_":
            content = self.spread(contents["src"], meta)
        elif name == "detach_":
            content = self.call(aten.detach.default, before)
        elif name in ("requires_grad_", "set_"):
            return view
        elif name in ("zero_", "fill_"):
            value = contents.get("value", 0)
            if isinstance(value, Content):
                content = self.spread(value, meta)
            else:
                content = self.call(aten.full.default, list(meta.shape), value, dtype=meta.dtype)
        elif written == "out":
            functional = without_out(operator)
            content = self.spread(self.apply(functional, {k: v for k, v in contents.items() if k != "out"}, meta), meta)
        else:
            tensors = leaves(Content, contents)
            if not any(tensor.is_value for tensor in tensors):
                noise = any(tensor.noise for tensor in tensors) or is_random(operator)
                content = self.program(operator, contents, meta, noise, in_place=True)
            else:
                content = self.functional(operator, contents, meta)
        self.write(view, content)
        return view

    def functional(self, operator: Any, contents: dict[str, Any], meta: Meta) -> Content:
        packet = getattr(aten, base_name(operator).rstrip("_"), None)
        if packet is not None and operator._overloadname in packet.overloads():
            counterpart = getattr(packet, operator._overloadname)
            args, kwargs = call_form(operator, contents)
            return self.apply(counterpart, arguments(counterpart, args, kwargs), meta)
        if is_random(operator):
            return self.noisy(operator, contents, meta, in_place=True)
        raise CaptureError(f"{self.place()}: {self.label(operator)} in place is not understood")

    def spread(self, tensor: Any, meta: Meta) -> Content:
        """A tensor broadcast to a shape."""
        return tensor if tensor.shape == meta.shape else self.call(aten.expand.default, tensor, list(meta.shape))


def require_fixed(operand: Any, what: str) -> None:
    if isinstance(operand, Content) and operand.is_value:
        raise Refused(f"its {what} depends on the input")


def require_numbers(c: Reader, *tensors: Any) -> None:
    """Integers that the network is given, and sums and products of such, are numbers as well."""
    if any(
        isinstance(t, Content) and t.is_value and not t.meta.dtype.is_floating_point and t.name not in c.integers
        for t in tensors
    ):
        raise Refused("it computes with integers or truth values that depend on the input")
