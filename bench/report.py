# SPDX-License-Identifier: Apache-2.0
"""The benchmark's tables: on the terminal, and in two pages between two markers, always from the measured rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import layers
import saved
from operations import BY_KEY, OPERATIONS, Operation
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from summary import (
    COMPILERS,
    NETWORK_GOALS,
    Row,
    describe,
    geometric_mean,
    goals,
    goals_on_card,
    groups,
    network_sums,
    of_layers,
    ratio,
    select,
    summarize,
)

WIDTH = 120
BEGIN, END = "<!-- bench/run.py --page: begin -->", "<!-- bench/run.py --page: end -->"
# The columns of the rows' tables, and how each peer is called there.
PEERS = {
    "TensorFlow": "TF",
    "PyTorch": "torch",
    "PyTorch channels_last": "t. last",
    "PyTorch NCHW": "t. NCHW",
    "PyTorch channels_last cuDNN": "dnn last",
    "PyTorch NCHW cuDNN": "dnn NCHW",
    "torch.compile": "t.compile",
    "jax.jit": "jax.jit",
}


def console() -> Console:
    """As wide as the terminal, and wide enough for the tables where there is none."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH)


def factor(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
        if value >= 1
        else f"{value:.3f}"
    )


def _spread(times: Sequence[float]) -> str:
    median, low, high, _ = times
    return f"±{(high - low) / 2 / median:.0%}"


def _peer(row: Row, name: str) -> str:
    """Ours freshly allocated / preallocated; on a GPU by the peer's clock. A compiler's name carries the layout of its
    own row."""
    full = f"{name} {row['format']}".strip() if name in COMPILERS else name
    ratios = row["ratios"].get(full)
    if ratios is None:
        return "–"
    if "clocks" in row:
        return factor(ratios["fresh"]) + "*" * (row["clocks"][full] != "graph")
    return f"{factor(ratios['fresh'])}/{factor(ratios['preallocated'])}"


def print_rows(console: Console, operation: Operation, threads: int, rows: Sequence[Row]) -> None:
    """One operation's rows at one number of threads."""
    depthwise = operation.group == "depthwise"
    on_card = any("clocks" in row for row in rows)
    where = "on a GPU" if on_card else f"{threads} thread{'s' if threads > 1 else ''}"
    ours, others = "result fresh or preallocated (out=)", "their time / ours, fresh/out="
    if on_card:
        ours, others = "called or replayed (graph)", "their time / ours, both replayed, * both called"
    table = Table(
        box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left",
        title=f"[bold]{operation.title}[/] ({operation.raw}), {where}",
        caption=f"ms of ours, {ours}, ± half the quartiles' distance; "
        + ("rate: billions of multiply-adds a second" if depthwise else "rate: GB/s")
        + f", and fraction of the roof, {'graph' if on_card else 'out='};\nothers: {others}", caption_justify="left",
    )  # fmt: skip
    shown = [name for name in PEERS if any(_peer(row, name) != "–" for row in rows)]
    layouts = any(row["format"] for row in rows)
    based = any("base" in row for row in rows)
    table.add_column("tensor", no_wrap=True)
    if layouts:
        table.add_column("layout", no_wrap=True)
    for heading in (
        *(("calls", "", "graph", "") if on_card else ("fresh", "", "out=", "")),
        "rate",
        "roof",
        *(PEERS[name] for name in shown),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    if based:
        table.add_column("base", justify="right", no_wrap=True)
    for row in rows:
        rate = row["giga_multiply_adds_per_second" if depthwise else "gigabytes_per_second"]
        cells = [describe(row) + " !" * ("disturbed" in row), *([row["format"]] if layouts else [])]
        for kind in ("fresh", "preallocated"):
            cells += [milliseconds(row[kind][0]), _spread(row[kind])]
        cells += [f"{rate:.1f}", f"{row['fraction']:.0%}", *(_peer(row, name) for name in shown)]
        if based:
            base = row.get("base")
            cells.append(factor(base["preallocated"][0] / row["preallocated"][0]) if base else "–")
        table.add_row(*cells)
    console.print(table)
    for text in sorted({text for row in rows for text in row.get("failures", {}).values()}):
        console.print(f"left out: {text}", markup=False, highlight=False, style="dim")


def _cell(rows: Sequence[Row], peers: Sequence[str] | None, kind: str = "fresh") -> str:
    result = summarize(rows, lambda row: ratio(row, peers, kind))
    return "–" if result is None else f"{factor(result.mean)} ({factor(result.worst)})"


SUMMARY_COLUMNS = {
    "best peer": None,
    "TensorFlow": ("TensorFlow",),
    "PyTorch": ("PyTorch",),
    "torch.compile": ("torch.compile",),
    "jax.jit": ("jax.jit",),
}


def print_summary(console: Console, results: dict[str, Any]) -> None:
    """Each operation, each network, the overheads, and the goals."""
    rows = results["rows"]
    table = Table(
        box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left",
        title="[bold]Summary[/]: geometric mean over layers and (worst layer); "
        f"{'by the same clock' if any('clocks' in row for row in rows) else 'results fresh'}, peers in best layout",
    )  # fmt: skip
    for heading in ("operation", "layout", "thr."):
        table.add_column(heading, no_wrap=True)
    based = any("base" in row for row in rows)
    for heading in ("rows", "of roof", *SUMMARY_COLUMNS, *(["base"] if based else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for key, threads, form in groups(rows):
        among = select(rows, key, threads, form)
        cells = [SHORT[key], form, str(threads), str(len(among)), f"{_fraction(among):.0%}"]
        cells += [_cell(among, peers) for peers in SUMMARY_COLUMNS.values()]
        if based:
            change = summarize(among, lambda row: row["base"]["preallocated"][0] / row["preallocated"][0])
            cells.append("–" if change is None else factor(change.mean))
        table.add_row(*cells)
    console.print(table)
    _print_networks(console, rows)
    _print_overheads(console, results["overhead"])
    if "step" in results:
        _print_step(console, results["step"])
    if "memory" in results:
        _print_memory(console, results["memory"])
    if "huge" in results:
        for line in results["huge"]["lines"]:
            console.print(line, highlight=False)
    for measured in results.get("halves", []):
        for line in measured["lines"]:
            console.print(line, highlight=False)
    _print_goals(console, results)
    disturbed = sum("disturbed" in row for row in rows)
    if disturbed:
        console.print(
            f"[bold yellow]{disturbed} of {len(rows)} rows were measured while others kept cores busy[/] (marked !): "
            "believe them less, above all with several threads.",
            highlight=False,
        )
    console.print(
        f"{results['machine']}; {', '.join(f'{name} {version}' for name, version in results['versions'].items())}; "
        f"compilers: {results['settings']['compilers']}; took {results.get('seconds', 0)} s.",
        style="dim", highlight=False,
    )  # fmt: skip


SHORT = {
    "args": "fake quant, fixed range",
    "args_gradient": "fixed range, gradient",
    "vars": "fake quant, one range",
    "vars_gradient": "one range, gradient",
    "per_channel": "fake quant, per channel",
    "per_channel_gradient": "per channel, gradient",
    "dequantize": "q. and deq., given",
    "dequantize_from_data": "q. and deq., from data",
    "dequantize_axis": "q. and deq., per channel",
    "dequantize_gradient": "q. and deq., gradient",
    "batch_norm": "batch norm",
    "batch_norm_gradient": "batch norm, gradient",
    "depthwise": "depthwise",
    "depthwise_input": "depthwise, of input",
    "depthwise_filter": "depthwise, of filter",
}


def _fraction(rows: Sequence[Row]) -> float:
    return geometric_mean(row["fraction"] for row in rows)


def _print_networks(console: Console, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(network for row in rows for network in row["networks"]))
    if not names:
        return
    threads = max(row["threads"] for row in rows)
    table = Table(
        box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left",
        title=f"[bold]Networks[/]: the same against the best peer, {threads} thread{'s' if threads > 1 else ''}",
    )  # fmt: skip
    table.add_column("operation", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for key, count, form in groups(rows):
        if count == threads:
            among = select(rows, key, threads, form)
            cells = [_cell([row for row in among if name in row["networks"]], None) for name in names]
            table.add_row(SHORT[key], form, *cells)
    console.print(table)


def _print_overheads(console: Console, overhead: dict[str, Sequence[float]]) -> None:
    if not overhead:
        return
    table = Table(
        box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left",
        title="[bold]A call on 8 values[/] (FakeQuantWithMinMaxVars), 1 thread, microseconds",
    )  # fmt: skip
    table.add_column("")
    whats = list(dict.fromkeys(name.partition("|")[2] for name in overhead))
    for what in whats:
        table.add_column(what, justify="right")
    for who in dict.fromkeys(name.partition("|")[0] for name in overhead):
        times = [overhead.get(f"{who}|{what}") for what in whats]
        table.add_row(who, *("–" if t is None else f"{1e6 * t[1]:.1f} ±{(t[2] - t[0]) / 2 / t[1]:.0%}" for t in times))
    console.print(table)


def _print_memory(console: Console, memory: dict[str, Any]) -> None:
    base = memory["step_mib"]["float"]
    figures = ", ".join(f"{name} {value:.0f} MiB ({value / base:.2f})" for name, value in memory["step_mib"].items())
    console.print(
        f"[bold]Memory of a training step[/] of {memory['network']} on {memory['images']} images: {figures}. "
        f"{memory['how']}",
        highlight=False,
    )


def _print_step(console: Console, step: dict[str, Any]) -> None:
    figures = ", ".join(f"{row['contestant']} {row['ms']:.1f} ms ±{row['spread']:.0%}" for row in step["steps"])
    images = "x".join(map(str, step["images"]))
    console.print(f"[bold]A training step[/] of {step['network']} on {images} images: {figures}.", highlight=False)


def _print_goals(console: Console, results: dict[str, Any]) -> None:
    table = Table(
        box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left",
        title="[bold]Goals[/]: geometric mean, worst layer"
        + ("; results fresh unless said otherwise" if results.get("device", "cpu") == "cpu" else ""),
    )  # fmt: skip
    table.add_column("goal", max_width=66)
    table.add_column("thr.")
    for heading in ("wanted", "measured", "worst"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("where", no_wrap=True)
    table.add_column("", no_wrap=True)
    if results.get("device", "cpu") == "cpu":
        every = goals(results["rows"], results["overhead"])
    else:
        every = goals_on_card(results["rows"], results.get("step"))
    for goal in every:
        if goal.met is None:
            continue
        verdict = "[green]met[/]" if goal.met else "[red]missed[/]"
        unit = "" if goal.unit == "x" else f" {goal.unit}"
        worst = goal.worst if goal.where else None
        table.add_row(
            goal.title, str(goal.threads), f"{goal.wanted:g}{unit}",
            *("–" if value is None else f"{factor(value)}{unit}" for value in (goal.measured, worst)),
            goal.where, verdict,
        )  # fmt: skip
    console.print(table)
    met, missed, open_ = (sum(goal.met is state for goal in every) for state in (True, False, None))
    console.print(f"{met} met, {missed} missed, {open_} not measured in this run.", highlight=False)


# The pages


def markdown(results: dict[str, Any]) -> str:
    """The table of every operation at the most threads."""
    rows = of_layers(results["rows"])
    threads = max(row["threads"] for row in rows)
    versions = results["versions"]
    lines = [
        "| operation | layout | of roof | best peer | TensorFlow | PyTorch | torch.compile | jax.jit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, count, form in groups(rows):
        if count == threads:
            among = select(rows, key, threads, form)
            cells = [BY_KEY[key].title, form or "any", f"{_fraction(among):.0%}"]
            cells += [_cell(among, peers) for peers in SUMMARY_COLUMNS.values()]
            lines.append(f"| {' | '.join(cells)} |")
    peers = {"tensorflow": "TensorFlow", "torch": "PyTorch", "jax": "JAX"}
    named = ", ".join(f"{peers[name]} {versions[name]}" for name in peers if name in versions)
    batches = sorted({row["batch"] for row in rows})
    lines += [
        "",
        f"How many times as fast: geometric mean over {len({(r['operation'], describe(r)) for r in rows})} layers' "
        f"tensors of seven networks at batch {', '.join(map(str, batches))}, and (the slowest layer); {threads} "
        f"thread{'s' if threads > 1 else ''} of `{results['machine']}`, {named}, every result fresh, each peer "
        "in its best layout. *Of roof*: of the bandwidth of a copy of as many bytes, or of a matrix product's rate of "
        "multiply-adds where that binds, preallocated. "
        f"The compilers took part in {results['settings']['compilers']}.",
    ]
    lines += network_table(rows)
    if results["overhead"]:
        calls = [
            (f"{who.removeprefix('exactqat, ')}, {what}", times[1])
            for name, times in results["overhead"].items()
            for who, _, what in [name.partition("|")]
            if who.startswith("exactqat")
        ]
        lines += ["", "A call on eight values: " + "; ".join(f"{name} {1e6 * t:.1f} µs" for name, t in calls) + "."]
    return "\n".join(lines)


def network_table(rows: Sequence[Row]) -> list[str]:
    """The sums over the layers of each network, where a goal is set on them; a cell has one for each batch."""
    batches = sorted({row["batch"] for row in rows})
    names = list(layers.NETWORKS)
    lines = [
        "",
        f"Summed over a network's layers, at batch {' / '.join(map(str, batches))}, as its training feels it; the peer "
        "keeps one layout:",
        "",
        f"| operation | layout | threads | {' | '.join(names)} |",
        f"|---|---|---{'|---' * len(names)}|",
    ]
    for key, threads, form in groups(rows):
        if key in NETWORK_GOALS:
            among = select(rows, key, threads, form)
            sums = [network_sums(row for row in among if row["batch"] == batch) for batch in batches]
            cells = [" / ".join(factor(of_batch.get(name)) for of_batch in sums) for name in names]
            lines.append(f"| {BY_KEY[key].title} | {form} | {threads} | {' | '.join(cells)} |")
    return lines


def with_table(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with the table between its markers."""
    head, marker, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not marker or not closed:
        raise ValueError(f"the page must contain the lines {begin} and {end}")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def write_page(page: Path, results: Path) -> None:
    """The table into the page on performance."""
    if not results.exists():
        raise SystemExit(f"there is no {results}; run bench/run.py --save first")
    page.write_text(with_table(page.read_text(), markdown(saved.read(results))))


assert set(SHORT) == {operation.key for operation in OPERATIONS} and set(COMPILERS) < set(PEERS)
