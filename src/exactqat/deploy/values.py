# SPDX-License-Identifier: Apache-2.0
"""What a trained network stores, tensor by tensor, in the device's layout, to be compared with the device's
integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..kit.device.operator import Layout
from .axes import on_device
from .graph import Graph
from .lower import lower_with_layouts

Lowered = tuple[Graph, Mapping[str, Layout]]


def device_codes(model: Any, *inputs: Any, lowered: Lowered | None = None) -> dict[str, np.ndarray]:
    """Codes of all tensors that a trained network stores, by tensor name, in the device's layout.

    Args:
        model: prepared and frozen; in evaluation mode.
        inputs: what the model is called with; the results include the network's own inputs.
        lowered: the result of `lower_with_layouts`, if already available.
    """
    network = model if hasattr(model, "traced") else model.trained()
    return placed_codes(model, network.stored_codes(*inputs), lowered or lower_with_layouts(model))


def placed_codes(model: Any, stored: Mapping[str, np.ndarray], lowered: Lowered) -> dict[str, np.ndarray]:
    """As `device_codes`, from what the model stores, by layer path, in the user's order of axes."""
    graph, layouts = lowered
    numbers = model.numbers()
    codes = {}
    for path, trained in stored.items():
        if path not in layouts:
            continue
        tensor = graph.tensors[path]
        _, zero = numbers.grids[model.plan.stored(path).grid]
        shifted = trained - zero + int(tensor.quantization.zero_point[0])
        codes[path] = on_device(shifted, layouts[path]).astype(tensor.dtype)
    return codes


def layer_values(
    model: Any, *inputs: Any, lowered: Lowered | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Real numbers that the float and the fake-quantized network store, by tensor name, in the device's layout; for
    `verify`.

    The float network is the one with the same weights, without quantization. Arguments as in `device_codes`.
    """
    _, layouts = lowered or lower_with_layouts(model)
    network = model if hasattr(model, "traced") else model.trained()
    plain, trained = (
        {path: on_device(array, layouts[path]) for path, array in values.items() if path in layouts}
        for values in network.layer_values(*inputs)
    )
    return plain, trained


def in_users_order(array: np.ndarray, layout: Layout) -> np.ndarray:
    """Converts an array from the device's axis order to the user's; the inverse of `on_device`."""
    if layout.order is not None:
        array = array[..., np.argsort(layout.order)]
    units = tuple(position for position, axis in enumerate(layout.axes) if axis < 0)
    present = [axis for axis in layout.axes if axis >= 0]
    return array.squeeze(units).transpose(np.argsort(present))
