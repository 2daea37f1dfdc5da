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
    """Interpreters by number."""

    def __init__(self) -> None:
        self.interpreters: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}

    def load(self, header: dict[str, Any], arrays: list[np.ndarray]) -> tuple[dict[str, Any], list[np.ndarray]]:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        resolver = OpResolverType.BUILTIN_REF if header["reference"] else OpResolverType.AUTO
        content = arrays[0].tobytes()
        interpreter = Interpreter(model_content=content, experimental_op_resolver_type=resolver, num_threads=1)
        self.interpreters[header["model"]] = interpreter
        details = {"inputs": interpreter.get_input_details(), "outputs": interpreter.get_output_details()}
        return {
            side: [{"name": detail["name"], "index": int(detail["index"])} for detail in entries]
            for side, entries in details.items()
        }, []

    def run(self, header: dict[str, Any], arrays: list[np.ndarray]) -> tuple[dict[str, Any], list[np.ndarray]]:
        interpreter = self.interpreters[header["model"]]
        if self.sizes.get(header["model"]) != arrays[0].shape[0]:
            for index, array in zip(header["inputs"], arrays, strict=True):
                interpreter.resize_tensor_input(index, array.shape)
            interpreter.allocate_tensors()
            self.sizes[header["model"]] = arrays[0].shape[0]
        for index, array in zip(header["inputs"], arrays, strict=True):
            interpreter.set_tensor(index, array)
        interpreter.invoke()
        return {}, [interpreter.get_tensor(index) for index in header["outputs"]]

    def drop(self, header: dict[str, Any], arrays: list[np.ndarray]) -> tuple[dict[str, Any], list[np.ndarray]]:
        self.interpreters.pop(header["model"], None)
        self.sizes.pop(header["model"], None)
        return {}, []


def main() -> None:
    """Answers until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    # What libraries print must not mix with the answers.
    os.dup2(2, 1)
    models = _Models()
    while (message := read(sys.stdin.buffer)) is not None:
        header, arrays = message
        try:
            answer, results = getattr(models, header["request"])(header, arrays)
        except (RuntimeError, ValueError) as error:
            answer, results = {"error": str(error)}, []
        write(answers, answer, results)


if __name__ == "__main__":
    main()
