# SPDX-License-Identifier: Apache-2.0
"""Files in uint8, as TensorFlow 1 wrote them, made int8: what is said of it is so on the runtimes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from test_detection import head
from test_read_tflite import changed

from exactqat import cli, deploy, qat
from exactqat.deploy import Builder, Graph, per_tensor
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.random_inputs import random_codes
from exactqat.deploy.runtimes import open_runtime

DEVICES = [name for name in ("xnnpack-x86", "reference") if name in deploy.profiles_here()]


def network(widest: int, pool: bool = True) -> Graph:
    """A small MobileNet in uint8, with one scale and a zero point for each filter, and codes up to `widest` from it."""
    rng, builder = np.random.default_rng(3), Builder()
    builder.input("image", (1, 16, 16, 3), per_tensor(1 / 128, 0))

    def layer(x: str, kind: str, filters: int, side: int, stride: int, name: str) -> str:
        channels = builder.tensor(x).shape[-1]
        shape = (1, side, side, channels) if kind == "DEPTHWISE_CONV_2D" else (filters, side, side, channels)
        bias = np.zeros(shape[3] if kind == "DEPTHWISE_CONV_2D" else filters, int)
        how = {"strides": (stride, stride), "padding": "SAME", "activation": "RELU6"}
        build = getattr(builder, kind.lower())
        return str(build(x, np.zeros(shape, int), [0.01], bias, per_tensor(6 / 255, -128), name=name, **how))

    x = layer("image", "CONV_2D", 8, 3, 2, "first")
    x = layer(x, "DEPTHWISE_CONV_2D", 8, 3, 1, "deep")
    x = layer(x, "CONV_2D", 16, 1, 1, "wide")
    x = builder.average_pool_2d(x, filter_size=(8, 8), strides=(8, 8), name="pool") if pool else x
    x = layer(x, "CONV_2D", 10, 1, 1, "logits")
    x = builder.softmax(builder.reshape(x, new_shape=(1, builder.tensor(x).shape[1] ** 2 * 10), name="row"), name="y")
    graph = builder.graph([x])
    tensors = dict(graph.tensors)
    for operator in graph.operators:
        if len(operator.inputs) == 3:
            filter, bias = (tensors[name] for name in operator.inputs[1:])
            zero_point = int(rng.integers(-60, 60))
            steps = np.clip(rng.normal(0, 60, filter.shape).round(), -128 - zero_point, 127 - zero_point)
            codes = np.clip(steps, -widest, widest).astype(np.int64) + zero_point
            added = filter.shape[1] * filter.shape[2] if filter.shape[0] == 1 else filter.data[0].size
            scale = np.float32(0.02 / np.sqrt(added))
            tensors[filter.name] = replace(
                filter, data=codes.astype(np.int8), quantization=per_tensor(scale, zero_point)
            )
            grid = per_tensor(tensors[operator.inputs[0]].quantization.scale[0] * scale, 0)
            codes = rng.integers(-500, 3000, bias.shape).astype(np.int32)
            tensors[bias.name] = replace(bias, data=codes, quantization=grid)
    operators = tuple(replace(operator, unsigned=True) for operator in graph.operators)
    result = replace(graph, tensors=tensors, operators=operators)
    result.validate()
    return result


def returned(graph: Graph, codes: dict[str, np.ndarray], device: str) -> np.ndarray:
    """What the runtime returns for the graph's file, as int8."""
    runtime = open_runtime(tflite_bytes(graph), graph.inputs, graph.outputs, device)
    given = {
        name: (array ^ -128).view(np.uint8) if name in graph.in_uint8() else array for name, array in codes.items()
    }
    (result,) = runtime.run(given).values()
    return (result ^ 128).view(np.int8) if result.dtype == np.uint8 else result


@pytest.mark.parametrize("device", DEVICES)
def test_filters_whose_codes_lie_near_their_zero_point_stay_as_they_are(device: str) -> None:
    graph = read_content(tflite_bytes(network(widest=127, pool=False))).graph
    conversion = deploy.convert(graph, device=device)
    assert conversion.values == 16 * 640 and not conversion.differing
    assert not any(row.differing for row in conversion.operators)
    assert [entry.requantized for entry in conversion.filters.values()] == [0] * 4
    assert all(entry.sqnr is None for entry in conversion.filters.values())
    assert "4 filters kept, 0 requantized" in conversion.text() and not conversion.graph.in_uint8()
    for name, tensor in graph.tensors.items():
        if name.endswith("/filter"):
            after = conversion.graph.tensors[name]
            steps = tensor.data.astype(int) - tensor.quantization.zero_point[0]
            assert np.array_equal(after.data, steps) and after.quantization.scale == tensor.quantization.scale
    codes = random_codes(graph, range(1), 1)
    assert np.array_equal(returned(graph, codes, device), returned(conversion.graph, codes, device))


@pytest.mark.parametrize("device", DEVICES)
def test_others_are_requantized_by_channel_and_what_changes_is_what_changes_on_the_runtime(device: str) -> None:
    graph = network(widest=255)
    codes = random_codes(graph, range(4), 2)
    conversion = deploy.convert(graph, codes, device)
    changed = {name: entry for name, entry in conversion.filters.items() if entry.requantized}
    assert changed and all(40 < entry.sqnr < 80 for entry in changed.values())
    for name in conversion.filters:
        before, after = (holder.tensors[f"{name}/filter"] for holder in (graph, conversion.graph))
        assert np.abs(after.data.astype(int)).max() <= 127 and not after.quantization.zero_point.any()
        axis = 3 if name == "deep" else 0
        steps = np.moveaxis(before.data.astype(int) - before.quantization.zero_point[0], axis, 0)
        scales = np.broadcast_to(after.quantization.scale, len(steps))
        same = scales == before.quantization.scale
        assert np.array_equal(np.moveaxis(after.data, axis, 0)[same], steps[same])
        assert conversion.filters[name].requantized == steps[~same].size
    one_by_one = [{name: array[[row]] for name, array in codes.items()} for row in range(4)]
    differing = [
        int((returned(graph, row, device) != returned(conversion.graph, row, device)).sum()) for row in one_by_one
    ]
    assert conversion.differing == sum(differing)
    assert "AVERAGE_POOL_2D" not in [row.kind for row in conversion.operators if row.name in changed]
    text = conversion.text()
    assert all(f"{entry.requantized:,} of {entry.values:,}" in text for entry in changed.values())


def test_the_result_trains_and_a_file_in_uint8_names_the_way() -> None:
    graph = network(widest=255)
    with pytest.raises(qat.UnsupportedOperator, match=r"deploy\.convert\(graph\)\.graph is it in int8"):
        qat.prepare(graph)
    converted = deploy.convert(graph).graph
    model = qat.prepare(converted, keep_final_activation=True)
    codes = random_codes(converted, range(3), 0)["image"]
    reals = torch.from_numpy(deploy.dequantize(codes, converted.tensors["image"].quantization))
    assert torch.isfinite(torch.autograd.grad(model(reals).square().sum(), list(model.parameters()))[0]).all()
    qat.freeze(model)
    expected = deploy.simulate(converted, codes)["y"]
    result = np.rint(model.eval()(reals).detach().numpy() * 256) - 128
    assert np.array_equal(result.reshape(expected.shape), expected)


def test_what_cannot_be_converted_is_said() -> None:
    graph = deploy.convert(network(widest=255)).graph
    with pytest.raises(deploy.Refusal, match="its codes are not uint8, so there is nothing to convert"):
        deploy.convert(graph)
    with pytest.raises(TypeError):
        deploy.convert("product.tflite")  # type: ignore[arg-type]
    conversion = deploy.convert(network(widest=255))
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(conversion)
    assert "\n" not in repr(conversion)


def test_operators_share_a_bias() -> None:
    graph = network(widest=255)
    first, deep = (operator for operator in graph.operators if operator.outputs[0] in ("first", "deep"))
    bias = graph.tensors["first/bias"]
    zeros = replace(bias, data=np.zeros_like(bias.data))
    shared = replace(deep, inputs=(*deep.inputs[:2], "first/bias"))
    operators = tuple(shared if operator is deep else operator for operator in graph.operators)
    graph = replace(graph, tensors={**graph.tensors, "first/bias": zeros}, operators=operators)
    converted = deploy.convert(graph).graph
    names = [operator.inputs[2] for operator in converted.operators if operator.outputs[0] in ("first", "deep")]
    assert len(set(names)) == 2


def test_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "product.tflite", tmp_path / "int8.tflite"
    deploy.write_tflite(network(widest=255), source)

    def status_of(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["exactqat", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0)

    assert status_of("convert", str(source), str(out), "--examples", "2") == 0
    said = capsys.readouterr().out
    assert "requantized" in said and "the file runs as simulated: none of" in said and "Written:" in said
    graph = deploy.read_tflite(out)
    assert not graph.in_uint8() and graph.tensors[graph.inputs[0]].dtype == "int8"
    assert status_of("convert", str(out), str(tmp_path / "again.tflite")) == 2
    assert not (tmp_path / "again.tflite").exists()


def in_uint8(content: bytes) -> bytes:
    """A detector's tail as TensorFlow 1 wrote it: the operator takes codes and makes real numbers of them itself."""

    def change(model: object) -> None:
        graph = model.subgraphs[0]
        names = {tensor.name.decode(): place for place, tensor in enumerate(graph.tensors)}
        (tail,) = graph.operators = graph.operators[-1:]
        tail.inputs = [names[name] for name in ("boxes", "scores", "anchors")]
        boxes, scores, anchors = (graph.tensors[place] for place in tail.inputs)
        for tensor in (boxes, scores):
            tensor.quantization.zeroPoint = np.array(tensor.quantization.zeroPoint) + 128
        data = np.array(model.buffers[anchors.buffer].data, np.uint8).view(np.float32)
        model.buffers[anchors.buffer].data = np.rint(data * 200 + 10).astype(np.uint8)
        anchors.quantization = type(boxes.quantization)()
        anchors.quantization.scale, anchors.quantization.zeroPoint = np.array([1 / 200], np.float32), np.array([10])
        boxes.type = scores.type = anchors.type = 3

    return changed(content, change)


def test_detectors_that_take_codes() -> None:
    content = in_uint8(tflite_bytes(head(background=1, integers=True)))
    graph = read_content(content).graph
    assert [operator.kind for operator in graph.operators] == ["DEQUANTIZE", "DEQUANTIZE", "DETECTION_POSTPROCESS"]
    codes = random_codes(graph, range(1), 0)
    given = {name: (array ^ -128).view(np.uint8) for name, array in codes.items()}
    device = open_runtime(content, graph.inputs, graph.outputs, DEVICES[0], True).run(given)
    results = deploy.simulate(graph, codes, DEVICES[0])
    assert device["found:3"] == results["found:3"] > 0
    for name in graph.outputs[:3]:
        np.testing.assert_allclose(results[name], device[name], rtol=2e-5, atol=2e-6, err_msg=name)
    converted = deploy.convert(graph)
    assert not converted.differing
