# SPDX-License-Identifier: Apache-2.0
"""A quantized file's network in trainable form: its plan, and real numbers whose integers are the file's.

Nothing is estimated. Every grid is the file's own and stays so. A filter's codes times a power of two are the weight; a
batch norm without statistics multiplies each channel by the factor missing from the file's scale. So the codes and
scales that a frozen network computes with are the file's, bit for bit, until a training step moves them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..kit.device import OPERATORS, Tensor, profile_named
from ..kit.device.operator import FLOAT, Attributes, Refusal, need
from ..kit.device.tensor import CODE_RANGES, dequantize
from ..kit.device.weighted import Weighted
from ..kit.display import listed, shortened
from ..kit.planning import UnsupportedOperator
from ..kit.planning.callers import users_line
from ..kit.planning.ends import Ends
from ..kit.planning.network import Constant, Network, Value
from ..kit.planning.plans import Grid, Numbers, Plan, PlanInput, PlanOutput, PlanStep, Weights
from ..kit.planning.rules import Rule
from .graph import Graph, Operator
from .lower import Lowering
from .random_inputs import random_codes
from .simulate import simulate
from .weights_on_grid import Trainable, unit_of, weights_on_grid


def trainable(graph: Graph) -> Trainable:
    """The network of a quantized file, to be trained.

    Raises:
        UnsupportedOperator: parts of it cannot be trained with their integers unchanged; every such part is named.
    """
    return Restoring(graph).run()


class Restoring:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made = Trainable(Plan(Network((), (), {}, {}, ()), (), (), {}, {}, (), ()))
        self.constants: dict[str, Constant] = {}
        self.grids: dict[str, Grid] = {}
        self.steps: list[PlanStep] = []
        self.refusals: list[str] = []
        # By tensor: the path that stores it. The QUANTIZE of a real input counts as the input itself.
        self.paths: dict[str, str] = {}
        self.taken: set[str] = set()
        # Tensors that follow from refused ones; there is nothing to say about them.
        self.lost: set[str] = set()
        # By path: the grid, if it is not its own.
        self.shared: dict[str, str] = {}

    def run(self) -> Trainable:
        if self.graph.in_uint8():
            raise UnsupportedOperator(
                "the file's codes are uint8, and training writes int8: deploy.convert(graph).graph is it in int8"
            )
        inputs = [self._input(name) for name in self.graph.inputs]
        for operator in self.graph.operators:
            if operator.outputs[0] in self.paths:  # QUANTIZE of an input
                continue
            if self.lost.intersection(operator.inputs):
                self.lost.update(operator.outputs)
                continue
            try:
                self._operator(operator)
            except Refusal as refused:
                self.refusals.append(f"{operator.kind} that makes '{operator.outputs[0]}': {refused}")
                self.lost.update(operator.outputs)
        outputs = ["" if name in self.lost else self.paths[name] for name in self.graph.outputs]
        if self.refusals:
            raise UnsupportedOperator(
                f"{len(self.refusals)} operator(s) of the file cannot be trained so that their integers stay what they "
                "are:\n" + "\n".join(f"  {number}. {text}" for number, text in enumerate(self.refusals, 1))
            )
        signature = self.graph.signature
        names = {port.tensor: port.name for port in (*signature.inputs, *signature.outputs)}
        shapes = {name: self.graph.tensors[name].shape for name in (*self.graph.inputs, *self.graph.outputs)}
        plan_inputs = tuple(
            PlanInput(path, path, shapes[name], 0, names.get(name, name), tuple(range(len(shapes[name]))))
            for name, path in inputs
        )
        results = tuple(
            PlanOutput(names.get(name, name), tuple(range(len(shapes[name])))) for name in self.graph.outputs
        )
        values = {path: Value(path, shapes[name]) for name, path in inputs}
        ends = Ends([source.name for source in plan_inputs], [result.name for result in results])
        network = Network(
            tuple(values),
            tuple(values),
            values,
            self.constants,
            (),
            tuple(source.path for source in plan_inputs),
            tuple(result.name for result in results),
            ends,
            ends,
            argument_names=tuple(source.name for source in plan_inputs),
            channels_first=False,
        )
        plan = Plan(
            network, plan_inputs, tuple(self.steps), self.grids, self.constants, tuple(outputs), tuple(outputs),
            results=results,
        )  # fmt: skip
        return replace(self.made, plan=plan)

    # --- tensors ----------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        """A path for a tensor: dots separate modules in frameworks, so names keep none; of what TensorFlow's converter
        fused, which it calls by all names, the first."""
        wanted = re.sub(r"[^\w/-]+", "_", name.partition(";")[0]).strip("_/") or "tensor"
        path, number = wanted, 1
        while path in self.taken:
            number += 1
            path = f"{wanted}_{number}"
        self.taken.add(path)
        return path

    def _stored(self, name: str, of_inputs: bool = False) -> str:
        """The path of a tensor, with a grid of its own: the file's."""
        tensor = self.graph.tensors[name]
        path = self.paths[name] = self._path(name)
        self._grid(path, tensor, of_inputs=of_inputs)
        return path

    def _grid(self, path: str, tensor: Tensor, of_inputs: bool = False) -> None:
        bits = 16 if tensor.dtype == "int16" else 8
        fixed = float(tensor.quantization.scale[0]), int(tensor.quantization.zero_point[0])
        self.grids[path] = Grid(path, Rule(activation_bits=bits), fixed=fixed, of_inputs=of_inputs)

    def _input(self, name: str) -> tuple[str, str]:
        tensor = self.graph.tensors[name]
        readers = [reader for reader in self.graph.operators if name in reader.inputs]
        if tensor.dtype == FLOAT and len(readers) == 1 and OPERATORS[readers[0].kind].changes_dtype:
            return name, self._stored(readers[0].outputs[0], of_inputs=True)
        if tensor.dtype not in ("int8", "int16"):
            self.refusals.append(f"input '{name}' is {tensor.dtype}; inputs are int8, int16, or float32 by QUANTIZE")
            self.lost.add(name)
            return name, ""
        return name, self._stored(name, of_inputs=True)

    # --- operators --------------------------------------------------------------------------------------------------

    def _operator(self, operator: Operator) -> None:
        tensors = [self.graph.tensors[name] for name in operator.inputs]
        results = [self.graph.tensors[name] for name in operator.outputs]
        declaration = OPERATORS[operator.kind]
        if declaration.changes_dtype and results[0].dtype == FLOAT and operator.outputs[0] in self.graph.outputs:
            self.paths[operator.outputs[0]] = self.paths[operator.inputs[0]]
            return
        for tensor in (*results, *(operand for operand in tensors if operand.data is None)):
            need(tensor.dtype in CODE_RANGES, f"'{tensor.name}' is {tensor.dtype}, and int8 or int16 can train")
            need(not tensor.variable, f"'{tensor.name}' is kept from call to call")
        declaration.restore(self, operator)

    # --- for declarations, which say what a plan has for them ---------------------------------------------------------

    def shapes(self, operator: Operator) -> list[tuple[int, ...]]:
        """The shapes of the operands, constants included."""
        return [self.graph.tensors[name].shape for name in operator.inputs]

    def results(self, operator: Operator) -> list[tuple[int, ...]]:
        """The shapes of the results."""
        return [self.graph.tensors[name].shape for name in operator.outputs]

    def tensors(self, operator: Operator) -> tuple[list[Tensor], list[Tensor]]:
        """The operands, constants included, and the results."""
        inputs, outputs = (
            [self.graph.tensors[name] for name in names] for names in (operator.inputs, operator.outputs)
        )
        return inputs, outputs

    def operands(self, operator: Operator) -> list[str]:
        """Paths of steps and inputs, and names of constants."""
        tensors = [self.graph.tensors[name] for name in operator.inputs]
        return [
            self.paths[tensor.name] if tensor.data is None else self._constant(operator, position, tensor)
            for position, tensor in enumerate(tensors)
        ]

    def _constant(self, operator: Operator, position: int, tensor: Tensor) -> str:
        """An operand that the file holds: a parameter on the file's grid."""
        assert tensor.data is not None
        what = f"its constant operand '{tensor.name}'"
        need(tensor.dtype in ("int8", "int16"), f"{what} is {tensor.dtype}, and int8 or int16 can train")
        need(tensor.quantization.scale.size == 1, f"{what} has {tensor.quantization.scale.size} scales, not one")
        name = self._path(f"{operator.outputs[0].partition(';')[0]}/operand_{position}")
        steps = tensor.data.astype(np.float64) - float(tensor.quantization.zero_point[0])
        values = (steps * np.float64(tensor.quantization.scale[0])).astype(np.float32)
        name = self.made.add(self.constants, name, values, unit=unit_of(np.abs(values).max(initial=0)))
        self._grid(name, tensor)
        return name

    def readers(self, name: str) -> list[Operator]:
        """The operators that read a tensor; empty if it is also a result of the network."""
        readers = [reader for reader in self.graph.operators if name in reader.inputs]
        return [] if name in self.graph.outputs else readers

    def absorbed(self, operator: Operator, path: str) -> None:
        """Another step computes this operator's result, which nothing else reads, as part of its own."""
        self.paths[operator.outputs[0]] = path

    def weighted(
        self,
        operator: Operator,
        operand: str = "",
        attributes: Attributes | None = None,
        stores: Operator | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """A step with a trainable weight.

        operand: the path of what it reads; attributes: of its step; stores: whose result it stores; shape: of its
        result; if these are not the operator's own.
        """
        declaration = OPERATORS[operator.kind]
        x, filters, bias = (self.graph.tensors[name] for name in operator.inputs)
        need(x.data is None, "its input is a constant")
        need(filters.data is not None, "its filter is computed")
        assert filters.data is not None
        need(filters.dtype == "int8", f"its filter is {filters.dtype}, and training writes int8")
        codes = filters.data.astype(np.int64)
        assert isinstance(declaration, Weighted)
        codes = np.moveaxis(declaration.plan_filter(codes), 0, declaration.plan_axis)
        need(bias.data is not None, "its bias is computed")
        assert bias.data is not None
        path = self._path((stores or operator).outputs[0])
        self.taken.discard(path)
        single = filters.quantization.axis is None or filters.quantization.scale.size == 1
        weights = weights_on_grid(
            self.made, self.constants, path, codes, filters.quantization.scale, bias.data.reshape(-1),
            x.quantization.scale[0], declaration.plan_axis, single,
        )  # fmt: skip
        if attributes is None:
            attributes = declaration.step_attributes(self.shapes(operator), operator.attributes)
        operands = [operand or self.paths[x.name]]
        self.step(operator, attributes, operands=operands, weights=weights, stores=stores, shape=shape)

    def step(
        self,
        operator: Operator,
        attributes: Attributes,
        *,
        kind: str = "",
        operands: Sequence[str] | None = None,
        result: int = 0,
        weights: Weights | None = None,
        stores: Operator | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """The step that stores a result of an operator.

        Args:
            kind: the device's operator, if it is another one. operands, shape: likewise.
            result: which one.
            stores: the operator whose result it is, if it is another one.
        """
        kind, name = kind or operator.kind, (stores or operator).outputs[result]
        operands = self.operands(operator) if operands is None else operands
        path = self._stored(name)
        if OPERATORS[kind].same_quantization:
            # Its codes are its operand's; so is its grid.
            of_operand = self.shared.get(operands[0], operands[0])
            need(self.grids[of_operand].fixed == self.grids[path].fixed, "its result is on another grid")
            del self.grids[path]
            self.shared[path] = of_operand
        shape = self.graph.tensors[name].shape if shape is None else shape
        activation = operator.attributes.get("activation", "NONE")
        self._enter(
            PlanStep(path, kind, tuple(operands), attributes, "", shape, activation=activation, weights=weights)
        )

    def part(self, operator: Operator, kind: str, operand: str, attributes: Attributes, shape: tuple[int, ...]) -> str:
        """The path of a step that moves codes and has no name in the file."""
        need(operand in self.paths.values() or operand in self.shared, "one of its operands is a constant")
        path = self._path(f"{operator.outputs[0]}/part")
        self.shared[path] = self.shared.get(operand, operand)
        self._enter(PlanStep(path, kind, (operand,), attributes, "", shape))
        return path

    def _enter(self, step: PlanStep) -> None:
        self.steps.append(replace(step, grid=self.shared.get(step.path, step.path)))


def lowered_as_planned(plan: Plan, numbers: Numbers) -> Graph:
    """The device's network of a plan that was made of a file."""
    try:
        return Lowering(plan, numbers).run()
    except ValueError as error:
        raise UnsupportedOperator(f"the network that would be trained is not the file's: {error}") from error


def compare_with_file(graph: Graph, plan: Plan, numbers: Numbers, device: str) -> None:
    """Raises UnsupportedOperator if a plan with these numbers has other integers than the file, on random codes.

    A trained network is written with all sizes, so it is compared with the file as delegates would compute it; a
    warning names operators that they leave to built-in kernels in the file itself.
    """
    left = [f"{layer.kind} at {shortened(layer.outputs[0])!r}" for layer in graph.operators if layer.built_in]
    if left and profile_named(device).delegates:
        warnings.warn(
            f"the file computes sizes from its batch, so on {device} LiteRT leaves {listed(left)} to built-in kernels; "
            "the trained network's file states all sizes, and single codes can differ from this file's (convert the "
            "model with a fixed batch)",
            stacklevel=users_line(),
        )
        graph = replace(graph, operators=tuple(replace(layer, built_in=False) for layer in graph.operators))
    lowered = lowered_as_planned(plan, numbers)
    ours, inputs = random_codes(lowered, range(2), 0), {}
    for name, path in zip(graph.inputs, lowered.inputs, strict=True):
        real = graph.tensors[name].dtype == FLOAT
        inputs[name] = dequantize(ours[path], lowered.tensors[path].quantization) if real else ours[path]
    theirs, results = simulate(graph, inputs, device=device), simulate(lowered, ours, device=device)
    wrong = []
    # A file's signature may name its outputs in another order.
    for name, own in zip(graph.outputs, lowered.signature.outputs, strict=True):
        expected, result = theirs[name], results[own.tensor]
        if graph.tensors[name].dtype == FLOAT:
            result = dequantize(result, lowered.tensors[own.tensor].quantization)
        if not np.array_equal(expected, result):
            wrong.append(f"{int((expected != result).sum()):,} of {expected.size:,} of '{own.name}'")
    if wrong:
        raise UnsupportedOperator(
            f"the network that would be trained computes other integers than the file: {listed(wrong)} differ on "
            f"{device}"
        )


# Share of a result's largest value: float32 numbers summed in another order.
_FLOAT_TOLERANCE = 1e-4


def compare_in_float(
    plan: Plan,
    network: Callable[..., Sequence[np.ndarray]],
    original: Callable[..., Sequence[np.ndarray]],
) -> None:
    """Raises UnsupportedOperator if a plan without quantization computes other real numbers than its file, on random
    inputs.

    Args:
        network: what the plan computes from the inputs, for two examples.
        original: likewise, what the file computes.
    """
    rng = np.random.default_rng(0)
    inputs = []
    for source in plan.inputs:
        shape = [2 * size if axis == source.batch_axis else size for axis, size in enumerate(source.shape)]
        drawn = rng.integers(0, source.rows, shape).astype(np.int32) if source.rows else rng.standard_normal(shape)
        inputs.append(drawn if source.rows else drawn.astype(np.float32))
    wrong = []
    for port, expected, ours in zip(plan.results, original(*inputs), network(*inputs), strict=True):
        if not np.issubdtype(expected.dtype, np.floating):
            share = float(np.mean(expected != ours)) if expected.shape == ours.shape else 1.0
        elif expected.shape == ours.shape:
            share = float(np.abs(expected - ours).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30))
        else:
            share = np.inf
        if not share <= _FLOAT_TOLERANCE:
            wrong.append(f"'{port.name}' by {share:.2g} of its largest value")
    if wrong:
        raise UnsupportedOperator(
            f"the network that would be trained computes other real numbers than the file: {listed(wrong)}"
        )
