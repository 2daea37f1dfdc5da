# SPDX-License-Identifier: Apache-2.0
"""Results of bench/run.py as a file: what was measured, each figure once, and nothing that follows from it.

    {..., "tensors": {operation: {"batch x tensor": [bytes, multiply-adds, bytes of the largest operand, networks]}},
     "races": {operation: {"contestants": [...], "rows": [[tensor, threads, times, what else there is], ...]}}}

Of each contestant's times a race keeps the median in microseconds and, in percent of it, half the distance between the
quartiles; null, or a missing entry at the end, means did not take part. Ours are called "preallocated NHWC" and
so on, another commit's "base fresh NHWC". `networks` are numbers of the list `networks`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import summary

OURS, BASE = ("preallocated", "fresh"), "base "
# What some rows alone have; see summary.py.
FURTHER = ("clocks", "sets", "disturbed", "failures")


def write(path: Path, results: dict[str, Any]) -> None:
    networks = list(dict.fromkeys(name for row in results["rows"] for name in row["networks"]))
    tensors: dict[str, dict[str, Any]] = {}
    races: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for row in results["rows"]:
        key, tensor = row["operation"], _tensor(row)
        demand = [row["bytes"], row["multiply_adds"], row["tensor_bytes"], [networks.index(n) for n in row["networks"]]]
        if tensors.setdefault(key, {}).setdefault(tensor, demand) != demand:
            raise ValueError(f"two tensors of {key} are called {tensor}")
        race = races.setdefault(key, {}).setdefault((tensor, row["threads"]), {"times": {}})
        race["times"] |= {"copy": row["copy"]} | row["peers"]
        for side, times in (("", row), (BASE, row.get("base"))):
            if times is not None:
                race["times"] |= {f"{side}{kind} {row['format']}".strip(): times[kind] for kind in OURS}
        race["further"] = {name: row[name] for name in FURTHER if name in row}
    written: dict[str, Any] = {}
    for key, of_operation in races.items():
        contestants = list(dict.fromkeys(name for race in of_operation.values() for name in race["times"]))
        written[key] = {
            "contestants": contestants,
            "rows": [
                [tensor, threads, _times(race["times"], contestants), *_if_any(race["further"])]
                for (tensor, threads), race in of_operation.items()
            ],
        }
    head = _rounded({name: value for name, value in results.items() if name != "rows"})
    path.write_text(_text(head | {"networks": networks, "tensors": tensors, "races": written}))


def read(path: Path) -> dict[str, Any]:
    """The results with their rows, as `run.collect` gives them, with quartiles that lie as far below as above."""
    results = json.loads(path.read_text())
    networks, tensors, races = (results.pop(name) for name in ("networks", "tensors", "races"))
    rows = []
    for key, race in races.items():
        for tensor, threads, measured, *further in race["rows"]:
            times = {
                name: _long(short)
                for name, short in zip(race["contestants"], measured, strict=False)
                if short is not None
            }
            rows += _rows(key, tensor, threads, times, tensors[key][tensor], networks, *further)
    return results | {"rows": [summary.finish(row, results["peak_multiply_adds"][str(row["threads"])]) for row in rows]}


def _rows(
    key: str,
    tensor: str,
    threads: int,
    times: dict[str, list[float]],
    demand: list[Any],
    networks: list[str],
    further: dict[str, Any] | None = None,
) -> list[summary.Row]:
    """The rows of one race: one for each layout of ours."""
    batch, _, name = tensor.partition("x")
    layouts = [contestant.removeprefix("fresh").strip() for contestant in times if contestant.startswith("fresh")]
    ours = {f"{side}{kind} {form}".strip() for side in ("", BASE) for kind in OURS for form in layouts}
    peers = {who: spread for who, spread in times.items() if who not in ours | {"copy"}}
    rows = []
    for form in layouts:
        row = {
            "operation": key,
            "tensor": name,
            "batch": int(batch),
            "threads": threads,
            "format": form,
            "networks": [networks[number] for number in demand[3]],
            **dict(zip(("bytes", "multiply_adds", "tensor_bytes"), demand, strict=False)),
            "copy": times["copy"],
            **{kind: times[f"{kind} {form}".strip()] for kind in OURS},
            "peers": peers,
        }
        if f"{BASE}fresh {form}".strip() in times:
            row["base"] = {kind: times[f"{BASE}{kind} {form}".strip()] for kind in OURS}
        rows.append(row | (further or {}))
    return rows


def _tensor(row: summary.Row) -> str:
    return f"{row['batch']}x{row['tensor']}"


def _if_any(further: dict[str, Any]) -> list[dict[str, Any]]:
    return [further] if further else []


def _times(times: dict[str, list[float]], contestants: list[str]) -> list[list[float] | None]:
    last = max(contestants.index(name) for name in times)
    return [_short(times[name]) if name in times else None for name in contestants[: last + 1]]


def _short(times: list[float]) -> list[float]:
    median, low, high = times[:3]
    return [float(f"{1e6 * median:.4g}"), round(100 * (high - low) / 2 / median)]


def _long(short: list[float]) -> list[float]:
    median, spread = 1e-6 * short[0], short[1] / 100
    return [median, median * (1 - spread), median * (1 + spread)]


def _rounded(value: Any) -> Any:
    """Five digits of a number; more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _text(results: dict[str, Any]) -> str:
    """JSON with a line for each row, so that two runs can be compared."""
    races = results.pop("races")
    parts = [json.dumps(results)[:-1] + ', "races": {']
    for key, race in races.items():
        rows = ",\n".join(json.dumps(row, separators=(",", ":")).replace(".0,", ",") for row in race["rows"])
        parts.append(f'"{key}": {{"contestants": {json.dumps(race["contestants"])}, "rows": [\n{rows}\n]}},')
    parts[-1] = parts[-1].removesuffix(",")
    return "\n".join([*parts, "}}\n"])
