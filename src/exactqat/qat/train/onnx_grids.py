# SPDX-License-Identifier: Apache-2.0
"""A quantized .onnx file in the form frameworks train: the plan of its network, on the file's own grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...deploy.graph import Graph, Operator
from ...deploy.inspect import need_a_bounded_size
from ...deploy.lower import Lowering
from ...deploy.random_inputs import random_codes
from ...deploy.simulate import simulate
from ...deploy.trainable import lowered_as_planned
from ...deploy.weights_on_grid import Trainable, unit_of, weights_on_grid
from ...kit.device import OPERATORS
from ...kit.device.activation import on_any_grid
from ...kit.device.file_forms import TO_CODES, TO_REAL
from ...kit.device.operator import FLOAT, Attributes, Call, Refusal, need
from ...kit.device.profile import ONNXRUNTIME_X86
from ...kit.device.tensor import INDICES, Tensor, dequantize, quantize
from ...kit.display import listed
from ...kit.planning import UnsupportedOperator
from ...kit.planning.network import Constant
from ...kit.planning.planner import Planner
from ...kit.planning.plans import Grid, Numbers, Plan, PlanInput, PlanStep
from ...kit.planning.rules import Rule
from ..capture.files import FileNetwork

# Random examples, on which a network is compared with its file.
_EXAMPLES = 4


def on_its_grids(file: FileNetwork, keep_final_activation: bool = True) -> Trainable:
    """The trainable network of a file that quantizes its values.

    Raises:
        UnsupportedOperator: a part of it cannot be trained on the file's grids; every such part is named.
    """
    planner = Planner(file.network, [Rule()], True, keep_final_activation, file.constant_grids)
    plan = planner.run()
    network = Trainable(plan)
    problems: list[str] = []
    grids = dict(plan.grids)
    file_grids: dict[str, tuple[float, int]] = {}
    makers = {step.path: step for step in plan.steps}
    free = {step.path for step in plan.steps if step.kind and OPERATORS[step.kind].free_in_onnx}
    # Functions whose grid devices fix, on another grid.
    looked_up: set[str] = set()
    for value, grid in file.grids.items():
        if value not in planner.stored:
            continue  # nothing that is returned depends on it
        name = planner.stored[value].grid.now.name
        if file_grids.setdefault(name, grid) != grid:
            problems.append(f"'{name}' is stored on two grids, {_said(file_grids[name])} and {_said(grid)}")
        elif grids[name].fixed not in (None, grid) and name in makers and on_any_grid(makers[name].kind) is not None:
            looked_up.add(name)
        elif grids[name].fixed not in (None, grid) and name not in free:
            problems.append(f"'{name}' is on the grid {_said(grid)}; devices have {_said(grids[name].fixed)}")
        grids[name] = replace(grids[name], fixed=grid)
        stored_as = planner.stored[value]
        if stored_as.shape == file.network.values[value].shape and value in file.codes:
            network.codes[stored_as.path] = file.codes[value]  # of what is fused into one, the last
    missing = [name for name, grid in grids.items() if grid.fixed is None]
    network.in_float = _last_layers(plan, missing)
    missing = [name for name in missing if name not in network.in_float]
    if missing:
        problems.append(f"the file does not quantize {listed(missing, 6)}")
    else:
        quantized = {planner.stored[value].path for value in file.grids if value in planner.stored}
        problems += _read_in_float(plan, quantized)
    constants = dict(plan.constants)
    stored: list[PlanInput | PlanStep] = [*plan.inputs, *plan.steps]
    scales = {step.path: grids[step.grid].fixed for step in stored if step.grid in grids}
    steps = []
    for step in plan.steps:
        table = on_any_grid(step.kind) if step.path in looked_up else None
        if table is not None:
            step = replace(step, kind=table[0], attributes=table[1])
        try:
            steps.append(_step(file, step, network, constants, scales, grids))
        except Refusal as refused:
            problems.append(f"{step.kind} that makes '{step.path}': {refused}")
    if problems:
        raise UnsupportedOperator(
            f"{len(problems)} thing(s) of the file have no integers here that are the file's:\n"
            + "\n".join(f"  {number}. {text}" for number, text in enumerate(problems, 1))
        )
    network.plan = replace(plan, steps=tuple(steps), grids=grids, constants=constants)
    return network


def _read_in_float(plan: Plan, quantized: set[str]) -> list[str]:
    """Steps that compute from real numbers in the file that are on a grid here: the result of a pool or a reshape is
    quantized, and its operand has another reader."""
    on_codes, problems = set(quantized), []
    for step in plan.steps:
        operands = [name for name in step.operands if plan.is_stored(name)]
        if step.weights is None and operands and all(plan.stored(name).grid == step.grid for name in operands):
            on_codes |= {step.path} if on_codes >= set(operands) else set()
        elif not step.outside:
            problems += [
                f"'{step.path}' reads '{name}', which is not quantized there"
                for name in operands
                if name not in on_codes
            ]
    return problems


def _last_layers(plan: Plan, grids: Sequence[str]) -> dict[str, str]:
    """The grids from which nothing on another grid is computed, and the layer with weights that each has."""
    layers = {}
    for name in grids:
        on_it = {step.path for step in plan.steps if step.grid == name}
        made_from_others = [step for step in plan.steps if step.path in on_it and not on_it & set(step.operands)]
        read = any(on_it & set(step.operands) for step in plan.steps if step.path not in on_it and not step.outside)
        if len(made_from_others) == 1 and made_from_others[0].weights is not None and not read:
            layers[name] = made_from_others[0].path
    return layers


def closed(plan: Plan, in_float: Mapping[str, str], numbers_of: Callable[[Plan], Numbers]) -> Plan:
    """The plan with a grid for each of `Trainable.in_float`, with room for the results of random codes.

    numbers_of: returns what a plan without open grids would be frozen to.
    """
    if not in_float:
        return plan
    # First on grids coarse enough for every sum; its real numbers follow from its operands' codes.
    numbers = numbers_of(_with_grids(plan, dict.fromkeys(in_float, (1.0, 0))))
    steps = {step.path: step for step in plan.steps}
    coarse = {}
    for name, path in in_float.items():
        scale, _ = numbers.grids[plan.stored(steps[path].operands[0]).grid]
        coarse[name] = float(np.float32(scale * numbers.weights[path].scale.max() * 2.0**20)), 0
    lowered = Lowering(with_room := _with_grids(plan, coarse), numbers_of(with_room)).run()
    made_by = {operator.outputs[0]: operator for operator in lowered.operators}
    layers = {name: made_by[path] for name, path in in_float.items()}
    need_a_bounded_size(lowered, "the file", _EXAMPLES)
    codes = random_codes(lowered, range(_EXAMPLES), 0)
    wanted = [source for layer in layers.values() for source in layer.inputs if lowered.tensors[source].data is None]
    operands = {**codes, **simulate(lowered, codes, ONNXRUNTIME_X86, wanted, progress=False)}
    grids = {}
    for name, layer in layers.items():
        tensors = [lowered.tensors[source] for source in layer.inputs]
        values = [
            operands[source] if tensor.data is None else tensor.data
            for source, tensor in zip(layer.inputs, tensors, strict=True)
        ]
        output = lowered.tensors[layer.outputs[0]]
        steps_of = OPERATORS[layer.kind].exact_steps(
            Call(values, tensors, (output,), layer.attributes, ONNXRUNTIME_X86)
        )
        assert steps_of is not None
        low = 0.0 if plan.grids[name].nonnegative else min(float(steps_of.min()), 0.0)
        width = (max(float(steps_of.max()), 0.0) - low) or 1.0
        grids[name] = float(np.float32(width / 255 * coarse[name][0])), round(-128 - low / width * 255)
    return _with_grids(plan, grids)


def as_others_write(graph: Graph, stored: Collection[str]) -> Graph:
    """The device's network of a file with averages on the file's own grids, and with real numbers where onnxruntime has
    them, between DEQUANTIZE and QUANTIZE.

    stored: results whose codes the file holds.
    """
    tensors, operators, reals, merged = dict(graph.tensors), list[Operator](), dict[str, str](), set[str]()

    def add(kind: str, source: str, result: Tensor, attributes: Attributes) -> str:
        tensors[result.name] = result
        operators.append(Operator(kind, (source,), (result.name,), attributes))
        return result.name

    for operator in graph.operators:
        declaration, (name, *_), (result, *_) = OPERATORS[operator.kind], operator.inputs, operator.outputs
        readers = [reader for reader in graph.operators if result in reader.inputs]
        again = bool(readers) and all(OPERATORS[reader.kind].changes_dtype for reader in readers)
        again = again and result not in (*stored, *graph.outputs)
        if declaration.free_in_onnx and declaration.same_quantization:
            operator = replace(operator, unsigned=True)
            if again:
                operators += [replace(operator, outputs=reader.outputs) for reader in readers]
                merged.update(reader.outputs[0] for reader in readers)
                continue
        if result in merged:
            continue
        if not declaration.real_in_onnx or not (declaration.changes_dtype or again or result in stored):
            operators.append(replace(operator, unsigned=operator.unsigned or declaration.real_in_onnx))
            continue
        if name not in reals:
            source = replace(tensors[name], name=f"{name}/real", dtype=FLOAT, quantization=INDICES)
            reals[name] = add(TO_REAL, name, source, {})
        real, output = reals[name], tensors[result]
        if not declaration.changes_dtype:
            whole = replace(output, name=f"{result}/computed", dtype=FLOAT, quantization=INDICES)
            real = add(operator.kind, real, whole, operator.attributes)
        if again:
            reals[result] = real
        else:
            add(TO_CODES, real, output, {})
    used = {name for operator in operators for name in (*operator.inputs, *operator.outputs)} | set(graph.inputs)
    held = {name: tensor for name, tensor in tensors.items() if name in used}
    return replace(graph, tensors=held, operators=tuple(operators))


def _with_grids(plan: Plan, fixed: Mapping[str, tuple[float, int]]) -> Plan:
    return replace(
        plan, grids={**plan.grids, **{name: replace(plan.grids[name], fixed=at) for name, at in fixed.items()}}
    )


def _said(grid: tuple[float, int] | None) -> str:
    return "none" if grid is None else f"(scale {grid[0]:.6g}, zero point {grid[1]})"


def _step(
    file: FileNetwork,
    step: PlanStep,
    network: Trainable,
    constants: dict[str, Constant],
    grids: Mapping[str, tuple[float, int] | None],
    constants_grids: dict[str, Grid],
) -> PlanStep:
    """The step with weights that have the file's codes.

    Args:
        grids: of what is stored.
        constants_grids: of constant operands; new ones are added.
    """
    names = [at if at in grids else _constant(file, network, constants, at, constants_grids) for at in step.operands]
    step = replace(step, operands=tuple(names))
    if step.weights is None:
        return step
    weights = step.weights
    need(weights.batch_norm is None, "its batch norm is not folded")
    need(weights.weight in file.constant_grids, "its weight is not quantized in the file")
    scale, zero_point = file.constant_grids[weights.weight]
    input_grid = grids[step.operands[0]]
    need(input_grid is not None, "its operand is not quantized in the file")
    assert input_grid is not None
    values = file.parameters[weights.weight]
    shape = [1] * values.ndim
    shape[weights.channel_axis] = -1
    codes = np.rint(values / scale.reshape(shape if scale.size > 1 else [1] * values.ndim)).astype(np.int64)
    channels = values.shape[weights.channel_axis]
    step_of_bias = np.broadcast_to(scale, (channels,)) * np.float32(input_grid[0])
    own_scale = None if weights.bias is None else file.constant_grids.get(weights.bias, (None, None))[0]
    # Runtimes add its codes to sums of codes, whatever its scale is.
    fits = own_scale is None or np.allclose(own_scale, step_of_bias, rtol=1e-5, atol=0)
    need(fits, "its bias is on another scale than input scale * weight scale")
    bias = np.zeros(channels) if weights.bias is None else np.rint(file.parameters[weights.bias] / step_of_bias)
    reason = _untrainable(codes, zero_point)
    if reason:
        need(zero_point.size == 1 or not np.any(zero_point), "its weight has a zero point for each channel")
        zero = int(zero_point.reshape(-1)[0])
        network.filters[step.path] = codes + zero, zero
        network.untrainable.append(f"{step.kind} that makes '{step.path}': {reason}")
    file_weights = weights_on_grid(
        network, constants, step.path, np.clip(codes, -127, 127), scale, bias, np.float32(input_grid[0]),
        weights.channel_axis, scale.size == 1,
    )  # fmt: skip
    return replace(step, weights=file_weights)


def _untrainable(codes: np.ndarray, zero_point: np.ndarray) -> str:
    """Why training does not write a filter of these codes, from real 0; "": it does."""
    if np.any(zero_point):
        return "its weight has a zero point other than 0"
    return "its filter has codes of -128, and filters train in -127..127" if codes.min(initial=0) < -127 else ""


def _constant(
    file: FileNetwork, network: Trainable, constants: dict[str, Constant], name: str, grids: dict[str, Grid]
) -> str:
    """The name of a constant operand, which is added with its grid, the file's."""
    constant = constants[name]
    source = constant.sources[0] if len(constant.sources) == 1 else name
    need(source in file.constant_grids, f"its constant operand '{name}' is not quantized in the file")
    scale, zero_point = file.constant_grids[source]
    need(scale.size == 1, f"its constant operand '{name}' has {scale.size} scales, not one")
    values = file.parameters[source]
    need(values.size == math.prod(constant.shape), f"its constant operand '{name}' is computed from '{source}'")
    network.parameters[source] = values
    if constant.parameter:
        name = network.add(constants, name, values, unit=unit_of(np.abs(values).max(initial=0)))
    grids[name] = Grid(name, Rule(), fixed=(float(scale[0]), int(zero_point[0])))
    return name


def compare_with_onnx(
    plan: Plan,
    numbers: Numbers,
    original: Callable[..., Sequence[np.ndarray]],
    device: str,
    in_float: Mapping[str, str],
) -> None:
    """Raises UnsupportedOperator if a plan with these numbers has other integers on a device than onnxruntime computes
    for the file, on random codes.

    Args:
        original: what the file returns for real numbers.
        in_float: grids of what it returns in float32, which may round to a neighbouring code.
    """
    lowered = lowered_as_planned(plan, numbers)
    codes = random_codes(lowered, range(_EXAMPLES), 0)
    reals = [
        port.to_user(dequantize(codes[port.tensor], lowered.tensors[port.tensor].quantization))
        for port in lowered.signature.inputs
    ]
    results, wrong = simulate(lowered, codes, device, progress=False), []
    for port, path, theirs in zip(lowered.signature.outputs, plan.device_outputs, original(*reals), strict=True):
        ours = port.to_user(results[port.tensor])
        expected = quantize(theirs, lowered.tensors[port.tensor].quantization)
        may_differ_by = 1 if plan.stored(path).grid in in_float else 0
        differ = np.abs(ours.astype(np.int64) - expected) > may_differ_by
        if ours.shape != expected.shape or differ.any():
            wrong.append(f"{int(differ.sum()):,} of {ours.size:,} of '{port.name}'")
    if wrong:
        raise UnsupportedOperator(
            f"the network that would be trained computes other integers on {device} than onnxruntime makes of the "
            f"file: {listed(wrong)} differ"
        )
