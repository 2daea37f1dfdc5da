# SPDX-License-Identifier: Apache-2.0
"""Operator declarations.

An operator is declared once, as a plain function: its parameters are TensorFlow's, its docstring is the
documentation, and its body checks the arguments and returns a `Lowering`: the results' shapes and dtypes, the kernel
to run and the numbers that kernel needs. Parameters annotated `Tensor` or `Range` are operands; all the others are
attributes, static under every compiler. Everything else (the frameworks' entry points, `raw_ops`, documentation,
test enumeration) is derived from it.
"""

import inspect
import numbers
import sys
import typing
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial, partialmethod, update_wrapper
from typing import Any, TypeVar

from exactqat.operators.declarations.dispatch import AN_ARRAY, compiling, frontend_for
from exactqat.operators.declarations.plain_numbers import integer, text, written
from exactqat.operators.declarations.specification import (
    Attributes,
    Axes,
    InTensorFlow,
    Lowering,
    Range,
    Tensor,
    TensorSpec,
    Value,
)


class _Shown:
    """An annotation that reads as `text` in signatures and `help()`."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


ARRAY = _Shown("numpy.ndarray | torch.Tensor | jax.Array | tf.Tensor")
_RANGE = _Shown("numpy.ndarray | torch.Tensor | jax.Array | tf.Tensor | float")
ARRAYS = _Shown("numpy.ndarray | torch.Tensor | tuple | None")


# Of (gradients, operands, results, attributes), or of what else `Operator` says; arrays are any framework's.
Vjp = Callable[..., tuple[Any, ...]]
# (args, kwargs, out) -> results.
Shortcut = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def showing_arrays(function: Function) -> Function:
    """A decorator: `help()` says what parameters and results that are annotated Any are."""
    signature = inspect.signature(function)

    def shown(p: inspect.Parameter) -> inspect.Parameter:
        return p.replace(annotation=ARRAYS if p.name == "out" else ARRAY) if p.annotation is Any else p

    result = ARRAY if signature.return_annotation is Any else signature.return_annotation
    parameters = [shown(p) for p in signature.parameters.values()]
    function.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    function.autograph_info__ = Operator.autograph_info__  # type: ignore[attr-defined]
    return function


OPERATORS: dict[str, "Operator"] = {}


class Operator:
    """A declared operator, callable with the arrays of any framework. See the module's text."""

    def __init__(
        self,
        rule: Callable[..., Lowering],
        raw_name: str | None,
        results: tuple[str, ...],
        exports: tuple[str, ...],
        reuses: tuple[str, ...],
    ):
        update_wrapper(self, rule)
        del self.__dict__["__wrapped__"]  # in the place of an operator that is an argument, tf.function would call it
        self.name: str = rule.__name__
        self.rule = rule
        self.raw_name = raw_name
        self.results = results
        self.exports = exports
        self.reuses = reuses
        self.vjp: Vjp | None = None
        self.training_form = self
        self.differentiable = results
        self.gradient_count = len(results)
        self.saved_results = slice(0)  # of the training form
        self.vjp_by_parts: Vjp | None = None
        self.axes_rule: Callable[..., Axes] | None = None
        self.parts_rule: Vjp | None = None
        self.tensorflow_rule: Callable[..., InTensorFlow | None] | None = None
        self.refusal_text = ""
        self.refusal_attributes: Mapping[str, Value] = {}
        parameters = inspect.signature(rule, eval_str=True).parameters
        self.parameters = tuple(parameters)
        self.defaults = {k: p.default for k, p in parameters.items() if p.default is not inspect.Parameter.empty}
        self.operands = tuple(k for k, p in parameters.items() if p.annotation in (Tensor, Range))
        self.ranges = frozenset(k for k, p in parameters.items() if p.annotation == Range)
        self.keeps = self.operands
        self.keeps_if: Mapping[str, tuple[str, Value]] = {}
        self.first = self.parameters.index(self.operands[0])
        # By type of the first operand: (args, kwargs) -> results, or None for what is not a plain call known before.
        # Under other keys, what frontends keep for themselves.
        self.shortcuts: dict[type | str, Shortcut] = {}
        self.attributes = {k: _kind(p.annotation) for k, p in parameters.items() if k not in self.operands}
        self.choices = {
            k: typing.get_args(parameters[k].annotation) for k, kind in self.attributes.items() if kind == "choice"
        }
        shown = [
            p.replace(annotation=_RANGE if k in self.ranges else ARRAY) if k in self.operands else p
            for k, p in parameters.items()
        ]
        name = inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=str | None)
        out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ARRAYS)
        self.__signature__ = inspect.Signature([*shown, name, out])
        self.result_type = namedtuple(raw_name or self.name, results)  # type: ignore[misc]
        self.result_type.__doc__ = f"Results of `{self.name}`."
        # Pickled by the operator's name, because the class has none in its module.
        self.result_type.__reduce__ = partialmethod(_reduced, self.name)  # type: ignore[assignment]
        self._remembered = lru_cache(maxsize=4096)(self.check)

    def __reduce__(self) -> tuple[Callable[[str], "Operator"], tuple[str]]:
        return _by_name, (self.name,)  # pickled by name, as functions are

    # TensorFlow's autograph rewrites the Python code of what a traced function calls, unless it has this attribute.
    autograph_info__: object = None

    def __repr__(self) -> str:
        nothing = inspect.Parameter.empty
        parameters = [
            p.replace(annotation=nothing) if isinstance(p.annotation, _Shown) else p
            for p in self.__signature__.parameters.values()
        ]
        return f"<exactqat operator {self.name}{inspect.Signature(parameters)}>"

    def __get__(self, instance: object, owner: object = None) -> "Operator":
        """Of a class an operator is a static method. Having this also tells `help` that it is a routine, with a
        signature."""
        return self

    def gradient(
        self,
        vjp: Vjp | None = None,
        *,
        of: tuple[str, ...] | None = None,
        saves_results: tuple[str, ...] = (),
        keeps: tuple[str, ...] | None = None,
        keeps_if: Mapping[str, tuple[str, Value]] | None = None,
        training_form: "Operator | None" = None,
    ) -> Any:
        """Declare the vector-Jacobian product: `vjp(gradients, operands, results, attributes)` -> one gradient per
        operand.

        `gradients` holds one array per result; None in the answer means a zero gradient. The body uses declared
        operators and the arrays' own arithmetic only, so it works in every framework and can be differentiated again.
        It is linear in `gradients`. `results` are those that `saves_results` names, the last ones in their order, which
        are kept alive for the backward pass; nobody may change them in place until then, so only those that are needed.
        `of` names the
        results that have a gradient, by default all; the others count as constants. `keeps` names the operands that
        are kept alive for the backward pass, by default all; the others are None in `operands`. `keeps_if` maps some of
        them to the attribute and the value with which they are: with another one they may be None, too.

        `training_form` is an operator that runs in the place of this one where gradients are wanted: with the same
        operands and attributes, and this one's results followed by residuals, which the caller never sees. `results`
        are then the residuals. So a backward pass can do with less memory than the operands take.
        """
        if vjp is None:
            return partial(
                self.gradient,
                of=of,
                saves_results=saves_results,
                keeps=keeps,
                keeps_if=keeps_if,
                training_form=training_form,
            )
        self.vjp = vjp
        self.differentiable = self.results if of is None else of
        self.keeps = self.operands if keeps is None else keeps
        self.keeps_if = keeps_if or {}
        self.saved_results = slice(len(self.results) - len(saves_results), len(self.results))
        if self.results[self.saved_results] != saves_results:
            raise ValueError(f"{self.name}: saves_results must be its last results, got {', '.join(saves_results)}")
        if training_form is not None:
            own = len(self.results)
            if training_form.parameters != self.parameters or training_form.results[:own] != self.results:
                raise ValueError(f"{training_form.name} does not take and return what {self.name} does")
            self.training_form = training_form
            self.saved_results = slice(own, None)
            # The same gradient for itself, so that a rule that runs it can be differentiated again.
            for name in ("vjp", "differentiable", "gradient_count", "keeps", "keeps_if", "saved_results"):
                setattr(training_form, name, getattr(self, name))
        return vjp

    def gradient_by_parts(self, vjp: Vjp) -> Vjp:
        """Declare the same gradient without residuals of a training form, which cannot be cut along every axis: for
        arrays that may be spread over several devices. `vjp` is called as that of `gradient`, with all operands and
        no results."""
        self.vjp_by_parts = vjp
        return vjp

    def axes(self, rule: Callable[..., Axes]) -> Callable[..., Axes]:
        """Declare what the dimensions mean: `rule(**operands, **attributes)` -> `Axes`, for specifications that passed
        the checks. Without it a call is never cut and never made one with others."""
        self.axes_rule = rule
        return rule

    def by_parts(self, rule: Vjp) -> Vjp:
        """Declare how parts that were cut along `Axes.whole` are computed together: `rule(total, operands, attributes)`
        -> the results, with the part's operands; `total(array)` is the sum of what the parts have there. Like a
        gradient it uses declared operators and the arrays' own arithmetic only."""
        self.parts_rule = rule
        return rule

    def in_tensorflow(self, rule: Callable[..., InTensorFlow | None]) -> Callable[..., InTensorFlow | None]:
        """Declare which calls TensorFlow's own operator handles: `rule(results, **operands, **attributes)` -> how, or
        None if it does not, for specifications that passed the checks. Without it TensorFlow has no such operator.
        """
        self.tensorflow_rule = rule
        return rule

    def refuses(self, text: str, **attributes: Value) -> None:
        """Declare that with these attributes the kernel may refuse the values of the ranges, which are known only when
        it runs. `text` is the caller's error message, with the ranges' names in braces; up to its first colon it is
        the kernel's message."""
        self.refusal_text, self.refusal_attributes = text, attributes

    def may_refuse(self, attributes: Mapping[str, Value]) -> bool:
        """Whether a call with these attributes may fail when its kernel runs."""
        return (
            bool(self.refusal_text) and {k: attributes[k] for k in self.refusal_attributes} == self.refusal_attributes
        )

    def refusal(self, error: Exception, operands: Iterable[object], attributes: Mapping[str, Value]) -> Exception:
        """The error message for a call whose kernel failed with `error`."""
        if not self.may_refuse(attributes) or self.refusal_text.partition(":")[0] not in str(error):
            return error
        try:
            ranges = {k: written(v) for k, v in zip(self.operands, operands, strict=True) if k in self.ranges}
        except Exception:  # they are not known here
            return error
        return ValueError(f"{self.name}: {self.refusal_text.format(**ranges)}")

    def axes_of(self, operands: tuple[TensorSpec, ...], attributes: Attributes) -> Axes | None:
        """The meaning of the dimensions in one checked call, None if it is not declared."""
        if self.axes_rule is None:
            return None
        axes = self.axes_rule(**dict(zip(self.operands, operands, strict=True)), **dict(attributes))
        # Versions of one operator that differ in their last operand or result share a rule.
        operand_count, count = len(self.operands), len(self.results)
        return axes._replace(
            operands=axes.operands[:operand_count], results=axes.results[:count], sums=axes.sums[:count]
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Value]]:
        """The operands, in order, and the checked attributes of one call."""
        accepted = self.parameters + ("name",)
        if len(args) > len(accepted):
            raise TypeError(f"{self.name}() takes at most {len(accepted)} arguments, got {len(args)}")
        values = dict(zip(accepted, args, strict=False))
        for key, value in kwargs.items():
            if key not in accepted:
                raise TypeError(f"{self.name}() has no argument {key!r}; its arguments are {', '.join(accepted)}")
            if key in values:
                raise TypeError(f"{self.name}() got argument {key!r} twice")
            values[key] = value
        operands: list[Any] = []
        attributes = {}
        for key in self.parameters:
            value = values.get(key)
            if value is None:  # TensorFlow 1 documented None as "the default" for attributes
                if key in self.defaults:
                    value = self.defaults[key]
                elif key not in values:
                    raise TypeError(f"{self.name}() is missing the required argument {key!r}")
                elif key not in self.attributes:
                    raise TypeError(f"{self.name}: {key} must be {AN_ARRAY}, got None")
            if key in self.attributes:
                attributes[key] = self.attribute(key, value)
            else:
                self._check_numbers(key, value)
                operands.append(value)
        return operands, attributes

    def _check_numbers(self, name: str, value: object, depth: int = 0) -> None:
        """Refuse Python numbers that no float can represent. Others are converted to their dtype, possibly to
        infinity."""
        if type(value) is float:
            return
        if isinstance(value, list | tuple):
            if depth == _MOST_DIMENSIONS:  # or one that holds itself
                raise ValueError(f"{self.name}: {name} must have at most {depth} dimensions, got a list nested deeper")
            for item in value:
                if isinstance(item, str | bytes):  # NumPy would read numbers from it
                    raise TypeError(f"{self.name}: {name} must contain numbers, got {_describe(item)}")
                if "complex" in str(getattr(item, "dtype", "")):
                    raise TypeError(f"{self.name}: {name} must be real, got {_describe(item)}")
                self._check_numbers(name, item, depth + 1)
        elif isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
            raise TypeError(f"{self.name}: {name} must be real, got {_describe(value)}")
        elif isinstance(value, int) and abs(value) > sys.float_info.max:
            raise ValueError(f"{self.name}: {name} must fit float64, got a larger integer")

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the operator. `out`: an array, or a tuple with one for each result, to write the results into."""
        return self.run(args, kwargs, out)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """`__call__` for a caller that has collected the arguments: passing them by name costs as much as a kernel."""
        arrays = out if out is None or isinstance(out, tuple) else (out,)
        if not compiling():
            first = args[self.first] if len(args) > self.first else kwargs.get(self.operands[0])
            shortcut = self.shortcuts.get(type(first))
            if shortcut is not None:
                try:
                    results = shortcut(args, kwargs, arrays)
                    if results is not None:
                        return results
                except TypeError:
                    pass  # the way below knows how arrays may be made to fit, or says again what is wrong
                except ValueError as error:
                    raise self.refusal(error, *self.bind(args, kwargs)) from None
        operands, attributes = self.bind(args, kwargs)
        if arrays is None:
            return frontend_for(self.name, self.operands, operands).call(self, operands, attributes)
        if len(arrays) != len(self.results):
            raise ValueError(f"{self.name}: out must be {len(self.results)} arrays, one per result, got {len(arrays)}")
        return frontend_for(self.name, self.operands, operands).call(self, operands, attributes, arrays)

    def wrap(self, results: Any) -> Any:
        """Results as the caller gets them: the array itself, or a named tuple of several."""
        return results[0] if len(self.results) == 1 else self.result_type(*results)

    # A method, not an attribute of the instance: `functools.wraps` copies those over what it wraps, and `jax.jit(op)`
    # has a `lower` of its own.
    def lower(self, operands: tuple[TensorSpec, ...], attributes: Attributes) -> Lowering:
        """`check`, remembered."""
        return self._remembered(operands, attributes)

    def check(self, operands: tuple[TensorSpec, ...], attributes: Attributes) -> Lowering:
        """The checked call."""
        specs = dict(zip(self.operands, operands, strict=True))
        try:
            return self.rule(**specs, **dict(attributes))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None

    def attribute(self, name: str, value: Any) -> Any:
        """`value` as plain Python of the declared kind, or an error that names the argument."""
        kind = self.attributes[name]
        if kind == "bool":
            if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
                return bool(value)
        elif kind == "int":
            if not isinstance(value, bool):
                index = value if type(value) is int else integer(value)
                if isinstance(index, int):
                    self._check_int64(name, index)
                    return index
        elif kind == "float":
            if isinstance(value, numbers.Real) and not isinstance(value, bool):
                try:
                    return float(value)
                except OverflowError:
                    raise ValueError(f"{self.name}: {name} must fit float64, got a larger integer") from None
        elif kind == "choice":
            if isinstance(value, bytes):
                value = text(value)
            if isinstance(value, str) and value in self.choices[name]:
                return str(value)
            allowed = ", ".join([repr(choice) for choice in self.choices[name]])
            kind = f"one of {allowed}"
            if isinstance(value, str):
                raise ValueError(f"{self.name}: {name} must be {kind}, got {value!r}")
        else:
            try:
                indices = tuple([integer(v) for v in value])
            except Exception:  # not a sequence, or not static
                indices = (None,)
            if None not in indices:
                for index in indices:
                    if isinstance(index, int):
                        self._check_int64(name, index)
                return indices
        wanted = _WANTED.get(kind, kind)
        raise TypeError(f"{self.name}: {name} must be {wanted}, got {_describe(value)}")

    def _check_int64(self, name: str, value: int) -> None:
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{self.name}: {name} must fit 64 bits, got {value}")


_MOST_DIMENSIONS = 64  # NumPy's
_WANTED = {
    "bool": "a bool",
    "int": "a static integer",
    "float": "a number",
    "integers": "a static sequence of integers",
}


def _kind(annotation: Any) -> str:
    """What an attribute may be: "bool", "int", "float", "integers" or "choice" (of strings)."""
    if typing.get_origin(annotation) is typing.Literal:
        return "choice"
    return {bool: "bool", int: "int", float: "float", tuple[int, ...]: "integers"}[annotation]


def _describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def operator(
    raw_name: str | None, results: tuple[str, ...], exports: tuple[str, ...] = (), reuses: tuple[str, ...] = ()
) -> Callable[[Callable[..., Lowering]], Operator]:
    """Declare an operator.

    raw_name: its name in `tf.raw_ops`, None for one that TensorFlow does not have. results: names of the outputs.
    exports: the public names TensorFlow gives it, as "namespace.name" or, for the top level, "name". reuses: operands
    whose memory the first result may be written into, because a kernel is done with each element when it writes it.
    """

    def declare(rule: Callable[..., Lowering]) -> Operator:
        declared = Operator(rule, raw_name, results, exports, reuses)
        OPERATORS[declared.name] = declared
        return declared

    return declare


def _by_name(name: str) -> Operator:
    return OPERATORS[name]


def _results(name: str, *results: Any) -> Any:
    return OPERATORS[name].result_type(*results)


def _reduced(results: Any, name: str) -> Any:
    return _results, (name, *results)
