# SPDX-License-Identifier: Apache-2.0
"""What `exactqat inspect` found in a file, as one page."""

from __future__ import annotations

from collections.abc import Sequence

from ..deploy.inspect import (
    BESIDE_FLOAT,
    DeviceFindings,
    Inspection,
    beside_float_rows,
    collapse_in_words,
    name_in_short,
)
from .page import cards, escape, page, section, table, warnings

# Characters of a layer's name.
NAME = 44


def file_page(found: Inspection) -> str:
    """The page's HTML; what the file calls its parts is escaped."""
    ran = [device for device in found.devices if device.values]
    compared, differing = (sum(getattr(device, what) for device in ran) for what in ("values", "differing"))
    figures = [
        (f"{compared:,}", f"integers compared on {len(ran)} of {len(found.devices)} devices"),
        (f"{differing:,}", "differ from the simulation"),
        (f"{len(found.disagreements):,}", "pairs of devices that differ from each other"),
        (f"{found.multiply_accumulates:,}", "multiply-adds of an example"),
        (f"{found.flash_bytes:,}", "bytes of flash"),
        ("–" if found.arena_bytes is None else f"{found.arena_bytes:,}", "bytes of arena on TFLite-Micro"),
    ]
    parts = [
        f"<h1>{escape(found.name)}</h1>",
        f"<p class='lead'>{escape(found.description or 'no description')}</p>",
        warnings(_warnings(found)),
        cards(figures),
        section("Devices", _devices(found)),
    ]
    if found.disagreements:
        parts.append(section("Where devices differ from each other, and why", _disagreements(found), "prose"))
    parts.append(section("Layers", _layers(found, ran), "layers"))
    if found.beside_float:
        rows = [(False, row) for row in beside_float_rows(found, NAME)]
        note = f"<p>{escape(collapse_in_words(found))}</p>"
        parts.append(section("Beside the float network", note + table(BESIDE_FLOAT, rows, 2), "layers"))
    parts.append(section("What it takes and returns", _ends(found), "prose"))
    return page(f"{found.name}: what devices compute", "".join(parts))


def _warnings(found: Inspection) -> list[str]:
    """What readers have to know before the figures."""
    if not found.ran_on:
        return ["No integer was compared: the file ran on no device, or computes in float32"]
    return [
        f"On {device.title}, {device.differing_as_claimed:,} integers are not as simulated where that is claimed"
        for device in found.devices
        if device.differing_as_claimed
    ]


def _devices(found: Inspection) -> str:
    rows = []
    for device in found.devices:
        reason = device.not_run or device.not_simulated
        claimed = "–" if reason else "yes" if all(row.exact for row in device.operators) else "not for all operators"
        counts = ("–", "–") if reason else (f"{device.values:,}", f"{device.differing:,}")
        rows.append((False, (device.title, reason or "it ran", claimed, *counts)))
    header = ("device", "", "equality is claimed", "integers", "differ")
    return f"<div class='prose'>{table(header, rows, 3)}</div><p class='note'>Each operator is simulated from the " \
           f"operands that the device had, of {found.examples} examples.</p>"  # fmt: skip


def _disagreements(found: Inspection) -> str:
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in found.disagreements:
        row = (
            f"{each.kind} {name_in_short(each.layer, NAME)}",
            each.mechanism.sentence,
            f"{each.differing:,} of {each.values:,}",
            f"{each.outputs_differing:,} of {each.output_values:,}",
        )
        alike.setdefault(row, []).append(" / ".join(each.profiles))
    rows = [(False, ("; ".join(pairs), *row)) for row, pairs in alike.items()]
    return table(("devices", "from", "because of", "codes there", "codes of the outputs"), rows, 3)


def _layers(found: Inspection, ran: Sequence[DeviceFindings]) -> str:
    by_device = [{row.name: row for row in device.operators} for device in ran]
    first = {each.layer for each in found.disagreements}
    rows = []
    for number, layer in enumerate(found.layers):
        cells = [
            str(number),
            name_in_short(layer.result, NAME),
            layer.kind,
            "x".join(map(str, layer.shape)),
            layer.dtype,
        ]
        cells += ["–" if layer.weight_bits is None else str(layer.weight_bits), f"{layer.multiply_accumulates:,}"]
        for results in by_device:
            row = results.get(layer.result)
            cells.append("–" if row is None or not row.values else f"{row.differing:,} of {row.values:,}")
        rows.append((layer.result in first, cells))
    header = ["", "result", "operator", "shape", "stored in", "bits of weights", "multiply-adds"]
    note = "Marked: the first layer in which two devices differ." if first else ""
    table_of = table([*header, *(f"differ on {device.profile}" for device in ran)], rows, 5)
    return f"{table_of}<p class='note'>{note}</p>"


def _ends(found: Inspection) -> str:
    lines = [f"takes {end}" for end in found.inputs] + [f"returns {end}" for end in found.outputs]
    words = ", ".join(f"{count} {word}" for word, count in sorted(found.words.items()))
    return "".join(f"<p>{escape(line)}</p>" for line in [*lines, f"Operators of the file: {words}"])


__all__ = ["file_page"]
