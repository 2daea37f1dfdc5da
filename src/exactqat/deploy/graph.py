# SPDX-License-Identifier: Apache-2.0
"""A fully quantized network as a small graph: the result of lowering, which is simulated and written to files.

Operators carry TensorFlow Lite's names and meaning (`exactqat.kit.device` declares them), tensors are channels-last
with the batch first, activations are int8 or int16, weights int8, biases int32 or int64. `Builder` builds a graph;
`Graph.validate` refuses everything the device would refuse or compute differently, before a file is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..kit.device import (
    ACTIVATIONS,
    INT8_MAX,
    INT8_MIN,
    OPERATORS,
    Profile,
    Quantization,
    Tensor,
    per_tensor,
    profile_named,
)
from ..kit.device.operator import BOOL, FLOAT, OWN_GRID, REQUIRED, DeviceOperator, Refusal, in_float, need
from ..kit.device.operator import Operator as Operator
from ..kit.device.tensor import CODE_RANGES, INDICES, INT4, INT4_MAX, INT4_MIN, PLAIN, RAW, initial_codes
from ..kit.display import listed, table_of
from .signature import Port, Signature


def require_graph(graph: object) -> None:
    """Raises TypeError unless the argument is a graph."""
    if not isinstance(graph, Graph):
        raise TypeError(
            f"graph must be a Graph, as returned by exactqat.deploy.lower(model), got {type(graph).__name__}"
        )


# Marks operators that delegates leave to built-in kernels, in `Graph.measured_as`.
BUILT_IN = ":built_in"


@dataclass(frozen=True, eq=False)
class Graph:
    """A fully quantized network: tensors by name, operators in order of execution, names of inputs and outputs.

    Activations are int8 per tensor (indices: int32 or int64), or int16 per tensor with zero point 0; an operator has
    all its activations in one of them, and QUANTIZE converts between them. Filters are int8 in -127..127, zero
    point 0, per channel or per tensor; biases int32 [out], with int16 activations int64, zero point 0, scale exactly
    float32(input scale * filter scale). Other constants have the activations' dtype and are per tensor.

    Activations of fewer than eight bits are stored in int8 containers, placed so that the device's own saturation is
    the clamp of training (`place_codes` gives the placement, `Builder` follows it). For example, 4 bits, codes 0..15:

    * after RELU or RELU6 the codes are at the TOP of int8: code c is stored as 112 + c. The upper clamp (15) is int8
      saturation at 127, the lower clamp is the fused RELU at the zero point (112 for zero-point code 0).
    * without an activation they are first placed at the top, which clamps at code 15; a QUANTIZE of equal scale then
      shifts them to the BOTTOM, where code 0 is -128 and int8 saturation is the lower clamp.

    Weights of fewer bits need no placement: their codes are a subset of -127..127.

    Attributes:
        trained_for: the profile whose integers training computed, if the graph was lowered from a trained network.
        ports: the `signature` of a graph lowered from a model: the user's names and axes.
        metadata: what the file it was read from holds besides the network, by name; it is written back.
        attached: likewise the files in the archive after a .tflite file; see `with_metadata`.
        file: the .tflite file that it was read from, unchanged; None for every other graph.
    """

    tensors: Mapping[str, Tensor]
    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    trained_for: str = ""
    ports: Signature | None = None
    metadata: Mapping[str, bytes] = field(default_factory=dict)
    attached: Mapping[str, bytes] = field(default_factory=dict)
    # `replace` leaves it out.
    file: bytes | None = field(default=None, init=False)

    @property
    def signature(self) -> Signature:
        """The user's names for inputs and outputs, and the positions of the user's axes; for a graph built by hand, its
        own names and axes."""
        if self.ports is not None:
            return self.ports
        sides = (
            {name: tuple(range(len(self.tensors[name].shape))) for name in side} for side in (self.inputs, self.outputs)
        )
        return Signature(*(tuple(Port(name, name, axes) for name, axes in side.items()) for side in sides))

    def validate(self) -> None:
        """Raises ValueError naming the operator or tensor, what was given and what is allowed."""
        for key, tensor in self.tensors.items():
            if key != tensor.name:
                raise ValueError(f"tensor {tensor.name!r} is stored under the name {key!r}")
            with _at(f"tensor {key!r}"):
                _check_tensor(tensor)
        if not self.inputs or not self.outputs:
            raise ValueError("a graph needs at least one input and one output")
        for side, names in (("inputs", self.inputs), ("outputs", self.outputs)):
            if len(set(names)) != len(names):
                raise ValueError(f"the graph's {side} must differ, got {list(names)}; its signature may name one twice")
            for name in names:
                if name not in self.tensors:
                    raise ValueError(f"graph input or output {name!r} is not among the tensors")
        for name in self.inputs:
            shape = self.tensors[name].shape
            with _at(f"input {name!r}"):
                need(shape[0] == 1, f"inputs have batch 1 in the graph, got {shape}")
        if self.ports is not None:
            self._check_ports("input", self.inputs, self.ports.inputs)
            self._check_ports("output", self.outputs, self.ports.outputs)
        for name in self.variables:
            with _at(f"variable {name!r}"):
                self._check_variable(self.tensors[name])
        ready = self.check_operators()
        for name in self.outputs:
            if name not in ready:
                raise ValueError(f"graph output {name!r} is produced by no operator")

    def check_operators(self) -> set[str]:
        """The names of all tensors, the operators' results among them.

        Raises:
            Refusal: the device cannot run an operator.
        """
        ready = {*self.inputs, *self.variables}
        ready.update(name for name, tensor in self.tensors.items() if tensor.data is not None)
        for index, operator in enumerate(self.operators):
            where = f"operator {index} ({operator.kind} -> {', '.join(operator.outputs)})"
            check_operator(operator, self.tensors, ready, where)
            ready.update(operator.outputs)
        return ready

    def _check_variable(self, tensor: Tensor) -> None:
        ends = tensor.name in (*self.inputs, *self.outputs)
        need(not ends, "lasts between calls, and is neither an input nor an output")
        uses = sum(operator.inputs.count(tensor.name) for operator in self.operators)
        if not tensor.successor:
            need(uses == 1, f"must be one operand of one operator, got {uses}")
            return
        need(uses > 0, "is read by no operator")
        following = self.tensors.get(tensor.successor)
        known = following is not None and (
            following.name in (*self.results(), *self.inputs) or (following.variable and following.successor != "")
        )
        what = "an input, a result, or another variable that has one"
        need(known, f"has the successor {tensor.successor!r}, which is not {what}")
        if following is not None:
            same = (tensor.shape, tensor.dtype) == (following.shape, following.dtype)
            same &= tensor.quantization.equals(following.quantization)
            need(same, f"{tensor!r} does not hold what its successor is: {following!r}")

    def _check_ports(self, side: str, names: Sequence[str], ports: Sequence[Port]) -> None:
        words, tensors = [port.name for port in ports], [port.tensor for port in ports]
        if len(set(words)) != len(words):
            raise ValueError(f"the signature has several {side}s of the same name: {words}")
        if set(tensors) != set(names):
            raise ValueError(f"the signature's {side}s are the tensors {tensors}, the graph's {list(names)}")
        for port in ports:
            shape = self.tensors[port.tensor].shape
            if sorted(port.axes) != list(range(len(shape))):
                raise ValueError(f"the signature has axes {port.axes} for {side} {port.name!r} of shape {shape}")

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the tensors that last from one call to the next."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.variable)

    def initial_state(self, examples: int = 1) -> dict[str, np.ndarray]:
        """What the variables hold before the first call, [examples * rows, ...] by name: codes of real 0, unless a file
        sets others."""
        return {name: initial_codes(self.tensors[name], examples) for name in self.variables}

    def with_outputs(self, outputs: Sequence[str]) -> Graph:
        """The same graph with other tensors as its outputs; these have no user-defined names."""
        return replace(self, outputs=tuple(outputs), ports=None)

    def limits(self, name: str) -> tuple[int, int]:
        """The lowest and the highest allowed value of an integer input: of codes, of indices into tables, or of
        integers without a grid."""
        tensor = self.tensors[name]
        port = next((port for port in self.signature.inputs if port.tensor == name), None)
        if tensor.dtype == BOOL:
            return 0, 1
        if tensor.dtype in CODE_RANGES:
            return CODE_RANGES[tensor.dtype] if port is None or port.limits is None else port.limits
        names = {name}
        for operator in self.operators:
            if operator.inputs[0] in names and OPERATORS[operator.kind].moves_codes:
                names.update(operator.outputs)
        rows = [
            OPERATORS[operator.kind].rows([self.tensors[operand] for operand in operator.inputs])
            for operator in self.operators
            for position in OPERATORS[operator.kind].index_operands
            if operator.inputs[position] in names
        ]
        if not rows:
            whole = np.iinfo(tensor.dtype)
            return int(whole.min), int(whole.max)
        return 0, min(rows) - 1

    def as_indices(self, name: str, array: np.ndarray) -> np.ndarray:
        """Converts values for an input of integers without a grid to its dtype.

        Raises:
            ValueError: one lies outside the dtype, or outside a table.
        """
        lowest, highest = self.limits(name)
        outside = array[(array < lowest) | (array > highest)]
        if outside.size:
            raise ValueError(f"input {name!r} must hold integers in {lowest}..{highest}, got {outside.reshape(-1)[0]}")
        return array.astype(self.tensors[name].dtype)

    def results(self) -> tuple[str, ...]:
        """Names of all computed tensors, in order of execution."""
        return tuple(name for operator in self.operators for name in operator.outputs)

    def measured_as(self, operator: Operator) -> str:
        """The name under which `EXACT` and `MEASURED` know an operator: "CONV_2D", or "CONV_2D:int16"."""
        inputs = [self.tensors[name] for name in operator.inputs]
        name = OPERATORS[operator.kind].measured_as(inputs, self.tensors[operator.outputs[0]])
        name = f"{operator.kind}:{RAW}" if operator.unsigned and not name.endswith(OWN_GRID) else name
        return f"{name}{BUILT_IN}" if operator.built_in else name

    def in_uint8(self) -> frozenset[str]:
        """Names of the tensors whose codes the file that it was read from holds in uint8."""
        names = {
            name for operator in self.operators if operator.unsigned for name in (*operator.inputs, *operator.outputs)
        }
        return frozenset(name for name in names if self.tensors[name].dtype == "int8")

    def absent_from(self, device: str | Profile) -> tuple[str, ...]:
        """What the device's runtime does not run, a sentence for each reason; usually nothing."""
        profile = profile_named(device)
        places: dict[str, list[str]] = {}
        for operator in self.operators:
            name = self.measured_as(operator).removesuffix(BUILT_IN)
            reason = OPERATORS[operator.kind].absent_from(profile, name, len(operator.inputs))
            if reason:
                places.setdefault(reason, []).append(operator.outputs[0])
        return tuple(f"{reason} (at {listed(names, 4)})" for reason, names in places.items())

    def multiply_accumulates(self, operator: Operator) -> int:
        """Multiply-accumulates of one example through `operator`; 0 if nothing is multiplied and summed."""
        inputs = [self.tensors[name] for name in operator.inputs]
        output = self.tensors[operator.outputs[0]]
        return OPERATORS[operator.kind].multiply_accumulates(inputs, output, operator.attributes)

    def __repr__(self) -> str:
        parameters = sum(tensor.data.size for tensor in self.tensors.values() if tensor.data is not None)
        ends = [listed([self._described(name) for name in names]) for names in (self.inputs, self.outputs)]
        return f"Graph({len(self.operators):,} operators, {parameters:,} parameters: {ends[0]} -> {ends[1]})"

    def _described(self, name: str) -> str:
        # A graph that has not been validated may name tensors it does not hold.
        tensor = self.tensors.get(name)
        return f"{name} missing" if tensor is None else f"{name} {tensor.dtype}[{'x'.join(map(str, tensor.shape))}]"

    def _repr_html_(self) -> str:
        return table_of(repr(self), self.summary(), 6)

    def summary(self) -> list[dict[str, Any]]:
        """One row for each operator."""
        rows = []
        for operator in self.operators:
            output = self.tensors[operator.outputs[0]]
            constants = [self.tensors[name].data for name in operator.inputs]
            arrays = [data for data in constants if data is not None]
            weights = [data for data in arrays if data.dtype == np.int8]
            # Symmetric codes of b bits reach 2**(b - 1) - 1.
            bits = [int(np.abs(codes.astype(np.int64)).max(initial=0)).bit_length() + 1 for codes in weights]
            rows.append(
                {
                    "output": output.name,
                    "kind": operator.kind,
                    "activation": str(operator.attributes.get("activation", "NONE")),
                    "dtype": output.dtype,
                    "shape": "x".join(map(str, output.shape)),
                    "weights": ", ".join("x".join(map(str, codes.shape)) for codes in weights) or None,
                    "weight_bits": ", ".join(map(str, bits)) or None,
                    "scale": float(output.quantization.scale[0]),
                    "zero_point": int(output.quantization.zero_point[0]),
                    "parameters": sum(data.size for data in arrays),
                    "multiply_accumulates": self.multiply_accumulates(operator),
                }
            )
        return rows


def place_codes(
    scale: float | np.floating,
    zero_point: int,
    num_bits: int = 8,
    activation: str = "NONE",
    narrow_range: bool = False,
) -> tuple[Quantization, ...]:
    """How to store an activation with FakeQuant's codes in int8 so that the device clamps where training clamped.

    scale: the nudged scale; zero_point: the code (0..2**num_bits - 1) of real 0; num_bits: 2..8, or 16;
    activation: the one fused into the operator that computes the tensor. Returns one Quantization, or two if the lower
    clamp needs a QUANTIZE of equal scale after the operator (see `Graph`); consumers read the tensor in the last one.
    Codes of 16 bits fill int16, whose zero point is 0, so the code of real 0 must be 2**15.
    """
    if not (2 <= num_bits <= 8 or num_bits == 16):
        raise ValueError(f"num_bits must be in 2..8, or 16, got {num_bits}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if num_bits == 16:
        if zero_point != 2**15 or narrow_range:
            raise ValueError(f"16-bit codes are symmetric, with zero_point {2**15} and all codes, got {zero_point}")
        return (per_tensor(scale, 0, "int16"),)
    lowest, highest = (1 if narrow_range else 0), 2**num_bits - 1
    if not lowest <= zero_point <= highest:
        raise ValueError(f"zero_point must be a code in {lowest}..{highest}, got {zero_point}")
    top = per_tensor(scale, zero_point + INT8_MAX - highest)
    bottom = per_tensor(scale, zero_point + INT8_MIN - lowest)
    # A fused RELU never yields a code below that of real 0, so the top placement alone clamps both ends.
    return (top,) if activation != "NONE" or top.equals(bottom) else (top, bottom)


class Builder:
    """Builds a graph operator by operator; every method returns the name of its result, or of the first if there are
    several (`results` names all).

    Besides `operator`, there is a lower-case method for every kind that `exactqat.kit.device` declares:
    ``builder.conv_2d(x, filter, filter_scale, bias, output, name="first", strides=(2, 2))``,
    ``builder.add(x, y, output, name="sum")``, ``builder.pad(x, paddings, name="padded")``.
    `output` is the result's Quantization, or the placement from `place_codes`: for two placements the shifting operator
    is added and its name returned. Filters and biases are passed as integer codes; their tensors, including the bias
    scale, are created here.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._operators: list[Operator] = []
        self._inputs: list[str] = []

    def graph(self, outputs: Sequence[str], validated: bool = True, signature: Signature | None = None) -> Graph:
        """Returns the graph. validated: refuse what the device would refuse in a whole network; part of a network may
        read other things than a network's inputs. signature: the user's names and axes, if they are not the
        tensors'."""
        graph = Graph(dict(self._tensors), tuple(self._operators), tuple(self._inputs), tuple(outputs), ports=signature)
        if validated:
            graph.validate()
        return graph

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name."""
        if name not in self._tensors:
            raise ValueError(f"tensor {name!r} does not exist")
        return self._tensors[name]

    def input(self, name: str, shape: Sequence[int], quantization: Quantization | None, dtype: str = "int32") -> str:
        """shape: with batch 1; quantization: None for real numbers, `INDICES` for plain integers of `dtype`, int32 or
        uint8."""
        shape = tuple(int(size) for size in shape)
        grid = INDICES if quantization is None else quantization
        dtype = FLOAT if quantization is None else dtype if grid is INDICES else grid.dtype
        result = self._add_tensor(Tensor(name, shape, dtype, grid))
        self._inputs.append(name)
        return result

    def variable(
        self,
        name: str,
        shape: Sequence[int],
        quantization: Quantization | None,
        successor: str = "",
        initial: np.ndarray | None = None,
    ) -> str:
        """A tensor that lasts from one call to the next.

        Args:
            shape: with batch 1.
            quantization: None for real numbers.
            successor: the tensor whose values it holds in the next call; it may be built later. Without one, it is for
                operators that have such `states`.
            initial: what it holds before the first call; by default real 0.
        """
        shape = tuple(int(size) for size in shape)
        dtype, grid = (FLOAT, INDICES) if quantization is None else (quantization.dtype, quantization)
        tensor = Tensor(name, shape, dtype, grid, variable=True, initial=initial, successor=successor)
        return self._add_tensor(tensor)

    def constant(self, name: str, codes: np.ndarray, quantization: Quantization) -> str:
        """codes: int8, or int32 or int64 for biases; other integers are converted to the quantization's dtype if they
        fit."""
        codes = np.asarray(codes)
        dtype = np.dtype(quantization.dtype)
        if codes.dtype not in (dtype, np.int32) or codes.ndim == 0:
            lowest, highest = CODE_RANGES[quantization.dtype]
            if not np.all((codes >= lowest) & (codes <= highest) & (codes == np.rint(codes))):
                raise ValueError(f"constant {name!r}: codes must be integers within {lowest}..{highest}")
            codes = np.atleast_1d(codes).astype(dtype)
        return self.bias(name, codes, quantization)

    def bias(self, name: str, codes: np.ndarray, quantization: Quantization) -> str:
        """codes: int32 or int64, [channels]; of any dtype that a constant may have."""
        return self._add_tensor(Tensor(name, codes.shape, str(codes.dtype), quantization, codes))

    def operator(
        self,
        kind: str,
        operands: Sequence[str],
        output: Quantization | Sequence[Quantization] | None = None,
        *,
        name: str,
        unsigned: bool = False,
        **attributes: object,
    ) -> str:
        """Adds any device operator.

        Args:
            operands: names of tensors, including constants.
            output: None if the operator keeps its first operand's quantization, or determines its result's.
            unsigned: see `Operator`.
            attributes: those that differ from the declaration's defaults.

        Raises:
            ValueError: the device has no such operator, or does not support these operands and attributes.
        """
        with _at(f"{kind} {name!r}"):
            need(kind in OPERATORS, f"unknown operator kind {kind!r}; known: {', '.join(OPERATORS)}")
            declaration = OPERATORS[kind]
            for operand in operands:
                need(operand in self._tensors, f"input {operand!r} does not exist")
            placements = self._placements(declaration, operands, output)
            attributes = {key: _plain(value) for key, value in {**declaration.attributes, **attributes}.items()}
            missing = [key for key, value in attributes.items() if value is REQUIRED]
            need(not missing, f"{', '.join(missing)} must be given")
            shapes = declaration.checked_shapes([self._tensors[operand].shape for operand in operands], attributes)
        result = name if len(placements) == 1 else f"{name}/unshifted"
        results = (result, *(f"{result}:{number}" for number in range(1, len(shapes))))
        real = bool(operands) and self._tensors[operands[0]].dtype == FLOAT and placements[0] is INDICES
        plain = self._tensors[operands[-1]].dtype
        stored = plain if placements[0] is INDICES and declaration.takes_plain(plain) else placements[0].dtype
        dtypes = declaration.result_dtypes(attributes, FLOAT if real else stored, len(shapes))
        for tensor_name, shape, dtype in zip(results, shapes, dtypes, strict=True):
            self._add_tensor(Tensor(tensor_name, shape, dtype, placements[0] if dtype == dtypes[0] else INDICES))
        self._operators.append(Operator(kind, tuple(operands), results, attributes, unsigned=unsigned))
        return result if len(placements) == 1 else str(self.quantize(result, placements[1:], name=name))

    def results(self, name: str) -> tuple[str, ...]:
        """Names of all results of the operator whose first result has this name."""
        return next(operator.outputs for operator in self._operators if operator.outputs[0] == name)

    def __getattr__(self, method: str) -> Callable[..., str]:
        declaration = OPERATORS.get(method.upper())
        if declaration is None or method != method.lower():
            raise AttributeError(f"Builder has no {method!r}; device operators: {', '.join(OPERATORS).lower()}")
        return functools.partial(declaration.build, self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *map(str.lower, OPERATORS)]

    def _placements(
        self,
        declaration: DeviceOperator,
        operands: Sequence[str],
        output: Quantization | Sequence[Quantization] | None,
    ) -> tuple[Quantization, ...]:
        if output is not None:
            return (output,) if isinstance(output, Quantization) else tuple(output)
        need(bool(operands), "an operand is missing")
        first = self._tensors[operands[len(declaration.conditions) + len(declaration.index_operands)]].quantization
        fixed = declaration.grid_fixed_in(first.dtype)
        if fixed is not None:
            return (per_tensor(*fixed, first.dtype),)
        need(declaration.same_quantization, "the result's quantization is missing")
        return (first,)

    def _add_tensor(self, tensor: Tensor) -> str:
        if tensor.name in self._tensors:
            raise ValueError(f"tensor name {tensor.name!r} is used twice")
        self._tensors[tensor.name] = tensor
        return tensor.name


def _plain(value: object) -> object:
    """Converts attributes to Python's own numbers and tuples, so that a graph can be written unchanged."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Refusals name the place."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal(str(refusal), place) from None


def _check_tensor(tensor: Tensor) -> None:
    quantization = tensor.quantization
    dtypes = (*CODE_RANGES, "int32", "int64", FLOAT, BOOL, RAW)
    if tensor.dtype == INT4 and tensor.data is not None:
        fits = tensor.data.dtype == np.int8 and bool(np.all((tensor.data >= INT4_MIN) & (tensor.data <= INT4_MAX)))
        need(fits, f"codes of {INT4} must be int8 within {INT4_MIN}..{INT4_MAX}")
        tensor = replace(tensor, dtype="int8")
    need(tensor.dtype in dtypes, f"dtype must be one of {', '.join(dtypes)}, got {tensor.dtype!r}")
    need(len(tensor.shape) > 0 and min(tensor.shape) > 0, f"every size must be positive, got {tensor.shape}")
    in_range = bool(np.all((quantization.zero_point >= INT8_MIN) & (quantization.zero_point <= INT8_MAX)))
    if not in_range:  # printing an array takes as long as all other checks of a tensor
        raise Refusal(f"zero points must be in {INT8_MIN}..{INT8_MAX}, got {quantization.zero_point[:4]}")
    if quantization.axis is not None:
        fits = 0 <= quantization.axis < len(tensor.shape)
        need(fits, f"channel axis {quantization.axis} is not an axis of {tensor.shape}")
        channels = tensor.shape[quantization.axis]
        need(quantization.scale.size == channels, f"{quantization.scale.size} scales for {channels} channels")
    begun = tensor.initial
    if begun is not None:
        need(tensor.variable, "only a variable has initial values")
        fits = isinstance(begun, np.ndarray) and (begun.shape, str(begun.dtype)) == (tensor.shape, tensor.dtype)
        need(fits, f"its initial values must be {tensor.dtype} {list(tensor.shape)}")
    need(tensor.variable or not tensor.successor, "only a variable has a successor")
    if tensor.data is None:
        need(quantization.axis is None, "activations are quantized per tensor, not per channel")
        in_codes = tensor.dtype in CODE_RANGES
        need(in_codes or quantization.equals(INDICES), f"{tensor.dtype} must have scale 1 and zero point 0")
        fits = not in_codes or tensor.dtype == quantization.dtype
        need(fits, f"stored in {tensor.dtype}, but its quantization is for {quantization.dtype}")
    else:
        need(tensor.data.dtype == tensor.dtype, f"data must be {tensor.dtype}, got {tensor.data.dtype}")
        need(tensor.data.shape == tensor.shape, f"data has shape {tensor.data.shape}, not {tensor.shape}")


def check_operator(operator: Operator, tensors: Mapping[str, Tensor], ready: set[str], where: str) -> None:
    """Raises a Refusal that begins with `where` if the device cannot run an operator on these tensors.

    ready: names of the constants and of everything computed before it.
    """
    with _at(where):
        need(operator.kind in OPERATORS, f"unknown operator kind {operator.kind!r}; known: {', '.join(OPERATORS)}")
        declaration = OPERATORS[operator.kind]
        for name in (*operator.inputs, *operator.outputs):
            need(name in tensors, f"tensor {name!r} is missing")
        for name in operator.inputs:
            need(name in ready, f"input {name!r} is used before it is computed")
        need(len(operator.outputs) > 0, "needs an output")
        for position, name in enumerate(operator.outputs):
            once = name not in ready and name not in operator.outputs[:position]
            need(once, f"output {name!r} is written twice")
        fewest, most = declaration.operands
        fits = fewest <= len(operator.inputs) and (most is None or len(operator.inputs) <= most)
        takes = fewest if fewest == most else f"{fewest} or more" if most is None else f"{fewest} to {most}"
        need(fits, f"takes {takes} inputs, got {operator.inputs}")
        inputs, outputs = ([tensors[name] for name in side] for side in (operator.inputs, operator.outputs))
        for position, tensor in enumerate(inputs):
            _check_operand(declaration, position, tensor, inputs, outputs[0], operator.attributes)
        need(outputs[0].data is None, f"{outputs[0].name!r} must be an activation, not a constant")
        need(not outputs[0].variable, f"{outputs[0].name!r} must be an activation, not a variable")
        need(any(tensor.data is None for tensor in inputs), "at least one operand must be an activation")
        _check_results(operator, declaration, inputs, outputs)
        if not in_float(inputs, outputs[0]):
            checked = declaration.without_shift(inputs) if operator.unsigned else inputs
            declaration.check(checked, outputs[0], operator.attributes)


def _check_operand(
    declaration: DeviceOperator,
    position: int,
    tensor: Tensor,
    inputs: Sequence[Tensor],
    output: Tensor,
    attributes: Mapping[str, Any],
) -> None:
    """Whether an operand is a constant, a variable or an activation, and its dtype."""
    name = repr(tensor.name)
    if position in declaration.states:
        need(tensor.variable and not tensor.successor, f"{name} must be a variable without a successor")
        return
    need(not tensor.variable or tensor.successor != "", f"{name} must not be a variable without a successor")
    if position in declaration.weights:
        need(tensor.data is not None, f"{name} must be a constant")
        return
    need(declaration.constants or tensor.data is None, f"{name} must be an activation, not a constant")
    dtypes = (*declaration.dtypes, FLOAT) if declaration.floats else declaration.dtypes
    moved = (output.dtype,) if declaration.moves_codes and output.dtype in PLAIN else ()
    dtypes = (*dtypes, *declaration.plain, *moved)
    if position in declaration.conditions:
        dtypes = (BOOL,)
    elif position in declaration.index_operands:
        dtypes = declaration.index_dtypes
    why = f", in which LiteRT has no usable {declaration.kind}" if tensor.dtype == "int16" else ""
    need(tensor.dtype in dtypes, f"{name} must be {' or '.join(dtypes)}, got {tensor.dtype}{why}")
    if position in (*declaration.conditions, *declaration.index_operands):
        return
    of_result = output.dtype in (*CODE_RANGES, FLOAT, *declaration.plain) or declaration.moves_codes
    of_result = of_result and declaration.dtype(attributes, FLOAT) not in ("int32", "int64")  # indices
    stored = output.dtype if of_result else inputs[0].dtype
    narrow = position in declaration.narrow and tensor.data is not None and (tensor.dtype, stored) == ("int8", "int16")
    fits = declaration.changes_dtype or narrow or tensor.dtype == stored
    need(fits, f"{name} is {tensor.dtype} but the result is {stored}; insert a QUANTIZE before it")
    why = ": of constants in int8 with several scales LiteRT makes 0" if narrow else ""
    need(tensor.quantization.axis is None, f"{name} must be quantized per tensor{why}")


def _check_results(
    operator: Operator, declaration: DeviceOperator, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Their number, shapes, dtypes and grids."""
    shapes = declaration.checked_shapes([tensor.shape for tensor in inputs], operator.attributes)
    need(len(shapes) == len(outputs), f"needs outputs of the shapes {list(shapes)}, got {operator.outputs}")
    plain = outputs[0].dtype == FLOAT or declaration.takes_plain(outputs[0].dtype)
    stored = outputs[0].dtype if plain else outputs[0].quantization.dtype
    dtypes = declaration.result_dtypes(operator.attributes, stored, len(shapes))
    without_grid = (*declaration.conditions, *declaration.index_operands)
    for shape, dtype, output in zip(shapes, dtypes, outputs, strict=True):
        need(shape == output.shape, f"output must have shape {shape}, got {output.shape}")
        need(dtype == output.dtype, f"output must be {dtype}, got {output.dtype}")
        free = declaration.free_in_onnx and output.dtype == "int8"
        for position, tensor in enumerate(inputs):
            if declaration.same_quantization and dtype == dtypes[0] and position not in without_grid:
                same = free or tensor.quantization.equals(output.quantization)
                need(same, f"input {tensor.name!r} must have the output's quantization; insert a QUANTIZE before it")
        grid = declaration.grid_fixed_in(output.dtype)
        if grid is not None and output.dtype in CODE_RANGES and not free:
            fixed = per_tensor(*grid, output.dtype).equals(output.quantization)
            need(fixed, f"scale and zero point of the result must be {grid}")
