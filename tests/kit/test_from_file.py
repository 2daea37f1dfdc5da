# SPDX-License-Identifier: Apache-2.0
"""Files of TensorFlow's converter, trained: before its first step a network computes what LiteRT computes of the
original file; what is written after it is what training computed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from device_cases import random_graph
from plain_networks import NETWORKS

from exactqat import deploy, qat
from exactqat.deploy import Builder, Graph, per_tensor
from exactqat.qat import Rule, UnsupportedOperator

pytest.importorskip("ai_edge_litert")
FILES = Path(__file__).parents[1] / "goldens" / "files"
PAGE = Path(__file__).parents[2] / "docs" / "train-from-a-file.md"
WAYS = ("convolutions.int8", "convolutions.int16", "convolutions.per_tensor", "convolutions.uint8",
        "convolutions.float_ends", "pieces.int8", "branches.int8", "sequence.int8",
        "two_ends.int8", "stacked.int8")  # fmt: skip
EXAMPLES = 3


def on_litert(path: Path, reals: list[np.ndarray], profile: str) -> list[np.ndarray]:
    """What LiteRT makes of the file itself, in real numbers; reals lie on the grids of its inputs."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kernels = OpResolverType.BUILTIN_REF if profile == "reference" else OpResolverType.AUTO
    interpreter = Interpreter(str(path), experimental_op_resolver_type=kernels, num_threads=1)
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
    rows = []
    for row in range(EXAMPLES):
        for detail, x in zip(inputs, reals, strict=True):
            example = x[row : row + 1]
            scale, zero_point = detail["quantization"]
            if scale:
                example = np.rint(example / np.float32(scale)) + zero_point
            interpreter.resize_tensor_input(detail["index"], example.shape)
        interpreter.allocate_tensors()
        for detail, x in zip(inputs, reals, strict=True):
            example = x[row : row + 1]
            scale, zero_point = detail["quantization"]
            if scale:
                example = np.rint(example / np.float32(scale)) + zero_point
            interpreter.set_tensor(detail["index"], example.astype(detail["dtype"]))
        interpreter.invoke()
        results = []
        for detail in outputs:
            result, (scale, zero_point) = interpreter.get_tensor(detail["index"]), detail["quantization"]
            results.append((result.astype(np.float32) - zero_point) * np.float32(scale) if scale else result)
        rows.append(results)
    return [np.concatenate(column) for column in zip(*rows, strict=True)]


def on_the_grid(plan: object, seed: int = 0) -> list[np.ndarray]:
    """Real numbers for each input that its codes stand for."""
    rng, reals = np.random.default_rng(seed), []
    for feature in plan.inputs:
        grid = plan.grids[feature.grid]
        scale, zero_point = grid.fixed
        lowest, highest = (-32768, 32767) if grid.rule.is_int16 else (-128, 127)
        codes = rng.integers(lowest, highest + 1, (EXAMPLES, *feature.shape[1:]))
        reals.append((codes.astype(np.float32) - zero_point) * np.float32(scale))
    return reals


def results_of(results: object) -> list[np.ndarray]:
    tensors = list(results.values()) if isinstance(results, dict) else [results]
    return [np.asarray(one.detach() if isinstance(one, torch.Tensor) else one) for one in tensors]


@pytest.mark.parametrize("device", ["xnnpack-x86", "reference"])
@pytest.mark.parametrize("name", WAYS)
def test_before_the_first_step_it_computes_what_litert_computes_of_the_file(name: str, device: str) -> None:
    path = FILES / f"{name}.tflite"
    if device not in deploy.profiles_here():
        pytest.skip(f"{device} does not run here")
    model = qat.prepare(deploy.read_tflite(path), device=device).eval()
    reals = on_the_grid(model.plan)
    qat.freeze(model)
    results, expected = results_of(model(*map(torch.from_numpy, reals))), on_litert(path, reals, device)
    assert len(results) == len(expected)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["convolutions.int8", "pieces.int8"])
def test_what_is_written_after_training_is_what_training_computed(name: str, tmp_path: Path) -> None:
    graph = deploy.read_tflite(FILES / f"{name}.tflite")
    model = qat.prepare(graph)
    reals = [torch.from_numpy(array) for array in on_the_grid(model.plan)]
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(*reals).square().sum().backward()
        optimizer.step()
        if not model.frozen:
            qat.freeze(model)
    moved = [key for key, value in model.named_parameters() if not torch.equal(value, before[key])]
    assert any(key.endswith(".weight") for key in moved) and any(key.endswith(".scale") for key in moved)
    model.eval()
    trained = deploy.lower(model)
    path = deploy.write_tflite(trained, tmp_path / "trained.tflite")
    for ours, theirs in zip(
        results_of(model(*reals)), on_litert(path, [tensor.numpy() for tensor in reals], "xnnpack-x86"), strict=True
    ):
        assert np.array_equal(ours, theirs)


def test_a_dense_layer_that_joins_the_axes_before_it() -> None:
    """As onnx2tf writes it after a mean that keeps its axis."""
    rng, builder = np.random.default_rng(5), Builder()
    builder.input("x", (1, 3, 8), per_tensor(0.05, 3))
    builder.mean("x", per_tensor(0.04, -3), axes=(1,), keep_dims=True, name="mean")
    filter, bias = rng.integers(-127, 128, (4, 8)), rng.integers(-90, 90, 4)
    builder.fully_connected("mean", filter, [0.01], bias, per_tensor(0.1, 0), name="y", keep_axes=False)
    graph = builder.graph(["y"])
    assert graph.tensors["y"].shape == (1, 4)
    model = qat.prepare(graph).eval()
    (x,) = on_the_grid(model.plan)
    qat.freeze(model)
    codes = {"x": deploy.quantize(x, graph.tensors["x"].quantization)}
    (result,) = results_of(model(torch.from_numpy(x)))
    expected = deploy.simulate(graph, codes, "xnnpack-x86")["y"]
    assert np.array_equal(result, deploy.dequantize(expected, graph.tensors["y"].quantization))


@pytest.mark.parametrize(
    "kind", ["RSQRT", "SQRT", "LOG", "ELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1", "REVERSE_V2", "BROADCAST_TO"]
)
def test_functions_that_only_files_hold_have_gradients(kind: str) -> None:
    """Also beside their poles."""
    moved = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        graph = random_graph(rng, kind)
        if any(graph.tensors[name].dtype != "int8" for name in graph.inputs):
            continue
        model = qat.prepare(graph, device="reference").train()
        inputs = [torch.from_numpy(array).requires_grad_() for array in on_the_grid(model.plan, seed)]
        result, *_ = results_of_training(model(*inputs))
        slopes = torch.autograd.grad(result.sum(), inputs)
        assert all(torch.isfinite(slope).all() for slope in slopes)
        moved += sum(int((slope != 0).sum()) for slope in slopes)
    assert moved


def results_of_training(results: object) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def dilated(rng: np.random.Generator, sequence: bool, depthwise: bool, activation: str = "NONE") -> Graph:
    """A dilated convolution as converters write it: blocks become rows of the batch, and come back."""
    builder, count = Builder(), 1 if sequence else 2
    blocks = tuple(int(length) for length in rng.integers(1, 4, count))
    windows = tuple(int(extent) for extent in rng.integers(1, 4, count))
    sizes = tuple(int(length) for length in rng.integers(7, 12, count))
    pads, crops = [], []
    for block, window, size in zip(blocks, windows, sizes, strict=True):
        before, reach = int(rng.integers(0, 3)), block * (window - 1)
        fitting = [
            after for after in range(12) if (size + before + after) % block == 0 and size + before + after > reach
        ]
        after = fitting[int(rng.integers(0, 2))]
        left = size + before + after - reach
        # What is cut off before was padded; so is what is cut off after.
        pads.append((before, after))
        crops.append((int(rng.integers(0, before + 1)), int(rng.integers(0, min(after + 1, max(left - before, 1))))))
    x = builder.input("x", (1, *sizes, 3), per_tensor(0.05, 7))
    blocked = builder.operator("SPACE_TO_BATCH_ND", [x], None, name="blocked", block_shape=blocks, paddings=tuple(pads))
    filter = rng.integers(-127, 128, (1 if depthwise else 5, *((1,) if sequence else ()), *windows, 3)).astype(np.int8)
    channels = 3 if depthwise else 5
    scales, bias = rng.uniform(0.5, 1, channels).astype(np.float32) * 0.01, rng.integers(-2000, 2000, channels)
    if sequence:
        blocked = builder.operator("EXPAND_DIMS", [blocked], None, name="image", axis=1)
    convolve = builder.depthwise_conv_2d if depthwise else builder.conv_2d
    how = {"padding": "VALID", "activation": activation}
    y = convolve(blocked, filter, scales, bias, per_tensor(0.1, -5), name="convolved", **how)
    if sequence:
        shape = builder.graph([y]).tensors[y].shape
        y = builder.reshape(y, (shape[0], *shape[2:]), name="line")
    y = builder.operator("BATCH_TO_SPACE_ND", [y], None, name="whole", block_shape=blocks, crops=tuple(crops))
    return builder.graph([y])


@pytest.mark.parametrize("seed", range(12))
def test_a_convolution_between_blocks_is_trained_as_a_dilated_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = dilated(rng, seed % 2 == 0, seed % 3 == 0, str(rng.choice(["NONE", "RELU"])))
    model = qat.prepare(graph, device="xnnpack-x86")
    qat.freeze(model)
    written = deploy.lower(model)
    assert not [operator.kind for operator in written.operators if "BATCH" in operator.kind]
    codes = rng.integers(-128, 128, graph.tensors["x"].shape).astype(np.int8)
    (name,), (path,) = graph.outputs, written.outputs
    for profile in ("xnnpack-x86", "reference"):
        expected = deploy.simulate(graph, {"x": codes}, profile)[name]
        assert np.array_equal(deploy.simulate(written, {written.inputs[0]: codes}, profile)[path], expected)


def test_blocks_without_a_plain_convolution_are_refused() -> None:
    graph = dilated(np.random.default_rng(2), False, False)
    cut = replace(graph, operators=graph.operators[:1], outputs=("blocked",))
    with pytest.raises(UnsupportedOperator, match="can be trained only before one convolution and BATCH_TO_SPACE_ND"):
        qat.prepare(cut, device="xnnpack-x86")
    convolution = replace(graph.operators[1], attributes={**graph.operators[1].attributes, "dilations": (2, 1)})
    twice = replace(graph, operators=(graph.operators[0], convolution, *graph.operators[2:]))
    with pytest.raises(UnsupportedOperator, match="can be trained only before one convolution and BATCH_TO_SPACE_ND"):
        qat.prepare(twice, device="xnnpack-x86")
    read_twice = replace(graph, outputs=(*graph.outputs, "convolved"))
    with pytest.raises(UnsupportedOperator, match="can be trained only before one convolution and BATCH_TO_SPACE_ND"):
        qat.prepare(read_twice, device="xnnpack-x86")


def test_what_delegates_leave_in_a_file_is_written_so_that_they_take_it(tmp_path: Path) -> None:
    """A transposed convolution of an open batch."""
    graph = deploy.read_tflite(FILES / "enlarged.int8.tflite")
    with pytest.warns(
        UserWarning, match="leaves TRANSPOSE_CONV at .* to built-in kernels.*convert the model with a fixed"
    ):
        model = qat.prepare(graph, device="xnnpack-x86").eval()
    reals = on_the_grid(model.plan)
    qat.freeze(model)
    path = deploy.write_tflite(deploy.lower(model), tmp_path / "trained.tflite")
    for ours, theirs in zip(
        results_of(model(*map(torch.from_numpy, reals))), on_litert(path, reals, "xnnpack-x86"), strict=True
    ):
        assert np.array_equal(ours, theirs)


@pytest.mark.slow
def test_jax_trains_the_same_integers() -> None:
    jax = pytest.importorskip("jax")
    path = FILES / "convolutions.int8.tflite"
    prepared = qat.jax.prepare_file(deploy.read_tflite(path))
    params, state = prepared.freeze(*prepared.init())
    reals = on_the_grid(prepared.plan)
    results, _ = prepared.apply(params, state, *reals)
    for ours, theirs in zip(results_of(results), on_litert(path, reals, "xnnpack-x86"), strict=True):
        assert np.array_equal(ours, theirs)

    def loss(params: object) -> object:
        return jax.numpy.square(prepared.apply(params, state, *reals)[0]).sum()

    slopes = jax.grad(loss)(params)["model"]
    assert all(np.isfinite(slope).all() for slope in slopes.values())
    assert any(np.any(slope) for name, slope in slopes.items() if name.endswith(".weight"))


def with_a_table(function: Callable[[np.ndarray], np.ndarray], dtype: str) -> Graph:
    """A table of a function, as a file holds it."""
    fine = 1 if dtype == "int8" else 256
    source = per_tensor(0.04 / fine, 5 if fine == 1 else 0, dtype)
    output = per_tensor(0.03 / fine, 0, dtype)
    codes = np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1)
    table = deploy.quantize(function(deploy.dequantize(codes, source).astype(np.float64)), output)
    builder = Builder()
    y = builder.lookup(builder.input("x", (1, 6), source), output, codes=tuple(table.tolist()), name="y")
    return builder.graph([y])


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize(
    ("function", "kind"),
    [(lambda x: x * np.tanh(np.log1p(np.exp(x))), "TABLE"), (lambda x: x / (1 + np.exp(-1.7 * x)), "LOOKUP")],
)
def test_tables_of_a_file_have_the_slope_of_their_function(
    function: Callable[[np.ndarray], np.ndarray], kind: str, dtype: str, tmp_path: Path
) -> None:
    path = deploy.write_tflite(with_a_table(function, dtype), tmp_path / "table.tflite")
    model = qat.prepare(deploy.read_tflite(path))
    assert [step.kind for step in model.plan.steps] == [kind]
    x = torch.linspace(-3, 2, 6 * 400).reshape(-1, 6).requires_grad_()
    model(x).sum().backward()
    points = x.detach().double().numpy()
    slope = (function(points + 1e-4) - function(points - 1e-4)) / 2e-4
    # What a table rises is rounded by one step at most, over a window of all codes or of the 256 that a slope is of.
    off = np.abs((x.grad.numpy() - slope).reshape(-1, 200).mean(-1))
    assert off.max() < (0.03 / (200 * 5 / 2400) if dtype == "int8" else 0.03 / 256 / 0.04)
    reals = on_the_grid(model.plan)
    qat.freeze(model.eval())
    for ours, theirs in zip(
        results_of(model(*map(torch.from_numpy, reals))), on_litert(path, reals, "xnnpack-x86"), strict=True
    ):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("rule", [Rule(), Rule(weight_bits=4, activation_bits=4), Rule(activation_bits=16)])
def test_files_of_this_project_come_back(rule: Rule, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, (example,) = NETWORKS["ds_cnn"]()
    original = qat.prepare(model, example, [rule])
    original(torch.randn(4, *example.shape[1:]))
    original.eval()
    with pytest.warns(UserWarning):
        qat.freeze(original)
    graph = deploy.lower(original)
    read = deploy.read_tflite(deploy.write_tflite(graph, tmp_path / "original.tflite"))
    again = qat.prepare(read)
    qat.freeze(again)
    back = deploy.lower(again)
    (name,), (other,) = graph.inputs, back.inputs
    low, high = (-32768, 32767) if rule.is_int16 else (-128, 127)
    codes = np.random.default_rng(0).integers(low, high + 1, (4, *graph.tensors[name].shape[1:]))
    codes = codes.astype(graph.tensors[name].dtype)
    for device in ("xnnpack-x86", "micro"):
        first, second = (
            deploy.simulate(version, {key: codes}, device=device) for version, key in ((graph, name), (back, other))
        )
        for ours, theirs in zip(second.values(), first.values(), strict=True):
            assert np.array_equal(ours, theirs)


def small(lowest: int = -127, bias: int = 3) -> Graph:
    builder = Builder()
    x = builder.input("x", (1, 4), per_tensor(0.1, 0))
    codes = np.full((2, 4), lowest, np.int8)
    filters = builder.constant("w", codes, per_tensor(0.02, 0))
    biases = builder.constant("b", np.array([bias, -bias], np.int32), per_tensor(np.float32(0.1) * np.float32(0.02), 0))
    y = builder.operator("FULLY_CONNECTED", (x, filters, biases), per_tensor(0.5, 1), name="y", activation="NONE")
    return builder.graph([y])


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (lambda: small(-128), r"FULLY_CONNECTED that makes 'y'.*codes of -128"),
        (
            lambda: small(bias=2**30 + 1),
            r"FULLY_CONNECTED that makes 'y'.*its bias has codes beyond what float32 holds",
        ),
        (lambda: deploy.read_tflite(FILES / "float_island.int8.tflite"), r"float32, and int8 or int16 can train"),
    ],
)
def test_what_cannot_stay_as_it_is_is_named(graph: object, words: str) -> None:
    with pytest.raises(UnsupportedOperator, match=words):
        qat.prepare(graph())


def test_a_file_decides_its_grids() -> None:
    graph = small()
    rules = [Rule(weight_bits=4)]
    for wrong in ({"rules": rules}, {"example": np.zeros((1, 4))}, {"deployable": False}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} is not for a Graph"):
            qat.prepare(graph, **wrong)
    model = qat.prepare(graph, device="micro")
    assert model.profile == "micro"
    with pytest.raises(TypeError, match="the file's inputs are x; got"):
        model(torch.zeros(1, 4), torch.zeros(1, 4))


def of_bytes() -> Graph:
    """A network of inputs 0..255, as converters fold it: scaled by 1/255, and with weights of 1/1000."""
    rng, builder = np.random.default_rng(0), Builder()
    x = builder.input("x", (1, 16), per_tensor(1.0, -128))
    factor = builder.constant("factor", np.full((1, 16), 127, np.int8), per_tensor(1 / 255 / 127, 0))
    y = builder.mul(x, factor, per_tensor(1 / 255, -128), name="scaled;Rescaling;mul")
    for name, source, scale, output in (
        ("first;norm;MatMul", y, [0.02 / 127] * 8, per_tensor(1e-4, 0)),
        ("beside;norm;MatMul", x, list(rng.uniform(1e-5, 1e-4, 8)), per_tensor(0.02, 0)),
    ):
        filters, biases = rng.integers(-127, 128, (8, 16)), rng.integers(-900, 900, 8)
        y = builder.fully_connected(source, filters, scale, biases, output, name=name)
    return builder.graph(["first;norm;MatMul", "beside;norm;MatMul"])


def test_parameters_of_a_file_are_near_one_and_have_short_names() -> None:
    model = qat.prepare(of_bytes(), device="micro")
    sizes = {name: float(parameter.detach().abs().max()) for name, parameter in model.named_parameters()}
    names = {f"{layer}.{what}" for layer in ("first", "beside") for what in ("weight", "scale", "bias")}
    assert {name for name in sizes if not name.startswith("quantization.")} == names | {"scaled/operand_1"}
    assert all(1 / 64 < size < 2 for size in sizes.values())
    jax = pytest.importorskip("jax")
    params, _ = qat.jax.prepare_file(of_bytes(), device="micro").init()
    assert set(params["model"]) == names | {"scaled/operand_1"}
    assert all(1 / 64 < np.abs(leaf).max() < 2 for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("optimizer", "rate"), [(torch.optim.SGD, 1e-2), (torch.optim.Adam, 1e-3)])
@pytest.mark.parametrize("grouped", [False, True])
def test_small_weights_of_a_file_are_adapted_and_not_replaced(
    optimizer: type[torch.optim.Optimizer], rate: float, grouped: bool
) -> None:
    """Before, a step that suits weights near 1 was larger than theirs."""
    torch.manual_seed(0)
    graph = of_bytes()
    model = qat.prepare(graph, device="micro")
    x, wanted = torch.randint(0, 256, (64, 16)).float(), torch.randint(0, 8, (64,))
    trained = optimizer(qat.parameter_groups(model, rate) if grouped else model.parameters(), lr=rate)
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(x)["beside;norm;MatMul"], wanted)
        trained.zero_grad()
        loss.backward()
        trained.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error", qat.WeightsMovedWarning)
        qat.freeze(model)
        after = deploy.lower(model.eval())
    dense = [[layer for layer in at.operators if layer.kind == "FULLY_CONNECTED"] for at in (graph, after)]
    codes = [
        [np.asarray(at.tensors[layer.inputs[1]].data, int) for layer in layers]
        for at, layers in zip((graph, after), dense, strict=True)
    ]
    farthest = [int(np.abs(first - second).max()) for first, second in zip(*codes, strict=True)]
    assert 0 < max(farthest) < 10


def test_weights_that_training_replaces_are_named() -> None:
    torch.manual_seed(0)
    model = qat.prepare(of_bytes(), device="micro")
    optimizer = torch.optim.Adam([model.get_parameter("beside.weight")], 0.3)
    for frozen in (False, True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randint(0, 256, (8, 16)).float())["beside;norm;MatMul"].square().sum().backward()
            optimizer.step()
        with pytest.warns(qat.WeightsMovedWarning, match="of 1 of the file's layers.*: beside by .*smaller learning"):
            deploy.lower(model.eval()) if frozen else qat.freeze(model)


def test_a_final_softmax_of_a_file_stays_and_is_named() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1))
    model = qat.prepare(network, torch.randn(2, 4), device="micro", keep_final_activation=True)
    qat.calibrate(model, [torch.randn(8, 4)])
    qat.freeze(model)
    graph = deploy.lower(model.eval())
    with pytest.warns(qat.FinalActivationWarning, match=r"ends with SOFTMAX.*takes probabilities.*\+ 1 / 512"):
        again = qat.prepare(graph, device="micro")
    with warnings.catch_warnings():
        warnings.simplefilter("error", qat.FinalActivationWarning)
        again = qat.prepare(graph, device="micro", keep_final_activation=True)
        qat.prepare(small(), keep_final_activation=False)  # it has none
    assert torch.allclose(again(torch.randn(4, 4)).sum(1), torch.ones(4), atol=0.02)
    with pytest.raises(TypeError, match="keep_final_activation=False is not for this file: it ends with SOFTMAX"):
        qat.prepare(graph, keep_final_activation=False)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    graph = deploy.read_tflite(FILES / "convolutions.int8.tflite")
    (shape,), (classes,) = (
        [graph.tensors[name].shape[1:] for name in names] for names in (graph.inputs, graph.outputs)
    )
    torch.manual_seed(0)
    loader = [(torch.randn(4, *shape), torch.randint(classes[-1], (4,))) for _ in range(3)]
    (tmp_path / "product.tflite").write_bytes((FILES / "convolutions.int8.tflite").read_bytes())
    monkeypatch.chdir(tmp_path)
    exec(block.replace("lr=1e-4", "lr=1e-2"), {"loader": loader})  # so that a few images move codes
    repaired = deploy.read_tflite(tmp_path / "repaired.tflite")
    codes = np.random.default_rng(0).integers(-128, 128, (16, *shape)).astype(np.int8)
    (before,), (after,) = (deploy.simulate(version, codes, device="micro").values() for version in (graph, repaired))
    assert before.shape == after.shape and not np.array_equal(before, after)
    assert repaired.tensors[repaired.outputs[0]].quantization.equals(graph.tensors[graph.outputs[0]].quantization)
