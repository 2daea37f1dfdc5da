# SPDX-License-Identifier: Apache-2.0
"""A file's network under construction: its constants are numbers, which training may move."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ....kit.planning.ends import Ends
from ....kit.planning.kinds import KINDS
from ....kit.planning.network import Constant, Network, Place
from ..core.builder import ItemBuilder, Moving, free_name
from ..core.functions import Curve
from ..core.refusals import Refused
from ..core.sizes import Batch, Shape, broadcast

# In whole numbers and in real ones: constants hold what is not trained as they are.
_REAL = "f"


@dataclass(frozen=True)
class FileNetwork:
    """A network in real numbers, as a file holds it.

    Attributes:
        network: its steps; its trained constants are parameters.
        parameters: by the names of these, float32.
        buffers: likewise, of what is not trained.
        grids: of values, where the file has them: (scale, zero point of int8).
        codes: likewise, what the file calls the codes.
        constant_grids: of parameters, as `Fixed.grid`.
    """

    network: Network
    parameters: Mapping[str, np.ndarray]
    buffers: Mapping[str, np.ndarray]
    grids: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)
    constant_grids: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


@dataclass(eq=False)
class Fixed:
    """What a file holds.

    Attributes:
        name: in the file.
        data: of one example, where it has a batch.
        trained: whether training may move it, where it is real numbers.
        grid: (scales, zero points), [1] or [channels], of real numbers that the file holds as codes.
    """

    name: str
    data: np.ndarray
    trained: bool = True
    grid: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def number(self) -> float | None:
        """Its only value: training leaves that as it is. Of codes, also a single one is an operand on its own grid."""
        return float(self.data.reshape(-1)[0]) if self.data.size == 1 and self.grid is None else None


Item = Moving | Fixed
# Of a file's operator: None is one that is left out.
Result = Item | list[Item | None]


def path_of(name: str) -> str:
    """A path for what a file calls so: dots separate modules in frameworks, so names keep none; of what TensorFlow's
    converter fused, which it calls by all names, the first."""
    return re.sub(r"[^\w/-]+", "_", name.partition(";")[0]).strip("_/") or "tensor"


class Reader(ItemBuilder[Fixed]):
    """The network of a file.

    Attributes:
        path: of the operator that is read.
        word: what its file calls it.
        parameters, buffers, grids, codes: see `FileNetwork`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path = self.word = ""
        self.parameters: dict[str, np.ndarray] = {}
        self.buffers: dict[str, np.ndarray] = {}
        self.grids: dict[str, tuple[float, int]] = {}
        self.codes: dict[str, str] = {}
        self._named: dict[int, tuple[Fixed, str]] = {}
        self._taken: set[str] = set()
        # Whether a step has the operator's own path already.
        self._has_path = False

    def begin(self, path: str, word: str) -> None:
        """The next operator of the file."""
        self.path, self.word, self._has_path = free_name(path_of(path), self._taken), word, False
        self._taken.add(self.path)

    # --- what the builder asks for ------------------------------------------------------------------------------------

    def place(self) -> Place:
        return Place(self.path)

    def label(self, kind: str) -> str:
        return self.word or kind

    def operand(self, item: Any) -> str | float | None:
        if item is None or isinstance(item, int | float):
            return item
        return item.name if isinstance(item, Moving) else self.constant(item)

    def then(self, item: Fixed, shape: Sequence[int], function: Callable[[Any], Any]) -> Fixed:
        return Fixed(item.name, np.asarray(function(item.data)))

    def fixed_named(self, name: str) -> Fixed:
        return next(item for item, own in self._named.values() if own == name)

    def of_both(self, first: Fixed, second: Fixed, function: Callable[[Any, Any], Any]) -> Fixed:
        return Fixed(first.name, np.asarray(function(first.data, second.data)))

    def numbers(self, item: Any) -> np.ndarray | None:
        if isinstance(item, Fixed):
            moves = item.trained and item.data.dtype.kind == _REAL and item.number is None
            return None if moves else item.data
        return np.asarray(item, np.float32) if isinstance(item, int | float) else None

    def fixed_of(self, values: np.ndarray) -> Fixed:
        return Fixed("constant", values, trained=False)

    def constant(self, item: Fixed) -> str:
        """The name of the network's constant."""
        if id(item) not in self._named:
            name = free_name(path_of(item.name), self.constants, self._taken)
            self._named[id(item)] = (item, name)
            real = item.data.dtype.kind == _REAL
            trained = real and item.trained
            self.constants[name] = Constant(
                name, item.shape, parameter=real, trainable=trained, data=None if real else item.data
            )
            if real:
                (self.parameters if trained else self.buffers)[name] = item.data.astype(np.float32)
        return self._named[id(item)][1]

    # --- what readers ask for -----------------------------------------------------------------------------------------

    def traced(self, shape: Sequence[int]) -> Shape:
        """The shape of so many rows of one example, as it is traced."""
        return (Batch(shape[0]), *shape[1:])

    def step(
        self, kind: str, operands: Sequence[Any], shape: Sequence[int], /, dtype: str = "float32", **attributes: Any
    ) -> Any:
        """What a step makes; a function of one value that its steps write out is that function's own step.

        shape: for one example, or as traced.
        """
        shape = tuple(shape) if self.batch_axes(shape) else self.traced(shape)
        samples: dict[str, Curve] = {}
        if KINDS[kind].pointwise:
            numbers = [getattr(item, "number", None) if isinstance(item, Fixed) else None for item in operands]
            operands = [item if number is None else number for item, number in zip(operands, numbers, strict=True)]

            def evaluate(*arrays: Any) -> np.ndarray:
                return np.asarray(KINDS[kind].compute([np.asarray(array, np.float64) for array in arrays], attributes))

            samples = self.sampled(operands, evaluate, attributes.values())
            result = self.recognized(samples, operands, shape)
            if result is not None:
                return result
        module = "" if self._has_path else self.path
        self._has_path = True
        return self.emit(kind, operands, shape, dtype, samples, module, **attributes)

    def reshaped(self, x: Any, shape: Sequence[int]) -> Any:
        """shape: for one example."""
        if isinstance(x, Fixed):
            return Fixed(x.name, x.data.reshape(shape))
        return self.reshape(x, self.traced(shape))

    def sliced(self, x: Any, cuts: Sequence[tuple[int, int | None, int]]) -> Any:
        """begin, end (None: the axis's own) and step for each axis."""
        for axis, (begin, end, step) in enumerate(cuts):
            if (begin, end, step) != (0, None, 1):
                x = self.cut(x, axis, begin, x.shape[axis] if end is None else end, step)
        return x

    def weight(self, item: Any, turn: Callable[[np.ndarray], np.ndarray] | None = None) -> Fixed:
        """A constant operand, its axes as a network has them.

        Raises:
            Refused: it is computed.
        """
        if not isinstance(item, Fixed):
            raise Refused(f"the weight of {self.word} is computed from the network's input")
        return item if turn is None else replace(item, data=np.ascontiguousarray(turn(item.data)))

    def plus(self, x: Any, other: Any) -> Any:
        """The sum; of a product with weights and numbers for its channels, the product with a bias."""
        if isinstance(x, Fixed):
            x, other = other, x
        step = self.made_by.get(x.name)
        if step is not None and isinstance(other, Fixed) and KINDS[step.kind].inputs == ("x", "weight", "bias?"):
            axis = int(step.attributes.get("channel_axis", x.rank - 1))
            sizes = (1,) * (x.rank - len(other.shape)) + other.shape
            free = x.name not in self.grids and (len(step.inputs) < 3 or step.inputs[2] is None)
            if free and len(sizes) == x.rank and sizes[axis] == x.shape[axis] == math.prod(sizes):
                weight = self.fixed_named(str(step.inputs[1]))
                operands = [self.items[str(step.inputs[0])], weight, replace(other, data=other.data.reshape(-1))]
                return self.emit(step.kind, operands, x.shape, module=step.module, **step.attributes)
        return self.step("add", [x, other], broadcast(x.shape, other.shape))

    def finished(
        self, inputs: Mapping[str, str], outputs: Mapping[str, Any], channels_first: bool = False
    ) -> FileNetwork:
        """The whole network.

        Args:
            inputs: what the file calls them -> their values' names.
            outputs: what the file calls them -> what they are.
        """
        ends = Ends(list(inputs), list(outputs))
        single = len(inputs) == 1
        network = Network(
            tuple(inputs.values()),
            tuple(str(self.operand(item)) for item in outputs.values()),
            self.values,
            self.constants,
            tuple(self.steps),
            ("input",) if single else tuple(path_of(name) for name in inputs),
            tuple(outputs),
            ends,
            ends,
            tuple(inputs),
            channels_first=channels_first,
        )
        used = {name for step in self.steps for name in step.inputs}
        parameters, buffers = (
            {name: tensor for name, tensor in held.items() if name in used} for held in (self.parameters, self.buffers)
        )
        held = {name: item.grid for item, name in self._named.values() if item.grid is not None and name in used}
        return FileNetwork(network, parameters, buffers, dict(self.grids), dict(self.codes), held)
