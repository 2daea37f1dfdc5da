# SPDX-License-Identifier: Apache-2.0
"""The functions of `nn` and `quantization` that rearrange their arguments give what the operator below them gives."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from cases import Case, cases
from conftest import expected_of

import exactqat as eq

DEPTHWISE = [case for case in cases("depthwise_conv2d") if not isinstance(expected_of(case), Exception)]


def public_padding(case: Case) -> Any:
    """An operator's padding as the public functions take it."""
    numbers = case.attributes["explicit_paddings"]
    if case.attributes["padding"] != "EXPLICIT":
        return case.attributes["padding"]
    return [numbers[i : i + 2] for i in range(0, 8, 2)]


def same_as_the_operator(case: Case, result: Any) -> None:
    (expected,) = expected_of(case)  # type: ignore[misc]
    assert_same_bits(result, expected, what=case.name)


def of(op: str) -> list[Case]:
    return [case for case in DEPTHWISE if case.op == op]


def test_depthwise_conv2d() -> None:
    for case in of("DepthwiseConv2dNative"):
        a = case.attributes
        four = {"data_format": a["data_format"], "dilations": a["dilations"]}
        two = [a["dilations"][a["data_format"].index(letter)] for letter in "HW"]
        arguments = (case.operands["input"], case.operands["filter"], a["strides"], public_padding(case))
        same_as_the_operator(case, eq.nn.depthwise_conv2d_native(*arguments, **four))
        same_as_the_operator(case, eq.nn.depthwise_conv2d(*arguments, a["data_format"], two))


def test_depthwise_conv2d_backprop_input() -> None:
    for case in of("DepthwiseConv2dNativeBackpropInput"):
        a, operands = case.attributes, case.operands
        arguments = (a["input_sizes"], operands["filter"], operands["out_backprop"], a["strides"], public_padding(case))
        for function in (eq.nn.depthwise_conv2d_backprop_input, eq.nn.depthwise_conv2d_native_backprop_input):
            same_as_the_operator(case, function(*arguments, a["data_format"], a["dilations"]))


def test_depthwise_conv2d_backprop_filter() -> None:
    for case in of("DepthwiseConv2dNativeBackpropFilter"):
        a, operands = case.attributes, case.operands
        arguments = (operands["input"], a["filter_sizes"], operands["out_backprop"], a["strides"], public_padding(case))
        for function in (eq.nn.depthwise_conv2d_backprop_filter, eq.nn.depthwise_conv2d_native_backprop_filter):
            same_as_the_operator(case, function(*arguments, a["data_format"], a["dilations"]))


@pytest.mark.parametrize("padding", [3, [[1, 1]] * 3, [[1, 2, 3]] * 4, [["a", "b"]] * 4])
def test_paddings_that_are_no_pairs_are_refused(padding: Any) -> None:
    x, w = np.ones((1, 3, 3, 1), np.float32), np.ones((2, 2, 1, 1), np.float32)
    with pytest.raises(ValueError, match="4 pairs of integers, one per dimension, got"):
        eq.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], padding)


def test_axes_count_from_the_end_or_cover_everything() -> None:
    x = np.linspace(-3, 5, 24, dtype=np.float32).reshape(2, 3, 4)
    for public, operator in (
        (eq.quantization.quantize_and_dequantize, eq.raw_ops.QuantizeAndDequantizeV2),
        (eq.quantization.quantize_and_dequantize_v2, eq.raw_ops.QuantizeAndDequantizeV4),
    ):
        for axis, raw in ((None, -1), (-1, 2), (-3, 0), (1, 1)):
            expected = operator(input=x, input_min=0.0, input_max=0.0, num_bits=4, axis=raw)
            assert_same_bits(public(x, 0.0, 0.0, num_bits=4, axis=axis), expected, what=f"axis {axis}")
        for axis in (3, -4):
            with pytest.raises(ValueError, match="axis must be from -3 to 2 for an input of rank 3"):
                public(x, 0.0, 0.0, axis=axis)


@pytest.mark.parametrize(
    "code",
    [
        "import exactqat as eq; assert callable(eq.deploy.lower) and eq.deploy.simulate",
        "import exactqat.deploy.lower; from exactqat import deploy; assert callable(deploy.lower)",
        "from exactqat.deploy.lower import lower, lower_step; import exactqat; assert exactqat.deploy.lower is lower",
        "from exactqat import deploy; import exactqat.deploy.lower as lower; assert lower is deploy.lower",
        "import exactqat.deploy.values, exactqat as eq; assert callable(eq.deploy.lower)",
        "from exactqat import deploy; assert callable(deploy.layer_values) and deploy.values",
        "import exactqat as eq; assert eq.qat.Rule().weight_bits == 8",
        "import exactqat as eq; assert {'qat', 'deploy'} <= set(dir(eq)) and not hasattr(eq, 'qta')",
    ],
)
def test_the_kit_and_the_road_to_the_device_are_there_without_a_framework(code: str) -> None:
    check = "; import sys; assert not {'torch', 'jax', 'keras', 'tensorflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + check], check=True)


# Modules that a user reaches by a name's dot, beside what they export.
WITHIN = {"exactqat": {"deploy", "qat", "tune"}, "exactqat.qat": {"distributed", "jax", "keras", "tfmot", "torch"}}


@pytest.mark.parametrize(
    "name",
    [*WITHIN, "exactqat.deploy", "exactqat.tune", *(f"exactqat.qat.{part}" for part in sorted(WITHIN["exactqat.qat"]))],
)
def test_completion_shows_public_names_and_nothing_else(name: str) -> None:
    framework = {"tfmot": "keras", "distributed": "torch"}.get(name.split(".")[-1], name.split(".")[-1])
    if framework in ("jax", "keras", "torch"):
        pytest.importorskip(framework)
    code = f"import importlib; module = importlib.import_module({name!r}); print(*dir(module), '+', *module.__all__)"
    environment = {**os.environ, "KERAS_BACKEND": "jax" if importlib.util.find_spec("jax") else "torch"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    shown, _, exported = done.stdout.partition("+")
    assert {word for word in shown.split() if not word.startswith("__")} == {*exported.split(), *WITHIN.get(name, ())}


def test_operators_alone_do_not_load_the_kit() -> None:
    code = (
        "import exactqat, sys; assert not {'exactqat.qat', 'exactqat.deploy', 'exactqat.kit.device'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prepare_is_found_from_the_top_and_loads_its_framework() -> None:
    pytest.importorskip("torch")
    code = (
        "import exactqat as eq, sys; assert 'torch' not in sys.modules; assert callable(eq.qat.prepare); import torch"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
