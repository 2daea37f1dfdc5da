# SPDX-License-Identifier: Apache-2.0
"""onnxruntime's CPU kernels on x86 as a device: its integers, and networks that are trained for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs exactqat[onnx]")
pytest.importorskip("onnx", reason="needs exactqat[onnx]")

import onnx
import onnxruntime as ort
from device_cases import NAMES, NAMES_IN_ONNX
from sweep import sweep

from exactqat.deploy import (
    EXACT,
    MEASURED,
    Builder,
    Graph,
    per_tensor,
    profiles_here,
    simulate,
    verify,
    write_onnx,
    write_tflite,
)
from exactqat.deploy.runtimes import onnxruntime, profile_here
from exactqat.deploy.runtimes.trial import RuntimeRefusal

DEVICE = "onnxruntime-x86"
here = pytest.mark.skipif(DEVICE not in profiles_here(".onnx"), reason="needs an x86 with VNNI instructions")
CLAIMED = [kind for kind in (*NAMES, *NAMES_IN_ONNX) if (kind, DEVICE) in EXACT]


@here
@pytest.mark.parametrize("kind", CLAIMED)
def test_equals_the_runtime(kind: str, tmp_path: Path) -> None:
    outcome = sweep(kind, DEVICE, 6, tmp_path)
    assert outcome.values and not outcome.differing, outcome.examples


def test_what_is_claimed_was_compared() -> None:
    for kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD", "MUL", "MEAN", "SOFTMAX", "BATCH_MATMUL"):
        assert MEASURED[kind, DEVICE][0] >= 10_000 and kind in CLAIMED
    # onnxruntime computes these in float32.
    assert not any(kind in CLAIMED for kind in ("TRANSPOSE_CONV", "SUM", "CONV_2D:int16"))


def layers(rng: np.random.Generator) -> Graph:
    """Operators that have integer kernels, and activations that do not follow from a grid's range."""
    builder = Builder()
    x = builder.input("x", (1, 8, 8, 4), per_tensor(0.031, -5))
    filter, scale = rng.integers(-127, 128, (6, 3, 3, 4)), rng.uniform(0.5, 1, 6) * 0.003
    grid = per_tensor(0.043, 7)
    first = builder.conv_2d(x, filter, scale, rng.integers(-99, 99, 6), grid, name="first", activation="RELU6")
    second = builder.conv_2d(first, rng.integers(-127, 128, (6, 1, 1, 6)), scale, np.zeros(6), grid, name="second")
    total = builder.add(first, second, per_tensor(0.051, -3), name="total", activation="RELU")
    gate = builder.logistic(builder.mean(total, per_tensor(0.04, 3), name="mean", keep_dims=True), name="gate")
    gated = builder.mul(total, gate, per_tensor(0.037, -9), name="gated")
    pooled = builder.average_pool_2d(gated, name="pooled", filter_size=(2, 2), strides=(2, 2))
    flat = builder.reshape(pooled, (1, 96), name="flat")
    rows = builder.fully_connected(
        flat, rng.integers(-127, 128, (10, 96)), [0.004], rng.integers(-99, 99, 10), per_tensor(0.1, 5), name="rows"
    )
    return builder.graph([builder.softmax(rows, name="y")])


@here
def test_its_integer_kernels_are_met(tmp_path: Path) -> None:
    """Of an unchanged session: no convolution, product or sum is left in real numbers."""
    path = write_onnx(layers(np.random.default_rng(0)), tmp_path / "model.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    counts = {"QLinearConv": 2, "QLinearAdd": 1, "QLinearMul": 1, "QGemm": 1, "QLinearSigmoid": 1}
    counts |= {"QLinearGlobalAveragePool": 1, "QLinearSoftmax": 1}
    assert {kind: kinds.count(kind) for kind in counts} == counts
    assert not {"Conv", "Gemm", "MatMul", "Add", "Softmax", "GlobalAveragePool"} & set(kinds), kinds


@here
def test_a_graph_of_all_of_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    graph = layers(rng)
    codes = rng.integers(-128, 128, (64, 8, 8, 4)).astype(np.int8)
    path = write_onnx(graph, tmp_path / "model.onnx")
    report = verify(graph, path, codes, DEVICE)
    assert report.values > 50_000 and not report.differing and all(row.exact for row in report.operators)
    assert report.profile == DEVICE and not any(row.differing for row in report.outputs)
    # Another device computes other integers, and says so.
    assert verify(graph, path, codes).values == report.values
    builder = Builder()
    graph = builder.graph(
        [builder.quantize(builder.input("x", (1, 256), per_tensor(0.031, 3)), per_tensor(0.0217, 3), name="y")]
    )
    codes = np.arange(-128, 128).astype(np.int8)[None]
    comparison = verify(graph, write_onnx(graph, path), codes, DEVICE)
    assert not comparison.differing and np.any(simulate(graph, codes)["y"] != simulate(graph, codes, DEVICE)["y"])


@here
@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeeze_excite_net"])
def test_what_is_trained_is_what_it_computes(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import plain_networks

    from exactqat import deploy, qat

    model, examples = plain_networks.NETWORKS[name]()
    prepared = qat.prepare(model, examples, device=DEVICE)
    qat.calibrate(prepared, [examples])
    qat.freeze(prepared)
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        prepared.train()(*examples).square().mean().backward()
        optimizer.step()
    graph = deploy.lower(prepared.eval())
    assert graph.trained_for == DEVICE
    codes = deploy.input_codes(graph, [example.numpy() for example in examples])
    trained = deploy.device_codes(prepared, *examples)
    report = verify(graph, write_onnx(graph, tmp_path / "model.onnx"), codes, DEVICE, trained_codes=trained)
    assert report.differing == report.training_differing == 0 < report.training_values


def test_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, codes = layers(np.random.default_rng(0)), np.zeros((1, 8, 8, 4), np.int8)
    assert DEVICE not in profiles_here()
    if DEVICE in profiles_here(".onnx"):
        pytest.importorskip("ai_edge_litert")
        with pytest.raises(ValueError, match="runs .onnx files, and path is a .tflite file: model.tflite"):
            verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes, DEVICE)
        with pytest.raises(ValueError, match="runs .tflite files, and path is an .onnx file: model.onnx"):
            verify(graph, write_onnx(graph, tmp_path / "model.onnx"), codes, "reference")
        (tmp_path / "damaged.onnx").write_bytes(b"no network")
        with pytest.raises(RuntimeRefusal, match="onnxruntime rejects the file: "):
            verify(graph, tmp_path / "damaged.onnx", codes, DEVICE)
    monkeypatch.setattr("exactqat.deploy.runtimes.saturates", lambda: True)
    assert profiles_here(".onnx") == ()
    with pytest.raises(ValueError, match="needs a processor with VNNI instructions"):
        profile_here(DEVICE)
    report = verify(graph, write_onnx(graph, tmp_path / "model.onnx"), codes)
    assert not any(row.exact for row in report.operators)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("sse2 avx2", True), ("sse2 avx2 avx_vnni", False), ("sse2 avx512f avx512_vnni", False), ("asimd neon", False)],
)
def test_processors_without_vnni_are_known(flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_: f"flags : fpu {flags}\n")
    assert onnxruntime.saturates() is expected
