# SPDX-License-Identifier: Apache-2.0
"""Functions with a gradient rule of the user's own: `jax.custom_vjp`, `jax.custom_jvp`, `jax.custom_gradient`.

Their forward computation becomes ordinary steps. Their rule stays JAX's own: a step after the forward computation keeps
its value and gets the gradient of the original function at the same operands.

Rules that JAX brings with its own functions (`jax.nn.relu`, `softmax`, ...) say what their derivative is anyway; such
functions are read like all others. A rule of the user's for a function of JAX's, as `jax.custom_jvp(jnp.tanh)`, is
known by its gradients, which are not the derivative.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.builder import Moving
from ..core.expressions import CustomGradient
from ..core.refusals import Refused, first_line
from ..core.safeguards import SAFEGUARDS
from .converter import Converter, bound, handles
from .items import Fixed, Item, Node

NAMES = ("custom_jvp_call", "custom_vjp_call")


# Operands at which a rule is compared with the derivative.
_SCALES = (0.3, 3.0, 30.0)
_ALIKE = 1e-3
_ALIKE_IN_HALVES = 0.05


def _forward_of_jax(equation: Any) -> bool:
    """Whether the function is one of JAX's; `custom_gradient` wraps the user's functions in one of its files."""
    info = getattr(_inner(equation.params["call_jaxpr"]), "debug_info", None)
    file = str(getattr(info, "func_src_info", "")).rpartition(" at ")[2].rpartition(":")[0]
    of_jax = os.path.dirname(jax.__file__) + os.sep
    return file.startswith(of_jax) and os.path.basename(file) != "custom_derivatives.py"


def _is_derivative(call: Any) -> bool:
    """Whether a rule gives the forward function's derivative, wherever that is finite."""
    forward = call.params["call_jaxpr"]
    generator = np.random.default_rng(0)

    def plain(*given: Any) -> list[Any]:
        return list(jax.core.eval_jaxpr(_inner(forward), getattr(forward, "consts", ()), *given))

    def ruled(*given: Any) -> list[Any]:
        return bound(call.primitive, call.params, given)

    for scale in _SCALES:
        given: list[Any] = []
        tangents: list[Any] = []
        for variable in call.invars:
            shape, dtype = variable.aval.shape, variable.aval.dtype
            if not jnp.issubdtype(dtype, jnp.floating):
                given.append(jnp.zeros(shape, dtype))
                tangents.append(np.zeros(shape, jax.dtypes.float0))
                continue
            values = (generator.standard_normal(shape) for _ in range(2))
            one, direction = (jnp.asarray(each, dtype) for each in values)
            given.append(one * jnp.asarray(scale, dtype))
            tangents.append(direction)
        expected, found = (jax.jvp(each, given, tangents)[1] for each in (plain, ruled))
        for a, b in zip(expected, found, strict=True):
            if a.dtype == jax.dtypes.float0:
                continue
            there, here = np.asarray(a, np.float64), np.asarray(b, np.float64)
            finite = np.isfinite(there)
            alike = _ALIKE if a.dtype.itemsize >= 4 else _ALIKE_IN_HALVES
            if not np.allclose(here[finite], there[finite], alike, alike):
                return False
    return True


def _inner(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def subjaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs inside of an equation, in a fixed order."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(_inner(each), "eqns"):
                yield _inner(each)


def custom_calls(jaxpr: Any) -> Iterator[Any]:
    """All equations with a rule, the user's or JAX's, wherever they are."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in NAMES:
            yield equation
        for inner in subjaxprs(equation):
            yield from custom_calls(inner)


class Traces:
    """The custom calls of a model, traced for any number of examples: their rules are traced for a fixed one."""

    def __init__(self, jaxpr: Any, trace: Callable[[int], Any]) -> None:
        """jaxpr: what is captured; trace: makes it for a number of examples."""
        self._trace = trace
        calls = list(custom_calls(jaxpr))
        self._count = len(calls)
        self._numbers: dict[int, int] = {}
        for number, equation in enumerate(calls):
            self._numbers.setdefault(id(equation), number)
        self._known: dict[int, list[Any]] = {}
        self._kept: dict[int, bool] = {}

    def number(self, equation: Any) -> int:
        """Of a custom call, in the order in which they are written."""
        return self._numbers[id(equation)]

    def keeps(self, equation: Any) -> bool:
        """Whether the rule of a custom call is the user's, as far as is known."""
        number = self.number(equation)
        if number not in self._kept:
            try:
                known = equation.primitive.name == "custom_jvp_call" and _forward_of_jax(equation)
                self._kept[number] = not (known and _is_derivative(self.call(number, 2)))
            except Exception:  # whatever a rule raises where it is tried: it is not known
                self._kept[number] = True
        return self._kept[number]

    def call(self, number: int, examples: int) -> Any:
        """The same call for so many examples."""
        if examples not in self._known:
            found = list(custom_calls(self._trace(examples)))
            if len(found) != self._count:
                raise ValueError(
                    f"the model has {len(found)} functions with a custom gradient for {examples} examples, and "
                    f"{self._count} for the number it was captured with"
                )
            self._known[examples] = found
        return self._known[examples][number]


class Rule:
    """One call of a function with a rule of the user's own.

    sizes: (operand, axis, factor): the number of examples is that operand's size there over the factor.
    """

    def __init__(self, traces: Traces, number: int, sizes: tuple[int, int, int] | None) -> None:
        self.traces = traces
        self.number = number
        self.sizes = sizes

    def results(self, *operands: Any) -> list[Any]:
        """All results of the original function, in float32."""
        examples = 1
        if self.sizes is not None:
            at, axis, factor = self.sizes
            examples = operands[at].shape[axis] // factor
        equation = self.traces.call(self.number, examples)
        given = [_as(each, variable.aval) for each, variable in zip(operands, equation.invars, strict=True)]
        results = bound(equation.primitive, equation.params, given)
        return [each.astype(jnp.float32) if jnp.issubdtype(each.dtype, jnp.floating) else each for each in results]

    def obstacle(self) -> str:
        """Why the rule cannot be applied elsewhere; empty where it can."""
        call = self.traces.call(self.number, 2)
        shapes = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in call.invars]
        try:
            closed = jax.make_jaxpr(_pulled_back(call))(*shapes)
            leaked = any(isinstance(each, jax.core.Tracer) for each in _constants(closed))
        except jax.errors.UnexpectedTracerError:
            leaked = True
        except Exception as error:  # noqa: BLE001 - a rule of the user's may raise anything
            return f"its gradient rule cannot be applied ({first_line(error).partition('. ')[0]})"
        if not leaked:
            return ""
        return (
            "its gradient rule reads a value of the model that is not among the function's arguments; give it to the "
            "function as an argument"
        )


def _constants(closed: Any) -> Iterator[Any]:
    """All arrays that a jaxpr holds."""
    yield from getattr(closed, "consts", ())
    for equation in _inner(closed).eqns:
        yield from (each.val for each in equation.invars if hasattr(each, "val"))
        for value in equation.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if hasattr(_inner(each), "eqns"):
                    yield from _constants(each)


def _pulled_back(call: Any) -> Callable[..., Any]:
    """Of the operands of a call: what its rule makes of gradients of one."""

    def function(*given: Any) -> Any:
        results, pull = jax.vjp(lambda *at: bound(call.primitive, call.params, at), *given)
        return pull([_one_like(each) for each in results])

    return function


def _one_like(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.ones_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


def _as(value: Any, aval: Any) -> Any:
    """An operand as the rule was traced for it: constants come for one example."""
    array = jnp.asarray(value).astype(aval.dtype)
    if array.shape == tuple(aval.shape):
        return array
    return jnp.tile(array, [wanted // size for wanted, size in zip(aval.shape, array.shape, strict=True)])


@handles(*NAMES)
def custom_call(c: Converter, equation: Any, operands: list[Any]) -> Any:
    """The forward computation, and a step for each result that keeps the rule."""
    forward = equation.params["call_jaxpr"]
    if not SAFEGUARDS.custom_gradients or c.inside_custom or not c.traces.keeps(equation):
        return c.inline(forward, operands)
    if any(isinstance(each, Moving) and each.comparison is not None for each in operands):
        raise Refused("truth values that depend on the input, in a function with a custom gradient")
    obstacle = Rule(c.traces, c.traces.number(equation), None).obstacle()
    if obstacle:
        raise Refused(obstacle)
    moving = [at for at, each in enumerate(operands) if isinstance(each, Moving)]
    number = c.traces.number(equation)
    if not moving:
        return _of_constants(c, equation, operands, Rule(c.traces, number, None))
    first = operands[moving[0]]
    axis = c.batch_axis(first.shape)
    rule = Rule(c.traces, number, (moving[0], axis, first.shape[axis] // c.prime))
    c.inside_custom += 1
    try:
        results = c.inline(forward, operands)
    finally:
        c.inside_custom -= 1
    names = [c.constant(each) if isinstance(each, Fixed) else each for each in operands]
    made: list[Any] = []
    for index, (result, variable) in enumerate(zip(results, equation.outvars, strict=True)):
        shape = tuple(variable.aval.shape)
        if not jnp.issubdtype(variable.aval.dtype, jnp.floating):
            made.append(result)
            continue
        if isinstance(result, Fixed):
            raise Refused("it has a custom gradient and a result that does not depend on the input")
        label = getattr(getattr(_inner(forward), "debug_info", None), "func_name", None) or "custom_gradient"
        made.append(
            c.emit(
                "custom_gradient",
                [result, *names],
                shape,
                label=str(label),
                expression=CustomGradient(rule.results, index),
            )
        )
    return made


def _of_constants(c: Converter, equation: Any, operands: Sequence[Item], rule: Rule) -> list[Item]:
    """A function of parameters alone is computed by JAX, its rule with it."""
    nodes = tuple(each.node for each in operands if isinstance(each, Fixed))

    results: list[Item] = []
    for index, variable in enumerate(equation.outvars):
        shape, dtype = variable.aval.shape, variable.aval.dtype
        dtype = np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
        results.append(Fixed(Node(function=rule.results, inputs=nodes, index=index), c.for_one(shape), dtype))
    return results
