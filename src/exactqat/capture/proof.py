# SPDX-License-Identifier: Apache-2.0
"""The self-check of `prepare`: the user's original model beside the network that was captured from it.

Both run on the same numbers, quantization and randomness switched off, in training and in evaluation, with several
numbers of examples. Results, gradients of every parameter and of the inputs, the buffers that training moves, and what
evaluation makes of those must be equal but for rounding. Nothing here knows a framework: a `Subject` runs both sides.

How much rounding explains is measured, not guessed: where a tensor differs by more than `FLOOR`, the original runs
again with inputs and parameters moved by a few units of float32's last place. What changes then is what rounding can
do. A ReLU whose operand rounding turns from one side of zero to the other escapes that now and then; it does so for
one input, so what differs must differ for `DRAWS` of them (docs/decisions/self-check.md).
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ..planning import UnsupportedOperator
from ..planning.callers import users_line
from ..planning.masks import hides
from .core.comparison import NotComparedWarning as NotComparedWarning
from .core.watched import Asked

# Relative differences below it are float32's rounding in any network.
FLOOR = 1e-4
# By how much inputs and parameters move, relative, to see what rounding does.
NUDGE = 2.0**-20
# A difference is more than rounding if it is so many times what moving the inputs does.
FACTOR = 16.0
# Inputs for which a tensor must differ.
DRAWS = 3
# A tensor that moves by more than this under `NUDGE` says nothing.
UNDECIDED = 0.1
# Numbers in a batch of inputs; more take time and show nothing more.
_ENOUGH = 2**19
# Where the model asks about a number of examples, so many numbers are tried.
_LARGEST = 2**24
# Beside the largest tensor of its kind, smaller values are zero but for rounding.
NOTHING = 1e-6
# Differences up to it are what becomes of float32's denormal numbers, which one side may flush to zero and later layers
# may enlarge: of deep networks with small random weights, whole results are hardly larger.
LEAST = 2.0**-120


@dataclass(frozen=True)
class Trial:
    """One comparison.

    Attributes:
        training: both sides train one step; else they evaluate.
        examples: in the batch.
        scale: of the inputs; small ones show what is added inside of roots and quotients, large ones where functions
            are cut off.
        gradients: whether they are compared, too.
        draw: which of the inputs.
        asked: the place where the model asks about this number of examples; empty of the usual ones.
        too_large: whether so many examples are too many to run.
    """

    training: bool
    examples: int
    scale: float = 1.0
    gradients: bool = True
    draw: int = 0
    asked: str = ""
    too_large: bool = False

    @property
    def afterwards(self) -> Trial:
        """The evaluation right after a step of training; after small inputs of one example."""
        return replace(self, training=False, examples=1 if self.scale < 1 else self.examples)

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluation"
        small = "" if self.scale == 1 else f", inputs {self.scale:g} times as large"
        asked = f" (about which the model asks at {self.asked})" if self.asked else ""
        return f"{mode}, {self.examples} example{'s' * (self.examples != 1)}{asked}{small}"


@dataclass
class Evidence:
    """What one run gave: arrays by the user's names.

    Attributes:
        results: of the run, and of an evaluation right after a step of training ("NAME (evaluated after a step)").
        gradients: of the sum of all results times `cotangent`, by parameter, and "input NAME".
        state: buffers after the run.
        layers: what is computed on the way, in order; only if asked for.
    """

    results: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    layers: dict[str, np.ndarray] = field(default_factory=dict)


class HalfPrecisionWarning(UserWarning):
    """The user's model computes in half precision; its network trains in float32."""


class CannotRun(Exception):
    """One side does not run this way. If it is the original, nothing is compared."""


class Subject(Protocol):
    """A framework's side: runs the original and the captured network; leaves both as they were."""

    def original(self, trial: Trial, nudge: int = 0, layers: bool = False) -> Evidence:
        """nudge: not 0: inputs and parameters are moved by `nudged`, each number otherwise.

        Raises:
            CannotRun: the user's model raises an error.
        """
        raise NotImplementedError

    def captured(self, trial: Trial, layers: bool = False) -> Evidence:
        """The same of the captured network.

        Raises:
            CannotRun: it raises an error.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Difference:
    """A tensor that the captured network computes otherwise. error: relative to its largest value."""

    what: str
    name: str
    error: float
    cosine: float | None = None

    def __str__(self) -> str:
        opposite = "" if self.cosine is None or self.cosine > 0.99 else f", cosine {self.cosine:.2f}"
        size = "is not the same" if not np.isfinite(self.error) else f"differs by {self.error:.2g} of its largest value"
        return f"{self.what} '{self.name}' {size}{opposite}"


@dataclass
class Proof:
    """What the self-check found.

    Attributes:
        trials: those that were compared.
        tensors: how many were compared in all.
        largest: the largest relative error that rounding explains.
        undecided: tensors that rounding changes so much that they say nothing.
        not_run: a sentence for each trial that the original did not run.
        seconds: that the check took.
        refusal: what differs, in words; empty where nothing does.
        halves: the type of half precision that the model computes in, where its network trains in float32; else empty.
    """

    trials: list[Trial] = field(default_factory=list)
    tensors: int = 0
    largest: float = 0.0
    undecided: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    seconds: float = 0.0
    refusal: str = ""
    halves: str = ""

    @property
    def rounding(self) -> str:
        """A sentence if the model rounds to half precision."""
        if not self.halves:
            return ""
        return (
            f"the model computes in {self.halves} in part; the prepared network trains in float32 throughout, and the "
            "model was compared with it without that rounding. What the device computes is integers either way"
        )

    @property
    def missing(self) -> str:
        """A sentence if nothing was compared in a mode that was to be."""
        if not self.not_run or {trial.training for trial in self.trials} == {True, False}:
            return ""
        return (
            "whether the captured network is the model could not be compared in all modes: "
            f"{self.not_run[0]}; give an example with which the model runs, and look at its results yourself"
        )

    def __str__(self) -> str:
        text = (
            f"{self.tensors:,} results, gradients and buffers in {len(self.trials)} runs equal the original's but for "
            f"rounding ({self.largest:.1e}), {self.seconds:.1f} s"
        )
        if self.undecided:
            text += f"; not decided: {len(self.undecided)} ({self.undecided[0]}, ...)"
        return "; ".join([text, *self.not_run])


def accept(proof: Proof) -> Proof:
    """The proof, if it found no difference. Warns of modes that were not compared, and of half precision.

    Raises:
        UnsupportedOperator: the network that would be trained is not the model.
    """
    if proof.refusal:
        raise UnsupportedOperator(proof.refusal)
    if proof.missing:
        warnings.warn(proof.missing, NotComparedWarning, stacklevel=users_line())
    if proof.rounding:
        warnings.warn(proof.rounding, HalfPrecisionWarning, stacklevel=users_line())
    return proof


def cotangent(name: str, shape: Sequence[int]) -> np.ndarray:
    """What a result is multiplied by before it is added up: the same for both sides."""
    return _generator(f"cotangent {name}").standard_normal(tuple(shape)).astype(np.float32)


def nudged(array: np.ndarray, name: str, nudge: int) -> np.ndarray:
    """Values moved by `NUDGE`, up or down at random; integers and truth values stay."""
    if not nudge or array.dtype.kind != "f":
        return array
    # Again and again the same signs, of a prime number of them: large weights take their time to draw.
    moves = 1 + NUDGE * _generator(f"{nudge} {name}").choice([-1.0, 1.0], 4099)
    return np.asarray(array * np.resize(moves.astype(array.dtype), array.shape), array.dtype)


def example_rows(array: np.ndarray, name: str, rows: int, trial: Trial, table: int = 0) -> np.ndarray:
    """An input of so many rows for a trial, made from the example's own values.

    Floating point values vary from row to row between the example's smallest and largest; an example without variation,
    or with values that are not numbers, gives way to random ones. Masks, integers and truth values are the example's
    rows, again and again; after the first one, indices into a table of `table` rows are random, and masks of zeros and
    ones hide more than the example does.
    """
    if array.dtype.kind in "iub" and array.size and rows > 1:
        return _integer_rows(array, _generator(f"input {name} {rows} {trial.draw}"), rows, table)
    if array.dtype.kind != "f" or array.size == 0 or hides(array):
        nothing = np.zeros((rows, *array.shape[1:]), array.dtype)
        return array[np.arange(rows) % array.shape[0]] if array.shape[0] else nothing
    noise = _generator(f"input {name} {rows} {trial.draw}").standard_normal((rows, *array.shape[1:])).astype(np.float32)
    finite = np.isfinite(array)
    spread = float(array[finite].std()) if finite.any() else 0.0
    if not 1e-6 < spread < 1e6 or not np.abs(array[finite]).max() < 1e6:
        return noise * np.float32(trial.scale)
    values = array[np.arange(rows) % array.shape[0]].astype(np.float32)
    varied = np.clip(values + noise * np.float32(0.5 * spread), array[finite].min(), array[finite].max())
    # Infinite values are masks.
    return np.where(np.isfinite(values), varied * np.float32(trial.scale), values).astype(np.float32)


def _integer_rows(array: np.ndarray, rng: np.random.Generator, rows: int, table: int) -> np.ndarray:
    values = array[np.arange(rows) % array.shape[0]]
    if table:
        values[1:] = rng.integers(0, table, values[1:].shape)
    elif array.ndim > 1 and ((array == 0) | (array == 1)).all():
        shown = rng.integers(0, 2, values.shape).astype(array.dtype)
        shown[..., 0] = 1  # of a row that shows nothing, nothing follows
        values[1:] &= shown[1:]
    return values


def _generator(seed: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(seed.encode()))


def usual_trials(examples: int, size: int = 1, training: bool = True) -> list[Trial]:
    """The example's number of examples as far as it is cheap, another one, and one.

    size: numbers in the inputs of one example. training: whether the original's training is known.
    """
    first = max(2, min(examples, 8, _ENOUGH // max(size, 1)))
    second = 3 if first != 3 else 2
    trials = [Trial(True, first), Trial(True, second, scale=2.0**-6)] if training else []
    trials += [Trial(False, second, scale=2.0), Trial(False, first, scale=2.0**-6), Trial(False, 1, gradients=False)]
    return trials


def asked_trials(asked: Iterable[Asked], size: int) -> list[Trial]:
    """Numbers of examples about which the model asks, in training and in evaluation.

    size: numbers in the inputs of one example.
    """
    return [
        Trial(training, each.examples, gradients=False, asked=each.place, too_large=each.examples * size > _LARGEST)
        for each in asked
        for training in (True, False)
    ]


def prove(subject: Subject, trials: Iterable[Trial]) -> Proof:
    """Compares both sides in all trials; stops at the first difference."""
    proof, began = Proof(), time.perf_counter()
    for trial in trials:
        if trial.too_large:
            proof.refusal = (
                f"{trial.asked}: the model asks whether a batch has {trial.examples} examples or how it compares with "
                "that, and so many are too many to compare the captured network with the model; leave the question "
                "out, or prepare(..., check=False) trains what it computes for fewer"
            )
            break
        try:
            found = _compared(subject, trial, proof)
            for draw in range(1, DRAWS):
                # Inputs that the original does not take speak for nobody.
                with contextlib.suppress(CannotRun):
                    if not found:
                        break
                    again = {(each.what, each.name) for each in _compared(subject, replace(trial, draw=draw), proof)}
                    found = [each for each in found if (each.what, each.name) in again]
        except CannotRun as reason:
            proof.not_run.append(f"not compared in {trial}: the original raises {reason}")
            continue
        except _OnlyCapturedRaises as error:
            proof.refusal = f"the captured network is not the model: in {trial} it raises {error}, the model does not"
            break
        except _OriginalVaries as what:
            proof.refusal = (
                f"the model computes {what} otherwise each time it is called (a counter, a clock, random numbers of "
                "Python's); the device computes the same at every call"
            )
            break
        if found:
            proof.refusal = _refusal(subject, trial, found)
            break
        proof.trials.append(trial)
    proof.seconds = time.perf_counter() - began
    return proof


class _OnlyCapturedRaises(Exception):
    pass


class _OriginalVaries(Exception):
    """The model gives something else for the same inputs; the message says where."""


_WHAT = {"results": "result", "gradients": "the gradient of", "state": "buffer"}


def _compared(subject: Subject, trial: Trial, proof: Proof) -> list[Difference]:
    """The tensors that differ by more than rounding explains."""
    original = subject.original(trial)
    try:
        captured = subject.captured(trial)
    except CannotRun as reason:
        raise _OnlyCapturedRaises(str(reason)) from reason
    suspects: list[tuple[str, str, np.ndarray, np.ndarray, float]] = []
    # By kind: what counts as nothing beside the largest of them.
    tiny = dict.fromkeys(_WHAT, LEAST / FLOOR)
    tiny["gradients"] += NOTHING * max([_largest(each) for each in original.gradients.values()], default=0.0)
    for kind in _WHAT:
        ours, theirs = getattr(original, kind), getattr(captured, kind)
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if kind == "gradients":
                # One that nothing depends on is zero.
                here = ours[name] if name in ours else np.zeros_like(theirs[name])
                there = theirs[name] if name in theirs else np.zeros_like(ours[name])
            else:
                nothing = np.zeros(0, np.float32)
                here, there = ours.get(name, nothing), theirs.get(name, nothing)
            error = relative_error(here, there, tiny[kind])
            proof.tensors += 1
            if error > FLOOR:
                suspects.append((kind, name, here, there, error))
            elif here.size and not np.isfinite(here).any():
                proof.undecided.append(f"{_WHAT[kind]} '{name}' in {trial}, which is not finite")
            elif kind == "results" and 0 < _largest(here) < LEAST / FLOOR:
                proof.undecided.append(f"result '{name}' in {trial}, which is too small for float32")
            else:
                proof.largest = max(proof.largest, error)
    if not suspects:
        return []
    found, undecided = [], []
    again = subject.original(trial)
    moved = [subject.original(trial, nudge=number) for number in (1, 2)]
    for kind, name, here, there, error in suspects:
        if relative_error(here, getattr(again, kind).get(name, np.zeros_like(here)), tiny[kind]) > FACTOR * FLOOR:
            raise _OriginalVaries(f"{_WHAT[kind]} '{name}'")
        runs = [getattr(each, kind).get(name, np.zeros_like(here)) for each in moved]
        noise = max(relative_error(here, each, tiny[kind]) for each in runs)
        if error <= FACTOR * noise:
            if noise > UNDECIDED:
                undecided.append(f"{_WHAT[kind]} '{name}' in {trial}")
            else:
                proof.largest = max(proof.largest, error)
            continue
        found.append(Difference(_WHAT[kind], name, error, _cosine(here, there) if kind == "gradients" else None))
    proof.undecided += undecided
    return found


def _largest(array: np.ndarray) -> float:
    """The largest magnitude of a finite value."""
    if not array.size:
        return 0.0
    largest = float(max(array.max(), -array.min()))
    if math.isfinite(largest):
        return largest
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def relative_error(expected: np.ndarray, given: np.ndarray, tiny: float = 0.0) -> float:
    """The largest difference over the largest expected value; infinite where shapes or what is no number differ.

    tiny: the least that is divided by.
    """
    if expected.shape != given.shape:
        return math.inf
    if not expected.size:
        return 0.0
    a, b = (each if each.dtype.kind == "f" else each.astype(np.float64) for each in (expected, given))
    with np.errstate(all="ignore"):
        difference = float(np.abs(a - b).max())
    if not math.isfinite(difference):
        finite = np.isfinite(a)
        if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return math.inf
        difference = float(np.abs(a[finite] - b[finite]).max()) if finite.any() else 0.0
    if not difference:
        return 0.0
    scale = max(_largest(a), tiny)
    return difference / scale if scale else math.inf


def _cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.shape != b.shape or not np.isfinite(a).all() or not np.isfinite(b).all():
        return None
    lengths = float(np.linalg.norm(a.astype(np.float64)) * np.linalg.norm(b.astype(np.float64)))
    return float((a.astype(np.float64) * b).sum()) / lengths if lengths else 0.0


def _refusal(subject: Subject, trial: Trial, found: Sequence[Difference]) -> str:
    """What differs, where it begins, and what to do."""
    results = [each for each in found if each.what == _WHAT["results"]]
    states = [each for each in found if each.what == _WHAT["state"]]
    if results:
        where, worst = _first_layer(subject, trial), max(results, key=lambda each: each.error)
    elif states:
        where, worst = "", max(states, key=lambda each: each.error)
    else:
        # Gradients flow backwards: the last one that is wrong is next to where they go wrong.
        where, worst = "", found[-1]
        parameters = [each for each in found if not each.name.startswith("input ")]
        if parameters:
            worst = parameters[-1]
            where = f"; it is the one nearest to the results of {len(found)} gradients that differ"
        else:
            where = "; gradients of inputs alone differ: hooks that the model registers on its inputs are not kept"
    return (
        f"the captured network is not the model: in {trial}, {worst}{where}. Training it would train another network. "
        "prepare(..., check=False) trains it all the same"
    )


def _first_layer(subject: Subject, trial: Trial) -> str:
    """Where results begin to differ, in words."""
    try:
        originals = list(subject.original(trial, layers=True).layers.values())
        captured = subject.captured(trial, layers=True).layers
    except CannotRun:
        return ""
    last = ""
    for name, value in captured.items():
        alike = [each for each in originals if each.size == value.size]
        if any(_same_values(each, value) for each in alike):
            last = name
        elif any(each.shape == value.shape for each in alike):
            after = f", after '{last}', which is equal" if last else ""
            return f"; the first layer that differs is '{name}'{after}"
    return f"; '{last}' is the last layer that is equal" if last else ""


def _same_values(expected: np.ndarray, given: np.ndarray) -> bool:
    """Whether a layer stores what a part of the original gives; layers of the device fuse ReLU and ReLU6."""
    if expected.shape != given.shape or expected.dtype.kind != "f":
        return False
    forms = (expected, np.maximum(expected, 0), np.clip(expected, 0, 6))
    return any(relative_error(each, given) <= 10 * FLOOR for each in forms)
