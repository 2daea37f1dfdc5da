# SPDX-License-Identifier: Apache-2.0
"""Quantized .onnx files of onnxruntime's own tools, trained: before the first step a network computes what onnxruntime
makes of the file; what is written after it is what training computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_networks import NETWORKS
from test_float_files import exported, on_onnxruntime

from exactqat import deploy, qat
from exactqat.qat import Rule, UnsupportedOperator

pytest.importorskip("onnxruntime")
DEVICE = "onnxruntime-x86"


class Reader:
    """Batches by which onnxruntime chooses ranges."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        rng = np.random.default_rng(0)
        given = ({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in "123")
        self.batches: Iterator[Any] = iter(given)

    def get_next(self) -> Any:
        return next(self.batches, None)


def quantized(name: str, folder: Path, **how: Any) -> Path:
    """A network by `quantize_static`, as its documentation says."""
    tools = pytest.importorskip("onnxruntime.quantization")
    path = exported(name, folder)
    ready, made = folder / "ready.onnx", folder / "quantized.onnx"
    tools.shape_inference.quant_pre_process(str(path), str(ready), skip_symbolic_shape=True)
    examples = NETWORKS[name]()[1]
    shapes = {f"input_{number}": tuple(each.shape) for number, each in enumerate(examples)}
    types = {"activation_type": tools.QuantType.QUInt8, "weight_type": tools.QuantType.QInt8, **how}
    tools.quantize_static(str(ready), str(made), Reader(shapes), quant_format=tools.QuantFormat.QDQ, **types)
    return made


def on_the_grid(model: qat.torch.PreparedModel) -> list[np.ndarray]:
    rng, found = np.random.default_rng(0), []
    for given in model.plan.inputs:
        scale, zero_point = model.plan.grids[given.grid].fixed
        codes = rng.integers(-128, 128, (3, *given.shape[1:]))
        found.append((codes - zero_point).astype(np.float32) * np.float32(scale))
    return found


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
    found = model(*map(torch.from_numpy, reals)).detach().numpy()
    (expected,) = on_onnxruntime(path, reals)
    assert np.array_equal(found, expected)


def test_what_is_written_after_training_is_what_training_computed(tmp_path: Path) -> None:
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    model = qat.prepare(deploy.read_onnx(quantized("ds_cnn", tmp_path)), device=DEVICE)
    reals = [torch.from_numpy(each) for each in on_the_grid(model)]
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
    (expected,) = on_onnxruntime(path, [each.numpy() for each in reals])
    assert np.array_equal(model(*reals).detach().numpy(), expected)
    report = deploy.verify(graph, path, device=DEVICE, model=model, data=reals[0].numpy())
    assert report.equal and all(each.values and not each.differing for each in report.predictions)


def test_jax_trains_the_same_integers(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    if DEVICE not in deploy.profiles_here(".onnx"):
        pytest.skip(f"{DEVICE} does not run here")
    path = quantized("tc_res_net", tmp_path, per_channel=True)
    prepared = qat.jax.prepare_file(deploy.read_onnx(path), device=DEVICE)
    params, state = prepared.freeze(*prepared.init())
    reals = on_the_grid(prepared)
    found, _ = prepared.apply(params, state, *reals)
    assert np.array_equal(np.asarray(found), on_onnxruntime(path, reals)[0])


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
    how = {name: getattr(tools.QuantType, each) if isinstance(each, str) else each for name, each in how.items()}
    with pytest.raises(UnsupportedOperator, match=words):
        qat.prepare(deploy.read_onnx(quantized("ds_cnn", tmp_path, **how)), device=DEVICE)
