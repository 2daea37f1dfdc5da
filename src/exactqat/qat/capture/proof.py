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

import math
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np

from ...kit.display import listed
from ...kit.planning import UnsupportedOperator
from ...kit.planning.callers import users_line
from ...kit.planning.masks import MOVES, hides
from ...kit.planning.network import Network, Place
from .core.refusals import Refused, first_line

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
    """

    results: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)


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
        places: of layers in the user's files, where their names do not tell.
        own_gradients: a sentence on what may give the original other gradients than those of what it computes.
        halves: the type of half precision that the original computes in, in part; known once it ran.
        rules: names of functions of the user's that have a gradient of their own; known once the original ran.
        compiles: each mode, number of examples and side is a program to compile, which takes longer than to run it.
    """

    first_line = staticmethod(first_line)
    remedy = ""
    own_gradients = "Gradients of the model's own are not kept"
    compiles = False

    def __init__(
        self, network: Network, inputs: Sequence[np.ndarray], tables: Sequence[int], trains: bool = True
    ) -> None:
        self.network, self.inputs, self.tables, self.trains = network, list(inputs), list(tables), trains
        self.examples = len(self.inputs[0])
        self.halves = ""
        self.places: Mapping[str, Place] = {}
        self.rules: Collection[str] = ()
        self._programs: dict[tuple[object, ...], Differentiated[Any]] = {}

    def original(self, trial: Trial, inputs: Sequence[np.ndarray], nudge: int) -> Evidence:
        """What the user's model computes; it may raise whatever that raises.

        Args:
            inputs: an array for each input.
            nudge: not 0: parameters are moved by `nudged`, each number otherwise.
        """
        raise NotImplementedError

    def captured(self, trial: Trial, inputs: Sequence[np.ndarray]) -> Evidence:
        """The same of the captured network, without quantization."""
        raise NotImplementedError

    def layers(self, original: bool, trial: Trial) -> Mapping[str, np.ndarray]:
        """What one side computes on the way, in order."""
        return {}

    def trials(self) -> Iterator[Trial]:
        """All comparisons, in order: the example's number of examples as far as it is cheap, another one, and one; then
        inputs far beyond the example's, and at the numbers that the network compares with. Where programs are compiled,
        three for each side: of training with gradients, and of evaluation for one example and for one more than in
        training; of few examples, as what they compile to was not made to be fast. The last ones are for gradients of
        the user's own, which differ for some numbers only: batch norms make the same of any two examples."""
        numbers = sum(array.size for array in self.inputs)
        most = 3 if self.compiles else 8
        first = max(2, min(self.examples, most, _ENOUGH // max(numbers // max(self.examples, 1), 1)))
        second, third, far = 3 if first != 3 else 2, first, min(self.examples, 3)
        if self.compiles:
            second, third, far = first, first + 1, first + 1 if self.examples > 1 else 1
        small, evaluated = 2.0**-6, third if self.compiles else second
        gradients = not (self.compiles and self.trains)
        trials = [Trial(True, first), Trial(True, second, small)] if self.trains else []
        trials += [
            Trial(False, evaluated, 2.0, gradients),
            Trial(False, third, small, gradients),
            Trial(False, 1, gradients=False),
        ]
        if any(array.dtype.kind == "f" and not hides(array) for array in self.inputs):
            beyond = Trial(False, far, gradients=False, results_only=True)
            trials += [replace(beyond, scale=scale) for scale in FAR]
            if corners := corners_of(self.network):
                trials.append(replace(beyond, corners=corners))
        yield from trials
        if self.rules:
            yield from (replace(trials[0], examples=8, scale=scale) for scale in (1.0, 4.0))

    def arrays(self, trial: Trial, nudge: int = 0) -> list[np.ndarray]:
        """The inputs of a trial."""
        arrays = []
        for place, (example, table) in enumerate(zip(self.inputs, self.tables, strict=True)):
            rows = len(example) // self.examples * trial.examples
            arrays.append(nudged(example_rows(example, str(place), rows, trial, table), str(place), nudge))
        return arrays

    def run(self, original: bool, trial: Trial, nudge: int = 0) -> Evidence:
        """One side.

        Raises:
            CannotRun: it raises an error.
        """
        try:
            if original:
                return self.original(trial, self.arrays(trial, nudge), nudge)
            return self.captured(trial, self.arrays(trial))
        except CannotRun:
            raise
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {self.first_line(error)}") from error


# What the results of an evaluation right after a step of training are called.
AFTERWARDS = " (evaluated after a step)"
Array = TypeVar("Array")
Named = Mapping[str, Array]
# Of what is followed by gradients and of what is not: a sum, and what else is wanted.
Summed = Callable[[Named[Array], Named[Array]], tuple[Any, Any]]
# Of the same: gradients by name, and what else is wanted.
Differentiated = Callable[[Named[Array], Named[Array]], tuple[Named[Array], Any]]


# Of variables by name, inputs, whether it trains and perhaps a dictionary for what the captured network computes on the
# way: results by name, and variables afterwards.
Run = Callable[..., tuple[Named[Array], Named[Array]]]


@dataclass(frozen=True)
class Side(Generic[Array]):
    """One side of a comparison.

    Attributes:
        values: of all variables; `trained` have gradients, and training may move `statistics`.
    """

    run: Run[Array]
    values: Mapping[str, Any]
    trained: Collection[str]
    statistics: Collection[str]


class FunctionalSubject(Subject, Generic[Array]):
    """Of a framework in which a model is a function of its variables.

    Attributes:
        primitives: the framework's, with `program`, which compiles a function if the framework does, and
            `differentiated`, which gives the gradients of one.
        evaluates_after: what evaluation gives after a step of training is compared, too.
    """

    primitives: ModuleType
    evaluates_after = True

    def side(self, original: bool, nudge: int = 0) -> Side[Array]:
        """The user's model, or the captured network. nudge: see `original`."""
        raise NotImplementedError

    def settled(self) -> AbstractContextManager[None]:
        """Takes all randomness out of both sides."""
        raise NotImplementedError

    def recorded(self, seen: dict[str, Array]) -> AbstractContextManager[None]:
        """Keeps what the user's model computes on the way."""
        raise NotImplementedError

    def array(self, value: Array) -> np.ndarray:
        """In NumPy, real numbers in float32."""
        raise NotImplementedError

    def original(self, trial: Trial, inputs: Sequence[np.ndarray], nudge: int) -> Evidence:
        return self._evidence("original", self.side(True, nudge), trial, inputs)

    def captured(self, trial: Trial, inputs: Sequence[np.ndarray]) -> Evidence:
        return self._evidence("captured", self.side(False), trial, inputs)

    def layers(self, original: bool, trial: Trial) -> Mapping[str, np.ndarray]:
        side, seen = self.side(original), dict[str, Array]()
        inputs = self._tensors(dict(enumerate(self.arrays(trial))))
        with self.settled(), self.recorded(seen) if original else nullcontext():
            side.run(self._tensors(side.values), list(inputs.values()), trial.training, seen)
        return {name: self.array(value) for name, value in seen.items()}

    def program(self, side: str, trial: Trial, step: Summed[Array]) -> Differentiated[Array]:
        """A step with gradients if the trial compares them."""

        def differentiated(leaves: Named[Array], others: Named[Array]) -> tuple[Named[Array], Any]:
            if not trial.gradients:
                return {}, step(leaves, others)[1]
            result: tuple[Named[Array], Any] = self.primitives.differentiated(step, leaves, others)
            return result

        program: Differentiated[Array] = self.primitives.program(differentiated)
        return program

    def _tensors(self, values: Mapping[Any, Any]) -> dict[Any, Array]:
        to_tensor = self.primitives.from_numpy
        return {name: to_tensor(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}

    def _evidence(self, word: str, side: Side[Array], trial: Trial, inputs: Sequence[np.ndarray]) -> Evidence:
        names = [f"input {place}" for place in range(len(inputs))]
        known = {**side.values, **dict(zip(names, inputs, strict=True))}
        # A mask reaches up to 0, where it shows all, and there a clip has no gradient; it is not trained.
        real = [name for name, array in zip(names, inputs, strict=True) if array.dtype.kind == "f" and not hides(array)]
        leaves = {name: known[name] for name in (*(name for name in side.values if name in side.trained), *real)}
        others = {name: value for name, value in known.items() if name not in leaves}
        p = self.primitives

        def step(leaves: Named[Array], others: Named[Array]) -> tuple[Any, Any]:
            variables = {**leaves, **others}
            arrays = [variables.pop(name) for name in names]
            results, after = side.run(variables, arrays, trial.training)
            total: Any = 0.0
            for name, x in results.items():
                value: Any = x
                if "float" in str(value.dtype):
                    weights = p.from_numpy(cotangent(name, tuple(value.shape)))
                    total = total + p.sum(p.to_float(value) * weights, tuple(range(len(value.shape))))
            return total, (results, {name: after.get(name, variables[name]) for name in side.statistics})

        # Equal numbers of examples run the same program.
        key = (word, trial.training, trial.examples, trial.gradients)
        with self.settled():
            if key not in self._programs:
                self._programs[key] = self.program(word, trial, step)
            # Compiled programs take NumPy's arrays; JAX would compile a copy of them for every shape.
            operands = [leaves, others] if self.compiles else map(self._tensors, (leaves, others))
            gradients, (results, state) = self._programs[key](*operands)
        evidence = Evidence(
            *({name: self.array(value) for name, value in arrays.items()} for arrays in (results, gradients, state))
        )
        evidence.state = {
            name: value for name, value in evidence.state.items() if not np.array_equal(value, side.values[name])
        }
        if trial.training and self.evaluates_after:
            afterwards = replace(trial, training=False, examples=1, gradients=False)
            moved = replace(side, values={**side.values, **evidence.state})
            later = self._evidence(word, moved, afterwards, [array[: len(array) // trial.examples] for array in inputs])
            evidence.results |= {f"{name}{AFTERWARDS}": value for name, value in later.results.items()}
        return evidence


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


def accept(proof: Proof) -> Proof:
    """The proof, if it found no difference. Warns of modes that were not compared, and of half precision.

    Raises:
        UnsupportedOperator: the network that would be trained is not the model.
    """
    if proof.refusal:
        raise UnsupportedOperator(proof.refusal)
    if proof.missing:
        warnings.warn(proof.missing, NotComparedWarning, stacklevel=users_line())
    if proof.halves:
        rounding = (
            f"the model computes in {proof.halves} in part; the prepared network trains in float32 throughout, and the "
            "model was compared with it without that rounding. What the device computes is integers either way"
        )
        warnings.warn(rounding, HalfPrecisionWarning, stacklevel=users_line())
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
    if not array.size:
        return np.zeros((rows, *array.shape[1:]), array.dtype)
    values, random = array[np.arange(rows) % array.shape[0]], _generator(f"input {name} {rows} {trial.draw}")
    if array.dtype.kind in "iub" and rows > 1:
        if table:
            values[1:] = random.integers(0, table, values[1:].shape)
        elif array.ndim > 1 and ((array == 0) | (array == 1)).all():
            shown = random.integers(0, 2, values.shape).astype(array.dtype)
            shown[..., 0] = 1  # of a row that shows nothing, nothing follows
            values[1:] &= shown[1:]
    if array.dtype.kind != "f" or hides(array):
        return values
    values, noise = values.astype(np.float32), random.standard_normal(values.shape).astype(np.float32)
    if trial.corners:
        beside = np.outer(trial.corners, [-1.0, 0.5, 0.999, 1.0, 1.001, 1.5]).reshape(-1)
        drawn = _generator(f"corners {name} {trial.draw}").choice(beside, values.shape).astype(np.float32)
        return np.where(np.isfinite(values), drawn, values)
    finite = array[np.isfinite(array)]
    spread = float(finite.std()) if finite.size else 0.0
    if not 1e-30 < spread < 1e6 or not np.abs(finite).max() < 1e6:
        return noise * np.float32(trial.scale)
    varied = np.clip(values + noise * np.float32(0.5 * spread), finite.min(), finite.max())
    # Infinite values are masks.
    return np.where(np.isfinite(values), varied * np.float32(trial.scale), values).astype(np.float32)


def _generator(seed: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(seed.encode()))


def corners_of(network: Network) -> tuple[float, ...]:
    """Numbers that a network compares with: bounds, thresholds, operands of extremes and comparisons."""
    numbers: set[float] = set()
    for step in network.steps:
        if step.kind in _COMPARING:
            numbers.update(edge for edge in (*step.attributes.values(), *step.inputs) if isinstance(edge, int | float))
            for _, operands, parameters in step.attributes.get("instructions", ()):
                numbers.update(number for number in (*operands, *parameters) if isinstance(number, float))
    return tuple(sorted(float(number) for number in numbers if number and abs(number) < _HUGE))


# Kinds of steps whose numbers are places where they turn.
_COMPARING = (
    *("clamp", "threshold", "hardshrink", "softshrink", "softplus", "minimum", "maximum", "compare", "composition"),
)


def prove(subject: Subject) -> Proof:
    """Compares both sides in all trials; stops at the first difference."""
    proof, began = Proof(), time.perf_counter()
    for trial in subject.trials():
        try:
            differences = _differences(subject, trial, proof)
        except CannotRun as reason:
            if not trial.results_only:
                proof.not_run.append(f"not compared in {trial}: the original raises {reason}")
            continue
        except Refused as refusal:
            proof.refusal = str(refusal)
            break
        for draw in range(1, DRAWS):
            # Inputs that the original does not take speak for nobody.
            with suppress(CannotRun):
                if differences:
                    again = _differences(subject, replace(trial, draw=draw), Proof())
                    differences = {place: differences[place] for place in differences if place in again}
        if differences:
            proof.refusal = _refusal(subject, trial, differences)
            break
        proof.trials.append(trial)
    proof.halves = subject.halves
    proof.seconds = time.perf_counter() - began
    return proof


# What a run gives, in the words of the report.
_WORDS = {"results": "result", "gradients": "the gradient of", "state": "buffer"}
# By kind of evidence and name, relative errors.
Differences = dict[tuple[str, str], float]


def _differences(subject: Subject, trial: Trial, proof: Proof) -> Differences:
    """The tensors that differ by more than rounding explains."""
    original = subject.run(True, trial)
    try:
        captured = subject.run(False, trial)
    except CannotRun as reason:
        raise Refused(
            f"the captured network is not the model: in {trial} it raises {reason}, the model does not"
        ) from reason
    reruns: list[Evidence] = []
    differences: Differences = {}
    for kind in ("results",) if trial.results_only else _WORDS:
        ours, theirs = getattr(original, kind), getattr(captured, kind)
        # What counts as nothing beside the largest of them.
        tiny = LEAST / FLOOR
        if kind == "gradients":
            tiny += NOTHING * max(map(_largest, ours.values()), default=0.0)
        for name in dict.fromkeys([*ours, *theirs]):
            # A gradient that one side lacks is zero: nothing depends on the parameter.
            like = ours.get(name, theirs.get(name))
            lacking = np.zeros_like(like) if kind == "gradients" else np.zeros(0, np.float32)
            here, there = ours.get(name, lacking), theirs.get(name, lacking)
            error, noise, doubt = relative_error(here, there, tiny), 0.0, ""
            proof.tensors += 1
            if trial.results_only and not (np.isfinite(here).all() and _largest(here) < _HUGE):
                doubt = "which float32 hardly holds"
            elif error > FLOOR:
                reruns = reruns or [subject.run(True, trial, nudge) for nudge in (0, 1, 2)]
                runs = [getattr(run, kind).get(name, np.zeros_like(here)) for run in reruns]
                same, *moved = (relative_error(here, run, tiny) for run in runs)
                if same > FACTOR * FLOOR:
                    raise Refused(
                        f"the model computes another {name} each time it is called with the same numbers (a clock, a "
                        "counter, random numbers of Python's); the device computes the same at every call"
                    )
                noise = max(moved)
                if error > FACTOR * noise and not (trial.results_only and _adds_to_scores(subject.network)):
                    differences[kind, name] = error
                    continue
                doubt = f"which rounding changes by {noise:.0e}" if error > UNDECIDED else ""
            elif here.size and not np.isfinite(here).any():
                doubt = "which is not finite"
            elif kind == "results" and 0 < _largest(here) < LEAST / FLOOR:
                doubt = "which is too small for float32"
            place = f"{_WORDS[kind]} '{name}' in {trial}"
            if doubt:
                proof.undecided.append(f"{place}, {doubt}")
            elif error > proof.largest[0]:
                proof.largest, proof.noise = (error, place), noise
    return differences


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


def relative_error(expected: np.ndarray, result: np.ndarray, tiny: float = 0.0) -> float:
    """The largest difference over the largest expected value; infinite where shapes or what is no number differ.

    tiny: the least that is divided by.
    """
    if expected.shape != result.shape:
        return math.inf
    if not expected.size:
        return 0.0
    a, b = (array if array.dtype.kind == "f" else array.astype(np.float64) for array in (expected, result))
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


def _refusal(subject: Subject, trial: Trial, differences: Differences) -> str:
    """What differs, where it begins, and what to do."""
    by_kind = {kind: [name for other, name in differences if other == kind] for kind in _WORDS}
    results, gradients, states = by_kind.values()
    if subject.remedy and results and all(name.endswith(AFTERWARDS) for name in results):
        names = listed([f"'{name.removesuffix(AFTERWARDS)}'" for name in results])
        return (
            f"the model was given in training, and in evaluation it computes something else than the network that was "
            f"read (results {names}); the device computes evaluation. {subject.remedy[0].upper()}{subject.remedy[1:]}"
        )
    if states and all(name.endswith(AFTERWARDS) for name in results):
        results = by_kind["results"] = []  # they follow from the buffers
    kind, where = next(kind for kind in ("results", "state", "gradients") if by_kind[kind]), ""
    worst = max(by_kind[kind], key=lambda name: differences[kind, name])
    if results:
        where = _first_layer(subject, trial)
    elif not states:
        # Gradients flow backwards: the last one that is wrong is next to where they go wrong.
        parameters = [name for name in gradients if not name.startswith("input ")]
        worst = (parameters or gradients)[-1]
        nearest = f"it is the one nearest to the results of {len(gradients)} gradients that differ"
        where = f"; {nearest if parameters else 'gradients of inputs alone differ'}"
    error = differences[kind, worst]
    size = f"differs by {error:.2g} of its largest value" if math.isfinite(error) else "is not the same"
    sentences = [
        f"the captured network is not the model: in {trial}, {_WORDS[kind]} '{worst}' {size}{where}. Training it would "
        "train another network",
        "prepare(..., check=False) trains it all the same",
    ]
    if subject.rules:
        sentences.append(
            f"The model computes gradients by rules of its own ({', '.join(sorted(subject.rules))}); those of the "
            "captured network are the gradients of what these functions compute"
        )
    elif kind == "gradients":
        sentences.append(subject.own_gradients)
    if subject.remedy and kind != "gradients":
        sentences.append(f"If training computes something else than evaluation, {subject.remedy}")
    return ". ".join(sentences)


def _first_layer(subject: Subject, trial: Trial) -> str:
    """Where results begin to differ, in words. Layers of the device fuse ReLU and ReLU6."""
    try:
        originals = [*subject.arrays(trial), *subject.layers(True, trial).values()]
        captured = subject.layers(False, trial)
    except Exception:  # noqa: BLE001 - a model's own, which it may raise where it is looked into
        return ""
    last = ""
    for name, value in captured.items():
        alike = [layer for layer in originals if layer.shape == value.shape and layer.dtype.kind == "f"]
        forms = [form for layer in alike for form in (layer, np.maximum(layer, 0), np.clip(layer, 0, 6))]
        if any(relative_error(form, value) <= 10 * FLOOR for form in forms):
            last = name
        elif alike:
            after = f", after '{last}', which is equal" if last else ""
            place = f" in {subject.places[name]}" if name in subject.places else ""
            return f"; the first layer that differs is '{name}'{place}{after}"
    return f"; '{last}' is the last layer that is equal" if last else ""
