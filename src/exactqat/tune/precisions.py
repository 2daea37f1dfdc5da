# SPDX-License-Identifier: Apache-2.0
"""A graph in which every tensor and every weight is computed in the device's 8 bits or finely, in 16.

Fine parts are computed by the device's own int16 operators (TensorFlow Lite's 16x8), with the filter in 16 bits where
the weights are fine; QUANTIZE converts between the two. Functions without an int16 form are tables of all codes; other
operators without one stay in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..deploy.graph import Graph, Operator
from ..deploy.signature import Port
from ..kit.device import OPERATORS, Quantization, Tensor, per_tensor
from ..kit.device.activation import Table
from ..kit.device.file_forms import ONTO_A_GRID
from ..kit.device.tensor import CODE_RANGES
from ..kit.device.weighted import Weighted
from ..kit.train.core import primitives_numpy
from ..kit.train.core.weights import SMALLEST_MULTIPLIER, per_channel
from .network import FineWeights

INT16_LARGEST = 2**15 - 1
# Steps of a tensor's first fine grid in one 8-bit step, which leaves room for 8 times the range.
FIRST_STEPS = 16
# The operator between grids of any dtype.
(CONVERSION,) = ONTO_A_GRID
# Functions without an int16 operator that a table of all codes computes, because they have a value for every number.
OF_ALL_NUMBERS = ("elu", "exp", "gelu", "hardswish")
# Room above the largest magnitude seen.
MARGIN = 2.0
# Where the largest code is below this one, the grid is fitted again. A fine step is at least this share of an 8-bit
# step: where only zeros are seen, no step is small enough.
WELL_KNOWN, LEAST_OF_SCALE = 2**9, 2.0**-44


@dataclass(frozen=True, order=True)
class Part:
    """What is kept fine or not: the weights of a layer, or the tensors it stores on one grid.

    Attributes:
        place: number of the operator it belongs to; -1: an input.
        weights: whether it is the weights; otherwise what is stored.
        layer: the layer's path, or the name of the tensor.
    """

    place: int
    weights: bool
    layer: str

    @property
    def kind(self) -> str:
        """``weights`` or ``result``; ``input`` for a network input."""
        return "weights" if self.weights else "input" if self.place < 0 else "result"

    def __str__(self) -> str:
        return f"{self.layer} ({self.kind})"


def layer_of(tensor: str) -> str:
    """The path of the layer that stores a tensor: few bits are placed by a second operator."""
    return tensor.removesuffix("/unshifted")


class Precisions:
    """A graph's variants. Operators and tensors that variants have in common are the same objects.

    Attributes:
        graph: the device's.
        parts: in order of execution.
        group: the tensors of each activation, by the part's number in `parts`.
    """

    def __init__(
        self, graph: Graph, weights: Mapping[str, FineWeights], clamped: Mapping[str, tuple[float, float]]
    ) -> None:
        """
        Args:
            weights: fine weights by the name of the operator's filter; other weights are not parts.
            clamped: ranges of tensors, by name, that the ends of their grids clamp by design; infinite where an end
                does not.
        """
        self.graph = graph
        self.weights = weights
        self._made: dict[Any, Any] = {}
        # Tensors on one grid are fine together.
        self._group_of = _groups(graph)
        members: dict[str, list[str]] = {}
        for name, first in self._group_of.items():
            members.setdefault(first, []).append(name)
        made_by = {name: number for number, operator in enumerate(graph.operators) for name in operator.outputs}
        parts: dict[Part, list[str]] = {}
        self._part_of_group: dict[str, Part] = {}
        self._part_of_filter: dict[str, Part] = {}
        self._scale: dict[str, np.float32] = {}
        self._pinned: set[str] = set()
        # Results whose 8-bit grid ends at 0; the fine one does not, and an activation clamps them.
        self._clamped_at_zero: set[str] = set()
        # What lasts from call to call keeps its grid.
        lasting = {*graph.variables, *(graph.tensors[name].successor for name in graph.variables)}
        for first, names in members.items():
            if all(graph.tensors[name].dtype == "int16" for name in names) or not lasting.isdisjoint(names):
                continue
            layer = layer_of(first)
            part = Part(made_by.get(first, -1), False, layer)
            scale = self._first_scale(names, made_by, clamped)
            if scale is None:
                continue
            self._part_of_group[first] = part
            self._scale[first] = scale
            parts[part] = names
        for number, operator in enumerate(graph.operators):
            for name in operator.inputs:
                if name in weights:
                    part = Part(number, True, layer_of(operator.outputs[0]))
                    self._part_of_filter[name] = part
                    parts[part] = [name]
        # An operator's weights come before its results.
        self.parts = tuple(sorted(parts, key=lambda part: (part.place, not part.weights, part.layer)))
        self.tensors_of = {part: tuple(parts[part]) for part in self.parts}

    def _first_scale(
        self, names: list[str], made_by: Mapping[str, int], clamped: Mapping[str, tuple[float, float]]
    ) -> np.float32 | None:
        """The initial fine grid of tensors; a pinned one is not moved. None: there is none."""
        graph, first = self.graph, self._group_of[names[0]]
        for name in names:
            declaration = OPERATORS[graph.operators[made_by[name]].kind] if name in made_by else None
            fixed = None if declaration is None else declaration.grid_fixed_in("int16")
            if fixed is not None and declaration is not None and "int16" in declaration.dtypes:
                self._pinned.add(first)
                return np.float32(fixed[0])
        for name in names:
            if name in clamped:
                low, high = clamped[name]
                activation = graph.operators[made_by[name]].attributes.get("activation")
                if low == 0 and activation == "NONE":
                    self._clamped_at_zero.add(name)
                elif low != -high and not (low == 0 and activation):
                    return None
                if math.isfinite(high):
                    self._pinned.add(first)
                    return np.float32(high / INT16_LARGEST)
        return np.float32(graph.tensors[names[0]].quantization.scale[0] / FIRST_STEPS)

    def fit(self, largest: Mapping[Part, int], narrower: bool = True) -> bool:
        """Moves fine grids to the largest codes seen in them; returns whether some are not settled yet: values beyond a
        grid's end, or so small that they are not known well.

        largest: of each activation, in the current fine grids.
        narrower: False: grids are only widened, for further examples.
        """
        again = False
        for first, part in self._part_of_group.items():
            if part not in largest or first in self._pinned:
                continue
            code, scale = largest[part], self._scale[first]
            least = self.graph.tensors[first].quantization.scale[0] * LEAST_OF_SCALE
            if code >= INT16_LARGEST:
                again = True
                self._scale[first] = np.float32(scale * (64 if narrower else 4))
            elif narrower and scale > least:
                again = again or code < WELL_KNOWN
                self._scale[first] = np.float32(max(scale * max(code * MARGIN / INT16_LARGEST, 2.0**-12), least))
        self._made.clear()
        return again

    def fine_tensor(self, name: str) -> Tensor:
        """The int16 form of one of the graph's tensors; the tensor itself if it has none."""
        tensor = self.graph.tensors[name]
        scale = self._scale.get(self._group_of.get(name, ""))
        if tensor.dtype != "int8" or scale is None:
            return tensor
        return self._tensor(f"{name} in 16 bits", tensor.shape, per_tensor(scale, 0, "int16"))

    def stored(self, name: str, fine: Collection[Part]) -> Tensor:
        """The form of a tensor in the variant in which `fine` parts are fine."""
        return self.fine_tensor(name) if self._is_fine(name, fine) else self.graph.tensors[name]

    def variant(self, fine: Collection[Part]) -> Graph:
        """The graph in which these parts are computed in 16 bits. It is not validated: no file holds such filters."""
        fine = frozenset(fine)
        graph = self.graph
        tensors: dict[str, Tensor] = {}
        operators: list[Operator] = []

        def emit(operator: Operator, *made: Tensor) -> None:
            operators.append(operator)
            tensors.update({each.name: each for each in made})

        def quantize(source: Tensor, target: Tensor) -> Tensor:
            if target.name not in tensors:
                key = ("quantize", source.name, source.dtype, target.name)
                emit(self._operator(key, CONVERSION, (source.name,), (target.name,), {}), source, target)
            return target

        def wide(name: str) -> Tensor:
            """An activation in int16: fine, or its 8 bits exactly. Real numbers stay."""
            tensor = graph.tensors[name]
            if self._is_fine(name, fine) or tensor.dtype != "int8":
                return self.stored(name, fine)
            scale = tensor.quantization.scale[0]
            target = self._tensor(f"{name} in int16", tensor.shape, per_tensor(scale, 0, "int16"))
            return quantize(tensor, target)

        def narrow(name: str) -> Tensor:
            """An activation as the graph has it."""
            tensor = graph.tensors[name]
            return quantize(self.fine_tensor(name), tensor) if self._is_fine(name, fine) else tensor

        for name in graph.inputs:
            stored = self.stored(name, fine)
            tensors[stored.name] = stored
        for number, operator in enumerate(graph.operators):
            outputs = [graph.tensors[name] for name in operator.outputs]
            declaration = OPERATORS[operator.kind]
            read = [name for name in operator.inputs if graph.tensors[name].data is None]
            fine_weights = any(self._part_of_filter.get(name) in fine for name in operator.inputs)
            fine_outputs = [output for output in outputs if self._is_fine(output.name, fine)]
            plain = not (fine_weights or fine_outputs or any(self._is_fine(name, fine) for name in read))
            # A table of codes holds for its own grids only, and so do weights of other kinds.
            other = "codes" in operator.attributes or (declaration.weights and not isinstance(declaration, Weighted))
            kind, attributes = operator.kind, operator.attributes
            if "int16" not in declaration.dtypes and declaration.float_kind in OF_ALL_NUMBERS:
                kind, attributes = (
                    Table.kind,
                    {"function": declaration.float_kind, "parameters": tuple(attributes.values())},
                )
            if plain or other or "int16" not in OPERATORS[kind].dtypes:
                for name in operator.inputs:
                    tensor = graph.tensors[name] if graph.tensors[name].data is not None else narrow(name)
                    tensors[tensor.name] = tensor
                emit(operator, *outputs)
                for output in fine_outputs:
                    quantize(output, self.fine_tensor(output.name))
                continue
            targets = [
                output
                if output.dtype != "int8"
                else self.fine_tensor(output.name)
                if output in fine_outputs
                else self._computed(output)
                for output in outputs
            ]
            operands = []
            for position, name in enumerate(operator.inputs):
                tensor = graph.tensors[name]
                if tensor.data is None:
                    operands.append(wide(name))
                elif position in declaration.weights:
                    operands.append(self._weight(operator, position, operands[0], targets[0], fine_weights))
                else:
                    operands.append(self._constant(tensor, targets[0] if declaration.same_quantization else None))
            names, made = (tuple(each.name for each in several) for several in (operands, targets))
            if any(output.name in self._clamped_at_zero for output in fine_outputs):
                attributes = {**attributes, "activation": "RELU"}
            emit(self._operator((number, names, made), kind, names, made, attributes), *operands, *targets)
            for target, output in zip(targets, outputs, strict=True):
                if target is not output and output not in fine_outputs:
                    quantize(target, output)
        renamed = {name: self.stored(name, fine).name for name in (*graph.inputs, *graph.outputs)}
        ports = graph.signature
        sides = (
            tuple(_port(port, renamed[port.tensor], fine_port=renamed[port.tensor] != port.tensor) for port in side)
            for side in (ports.inputs, ports.outputs)
        )
        return replace(
            graph,
            tensors=tensors,
            operators=tuple(operators),
            inputs=tuple(renamed[name] for name in graph.inputs),
            outputs=tuple(renamed[name] for name in graph.outputs),
            ports=replace(ports, **dict(zip(("inputs", "outputs"), sides, strict=True))),
        )

    # --- what variants share ------------------------------------------------------------------------------------------

    def _is_fine(self, name: str, fine: Collection[Part]) -> bool:
        part = self._part_of_group.get(self._group_of.get(name, ""))
        return part is not None and part in fine

    def _computed(self, output: Tensor) -> Tensor:
        """A result in 16 bits, on its way to 8."""
        group = self._group_of[output.name]
        scale = self._scale.get(group, np.float32(output.quantization.scale[0] / FIRST_STEPS))
        return self._tensor(f"{output.name} before 8 bits", output.shape, per_tensor(scale, 0, "int16"))

    def _tensor(self, name: str, shape: tuple[int, ...], grid: Quantization) -> Tensor:
        if name not in self._made:
            self._made[name] = Tensor(name, shape, "int16", grid)
        made: Tensor = self._made[name]
        return made

    def _operator(
        self, key: Any, kind: str, inputs: tuple[str, ...], outputs: tuple[str, ...], attributes: Mapping[str, Any]
    ) -> Operator:
        if key not in self._made:
            self._made[key] = Operator(kind, inputs, outputs, attributes)
        made: Operator = self._made[key]
        return made

    def _weight(self, operator: Operator, position: int, input: Tensor, output: Tensor, fine: bool) -> Tensor:
        """The filter or the bias of an operator whose input is int16.

        A device computes 0 for a channel whose sums are in steps of less than 2**-32 of the result's, whatever its
        bias. Weights of such channels are on a coarser grid here: their sums are less than a step of the result anyway.
        """
        filter, bias = (self.graph.tensors[name] for name in operator.inputs[1:3])
        input_scale, output_scale = (float(each.quantization.scale[0]) for each in (input, output))
        key = (filter.name, position, fine, input.name, input_scale, output_scale)
        if key in self._made:
            made: Tensor = self._made[key]
            return made
        kept = self.weights.get(filter.name)
        grid, codes = filter.quantization, np.asarray(filter.data)
        assert bias.data is not None
        real = bias.data.astype(np.float64) * bias.quantization.scale.astype(np.float64)
        word = "in 8 bits"
        if fine and kept is not None:
            grid, codes, real, word = replace(grid, scale=kept.scale), kept.codes, kept.bias, "in 16 bits"
        scales = grid.scale.astype(np.float64)
        multipliers = scales * input_scale / output_scale
        coarser = 2 ** np.maximum(np.ceil(np.log2(SMALLEST_MULTIPLIER / multipliers)), 0)
        if coarser.max() > 1:
            by = coarser if grid.axis is None else per_channel(primitives_numpy, coarser, codes.ndim, grid.axis)
            scales, codes = scales * coarser, np.rint(codes / by).astype(codes.dtype)
            grid, word = replace(grid, scale=scales.astype(np.float32)), f"{word} for {output.name}"
        if position == 1:
            tensor = Tensor(f"{filter.name} {word}", filter.shape, str(codes.dtype), grid, codes)
        else:
            scale = input_scale * scales
            steps = np.clip(np.rint(real / scale), -(2**47), 2**47).astype(np.int64)
            own = Quantization(scale.astype(np.float32), np.zeros(1), bias.quantization.axis)
            # The same bias has other codes with another input.
            tensor = Tensor(f"{bias.name} {word} for {input.name}", bias.shape, "int64", own, steps)
        self._made[key] = tensor
        return tensor

    def _constant(self, tensor: Tensor, like: Tensor | None) -> Tensor:
        """A constant operand in int16; on the grid of a tensor, or on its own, exactly."""
        if tensor.dtype != "int8":
            return tensor
        grid = tensor.quantization
        scale = grid.scale[0] if like is None else like.quantization.scale[0]
        key = (tensor.name, "constant", float(scale))
        if key not in self._made:
            assert tensor.data is not None
            steps = tensor.data.astype(np.float64) - float(grid.zero_point[0])
            codes = np.rint(steps * (float(grid.scale[0]) / float(scale)))
            codes = np.clip(codes, *CODE_RANGES["int16"]).astype(np.int16)
            name = f"{tensor.name} in int16 by {float(scale):g}"
            self._made[key] = Tensor(name, tensor.shape, "int16", per_tensor(scale, 0, "int16"), codes)
        made: Tensor = self._made[key]
        return made


def _port(port: Port, tensor: str, fine_port: bool) -> Port:
    return replace(port, tensor=tensor, limits=None if fine_port else port.limits)


def _groups(graph: Graph) -> dict[str, str]:
    """For each activation, the first of the tensors that share its grid because no operator rescales them."""
    first = {name: name for name in (*graph.inputs, *graph.variables, *graph.results())}

    def root(name: str) -> str:
        while first[name] != name:
            name = first[name]
        return name

    order = {name: number for number, name in enumerate(first)}
    for operator in graph.operators:
        read = [name for name in operator.inputs if graph.tensors[name].data is None]
        tensors = [graph.tensors[name] for name in (*read, *operator.outputs)]
        if any(tensor.dtype not in CODE_RANGES for tensor in tensors):
            continue
        # Codes that are only shifted are values of few bits on their way to the bottom of int8.
        same_steps = np.array_equal(tensors[0].quantization.scale, tensors[-1].quantization.scale)
        same_dtype = tensors[0].dtype == tensors[-1].dtype
        shifted = OPERATORS[operator.kind].changes_dtype and same_dtype and same_steps
        if OPERATORS[operator.kind].same_quantization or shifted:
            for name in (*read, *operator.outputs[1:]):
                ends = sorted((root(name), root(operator.outputs[0])), key=order.__getitem__)
                first[ends[1]] = ends[0]
    int8 = {name for name in first if graph.tensors[name].dtype in CODE_RANGES}
    return {name: root(name) for name in first if name in int8}


__all__ = ["Part", "Precisions", "layer_of"]
