# SPDX-License-Identifier: Apache-2.0
"""A graph in which every tensor and every weight is computed in the device's 8 bits or finely, in 16.

Fine parts are computed by the device's own int16 operators (TensorFlow Lite's 16x8), with the filter in 16 bits where
the weights are fine, which no file and no rule can say; QUANTIZE converts between the two. Functions without an int16
form are tables of all codes; other operators without one stay in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from ..deploy.graph import Graph, Operator
from ..deploy.signature import Port
from ..kit.device import DEFAULT_PROFILE, OPERATORS, Profile, Quantization, Tensor, per_tensor, profile_named
from ..kit.device.activation import TableOfCodes
from ..kit.device.file_forms import ONTO_A_GRID
from ..kit.device.tensor import CODE_RANGES
from ..kit.device.weighted import Weighted
from ..kit.planning.plans import PlanStep
from ..qat.train.core import primitives_numpy
from ..qat.train.core.weights import SMALLEST_MULTIPLIER, per_channel
from .network import Candidate, Ends, FineWeights

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

Made = TypeVar("Made")


@dataclass(frozen=True, order=True)
class Part:
    """What has bits of its own: the weights of a layer, or the tensors stored on one grid.

    Attributes:
        layer: path of the layer, the first one of a grid; or the name of the tensor.
        weights: whether it is the weights; otherwise what is stored.
    """

    layer: str
    weights: bool

    def named_by(self, pattern: str) -> bool:
        """Whether a glob matches the layer, or this part alone, such as ``head (result)``."""
        return fnmatchcase(self.layer, pattern) or fnmatchcase(str(self), pattern)

    def __str__(self) -> str:
        return f"{self.layer} ({'weights' if self.weights else 'result'})"


def layer_of(tensor: str) -> str:
    """The path of the layer that stores a tensor: few bits are placed by a second operator."""
    return tensor.removesuffix("/unshifted")


class Precisions:
    """A graph's variants. Operators and tensors that variants have in common are the same objects.

    Attributes:
        graph: the device's.
        device: whose integers.
        weights: fine weights by the name of the operator's filter; other weights are not parts.
        ends: (low, high, bits) of tensors, by name, where these are not those of their dtype.
        parts: in order of execution, an operator's weights before its results.
        tensors_of: the tensors of each part.
    """

    def __init__(self, network: object, device: str | Profile | None = None) -> None:
        """network: a prepared model, a candidate, or a graph, whose results alone are parts: a file does not say what
        its weights were."""
        wanted = None if device is None else profile_named(device).name
        self.weights: Mapping[str, FineWeights] = {}
        self.ends: dict[str, tuple[float, float, int]] = {}
        # Ranges that the ends of grids clamp by design; infinite where an end does not.
        clamped: dict[str, Ends] = {}
        if isinstance(network, Graph):
            self.graph, self.device = network, wanted or network.trained_for or DEFAULT_PROFILE
            clamped = _clamps_of(network)
        else:
            candidate = Candidate.of(network, wanted).settled()
            self.graph, self.device, self.weights = candidate.graph(), candidate.device, candidate.fine_weights()
            plan, grids = candidate.plan, candidate.numbers().grids
            for step in plan.stored_steps:
                grid = plan.grids.get(step.grid)
                if grid is None or grid.bits > 8 or step.path not in self.graph.tensors or step.grid not in grids:
                    continue
                scale, zero_point = grids[step.grid]
                low, high = (float(scale) * (code - zero_point) for code in (0, 2**grid.bits - 1))
                self.ends[step.path] = (low, high, grid.bits)
                if isinstance(step, PlanStep) and step.bounds is not None:
                    clamped[step.path] = step.bounds
        graph = self.graph
        made_by = {name: number for number, operator in enumerate(graph.operators) for name in operator.outputs}
        # Tensors on one grid are fine together.
        members: dict[str, list[str]] = {}
        for name, first in _groups(graph).items():
            members.setdefault(first, []).append(name)
        self._made: dict[Hashable, Any] = {}
        self._part_of: dict[str, Part] = {}
        # The fine grids; pinned ones are not moved.
        self._scale: dict[Part, np.float32] = {}
        self._pinned: set[Part] = set()
        # Results whose 8-bit grid ends at 0; the fine one does not, and an activation clamps them.
        self._clamped_at_zero: set[str] = set()
        # What lasts from call to call keeps its grid.
        lasting = {*graph.variables, *(graph.tensors[name].successor for name in graph.variables)}
        places: dict[Part, tuple[int, tuple[str, ...]]] = {}
        for first, names in members.items():
            part = Part(layer_of(first), False)
            if any(graph.tensors[name].dtype != "int16" for name in names) and lasting.isdisjoint(names):
                first_scale = self._first_scale(part, names, made_by, clamped)
                if first_scale is not None:
                    self._scale[part], places[part] = first_scale, (made_by.get(first, -1), tuple(names))
                    self._part_of.update(dict.fromkeys(names, part))
        for number, operator in enumerate(graph.operators):
            for name in self.weights.keys() & set(operator.inputs):
                part = self._part_of[name] = Part(layer_of(operator.outputs[0]), True)
                places[part] = number, (name,)
        self.parts = tuple(sorted(places, key=lambda part: (places[part][0], not part.weights, part.layer)))
        self.tensors_of = {part: places[part][1] for part in self.parts}

    def kind(self, part: Part) -> str:
        """``weights`` or ``result``; ``input`` for a network input."""
        return "weights" if part.weights else "input" if self.tensors_of[part][0] in self.graph.inputs else "result"

    def _first_scale(
        self, part: Part, names: list[str], made_by: Mapping[str, int], clamped: Mapping[str, Ends]
    ) -> np.float32 | None:
        """The initial fine grid of tensors. None: there is none."""
        graph = self.graph
        for name in names:
            declaration = OPERATORS[graph.operators[made_by[name]].kind] if name in made_by else None
            fixed = None if declaration is None else declaration.grid_fixed_in("int16")
            if fixed is not None and declaration is not None and "int16" in declaration.dtypes:
                self._pinned.add(part)
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
                    self._pinned.add(part)
                    return np.float32(high / INT16_LARGEST)
        return np.float32(graph.tensors[names[0]].quantization.scale[0] / FIRST_STEPS)

    def fit(self, largest: Mapping[Part, int], narrower: bool = True) -> bool:
        """Moves fine grids to the largest codes seen in them; returns whether some are not settled yet: values beyond a
        grid's end, or so small that they are not known well.

        largest: of each activation, in the current fine grids.
        narrower: False: grids are only widened, for further examples.
        """
        again = False
        for part in largest.keys() & (self._scale.keys() - self._pinned):
            code, scale = largest[part], self._scale[part]
            least = self.graph.tensors[self.tensors_of[part][0]].quantization.scale[0] * LEAST_OF_SCALE
            if code >= INT16_LARGEST:
                again = True
                self._scale[part] = np.float32(scale * (64 if narrower else 4))
            elif narrower and scale > least:
                again = again or code < WELL_KNOWN
                self._scale[part] = np.float32(max(scale * max(code * MARGIN / INT16_LARGEST, 2.0**-12), least))
        self._made.clear()
        return again

    def fine_tensor(self, name: str) -> Tensor:
        """The int16 form of one of the graph's tensors; the tensor itself if it has none."""
        tensor, part = self.graph.tensors[name], self._part_of.get(name)
        if tensor.dtype != "int8" or part not in self._scale:
            return tensor
        return self._int16(f"{name} in 16 bits", tensor, self._scale[part])

    def variant(self, fine: Collection[Part]) -> Graph:
        """The graph in which these parts are computed in 16 bits. It is not validated: no file holds such filters."""
        graph = self.graph
        tensors: dict[str, Tensor] = {}
        operators: list[Operator] = []

        def is_fine(name: str) -> bool:
            return self._part_of.get(name) in fine

        def emit(operator: Operator, *entries: Tensor) -> None:
            operators.append(operator)
            tensors.update({tensor.name: tensor for tensor in entries})

        def quantized(source: Tensor, target: Tensor) -> Tensor:
            if target.name not in tensors:
                emit(self._operator(CONVERSION, [source], [target], {}), source, target)
            return target

        def form(name: str, in_16: bool) -> Tensor:
            """An activation as an operator in 16 or 8 bits reads it; constants and real numbers stay."""
            tensor = graph.tensors[name]
            own = self.fine_tensor(name) if tensor.data is None and is_fine(name) else tensor
            if tensor.dtype != "int8" or in_16 == (own is not tensor):
                return own
            if in_16:
                tensor = self._int16(f"{name} in int16", tensor, tensor.quantization.scale[0])
            return quantized(own, tensor)

        def stored(name: str) -> Tensor:
            return form(name, is_fine(name))

        tensors.update({tensor.name: tensor for tensor in map(stored, graph.inputs)})
        for operator in graph.operators:
            outputs = [graph.tensors[name] for name in operator.outputs]
            declaration = OPERATORS[operator.kind]
            plain = not any(map(is_fine, (*operator.inputs, *operator.outputs)))
            # A table of codes holds for its own grids only, and so do weights of other kinds.
            other = "codes" in operator.attributes or (declaration.weights and not isinstance(declaration, Weighted))
            kind, attributes = operator.kind, operator.attributes
            if not declaration.planned_in("int16") and declaration.float_kind in OF_ALL_NUMBERS:
                kind = TableOfCodes.kind
                attributes = {"function": declaration.float_kind, "parameters": tuple(attributes.values())}
            if plain or other or "int16" not in OPERATORS[kind].dtypes:
                emit(operator, *(form(name, False) for name in operator.inputs), *outputs)
                targets = outputs
            else:
                # In 16 bits: fine, or on its way to 8.
                targets = [
                    output if output.dtype != "int8" else self._computed(output, is_fine(output.name))
                    for output in outputs
                ]
                operands: list[Tensor] = []
                for position, name in enumerate(operator.inputs):
                    tensor = graph.tensors[name]
                    if tensor.data is None:
                        operands.append(form(name, True))
                    elif position in declaration.weights:
                        fine_weights = any(map(is_fine, operator.inputs[1:]))
                        operands.append(self._weight(operator, position, operands[0], targets[0], fine_weights))
                    else:
                        operands.append(self._constant(tensor, targets[0] if declaration.same_quantization else tensor))
                if any(is_fine(name) and name in self._clamped_at_zero for name in operator.outputs):
                    attributes = {**attributes, "activation": "RELU"}
                emit(self._operator(kind, operands, targets, attributes), *operands, *targets)
            for target, output in zip(targets, outputs, strict=True):
                wanted = stored(output.name) if is_fine(output.name) else output
                if wanted is not target:
                    quantized(target, wanted)

        def port(source: Port) -> Port:
            name = stored(source.tensor).name
            return replace(source, tensor=name, limits=source.limits if name == source.tensor else None)

        ports = graph.signature
        return replace(
            graph,
            tensors=tensors,
            operators=tuple(operators),
            inputs=tuple(stored(name).name for name in graph.inputs),
            outputs=tuple(stored(name).name for name in graph.outputs),
            ports=replace(ports, inputs=tuple(map(port, ports.inputs)), outputs=tuple(map(port, ports.outputs))),
        )

    # --- what variants share ------------------------------------------------------------------------------------------

    def _once(self, key: Hashable, make: Callable[..., Made], *arguments: object) -> Made:
        if key not in self._made:
            self._made[key] = make(*arguments)
        result: Made = self._made[key]
        return result

    def _operator(
        self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], attributes: Mapping[str, Any]
    ) -> Operator:
        names, results = (tuple(tensor.name for tensor in tensors) for tensors in (inputs, outputs))
        return self._once((names, results), Operator, kind, names, results, attributes)

    def _int16(self, name: str, like: Tensor, scale: float | np.floating) -> Tensor:
        return self._once(name, Tensor, name, like.shape, "int16", per_tensor(scale, 0, "int16"))

    def _computed(self, output: Tensor, fine: bool) -> Tensor:
        """A result in 16 bits: fine, or on its way to 8."""
        if fine:
            return self.fine_tensor(output.name)
        part = self._part_of.get(output.name)
        scale = self._scale.get(part) if part is not None else None
        usual = np.float32(output.quantization.scale[0] / FIRST_STEPS)
        return self._int16(f"{output.name} before 8 bits", output, usual if scale is None else scale)

    def _weight(self, operator: Operator, position: int, input: Tensor, output: Tensor, fine: bool) -> Tensor:
        """The filter or the bias of an operator whose input is int16.

        A device computes 0 for a channel whose sums are in steps of less than 2**-32 of the result's, whatever its
        bias. Weights of such channels are on a coarser grid here: their sums are less than a step of the result anyway.
        """
        filter, bias = (self.graph.tensors[name] for name in operator.inputs[1:3])
        input_scale, output_scale = (float(tensor.quantization.scale[0]) for tensor in (input, output))
        key = (filter.name, position, fine, input.name, input_scale, output_scale)
        if key in self._made:
            result: Tensor = self._made[key]
            return result
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
            return self._once(key, Tensor, f"{filter.name} {word}", filter.shape, str(codes.dtype), grid, codes)
        scale = input_scale * scales
        steps = np.clip(np.rint(real / scale), -(2**47), 2**47).astype(np.int64)
        own = Quantization(scale.astype(np.float32), np.zeros(1), bias.quantization.axis)
        # The same bias has other codes with another input.
        name = f"{bias.name} {word} for {input.name}"
        return self._once(key, Tensor, name, bias.shape, "int64", own, steps)

    def _constant(self, tensor: Tensor, like: Tensor) -> Tensor:
        """A constant operand in int16 on the grid of a tensor; its own is exact."""
        if tensor.dtype != "int8":
            return tensor
        own, scale = tensor.quantization, float(like.quantization.scale[0])
        assert tensor.data is not None
        steps = tensor.data.astype(np.float64) - float(own.zero_point[0])
        codes = np.clip(np.rint(steps * (float(own.scale[0]) / scale)), *CODE_RANGES["int16"]).astype(np.int16)
        name = f"{tensor.name} in int16 by {scale:g}"
        return self._once(name, Tensor, name, tensor.shape, "int16", per_tensor(scale, 0, "int16"), codes)


def _clamps_of(graph: Graph) -> dict[str, Ends]:
    """The ranges of a file's results that the ends of their grids clamp by design, as far as grids can tell: from 0, or
    from minus it, to a whole number, such as 1 of a hard sigmoid; and those from 0, where nothing is lost if they are
    not meant to clamp."""
    clamps = {}
    for operator in graph.operators:
        tensor = graph.tensors[operator.outputs[0]]
        if tensor.dtype != "int8" or operator.attributes.get("activation") != "NONE":
            continue
        scale, zero_point = (float(ends[0]) for ends in (tensor.quantization.scale, tensor.quantization.zero_point))
        lowest, highest = CODE_RANGES["int8"]
        width, from_zero = scale * (highest - lowest), zero_point == lowest
        whole = width > 0.5 and abs(width - round(width)) < 1e-6 * width
        if whole and (from_zero or (zero_point in (-1, 0) and round(width) % 2 == 0)):
            clamps[tensor.name] = (0.0, float(round(width))) if from_zero else (-round(width) / 2, round(width) / 2)
        elif from_zero:
            clamps[tensor.name] = (0.0, math.inf)
    return clamps


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
    return {name: root(name) for name in first if graph.tensors[name].dtype in CODE_RANGES}
