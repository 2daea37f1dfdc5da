# SPDX-License-Identifier: Apache-2.0
"""Quantized .onnx files of onnxruntime's own tools, trained: before the first step a network computes what onnxruntime
makes of the file; what is written after it is what training computed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_onnx
import torch
from onnx_files import exported, on_onnxruntime, quantized

from exactqat import cli, deploy, qat
from exactqat.deploy.inspect import file_of_onnx, inspect
from exactqat.qat import Rule, UnsupportedOperator
from exactqat.qat.train.files import OpenedFile

pytest.importorskip("onnxruntime")
DEVICE = "onnxruntime-x86"


def without_the_last_grid(path: Path) -> Path:
    """As NNCF writes files: the last layer's result in float32, and biases too."""
    import onnx

    model = onnx.load(path)
    graph = model.graph
    made_by = {name: node for node in graph.node for name in node.output}
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    last = made_by[graph.output[0].name]
    assert last.op_type == "DequantizeLinear"
    quantize = made_by[last.input[0]]
    layer = made_by[quantize.input[0]]
    graph.node.remove(last)
    graph.node.remove(quantize)
    layer.output[0] = graph.output[0].name
    for node in list(graph.node):
        if node.op_type == "DequantizeLinear" and held.get(node.input[0], np.zeros(0)).dtype == np.int32:
            values = held[node.input[0]] * held[node.input[1]]
            graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), node.output[0]))
            graph.node.remove(node)
    onnx.save(model, path)
    return path


def on_the_grid(model: qat.torch.PreparedModel) -> list[np.ndarray]:
    rng, reals = np.random.default_rng(0), []
    for feature in model.plan.inputs:
        scale, zero_point = model.plan.grids[feature.grid].fixed
        codes = rng.integers(-128, 128, (3, *feature.shape[1:]))
        reals.append((codes - zero_point).astype(np.float32) * np.float32(scale))
    return reals


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("name", ["ds_cnn", "res_net_option_a"])
def test_before_the_first_step_it_computes_what_onnxruntime_computes(
    name: str, per_channel: bool, tmp_path: Path
) -> None:
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    path = quantized(name, tmp_path, per_channel=per_channel)
    model = qat.prepare(deploy.read_onnx(path), device=DEVICE).eval()
    qat.freeze(model)
    reals = on_the_grid(model)
    result = model(*map(torch.from_numpy, reals)).detach().numpy()
    (expected,) = on_onnxruntime(path, reals)
    assert np.array_equal(result, expected)


def test_what_is_written_after_training_is_what_training_computed(tmp_path: Path) -> None:
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    model = qat.prepare(deploy.read_onnx(quantized("ds_cnn", tmp_path)), device=DEVICE)
    reals = [torch.from_numpy(array) for array in on_the_grid(model)]
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        model(*reals).square().sum().backward()
        optimizer.step()
        if not model.frozen:
            qat.freeze(model)
    moved = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
    assert any(name.endswith(".weight") for name in moved) and any(name.endswith(".scale") for name in moved)
    graph = deploy.lower(model.eval())
    path = deploy.write_onnx(graph, tmp_path / "trained.onnx")
    (expected,) = on_onnxruntime(path, [tensor.numpy() for tensor in reals])
    assert np.array_equal(model(*reals).detach().numpy(), expected)
    report = deploy.verify(graph, path, device=DEVICE, model=model, data=reals[0].numpy())
    assert report.equal and all(prediction.values and not prediction.differing for prediction in report.predictions)


def test_jax_trains_the_same_integers(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    path = quantized("tc_res_net", tmp_path, per_channel=True)
    prepared = qat.jax.prepare_file(deploy.read_onnx(path), device=DEVICE)
    params, state = prepared.freeze(*prepared.init())
    reals = on_the_grid(prepared)
    result, _ = prepared.apply(params, state, *reals)
    assert np.array_equal(np.asarray(result), on_onnxruntime(path, reals)[0])


def test_a_file_decides_its_grids(tmp_path: Path) -> None:
    file = deploy.read_onnx(quantized("ds_cnn", tmp_path))
    with pytest.raises(TypeError, match="rules is not for"):
        qat.prepare(file, rules=[Rule(weight_bits=4)])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"op_types_to_quantize": ["Conv"]}, "the file does not quantize"),
        ({"nodes_to_exclude": ["/fc/Gemm"]}, "its weight is not quantized in the file"),
        ({"weight_type": "QUInt8"}, "its weight has a zero point other than 0"),
        ({"activation_type": "QUInt16"}, "an activation is in uint16; int8 and uint8 train"),
    ],
)
def test_what_cannot_stay_as_it_is_is_named(how: dict[str, Any], words: str, tmp_path: Path) -> None:
    tools = pytest.importorskip("onnxruntime.quantization")
    how = {name: getattr(tools.QuantType, kind) if isinstance(kind, str) else kind for name, kind in how.items()}
    with pytest.raises(UnsupportedOperator, match=words):
        qat.prepare(deploy.read_onnx(quantized("ds_cnn", tmp_path, **how)), device=DEVICE)


@pytest.mark.parametrize("name", ["ds_cnn", "tc_res_net"])
def test_a_last_layer_in_float32_is_calibrated(name: str, tmp_path: Path) -> None:
    """All integers before it are the file's; its result has no grid in the file."""
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    path = without_the_last_grid(quantized(name, tmp_path))
    report = deploy.inspect(path, examples=2)
    (device,) = report.devices
    assert not device.differing and device.values > 1000
    assert all(operator.exact for operator in device.operators) and not any(output.exact for output in device.outputs)
    assert "float32 [N" in report.outputs[0] and " as int8" not in report.outputs[0]
    model = qat.prepare(deploy.read_onnx(path), device=DEVICE)
    (open_grid,) = [grid for grid in model.plan.grids.values() if grid.fixed is None]
    with pytest.raises(qat.MissingData, match=open_grid.name):
        qat.freeze(model)
    reals = [np.random.default_rng(1).standard_normal((4, *feature.shape[1:])).astype(np.float32)
             for feature in model.plan.inputs]  # fmt: skip
    qat.calibrate(model, [tuple(map(torch.from_numpy, reals))])
    qat.freeze(model.eval())
    results, (expected,) = model(*map(torch.from_numpy, reals)).detach().numpy(), on_onnxruntime(path, reals)
    graph = deploy.lower(model)
    # Calibration measures the float network, so the range may clip.
    grid = graph.tensors[graph.outputs[0]].quantization
    low, high = (grid.scale[0] * (code - grid.zero_point[0]) for code in (-128, 127))
    assert np.abs(results - np.clip(expected, low, high)).max() < 0.501 * grid.scale[0]
    written = deploy.write_onnx(graph, tmp_path / "trained.onnx")
    assert np.array_equal(results, on_onnxruntime(written, reals)[0])
    prepared = qat.jax.prepare_file(deploy.read_onnx(path), device=DEVICE)
    assert [grid.name for grid in prepared.plan.grids.values() if grid.fixed is None] == [open_grid.name]


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_a_file_is_inspected_beside_onnxruntime(form: str, tmp_path: Path) -> None:
    """Joined tensors on other grids, in both formats: the file's own codes are the simulation's."""
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    path = quantized("two_inputs", tmp_path, form=form)
    report = deploy.inspect(path, examples=2)
    (device,) = report.devices
    assert report.equal and not device.differing and device.values == sum(node.values for node in device.operators) + 6
    assert {node.kind for node in device.operators} >= {"CONV_2D", "CONCATENATION", "FULLY_CONNECTED"}
    assert all(part.exact for part in (*device.operators, *device.outputs))
    assert max(map(len, report.text(80).splitlines())) <= 80 and report.flash_bytes == path.stat().st_size
    real = {"input_0": np.zeros((1, 3, 16, 16), np.float32), "input_1": np.zeros((1, 6), np.float32)}
    shapes = {end.split()[0]: end for end in report.inputs}
    assert set(shapes) == set(real)
    with pytest.raises(ValueError, match="the network's inputs are"):
        deploy.inspect(path, {"other": real["input_1"]})
    with pytest.raises(ValueError, match=r"devices must run \.onnx files, which reference does not"):
        deploy.inspect(path, devices=["reference"])


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_a_sum_with_a_constant_on_a_grid_is_a_sum(form: str, tmp_path: Path) -> None:
    """A dense layer over three axes is a product and a sum in the file, and each rounds."""
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    report = deploy.inspect(quantized("m5", tmp_path, form=form), examples=2)
    (device,) = report.devices
    assert report.equal and not device.differing
    assert {operator.kind for operator in device.operators} >= {"FULLY_CONNECTED", "ADD"}


def test_nothing_is_claimed_of_what_follows_from_what_is_not(tmp_path: Path) -> None:
    """A file of QLinear operators resizes codes, which it has no name for here; the convolution after it reads them."""
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    report = deploy.inspect(quantized("unet_bilinear", tmp_path, form="QOperator"), examples=2)
    (device,) = report.devices
    claimed = {operator.name: operator.exact for operator in device.operators}
    assert report.equal and not device.differing
    assert {name.split("/")[0] for name, exact in claimed.items() if not exact} == {"up1", "up2"}


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("conv_shifted", "QDQ,QUInt8,QUInt8", {"CONV_2D:uint8"}),
        ("conv_shifted", "QDQ,asymmetric", {"CONV_2D:uint8"}),
        ("depthwise", "QOperator,QUInt8,QUInt8", {"DEPTHWISE_CONV_2D:uint8", "CONV_2D:uint8"}),
        ("gemm", "QDQ,QUInt8,QUInt8", {"FULLY_CONNECTED:uint8"}),
        ("conv_relu", "QDQ,QUInt8,QUInt8,per_channel", {"CONV_2D:full_range"}),
        ("classified", "QDQ,QInt8,QInt8,per_channel", {"CONV_2D", "SOFTMAX:own_grid"}),
        ("average_pool", "QDQ,QUInt8,QInt8", {"AVERAGE_POOL_2D:uint8"}),
        ("average_pool", "QDQ,symmetric", {"AVERAGE_POOL_2D:uint8"}),
        ("average_pool_padded", "QOperator,QUInt8,QInt8", {"AVERAGE_POOL_2D:own_grid"}),
        ("split", "QDQ,QUInt8,QInt8", {"QUANTIZE:float32", "CONCATENATION"}),
    ],
)
def test_what_the_tool_writes_with_its_options_is_equal_as_claimed(
    name: str, options: str, kinds: set[str], tmp_path: Path
) -> None:
    """Weights with zero points and codes of -128, codes in int8, softmax on 1 / 255, averages on the file's grids."""
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    report = deploy.inspect(small_onnx.quantized(name, options, tmp_path), examples=3)
    (device,) = report.devices
    assert report.equal and not device.differing and {row.kind for row in device.operators} >= kinds
    assert all(row.exact for row in (*device.operators, *device.outputs))


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("excited", "QDQ,QUInt8,QInt8", "TABLE"),
        ("resize_linear", "QDQ,QUInt8,QInt8", "QUANTIZE:float32"),
        ("resize_linear", "QOperator,QUInt8,QInt8", "CONV_2D"),
        ("split", "QDQ,symmetric", "TABLE"),
        ("concat", "QDQ,QInt8,QInt8", "CONCATENATION"),
    ],
)
def test_what_runs_in_float32_is_equal_and_not_claimed(name: str, options: str, kind: str, tmp_path: Path) -> None:
    """HardSigmoid, a resize; and int8 codes with two readers, which onnxruntime does not turn into uint8."""
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    report = deploy.inspect(small_onnx.quantized(name, options, tmp_path), examples=3)
    (device,) = report.devices
    assert report.equal and not any(row.differing for row in device.outputs)
    assert not any(row.exact for row in device.operators if row.kind == kind and row.values) or name == "resize_linear"
    assert not any(row.exact for row in device.outputs)


def test_a_softmax_on_the_files_grid_trains_and_tflite_has_none(tmp_path: Path) -> None:
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    path = small_onnx.quantized("classified", "QDQ,QUInt8,QInt8,per_channel", tmp_path)
    model = qat.prepare(deploy.read_onnx(path), device=DEVICE, keep_final_activation=True).eval()
    qat.freeze(model)
    reals = on_the_grid(model)
    assert np.array_equal(model(*map(torch.from_numpy, reals)).detach().numpy(), on_onnxruntime(path, reals)[0])
    graph = deploy.lower(model)
    (missing,) = graph.absent_from("micro")
    assert missing.startswith("TFLite-Micro has SOFTMAX on the grid (0.00390625, -128) alone")
    with pytest.raises(deploy.Refusal, match="no runtime of .tflite has"):
        deploy.write_tflite(graph, tmp_path / "model.tflite")


def test_files_that_choose_their_grids_are_named(tmp_path: Path) -> None:
    tools = pytest.importorskip("onnxruntime.quantization")
    path = tmp_path / "dynamic.onnx"
    tools.quantize_dynamic(str(small_onnx.in_float("conv_relu", tmp_path)), str(path), op_types_to_quantize=["Conv"])
    with pytest.raises(deploy.Refusal, match="chooses its grids while it runs .*ConvInteger"):
        deploy.inspect(path)


def test_real_numbers_between_are_named(tmp_path: Path) -> None:
    """A convolution's result that a pool puts on a grid, and that another convolution reads as it is."""
    path = without_the_last_grid(quantized("bi_fpn", tmp_path))
    with pytest.raises(UnsupportedOperator, match="'b/b_2/Relu_output_0' reads 'onnx_Conv_36', which is not"):
        deploy.inspect(path)


def status_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Of the command."""
    monkeypatch.setattr(sys, "argv", ["exactqat", "inspect", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_an_operator_that_computes_otherwise_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation gets another scale than the file's."""
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    path = quantized("ds_cnn", tmp_path)
    assert status_of(monkeypatch, str(path), "--json", "--examples", "1") == 0
    assert json.loads(capsys.readouterr().out)["equal"]
    assert status_of(monkeypatch, str(path), "--reduce", str(tmp_path / "small")) == 2
    assert "--reduce is for .tflite files" in capsys.readouterr().err
    assert status_of(monkeypatch, str(exported("ds_cnn", tmp_path))) == 2
    assert "it computes in real numbers" in " ".join(capsys.readouterr().err.split())
    network = OpenedFile(deploy.read_onnx(path)).on_onnxruntime()
    operator = next(candidate for candidate in network.graph.operators if candidate.kind == "CONV_2D")
    tensors = dict(network.graph.tensors)
    tensor = tensors[operator.outputs[0]]
    grid = replace(tensor.quantization, scale=tensor.quantization.scale * np.float32(1.01))
    tensors[tensor.name] = replace(tensor, quantization=grid)
    other = replace(network, graph=replace(network.graph, tensors=tensors))
    report = inspect(file_of_onnx(other), examples=1, seconds=60.0)
    wrong = [layer for layer in report.devices[0].operators if layer.differing]
    assert not report.equal and wrong[0].name == tensor.name and all(layer.exact for layer in wrong)


def test_less_than_no_padding_is_refused(tmp_path: Path) -> None:
    """Of windows that stand further apart than they are wide; onnxruntime moves them."""
    onnx = pytest.importorskip("onnx")
    builder = deploy.Builder()
    builder.input("x", (1, 2, 7, 3), deploy.per_tensor(0.5, 3))
    builder.max_pool_2d("x", name="y", filter_size=(2, 2), strides=(1, 1), padding="SAME")
    path = deploy.write_onnx(builder.graph(["y"]), tmp_path / "pool.onnx")
    assert deploy.inspect(path, examples=2).equal
    model = onnx.load(path)
    (pool,) = (node for node in model.graph.node if node.op_type == "MaxPool")
    strides = next(attribute for attribute in pool.attribute if attribute.name == "strides")
    strides.ints[:] = [1, 4]
    onnx.save(model, path)
    with pytest.raises(UnsupportedOperator, match="SAME_UPPER asks for less than no padding of 7 values"):
        deploy.inspect(path)
