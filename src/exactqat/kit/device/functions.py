# SPDX-License-Identifier: Apache-2.0
"""Functions of one value, one declaration each: what they compute, what runs them, and what frameworks call them.

`declare(Function(...))` is all that an activation takes. From it follow the kind of step in `planning.network`, the
operator or table that a plan makes of it, its gradient in every framework, its 256 codes on the device, and how it is
recognised: in PyTorch by the name of the ATen operator, in Keras by that of the operation, in JAX and wherever it is
written out by its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from .attribute import NUMBER, Attribute, Attributes
from .primitives import A, Array, RealPrimitives

# Of (primitives, x, *parameters), in real numbers.
Real = Callable[..., Array]


def _given(attributes: Attributes, names: Sequence[str]) -> dict[str, float | None]:
    values = ((name, attributes.get(name)) for name in names)
    return {name: None if value is None else float(value) for name, value in values}


@dataclass(frozen=True)
class Function:
    """A function of one value.

    Attributes:
        name: the kind of step in a network, and the name of a table's function.
        real: of (primitives, x, *parameters), in real numbers; differentiable where a framework's primitives are.
        attributes: of the step, by name.
        operator: the device's operator that a plan makes of it; "": it has a handler of its own in `planning`.
        arguments: of the step's attributes, the operator's attributes or the table's parameters, in order.
        nonnegative: no result is below 0.
        is_kind: a network may hold it as a step; otherwise only tables do.
        recognized: the attributes with which it is recognised by its values, however it is written.
        aten, keras, jax, onnx: what PyTorch's ATen operators, Keras' operations, JAX' primitives and ONNX' operators
            are called that compute it and take nothing else.
    """

    name: str
    real: Real
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    operator: str = ""
    arguments: Callable[[Attributes], Attributes] | None = None
    nonnegative: bool = False
    is_kind: bool = True
    recognized: tuple[Attributes, ...] = ()
    aten: tuple[str, ...] = ()
    keras: tuple[str, ...] = ()
    jax: tuple[str, ...] = ()
    onnx: tuple[str, ...] = ()

    def of_step(self, attributes: Attributes) -> Attributes:
        """The arguments for a step with these attributes."""
        return _given(attributes, tuple(self.attributes)) if self.arguments is None else self.arguments(attributes)

    @property
    def is_table(self) -> bool:
        """Whether a plan makes a table of it."""
        return self.operator == "TABLE"

    def __call__(self, primitives: RealPrimitives[A], x: A, *parameters: float) -> A:
        return cast(A, self.real(primitives, x, *parameters))


_FUNCTIONS: dict[str, Function] = {}
# By name, in order of declaration.
FUNCTIONS: Mapping[str, Function] = MappingProxyType(_FUNCTIONS)


def declare(function: Function) -> Function:
    """Adds a function to `FUNCTIONS`."""
    if function.name in FUNCTIONS:
        raise ValueError(f"function {function.name!r} is declared already")
    _FUNCTIONS[function.name] = function
    return function


def named_by(framework: str) -> dict[str, str]:
    """The framework's names ("aten", "keras", "jax" or "onnx") -> kinds of steps, of all functions that are steps."""
    return {name: entry.name for entry in FUNCTIONS.values() if entry.is_kind for name in getattr(entry, framework)}


# The smallest magnitude at which functions with a pole are evaluated while no grid is known.
TINY = 1e-12


def _softplus(primitives: RealPrimitives[A], x: A, beta: float = 1.0, threshold: float = 20.0) -> A:
    scaled = beta * x
    smooth = primitives.maximum(x, 0.0) + primitives.log1p(primitives.exp(-primitives.abs(scaled))) / beta
    return primitives.where(scaled > threshold, x, smooth)


def _elu(primitives: RealPrimitives[A], x: A, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> A:
    negative = primitives.expm1(primitives.where(x > 0, 0.0, x) * input_scale) * (alpha * scale)
    return primitives.where(x > 0, x * scale, negative)


def _gelu(primitives: RealPrimitives[A], x: A, approximate: bool = False) -> A:
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + primitives.tanh(inner))
    return 0.5 * x * (1 + primitives.erf(x * math.sqrt(0.5)))


def _pow(primitives: RealPrimitives[A], x: A, exponent: float) -> A:
    if exponent != int(exponent):
        return primitives.exp(exponent * primitives.log(primitives.maximum(x, TINY)))
    return x ** int(exponent) if exponent >= 0 else (1.0 / x) ** int(-exponent)


def _clamp(primitives: RealPrimitives[A], x: A, low: float | None = None, high: float | None = None) -> A:
    return primitives.clip(x, -math.inf if low is None else low, math.inf if high is None else high)


def _asinh(primitives: RealPrimitives[A], x: A) -> A:
    size = primitives.where(x < 0, -x, x)  # its slope at 0 is 1, and that of `abs` is 0
    grown = primitives.log1p(size + size * size / (1.0 + primitives.sqrt(size * size + 1.0)))
    return primitives.where(x < 0, -grown, grown)


# In float32, infinity is not far.
def _cosh(primitives: RealPrimitives[A], x: A) -> A:
    first, second = (primitives.exp(primitives.minimum(sign * x, 80.0)) / 2 for sign in (1, -1))
    return first + second


def _exp(primitives: RealPrimitives[A], x: A) -> A:
    return primitives.exp(primitives.minimum(x, 80.0))


def _hardshrink(primitives: RealPrimitives[A], x: A, width: float = 0.5) -> A:
    return primitives.where(primitives.abs(x) > width, x, 0.0 * x)


def _softshrink(primitives: RealPrimitives[A], x: A, width: float = 0.5) -> A:
    return x - primitives.clip(x, -width, width)


def _hardsigmoid(primitives: RealPrimitives[A], x: A) -> A:
    return primitives.clip(x / 6 + 0.5, 0.0, 1.0)


def _hardswish(primitives: RealPrimitives[A], x: A) -> A:
    return x * primitives.clip(x / 6 + 0.5, 0.0, 1.0)


def _rsqrt(primitives: RealPrimitives[A], x: A, epsilon: float = 0.0) -> A:
    return primitives.rsqrt(x + epsilon)


def _selu(primitives: RealPrimitives[A], x: A) -> A:
    return _elu(primitives, x, 1.6732632423543772, 1.0507009873554805)


# Its slope at 0 is infinite.
def _sqrt(primitives: RealPrimitives[A], x: A) -> A:
    return primitives.sqrt(primitives.maximum(x, TINY))


def _threshold(primitives: RealPrimitives[A], x: A, least: float, value: float) -> A:
    return primitives.where(x > least, x, 0.0 * x + value)


# What a composition consists of beside `FUNCTIONS`: of (primitives, *operands), which are arrays or numbers.
COMBINATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda primitives, x, y: x + y,
    "sub": lambda primitives, x, y: x - y,
    "mul": lambda primitives, x, y: x * y,
    "div": lambda primitives, x, y: x / (y if isinstance(y, float) else _off_zero(primitives, y)),
    "maximum": lambda primitives, x, y: primitives.maximum(x, y),
    "minimum": lambda primitives, x, y: primitives.minimum(x, y),
    "gt": lambda primitives, x, y: x > y,
    "ge": lambda primitives, x, y: x >= y,
    "lt": lambda primitives, x, y: x < y,
    "le": lambda primitives, x, y: x <= y,
    "eq": lambda primitives, x, y: x == y,
    "ne": lambda primitives, x, y: x != y,
    "and": lambda primitives, x, y: x & y,
    "or": lambda primitives, x, y: x | y,
    "xor": lambda primitives, x, y: x ^ y,
    "not": lambda primitives, x: ~x,
    "where": lambda primitives, condition, x, y: primitives.where(condition, x, y),
    "stop_gradient": lambda primitives, x: primitives.stop_gradient(x),
}


def _off_zero(primitives: RealPrimitives[A], x: A) -> A:
    return off_the_pole(primitives, x, TINY, "reciprocal", ())


def _composition(
    primitives: RealPrimitives[A], x: A, *instructions: tuple[str, Sequence[int | float], Sequence[float]]
) -> A:
    """The last of (name, operands, parameters), names of `FUNCTIONS` or `COMBINATIONS`. An operand that is an int is
    the result of that number, 0 the operand itself; a float is a number."""
    results = [x]
    for name, operands, parameters in instructions:
        arguments = [results[operand] if isinstance(operand, int) else operand for operand in operands]
        results.append(instruction(primitives, name, arguments, parameters, x))
    return results[-1]


def instruction(
    primitives: RealPrimitives[A], name: str, operands: Sequence[Any], parameters: Sequence[float], like: A
) -> A:
    """One of a composition, of arrays of the type of `like`, and numbers."""
    if name not in COMBINATIONS:
        # What is not chosen is computed too, and infinity times a gradient of 0 is none.
        return FUNCTIONS[name](primitives, off_the_pole(primitives, operands[0], TINY, name, parameters), *parameters)
    if name == "where":  # two numbers would not give arrays of that type
        chosen = [primitives.array(branch, like) if isinstance(branch, float) else branch for branch in operands[1:]]
        operands = [operands[0], *chosen]
    return COMBINATIONS[name](primitives, *operands)


NUMBER_OR_NONE = Attribute("a number", optional=True)
# Recognised as it is, without attributes.
PLAIN: tuple[Attributes, ...] = ({},)
FRAMEWORKS = ("aten", "keras", "jax", "onnx")


def _primitive(name: str) -> Real:
    """The function that frameworks' primitives have under this name."""

    def real(primitives: RealPrimitives[A], x: A) -> A:
        return cast(A, getattr(primitives, name)(x))

    return real


def _named(name: str, real: Real, frameworks: Sequence[str] = FRAMEWORKS, **settings: Any) -> None:
    """Declares a function that frameworks call as it is called here (`log_sigmoid`, in Keras and ONNX `LogSigmoid`),
    unless settings say otherwise."""
    with_capitals = "".join(word.capitalize() for word in name.split("_"))
    names = {framework: (with_capitals if framework in ("keras", "onnx") else name,) for framework in frameworks}
    declare(Function(name, real, **{**names, **settings}))


def _instructions(attributes: Attributes) -> Attributes:
    return {str(place): triple for place, triple in enumerate(attributes["instructions"])}


def _table(name: str, real: Real, frameworks: Sequence[str] = FRAMEWORKS, **settings: object) -> None:
    """Likewise one that becomes a table, and is recognised."""
    _named(name, real, frameworks, **{"operator": "TABLE", "recognized": PLAIN, **settings})


_table("abs", _primitive("abs"), nonnegative=True, aten=("abs", "absolute"), keras=("Abs", "Absolute"))
_table("asinh", _asinh, keras=("Arcsinh", "Asinh"))
declare(Function("ceil", _primitive("ceil"), is_kind=False))
declare(Function("clamp", _clamp, attributes={"min": NUMBER_OR_NONE, "max": NUMBER_OR_NONE}))
declare(
    Function("composition", _composition, attributes={"instructions": Attribute("a sequence")}, arguments=_instructions)
)
_table("cos", _primitive("cos"))
_table("cosh", _cosh, nonnegative=True)
declare(Function("elu", _elu, attributes={"alpha": NUMBER, "scale": NUMBER, "input_scale": NUMBER}, operator="TABLE"))
_table("erf", _primitive("erf"), aten=("erf", "special_erf"))
_named("exp", _exp, operator="EXP", nonnegative=True, recognized=PLAIN)
_table("floor", _primitive("floor"))
declare(
    Function(
        "gelu",
        _gelu,
        attributes={"approximate": Attribute("a word", words=("none", "tanh"))},
        operator="GELU",
        arguments=lambda attributes: {"approximate": attributes["approximate"] == "tanh"},
        recognized=({"approximate": "none"}, {"approximate": "tanh"}),
    )
)
declare(Function("hardshrink", _hardshrink, attributes={"width": NUMBER}, operator="TABLE"))
_named("hardsigmoid", _hardsigmoid, ["aten"], recognized=PLAIN, keras=("HardSigmoid",))
_named("hardswish", _hardswish, ["aten"], recognized=PLAIN, keras=("HardSilu",), onnx=("HardSwish",))
declare(
    Function(
        "leaky_relu",
        lambda primitives, x, slope: primitives.where(x >= 0, x, x * slope),
        attributes={"slope": NUMBER},
        operator="LEAKY_RELU",
        arguments=lambda attributes: {"alpha": float(attributes["slope"])},
    )
)
_table("log", _primitive("log"), recognized=())
_table("log_sigmoid", lambda primitives, x: -_softplus(primitives, -x), ["aten", "keras"])
_table("mish", lambda primitives, x: x * primitives.tanh(_softplus(primitives, x)), ["aten", "keras", "onnx"])
_named("neg", lambda primitives, x: -x, recognized=PLAIN, aten=("neg", "negative"), keras=("Negative",))
declare(Function("pow", _pow, attributes={"exponent": NUMBER}))
_table("reciprocal", lambda primitives, x: 1.0 / x, ["aten", "keras", "onnx"], recognized=())
_named("relu", lambda primitives, x: primitives.clip(x, 0.0, math.inf), ["aten", "keras", "onnx"], recognized=PLAIN)
_named("relu6", lambda primitives, x: primitives.clip(x, 0.0, 6.0), ["aten", "keras"], recognized=PLAIN)
_table("round", _primitive("round"), ["jax", "onnx"], recognized=())
_table("rsqrt", _rsqrt, ["aten", "keras", "jax"], nonnegative=True, recognized=())
_table("selu", _selu, ["aten", "keras"])
_named("sigmoid", _primitive("sigmoid"), recognized=PLAIN, aten=("sigmoid", "special_expit"), jax=("logistic",))
_table("sign", _primitive("sign"), aten=("sign", "sgn"))
_named("silu", lambda primitives, x: x * primitives.sigmoid(x), ["aten", "keras"], recognized=PLAIN)
_table("sin", _primitive("sin"))
declare(
    Function(
        "softplus",
        _softplus,
        attributes={"beta": NUMBER, "threshold": NUMBER},
        operator="TABLE",
        nonnegative=True,
        recognized=({"beta": 1.0, "threshold": 20.0},),
    )
)
declare(Function("softshrink", _softshrink, attributes={"width": NUMBER}, operator="TABLE"))
_table("softsign", lambda primitives, x: x / (1.0 + primitives.abs(x)), ["aten", "keras", "onnx"])
_table("sqrt", _sqrt, nonnegative=True, recognized=())
_named("square", lambda primitives, x: x * x, ["aten", "keras", "jax"], recognized=PLAIN)
_named("tanh", _primitive("tanh"), operator="TANH", recognized=PLAIN)
declare(Function("threshold", _threshold, attributes={"least": NUMBER, "value": NUMBER}, operator="TABLE"))


def off_the_pole(
    primitives: RealPrimitives[A], x: A, least: A | float, function: str, parameters: Sequence[float]
) -> A:
    """x, but at least `least` away from where the function is infinite; there it has no slope either.

    Code 0 of a grid represents everything below half a step, so `least` is half a step: values closer to the pole
    would be one value that takes the whole range of the result.
    """
    exponent = {"reciprocal": -1.0, "rsqrt": -0.5, "log": -0.5}.get(function, 0.0)
    if function == "pow":
        exponent = float(parameters[0])
    if exponent >= 0:
        return x
    if exponent == int(exponent):  # defined on both sides
        return primitives.where(primitives.abs(x) < least, least, x)
    return primitives.maximum(x, least)
