# SPDX-License-Identifier: Apache-2.0
"""Real numbers in others' files: near the runtime's, and exact where they meet codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from test_read_tflite import FILES

from exactqat.deploy import Builder, per_tensor, profiles_here, simulate
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.formats.tflite import tflite_bytes, with_outputs_at
from exactqat.deploy.inspect import inspect
from exactqat.deploy.runtimes import open_runtime
from exactqat.deploy.simulate import simulate_results
from exactqat.kit.device import OPERATORS
from exactqat.kit.device.operator import FLOAT
from exactqat.kit.device.tensor import INDICES


def every_result(path: Path, examples: int = 3) -> tuple[object, dict[str, np.ndarray]]:
    """The graph, and what LiteRT computes for all of its tensors."""
    content = path.read_bytes()
    file = read_content(content)
    graph = file.graph
    rng = np.random.default_rng(0)
    names = graph.results()
    runtime = open_runtime(
        with_outputs_at(content, [file.positions[name] for name in names]), graph.inputs, names, "xnnpack-x86", True
    )
    parts = []
    for _ in range(examples):
        inputs = {name: rng.normal(size=graph.tensors[name].shape).astype(np.float32) for name in graph.inputs}
        parts.append({**inputs, **runtime.run(inputs)})
    return graph, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("name", ["convolutions", "enlarged", "pooled", "reals"])
def test_operators_in_float_are_near_the_runtime(name: str) -> None:
    graph, device = every_result(FILES / f"{name}.float32.tflite")
    for operator in graph.operators:
        for result, array in simulate_results(graph, operator, device, "xnnpack-x86").items():
            assert array.dtype == device[result].dtype == np.float32
            np.testing.assert_allclose(array, device[result], rtol=2e-5, atol=2e-6, err_msg=operator.kind)


IMAGE = (1, 5, 6, 8)
WINDOW = {"filter_size": (2, 3), "strides": (2, 1), "padding": "SAME"}
# What TensorFlow's converter makes of no model here, by the operator's attributes.
WRITTEN = [
    ("CUMSUM", {"axis": 2}),
    ("CUMSUM", {"axis": 1, "exclusive": True}),
    ("CUMSUM", {"axis": 3, "exclusive": True, "reverse": True}),
    ("ADD_N", {}),
    ("L2_POOL_2D", WINDOW),
    ("LOCAL_RESPONSE_NORMALIZATION", {"radius": 2, "bias": 1.5, "alpha": 0.7, "beta": 0.75}),
    ("LOCAL_RESPONSE_NORMALIZATION", {"radius": 40}),
    ("TOPK_V2", {"count": 3}),
    ("GATHER_ND", {"indices": (((0, 1), (0, 4)),)}),
    ("SCATTER_ND", {"indices": tuple([((0, 2), (0, 0), (0, 2), (0, 3), (0, 5))]), "new_shape": (1, 7, 6, 8)}),
    ("ATAN2", {}),
    *[
        (kind, {"size": (9, 4), "align_corners": align, "half_pixel_centers": half})
        for kind in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")
        for align, half in ((False, False), (False, True), (True, False))
    ],
]


@pytest.mark.parametrize(("kind", "attributes"), WRITTEN)
@pytest.mark.parametrize("profile", ["xnnpack-x86", "reference"])
def test_what_we_write_in_float_is_near_the_runtime(
    kind: str, attributes: dict[str, object], profile: str, tmp_path: Path
) -> None:
    if profile not in profiles_here():
        pytest.skip("another processor")
    builder = Builder()
    names = [builder.input(name, IMAGE, None) for name in ("x", "z")[: 1 + (kind in ("ADD_N", "ATAN2"))]]
    graph = builder.graph(builder.results(builder.operator(kind, names, INDICES, name="y", **attributes)))
    content = tflite_bytes(graph)
    assert tflite_bytes(read_content(content).graph) == content
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=IMAGE).astype(np.float32) for name in graph.inputs}
    device = open_runtime(content, graph.inputs, graph.outputs, profile).run(inputs)
    for name, array in simulate(graph, inputs, profile).items():
        assert array.dtype == device[name].dtype
        np.testing.assert_allclose(array, device[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("profile", ["xnnpack-x86", "reference"])
@pytest.mark.parametrize("function", ["TANH", "RELU", "RELU6", "NONE"])
@pytest.mark.parametrize("integers", [False, True])
def test_a_recurrent_layer_in_float_is_near_the_runtime(integers: bool, function: str, profile: str) -> None:
    """From call to call; with integer weights runtimes also quantize what goes in, to a code in 127."""
    if profile not in profiles_here():
        pytest.skip("another processor")
    rng, builder = np.random.default_rng(0), Builder()

    def weights(name: str, shape: tuple[int, ...]) -> str:
        if integers:
            return builder.constant(name, rng.integers(-127, 128, shape).astype(np.int8), per_tensor(0.004, 0))
        return builder.bias(name, rng.normal(size=shape).astype(np.float32) * np.float32(0.4), INDICES)

    operands = [builder.input("x", (1, 5, 3), None), weights("own", (4, 3)), weights("other", (4, 4))]
    operands.append(builder.bias("bias", rng.normal(size=4).astype(np.float32), INDICES))
    operands.append(builder.variable("state", (1, 4), None))
    builder.operator("UNIDIRECTIONAL_SEQUENCE_RNN", operands, INDICES, name="y", function=function)
    graph = builder.graph(["y"])
    content = tflite_bytes(graph)
    assert tflite_bytes(read_content(content).graph) == content
    runtime, state = open_runtime(content, graph.inputs, graph.outputs, profile), {}
    for _ in range(3):
        inputs = {"x": rng.normal(size=(1, 5, 3)).astype(np.float32)}
        result = simulate(graph, inputs, profile, state=state)["y"]
        tolerance = 0.02 if integers else 2e-6
        np.testing.assert_allclose(result, runtime.run(inputs)["y"], rtol=2e-5, atol=tolerance)
    assert state["state"].dtype == np.float32 and state["state"].any()


@pytest.mark.parametrize("profile", ["xnnpack-x86", "reference"])
@pytest.mark.parametrize("more", [(), ("projection",), ("peepholes", "layer normalization")])
@pytest.mark.parametrize("kind", ["LSTM_CELL", "UNIDIRECTIONAL_SEQUENCE_LSTM"])
def test_an_lstm_in_float_is_near_the_runtime(kind: str, more: tuple[str, ...], profile: str) -> None:
    """From call to call."""
    if profile not in profiles_here():
        pytest.skip("another processor")
    rng, builder, units, out = np.random.default_rng(0), Builder(), 4, 2 if "projection" in more else 4
    shape = (1, 3) if kind == "LSTM_CELL" else (1, 5, 3)

    def constants(count: int, *sizes: int) -> list[str]:
        values = [rng.normal(size=sizes).astype(np.float32) for _ in range(count)]
        return [builder.bias(f"{len(operands)}/{count}/{at}", value, INDICES) for at, value in enumerate(values)]

    operands = [builder.input("x", shape, None)]
    for group in ((4, units, 3), (4, units, out), (4, units)):
        operands += constants(*group)
    operands += [builder.variable("hidden", (1, out), None), builder.variable("cell", (1, units), None)]
    groups = {"projection": ((1, out, units), (1, out)), "peepholes": ((3, units),)}
    groups["layer normalization"] = ((4, units),)
    for group in (group for name in more for group in groups[name]):
        operands += constants(*group)
    how = {"cell_clip": 0.5, "hidden_scale": 1.0, "hidden_zero_point": 0, "projection_clip": 0.3}
    graph = builder.graph([builder.operator(kind, operands, INDICES, name="y", **how)])
    content = tflite_bytes(graph)
    assert tflite_bytes(read_content(content).graph) == content
    runtime, state = open_runtime(content, graph.inputs, graph.outputs, profile), {}
    for _ in range(3):
        inputs = {"x": rng.normal(size=shape).astype(np.float32)}
        result = simulate(graph, inputs, profile, state=state)["y"]
        np.testing.assert_allclose(result, runtime.run(inputs)["y"], rtol=2e-5, atol=2e-6)
    assert state["cell"].any()


@pytest.mark.parametrize("profile", profiles_here())
@pytest.mark.parametrize("values", [6, 20, 256])
def test_real_numbers_about_the_middle_of_two_codes(values: int, profile: str) -> None:
    """LiteRT brings eight at a time into int16, and the rest by another arithmetic."""
    rng, builder, scale = np.random.default_rng(values), Builder(), np.float32(4.65348e-05)
    builder.quantize(builder.input("x", (1, values), None), per_tensor(scale, 0, "int16"), name="y")
    graph = builder.graph(["y"])
    runtime = open_runtime(tflite_bytes(graph), graph.inputs, graph.outputs, profile)
    for _ in range(20):
        x = ((np.floor(rng.uniform(-32767, 32767, (1, values))) + 0.5) * scale).astype(np.float32)
        x = np.nextafter(x, x + rng.choice([-1, 0, 1], x.shape).astype(np.float32))
        np.testing.assert_array_equal(simulate(graph, x, profile)["y"], runtime.run({"x": x})["y"])


@pytest.mark.parametrize("to", ["float32", "int32", "bool"])
def test_a_cast_of_real_numbers(to: str) -> None:
    builder = Builder()
    graph = builder.graph([builder.cast(builder.input("x", (1, 64), None), INDICES, to=to, name="y")])
    x = np.concatenate([np.linspace(-3, 3, 60), [0.0, -0.0, 2.0**24 + 2, 1e-30]]).astype(np.float32)[None]
    content = tflite_bytes(graph)
    device = open_runtime(content, graph.inputs, graph.outputs, "reference").run({"x": x})["y"]
    (result,) = simulate(read_content(content).graph, x, "reference").values()
    assert result.dtype == device.dtype == to
    np.testing.assert_array_equal(result, device)


def test_images_without_a_grid(tmp_path: Path) -> None:
    """As Keras' `Rescaling` makes it of uint8 inputs: what is compared begins where it is brought onto a grid."""
    builder = Builder()
    real = builder.cast(builder.input("image", (1, 4, 4, 3), INDICES, "uint8"), INDICES, to="float32", name="real")
    codes = builder.quantize(real, per_tensor(1.0, -128), name="codes")
    y = builder.relu(codes, per_tensor(1.0, -128), name="y")
    path = tmp_path / "image.tflite"
    path.write_bytes(tflite_bytes(builder.graph([y])))
    inspection = inspect(path, {"image": np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)}, devices=["xnnpack"])
    (device,) = (device for device in inspection.devices if device.values)
    assert inspection.equal and device.differing == 0 and {row.kind for row in device.operators if row.values} == {
        "CAST", "QUANTIZE:float32", "RELU"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"must hold integers in 0\.\.255, got 256"):
        simulate(read_content(path.read_bytes()).graph, np.full((1, 4, 4, 3), 256))


def test_which_operators_were_compared_in_float() -> None:
    """Those that a model can be made of in one line each; the rest are written down here."""
    compared = set()
    for path in FILES.glob("*.float32.tflite"):
        compared |= {operator.kind for operator in read_content(path.read_bytes()).graph.operators}
    others = {"DEPTH_TO_SPACE", "EXPAND_DIMS", "GATHER", "HARD_SWISH", "L2_NORMALIZATION", "MIRROR_PAD", "PACK", "PAD",
              "PADV2", "PRELU", "QUANTIZE", "REDUCE_MIN", "REDUCE_PROD", "RELU_0_TO_1", "RELU_N1_TO_1", "SLICE",
              "SPACE_TO_DEPTH",
              "SPLIT", "SPLIT_V", "SQUEEZE", "STRIDED_SLICE", "SUB", "TILE", "UNPACK", "ADD", "TRANSPOSE", "ARG_MAX",
              "ARG_MIN",
              "BATCH_TO_SPACE_ND", "BROADCAST_TO", "EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL",
              "NOT_EQUAL", "REVERSE_V2", "SELECT", "SELECT_V2", "SPACE_TO_BATCH_ND", "CAST",
              "UNIDIRECTIONAL_SEQUENCE_RNN", "DETECTION_POSTPROCESS", "UNIDIRECTIONAL_SEQUENCE_LSTM", "LSTM_CELL",
              "DYNAMIC_UPDATE_SLICE"}  # fmt: skip
    others |= {kind for kind, _ in WRITTEN}
    assert {kind for kind, operator in OPERATORS.items() if operator.floats} - compared <= others


def test_an_island_is_written_again() -> None:
    graph = read_content((FILES / "float_island.int8.tflite").read_bytes()).graph
    assert [operator.kind for operator in graph.operators][1:4] == ["DEQUANTIZE", "ELU", "QUANTIZE"]
    again = read_content(tflite_bytes(graph)).graph
    codes = np.random.default_rng(0).integers(-128, 128, (4, 12)).astype(np.int8)
    for result, expected in zip(simulate(again, codes).values(), simulate(graph, codes).values(), strict=True):
        np.testing.assert_array_equal(result, expected)
    measured = [graph.measured_as(operator) for operator in graph.operators]
    assert measured[1:4] == ["DEQUANTIZE", "ELU:float32", "QUANTIZE:float32"]


@pytest.mark.slow
def test_an_island_is_inspected_at_its_ends() -> None:
    inspection = inspect(FILES / "float_island.int8.tflite", examples=3, devices=["xnnpack"])
    (device,) = (device for device in inspection.devices if device.values)
    counts = {row.kind: (row.values, row.differing, row.exact) for row in device.operators}
    assert counts["DEQUANTIZE"] == (24, 0, True) and counts["QUANTIZE:float32"] == (24, 0, True)
    assert counts["ELU:float32"] == (0, 0, False)
    assert inspection.equal and "1 operator computes in float32" in inspection.text()


@pytest.mark.slow
def test_nothing_is_claimed_of_a_network_in_float() -> None:
    inspection = inspect(FILES / "convolutions.dynamic_range.tflite", examples=2, devices=["reference"])
    assert not inspection.equal and not any(device.values for device in inspection.devices)
    assert {layer.dtype for layer in inspection.layers} == {FLOAT}
    assert "no integer was compared" in inspection.text()
