# SPDX-License-Identifier: Apache-2.0
"""The .onnx writer against onnxruntime: at most one in ten thousand codes off, and by one at most.

The file is defined by float arithmetic, so exactness cannot be asked for: see `exactqat.deploy.formats.onnx`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs exactqat[onnx]")
onnx = pytest.importorskip("onnx", reason="needs exactqat[onnx]")

from device_cases import CASES, NAMES  # noqa: E402
from sweep import graphs  # noqa: E402

from exactqat.deploy import (  # noqa: E402
    Builder,
    Graph,
    Report,
    per_tensor,
    place_codes,
    simulate,
    verify,
    write_onnx,
)
from exactqat.deploy.graph import ACTIVATIONS  # noqa: E402
from exactqat.deploy.runtimes.trial import RuntimeRefusal  # noqa: E402
from exactqat.kit.device import OPERATORS, DeviceOperator, Refusal  # noqa: E402

Random = np.random.Generator
SHARE_OFF_BY_ONE = 1e-4


def check(graph: Graph, codes: np.ndarray | dict[str, np.ndarray], path: Path, share: float) -> Report:
    report = verify(graph, write_onnx(graph, path), codes)
    assert [row.name for row in report.operators] == list(graph.results())
    for row in report.operators:
        assert row.values > 0 and row.largest_difference <= 1, row
    differing = sum(row.differing for row in report.operators)
    assert differing <= share * sum(row.values for row in report.operators), report.table()
    return report


def random_codes(rng: Random, graph: Graph, count: int) -> dict[str, np.ndarray]:
    return {
        name: rng.integers(-128, 128, (count, *graph.tensors[name].shape[1:])).astype(np.int8) for name in graph.inputs
    }


def weights(rng: Random, shape: tuple[int, ...], axis: int, activation: str, bits: int = 8) -> dict[str, object]:
    """A layer whose results spread over the codes; no scale is a power of two, whose products would make ties."""
    size = np.prod(shape) / shape[axis]
    zero_code = 2 ** (bits - 1) if activation == "NONE" else 0
    output = place_codes(rng.uniform(0.9, 1.1) * 6 / (2**bits - 1), zero_code, bits, activation)
    return {
        "filter": rng.integers(-127, 128, shape),
        "filter_scale": rng.uniform(0.5, 2, shape[axis]) * 4 / np.sqrt(size) / 127,
        "bias": rng.integers(-300, 300, shape[axis]),
        "output": output,
        "activation": activation,
    }


def conv(rng: Random, builder: Builder, x: str, activation: str) -> str:
    dilated = {"padding": str(rng.choice(["SAME", "VALID"])), "dilations": (2, 1)}
    strided = {"padding": str(rng.choice(["SAME", "VALID"])), "strides": tuple(int(s) for s in rng.integers(1, 4, 2))}
    window = dilated if rng.integers(3) == 0 else strided
    return builder.conv_2d(x, name="y", **window, **weights(rng, (7, 3, 2, 6), 0, activation))


def depthwise(rng: Random, builder: Builder, x: str, activation: str) -> str:
    window = {"padding": str(rng.choice(["SAME", "VALID"])), "strides": tuple(int(s) for s in rng.integers(1, 4, 2))}
    shape = (1, 3, 3, 6 * int(rng.integers(1, 3)))
    return builder.depthwise_conv_2d(x, name="y", **window, **weights(rng, shape, 3, activation))


def dense(rng: Random, builder: Builder, x: str, activation: str) -> str:
    flat = builder.reshape(x, (1, 7 * 9 * 6), name="flat")
    return builder.fully_connected(flat, name="y", **weights(rng, (11, 7 * 9 * 6), 0, activation))


def add(rng: Random, builder: Builder, x: str, activation: str) -> str:
    other = builder.input("other", (1, 7, 9, 6), per_tensor(rng.uniform(0.001, 0.1), 7))
    return builder.add(x, other, per_tensor(rng.uniform(0.03, 0.1), -3), name="y", activation=activation)


def mul(rng: Random, builder: Builder, x: str, activation: str) -> str:
    other = builder.input("other", (1, 1, 1, 6), per_tensor(rng.uniform(0.001, 0.1), 7))
    return builder.mul(x, other, per_tensor(rng.uniform(0.03, 0.1), -3), name="y", activation=activation)


def mean(rng: Random, builder: Builder, x: str, activation: str) -> str:
    return builder.mean(x, per_tensor(rng.uniform(0.005, 0.02), -3), name="y", keep_dims=bool(rng.integers(2)))


def average_pool(rng: Random, builder: Builder, x: str, activation: str) -> str:
    size = tuple(int(side) for side in rng.integers(1, 5, 2))
    return builder.average_pool_2d(x, name="y", filter_size=size, strides=(2, 1), padding="SAME")


def max_pool(rng: Random, builder: Builder, x: str, activation: str) -> str:
    size = tuple(int(side) for side in rng.integers(1, 5, 2))
    return builder.max_pool_2d(x, name="y", filter_size=size, strides=(1, 2), padding="SAME")


def pad_and_join(rng: Random, builder: Builder, x: str, activation: str) -> str:
    padded = builder.pad(x, [(0, 0), (1, 0), (0, 2), (0, 3)], name="padded")
    return builder.concatenation(
        [padded, padded], builder.tensor(x).quantization, name="y", axis=int(rng.integers(1, 4))
    )


def reshapes(rng: Random, builder: Builder, x: str, activation: str) -> str:
    return builder.reshape(builder.reshape(x, (1, 9, 2, 21), name="image"), (1, 7 * 9 * 6), name="y")


# Operators whose results are moved or compared, not computed: they must agree without exception.
EXACT_HERE = (average_pool, max_pool, pad_and_join, reshapes)


@pytest.mark.parametrize("build", [conv, depthwise, dense, add, mul, mean, *EXACT_HERE], ids=lambda b: b.__name__)
def test_every_operator(build: Callable[[Random, Builder, str, str], str], tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = differing = 0
    for trial in range(12):
        builder = Builder()
        x = builder.input("x", (1, 7, 9, 6), per_tensor(rng.uniform(0.01, 0.05), int(rng.integers(-128, 128))))
        graph = builder.graph([build(rng, builder, x, ACTIVATIONS[trial % 3])])
        # 64 images each; the share is asked for over all trials together.
        report = check(graph, random_codes(rng, graph, 64), tmp_path / "model.onnx", share=1.0)
        values += report.values
        differing += report.differing
    print(f"{build.__name__}: {differing} of {values} differ")
    assert differing <= (0 if build in EXACT_HERE else SHARE_OFF_BY_ONE * values)


@pytest.mark.parametrize("kind", CASES)
def test_every_declaration(kind: str, tmp_path: Path) -> None:
    """The random graphs of the sweep, whose many ties round to even here: off by one, but by no more."""
    for graph, codes in graphs(kind, "xnnpack-x86", 8):
        kinds = {operator.kind for operator in graph.operators}
        # Axes that operators of others' files leave out.
        others = any(operator.attributes.get("shrink_axes") for operator in graph.operators)
        if others or "DIV" in kinds or any(type(OPERATORS[name]).onnx is DeviceOperator.onnx for name in kinds):
            # What only others' files hold is not written to ONNX.
            with pytest.raises(Refusal, match="has no form in ONNX here|ONNX has no variables"):
                write_onnx(graph, tmp_path / "model.onnx")
            continue
        report = verify(graph, write_onnx(graph, tmp_path / "model.onnx"), codes)
        assert report.values > 0
        for row in (*report.operators, *report.outputs):
            assert row.largest_difference <= 1, (row, graph.operators)


@pytest.mark.parametrize("kind", NAMES)
def test_every_kind_is_written_or_refused(kind: str, tmp_path: Path) -> None:
    for graph, _ in graphs(kind, "onnxruntime-x86", 2):
        try:
            write_onnx(graph, tmp_path / "model.onnx")
        except Refusal as refusal:
            assert "ONNX" in str(refusal), refusal


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_whole_network(bits: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(bits)
    builder = Builder()
    middle, scale = 2 ** (bits - 1), 9.1 / (2**bits - 1)
    x = builder.input("x", (1, 17, 15, 3), per_tensor(0.021, -5))
    first = builder.depthwise_conv_2d(x, name="first", **weights(rng, (1, 3, 3, 6), 3, "RELU6", bits))
    wide = builder.conv_2d(first, name="wide", **weights(rng, (16, 1, 1, 6), 0, "RELU", bits))
    narrow = builder.conv_2d(wide, name="narrow", **weights(rng, (6, 3, 3, 16), 0, "NONE", bits))
    total = builder.add(first, narrow, place_codes(scale, middle, bits), name="total")
    down = builder.conv_2d(total, name="down", strides=(2, 2), **weights(rng, (8, 3, 3, 6), 0, "RELU6", bits))
    pooled = builder.max_pool_2d(total, name="pooled", filter_size=(3, 3), strides=(2, 2), padding="SAME")
    gate = builder.mean(pooled, place_codes(scale, middle, bits), name="gate", keep_dims=True)
    gated = builder.mul(pooled, gate, place_codes(scale, middle, bits), name="gated")
    average = builder.average_pool_2d(gated, name="average", filter_size=(2, 2), strides=(2, 2))
    flat = builder.reshape(average, (1, 4 * 4 * 6), name="flat")
    head = builder.fully_connected(flat, name="head", **weights(rng, (10, 4 * 4 * 6), 0, "NONE", bits))
    graph = builder.graph([head, down])
    codes = random_codes(rng, graph, 64)
    check(graph, codes, tmp_path / "model.onnx", SHARE_OFF_BY_ONE)
    for name, results in simulate(graph, codes, tensors=list(graph.results())).items():
        assert len(np.unique(results)) > 1, f"{name} is constant, so nothing was tested"


NETWORKS = {
    "dscnn": (1, 25, 10),
    "mobilenet_v1": (3, 33, 33),
    "resnet8": (3, 16, 16),
    "autoencoder": (40,),
}
# Of tests/plain_networks.py: gates and hard functions.
PLAIN = ("squeeze_excite_net", "activations_hard")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NETWORKS, *PLAIN])
def test_networks(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import plain_networks

    from exactqat import qat
    from exactqat.application.job import models
    from exactqat.deploy.lower import lower
    from exactqat.deploy.values import device_codes

    torch.manual_seed(0)
    if name in PLAIN:
        network, (example,) = plain_networks.NETWORKS[name]()
        batch = torch.randn(16, *example.shape[1:])
    else:
        batch = torch.randn(16, *NETWORKS[name])
        known = name in models.NETWORKS
        network = models.network(name if known else f"plain_networks:{name}", NETWORKS[name], 5)
    for norm in network.modules():
        if isinstance(norm, torch.nn.BatchNorm2d | torch.nn.BatchNorm1d):
            norm.momentum = None
    network(batch)  # statistics for batch norm, without which signals would die away
    model = qat.prepare(network.eval(), batch)
    qat.calibrate(model, [batch])
    qat.freeze(model)
    graph = lower(model)
    codes = device_codes(model, batch)["input"]
    report = check(graph, codes, tmp_path / "model.onnx", SHARE_OFF_BY_ONE)
    print(f"{name}: {sum(row.differing for row in report.operators)} of {report.values} differ")


def small_graph() -> Graph:
    rng = np.random.default_rng(0)
    builder = Builder()
    x = builder.input("x", (1, 5, 4, 3), per_tensor(0.02, 3))
    first = builder.conv_2d(x, name="first", **weights(rng, (4, 3, 3, 3), 0, "RELU6"))
    return builder.graph([builder.conv_2d(first, name="second", **weights(rng, (6, 1, 1, 4), 0, "NONE"))])


def test_the_file_is_what_it_says(tmp_path: Path) -> None:
    graph = small_graph()
    content = write_onnx(graph, tmp_path / "a.onnx", "digits").read_bytes()
    assert content == write_onnx(small_graph(), tmp_path / "b.onnx", "digits").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]
    model = onnx.load_model_from_string(content)
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 21)]
    assert model.doc_string == "exactqat; digits"
    (entry,), (exit_,) = model.graph.input, model.graph.output
    for value, name, sizes in ((entry, "x", [3, 5, 4]), (exit_, "second", [6, 5, 4])):
        shape = value.type.tensor_type.shape.dim
        assert value.name == name and shape[0].dim_param == "batch"
        assert [axis.dim_value for axis in shape[1:]] == sizes
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    words = [attribute.s for node in convolutions for attribute in node.attribute if attribute.name == "auto_pad"]
    assert words == [b"SAME_UPPER"] * 2
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert constants["first/filter/codes"].dtype == np.int8 and constants["first/filter/scale"].shape == (4,)
    assert constants["first/bias/codes"].dtype == np.int32
    assert "Clip" in [node.op_type for node in model.graph.node]


def test_real_inputs_of_any_batch(tmp_path: Path) -> None:
    import onnxruntime

    graph = small_graph()
    session = onnxruntime.InferenceSession(write_onnx(graph, tmp_path / "model.onnx"))
    codes = random_codes(np.random.default_rng(1), graph, 5)["x"]
    real = ((codes.astype(np.float32) - 3) * np.float32(0.02)).transpose(0, 3, 1, 2)
    expected = simulate(graph, codes)["second"]
    quantization = graph.tensors["second"].quantization
    scale, zero_point = quantization.scale[0], quantization.zero_point[0]
    for count in (1, 5):
        (result,) = session.run(None, {"x": real[:count]})
        stored = np.rint(result / scale).transpose(0, 2, 3, 1) + zero_point
        assert np.abs(stored - expected[:count]).max() <= 1
        assert result.shape == (count, 6, 5, 4)


def test_verify_finds_one_wrong_weight_and_another_graphs_file(tmp_path: Path) -> None:
    graph = small_graph()
    path = write_onnx(graph, tmp_path / "model.onnx")
    codes = random_codes(np.random.default_rng(1), graph, 20)
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == "first/filter/codes":
            data = onnx.numpy_helper.to_array(tensor).copy()
            data[0, 0, 0, 0] ^= 64
            tensor.CopyFrom(onnx.numpy_helper.from_array(data, tensor.name))
    onnx.save(model, path)
    first, second = verify(graph, path, codes).operators
    assert first.differing > 50 and first.largest_difference > 1
    assert second.differing <= 2, "the second operator computes rightly from what it is given"
    builder = Builder()
    x = builder.input("x", (1, 5, 4, 3), per_tensor(0.02, 3))
    other = write_onnx(builder.graph([builder.pad(x, [(0, 0)] * 4, name="second")]), tmp_path / "other.onnx")
    with pytest.raises(ValueError, match="no tensors .'first'.; was it written from another graph"):
        verify(graph, other, codes)
    with pytest.raises(ValueError, match="no images"):
        verify(graph, path, codes["x"][:0])


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"DequantizeLinear", b"DequantizeTriple"),
    ],
    ids=["empty", "half", "unknown operator"],
)
def test_a_damaged_file_is_refused_in_one_sentence(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    graph = small_graph()
    path = write_onnx(graph, tmp_path / "model.onnx")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RuntimeRefusal, match="onnxruntime rejects the file: ") as refusal:
        verify(graph, path, random_codes(np.random.default_rng(1), graph, 2))
    assert "\n" not in str(refusal.value)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'exactqat\[onnx\]'"):
        write_onnx(small_graph(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
