# SPDX-License-Identifier: Apache-2.0
"""Walks a jaxpr: what depends on the input becomes steps of a network, all else a graph of its own.

What becomes of a primitive is said by its handler, in the file of its family.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive

from ....kit.planning.callers import PACKAGE
from ....kit.planning.network import Constant, Place
from ..core.builder import ItemBuilder, Moving, entering, free_name
from ..core.refusals import MIXES, SIZE_OF_BATCH, CaptureError, Refused
from ..core.sizes import Batch, Shape, for_examples
from .items import Expression, Fixed, Item, Node, Result, nodes

Handler = Callable[..., Result]
# By the name of a primitive; a handler gives an item, or a list for several results.
HANDLERS: dict[str, Handler] = {}
handles = entering(HANDLERS)
LONGEST_LOOP = 128
_INLINE = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True)
class Operation:
    """An equation of a jaxpr, with `Batch` for each size that follows the batch."""

    equation: JaxprEqn
    name: str
    params: dict[str, Any]
    shapes: tuple[Shape, ...]

    @property
    def shape(self) -> Shape:
        """Of the first result."""
        return self.shapes[0]


class Converter(ItemBuilder[Fixed]):
    """Reads a jaxpr. Handlers use the methods without underscore."""

    def __init__(
        self,
        batch: Any,
        trainable: Callable[[str], bool],
        leaves: Mapping[str, jax.ShapeDtypeStruct],
        fixed_in_training: Set[int] = frozenset(),
    ) -> None:
        """
        Args:
            batch: JAX's symbol for the number of examples.
            leaves: the model's parameters.
            fixed_in_training: ids of equations of layers that evaluate in training.
        """
        super().__init__()
        # Functions whose gradient rules are not read, with their places.
        self.rules: list[str] = []
        self.fixed_in_training = fixed_in_training
        self._batch = batch
        self._trainable = trainable
        self._shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        self._leaves = leaves
        self._checked: dict[Node, bool] = {}
        self._names: dict[Node, str] = {}
        self._fixed_items: dict[str, Fixed] = {}
        # Those that are being read, the innermost last.
        self._equations: list[JaxprEqn] = []

    # --- steps --------------------------------------------------------------------------------------------------------

    def label(self, kind: str) -> str:
        return self._equations[-1].primitive.name if kind == "unsupported" and self._equations else kind

    def operand(self, item: Item | str | float | None) -> str | float | None:
        """How a step names what it reads."""
        if item is None or isinstance(item, float | int | str):
            return item
        if isinstance(item, Moving):
            if item.comparison is not None:
                raise Refused("truth values that depend on the input; the device computes with numbers only")
            return item.name
        if item.number is not None and item.shape == ():
            return item.number
        return self.constant(item)

    def constant(self, item: Fixed) -> str:
        """Name of the constant that an item is."""
        node = item.node
        drawn = next((part.random for part in nodes(node) if part.random), None)
        if drawn is not None:
            raise CaptureError(
                f"{drawn} draws random numbers; a network that is deployed does the same for every input: give it its "
                "flag for evaluation (deterministic=True), for noise in training use exactqat.qat.jax.dropout and "
                "the layers of Flax"
            )
        if node.path:
            name = node.path
            self._fixed_items[name] = item
            self.constants.setdefault(
                name, Constant(name, self._shapes[name], parameter=True, trainable=self._trainable(name))
            )
            return name
        if node not in self._names:
            paths = item.sources
            name = free_name(f"{paths[0]}/computed" if paths else "constant", self.constants, self._shapes)
            self.constants[name] = Constant(
                name,
                item.shape,
                parameter=False,
                trainable=any(map(self._trainable, paths)),
                data=None if paths else np.asarray(item.values, np.float32),
                sources=paths,
                expression=Expression(node) if paths else None,
            )
            self._names[node] = name
            self._fixed_items[name] = item
        return self._names[node]

    def fixed_named(self, name: str) -> Fixed:
        return self._fixed_items[name]

    def module_of(self, item: Item | None) -> str:
        """Path of the user's layer that a weight belongs to."""
        if not isinstance(item, Fixed) or not item.sources:
            return ""
        return item.sources[0].rpartition(".")[0] or item.sources[0]

    def place(self) -> Place:
        """Where the current equation, or the call that contains it, is in the user's files."""
        return place_of(*self._equations)

    def then(self, item: Fixed, shape: Sequence[int], function: Callable[[jax.Array], jax.Array]) -> Fixed:
        return item.then(function)

    def of_both(self, first: Fixed, second: Fixed, function: Callable[[jax.Array, jax.Array], jax.Array]) -> Fixed:
        return first.then(function, second)

    def numbers(self, item: Item | float | None) -> np.ndarray | None:
        if isinstance(item, Fixed):
            values = item.values
            return None if values is None or values.dtype.kind not in "biuf" else values
        return np.asarray(item, np.float32) if isinstance(item, int | float) else None

    def fixed_of(self, values: np.ndarray) -> Fixed:
        return self.data(values)

    def join(self, items: Sequence[Item], axis: int) -> Item:
        fixed = [item for item in items if isinstance(item, Fixed)]
        if len(fixed) < len(items) or len(fixed) == 1:
            joined: Item = super().join(items, axis)
            return joined
        return fixed[0].then(lambda *arrays: jnp.concatenate(arrays, axis), *fixed[1:])

    # --- the walk -----------------------------------------------------------------------------------------------------

    def run(self, jaxpr: Jaxpr, constants: Sequence[Item], arguments: Sequence[Item]) -> list[Item]:
        """The results of a jaxpr of these items."""
        known: dict[Any, Item] = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(variable: Any) -> Item:
            if hasattr(variable, "val"):  # a literal
                return self.data(variable.val, variable.aval.dtype)
            return known[variable]

        for equation in jaxpr.eqns:
            self._equations.append(equation)
            results = self._apply(equation, [read(variable) for variable in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
            self._equations.pop()
        return [read(variable) for variable in jaxpr.outvars]

    def data(self, values: Any, dtype: Any = None) -> Fixed:
        """Numbers as an item; of floating point numbers there is but one kind."""
        if jnp.issubdtype(jnp.result_type(values), jax.dtypes.prng_key):
            return Fixed(Node(data=values), tuple(values.shape), values.dtype)
        array = np.asarray(values) if dtype is None else np.asarray(values).astype(dtype)
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(np.float32)
        return Fixed(Node(data=array), array.shape, array.dtype)

    def shape_of(self, sizes: Sequence[Any]) -> Shape:
        """A shape, with `Batch` for each size that follows the batch.

        Raises:
            Refused: one follows it otherwise than as a multiple.
        """
        return tuple(self._known(int(size) if isinstance(size, np.integer) else size) for size in sizes)

    def _known(self, value: object) -> Any:
        """A parameter of an equation, with `Batch` for what follows the batch."""
        if isinstance(value, dict):
            return {key: self._known(entry) for key, entry in value.items()}
        if type(value) is tuple:
            return tuple(map(self._known, value))
        if not isinstance(value, type(self._batch)):
            return value
        multiple = value // self._batch
        if not isinstance(multiple, int) or multiple * self._batch != value:
            raise Refused(MIXES)
        return Batch(multiple)

    def _follows(self, item: Fixed) -> bool:
        """Whether something fixed is not the same for every example of a batch of any size."""
        parts = nodes(item.node)
        if any(part.leak for part in parts):
            return True
        if not any(part.by_rows for part in parts) or any(part.random for part in parts):
            return False
        try:
            one, three = (self._tried(item, rows) for rows in (1, 3))
        except (TypeError, ValueError):
            return True
        repeats = [large // small if small else 1 for large, small in zip(three.shape, one.shape, strict=True)]
        alike = np.tile(one, repeats)
        return alike.shape != three.shape or not np.allclose(alike, three, 1e-5, 1e-6, equal_nan=True)

    def _tried(self, item: Fixed, rows: int = 1) -> np.ndarray:
        """What it is for parameters that are drawn."""
        generator = np.random.default_rng(0)
        expression = Expression(item.node)
        arrays: list[Any] = [
            generator.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else np.zeros(leaf.shape, leaf.dtype)
            for leaf in (self._leaves[name] for name in expression.sources)
        ]
        return np.asarray(expression(*arrays, rows=rows), np.float64)

    def repeats(self, item: Fixed, axis: int) -> bool:
        """Whether it is the same all along an axis, whatever is trained."""
        values = self._tried(item)
        return bool((values == np.take(values, [0], axis)).all())

    def closed(self, jaxpr: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, list[Fixed]]:
        """A jaxpr and its constants as items."""
        if isinstance(jaxpr, ClosedJaxpr):
            return jaxpr.jaxpr, list(map(self.data, jaxpr.consts))
        return jaxpr, []

    def inline(self, jaxpr: ClosedJaxpr | Jaxpr, arguments: Sequence[Item]) -> list[Item]:
        inner, constants = self.closed(jaxpr)
        return self.run(inner, constants, arguments)

    def _apply(self, equation: JaxprEqn, operands: list[Item]) -> list[Item]:
        name, read = equation.primitive.name, [operand for operand in operands if isinstance(operand, Moving)]
        inner = next((equation.params[key] for key in _INLINE if key in equation.params), None)
        inlined = name not in HANDLERS
        sizes = [size for aval in _avals([*equation.invars, *equation.outvars]) for size in aval.shape]
        if name in _WITH_RULES and (read or any(isinstance(size, type(self._batch)) for size in sizes)):
            place, info = self.place(), getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
            self.rules.append(f"{getattr(info, 'func_name', 'a function')} in {place.file}, line {place.line}")
        elif name in _WITH_RULES:
            inlined = False
        elif name == "dim_as_value":
            return [Fixed(Node(data=np.int32(1), leak=True), (), np.dtype(np.int32))]
        if inlined and inner is not None:
            return self.inline(inner, operands[len(operands) - len(getattr(inner, "jaxpr", inner).invars) :])
        try:
            shapes = tuple(self.shape_of(aval.shape) for aval in _avals(equation.outvars))
            operation = Operation(equation, name, self._known(equation.params), shapes)
            if name != "cond" and not read:
                return self.fixed(operation, operands)
            if name not in HANDLERS:
                raise Refused("a loop whose rounds are not counted; use jax.lax.scan" if name == "while" else "")
            results = HANDLERS[name](self, operation, *operands)
            # Refused, if what it reads can be had at all.
            makers = [self.step_of(operand) for operand in operands]
            if not any(step is not None and step.attributes.get("reason") for step in makers):
                for operand in operands:
                    if isinstance(operand, Fixed) and operand.node not in self._checked:
                        self._checked[operand.node] = self._follows(operand)
                    if isinstance(operand, Fixed) and self._checked[operand.node]:
                        raise Refused(SIZE_OF_BATCH)
            return results if isinstance(results, list) else [results]
        except Refused as refused:
            tensors = [operand if operand.comparison is None else _operand_of(operand) for operand in read]
            # With a batch in front in place of one that does not follow the batch as a value does.
            known = (
                [s for s in aval.shape if not isinstance(s, type(self._batch))] for aval in _avals(equation.outvars)
            )
            shapes = tuple((Batch(), *sizes) for sizes in known)
            return list(self.unsupported({"select_n": "where"}.get(name, name), tensors, shapes, str(refused)))

    def fixed(self, operation: Operation, operands: list[Item]) -> list[Item]:
        """What is computed without the input, later, by JAX itself."""
        name, params, primitive = operation.name, operation.params, operation.equation.primitive
        if name == "convert_element_type" and all(
            jnp.issubdtype(dtype, jnp.floating) for dtype in (operands[0].dtype, params["new_dtype"])
        ):
            return operands
        if name in ("copy", "copy_p", "reduce_precision"):
            return operands[:1]
        # Keys that nobody draws from are no obstacle.
        random = str(self.place()) if "random" in name or "threefry" in name else ""
        by_rows = _has_batches(params)

        def function(*arrays: jax.Array, rows: int = 1) -> list[jax.Array]:
            return bound(primitive, for_examples(params, rows), [jnp.asarray(array) for array in arrays])

        inputs = tuple(item.node for item in operands if isinstance(item, Fixed))
        results: list[Item] = []
        for index, (shape, aval) in enumerate(zip(operation.shapes, _avals(operation.equation.outvars), strict=True)):
            node = Node(function=function, inputs=inputs, index=index, random=random, by_rows=by_rows)
            dtype = np.float32 if jnp.issubdtype(aval.dtype, jnp.floating) else aval.dtype
            results.append(Fixed(node, self.for_one(shape), dtype))
        return results


def _avals(variables: Sequence[Any]) -> list[jax.core.ShapedArray]:
    return [variable.aval for variable in variables]


def jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """A jaxpr and those inside of its equations, in order."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for entry in value if isinstance(value, tuple | list) else (value,):
                inner: Any = getattr(entry, "jaxpr", entry)
                if hasattr(inner, "eqns"):
                    yield from jaxprs(inner)


def place_in(error: BaseException) -> Place:
    """The user's innermost line that an error went through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if not is_library(frame.f_code.co_filename)]
    return Place("", own[-1].f_code.co_filename, own[-1].f_lineno) if own else Place("")


def place_of(*equations: JaxprEqn) -> Place:
    """Where the last of these equations, or the call that it is in, is in the user's files."""
    path = ""
    for equation in reversed(equations):
        info = equation.source_info
        # Linen names the scopes of its modules, the model's own first.
        scopes = [scope for scope in str(info.name_stack).split("/") if scope.replace("_", "a").isalnum()][1:]
        path = path or ".".join(scopes)
        frames: Any = [] if info.traceback is None else info.traceback.frames
        for frame in frames:
            if not is_library(frame.file_name):
                return Place(path, frame.file_name, frame.line_num)
    return Place(path)


# Functions with gradient rules: of parameters alone JAX keeps them, of values the forward computation is read.
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")

# Where users type code; other files in angle brackets are written by libraries.
_PROMPTS = ("<stdin", "<python-input", "<ipython-input")
# Frames of a traceback that are nobody's model.
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "keras")


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file is a framework's, not a model's."""
    paths = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    folders = (PACKAGE, *(os.path.dirname(path) + os.sep for path in paths if path))
    return file.startswith(folders) or (file.startswith("<") and not file.startswith(_PROMPTS))


def _operand_of(item: Moving) -> Moving:
    """A number that a truth value depends on."""
    assert item.comparison is not None
    for side in item.comparison[1:]:
        if isinstance(side, Moving):
            return side if side.comparison is None else _operand_of(side)
    raise AssertionError("a comparison of constants")


def bound(primitive: Primitive, params: Mapping[str, Any], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """What a primitive gives for these arrays."""
    subfunctions = any(hasattr(value, "eqns") or hasattr(value, "jaxpr") for value in params.values())
    params = {key: _in_float32(value) for key, value in params.items()}
    arguments = primitive.get_bind_params(params) if subfunctions else params
    # Older versions of JAX give the functions apart.
    functions, rest = arguments if isinstance(arguments, tuple) else ((), arguments)
    results = primitive.bind(*functions, *arrays, **rest)
    return list(results) if primitive.multiple_results else [results]


def _in_float32(value: Any) -> Any:
    """A type of half precision in the parameters of an equation: networks train in float32."""
    is_type = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    if is_type and jnp.issubdtype(value, jnp.floating) and np.dtype(value).itemsize < 4:
        return np.dtype(np.float32)
    return value


def _has_batches(value: object) -> bool:
    entries = value.values() if isinstance(value, dict) else value if type(value) is tuple else ()
    return isinstance(value, Batch) or any(map(_has_batches, entries))
