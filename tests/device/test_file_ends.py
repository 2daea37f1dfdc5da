# SPDX-License-Identifier: Apache-2.0
"""Files as applications take them: real numbers or uint8 at the ends, names of classes, normalization, properties."""

from __future__ import annotations

import io
import itertools
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert")

from exactqat import deploy  # noqa: E402
from exactqat.deploy import Builder, Graph, per_tensor  # noqa: E402
from exactqat.deploy.formats import tflite  # noqa: E402
from exactqat.deploy.formats.tflite_metadata import attached_files  # noqa: E402

LABELS = ["cat", "dog", "a bird"]
RANDOM = np.random.default_rng(3)


def network(dtype: str = "int8") -> Graph:
    """An image to the scores of three classes."""
    zero = 3 if dtype == "int8" else 0
    builder = Builder()
    builder.input("image", (1, 4, 4, 3), per_tensor(0.0173, zero, dtype))
    builder.reshape("image", (1, 48), name="flat")
    weights, grid = RANDOM.integers(-127, 128, (3, 48)), per_tensor(0.11, -zero, dtype)
    return builder.graph([builder.fully_connected("flat", weights, [0.02], np.arange(3), grid, name="scores")])


@pytest.fixture
def graph() -> Graph:
    return network()


def ends() -> list[tuple[Any, ...]]:
    kinds = {"int8": (None, "int8", "uint8", "float32"), "int16": (None, "float32")}
    return [(dtype, *pair) for dtype in kinds for pair in itertools.product(kinds[dtype], repeat=2)]


@pytest.mark.parametrize(("dtype", "inputs", "outputs"), ends())
def test_no_code_differs_whatever_the_file_takes(tmp_path: Path, dtype: str, inputs: Any, outputs: Any) -> None:
    graph = network(dtype)
    path = deploy.write_tflite(graph, tmp_path / "m.tflite", "what it is", inputs=inputs, outputs=outputs)
    assert tflite.is_file_of(graph, path.read_bytes())
    images = RANDOM.normal(0, 1, (20, 4, 4, 3)).astype(np.float32)
    codes = deploy.input_codes(graph, images)
    back = deploy.read_tflite(path)
    assert back.inputs == graph.inputs and back.outputs == graph.outputs
    assert [operator.kind for operator in back.operators] == [operator.kind for operator in graph.operators]
    for device in deploy.profiles_here():
        report = deploy.verify(graph, path, codes, device)
        assert report.equal and not report.declared, report
        assert report.values == 20 * (48 + 3 + 3)
        assert deploy.verify(back, path, codes, device).equal


def test_inspect_takes_them_as_other_files(graph: Graph, tmp_path: Path) -> None:
    path = deploy.write_tflite(graph, tmp_path / "m.tflite", inputs="float32", outputs="uint8")
    inspection = deploy.inspect(path, RANDOM.normal(0, 1, (4, 4, 4, 3)).astype(np.float32))
    assert inspection.equal, inspection


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("resolver", ["AUTO", "BUILTIN_REF"])
def test_real_numbers_become_the_nearest_codes(tmp_path: Path, dtype: str, resolver: str) -> None:
    """Halfway between two codes the runtime may take the other one; results are the codes' own numbers."""
    runtime = pytest.importorskip("ai_edge_litert.interpreter")
    scale = np.float32(0.0173)
    builder = Builder()
    builder.input("x", (1, 5000), per_tensor(scale, 3 if dtype == "int8" else 0, dtype))
    graph = builder.graph([builder.reshape("x", (1, 5000), name="y")])
    path = deploy.write_tflite(graph, tmp_path / "m.tflite", inputs="float32", outputs="float32")
    numbers = RANDOM.normal(0, 60 * scale, (1, 5000)).astype(np.float32)  # in int8 also beyond its ends
    interpreter = runtime.Interpreter(
        str(path), experimental_op_resolver_type=getattr(runtime.OpResolverType, resolver), num_threads=1
    )
    result = interpreter.get_signature_runner()(x=numbers)["y"]
    codes = deploy.simulate(graph, deploy.input_codes(graph, numbers))
    expected = deploy.output_values(graph, codes)["y"]
    halfway = np.abs(np.abs(numbers / scale) % 1 - 0.5) < 1e-2
    np.testing.assert_array_equal(result[~halfway], expected[~halfway])
    assert np.abs(result - expected).max() <= 1.001 * scale


def test_an_input_of_fewer_bits_takes_codes_only(tmp_path: Path) -> None:
    """QUANTIZE would give codes that the network never saw in training."""
    graph = network()
    port = replace(graph.signature.inputs[0], limits=(112, 127))
    few = replace(graph, ports=replace(graph.signature, inputs=(port,)))
    deploy.write_tflite(few, tmp_path / "m.tflite", inputs="uint8")
    with pytest.raises(ValueError, match=r"inputs cannot be float32: the codes of 'image' stay within 112..127"):
        deploy.write_tflite(few, tmp_path / "m.tflite", inputs="float32")


@pytest.mark.parametrize(
    ("dtype", "settings", "words"),
    [
        ("int8", {"inputs": "int16"}, "inputs must be one of int8, uint8, float32, got 'int16'"),
        ("int16", {"outputs": "uint8"}, "outputs cannot be uint8: the codes of 'scores' are int16"),
        ("int16", {"inputs": "int8"}, "inputs cannot be int8: the codes of 'image' are int16"),
    ],
)
def test_ends_that_the_codes_do_not_have_are_refused(
    tmp_path: Path, dtype: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        deploy.write_tflite(network(dtype), tmp_path / "m.tflite", **settings)
    assert not list(tmp_path.iterdir())


def test_metadata_is_written_read_and_written_back(graph: Graph, tmp_path: Path) -> None:
    said = deploy.with_metadata(
        graph, name="pets", labels=LABELS, mean=127.5, std=[127.5] * 3, properties={"task": "classify", "imgsz": [4, 4]}
    )
    path = deploy.write_tflite(said, tmp_path / "m.tflite", inputs="float32")
    with zipfile.ZipFile(path) as archive:
        assert archive.read("labels.txt").decode().split("\n") == [*LABELS, ""]
        assert json.loads(archive.read("metadata.json")) == {"task": "classify", "imgsz": [4, 4]}
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    back = deploy.read_tflite(path)
    assert back.attached == said.attached and back.metadata["TFLITE_METADATA"] == said.metadata["TFLITE_METADATA"]
    again = deploy.write_tflite(back, tmp_path / "again.tflite", inputs="float32")
    assert again.read_bytes() == path.read_bytes()
    codes = deploy.input_codes(graph, RANDOM.random((4, 4, 4, 3)))
    for known in (graph, said, back):
        assert deploy.verify(known, path, codes).equal


def test_metadata_json_of_another_writer_is_kept(graph: Graph, tmp_path: Path) -> None:
    """As Ultralytics appends it, compressed."""
    path = deploy.write_tflite(graph, tmp_path / "m.tflite")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("metadata.json", '{"stride": 32}')
    back = deploy.read_tflite(path)
    assert back.attached == {"metadata.json": b'{"stride": 32}'}
    assert deploy.read_tflite(deploy.write_tflite(back, path)).attached == back.attached


def test_an_archive_that_cannot_be_read_is_left_out(graph: Graph) -> None:
    content = tflite.tflite_bytes(graph)
    assert attached_files(content, 1000) == {}
    whole = tflite.archive_of({"large": bytes(10_000)}, content)
    assert attached_files(whole, 9_999) == {} and attached_files(whole, 10_000) == {"large": bytes(10_000)}
    for end in range(len(content), len(whole)):
        attached_files(whole[:end] + b"\xff" + whole[end + 1 :], 10_000)
    bomb = io.BytesIO(content)
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(1 << 24))
    assert attached_files(bomb.getvalue(), 8 * len(bomb.getvalue())) == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"labels": ["cat"]}, "labels of 'scores' must be 3, one for each value of its last axis, got 1"),
        ({"labels": {"other": LABELS}}, "labels are for 'other'; the outputs are scores"),
        ({"labels": ["a\nb", "c", "d"]}, "lines of text"),
        ({"mean": 1}, "mean and std go together"),
        ({"mean": 0, "std": 0}, "std must be positive"),
        ({"mean": [1, 2], "std": [1, 2, 3]}, "mean and std must have as many numbers, got 2 and 3"),
    ],
)
def test_metadata_that_contradicts_the_network_is_refused(graph: Graph, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        deploy.with_metadata(graph, **settings)


def test_an_onnx_file_has_the_properties(graph: Graph, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    said = deploy.with_metadata(graph, labels=LABELS, properties={"task": "classify", "imgsz": [4, 4]})
    said = replace(said, attached={**said.attached, "exactqat": b"not ours", "picture": b"\xff"})
    path = deploy.write_onnx(said, tmp_path / "m.onnx")
    known = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(known.pop("exactqat"))["inputs"]
    assert known == {"task": "classify", "imgsz": "[4, 4]", "labels.txt": "cat\ndog\na bird\n"}
    assert deploy.verify(said, path, deploy.input_codes(graph, RANDOM.random((4, 4, 4, 3)))).equal


def test_mediapipe_reads_the_labels(graph: Graph, tmp_path: Path) -> None:
    """Its own classes of the table, and its image classifier on the file."""
    schema = pytest.importorskip("mediapipe.tasks.metadata.metadata_schema_py_generated")
    said = deploy.with_metadata(graph, name="pets", labels=LABELS, mean=120, std=[127.5] * 3)
    table = said.metadata["TFLITE_METADATA"]
    assert table[4:8] == b"M001"
    known = schema.ModelMetadataT.InitFromPackedBuf(table)
    assert known.name == b"pets"
    (image,), (scores,) = known.subgraphMetadata[0].inputTensorMetadata, known.subgraphMetadata[0].outputTensorMetadata
    assert image.content.contentProperties.colorSpace == schema.ColorSpaceType.RGB
    assert image.processUnits[0].optionsType == schema.ProcessUnitOptions.NormalizationOptions
    assert list(image.processUnits[0].options.mean) == [120] * 3
    assert list(image.processUnits[0].options.std) == [127.5] * 3
    (file,) = scores.associatedFiles
    assert (file.name, file.type) == (b"labels.txt", schema.AssociatedFileType.TENSOR_AXIS_LABELS)

    mediapipe = pytest.importorskip("mediapipe")
    vision = pytest.importorskip("mediapipe.tasks.python.vision")
    path = deploy.write_tflite(said, tmp_path / "m.tflite", inputs="float32", outputs="float32")
    images = RANDOM.integers(0, 256, (20, 4, 4, 3)).astype(np.uint8)
    codes = deploy.simulate(graph, deploy.input_codes(graph, (images - np.float32(120)) / np.float32(127.5)))
    # No pixel is halfway between two codes, so MediaPipe normalizes to the same ones and gives the same scores.
    with vision.ImageClassifier.create_from_model_path(str(path)) as classifier:
        for pixels, own in zip(images, deploy.output_values(graph, codes)["scores"].tolist(), strict=True):
            answer = classifier.classify(mediapipe.Image(image_format=mediapipe.ImageFormat.SRGB, data=pixels))
            scores = {category.category_name: category.score for category in answer.classifications[0].categories}
            assert scores == dict(zip(LABELS, own, strict=True))
