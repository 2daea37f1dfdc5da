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
import functools
import inspect
import io
import logging
import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from .network import Constant, Network, Place, Step, Value

aten = torch.ops.aten

_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 2003, 2011)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# A momentum that no user gives: stands for None, whose export would need the counter's value.
_CUMULATIVE = -0.123456789


_MIXES = "it mixes the examples of a batch"


class CaptureError(ValueError):
    """The model is not a fixed sequence of operations on tensors; the message says where, and what to do."""


class _Refused(Exception):
    """No kind of the vocabulary says what an operation does; the step becomes "unsupported"."""


# --- what is computed without the input: programs -------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """A size of `count` rows for each example."""

    count: int


@dataclass(frozen=True)
class _Slot:
    """The result of an earlier instruction."""

    index: int


@dataclass(eq=False, frozen=True)
class _Node:
    """A result in the graph of what is computed without the input.

    `operator` is an operator's name ("aten.add.Tensor"), or one of: "source" (args: path), "data" (args: tensor),
    "operand" (args: index), "item" (args: node, index).
    """

    operator: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    in_place: bool = False


@functools.cache
def _overload(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


class Expression(nn.Module):
    """What is computed from parameters, buffers and numbers, and from a step's operands where it has any.

    Called with the tensors of `sources` in their order, then the operands; differentiable. `rows` is the number of rows
    that an operand's batch axis holds for one example, `axis` that axis: they give the batch, one without operands.
    Floating-point numbers of the expression take the dtype and the device of the first tensor that it is given.
    """

    def __init__(self, node: _Node, prime: int, axis: int = 0, rows: int = 1) -> None:
        super().__init__()
        self.axis, self.rows = axis, rows
        self.instructions: list[tuple[str, list[Any], dict[str, Any], bool]] = []
        indices: dict[int, int] = {}
        sources: list[str] = []

        def encode(value: Any) -> Any:
            if isinstance(value, _Node):
                return _Slot(indices[id(value)])
            if isinstance(value, (list, tuple)):
                return [encode(element) for element in value]
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40 and value % prime == 0:
                return _Rows(value // prime)
            return value

        # Depth first without recursion: chains of thousands of nodes occur.
        stack = [(node, False)]
        while stack:
            current, ready = stack.pop()
            if id(current) in indices:
                continue
            if not ready:
                stack.append((current, True))
                stack += [(leaf, False) for leaf in reversed(_nodes_in((current.args, current.kwargs)))]
                continue
            indices[id(current)] = len(self.instructions)
            args = encode(current.args)
            if current.operator == "source":
                sources.append(current.args[0])
            elif current.operator == "data":
                args = [f"data_{len(self.instructions)}"]
                self.register_buffer(args[0], current.args[0], persistent=False)
            kwargs = {key: encode(value) for key, value in current.kwargs.items()}
            self.instructions.append((current.operator, args, kwargs, current.in_place))
        self.sources = tuple(sources)

    @property
    def follows_the_batch(self) -> bool:
        return any(_contains((args, kwargs), _Rows) for _, args, kwargs, _ in self.instructions)

    def forward(self, *tensors: torch.Tensor, batch: int | None = None) -> Any:
        given, operands = dict(zip(self.sources, tensors, strict=False)), tensors[len(self.sources) :]
        if batch is None:
            batch = operands[0].shape[self.axis] // self.rows if operands and operands[0].dim() > self.axis else 1
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        device = tensors[0].device if tensors else torch.device("cpu")

        def decode(value: Any) -> Any:
            if isinstance(value, _Slot):
                return results[value.index]
            if isinstance(value, _Rows):
                return value.count * batch
            if isinstance(value, list):
                return [decode(element) for element in value]
            if isinstance(value, torch.dtype):
                return dtype if value.is_floating_point else value
            return device if isinstance(value, torch.device) else value

        results: list[Any] = []
        for name, args, kwargs, in_place in self.instructions:
            if name in ("source", "data"):
                tensor = given[args[0]] if name == "source" else getattr(self, args[0])
                results.append(tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype))
            elif name == "operand":
                results.append(operands[args[0]])
            elif name == "item":
                results.append(decode(args[0])[args[1]])
            else:
                arguments = [decode(value) for value in args]
                if in_place:
                    arguments[0] = arguments[0].clone()
                results.append(_overload(name)(*arguments, **{key: decode(value) for key, value in kwargs.items()}))
        return results[-1]

    def same_as(self, other: Expression) -> bool:
        """Whether both are the same instructions on the same sources and data."""
        ours, theirs = dict(self.named_buffers()), dict(other.named_buffers())
        same = (self.axis, self.rows) == (other.axis, other.rows) and _same(ours, theirs)
        return same and _same(self.instructions, other.instructions)


def _nodes_in(value: Any) -> list[_Node]:
    if isinstance(value, _Node):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [node for element in value for node in _nodes_in(element)]


def _contains(value: Any, what: type) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return isinstance(value, what) or (isinstance(value, (list, tuple)) and any(_contains(v, what) for v in value))


def _same(a: Any, b: Any) -> bool:
    """Equality that looks into tensors and containers."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return False
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, Expression) and isinstance(b, Expression):
        return a.same_as(b)
    return type(a) is type(b) and (a == b or (a != a and b != b))


# --- tensors of the export: contents, storages, views ---------------------------------------------------------------


@dataclass(frozen=True)
class _Meta:
    """Shape (the batch as the prime) and dtype of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _Tensor:
    """What a tensor of the export holds at one moment: a value of the network by name, or a node of a program.

    Attributes:
        noise: the node draws random numbers.
        outer: of a value: its batch axis holds (outer, batch, rows / outer) in this order.
        broken: of a value: behind a step that mixes the examples of a batch; no more is said about its batch.
    """

    meta: _Meta
    name: str = ""
    node: _Node | None = None
    noise: bool = False
    outer: int = 1
    broken: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape

    @property
    def is_value(self) -> bool:
        return self.node is None


class _Storage:
    """What views share: a content, and how often it was replaced."""

    def __init__(self, content: _Tensor) -> None:
        self.content, self.version = content, 0


@dataclass(frozen=True, eq=False)
class _ViewStep:
    """One operation that looks into a storage through its argument `source`; `index` picks from several results."""

    operator: Any
    source: str
    arguments: Mapping[str, Any]
    meta: Any
    index: int | None


class _View:
    """A tensor of the export: a storage seen through a chain of operations."""

    def __init__(self, storage: _Storage, chain: tuple[_ViewStep, ...], content: _Tensor) -> None:
        self.storage, self.chain = storage, chain
        self.content, self.version = content, storage.version


# --- the conversion -------------------------------------------------------------------------------------------------

_HANDLERS: dict[str, Callable[..., Any]] = {}


def _handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _base_name(operator: Any) -> str:
    return operator._schema.name.split("::")[1]


def _full_name(operator: Any) -> str:
    return f"{operator.namespace}.{_base_name(operator)}.{operator._overloadname}"


def _is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


def _arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by the names of the operator's schema."""
    bound = dict(kwargs)
    for position, argument in enumerate(operator._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        elif argument.name not in bound:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def _without_out(operator: Any) -> Any:
    """The operator that returns what this one writes into its argument `out`."""
    packet = getattr(aten, _base_name(operator))
    wanted = [argument.name for argument in operator._schema.arguments if argument.name != "out"]
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if [argument.name for argument in found._schema.arguments] == wanted:
            return found
    raise CaptureError(f"{_base_name(operator)}(out=...) is not understood")


def _call_form(operator: Any, bound: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """`_arguments` back to positional and keyword arguments."""
    schema = operator._schema.arguments
    return (
        [bound[argument.name] for argument in schema if not argument.kwarg_only],
        {argument.name: bound[argument.name] for argument in schema if argument.kwarg_only},
    )


def _tree_map(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _tree_map(kind, function, element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        # Lists and tuples of their own kinds (torch.Size, named results, fx's lists) become plain ones.
        mapped = [_tree_map(kind, function, element) for element in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return value


def _leaves(kind: type, value: Any) -> list[Any]:
    found: list[Any] = []
    _tree_map(kind, found.append, value)
    return found


class Tree:
    """How a model's arguments and results nest."""

    def __init__(self, signature: inspect.Signature, leaves: Sequence[Any], spec: Any) -> None:
        self.signature, self.spec = signature, spec
        self.tensors = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        # What the network was captured for: its values are fixed in it.
        self.others = {index: leaf for index, leaf in enumerate(leaves) if index not in self.tensors}
        self.results: tuple[Any, list[tuple[bool, Any]]] = (None, [])

    @staticmethod
    def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name; those left out by their defaults."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def flatten(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The tensors among a call's arguments, in the order of `Network.inputs`.

        Raises:
            TypeError: the arguments nest otherwise than the example's, or what is no tensor has another value.
        """
        leaves, spec = pytree.tree_flatten(self.bind(self.signature, args, kwargs))
        names = [_leaf_name(path) for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, spec))[0]]
        if spec != self.spec or any(not isinstance(leaves[index], torch.Tensor) for index in self.tensors):
            raise TypeError(
                "the arguments must nest as those of the example did: the same tensors, None where it had None"
            )
        for index, value in self.others.items():
            if isinstance(leaves[index], torch.Tensor) or leaves[index] != value:
                given = "a tensor" if isinstance(leaves[index], torch.Tensor) else repr(leaves[index])
                raise TypeError(f"the network was captured for {names[index]} = {value!r}, got {given}")
        return [leaves[index] for index in self.tensors]

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's result from the values of `Network.outputs`."""
        spec, leaves = self.results
        return pytree.tree_unflatten([outputs[leaf] if is_output else leaf for is_output, leaf in leaves], spec)


@dataclass
class _Draft:
    """A network under construction, of one export."""

    network: Network
    mutated: Sequence[str]


# Operators by the words of those who write them otherwise.
_WORDS = {
    "upsample_": "F.interpolate",
    "_upsample_": "F.interpolate",
    "slice": "slicing",
    "select": "indexing",
    "index.": "indexing",
    "linalg_vector_norm": "torch.linalg.vector_norm",
    "_weight_norm": "weight_norm",
}


class _Converter:
    """Reads an exported program node by node."""

    def __init__(self, model: nn.Module, program: Any, prime: int, noise: bool) -> None:
        self.noise_is_training = noise
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
        self.storages: dict[int, _Storage] = {}
        self.environment: dict[Any, Any] = {}
        self.calls: dict[str, tuple[str, ...]] = {}
        self.current: Any = None
        self.mutated: list[str] = []
        self.counters: set[str] = set()
        self.refusals: dict[tuple[Place, str], int] = {}
        self.graph_module: Any = None

    # --- sizes ------------------------------------------------------------------------------------------------------

    def example(self, shape: Iterable[int]) -> tuple[int, ...]:
        """A shape for a batch of one."""
        return tuple(size // self.prime if size and size % self.prime == 0 else size for size in shape)

    def batch_axes(self, shape: Sequence[int]) -> list[int]:
        return [axis for axis, size in enumerate(shape) if size and size % self.prime == 0]

    def batch_axis(self, tensor: _Tensor) -> int | None:
        axes = self.batch_axes(tensor.shape)
        return axes[0] if axes and tensor.is_value and not tensor.broken else None

    def number(self, value: Any) -> float:
        """A number that is an operand."""
        if isinstance(value, bool):
            return int(value)
        if value and math.isfinite(value) and (value % self.prime == 0 or abs((1 / value) % self.prime) < 1e-9):
            raise _Refused("it computes with the size of the batch")
        return value

    def keep_batch(self, tensor: _Tensor, axes: Iterable[int]) -> None:
        if self.batch_axis(tensor) in set(axes):
            raise _Refused(_MIXES)

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
        file, line = next(((f, n) for f, n in reversed(frames) if not f.startswith(_TORCH)), ("", 0))
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
        name = _base_name(operator)
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
            raise _Refused("it computes with the size of the batch")
        if not torch.equal(three, torch.cat([one] * 3, axes[0]) if axes else one):
            raise _Refused("it differs between the examples of a batch")

    def data(self, tensor: _Tensor) -> torch.Tensor:
        """Content of a tensor that does not depend on the input, as it is now.

        Raises:
            _Refused: it depends on the input, or is random.
        """
        if tensor.node is None or tensor.noise:
            raise _Refused("an operand that must be fixed depends on the input")
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

    def constant(self, tensor: _Tensor, role: str) -> str | float:
        node = tensor.node
        assert node is not None
        if tensor.noise:
            raise _Refused("it computes with random numbers")
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
        meta: _Meta,
        roles: Sequence[str] = (),
        outer: int | None = None,
        broken: bool = False,
        label: str = "",
        **attributes: Any,
    ) -> _Tensor:
        """Adds a step and returns what it makes."""
        values = [operand for operand in operands if isinstance(operand, _Tensor) and operand.is_value]
        broken = broken or any(value.broken for value in values)
        axes = self.batch_axes(meta.shape)
        if not broken:
            if len(axes) != 1:
                raise _Refused(_MIXES)
            if outer is None:
                outers = {value.outer for value in values}
                if len(outers) > 1:
                    raise _Refused(_MIXES)
                outer = outers.pop() if outers else 1
        roles = [*roles, *[""] * len(operands)]
        inputs = tuple(self.operand(operand, role) for operand, role in zip(operands, roles, strict=False))
        name = self.new_name()
        dtype = "float32" if meta.dtype.is_floating_point else str(meta.dtype).removeprefix("torch.")
        self.values[name] = Value(name, self.example(meta.shape), axes[0] if axes else 0, dtype)
        step = Step(kind, inputs, name, attributes, self.place(), label=label or self.label(self.operator))
        self.steps.append(step)
        self.producers[name] = (step, tuple(operands))
        self.calls[name] = tuple(call for call, _, _ in self.stack())
        return _Tensor(meta, name, outer=outer or 1, broken=broken)

    def program(self, operator: Any, bound: Mapping[str, Any], meta: Any, noise: bool, in_place: bool = False) -> Any:
        """The result of an operator on what does not depend on the input."""
        args, kwargs = _call_form(operator, _tree_map(_Tensor, lambda tensor: tensor.node, dict(bound)))
        node = _Node(_full_name(operator), tuple(args), kwargs, in_place)
        if isinstance(meta, list):
            return [_Tensor(m, node=_Node("item", (node, i)), noise=noise) for i, m in enumerate(meta)]
        return _Tensor(meta, node=node, noise=noise)

    def opaque(self, operator: Any, bound: Mapping[str, Any], meta: Any, kind: str, in_place: bool = False) -> Any:
        """A step whose meaning is the operator itself: unsupported, or noise."""
        values: list[_Tensor] = []

        def leaf(tensor: _Tensor) -> Any:
            if not tensor.is_value:
                # It is called with its operands alone: parameters are what they are at capture.
                assert tensor.node is not None
                return _map_nodes(self.frozen, tensor.node)
            if tensor not in values:
                values.append(tensor)
            return operand_nodes.setdefault(values.index(tensor), _Node("operand", (values.index(tensor),)))

        operand_nodes: dict[int, _Node] = {}
        args, kwargs = _call_form(operator, _tree_map(_Tensor, leaf, dict(bound)))
        node = _Node(_full_name(operator), tuple(args), kwargs, in_place)
        if kind == "dropout":
            values, node = self.with_scale(values, node)
        axis = self.batch_axis(values[0]) or 0
        rows = max(self.example(values[0].shape)[axis] if values[0].shape else 1, 1)
        several = meta if isinstance(meta, list) else [meta]
        results = []
        for index, result in enumerate(several):
            picked = _Node("item", (node, index)) if isinstance(meta, list) else node
            expression = Expression(picked, self.prime, axis, rows)
            broken = kind == "unsupported" and (
                len(self.batch_axes(result.shape)) != 1 or len({value.outer for value in values}) > 1
            )
            results.append(self.emit(kind, values, result, broken=broken, expression=expression))
        return results if isinstance(meta, list) else results[0]

    def frozen(self, node: _Node) -> _Node:
        return _Node("data", (self.tensors[node.args[0]].detach(),)) if node.operator == "source" else node

    def noisy(self, operator: Any, bound: Mapping[str, Any], meta: Any, in_place: bool = False) -> Any:
        """A step that is nothing in evaluation."""
        if not self.noise_is_training:
            raise _Refused("it draws random numbers in evaluation too")
        values = [tensor for tensor in _leaves(_Tensor, bound) if tensor.is_value]
        if len(values) != 1 or isinstance(meta, list) or meta.shape != values[0].shape:
            raise _Refused("it computes with random numbers")
        return self.opaque(operator, bound, meta, "dropout", in_place)

    def with_scale(self, values: list[_Tensor], node: _Node) -> tuple[list[_Tensor], _Node]:
        """Stochastic depth divides by the probability before or behind the noise: before, it is a part of the noise."""
        producer = self.producers.get(values[0].name)
        if producer is None or producer[0].kind not in ("div", "mul"):
            return values, node
        step, operands = producer
        same_place = step.place.path == self.place().path
        if (
            len(values) != 1
            or not same_place
            or not isinstance(operands[0], _Tensor)
            or not isinstance(step.inputs[1], float)
        ):
            return values, node
        scaled = _Node(f"aten.{step.kind}.Tensor", (_Node("operand", (0,)), step.inputs[1]))
        return [operands[0]], _map_nodes(lambda leaf: scaled if leaf.operator == "operand" else leaf, node)

    def unsupported(self, operator: Any, bound: Mapping[str, Any], meta: Any, reason: str) -> Any:
        place = self.place()
        self.refusals[place, reason] = self.refusals.get((place, reason), 0) + (
            len(meta) if isinstance(meta, list) else 1
        )
        if reason == _MIXES and self.refusals[place, reason] > self.prime // 4:
            raise CaptureError(
                f"{place}: forward goes through the examples of a batch one by one; what it does must be the same "
                "operation on all of them"
            )
        result = self.opaque(operator, bound, meta, "unsupported")
        for made in result if isinstance(result, list) else [result]:
            index = next(i for i, step in enumerate(self.steps) if step.output == made.name)
            step = self.steps[index]
            self.steps[index] = replace(step, attributes={**step.attributes, "reason": reason})
        return result

    def unsupported_part(self, a: SimpleNamespace, meta: list[_Meta], index: int) -> _Tensor:
        """One of several results that no kind says, while others are; it vanishes where nobody reads it."""
        return self.opaque(self.applied, vars(a), meta, "unsupported")[index]

    # --- one operator -------------------------------------------------------------------------------------------------

    # The operator of the export that is being read, and the one that a handler is asked for: a part of it, or itself.
    operator: Any = None
    applied: Any = None

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies an operator to tensors and numbers as a handler has them; shapes follow from PyTorch."""
        bound = _arguments(operator, args, kwargs)
        blank = _tree_map(_Tensor, lambda t: torch.empty(t.shape, dtype=t.meta.dtype, device="meta"), dict(bound))
        positional, keywords = _call_form(operator, blank)
        if "device" in keywords:
            keywords["device"] = torch.device("meta")
        result = operator(*positional, **keywords)
        meta = _tree_map(torch.Tensor, lambda t: _Meta(tuple(t.shape), t.dtype), result)
        return self.apply(
            operator, bound, list(meta) if isinstance(meta, tuple) and not isinstance(result, torch.Tensor) else meta
        )

    def apply(self, operator: Any, bound: dict[str, Any], meta: Any) -> Any:
        """What an operator makes of contents: steps, or a program."""
        name, overload = _base_name(operator), operator._overloadname
        shape_only = _SHAPE_ONLY.get(name)
        if shape_only is not None and isinstance(bound.get("self"), _Tensor) and bound["self"].is_value:
            operator, bound = shape_only(bound, meta)
        tensors = _leaves(_Tensor, bound)
        noise = any(tensor.noise for tensor in tensors)
        if not any(tensor.is_value for tensor in tensors):
            return self.program(operator, bound, meta, noise or _is_random(operator))
        outer_operator, self.operator = self.operator, self.operator or operator
        outer_applied, self.applied = self.applied, operator
        mark = (len(self.steps), dict(self.values), dict(self.constants), dict(self.constant_of), dict(self.calls))
        try:
            handler = _HANDLERS.get(f"{name}.{overload}") or _HANDLERS.get(name)
            if noise:
                return self.noisy(operator, bound, meta)
            if handler is not None:
                return handler(self, SimpleNamespace(**bound), meta)
            return self.decompose(operator, bound, meta)
        except _Refused as refused:
            if outer_operator is not None:
                raise
            del self.steps[mark[0] :]
            self.values, self.constants, self.constant_of, self.calls = mark[1:]
            return self.unsupported(operator, bound, meta, str(refused))
        finally:
            self.operator, self.applied = outer_operator, outer_applied

    def decompose(self, operator: Any, bound: dict[str, Any], meta: Any) -> Any:
        """An operator without a handler, by what PyTorch says it consists of."""
        from torch._decomp import core_aten_decompositions
        from torch.fx.experimental.proxy_tensor import make_fx

        table = core_aten_decompositions()
        if operator not in table and not operator._can_decompose():
            raise _Refused("")
        tensors = _leaves(_Tensor, bound)

        def function(*given: torch.Tensor) -> Any:
            replacements = iter(given)
            args, kwargs = _call_form(operator, _tree_map(_Tensor, lambda _: next(replacements), bound))
            return operator(*args, **kwargs)

        blank = [torch.empty(t.shape, dtype=t.meta.dtype, device="meta") for t in tensors]
        selected = {operator: table[operator]} if operator in table else {}
        try:
            graph = make_fx(function, decomposition_table=selected, tracing_mode="real")(*blank).graph
        except Exception as error:
            raise _Refused("") from error
        environment: dict[Any, Any] = {}
        remaining = iter(tensors)
        for node in graph.nodes:
            if node.op == "placeholder":
                environment[node] = next(remaining)
            elif node.op == "output":
                result = _tree_map(torch.fx.Node, environment.__getitem__, node.args[0])
                return list(result) if isinstance(result, (list, tuple)) else result
            elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                if node.target is operator or node.target._schema.is_mutable:
                    raise _Refused("")
                args = _tree_map(torch.fx.Node, environment.__getitem__, tuple(node.args))
                kwargs = _tree_map(torch.fx.Node, environment.__getitem__, dict(node.kwargs))
                environment[node] = self.call(node.target, *args, **kwargs)
            elif node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
                environment[node] = environment[node.args[0]][node.args[1]]
            else:
                raise _Refused("")
        raise _Refused("")

    # --- views and writes ---------------------------------------------------------------------------------------------

    def read(self, view: _View) -> _Tensor:
        if view.version != view.storage.version:
            content = view.storage.content
            for step in view.chain:
                content = self.look(step, content)
            view.content, view.version = content, view.storage.version
        return view.content

    def look(self, step: _ViewStep, content: _Tensor) -> _Tensor:
        result = self.apply(step.operator, {**step.arguments, step.source: content}, step.meta)
        return result if step.index is None else result[step.index]

    def write(self, view: _View, content: _Tensor) -> None:
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

    def scatter(self, step: _ViewStep, parent: _Tensor, part: _Tensor) -> _Tensor:
        """The parent of a view once the view was replaced."""
        name, a = _base_name(step.operator), SimpleNamespace(**step.arguments)
        rank = len(parent.shape)
        if name in _RESHAPES:
            return self.call(aten.reshape.default, part, list(parent.shape))
        if name in _IDENTITIES or name == "detach":
            return part
        if name in _PERMUTES:
            axes = _permutation(name, a, rank)
            return self.call(aten.permute.default, part, [axes.index(axis) for axis in range(rank)])
        axis = int(getattr(a, "dim", 0) or 0) % max(rank, 1)
        size = parent.shape[axis] if rank else 1
        if name == "slice":
            start, stop, stride = _slice_bounds(a.start, a.end, a.step, size)
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

    def put(self, x: _Tensor, axis: int, indices: Sequence[int], part: _Tensor) -> _Tensor:
        """A tensor in which `part` stands at these indices of an axis."""
        size = x.shape[axis]
        order = list(range(size))
        for position, index in enumerate(indices):
            order[index % size] = size + position
        return self.gather(self.call(aten.cat.default, [x, part], axis), axis, order)

    def gather(self, x: _Tensor, axis: int, indices: Sequence[int]) -> _Tensor:
        meta = _Meta((*x.shape[:axis], len(indices), *x.shape[axis + 1 :]), x.meta.dtype)
        if not x.is_value:
            index = _Tensor(_Meta((len(indices),), torch.int64), node=_Node("data", (torch.tensor(indices),)))
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
        for node in graph.nodes:
            self.current, outer = node, self.current
            if node.op == "placeholder":
                self.environment[node] = next(remaining)
            elif node.op == "get_attr":
                self.environment[node] = functools.reduce(getattr, node.target.split("."), owner)
            elif node.op == "output":
                self.current = outer
                return _tree_map(torch.fx.Node, self.environment.__getitem__, node.args[0])
            else:
                self.environment[node] = self.execute(node)
        raise AssertionError("a graph without an output")

    def fetch(self, value: Any) -> Any:
        return _tree_map(torch.fx.Node, self.environment.__getitem__, value)

    def execute(self, node: Any) -> Any:
        target = node.target
        args, kwargs = self.fetch(tuple(node.args)), self.fetch(dict(node.kwargs))
        if isinstance(target, torch._ops.OpOverload):
            return self.execute_operator(node, target, _arguments(target, args, kwargs))
        name = getattr(target, "__name__", str(target))
        if name == "getitem":
            return args[0][args[1]]
        if "wrap_with_set_grad_enabled" in str(target):
            enabled, graph, *rest = args
            results = self.run(graph.graph, graph, rest)
            return results if enabled else _tree_map(_View, self.detached, results)
        if "wrap_with_autocast" in str(target):
            graph = next(value for value in args if isinstance(value, torch.fx.GraphModule))
            return self.run(graph.graph, graph, args[args.index(graph) + 1 :])
        if not _leaves(_View, (args, kwargs)) and callable(target):
            return target(*args, **kwargs)
        raise CaptureError(
            f"{self.place()}: {name} is not understood: the model must be a fixed sequence of operations"
        )

    def detached(self, view: _View) -> _View:
        content = self.read(view)
        made = self.apply(aten.detach.default, {"self": content}, content.meta)
        return _View(_Storage(made), (), made)

    def execute_operator(self, node: Any, operator: Any, bound: dict[str, Any]) -> Any:
        name = _base_name(operator)
        if name.startswith(("_assert", "sym_constrain")) or node.meta.get("val", 0) is None:
            return None
        if name in ("item", "_local_scalar_dense"):
            return self.item(bound["self"])
        if name in _DROPOUTS and not (bound["train"] and bound["p"]):
            # PyTorch gives the tensor itself; its export pretends a copy.
            return bound["input"]
        schema = operator._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        contents = _tree_map(_View, self.read, bound)
        meta = self.meta_of(node)
        if written and isinstance(bound[written[0]], _View):
            return self.execute_in_place(node, operator, bound, contents, written[0])
        result = self.apply(operator, contents, meta)
        if isinstance(result, list):
            return [self.view_of(node, operator, bound, contents, r, i) for i, r in enumerate(result)]
        return self.view_of(node, operator, bound, contents, result, None)

    def item(self, view: _View) -> float:
        content = self.read(view)
        try:
            data = self.data(content)
        except _Refused:
            raise CaptureError(
                f"{self.place()}: a Python number is made of a tensor that depends on the input; a network that is "
                "deployed does the same for every input: keep it a tensor, or make it a constant"
            ) from None
        return data.item()

    def meta_of(self, node: Any) -> Any:
        value = node.meta.get("val")
        if any(not isinstance(size, int) for tensor in _leaves(torch.Tensor, value) for size in tensor.shape):
            raise CaptureError(
                f"{self.place()}: the size of a result depends on the values of a tensor ({self.label()}); give the "
                "indices as numbers instead of a mask"
            )
        made = _tree_map(torch.Tensor, lambda t: _Meta(tuple(t.shape), t.dtype), value)
        return list(made) if isinstance(made, (list, tuple)) else made

    def view_of(
        self,
        node: Any,
        operator: Any,
        bound: Mapping[str, Any],
        contents: Mapping[str, Any],
        result: _Tensor,
        index: int | None,
    ) -> _View:
        """A result as a view of the storage that PyTorch says it shares, or of a new one."""
        fake = node.meta["val"] if index is None else node.meta["val"][index]
        if not isinstance(fake, torch.Tensor):
            return _View(_Storage(result), (), result)
        identity = fake.untyped_storage()._cdata
        storage = self.storages.get(identity)
        for key, source in bound.items():
            if storage is not None and isinstance(source, _View) and source.storage is storage:
                others = {name: value for name, value in contents.items() if name != key}
                step = _ViewStep(operator, key, others, self.meta_of(node), index)
                return _View(storage, (*source.chain, step), result)
        made = _Storage(result)
        self.storages.setdefault(identity, made)
        return _View(made, (), result)

    def execute_in_place(
        self, node: Any, operator: Any, bound: dict[str, Any], contents: dict[str, Any], written: str
    ) -> _View:
        view, name = bound[written], _base_name(operator)
        before = contents[written]
        meta = before.meta
        if view.storage.content.node is not None and view.storage.content.node.operator == "source":
            self.mutated.append(view.storage.content.node.args[0])
        if name == "copy_":
            content = self.spread(contents["src"], meta)
        elif name in ("detach_", "requires_grad_", "set_"):
            return view
        elif name in ("zero_", "fill_"):
            value = contents.get("value", 0)
            if isinstance(value, _Tensor):
                content = self.spread(value, meta)
            else:
                content = self.call(aten.full.default, list(meta.shape), value, dtype=meta.dtype)
        elif written == "out":
            functional = _without_out(operator)
            content = self.spread(self.apply(functional, {k: v for k, v in contents.items() if k != "out"}, meta), meta)
        else:
            tensors = _leaves(_Tensor, contents)
            if not any(tensor.is_value for tensor in tensors):
                noise = any(tensor.noise for tensor in tensors) or _is_random(operator)
                content = self.program(operator, contents, meta, noise, in_place=True)
            else:
                content = self.functional(operator, contents, meta)
        self.write(view, content)
        return view

    def functional(self, operator: Any, contents: dict[str, Any], meta: _Meta) -> _Tensor:
        packet = getattr(aten, _base_name(operator).rstrip("_"), None)
        if packet is not None and operator._overloadname in packet.overloads():
            counterpart = getattr(packet, operator._overloadname)
            args, kwargs = _call_form(operator, contents)
            return self.apply(counterpart, _arguments(counterpart, args, kwargs), meta)
        if _is_random(operator):
            return self.noisy(operator, contents, meta, in_place=True)
        raise CaptureError(f"{self.place()}: {self.label(operator)} in place is not understood")

    def spread(self, tensor: Any, meta: _Meta) -> _Tensor:
        """A tensor broadcast to a shape."""
        return tensor if tensor.shape == meta.shape else self.call(aten.expand.default, tensor, list(meta.shape))


def _map_nodes(function: Callable[[_Node], _Node], node: _Node) -> _Node:
    """The program with its leaves replaced."""
    done: dict[int, _Node] = {}

    def mapped(current: _Node) -> _Node:
        if id(current) not in done:
            if _nodes_in((current.args, current.kwargs)):
                args = _tree_map(_Node, mapped, current.args)
                done[id(current)] = replace(current, args=args, kwargs=_tree_map(_Node, mapped, current.kwargs))
            else:
                done[id(current)] = function(current)
        return done[id(current)]

    return mapped(node)


# --- operators: movement of data ------------------------------------------------------------------------------------

_RESHAPES = {
    *(
        "view",
        "reshape",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "view_as",
        "reshape_as",
        "ravel",
    ),
    *("_reshape_alias", "atleast_1d", "atleast_2d", "atleast_3d"),
}
_PERMUTES = {
    *("permute", "transpose", "t", "numpy_T", "mT", "adjoint", "mH", "matrix_H", "movedim", "moveaxis"),
    *("swapaxes", "swapdims"),
}
_IDENTITIES = {
    *("contiguous", "clone", "to", "_to_copy", "type_as", "float", "double", "half", "bfloat16", "alias", "lift_fresh"),
    *("lift_fresh_copy", "lift", "positive", "resolve_conj", "resolve_neg", "real", "cpu", "cuda", "copy"),
}


_DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}


def _filled(value: Any) -> Callable[..., Any]:
    def make(bound: Mapping[str, Any], meta: _Meta) -> Any:
        filling = bound["fill_value"] if value is None else value
        return aten.full.default, _arguments(aten.full.default, [list(meta.shape), filling], {"dtype": meta.dtype})

    return make


def _drawn(operator: Any) -> Callable[..., Any]:
    def make(bound: Mapping[str, Any], meta: _Meta) -> Any:
        return operator, _arguments(operator, [list(meta.shape)], {"dtype": meta.dtype})

    return make


# Operators that read a tensor's shape only.
_SHAPE_ONLY: dict[str, Callable[..., Any]] = {
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "full_like": _filled(None),
    "new_zeros": _filled(0),
    "new_ones": _filled(1),
    "new_full": _filled(None),
    "empty_like": _drawn(aten.empty.memory_format),
    "new_empty": _drawn(aten.empty.memory_format),
    "rand_like": _drawn(aten.rand.default),
    "randn_like": _drawn(aten.randn.default),
}


@_handles(*_IDENTITIES)
def _identity(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if a.self.meta.dtype.is_floating_point != meta.dtype.is_floating_point:
        raise _Refused("it converts between integers and numbers")
    return replace(a.self, meta=meta)


@_handles("detach")
def _detach(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    return c.emit("identity", [a.self], meta, expression=None, stop_gradient=True)


@_handles(*_RESHAPES)
def _reshape(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    x, shape = a.self, meta.shape
    if x.shape == shape:
        return x
    producer = c.producers.get(x.name)
    if producer is not None and producer[0].kind == "reshape" and not x.broken:
        return c.call(aten.reshape.default, producer[1][0], list(shape))
    axes = c.batch_axes(shape)
    if x.broken or len(axes) != 1:
        return c.emit("reshape", [x], meta, shape=c.example(shape))
    before = math.prod(x.shape[: c.batch_axis(x)]) * x.outer
    outer, rest = divmod(before, math.prod(shape[: axes[0]]))
    if rest or outer < 1 or c.example(shape)[axes[0]] % outer:
        raise _Refused(_MIXES)
    return c.emit("reshape", [x], meta, outer=outer, shape=c.example(shape))


def _permutation(name: str, a: SimpleNamespace, rank: int) -> list[int]:
    """For each axis of the result, the operand's."""
    order = list(range(rank))
    if name == "permute":
        return [axis % rank for axis in a.dims]
    if name in ("numpy_T",):
        return order[::-1]
    if name in ("movedim", "moveaxis"):
        source = [a.source] if isinstance(a.source, int) else list(a.source)
        target = [a.destination] if isinstance(a.destination, int) else list(a.destination)
        source, target = [axis % rank for axis in source], [axis % rank for axis in target]
        rest = iter(axis for axis in order if axis not in source)
        return [source[target.index(axis)] if axis in target else next(rest) for axis in order]
    first, second = rank - 2, rank - 1
    if name in ("transpose", "swapdims"):
        first, second = a.dim0 % rank, a.dim1 % rank
    elif name == "swapaxes":
        first, second = a.axis0 % rank, a.axis1 % rank
    if rank >= 2:
        order[first], order[second] = order[second], order[first]
    return order


@_handles(*_PERMUTES)
def _permute(c: _Converter, a: SimpleNamespace, meta: _Meta, name: str = "") -> _Tensor:
    axes = _permutation(_base_name(c.applied), a, len(a.self.shape))
    return a.self if axes == sorted(axes) else c.emit("permute", [a.self], meta, axes=tuple(axes))


@_handles("expand", "expand_as", "broadcast_to")
def _expand(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    return a.self if a.self.shape == meta.shape else c.emit("expand", [a.self], meta, shape=c.example(meta.shape))


@_handles("repeat", "tile")
def _repeat(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    x, counts = a.self, list(getattr(a, "repeats", None) or a.dims)
    counts = [1] * (len(meta.shape) - len(counts)) + counts
    x = c.call(aten.reshape.default, x, [1] * (len(counts) - len(x.shape)) + list(x.shape))
    single = [
        size if count == 1 else count for size, count in zip(x.shape, counts, strict=True) if size == 1 or count == 1
    ]
    if len(single) == len(counts):
        return c.call(aten.expand.default, x, list(meta.shape))
    for axis, count in enumerate(counts):
        if count > 1:
            c.keep_batch(x, [axis])
            x = c.call(aten.cat.default, [x] * count, axis)
    return x


@_handles("repeat_interleave.self_int")
def _repeat_interleave(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if a.dim is None:
        raise _Refused("")
    axis = a.dim % len(a.self.shape)
    return c.gather(a.self, axis, [index // a.repeats for index in range(a.self.shape[axis] * a.repeats)])


def _slice_bounds(start: int | None, stop: int | None, step: int | None, size: int) -> tuple[int, int, int]:
    begin, end, stride = slice(start, stop, step).indices(size)
    return begin, max(begin, end), stride


def _slice_of(c: _Converter, x: _Tensor, axis: int, start: int, stop: int, step: int, meta: _Meta) -> _Tensor:
    if (start, stop, step) == (0, x.shape[axis], 1):
        return x
    c.keep_batch(x, [axis])
    return c.emit("slice", [x], meta, axis=axis, start=start, stop=stop, step=step)


@_handles("slice")
def _slice(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    axis = a.dim % len(a.self.shape)
    return _slice_of(c, a.self, axis, *_slice_bounds(a.start, a.end, a.step, a.self.shape[axis]), meta)


@_handles("narrow")
def _narrow(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    axis = a.dim % len(a.self.shape)
    start = a.start % a.self.shape[axis]
    return _slice_of(c, a.self, axis, start, start + a.length, 1, meta)


def _without(x: _Tensor, axis: int, index: int, c: _Converter, meta: _Meta) -> _Tensor:
    kept = _Meta((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.meta.dtype)
    c.keep_batch(x, [axis])
    return c.call(aten.reshape.default, _slice_of(c, x, axis, index, index + 1, 1, kept), list(meta.shape))


@_handles("select")
def _select(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    axis = a.dim % len(a.self.shape)
    return _without(a.self, axis, a.index % a.self.shape[axis], c, meta)


@_handles("unbind")
def _unbind(c: _Converter, a: SimpleNamespace, meta: list[_Meta]) -> list[_Tensor]:
    axis = a.dim % len(a.self.shape)
    return [_without(a.self, axis, index, c, one) for index, one in enumerate(meta)]


@_handles(
    "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"
)
def _split(c: _Converter, a: SimpleNamespace, meta: list[_Meta]) -> list[_Tensor]:
    axis, start, parts = a.dim % len(a.self.shape), 0, []
    for one in meta:
        parts.append(_slice_of(c, a.self, axis, start, start + one.shape[axis], 1, one))
        start += one.shape[axis]
    return parts


@_handles("cat", "concat", "concatenate")
def _concat(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    axis = (getattr(a, "dim", None) or getattr(a, "axis", None) or 0) % len(meta.shape)
    pieces = [tensor for tensor in a.tensors if tensor.shape != (0,)]
    for piece in pieces:
        c.keep_batch(piece, [axis])
    return pieces[0] if len(pieces) == 1 else c.emit("concat", pieces, meta, axis=axis)


@_handles("stack")
def _stack(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    axis = a.dim % len(meta.shape)
    return c.call(aten.cat.default, [c.call(aten.unsqueeze.default, tensor, axis) for tensor in a.tensors], axis)


@_handles("flip")
def _flip(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    axes = tuple(sorted(axis % len(a.self.shape) for axis in a.dims))
    c.keep_batch(a.self, axes)
    return c.emit("flip", [a.self], meta, axes=axes) if axes else a.self


@_handles("roll")
def _roll(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    x = a.self
    if not a.dims:
        raise _Refused(_MIXES)
    for shift, dim in zip(a.shifts, a.dims, strict=True):
        axis = dim % len(x.shape)
        size = x.shape[axis]
        if (shift := shift % size) == 0:
            continue
        head = c.call(aten.slice.Tensor, x, axis, size - shift, size, 1)
        x = c.call(aten.cat.default, [head, c.call(aten.slice.Tensor, x, axis, 0, size - shift, 1)], axis)
    return x


@_handles("index_select")
def _index_select(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    return c.gather(a.self, a.dim % len(a.self.shape), c.data(a.index).reshape(-1).tolist())


@_handles("index")
def _index(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    x = a.self
    given = {axis: c.data(index) for axis, index in enumerate(a.indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        if len(given) > 1:
            raise _Refused("")
        ((axis, mask),) = given.items()
        given = {axis + k: found for k, found in enumerate(mask.bool().nonzero(as_tuple=True))}
    axes = sorted(given)
    c.keep_batch(x, axes)
    if axes != list(range(axes[0], axes[0] + len(axes))):
        raise _Refused("")
    sizes = [x.shape[axis] for axis in axes]
    flat, index_shape = 0, torch.broadcast_shapes(*(index.shape for index in given.values()))
    for axis, size in zip(axes, sizes, strict=True):
        flat = flat * size + given[axis] % size
    first = axes[0]
    joined = c.call(aten.reshape.default, x, [*x.shape[:first], math.prod(sizes), *x.shape[axes[-1] + 1 :]])
    picked = c.gather(joined, first, torch.as_tensor(flat).expand(index_shape).reshape(-1).tolist())
    return c.call(aten.reshape.default, picked, list(meta.shape))


@_handles("index_put", "_unsafe_index_put")
def _index_put(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    given = [(axis, c.data(index)) for axis, index in enumerate(a.indices) if index is not None]
    axis, index = given[0]
    if index.dtype == torch.bool:
        index = index.nonzero().squeeze(-1)
    if len(given) > 1 or index.dim() != 1 or a.accumulate or len(set(index.tolist())) != len(index):
        raise _Refused("")
    shape = [*meta.shape[:axis], len(index), *meta.shape[axis + 1 :]]
    return c.put(a.self, axis, index.tolist(), c.call(aten.expand.default, a.values, shape))


@_handles("gather")
def _gather(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    index, axis = c.data(a.index), a.dim % len(a.self.shape)
    line = index.movedim(axis, -1).reshape(-1, index.shape[axis])
    others = [size for k, size in enumerate(c.example(a.self.shape)) if k != axis]
    if not (line == line[0]).all() or others != [size for k, size in enumerate(index.shape) if k != axis]:
        raise _Refused("")
    return c.gather(a.self, axis, line[0].tolist())


@_handles("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
@_handles("_pad_circular", "_pad_enum")
def _pad(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    name = _base_name(c.applied)
    modes = {"reflection_": "reflect", "replication": "replicate", "_pad_circul": "circular", "constant_pa": "constant"}
    mode = getattr(a, "mode", None) if name == "pad" else modes.get(name[:11])
    if not isinstance(mode, str):
        raise _Refused("")
    given = list(getattr(a, "pad", None) or a.padding)
    x, rank = a.self, len(a.self.shape)
    pairs = [(0, 0)] * (rank - len(given) // 2)
    pairs += [(given[k], given[k + 1]) for k in range(len(given) - 2, -1, -2)]
    for axis, (before, after) in enumerate(pairs):
        if before < 0 or after < 0:
            stop = x.shape[axis] + min(after, 0)
            x = c.call(aten.slice.Tensor, x, axis, max(-before, 0), stop, 1)
    pairs = [(max(before, 0), max(after, 0)) for before, after in pairs]
    c.keep_batch(x, [axis for axis, pair in enumerate(pairs) if any(pair)])
    if not any(map(any, pairs)):
        return x
    value = c.number(getattr(a, "value", None) or 0)
    return c.emit("pad", [x], meta, padding=tuple(pairs), mode=mode, value=float(value))


@_handles("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    name = _base_name(c.applied)
    if len(a.self.shape) != 4 or c.batch_axis(a.self) not in (0, None):
        raise _Refused("only for [batch, channels, height, width]")
    factor = a.upscale_factor if name == "pixel_shuffle" else a.downscale_factor
    return c.emit(name, [a.self], meta, factor=factor)


@_handles("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    batch, channels, *rest = a.self.shape
    x = c.call(aten.reshape.default, a.self, [batch, a.groups, channels // a.groups, *rest])
    x = c.call(aten.permute.default, x, [0, 2, 1, *range(3, len(rest) + 3)])
    return c.call(aten.reshape.default, x, list(meta.shape))


# --- operators: layers ----------------------------------------------------------------------------------------------


def _each(value: Any, count: int) -> tuple[int, ...]:
    """One integer for each spatial axis."""
    values = [value] if isinstance(value, int) else list(value)
    return tuple(int(v) for v in (values * count if len(values) == 1 else values))


def _batched(c: _Converter, x: _Tensor, rank: int) -> None:
    if len(x.shape) != rank or c.batch_axis(x) not in (0, None):
        raise _Refused("the batch must be the first axis")


def _fixed(operand: Any, what: str) -> None:
    if isinstance(operand, _Tensor) and operand.is_value:
        raise _Refused(f"its {what} depends on the input")


@_handles("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
def _conv(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    _fixed(a.weight, "weight")
    _fixed(a.bias, "bias")
    spatial = len(a.weight.shape) - 2
    _batched(c, a.input, spatial + 2)
    strides, dilations = _each(a.stride, spatial), _each(a.dilation, spatial)
    if getattr(a, "transposed", False):
        return _transposed(c, a, meta, spatial)
    if isinstance(a.padding, str):
        totals = [
            0 if a.padding == "valid" else d * (k - 1) for d, k in zip(dilations, a.weight.shape[2:], strict=True)
        ]
        padding = tuple((total // 2, total - total // 2) for total in totals)
    else:
        padding = tuple((p, p) for p in _each(a.padding, spatial))
    return c.emit(
        "conv",
        [a.input, a.weight, a.bias],
        meta,
        ("", "weight", "bias"),
        strides=strides,
        padding=padding,
        dilations=dilations,
        groups=a.groups,
        channel_axis=1,
        padding_mode="zeros",
    )


@_handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    _fixed(a.weight, "weight")
    _fixed(a.bias, "bias")
    _batched(c, a.input, len(a.weight.shape))
    return _transposed(c, a, meta, len(a.weight.shape) - 2)


def _transposed(c: _Converter, a: SimpleNamespace, meta: _Meta, spatial: int) -> _Tensor:
    return c.emit(
        "conv_transpose",
        [a.input, a.weight, a.bias],
        meta,
        ("", "weight", "bias"),
        strides=_each(a.stride, spatial),
        padding=tuple((p, p) for p in _each(a.padding, spatial)),
        dilations=_each(a.dilation, spatial),
        output_padding=_each(a.output_padding, spatial),
        groups=a.groups,
        channel_axis=1,
    )


@_handles("linear")
def _linear(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    x, weight, bias = a.input, a.weight, a.bias
    if weight.is_value or (bias is not None and bias.is_value) or len(weight.shape) != 2 or not x.is_value:
        result = c.call(aten.matmul.default, x, c.call(aten.permute.default, weight, [1, 0][: len(weight.shape)]))
        return result if bias is None else c.call(aten.add.Tensor, result, bias)
    c.keep_batch(x, [len(x.shape) - 1])
    if x.outer > 1:
        # Axes joined in front of the batch (as in nn.MultiheadAttention) are taken apart again: the last alone counts.
        axis = c.batch_axes(x.shape)[0]
        apart = [*x.shape[:axis], x.outer, x.shape[axis] // x.outer, *x.shape[axis + 1 :]]
        x = c.call(aten.reshape.default, x, apart)
        result = c.emit(
            "linear", [x, weight, bias], _Meta((*x.shape[:-1], meta.shape[-1]), meta.dtype), ("", "weight", "bias")
        )
        return c.call(aten.reshape.default, result, list(meta.shape))
    return c.emit("linear", [x, weight, bias], meta, ("", "weight", "bias"))


def _as_linear_weight(node: _Node | None) -> Any:
    """The transpose of a program, where it is one by its last instruction."""
    if node is None:
        return None
    name = node.operator.split(".")[1] if node.operator.startswith("aten.") else ""
    rest = tuple(node.args[1:])
    if name in ("t", "numpy_T") or (
        name in ("transpose", "permute") and rest in (([1, 0],), (0, 1), (1, 0), (-1, -2), (-2, -1))
    ):
        return node.args[0]
    return None


@_handles("matmul", "mm", "bmm")
def _matmul(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    x, y = a.self, getattr(a, "other", None) or a.mat2
    if len(x.shape) == 1 or len(y.shape) == 1:
        x = c.call(aten.unsqueeze.default, x, 0) if len(x.shape) == 1 else x
        y = c.call(aten.unsqueeze.default, y, 1) if len(y.shape) == 1 else y
        return c.call(aten.reshape.default, c.call(aten.matmul.default, x, y), list(meta.shape))
    c.keep_batch(x, [len(x.shape) - 1])
    c.keep_batch(y, [len(y.shape) - 2])
    weight = _as_linear_weight(y.node) if len(y.shape) == 2 else None
    if weight is not None:
        transposed = _Tensor(_Meta(y.shape[::-1], y.meta.dtype), node=weight)
        return c.emit("linear", [x, transposed, None], meta, ("", "weight"))
    return c.emit("matmul", [x, y], meta)


@_handles("addmm", "baddbmm", "addbmm", "addmv")
def _addmm(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if hasattr(a, "mat1") or hasattr(a, "batch1"):
        x, y = (a.mat1, a.mat2) if hasattr(a, "mat1") else (a.batch1, a.batch2)
    else:
        x, y = a.mat, a.vec
    if _base_name(c.applied) == "addbmm":
        raise _Refused("")
    product = c.call(aten.matmul.default, x, y)
    product = product if a.alpha == 1 else c.call(aten.mul.Tensor, product, a.alpha)
    if a.beta == 0:
        return product
    return c.call(aten.add.Tensor, product, a.self if a.beta == 1 else c.call(aten.mul.Tensor, a.self, a.beta))


@_handles("dot", "mv", "inner", "vdot")
def _dot(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    name = _base_name(c.applied)
    if name != "inner":
        return c.call(aten.matmul.default, a.self, a.vec if name == "mv" else getattr(a, "tensor", None) or a.other)
    if len(a.other.shape) > 2:
        raise _Refused("")
    other = c.call(aten.permute.default, a.other, [1, 0]) if len(a.other.shape) == 2 else a.other
    return c.call(aten.matmul.default, a.self, other)


@_handles("einsum")
def _einsum(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    terms, _, result = a.equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if "..." in a.equation:
        operands, result = _without_ellipsis(operands, result, [len(t.shape) for t in a.tensors], "->" in a.equation)
    elif "->" not in a.equation:
        letters = "".join(operands)
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if any(len(set(term)) != len(term) for term in operands):
        raise _Refused("")
    pairs = list(zip(a.tensors, operands, strict=True))
    left, letters = pairs[0]
    for position, (right, others) in enumerate(pairs[1:], 2):
        needed = set(result).union(*(term for _, term in pairs[position:]))
        left, letters = _contract(c, left, letters, right, others, needed)
    surplus = [letters.index(letter) for letter in letters if letter not in result]
    if surplus:
        left = c.call(aten.sum.dim_IntList, left, surplus, False)
        letters = "".join(letter for letter in letters if letter in result)
    return c.call(aten.permute.default, left, [letters.index(letter) for letter in result])


def _without_ellipsis(operands: list[str], result: str, ranks: list[int], arrow: bool) -> tuple[list[str], str]:
    """The equation with letters for the axes that '...' stands for."""
    free = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in "".join(operands) + result]
    counts = [rank - len(term.replace("...", "")) for term, rank in zip(operands, ranks, strict=True)]
    longest = "".join(free[: max(c for c, term in zip(counts, operands, strict=True) if "..." in term)])
    expanded = [term.replace("...", longest[len(longest) - n :]) for term, n in zip(operands, counts, strict=True)]
    if arrow:
        return expanded, result.replace("...", longest)
    letters = "".join(operands).replace(".", "")
    return expanded, longest + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))


def _contract(c: _Converter, x: _Tensor, xs: str, y: _Tensor, ys: str, needed: set[str]) -> tuple[_Tensor, str]:
    """One product of two operands of an einsum: what both have and the result needs leads, and matmul does the rest."""
    for name in [letter for letter in xs if letter not in ys and letter not in needed]:
        x, xs = c.call(aten.sum.dim_IntList, x, [xs.index(name)], False), xs.replace(name, "")
    for name in [letter for letter in ys if letter not in xs and letter not in needed]:
        y, ys = c.call(aten.sum.dim_IntList, y, [ys.index(name)], False), ys.replace(name, "")
    both = [letter for letter in xs if letter in ys and letter in needed]
    summed = [letter for letter in xs if letter in ys and letter not in needed]
    only_x = [letter for letter in xs if letter not in ys]
    only_y = [letter for letter in ys if letter not in xs]
    sizes = {**dict(zip(ys, y.shape, strict=True)), **dict(zip(xs, x.shape, strict=True))}
    # The batch stays an axis of its own among the leading ones wherever only one operand has it.
    for own, other, letters in ((only_x, "y", only_x), (only_y, "x", only_y)):
        batch = next((letter for letter in own if sizes[letter] % c.prime == 0), None)
        if batch is not None and len(letters) > 1:
            own.remove(batch)
            both.insert(0, batch)
            if other == "y":
                y, ys = c.call(aten.unsqueeze.default, y, 0), batch + ys
            else:
                x, xs = c.call(aten.unsqueeze.default, x, 0), batch + xs

    def arranged(tensor: _Tensor, letters: str, order: list[str], groups: list[list[str]]) -> _Tensor:
        moved = c.call(aten.permute.default, tensor, [letters.index(letter) for letter in order])
        lead = list(moved.shape[: len(both)])
        tail = [math.prod(sizes[letter] for letter in group) for group in groups]
        return c.call(aten.reshape.default, moved, [*lead, *tail])

    left = arranged(x, xs, [*both, *only_x, *summed], [only_x, summed])
    right = arranged(y, ys, [*both, *summed, *only_y], [summed, only_y])
    product = c.call(aten.matmul.default, left, right)
    order = [*both, *only_x, *only_y]
    return c.call(aten.reshape.default, product, [sizes[letter] for letter in order]), "".join(order)


@_handles("batch_norm", "_native_batch_norm_legit", "native_batch_norm", "_batch_norm_impl_index")
def _batch_norm(c: _Converter, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        return [_batch_norm(c, a, meta[0]), *[None] * (len(meta) - 1)]
    if a.running_mean is None or a.running_var is None:
        raise _Refused("it has no running statistics: what it computes depends on the other examples of the batch")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if getattr(a, name) is not None:
            _fixed(getattr(a, name), name)
    x = a.input
    c.keep_batch(x, [1])
    mean = a.running_mean.node
    prefix = mean.args[0].rpartition("running_mean")[0] if mean is not None and mean.operator == "source" else None
    counter = f"{prefix}num_batches_tracked"
    return c.emit(
        "batch_norm",
        [x, a.weight, a.bias, a.running_mean, a.running_var],
        meta,
        ("", "weight", "bias", "running_mean", "running_var"),
        epsilon=a.eps,
        momentum=None if a.momentum == _CUMULATIVE else a.momentum,
        channel_axis=1,
        training=bool(a.training),
        counter=counter if counter in c.counters else "",
    )


@_handles("layer_norm", "native_layer_norm")
def _layer_norm(c: _Converter, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        return [_layer_norm(c, a, meta[0]), None, None]
    rank = len(a.input.shape)
    axes = tuple(range(rank - len(a.normalized_shape), rank))
    c.keep_batch(a.input, axes)
    _fixed(a.weight, "weight")
    _fixed(a.bias, "bias")
    return c.emit("layer_norm", [a.input, a.weight, a.bias], meta, ("", "weight", "bias"), axes=axes, epsilon=a.eps)


@_handles("rms_norm")
def _rms_norm(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    rank = len(a.input.shape)
    axes = tuple(range(rank - len(a.normalized_shape), rank))
    c.keep_batch(a.input, axes)
    _fixed(a.weight, "weight")
    epsilon = torch.finfo(a.input.meta.dtype).eps if a.eps is None else a.eps
    return c.emit("rms_norm", [a.input, a.weight], meta, ("", "weight"), axes=axes, epsilon=epsilon)


@_handles("group_norm")
def _group_norm(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if c.batch_axis(a.input) not in (0, None):
        raise _Refused("the batch must be the first axis")
    operands = [a.input, a.weight, a.bias]
    return c.emit(
        "group_norm", operands, meta, ("", "weight", "bias"), groups=a.num_groups, epsilon=a.eps, channel_axis=1
    )


@_handles("instance_norm")
def _instance_norm(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if c.batch_axis(a.input) not in (0, None):
        raise _Refused("the batch must be the first axis")
    if not a.use_input_stats:
        return c.call(
            aten.batch_norm.default, a.input, a.weight, a.bias, a.running_mean, a.running_var, False, 0.0, a.eps, False
        )
    operands = [a.input, a.weight, a.bias]
    groups = a.input.shape[1]
    return c.emit("group_norm", operands, meta, ("", "weight", "bias"), groups=groups, epsilon=a.eps, channel_axis=1)


@_handles("scaled_dot_product_attention")
def _attention(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    for operand in (a.query, a.key, a.value):
        c.keep_batch(operand, [len(operand.shape) - 2, len(operand.shape) - 1])
    query, key, value, mask = a.query, a.key, a.value, a.attn_mask
    if getattr(a, "enable_gqa", False) and key.shape[-3] != query.shape[-3]:
        count = query.shape[-3] // key.shape[-3]
        key = c.call(aten.repeat_interleave.self_int, key, count, -3)
        value = c.call(aten.repeat_interleave.self_int, value, count, -3)
    if mask is not None and mask.meta.dtype == torch.bool:
        _fixed(mask, "mask")
        nothing = c.call(aten.zeros.default, list(mask.shape), dtype=query.meta.dtype)
        mask = c.call(aten.masked_fill.Scalar, nothing, c.call(aten.logical_not.default, mask), -math.inf)
    scale = a.scale if a.scale is not None else 1 / math.sqrt(a.query.shape[-1])
    operands = [query, key, value, mask]
    roles = ("", "", "", "mask")
    return c.emit("attention", operands, meta, roles, causal=bool(a.is_causal), scale=scale, dropout=a.dropout_p)


@_handles("lstm.input", "gru.input")
def _recurrent(c: _Converter, a: SimpleNamespace, meta: list[_Meta]) -> list[_Tensor]:
    kind = _base_name(c.applied)
    x = a.input
    if len(x.shape) != 3 or c.batch_axis(x) not in (None, 0 if a.batch_first else 1):
        raise _Refused("the batch must be where batch_first says")
    states = a.hx if isinstance(a.hx, (list, tuple)) else [a.hx]
    if any(state.is_value or c.data(state).any() for state in states):
        raise _Refused("its initial state is not zero")
    directions = 2 if a.bidirectional else 1
    if len(a.params) != a.num_layers * directions * (4 if a.has_biases else 2):
        raise _Refused("it projects its state")
    operands = [x, *a.params]
    return [
        c.emit(
            kind,
            operands,
            one,
            layers=a.num_layers,
            bidirectional=a.bidirectional,
            batch_first=a.batch_first,
            has_bias=a.has_biases,
            output=index,
            dropout=a.dropout if a.train else 0.0,
        )
        for index, one in enumerate(meta)
    ]


def _pool_attributes(a: SimpleNamespace, spatial: int) -> tuple[Any, ...]:
    window = _each(a.kernel_size, spatial)
    strides = _each(a.stride, spatial) if a.stride else window
    return window, strides, _each(a.padding, spatial), _each(getattr(a, "dilation", 1), spatial)


@_handles("max_pool1d", "max_pool2d", "max_pool2d_with_indices", "max_pool1d_with_indices")
def _max_pool(c: _Converter, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        indices = c.unsupported_part(a, meta, 1)
        return [_max_pool(c, a, meta[0]), indices]
    x, spatial = a.self, 1 if "1d" in _base_name(c.applied) else 2
    _batched(c, x, spatial + 2)
    window, strides, before, dilations = _pool_attributes(a, spatial)
    padding = tuple(
        (p, max(p, (out - 1) * s + d * (w - 1) + 1 - size - p))
        for p, out, s, d, w, size in zip(before, meta.shape[2:], strides, dilations, window, x.shape[2:], strict=True)
    )
    return c.emit(
        "max_pool", [x], meta, window=window, strides=strides, padding=padding, dilations=dilations, channel_axis=1
    )


@_handles("avg_pool1d", "avg_pool2d")
def _avg_pool(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    x, spatial = a.self, 1 if "1d" in _base_name(c.applied) else 2
    _batched(c, x, spatial + 2)
    window, strides, before, _ = _pool_attributes(a, spatial)
    over = tuple(
        max(0, (out - 1) * s + w - size - 2 * p)
        for p, out, s, w, size in zip(before, meta.shape[2:], strides, window, x.shape[2:], strict=True)
    )
    return c.emit(
        "avg_pool",
        [x],
        meta,
        window=window,
        strides=strides,
        padding=tuple((p, p) for p in before),
        over=over,
        count_include_pad=bool(a.count_include_pad),
        divisor=getattr(a, "divisor_override", None),
        channel_axis=1,
    )


@_handles(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d"
)
def _adaptive_pool(c: _Converter, a: SimpleNamespace, meta: Any) -> Any:
    if isinstance(meta, list):
        indices = c.unsupported_part(a, meta, 1)
        return [_adaptive_pool(c, a, meta[0]), indices]
    name = _base_name(c.applied).lstrip("_")
    _batched(c, a.self, 4 if name.endswith("2d") else 3)
    return c.emit(name[:-2] if name.endswith("d") else name, [a.self], meta, size=tuple(meta.shape[2:]), channel_axis=1)


_UPSAMPLES = {"nearest": "nearest", "linear": "bilinear", "bilinear": "bilinear", "bicubic": "bicubic"}


@_handles(*(f"upsample_{mode}" for mode in ("nearest1d", "nearest2d", "linear1d", "bilinear2d", "bicubic2d")))
@_handles("_upsample_nearest_exact1d", "_upsample_nearest_exact2d")
def _resize(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    name = _base_name(c.applied)
    x = getattr(a, "input", None) or a.self
    _batched(c, x, 3 if name.endswith("1d") else 4)
    sizes = meta.shape[2:]
    scales = getattr(a, "scale_factors", None)
    if scales is None:
        scales = [getattr(a, key, None) for key in (["scales"] if name.endswith("1d") else ["scales_h", "scales_w"])]
    whole = False
    if "exact" in name:
        # At whole factors both kinds of nearest take the same pixels.
        whole = all(size % old == 0 for size, old in zip(sizes, x.shape[2:], strict=True))
        mode = "nearest" if whole else "nearest_exact"
    else:
        mode = _UPSAMPLES[name.removeprefix("upsample_")[:-2]]
    return c.emit(
        "resize",
        [x],
        meta,
        size=tuple(sizes),
        mode=mode,
        align_corners=bool(getattr(a, "align_corners", False)),
        scales=tuple(scales) if scales and None not in scales and not whole else None,
        channel_axis=1,
    )


# --- operators: element by element ----------------------------------------------------------------------------------

_UNARY = {
    **{name: name for name in ("relu", "relu6", "sigmoid", "tanh", "silu", "mish", "hardsigmoid", "hardswish", "abs")},
    **{
        name: name
        for name in ("neg", "exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "erf", "sin", "cos", "selu")
    },
    **{name: name for name in ("sign", "floor", "softsign")},
    "absolute": "abs",
    "negative": "neg",
    "sgn": "sign",
    "log_sigmoid": "log_sigmoid",
    "special_expit": "sigmoid",
    "special_erf": "erf",
}


def _float(c: _Converter, *tensors: Any) -> None:
    if any(isinstance(t, _Tensor) and t.is_value and not t.meta.dtype.is_floating_point for t in tensors):
        raise _Refused("it computes with integers or truth values that depend on the input")


@_handles(*_UNARY)
def _unary(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    _float(c, a.self)
    return c.emit(_UNARY[_base_name(c.applied)], [a.self], meta)


@_handles("round")
def _round(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if getattr(a, "decimals", 0):
        raise _Refused("")
    return c.emit("round", [a.self], meta)


@_handles("ceil", "trunc", "fix", "frac")
def _ceil(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if _base_name(c.applied) != "ceil":
        raise _Refused("")
    down = c.emit("floor", [c.emit("neg", [a.self], meta)], meta)
    return c.emit("neg", [down], meta)


def _clamped(c: _Converter, x: _Tensor, low: Any, high: Any, meta: _Meta) -> _Tensor:
    _float(c, x)
    for kind, bound in (("maximum", low), ("minimum", high)):
        if isinstance(bound, _Tensor):
            x = c.emit(kind, [x, bound], meta)
    low, high = (None if isinstance(b, _Tensor) or b in (-math.inf, math.inf) else b for b in (low, high))
    if low is None and high is None:
        return x
    if low == 0 and high in (None, 6):
        return c.emit("relu" if high is None else "relu6", [x], meta)
    return c.emit("clamp", [x], meta, min=low, max=high)


@_handles("clamp", "clip", "clamp_min", "clamp_max", "hardtanh")
def _clamp(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    low = getattr(a, "min", None) if not hasattr(a, "min_val") else a.min_val
    high = getattr(a, "max", None) if not hasattr(a, "max_val") else a.max_val
    return _clamped(c, a.self, low, high, meta)


@_handles("threshold")
def _threshold(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if a.threshold != a.value:
        raise _Refused("")
    return _clamped(c, a.self, a.value, None, meta)


@_handles("gelu")
def _gelu(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    return c.emit("gelu", [a.self], meta, approximate=a.approximate)


@_handles("softplus")
def _softplus(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    return c.emit("softplus", [a.self], meta, beta=float(a.beta), threshold=float(a.threshold))


@_handles("elu")
def _elu(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    alpha, scale, input_scale = float(a.alpha), float(a.scale), float(a.input_scale)
    return c.emit("elu", [a.self], meta, alpha=alpha, scale=scale, input_scale=input_scale)


@_handles("celu")
def _celu(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    alpha = float(a.alpha)
    return c.emit("elu", [a.self], meta, alpha=alpha, scale=1.0, input_scale=1 / alpha)


@_handles("leaky_relu")
def _leaky_relu(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    return c.emit("leaky_relu", [a.self], meta, slope=float(a.negative_slope))


@_handles("rrelu")
def _rrelu(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if a.training:
        raise _Refused("its slope is random")
    return c.emit("leaky_relu", [a.self], meta, slope=(a.lower + a.upper) / 2)


@_handles("prelu", "_prelu_kernel")
def _prelu(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    _fixed(a.weight, "weight")
    weight = a.weight
    if _base_name(c.applied) == "_prelu_kernel":
        weight = c.call(aten.reshape.default, weight, [math.prod(weight.shape)])
    axis = 1 if len(a.self.shape) > 1 else 0
    if weight.shape != (1,):
        c.keep_batch(a.self, [axis])
    return c.emit("prelu", [a.self, weight], meta, ("", "weight"), channel_axis=axis)


@_handles("glu")
def _glu(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    first, second = c.call(aten.chunk.default, a.self, 2, a.dim)
    return c.call(aten.mul.Tensor, first, c.call(aten.sigmoid.default, second))


@_handles("exp2", "log2", "log10", "log1p", "expm1")
def _by_exp_and_log(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    name, x = _base_name(c.applied), a.self
    if name == "exp2":
        return c.call(aten.exp.default, c.call(aten.mul.Tensor, x, math.log(2)))
    if name == "expm1":
        return c.call(aten.sub.Tensor, c.call(aten.exp.default, x), 1.0)
    if name == "log1p":
        return c.call(aten.log.default, c.call(aten.add.Tensor, x, 1.0))
    return c.call(aten.mul.Tensor, c.call(aten.log.default, x), 1 / math.log(2 if name == "log2" else 10))


@_handles("pow")
def _pow(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    x, exponent = a.self, a.exponent
    if isinstance(exponent, _Tensor) and not exponent.is_value and not exponent.shape and not _sources(c, exponent):
        exponent = c.data(exponent).item()
    if isinstance(exponent, _Tensor):
        if isinstance(x, (int, float)) and x > 0:
            return c.call(aten.exp.default, c.call(aten.mul.Tensor, exponent, math.log(x)))
        raise _Refused("its exponent is no number")
    _float(c, x)
    known = {1: None, 2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in known:
        kind = known[exponent]
        return x if kind is None else c.emit(kind, [x], meta)
    return c.emit("pow", [x], meta, exponent=float(exponent))


def _binary(c: _Converter, kind: str, x: Any, y: Any, meta: _Meta) -> _Tensor:
    _float(c, x, y)
    neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1}.get(kind)
    for operand, other in ((x, y), (y, x)) if kind in ("add", "mul") else ((x, y),):
        if isinstance(other, (int, float)) and other == neutral and isinstance(operand, _Tensor):
            return replace(operand, meta=meta)
    for operand in (x, y):
        if isinstance(operand, _Tensor) and (axis := c.batch_axis(operand)) is not None:
            axes = c.batch_axes(meta.shape)
            if axes != [axis + len(meta.shape) - len(operand.shape)]:
                raise _Refused(_MIXES)
    return c.emit(kind, [x, y], meta)


def _scaled(c: _Converter, x: Any, factor: float) -> Any:
    if factor == 1:
        return x
    return c.call(aten.mul.Tensor, x, factor) if isinstance(x, _Tensor) else x * factor


@_handles("add", "sub", "subtract")
def _add(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    kind = "add" if _base_name(c.applied) == "add" else "sub"
    return _binary(c, kind, a.self, _scaled(c, a.other, a.alpha), meta)


@_handles("rsub")
def _rsub(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    return _binary(c, "sub", a.other, _scaled(c, a.self, a.alpha), meta)


@_handles("mul", "multiply")
def _mul(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if isinstance(a.self, _Tensor) and a.self is a.other:
        return c.emit("square", [a.self], meta)
    return _binary(c, "mul", a.self, a.other, meta)


@_handles("div", "divide", "true_divide", "floor_divide")
def _div(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    mode = "floor" if _base_name(c.applied) == "floor_divide" else getattr(a, "rounding_mode", None)
    if mode == "trunc":
        raise _Refused("")
    normal = None if mode else _normalize(c, a, meta)
    if normal is not None:
        return normal
    quotient = _binary(c, "div", a.self, a.other, meta)
    return quotient if mode is None else c.emit("floor", [quotient], meta)


def _normalize(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor | None:
    """F.normalize, from the steps that it consists of: x / expand(clamp(norm(x)))."""

    def made_by(tensor: Any, kind: str) -> Any:
        producer = c.producers.get(tensor.name) if isinstance(tensor, _Tensor) and tensor.is_value else None
        return producer if producer is not None and producer[0].kind == kind else None

    divisor = a.other
    if (expanded := made_by(divisor, "expand")) is not None:
        divisor = expanded[1][0]
    clamped = made_by(divisor, "clamp")
    norm = made_by(clamped[1][0], "norm") if clamped is not None else None
    if clamped is None or norm is None or norm[1][0].name != getattr(a.self, "name", None):
        return None
    attributes, epsilon = norm[0].attributes, clamped[0].attributes["min"]
    whole = attributes["order"] == 2 and attributes["keep_dims"] and len(attributes["axes"]) == 1
    if not whole or epsilon is None or clamped[0].attributes["max"] is not None:
        return None
    return c.emit("normalize", [a.self], meta, label="F.normalize", axis=attributes["axes"][0], epsilon=epsilon)


@_handles("maximum", "max.other", "fmax")
def _maximum(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    return _binary(c, "maximum", a.self, a.other, meta)


@_handles("minimum", "min.other", "fmin")
def _minimum(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    return _binary(c, "minimum", a.self, a.other, meta)


@_handles("addcmul", "addcdiv")
def _addcmul(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    operator = aten.mul.Tensor if _base_name(c.applied) == "addcmul" else aten.div.Tensor
    return c.call(aten.add.Tensor, a.self, _scaled(c, c.call(operator, a.tensor1, a.tensor2), a.value))


@_handles("lerp")
def _lerp(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    difference = c.call(aten.sub.Tensor, a.end, a.self)
    return c.call(aten.add.Tensor, a.self, c.call(aten.mul.Tensor, difference, a.weight))


@_handles("where.self", "where.ScalarOther", "where.ScalarSelf", "masked_fill")
def _where(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if hasattr(a, "mask"):
        mask, chosen, other = a.mask, a.value, a.self
    else:
        mask, chosen, other = a.condition, a.self, a.other
    _fixed(mask, "condition")
    dtype = meta.dtype

    def weight(condition: _Tensor) -> _Tensor:
        return c.call(aten.to.dtype, condition, dtype)

    def is_fixed(operand: Any) -> bool:
        return not isinstance(operand, _Tensor) or not operand.is_value

    inverse = c.call(aten.logical_not.default, mask)
    if is_fixed(chosen) or is_fixed(other):
        fixed, value, at = (chosen, other, mask) if is_fixed(chosen) else (other, chosen, inverse)
        elsewhere = inverse if at is mask else mask
        nothing = c.call(aten.zeros.default, [1], dtype=dtype)
        if not isinstance(fixed, _Tensor):
            fixed = c.call(aten.full.default, [1], fixed, dtype=dtype)
        addend = c.call(aten.where.self, at, fixed, nothing)
        # Minus infinity absorbs what it is added to.
        if not _sources(c, fixed) and bool((c.data(fixed) == -math.inf).all()):
            return c.call(aten.add.Tensor, value, addend)
        kept = c.call(aten.mul.Tensor, value, weight(elsewhere))
        zero = not _sources(c, fixed) and not c.data(fixed).any()
        return kept if zero else c.call(aten.add.Tensor, kept, addend)
    first, second = c.call(aten.mul.Tensor, chosen, weight(mask)), c.call(aten.mul.Tensor, other, weight(inverse))
    return c.call(aten.add.Tensor, first, second)


@_handles("softmax", "log_softmax", "_softmax", "_log_softmax", "special_softmax", "special_log_softmax")
def _softmax(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    axis = a.dim % max(len(a.self.shape), 1)
    c.keep_batch(a.self, [axis])
    return c.emit("log_softmax" if "log" in _base_name(c.applied) else "softmax", [a.self], meta, axis=axis)


# --- operators: reductions ------------------------------------------------------------------------------------------


def _axes(c: _Converter, x: _Tensor, given: Any) -> tuple[int, ...]:
    _float(c, x)
    rank = len(x.shape)
    given = [given] if isinstance(given, int) else given
    axes = tuple(sorted(axis % rank for axis in given)) if given else tuple(range(rank))
    c.keep_batch(x, axes)
    return axes


_REDUCTIONS = {
    "mean": "mean",
    "sum": "sum",
    "amax": "amax",
    "amin": "amin",
    "max.default": "amax",
    "min.default": "amin",
}


@_handles(*_REDUCTIONS)
def _reduce(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    name = _base_name(c.applied)
    axes = _axes(c, a.self, getattr(a, "dim", None))
    kind = _REDUCTIONS.get(name) or _REDUCTIONS[f"{name}.default"]
    return c.emit(kind, [a.self], meta, axes=axes, keep_dims=bool(getattr(a, "keepdim", False)))


@_handles("max.dim", "min.dim")
def _max(c: _Converter, a: SimpleNamespace, meta: list[_Meta]) -> list[Any]:
    axes = _axes(c, a.self, a.dim)
    greatest = _base_name(c.applied) == "max"
    values = c.emit("amax" if greatest else "amin", [a.self], meta[0], axes=axes, keep_dims=bool(a.keepdim))
    if greatest:
        return [values, c.emit("argmax", [a.self], meta[1], axis=axes[0], keep_dims=bool(a.keepdim))]
    return [values, c.unsupported_part(a, meta, 1)]


@_handles("argmax")
def _argmax(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    if a.dim is None:
        raise _Refused(_MIXES)
    return c.emit("argmax", [a.self], meta, axis=_axes(c, a.self, a.dim)[0], keep_dims=bool(a.keepdim))


def _correction(a: SimpleNamespace) -> float:
    if hasattr(a, "unbiased"):
        return int(a.unbiased)
    return 1 if a.correction is None else a.correction


@_handles("var", "std")
def _var(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    axes, keep = _axes(c, a.self, getattr(a, "dim", None)), bool(getattr(a, "keepdim", False))
    return c.emit(_base_name(c.applied), [a.self], meta, axes=axes, keep_dims=keep, correction=_correction(a))


@_handles("var_mean", "std_mean")
def _var_mean(c: _Converter, a: SimpleNamespace, meta: list[_Meta]) -> list[_Tensor]:
    axes, keep = _axes(c, a.self, getattr(a, "dim", None)), bool(getattr(a, "keepdim", False))
    kind = _base_name(c.applied).removesuffix("_mean")
    return [
        c.emit(kind, [a.self], meta[0], axes=axes, keep_dims=keep, correction=_correction(a)),
        c.emit("mean", [a.self], meta[1], axes=axes, keep_dims=keep),
    ]


@_handles("linalg_vector_norm", "norm")
def _norm(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    order = a.ord if hasattr(a, "ord") else getattr(a, "p", 2)
    order = 2 if order is None else order
    axes, keep = _axes(c, a.self, getattr(a, "dim", None)), bool(getattr(a, "keepdim", False))
    if order == math.inf:
        magnitude = c.call(aten.abs.default, a.self)
        return c.emit("amax", [magnitude], meta, axes=axes, keep_dims=keep)
    if order not in (1, 2):
        raise _Refused(f"of order {order}")
    return c.emit("norm", [a.self], meta, axes=axes, keep_dims=keep, order=int(order))


@_handles("cosine_similarity")
def _cosine_similarity(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    units = []
    for x in (a.x1, a.x2):
        axis = a.dim % len(x.shape)
        c.keep_batch(x, [axis])
        units.append(
            c.emit("normalize", [x], x.meta, axis=axis, epsilon=a.eps) if x.is_value else _unit(c, x, axis, a.eps)
        )
    return c.call(aten.sum.dim_IntList, c.call(aten.mul.Tensor, *units), [a.dim])


def _unit(c: _Converter, x: _Tensor, axis: int, epsilon: float) -> _Tensor:
    length = c.call(aten.clamp_min.default, c.call(aten.linalg_vector_norm.default, x, 2, [axis], True), epsilon)
    return c.call(aten.div.Tensor, x, length)


@_handles("logsumexp")
def _logsumexp(c: _Converter, a: SimpleNamespace, meta: _Meta) -> _Tensor:
    axes = list(_axes(c, a.self, a.dim))
    greatest = c.call(aten.amax.default, a.self, axes, True)
    terms = c.call(aten.exp.default, c.call(aten.sub.Tensor, a.self, greatest))
    total = c.call(aten.log.default, c.call(aten.sum.dim_IntList, terms, axes, True))
    return c.call(aten.reshape.default, c.call(aten.add.Tensor, total, greatest), list(meta.shape))


# --- operators: noise -----------------------------------------------------------------------------------------------


@_handles(*_DROPOUTS, "native_dropout")
def _dropout(c: _Converter, a: SimpleNamespace, meta: Any) -> Any:
    x = a.input
    if not a.train or a.p == 0:
        return [x, None] if isinstance(meta, list) else x
    if isinstance(meta, list):
        return [c.call(aten.dropout.default, x, a.p, True), None]
    return c.noisy(c.applied, vars(a), meta)


# --- capture --------------------------------------------------------------------------------------------------------


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
    wanted = model.training
    training = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    if not wanted:
        training = dict.fromkeys(training, True)
    drafts: dict[bool, _Draft] = {}
    try:
        drafts[True] = _draft(model, args, kwargs, training)
    except CaptureError:
        if wanted:
            raise
    still = dict.fromkeys(training, False)
    try:
        evaluation = _draft(model, args, kwargs, still)
    except CaptureError as error:
        if not wanted or True not in drafts:
            raise
        warnings.warn(f"the network is that of training: in evaluation it cannot be captured: {error}", stacklevel=2)
        return drafts[True].network
    difference = "it cannot be captured"
    if True in drafts:
        found = _difference(drafts[True].network, evaluation.network)
        if found is None:
            return _warned(drafts[True])
        difference = found
    if wanted:
        warnings.warn(
            f"training computes something else than evaluation ({difference}); the network is that of evaluation. "
            "Call model.eval() before to say that this is meant",
            stacklevel=2,
        )
    # The outputs of evaluation, with the noise of training as far as it changes nothing else.
    noisy = _noise_modules(model, drafts[True]) if True in drafts else set()
    partly = {
        path: training[path] and (isinstance(module, _TRAINED_IN_EVALUATION) or path in noisy)
        for path, module in model.named_modules(remove_duplicate=False)
    }
    with contextlib.suppress(CaptureError):
        trained = _draft(model, args, kwargs, partly)
        if _difference(trained.network, evaluation.network) is None:
            evaluation = trained
    return _warned(replace(evaluation, network=_with_statistics(evaluation.network, drafts.get(True), partly, model)))


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


def _warned(draft: _Draft) -> Network:
    if draft.mutated:
        warnings.warn(
            f"the model's forward changes {', '.join(sorted(set(draft.mutated)))} in place; in the captured network it "
            "stays as it is",
            stacklevel=3,
        )
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


def _difference(training: Network, evaluation: Network) -> str | None:
    """What evaluation computes otherwise than training without its noise; None where they are the same."""
    renamed: dict[Any, Any] = {}
    renamed.update(zip(training.inputs, evaluation.inputs, strict=True))
    ignored = {"training", "dropout", "counter", "momentum"}

    def significant(step: Step) -> dict[str, Any]:
        return {key: value for key, value in step.attributes.items() if key not in ignored}

    def same_operand(ours: Any, theirs: Any) -> bool:
        if not isinstance(ours, str) or not isinstance(theirs, str):
            return _same(ours, theirs) or ours == theirs
        if ours in training.values:
            return renamed.get(ours) == theirs
        first, second = training.constants[ours], evaluation.constants.get(theirs)
        if second is None:
            return False
        return first.parameter == second.parameter and (
            ours == theirs
            if first.parameter
            else _same(first.expression, second.expression) and _same(first.data, second.data)
        )

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
        same = same and _same(significant(first), significant(second))
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


def _draft(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: Mapping[str, bool]) -> _Draft:
    """One export of a copy of the model with these training flags, as a network; where none is set, without noise."""
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
            module.momentum = _CUMULATIVE
    signature = inspect.signature(copied.forward)
    arguments = Tree.bind(signature, args, kwargs)
    leaves, spec = pytree.tree_flatten(arguments)
    positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not positions or any(leaves[index].dim() == 0 for index in positions):
        raise CaptureError(
            "the example's tensors must have a batch: their first axis; a number is no tensor of the batch"
        )
    first = leaves[positions[0]].shape[0]
    taken = {size for tensor in (*copied.parameters(), *copied.buffers()) for size in tensor.shape}
    taken |= {size for index in positions for size in leaves[index].shape}
    prime = next(p for p in _PRIMES if not any(size and size % p == 0 for size in taken))
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor.shape[0] // first if first and tensor.shape[0] % first == 0 else 0
            if not rows:
                raise CaptureError(
                    f"the first axis of every tensor is the batch; the example has {first} and {tensor.shape[0]} there"
                )
            return torch.empty((rows * prime, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

        given_args, given_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    program = _export(copied, given_args, given_kwargs)
    converter = _Converter(copied, program, prime, noise=any(training.values()))
    names = [
        _leaf_name(key) for key, leaf in pytree.tree_flatten_with_path(arguments)[0] if isinstance(leaf, torch.Tensor)
    ]
    return _read(converter, names, Tree(signature, leaves, spec), args, kwargs, copied)


def _leaf_name(path: Sequence[Any]) -> str:
    """A name for a place in a tree: keys, attributes and positions."""
    return "_".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _result_name(path: Sequence[Any]) -> str:
    name = _leaf_name(path)
    return f"output_{name}".rstrip("_") if not name or name[0].isdigit() else name


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logger, silence = logging.getLogger("torch"), io.StringIO()
    level = logger.level
    try:
        # PyTorch prints the graph and its advice on its own exceptions; ours says what matters.
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            warnings.simplefilter("ignore")
            return torch.export.export(model, args, kwargs or None, strict=False)
    except Exception as error:
        raise CaptureError(_explained(model, error)) from error
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
        if not name.startswith((_TORCH, "<")) and name != __file__:
            file, line = name, number
            code = traceback.linecache.getline(name, number).strip()  # type: ignore[attr-defined]
    place = Place(path, file, line)
    text = str(error).strip().split("\n")[0]
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in text or "dynamo.exc" in type(error).__module__:
        reason = (
            "what it does depends on the values of a tensor; a network that is deployed does the same for every input: "
            "take the branch or the number out of forward (torch.where, a mask, a constant)"
        )
    else:
        reason = f"{kind}: {text}"
    return f"the model cannot be captured: {place}{f': {code[:100]}' if code else ''}: {reason}"


def _read(
    c: _Converter, names: Sequence[str], tree: Tree, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module
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
        meta = _Meta(tuple(int(size) for size in value.shape), value.dtype)
        kind = spec.kind.name
        if kind == "USER_INPUT":
            dtype = "float32" if value.dtype.is_floating_point else str(value.dtype).removeprefix("torch.")
            c.values[node.name] = Value(node.name, c.example(meta.shape), 0, dtype)
            content = _Tensor(meta, node.name)
            user.append(node.name)
        elif kind in ("PARAMETER", "BUFFER") and spec.target in c.paths:
            content = _Tensor(meta, node=_Node("source", (c.paths[spec.target],)))
        else:
            held = program.constants.get(spec.target)
            held = program.state_dict.get(spec.target) if held is None else held
            content = _Tensor(meta, node=_Node("data", (held.detach(),)))
        storage = _Storage(content)
        c.storages[value.untyped_storage()._cdata] = storage
        given.append(_View(storage, (), content))
    try:
        flat = c.run(program.graph, program.graph_module, given)
    except CaptureError:
        raise
    except Exception as error:
        reason = str(error).split("\n")[0]
        what = "" if isinstance(error, _Refused) else f"{type(error).__name__}: "
        raise CaptureError(f"the model cannot be captured: {c.place()}: {c.label()}: {what}{reason}") from error
    spec = program.call_spec.out_spec
    paths = [key for key, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(flat))), spec))[0]]
    outputs: list[str] = []
    output_names: list[str] = []
    results: list[tuple[bool, Any]] = []
    for path, leaf in zip(paths, flat, strict=True):
        if not isinstance(leaf, _View):
            results.append((False, leaf))
            continue
        content = c.read(leaf)
        if content.is_value:
            results.append((True, len(outputs)))
            outputs.append(content.name)
            output_names.append(_result_name(path))
        else:
            if _sources(c, content):
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
        input_names=("input",) if len(names) == 1 else tuple(names),
        output_names=tuple(output_names),
        input_tree=tree,
        output_tree=tree,
    )
    mutated = [path for path in c.mutated if path not in c.counters]
    return _Draft(_finished(c, network), mutated)


def _sources(c: _Converter, content: _Tensor) -> tuple[str, ...]:
    assert content.node is not None
    return Expression(content.node, c.prime).sources


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


def _finished(c: _Converter, network: Network) -> Network:
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
