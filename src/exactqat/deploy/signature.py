# SPDX-License-Identifier: Apache-2.0
"""A network's inputs and outputs as the user knows them: names and axes.

A `Graph` contains its `Signature`, and so do files: names in the .tflite file's SignatureDef ``serving_default`` and
in the .onnx file itself, and all of it as JSON under the name "exactqat" in their metadata.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from ..kit.device.tensor import Tensor

KEY = "serving_default"
METADATA = "exactqat"
_FORMAT = 1


@dataclass(frozen=True)
class Port:
    """One input or output of a network.

    Attributes:
        name: the user's: an argument, a key of a dictionary, an input layer.
        tensor: the graph's tensor.
        axes: for each axis of that tensor, the user's axis: (0, 2, 3, 1) for a user's [N, C, H, W] stored as
            [N, H, W, C] in the graph. The batch comes first in the graph.
        outside: operations on an output that the model performs and the graph does not, such as "softmax over axis 1"
            (of the user's axes), in order.
        limits: for an input of fewer bits, its lowest and highest allowed code.
    """

    name: str
    tensor: str
    axes: tuple[int, ...]
    outside: tuple[str, ...] = ()
    limits: tuple[int, int] | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """For each of the user's axes, the tensor's axis."""
        return tuple(self.axes.index(axis) for axis in range(len(self.axes)))

    def to_graph(self, array: np.ndarray) -> np.ndarray:
        """Converts an array from the user's axes to the graph's."""
        return np.ascontiguousarray(array.transpose(self.axes))

    def to_user(self, array: np.ndarray) -> np.ndarray:
        """Converts an array from the graph's axes to the user's."""
        return np.ascontiguousarray(array.transpose(self.order))

    def described(self, tensor: Tensor) -> str:
        """One readable line: ``image [N, 3, 32, 32] as [N, 32, 32, 3]``."""
        sizes: list[object] = ["N" if tensor.shape[0] == 1 else f"{tensor.shape[0]}*N", *tensor.shape[1:]]
        yours = ", ".join(str(sizes[at]) for at in self.order)
        lies = "" if self.axes == tuple(range(len(self.axes))) else f" as [{', '.join(map(str, sizes))}]"
        left = "".join(f"; {operation} is applied outside" for operation in self.outside)
        return f"{self.name} [{yours}]{lies}{left}"


@dataclass(frozen=True)
class Signature:
    """A network's inputs and outputs in the user's order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def as_json(self) -> str:
        """For a file's metadata."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, separators=(",", ":"), ensure_ascii=True)

    @staticmethod
    def from_json(text: str | bytes) -> Signature:
        """The inverse of `as_json`.

        Raises:
            ValueError: the format is unknown, or the text is damaged.
        """
        try:
            content = json.loads(text)
            version = content["format"]
            sides = [
                tuple(
                    Port(
                        str(entry["name"]),
                        str(entry["tensor"]),
                        tuple(int(axis) for axis in entry["axes"]),
                        tuple(map(str, entry["outside"])),
                        None if entry["limits"] is None else (int(entry["limits"][0]), int(entry["limits"][1])),
                    )
                    for entry in content[side]
                )
                for side in ("inputs", "outputs")
            ]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"the file's metadata about its inputs and outputs is damaged: {error}") from error
        if version != _FORMAT:
            raise ValueError(f"the file's metadata has format {version!r}; this version reads {_FORMAT}")
        for port in (*sides[0], *sides[1]):
            if sorted(port.axes) != list(range(len(port.axes))):
                raise ValueError(f"the file's metadata is damaged: {port.name!r} has the axes {port.axes}")
        return Signature(*sides)
