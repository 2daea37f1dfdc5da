# SPDX-License-Identifier: Apache-2.0
"""What is computed without the input: graphs of operators, and what runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..core.sizes import Batch


@dataclass(frozen=True)
class _Slot:
    """The result of an earlier instruction."""

    index: int


@dataclass(frozen=True)
class InTraining:
    """A probability of dropout, which is 0 in evaluation."""

    probability: float


@dataclass(eq=False, frozen=True)
class Node:
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


@functools.cache
def _takes_a_device(name: str) -> bool:
    """Whether an operator may make a tensor elsewhere than its operands; without being asked to, on the CPU.

    Those that must be given a device, as `to.device`, have it among their arguments.
    """
    return any(argument.name == "device" and argument.kwarg_only for argument in _overload(name)._schema.arguments)


class Expression(nn.Module):
    """What is computed from parameters, buffers and numbers, and from a step's operands where it has any.

    Called with the tensors of `sources` in their order, then the operands; differentiable. `rows` is the number of rows
    that an operand's batch axis holds for one example, `axis` that axis: they give the batch, one without operands.
    Floating-point numbers of the expression take the dtype and the device of the first tensor that it is given.
    It is in evaluation until the model that holds it is set to training.
    """

    def __init__(self, node: Node, axis: int = 0, rows: int = 1) -> None:
        super().__init__()
        self.training = False
        self.axis, self.rows = axis, rows
        self.instructions: list[tuple[str, list[Any], dict[str, Any], bool]] = []
        indices: dict[int, int] = {}
        sources: list[str] = []

        def encode(value: object) -> Any:
            if isinstance(value, Node):
                return _Slot(indices[id(value)])
            if isinstance(value, (list, tuple)):
                return [encode(element) for element in value]
            return value

        # Depth first without recursion: chains of thousands of nodes occur.
        stack = [(node, False)]
        while stack:
            current, ready = stack.pop()
            if id(current) in indices:
                continue
            if not ready:
                stack.append((current, True))
                stack += [(leaf, False) for leaf in reversed(leaves(Node, (current.args, current.kwargs)))]
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
        return any(leaves(Batch, (args, kwargs)) for _, args, kwargs, _ in self.instructions)

    def forward(self, *tensors: torch.Tensor, batch: int | None = None) -> Any:
        sources, operands = dict(zip(self.sources, tensors, strict=False)), tensors[len(self.sources) :]
        if batch is None:
            batch = operands[0].shape[self.axis] // self.rows if operands and operands[0].dim() > self.axis else 1
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        device = tensors[0].device if tensors else torch.device("cpu")

        def decode(value: object) -> Any:
            if isinstance(value, _Slot):
                return results[value.index]
            if isinstance(value, Batch):
                return value.multiple * batch
            if isinstance(value, list):
                return [decode(element) for element in value]
            if isinstance(value, InTraining):
                return value.probability if self.training else 0.0
            if isinstance(value, torch.dtype):
                return dtype if value.is_floating_point else value
            return device if isinstance(value, torch.device) else value

        results: list[Any] = []
        for name, args, kwargs, in_place in self.instructions:
            if name in ("source", "data"):
                tensor = sources[args[0]] if name == "source" else getattr(self, args[0])
                results.append(tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype))
            elif name == "operand":
                results.append(operands[args[0]])
            elif name == "item":
                results.append(decode(args[0])[args[1]])
            else:
                arguments = [decode(value) for value in args]
                if in_place:
                    arguments[0] = arguments[0].clone()
                options = {key: decode(value) for key, value in kwargs.items()}
                if _takes_a_device(name):
                    options["device"] = device
                results.append(_overload(name)(*arguments, **options))
        return results[-1]


def map_nodes(function: Callable[[Node], Node], node: Node) -> Node:
    """The program with its leaves replaced."""
    done: dict[int, Node] = {}

    def mapped(current: Node) -> Node:
        if id(current) not in done:
            if leaves(Node, (current.args, current.kwargs)):
                args = tree_map(Node, mapped, current.args)
                done[id(current)] = replace(current, args=args, kwargs=tree_map(Node, mapped, current.kwargs))
            else:
                done[id(current)] = function(current)
        return done[id(current)]

    return mapped(node)


def tree_map(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: object) -> Any:
    return pytree.tree_map_only(kind, function, value)


def leaves(kind: type | tuple[type, ...], value: object) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, kind)]
