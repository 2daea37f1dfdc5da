# SPDX-License-Identifier: Apache-2.0
"""Results of comparing a device with a simulation and with training: counts per tensor, and the answers in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import add

import numpy as np

from ..kit.device import PROFILES
from ..kit.display import Finding, listed, shortened, table_of


@dataclass(frozen=True)
class Comparison:
    """Codes of one tensor: how many were compared, how many differ, by how much at most, and whether 0 is claimed.

    Attributes:
        kind: the operator; with int16 activations as "CONV_2D:int16".
        signal, trained_noise, device_noise: sums of squares of the float network's tensor, and of what the
            fake-quantized and the device's differ from it; 0 if no values were given.
    """

    name: str
    kind: str
    values: int = 0
    differing: int = 0
    largest_difference: int = 0
    exact: bool = False
    signal: float = 0.0
    trained_noise: float = 0.0
    device_noise: float = 0.0

    def __add__(self, other: Comparison) -> Comparison:
        """The same tensor, on the examples of both.

        Raises:
            ValueError: they are two tensors.
        """
        if (self.name, self.kind) != (other.name, other.kind):
            raise ValueError(f"{self.name!r} ({self.kind}) and {other.name!r} ({other.kind}) are not the same tensor")
        return replace(
            self,
            values=self.values + other.values,
            differing=self.differing + other.differing,
            largest_difference=max(self.largest_difference, other.largest_difference),
            exact=self.exact and other.exact,
            signal=self.signal + other.signal,
            trained_noise=self.trained_noise + other.trained_noise,
            device_noise=self.device_noise + other.device_noise,
        )

    def counting(self, device: np.ndarray, simulated: np.ndarray, other: str = "the graph") -> Comparison:
        """With further codes of the device, and of what they are compared with: `other`."""
        if device.shape != simulated.shape:
            raise ValueError(f"the device returns shape {device.shape} but {other} has {simulated.shape}")
        if device.dtype == np.float32 and simulated.dtype == np.float32:
            # Real numbers are either equal bit for bit or not.
            difference = (device.view(np.int32) != simulated.view(np.int32)).astype(np.int64)
        else:
            difference = np.abs(device.astype(np.int64) - simulated)
        return replace(
            self,
            values=self.values + difference.size,
            differing=self.differing + int(np.count_nonzero(difference)),
            largest_difference=max(self.largest_difference, math.ceil(difference.max(initial=0))),
        )

    def with_noise(self, exact: np.ndarray, device: np.ndarray, trained: np.ndarray | None) -> Comparison:
        """With squares of the float network's values, and of what those of the device and of training differ by."""
        return replace(
            self,
            signal=self.signal + power(exact),
            device_noise=self.device_noise + power(exact, device),
            trained_noise=self.trained_noise + (0.0 if trained is None else power(exact, trained)),
        )

    @property
    def trained_sqnr(self) -> float | None:
        """Signal to quantization noise in dB, of the fake-quantized tensor; None without signal or noise."""
        return decibels(self.signal, self.trained_noise)

    @property
    def device_sqnr(self) -> float | None:
        """Likewise, of the device's."""
        return decibels(self.signal, self.device_noise)


@dataclass(frozen=True, repr=False)
class Report(Finding):
    """Answers three questions: does the file run on a device as simulated, does the device compute what was trained,
    and for which device was it trained?

    Attributes:
        profile: the device in question.
        operators: each result of the runtime compared with its simulation from the device's own operands; outputs: the
            unchanged file compared with the simulation of the whole graph. Without values if the file was not run.
        trained_for: the profile of the trained network, if known.
        training: what the device computes, by simulation, compared with what training computed, tensor by tensor,
            including the graph's outputs. Empty if it was not compared.
        ran_as: the profile whose runtime ran the file, if not the device's own; the file was then compared with that
            profile's simulation.
        predictions: the file's results on the user's arrays, compared with the trained model's, by result name. Empty
            if no model was given.
        declared: where the file says something else of a tensor, of its inputs and outputs or of their names and axes
            than the graph, a sentence each.

    It is true if everything is `equal`. Reports on parts of the examples add up.
    """

    profile: str
    operators: tuple[Comparison, ...]
    outputs: tuple[Comparison, ...]
    trained_for: str = ""
    training: tuple[Comparison, ...] = ()
    ran_as: str = ""
    predictions: tuple[Comparison, ...] = ()
    declared: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.equal

    def __add__(self, other: Report) -> Report:
        """The report on the examples of both.

        Raises:
            ValueError: they are about different files or devices.
        """
        about = [(report.profile, report.trained_for, report.ran_as, report.declared) for report in (self, other)]
        tables = [(report.operators, report.outputs, report.training, report.predictions) for report in (self, other)]
        if about[0] != about[1] or [*map(len, tables[0])] != [*map(len, tables[1])]:
            raise ValueError("only reports of the same comparison, on other examples, add up")
        operators, outputs, training, predictions = (tuple(map(add, *pair)) for pair in zip(*tables, strict=True))
        return replace(self, operators=operators, outputs=outputs, training=training, predictions=predictions)

    @property
    def differing(self) -> int:
        """Number of codes that differ between runtime and simulation, over all operators and outputs."""
        return sum(row.differing for row in (*self.operators, *self.outputs))

    @property
    def values(self) -> int:
        """Number of codes compared between runtime and simulation."""
        return sum(row.values for row in (*self.operators, *self.outputs))

    @property
    def predictions_differing(self) -> int:
        """Number of integers in which the file differs from the model's own results on the user's arrays."""
        return sum(row.differing for row in self.predictions)

    @property
    def predictions_values(self) -> int:
        """Number of integers compared with the model's own results."""
        return sum(row.values for row in self.predictions)

    @property
    def training_differing(self) -> int:
        """Number of codes in which this device differs from training, over all tensors compared."""
        return sum(row.differing for row in self.training)

    @property
    def training_values(self) -> int:
        """Number of codes compared with training's."""
        return sum(row.values for row in self.training)

    @property
    def equal(self) -> bool:
        """Whether the file says what the graph says and ran as simulated, and the device computes what was trained, on
        the user's arrays too; if the graph's training is unknown, only the former."""
        as_simulated = self.values > 0 and self.differing == self.predictions_differing == 0 and not self.declared
        if not self.training:
            return as_simulated and self.trained_for in ("", self.profile)
        return as_simulated and self.training_differing == 0

    def sentences(self) -> tuple[str, str, str]:
        """The three answers in words: the file on the device, the device compared with training, what it was trained
        for."""
        names = self.profile, self.ran_as or self.profile
        device, runtime = (PROFILES[name].title if name in PROFILES else shortened(name) for name in names)
        if self.values:
            where = f"On {runtime}" + (f" ({device} was not run here)" if self.ran_as else "")
            runs = "does not run" if self.differing else "runs"
            ran = f"{where} the file {runs} as simulated: {_share(self.differing, self.values, 'integers')}"
        else:
            ran = f"On {runtime} the file was not run"
        if self.predictions:
            gives = "something other than" if self.predictions_differing else "what"
            ran += (
                f"; fed with the user's arrays it returns {gives} the model returns: "
                f"{_share(self.predictions_differing, self.predictions_values, 'integers')}"
            )
        if self.declared:
            ran += f"; but it is not the graph's file: {listed(self.declared, length=160)}"
        computes = f"What {device} computes was not compared with what was trained"
        if self.training:
            what = "something other than" if self.training_differing else "what"
            count, whole = self.outputs_beside_training, (self.training_differing, self.training_values)
            # What only moves values, as at the end of a network, training does not store.
            outputs = f"{_share(*count, 'integers of the outputs')}, " if count[1] else ""
            all_stored = _share(*whole, "of all stored tensors" if outputs else "integers of all stored tensors")
            computes = f"{device} computes {what} was trained: {outputs}{all_stored}"
        if not self.trained_for:
            return ran, computes, "The device it was trained for is unknown"
        same = "this device" if self.trained_for == self.profile else f"and not for {shortened(self.profile)}"
        return ran, computes, f"It was trained for {shortened(self.trained_for)}, {same}"

    @property
    def outputs_beside_training(self) -> tuple[int, int]:
        """How many codes of the graph's outputs differ from training's, and how many were compared."""
        names = {row.name for row in self.outputs}
        rows = [row for row in self.training if row.name in names]
        return sum(row.differing for row in rows), sum(row.values for row in rows)

    def text(self) -> str:
        """The answers, and the tensors that differ."""
        lines = [f"{sentence}." for sentence in self.sentences()]
        for rows, words in (
            ((*self.operators, *self.outputs, *self.predictions), "differ, by {:,} at most"),
            (self.training, "are not as trained"),
        ):
            lines += [
                f"  {shortened(row.name)} ({row.kind}): {row.differing:,} of {row.values:,} "
                + words.format(row.largest_difference)
                for row in rows
                if row.differing
            ]
        return "\n".join([*lines, *(f"  {difference}" for difference in self.declared)])

    def in_short(self) -> str:
        return "; ".join(self.sentences())

    def _repr_html_(self) -> str:
        trained = {row.name: row for row in self.training}
        rows: list[dict[str, object]] = []
        for row, comparison in zip(self.table(), (*self.operators, *self.outputs), strict=True):
            own = trained.get(comparison.name)
            beside = None if own is None else f"{own.differing:,} of {own.values:,}"
            rows.append({**row, "differ_from_training": beside})
        rows += [
            dict.fromkeys(rows[0] if rows else ())
            | {"tensor": row.name, "operator": row.kind, "values": row.values, "differing": row.differing}
            for row in self.predictions
        ]
        return table_of(f"{'. '.join(self.sentences())}.", rows, 2)

    def table(self) -> list[dict[str, str | int | float | None]]:
        """One row per operator, then one per output: tensor, operator, values, differing, largest, promise, SQNR."""
        return [
            {
                "tensor": comparison.name,
                "operator": comparison.kind,
                "values": comparison.values,
                "differing": comparison.differing,
                "largest_difference": comparison.largest_difference,
                "promise": "exact" if comparison.exact else "none",
                "trained_sqnr": comparison.trained_sqnr,
                "device_sqnr": comparison.device_sqnr,
            }
            for comparison in (*self.operators, *self.outputs)
        ]


def _share(differing: int, values: int, what: str) -> str:
    """How many of them differ, in words."""
    return f"{differing:,} of {values:,} {what} differ" if differing else f"none of {values:,} {what} differs"


def power(exact: np.ndarray, quantized: np.ndarray | None = None) -> float:
    """The sum of squares of a tensor, or of what a quantized one differs by."""
    values = exact.astype(np.float64)
    if quantized is not None:
        if exact.shape != quantized.shape:
            raise ValueError(f"float and trained values must have shape {quantized.shape}, got {exact.shape}")
        values -= quantized
    return float(np.square(values).sum())


def decibels(signal: float, noise: float) -> float | None:
    """Signal to noise; None without signal or noise."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None
