# SPDX-License-Identifier: Apache-2.0
"""LiteRT driven through a pipe: what the emulated processor runs, see `emulation`. Independent of this package.

A message is eight bytes of length and an .npz archive: `header` (JSON in bytes) and arrays by number. Requests load a
model, run it or drop it; every request has one answer, with `error` in its header if it failed.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import IO, Any

import numpy as np


def write(stream: IO[bytes], header: dict[str, Any], arrays: list[np.ndarray]) -> None:
    """Sends one message."""
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    named: dict[str, Any] = {"header": text, **{str(number): array for number, array in enumerate(arrays)}}
    np.savez(buffer, **named)
    stream.write(len(buffer.getvalue()).to_bytes(8, "little") + buffer.getvalue())
    stream.flush()


def read(stream: IO[bytes]) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Receives one message; None if the other side has gone."""
    length = stream.read(8)
    if len(length) < 8:
        return None
    content = stream.read(int.from_bytes(length, "little"))
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        header = json.loads(archive["header"].tobytes())
        return header, [archive[str(number)] for number in range(len(archive.files) - 1)]


class _Models:
    """Interpreters by number, with the batch that each is ready for."""

    def __init__(self) -> None:
        self.interpreters: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}

    def load(self, number: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
        from ai_edge_litert.interpreter import Interpreter

        self.interpreters[number] = Interpreter(model_content=arrays[0].tobytes(), num_threads=1)
        return []

    def run(self, number: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
        interpreter = self.interpreters[number]
        inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
        if self.sizes.get(number) != arrays[0].shape[0]:
            for detail, array in zip(inputs, arrays, strict=True):
                interpreter.resize_tensor_input(detail["index"], array.shape)
            interpreter.allocate_tensors()
            self.sizes[number] = arrays[0].shape[0]
        for detail, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(detail["index"], array)
        interpreter.invoke()
        return [interpreter.get_tensor(detail["index"]) for detail in outputs]

    def drop(self, number: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
        self.interpreters.pop(number, None)
        self.sizes.pop(number, None)
        return []


def main() -> None:
    """Answers until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    # What libraries print must not mix with the answers.
    os.dup2(2, 1)
    models = _Models()
    while (message := read(sys.stdin.buffer)) is not None:
        header, arrays = message
        try:
            write(answers, {}, getattr(models, header["request"])(header["model"], arrays))
        except (RuntimeError, ValueError) as error:
            write(answers, {"error": str(error)}, [])


if __name__ == "__main__":
    main()
