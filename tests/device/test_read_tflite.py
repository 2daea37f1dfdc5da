# SPDX-License-Identifier: Apache-2.0
"""Files read as graphs: our own, equal and byte-stable; others', which TensorFlow's converter wrote; damaged ones."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from damaged_files import cases
from device_cases import NAMES, random_codes, random_graph

from exactqat.deploy import (
    PROFILES,
    Builder,
    Graph,
    Quantization,
    per_tensor,
    profiles_here,
    read_tflite,
    simulate,
    unclaimed,
    write_tflite,
)
from exactqat.deploy.formats.read_tflite import read_content
from exactqat.deploy.formats.tflite import tflite_bytes
from exactqat.deploy.runtimes import open_runtime
from exactqat.kit.device import Refusal
from exactqat.kit.device.file_forms import SHAPE_ARITHMETIC
from exactqat.kit.device.tensor import INDICES

schema: Any = importlib.import_module("ai_edge_litert.schema_py_generated")
flatbuffers: Any = importlib.import_module("flatbuffers")

FILES = Path(__file__).parents[1] / "goldens" / "files"
READ = ("convolutions.int8", "convolutions.float_ends", "convolutions.uint8", "convolutions.int16",
        "convolutions.per_tensor", "convolutions.fixed_batch", "branches.int8", "sequence.int8", "two_ends.int8",
        "pieces.int8", "dilated.int8", "functions.int8", "enlarged.int8", "enlarged.fixed_batch", "embedded.int8",
        "one_hot.int8", "scores.float_ends", "with_token.fixed_batch", "stacked.int8", "stacked.fixed_batch",
        "sequences.int8", "sequences.fixed_batch", "excited.fixed_batch")  # fmt: skip


# What a network in codes begins or ends with is at the end of a file, not in the graph.
ENDS = ("DEQUANTIZE", "DEQUANTIZE:int16", "QUANTIZE:float32")


@pytest.mark.parametrize("kind", [name for name in NAMES if name not in ENDS])
def test_round_trip(kind: str) -> None:
    rng = np.random.default_rng(5)
    for number in range(4):
        graph = random_graph(rng, kind)
        content = tflite_bytes(graph)
        again = read_content(content).graph
        # LiteRT has no kernel of int32 for it: the file holds reshapes and a transpose, which are read as such.
        assert tflite_bytes(again) == content or kind == "SPACE_TO_DEPTH:int32"
        if number:
            continue
        codes = random_codes(rng, graph)
        for profile in PROFILES:
            try:
                expected = simulate(graph, codes, profile)
            except Refusal:  # codes at which a runtime dies
                continue
            for name, result in simulate(again, codes, profile).items():
                np.testing.assert_array_equal(result, expected[name])


def small_graph() -> Graph:
    rng = np.random.default_rng(0)
    builder = Builder()
    builder.input("x", (1, 6, 6, 3), per_tensor(0.02, 3))
    filter, bias = rng.integers(-127, 128, (4, 3, 3, 3)), rng.integers(-90, 90, 4)
    builder.conv_2d("x", filter, [0.01] * 4, bias, per_tensor(0.05, -128), name="first", activation="RELU")
    builder.mean("first", per_tensor(0.04, -3), name="mean")
    return builder.graph(
        [builder.fully_connected("mean", np.ones((2, 4)), [0.1], [3, -4], per_tensor(0.1, 0), name="y")]
    )


def changed(content: bytes, change: Any) -> bytes:
    """The file with something else in it."""
    model = schema.ModelT.InitFromPackedBuf(content)
    change(model)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


@pytest.mark.parametrize("name", ["convolutions.int8", "convolutions.uint8"])
@pytest.mark.parametrize("end", ["inputs", "outputs"])
def test_an_input_or_a_result_that_is_a_constant(name: str, end: str) -> None:
    """TFLite-Micro writes it into the file, and over what lies after it."""

    def constant(model: Any) -> None:
        (number,) = getattr(model.subgraphs[0], end)
        model.buffers.append(schema.BufferT())
        model.buffers[-1].data = np.zeros(300 if end == "inputs" else 5, np.uint8)
        model.subgraphs[0].tensors[number].buffer = len(model.buffers) - 1

    words = "is also a constant" if end == "inputs" else "is written twice"
    with pytest.raises(Refusal, match=words):
        read_content(changed((FILES / f"{name}.tflite").read_bytes(), constant))


@pytest.mark.parametrize("path", sorted(FILES.glob("*.tflite")), ids=lambda path: path.stem)
def test_no_shape_is_passed_over(path: Path) -> None:
    """TFLite-Micro reserves what the file says of a result, and other tensors lie beyond it, also of results that a
    graph does not have: every one that says too little is refused."""
    content = path.read_bytes()
    try:
        read_content(content)
    except Refusal:
        pytest.skip("it is refused as it is")
    model = schema.ModelT.InitFromPackedBuf(content)
    main = model.subgraphs[0]
    computed = [number for operator in main.operators for number in operator.outputs]
    resources = {at for at, tensor in enumerate(main.tensors) if tensor.type == schema.TensorType.RESOURCE}
    passed = []
    for at, number in enumerate(computed):
        if at >= 60 and at % 5:  # of networks that are unrolled
            continue
        tensor = main.tensors[number]
        shape, signature = tensor.shape, tensor.shapeSignature
        if number in resources or shape is None or np.prod(shape) <= 1 or (signature is not None and -1 in signature):
            continue
        for less in ([], [1] * len(shape)):
            tensor.shape, tensor.shapeSignature = np.array(less, np.int32), None
            builder = flatbuffers.Builder(1024)
            builder.Finish(model.Pack(builder), b"TFL3")
            try:
                read_content(bytes(builder.Output()))
            except Refusal:
                continue
            finally:
                tensor.shape, tensor.shapeSignature = shape, signature
            passed.append((tensor.name.decode(), less))
    assert not passed


def test_our_file_keeps_its_signature(tmp_path: Path) -> None:
    graph = small_graph()
    again = read_tflite(write_tflite(graph, tmp_path / "model.tflite", "a description"))
    assert again.signature == graph.signature
    assert list(again.tensors) == list(graph.tensors)
    assert (
        write_tflite(again, tmp_path / "again.tflite", "a description").read_bytes()
        == (tmp_path / "model.tflite").read_bytes()
    )


@pytest.mark.parametrize("name", READ)
def test_files_of_others_are_read(name: str) -> None:
    content = (FILES / f"{name}.tflite").read_bytes()
    file = read_content(content)
    file.graph.validate()
    assert "min_runtime_version" in file.graph.metadata
    # Written by us and read again, the integers stay.
    again = read_content(tflite_bytes(file.graph)).graph
    assert again.metadata == {**file.graph.metadata, "exactqat": again.metadata["exactqat"]}
    rng = np.random.default_rng(0)
    codes = random_codes(rng, file.graph)
    left = any(operator.built_in for operator in file.graph.operators)
    for profile in PROFILES:
        if left and PROFILES[profile].delegates:  # they take the operators of the file that is written again
            continue
        results, expected = simulate(again, codes, profile), simulate(file.graph, codes, profile)
        assert all(np.array_equal(results[name], expected[name]) for name in expected)


def test_ends_off_the_grid() -> None:
    real, unsigned, codes = (read_content((FILES / f"convolutions.{way}.tflite").read_bytes())
                             for way in ("float_ends", "uint8", "int8"))  # fmt: skip
    assert real.inputs[0].dtype == "float32" and unsigned.inputs[0].dtype == "uint8" and codes.inputs[0].dtype == "int8"
    assert real.inputs[0].any_batch and real.inputs[0].tensor != real.inputs[0].name
    assert len(real.graph.operators) == len(unsigned.graph.operators) == len(codes.graph.operators)
    assert sum(real.words.values()) == len(real.graph.operators) + 2


def test_constants_that_a_network_looks_up_or_joins() -> None:
    embedded, one_hot, token = (read_content((FILES / f"{name}.tflite").read_bytes()).graph
                                for name in ("embedded.int8", "one_hot.int8", "with_token.fixed_batch"))  # fmt: skip
    # What brings negative indices to the table's end is left out.
    assert [operator.kind for operator in embedded.operators] == ["EMBEDDING", "MEAN", "FULLY_CONNECTED"]
    assert one_hot.operators[0].kind == "EMBEDDING"
    (joined,) = (operator for operator in token.operators if operator.kind == "CONCATENATION")
    codes = np.arange(2 * 5 * 6, dtype=np.int8).reshape(2, 5, 6)
    results = simulate(token, {token.inputs[0]: codes}, tensors=[*joined.outputs])
    constant = next(token.tensors[name].data for name in joined.inputs if token.tensors[name].data is not None)
    for example in results[joined.outputs[0]]:  # each has the constant
        np.testing.assert_array_equal(example[:1], constant[0])


def test_recurrent_layers_bring_time_to_the_front_and_back() -> None:
    stacked, sequences = (read_content((FILES / f"{name}.fixed_batch.tflite").read_bytes())
                          for name in ("stacked", "sequences"))  # fmt: skip
    for file, packed in ((stacked, 0), (sequences, 1)):
        kinds = [operator.kind for operator in file.graph.operators]
        assert (kinds.count("UNPACK"), kinds.count("PACK")) == (1, packed)
        assert kinds[0] == "UNPACK" and file.graph.operators[0].attributes == {"axis": 1}
    # Layers in a row take apart what the one before joined: of that nothing is left.
    assert stacked.words["PACK"] == 1 and stacked.words["UNPACK"] == 2

    def two_entries(model: Any) -> None:
        """The RESHAPE in front keeps the number of values, and mixes time and features."""
        graph = model.subgraphs[0]
        turned = graph.operators[0]
        shape = graph.tensors[turned.inputs[1]]
        model.buffers[shape.buffer].data = np.frombuffer(np.array([3, 1, 4], np.int32).tobytes(), np.uint8)
        graph.tensors[turned.outputs[0]].shape = [3, 1, 4]

    with pytest.raises(Refusal, match=r"UNPACK: axis must be in 1\.\.2, got 0"):
        read_content(changed((FILES / "sequences.fixed_batch.tflite").read_bytes(), two_entries))


def test_constants_with_a_subnormal_scale_are_refused() -> None:
    """XNNPACK leaves such operators to kernels that round otherwise."""

    def subnormal(model: Any) -> None:
        names = [tensor.name.decode() for tensor in model.subgraphs[0].tensors]
        model.subgraphs[0].tensors[names.index("first/bias")].quantization.scale = np.array([1e-38] * 4, np.float32)

    with pytest.raises(Refusal, match="'first/bias' must not have a subnormal scale"):
        read_content(changed(tflite_bytes(small_graph()), subnormal))


def test_grids_between_that_a_runtime_would_keep_are_refused() -> None:
    """LiteRT computes an LSTM otherwise whose intermediate tensors are variables."""

    def variable(model: Any) -> None:
        graph = model.subgraphs[0]
        at = next(operator.intermediates for operator in graph.operators if operator.intermediates is not None)[2]
        graph.tensors[at].isVariable = True

    content = (FILES / "lstm.int8.tflite").read_bytes()
    with pytest.raises(Refusal, match="UNIDIRECTIONAL_SEQUENCE_LSTM with a variable, which it is not known to have"):
        read_content(changed(content, variable))


@pytest.mark.parametrize(("x", "slopes", "what"), [(2.0**32, 2.0**-4, "input scale"), (1.0, 2.0**32, "product")])
def test_prelu_has_limits_of_scales(x: float, slopes: float, what: str) -> None:
    """Beyond them kernels shift further than 32 bits; the whole product may be infinite."""

    def graph(factor: float) -> Graph:
        builder = Builder()
        builder.input("x", (1, 4), per_tensor(x * factor, 3))
        builder.constant("z", np.array([5, -7, 1, 100]), per_tensor(slopes, 0))
        return builder.graph([builder.prelu("x", "z", per_tensor(1.0, 0), name="y")])

    with pytest.raises(Refusal, match=rf"{what}.* must be below 2\.?.*, got"):
        graph(1.0)
    graph(0.25)


def test_what_is_read_before_it_is_computed_is_refused() -> None:
    """Also where an operator undoes another one, and a graph has neither."""

    def turned(model: Any) -> None:
        graph = model.subgraphs[0]
        graph.operators.reverse()

    content = (FILES / "pieces.int8.tflite").read_bytes()
    with pytest.raises(Refusal, match="is read before it is computed"):
        read_content(changed(content, turned))


def test_what_is_written_twice_is_refused() -> None:
    """Also by operators that no graph has: runtimes keep other tensors there in between."""

    def again(model: Any) -> None:
        words = [code.builtinCode for code in model.operatorCodes]
        select = words.index(schema.BuiltinOperator.SELECT_V2)
        graph = model.subgraphs[0]
        graph.operators.append(next(operator for operator in graph.operators if operator.opcodeIndex == select))

    content = (FILES / "embedded.int8.tflite").read_bytes()
    with pytest.raises(Refusal, match="is written twice"):
        read_content(changed(content, again))


def test_sizes_that_a_file_computes() -> None:
    """As Keras' dilated convolutions of an image of any size ask for their paddings."""

    def computed(kind: str, *operands: Any, **options: int) -> np.ndarray:
        return SHAPE_ARITHMETIC[kind]([np.array(operand) for operand in operands], options.get)

    less = computed("SUB", [2, 3], [5, 7])
    assert less.tolist() == [-3, -4] and computed("ADD", less, [5]).tolist() == [2, 1]
    assert computed("FLOOR_MOD", less, [2, 3]).tolist() == [1, 2] and computed("MUL", less, 2).tolist() == [-6, -8]
    with pytest.raises(Refusal, match="shapes are computed with fusedActivationFunction 1"):
        computed("ADD", [1], [2], fusedActivationFunction=1)
    pairs = [[0, 4], [0, 5]]
    assert computed("STRIDED_SLICE", pairs, [0, 0], [2, 1], [1, 1], beginMask=2, endMask=2).tolist() == pairs
    assert computed("STRIDED_SLICE", pairs, [1, -1], [2, 2], [1, 1], shrinkAxisMask=3) == 5
    assert computed("STRIDED_SLICE", pairs, [-1], [0], [-1], endMask=1).tolist() == pairs[::-1]


def test_what_runtimes_make_something_else_of_in_int16_is_refused() -> None:
    """Constants in int8 with several scales, and slopes in int16; with one scale, and in int8, they are read."""
    fine, several = per_tensor(1e-3, 0, "int16"), Quantization(np.float32([0.1, 0.2]), np.zeros(2), 1)

    def product(grid: Quantization) -> Graph:
        builder = Builder()
        builder.input("x", (1, 2, 3), fine)
        builder.constant("z", np.ones((3, 2)), grid)
        return builder.graph([builder.batch_matmul("x", "z", fine, name="y")])

    assert unclaimed(read_content(tflite_bytes(product(per_tensor(0.1, 0)))).graph, "reference") == ()
    with pytest.raises(Refusal, match="'z' must be quantized per tensor: of constants in int8 with several"):
        product(several)
    with pytest.raises(Refusal, match="operands must have zero point 0 beside int16"):
        product(per_tensor(0.1, 3))

    def sloped(grid: Quantization) -> Graph:
        builder = Builder()
        builder.input("x", (1, 3), fine)
        builder.constant("z", np.array([5, -7, 1]), grid)
        return builder.graph([builder.prelu("x", "z", fine, name="y")])

    assert unclaimed(read_content(tflite_bytes(sloped(per_tensor(0.1, 0)))).graph, "reference") == ()
    with pytest.raises(Refusal, match="slopes must be int8 per tensor, got int16 'z', which LiteRT takes for int8"):
        sloped(per_tensor(1e-4, 0, "int16"))


def test_integers_without_a_grid() -> None:
    """They wrap; what ends a runtime's process is refused, and an activation that one of them leaves out."""

    def graph(kind: str, **attributes: str) -> Graph:
        builder = Builder()
        names = [builder.input(name, (1, 2), INDICES) for name in ("x", "z")]
        return builder.graph([builder.operator(kind, names, INDICES, name="y", **attributes)])

    def result(kind: str, x: list[int], z: list[int]) -> list[int]:
        codes = {"x": np.array([x], np.int32), "z": np.array([z], np.int32)}
        return [int(value) for value in simulate(graph(kind), codes)["y"][0]]

    assert result("ADD", [2**31 - 1, -5], [1, 2]) == [-(2**31), -3]
    assert result("DIV", [-7, 7], [2, -2]) == [-3, -3] and result("FLOOR_DIV", [-7, 7], [2, -2]) == [-4, -4]
    assert result("FLOOR_MOD", [-7, 7], [2, -2]) == [1, -1] and result("LESS", [1, 3], [2, 3]) == [1, 0]
    for kind in ("DIV", "FLOOR_DIV", "FLOOR_MOD"):
        with pytest.raises(Refusal, match="a division by 0, which runtimes do not define"):
            result(kind, [1, 1], [1, 0])
        with pytest.raises(Refusal, match="a division of the lowest integer by -1, which ends the process"):
            result(kind, [-(2**31), 1], [-1, 1])
    with pytest.raises(Refusal, match="a fused RELU of int32, which TFLite-Micro leaves out"):
        graph("ADD", activation="RELU")


def test_codes_are_not_quantized_into_real_numbers() -> None:
    def into_reals(model: Any) -> None:
        graph = model.subgraphs[0]
        words = [code.builtinCode for code in model.operatorCodes]
        dequantize, quantize = (
            words.index(getattr(schema.BuiltinOperator, word)) for word in ("DEQUANTIZE", "QUANTIZE")
        )
        next(operator for operator in graph.operators if operator.opcodeIndex == dequantize).opcodeIndex = quantize

    content = (FILES / "float_island.int8.tflite").read_bytes()
    with pytest.raises(Refusal, match="QUANTIZE: the result must be int8 or int16, got float32"):
        read_content(changed(content, into_reals))


def test_what_a_signature_calls_its_ends() -> None:
    graph = read_content((FILES / "two_ends.int8.tflite").read_bytes()).graph
    assert sorted(port.name for port in graph.signature.inputs) == ["first", "second"]
    assert [port.name for port in graph.signature.outputs] == ["output_0", "output_1"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loop.int8", ("control flow (WHILE)",)),
    ],
)
def test_what_cannot_be_read_is_listed(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(Refusal) as refused:
        read_tflite(FILES / f"{name}.tflite")
    text = str(refused.value)
    assert text.startswith(f"{name}.tflite cannot be read: ") and "\n" not in text
    for word in words:
        assert word in text


def test_what_delegates_leave_to_built_in_kernels_is_not_claimed(tmp_path: Path) -> None:
    """A transposed convolution of an open batch. The file that is written again states its sizes."""
    graph = read_tflite(FILES / "enlarged.int8.tflite")
    left = [operator.kind for operator in graph.operators if operator.built_in]
    assert left == ["TRANSPOSE_CONV"]
    assert unclaimed(graph, "xnnpack-x86") == ("TRANSPOSE_CONV:built_in",)
    assert "TRANSPOSE_CONV:built_in" in unclaimed(graph, "xnnpack-arm64")
    assert unclaimed(graph, "reference") == ()
    again = read_tflite(write_tflite(graph, tmp_path / "again.tflite"))
    assert not unclaimed(again, "xnnpack-x86") and len(again.operators) == len(graph.operators)


@pytest.mark.parametrize("name", ["convolutions.float16", "convolutions.weight_only", "sloped.fixed_float16"])
def test_weights_that_the_file_brings_into_float32(name: str) -> None:
    """Of float16 by TensorFlow's converter, and of four bits with a scale for each channel by ai-edge-quantizer; slopes
    that have fewer axes than the image, as in MediaPipe's files."""
    path = FILES / f"{name}.tflite"
    graph = read_tflite(path)
    (end,) = graph.inputs
    x = np.random.default_rng(0).normal(size=graph.tensors[end].shape).astype(np.float32)
    runtime = importlib.import_module("ai_edge_litert.interpreter").Interpreter(str(path))
    runtime.allocate_tensors()
    runtime.set_tensor(runtime.get_input_details()[0]["index"], x)
    runtime.invoke()
    expected = runtime.get_tensor(runtime.get_output_details()[0]["index"])
    np.testing.assert_allclose(simulate(graph, x)[graph.outputs[0]], expected, rtol=1e-5, atol=1e-6)


def test_options_that_count_something_else() -> None:
    """LiteRT refuses them, and TFLite-Micro computes as many results as they say."""

    def fewer(model: Any) -> None:
        for operator in model.subgraphs[0].operators:
            for name in ("num", "numSplits", "valuesCount"):
                if hasattr(operator.builtinOptions, name):
                    setattr(operator.builtinOptions, name, 1)

    for kind, words in (("UNPACK", "num is 1"), ("SPLIT_V", "numSplits is 1"), ("PACK", "valuesCount is 1")):
        rng = np.random.default_rng(1)
        content = next(
            tflite_bytes(graph)
            for graph in (random_graph(rng, kind) for _ in range(50))
            if max(len(graph.operators[0].inputs), len(graph.operators[0].outputs)) > 2
        )
        with pytest.raises(Refusal, match=f"{kind}: {words}, where there are"):
            read_content(changed(content, fewer))


def test_an_lstm_whose_hidden_state_is_no_int8() -> None:
    def otherwise(model: Any) -> None:
        graph = model.subgraphs[0]
        (operator,) = (operator for operator in graph.operators if operator.intermediates is not None)
        graph.tensors[operator.intermediates[4]].type = schema.TensorType.UINT16

    with pytest.raises(Refusal, match="with a hidden state in uint16 on the way"):
        read_content(changed((FILES / "lstm.int8.tflite").read_bytes(), otherwise))


def test_an_lstms_numbers_and_scales_of_relu6_that_kernels_cannot_hold() -> None:
    def zero_point(model: Any) -> None:
        (operator,) = (operator for operator in model.subgraphs[0].operators if operator.intermediates is not None)
        model.subgraphs[0].tensors[operator.intermediates[4]].quantization.zeroPoint = np.array([-(2**63)], np.int64)

    def clip(model: Any) -> None:
        (operator,) = (operator for operator in model.subgraphs[0].operators if operator.intermediates is not None)
        operator.builtinOptions.cellClip = float("inf")

    def no_step(model: Any) -> None:
        (operator,) = (operator for operator in model.subgraphs[0].operators if operator.intermediates is not None)
        operator.builtinOptions.cellClip = 1e-9

    for change, words in (
        (zero_point, "hidden_zero_point must be in -128..127"),
        (clip, "cell_clip must be finite"),
        (no_step, "cell_clip must be 0 or at least the scale"),
    ):
        with pytest.raises(Refusal, match=words):
            read_content(changed((FILES / "lstm.int8.tflite").read_bytes(), change))
    builder = Builder()
    x = builder.input("x", (1, 4), per_tensor(2.0**-32, 0))
    graph = builder.graph([builder.operator("RELU6", [x], per_tensor(0.1, 0), name="y")])
    with pytest.raises(Refusal, match="input scale must be at least"):
        simulate(graph, np.zeros((1, 4), np.int8), "micro")


def test_what_others_write_and_we_do_not() -> None:
    graph = small_graph()
    content = tflite_bytes(graph)
    codes = np.random.default_rng(1).integers(-128, 128, (3, 6, 6, 3)).astype(np.int8)
    expected = simulate(graph, codes)["y"]

    def no_bias(model: Any) -> None:
        operator = model.subgraphs[0].operators[2]
        operator.inputs = [*operator.inputs[:2], -1]

    def bias_elsewhere(model: Any) -> None:
        names = [tensor.name.decode() for tensor in model.subgraphs[0].tensors]
        grid = model.subgraphs[0].tensors[names.index("first/bias")].quantization
        grid.scale = grid.scale * np.float32(1 + 2**-20)

    def fixed_and_nameless(model: Any) -> None:
        for tensor in model.subgraphs[0].tensors:
            tensor.shapeSignature = None
            tensor.name = b"the same"
        model.signatureDefs = model.metadata = model.description = None

    def unused(model: Any) -> None:
        model.buffers += [schema.BufferT(), schema.BufferT(data=np.zeros(7, np.uint8))]
        model.subgraphs[0].tensors.append(schema.TensorT(name="unused", shape=[3], buffer=len(model.buffers) - 2))

    def negative_axis(model: Any) -> None:
        names = [tensor.name.decode() for tensor in model.subgraphs[0].tensors]
        at = model.subgraphs[0].tensors[names.index("mean/axes")].buffer
        model.buffers[at].data = np.frombuffer(np.array([-3, -2], np.int32).tobytes(), np.uint8)

    def weights(model: Any) -> None:
        names = [tensor.name.decode() for tensor in model.subgraphs[0].tensors]
        at = model.subgraphs[0].tensors[names.index("first/filter")].buffer
        model.buffers[at].data = np.array([128, *model.buffers[at].data[1:]], np.uint8)

    for change in (bias_elsewhere, fixed_and_nameless, unused, negative_axis):
        read = read_content(changed(content, change)).graph
        np.testing.assert_array_equal(next(iter(simulate(read, codes).values())), expected, err_msg=change.__name__)
    read = read_content(changed(content, no_bias)).graph
    assert not read.tensors[read.operators[2].inputs[2]].data.any()
    read = read_content(changed(content, weights)).graph
    assert read.measured_as(read.operators[0]) == "CONV_2D:full_range"


def test_features_that_are_refused() -> None:
    content = tflite_bytes(small_graph())

    def compiled(model: Any) -> None:
        model.operatorCodes[0] = schema.OperatorCodeT(32, customCode="edgetpu-custom-op", builtinCode=32)

    def custom(model: Any) -> None:
        model.operatorCodes[0] = schema.OperatorCodeT(builtinCode=32, deprecatedBuiltinCode=32, customCode="TheirOwn")

    def no_scale(model: Any) -> None:
        model.subgraphs[0].tensors[0].quantization = None

    def int4(model: Any) -> None:
        names = [tensor.name.decode() for tensor in model.subgraphs[0].tensors]
        model.subgraphs[0].tensors[names.index("first/filter")].type = schema.TensorType.INT4

    def activation(model: Any) -> None:
        model.subgraphs[0].operators[0].builtinOptions.fusedActivationFunction = 2

    def real_bias(model: Any) -> None:
        names = [tensor.name.decode() for tensor in model.subgraphs[0].tensors]
        model.subgraphs[0].tensors[names.index("first/bias")].type = schema.TensorType.FLOAT32

    for change, message in (
        (real_bias, r"a bias in float32 beside an input in int8, which no runtime adds \(at first\)"),
        (custom, r"the custom operator TheirOwn \(at first\)"),
        (compiled, "compiled for the Edge TPU; inspect the file it was compiled from"),
        (no_scale, r"int8 without a scale \(at x\)"),
        (int4, r"constant 'first/filter' of int4 and shape \[4, 3, 3, 3\] has 108 bytes"),
        (activation, r"activation must be one of NONE, RELU, RELU6, got 'RELU_N1_TO_1' \(at first\)"),
    ):
        with pytest.raises(Refusal, match=message):
            read_content(changed(content, change))
    for damaged, message in (
        (b"", "not a .tflite file"),
        (b"PK\3\4 and more", "not a .tflite file"),
        (content[:200], "damaged"),
    ):
        with pytest.raises(Refusal, match=re.escape(message)):
            read_content(damaged)


@pytest.mark.parametrize("profile", profiles_here())
def test_a_bias_that_is_left_out_has_the_dtype_that_its_operator_names(profile: str) -> None:
    """By which kernels choose how many bits their sums have."""
    rng, builder = np.random.default_rng(0), Builder()
    builder.input("x", (1, 60), per_tensor(2.0**-14, 0, "int16"))
    filter, grid = rng.integers(-127, 128, (40, 60)), per_tensor(0.0031, 0, "int16")
    builder.fully_connected("x", filter, [0.01] * 40, [0] * 40, grid, name="y")

    def short(model: Any) -> None:
        (operator,) = model.subgraphs[0].operators
        operator.inputs = [*operator.inputs[:2], -1]
        operator.builtinOptions.quantizedBiasType = schema.TensorType.INT32

    content = changed(tflite_bytes(builder.graph(["y"])), short)
    graph = read_content(content).graph
    assert graph.tensors[graph.operators[0].inputs[2]].dtype == "int32"
    x = rng.integers(-(2**15), 2**15, (1, 60)).astype(np.int16)
    result = open_runtime(content, graph.inputs, graph.outputs, profile).run({"x": x})["y"]
    np.testing.assert_array_equal(simulate(graph, x, profile)["y"], result)


def test_outputs_that_the_file_holds_are_not_computed() -> None:
    """Interpreters return them, whatever the network's inputs are."""

    def constant(model: Any) -> None:
        main = model.subgraphs[0]
        names = [tensor.name.decode() for tensor in main.tensors]
        main.outputs = [names.index("y/filter"), *main.outputs]

    graph = small_graph()
    file = read_content(changed(tflite_bytes(graph), constant))
    assert [end.name for end in file.outputs] == list(graph.outputs)
    codes = np.random.default_rng(0).integers(-128, 128, (1, 6, 6, 3)).astype(np.int8)
    (profile, *_) = profiles_here()
    result = open_runtime(file.content, file.graph.inputs, file.graph.outputs, profile, True).run({"x": codes})
    np.testing.assert_array_equal(result["y"], simulate(graph, codes, profile)["y"])


def test_damaged_files_are_refused_in_a_sentence() -> None:
    refusals = []
    for content in cases(7, 300):
        try:
            read_content(content)
        except Refusal as error:
            refusals.append(str(error))
    assert 150 < len(refusals) < 300
    assert all(text and "\n" not in text for text in refusals)


def test_what_litert_rejects_is_refused() -> None:
    """TFLite-Micro runs such files, and computes with what lies in memory."""
    builder = Builder()
    builder.input("x", (1, 8), per_tensor(0.1, 0))
    content = tflite_bytes(builder.graph([builder.softmax(builder.reshape("x", (1, 8), name="y"), name="z")]))

    def constant_variable(model: Any) -> None:
        next(edge for edge in model.subgraphs[0].tensors if model.buffers[edge.buffer].data is not None).isVariable = 1

    def no_zero_point(model: Any) -> None:
        model.subgraphs[0].tensors[0].quantization.zeroPoint = None

    def other_options(model: Any) -> None:
        (softmax,) = (operator for operator in model.subgraphs[0].operators if hasattr(operator.builtinOptions, "beta"))
        softmax.builtinOptionsType = schema.BuiltinOptions.Pool2DOptions
        softmax.builtinOptions = schema.Pool2DOptionsT()

    def other_shape(model: Any) -> None:
        model.subgraphs[0].tensors[0].shape = [1, 4]

    def axis_of_an_input(model: Any) -> None:
        model.subgraphs[0].tensors[0].quantization.quantizedDimension = 1

    def constant_output(model: Any) -> None:
        tensors = enumerate(model.subgraphs[0].tensors)
        model.subgraphs[0].outputs = [next(at for at, edge in tensors if model.buffers[edge.buffer].data is not None)]

    for change, message in (
        (other_shape, r"the shape \[1, 4\] and the signature \[-1, 8\]"),
        (axis_of_an_input, "a result with a scale for each channel"),
        (constant_output, "an output that no operator computes"),
        (constant_variable, "is a variable and a constant at once"),
        (no_zero_point, "another number of zero points than of scales"),
        (other_options, "SOFTMAX has Pool2DOptions, which runtimes take for missing, not SoftmaxOptions"),
    ):
        with pytest.raises(Refusal, match=message):
            read_content(changed(content, change))


def test_options_of_another_operator_are_refused_though_they_have_the_field() -> None:
    """LiteRT reads nothing from them, and leaves out the activation."""
    builder = Builder()
    builder.input("x", (1, 8), per_tensor(0.1, 0))
    content = tflite_bytes(builder.graph([builder.add("x", "x", per_tensor(0.2, 0), name="y", activation="RELU")]))

    def another(model: Any) -> None:
        (add,) = model.subgraphs[0].operators
        add.builtinOptionsType = schema.BuiltinOptions.SubOptions
        add.builtinOptions = schema.SubOptionsT()
        add.builtinOptions.fusedActivationFunction = schema.ActivationFunctionType.RELU

    read_content(content)
    with pytest.raises(Refusal, match="ADD has SubOptions, which runtimes take for missing, not AddOptions"):
        read_content(changed(content, another))


def test_depth_multipliers_fit_the_filter() -> None:
    def change(model: Any) -> None:
        (step,) = (step for step in model.subgraphs[0].operators if hasattr(step.builtinOptions, "depthMultiplier"))
        step.builtinOptions.depthMultiplier = -1

    content = tflite_bytes(random_graph(np.random.default_rng(0), "DEPTHWISE_CONV_2D"))
    read_content(content)
    with pytest.raises(Refusal, match="a depth multiplier of -1 with"):
        read_content(changed(content, change))


def test_several_results_are_bounded() -> None:
    """A small file may not ask for a list of millions."""
    builder = Builder()
    builder.input("x", (1, 8), per_tensor(0.1, 0))
    graph = builder.graph(builder.results(builder.unpack("x", 1, name="y")))
    assert len(graph.outputs) == 8 and graph.outputs[:2] == ("y", "y:1")

    def enormous(model: Any) -> None:
        model.subgraphs[0].tensors[0].shape = [1, 2**31 - 1]
        model.subgraphs[0].tensors[0].shapeSignature = None

    with pytest.raises(Refusal, match=r"UNPACK.*at most 4096 results are supported, got 2147483647"):
        read_content(changed(tflite_bytes(graph), enormous))


@pytest.mark.parametrize(("size", "words"), [(1, r"of the shape \[1\], where 2 values"), (2**31 - 1, "at most")])
def test_room_for_shapes_that_are_computed(size: int, words: str) -> None:
    """TFLite-Micro takes it from the file: with too little, or where it overflows, a PAD's codes were others."""

    def change(model: Any) -> None:
        tensors, packed = model.subgraphs[0].tensors, schema.BuiltinOperator.PACK
        (step,) = (
            step for step in model.subgraphs[0].operators if model.operatorCodes[step.opcodeIndex].builtinCode == packed
        )
        tensors[step.outputs[0]].shape = [size]

    content = (FILES / "branches.int8.tflite").read_bytes()
    with pytest.raises(Refusal, match=words):
        read_content(changed(content, change))


# Options that change nothing: of other dtypes, said again by tensors, or without effect where they are found.
WITHOUT_EFFECT = {
    "potScaleInt16", "asymmetricQuantizeInputs", "quantizedBiasType", "inDataType", "outDataType", "newShape",
    "keepNumDims", "beginMask", "endMask", "diagonalRecurrentTensors",
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_no_option_is_passed_over(kind: str) -> None:
    """Another value is refused or makes another graph."""
    content = tflite_bytes(random_graph(np.random.default_rng(0), kind))
    expected = tflite_bytes(read_content(content).graph)
    for at, step in enumerate(schema.ModelT.InitFromPackedBuf(content).subgraphs[0].operators):
        for option, value in vars(step.builtinOptions).items() if step.builtinOptions is not None else ():
            if option in WITHOUT_EFFECT or not isinstance(value, (bool, int, float, np.generic)):
                continue
            for other in (not value,) if isinstance(value, (bool, np.bool_)) else (value + 1, value + 2):

                def change(model: Any, at: int = at, option: str = option, other: Any = other) -> None:
                    setattr(model.subgraphs[0].operators[at].builtinOptions, option, other)

                try:
                    result = tflite_bytes(read_content(changed(content, change)).graph)
                except Refusal:
                    continue
                assert result != expected, (option, value, other)


@pytest.mark.parametrize(("kind", "option"), [("ADD", "fusedActivationFunction"), ("GATHER", "axis")])
def test_options_inside_of_what_is_read_as_one_operator(kind: str, option: str) -> None:
    """A table is CAST, ADD and GATHER: LiteRT clamps what an ADD with a fused RELU_N1_TO_1 gives."""
    graph = random_graph(np.random.default_rng(0), "LOOKUP")

    def change(model: Any) -> None:
        (step,) = (step for step in model.subgraphs[0].operators if hasattr(step.builtinOptions, option))
        setattr(step.builtinOptions, option, 2)

    assert read_content(tflite_bytes(graph)).graph.operators[0].kind == "LOOKUP"
    with pytest.raises(Refusal):
        read_content(changed(tflite_bytes(graph), change))


def test_a_result_without_values_is_refused() -> None:
    """LiteRT takes its size from the signature, and leaves its operators to other kernels than the delegate's."""

    def change(model: Any) -> None:
        tensor = model.subgraphs[0].tensors[model.subgraphs[0].operators[0].outputs[0]]
        tensor.shape = [0, *tensor.shape[1:]]

    content = (FILES / "branches.int8.tflite").read_bytes()
    with pytest.raises(Refusal, match=r"has the shape \[0, 8, 8, 8\], no values"):
        read_content(changed(content, change))


def test_weights_of_four_bits() -> None:
    """Two in a byte; an odd number of them too."""
    builder = Builder()
    builder.input("x", (1, 5), per_tensor(0.1, 0))
    codes = np.random.default_rng(0).integers(-8, 8, (3, 5)).astype(np.int8)
    builder.fully_connected("x", codes, [0.1], [0] * 3, per_tensor(0.1, 0), name="y")
    graph = builder.graph(["y"])
    tensors = {**graph.tensors, "y/filter": replace(graph.tensors["y/filter"], dtype="int4")}
    graph = replace(graph, tensors=tensors)
    content = tflite_bytes(graph)
    model = schema.ModelT.InitFromPackedBuf(content)
    (filter,) = (tensor for tensor in model.subgraphs[0].tensors if tensor.type == schema.TensorType.INT4)
    assert len(model.buffers[filter.buffer].data) == 8
    again = read_content(content).graph
    np.testing.assert_array_equal(again.tensors["y/filter"].data, codes)
    assert again.measured_as(again.operators[0]) == "FULLY_CONNECTED:int4" and tflite_bytes(again) == content


@pytest.mark.parametrize("scale", [2.0**-10, 0.003])
def test_int16_sums_that_ask_for_grids_of_powers_of_two(scale: float) -> None:
    """ai-edge-quantizer leaves the option at its default, which kernels follow on such grids alone."""
    builder = Builder()
    x = builder.input("x", (1, 4), per_tensor(2.0**-11, 0, "int16"))
    graph = builder.graph([builder.add(x, x, per_tensor(scale, 0, "int16"), name="y")])

    def ask(model: Any) -> None:
        model.subgraphs[0].operators[0].builtinOptions.potScaleInt16 = True

    content = changed(tflite_bytes(graph), ask)
    if scale == 0.003:
        assert tflite_bytes(read_content(content).graph) == tflite_bytes(graph)
    else:
        with pytest.raises(Refusal, match="int16 on grids of powers of two is not supported"):
            read_content(content)


def test_a_softmax_without_options_is_refused() -> None:
    """Runtimes take its beta for 0, and TFLite-Micro's and LiteRT's reference kernels end the process."""
    builder = Builder()
    builder.input("x", (1, 4, 10), per_tensor(0.5, -32))
    content = tflite_bytes(builder.graph([builder.softmax("x", name="y")]))

    def without_options(model: Any) -> None:
        (operator,) = model.subgraphs[0].operators
        operator.builtinOptions, operator.builtinOptionsType = None, 0

    with pytest.raises(Refusal, match=r"SOFTMAX: beta must be positive and finite, got 0\.0"):
        read_content(changed(content, without_options))


@pytest.mark.parametrize(
    ("kind", "scale", "words"),
    [
        ("RELU6", 1e-9, "output scale must be at least 5.58794e-09, got 1e-09"),
        ("RELU_N1_TO_1", 1e-10, "output scale must be at least 9.31323e-10, got 1e-10"),
        ("LOG_SOFTMAX", 3e38, r"input scale must be in \[2\*\*-26, 1.26765e\+30\), got 3e\+38"),
    ],
)
def test_scales_at_which_runtimes_leave_their_words_are_refused(kind: str, scale: float, words: str) -> None:
    builder = Builder()
    of_input = kind == "LOG_SOFTMAX"
    builder.input("x", (1, 4, 10), per_tensor(scale if of_input else 0.12, -128))
    output = None if of_input else per_tensor(scale, 0)
    name = builder.operator(kind, ["x"], output, name="y")
    with pytest.raises(Refusal, match=words):
        builder.graph([name])
