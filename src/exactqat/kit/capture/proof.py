# SPDX-License-Identifier: Apache-2.0
"""The self-check of `prepare`: the user's original model beside the network that was captured from it.

Both run on the same numbers, quantization and randomness switched off, in training and in evaluation, with several
numbers of examples, and in evaluation far beyond the example's values and at the numbers of the model's own. Results,
gradients of every parameter and of the inputs, the buffers that training moves, and what evaluation makes of those must
be equal to float32's rounding. Nothing here knows a framework: a `Subject` runs both sides.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from ..display import listed
from ..planning import UnsupportedOperator
from ..planning.callers import users_line
from ..planning.masks import MOVES, hides
from ..planning.network import Network
from .core.refusals import first_line

# Relative differences below it are float32's rounding in any network.
FLOOR = 1e-4
# By how much inputs and parameters move, relative, to see what rounding does.
NUDGE = 2.0**-20
# A difference is more than rounding if it is so many times what moving the inputs does.
FACTOR = 16.0
# Inputs for which a tensor must differ.
DRAWS = 3
# A larger difference, though moving the inputs explains it, says nothing: nor is it called rounding.
UNDECIDED = 1e-2
# By how much larger than the example's inputs are, to see bounds far beyond these.
FAR = (10.0, 1e3, 1e6)
# Beyond this, float32's infinity is near, and `exp` ends.
_HUGE = 1e30
# Numbers in a batch of inputs; more take time and show nothing more.
_ENOUGH = 2**19
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
        corners: numbers of the model's own; inputs are at and beside them.
        results_only: nothing else is compared: far from the example, gradients are 0 or infinite.
        draw: which of the inputs.
    """

    training: bool
    examples: int
    scale: float = 1.0
    gradients: bool = True
    corners: tuple[float, ...] = ()
    results_only: bool = False
    draw: int = 0

    @property
    def afterwards(self) -> Trial:
        """The evaluation right after a step of training; after small inputs of one example."""
        return replace(self, training=False, examples=1 if self.scale < 1 else self.examples)

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluation"
        small = "" if self.scale == 1 else f", inputs {self.scale:g} times as large"
        small += ", inputs at numbers that the model compares with" if self.corners else ""
        return f"{mode}, {self.examples} example{'s' * (self.examples != 1)}{small}"


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


class NotComparedWarning(UserWarning):
    """The self-check of `prepare` could not run the user's model in training or in evaluation."""


class HalfPrecisionWarning(UserWarning):
    """The user's model computes in half precision; its network trains in float32."""


class CannotRun(Exception):
    """One side does not run this way. If it is the original, nothing is compared."""


class Subject:
    """A framework's side: runs the original and the captured network; leaves both as they were.

    Attributes:
        network: the captured one.
        inputs: the example: an array for each input, in the type that the original takes.
        tables: by input, how many rows the table has that it is an index into; 0: it is none.
        examples: in the example.
        trains: whether the original's training is known.
        remedy: what to do if the original computes something else in training than in evaluation, if that may be.
        own_gradients: a sentence on what may give the original other gradients than those of what it computes.
        halves: the type of half precision that the original computes in, in part; known once it ran.
        rules: names of functions of the user's that have a gradient of their own; known once the original ran.
    """

    first_line = staticmethod(first_line)
    remedy = ""
    own_gradients = "Gradients of the model's own are not kept"

    def __init__(
        self, network: Network, inputs: Sequence[np.ndarray], tables: Sequence[int], trains: bool = True
    ) -> None:
        self.network, self.inputs, self.tables, self.trains = network, list(inputs), list(tables), trains
        self.examples = len(self.inputs[0])
        self.halves = ""
        self.rules: Collection[str] = ()

    def original(self, trial: Trial, inputs: Sequence[np.ndarray], nudge: int, layers: bool) -> Evidence:
        """What the user's model computes; it may raise whatever that raises.

        Args:
            inputs: an array for each input.
            nudge: not 0: parameters are moved by `nudged`, each number otherwise.
            layers: what is computed on the way is recorded.
        """
        raise NotImplementedError

    def captured(self, trial: Trial, inputs: Sequence[np.ndarray], layers: bool) -> Evidence:
        """The same of the captured network, without quantization."""
        raise NotImplementedError

    def trials(self) -> list[Trial]:
        """All comparisons, in order."""
        size = sum(array.size for array in self.inputs) // max(self.examples, 1)
        return usual_trials(self.examples, size, self.trains) + self.far_trials()

    def far_trials(self) -> list[Trial]:
        """Inputs far beyond the example's, and at the numbers that the network compares with."""
        if not any(array.dtype.kind == "f" and not hides(array) for array in self.inputs):
            return []
        far = Trial(False, min(self.examples, 3), gradients=False, results_only=True)
        corners = corners_of(self.network)
        at_corners = [replace(far, corners=corners)] if corners else []
        return [replace(far, scale=scale) for scale in FAR] + at_corners

    def arrays(self, trial: Trial, nudge: int = 0) -> list[np.ndarray]:
        """The inputs of a trial."""
        arrays = []
        for place, (example, table) in enumerate(zip(self.inputs, self.tables, strict=True)):
            rows = len(example) // self.examples * trial.examples
            arrays.append(nudged(example_rows(example, str(place), rows, trial, table), str(place), nudge))
        return arrays

    def run(self, original: bool, trial: Trial, nudge: int = 0, layers: bool = False) -> Evidence:
        """One side.

        Raises:
            CannotRun: it raises an error.
        """
        try:
            if original:
                return self.original(trial, self.arrays(trial, nudge), nudge, layers)
            return self.captured(trial, self.arrays(trial), layers)
        except CannotRun:
            raise
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {self.first_line(error)}") from error


# What the results of an evaluation right after a step of training are called.
AFTERWARDS = " (evaluated after a step)"
Array = TypeVar("Array")
# Of variables by name, inputs, and whether it trains: results, and variables afterwards.
Run = Callable[[Mapping[str, Array], Sequence[Array], bool], tuple[Any, Mapping[str, Array]]]


class FunctionalSubject(Subject, Generic[Array]):
    """Of a framework in which a model is a function of its variables.

    Attributes:
        evaluates_after: what evaluation gives after a step of training is compared, too.
    """

    evaluates_after = True

    def named(self, results: Any) -> dict[str, Array]:
        """A model's results by their places."""
        raise NotImplementedError

    def weighted_sum(self, results: Mapping[str, Array]) -> Any:
        """The sum of all real results times their cotangents."""
        raise NotImplementedError

    def differentiated(
        self,
        key: tuple[object, ...],
        step: Callable[..., Any],
        leaves: Mapping[str, np.ndarray],
        others: Mapping[str, Any],
        trial: Trial,
    ) -> tuple[Mapping[str, Any], Any]:
        """Gradients of what ``step(leaves, others)`` returns first, by the names of leaves, if the trial compares them;
        and what it returns second.

        key: of equal keys, steps are equal.
        """
        raise NotImplementedError

    def array(self, value: Array) -> np.ndarray:
        """In NumPy, real numbers in float32."""
        raise NotImplementedError

    def evidence(
        self,
        side: str,
        run: Run[Array],
        values: Mapping[str, Any],
        trained: Collection[str],
        statistics: Collection[str],
        trial: Trial,
        inputs: Sequence[np.ndarray],
    ) -> Evidence:
        """What one side gives.

        Args:
            values: of all variables; `trained` have gradients, and training moves `statistics`.
        """
        names = [f"input {place}" for place in range(len(inputs))]
        given = dict(zip(names, inputs, strict=True))
        # A mask reaches up to 0, where it shows all, and there a clip has no gradient; it is not trained.
        followed = {name for name, array in given.items() if array.dtype.kind == "f" and not hides(array)}
        leaves = {name: values[name] for name in values if name in trained}
        leaves |= {name: array for name, array in given.items() if name in followed}
        others = {name: value for name, value in {**values, **given}.items() if name not in leaves}

        def step(leaves: Mapping[str, Array], others: Mapping[str, Array]) -> Any:
            known = {**leaves, **others}
            arrays = [known.pop(name) for name in names]
            results, after = run(known, arrays, trial.training)
            named = self.named(results)
            total = self.weighted_sum(named)
            if trial.training and self.evaluates_after:
                later, _ = run({**known, **after}, arrays, False)
                named |= {f"{name}{AFTERWARDS}": value for name, value in self.named(later).items()}
            return total, (named, {name: after.get(name, known[name]) for name in statistics})

        key = (side, trial.training, trial.examples, trial.gradients)
        gradients, (results, state) = self.differentiated(key, step, leaves, others, trial)
        return Evidence(
            *({name: self.array(value) for name, value in found.items()} for found in (results, gradients, state))
        )


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
        largest: the largest relative error of a tensor that counts as equal, and which tensor.
        noise: how much of that moving the original's inputs by rounding gives; 0: it was too small to be measured.
        undecided: tensors that say nothing: rounding changes them too much, or float32 does not hold them.
        not_run: a sentence for each trial that the original did not run.
        seconds: that the check took.
        refusal: what differs, in words; empty where nothing does.
        own_gradients: a sentence on what may give the original other gradients than those of what it computes.
        halves: the type of half precision that the model computes in, where its network trains in float32; else empty.
    """

    trials: list[Trial] = field(default_factory=list)
    tensors: int = 0
    largest: tuple[float, str] = (0.0, "")
    noise: float = 0.0
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
        equal = self.tensors - len(self.undecided)
        text = f"{equal:,} results, gradients and buffers of {len(self.trials)} runs equal to float32 rounding"
        if self.undecided:
            text += f"; {len(self.undecided):,} not decidable ({listed(self.undecided, 1)})"
        error, name = self.largest
        if error:
            noise = f"; moving the inputs by rounding changes it by {self.noise:.0e}" if self.noise else ""
            text += f"; the largest difference: {name}, by {error:.0e} of its largest value{noise}"
        return "; ".join([f"{text}; {self.seconds:.1f} s", *self.not_run])

    def note(self, error: float, name: str, noise: float = 0.0) -> None:
        """A tensor counts as equal."""
        if error > self.largest[0]:
            self.largest, self.noise = (error, name), noise


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
    if not trial.corners and (not 1e-30 < spread < 1e6 or not np.abs(array[finite]).max() < 1e6):
        return noise * np.float32(trial.scale)
    values = array[np.arange(rows) % array.shape[0]].astype(np.float32)
    if trial.corners:
        beside = np.outer(trial.corners, [-1.0, 0.5, 0.999, 1.0, 1.001, 1.5]).reshape(-1)
        drawn = _generator(f"corners {name} {trial.draw}").choice(beside, values.shape).astype(np.float32)
        return np.where(np.isfinite(values), drawn, values)
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


def corners_of(network: Network) -> tuple[float, ...]:
    """Numbers that a network compares with: bounds, thresholds, operands of extremes and comparisons."""
    numbers: set[float] = set()
    for step in network.steps:
        if step.kind in _COMPARING:
            numbers.update(each for each in (*step.attributes.values(), *step.inputs) if isinstance(each, int | float))
            for _, operands, parameters in step.attributes.get("instructions", ()):
                numbers.update(each for each in (*operands, *parameters) if isinstance(each, float))
    return tuple(sorted(float(number) for number in numbers if number and abs(number) < _HUGE))


# Kinds of steps whose numbers are places where they turn.
_COMPARING = (
    *("clamp", "threshold", "hardshrink", "softshrink", "softplus", "minimum", "maximum", "compare", "composition"),
)


def prove(subject: Subject, trials: Iterable[Trial] | None = None) -> Proof:
    """Compares both sides in all trials, or in these; stops at the first difference."""
    proof, began = Proof(), time.perf_counter()
    for trial in subject.trials() if trials is None else trials:
        try:
            found = _differences(subject, trial, proof)
        except CannotRun as reason:
            if not trial.results_only:
                proof.not_run.append(f"not compared in {trial}: the original raises {reason}")
            continue
        except _Refused as refusal:
            proof.refusal = str(refusal)
            break
        if found:
            proof.refusal = _refusal(subject, trial, found)
            break
        proof.trials.append(trial)
    proof.halves = subject.halves
    proof.seconds = time.perf_counter() - began
    return proof


def _differences(subject: Subject, trial: Trial, proof: Proof) -> list[Difference]:
    """The tensors that differ for all draws of inputs."""
    found = _compared(subject, trial, proof)
    for draw in range(1, DRAWS):
        # Inputs that the original does not take speak for nobody.
        with contextlib.suppress(CannotRun):
            if not found:
                break
            again = {(each.what, each.name) for each in _compared(subject, replace(trial, draw=draw), Proof())}
            found = [each for each in found if (each.what, each.name) in again]
    return found


class _Refused(Exception):
    """The network is not the model; the message says why."""


_WHAT = {"results": "result", "gradients": "the gradient of", "state": "buffer"}
_RAISES = "the captured network is not the model: in {trial} it raises {reason}, the model does not"
_VARIES = (
    "the model computes another {name} each time it is called with the same numbers (a clock, a counter, random "
    "numbers of Python's); the device computes the same at every call"
)


def _compared(subject: Subject, trial: Trial, proof: Proof) -> list[Difference]:
    """The tensors that differ by more than rounding explains."""
    original = subject.run(True, trial)
    try:
        captured = subject.run(False, trial)
    except CannotRun as reason:
        raise _Refused(_RAISES.format(trial=trial, reason=reason)) from reason
    suspects: list[tuple[str, str, np.ndarray, np.ndarray, float]] = []
    # By kind: what counts as nothing beside the largest of them.
    tiny = dict.fromkeys(_WHAT, LEAST / FLOOR)
    tiny["gradients"] += NOTHING * max([_largest(each) for each in original.gradients.values()], default=0.0)
    for kind in ("results",) if trial.results_only else _WHAT:
        for name, here, there in _pairs(getattr(original, kind), getattr(captured, kind), kind == "gradients"):
            word = f"{_WHAT[kind]} '{name}' in {trial}"
            error = relative_error(here, there, tiny[kind])
            proof.tensors += 1
            if trial.results_only and not _decides(here):
                proof.undecided.append(f"{word}, which float32 hardly holds")
            elif error > FLOOR:
                suspects.append((kind, name, here, there, error))
            elif here.size and not np.isfinite(here).any():
                proof.undecided.append(f"{word}, which is not finite")
            elif kind == "results" and 0 < _largest(here) < LEAST / FLOOR:
                proof.undecided.append(f"{word}, which is too small for float32")
            else:
                proof.note(error, word)
    if not suspects:
        return []
    found = []
    again, *moved = (subject.run(True, trial, nudge) for nudge in (0, 1, 2))
    for kind, name, here, there, error in suspects:
        word = f"{_WHAT[kind]} '{name}' in {trial}"
        same, *runs = (getattr(each, kind).get(name, np.zeros_like(here)) for each in (again, *moved))
        if relative_error(here, same, tiny[kind]) > FACTOR * FLOOR:
            raise _Refused(_VARIES.format(name=name))
        noise = max(relative_error(here, each, tiny[kind]) for each in runs)
        if error > FACTOR * noise and not (trial.results_only and _adds_to_scores(subject.network)):
            found.append(Difference(_WHAT[kind], name, error, _cosine(here, there) if kind == "gradients" else None))
        elif error > UNDECIDED:
            proof.undecided.append(f"{word}, which rounding changes by {noise:.0e}")
        else:
            proof.note(error, word, noise)
    return found


def _pairs(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], zeros: bool
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, original's, captured one's); zeros: what one side lacks is zero, as a gradient of what nothing depends on;
    else it is empty."""
    for name in dict.fromkeys([*ours, *theirs]):
        lacking = np.zeros_like(ours.get(name, theirs.get(name))) if zeros else np.zeros(0, np.float32)
        yield name, ours.get(name, lacking), theirs.get(name, lacking)


def _decides(array: np.ndarray) -> bool:
    """Whether float32 holds a result far from the example well."""
    return bool(np.isfinite(array).all()) and _largest(array) < _HUGE


def _adds_to_scores(network: Network) -> bool:
    """Whether something is added in front of a softmax: a mask, which hides scores of the example's size only."""
    makers = {step.output: step for step in network.steps}

    def is_sum(name: Any) -> bool:
        step = makers.get(name)
        return step is not None and (step.kind in ("add", "sub") or (step.kind in MOVES and is_sum(step.inputs[0])))

    return any(
        (step.kind == "attention" and (step.inputs[3:] not in ((), (None,)) or step.attributes.get("causal")))
        or (step.kind in ("softmax", "log_softmax") and is_sum(step.inputs[0]))
        for step in network.steps
    )


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
    results, states = ([each for each in found if each.what == _WHAT[kind]] for kind in ("results", "state"))
    if subject.remedy and results and all(difference.name.endswith(AFTERWARDS) for difference in results):
        names = listed([f"'{difference.name.removesuffix(AFTERWARDS)}'" for difference in results])
        return (
            f"the model was given in training, and in evaluation it computes something else than the network that was "
            f"read (results {names}); the device computes evaluation. {subject.remedy[0].upper()}{subject.remedy[1:]}"
        )
    where = ""
    if results:
        where, worst = _first_layer(subject, trial), max(results, key=lambda each: each.error)
    elif states:
        worst = max(states, key=lambda each: each.error)
    else:
        # Gradients flow backwards: the last one that is wrong is next to where they go wrong.
        parameters = [each for each in found if not each.name.startswith("input ")]
        worst = (parameters or list(found))[-1]
        where = (
            f"; it is the one nearest to the results of {len(found)} gradients that differ"
            if parameters
            else "; gradients of inputs alone differ"
        )
    sentences = [
        f"the captured network is not the model: in {trial}, {worst}{where}. Training it would train another network",
        "prepare(..., check=False) trains it all the same",
    ]
    if subject.rules:
        sentences.append(
            f"The model computes gradients by rules of its own ({', '.join(sorted(subject.rules))}); those of the "
            "captured network are the gradients of what these functions compute"
        )
    elif not (results or states):
        sentences.append(subject.own_gradients)
    if subject.remedy and (results or states):
        sentences.append(f"If training computes something else than evaluation, {subject.remedy}")
    return ". ".join(sentences)


def _first_layer(subject: Subject, trial: Trial) -> str:
    """Where results begin to differ, in words."""
    try:
        originals = list(subject.run(True, trial, layers=True).layers.values())
        captured = subject.run(False, trial, layers=True).layers
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
