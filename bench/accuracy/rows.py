# SPDX-License-Identifier: Apache-2.0
"""Rows of the comparison: kept in a file line by line, so that a stopped run goes on, and shown as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PEERS = ("onnxruntime", "nncf", "brevitas", "torchao", "aimet", "ai_edge", "tensorflow")
OURS, FLOAT = "exactqat", "PyTorch"
# Of the float network after the training that quantized ones get.
TRAINED = "float QAT"
TITLES = {"onnxruntime": "ONNX Runtime", "nncf": "NNCF", "brevitas": "Brevitas", "torchao": "torchao", "aimet": "AIMET",
          "ai_edge": "ai-edge-quantizer", "tensorflow": "TensorFlow", OURS: "exactqat", FLOAT: "float"}  # fmt: skip
PRECISIONS = ("w8a8", "w4a8", "w4a4", "mixed")
# What a note says, by what it proposes, and what marks a cell of such rows.
PROPOSED = {16: "results in 16 bits", 8: "8 bits for means"}
MARKS = {16: " *", 8: " ‡"}
# What marks a cell of float networks that are not those of our row.
OTHER_NETWORKS = " †"
Key = tuple[str, int, str, str]


@dataclass(frozen=True)
class Row:
    """One network, quantized by one tool.

    Attributes:
        network, seed, precision, tool: which.
        method: the tool's, chosen by the validation examples.
        predicted, runtime: the metric on the test examples as the tool says beforehand, and as its file gives; None:
            it does not.
        interval: half of the 95 % interval of the runtime's metric (or the prediction's).
        unlike: how many test examples the runtime answers otherwise than was predicted.
        note: why there is nothing, or what was chosen.
        methods: the metric on the validation examples of all methods that were tried.
        integers, differing: of the file's results, compared with what was predicted; 0 where real numbers are.
        seconds: what it took.
        flash, arena, work: of our file: bytes, bytes of TFLite-Micro's arena, multiply-adds of an example.
        weights: a fingerprint of the float network, see `networks.fingerprint`. Trainings on another processor give
            another network, with which nothing is compared. Empty: of a row from before it was kept.
    """

    network: str
    seed: int
    precision: str
    tool: str
    method: str = "-"
    predicted: float | None = None
    runtime: float | None = None
    interval: float | None = None
    unlike: int | None = None
    note: str = ""
    methods: dict[str, float] | None = None
    integers: int = 0
    differing: int = 0
    seconds: float = 0.0
    flash: int = 0
    arena: int | None = None
    work: int = 0
    weights: str = ""

    @property
    def key(self) -> Key:
        return self.network, self.seed, self.precision, self.tool

    def cells(self) -> tuple[str, ...]:
        measured = (points(self.predicted), points(self.runtime), points(self.interval), count(self.unlike))
        return (self.network, str(self.seed), self.precision, self.tool, self.method, *measured, self.note[:60])


HEADER = ("network", "seed", "bits", "tool", "method", "predicted", "runtime", "+-", "unlike", "")


def points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def count(value: int | None) -> str:
    return "-" if value is None else str(value)


def read(path: Path) -> dict[Key, Row]:
    """The rows of a file; of rows of one key the last. A line that a stopped run left unfinished is passed over."""
    rows: dict[Key, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = Row(**json.loads(line))
        except json.JSONDecodeError:
            continue
        rows[row.key] = row
    return rows


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    start = "\n" if text and not text.endswith("\n") else ""
    with path.open("a", encoding="utf-8") as file:
        file.write(start + json.dumps(asdict(row)) + "\n")


def printed(rows: Iterable[Row]) -> str:
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in cells)  # fmt: skip


@dataclass(frozen=True)
class Match:
    """Our row beside the best of the peers' for the same network and bits, by what their files give on a runtime.

    best: by the test examples; chosen: by the validation examples, as anybody would choose.
    """

    ours: Row
    best: Row
    chosen: Row

    @property
    def difference(self) -> float:
        assert self.ours.runtime is not None and self.best.runtime is not None
        return self.ours.runtime - self.best.runtime

    @property
    def lost(self) -> bool:
        """Whether the peer's is better by more than the interval."""
        return self.difference < -max(self.ours.interval or 0, self.best.interval or 0)


def matches(rows: Iterable[Row]) -> list[Match]:
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        if row.runtime is not None:
            groups.setdefault((row.network, row.seed, row.precision), []).append(row)
    pairs = []
    for group in groups.values():
        ours = next((row for row in group if row.tool == OURS), None)
        peers = [row for row in group if row.tool in PEERS and ours is not None and row.weights == ours.weights]
        if ours is not None and peers:
            best = max(peers, key=lambda row: row.runtime or 0.0)
            pairs.append(Match(ours, best, max(peers, key=lambda row: (row.methods or {}).get(row.method, 0.0))))
    return pairs


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verdict(rows: Sequence[Row]) -> list[str]:
    """In how many rows we are worse than the best peer, and what each tool's predictions were worth."""
    pairs, lines = matches(rows), []
    if pairs:
        lines.append(
            f"significantly worse than the best peer in {sum(match.lost for match in pairs)} of {len(pairs)} rows, "
            f"mean difference {100 * mean([match.difference for match in pairs]):+.2f} points"
        )
        beside = mean([(match.ours.runtime or 0.0) - (match.chosen.runtime or 0.0) for match in pairs])
        lines.append(
            f"beside the peer that validation examples choose, not test examples: {100 * beside:+.2f} points on average"
        )
    for precision in dict.fromkeys(match.ours.precision for match in pairs):
        part = [match for match in pairs if match.ours.precision == precision]
        few = [match for match in part if PROPOSED[8] not in match.ours.note]
        for matched, which in ((part, ""), (few, f" without {PROPOSED[8]}")) if len(few) < len(part) else ((part, ""),):
            if matched:
                average = mean([match.difference for match in matched])
                lines.append(f"{precision}{which}: {100 * average:+.2f} points on average in {len(matched)} rows")
    for tool in (OURS, *PEERS):
        # A peer's row of mixed bits is its row of W4A8 once more.
        own = [row for row in rows if row.tool == tool and (tool == OURS or not row.precision.startswith("mixed"))]
        judged = [row for row in own if row.unlike is not None]
        if judged:
            wrong, all_right = sum(row.unlike or 0 for row in judged), sum(not row.unlike for row in judged)
            lines.append(
                f"{TITLES[tool]}: {wrong:,} test examples answered otherwise than predicted, in "
                f"{len(judged) - all_right} of {len(judged)} networks"
            )
    integers, differing = (sum(getattr(row, name) for row in rows) for name in ("integers", "differing"))
    lines.append(f"exactqat: {integers:,} integers compared with LiteRT, {differing:,} differ")
    for match in pairs:
        if match.lost:
            row = match.ours
            lines.append(
                f"lost: {row.network} seed {row.seed} {row.precision} by {-100 * match.difference:.1f} points "
                f"(interval {100 * max(row.interval or 0, match.best.interval or 0):.1f}) to {TITLES[match.best.tool]}"
            )
    return lines


def page_text(rows: Sequence[Row], titles: dict[str, str], precisions: Sequence[str]) -> str:
    """The tables of the page: means over seeds.

    titles: of networks, by name; precisions: as in rows, a table each.
    """
    lines = [*(f"- {line}." for line in verdict(rows)), ""]
    tools = [tool for tool in (OURS, *PEERS) if any(row.tool == tool and row.runtime is not None for row in rows)]
    for precision in precisions:
        part = [row for row in rows if row.precision == precision]
        shown = [tool for tool in tools if any(row.tool == tool and row.runtime is not None for row in part)]
        if OURS not in shown:
            continue
        trained = [row for row in rows if row.tool == FLOAT and row.precision == TRAINED]
        beside = ["float, trained as well"] if precision.endswith("QAT") and trained else []
        words = ["network", "seeds", "float", *beside, *(TITLES[tool] for tool in shown)]
        lines += [
            f"### {'Mixed' + precision[5:] if precision.startswith('mixed') else precision.upper()}",
            "",
            _line(words),
        ]
        lines.append(_line(["---"] * len(words)))
        for name, title in titles.items():
            ours = {row.seed: row for row in part if row.network == name and row.tool == OURS}
            seeds = sorted(ours)
            if not seeds:
                continue
            plain = [row.runtime or 0.0 for row in rows
                     if row.network == name and row.tool == FLOAT and row.precision == "float"
                     and row.seed in seeds]  # fmt: skip
            cells = [title, str(len(seeds)), points(mean(plain))]
            if beside:
                floats = [row.runtime for row in trained if row.network == name and row.runtime is not None]
                cells.append(points(mean(floats) if floats else None))
            for tool in shown:
                of_tool = [row for row in part if row.network == name and row.tool == tool and row.seed in seeds]
                same = [row for row in of_tool if row.weights == ours[row.seed].weights]
                of_tool = same if any(row.runtime is not None for row in same) else of_tool
                marks = "".join(
                    MARKS[bits] for bits, said in PROPOSED.items() if any(said in row.note for row in of_tool)
                )
                other = (
                    OTHER_NETWORKS if of_tool is not same and any(row.runtime is not None for row in of_tool) else ""
                )
                cells.append(_cell(of_tool, len(seeds)) + marks + other)
            lines.append(_line(cells))
        lines.append("")
    return "\n".join(lines)


def _cell(rows: Sequence[Row], seeds: int) -> str:
    """The runtime's mean, and the prediction's where it is another; which seeds, where they are not all."""
    known = [row for row in rows if row.runtime is not None]
    if not known:
        return "-"
    runtime = points(mean([row.runtime or 0.0 for row in known]))
    predicted = [row.predicted for row in known if row.predicted is not None]
    said = points(mean(predicted)) if len(predicted) == len(known) else runtime
    which = f" (seed {', '.join(str(row.seed) for row in known)})" if len(known) < seeds else ""
    return runtime + ("" if said == runtime else f" (predicted {said})") + which


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


__all__ = ["FLOAT", "OURS", "PEERS", "PRECISIONS", "PROPOSED", "Row", "append", "matches", "page_text", "printed",
           "read", "verdict"]  # fmt: skip
