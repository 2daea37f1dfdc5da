# SPDX-License-Identifier: Apache-2.0
"""What a network is judged by: functions of outputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..deploy.codes import Intake, as_array
from ..deploy.examples import is_file, read_examples
from ..deploy.graph import Graph

# outputs: an array for a network with one output, else a dictionary by the outputs' names; real numbers in the user's
# axes. targets: the user's.
Metric = Callable[[Any, Any], float]
# The only input, or several in order or by name.
Inputs = np.ndarray | list[np.ndarray] | dict[str, np.ndarray]
# Number of parts of the examples whose metrics show what is chance, and the fewest examples in one.
BLOCKS, LEAST_IN_BLOCK = 16, 8
# By how much signal to noise has to grow, in dB, to count where the metric stays the same.
LEAST_GAIN = 0.01
# Half of the noise, in dB.
MUCH = 6.0


def accuracy(outputs: ArrayLike, targets: ArrayLike) -> float:
    """The share of examples whose largest output, along the last axis, is that of their class.

    Args:
        outputs: [batch, classes].
        targets: classes, integers [batch].

    Raises:
        ValueError: the shapes do not fit, or targets are not classes of the outputs.
    """
    scores, classes = np.asarray(outputs), np.asarray(targets)
    if scores.ndim < 2 or scores.shape[:-1] != classes.shape:
        raise ValueError(
            f"accuracy needs outputs [batch, classes] and classes [batch], got {list(scores.shape)} and "
            f"{list(classes.shape)}; give a metric of your own, a function of outputs and targets"
        )
    whole = classes.dtype.kind in "biuf" and np.array_equal(classes, np.floor(classes))
    if not whole or classes.size and not 0 <= classes.min() <= classes.max() < scores.shape[-1]:
        shown = np.unique(classes.reshape(-1)[:1000])[:5].tolist()
        raise ValueError(f"targets must be classes from 0 to {scores.shape[-1] - 1}, integers, got {shown}")
    return float((scores.argmax(-1) == classes).mean())


def score(metric: Metric, outputs: Mapping[str, np.ndarray], targets: object) -> float:
    """The metric for outputs by name.

    Raises:
        TypeError: it is not a function, or does not return a number.
        ValueError: the number is not finite.
    """
    if not callable(metric):
        raise TypeError(f"metric must be a function of outputs and targets, got {metric!r}")
    argument = next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)
    said = metric(argument, targets)
    try:
        number = float(said)
    except (TypeError, ValueError):
        raise TypeError(f"metric must return a number, got {said!r:.80}") from None
    if not np.isfinite(number):
        raise ValueError(f"metric must return a finite number, got {number}")
    return number


def decibels(reference: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> float:
    """Signal to noise of outputs against the reference's, in dB; infinite if they are equal, 0 if there is no
    signal."""
    signal = noise = 0.0
    for name, values in reference.items():
        exact = values.astype(np.float64)
        signal += float(np.square(exact).sum())
        noise += float(np.square(outputs[name].astype(np.float64) - exact).sum())
    if noise == 0:
        return float("inf")
    return 10 * float(np.log10(signal / noise)) if signal > 0 else 0.0


class Data:
    """Inputs and targets, cut into parts.

    Attributes:
        examples: how many there are.
    """

    def __init__(self, data: Any, targets_needed: bool, part: str = "validation") -> None:
        """
        Args:
            data: ``(inputs, targets)``; inputs as `deploy.input_codes` takes them; or a loader of such pairs, or the
                path of a file (`deploy.examples.read_examples`); part: of a file that holds several.

        Raises:
            TypeError, ValueError: it is something else, or the numbers of examples differ.
        """
        batches = isinstance(data, list) and all(isinstance(batch, tuple) for batch in data)
        if is_file(data):
            file = read_examples(data, part, targets_needed)
            data = file.inputs, file.targets
        elif batches or not (isinstance(data, tuple | list | str | Mapping | np.ndarray) or hasattr(data, "ndim")):
            data = _loaded(data)
        pair = isinstance(data, tuple | list) and len(data) == 2
        if not pair and targets_needed:
            raise TypeError(f"data must be (inputs, targets), or a loader of such pairs, got {type(data).__name__}")
        self.inputs: Inputs = _mapped(as_array, data[0] if pair else data)
        self.targets: Any = data[1] if pair else None
        inputs = list(self.inputs.values()) if isinstance(self.inputs, dict) else self.inputs
        arrays: list[np.ndarray] = inputs if isinstance(inputs, list) else [inputs]
        wrong = [array for array in arrays if array.ndim == 0 or array.dtype.kind in "OSU"]
        if wrong:
            raise TypeError(
                f"inputs must be arrays of numbers, an example in each row, got an array of {wrong[0].dtype}"
            )
        counts = {len(array) for array in arrays}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(f"inputs must hold the same number of examples, at least one, got {sorted(counts)}")
        (self.examples,) = counts
        if not targets_needed or self.targets is None or isinstance(self.targets, Mapping):
            return
        if not hasattr(self.targets, "__len__") or len(self.targets) != self.examples:
            has = len(self.targets) if hasattr(self.targets, "__len__") else f"{self.targets!r:.80}"
            raise ValueError(f"targets must be one for each of the {self.examples} examples, got {has}")

    def numbers_for(self, graph: Graph) -> Data:
        """The same data in real numbers and the user's axes, whatever it is in. Warns of values far beyond an input's
        range."""
        return Data((Intake(graph).numbers(self.inputs), self.targets), self.targets is not None)

    def part(self, start: int, stop: int) -> Inputs:
        """The inputs of some examples."""
        return _mapped(lambda array: array[start:stop], self.inputs)

    def only(self, chosen: Sequence[int] | np.ndarray) -> Data:
        """Some of the examples, by number."""
        rows = np.asarray(chosen)
        inputs = _mapped(lambda array: array[rows], self.inputs)
        return Data((inputs, None if self.targets is None else self.targets_of(rows)), self.targets is not None)

    def targets_of(self, rows: np.ndarray) -> Any:
        """The targets of some examples, by number."""
        targets = self.targets
        if isinstance(targets, Mapping):
            return {name: np.asarray(array)[rows] for name, array in targets.items()}
        return targets[rows] if hasattr(targets, "shape") else [targets[row] for row in rows]


def _mapped(function: Callable[[Any], np.ndarray], inputs: object) -> Inputs:
    if isinstance(inputs, Mapping):
        return {name: function(array) for name, array in inputs.items()}
    return [function(array) for array in inputs] if isinstance(inputs, tuple | list) else function(inputs)


def _loaded(loader: object) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of a loader, joined."""
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"data must be (inputs, targets), or a loader of such pairs, got {type(loader).__name__}")
    pairs = []
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(f"a loader must give pairs of inputs and targets, got {type(batch).__name__}")
        pairs.append([as_array(part) for part in batch])
    if not pairs:
        raise ValueError("data is an empty loader")
    inputs, targets = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    return inputs, targets


@dataclass(frozen=True)
class Mark:
    """How good a network is on some examples.

    Attributes:
        metric: on the device; None: its layers do not fit the device.
        decibels: signal to noise of its outputs against the float network's.
        blocks: the metric on each of several parts of the examples, which shows how much of a difference is chance.
    """

    metric: float | None
    decibels: float
    blocks: tuple[float, ...] = ()

    def better_than(self, other: Mark, higher_is_better: bool) -> bool:
        """Whether it is better: by the metric if that differs by more than its standard error, else by the noise.

        A difference of up to two standard errors may still be chance: half the noise, or twice as much, then counts
        more.
        """
        if self.metric is None or other.metric is None:
            return self.metric is not None
        difference, chance = self.metric - other.metric, self.chance(other)
        gain = self.decibels - other.decibels
        if abs(difference) <= chance or abs(difference) <= 2 * chance and abs(gain) >= MUCH:
            return gain > LEAST_GAIN
        return (difference > 0) == higher_is_better

    def clearly_better_than(self, other: Mark, higher_is_better: bool) -> bool:
        """Whether the metric is better by more than twice its standard error."""
        if self.metric is None or other.metric is None:
            return False
        return (self.metric - other.metric) * (1 if higher_is_better else -1) > 2 * self.chance(other)

    @staticmethod
    def of(outputs: Mapping[str, np.ndarray], data: Data, metric: Metric, reference: Mapping[str, np.ndarray]) -> Mark:
        """The mark of outputs on some examples, against the float network's."""
        count = min(BLOCKS, data.examples // LEAST_IN_BLOCK)
        blocks = []
        for at in range(count if count > 1 else 0):
            rows = np.arange(at, data.examples, count)
            part = {name: values[rows] for name, values in outputs.items()}
            blocks.append(score(metric, part, data.targets_of(rows)))
        return Mark(score(metric, outputs, data.targets), decibels(reference, outputs), tuple(blocks))

    def chance(self, other: Mark) -> float:
        """The standard error of the difference of two metrics on the same examples."""
        if len(self.blocks) < 2 or len(self.blocks) != len(other.blocks):
            return 0.0
        differences = np.subtract(self.blocks, other.blocks)
        return float(differences.std(ddof=1) / np.sqrt(len(differences)))
