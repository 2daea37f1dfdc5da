# SPDX-License-Identifier: Apache-2.0
"""The smallest graph and input on which a file still shows a difference: a bug report for the authors of a runtime.

The difference is between two devices, or between a runtime and its simulation where both should be equal. One operator
is cut out, with its operands; then its axes are cut, and codes and weights are set to zero, as long as the difference
persists.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..kit.device import OPERATORS, Profile, Refusal, profile_named
from ..kit.display import Finding, shortened
from .comparing import Codes
from .examples import Data
from .formats.tflite import tflite_bytes, write_whole
from .graph import Graph, Operator, check_operator
from .inspect import EXAMPLES, SECONDS, InspectedFile, Inspection, codes_of, inspect, read_file
from .mechanism import mechanism_of
from .runtimes import open_runtime
from .runtimes.trial import RuntimeRefusal, try_in_a_child
from .simulate import simulate, simulate_results

# How many smaller graphs and inputs are tried.
MOST_TRIES = 3000
Differs = Callable[[Graph, Codes], bool]


@dataclass(frozen=True, repr=False)
class Reduction(Finding):
    """What `reduce` wrote: that there is one says that there is a difference.

    Attributes:
        graph: a .tflite file of one operator, or of as few as show the difference.
        arrays: an .npz file: the codes of its inputs by name, and ``SIDE/RESULT`` for both sides.
        sides: the devices, or "a device's runtime" and "its simulation".
        kinds: of the operators.
        values: in the operands, weights included.
        differing: codes of the result.
        sentence: all of it in words.
    """

    graph: Path
    arrays: Path
    sides: tuple[str, str]
    kinds: tuple[str, ...]
    values: int
    differing: int
    sentence: str

    def __bool__(self) -> bool:
        return True

    def text(self) -> str:
        return f"{self.graph}, {self.arrays}: {self.sentence}"


class _Sought(NamedTuple):
    """A difference that an inspection found: between two devices, or a runtime (first) and its simulation."""

    result: str
    first: str
    second: str

    @property
    def sides(self) -> tuple[str, str]:
        one = self.first == self.second
        return (f"{self.first} runtime", f"{self.first} simulation") if one else (self.first, self.second)


def reduce(
    path: str | os.PathLike[str],
    into: str | os.PathLike[str],
    data: Data = None,
    examples: int = EXAMPLES,
    devices: Sequence[str | Profile] | None = None,
    seed: int = 0,
    seconds: float = SECONDS,
    progress: Callable[[str], None] | None = None,
) -> Reduction | None:
    """Writes the smallest graph and input that show a difference of this file; None if it shows none.

    A runtime that differs from its simulation comes first, then two devices whose simulations differ.

    Args:
        into: both files without their endings: ``into.tflite`` and ``into.npz``.
        data, examples, devices, seed, seconds, progress: as in `inspect`.

    Raises:
        OSError, Refusal, ValueError: as `inspect`.
        RuntimeError: the difference disappeared outside the file, or a runtime crashed on it.
    """
    into, say = Path(into), progress or (lambda text: None)
    say("reading")
    subject = read_file(path)
    if subject.suffix != ".tflite":
        raise Refusal(f"{shortened(subject.name)} is an .onnx file", remedy=".tflite files are reduced")
    codes, _ = codes_of(subject, data, examples, seed, seconds)
    arrays = {port.name: codes[port.tensor] for port in subject.graph.signature.inputs}
    sought = _sought(inspect(subject, arrays, examples, devices, seed, seconds, progress))
    if sought is None:
        return None
    say("reducing the difference")
    if subject.graph.variables:
        raise Refusal("a network with variables cannot be reduced: its differences depend on all calls before")
    with tempfile.TemporaryDirectory() as folder:
        try:
            said = try_in_a_child(_work, subject, codes, sought, folder, seconds=seconds)
        except RuntimeRefusal as error:
            said = str(error)
        if not (Path(folder) / "facts.json").exists():
            reason = next(
                (line for line in reversed(said.splitlines()) if line.strip()), "outside of the file both agree"
            )
            raise RuntimeError(f"the difference could not be reduced: {reason}")
        facts = json.loads((Path(folder) / "facts.json").read_text())
        written = [
            write_whole(into.with_name(f"{into.name}{ending}"), (Path(folder) / f"reduced{ending}").read_bytes())
            for ending in (".tflite", ".npz")
        ]
    return Reduction(written[0], written[1], sought.sides, tuple(facts.pop("kinds")), **facts)


def _sought(inspection: Inspection) -> _Sought | None:
    rows = [(row, device.profile) for device in inspection.devices for row in device.operators if row.differing]
    for row, profile in sorted(rows, key=lambda pair: not pair[0].exact):
        return _Sought(row.name, profile, profile)
    for case in sorted(inspection.disagreements, key=lambda case: not set(case.profiles) <= set(inspection.ran_on)):
        return _Sought(case.layer, *case.profiles)
    return None


# --- in another process ---------------------------------------------------------------------------------------------


def _work(subject: InspectedFile, codes: Codes, sought: _Sought, folder: str) -> None:
    graph, first = subject.graph, sought.first
    number = next(at for at, operator in enumerate(graph.operators) if sought.result in operator.outputs)
    before = graph.operators[:number]
    differs = difference(first, sought.second)
    for example in range(len(next(iter(codes.values())))):
        # What is computed up to the operator: by the runtime if it is the one in question, else by the simulation.
        values = {name: array[example : example + 1] for name, array in codes.items()}
        if before and first == sought.second:
            values |= subject.opened(first).run(values)[0]
            for operator in before:
                # The file has no codes for results that only move others.
                if any(name not in values for name in operator.outputs):
                    values |= simulate_results(graph, operator, values, first)
        elif before:
            names = [name for operator in before for name in operator.outputs]
            values |= simulate(graph, values, first, names, progress=False)
        for depth in range(1, number + 2):
            part = cut_out(graph, number, depth)
            inputs: Codes = {name: values[name] for name in part.inputs}
            if differs(part, inputs):
                # A runtime may crash on what is tried; then this is the result.
                _keep(part, inputs, sought, Path(folder))
                _keep(*shrink(part, inputs, differs), sought, Path(folder))
                return


def difference(first: str | Profile, second: str | Profile) -> Differs:
    """Whether a graph's results differ between two devices' simulations, or, for the same one twice, between its
    runtime and its simulation."""

    def differs(graph: Graph, codes: Codes) -> bool:
        ours, theirs = both(graph, codes, profile_named(first), profile_named(second))
        return any(not np.array_equal(ours[name], theirs[name]) for name in graph.outputs)

    return differs


def both(graph: Graph, codes: Codes, first: Profile, second: Profile) -> tuple[Codes, Codes]:
    """The graph's results on both sides."""
    simulated = simulate(graph, codes, second, progress=False)
    if first.name != second.name:
        return simulate(graph, codes, first, progress=False), simulated
    return open_runtime(tflite_bytes(graph), graph.inputs, graph.outputs, first).run(codes), simulated


def cut_out(graph: Graph, number: int, depth: int = 1) -> Graph:
    """The operator of that number and those leading to it among the last `depth` ones, as a graph of their own."""
    kept: list[Operator] = []
    wanted = set(graph.operators[number].outputs)
    for operator in reversed(graph.operators[max(number + 1 - depth, 0) : number + 1]):
        if wanted & set(operator.outputs):
            kept.insert(0, operator)
            wanted.update(operator.inputs)
    results = {name for operator in kept for name in operator.outputs}
    read = dict.fromkeys(name for operator in kept for name in operator.inputs if name not in results)
    inputs = tuple(name for name in read if graph.tensors[name].data is None)
    tensors = {name: graph.tensors[name] for name in (*read, *results)}
    return Graph(tensors, tuple(kept), inputs, graph.operators[number].outputs)


def _keep(graph: Graph, codes: Codes, sought: _Sought, folder: Path) -> None:
    first, second = sides = both(graph, codes, profile_named(sought.first), profile_named(sought.second))
    arrays: dict[str, Any] = dict(codes)
    for side, results in zip(sought.sides, sides, strict=True):
        arrays |= {f"{side}/{name}": results[name] for name in graph.outputs}
    np.savez(folder / "reduced.npz", **arrays)
    (folder / "reduced.tflite").write_bytes(tflite_bytes(graph, "reduced"))
    values = sum(int(np.size(codes[name])) for name in graph.inputs)
    values += sum(tensor.data.size for tensor in graph.tensors.values() if tensor.data is not None)
    unequal = {name: first[name] != second[name] for name in graph.outputs}
    name = next(name for name, where in unequal.items() if np.any(where))
    place = tuple(int(at[0]) for at in np.nonzero(unequal[name]))
    kinds = [operator.kind for operator in graph.operators]
    sentence = (
        f"{', '.join(kinds)} of {values:,} values: {sought.sides[0]} computes {int(first[name][place])}, "
        f"{sought.sides[1]} {int(second[name][place])}"
    )
    if sought.first != sought.second:
        why = mechanism_of(graph, graph.operators[-1], codes, sought.first, sought.second)
        sentence += "" if why is None else f" ({why.sentence})"
    differing = sum(int(np.count_nonzero(where)) for where in unequal.values())
    facts = {"kinds": kinds, "values": values, "differing": differing, "sentence": sentence}
    (folder / "facts.json").write_text(json.dumps(facts))


# --- smaller --------------------------------------------------------------------------------------------------------


def shrink(graph: Graph, codes: Codes, differs: Differs) -> tuple[Graph, Codes]:
    """A smaller graph and smaller codes that still differ: no single further cut keeps the difference."""
    left, changed = MOST_TRIES, True
    while changed:
        changed = False
        for smaller in chain(_shorter(graph, codes), _zeroed(graph, codes)):
            left -= 1
            if left <= 0:
                break
            try:
                changed = differs(*smaller)
            except (ValueError, RuntimeError):  # no device takes it
                continue
            if changed:
                graph, codes = smaller
                break
    return graph, codes


def _spans(size: int) -> Iterator[np.ndarray]:
    """What may be kept of an axis: halves first, then all but a part."""
    every = np.arange(size)
    length = size // 2
    while length >= 1:
        for start in range(0, size, length):
            part = slice(start, start + length)
            if length == size // 2:
                yield every[part]
            if size - length >= 1 and (size > 8 or length == 1):
                yield np.delete(every, part)
        length //= 2


def _shorter(graph: Graph, codes: Codes) -> Iterator[tuple[Graph, Codes]]:
    """One axis shorter, in all operands that have to follow. Graphs of several operators are not cut."""
    if len(graph.operators) != 1:
        return
    (operator,) = graph.operators
    names = tuple(dict.fromkeys(operator.inputs))
    for name in names:
        for axis, size in enumerate(graph.tensors[name].shape):
            if size == 1 or (axis == 0 and graph.tensors[name].data is None):
                continue
            for others in _followers(graph, names, name, size):
                for kept in _spans(size):
                    smaller = _taken(graph, codes, {name: axis, **others}, kept)
                    if smaller is not None:
                        yield smaller


def _followers(graph: Graph, names: Sequence[str], name: str, size: int) -> list[dict[str, int]]:
    """Axes of other operands with the same length: any of them may be the same axis."""
    others = [other for other in names if other != name]
    choices: list[list[int | None]] = []
    for other in others:
        tensor = graph.tensors[other]
        first = 0 if tensor.data is not None else 1
        choices.append([*(axis for axis in range(first, len(tensor.shape)) if tensor.shape[axis] == size), None])
    followers = [
        {key: axis for key, axis in zip(others, axes, strict=True) if axis is not None} for axes in product(*choices)
    ]
    return sorted(followers, key=len)


def _taken(graph: Graph, codes: Codes, axes: Mapping[str, int], kept: np.ndarray) -> tuple[Graph, Codes] | None:
    """The graph with these entries of an axis of each operand; None if the operator does not take them."""
    (operator,) = graph.operators
    declaration = OPERATORS[operator.kind]
    tensors, arrays = dict(graph.tensors), dict(codes)
    for name, axis in axes.items():
        tensor = tensors[name]
        grid, shape = tensor.quantization, list(tensor.shape)
        shape[axis] = len(kept)
        if grid.axis == axis:
            grid = replace(grid, scale=grid.scale[kept], zero_point=grid.zero_point[kept])
        data = None if tensor.data is None else tensor.data.take(kept, axis)
        if data is None:
            arrays[name] = arrays[name].take(kept, axis)
        tensors[name] = replace(tensor, shape=tuple(shape), quantization=grid, data=data)
    try:
        shapes = declaration.checked_shapes([tensors[name].shape for name in operator.inputs], operator.attributes)
        for name, whole in zip(operator.outputs, shapes, strict=True):
            tensors[name] = replace(tensors[name], shape=whole)
        check_operator(operator, tensors, set(operator.inputs), operator.kind)
    except (ValueError, IndexError):
        return None
    return replace(graph, tensors=tensors), arrays


def _zeroed(graph: Graph, codes: Codes) -> Iterator[tuple[Graph, Codes]]:
    """Codes at real 0, and weights of 0: all, halves, and so on."""
    for name in dict.fromkeys(name for operator in graph.operators for name in operator.inputs):
        tensor = graph.tensors[name]
        values = codes.get(name) if tensor.data is None else tensor.data
        if values is None:
            continue
        zero = 0 if tensor.data is not None else int(tensor.quantization.zero_point[0])
        places = np.flatnonzero(values != zero)
        length = len(places)
        while length >= 1:
            for start in range(0, len(places), length):
                changed = values.copy()
                changed.reshape(-1)[places[start : start + length]] = zero
                if tensor.data is None:
                    yield graph, {**codes, name: changed}
                else:
                    yield replace(graph, tensors={**graph.tensors, name: replace(tensor, data=changed)}), codes
            length //= 2
