# SPDX-License-Identifier: Apache-2.0
"""What is derived from the times of a run: rates, ratios, summaries for each operation, and the goals.

A row is the race of one operation on one tensor in one layout, at one number of threads:

    operation, tensor, batch, threads, format, networks     which; `format` is "" where layouts make no difference
    bytes, multiply_adds, tensor_bytes                      of the call, by its declaration, and of its largest operand
    copy, preallocated, fresh                               [median, lower quartile, upper quartile, samples], seconds
    peers, base                                             the same, by name; base: another commit
    clocks, sets                                            on a GPU: card.py's clock of each contestant, and how many
                                                            sets of operands; preallocated is replayed, fresh called

A ratio is the other's median over ours: above 1 we are faster. Peers' results are freshly allocated, so goals are
stated on ours freshly allocated too; ratios with a preallocated result are listed next to them. On a GPU both are the
ratio to ours by the peer's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import layers
from operations import BY_KEY, OPERATIONS
from timing import geometric_mean

Row = dict[str, Any]
COMPILERS = ("torch.compile", "jax.jit")


def finish(row: Row, peak: float) -> Row:
    """The row with what follows from its times. peak: multiply-adds in a second that a matrix product reaches."""
    seconds, moved, operations = row["preallocated"][0], row["bytes"], row["multiply_adds"]
    by_memory, by_arithmetic = row["copy"][0], operations / peak
    return row | {
        "gigabytes_per_second": moved / seconds / 1e9,
        "giga_multiply_adds_per_second": operations / seconds / 1e9,
        "bound": "multiply-adds" if by_arithmetic > by_memory else "copy",
        "fraction": max(by_memory, by_arithmetic) / seconds,
        "ratios": {
            name: {kind: times[0] / row[beside(row, name, kind)][0] for kind in ("fresh", "preallocated")}
            for name, times in row["peers"].items()
        },
    }


def beside(row: Row, peer: str, kind: str = "fresh") -> str:
    """Which of ours a peer is compared with: as asked, on a GPU the one that was timed as the peer was."""
    if "clocks" not in row:
        return kind
    return "preallocated" if row["clocks"][peer] == "graph" else "fresh"


def family(peer: str) -> str:
    """The peer without its layout: "PyTorch NCHW" is one of PyTorch's."""
    return peer.partition(" ")[0]


def ratio(row: Row, families: Sequence[str] | None = None, kind: str = "fresh") -> float | None:
    """Against the best of the peers, or of those of some families, each in its best layout; None if none took part."""
    factors = [ratios[kind] for name, ratios in row["ratios"].items() if families is None or family(name) in families]
    return min(factors, default=None)


class Summary(NamedTuple):
    """Over the rows of one operation: geometric mean, and the worst row and its name."""

    mean: float
    worst: float
    where: str
    rows: int


def describe(row: Row) -> str:
    return f"{row['batch']}x{row['tensor']}" if row["batch"] else row["tensor"]


def summarize(rows: Iterable[Row], measure: Callable[[Row], float | None]) -> Summary | None:
    """None if no row has the measure."""
    measured = [(value, describe(row)) for row in rows if (value := measure(row)) is not None]
    if not measured:
        return None
    worst, where = min(measured)
    return Summary(geometric_mean(value for value, _ in measured), worst, where, len(measured))


def of_layers(rows: Iterable[Row]) -> list[Row]:
    """Without the test cases, which are too small to say anything about a kernel."""
    return [row for row in rows if row["batch"]]


def select(rows: Iterable[Row], key: str, threads: int, data_format: str = "") -> list[Row]:
    return [
        row
        for row in of_layers(rows)
        if row["operation"] == key and row["threads"] == threads and row["format"] == data_format
    ]


def groups(rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    """Operation, threads and layout of the rows there are, in the order of the operations."""
    threads = sorted({row["threads"] for row in rows})
    every = [(op.key, count, form) for op in OPERATIONS for count in threads for form in op.formats]
    return [group for group in every if select(rows, *group)]


def network_sums(rows: Iterable[Row]) -> dict[str, float]:
    """As users feel it: the sum over all layers of a network of the peer that has the smallest, over ours.

    rows: of one operation, layout, batch and number of threads. A peer keeps one layout for the whole network.
    Networks with a layer that was not timed are left out.
    """
    index = {row["tensor"]: row for row in rows}
    if not index:
        return {}
    group = BY_KEY[next(iter(index.values()))["operation"]].group
    sums = {}
    for network in layers.NETWORKS:
        repeats = layers.repeats(network)[group]
        if not repeats or not set(repeats) <= set(index):
            continue
        peers = set.intersection(*(set(index[tensor]["peers"]) for tensor in repeats))
        theirs = [sum(count * index[tensor]["peers"][peer][0] for tensor, count in repeats.items()) for peer in peers]
        ours = sum(count * index[tensor]["fresh"][0] for tensor, count in repeats.items())
        if theirs:
            sums[network] = min(theirs) / ours
    return sums


# What each network's sum should reach; none may be below 1.
NETWORK_GOALS = {"batch_norm": 1.5, "batch_norm_gradient": 1.3, "depthwise_filter": 2.0}


def _network_goals(rows: Sequence[Row], threads: int) -> list[Goal]:
    """The worst network decides."""
    result = []
    for key, wanted in NETWORK_GOALS.items():
        for form in BY_KEY[key].formats:
            among = select(rows, key, threads, form)
            every = [
                (value, f"{network}, batch {batch}")
                for batch in sorted({row["batch"] for row in among})
                for network, value in network_sums(row for row in among if row["batch"] == batch).items()
            ]
            title = f"{BY_KEY[key].title}, {form}, sum over each network's layers / best peer"
            if not every:
                result.append(Goal(title, threads, wanted, "x", None, None, "", None))
                continue
            worst, where = min(every)
            mean = geometric_mean(value for value, _ in every)
            result.append(Goal(title, threads, wanted, "x", mean, worst, where, worst >= wanted))
    return result


class Goal(NamedTuple):
    """`measured` and `worst` are None where nothing was measured; `met` is None then."""

    title: str
    threads: int
    wanted: float
    unit: str
    measured: float | None
    worst: float | None
    where: str
    met: bool | None


def _goal(title: str, threads: int, wanted: float, spread: Summary | None, floor: float | None = None) -> Goal:
    """On the geometric mean, and on the worst row too where there is a floor."""
    if spread is None:
        return Goal(title, threads, wanted, "x", None, None, "", None)
    met = spread.mean >= wanted and (floor is None or spread.worst >= floor)
    return Goal(title, threads, wanted, "x", spread.mean, spread.worst, spread.where, met)


MEGABYTE = 1e6
OVERHEADS = (
    ("exactqat, NumPy|forward", 2.0),
    ("exactqat, PyTorch|forward", 6.0),
    ("exactqat, PyTorch|forward and backward", 30.0),
)


def goals(rows: Sequence[Row], overhead: dict[str, Sequence[float]]) -> list[Goal]:
    """What was aimed at beside what was measured, for each number of threads."""
    result = []
    for threads in sorted({row["threads"] for row in rows}):
        large = [
            row
            for row in of_layers(rows)
            if row["threads"] == threads
            and row["tensor_bytes"] >= MEGABYTE
            and BY_KEY[row["operation"]].group in ("whole tensor", "per channel")
        ]
        spread = summarize(large, lambda row: row["fraction"])
        title = "elementwise, preallocated, each tensor from 1 MB: of copy bandwidth"
        if spread is not None:
            # Every tensor has to reach it, so the worst decides.
            result.append(
                Goal(title, threads, 80, "%", 100 * spread.mean, 100 * spread.worst, spread.where, spread.worst >= 0.8)
            )
        else:
            result.append(Goal(title, threads, 80, "%", None, None, "", None))
        forward, gradient = select(rows, "per_channel", threads), select(rows, "per_channel_gradient", threads)
        for title, among, peers, wanted in (
            ("fake quant, per channel / TensorFlow", forward, ("TensorFlow",), 15),
            ("fake quant, per channel / PyTorch eager", forward, ("PyTorch",), 15),
            ("fake quant, per channel, gradient / TensorFlow", gradient, ("TensorFlow",), 30),
            ("fake quant, per channel / best compiler", forward, COMPILERS, 2),
            ("fake quant, per channel, gradient / best compiler", gradient, COMPILERS, 2),
        ):
            result.append(_goal(title, threads, wanted, summarize(among, lambda row, p=peers: ratio(row, p))))
        for operation in OPERATIONS:
            if operation.group in ("batch norm", "depthwise"):
                for form in operation.formats:
                    among = select(rows, operation.key, threads, form)
                    title = f"{operation.title}, {form} / best peer, no layer below 1"
                    result.append(_goal(title, threads, 1.5, summarize(among, ratio), floor=1.0))
                    if operation.group == "depthwise":
                        spread = summarize(among, lambda row: ratio(row, ("jax.jit",)))
                        result.append(_goal(f"{operation.title}, {form} / jax.jit", threads, 30, spread))
        result += _network_goals(rows, threads)
    first = {goal.title: number for number, goal in reversed(list(enumerate(result)))}
    result.sort(key=lambda goal: first[goal.title])
    for key, limit in OVERHEADS:
        measured = overhead[key][1] * 1e6 if key in overhead else None
        met = None if measured is None else measured <= limit
        title = f"overhead of a call, {key.replace('|', ', ')}: at most"
        result.append(Goal(title, 1, limit, "us", measured, measured, "", met))
    return result


LARGE = 64e6  # bytes of a tensor that fills a GPU


def forward_and_gradient(forward: Sequence[Row], gradient: Sequence[Row]) -> Summary | None:
    """Both calls of each layer together, against the best of the peers that make both."""
    index = {(row["tensor"], row["batch"]): row for row in gradient}
    pairs = [(row, index[row["tensor"], row["batch"]]) for row in forward if (row["tensor"], row["batch"]) in index]

    def measure(pair: Row) -> float | None:
        rows = pair["pair"]
        names = set(rows[0]["peers"]) & set(rows[1]["peers"])
        return min(
            (
                sum(row["peers"][name][0] for row in rows) / sum(row[beside(row, name)][0] for row in rows)
                for name in names
            ),
            default=None,
        )

    return summarize([{**pair[0], "pair": pair} for pair in pairs], measure)


def goals_on_card(rows: Sequence[Row], step: dict[str, Any] | None) -> list[Goal]:
    """What was aimed at on a GPU beside what was measured. step: what run.py's `training_step` gives."""
    # A range from the data reads it a second time, which a copy does not.
    simple = [
        row
        for row in of_layers(rows)
        if BY_KEY[row["operation"]].group in ("whole tensor", "per channel")
        and row["operation"] not in ("dequantize_from_data", "dequantize_axis")
    ]
    result = []
    for what, gradients in (("elementwise", False), ("gradients", True)):
        large = [
            row
            for row in simple
            if row["operation"].endswith("_gradient") is gradients and row["tensor_bytes"] >= LARGE
        ]
        spread = summarize(large, lambda row: row["fraction"])
        title = f"{what}, range given, each tensor from 64 MB: of copy bandwidth"
        if spread is None:
            result.append(Goal(title, 1, 85, "%", None, None, "", None))
        else:
            met = spread.worst >= 0.85  # every tensor has to reach it
            result.append(Goal(title, 1, 85, "%", 100 * spread.mean, 100 * spread.worst, spread.where, met))
    for form in BY_KEY["batch_norm"].formats:
        both = [select(rows, key, 1, form) for key in ("batch_norm", "batch_norm_gradient")]
        title = f"batch norm, training, forward and gradient, {form} / best peer"
        result.append(_goal(title, 1, 1.3, forward_and_gradient(*both)))
    for operation in OPERATIONS:
        if operation.group == "depthwise":
            for form in operation.formats:
                spread = summarize(select(rows, operation.key, 1, form), lambda row: ratio(row, ("PyTorch",)))
                title = f"{operation.title}, {form} / best of PyTorch's layouts, no layer below 1"
                result.append(_goal(title, 1, 2, spread, floor=1.0))
    times = {row["contestant"]: row["ms"] for row in step["steps"]} if step else {}
    for ranges in ("ema", "learned"):
        measured = None
        if times:
            floats = [time for name, time in times.items() if name.endswith("float")]
            measured = 100 * times[f"exactqat QAT, {ranges}"] / min(floats)
        title = f"QAT step of MobileNetV2, {ranges} ranges / the faster float step: at most"
        met = None if measured is None else measured <= 115
        result.append(Goal(title, 1, 115, "%", measured, measured, "", met))
    return result
