# SPDX-License-Identifier: Apache-2.0
"""A network's inputs and outputs as the user knows them: names and axes.

A `Graph` contains its `Signature`, and so do files: names in the .tflite file's SignatureDef ``serving_default`` and
in the .onnx file itself, all of it as JSON under the name "exactqat" in their metadata. `input_codes` and
`output_values` convert between the user's arrays and the graph's integers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device.tensor import CODE_RANGES, RAW, Quantization, Tensor, dequantize, quantize

if TYPE_CHECKING:
    from .graph import Graph

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
        left = "".join(f"; {each} is applied outside" for each in self.outside)
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
            found = content["format"]
            sides = [
                tuple(
                    Port(
                        str(each["name"]),
                        str(each["tensor"]),
                        tuple(int(axis) for axis in each["axes"]),
                        tuple(map(str, each["outside"])),
                        None if each["limits"] is None else (int(each["limits"][0]), int(each["limits"][1])),
                    )
                    for each in content[side]
                )
                for side in ("inputs", "outputs")
            ]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"the file's metadata about its inputs and outputs is damaged: {error}") from error
        if found != _FORMAT:
            raise ValueError(f"the file's metadata has format {found!r}; this version reads {_FORMAT}")
        for port in (*sides[0], *sides[1]):
            if sorted(port.axes) != list(range(len(port.axes))):
                raise ValueError(f"the file's metadata is damaged: {port.name!r} has the axes {port.axes}")
        return Signature(*sides)


def plain_signature(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Signature:
    """The signature of a graph that was not lowered from a model: names and axes are the tensors' own."""
    sides = [{each.name: tuple(range(len(each.shape))) for each in side} for side in (inputs, outputs)]
    return Signature(*(tuple(Port(name, name, axes) for name, axes in side.items()) for side in sides))


def input_codes(graph: Graph, data: Any) -> dict[str, np.ndarray]:
    """Converts a user's arrays to codes, by tensor name, as `simulate` and `verify` expect them.

    Args:
        data: real numbers in the user's axes, including the batch: an array for a network with one input, a dictionary
            with the inputs' names (`graph.signature`), or a sequence in their order.

    Raises:
        ValueError: an input is missing or its shape differs from the network's.
    """
    ports = graph.signature.inputs
    arrays = _by_name(ports, data)
    codes = {}
    for port in ports:
        array, tensor = np.asarray(arrays[port.name]), graph.tensors[port.tensor]
        wanted: list[object] = [tensor.shape[at] for at in port.order]
        batch = port.axes[0]
        wanted[batch] = "batch"
        fits = array.ndim == len(wanted) and all(
            size == given or size == "batch" for size, given in zip(wanted, array.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"input {port.name!r} must have shape {wanted}, got {list(array.shape)}")
        if tensor.dtype in ("int32", RAW):
            if not np.issubdtype(array.dtype, np.integer):
                raise ValueError(f"input {port.name!r} must be integers, got {array.dtype}")
            codes[port.tensor] = graph.as_indices(port.tensor, port.to_graph(array))
            continue
        codes[port.tensor] = as_codes(port.to_graph(array), tensor.dtype, tensor.quantization, port.limits)
    return codes


def as_codes(
    real: np.ndarray, dtype: str, quantization: Quantization, limits: tuple[int, int] | None = None
) -> np.ndarray:
    """Converts real numbers to a tensor's codes; integers without a grid are unchanged."""
    if dtype not in CODE_RANGES:
        return real.astype(dtype)
    return quantize(real.astype(np.float32), quantization, *(limits or ()))


def as_real(codes: np.ndarray, dtype: str, quantization: Quantization) -> np.ndarray:
    """Converts a tensor's codes to real numbers."""
    return dequantize(codes, quantization) if dtype in CODE_RANGES else codes


def output_values(graph: Graph, codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts a graph's results to real numbers in the user's axes, by the outputs' names (`graph.signature`).

    Args:
        codes: by tensor name, as `simulate` returns them.
    """
    found = {}
    for port in graph.signature.outputs:
        tensor = graph.tensors[port.tensor]
        found[port.name] = port.to_user(as_real(codes[port.tensor], tensor.dtype, tensor.quantization))
    return found


def _by_name(ports: Sequence[Port], data: Any) -> dict[str, Any]:
    names = [port.name for port in ports]
    if isinstance(data, Mapping):
        if set(data) != set(names):
            raise ValueError(f"the network's inputs are {names}, got {sorted(map(str, data))}")
        return dict(data)
    given = list(data) if isinstance(data, tuple | list) else [data]
    if len(given) != len(names):
        raise ValueError(f"the network has the inputs {names}, got {len(given)} arrays")
    return dict(zip(names, given, strict=True))
