# SPDX-License-Identifier: Apache-2.0
"""Float files of others as networks: real numbers beside their own runtimes, and what is trained from there beside the
device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from onnx_files import exported, on_onnxruntime
from plain_networks import NETWORKS
from test_from_file import FILES, on_litert

from exactqat import deploy, qat
from exactqat.deploy.formats.read_onnx import model_of
from exactqat.qat import Rule, UnsupportedOperator
from exactqat.qat.train.files import OpenedFile

pytest.importorskip("ai_edge_litert")
# Of the largest value of a result: sums of float32 in another order.
ORDER_OF_SUMS = 1e-5
# Of TensorFlow's converter; the second has weights in int8 and computes with real numbers.
TFLITE = ("convolutions.float32", "convolutions.dynamic_range", "enlarged.float32", "pooled.float32")
# Each with something of its own: axes in the middle, attention, transposed convolutions, recurrent layers.
EXPORTED = ("ds_cnn", "tiny_vit", "unet_transposed", pytest.param("gru_keywords", marks=pytest.mark.slow),
            "res_net_option_a")  # fmt: skip


def drawn(plan: object, examples: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((examples, *feature.shape[1:])).astype(np.float32) for feature in plan.inputs]


def assert_close(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= ORDER_OF_SUMS * np.abs(theirs).max()


def assert_trains(model: qat.torch.PreparedModel, folder: Path) -> None:
    """Two steps in real numbers, one in integers; the file computes training's integers."""
    images = [torch.from_numpy(array) for array in drawn(model.plan, 4)]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for number in range(3):
        if number == 2:
            qat.freeze(model)
        optimizer.zero_grad()
        results = model(*images)
        sum(torch.square(torch.as_tensor(leaf)).mean() for leaf in torch.utils._pytree.tree_leaves(results)).backward()
        optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    graph = deploy.lower(model.eval())
    codes = {}
    for name, image in zip(graph.inputs, images, strict=True):
        axes = next(port.axes for port in graph.signature.inputs if port.tensor == name)
        codes[name] = deploy.quantize(image.numpy().transpose(axes), graph.tensors[name].quantization)
    path = deploy.write_tflite(graph, folder / "trained.tflite")
    for device in ("xnnpack-x86", "reference"):
        assert deploy.verify(graph, path, codes, device).differing == 0


@pytest.mark.parametrize("name", TFLITE)
def test_a_float_tflite_file_is_a_network(name: str, tmp_path: Path) -> None:
    path = FILES / f"{name}.tflite"
    model = qat.prepare(deploy.read_tflite(path), device="xnnpack-x86")
    reals = drawn(model.plan, 3)
    if "dynamic" not in name:  # there LiteRT rounds what it multiplies
        assert_close(model.trained().float_results(*reals), on_litert(path, reals, "xnnpack-x86"))
    assert_trains(model, tmp_path)


@pytest.mark.filterwarnings("ignore::exactqat.kit.planning.FinalActivationWarning")
@pytest.mark.parametrize("name", EXPORTED)
def test_an_onnx_file_is_a_network(name: str, tmp_path: Path) -> None:
    path = exported(name, tmp_path)
    model = qat.prepare(deploy.read_onnx(path))
    reals = drawn(model.plan, 3)
    assert_close(model.trained().float_results(*reals), on_onnxruntime(path, reals))
    assert_trains(model, tmp_path)


def test_a_batch_that_is_fixed_to_one_serves_any(tmp_path: Path) -> None:
    path = exported("tiny_vit", tmp_path, dynamic_axes=None)
    onnx = pytest.importorskip("onnx")
    assert onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
    with pytest.raises(UnsupportedOperator, match="a fixed batch of 2; leave it open, or make it 1"):
        qat.prepare(deploy.read_onnx(path))
    model, (examples,) = NETWORKS["tiny_vit"]()
    with pytest.warns() as _:
        torch.onnx.export(model.eval(), (examples[:1],), str(path), dynamo=False, opset_version=17)
    prepared = qat.prepare(deploy.read_onnx(path))
    reals = drawn(prepared.plan, 3)
    one_by_one = [on_onnxruntime(path, [reals[0][row : row + 1]])[0] for row in range(3)]
    assert_close(prepared.trained().float_results(*reals), [np.concatenate(one_by_one)])


@pytest.mark.slow
def test_jax_quantizes_an_onnx_file_by_rules(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    path = exported("ds_cnn", tmp_path)
    prepared = qat.jax.prepare_file(deploy.read_onnx(path), rules=[Rule(weight_bits=4)])
    params, state = prepared.init()
    reals = drawn(prepared.plan, 3)
    assert_close(prepared.trained(params, state).float_results(*reals), on_onnxruntime(path, reals))
    params, state = prepared.freeze(*prepared.calibrate(params, state, [reals[0]]))
    graph = prepared.lower(params, state)
    filters = [tensor.data for tensor in graph.tensors.values() if tensor.data is not None and tensor.dtype == "int8"]
    assert max(int(np.abs(array.astype(int)).max()) for array in filters) == 7


def test_what_has_no_step_is_listed() -> None:
    with pytest.raises(UnsupportedOperator) as refused:
        qat.prepare(deploy.read_tflite(FILES / "reals.float32.tflite"))
    for word in ("FLOOR_MOD", "FLOOR_DIV", "CEIL"):
        assert f"no network has a step for {word}" in str(refused.value)


def node(kind: str, shape: tuple[object, ...], *more: tuple[int, ...], dtype: int = 1) -> object:
    """A file of one operator; more: shapes of its other operands, which are constants."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    constants = [
        onnx.numpy_helper.from_array(np.ones(sizes, np.float32), f"c{number}") for number, sizes in enumerate(more)
    ]
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *(constant.name for constant in constants)], ["y"])],
        "one",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", 1, shape)],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(
    ("kind", "shape", "more", "dtype", "words"),
    [
        ("Det", ("N", 3, 3), (), 1, "Det has no int8 operator"),
        ("Relu", ("N", "H"), (), 1, r"has the shape \[None, None\]; a device's network has fixed sizes"),
        ("Cast", ("N", 3), (), 9, "input 'x' is bool; networks get float32, or indices"),
        ("Pow", ("N", 3), ((3,),), 1, "its exponent is not one number"),
        ("Relu", (), (), 1, r"has the shape \[\]"),
    ],
)
def test_onnx_files_that_are_refused(
    kind: str, shape: tuple[object, ...], more: tuple[tuple[int, ...], ...], dtype: int, words: str, tmp_path: Path
) -> None:
    model = node(kind, shape, *more, dtype=dtype)
    if kind == "Cast":
        model.graph.node[0].attribute.append(pytest.importorskip("onnx").helper.make_attribute("to", 1))
    (tmp_path / "one.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedOperator, match=words):
        qat.prepare(deploy.read_onnx(tmp_path / "one.onnx"))


def test_files_that_ask_for_too_much_are_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, path = onnx.helper, tmp_path / "one.onnx"
    model = node("Add", ("N", 3), (3,))
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["sizes"], ["ones"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([10**6, 10**6]), "sizes"))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedOperator, match="ConstantOfShape that makes 'ones' holds 1,000,000,000,000 numbers"):
        qat.prepare(deploy.read_onnx(path))
    # Constants in files beside it are read, and nothing else is.
    model = node("Add", ("N", 300), (300,))
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="beside.bin")
    assert (tmp_path / "beside.bin").exists()
    assert [feature.name for feature in qat.prepare(deploy.read_onnx(path)).plan.inputs] == ["x"]
    model = onnx.load(path, load_external_data=False)
    next(pair for pair in model.graph.initializer[0].external_data if pair.key == "location").value = "/etc/hostname"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(deploy.Refusal, match="cannot be read: it is damaged"):
        deploy.read_onnx(path)


def test_bytes_of_onnx_files_may_be_anything() -> None:
    content = node("Add", ("N", 3), (3,)).SerializeToString()
    rng, refused = np.random.default_rng(0), 0
    for _ in range(200):
        damaged = bytearray(content)
        for place in rng.integers(0, len(damaged), 2):
            damaged[place] = rng.integers(0, 256)
        try:
            OpenedFile(model_of(bytes(damaged))).plan()
        except (deploy.Refusal, UnsupportedOperator) as error:
            assert str(error)
            refused += 1
    assert 50 < refused < 200


def test_damaged_onnx_files_are_refused(tmp_path: Path) -> None:
    content = node("Relu", ("N", 3)).SerializeToString()
    for number, damaged in enumerate((b"", b"no model at all", content[: len(content) // 2])):
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(damaged)
        with pytest.raises(deploy.Refusal, match="cannot be read: it is damaged"):
            deploy.read_onnx(path)
    model = node("Relu", ("N", 3))
    model.graph.output.append(model.graph.output[0])
    path.write_bytes(model.SerializeToString())
    with pytest.raises(deploy.Refusal, match="its outputs must differ, got"):
        deploy.read_onnx(path)
