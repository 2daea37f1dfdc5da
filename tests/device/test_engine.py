# SPDX-License-Identifier: Apache-2.0
"""The engine against the declarations: the same bits, on every instruction set and number of threads.

EXACTQAT_SWEEP=20 multiplies the random graphs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from device_cases import NAMES, random_codes, random_graph

from exactqat import deploy
from exactqat.deploy import Builder, Graph, Quantization, per_tensor
from exactqat.kit.device import OPERATORS, PROFILES, Refusal, Tensor, profile_named
from exactqat.kit.device.tensor import CODE_RANGES
from exactqat.kit.engine import Compiled, by_declaration, dequantized, quantized
from exactqat.kit.engine.arena import lifetimes, places
from exactqat.operators import cpu

COUNT = 3 * int(os.environ.get("EXACTQAT_SWEEP", "1"))
THREADS = (1, 2, 7, 16)
# Instruction sets, and the one with dot products once without.
WAYS = [(name, dots) for name in cpu.INSTRUCTION_SETS for dots in ((1, 0) if name in ("avx512", "neon") else (1,))]


@pytest.fixture(params=WAYS, ids=lambda way: way[0] if way[1] else f"{way[0]}-without-dot-products")
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All kernels on one instruction set."""
    name, dots = request.param
    monkeypatch.setattr(cpu, "kernels", cpu.load(name))
    monkeypatch.setenv("EXACTQAT_DOT_PRODUCTS", str(dots))
    return str(name)


@pytest.fixture
def threads() -> Iterator[None]:
    """As many as there were."""
    before = cpu.get_num_threads()
    yield
    cpu.set_num_threads(before)


def declared(graph: Graph, codes: Mapping[str, np.ndarray], profile: str) -> dict[str, np.ndarray]:
    """All results, by the declarations."""
    examples = len(next(iter(codes.values()))) // graph.tensors[graph.inputs[0]].shape[0]
    values = {**codes, **graph.initial_state(examples)}
    for operator in graph.operators:
        tensors, outputs = ([graph.tensors[name] for name in names] for names in (operator.inputs, operator.outputs))
        operands = [values[tensor.name] if tensor.data is None else tensor.data for tensor in tensors]
        declaration = OPERATORS[operator.kind]
        device = profile_named(profile).for_unsigned() if operator.unsigned else profile_named(profile)
        results = by_declaration(declaration, operands, tensors, outputs, operator.attributes, device)
        # What variables hold afterwards comes last.
        values.update(zip(operator.outputs, results[: len(operator.outputs)], strict=True))
    return values


def check(graph: Graph, codes: Mapping[str, np.ndarray], profile: str) -> None:
    """Every result, of the whole graph and of each operator alone, equals the declarations'."""
    try:
        expected = declared(graph, codes, profile)
    except Refusal:
        with pytest.raises(Refusal):
            Compiled(graph, profile).run(codes)
        return
    compiled = Compiled(graph, profile)
    results = compiled.run(codes, graph.results(), 2)
    for name in graph.results():
        assert results[name].dtype == expected[name].dtype
        assert np.array_equal(results[name], expected[name]), name
        assert np.array_equal(compiled.operator(name, expected), expected[name]), name


def repeated(codes: Mapping[str, np.ndarray], examples: int) -> dict[str, np.ndarray]:
    """Several examples of random codes."""
    rng = np.random.default_rng(3)
    more = {}
    for name, array in codes.items():
        if array.dtype in (np.float32, np.int32):  # indices within a table
            more[name] = np.concatenate([array] * examples)
            continue
        ends, shape = np.iinfo(array.dtype), (examples * len(array), *array.shape[1:])
        more[name] = rng.integers(ends.min, ends.max + 1, shape, array.dtype)
    return more


# --- every operator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NAMES)
def test_every_operator(kind: str, way: str) -> None:
    for profile in PROFILES:
        rng = np.random.default_rng([*kind.encode(), *profile.encode()])
        for _ in range(COUNT):
            graph = random_graph(rng, kind)
            check(graph, repeated(random_codes(rng, graph), 3), profile)


# What is left to the declarations: operators of others' files, and those that copy rows of a table.
WITHOUT_KERNELS = {
    "CAST", "CODED_EMBEDDING", "CODED_EMBEDDING:int16", "CONV_2D:int4", "DEPTHWISE_CONV_2D:int4", "DEQUANTIZE",
    "DYNAMIC_UPDATE_SLICE", "DYNAMIC_UPDATE_SLICE:int16", "DEQUANTIZE:int16", "DIV",
    "EMBEDDING", "EMBEDDING:int16", "EQUAL", "FULLY_CONNECTED:int4", "GATHER_ND",
    "GATHER_ND:int16", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "LOGICAL_AND", "LOGICAL_NOT", "LOGICAL_OR",
    "NOT_EQUAL", "QUANTIZE:float32", "REDUCE_ALL", "REDUCE_ANY", "REDUCE_PROD",
    "REDUCE_PROD:int16", "SELECT", "SELECT_V2", "SVDF", "TOPK_V2", "UNIDIRECTIONAL_SEQUENCE_LSTM",
    "UNIDIRECTIONAL_SEQUENCE_LSTM:projection", "BATCH_MATMUL:int16:int8_constant", "DIV:int16", "EQUAL:int16",
    "GREATER:int16", "GREATER_EQUAL:int16", "LESS:int16", "LESS_EQUAL:int16", "NOT_EQUAL:int16", "PRELU:int16",
    "SELECT:int16", "SELECT_V2:int16", "SUM:int16", "TOPK_V2:int16",
}  # fmt: skip


# Pairs of codes that are looked up in the declaration's own table, and what onnxruntime has in float32.
WITHOUT_KERNELS_AS_ONNX = {
    "ADD", "L2_NORMALIZATION", "MEAN", "MUL", "PRELU", "RESIZE_BILINEAR", "SOFTMAX", "SQUARED_DIFFERENCE", "SUB",
}  # fmt: skip


def test_which_operators_have_kernels() -> None:
    """So that the comparison above is one, under every profile."""
    for profile in PROFILES:
        served = set()
        for kind in NAMES:
            rng = np.random.default_rng(1)
            for graph in (random_graph(rng, kind) for _ in range(5)):
                left = Compiled(graph, profile).without_kernels()
                served |= {kind} if graph.operators[-1].outputs[0] not in left else set()
        as_onnx = WITHOUT_KERNELS_AS_ONNX if PROFILES[profile].rounds_as_onnx else set()
        of_files = {name for name in NAMES if name.endswith((":uint8", ":int32", ":int64", ":int32_bias"))}
        assert set(NAMES) - served - of_files == WITHOUT_KERNELS | as_onnx, profile
        assert not any(name.endswith((":uint8", ":int32_bias")) for name in served), profile


@pytest.mark.parametrize("values", [1, 7, 8, 13])
def test_values_that_fill_no_vector(values: int, way: str) -> None:
    """HARD_SWISH on ARM rounds the last ones, fewer than eight of all of a batch, as elsewhere."""
    builder = Builder()
    builder.hard_swish(builder.input("x", (1, values), per_tensor(0.04, 3)), per_tensor(0.03, -2), name="y")
    graph = builder.graph(["y"])
    for examples in (1, 3):
        codes = {"x": np.random.default_rng(examples).integers(-128, 128, (examples, values)).astype(np.int8)}
        result = Compiled(graph, "xnnpack-arm64").run(codes)["y"]
        assert np.array_equal(result, declared(graph, codes, "xnnpack-arm64")["y"])
    assert not Compiled(graph, "xnnpack-arm64").without_kernels()


# --- between real numbers and codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("scale", [1 / 128, 3.1e-5, 0.37, 1e-35])
def test_real_numbers_become_codes(dtype: str, scale: float, way: str) -> None:
    zero_point = -7 if dtype == "int8" else 0
    low, high = CODE_RANGES[dtype]
    tensor = Tensor("x", (1, 3, 5), dtype, per_tensor(scale, zero_point, dtype))
    rng = np.random.default_rng(0)
    steps = rng.integers(2 * low, 2 * high, (4, 9000, 5)) + rng.choice([0.0, 0.25, 0.5, 0.75], (4, 9000, 5))
    values = (steps * np.float32(scale)).astype(np.float32)
    values[0, 0, :4] = [np.inf, -np.inf, 3e38, -0.0]
    with np.errstate(over="ignore"):
        expected = np.clip(np.rint(values / np.float32(scale)) + np.float32(zero_point), low, high).astype(dtype)
    codes, missing = quantized(values, tensor)
    np.testing.assert_array_equal(codes, expected)
    assert not missing.any()
    numbers = dequantized(codes, tensor)
    assert numbers.dtype == np.float32
    np.testing.assert_array_equal(numbers, (codes.astype(np.float32) - np.float32(zero_point)) * np.float32(scale))
    values[2, 8999, 4] = np.nan
    codes, missing = quantized(values, tensor)
    assert missing.tolist() == [False, False, True, False] and codes[2, 8999, 4] == zero_point


# --- sums -----------------------------------------------------------------------------------------------------------


def conv(
    shape: tuple[int, ...],
    filter: tuple[int, ...],
    kind: str = "conv_2d",
    extreme: bool = False,
    zero_point: int = -128,
    dtype: str = "int8",
    **attributes: object,
) -> Graph:
    """A layer whose results spread over its dtype, or with weights and biases at their ends."""
    rng = np.random.default_rng([*shape, *filter])
    builder, wide = Builder(), dtype == "int16"
    fineness = 256 if wide else 1
    builder.input("x", shape, per_tensor(1 / 64 / fineness, 0 if wide else zero_point, dtype))
    axis = 3 if kind == "depthwise_conv_2d" else 0
    channels, depth = filter[axis], np.prod(filter) // filter[axis]
    scale = rng.uniform(0.5, 1.5, channels).astype(np.float32) / np.float32(64 * np.sqrt(depth))
    weights, bias = rng.integers(-127, 128, filter), rng.integers(-2000, 2000, channels)
    if extreme:
        weights = np.where(rng.integers(0, 2, filter), 127, -127)
        np.moveaxis(weights, axis, 0)[0] = 127
        scale = (2.0 ** (rng.uniform(-10, 2, channels) if wide else rng.uniform(-20, 6, channels))).astype(np.float32)
    # Rescaled sums stay below 2**31, which kernels need.
    step = 2 / 255 / fineness if not extreme else 2.0 ** (rng.integers(4, 8) if wide else rng.integers(-3, 8))
    if extreme:
        shift = np.maximum(np.frexp(scale / 64 / fineness / step)[1], 0)
        most = np.int64(2) ** (47 if wide else 31 - shift) - 1
        room = most - int(depth) * 127 * (32768 if wide else 255)
        bias = np.where(rng.integers(0, 2, channels), room, -room)
    output = per_tensor(step, 0 if wide else 3, dtype)
    call = getattr(builder, kind)
    return builder.graph([call("x", weights, scale, bias, output, name="y", **attributes)])


LAYERS = {
    "as many columns as fit": conv((1, 9, 7, 64), (64, 1, 1, 64)),
    "few columns": conv((1, 13, 11, 24), (7, 1, 1, 24)),
    "column more": conv((1, 5, 7, 17), (65, 1, 1, 17)),
    "all blocks of columns": conv((1, 4, 5, 31), (64 + 32 + 16 + 5, 1, 1, 31)),
    "three channels": conv((1, 33, 35, 3), (32, 3, 3, 3), strides=(2, 2)),
    "one row of sums": conv((1, 1, 1, 1280), (1000, 1, 1, 1280)),
    "deep": conv((1, 7, 7, 512), (70, 3, 3, 512)),
    "wide window": conv((1, 19, 17, 5), (9, 7, 5, 5), dilations=(1, 1)),
    "dilated": conv((1, 19, 17, 8), (16, 3, 3, 8), dilations=(3, 2)),
    "strides beyond the window": conv((1, 17, 18, 6), (10, 1, 2, 6), strides=(3, 3), padding="VALID"),
    "groups": conv((1, 9, 9, 48), (36, 3, 3, 4)),
    "extremes": conv((1, 6, 7, 19), (40, 3, 3, 19), extreme=True, zero_point=127),
    "other extremes": conv((1, 6, 7, 64), (33, 1, 1, 64), extreme=True),
    "depthwise": conv((1, 19, 21, 33), (1, 3, 3, 33), "depthwise_conv_2d"),
    "depthwise with strides": conv((1, 19, 21, 144), (1, 3, 3, 144), "depthwise_conv_2d", strides=(2, 2)),
    "depthwise, dilated": conv((1, 19, 5, 40), (1, 5, 5, 40), "depthwise_conv_2d", dilations=(2, 3)),
    "depthwise, multiplied": conv((1, 9, 8, 5), (1, 3, 3, 20), "depthwise_conv_2d"),
    "depthwise, one channel": conv((1, 9, 8, 1), (1, 10, 4, 64), "depthwise_conv_2d", strides=(2, 2)),
    "depthwise extremes": conv((1, 9, 8, 70), (1, 3, 3, 70), "depthwise_conv_2d", extreme=True, zero_point=127),
    "transposed": conv((1, 7, 5, 20), (33, 3, 3, 20), "transpose_conv", strides=(2, 2), output_size=(15, 11)),
    "transposed with gaps": conv((1, 7, 5, 9), (3, 2, 2, 9), "transpose_conv", strides=(3, 4), output_size=(20, 18)),
    "16 bits": conv((1, 13, 11, 24), (65, 3, 3, 24), dtype="int16", strides=(2, 1)),
    "16 bits, all blocks of columns": conv((1, 4, 5, 31), (64 + 32 + 16 + 5, 1, 1, 31), dtype="int16"),
    "16 bits, deep": conv((1, 7, 7, 512), (70, 3, 3, 512), dtype="int16"),
    "16 bits, groups": conv((1, 9, 9, 48), (36, 3, 3, 4), dtype="int16", dilations=(2, 1)),
    "16 bits, extremes": conv((1, 6, 7, 300), (40, 3, 3, 300), extreme=True, dtype="int16"),
    "16 bits, depthwise": conv((1, 19, 21, 33), (1, 3, 3, 33), "depthwise_conv_2d", dtype="int16"),
    "16 bits, depthwise, multiplied": conv((1, 9, 8, 5), (1, 3, 3, 20), "depthwise_conv_2d", dtype="int16"),
    "16 bits, depthwise extremes": conv(
        (1, 24, 22, 70), (1, 21, 22, 70), "depthwise_conv_2d", extreme=True, dtype="int16", padding="VALID"
    ),
    "16 bits, too many taps": conv((1, 23, 23, 3), (1, 23, 23, 3), "depthwise_conv_2d", True, dtype="int16"),
    "16 bits, transposed": conv(
        (1, 7, 5, 20), (33, 3, 3, 20), "transpose_conv", dtype="int16", strides=(2, 2), output_size=(15, 11)
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, way: str) -> None:
    graph = LAYERS[name]
    rng = np.random.default_rng(0)
    shape = (3, *graph.tensors["x"].shape[1:])
    dtype = graph.tensors["x"].dtype
    low, high = CODE_RANGES[dtype]
    for profile in PROFILES:
        check(graph, {"x": rng.integers(low, high + 1, shape).astype(dtype)}, profile)
        # Codes at their ends make the largest sums.
        check(graph, {"x": np.where(rng.integers(0, 2, shape), high, low).astype(dtype)}, profile)
        check(graph, {"x": np.full(shape, low, dtype)}, profile)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("count", THREADS)
def test_threads(count: int, dtype: str, way: str, threads: None) -> None:
    """Of tensors large enough for all of them to get a part."""
    cpu.kernels.set_thread_count(count)
    builder = Builder()
    rng = np.random.default_rng(0)

    def per_tensor(scale: float, zero_point: int) -> Quantization:
        wide = dtype == "int16"
        return deploy.per_tensor(scale / 256 if wide else scale, 0 if wide else zero_point, dtype)

    x = builder.input("x", (1, 29, 31, 24), per_tensor(1 / 64, 5))
    grid, scale = per_tensor(1 / 30, -7), np.full(24, 1 / 640, np.float32)
    bias = rng.integers(-500, 500, 24)
    first = builder.conv_2d(x, rng.integers(-127, 128, (24, 3, 3, 24)), scale / 3, bias, grid, name="first")
    second = builder.depthwise_conv_2d(first, rng.integers(-127, 128, (1, 3, 3, 24)), scale, bias, grid, name="second")
    total = builder.add(first, second, per_tensor(1 / 20, 3), name="sum")
    pooled = builder.average_pool_2d(total, (3, 3), (2, 2), "SAME", name="pooled")
    taken = builder.gather(pooled, name="taken", axis=2, indices=(7, 0, 3, 3))
    larger = builder.resize_bilinear(taken, name="larger", size=(31, 9))
    graph = builder.graph([builder.mean(larger, per_tensor(1 / 50, 0), name="y")])
    low, high = CODE_RANGES[dtype]
    codes = {"x": rng.integers(low, high + 1, (5, 29, 31, 24)).astype(dtype)}
    for profile in PROFILES:
        check(graph, codes, profile)


# --- a whole network ------------------------------------------------------------------------------------------------


def chain(seed: int = 0) -> Graph:
    """Three layers, with a sum across two of them."""
    rng = np.random.default_rng(seed)
    builder = Builder()
    x = builder.input("x", (1, 8, 8, 8), per_tensor(1 / 64, 5))
    layers = []
    for number in range(3):
        filter = np.random.default_rng(number).integers(-127, 128, (8, 3, 3, 8))
        if number == 2:
            filter = rng.integers(-127, 128, filter.shape)
        x = builder.conv_2d(x, filter, [1 / 900], np.zeros(8), per_tensor(1 / 64, 0), name=f"layer_{number}")
        layers.append(x)
    return builder.graph([builder.add(layers[0], layers[2], per_tensor(1 / 40, 0), name="y")])


def test_a_run_begins_where_codes_are_given() -> None:
    codes = np.random.default_rng(0).integers(-128, 128, (5, 8, 8, 8)).astype(np.int8)
    compiled = deploy.compile(chain(), "reference")
    whole = compiled.run({"x": codes}, ["layer_0", "layer_1", "y"])
    kept = {name: whole[name] for name in ("layer_0", "layer_1")}
    assert np.array_equal(compiled.run(kept)["y"], whole["y"])
    other = chain(7)
    changed = deploy.compile(other, "reference").run(kept)["y"]
    assert np.array_equal(changed, deploy.simulate(other, codes, "reference")["y"])
    assert not np.array_equal(changed, whole["y"])


def test_progress_is_shown() -> None:
    shown: list[tuple[int, int]] = []
    codes = np.zeros((5, 8, 8, 8), np.int8)
    deploy.compile(chain()).run({"x": codes}, batch_size=2, progress=lambda *counts: shown.append(counts))
    assert shown == [(2, 5), (4, 5), (5, 5)]


def test_what_to_keep_for_a_changed_layer() -> None:
    codes = np.random.default_rng(0).integers(-128, 128, (5, 8, 8, 8)).astype(np.int8)
    compiled, other = deploy.compile(chain()), chain(7)
    assert compiled.frontier(["layer_2"]) == ("layer_1", "layer_0")  # layer_0 is added to what layer_2 gives
    assert compiled.frontier(["layer_0"]) == ("x",)
    kept = compiled.run({"x": codes}, compiled.frontier(["layer_2"]))
    assert np.array_equal(deploy.compile(other).run(kept)["y"], deploy.simulate(other, codes)["y"])
    with pytest.raises(ValueError, match="changed names 'x', which no operator"):
        compiled.frontier(["x"])


def test_operators_in_common_are_prepared_once() -> None:
    """A graph with another layer, whose other tensors are the same objects."""
    before, after = chain(), chain(7)
    swapped = {**before.tensors, **{name: after.tensors[name] for name in after.operators[2].inputs[1:2]}}
    graph = Graph(swapped, before.operators, before.inputs, before.outputs)
    codes = {"x": np.random.default_rng(0).integers(-128, 128, (2, 8, 8, 8)).astype(np.int8)}
    compiled = deploy.compile(before)
    compiled.run(codes)
    changed = deploy.compile(graph, like=compiled)
    shared = [changed._forms.get(number) is compiled._forms[number] for number in range(4)]
    assert shared == [True, True, False, True]
    assert np.array_equal(changed.run(codes)["y"], deploy.simulate(graph, codes)["y"])


def test_memory_is_used_again() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        steps, names = [], ["x"]
        for number in range(int(rng.integers(1, 12))):
            operands = [str(name) for name in rng.choice(names, rng.integers(1, 3))]
            steps.append((operands, (f"t{number}",)))
            names.append(f"t{number}")
        kept = [str(name) for name in rng.choice(names[1:], 1)]
        alive = lifetimes([((), ("x",)), *steps], kept)
        sizes = {name: int(rng.integers(1, 5000)) for name in alive}
        offsets, total = places(sizes, alive)
        for name in alive:
            for other in alive:
                together = alive[name][0] <= alive[other][1] and alive[other][0] <= alive[name][1]
                if name != other and together:
                    ends = offsets[name] + sizes[name] <= offsets[other], offsets[other] + sizes[other] <= offsets[name]
                    assert any(ends), (name, other)
        assert total <= sum(-(-size // 64) * 64 for size in sizes.values())
    line = lifetimes([((), ("x",)), *((((f"t{k - 1}" if k else "x"),), (f"t{k}",)) for k in range(20))], ["t19"])
    assert places(dict.fromkeys(line, 1000), line)[1] == 2 * 1024  # of a chain: two layers


def test_bad_input() -> None:
    graph = chain()
    compiled = deploy.compile(graph)
    codes = np.zeros((2, 8, 8, 8), np.int8)
    with pytest.raises(ValueError, match=r"layer_1.*\[batch \* 1, 8, 8, 8\].*int16"):
        compiled.run({"layer_1": codes.astype(np.int16)}, ["y"])
    with pytest.raises(ValueError, match="needs 'x', which is neither given nor computed"):
        compiled.run({"layer_1": codes}, ["layer_0"])
    with pytest.raises(ValueError, match="nothing"):
        compiled.run({"nothing": codes})
    with pytest.raises(ValueError, match=r"as many examples.*\[1, 2\]"):
        compiled.run({"x": codes, "layer_1": codes[:1]})
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        compiled.run({"x": codes}, batch_size=0)
    with pytest.raises(TypeError, match="Graph"):
        deploy.compile("a graph")  # type: ignore[arg-type]
    assert repr(compiled) == "Compiled(4 operators, xnnpack-x86)" and not compiled.without_kernels()
