# SPDX-License-Identifier: Apache-2.0
"""A network under construction, of an exported program: operands, constants, steps and refusals."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ...device.functions import COMBINATIONS, FUNCTIONS
from ...planning.callers import PACKAGE
from ...planning.network import Constant, Place, Step, Value
from ..core.builder import Builder, free_name
from ..core.refusals import MIXES, SIZE_OF_BATCH, Refused
from .composition import SeveralValues, composed, is_composed
from .contents import BATCH, Content, Meta, Storage
from .expression import Expression, Node, leaves, map_nodes, tree_map
from .schema import base_name, call_form, full_name
from .sizes import FOLLOWS, Sizes

aten = torch.ops.aten

# PyTorch and this package: what is in their files is not the user's.
NOT_USERS = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, PACKAGE)

# What gives integers of integers, as it does of real numbers; the first ones where no integer is too large.
_SUMS = {"add", "sub", "mul", "neg", "abs", "square", "sum"}
_CHOICES = {"maximum", "minimum", "clamp", "compare", "relu", "amax", "amin", "identity"}
_MOVEMENTS = {"reshape", "expand", "permute", "slice", "flip", "gather", "concat", "pad"}
_LARGE = (torch.bool, torch.int32, torch.int64)
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


class RowsDiffer(Refused):
    """A constant beside the batch has several different rows for each example."""


class StepBuilder(Builder):
    """A network under construction, of an exported program."""

    # The node that is being read; the operator of the export, and the one that a handler is asked for: a part of it,
    # or itself.
    current: Any = None
    operator: Any = None
    applied: Any = None

    def __init__(self, model: nn.Module, program: Any, sizes: Sizes) -> None:
        super().__init__()
        self.prime = BATCH
        self.sizes = sizes
        # Of a complex value by its name: real and imaginary part.
        self.complexes: dict[str, tuple[Content, Content | None]] = {}
        self.model, self.program_of_export = model, program
        self.tensors: dict[str, torch.Tensor] = {}
        self.paths: dict[str, str] = {}
        first: dict[int, str] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for path, tensor in named:
            self.paths[path] = first.setdefault(id(tensor), path)
            self.tensors.setdefault(self.paths[path], tensor)
        self.parameters = {path for path, _ in model.named_parameters()}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.producers: dict[str, tuple[Step, tuple[Any, ...]]] = {}
        self.constant_of: dict[int, str | float] = {}
        self.storages: dict[int, Storage] = {}
        self.environment: dict[Any, Any] = {}
        self.calls: dict[str, tuple[str, ...]] = {}
        # The storages of parameters, buffers and other tensors of the model's own, by path; and which of them forward
        # writes into, and where first.
        self.own: dict[str, Storage] = {}
        self.mutated: dict[str, Place] = {}
        self.counters: set[str] = set()
        # Values of integers that are as good as real numbers: the network is given them, or computes them of such.
        self.integers: set[str] = set()

    @property
    def noise_is_training(self) -> bool:
        """Whether the module around the current node trains: then random numbers are noise of training."""
        module = self.modules.get(self.place().path)
        return module is not None and module.training

    # --- sizes ------------------------------------------------------------------------------------------------------

    def follows(self, size: Any) -> bool:
        return bool(size and size % BATCH == 0)

    def for_one(self, shape: Iterable[Any]) -> tuple[int, ...]:
        return tuple(int(size // BATCH if self.follows(size) else size) for size in shape)

    def batch_axis(self, tensor: Content) -> int | None:
        axes = self.batch_axes(tensor.shape)
        return axes[0] if axes and tensor.is_value and not tensor.broken else None

    def number(self, value: Any) -> float:
        """A number that is an operand."""
        if isinstance(value, bool):
            return int(value)
        if value is FOLLOWS or (isinstance(value, int) and value and value % BATCH == 0):
            raise Refused(SIZE_OF_BATCH)
        return value

    def keep_batch(self, tensor: Content, axes: Iterable[int]) -> None:
        if self.batch_axis(tensor) in set(axes):
            raise Refused(MIXES)

    # --- where the current step is ------------------------------------------------------------------------------------

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
        file, line = next(
            ((f, n) for f, n in reversed(frames) if not f.startswith((*NOT_USERS, "<eval_with_key>"))), ("", 0)
        )
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
        if name.startswith("fft_"):
            return f"torch.fft.{name.removeprefix('fft_')}"
        if hasattr(torch, name) and not name.startswith("_"):
            return f"torch.{name}"
        if hasattr(nn.functional, name):
            return f"F.{name}"
        return f"Tensor.{name}" if hasattr(torch.Tensor, name) else name

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """What an operator makes of tensors and numbers as a handler has them."""
        raise NotImplementedError

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
            raise Refused(SIZE_OF_BATCH)
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
        """Paths of the parameters and buffers of a tensor that does not depend on the input."""
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
        name = free_name(base, self.constants, self.tensors, self.values, first=1)
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
        return free_name(base, self.constants, self.tensors, self.values, first=1)

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
        self.values[name] = Value(name, self.for_one(meta.shape), axes[0] if axes else 0, dtype)
        whole = kind in _CHOICES | _MOVEMENTS or (kind in _SUMS and meta.dtype in _LARGE)
        if not meta.dtype.is_floating_point and whole and {each.name for each in values} <= self.integers:
            self.integers.add(name)
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
        view = None
        if kind == "dropout":
            values, node = self.with_scale(values, node)
            if (source := self.before_view(values[0])) is not None:
                seen = Node("aten.reshape.default", (Node("operand", (0,)), list(values[0].shape)))
                node = map_nodes(lambda each: seen if each.operator == "operand" else each, node)
                node = Node("aten.reshape.default", (node, list(source.shape)))
                values, view, meta = [source], meta, source.meta
        axis = self.batch_axis(values[0]) or 0
        rows = max(self.for_one(values[0].shape)[axis] if values[0].shape else 1, 1)
        several = meta if isinstance(meta, list) else [meta]
        results = []
        for index, result in enumerate(several):
            picked = Node("item", (node, index)) if isinstance(meta, list) else node
            expression = Expression(picked, self.prime, axis, rows)
            broken = kind == "unsupported" and (
                len(self.batch_axes(result.shape)) != 1 or len({value.outer for value in values}) > 1
            )
            results.append(self.emit(kind, values, result, broken=broken, expression=expression))
        if view is not None:
            return self.call(aten.reshape.default, results[0], list(view.shape))
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
        """Stochastic depth divides by the probability before or after the noise: before, it is a part of the noise."""
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

    def before_view(self, x: Content) -> Content | None:
        """What has the same values without axes of one, if the operator's own module made `x` of it.

        PyTorch gives noise that drops whole channels one more axis where it has one too few (nn.Dropout3d of images);
        evaluation has no such step.
        """
        producer = self.producers.get(x.name)
        if producer is None or producer[0].kind != "reshape" or producer[0].place.path != self.place().path:
            return None
        source = producer[1][0]
        same = [size for size in source.shape if size != 1] == [size for size in x.shape if size != 1]
        return source if same else None

    def unsupported(self, operator: Any, bound: Mapping[str, Any], meta: Any, reason: str) -> Any:
        result = self.opaque(operator, bound, meta, "unsupported")
        for made in result if isinstance(result, list) else [result]:
            index = next(i for i in reversed(range(len(self.steps))) if self.steps[i].output == made.name)
            step = self.steps[index]
            self.steps[index] = replace(step, attributes={**step.attributes, "reason": reason})
        return result

    def unsupported_part(self, a: SimpleNamespace, meta: list[Meta], index: int, reason: str) -> Content:
        """One of several results that no kind says, while others are; it vanishes where nobody reads it."""
        return self.unsupported(self.applied, vars(a), meta, reason)[index]
