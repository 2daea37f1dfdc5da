# SPDX-License-Identifier: Apache-2.0
"""Names, order and defaults of all public functions' arguments, and the names of results, are TensorFlow's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import goldens
import pytest
from cases import RESULTS, cases

import exactqat as eq
from exactqat.operators import reference

SIGNATURES = goldens.load_json("signatures")

REQUIRED = {
    "FakeQuantWithMinMaxArgs",
    "FakeQuantWithMinMaxArgsGradient",
    "FakeQuantWithMinMaxVars",
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannel",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    "QuantizeAndDequantizeV2",
    "QuantizeAndDequantizeV3",
    "QuantizeAndDequantizeV4",
    "QuantizeAndDequantizeV4Grad",
    "FusedBatchNormV3",
    "FusedBatchNormGradV3",
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropInput",
    "DepthwiseConv2dNativeBackpropFilter",
}


def described(function: Callable[..., Any]) -> list[dict[str, Any]]:
    """Arguments in the form in which TensorFlow's are recorded, after JSON."""
    arguments = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "out":  # ours, by keyword only
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
            continue
        entry: dict[str, Any] = {"name": name}
        if parameter.default is not inspect.Parameter.empty:
            default = parameter.default
            entry["default"] = list(default) if isinstance(default, tuple) else default
        arguments.append(entry)
    return arguments


def assert_same_arguments(function: Callable[..., Any], recorded: list[dict[str, Any]]) -> None:
    ours = described(function)
    assert [entry["name"] for entry in ours] == [entry["name"] for entry in recorded]
    for own, expected in zip(ours, recorded, strict=True):
        name = expected["name"]
        assert ("default" in own) == ("default" in expected), f"{name}: only one of the two has a default"
        if "default" in expected:
            # 6 and 6.0 are the same default, but 0 and False are not.
            assert own["default"] == expected["default"], name
            assert isinstance(own["default"], bool) == isinstance(expected["default"], bool), name


def here(name: str) -> Any:
    """exactqat's function for a public TensorFlow name: TensorFlow 1's names live beside TensorFlow 2's."""
    function: Any = eq
    for part in name.removeprefix("compat.v1.").split("."):
        function = getattr(function, part)
    return function


def test_operators_are_declared() -> None:
    declared = set(dir(eq.raw_ops))
    assert declared >= REQUIRED
    assert declared <= set(SIGNATURES["raw_ops"]), "an operator without recorded signature"


@pytest.mark.parametrize("op", [op for op in SIGNATURES["raw_ops"] if op in dir(eq.raw_ops)])
def test_raw_operator(op: str) -> None:
    recorded = SIGNATURES["raw_ops"][op]
    assert list(RESULTS[op]) == recorded["outputs"]
    assert_same_arguments(getattr(eq.raw_ops, op), recorded["arguments"])


@pytest.mark.parametrize("op", [op for op, results in RESULTS.items() if len(results) > 1])
def test_results_are_named_as_in_tensorflow(op: str) -> None:
    case = cases(op)[0]
    results = reference.call(op, case.operands, case.attributes)
    assert list(results._fields) == SIGNATURES["raw_ops"][op]["outputs"]


def followed() -> list[str]:
    """The public names, except those of TensorFlow 1 to which TensorFlow 2 gave another signature: that is followed."""
    public = SIGNATURES["public"]
    return [name for name in public if public.get(name.removeprefix("compat.v1."), public[name]) == public[name]]


@pytest.mark.parametrize("name", followed())
def test_public_function(name: str) -> None:
    assert_same_arguments(here(name), SIGNATURES["public"][name]["arguments"])


def test_comparison_notices_differences() -> None:
    def original(a, b=6.0, c=(1, 2), d=False): ...

    def renamed(a, b=6.0, c=(1, 2), e=False): ...

    def reordered(a, c=(1, 2), b=6.0, d=False): ...

    def other_default(a, b=5.0, c=(1, 2), d=False): ...

    def required(a, b, c=(1, 2), d=False): ...

    def integer(a, b=6.0, c=(1, 2), d=0): ...

    def shorter(a, b=6.0, c=(1, 2)): ...

    recorded = [
        {"name": "a"},
        {"name": "b", "default": 6},
        {"name": "c", "default": [1, 2]},
        {"name": "d", "default": False},
    ]
    assert_same_arguments(original, recorded)
    for different in (renamed, reordered, other_default, required, integer, shorter):
        with pytest.raises(AssertionError):
            assert_same_arguments(different, recorded)
