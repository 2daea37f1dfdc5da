# SPDX-License-Identifier: Apache-2.0
"""TFLite-Micro's interpreter on one model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...kit.device import Profile
from ..formats.tflite import Table, file_schema, import_deploy
from .trial import RuntimeRefusal, try_in_a_child


class Micro:
    """The interpreter, which takes one example at a time; arrays are in the file's order."""

    def __init__(self, content: bytes, profile: Profile) -> None:
        subgraph = file_schema().ModelT.InitFromPackedBuf(content).subgraphs[0]
        shapes = [() if tensor.shape is None else tuple(map(int, tensor.shape)) for tensor in subgraph.tensors]
        self.taken = [shapes[at] for at in subgraph.inputs]
        self.returned = [(subgraph.tensors[at].name, shapes[at]) for at in subgraph.outputs]
        # Room for all tensors at once, with their bookkeeping.
        arena = sum(math.prod(shape) * 8 + 1024 for shape in shapes) + (1 << 20)
        try:
            self.interpreter = _interpreter(content, arena)
        except RuntimeError as error:
            # Its exceptions give no reason; it prints that to the process's standard error.
            said = try_in_a_child(_interpreter, content, arena).splitlines()
            reason = next((line for line in said if line.strip()), str(error))
            raise RuntimeRefusal(f"TFLite-Micro rejects the file: {reason}") from error

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        # The rows that the file takes at a time; a scalar has none.
        counts = [(shape or (0,))[0] for shape in self.taken]
        parts: list[list[np.ndarray]] = [[] for _ in self.returned]
        for example in range(len(arrays[0]) // counts[0] if counts[0] else 1):
            for position, (array, rows) in enumerate(zip(arrays, counts, strict=True)):
                codes = array[example * rows : (example + 1) * rows] if rows else array
                self.interpreter.set_input(codes.copy(), position)
            try:
                self.interpreter.invoke()
            except RuntimeError as error:
                raise RuntimeRefusal(f"TFLite-Micro fails to run the file: {error}") from error
            for position, (name, shape) in enumerate(self.returned):
                result = np.array(self.interpreter.get_output(position))
                if result.shape != shape:  # it has room for the file's shape alone
                    raise RuntimeRefusal(
                        f"TFLite-Micro computes the shape {list(result.shape)} for {(name or b'').decode()!r}, for "
                        f"which the file has {list(shape)} (convert the model with a fixed batch)"
                    )
                parts[position].append(result)
        return [np.concatenate(results) if results[0].ndim else results[0] for results in parts]


def _interpreter(content: bytes, arena: int) -> Table:
    runtime = import_deploy("tflite_micro", "micro").runtime
    return runtime.Interpreter.from_bytes(content, arena_size=arena)
