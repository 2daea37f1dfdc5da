# SPDX-License-Identifier: Apache-2.0
"""Reads an exported program node by node: contents, views and steps."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ...device.functions import COMBINATIONS, FUNCTIONS
from ...planning.network import Constant, Place, Step, Value
from ..core.progress import now_at
from .composition import SeveralValues, composed, is_composed
from .contents import Content, Meta, Storage, View, ViewStep
from .errors import MIXES, CaptureError, Refused, RowsDiffer
from .expression import Expression, Node, leaves, map_nodes, tree_map
from .gradients import NAMESPACE, Marked, read_mark
from .schema import (
    DROPOUTS,
    IDENTITIES,
    PERMUTES,
    RESHAPES,
    SHAPE_ONLY,
    arguments,
    base_name,
    call_form,
    full_name,
    is_random,
    permutation,
    slice_bounds,
    without_out,
)

aten = torch.ops.aten


# PyTorch and this package: what stands in their files is not the user's.
NOT_USERS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, os.path.dirname(__file__))
)
# A momentum that no user gives: stands for None, whose export would need the counter's value.
CUMULATIVE = -0.123456789

HANDLERS: dict[str, Callable[..., Any]] = {}


def handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# Operators by the words of those who write them otherwise.
_WORDS = {
    "max_pool1d_with_indices": "F.max_pool1d",
    "max_pool2d_with_indices": "F.max_pool2d",
    "upsample_": "F.interpolate",
    "_upsample_": "F.interpolate",
    "slice": "slicing",
    "select": "indexing",
    "index.": "indexing",
    "linalg_vector_norm": "torch.linalg.vector_norm",
    "_weight_norm": "weight_norm",
}


class Converter:
    """Reads an exported program node by node."""

    def __init__(self, model: nn.Module, program: Any, prime: int, noise: bool, marked: Marked | None = None) -> None:
        """marked: what the marks of the export are about."""
        self.noise_is_training = noise
        self.marked = Marked() if marked is None else marked
        # By the content that a hook has made, what else is registered on the same tensor.
        self.hooked: dict[Any, Any] = {}
        self.model, self.program_of_export, self.prime = model, program, prime
        self.tensors: dict[str, torch.Tensor] = {}
        self.paths: dict[str, str] = {}
        first: dict[int, str] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for path, tensor in named:
            self.paths[path] = first.setdefault(id(tensor), path)
            self.tensors.setdefault(self.paths[path], tensor)
        self.parameters = {path for path, _ in model.named_parameters()}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.values: dict[str, Value] = {}
        self.constants: dict[str, Constant] = {}
        self.steps: list[Step] = []
        self.producers: dict[str, tuple[Step, tuple[Any, ...]]] = {}
        self.constant_of: dict[int, str | float] = {}
        self.storages: dict[int, Storage] = {}
        self.environment: dict[Any, Any] = {}
        self.calls: dict[str, tuple[str, ...]] = {}
        self.current: Any = None
        # The storages of parameters, buffers and other tensors of the model's own, by path; and which of them forward
        # writes into, and where first.
        self.own: dict[str, Storage] = {}
        self.mutated: dict[str, Place] = {}
        self.counters: set[str] = set()
        self.refusals: dict[tuple[Place, str], int] = {}
        self.graph_module: Any = None

    # --- sizes ------------------------------------------------------------------------------------------------------

    def example(self, shape: Iterable[int]) -> tuple[int, ...]:
        """A shape for a batch of one."""
        return tuple(size // self.prime if size and size % self.prime == 0 else size for size in shape)

    def batch_axes(self, shape: Sequence[int]) -> list[int]:
        return [axis for axis, size in enumerate(shape) if size and size % self.prime == 0]

    def batch_axis(self, tensor: Content) -> int | None:
        axes = self.batch_axes(tensor.shape)
        return axes[0] if axes and tensor.is_value and not tensor.broken else None

    def number(self, value: Any) -> float:
        """A number that is an operand."""
        if isinstance(value, bool):
            return int(value)
        if value and math.isfinite(value) and (value % self.prime == 0 or abs((1 / value) % self.prime) < 1e-9):
            raise Refused("it computes with the size of the batch")
        return value

    def keep_batch(self, tensor: Content, axes: Iterable[int]) -> None:
        if self.batch_axis(tensor) in set(axes):
            raise Refused(MIXES)

    # --- where the current step stands --------------------------------------------------------------------------------

    def stack(self) -> list[tuple[str, str, str]]:
        """(call, path, class) of the modules around the current node, outermost first."""
        stack = (self.current.meta.get("nn_module_stack") if self.current is not None else None) or {}
        entries = []
        for call, (path, kind) in stack.items():
            name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            entries.append((call, path, name))
        return entries

    def place(self) -> Place:
        stack = self.stack()
        frames = re.findall(r'File "([^"]+)", line (\d+)', (self.current.meta.get("stack_trace") or ""))
        file, line = next(((f, n) for f, n in reversed(frames) if not f.startswith(NOT_USERS)), ("", 0))
        return Place(stack[-1][1] if stack else "", file, int(line))

    def label(self, operator: Any = None) -> str:
        stack = self.stack()
        if stack and operator is not None:
            module = self.modules.get(stack[-1][1])
            if (
                module is not None
                and type(module).__module__.startswith("torch.nn.modules")
                and not any(module.children())
            ):
                return type(module).__name__
        if operator is None:
            operator = self.current.target
        if not isinstance(operator, torch._ops.OpOverload):
            return getattr(operator, "__name__", str(operator))
        name = base_name(operator)
        name = name if name.startswith("_") else name.rstrip("_")
        if (word := next((word for start, word in _WORDS.items() if name.startswith(start)), None)) is not None:
            return word
        if hasattr(torch, name) and not name.startswith("_"):
            return f"torch.{name}"
        if hasattr(nn.functional, name):
            return f"F.{name}"
        return f"Tensor.{name}" if hasattr(torch.Tensor, name) else name

    # --- operands -----------------------------------------------------------------------------------------------------

    def evaluate(self, expression: Expression, batch: int = 1) -> Any:
        """Value of an expression with the model's parameters as they are."""
        sources = [self.tensors[path] for path in expression.sources]
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in sources) else torch.float32
        with torch.enable_grad():
            return expression(*(t.to(dtype) if t.is_floating_point() else t for t in sources), batch=batch)

    def check_batch(self, expression: Expression) -> None:
        """Refuses what is not the same for every example."""
        if not expression.follows_the_batch:
            return
        one, three = self.evaluate(expression), self.evaluate(expression, batch=3)
        axes = [axis for axis, (a, b) in enumerate(zip(one.shape, three.shape, strict=False)) if a != b]
        if one.dim() != three.dim() or len(axes) > 1 or any(three.shape[axis] != 3 * one.shape[axis] for axis in axes):
            raise Refused("it computes with the size of the batch")
        repeated = torch.cat([one] * 3, axes[0]) if axes else one
        if not torch.equal(three, repeated) and not self.same_but_for_rounding(three, repeated):
            raise Refused("it differs between the examples of a batch")

    @staticmethod
    def same_but_for_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether a product of more rows, which may be added up in another order, explains the difference."""
        if not one.is_floating_point() or not torch.isfinite(one).all() or not torch.isfinite(other).all():
            return False
        return bool((one - other).abs().max() <= 1e-5 * one.abs().max())

    def sources(self, tensor: Content) -> tuple[str, ...]:
        """Paths of the parameters and buffers behind a tensor that does not depend on the input."""
        assert tensor.node is not None
        return Expression(tensor.node, self.prime).sources

    def data(self, tensor: Content) -> torch.Tensor:
        """Content of a tensor that does not depend on the input, as it is now.

        Raises:
            Refused: it depends on the input, or is random.
        """
        if tensor.node is None or tensor.noise:
            raise Refused("an operand that must be fixed depends on the input")
        expression = Expression(tensor.node, self.prime)
        self.check_batch(expression)
        return self.evaluate(expression).detach()

    def operand(self, operand: Any, role: str = "") -> str | float | None:
        """The name by which a step reads a tensor, or a number."""
        if operand is None:
            return None
        if isinstance(operand, (int, float, bool)):
            return self.number(operand)
        if operand.is_value:
            return operand.name
        key = id(operand.node)
        if key not in self.constant_of:
            self.constant_of[key] = self.constant(operand, role)
        return self.constant_of[key]

    def constant(self, tensor: Content, role: str) -> str | float:
        node = tensor.node
        assert node is not None
        if tensor.noise:
            raise Refused("it computes with random numbers")
        if node.operator == "source":
            path = node.args[0]
            found = self.tensors[path]
            if path not in self.constants:
                trainable = path in self.parameters and found.requires_grad
                self.constants[path] = Constant(path, tuple(found.shape), trainable=trainable)
            return path
        expression = Expression(node, self.prime)
        self.check_batch(expression)
        result = self.evaluate(expression)
        for axis in self.batch_axes(tensor.shape) if expression.follows_the_batch else ():
            if result.shape[axis] > 1:
                first = result.narrow(axis, 0, 1)
                if expression.sources or not torch.equal(result, first.expand_as(result)):
                    raise RowsDiffer(
                        f"a constant beside the batch has {result.shape[axis]} rows for each example; give these rows "
                        "an axis of their own: [batch, rows, ...]"
                    )
                return self.constant(self.call(aten.narrow.default, tensor, axis, 0, 1), role)
        place, sources = self.place(), expression.sources
        if not sources and result.dim() == 0:
            return result.item() if result.dtype != torch.bool else int(result)
        base = ".".join(filter(None, (place.path, role or self.current.name)))
        name, count = base, 0
        while name in self.constants or name in self.tensors or name in self.values:
            count += 1
            name = f"{base}_{count}"
        self.constants[name] = Constant(
            name,
            tuple(result.shape),
            parameter=False,
            trainable=result.requires_grad,
            sources=sources,
            expression=expression if sources else None,
            data=None if sources else result.detach(),
        )
        return name

    # --- steps --------------------------------------------------------------------------------------------------------

    def new_name(self) -> str:
        base = self.current.name if self.current is not None else "value"
        name, count = base, 0
        while name in self.values or name in self.constants or name in self.tensors:
            count += 1
            name = f"{base}_{count}"
        return name

    def emit(
        self,
        kind: str,
        operands: Sequence[Any],
        meta: Meta,
        roles: Sequence[str] = (),
        outer: int | None = None,
        broken: bool = False,
        label: str = "",
        **attributes: Any,
    ) -> Content:
        """Adds a step and returns what it makes; comparisons and what follows value by value are one step."""
        if any(map(is_composed, operands)):
            with contextlib.suppress(SeveralValues):
                if kind in FUNCTIONS or kind in COMBINATIONS:
                    return composed(self, kind, operands, attributes, meta)
                if attributes.get("stop_gradient"):
                    return composed(self, "stop_gradient", operands, {}, meta)
        values = [operand for operand in operands if isinstance(operand, Content) and operand.is_value]
        broken = broken or any(value.broken for value in values)
        axes = self.batch_axes(meta.shape)
        if not broken:
            if len(axes) != 1:
                raise Refused(MIXES)
            if outer is None:
                outers = {value.outer for value in values}
                if len(outers) > 1:
                    raise Refused(MIXES)
                outer = outers.pop() if outers else 1
        roles = [*roles, *[""] * len(operands)]
        try:
            inputs = tuple(self.operand(operand, role) for operand, role in zip(operands, roles, strict=False))
        except RowsDiffer:
            if broken or outer != 1 or kind not in ("add", "sub", "mul", "div", "maximum", "minimum", "matmul"):
                raise
            return self.emit_apart(kind, operands, meta, axes[0])
        name = self.new_name()
        dtype = "float32" if meta.dtype.is_floating_point else str(meta.dtype).removeprefix("torch.")
        self.values[name] = Value(name, self.example(meta.shape), axes[0] if axes else 0, dtype)
        step = Step(kind, inputs, name, attributes, self.place(), label=label or self.label(self.operator))
        self.steps.append(step)
        self.producers[name] = (step, tuple(operands))
        self.calls[name] = tuple(call for call, _, _ in self.stack())
        return Content(meta, name, outer=outer or 1, broken=broken)

    def emit_apart(self, kind: str, operands: Sequence[Any], meta: Meta, axis: int) -> Content:
        """A step on operands of several rows for each example, with an axis of their own for these rows."""
        rows = meta.shape[axis] // self.prime
        if kind == "matmul" and axis >= len(meta.shape) - 2:
            raise Refused(MIXES)
        apart = []
        for operand in operands:
            at = axis - len(meta.shape) + len(operand.shape) if isinstance(operand, Content) else -1
            if at >= 0:
                size = operand.shape[at]
                parts = [self.prime, rows] if size == meta.shape[axis] else [1, size]
                operand = self.call(
                    aten.reshape.default, operand, [*operand.shape[:at], *parts, *operand.shape[at + 1 :]]
                )
            apart.append(operand)
        shape = (*meta.shape[:axis], self.prime, rows, *meta.shape[axis + 1 :])
        return self.call(aten.reshape.default, self.emit(kind, apart, Meta(shape, meta.dtype)), list(meta.shape))

    def program(self, operator: Any, bound: Mapping[str, Any], meta: Any, noise: bool, in_place: bool = False) -> Any:
        """The result of an operator on what does not depend on the input."""
        args, kwargs = call_form(operator, tree_map(Content, lambda tensor: tensor.node, dict(bound)))
        node = Node(full_name(operator), tuple(args), kwargs, in_place)
        if isinstance(meta, list):
            return [Content(m, node=Node("item", (node, i)), noise=noise) for i, m in enumerate(meta)]
        return Content(meta, node=node, noise=noise)

    def opaque(self, operator: Any, bound: Mapping[str, Any], meta: Any, kind: str, in_place: bool = False) -> Any:
        """A step whose meaning is the operator itself: unsupported, or noise."""
        values: list[Content] = []

        def leaf(tensor: Content) -> Any:
            if not tensor.is_value:
                # It is called with its operands alone: parameters are what they are at capture.
                assert tensor.node is not None
                return map_nodes(self.frozen, tensor.node)
            if tensor not in values:
                values.append(tensor)
            return operand_nodes.setdefault(values.index(tensor), Node("operand", (values.index(tensor),)))

        operand_nodes: dict[int, Node] = {}
        args, kwargs = call_form(operator, tree_map(Content, leaf, dict(bound)))
        node = Node(full_name(operator), tuple(args), kwargs, in_place)
        if kind == "dropout":
            values, node = self.with_scale(values, node)
        axis = self.batch_axis(values[0]) or 0
        rows = max(self.example(values[0].shape)[axis] if values[0].shape else 1, 1)
        several = meta if isinstance(meta, list) else [meta]
        results = []
        for index, result in enumerate(several):
            picked = Node("item", (node, index)) if isinstance(meta, list) else node
            expression = Expression(picked, self.prime, axis, rows)
            broken = kind == "unsupported" and (
                len(self.batch_axes(result.shape)) != 1 or len({value.outer for value in values}) > 1
            )
            results.append(self.emit(kind, values, result, broken=broken, expression=expression))
        return results if isinstance(meta, list) else results[0]

    def frozen(self, node: Node) -> Node:
        return Node("data", (self.tensors[node.args[0]].detach(),)) if node.operator == "source" else node

    def noisy(self, operator: Any, bound: Mapping[str, Any], meta: Any, in_place: bool = False) -> Any:
        """A step that is nothing in evaluation."""
        if not self.noise_is_training:
            raise Refused("it draws random numbers in evaluation too")
        values = [tensor for tensor in leaves(Content, bound) if tensor.is_value]
        if len(values) != 1 or isinstance(meta, list) or meta.shape != values[0].shape:
            raise Refused("it computes with random numbers")
        return self.opaque(operator, bound, meta, "dropout", in_place)

    def with_scale(self, values: list[Content], node: Node) -> tuple[list[Content], Node]:
        """Stochastic depth divides by the probability before or behind the noise: before, it is a part of the noise."""
        producer = self.producers.get(values[0].name)
        if producer is None or producer[0].kind not in ("div", "mul"):
            return values, node
        step, operands = producer
        same_place = step.place.path == self.place().path
        if (
            len(values) != 1
            or not same_place
            or not isinstance(operands[0], Content)
            or not isinstance(step.inputs[1], float)
        ):
            return values, node
        scaled = Node(f"aten.{step.kind}.Tensor", (Node("operand", (0,)), step.inputs[1]))
        return [operands[0]], map_nodes(lambda leaf: scaled if leaf.operator == "operand" else leaf, node)

    def unsupported(self, operator: Any, bound: Mapping[str, Any], meta: Any, reason: str) -> Any:
        place = self.place()
        self.refusals[place, reason] = self.refusals.get((place, reason), 0) + (
            len(meta) if isinstance(meta, list) else 1
        )
        if reason == MIXES and self.refusals[place, reason] > self.prime // 4:
            raise CaptureError(
                f"{place}: forward goes through the examples of a batch one by one; what it does must be the same "
                "operation on all of them"
            )
        result = self.opaque(operator, bound, meta, "unsupported")
        for made in result if isinstance(result, list) else [result]:
            index = next(i for i in reversed(range(len(self.steps))) if self.steps[i].output == made.name)
            step = self.steps[index]
            self.steps[index] = replace(step, attributes={**step.attributes, "reason": reason})
        return result

    def unsupported_part(self, a: SimpleNamespace, meta: list[Meta], index: int, reason: str) -> Content:
        """One of several results that no kind says, while others are; it vanishes where nobody reads it."""
        return self.unsupported(self.applied, vars(a), meta, reason)[index]

    # --- one operator -------------------------------------------------------------------------------------------------

    # The operator of the export that is being read, and the one that a handler is asked for: a part of it, or itself.
    operator: Any = None
    applied: Any = None

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
        tensors = leaves(Content, bound)
        noise = any(tensor.noise for tensor in tensors)
        if not any(tensor.is_value for tensor in tensors):
            return self.program(operator, bound, meta, noise or is_random(operator, bound))
        outer_operator, self.operator = self.operator, self.operator or operator
        outer_applied, self.applied = self.applied, operator
        growing: tuple[dict[Any, Any], ...] = (self.values, self.constants, self.constant_of, self.calls)
        before = len(self.steps), [len(each) for each in growing]
        try:
            handler = HANDLERS.get(f"{name}.{overload}") or HANDLERS.get(name)
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
        """A tensor in which `part` stands at these indices of an axis."""
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
        target = node.target
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
        if operator.namespace == NAMESPACE:
            return read_mark(self, node, bound)
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
        value = node.meta.get("val")
        if any(not isinstance(size, int) for tensor in leaves(torch.Tensor, value) for size in tensor.shape):
            raise CaptureError(
                f"{self.place()}: the size of a result depends on the values of a tensor ({self.label()}); give the "
                "indices or counts as numbers instead, such as x[:, [0, 2, 2]]"
            )
        made = tree_map(torch.Tensor, lambda t: Meta(tuple(t.shape), t.dtype), value)
        return list(made) if isinstance(made, (list, tuple)) else made

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


def require_numbers(*tensors: Any) -> None:
    if any(isinstance(t, Content) and t.is_value and not t.meta.dtype.is_floating_point for t in tensors):
        raise Refused("it computes with integers or truth values that depend on the input")
