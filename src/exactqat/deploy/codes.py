# SPDX-License-Identifier: Apache-2.0
"""Converts between a user's arrays, with their model's axes and names, and a graph's integers.

What a user's array means is said here, once, for everything that takes data:

- Real numbers are quantized; so are integers of other types than below, as the numbers that they are.
- Integers of the input's own type (int8 or int16) are codes, in the graph's order of axes or in the user's.
- Images of unsigned integers are divided by 255 (uint8) or 65535 (uint16), as `exactqat train` does, unless the input's
  range reaches that far itself. Where an int8 input's range reaches below 0, as of (pixel - 127) / 128, pixels of uint8
  are its codes, 128 above them.
- Images may lie channels first or last, and gray ones without their channel: the shape decides, the user's own first.
- Values far beyond an input's range are not what the network was trained with, and cause one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from ..kit.device.tensor import CODE_RANGES, RAW, Quantization, Tensor, dequantize, quantize
from ..kit.planning.callers import users_line
from .examples import Data
from .graph import Graph
from .signature import Port

# Share of an input's values, farther beyond its range than the range is wide, from which they count as other values.
OTHER_VALUES = 0.01
# The largest number of unsigned images, by dtype.
LARGEST_PIXEL = {"uint8": 255, "uint16": 65535}


class Intake:
    """Converts a user's data to a graph's codes, in one call or batch by batch, and warns once of values far beyond an
    input's range."""

    def __init__(self, graph: Graph, warns: bool = True) -> None:
        """warns: False for parts of data that was looked at as a whole."""
        self.graph, self._warns = graph, warns

    def codes(self, data: Data) -> dict[str, np.ndarray]:
        """As `input_codes`, of some examples."""
        codes = {}
        for port, array in self._arrays(data):
            tensor = self.graph.tensors[port.tensor]
            if _are_codes(tensor, array):
                codes[port.tensor] = _placed(port, tensor, array)
                continue
            numbers = port.to_graph(self._numbers(port, tensor, array))
            if tensor.dtype in ("int32", RAW):
                codes[port.tensor] = self.graph.as_indices(port.tensor, numbers)
            else:
                codes[port.tensor] = as_codes(numbers, tensor.dtype, tensor.quantization, port.limits)
        return codes

    def numbers(self, data: Data) -> dict[str, np.ndarray]:
        """The same examples as real numbers (or indices) in the user's axes, by the inputs' names."""
        numbers = {}
        for port, array in self._arrays(data):
            tensor = self.graph.tensors[port.tensor]
            if _are_codes(tensor, array):
                numbers[port.name] = port.to_user(dequantize(_placed(port, tensor, array), tensor.quantization))
            else:
                numbers[port.name] = self._numbers(port, tensor, array)
        return numbers

    def as_model_takes(self, data: Data) -> Data:
        """Data for the model itself: integers of an only input as real numbers in its axes, all else as it is."""
        ports = self.graph.signature.inputs
        if (
            len(ports) != 1
            or not hasattr(data, "dtype")
            or self.graph.tensors[ports[0].tensor].dtype not in CODE_RANGES
        ):
            return data
        array = as_array(data)
        return self.numbers(array)[ports[0].name].astype(np.float32) if np.issubdtype(array.dtype, np.integer) else data

    def _arrays(self, data: Data) -> list[tuple[Port, np.ndarray]]:
        ports = self.graph.signature.inputs
        arrays = by_name([port.name for port in ports], data)
        return [(port, as_array(arrays[port.name])) for port in ports]

    def _numbers(self, port: Port, tensor: Tensor, array: np.ndarray) -> np.ndarray:
        """Real numbers in the user's axes: those of unsigned images between 0 and 1, unless the input's range holds all
        of them or reaches below 0."""
        real = in_users_axes(port, tensor, array)
        if tensor.dtype in ("int32", RAW) and not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"input {port.name!r} must be integers, got {array.dtype}")
        if tensor.dtype not in CODE_RANGES:
            return real
        ends = dequantize(np.asarray(port.limits or CODE_RANGES[tensor.dtype]), tensor.quantization)
        lowest, highest = map(float, ends)
        largest = LARGEST_PIXEL.get(array.dtype.name)
        if array.dtype == np.uint8 and tensor.dtype == "int8" and lowest < 0:
            # No pixel is negative, so these are not the network's numbers: its codes are the pixels.
            real = dequantize((real.astype(np.int16) + CODE_RANGES["int8"][0]).astype(np.int8), tensor.quantization)
        elif largest is not None and highest < largest - 1:
            real = real.astype(np.float32) / np.float32(largest)
        if self._warns and real.size:
            width = highest - lowest
            share = float(((real < lowest - width) | (real > highest + width)).mean())
            if share >= OTHER_VALUES:
                self._warns = False
                warnings.warn(
                    f"{share:.0%} of the values of input {port.name!r} lie far beyond its range on the device, "
                    f"[{lowest:.4g}, {highest:.4g}], and are clamped: give them as in training, for example divided by "
                    "255",
                    stacklevel=users_line(),
                )
        return real


def input_codes(graph: Graph, data: Data) -> dict[str, np.ndarray]:
    """Converts a user's arrays to codes, by tensor name, as `simulate` and `verify` expect them.

    Args:
        data: real numbers in the user's axes, including the batch: an array for a network with one input, a dictionary
            by the inputs' names (`graph.signature`), or a sequence in their order. Arrays of the input's own dtype,
            int8 or int16, are codes already; unsigned images are divided by their largest value.

    Raises:
        ValueError: an input is missing or its shape differs from the network's.
    """
    return Intake(graph).codes(data)


def codes_of(graph: Graph, data: Data) -> dict[str, np.ndarray]:
    """`input_codes`, of data whose values were looked at before."""
    return Intake(graph, warns=False).codes(data)


def _are_codes(tensor: Tensor, array: np.ndarray) -> bool:
    return tensor.dtype == str(array.dtype) and tensor.dtype in CODE_RANGES


def _placed(port: Port, tensor: Tensor, codes: np.ndarray) -> np.ndarray:
    """Codes in the graph's order of axes, whether they lie so or as the user's."""
    return codes if _fits(codes, tensor.shape) else port.to_graph(in_users_axes(port, tensor, codes))


def as_array(values: Data) -> np.ndarray:
    """A NumPy array of a framework's, wherever it lies."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values)


def in_users_axes(port: Port, tensor: Tensor, array: np.ndarray) -> np.ndarray:
    """The array as the model takes it; images may lie in the other usual order.

    Raises:
        ValueError: no order of its axes fits.
    """
    wanted = tuple(tensor.shape[at] for at in port.order)
    batch = port.axes[0]
    forms = [array]
    if len(wanted) == 4 and batch == 0:
        # Images whose channels lie elsewhere or are left out.
        forms += [np.moveaxis(array, -1, 1), np.moveaxis(array, 1, -1)] if array.ndim == 4 else []
        forms += [array[:, None], array[..., None]] if array.ndim == 3 else []
    for form in forms:
        if _fits(form, wanted, batch):
            return form
    sizes: list[object] = [*wanted]
    sizes[batch] = "batch"
    raise ValueError(f"input {port.name!r} must have shape {sizes}, got {list(array.shape)}")


def _fits(array: np.ndarray, shape: Sequence[int], batch: int = 0) -> bool:
    """Whether only the number of examples may differ."""
    return array.ndim == len(shape) and all(
        length == size or axis == batch for axis, (length, size) in enumerate(zip(array.shape, shape, strict=True))
    )


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
    values = {}
    for port in graph.signature.outputs:
        tensor = graph.tensors[port.tensor]
        values[port.name] = port.to_user(as_real(codes[port.tensor], tensor.dtype, tensor.quantization))
    return values


def by_name(names: Sequence[str], data: Data) -> dict[str, Data]:
    """Data of all inputs by their names: from a mapping, a sequence in their order, or that of the only one.

    Raises:
        ValueError: the names, or their number, are others.
    """
    if isinstance(data, Mapping):
        if set(data) != set(names):
            raise ValueError(f"the network's inputs are {list(names)}, got {sorted(map(str, data))}")
        return dict(data)
    arrays = list(data) if isinstance(data, tuple | list) else [data]
    if len(arrays) != len(names):
        raise ValueError(f"the network has the inputs {list(names)}, got {len(arrays)} arrays")
    return dict(zip(names, arrays, strict=True))
