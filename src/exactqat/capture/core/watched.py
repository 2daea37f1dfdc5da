# SPDX-License-Identifier: Apache-2.0
"""What a model's Python asks about the number of examples while it is traced.

A network is traced with a few numbers of examples; `if len(x) == 16` answers alike for all of these. So in one run
sizes that follow the batch are integers that keep how they follow it, through arithmetic, and write down what the
user's own code compares them with. For each comparison `to_try` gives a number of examples that has the other answer,
and the same ones before it: with that the model is traced, or run, too, and may ask more. Where a size leaves what can
be followed (a key of a dictionary, `math.sqrt`, a text), the numbers in the code around it are tried.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import itertools
import math
import operator
import os
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import numpy as np

from ...planning.callers import users_line
from .comparison import NotComparedWarning
from .naming import PACKAGE

# Every number of examples up to here is looked at, and powers of two up to the other one.
EVERY, LARGEST = 4096, 2**20
# So many of those that a model asks about are tried.
MOST = 48
# What libraries compare is for their own checks, or the same for all sizes.
_LIBRARIES = ("torch", "jax", "jaxlib", "numpy", "keras", "tensorflow", "einops")

# A variable of an enclosing function that has no value yet.
_EMPTY = CellType()
_Follows = Callable[[int], Any]


@dataclass(frozen=True)
class Asked:
    """A number of examples that is to be tried, and the place of the question whose answer changes there."""

    examples: int
    place: str


class Watch:
    """Writes down what is asked of the sizes that it hands out.

    Attributes:
        examples: in the batch that is traced: sizes that are multiples of it follow the batch.
        handed_out: whether anything was watched.
        strict: whether code asks for the class of numbers: what is tried has to be tried with plain ones, too.
        found: numbers of examples to try, by the places of the questions.
    """

    def __init__(self, own: Iterable[int] = ()) -> None:
        """own: sizes of the model's own. Numbers of examples that one of them is a multiple of are tried
        only if there are no others, as it would look like a batch."""
        self.examples = 0
        self._clear = np.array([not any(each and each % n == 0 for each in set(own)) for n in _ALL], bool)
        self.handed_out = self.strict = False
        self.found: dict[int, str] = {}
        # By question, what is answered for each of `_ALL`.
        self._answers: dict[Any, np.ndarray] = {}
        self._read: set[CodeType] = set()
        # For which of these this run's answers are the same so far.
        self._alike = np.ones(len(_ALL), bool)
        self._active = False
        self._thread = 0
        # Whose frame runs the model: what calls it has its own numbers.
        self._runs: FrameType | None = None

    @contextmanager
    def of(self, examples: int, tensor: type) -> Iterator[None]:
        """While it lasts, questions are written down, and `len` of what is a `tensor` is watched."""
        length = builtins.len

        def watched_length(value: Any, /) -> int:
            found = length(value)
            return self.size(found) if isinstance(value, tensor) else found

        self.examples, self._active, self._thread = examples, True, threading.get_ident()
        self._runs = _entering(sys._getframe())
        self._alike[:] = True
        # Python makes a plain number of what `__len__` returns.
        builtins.len = watched_length
        try:
            yield
        finally:
            builtins.len = length
            self._active, self._runs = False, None

    @property
    def watching(self) -> bool:
        return self._active and threading.get_ident() == self._thread

    def size(self, size: Any) -> Any:
        """A size, which is watched if it follows the batch."""
        if not self.watching or type(size) is not int or size <= 0 or size % self.examples:
            return size
        self.handed_out = True
        self._look_at_code()
        rows = size // self.examples
        return WatchedInt(size)._watched(self, lambda examples: rows * examples)

    def shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The sizes of a tensor."""
        return tuple(map(self.size, shape))

    def to_try(self, usual: Iterable[int]) -> Iterator[Asked]:
        """Numbers of examples other than the usual ones, the smallest first, `MOST` of them; those that questions add
        on the way, too. Warns of those that are left."""
        tried = set(usual)
        for _ in range(MOST):
            left = set(self.found) - tried
            if not left:
                return
            tried.add(smallest := min(left))
            yield Asked(smallest, self.found[smallest])
        left = set(self.found) - tried
        if left:
            smallest = min(left)
            warnings.warn(
                f"the model asks about more than {MOST} numbers of examples; {len(left)} of them were not tried, the "
                f"smallest {smallest} ({self.found[smallest]})",
                NotComparedWarning,
                stacklevel=users_line(),
            )

    def asked(self, key: Any, truth: _Follows, frame: FrameType) -> None:
        """A question whose answer follows the batch."""
        place = place_of(frame)
        answers = self._answers.get((place, key))
        if answers is None:
            answers = self._answers[place, key] = np.array([_answer(truth, examples) for examples in _ALL], np.int8)
        now = _answer(truth, self.examples)
        other = answers != now
        # Sizes of the model's own may look like the batch, and leave none that are alike.
        for found in (other & self._alike & self._clear, other & self._alike, other):
            if found.any():
                self._add([_ALL[int(found.argmax())]], place)
                break
        else:
            self._add(_beyond(truth, now), place)
        self._alike &= ~other

    def lost(self, frame: FrameType, keys: bool = False) -> None:
        """A size becomes a plain number, or a key: what is done with it cannot be followed."""
        place = place_of(frame)
        if (place, keys) in self._answers:
            return
        self._answers[place, keys] = self._alike
        if keys:
            numbers = _keys_near(frame) | _constants([frame.f_code])
            self._add(numbers or range(3, 65), place)
            return
        codes = [each.f_code for each in itertools.islice(_users_frames(frame, self._runs), 8)]
        numbers = _constants(codes) | _whole(_near(frame))
        powers = {2**each for each in numbers if each <= 12} | {2**each for each in range(2, 13)}
        sizes = {*(n + step for n in numbers for step in (-1, 0, 1)), *(n * n for n in numbers), *powers}
        self._add((each for each in sizes if each <= EVERY), place)

    def read_code(self, error: BaseException | None) -> None:
        """Tries the numbers in code that raised an error with watched sizes; some code wants plain numbers alone."""
        while error is not None:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if is_users(frame.f_code.co_filename):
                    numbers = _constants([frame.f_code])
                    self._add((number + step for number in numbers for step in (0, 1)), place_of(frame))
            error = error.__cause__

    def _look_at_code(self) -> None:
        """Finds questions in the code that gets a size, and in what it calls, that no watched number hears of."""
        frame = next(_users_frames(sys._getframe(2), self._runs), None)
        if frame is None or frame.f_code in self._read:
            return
        self._read.add(frame.f_code)
        codes, values = _reached(frame)
        # Python asks a fraction in front of a size alone, which knows nothing of a watch.
        fractions = {each for code in codes for each in _leading_fractions(code)}
        strict = any(map(_asks_for_class, codes))
        self.strict |= strict
        if not fractions and not strict:
            return
        numbers = _constants(codes) | _whole(values)
        sizes = {round(each) for n in numbers for f in fractions for each in (n, n / f, n * f)}
        sizes |= numbers if strict else set()
        self._add((each + step for each in sizes for step in (-1, 0, 1) if each < EVERY), place_of(frame))

    def _add(self, sizes: Iterable[int], place: str) -> None:
        for each in sizes:
            if each in _ALL or EVERY < each <= LARGEST:
                self.found.setdefault(each, place)


# One and two are the self-check's, and every trace's.
_ALL = range(3, EVERY + 1)


def _answer(truth: _Follows, examples: int) -> int:
    try:
        return int(bool(truth(examples)))
    except (ArithmeticError, ValueError):
        return -1


def _beyond(truth: _Follows, now: int) -> list[int]:
    """The first number of examples beyond those that are all looked at that has another answer."""
    below = EVERY
    while below < LARGEST:
        above = 2 * below
        if _answer(truth, above) != now:
            while above - below > 1:
                middle = (above + below) // 2
                below, above = (middle, above) if _answer(truth, middle) == now else (below, middle)
            return [above]
        below = above
    return []


# --- whose code asks --------------------------------------------------------------------------------------------------


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is a model's: the user's own, or of a library of models; not of a framework or of Python."""
    found = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    libraries = (PACKAGE, *(os.path.dirname(each) + os.sep for each in found if each), "<frozen")
    paths = sysconfig.get_paths()
    inside = file.startswith((paths["purelib"] + os.sep, paths["platlib"] + os.sep))
    return not file.startswith(libraries) and (inside or not file.startswith(paths["stdlib"] + os.sep))


def users_frame(depth: int) -> FrameType | None:
    """The frame that runs, if its code is a model's; None in a library."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame if frame is not None and is_users(frame.f_code.co_filename) else None


def place_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def _users_frames(frame: FrameType | None, runs: FrameType | None) -> Iterator[FrameType]:
    """The functions that are being called, as far as their code is a model's, from a frame to the one that runs it."""
    while frame is not None and frame is not runs:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _entering(frame: FrameType | None) -> FrameType | None:
    """The frame of the outermost `with` statement that a context manager's frame was entered by."""
    while frame is not None and (
        frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    return frame


def _numbers_in(value: Any) -> Iterator[int]:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield int(value)
    elif isinstance(value, tuple | list | set | frozenset):
        for each in list(value)[:256]:
            yield from _numbers_in(each)


def _constants(codes: Iterable[CodeType]) -> set[int]:
    """Whole numbers in code that may be numbers of examples."""
    return _whole(
        instruction.argval
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
    )


@functools.cache
def _leading_fractions(code: CodeType) -> tuple[float, ...]:
    """Fractions in code that compares, in front of what it computes with."""
    instructions = list(dis.get_instructions(code))
    if not any(each.opname in ("COMPARE_OP", "CONTAINS_OP") for each in instructions):
        return ()
    pairs = zip(instructions, instructions[1:], strict=False)
    found = (first.argval for first, then in pairs if then.opname.startswith("LOAD_") and then.opname != "LOAD_CONST")
    return tuple(abs(each) for each in found if isinstance(each, float) and each and math.isfinite(each))


def _asks_for_class(code: CodeType) -> bool:
    """Whether code may ask if a number is an `int` and of no other class."""
    return not {"type", "__class__"}.isdisjoint(code.co_names) and "int" in (*code.co_names, *code.co_consts)


def _reached(frame: FrameType) -> tuple[list[CodeType], list[Any]]:
    """The model's code that code can reach by name, with itself, and what that can reach, as far as it can be seen."""
    codes, values = [frame.f_code], _near(frame)
    instances = list(frame.f_locals.values())
    for value in values:  # which grow on the way
        function = getattr(value, "__func__", value)
        if not isinstance(function, FunctionType) or not is_users(function.__code__.co_filename):
            continue
        code = function.__code__
        if code in codes or len(codes) == 64:
            continue
        codes.append(code)
        instances += [value.__self__] if hasattr(value, "__self__") else []
        values += [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
        values += _named(code, function.__globals__, instances)
    return codes, values


def _named(code: CodeType, variables: Mapping[str, Any], instances: Iterable[Any]) -> list[Any]:
    """Variables of a module, and attributes of classes, that the code names."""
    attributes = [inspect.getattr_static(type(each), name, None) for each in instances for name in code.co_names]
    return [*attributes, *(variables.get(name) for name in code.co_names)]


def _near(frame: FrameType) -> list[Any]:
    """What a function can reach by name: its variables, their attributes, and its module's."""
    own = list(frame.f_locals.values())
    attributes = [each for value in own for each in list(getattr(value, "__dict__", {}).values())[:256]]
    return [*own, *attributes, *_named(frame.f_code, frame.f_globals, own)]


def _whole(values: Iterable[Any]) -> set[int]:
    """Whole numbers that may be numbers of examples."""
    found = (each for each in values if isinstance(each, int | float | tuple | list | frozenset))
    return {n for value in found for n in _numbers_in(value) if 2 < n <= EVERY}


def _keys_near(frame: FrameType) -> set[int]:
    """Whole numbers among the keys of dictionaries and sets that a function can reach by name."""
    keys = [each for value in _near(frame) if isinstance(value, dict | set | frozenset) for each in list(value)[:256]]
    return {number for key in keys for number in _numbers_in(key) if 2 < number <= LARGEST}


# --- numbers that are watched -----------------------------------------------------------------------------------------


def plain(number: Any) -> Any:
    """A number as any other, which is not watched."""
    if isinstance(number, WatchedInt):
        return int.__int__(number)
    return float.__float__(number) if isinstance(number, WatchedFloat) else number


def _follower(number: Any) -> _Follows | None:
    """How a number follows the batch; None of what is no number."""
    if isinstance(number, _Watched):
        return number._follows
    if isinstance(number, int | float):
        return lambda examples: number
    return None


class _Watched:
    """Arithmetic that keeps how a number follows the batch, and comparisons that are written down."""

    _watch: Watch
    _follows: _Follows

    def _watched(self, watch: Watch, follows: _Follows) -> Any:
        self._watch, self._follows = watch, follows
        return self

    def _made(self, value: Any, function: Callable[..., Any], *operands: Any) -> Any:
        """What arithmetic gives, watched."""
        follows = [_follower(each) for each in operands]
        if not self._watch.watching or any(each is None for each in follows):
            return value
        if type(value) is int or type(value) is float:
            kind = WatchedInt if type(value) is int else WatchedFloat
            made = kind(value)._watched(self._watch, lambda n: function(*(each(n) for each in follows if each)))
            return made
        if type(value) is tuple:
            return tuple(
                self._made(each, lambda *given, at=at: function(*given)[at], *operands) for at, each in enumerate(value)
            )
        return value

    def _asked(self, function: Callable[..., Any], *others: Any) -> None:
        if not self._watch.watching:
            return
        frame = users_frame(2)
        follows = [_follower(each) for each in (self, *others)]
        if frame is None or any(each is None for each in follows):
            return

        def truth(examples: int) -> Any:
            return function(*(each(examples) for each in follows if each))

        samples = tuple(each(n) for each in follows if each for n in (3, 1009))
        self._watch.asked((getattr(function, "__name__", ""), samples), truth, frame)

    def _lost(self, keys: bool = False) -> None:
        if self._watch.watching and (frame := users_frame(2)) is not None:
            self._watch.lost(frame, keys)


def _arithmetic(base: type, name: str, function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    own = getattr(base, name)

    def operation(self: Any, *others: Any) -> Any:
        value = own(self, *others)
        operands = (*others, self) if reflected else (self, *others)
        if value is NotImplemented and isinstance(others[0], float):
            # Python would ask the fraction, which knows nothing of a watch.
            value = function(*map(plain, operands))
        return value if value is NotImplemented else self._made(value, function, *operands)

    return operation


def _comparison(base: type, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    own = getattr(base, name)

    def compare(self: Any, other: Any) -> Any:
        value = own(self, other)
        if value is NotImplemented and isinstance(other, float):
            value = function(plain(self), plain(other))
        if value is not NotImplemented:
            self._asked(function, other)
        return value

    return compare


def _leaving(base: type, name: str) -> Callable[..., Any]:
    own = getattr(base, name)

    def leave(self: Any, *args: Any) -> Any:
        self._lost()
        return own(self, *args)

    return leave


def _methods(base: type) -> dict[str, Any]:
    """What a watched number does otherwise than its base."""
    methods: dict[str, Any] = {}
    binary = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
    for name in (*binary, "divmod"):
        function = divmod if name == "divmod" else getattr(operator, name)
        for prefix in ("", "r"):
            special = f"__{prefix}{name.rstrip('_')}__"
            if hasattr(base, special):
                methods[special] = _arithmetic(base, special, function, bool(prefix))
    for name in ("neg", "pos", "abs", "invert"):
        if hasattr(base, f"__{name}__"):
            methods[f"__{name}__"] = _arithmetic(base, f"__{name}__", getattr(operator, name), False)
    to_whole: dict[str, Callable[..., Any]] = {
        "floor": math.floor,
        "ceil": math.ceil,
        "trunc": math.trunc,
        "round": round,
    }
    for name, rounded in to_whole.items():
        methods[f"__{name}__"] = _arithmetic(base, f"__{name}__", rounded, False)
    for name in ("bit_length", "bit_count"):
        if hasattr(base, name):
            methods[name] = _arithmetic(base, name, getattr(base, name), False)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        methods[f"__{name}__"] = _comparison(base, f"__{name}__", getattr(operator, name))
    for name in ("__float__", "__int__", "__str__", "__repr__", "__format__", "__trunc__"):
        if name not in methods:
            methods[name] = _leaving(base, name)

    def truth(self: Any) -> bool:
        self._asked(bool)
        return bool(base.__bool__(self))  # type: ignore[attr-defined]

    def is_integer(self: Any) -> bool:
        self._asked(lambda number: float(number).is_integer())
        return float(plain(self)).is_integer()

    def hashed(self: Any) -> int:
        self._lost(keys=True)
        return hash(plain(self))

    def copied(self: Any, *args: Any) -> Any:
        return plain(self)

    def reduced(self: Any, *args: Any) -> Any:
        return base, (plain(self),)

    return methods | {
        "__bool__": truth,
        "is_integer": is_integer,
        "__hash__": hashed,
        "__copy__": copied,
        "__deepcopy__": copied,
        "__reduce_ex__": reduced,
    }


class WatchedInt(_Watched, int):
    """A size that follows the batch."""

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        self._lost()
        return getattr(function, method)(*map(plain, inputs), **kwargs)


class WatchedFloat(_Watched, float):
    """What is computed of such a size."""

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        self._lost()
        return getattr(function, method)(*map(plain, inputs), **kwargs)


for _kind, _base in ((WatchedInt, int), (WatchedFloat, float)):
    for _name, _method in _methods(_base).items():
        setattr(_kind, _name, _method)
