# SPDX-License-Identifier: Apache-2.0
"""Recorded answers of TensorFlow: how the files beside this one are written and read.

`<family>.npz` holds, without pickle, one flat array per dtype and the entry `index`: JSON text (as bytes) that says
where in them each operand and output of each case begins. Arrays of equal content are stored once. The bytes of a file
depend on its contents only. `signatures.json` holds TensorFlow's signatures, `errors.json` which bad calls it
refuses, `manners.json` what it makes of arguments in other forms (manners.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["FOLDER", "Golden", "Goldens", "load", "load_json", "save", "save_json"]

FOLDER = Path(__file__).parent


class Golden(NamedTuple):
    """One recorded call."""

    operands: dict[str, np.ndarray]
    attributes: dict[str, Any]
    outputs: dict[str, np.ndarray]


class Goldens(NamedTuple):
    """All recorded calls of a family, and the versions and machine they were recorded with."""

    cases: dict[str, Golden]
    recorded_with: dict[str, Any]


@lru_cache
def load(family: str) -> Goldens:
    """The goldens of a family. Raises FileNotFoundError if they have not been recorded."""
    with np.load(FOLDER / f"{family}.npz", allow_pickle=False) as file:
        index = json.loads(file["index"].tobytes())
        flat = {name: file[name] for name in file.files if name != "index"}

    def read(places: dict[str, list[Any]]) -> dict[str, np.ndarray]:
        arrays = {}
        for name, (dtype, shape, start) in places.items():
            arrays[name] = flat[dtype][start : start + math.prod(shape)].reshape(shape)
        return arrays

    cases = {
        name: Golden(read(entry["operands"]), entry["attributes"], read(entry["outputs"]))
        for name, entry in index["cases"].items()
    }
    return Goldens(cases, index["recorded_with"])


def save(family: str, goldens: Goldens) -> None:
    """Writes the goldens of a family."""
    flat: dict[str, list[np.ndarray]] = {}
    lengths: dict[str, int] = {}
    stored: dict[tuple[str, bytes], int] = {}

    def write(arrays: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
        places = {}
        for name, array in arrays.items():
            dtype, content = array.dtype.name, array.tobytes()
            if (dtype, content) not in stored:
                stored[dtype, content] = lengths.get(dtype, 0)
                lengths[dtype] = stored[dtype, content] + array.size
                flat.setdefault(dtype, []).append(array.reshape(-1))
            places[name] = [dtype, list(array.shape), stored[dtype, content]]
        return places

    entries = {
        name: {
            "attributes": golden.attributes,
            "operands": write(golden.operands),
            "outputs": write(golden.outputs),
        }
        for name, golden in goldens.cases.items()
    }
    index = {"recorded_with": goldens.recorded_with, "cases": entries}
    text = json.dumps(index, separators=(",", ":")).encode()
    arrays = {dtype: np.concatenate(parts) for dtype, parts in flat.items()}
    np.savez_compressed(FOLDER / f"{family}.npz", index=np.frombuffer(text, np.uint8), **arrays)


def load_json(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def save_json(name: str, content: Mapping[str, Any]) -> None:
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
