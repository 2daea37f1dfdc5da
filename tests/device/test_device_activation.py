# SPDX-License-Identifier: Apache-2.0
"""Functions of one value, rows and resizing on the device: training against the integers, poles, refusals, ONNX.

That the integers are the runtimes' own is compared by test_device.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from device_cases import CASES, PARAMETERS, random_codes, random_quantization

from exactqat.deploy import (
    Builder,
    Graph,
    dequantize,
    per_tensor,
    profiles_here,
    quantize,
    simulate,
    verify,
    write_tflite,
)
from exactqat.deploy.runtimes import open_runtime
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.kit.device import OPERATORS, PROFILES, Refusal
from exactqat.kit.device import fixed_point_functions as fixed
from exactqat.kit.device.activation import FUNCTIONS, TableOfCodes, off_the_pole
from exactqat.qat.train.torch import primitives as primitives_torch

CODES = np.arange(-128, 128).astype(np.int8)
FUNCTIONS_OF_ONE = ("LOGISTIC", "TANH", "GELU", "EXP", "TABLE", "RELU", "LEAKY_RELU", "HARD_SWISH")


def graphs(kind: str, count: int) -> list[Graph]:
    rng = np.random.default_rng([*kind.encode(), 7])
    networks = []
    for _ in range(count):
        builder = Builder()
        networks.append(builder.graph([CASES[kind](rng, builder)]))
    return networks


def trained_codes(graph: Graph, codes: np.ndarray, **plan: Any) -> np.ndarray:
    """What training computes and stores, given the operand on its grid."""
    (operator,) = graph.operators
    source, output = (graph.tensors[name].quantization for name in (*operator.inputs[:1], *operator.outputs))
    x = torch.from_numpy(dequantize(codes, source))
    attributes = {**operator.attributes, **plan}
    declaration = OPERATORS[operator.kind]
    if declaration.uses_operand_scale:
        attributes["operand_scale"] = torch.tensor(source.scale[0])
    grid = SimpleNamespace(scale=torch.tensor(output.scale[0]), zero_point=int(output.zero_point[0]))
    real = declaration.real_on_grid(primitives_torch, [x], attributes, grid)
    real = declaration.real(primitives_torch, [x], attributes) if real is None else real
    return quantize(real.numpy(), output)


@pytest.mark.parametrize("kind", FUNCTIONS_OF_ONE)
def test_training_computes_the_device(kind: str) -> None:
    """All codes, many grids. A table is what training made of it; kernels round their own way by one step at most."""
    differing = compared = 0
    for graph in graphs(kind, 60):
        device = simulate(graph, CODES.reshape(1, 16, 16))["y"].astype(int)
        difference = np.abs(trained_codes(graph, CODES.reshape(1, 16, 16)) - device)
        assert difference.max() <= 1, graph.operators
        differing, compared = differing + np.count_nonzero(difference), compared + difference.size
    print(f"{kind}: {differing} of {compared}")
    # RELU rounds twice, as LEAKY_RELU does where XNNPACK leaves it alone; HARD_SWISH has 16 bits.
    allowed = {"TABLE": 3e-4, "LEAKY_RELU": 0.01, "HARD_SWISH": 0.05, "RELU": 0.03}
    assert differing <= allowed.get(kind, 2e-3) * compared


@pytest.mark.parametrize("kind", ["RESIZE_NEAREST_NEIGHBOR", "RESIZE_BILINEAR"])
def test_training_resizes_as_the_device_does(kind: str) -> None:
    """In any order of axes; ties of doubled images included."""
    rng = np.random.default_rng(1)
    for graph in graphs(kind, 40):
        codes = random_codes(rng, graph)["x"]
        device = simulate(graph, codes)["y"]
        last = trained_codes(graph, codes, channel_axis=3)
        assert np.count_nonzero(last != device) <= 1e-3 * device.size
        (operator,) = graph.operators
        tensor = graph.tensors["x"]
        x = torch.from_numpy(dequantize(codes, tensor.quantization).transpose(0, 3, 1, 2).copy())
        grid = SimpleNamespace(scale=torch.tensor(tensor.quantization.scale[0]), zero_point=0)
        declaration, attributes = OPERATORS[kind], {**operator.attributes, "channel_axis": 1}
        first = declaration.real_on_grid(primitives_torch, [x], attributes, grid)
        first = declaration.real(primitives_torch, [x], attributes) if first is None else first
        assert np.array_equal(quantize(first.numpy().transpose(0, 2, 3, 1), tensor.quantization), last)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(8, 10), (7, 3), (1, 1), (13, 5)])
def test_resizing_is_pytorch_s(size: tuple[int, int], align_corners: bool) -> None:
    x = torch.randn(2, 3, 4, 5)
    interpolate = torch.nn.functional.interpolate
    plan = {"size": size, "channel_axis": 1}
    bilinear = OPERATORS["RESIZE_BILINEAR"].real(
        primitives_torch, [x], {**plan, "align_corners": align_corners, "half_pixel_centers": not align_corners}
    )
    # Shares are rounded to 1 / 2**11.
    torch.testing.assert_close(
        bilinear, interpolate(x, size, mode="bilinear", align_corners=align_corners), atol=4e-3, rtol=0
    )
    if not align_corners:
        nearest = OPERATORS["RESIZE_NEAREST_NEIGHBOR"]
        assert torch.equal(nearest.real(primitives_torch, [x], plan), interpolate(x, size, mode="nearest"))
        exact = nearest.real(primitives_torch, [x], {**plan, "half_pixel_centers": True})
        assert torch.equal(exact, interpolate(x, size, mode="nearest-exact"))
        row = torch.randn(2, 3, 6)  # one spatial axis
        line = nearest.real(primitives_torch, [row], {"size": size[:1], "channel_axis": 1})
        assert torch.equal(line, interpolate(row, size[:1], mode="nearest"))


# PyTorch's own functions, with the parameters of PARAMETERS.
TORCH = {
    "abs": torch.abs, "asinh": torch.asinh, "cos": torch.cos, "cosh": torch.cosh,
    "erf": torch.erf, "exp": torch.exp, "floor": torch.floor,
    "hardsigmoid": torch.nn.functional.hardsigmoid, "hardswish": torch.nn.functional.hardswish,
    "log_sigmoid": torch.nn.functional.logsigmoid, "mish": torch.nn.functional.mish, "neg": torch.neg,
    "relu": torch.relu, "relu6": torch.nn.functional.relu6, "round": torch.round, "selu": torch.selu,
    "sigmoid": torch.sigmoid, "sign": torch.sign, "silu": torch.nn.functional.silu, "sin": torch.sin,
    "softplus": torch.nn.functional.softplus, "softsign": torch.nn.functional.softsign, "square": torch.square,
    "tanh": torch.tanh, "clamp": torch.clamp, "elu": lambda x, *p: torch.ops.aten.elu(x, *p),
    "gelu": lambda x, tanh=False: torch.nn.functional.gelu(x, approximate="tanh" if tanh else "none"),
    "leaky_relu": torch.nn.functional.leaky_relu, "ceil": torch.ceil, "threshold": torch.nn.functional.threshold,
    "hardshrink": torch.nn.functional.hardshrink, "softshrink": torch.nn.functional.softshrink,
    "composition": lambda x, *p: (
        torch.where(x > 0.5, x.sin(), -1.0) if len(p) == 3 else torch.where(x.abs() <= 1, 1.0, x.tanh() / x)
    ),
    # Where they are defined:
    "log": torch.log, "reciprocal": torch.reciprocal, "sqrt": torch.sqrt, "pow": torch.pow,
    "rsqrt": lambda x, epsilon=0.0: torch.rsqrt(x + epsilon),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_slopes_are_pytorch_s(name: str) -> None:
    positive = name in ("log", "sqrt", "pow", "rsqrt", "reciprocal")
    for parameters in PARAMETERS.get(name, [()]):
        x = torch.linspace(0.1 if positive else -9.05, 9.0, 241, requires_grad=True)
        ours, theirs = FUNCTIONS[name](primitives_torch, x, *parameters), TORCH[name](x, *parameters)
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-5)
        (slope,) = torch.autograd.grad(ours.sum(), x, retain_graph=True, allow_unused=True)
        (wanted,) = torch.autograd.grad(theirs.sum(), x, retain_graph=True)
        slope = torch.zeros_like(x) if slope is None else slope
        torch.testing.assert_close(slope, wanted, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_training_meets_neither_infinity_nor_nan(name: str) -> None:
    for parameters in PARAMETERS.get(name, [()]):
        for scale in (None, torch.tensor(0.05)):
            x = torch.tensor([-900.0, -1.0, -0.05, 0.0, 0.05, 900.0], requires_grad=True)
            attributes = {"function": name, "parameters": parameters, "operand_scale": scale}
            real = TableOfCodes().real(primitives_torch, [x], attributes)
            assert torch.isfinite(real).all()
            if real.requires_grad:
                real.sum().backward()
                assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(("name", "parameters"), [("rsqrt", ()), ("log", ()), ("reciprocal", ()), ("pow", (-1.5,))])
def test_code_0_stays_off_the_pole(name: str, parameters: tuple[float, ...]) -> None:
    """It is no further from its neighbours than half a step of the operand is."""
    scale = np.float32(0.25)
    builder = Builder()
    builder.input("x", (1, 256), per_tensor(scale, -128))
    function = TORCH[name]
    at_half = float(function(torch.tensor(scale / 2), *parameters))
    builder.table("x", per_tensor(abs(at_half) / 100, 0), name="y", function=name, parameters=parameters)
    graph = builder.graph(["y"])
    codes = simulate(graph, CODES.reshape(1, 256))["y"][0]
    assert abs(int(codes[0])) == 100 and np.sign(codes[0]) == np.sign(at_half)
    at_one = float(function(torch.tensor(scale), *parameters))
    assert codes[1] == round(at_one / abs(at_half) * 100)
    least = torch.tensor(0.125)
    x = torch.tensor([0.0, 0.25], requires_grad=True)
    off_the_pole(primitives_torch, x, least, name, parameters).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 1.0]


def test_a_table_in_a_file_of_any_batch(tmp_path: Path) -> None:
    """Between other operators, resized to other batches, under every runtime."""
    rng = np.random.default_rng(3)
    builder = Builder()
    builder.input("x", (1, 3, 5), per_tensor(0.05, 4))
    builder.table("x", per_tensor(0.02, -100), name="mish", function="mish")
    builder.table("mish", per_tensor(0.01, 0), name="sine", function="sin")
    graph = builder.graph([builder.add("mish", "sine", per_tensor(0.04, 3), name="y")])
    path = write_tflite(graph, tmp_path / "model.tflite")
    for profile in profiles_here():
        for batch in (1, 4):
            report = verify(graph, path, rng.integers(-128, 128, (batch, 3, 5)).astype(np.int8), profile, batch)
            assert report.differing == 0 and [row.kind for row in report.operators] == ["TABLE", "TABLE", "ADD"]


def test_a_table_that_hangs_on_the_last_bit_of_a_library_is_in_the_file(tmp_path: Path) -> None:
    """Found in a network: at one code glibc's erfc gave 137.49999 steps, and the float64 one, rounded, 137.5."""
    source, output = (
        per_tensor(float(np.uint32(bits).view(np.float32)), zero_point)
        for bits, zero_point in ((1011079941, 10), (1002060906, -98))
    )
    builder = Builder()
    x = builder.input("x", (1, 256), source)
    hanging = builder.operator("GELU", [x], output, name="y", approximate=False)
    settled = builder.operator("GELU", [x], per_tensor(0.02, -110), name="z", approximate=False)
    graph = builder.graph([hanging, settled])
    path = write_tflite(graph, tmp_path / "model.tflite")
    for profile in profiles_here():
        try:
            report = verify(graph, path, np.tile(CODES, (3, 1)), profile)
        except RuntimeRefusal:
            assert profile == "micro"  # has no GELU
            continue
        assert report.values >= 2 * 3 * 256 and report.differing == 0, report.table()
    gelu = OPERATORS["GELU"]
    steps = {
        operator.outputs[0]: [
            step.kind
            for step in gelu.tflite_steps([graph.tensors["x"]], graph.tensors[operator.outputs[0]], operator.attributes)
        ]
        for operator in graph.operators
    }
    assert steps == {"y": ["CAST", "ADD", "GATHER"], "z": ["GELU"]}


def test_fixed_point_functions_are_what_they_approximate() -> None:
    """The runtimes say the last bit; a wrong constant would be seen here, too."""
    one = 2.0**31
    a = -np.arange(0, 16 << 26, 98765, dtype=np.int64)
    np.testing.assert_allclose(fixed.exp_on_negative_values(a, 5) / one, np.exp(a / 2**26), atol=3e-7, rtol=0)
    x = np.arange(0, 2**31, 9876543, dtype=np.int64)
    np.testing.assert_allclose(fixed.one_over_one_plus_x(x) / one, 1 / (1 + x / one), atol=3e-8)
    sums = np.unique(np.geomspace(2**19, 2**30, 500).astype(np.int64))
    factor, exponent = fixed.reciprocal(sums, 12)
    np.testing.assert_allclose(factor / one * 2.0**-exponent, 2.0**19 / sums, rtol=1e-7)
    np.testing.assert_allclose(fixed.log_of_one_and_more(sums, 12, 5) / 2**26, np.log(sums / 2**19), atol=2e-6)
    squares = np.unique(np.geomspace(2, 2**31 - 1, 700).astype(np.int64))
    factor, exponent = fixed.inverse_square_root(squares)
    np.testing.assert_allclose(factor / one * 2.0**-exponent, 1 / np.sqrt(squares), rtol=2e-6)
    assert [int(part) for part in fixed.inverse_square_root(np.array(0))] == [fixed.ONE, 0]
    signed = np.arange(-(2**31) + 1, 2**31, 9876543, dtype=np.int64)
    np.testing.assert_allclose(fixed.logistic(signed, 4) / one, 1 / (1 + np.exp(-signed / 2**27)), atol=3e-8)
    np.testing.assert_allclose(fixed.tanh(signed, 4) / one, np.tanh(signed / 2**27), atol=6e-8)


def test_what_the_reference_kernel_does_not_survive_is_refused(tmp_path: Path) -> None:
    """512 equal values: their exponentials add up to 512, at which LiteRT's reference SOFTMAX aborts the process."""
    for length in (511, 512):
        builder = Builder()
        builder.input("x", (1, length), per_tensor(0.1, 0))
        graph = builder.graph([builder.softmax("x", name="y")])
        codes = np.zeros((1, length), np.int8)
        assert np.all(simulate(graph, codes, "xnnpack")["y"] == -127)
        if length == 511:
            assert np.all(simulate(graph, codes, "reference")["y"] == -127)
        else:
            with pytest.raises(Refusal, match="crashes the process if a row's exponentials add up to 512"):
                simulate(graph, codes, "reference")
            path = write_tflite(graph, tmp_path / "model.tflite")
            assert verify(graph, path, codes).differing == 0
            with pytest.raises(Refusal, match="crashes the process"):
                verify(graph, path, codes, "reference")
            steep = np.tile(np.array([0, -128], np.int8), 256)[None]
            assert verify(graph, path, steep, "reference").differing == 0


def test_shares_just_below_half_a_code_are_rounded_down(tmp_path: Path) -> None:
    """The largest float32 below 0.5, where adding 0.5 gives 1: the kernel calls round."""
    builder = Builder()
    builder.input("x", (1, 16), per_tensor(np.float32(0.6663533), -121))
    graph = builder.graph([builder.softmax("x", name="y")])
    row = [-124, -124, -121, -123, -120, -120, -115, -119, -120, -126, -125, -115, -123, -124, -128, -117]
    codes = np.array([row, row[::-1]], np.int8)
    shares = simulate(graph, codes, "xnnpack")["y"]
    assert shares[0, 3] == shares[0, 12] == -128 and shares[0, 2] == -126
    assert verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes).differing == 0


def test_rounding_half_away_from_zero() -> None:
    from exactqat.kit.device.arithmetic import round_half_away

    for dtype in (np.float32, np.float64):
        below = np.nextafter(dtype(0.5), dtype(0))
        large = dtype(2 ** (np.finfo(dtype).nmant) + 1)
        x = np.array([0.5, below, 1.5, 2.5, 0.0, np.nextafter(dtype(1.5), dtype(0)), large, np.inf], dtype)
        wanted = np.array([1, 0, 2, 3, 0, 1, large, np.inf], dtype)
        integers = round_half_away(np.concatenate([x, -x]))
        assert integers.dtype == dtype and np.array_equal(integers, np.concatenate([wanted, -wanted]))
        assert round_half_away(below) == 0 and np.isnan(round_half_away(dtype(np.nan)))
    assert round_half_away(2.5) == 3 and round_half_away(-0.49999999999999994) == 0


def test_positions_that_a_built_in_kernel_would_read_past_the_image_are_refused(tmp_path: Path) -> None:
    """1024 * 29 / 339 is rounded up, and 338 such steps are more than 29 rows."""
    builder = Builder()
    builder.input("x", (1, 29, 1, 1), per_tensor(0.1, 0))
    graph = builder.graph([builder.resize_bilinear("x", name="y", size=(339, 1))])
    codes = np.arange(29, dtype=np.int8).reshape(1, 29, 1, 1)
    path = write_tflite(graph, tmp_path / "model.tflite")
    assert verify(graph, path, codes).differing == 0
    with pytest.raises(Refusal, match="reads past 29 values for 339 results"):
        verify(graph, path, codes, "reference")


def test_rows_are_the_axis_that_a_plan_names() -> None:
    x = torch.randn(2, 3, 5)
    for kind, function in (("SOFTMAX", torch.softmax), ("LOG_SOFTMAX", torch.log_softmax)):
        assert OPERATORS[kind].trailing(3, {"axis": 1}) == (1,)
        torch.testing.assert_close(OPERATORS[kind].real(primitives_torch, [x], {"axis": 1}), function(x, 1))
    scaled = OPERATORS["SOFTMAX"].real(primitives_torch, [x], {"axis": 1, "beta": 0.5})
    torch.testing.assert_close(scaled, torch.softmax(x / 2, 1))
    length = OPERATORS["L2_NORMALIZATION"].real(primitives_torch, [x], {"axis": 1})
    torch.testing.assert_close(length, torch.nn.functional.normalize(x, dim=1))
    zero = torch.zeros(1, 4, requires_grad=True)
    OPERATORS["L2_NORMALIZATION"].real(primitives_torch, [zero], {"axis": 1}).sum().backward()
    assert zero.grad is not None and torch.isfinite(zero.grad).all()


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        ("TABLE", {"function": "sinh"}, "function must be one of abs, asinh, ceil, clamp, .*, got 'sinh'"),
        (
            "TABLE",
            {"function": "composition", "parameters": (("gone", (0,), ()),)},
            "parameters do not fit the function 'composition'",
        ),
        ("TABLE", {"function": "mish", "parameters": (1.0, 2.0)}, "parameters do not fit the function 'mish'"),
        ("LEAKY_RELU", {"alpha": -0.5}, "alpha must be finite and not negative .*, got -0.5"),
        ("LEAKY_RELU", {"alpha": math.nan}, "alpha must be finite"),
        ("LEAKY_RELU", {"alpha": 2.0**21}, r"input scale / output scale \* alpha must be below 2\*\*31, got"),
        ("SOFTMAX", {"beta": 0.0}, "beta must be positive and finite, got 0.0"),
        ("HARD_SWISH", {}, r"input scale / output scale must be in \[2\*\*-9, 2\*\*7\), got 1024"),
        ("RESIZE_BILINEAR", {"size": (2, 2), "align_corners": True, "half_pixel_centers": True}, "cannot be combined"),
        ("RESIZE_NEAREST_NEIGHBOR", {"size": (0, 2)}, "size must be two positive integers below .*, got"),
        ("RESIZE_NEAREST_NEIGHBOR", {"size": (2,)}, "size must be two positive integers below .*, got"),
    ],
)
def test_refusals(kind: str, attributes: dict[str, Any], message: str) -> None:
    builder = Builder()
    builder.input("x", (1, 4, 4, 3), per_tensor(2.0, 0))
    moves = OPERATORS[kind].same_quantization or OPERATORS[kind].fixed_grid
    with pytest.raises(Refusal, match=message):
        builder.graph(
            [builder.operator(kind, ["x"], None if moves else per_tensor(2.0**-9, 0), name="y", **attributes)]
        )


# The last scales at which the kernels' fixed point holds, and the first ones at which it does not: there LiteRT and
# TFLite-Micro computed other codes, or ended the process.
@pytest.mark.parametrize(
    ("kind", "attributes", "dtype", "scales", "beyond", "message"),
    [
        ("LEAKY_RELU", {"alpha": 0.1}, "int8", (2.0**30, 1.0), (2.0**31, 1.0), r"output scale must be below 2\*\*31"),
        ("LEAKY_RELU", {"alpha": 2.0**30}, "int8", (1.0, 1.0), (2.0, 1.0), r"scale \* alpha must be below 2\*\*31"),
        ("HARD_SWISH", {}, "int8", (2.0**-22, 2.0**-22), (2.0**-23, 2.0**-23), r"scale must be in \[3 \* 2\*\*-24"),
        ("HARD_SWISH", {}, "int8", (2.0**24, 2.0**24), (2.0**25, 2.0**25), r"scale must be in .*, 3 \* 2\*\*23\)"),
        ("ADD", {}, "int8", (1.0, 2.0**107), (1.0, 2.0**108), r"output scale must be below 2\*\*108"),
        ("SQUARED_DIFFERENCE", {}, "int8", (63.9, 1.0), (64.0, 1.0), r"must be below 2\*\*12, got 4096"),
        ("RELU", {}, "int16", (2.0**30, 1.0), (2.0**31, 1.0), "input scale / output scale must be below 2.14748e.09"),
        ("ABS", {}, "int16", (2.0**30, 1.0), (2.0**31, 1.0), "input scale / output scale must be below 2.14748e.09"),
        (
            "LOGISTIC",
            {},
            "int16",
            (5.33, None),
            (5.34, None),
            r"input scale must be in \[2\*\*-40, 5.33333\), got 5.34",
        ),
        ("TANH", {}, "int16", (5.33, None), (5.34, None), r"input scale must be in \[2\*\*-40, 5.33333\), got 5.34"),
        ("LOGISTIC", {}, "int16", (2.0**-40, None), (2.0**-41, None), r"input scale must be in \[2\*\*-40"),
        ("LOGISTIC", {}, "int8", (2.0**-28, None), (2.0**-29, None), r"input scale must be in \[2\*\*-28"),
        ("TANH", {}, "int8", (2.0**33, None), (2.0**34, None), r"input scale must be in .*, 1.71799e.10\)"),
        (
            "SOFTMAX",
            {},
            "int16",
            (327000.0, None),
            (328000.0, None),
            r"input scale must be in .*, 327685\), got 328000",
        ),
    ],
)
def test_scales_beyond_the_kernels_fixed_point_are_refused(
    kind: str,
    attributes: dict[str, Any],
    dtype: str,
    scales: tuple[float, float | None],
    beyond: tuple[float, float | None],
    message: str,
    tmp_path: Path,
) -> None:
    small = dtype == "int8"

    def graph_of(input_scale: float, output_scale: float | None) -> Graph:
        builder = Builder()
        operands = "xy"[: 2 if kind in ("ADD", "SQUARED_DIFFERENCE") else 1]
        names = [builder.input(name, (1, 4, 4, 3), per_tensor(input_scale, 3 * small, dtype)) for name in operands]
        grid = None if output_scale is None else per_tensor(output_scale, 1 * small, dtype)
        return builder.graph([builder.operator(kind, names, grid, name="z", **attributes)])

    graph = graph_of(*scales)
    path = tmp_path / "model.tflite"
    write_tflite(graph, path)
    ends = np.iinfo(dtype)
    values = np.linspace(ends.min, ends.max, 240).astype(dtype)
    codes = {
        name: np.roll(values, shift).reshape(5, 4, 4, 3) for name, shift in zip(graph.inputs, (0, 100), strict=False)
    }
    for profile in profiles_here():
        if PROFILES[profile].emulated:
            continue
        runtime = open_runtime(path.read_bytes(), graph.inputs, graph.outputs, profile)
        np.testing.assert_array_equal(simulate(graph, codes, profile)["z"], runtime.run(codes)["z"])
    with pytest.raises(Refusal, match=message):
        graph_of(*beyond)


def test_slopes_that_do_not_fit_are_refused() -> None:
    builder = Builder()
    builder.input("x", (1, 4, 3), per_tensor(0.1, 0))
    builder.constant("z", np.ones(4, np.int8), per_tensor(0.1, 0))
    with pytest.raises(Refusal, match=r"operands must broadcast to one shape, got \(1, 4, 3\) and \(4,\)"):
        builder.prelu("x", "z", per_tensor(0.1, 0), name="y")


# Shares of codes that onnxruntime, which computes in float32, may round otherwise, by one; 0: looked up or moved.
ON_ONNX = {"TABLE": 0.0, "RESIZE_NEAREST_NEIGHBOR": 0.0, "RESIZE_BILINEAR": 0.1, "L2_NORMALIZATION": 0.3}


@pytest.mark.parametrize(
    "kind",
    [
        *FUNCTIONS_OF_ONE, "PRELU", "SOFTMAX", "LOG_SOFTMAX", "L2_NORMALIZATION", "RESIZE_NEAREST_NEIGHBOR",
        "RESIZE_BILINEAR",
    ],
)  # fmt: skip
def test_on_onnxruntime(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs exactqat[onnx]")
    from exactqat.deploy import verify, write_onnx

    rng, differing, values = np.random.default_rng(5), 0, 0
    for graph in graphs(kind, 15):
        report = verify(graph, write_onnx(graph, tmp_path / "model.onnx"), random_codes(rng, graph))
        assert report.operators[0].largest_difference <= 1, graph.operators
        differing, values = differing + report.operators[0].differing, values + report.operators[0].values
    print(f"{kind}: {differing} of {values}")
    assert differing <= ON_ONNX.get(kind, 0.06) * values


def test_fewer_bits_are_clamped_around_a_table(tmp_path: Path) -> None:
    """A table of a four-bit result uses the top codes of int8; the QUANTIZE after it clamps the lower end."""
    from exactqat.deploy import place_codes

    builder = Builder()
    builder.input("x", (1, 256), random_quantization(np.random.default_rng(2), np.float32(0.05)))
    builder.table("x", place_codes(0.2, 5, 4), name="y", function="mish")
    graph = builder.graph(["y"])
    results = simulate(graph, CODES.reshape(1, 256))["y"]
    assert results.min() >= -128 and results.max() <= -113
    for profile in profiles_here():
        path = write_tflite(graph, tmp_path / "model.tflite")
        assert verify(graph, path, CODES.reshape(1, 256), profile).differing == 0


@pytest.mark.parametrize("kind", ["RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"])
def test_scales_as_far_apart_as_kernels_shift(kind: str, tmp_path: Path) -> None:
    """Beyond, they shift by more bits than there are."""
    x = CODES.reshape(1, 16, 16)

    def graph(exponent: int) -> Graph:
        builder = Builder()
        builder.input("x", (1, 16, 16), per_tensor(np.float32(1.1) * np.float32(2.0) ** (exponent - 7), 109))
        return builder.graph([builder.operator(kind, ["x"], per_tensor(2.0**-7, 0), name="y")])

    for exponent in (30, -30):
        network = graph(exponent)
        content = write_tflite(network, tmp_path / "model.tflite").read_bytes()
        for profile in {"xnnpack-x86", "reference"}.intersection(profiles_here()):
            device = open_runtime(content, network.inputs, network.outputs, profile).run({"x": x})["y"]
            np.testing.assert_array_equal(device, simulate(network, x, profile)["y"])
    with pytest.raises(Refusal, match="input scale / output scale must be below"):
        graph(31)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("kind", ["ABS", "RELU", "LEAKY_RELU", "PRELU", "MUL", "BATCH_MATMUL"])
def test_quotients_that_tie_in_float32_alone(kind: str, dtype: str, tmp_path: Path) -> None:
    """1/128 over 0.1 is 5/64 in float32, whose multiples tie, and a little less in float64."""
    if (kind, dtype) == ("PRELU", "int16"):
        pytest.skip("it computes int8 alone")
    values, small = np.concatenate([CODES, CODES]), dtype == "int8"
    builder = Builder()
    names = [builder.input("x", (1, 32, 16), per_tensor(2.0**-7, -26 * small, dtype))]
    attributes: dict[str, Any] = {"alpha": 0.75} if kind == "LEAKY_RELU" else {}
    if kind in ("PRELU", "MUL", "BATCH_MATMUL"):
        shape = (16, 1) if kind == "BATCH_MATMUL" else (1,)
        code = np.zeros(shape, dtype)
        code.reshape(-1)[0] = 64  # half a unit, and no other products
        grid = per_tensor(2.0**-7, 0, dtype)
        names.append(
            builder.constant("z", code, grid) if kind != "BATCH_MATMUL" else builder.input("z", (1, 16, 1), grid)
        )
    builder.operator(
        kind, names, per_tensor(0.05 if len(names) == 2 else 0.1, -64 * small, dtype), name="y", **attributes
    )
    graph = builder.graph(["y"])
    batch = {"x": values.astype(dtype).reshape(1, 32, 16)}
    if kind == "BATCH_MATMUL":
        batch["z"] = code.reshape(1, 16, 1)
    path = write_tflite(graph, tmp_path / "model.tflite")
    for profile in profiles_here():
        if not PROFILES[profile].emulated:
            assert verify(graph, path, batch, profile).differing == 0, profile
    if kind in ("RELU", "LEAKY_RELU", "PRELU", "ABS"):  # the case is one where devices differ
        assert np.any(simulate(graph, batch, "micro")["y"] != simulate(graph, batch, "reference")["y"]) or not small


@pytest.mark.parametrize("profile", ["xnnpack-x86", "reference", "micro"])
@pytest.mark.parametrize("kind", ["LOGISTIC", "TANH"])
def test_scales_about_as_near_to_a_power_of_two_as_kernels_ask(kind: str, profile: str, tmp_path: Path) -> None:
    """Within 1 / 1000 of a power the kernels take other steps, and float32 decides what is within."""
    if profile not in profiles_here():
        pytest.skip(f"{profile} does not run here")
    codes = {"x": np.arange(-(2**15), 2**15, 7, dtype=np.int16)[None]}
    distances = np.concatenate([side * (1e-3 + np.linspace(-1e-6, 1e-6, 9)) for side in (-1, 1)])
    for distance in distances:
        scale = np.float32(2.0 ** (distance - 12))
        builder = Builder()
        builder.input("x", codes["x"].shape, per_tensor(scale, 0, "int16"))
        graph = builder.graph([builder.operator(kind, ["x"], per_tensor(2.0**-15, 0, "int16"), name="y")])
        report = verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes, profile)
        assert report.differing == 0, scale


@pytest.mark.parametrize("profile", ["xnnpack-x86", "reference", "micro"])
def test_softmax_multiplies_scale_and_beta_as_its_kernels_do(profile: str, tmp_path: Path) -> None:
    """In float32 in LiteRT, in float64 in TFLite-Micro: another multiplier, and 1 of 511 codes."""
    if profile not in profiles_here():
        pytest.skip(f"{profile} does not run here")
    # Of 1,500 random ones, where most codes depend on it.
    pairs = ((0.0008086311281658709, 0.8474123477935791), (0.0006281303940340877, 1.8791015148162842))
    shape, codes = (1, 511), {"x": np.random.default_rng(0).integers(-(2**13), 2**13, (64, 511)).astype(np.int16)}
    for scale, beta in pairs:
        builder = Builder()
        builder.input("x", shape, per_tensor(scale, 0, "int16"))
        grid = per_tensor(2.0**-15, 0, "int16")
        graph = builder.graph([builder.operator("SOFTMAX", ["x"], grid, name="y", beta=beta)])
        assert verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes, profile).differing == 0, scale
