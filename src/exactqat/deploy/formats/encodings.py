# SPDX-License-Identifier: Apache-2.0
"""A network's grids for other tools, which then quantize a float model with these ranges instead of their own: AIMET's
encodings (also Qualcomm's converters read them) and ONNX Runtime's tensor overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...kit.device.tensor import CODE_RANGES, Tensor
from ..graph import Graph


def aimet_encodings(graph: Graph, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The grids of all tensors as AIMET's encodings, format 0.6.1, to be written as JSON.

    Args:
        names: what the float model calls the graph's tensors; those without a name are left out. None: as the graph
            does.
    """
    encodings: dict[str, Any] = {
        "version": "0.6.1", "activation_encodings": {}, "param_encodings": {}, "quantizer_args": {}
    }  # fmt: skip
    for name, tensor in _named(graph, names):
        grid, (lowest, highest) = tensor.quantization, CODE_RANGES[tensor.dtype]
        side = "activation_encodings" if tensor.data is None else "param_encodings"
        encodings[side][name] = [
            {
                "bitwidth": 8 if tensor.dtype == "int8" else 16,
                "dtype": "int",
                "is_symmetric": str(zero == 0),
                "min": (lowest - zero) * scale,
                "max": (highest - zero) * scale,
                "offset": lowest - zero,
                "scale": scale,
            }
            for scale, zero in _grid(grid.scale, grid.zero_point)
        ]
    return encodings


def onnxruntime_overrides(graph: Graph, names: Mapping[str, str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """The grids of all tensors as ONNX Runtime's ``TensorQuantOverrides``, to be written as JSON for
    ``python -m onnxruntime.quantization.static_quantize_runner --tensor_quant_overrides FILE``.

    JSON cannot name ONNX Runtime's types, so they are the call's: weights are qint8; activations of 8 bits are quint8,
    128 above the graph's codes as in `write_onnx`, those of 16 bits qint16 (``--activation_type``).

    Args:
        names: as in `aimet_encodings`.
    """
    overrides: dict[str, list[dict[str, Any]]] = {}
    for name, tensor in _named(graph, names):
        grid, unsigned = tensor.quantization, tensor.data is None and tensor.dtype == "int8"
        axis = {} if grid.axis is None else {"axis": grid.axis}
        overrides[name] = [
            {
                "scale": scale,
                "zero_point": zero + 128 * unsigned,
                **axis,
            }
            for scale, zero in _grid(grid.scale, grid.zero_point)
        ]
    return overrides


def _grid(scales: Any, zero_points: Any) -> list[tuple[float, int]]:
    zeros = zero_points.tolist() if zero_points.size == scales.size else zero_points.tolist() * scales.size
    return list(zip(scales.tolist(), map(int, zeros), strict=True))


def _named(graph: Graph, names: Mapping[str, str] | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in graph.tensors.items():
        if tensor.dtype in CODE_RANGES and (names is None or name in names):
            yield (name if names is None else names[name]), tensor
