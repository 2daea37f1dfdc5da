# SPDX-License-Identifier: Apache-2.0
"""A lowered network as a picture: a row for each operator, in order of execution, and next to the rows the paths that
tensors take from one to another, as in drawings of version histories. It is as wide as a phone's screen, however many
branches a network has, and in long networks modules become rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from markupsafe import Markup

from ...deploy.graph import Graph, Operator
from ...kit.device import OPERATORS
from .page import NOTE, PAPER, render, variable
from .text import shortened

# The most rows, beyond which modules are drawn instead of their operators.
MOST_ROWS = 40
# Units of the picture, which is shown at 0.85 to 1.45 pixels a unit: a phone's page is some 340 pixels wide.
WIDTH, ROW, BOX = 400, 46, 38
# The paths next to the rows; the more there are side by side, the closer they are, and the last ones share a position.
FIRST_WAY, WAYS_WIDTH, WAY_GAP = 9, 96, 13
# Letters of 11 and of 10 units: their average width in the boxes' texts.
LETTER, SMALL_LETTER = 6.3, 5.4
# The edges of boxes: multiply-adds, computing without weights, moving codes.
WEIGHTED, COMPUTING, MOVING = "#1f5fa8", "#e08a3c", "#6b7280"


@dataclass(frozen=True)
class Row:
    """One box: an operator, a module's operators, or an end of the network.

    Attributes:
        title: what it is, in the device's words.
        name: the user's path.
        shape: of what it stores, without the batch.
        bits: of weights and of what it stores, as text; empty if there is nothing to say.
        work: its multiply-accumulates; None at the ends of the network.
        color: of its edge.
        sources: the rows, by number, whose results it reads.
    """

    title: str
    name: str
    shape: str
    bits: str
    work: int | None
    color: str
    sources: tuple[int, ...] = ()
    operators: tuple[str, ...] = field(default=())


def rows(graph: Graph, bits: Mapping[str, str] | None = None, most: int | None = MOST_ROWS) -> list[Row]:
    """The boxes of a graph from its inputs to its last operator.

    Args:
        bits: what to say about an operator's bits, by the name of its result.
        most: the most rows for operators; None: one for each.
    """
    bits = bits or {}
    inputs = [
        Row("input", name, _shape(graph, name), "", None, NOTE)
        for name in graph.inputs
        if any(name in operator.inputs for operator in graph.operators) or name in graph.outputs
    ]
    parts = [[operator] for operator in graph.operators] if most is None else _parts(graph.operators, most)
    found = {row.name: number for number, row in enumerate(inputs)}
    drawn = list(inputs)
    for part in parts:
        number = len(drawn)
        inside = {name for operator in part for name in operator.outputs}
        read = [name for operator in part for name in operator.inputs if name not in inside and name in found]
        sources = tuple(dict.fromkeys(found[name] for name in read))
        found.update(dict.fromkeys(inside, number))
        drawn.append(_row(graph, part, bits, sources))
    return drawn


def picture(graph: Graph, caption: str, bits: Mapping[str, str] | None = None, most: int | None = MOST_ROWS) -> Markup:
    """The graph as a figure of the page; if rows are modules, all operators are in a collapsed section below."""
    shown = rows(graph, bits, most)
    figures = [_figure(graph, shown, caption)]
    if any(len(row.operators) > 1 for row in shown):
        figures.append(_figure(graph, rows(graph, bits, None), f"{caption} Every operator."))
    return Markup(render("layer_graph.html", figures=figures, operators=len(graph.operators), width=WIDTH, box=BOX))


def _shape(graph: Graph, name: str) -> str:
    return "x".join(map(str, graph.tensors[name].shape[1:])) or "1"


def _parts(operators: Sequence[Operator], most: int) -> list[list[Operator]]:
    """Groups neighbouring operators of one module, as deep into modules as `most` rows allow; if even the outermost
    modules are too many, neighbours in equal numbers."""
    if len(operators) <= most:
        return [[operator] for operator in operators]
    paths = [operator.outputs[0].removesuffix("/unshifted").split(".") for operator in operators]
    for depth in range(max(map(len, paths)), 0, -1):
        # An operator's last name is its own; those above it are modules.
        keys = [tuple(path[: min(depth, max(len(path) - 1, 1))]) for path in paths]
        parts = [
            [operator for _, operator in pairs]
            for _, pairs in groupby(zip(keys, operators, strict=True), key=lambda pair: pair[0])
        ]
        if len(parts) <= most:
            return parts
    size = -(-len(parts) // most)
    return [
        [operator for part in parts[start : start + size] for operator in part] for start in range(0, len(parts), size)
    ]


def _row(graph: Graph, part: Sequence[Operator], bits: Mapping[str, str], sources: tuple[int, ...]) -> Row:
    work = sum(graph.multiply_accumulates(operator) for operator in part)
    names = tuple(name for operator in part for name in operator.outputs)
    last = names[-1].removesuffix("/unshifted")
    if len(part) == 1:
        operator = part[0]
        color = WEIGHTED if work else MOVING if OPERATORS[operator.kind].same_quantization else COMPUTING
        return Row(
            _title(graph, operator), last, _shape(graph, names[-1]), bits.get(names[0], ""), work, color, sources, names
        )
    said = list(dict.fromkeys(bits[name] for name in names if bits.get(name)))
    first = names[0].removesuffix("/unshifted")
    return Row(
        f"{len(part)} operators: {_counted(part)}",
        _together(first, last),
        _shape(graph, names[-1]),
        said[0] if len(said) == 1 else "",
        work,
        WEIGHTED if work else COMPUTING,
        sources,
        names,
    )


def _title(graph: Graph, operator: Operator) -> str:
    """The kind with its window, and what is fused into it."""
    title = operator.kind
    attributes = operator.attributes
    shapes = [graph.tensors[name].shape for name in operator.inputs if graph.tensors[name].data is not None]
    window = attributes.get("filter_size") or attributes.get("window")
    if window is None and shapes and len(shapes[0]) == 4 and operator.kind.endswith(("CONV_2D", "CONV")):
        window = shapes[0][1:3]
    if window:
        title += f" {'x'.join(map(str, window))}"
    strides = attributes.get("strides")
    if strides and max(strides) > 1:
        title += f" /{max(strides)}"
    activation = attributes.get("activation", "NONE")
    return title if activation == "NONE" else f"{title} + {activation}"


def _counted(part: Sequence[Operator]) -> str:
    kinds: dict[str, int] = {}
    for operator in part:
        kinds[operator.kind] = kinds.get(operator.kind, 0) + 1
    ordered = sorted(kinds.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in ordered)


def _together(first: str, last: str) -> str:
    """The common module of two paths, or both paths if they have none."""
    common = []
    for one, other in zip(first.split(".")[:-1], last.split(".")[:-1], strict=False):
        if one != other:
            break
        common.append(one)
    return ".".join(common) or f"{first} … {last}"


def ways(drawn: Sequence[Row]) -> list[int]:
    """For each row, the path of its result: tensors needed at the same time take different paths."""
    last_read = list(range(len(drawn)))
    for number, row in enumerate(drawn):
        for source in row.sources:
            last_read[source] = number
    taken: dict[int, int] = {}
    places: list[int] = []
    for number, row in enumerate(drawn):
        free = sorted(taken[source] for source in row.sources if last_read[source] == number)
        for source in [source for source in taken if last_read[source] <= number]:
            del taken[source]
        busy = set(taken.values())
        candidates = [place for place in free if place not in busy]
        place = candidates[0] if candidates else next(place for place in range(len(drawn) + 1) if place not in busy)
        places.append(place)
        taken[number] = place
    return places


def _figure(graph: Graph, drawn: Sequence[Row], caption: str) -> dict[str, Any]:
    """What `templates/layer_graph.html` draws: boxes, dots, and the lines between them."""
    places = ways(drawn)
    most = max(places, default=0) + 1
    gap = min(WAY_GAP, WAYS_WIDTH / max(most - 1, 1))
    x = [FIRST_WAY + place * gap for place in places]
    y = [number * ROW + BOX / 2 + 3 for number in range(len(drawn))]
    left = FIRST_WAY + (most - 1) * gap + 12
    work = sum(row.work or 0 for row in drawn)
    lines, boxes = [], []
    for number, row in enumerate(drawn):
        for source in row.sources:
            # Down its own path, then over to the reader, in the gap above it.
            turn = y[number] - ROW * 0.55
            way = f"M{x[source]:.1f} {y[source]:.1f}V{turn:.1f}"
            over = f"C{x[source]:.1f} {y[number]:.1f} {x[number]:.1f} {turn:.1f} {x[number]:.1f} {y[number]:.1f}"
            lines.append(way + (f"V{y[number]:.1f}" if x[source] == x[number] else over))
        boxes.append({"x": x[number], "y": y[number], **_box(row, graph, left, work)})
    return {"caption": caption, "height": len(drawn) * ROW, "left": left, "lines": lines, "boxes": boxes}


def _box(row: Row, graph: Graph, left: float, work: int) -> dict[str, Any]:
    """The texts of a box, as far as they fit, its colors, and the length of its bar."""
    width = WIDTH - left - 3
    share = (row.work or 0) / work if work else 0.0
    is_output = bool(set(graph.outputs).intersection((*row.operators, row.name)))
    # A share that would round to nothing is left out.
    percent = f"{share:.1%}" if share >= 0.0005 else ""
    shape = f"{row.shape}{' → output' if is_output and row.work is not None else ''}{' · ' if percent else ''}{percent}"
    hover = [row.title, row.name, row.shape, *([row.bits] if row.bits else [])]
    hover += [f"{row.work:,} multiply-adds ({share:.1%})"] if row.work else []
    is_end = is_output or row.work is None
    return {
        "title": _fitting(row.title, width - 24 - SMALL_LETTER * len(row.bits), LETTER),
        "name": _fitting(row.name, width - 24 - SMALL_LETTER * (len(shape) + 3), SMALL_LETTER, tail=True),
        "bits": row.bits,
        "shape": shape,
        "hover": " · ".join(hover),
        "bar": share * (width - 4) if percent else 0.0,
        "color": variable(row.color),
        "fill": variable(PAPER if is_end else row.color),
        "radius": 5 if is_end else 3.5,
    }


def _fitting(text: str, room: float, letter: float, tail: bool = False) -> str:
    """As much of a text as fits; for a path its end, which distinguishes it from its neighbours."""
    most = max(int(room / letter), 4)
    text = shortened(text, max(len(text), most) * 10)
    if len(text) <= most:
        return text
    return "…" + text[1 - most :] if tail else text[: most - 1] + "…"
