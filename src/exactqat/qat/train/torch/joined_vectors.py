# SPDX-License-Identifier: Apache-2.0
"""What the layers of a frozen network compute with, one number for each output channel: of layers of one form at once,
as each small operation costs more than its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ....kit.planning.plans import PlanStep
from ..core.accumulators import LayerVectors, layer_vectors, most_bias
from ..core.on_device import DeviceSteps
from ..core.steps import WeightedStep
from ..core.weights import LayerArrays, grid_of
from . import primitives as p
from .image_layers import is_unwatched
from .state import ModuleState, scales_of_rows

# And whether float32 is known to hold all sums of the layer.
Vectors = tuple[LayerVectors, bool]


class _Places(NamedTuple):
    """What follows from the grids alone, of the channels of several layers, one layer's after the other's.

    Attributes:
        input_scales, output_scales: of the operand and of the result.
        input_numbers: the operand's, as the device places its codes.
        most_bias: of `most_bias`.
    """

    input_scales: Tensor
    output_scales: Tensor
    input_numbers: Tensor
    most_bias: np.ndarray


class JoinedVectors:
    """Of the layers with weights in eight bits."""

    def __init__(self, state: ModuleState, layers: Sequence[WeightedStep]) -> None:
        """layers: whose vectors are computed together."""
        self.state, self.layers = state, layers

    def place(self, placed: DeviceSteps, device: torch.device) -> None:
        """On which grids the layers are from here on."""
        # What one step of a grid is; not on a GPU, which divides otherwise than the host and has to wait for it.
        grids = placed.grids if device.type == "cpu" else {}
        scales = {name: torch.tensor(scale) for name, (scale, _) in grids.items()}
        # Together, and never changed: other threads may be computing with those of before.
        self._placed = placed, scales, dict[tuple[str, ...], _Places]()

    def together(self) -> dict[str, Vectors]:
        """Of all layers, by path."""
        groups: dict[Any, list[tuple[WeightedStep, LayerArrays]]] = {}
        scales = self._scales()
        for layer in self.layers:
            arrays = layer.arrays(raw_scale=scales.get(layer.path))
            form = tuple([leaf.device if isinstance(leaf, Tensor) else leaf for leaf in arrays.leaves()])
            groups.setdefault(form, []).append((layer, arrays))
        return {path: vectors for layers in groups.values() for path, vectors in self._joined(layers)}

    def of(self, layer: WeightedStep) -> Vectors:
        """Of one layer."""
        return next(self._joined([(layer, layer.arrays())]))[1]

    @torch.no_grad()
    def _scales(self) -> dict[str, Tensor]:
        """Of the weights that follow their rows, by path."""
        groups: dict[tuple[int, bool], list[tuple[str, Tensor]]] = {}
        for layer in self.layers if is_unwatched() else ():
            weight, grid = layer.stored_weight(), layer.weight_quantizer
            if grid.follows_rows(weight):
                groups.setdefault((grid.rule.weight_bits, grid.rule.narrow_range), []).append((layer.path, weight))
        scales: dict[str, Tensor] = {}
        for rule, weights in groups.items():
            of_rows = scales_of_rows([weight for _, weight in weights], *rule)
            scales |= zip((path for path, _ in weights), of_rows, strict=True)
        return scales

    def _joined(self, layers: Sequence[tuple[WeightedStep, LayerArrays]]) -> Iterator[tuple[str, Vectors]]:
        """Of layers of one form, by path."""
        own = layers[0][1]
        sizes = [arrays.raw_scale.shape[0] for _, arrays in layers]
        if len(layers) > 1:
            rows = zip(*(arrays.leaves() for _, arrays in layers), strict=True)
            own = LayerArrays.of([torch.cat(row) if isinstance(row[0], Tensor) else row[0] for row in rows])
        places = self._places([layer for layer, _ in layers], sizes, own.raw_scale)
        own_grid = grid_of(p, own, places.input_scales, places.output_scales)
        vectors = layer_vectors(self.state.primitives, own_grid, places.input_numbers)
        fits = [False] * len(layers)
        if own.raw_scale.device.type == "cpu":  # a GPU would have to be waited for
            fit = np.abs(p.to_numpy(vectors.bias)) < places.most_bias
            fit &= np.isfinite(p.to_numpy(own.raw_scale))
            fits = np.logical_and.reduceat(fit, np.cumsum([0, *sizes[:-1]])).tolist()
        parts = zip(*(vector.split(sizes) for vector in vectors), strict=True)
        for (layer, _), fit_all, own_parts in zip(layers, fits, parts, strict=True):
            yield layer.path, (LayerVectors(*own_parts), fit_all)

    def _places(self, layers: Sequence[WeightedStep], sizes: Sequence[int], like: Tensor) -> _Places:
        """sizes: of the layers' channels."""
        placed, held, known = self._placed
        paths = tuple([layer.path for layer in layers])
        if paths in known:
            return known[paths]
        owners = np.repeat(np.arange(len(layers)), sizes)
        numbers = [placed.rounded_by(cast(PlanStep, placed.plan.stored(path))) for path in paths]
        scales = [
            (held[layer.source.name], held[layer.output_quantizer.name]) if held else layer.scales() for layer in layers
        ]
        input_scales, output_scales = (p.gather(torch.stack(ends), owners, 0) for ends in zip(*scales, strict=True))
        input_numbers = p.array(np.stack(numbers)[owners, 0], like)
        bounds = [most_bias(layer, layer.weight_source(), row) for layer, row in zip(layers, numbers, strict=True)]
        places = _Places(input_scales, output_scales, input_numbers, np.array(bounds, np.float32)[owners])
        if held:
            known[paths] = places
        return places
