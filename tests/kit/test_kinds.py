# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of networks, and what is not a network."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import numpy as np
import pytest

import exactqat.deploy.lower
from exactqat.kit import planning
from exactqat.kit.device import OPERATORS
from exactqat.kit.device.functions import FUNCTIONS, Function, declare
from exactqat.kit.planning import maker
from exactqat.kit.planning.network import KINDS, Constant, Network, Place, Step, Value


def relu(**changed: Any) -> Network:
    values = {name: Value(name, (1, 3)) for name in ("x", "y")}
    step = Step("relu", ("x",), "y", {}, Place("act", "model.py", 3))
    fields: dict[str, Any] = {"inputs": ("x",), "outputs": ("y",), "values": values, "constants": {}, "steps": (step,)}
    return Network(**fields | changed)


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
    with pytest.raises(NotImplementedError, match="a step 'lstm' is not computed value by value"):
        KINDS["lstm"].compute([], {})


def test_every_function_that_is_a_step_is_a_kind() -> None:
    assert {name for name, function in FUNCTIONS.items() if function.is_kind} <= set(KINDS)
    with pytest.raises(ValueError, match="function 'relu' is declared already"):
        declare(Function("relu", lambda primitives, x: x))


def test_every_device_operator_is_reached_by_a_plan_or_says_what_it_is_for() -> None:
    named = {function.operator for function in FUNCTIONS.values()}
    rooms = [module for _, module in inspect.getmembers(planning, inspect.ismodule)]
    for module in (*rooms, maker, inspect.getmodule(exactqat.deploy.lower)):
        assert module is not None
        nodes = ast.walk(ast.parse(inspect.getsource(module)))
        named |= {str(node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # Some kinds are called as the operator is.
    named |= {kind.upper() for kind in ("softmax", "log_softmax", "maximum", "minimum", "add", "sub", "mul")}
    # What has no form in integers is in others' files alone. RELU6 is also the word of a fused activation.
    kinds = {kind: operator for kind, operator in OPERATORS.items() if operator.dtypes and kind != "RELU6"}
    assert {kind for kind in kinds if kind not in named} == {k for k, operator in kinds.items() if operator.purpose}
