# SPDX-License-Identifier: Apache-2.0
"""TFLite-Micro's interpreter on one model; tensors are addressed by name."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...kit.device import Profile
from ..formats.tflite import import_deploy
from .litert import indices_of
from .trial import RuntimeRefusal, try_in_a_child


class Micro:
    """TFLite-Micro's interpreter, which takes one example at a time and identifies tensors by position."""

    module = "tflite_micro"

    def __init__(
        self,
        content: bytes,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        profile: Profile,
        in_order: bool = False,
    ) -> None:
        runtime = self.interpreters()
        schema = import_deploy("ai_edge_litert.schema_py_generated")
        subgraph = schema.ModelT.InitFromPackedBuf(content).subgraphs[0]
        names = [(tensor.name or b"").decode("utf-8", "replace") for tensor in subgraph.tensors]
        self.inputs, self.outputs = (
            indices_of([{"name": names[at], "index": place} for place, at in enumerate(side)], wanted, in_order)
            for side, wanted in ((subgraph.inputs, inputs), (subgraph.outputs, outputs))
        )
        shapes = [() if tensor.shape is None else tuple(map(int, tensor.shape)) for tensor in subgraph.tensors]
        self.taken, self.shapes = ([shapes[index] for index in side] for side in (subgraph.inputs, subgraph.outputs))
        try:
            self.interpreter: Any = runtime.Interpreter.from_bytes(content, arena_size=_arena(subgraph))
        except RuntimeError as error:
            # Its exceptions give no reason; it prints that to the process's standard error.
            said = try_in_a_child(_take, content, _arena(subgraph)).splitlines()
            reason = next((line for line in said if line.strip()), str(error))
            raise RuntimeRefusal(f"TFLite-Micro rejects the file: {reason}") from error

    @staticmethod
    def interpreters() -> Any:
        """TFLite-Micro's interpreter, which no extra installs: it only has pre-releases."""
        try:
            return importlib.import_module("tflite_micro").runtime
        except ImportError as error:
            raise ImportError(f"this needs tflite_micro: pip install --pre tflite-micro ({error})") from error

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self.outputs}
        # The rows that the file takes at a time; a scalar has none.
        rows = {name: (self.taken[position] or (0,))[0] for name, position in self.inputs.items()}
        first = next(iter(rows))
        for example in range(len(batch[first]) // rows[first] if rows[first] else 1):
            for name, position in self.inputs.items():
                start = example * rows[name]
                codes = batch[name][start : start + rows[name]] if rows[name] else batch[name]
                self.interpreter.set_input(codes.copy(), position)
            try:
                self.interpreter.invoke()
            except RuntimeError as error:
                raise RuntimeRefusal(f"TFLite-Micro fails to run the file: {error}") from error
            for name, position in self.outputs.items():
                found = np.array(self.interpreter.get_output(position))
                if found.shape != self.shapes[position]:  # it has room for the file's shape alone
                    raise RuntimeRefusal(
                        f"TFLite-Micro computes the shape {list(found.shape)} for {name!r}, for which the file has "
                        f"{list(self.shapes[position])} (convert the model with a fixed batch)"
                    )
                parts[name].append(found)
        return {name: np.concatenate(part) if part[0].ndim else part[0] for name, part in parts.items()}


def _take(content: bytes, arena: int) -> None:
    Micro.interpreters().Interpreter.from_bytes(content, arena_size=arena)


def _arena(subgraph: Any) -> int:
    """Bytes for all tensors at once, with their bookkeeping."""
    sizes = [math.prod(tensor.shape) * 8 if tensor.shape is not None else 8 for tensor in subgraph.tensors]
    return int(sum(sizes)) + 1024 * len(sizes) + (1 << 20)
