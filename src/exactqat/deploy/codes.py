# SPDX-License-Identifier: Apache-2.0
"""Converts between a user's arrays, real numbers with their model's axes and names, and a graph's integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..device.tensor import CODE_RANGES, RAW, Quantization, dequantize, quantize
from .graph import Graph
from .signature import Port


def input_codes(graph: Graph, data: Any) -> dict[str, np.ndarray]:
    """Converts a user's arrays to codes, by tensor name, as `simulate` and `verify` expect them.

    Args:
        data: real numbers in the user's axes, including the batch: an array for a network with one input, a dictionary
            by the inputs' names (`graph.signature`), or a sequence in their order.

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
