# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of networks: declared kinds compute what PyTorch computes, and what is no network is refused."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import network_interpreter  # noqa: E402
import plain_networks  # noqa: E402
from torch import nn  # noqa: E402

import exactqat.deploy.lower  # noqa: E402
from exactqat.kit import planning  # noqa: E402
from exactqat.kit.capture.torch.model import capture  # noqa: E402
from exactqat.kit.device import OPERATORS  # noqa: E402
from exactqat.kit.device.functions import FUNCTIONS, Function, declare  # noqa: E402
from exactqat.kit.planning import maker  # noqa: E402
from exactqat.kit.planning.network import KINDS, Constant, Network, Place, Step, Value  # noqa: E402

# Between them: convolutions of all sorts, norms, pools, products, attention, movement and functions of one value.
SAMPLE = ("squeeze_excite_net", "espcn", "norms", "pads", "global_pools", "activations_gelu_mish_silu", "tiny_vit")


def computed(network: Network, model: nn.Module, inputs: list[Any]) -> dict[str, np.ndarray]:
    """Every value of a network for one example, by the kinds' declarations alone; those that they do not say, by
    PyTorch."""
    run = network_interpreter.Run(network, model, False)
    run.dtype = torch.float64
    values: dict[str, Any] = {name: x.numpy() for name, x in zip(network.inputs, inputs, strict=True)}
    for step in network.steps:
        operands = [read(each, values, run) for each in step.inputs]
        kind = KINDS[step.kind]
        if kind.real is None:
            run.values = {name: torch.as_tensor(np.array(value)) for name, value in values.items()}
            values[step.output] = run.step(step).numpy()
        else:
            values[step.output] = kind.compute(operands, step.attributes)
    return values


def read(operand: Any, values: Mapping[str, Any], run: Any) -> Any:
    if isinstance(operand, str) and operand not in values:
        tensor = run.read(operand)
        return tensor.detach().numpy()
    return values[operand] if isinstance(operand, str) else operand


@pytest.mark.parametrize("name", SAMPLE)
def test_declared_kinds_compute_what_pytorch_computes(name: str) -> None:
    torch.manual_seed(0)
    model, examples = plain_networks.NETWORKS[name]()
    examples = examples if isinstance(examples, tuple) else (examples,)
    network = capture(model.eval(), examples)
    model = model.double()
    rows = [network.values[each].shape[network.values[each].batch_axis] for each in network.inputs]
    inputs = [x[:row].double() for x, row in zip(examples, rows, strict=True)]
    with torch.no_grad():
        values = computed(network, model, inputs)
        expected = network_interpreter.run(network, model, inputs)
    for output, theirs in zip(network.outputs, expected, strict=True):
        np.testing.assert_allclose(values[output], theirs.numpy(), rtol=1e-9, atol=1e-9)
    for step in network.steps:
        assert values[step.output].shape == network.values[step.output].shape, step


def relu(**changed: Any) -> Network:
    values = {name: Value(name, (1, 3)) for name in ("x", "y")}
    step = Step("relu", ("x",), "y", {}, Place("act", "model.py", 3))
    given: dict[str, Any] = {"inputs": ("x",), "outputs": ("y",), "values": values, "constants": {}, "steps": (step,)}
    return Network(**given | changed)


def steps(kind: str, inputs: tuple[Any, ...] = ("x",), output: str = "y", **attributes: Any) -> dict[str, Any]:
    return {"steps": (Step(kind, inputs, output, attributes, Place("act", "model.py", 3)),)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (steps("rectify"), "'rectify' is no kind of a step; the kinds are abs, "),
        (steps("relu", ("x", "x")), "a step 'relu' reads x, got 2 inputs"),
        (steps("linear", ("x", None)), "input 'weight' of a step 'linear' must be there, got None"),
        (steps("softmax"), "the attributes of a step 'softmax' are axis: axis missing"),
        (steps("relu", slope=0.1), "the attributes of a step 'relu' are none: got slope"),
        (steps("softmax", axis=1.0), "attribute 'axis' of a step 'softmax' must be an integer, got 1.0"),
        (steps("softmax", axis=True), "attribute 'axis' of a step 'softmax' must be an integer, got True"),
        (steps("gelu", approximate="erf"), "attribute 'approximate' of a step 'gelu' must be one of none, tanh, got"),
        (steps("clamp", min=None, max="6"), "attribute 'max' of a step 'clamp' must be a number or None, got '6'"),
        (steps("relu", ("z",)), "a step 'relu' reads 'z', which nothing before it makes"),
        (steps("relu", output="x"), "a step 'relu' makes 'x', which is made already"),
        (steps("relu", output="z"), "a step 'relu' makes 'z', which is not among the values"),
        ({"outputs": ("z",)}, "^inputs and outputs must be among the values, got z$"),
        ({"steps": ()}, "^no step makes the outputs y$"),
    ],
)
def test_what_is_no_network_is_refused(changed: dict[str, Any], message: str) -> None:
    assert relu().steps
    with pytest.raises(ValueError, match=message) as refused:
        relu(**changed)
    assert ("model.py, line 3" in str(refused.value)) == bool(changed.get("steps"))


def test_constants_are_read() -> None:
    network = relu(constants={"c": Constant("c", (3,))}, **steps("add", ("x", "c")))
    assert KINDS["add"].pointwise and not KINDS["softmax"].pointwise
    assert np.array_equal(KINDS[network.steps[0].kind].compute([np.ones(3), 2.0], {}), [3, 3, 3])
    with pytest.raises(NotImplementedError, match="the declaration of 'lstm' does not say what it computes"):
        KINDS["lstm"].compute([], {})


def test_every_function_that_is_a_step_is_a_kind() -> None:
    assert {name for name, each in FUNCTIONS.items() if each.is_kind} <= set(KINDS)
    with pytest.raises(ValueError, match="function 'relu' is declared already"):
        declare(Function("relu", lambda primitives, x: x))


def test_every_device_operator_is_reached_by_a_plan_or_says_what_it_is_for() -> None:
    named = {function.operator for function in FUNCTIONS.values()}
    rooms = [module for _, module in inspect.getmembers(planning, inspect.ismodule)]
    for module in (*rooms, maker, inspect.getmodule(exactqat.deploy.lower)):
        assert module is not None
        found = ast.walk(ast.parse(inspect.getsource(module)))
        named |= {str(node.value) for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # Some kinds are called as the operator is.
    named |= {kind.upper() for kind in ("softmax", "log_softmax", "maximum", "minimum", "add", "sub", "mul")}
    # What has no form in integers is in others' files alone. RELU6 is also the word of a fused activation.
    kinds = {kind: operator for kind, operator in OPERATORS.items() if operator.dtypes and kind != "RELU6"}
    assert {kind for kind in kinds if kind not in named} == {k for k, each in kinds.items() if each.purpose}
