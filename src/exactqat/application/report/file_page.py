# SPDX-License-Identifier: Apache-2.0
"""What `exactqat inspect` found in a file, as one page."""

from __future__ import annotations

from ...deploy.inspect import BESIDE_FLOAT, Inspection, beside_float_rows, collapse_in_words, name_in_short
from .page import Cell, Table, differing, render

# Characters of a layer's name.
NAME = 44


def file_page(found: Inspection) -> str:
    """The page's HTML; what the file calls its parts is escaped."""
    ran = [device for device in found.devices if device.values]
    compared, unequal = (sum(getattr(device, what) for device in ran) for what in ("values", "differing"))
    float_rows = [(False, row) for row in beside_float_rows(found, NAME)] if found.beside_float else []
    return render(
        "file.html",
        title=f"{found.name}: what devices compute",
        found=found,
        warnings=_warnings(found),
        figures=[
            (f"{compared:,}", f"integers compared on {len(ran)} of {len(found.devices)} devices"),
            (f"{unequal:,}", "differ from the simulation"),
            (f"{len(found.disagreements):,}", "pairs of devices that differ from each other"),
            (f"{found.multiply_accumulates:,}", "multiply-adds of an example"),
            (f"{found.flash_bytes:,}", "bytes of flash"),
            ("–" if found.arena_bytes is None else f"{found.arena_bytes:,}", "bytes of arena on TFLite-Micro"),
        ],
        devices=_devices(found),
        disagreements=_disagreements(found) if found.disagreements else None,
        layers=_layers(found),
        beside_float=Table("Beside the float network", BESIDE_FLOAT, float_rows, 2, "dense") if float_rows else None,
        collapse=collapse_in_words(found) if float_rows else "",
        words=", ".join(f"{count} {word}" for word, count in sorted(found.words.items())),
    )


def _warnings(found: Inspection) -> list[str]:
    """What readers have to know before the figures."""
    if not found.ran_on:
        return ["No integer was compared: the file ran on no device, or computes in float32"]
    return [
        f"On {device.title}, {device.differing_as_claimed:,} integers are not as simulated where that is claimed"
        for device in found.devices
        if device.differing_as_claimed
    ]


def _devices(found: Inspection) -> Table:
    rows: list[tuple[bool, list[str | Cell]]] = []
    for device in found.devices:
        reason = device.not_run or device.not_simulated
        claimed = "–" if reason else "yes" if all(row.exact for row in device.operators) else "not for all operators"
        cell = Cell("–") if reason else differing(device.differing, device.values)
        rows.append((False, [device.title, reason or "it ran", claimed, cell]))
    caption = f"Each operator, simulated from the operands that the device had, of {found.examples} examples"
    return Table(caption, ("device", "outcome", "equality is claimed", "integers that differ"), rows, 3, "stack wrap")


def _disagreements(found: Inspection) -> Table:
    alike: dict[tuple[str, ...], list[str]] = {}
    for disagreement in found.disagreements:
        row = (
            f"{disagreement.kind} {name_in_short(disagreement.layer, NAME)}",
            disagreement.mechanism.sentence,
            f"{disagreement.differing:,} of {disagreement.values:,}",
            f"{disagreement.outputs_differing:,} of {disagreement.output_values:,}",
        )
        alike.setdefault(row, []).append(" / ".join(disagreement.profiles))
    rows = [(False, ("; ".join(pairs), *row)) for row, pairs in alike.items()]
    header = ("devices", "from", "because of", "codes there", "codes of the outputs")
    return Table("Pairs of devices, and the first layer in which they differ", header, rows, 3, "stack wrap")


def _layers(found: Inspection) -> Table:
    ran = [device for device in found.devices if device.values]
    by_device = [{row.name: row for row in device.operators} for device in ran]
    first = {disagreement.layer for disagreement in found.disagreements}
    rows: list[tuple[bool, list[str | Cell]]] = []
    for number, layer in enumerate(found.layers):
        cells: list[str | Cell] = [str(number), name_in_short(layer.result, NAME), layer.kind]
        cells += ["x".join(map(str, layer.shape)), layer.dtype]
        cells += ["–" if layer.weight_bits is None else str(layer.weight_bits), f"{layer.multiply_accumulates:,}"]
        for results in by_device:
            row = results.get(layer.result)
            cells.append(Cell("–") if row is None else differing(row.differing, row.values))
        rows.append((layer.result in first, cells))
    header = ["number", "result", "operator", "shape", "stored in", "bits of weights", "multiply-adds"]
    caption = "Layers" + ("; marked: the first in which two devices differ" if first else "")
    return Table(caption, [*header, *(f"differ on {device.profile}" for device in ran)], rows, 5, "dense")


__all__ = ["file_page"]
