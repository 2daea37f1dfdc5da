# SPDX-License-Identifier: Apache-2.0
"""Resource variables of a .tflite file, as represented in a graph: tensors that last from one call to the next.

A file has handles of variables (VAR_HANDLE) and reads and assigns them; a separate subgraph, which CALL_ONCE runs
before the first call, assigns constants. Here a variable is what its first READ_VARIABLE returns, and the value
assigned to it last is its successor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...kit.device.file_forms import FileOperator
from ...kit.device.operator import FLOAT, Refusal
from ...kit.device.tensor import CODE_RANGES, Tensor
from ...kit.display import shortened

CALL_ONCE, VAR_HANDLE, READ_VARIABLE, ASSIGN_VARIABLE = "CALL_ONCE", "VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"
WORDS = (CALL_ONCE, VAR_HANDLE, READ_VARIABLE, ASSIGN_VARIABLE)
# Operators that may have no result.
WITHOUT_RESULTS = (CALL_ONCE, ASSIGN_VARIABLE)

Step = tuple[str, FileOperator]
_OF_A_CONSTANT = "is assigned a constant in every call, which is not supported"
# What a file calls a variable: its container and its name there.
Key = tuple[str, str]


@dataclass
class Variables:
    """The state of a file's variables while its operators are read one by one.

    Attributes:
        begun: what they hold before the first call.
        tensors: tensors of the file that become something else in a graph, by name: variables, constants, or what was
            assigned.
    """

    begun: dict[Key, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def without(self, steps: Sequence[Step]) -> list[Step]:
        """The operators that remain when variables are tensors.

        Raises:
            Refusal: a variable is read before it has a value, or assigned something it cannot hold.
        """
        handles = handles_of(steps)
        read: dict[Key, Tensor] = {}
        latest: dict[Key, Tensor] = {}
        for word, step in steps:
            if word == READ_VARIABLE:
                key = handle(handles, step)
                known = latest.get(key, read.get(key))
                if known is None:
                    read[key] = step.output
                    continue
                if not alike(step.output, known):
                    both = f"{step.output!r} and {known!r}"
                    raise Refusal(f"variable {shortened(key[1])!r} is read as {both}, which is not supported")
                self.tensors[step.output.name] = known
            elif word == ASSIGN_VARIABLE:
                source = step.operand(1)
                latest[handle(handles, step)] = self.tensors.get(source.name, source)
        for key, tensor in read.items():
            self.tensors[tensor.name] = self.variable(key, tensor, latest.get(key))
        for key, tensor in read.items():
            following = self.tensors.get(self.tensors[tensor.name].successor)
            if following is not None and following.data is not None:
                raise Refusal(f"variable {shortened(key[1])!r} {_OF_A_CONSTANT}")
        # A second read gives the variable made from the first one.
        self.tensors = {name: self.tensors.get(tensor.name, tensor) for name, tensor in self.tensors.items()}
        left = []
        for word, step in steps:
            if word not in WORDS:
                operands = tuple(tensor and self.tensors.get(tensor.name, tensor) for tensor in step.inputs)
                left.append((word, replace(step, inputs=operands)))
        return left

    def variable(self, key: Key, tensor: Tensor, latest: Tensor | None) -> Tensor:
        """The variable that the file reads as this tensor and leaves as the other one."""
        where = f"variable {shortened(key[1])!r}"
        begun = self.begun.get(key)
        if begun is None or begun.data is None:
            raise Refusal(f"it is damaged: {where} is read before it is assigned")
        if tensor.dtype not in (*CODE_RANGES, FLOAT):
            raise Refusal(f"{where} holds {tensor.dtype} {list(tensor.shape)}, which is not supported")
        for other in (begun, latest):
            if other is not None and not alike(tensor, other):
                raise Refusal(f"{where} is read as {tensor!r} and assigned {other!r}, which is not supported")
        if latest is None:
            return replace(tensor, data=begun.data)
        if latest.data is not None:
            raise Refusal(f"{where} {_OF_A_CONSTANT}")
        return replace(tensor, variable=True, initial=begun.data.reshape(tensor.shape), successor=latest.name)


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether a variable can hold both."""
    shapes = [tensor.shape or (1,) for tensor in (one, other)]  # a constant without axes has one value
    return shapes[0] == shapes[1] and one.dtype == other.dtype and one.quantization.equals(other.quantization)


def handles_of(steps: Sequence[Step]) -> dict[str, Key]:
    """The variables by the names of the tensors that are their handles."""
    handles = {}
    for word, step in steps:
        if word == VAR_HANDLE:
            container, name = (step.option(field) or b"" for field in ("container", "sharedName"))
            handles[step.output.name] = container.decode("utf-8", "replace"), name.decode("utf-8", "replace")
    return handles


def handle(handles: Mapping[str, Key], step: FileOperator) -> Key:
    """The variable that an operator reads or assigns."""
    name = step.operand(0).name
    if name not in handles:
        raise Refusal(f"it is damaged: {shortened(name)!r} is no variable")
    return handles[name]


def assigned(steps: Sequence[Step], name: str) -> dict[Key, Tensor]:
    """What a subgraph of that name assigns to variables.

    Raises:
        Refusal: it does anything else.
    """
    others = sorted({word for word, _ in steps} - {VAR_HANDLE, ASSIGN_VARIABLE})
    if others:
        raise Refusal(f"its subgraph {shortened(name)!r}, which runs once, has {', '.join(others)}; what it may do is "
                      "assign constants to variables")  # fmt: skip
    handles, values = handles_of(steps), dict[Key, Tensor]()
    for word, step in steps:
        if word == ASSIGN_VARIABLE:
            source = step.operand(1)
            if source.data is None:
                raise Refusal(f"its subgraph {shortened(name)!r}, which runs once, assigns what is no constant")
            values[handle(handles, step)] = source
    return values


def called_once(steps: Sequence[Step]) -> set[int]:
    """The numbers of the subgraphs that run once, before a variable is read.

    Raises:
        Refusal: a variable is read or assigned before.
    """
    words = [word for word, _ in steps]
    last = max((at for at, word in enumerate(words) if word == CALL_ONCE), default=0)
    if any(word in (READ_VARIABLE, ASSIGN_VARIABLE) for word in words[:last]):
        raise Refusal("it uses variables before the subgraph runs that assigns their first values")
    return {int(step.option("initSubgraphIndex") or 0) for word, step in steps if word == CALL_ONCE}
