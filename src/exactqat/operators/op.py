# SPDX-License-Identifier: Apache-2.0
"""Operator declarations.

An operator is declared once, as a plain function: its parameters are TensorFlow's, its docstring is the
documentation, and its body checks the arguments and returns a `Lowering`: the results' shapes and dtypes, the kernel
to run and the numbers that kernel needs. Parameters annotated `Tensor` or `Range` are operands; all the others are
attributes, static under every compiler. Everything else (the frameworks' entry points, `raw_ops`, documentation,
test enumeration) is derived from it.
"""

import inspect
import math
import numbers
import operator as python_operator
import string
import struct
import sys
import types
import typing
from array import array
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, partialmethod, update_wrapper
from typing import Annotated, Any, NamedTuple, TypeVar


class TensorSpec(NamedTuple):
    """An array as the declarations see it: its shape and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# How a declaration marks an array parameter: what its rule sees of it is the specification.
Tensor = TensorSpec

# The same for ranges and statistics: a few numbers about the data, at least float32, which may be given as numbers of
# any kind.
Range = Annotated[TensorSpec, "range"]


class _Shown:
    """An annotation that reads as `text` in signatures and `help()`."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


ARRAY = _Shown("numpy.ndarray | torch.Tensor | jax.Array | tf.Tensor")
_RANGE = _Shown("numpy.ndarray | torch.Tensor | jax.Array | tf.Tensor | float")
ARRAYS = _Shown("numpy.ndarray | torch.Tensor | tuple | None")


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


class Lowering(NamedTuple):
    """A checked call: what it returns and which kernel computes it from which numbers."""

    results: tuple[TensorSpec, ...]
    kernel: str
    numbers: Mapping[str, int | float]


class Axes(NamedTuple):
    """How one call may be cut into calls on parts of its arrays, or several calls of one kind be made one.

    operands, results: a letter for each dimension of each array; dimensions of one letter are cut together. A leading
    "." means any number of further dimensions in front, which mean the same in all arrays that have it. "/" is a
    mask of 2 bits for each element, four to a byte, of an array with ".". "-" is a dimension of an operand that is
    ignored.
    sums: for each result the letters that it is a sum over: what the parts of a cut along one of them give is added up.
    Results without a letter that is not among them do not depend on anything along it.
    whole: letters along which nothing may be cut, or, with `Operator.by_parts`, not without the other parts' sums; "?"
    is one along which nothing is ever cut.
    sizes: attributes that hold sizes of dimensions, and the letters of these.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    sums: tuple[str, ...]
    whole: str = ""
    sizes: Mapping[str, str] = types.MappingProxyType({})


class InTensorFlow(NamedTuple):
    """How TensorFlow's own operator handles a checked call.

    gradients: whether those it has registered, of every order, are the declared ones.
    everywhere: whether every build of it takes the call; otherwise it has to be tried.
    unwritten: results it leaves uninitialized, and the operands whose values belong there.
    opaque: operands that it makes for itself, of whatever shape.
    nan_over: axes over which a NaN in the first operand makes the result NaN, which in TensorFlow depends on the NaN's
    position.
    """

    gradients: bool
    everywhere: bool = True
    unwritten: Mapping[str, str] = types.MappingProxyType({})
    opaque: tuple[str, ...] = ()
    nan_over: tuple[int, ...] = ()


OPERATORS: dict[str, "Operator"] = {}

# What loads the module for each framework; `exactqat.frontends` fills it, as declarations know none of them.
FRONTENDS: dict[str, Callable[[], types.ModuleType]] = {}

# Where an array type is defined, in the order in which they are asked; a framework counts only once the caller
# imported it.
FRAMEWORKS = {"numpy": ("numpy", "ndarray"), "torch": ("torch", "Tensor"), "jax": ("jax", "Array")}


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
        self.vjp: Callable[..., tuple[Any, ...]] | None = None
        self.training_form = self
        self.differentiable = results
        self.gradient_count = len(results)
        self.saved_results = slice(0)  # of the training form
        self.vjp_by_parts: Callable[..., tuple[Any, ...]] | None = None
        self.axes_rule: Callable[..., Axes] | None = None
        self.parts_rule: Callable[..., tuple[Any, ...]] | None = None
        self.tensorflow_rule: Callable[..., InTensorFlow | None] | None = None
        self.refusal_text = ""
        self.refusal_attributes: Mapping[str, Any] = {}
        parameters = inspect.signature(rule, eval_str=True).parameters
        self.parameters = tuple(parameters)
        self.defaults = {k: p.default for k, p in parameters.items() if p.default is not inspect.Parameter.empty}
        self.operands = tuple(k for k, p in parameters.items() if p.annotation in (Tensor, Range))
        self.ranges = frozenset(k for k, p in parameters.items() if p.annotation == Range)
        self.keeps = self.operands
        self.keeps_if: Mapping[str, tuple[str, Any]] = {}
        self.first = self.parameters.index(self.operands[0])
        # By type of the first operand: (args, kwargs) -> results, or None for what is not a plain call known before.
        # Under other keys, what frontends keep for themselves.
        self.shortcuts: dict[Any, Callable[[tuple[Any, ...], dict[str, Any], tuple[Any, ...] | None], Any]] = {}
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

    def __reduce__(self) -> Any:
        return _by_name, (self.name,)  # pickled by name, as functions are

    # TensorFlow's autograph rewrites the Python code of what a traced function calls, unless it has this attribute.
    autograph_info__: Any = None

    def __repr__(self) -> str:
        nothing = inspect.Parameter.empty
        parameters = [
            p.replace(annotation=nothing) if isinstance(p.annotation, _Shown) else p
            for p in self.__signature__.parameters.values()
        ]
        return f"<exactqat operator {self.name}{inspect.Signature(parameters)}>"

    def __get__(self, instance: Any, owner: Any = None) -> "Operator":
        """Of a class an operator is a static method. Having this also tells `help` that it is a routine, with a
        signature."""
        return self

    def gradient(
        self,
        vjp: Callable[..., tuple[Any, ...]] | None = None,
        *,
        of: tuple[str, ...] | None = None,
        saves_results: tuple[str, ...] = (),
        keeps: tuple[str, ...] | None = None,
        keeps_if: Mapping[str, tuple[str, Any]] | None = None,
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

    def gradient_by_parts(self, vjp: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
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

    def by_parts(self, rule: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
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

    def refuses(self, text: str, **attributes: Any) -> None:
        """Declare that with these attributes the kernel may refuse the values of the ranges, which are known only when
        it runs. `text` is the caller's error message, with the ranges' names in braces; up to its first colon it is
        the kernel's message."""
        self.refusal_text, self.refusal_attributes = text, attributes

    def may_refuse(self, attributes: Mapping[str, Any]) -> bool:
        """Whether a call with these attributes may fail when its kernel runs."""
        return (
            bool(self.refusal_text) and {k: attributes[k] for k in self.refusal_attributes} == self.refusal_attributes
        )

    def refusal(self, error: Exception, operands: Any, attributes: Mapping[str, Any]) -> Exception:
        """The error message for a call whose kernel failed with `error`."""
        if not self.may_refuse(attributes) or self.refusal_text.partition(":")[0] not in str(error):
            return error
        try:
            ranges = {k: written(v) for k, v in zip(self.operands, operands, strict=True) if k in self.ranges}
        except Exception:  # they are not known here
            return error
        return ValueError(f"{self.name}: {self.refusal_text.format(**ranges)}")

    def axes_of(self, operands: tuple[TensorSpec, ...], attributes: tuple[tuple[str, Any], ...]) -> Axes | None:
        """The meaning of the dimensions in one checked call, None if it is not declared."""
        if self.axes_rule is None:
            return None
        axes = self.axes_rule(**dict(zip(self.operands, operands, strict=True)), **dict(attributes))
        # Versions of one operator that differ in their last operand or result share a rule.
        operand_count, count = len(self.operands), len(self.results)
        return axes._replace(
            operands=axes.operands[:operand_count], results=axes.results[:count], sums=axes.sums[:count]
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
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
                    raise TypeError(f"{self.name}: {key} must be {_ARRAY}, got None")
            if key in self.attributes:
                attributes[key] = self.attribute(key, value)
            else:
                self._check_numbers(key, value)
                operands.append(value)
        return operands, attributes

    def _check_numbers(self, name: str, value: Any, depth: int = 0) -> None:
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
        if not _compiling():
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
            return frontend_for(self, operands).call(self, operands, attributes)
        if len(arrays) != len(self.results):
            raise ValueError(f"{self.name}: out must be {len(self.results)} arrays, one per result, got {len(arrays)}")
        return frontend_for(self, operands).call(self, operands, attributes, arrays)

    def wrap(self, results: Any) -> Any:
        """Results as the caller gets them: the array itself, or a named tuple of several."""
        return results[0] if len(self.results) == 1 else self.result_type(*results)

    # A method, not an attribute of the instance: `functools.wraps` copies those over what it wraps, and `jax.jit(op)`
    # has a `lower` of its own.
    def lower(self, operands: tuple[TensorSpec, ...], attributes: tuple[tuple[str, Any], ...]) -> Lowering:
        """`check`, remembered."""
        return self._remembered(operands, attributes)

    def check(self, operands: tuple[TensorSpec, ...], attributes: tuple[tuple[str, Any], ...]) -> Lowering:
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


def integer(value: Any) -> Any:
    """`value` as an int if it is one of any kind, else None; JAX's symbolic sizes stay what they are."""
    if isinstance(value, int):  # before anything that torch.compile cannot ask of a number that it holds symbolically
        return int(value)
    if hasattr(value, "dimension_as_value"):
        return value
    try:
        return python_operator.index(value)
    except Exception:  # arrays, tracers and tensors each refuse in their own way
        pass
    if isinstance(value, str | bytes | bytearray) or getattr(value, "shape", ()) != ():
        return None
    try:
        whole = int(value)
        return whole if whole == value else None
    except Exception:
        return None


def text(value: Any) -> Any:
    """Decodes `value` if it is bytes; other values are returned unchanged."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def written(value: Any) -> str:
    """A number as people write it: no more digits than its dtype (or float32, if it came from there) distinguishes."""
    if _compiling():
        return str(value)
    number = float(value.reshape(()) if hasattr(value, "reshape") else value)
    text = repr(number)
    try:
        of_float32 = struct.unpack("f", struct.pack("f", number))[0] == number
    except OverflowError:
        return text
    if not of_float32 or (isinstance(value, float) and len(text) <= 12):
        return text
    shorter = (f"{number:.{digits}g}" for digits in range(1, 10))
    return next(short for short in shorter if struct.unpack("f", struct.pack("f", float(short)))[0] == number)


_MOST_DIMENSIONS = 64  # NumPy's
_ARRAY = "a NumPy, PyTorch, JAX or TensorFlow array or a number"
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


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def operator(
    raw_name: str | None, results: tuple[str, ...], exports: tuple[str, ...] = (), reuses: tuple[str, ...] = ()
) -> Callable[[Any], Operator]:
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


def _compiling() -> bool:
    """Whether torch.compile is tracing, which cannot follow shortcuts."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def is_array_like(value: Any) -> bool:
    """Whether `value` is an object that NumPy can unambiguously convert to an array: pandas' columns, TensorFlow's
    tensors, the standard library's arrays."""
    return hasattr(value, "__array__") or isinstance(value, array | memoryview)


def arrays_in(value: Any) -> list[Any]:
    """What a nested sequence holds beside numbers."""
    found = []
    for item in value:
        if isinstance(item, list | tuple):
            found += arrays_in(item)
        elif type(item) not in (float, int) and not isinstance(item, numbers.Number):
            found.append(item)
    return found


def rank_of(value: Any) -> int:
    """Number of dimensions of anything that can be an operand."""
    if hasattr(value, "shape"):
        return len(value.shape)
    if isinstance(value, list | tuple):
        return 1 + (rank_of(value[0]) if value else 0)
    if hasattr(value, "__array__"):
        return len(value.__array__().shape)
    return memoryview(value).ndim if isinstance(value, array | memoryview) else 0


def framework_of(value: Any) -> str | None:
    """ "numpy", "torch", "jax" or "tensorflow" for an array, None for a Python number or sequence."""
    for framework, (module, array_type) in FRAMEWORKS.items():
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(value, getattr(loaded, array_type)):
            return framework
    # Its tensors and variables, and those of Keras that hold one of these, have no class in common that is public.
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and not _compiling() and getattr(tensorflow, "is_tensor", _is_nothing)(value):
        return "tensorflow"
    return None


def _is_nothing(value: Any) -> bool:
    return False


def frontend_for(declared: Operator, operands: list[Any]) -> types.ModuleType:
    """The module that runs `declared` for these arrays: one framework's, optionally mixed with NumPy's."""
    found, first = None, ""
    for name, value in zip(declared.operands, operands, strict=True):
        for item in arrays_in(value) if isinstance(value, list | tuple) else (value,):
            framework = framework_of(item)
            if framework is None:
                if type(item).__name__ == "KerasTensor":
                    raise TypeError(
                        f"{declared.name}: {name} is a KerasTensor, which has no values yet; call it in the `call` "
                        "method of a keras.layers.Layer"
                    )
                if not isinstance(item, numbers.Number) and not is_array_like(item):
                    raise TypeError(f"{declared.name}: {name} must be {_ARRAY}, got {type(item).__name__}")
            elif found in (None, "numpy"):
                found, first = framework, name
            elif framework not in (found, "numpy"):
                raise TypeError(
                    f"{declared.name}: {name} is a {framework} array but {first} is a {found} array; "
                    f"all operands must come from one framework, or from NumPy"
                )
    return frontend(found or "numpy")


def frontend_of(array: Any) -> types.ModuleType:
    """The module that runs operators on what `array` is."""
    return frontend(framework_of(array) or "numpy")


def frontend(framework: str) -> types.ModuleType:
    """The module that runs operators on the arrays of one framework."""
    return FRONTENDS[framework]()


# Checks that several families share. Each names the argument, what was given and what is allowed.

FLOATS = ("float16", "bfloat16", "float32", "float64")
HALVES = ("float16", "bfloat16")
ITEM_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}  # in bytes


def check_dtypes(**specs: TensorSpec) -> None:
    """Checks that all have one dtype, which the kernels support."""
    (first, leading), *others = specs.items()
    if leading.dtype not in FLOATS:
        raise TypeError(f"{first} must be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}, got {leading.dtype}")
    for name, spec in others:
        if spec.dtype != leading.dtype:
            raise TypeError(f"{name} must be {leading.dtype} like {first}, got {spec.dtype}")


def wide(dtype: str) -> str:
    """The dtype of ranges and statistics that goes with `dtype`: at least float32, since 16 bits are too few."""
    return "float32" if dtype in HALVES else dtype


def check_wide_dtypes(leading: TensorSpec, first: str, **specs: TensorSpec) -> None:
    """Ranges and statistics of a tensor: of its dtype, or float32 if it has 16 bits."""
    for name, spec in specs.items():
        if spec.dtype != wide(leading.dtype):
            raise TypeError(f"{name} must be {wide(leading.dtype)} for {leading.dtype} {first}, got {spec.dtype}")


def check_rank(rank: int, **specs: TensorSpec) -> None:
    for name, spec in specs.items():
        if spec.rank != rank:
            raise ValueError(f"{name} must be rank {rank} but is rank {spec.rank} (shape {list(spec.shape)})")


def check_same_shape(**specs: TensorSpec) -> None:
    (first, leading), *others = specs.items()
    for name, spec in others:
        if spec.shape != leading.shape:
            raise ValueError(
                f"{first} and {name} must be the same size, got {list(leading.shape)} and {list(spec.shape)}"
            )


def check_length(length: int, of: str, **specs: TensorSpec) -> None:
    """Vectors of one length; `of` tells what the length is taken from."""
    check_rank(1, **specs)
    for name, spec in specs.items():
        if spec.shape[0] != length:
            raise ValueError(f"{name} has incorrect size, expected {length} ({of}), got {spec.shape[0]}")


def dtypes_that_fit(op: Operator, kept: list[str | None], otherwise: str) -> list[str]:
    """A dtype for each operand that goes with those of the arrays that keep theirs: that of the first of them that
    holds data, `otherwise` where there is none. `kept`: None for operands that become what fits."""
    leading = next(
        (dtype for name, dtype in zip(op.operands, kept, strict=True) if dtype and name not in op.ranges), ""
    )
    leading = leading if leading in FLOATS else otherwise
    return [
        dtype or (wide(leading) if name in op.ranges else leading)
        for name, dtype in zip(op.operands, kept, strict=True)
    ]


def guest(op: Operator, name: str, array: Any) -> Any:
    """A NumPy array that other frameworks can read: real numbers in a dtype they support, dense, and writable, which
    they require."""
    kind, flags = array.dtype.kind, array.flags
    if kind not in "biuf" and array.dtype.name != "bfloat16":
        raise TypeError(f"{op.name}: {name} must contain real numbers, got an array of {array.dtype}")
    if kind == "f" and array.dtype.itemsize > 8:
        return array.astype("float64", order="C")
    # One without gaps may have negative strides where it has one element.
    dense = flags.c_contiguous and min(array.strides, default=0) >= 0
    if dense and flags.aligned and flags.writeable and array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="), order="C")


def unreadable(op: Operator, name: str, error: Exception) -> Exception:
    """The error for an operand that no framework can convert to an array."""
    why = str(error).split("\n")[0]
    if why.startswith(op.name):  # it says all
        return error
    return ValueError(f"{op.name}: {name} must be an array, a number or a regular nest of numbers, got one with: {why}")


class Memory(NamedTuple):
    """An array's place in memory, as `check_out` needs it."""

    spec: TensorSpec
    address: int
    dense: bool  # row-major without gaps, in the machine's byte order
    writable: bool

    @property
    def end(self) -> int:
        return self.address + self.spec.size * ITEM_SIZES[self.spec.dtype]

    def overlaps(self, other: "Memory") -> bool:
        return self.address < other.end and other.address < self.end


def check_out_specs(op: Operator, lowered: Lowering, out: list[TensorSpec]) -> None:
    """Refuse arrays for the results that are not like them."""
    for name, spec, given in zip(op.results, lowered.results, out, strict=True):
        if given != spec:
            wanted = f"{spec.dtype} of shape {list(spec.shape)}"
            raise ValueError(
                f"{op.name}: out for {name} must be {wanted}, got {given.dtype} of shape {list(given.shape)}"
            )


def out_is_not_dense(op: Operator, name: str) -> ValueError:
    """The error for result memory that is not contiguous."""
    return ValueError(f"{op.name}: out for {name} must be a dense and writable array (row-major, native byte order)")


def check_out(op: Operator, lowered: Lowering, operands: list[Memory], out: list[Memory]) -> None:
    """Refuse arrays for the results that do not match or whose memory is still needed."""
    check_out_specs(op, lowered, [given.spec for given in out])
    for i, (name, given) in enumerate(zip(op.results, out, strict=True)):
        where = f"{op.name}: out for {name}"
        if not given.dense or not given.writable:
            raise out_is_not_dense(op, name)
        for operand_name, operand in zip(op.operands, operands, strict=True):
            same = given.address == operand.address and given.spec == operand.spec
            if given.overlaps(operand) and not (same and i == 0 and operand_name in op.reuses):
                allowed = ", ".join(op.reuses) or "no operand"
                raise ValueError(
                    f"{where} shares memory with {operand_name}; the first result may only overwrite {allowed}"
                )
        for other_name, other in zip(op.results[:i], out, strict=False):
            if given.overlaps(other):
                raise ValueError(f"{where} shares memory with out for {other_name}")


_LETTERS = string.ascii_lowercase


def letters_of(spec: TensorSpec) -> str:
    """For `Axes`: a letter of its own for each dimension."""
    if spec.rank > len(_LETTERS):
        return ""  # nothing is said of so many
    return _LETTERS[: spec.rank]


def widened(array: Any) -> Any:
    """A 16-bit array of any framework as float32; others as they are."""
    if getattr(array.dtype, "itemsize", None) != 2 and getattr(array.dtype, "name", "") not in HALVES:
        return array
    if hasattr(array, "astype"):
        return array.astype("float32")
    return array.float() if hasattr(array, "float") else frontend_of(array).cast(array, "float32")


def reshaped(array: Any, shape: Any) -> Any:
    """An array of any framework in another shape."""
    return array.reshape(shape) if hasattr(array, "reshape") else frontend_of(array).reshape(array, shape)


def positions(array: Any, axis: int) -> Any:
    """How many elements an array of any framework has for each index of an axis, at least 1."""
    if None in array.shape:
        return frontend_of(array).positions(array, axis)
    return max(math.prod(array.shape) // max(array.shape[axis], 1), 1)


def repeated(array: Any, like: Any) -> Any:
    """An array of any framework, broadcast to the shape of another one."""
    everywhere = (like == like) | (like != like)
    return array * (everywhere if hasattr(everywhere, "reshape") else frontend_of(array).cast(everywhere, array.dtype))


FLOAT32_LIMIT = 2.0**128 - 2.0**103  # from here on float32 rounds to infinity


def rounded(dtype: str, value: float) -> float:
    """A number as the kernels see it: rounded to the dtype they compute in, with denormals flushed to 0.

    A compiler's symbol stays as it is; the kernel's call checks the number.
    """
    if dtype != "float64" and not _compiling() and isinstance(value, float | int):
        value = struct.unpack("f", struct.pack("f", value))[0]
    smallest_normal = sys.float_info.min if dtype == "float64" else 2.0**-126
    return 0.0 if abs(value) < smallest_normal else value
