# SPDX-License-Identifier: Apache-2.0
"""A network under construction, of an exported program: what an operator makes of items.

What becomes of an operator is said by its handler, in the file of its family; one without a handler is what PyTorch
says it consists of, or a step that the plan refuses.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from ....kit.device.functions import COMBINATIONS, FUNCTIONS
from ....kit.planning.callers import PACKAGE
from ....kit.planning.network import KINDS, Constant, Place
from ..core.builder import Either, ItemBuilder, entering, free_name
from ..core.functions import Curve
from ..core.refusals import MIXES, SIZE_OF_BATCH, CaptureError, Refused
from ..core.sizes import Batch, Shape, Size
from .composition import SeveralValues, composed, curves, is_composed
from .expression import Expression, InTraining, Node, leaves, map_nodes, tree_map
from .items import Fixed, Item, Meta, Metas, Traced
from .operators import Bound, Operator, arguments, base_name, call_form, full_name, is_random
from .sizes import FOLLOWS, FollowsTheBatch

aten = torch.ops.aten

# By the name of an operator, with or without its overload; a handler gives an item, or a list for several results.
HANDLERS: dict[str, Callable[..., Any]] = {}
handles = entering(HANDLERS)

# PyTorch and this package: what is in their files is not the user's.
NOT_USERS = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, PACKAGE)
# A momentum that no user gives: it means None, whose export would need the counter's value.
CUMULATIVE = -0.123456789
# The number of examples with which PyTorch finds shapes: a prime far above any size of a model's own, and small enough
# that PyTorch counts the values of a tensor.
_EXAMPLES = 2**24 - 3

# Operands by which a constant is called that is computed for them.
_ROLES = ("weight", "bias", "mean", "variance", "mask")
# What may have several rows for each example, with numbers of their own.
_OF_ROWS = ("add", "sub", "mul", "div", "maximum", "minimum", "matmul", "attention")
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
    "fft_": "torch.fft",
}


class _RowsDiffer(Refused):
    """A constant beside the batch has several different rows for each example."""


def meta_of(tensor: torch.Tensor) -> Meta:
    """Of a tensor with `_EXAMPLES` examples."""
    dtype = torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    return Meta(tuple(map(_size, tensor.shape)), dtype)


def _size(number: object) -> Size:
    return Batch(number // _EXAMPLES) if type(number) is int and number > 0 and number % _EXAMPLES == 0 else number


@dataclass
class _Array:
    """A fixed tensor with those methods of NumPy's arrays that what all frameworks share calls."""

    c: Converter
    item: Fixed

    def transpose(self, axes: Sequence[int]) -> _Array:
        return _Array(self.c, self.c.permute(self.item, axes))

    def reshape(self, *shape: Any) -> _Array:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        return _Array(self.c, self.c.reshape(self.item, sizes))

    def sum(self, axes: Sequence[int]) -> _Array:
        return _Array(self.c, self.c.call(aten.sum.dim_IntList, self.item, axes))


class Converter(ItemBuilder[Fixed]):
    """Reads operators one by one.

    Attributes:
        current: the node that is being read.
        operator, applied: the operator of the export, and the one that a handler is asked for: a part of it, or itself.
        tensors: the model's parameters and buffers by path; `paths` has the first path of a tensor by each of its own.
        operands_of: what a step was given, by the name of its result; `calls`: the calls of modules around it.
        counters: buffers that count what batch norms have seen.
    """

    moving = Traced
    merges = False
    current: Any = None
    operator: Operator | None = None
    applied: Any = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.paths: dict[str, str] = {}
        first: dict[int, str] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for path, tensor in named:
            self.paths[path] = first.setdefault(id(tensor), path)
            self.tensors.setdefault(self.paths[path], tensor)
        self.parameters = {path for path, _ in model.named_parameters()}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.operands_of: dict[str, tuple[Any, ...]] = {}
        self.calls: dict[str, tuple[str, ...]] = {}
        self.counters: set[str] = set()
        self._constant_of: dict[int, str | float] = {}
        self._fixed_items: dict[str, Fixed] = {}

    @property
    def noise_is_training(self) -> bool:
        """Whether the module around the current node trains: then random numbers are noise of training."""
        module = self.modules.get(self.place().path)
        return module is not None and module.training

    # --- where the current step is ------------------------------------------------------------------------------------

    def stack(self) -> list[tuple[str, str]]:
        """(call, path) of the modules around the current node, outermost first."""
        stack = (self.current.meta.get("nn_module_stack") if self.current is not None else None) or {}
        return [(call, path) for call, (path, _) in stack.items()]

    def place(self) -> Place:
        stack = self.stack()
        frames = re.findall(r'File "([^"]+)", line (\d+)', (self.current.meta.get("stack_trace") or ""))
        users = ((f, n) for f, n in reversed(frames) if not f.startswith((*NOT_USERS, "<eval_with_key>")))
        file, line = next(users, ("", 0))
        return Place(stack[-1][1] if stack else "", file, int(line))

    def word_of(self, operator: Operator | None = None) -> str:
        """An operator in the words of who wrote the model: PyTorch's layer around it, or its function."""
        stack = self.stack()
        module = self.modules.get(stack[-1][1]) if stack and operator is not None else None
        if type(module).__module__.startswith("torch.nn.modules") and not any(module.children()):  # type: ignore[union-attr]
            return type(module).__name__
        target = operator or self.current.target
        if not isinstance(target, Operator):
            return getattr(target, "__name__", str(target))
        name = base_name(target)
        name = name if name.startswith("_") else name.rstrip("_")
        if (word := next((word for start, word in _WORDS.items() if name.startswith(start)), None)) is not None:
            return f"{word}.{name.removeprefix('fft_')}" if word == "torch.fft" else word
        homes: dict[str, Any] = {} if name.startswith("_") else {"torch": torch}
        homes |= {"F": nn.functional, "Tensor": torch.Tensor}
        return next((f"{home}.{name}" for home, holder in homes.items() if hasattr(holder, name)), name)

    # --- items --------------------------------------------------------------------------------------------------------

    def batch_of(self, x: Item) -> int | None:
        """The axis of the batch; None of what has none."""
        return self.batch_axis(x.shape) if isinstance(x, Traced) else None

    def keep_batch(self, x: Item, axes: Iterable[int]) -> None:
        if self.batch_of(x) in set(axes):
            raise Refused(MIXES)

    def evaluate(self, expression: Expression, batch: int = 1) -> torch.Tensor:
        """Value of an expression with the model's parameters as they are."""
        sources = [self.tensors[path] for path in expression.sources]
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in sources) else torch.float32
        with torch.enable_grad():
            return expression(*(t.to(dtype) if t.is_floating_point() else t for t in sources), batch=batch)

    def _refuse_places(self, expression: Expression) -> None:
        """Refuses what is not the same for every example."""
        if not expression.follows_the_batch:
            return
        one, three = self.evaluate(expression), self.evaluate(expression, batch=3)
        axes = [axis for axis, (a, b) in enumerate(zip(one.shape, three.shape, strict=False)) if a != b]
        if one.dim() != three.dim() or len(axes) > 1 or any(three.shape[axis] != 3 * one.shape[axis] for axis in axes):
            raise Refused(SIZE_OF_BATCH)
        repeated = torch.cat([one] * 3, axes[0]) if axes else one
        # A product of more rows may be added up in another order.
        close = 1e-5 * one.abs().max() if one.is_floating_point() and one.numel() else 0
        if not torch.equal(three, repeated) and not bool(((three - repeated).abs() <= close).all()):
            raise Refused("it differs between the examples of a batch")

    def sources(self, item: Fixed) -> tuple[str, ...]:
        """Paths of the parameters and buffers that it is computed from."""
        return Expression(item.node).sources

    def data(self, item: Item) -> torch.Tensor:
        """What something fixed holds now, for a batch of one.

        Raises:
            Refused: it depends on the input, or is random.
        """
        if not isinstance(item, Fixed) or item.noise:
            raise Refused("an operand that must be fixed depends on the input")
        expression = Expression(item.node)
        self._refuse_places(expression)
        return self.evaluate(expression).detach()

    def numbers(self, item: Any) -> np.ndarray | None:
        if isinstance(item, Fixed):
            return None if item.noise or self.sources(item) else self.data(item).numpy(force=True)
        return np.asarray(item, np.float32) if isinstance(item, int | float) else None

    def uniform(self, item: Any) -> Any:
        """The number that something fixed holds everywhere, if no parameter can change it; else the item."""
        values = self.numbers(item) if isinstance(item, Fixed) else None
        if values is None or not values.size or (values != values.flat[0]).any():
            return item
        return float(values.flat[0])

    def fixed_of(self, values: Any) -> Fixed:
        tensor = torch.as_tensor(values)
        return Fixed(Node("data", (tensor,)), *meta_of(tensor))

    def fixed_named(self, name: str) -> Fixed:
        return self._fixed_items[name]

    def then(self, item: Fixed, shape: Sequence[int], function: Callable[[Any], Any]) -> Fixed:
        result: Fixed = function(_Array(self, item)).item
        return result

    def operand(self, item: Any, role: str = "") -> str | float | None:
        """How a step names what it reads. role: of a tensor, for the name of what is computed."""
        if item is None:
            return None
        if isinstance(item, Batch | FollowsTheBatch):
            raise Refused(SIZE_OF_BATCH)
        if isinstance(item, int | float):
            return int(item) if isinstance(item, bool) else item
        if isinstance(item, Traced):
            return item.name
        key = id(item.node)
        if key not in self._constant_of:
            self._constant_of[key] = self._constant(item, role)
        return self._constant_of[key]

    def _constant(self, item: Fixed, role: str) -> str | float:
        if item.noise:
            raise Refused("it computes with random numbers")
        if item.node.operator == "source":
            path = item.node.args[0]
            tensor = self.tensors[path]
            if path not in self.constants:
                trainable = path in self.parameters and tensor.requires_grad
                self.constants[path] = Constant(path, tuple(tensor.shape), trainable=trainable)
                self._fixed_items[path] = item
            return path
        expression = Expression(item.node)
        self._refuse_places(expression)
        result, sources = self.evaluate(expression), expression.sources
        for axis in self.batch_axes(item.shape) if expression.follows_the_batch else ():
            if result.shape[axis] > 1:
                if sources or not torch.equal(result, result.narrow(axis, 0, 1).expand_as(result)):
                    raise _RowsDiffer(
                        f"a constant beside the batch has {result.shape[axis]} rows for each example; give these rows "
                        "an axis of their own: [batch, rows, ...]"
                    )
                return self._constant(self.call(aten.narrow.default, item, axis, 0, 1), role)
        if not sources and result.dim() == 0:
            return result.item() if result.dtype != torch.bool else int(result)
        base = ".".join(filter(None, (self.place().path, role or self.current.name)))
        name = free_name(base, self.constants, self.tensors, self.values, first=1)
        self._fixed_items[name] = item
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

    def emit(
        self,
        kind: str,
        operands: Sequence[Any],
        shape: Sequence[Size],
        /,
        dtype: Any = torch.float32,
        samples: Mapping[str, Curve] | None = None,
        module: str = "",
        label: str = "",
        outer: int | None = None,
        **attributes: Any,
    ) -> Traced:
        """Adds a step; comparisons and what follows value by value are one step."""
        stopped = attributes.get("stop_gradient")
        function, parameters = ("stop_gradient", {}) if stopped else (kind, attributes)
        if any(is_composed(self, operand) for operand in operands):
            with contextlib.suppress(SeveralValues):
                if function in FUNCTIONS or function in COMBINATIONS:
                    return composed(self, function, operands, parameters, tuple(shape))
        outers = {operand.outer for operand in operands if isinstance(operand, Traced)} if outer is None else {outer}
        if len(outers) > 1:
            raise Refused(MIXES)
        dtype, label = torch.bool if dtype is bool else dtype, label or self.word_of(self.operator)
        samples = curves(self, function, operands, parameters)
        try:
            item = super().emit(kind, operands, shape, dtype, samples, label=label, **attributes)
        except _RowsDiffer:
            if outers != {1} or kind not in _OF_ROWS:
                raise
            return self._of_rows_apart(kind, operands, tuple(shape), attributes)
        assert isinstance(item, Traced)
        item.outer = outers.pop() if outers else 1
        self.operands_of[item.name] = tuple(operands)
        self.calls[item.name] = tuple(call for call, _ in self.stack())
        return item

    def read_by(self, kind: str, items: Sequence[object]) -> tuple[str | float | None, ...]:
        words = (word.rstrip("?") for word in (*KINDS[kind].inputs, *[""] * len(items)))
        roles = (word if word in _ROLES else "" for word in words)
        return tuple(self.operand(item, role) for item, role in zip(items, roles, strict=False))

    def name_of_result(self) -> str:
        return free_name(self.current.name, self.constants, self.tensors, self.values, first=1)

    def _of_rows_apart(self, kind: str, operands: Sequence[Any], shape: Shape, attributes: Mapping[str, Any]) -> Traced:
        """A step on operands of several rows for each example, with an axis of their own for these rows."""
        axis = self.batch_axis(shape)
        rows = shape[axis].multiple
        if kind in ("matmul", "attention") and axis >= len(shape) - 2:
            raise Refused(MIXES)
        apart = []
        for operand in operands:
            at = axis - len(shape) + len(operand.shape) if isinstance(operand, Traced | Fixed) else -1
            if at >= 0:
                size = operand.shape[at]
                parts = [Batch(), rows] if size == shape[axis] else [1, size]
                operand = self.reshape(operand, [*operand.shape[:at], *parts, *operand.shape[at + 1 :]])
            apart.append(operand)
        result = self.emit(kind, apart, (*shape[:axis], Batch(), rows, *shape[axis + 1 :]), **attributes)
        return self.reshape(result, shape)

    def permute(self, item: Either, axes: Sequence[int]) -> Either:
        return self.call(aten.permute.default, item, [int(axis) for axis in axes])

    def reshape(self, item: Either, shape: Sequence[Size]) -> Either:
        return self.call(aten.reshape.default, item, list(shape))

    def cut(self, x: Either, axis: int, start: int, stop: int, step: int = 1) -> Either:
        if isinstance(x, Fixed):
            return self.call(aten.slice.Tensor, x, axis, start, stop, step)
        return super().cut(x, axis, start, stop, step)

    def join(self, items: Sequence[Any], axis: int) -> Any:
        return self.call(aten.cat.default, list(items), axis)

    # --- operators ----------------------------------------------------------------------------------------------------

    def call(self, operator: Operator, *args: Any, **kwargs: Any) -> Any:
        """Applies an operator to items and numbers; shapes follow from PyTorch."""
        bound = arguments(operator, args, kwargs)
        positional, keywords = call_form(operator, tree_map((Traced, Fixed, Batch), _blank, bound))
        if "device" in keywords:
            keywords["device"] = torch.device("meta")
        result = operator(*positional, **keywords)
        meta = tree_map(torch.Tensor, meta_of, result)
        return self.apply(operator, bound, meta if isinstance(result, torch.Tensor) else list(meta))

    def apply(self, operator: Operator, bound: Bound, meta: Metas) -> Any:
        """What an operator makes of items: steps, or a program. meta: of its result, or of several."""
        items = leaves((Traced, Fixed), bound)
        noise = any(isinstance(item, Fixed) and item.noise for item in items)
        if not any(isinstance(item, Traced) for item in items):
            if leaves(FollowsTheBatch, bound):
                raise CaptureError(f"{self.place()}: {self.word_of(operator)}: {SIZE_OF_BATCH}")
            random = is_random(operator, bound)
            probability = "p" if operator is aten.dropout.default else "dropout_p"
            if random and self.noise_is_training and bound.get(probability):
                # Of learned queries: a constant that training computes with dropout, evaluation without.
                bound, random = {**bound, probability: InTraining(bound[probability])}, False
            return self.program(operator, bound, meta, noise or random)
        outer_operator, self.operator = self.operator, self.operator or operator
        outer_applied, self.applied = self.applied, operator
        growing: tuple[dict[Any, Any], ...] = (self.constants, self._constant_of)
        count, sizes = len(self.steps), [len(table) for table in growing]
        several = meta if isinstance(meta, list) else [meta]
        for item in items:
            if isinstance(item, Traced) and item.lost:
                results = [replace(item, shape=one.shape, dtype=one.dtype) for one in several]
                return results if isinstance(meta, list) else results[0]
        try:
            if leaves(FollowsTheBatch, bound):
                raise Refused(SIZE_OF_BATCH)
            if any(FOLLOWS in one.shape for one in several if one is not None):
                raise Refused(MIXES)
            if noise:
                return self.noisy(operator, bound, meta)
            name = base_name(operator)
            handler = HANDLERS.get(f"{name}.{operator._overloadname}") or HANDLERS.get(name)
            if handler is not None:
                return handler(self, SimpleNamespace(**bound), meta)
            return self._decomposed(operator, bound)
        except Refused as refused:
            if outer_operator is not None:
                raise
            self.forget(count)
            for table, size in zip(growing, sizes, strict=True):
                while len(table) > size:
                    table.popitem()
            return self.refused(bound, meta, str(refused))
        finally:
            self.operator, self.applied = outer_operator, outer_applied

    def _decomposed(self, operator: Operator, bound: Bound) -> Any:
        """An operator without a handler, by what PyTorch says it consists of."""
        table = torch._decomp.core_aten_decompositions()
        if operator not in table and not operator._can_decompose():
            raise Refused("")
        items = leaves((Traced, Fixed), bound)

        def function(*tensors: torch.Tensor) -> Any:
            replacements = iter(tensors)
            args, kwargs = call_form(operator, tree_map((Traced, Fixed), lambda _: next(replacements), numbers))
            return operator(*args, **kwargs)

        numbers = tree_map(Batch, _blank, bound)
        selected = {operator: table[operator]} if operator in table else {}
        try:
            graph = make_fx(function, decomposition_table=selected, tracing_mode="real")(*map(_blank, items)).graph
        except Exception as error:
            raise Refused("") from error
        known: dict[Any, Any] = {}
        remaining = iter(items)
        for node in graph.nodes:
            args, kwargs = tree_map(torch.fx.Node, known.__getitem__, (tuple(node.args), dict(node.kwargs)))
            if node.op == "placeholder":
                known[node] = next(remaining)
            elif node.op == "output":
                return list(args[0]) if isinstance(args[0], (list, tuple)) else args[0]
            elif getattr(node.target, "__name__", "") == "getitem":
                known[node] = args[0][args[1]]
            elif not isinstance(node.target, Operator) or node.target is operator or node.target._schema.is_mutable:
                break
            else:
                args, kwargs = tree_map(int, _size, (args, kwargs))
                known[node] = self.call(node.target, *args, **kwargs)
        raise Refused("")

    def program(self, operator: Operator, bound: Bound, meta: Metas, noise: bool, in_place: bool = False) -> Any:
        """The result of an operator on what does not depend on the input."""
        args, kwargs = call_form(operator, tree_map(Fixed, lambda item: item.node, dict(bound)))
        node = Node(full_name(operator), tuple(args), kwargs, in_place)
        if isinstance(meta, list):
            return [Fixed(Node("item", (node, at)), one.shape, one.dtype, noise) for at, one in enumerate(meta)]
        return Fixed(node, meta.shape, meta.dtype, noise)

    def noisy(self, operator: Operator, bound: Bound, meta: Metas) -> Any:
        """A step that is nothing in evaluation."""
        if not self.noise_is_training:
            raise Refused("it draws random numbers in evaluation too")
        values = leaves(Traced, bound)
        if len(values) != 1 or isinstance(meta, list) or meta.shape != values[0].shape:
            raise Refused("it computes with random numbers")

        def frozen(node: Node) -> Node:
            return Node("data", (self.tensors[node.args[0]].detach(),)) if node.operator == "source" else node

        def leaf(item: Item) -> Node:
            # It is called with its operand alone: parameters are what they are at capture.
            return map_nodes(frozen, item.node) if isinstance(item, Fixed) else Node("operand", (0,))

        args, kwargs = call_form(operator, tree_map((Traced, Fixed), leaf, dict(bound)))
        value, node = self._with_scale(values[0], Node(full_name(operator), tuple(args), kwargs))
        axis = self.batch_of(value) or 0
        rows = max(self.for_one(value.shape)[axis] if value.shape else 1, 1)
        return self.emit("dropout", [value], *meta, expression=Expression(node, axis, rows))

    def _with_scale(self, value: Traced, node: Node) -> tuple[Traced, Node]:
        """Stochastic depth divides by the probability before or after the noise: before, it is a part of the noise."""
        step = self.step_of(value)
        if step is None or step.kind not in ("div", "mul") or step.place.path != self.place().path:
            return value, node
        source = self.operands_of[value.name][0]
        if not isinstance(source, Traced) or not isinstance(step.inputs[1], float):
            return value, node
        scaled = Node(f"aten.{step.kind}.Tensor", (Node("operand", (0,)), step.inputs[1]))
        return source, map_nodes(lambda leaf: scaled if leaf.operator == "operand" else leaf, node)

    def refused(self, bound: Bound, meta: Metas, reason: str = "") -> Any:
        """Steps that the plan refuses; they vanish where nobody reads them."""
        values = list(dict.fromkeys(leaves(Traced, bound)))
        mixed, results = len({value.outer for value in values}) > 1, []
        for one in meta if isinstance(meta, list) else [meta]:
            lost = mixed or FOLLOWS in one.shape or len(self.batch_axes(one.shape)) != 1
            shape = (Batch(), *(size for size in one.shape if type(size) is int)) if lost else one.shape
            result = self.emit("unsupported", values, shape, one.dtype, outer=1, reason=reason)
            results.append(replace(result, shape=one.shape, lost=lost))
        return results if isinstance(meta, list) else results[0]


def _blank(value: Batch | Item) -> Any:
    """What PyTorch finds shapes with in place of an item or a size."""
    if isinstance(value, Batch):
        return value.multiple * _EXAMPLES
    shape = [_blank(size) if isinstance(size, Batch) else size for size in value.shape]
    return torch.empty(shape, dtype=value.dtype, device="meta")


def require_fixed(operand: object, what: str) -> None:
    if isinstance(operand, Traced):
        raise Refused(f"its {what} depends on the input")


def require_numbers(c: Converter, *operands: object) -> None:
    """Integers that the network is given, and sums and products of such, are numbers as well."""
    for operand in operands:
        if not isinstance(operand, Traced) or operand.dtype.is_floating_point:
            continue
        if operand.name not in c.truths | c.wholes | c.counted:
            raise Refused("it computes with integers or truth values that depend on the input")
