# SPDX-License-Identifier: Apache-2.0
"""What a device computes, given only a way to run files on it: its arithmetic, operator by operator.

Hypotheses are the declared devices and what a device's arithmetic can state (`kit.device.hypotheses`). Of each
operator's smallest graphs (`kit.device.probes`), the one is run on which most hypotheses part, until one is left or
nothing splits those that are. What is left is then compared on many more codes. An operator is explained if no code
differs, and otherwise said to be unexplained, with the nearest hypothesis and where it fails.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ..kit.device import OPERATORS, PROFILES, Profile, Refusal
from ..kit.device.hypotheses import Hypothesis, answering, beginning
from ..kit.device.operator import Call
from ..kit.device.probes import PROBES, probe
from ..kit.device.profile import FILE_VERSION, PACKAGED, known_names, profile_of_data
from ..kit.device.tensor import Quantization
from ..kit.display import Finding, aligned, shortened
from .codes import as_codes, as_real
from .comparing import Run
from .formats.onnx import onnx_bytes
from .formats.tflite import tflite_bytes, write_whole
from .graph import Builder, Graph
from .runtimes.onnxruntime import written_network
from .runtimes.trial import RuntimeRefusal

# Codes of each operator that are compared: noise in one code of 10,000 hides from these once in 20,000 times.
CODES = 100_000
# Of so many graphs the one is run that splits most hypotheses, or the first that splits them into enough parts; so many
# in a row may split nothing. So many hypotheses are kept for the next questions, and so many codes shown that none of
# them explains. A device that rejects so many graphs is said to lack the operator.
TRIED, ENOUGH, PATIENCE, KEPT, SHOWN, REJECTED = 5, 6, 20, 16, 5, 4


@dataclass(frozen=True)
class Place:
    """A code that no hypothesis explains.

    Attributes:
        graph: the operator's attributes and its tensors' grids in words.
        position: of the code in the result.
        operands: the codes of operands of the result's shape there.
        device, nearest: what the device has there, and what the nearest hypothesis says.
    """

    graph: str
    position: tuple[int, ...]
    operands: tuple[int, ...]
    device: int
    nearest: int


@dataclass(frozen=True)
class OperatorFindings:
    """What is known of one operator.

    Attributes:
        name: as it is measured, "ADD" or "ADD:int16".
        hypothesis: what explains all codes, or the nearest; None: the device does not run the operator.
        explained: whether no code differs.
        rivals: further hypotheses that explain all codes too.
        codes, differing: how many were compared with the hypothesis, and how many of them differ.
        runs: files that were run.
        seconds: all this took.
        places: some of the codes that differ.
        reason: why it is absent, or what else is known.
    """

    name: str
    hypothesis: Hypothesis | None
    explained: bool = False
    rivals: tuple[Hypothesis, ...] = ()
    codes: int = 0
    differing: int = 0
    runs: int = 0
    seconds: float = 0.0
    places: tuple[Place, ...] = ()
    reason: str = ""

    @property
    def explanations(self) -> tuple[Hypothesis, ...]:
        """All that explain every code."""
        return (self.hypothesis, *self.rivals) if self.explained and self.hypothesis is not None else ()


@dataclass(frozen=True, repr=False)
class Identification(Finding):
    """What `identify` found. It is true if every operator that the device runs is explained.

    Attributes:
        name: of the device.
        file: what it runs, by the end of a file's name.
        operators: by the order in which they were asked.
        seconds: all of it took.
    """

    name: str
    file: str
    operators: tuple[OperatorFindings, ...]
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return any(row.explained for row in self.operators) and not self.unexplained

    @property
    def unexplained(self) -> tuple[OperatorFindings, ...]:
        """Operators that the device computes otherwise than any hypothesis."""
        return tuple(row for row in self.operators if row.hypothesis is not None and not row.explained)

    @property
    def codes(self) -> int:
        """Number of codes compared."""
        return sum(row.codes for row in self.operators)

    @property
    def like(self) -> str:
        """The declared device that computes most of the operators alike."""
        names = [entry.like for row in self.operators for entry in row.explanations if entry.arithmetic is None]
        return Counter(names or [beginning(self.file)[0].like]).most_common(1)[0][0]

    def chosen(self, row: OperatorFindings) -> Hypothesis | None:
        """Of what explains an operator: that it is as on the device that is most alike or another declared one, else
        the arithmetic that explains most of the operators."""
        votes = Counter(entry.shared for other in self.operators for entry in other.explanations)

        def rank(entry: Hypothesis) -> tuple[bool, bool, int]:
            return entry != Hypothesis(self.like), entry.arithmetic is not None, -votes[entry.shared]

        return min(row.explanations, key=rank, default=row.hypothesis)

    def as_data(self) -> dict[str, Any]:
        """The device's file (`kit.device.profile.profile_of_data`)."""
        operators, asked = {}, {}
        for row in self.operators:
            chosen = self.chosen(row)
            if chosen is None:
                continue
            asked[row.name] = {"computes": str(chosen), "codes": row.codes, "runs": row.runs,
                               "seconds": round(row.seconds, 1), "rivals": len(row.rivals)}  # fmt: skip
            if chosen != Hypothesis(self.like):
                stated = {} if chosen.arithmetic is None else {"arithmetic": chosen.arithmetic.as_data()}
                operators[row.name] = {"like": chosen.like, **stated}
        return {
            "exactqat_device": FILE_VERSION,
            "name": self.name,
            "title": f"{self.name}, identified from outside",
            "file": self.file,
            "like": self.like,
            "operators": operators,
            "absent": [row.name for row in self.operators if row.hypothesis is None and row.runs],
            "compared": {row.name: row.codes for row in self.operators if row.explained},
            "unexplained": {
                row.name: {"codes": row.codes, "differing": row.differing, "reason": row.reason,
                           "places": [asdict(place) for place in row.places]}
                for row in self.unexplained
            },
            "identified": {"codes": self.codes, "seconds": round(self.seconds, 1), "operators": asked},
        }  # fmt: skip

    @property
    def profile(self) -> Profile:
        """The device, as `simulate` and the others take it."""
        return profile_of_data(self.as_data())

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes the device's file, a JSON, and returns its path: ``prepare(device="my-npu.json")``."""
        return write_whole(Path(path), json.dumps(self.as_data(), indent=2).encode() + b"\n")

    def in_short(self) -> str:
        ran = [row for row in self.operators if row.hypothesis is not None]
        explained = sum(row.explained for row in ran)
        return (f"{self.name}: {explained} of {len(ran)} operators explained, most as on {self.like}; "
                f"{self.codes:,} codes compared in {self.seconds:.0f} s")  # fmt: skip

    def text(self) -> str:
        rows = [("operator", "computes", "codes", "runs", "seconds")]
        for row in self.operators:
            chosen = self.chosen(row)
            words = (
                f"{'absent' if row.runs else 'not asked'}: {shortened(row.reason)}" if chosen is None else str(chosen)
            )
            if chosen is not None and not row.explained:
                words = f"UNEXPLAINED: {row.differing:,} codes differ from {words}. {row.reason}".strip()
            rows.append((row.name, words, f"{row.codes:,}", str(row.runs), f"{row.seconds:.1f}"))
        lines = [self.in_short(), "", *aligned(rows, (0, 1))]
        for row in self.unexplained:
            lines += ["", f"{row.name}:"]
            lines += [f"  at {place.position} of {place.graph}: operands {place.operands}, device {place.device}, "
                      f"nearest {place.nearest}" for place in row.places]  # fmt: skip
        return "\n".join(lines)


def identify(
    run: Run,
    name: str = "my-device",
    file: str = ".tflite",
    operators: Sequence[str] | None = None,
    codes: int = CODES,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Identification:
    """Finds the arithmetic of a device from outside.

    Args:
        run: runs a file on the device: from its content and codes by input, all with a batch of 1, to codes by output.
            An .onnx file takes and returns real numbers, as its ends say. What it raises (RuntimeError, OSError,
            ValueError, `subprocess.SubprocessError`) means that the device rejects the file.
        name: of the device.
        file: the kind of file it runs, ".tflite" or ".onnx".
        operators: names such as "CONV_2D" or "CONV_2D:int16"; None: all that are known here.
        codes: how many of each operator are compared at least.
        seed: of the graphs and codes.
        progress: called with what is done next.

    Returns:
        What was found; `Identification.write` writes it as the file of a device.

    Raises:
        ValueError: file or an operator is none of those known, or name cannot be a device's, or is one already.
    """
    if file not in (".tflite", ".onnx"):
        raise ValueError(f"file must be .tflite or .onnx, got {file!r}")
    known = names(file)
    wanted = known if operators is None else tuple(operators)
    unknown = [entry for entry in wanted if entry not in known]
    if unknown:
        raise ValueError(f"operators must be among {', '.join(known)}, got {', '.join(unknown)}")
    profile_of_data({"exactqat_device": FILE_VERSION, "name": name})
    declared = [*PACKAGED, *(entry for entry in known_names() if entry not in PROFILES or not PROFILES[entry].data)]
    if name in declared:
        raise ValueError(f"name must not be that of a declared device ({', '.join(declared)}), got {name!r}")
    began, rows = time.monotonic(), []
    for entry in wanted:
        (progress or (lambda text: None))(entry)
        rows.append(_Asking(run, file, entry, codes, seed).findings())
    return Identification(name, file, tuple(rows), time.monotonic() - began)


def names(file: str = ".tflite") -> tuple[str, ...]:
    """Names of the operators that can be identified: those of int8, then those of int16."""
    wide = [f"{kind}:int16" for kind in PROBES if "int16" in OPERATORS[kind].dtypes]
    return (*PROBES, *(wide if file == ".tflite" else ()))


class CommandRunner:
    """Runs a command with three paths after its own words: a file to run, an .npz of what its inputs hold, and the .npz
    to write with what its outputs hold, both by name."""

    def __init__(self, command: str, file: str = ".tflite", seconds: float = 120.0) -> None:
        """
        Raises:
            ValueError: it has no words, or there is no such program.
        """
        try:
            self.words, self.file, self.seconds = shlex.split(command), file, seconds
        except ValueError as error:
            raise ValueError(f"runner {command!r} cannot be split into words: {error}") from None
        if not self.words or shutil.which(self.words[0]) is None:
            raise ValueError(f"runner must begin with a program that can be run here, got {command!r}")

    def __call__(self, content: bytes, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """
        Raises:
            RuntimeRefusal: the command fails, takes too long, or writes no results.
            OSError: it cannot be run.
        """
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, part) for part in (f"model{self.file}", "inputs.npz", "outputs.npz")]
            paths[0].write_bytes(content)
            arrays: Any = dict(inputs)
            np.savez(paths[1], **arrays)
            try:
                ended = subprocess.run([*self.words, *paths], capture_output=True, timeout=self.seconds)
            except subprocess.TimeoutExpired:
                raise RuntimeRefusal(f"it takes longer than {self.seconds:g} seconds") from None
            if ended.returncode or not paths[2].exists():
                said = (ended.stderr or ended.stdout).decode(errors="replace").strip().splitlines()
                how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit status {ended.returncode}"
                raise RuntimeRefusal(f"{how}: {shortened(said[-1]) if said else 'no results'}")
            try:
                with np.load(paths[2], allow_pickle=False) as results:
                    return dict(results)
            except (ValueError, TypeError, zipfile.BadZipFile) as error:
                raise RuntimeRefusal(f"what it writes is not an .npz of codes by name: {error}") from None


# --- one operator -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Question:
    """A graph of one operator, the codes of its inputs, and what the device answers."""

    graph: Graph
    codes: Mapping[str, np.ndarray]

    def predicted(self, hypothesis: Hypothesis) -> np.ndarray | None:
        """The result; None: no device computes so."""
        (operator,) = self.graph.operators
        inputs, outputs = ([self.graph.tensors[name] for name in side] for side in (operator.inputs, operator.outputs))
        codes = [self.codes[tensor.name] if tensor.data is None else tensor.data for tensor in inputs]
        call = Call(codes, inputs, outputs, operator.attributes, hypothesis.profile)
        try:
            with np.errstate(all="ignore"):
                return OPERATORS[operator.kind].all_results(call)[0]
        except ValueError:
            return None

    def classes(self, hypotheses: Iterable[Hypothesis]) -> dict[bytes, list[Hypothesis]]:
        """Hypotheses that predict the same."""
        parts: dict[bytes, list[Hypothesis]] = {}
        for hypothesis in hypotheses:
            codes = self.predicted(hypothesis)
            parts.setdefault(b"" if codes is None else codes.tobytes(), []).append(hypothesis)
        return parts

    def answer(self, run: Run, file: str) -> np.ndarray:
        """
        Raises:
            RuntimeRefusal: the result has another shape or dtype.
        """
        (name,) = self.graph.outputs
        output = self.graph.tensors[name]
        if file == ".onnx":
            content = onnx_bytes(self.graph)
            network = written_network(self.graph, content)
            sides = network.graph.signature
            feeds = {}
            for given, port in zip(network.model.inputs, sides.inputs, strict=True):
                tensor = self.graph.tensors[port.tensor]
                feeds[given] = port.to_user(as_real(self.codes[tensor.name], tensor.dtype, tensor.quantization))
            (real,) = run(content, feeds).values()
            codes = as_codes(sides.outputs[0].to_graph(np.asarray(real)), output.dtype, output.quantization)
        else:
            results = run(tflite_bytes(self.graph), dict(self.codes))
            codes = np.asarray(results.get(name, next(iter(results.values()), np.empty(0))))
        if (codes.shape, str(codes.dtype)) != (output.shape, output.dtype):
            expected = f"{output.dtype} {list(output.shape)}"
            raise RuntimeRefusal(f"its result is {codes.dtype} {list(codes.shape)}, not {expected}")
        return codes

    def __str__(self) -> str:
        (operator,) = self.graph.operators
        grids = (_grid(self.graph.tensors[name].quantization) for name in (*operator.inputs, *operator.outputs))
        return f"{operator.kind} {dict(operator.attributes)} on {', '.join(grids)}"


def _grid(grid: Quantization) -> str:
    channels = "" if grid.scale.size == 1 else f" and {grid.scale.size - 1} more"
    return f"{float(grid.scale[0]).hex()}{channels} zero {int(grid.zero_point[0])}"


@dataclass
class _Asking:
    """One operator of a device."""

    run: Run
    file: str
    name: str
    wanted: int
    seed: int
    asked: list[tuple[_Question, np.ndarray]] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    runs: int = 0

    def __post_init__(self) -> None:
        self.kind, _, dtype = self.name.partition(":")
        self.dtype = dtype or "int8"
        self.rng = np.random.default_rng([self.seed, *self.name.encode()])
        # Sums of int16 have room in 32 bits for codes of one magnitude alone.
        wide = self.dtype == "int16"
        self.asks = [groups for groups in OPERATORS[self.kind].asks if not (wide and groups == ("accumulator",))]

    def findings(self) -> OperatorFindings:
        """All of it."""
        began, alive = time.monotonic(), beginning(self.file)
        while not self.asked and len(self.rejected) < REJECTED:
            self._ask(self._question(""))
        if not self.asked:
            seconds = time.monotonic() - began
            return OperatorFindings(self.name, None, runs=self.runs, reason=self.rejected[-1], seconds=seconds)
        for groups in self.asks:
            alive = self._split(answering(alive, groups, KEPT), groups[0])
        if not self.asks:
            alive = self._split([entry for entry in alive if entry.arithmetic is None], "")
        alive = self._confirmed(alive)
        nearest, *rivals = alive  # all that are left predict the same
        differing, reason = sum(self._differing(nearest, *asked) for asked in self.asked), ""
        if differing:
            question, answer = next(asked for asked in self.asked if self._differing(nearest, *asked))
            again = self._ask(question)
            twice = again is not None and not np.array_equal(again, answer)
            reason = "Asked the same twice, the device gives two answers." if twice else ""
        return OperatorFindings(
            self.name, nearest, not differing, () if differing else tuple(rivals),
            self._compared(), differing, self.runs,
            time.monotonic() - began, self._places(nearest) if differing else (), reason,
        )  # fmt: skip

    def _question(self, group: str) -> _Question:
        """A graph that all devices take.

        Raises:
            Refusal: none was found.
        """
        for _ in range(50):
            builder = Builder()
            try:
                codes = probe(self.kind, self.rng, builder, group, self.dtype)
                return _Question(builder.graph(["y"]), codes)
            except Refusal as refusal:
                last = refusal
        raise last

    def _ask(self, question: _Question) -> np.ndarray | None:
        def run(content: bytes, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            self.runs += 1
            return self.run(content, inputs)

        try:
            answer = question.answer(run, self.file)
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            self.rejected.append(" ".join(str(error).split()) or type(error).__name__)
            return None
        self.asked.append((question, answer))
        return answer

    def _split(self, alive: list[Hypothesis], group: str) -> list[Hypothesis]:
        """Those that predict what the device answers; of questions that none of them does, the nearest."""
        idle = 0
        while len(alive) > 1 and idle < PATIENCE and len(self.rejected) < 2 * REJECTED:
            best: tuple[_Question, dict[bytes, list[Hypothesis]]] | None = None
            for _ in range(TRIED):
                question = self._question(group)
                parted = question.classes(alive)
                if len(parted) > (1 if best is None else len(best[1])):
                    best = question, parted
                if len(parted) >= min(ENOUGH, len(alive)):
                    break
            if best is None:
                idle += TRIED
                continue
            answer = self._ask(best[0])
            if answer is not None:
                alive, idle = self._left(*best, answer), 0
        return alive

    def _confirmed(self, alive: list[Hypothesis]) -> list[Hypothesis]:
        """Likewise on as many codes as are wanted, of all groups of questions."""
        groups = cycle(["", *(groups[0] for groups in self.asks), "", ""])
        for question, answer in self.asked[:1]:  # it was asked before anything was open
            alive = self._left(question, question.classes(alive), answer)
        while self._compared() < self.wanted and len(self.rejected) < 3 * REJECTED:
            question = self._question(next(groups))
            reply = self._ask(question)
            if reply is not None:
                alive = self._left(question, question.classes(alive), reply)
        return alive

    def _compared(self) -> int:
        return sum(answer.size for _, answer in self.asked)

    @staticmethod
    def _left(question: _Question, parted: dict[bytes, list[Hypothesis]], answer: np.ndarray) -> list[Hypothesis]:
        """The class that predicts an answer, or the one from which fewest codes differ."""
        if answer.tobytes() in parted:
            return parted[answer.tobytes()]
        return min(parted.values(), key=lambda entries: _Asking._differing(entries[0], question, answer))

    @staticmethod
    def _differing(hypothesis: Hypothesis, question: _Question, answer: np.ndarray) -> int:
        codes = question.predicted(hypothesis)
        return answer.size if codes is None else int(np.count_nonzero(codes != answer))

    def _places(self, nearest: Hypothesis) -> tuple[Place, ...]:
        """Where the device has other codes, of several graphs."""
        places: list[Place] = []
        for question, answer in self.asked:
            codes = question.predicted(nearest)
            if codes is None or np.array_equal(codes, answer):
                continue
            for at in np.argwhere(codes != answer)[:2]:
                place = tuple(int(index) for index in at)
                operands = tuple(int(array[place]) for array in question.codes.values() if array.shape == answer.shape)
                places.append(Place(str(question), place, operands, int(answer[place]), int(codes[place])))
            if len(places) >= SHOWN:
                break
        return tuple(places)


__all__ = ["CommandRunner", "Identification", "OperatorFindings", "Place", "Run", "identify", "names"]
