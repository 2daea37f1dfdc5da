# SPDX-License-Identifier: Apache-2.0
"""A receipt of a delivered network: what was delivered, and digests of what each of its layers must compute on a few
inputs, which a short C routine compares on the board. It names the first layer that computes something else."""

from __future__ import annotations

import hashlib
import json
import os
import re
import string
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..kit.device import Profile, profile_named
from ..kit.device.profile import DEFAULT_PROFILE
from ..kit.display import Finding, aligned, shortened
from .comparing import own_end
from .formats.c_array import MADE_BY, array_lines, check_identifier, literal
from .formats.read_tflite import to_file
from .formats.tflite import positions_of, tflite_bytes, write_whole
from .graph import Graph
from .random_inputs import random_codes
from .simulate import COMPARED_ON, check_inputs, simulate, unclaimed

# The version of the files; how many inputs are digested by default; what means the file in place of a tensor.
FORMAT, EXAMPLES, FILE = 1, 4, -1


@dataclass(frozen=True)
class Row:
    """What is digested.

    Attributes:
        name: of a tensor; of the file "model".
        kind: "file", "input", or the operator that computes the tensor.
        tensor: its number in the file; -1: the file itself.
        bytes: of one example.
        digest: CRC-32 of these bytes, of all examples in order.
    """

    name: str
    kind: str
    tensor: int
    bytes: int
    digest: int


@dataclass(frozen=True, repr=False)
class Receipt(Finding):
    """What `receipt` returns.

    Attributes:
        device: whose arithmetic computed the layers.
        trained_for: the device that training computed for; "": unknown.
        sha256: of the .tflite file.
        rows: the file, then inputs and layers in order of execution.
        examples: how many were digested.
        compared_on: the runtime, with its version, on which the device's arithmetic was compared; "": none.
        unclaimed: operators for which no equality with it is claimed.
        accuracy: on the device; None: not known.
        inputs: the examples as the file takes them, [examples, ...] by name.
    """

    device: str
    trained_for: str
    sha256: str
    rows: tuple[Row, ...]
    examples: int
    compared_on: str
    unclaimed: tuple[str, ...]
    accuracy: float | None
    inputs: Mapping[str, np.ndarray]

    def as_json(self) -> str:
        """All of it but the inputs."""
        content: dict[str, Any] = {"exactqat_receipt": FORMAT, "exactqat": __version__, **vars(self)}
        del content["inputs"]
        content["rows"] = [{**asdict(row), "digest": f"{row.digest:08x}"} for row in self.rows]
        return json.dumps(content, indent=2)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes `as_json`, and returns the path."""
        return write_whole(Path(path), f"{self.as_json()}\n".encode())

    def text(self) -> str:
        good = "" if self.accuracy is None else f", {self.accuracy:.2%} right"
        lines = [f"{self.device}: {len(self.rows)} digests of {self.examples} examples{good}; sha256 {self.sha256}"]
        rows = [(shortened(row.name), row.kind, f"{row.bytes:,}", f"{row.digest:08x}") for row in self.rows]
        return "\n".join([*lines, *aligned([("tensor", "kind", "bytes", "digest"), *rows], (0, 1))])

    def c_source(self, name: str = "model") -> str:
        """A C header (C99 or C++) with the digests, the inputs, and the routine that compares them on a board.

        Args:
            name: prefix of every name in it.

        Raises:
            ValueError: it is not a C identifier.
        """
        check_identifier(name)
        rows = [f"  {{{row.tensor}, {row.bytes}u, 0x{row.digest:08x}u, {literal(row.name)}}}," for row in self.rows]
        inputs = []
        for number, codes in enumerate(self.inputs.values()):
            inputs.append(f"#define {name.upper()}_RECEIPT_INPUT_{number}_BYTES {codes.nbytes // self.examples}")
            content = np.frombuffer(codes.tobytes(), np.uint8)
            inputs += array_lines(f"static const unsigned char {name}_receipt_input_{number}", content)
        return string.Template(_C).substitute(
            about=re.sub(r"[^ -~]", "?", f"{MADE_BY}: a receipt for {self.device}, sha256 {self.sha256}. Do not edit."),
            name=name, upper=name.upper(), examples=self.examples, count=len(rows), rows="\n".join(rows),
            inputs="\n".join(inputs),
        )  # fmt: skip


_C = """\
$about
#ifndef ${upper}_RECEIPT_H_
#define ${upper}_RECEIPT_H_
#include <stdint.h>

#define ${upper}_RECEIPT_EXAMPLES $examples
#define ${upper}_RECEIPT_ROWS $count

// The examples, one after another.
$inputs

// What each tensor (its number in the file; -1: the file) must hold, in order of execution.
static const struct {
  int32_t tensor;
  uint32_t bytes, digest;
  const char* name;
} ${name}_receipt_rows[${upper}_RECEIPT_ROWS] = {
$rows
};

// To be called once with -1 and the file, and after each example with each tensor's number and its bytes, in any order.
// Others than those above are ignored. Begin with digests[${upper}_RECEIPT_ROWS] of 0.
static inline void ${name}_receipt_add(uint32_t* digests, int32_t tensor, const void* data, uint32_t bytes) {
  int row = 0, bit;
  const uint8_t* at = (const uint8_t*)data;
  uint32_t digest;
  while (row < ${upper}_RECEIPT_ROWS && ${name}_receipt_rows[row].tensor != tensor) ++row;
  if (row == ${upper}_RECEIPT_ROWS) return;
  digest = ~digests[row];
  while (bytes--) {
    digest ^= *at++;
    for (bit = 0; bit < 8; ++bit) digest = (digest >> 1) ^ (0xedb88320u & (0u - (digest & 1u)));
  }
  digests[row] = ~digest;
}

// The name of the first row that differs; 0: none does.
static inline const char* ${name}_receipt_first_wrong(const uint32_t* digests) {
  int row;
  for (row = 0; row < ${upper}_RECEIPT_ROWS; ++row) {
    if (digests[row] != ${name}_receipt_rows[row].digest) return ${name}_receipt_rows[row].name;
  }
  return 0;
}

#endif  // ${upper}_RECEIPT_H_
"""


def receipt(
    graph: Graph,
    x: np.ndarray | Mapping[str, np.ndarray] | None = None,
    device: str | Profile | None = None,
    content: bytes | None = None,
    accuracy: float | None = None,
    examples: int = EXAMPLES,
    seed: int = 0,
) -> Receipt:
    """Digests what every layer of a network computes on some inputs, by the exact simulation of a device.

    Args:
        x: codes [examples, ...], or one such array per input name, as `simulate` takes them; None: random ones.
        device: that the network will run on; by default the one that it was trained for.
        content: of its .tflite file; by default what `write_tflite` writes.
        accuracy: on the device, to be recorded.
        examples: how many random ones; seed: of these.

    Raises:
        ValueError: there are no examples, or the file lacks a tensor of the graph's.
    """
    profile = profile_named(device or graph.trained_for or DEFAULT_PROFILE)
    content = tflite_bytes(graph) if content is None else content
    inputs = check_inputs(graph, random_codes(graph, range(examples), seed) if x is None else x)
    count = len(next(iter(inputs.values())))
    if count == 0:
        raise ValueError("x contains no examples, so there is nothing to digest")
    kinds = {name: "input" for name in graph.inputs}
    kinds |= {name: operator.kind for operator in graph.operators for name in operator.outputs}
    digests, sizes, state = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0), dict[str, np.ndarray]()
    for at in range(count):  # as a device does, one after another
        one = {name: codes[at : at + 1] for name, codes in inputs.items()}
        memory = state if graph.variables else None
        results = simulate(graph, one, profile, graph.results(), progress=False, state=memory)
        for name in kinds:
            held = _bytes(graph, name, one.get(name, results.get(name)))
            digests[name], sizes[name] = zlib.crc32(held, digests[name]), len(held)
    rows = [Row("model", "file", FILE, len(content), zlib.crc32(content))]
    for name, tensor in zip(kinds, positions_of(content, tuple(kinds)), strict=True):
        rows.append(Row(name, kinds[name], tensor, sizes[name], digests[name]))
    stored = {name: np.frombuffer(_bytes(graph, name, codes), np.uint8) for name, codes in inputs.items()}
    return Receipt(
        profile.name, graph.trained_for, hashlib.sha256(content).hexdigest(), tuple(rows), count,
        COMPARED_ON.get(profile.name, ""), unclaimed(graph, profile), accuracy, stored,
    )  # fmt: skip


def _bytes(graph: Graph, name: str, codes: np.ndarray | None) -> bytes:
    """As they lie in a device's memory."""
    assert codes is not None
    stored = to_file(graph, codes, own_end(graph, name))
    return stored.astype(stored.dtype.newbyteorder("<")).tobytes()
