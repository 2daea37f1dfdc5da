# SPDX-License-Identifier: Apache-2.0
"""Whether what a model does depends on the number of examples in a batch, or on earlier calls.

An export shows one call with one number of examples, and not where Python has computed with it. So the model runs with
several, on tensors without values, and what it calls is compared: the same functions with the same numbers, but for
sizes, which follow the batch. The numbers that do not are the model's own: the stand-in for the batch is chosen among
others. And where forward changes attributes, it runs again: what it calls then must be the same.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...planning.network import Place
from ..core.stand_ins import MULTIPLE, PRIMES, fitting
from ..core.watched import Watch, plain
from .export import states_of_lstm
from .finite import Finite
from .steps import NOT_USERS

EACH_TIME = (
    "what it computes is another each time it is called with as many examples (a clock, a counter, random numbers of "
    "Python's); the device computes the same at every call"
)
# Another number of examples, even where the primes are odd. One, which broadcasts, is the self-check's.
FEW = 2


@dataclass(frozen=True)
class Call:
    """A call of a function of PyTorch's: its numbers, words and Nones in order, and the sizes of its results."""

    name: str
    given: tuple[Any, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass
class Run:
    """What a model has called.

    Attributes:
        calls: of its first call.
        state: in words, what later calls find changed and compute with; empty if nothing.
        draws: whether it draws random numbers in Python.
        counted: paths of numbers that every call changes, with which nothing is computed that could be seen.
    """

    calls: list[Call]
    state: str = ""
    draws: bool = False
    counted: tuple[str, ...] = ()


class _Recorder(TorchFunctionMode):
    def __init__(
        self, paths: dict[int, str], left: Mapping[str, Sequence[Any]] | None = None, watch: Watch | None = None
    ) -> None:
        """left: by attribute, tensors whose readers are noted. watch: of the sizes forward asks for."""
        super().__init__()
        self.paths, self.watch = paths, watch
        self.left = left or {}
        self.calls: list[Call] = []
        self.read: dict[str, Place] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for path, held in self.left.items():
            if any(each is tensor for each in pytree.tree_leaves((args, kwargs)) for tensor in held):
                self.read.setdefault(path, self._place())
        if isinstance(result, int | torch.Size):
            # What is asked computes nothing; what follows from the answer is called with it.
            if self.watch is None:
                return result
            return torch.Size(self.watch.shape(result)) if isinstance(result, torch.Size) else self.watch.size(result)
        tensors = (each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor))
        sizes = tuple(size for each in tensors for size in each.shape)
        name = getattr(function, "__name__", str(function))
        # What an assertion would say often holds the sizes it was given, but nothing is computed with it.
        given = args[:1] if function is torch._assert else (args, kwargs or {})
        self.calls.append(Call(name, tuple(_plain(given)), sizes, self._place()))
        return result

    def _place(self) -> Place:
        """The user's line that calls, and the module around the call."""
        frame: Any = sys._getframe(2)
        path: str | None = None
        while frame is not None:
            path = self.paths.get(id(frame.f_locals.get("self"))) if path is None else path
            if not frame.f_code.co_filename.startswith((*NOT_USERS, "<")):
                return Place(path or "", frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return Place(path or "")


def _plain(value: Any) -> Iterator[Any]:
    """Numbers, words and Nones among arguments."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, slice):
            yield from map(plain, (leaf.start, leaf.stop, leaf.step))
        elif leaf is None or isinstance(leaf, int | float | str):
            yield plain(leaf)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def recorded(
    make: Callable[[], nn.Module],
    given: Callable[[torch.device | None], Arguments],
    watched: tuple[Watch, int] | None = None,
) -> Run | None:
    """What a model calls; None where it does not run without values.

    Args:
        make: makes a copy of the model, which may be changed.
        given: makes the arguments, on their own device or on another one.
        watched: writes down what forward asks about the number of examples, which is the second one.
    """
    # Meta tensors take a fraction of the time; but a model may bring tensors that are none.
    meta = torch.device("meta")
    run = _run(lambda: make().to(meta), lambda: given(meta), meta, watched)
    if run is None:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        run = _run(lambda: _with_own_buffers(make()), lambda: given(None), fake, watched)
    # Some code wants sizes that are plain numbers.
    return recorded(make, given) if run is None and watched is not None and watched[0].handed_out else run


def _with_own_buffers(model: nn.Module) -> nn.Module:
    """A copy that shares its tensors with the model gets buffers of its own, as layers count batches in them."""
    for module in model.modules():
        module._buffers.update({name: each.clone() for name, each in module._buffers.items() if each is not None})
    return model


def _run(
    make: Callable[[], nn.Module], given: Callable[[], Arguments], mode: Any, watched: tuple[Watch, int] | None
) -> Run | None:
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make()
            random.seed(0)
            np.random.seed(0)
            seeded = _random_state()
            paths = {id(module): path for path, module in model.named_modules()}

            def once(left: Mapping[str, Sequence[Any]] | None = None) -> _Recorder:
                random.seed(0)
                np.random.seed(0)
                watch, examples = watched or (None, 0)
                recorder = _Recorder(paths, left, watch)
                with mode, _eager(), Finite(), states_of_lstm():
                    args, kwargs = given()
                    watching = contextlib.nullcontext() if watch is None else watch.of(examples, torch.Tensor)
                    with recorder, watching:
                        model(*args, **kwargs)
                return recorder

            before, run = _attributes(model), Run(once().calls)
            run.draws = _random_state() != seeded
            if _changed(before, _attributes(model)):
                # The second call may find what the first has made once and for all; the third shows what goes on.
                second = once(), _attributes(model)
                left = {path: held for path, (_, held) in second[1].items()}
                third = once(left), _attributes(model)
                _judge(run, second, third)
            return run
    except Exception as error:
        if watched is not None:
            watched[0].read_code(error)
        return None
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def _eager() -> Any:
    """Runs what torch.compile has made as it was written: what is compiled once calls something else next time."""
    compiler = sys.modules.get("torch._dynamo")
    return contextlib.nullcontext() if compiler is None else torch.compiler.set_stance("force_eager")


def _random_state() -> Any:
    _, words, *rest = np.random.get_state()
    return random.getstate(), np.asarray(words).tobytes(), rest


_Attributes = dict[str, tuple[Any, list[Any]]]


def _attributes(model: nn.Module) -> _Attributes:
    """What Python keeps in a model beside parameters, buffers and modules, by path: what is compared, and tensors."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") and name in _OWN or name == "training":
                continue
            leaves = pytree.tree_leaves(value)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            plain = [leaf if isinstance(leaf, int | float | str | None) else id(leaf) for leaf in leaves]
            found[".".join(filter(None, (path, name)))] = (plain, [value, *tensors])
    return found


# Attributes of every module.
_OWN = set(vars(nn.Module()))


def _changed(before: _Attributes, after: _Attributes) -> list[str]:
    return [path for path, (plain, _) in after.items() if path not in before or before[path][0] != plain]


def _judge(run: Run, second: tuple[_Recorder, _Attributes], third: tuple[_Recorder, _Attributes]) -> None:
    """What is said of a model that changes its attributes at every call."""
    changed = _changed(second[1], third[1])
    read = next((path for path in changed if path in third[0].read), None)
    pairs = zip(second[0].calls, third[0].calls, strict=False)
    other = next((pair for pair in pairs if (pair[0].name, pair[0].given) != (pair[1].name, pair[1].given)), None)
    names = ", ".join(repr(path) for path in changed)
    if changed and read is not None:
        run.state = f"{third[0].read[read]}: it computes with {read!r}, which an earlier call has left there"
    elif changed and other is not None:
        run.state = (
            f"{other[1].place}: forward changes {names}, and {other[1].name} is called with other numbers next time"
        )
    elif changed and len(second[0].calls) != len(third[0].calls):
        run.state = f"forward changes {names}, and calls other functions next time"
    numbers = (path for path in changed if all(isinstance(each, int | float) for each in third[1][path][0]))
    run.counted = tuple(path for path in numbers if not third[1][path][1][1:])


def alike(one: Run | None, other: Run | None) -> bool:
    """Whether two runs with as many examples call the same, but for switches such as those of dropout."""

    def compared(call: Call) -> tuple[Any, ...]:
        return call.name, [each for each in call.given if not isinstance(each, bool)]

    return one is not None and other is not None and [*map(compared, one.calls)] == [*map(compared, other.calls)]


def stand_in(taken: set[int], run: Run | None) -> int:
    """A prime that no size and no number of the model is a multiple of."""
    calls = [] if run is None else run.calls
    numbers = {abs(each) for call in calls for each in call.given if isinstance(each, int | float)}
    seen = taken | {size for call in calls for size in call.sizes} | numbers
    return next(iter(fitting(PRIMES, seen)), PRIMES[0])


# Functions that run along the first axis of three, if `batch_first` is not set; that is their last argument.
_ALONG_THE_FIRST = {"gru": "nn.GRU", "lstm": "nn.LSTM", "rnn_tanh": "nn.RNN", "rnn_relu": "nn.RNN"}


def along_the_batch(few: Run | None, with_one_more: Callable[[], Run | None]) -> str:
    """Where a recurrent layer takes the examples of a batch for the steps of a sequence; torch.export would write
    down each of them; empty if nowhere.

    few: a run with `FEW` examples.
    """

    def steps(call: Call) -> int:
        across = call.name in _ALONG_THE_FIRST and call.given[-1] is False and call.sizes
        return call.sizes[0] if across else 0

    if few is None or not any(steps(call) == FEW for call in few.calls):
        return ""
    more = with_one_more()
    for call, other in zip(few.calls, [] if more is None else more.calls, strict=False):
        if steps(call) == FEW and steps(other) == FEW + 1:
            name = _ALONG_THE_FIRST[call.name]
            return (
                f"{call.place}: {name} without batch_first=True runs along the first axis, which is the batch here; "
                f"the device computes every example by itself: {name}(..., batch_first=True), or transpose(0, 1) before"
            )
    return ""


def dependence(runs: dict[int, Run | None]) -> str:
    """Where what is called depends on the number of examples, by which the runs are listed; empty if nowhere."""
    known = {examples: run.calls for examples, run in runs.items() if run is not None}
    if len(known) < 2:
        return ""
    counts = list(known)
    for calls in zip(*known.values(), strict=False):
        first, last = calls[0], calls[-1]
        if any(each.name != first.name or len(each.given) != len(first.given) for each in calls):
            return _branch(counts, calls)
        for values in zip(*(each.given for each in calls), strict=True):
            if not _follows(values, counts):
                return (
                    f"{first.place}: {first.name}: it computes with the size of the batch: {values[0]!r} for "
                    f"{counts[0]} examples, {values[-1]!r} for {counts[-1]}; the device computes every example by "
                    "itself"
                )
    lengths = [len(run) for run in known.values()]
    if len(set(lengths)) > 1:
        longest = max(known, key=lambda count: len(known[count]))
        last = known[longest][min(lengths)]
        return f"{last.place}: {last.name} is called or not, depending on the number of examples in the batch"
    return ""


def _branch(counts: Sequence[int], calls: Sequence[Call]) -> str:
    other = next(
        at for at, each in enumerate(calls) if each != calls[0] and each.name != calls[0].name or at == len(calls) - 1
    )
    return (
        f"{calls[0].place}: what it computes depends on the number of examples in the batch: {calls[0].name} for "
        f"{counts[0]}, {calls[other].name} for {counts[other]} (at {calls[other].place}); the device computes every "
        "example by itself"
    )


def _follows(values: Sequence[Any], counts: Sequence[int]) -> bool:
    """Whether values are the same for all numbers of examples, or proportional to these."""
    first = values[0]
    if all(type(each) is type(first) and (each == first or each != each) for each in values):
        return True
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        return False
    if not all(isinstance(each, int) for each in values):
        # What converter.number sees, a multiple of the stand-in, it refuses at its own step.
        return all(
            each == values[0] / counts[0] * count and each % count == 0
            for each, count in zip(values, counts, strict=True)
        )
    return all(
        each % count == 0 and each // count == first // counts[0] for each, count in zip(values, counts, strict=True)
    )


__all__ = [
    "EACH_TIME",
    "FEW",
    "MULTIPLE",
    "PRIMES",
    "Arguments",
    "Call",
    "Run",
    "alike",
    "along_the_batch",
    "dependence",
    "recorded",
    "stand_in",
]
