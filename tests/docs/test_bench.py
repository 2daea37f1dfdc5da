# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the kernels: its tables, what it derives, that it refuses, that contestants compute the same."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))

import card  # noqa: E402
import check  # noqa: E402
import layers  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import saved as saved_results  # noqa: E402
import summary  # noqa: E402
import timing  # noqa: E402
from operations import BY_KEY, OPERATIONS, make, of_largest_case, stored_shape, work  # noqa: E402

# Parameters and millions of multiply-adds for one image, as published.
PUBLISHED = {
    "MobileNetV1 1.0": (4_231_976, 569),
    "MobileNetV2": (3_504_872, 300),
    "MobileNetV3-Large": (5_483_032, 219),
    "EfficientNet-Lite0": (4_652_008, 390),
}


# The layers


@pytest.mark.parametrize("network", PUBLISHED)
def test_networks_have_their_published_size(network: str) -> None:
    table = layers.NETWORKS[network]()
    parameters, millions = PUBLISHED[network]
    assert sum(layer.parameters for layer in table) == parameters
    assert sum(layer.multiply_adds for layer in table) / 1e6 == pytest.approx(millions, rel=0.015)


def test_a_quarter_of_mobilenet_is_as_the_paper_says() -> None:
    table = layers.mobilenet_v1(0.25)
    assert sum(layer.parameters for layer in table) == pytest.approx(0.5e6, rel=0.07)
    assert sum(layer.multiply_adds for layer in table) == pytest.approx(41e6, rel=0.01)


@pytest.mark.parametrize(
    "network, name, shape, classes",
    [
        ("MobileNetV1 0.25", "mobilenet_v1", (3, 96, 96), 1000),
        ("MobileNetV2", "mobilenet_v2", (3, 224, 224), 1000),
        ("EfficientNet-Lite0", "efficientnet_lite0", (3, 224, 224), 1000),
        ("DS-CNN", "dscnn", (1, 49, 10), 12),
        ("ResNet-8", "resnet8", (3, 32, 32), 10),
    ],
)
def test_tables_are_the_networks_that_are_trained(network: str, name: str, shape: Any, classes: int) -> None:
    torch = pytest.importorskip("torch")
    import step

    model, table = step.BUILDERS[name](shape, classes).eval(), layers.NETWORKS[network]()
    assert sum(p.numel() for p in model.parameters()) == sum(layer.parameters for layer in table)
    seen = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        channels, height, width = output.shape[1:]
        seen.append((height, width, channels))

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    model(torch.zeros(1, *shape))
    assert sorted(seen) == sorted(layer.output for layer in table if layer.kind != "dense")


def test_identical_layers_are_listed_once_with_all_their_networks() -> None:
    depthwise = layers.depthwise_layers()
    shared = depthwise[layers.Depthwise((112, 112, 32), (3, 3), 1)]
    assert shared == ["MobileNetV1 1.0", "MobileNetV2", "EfficientNet-Lite0"]
    sizes = layers.by_elements(layers.activations())
    elements = [math.prod(activation.size) for activation in sizes]
    assert len(elements) == len(set(elements)) < len(layers.activations())
    assert {name for networks in sizes.values() for name in networks} == set(layers.NETWORKS)


def test_a_spread_keeps_both_ends() -> None:
    every = list(layers.activations())
    chosen = layers.spread(every, 5)
    counts = [math.prod(layer.size) for layer in chosen]
    assert len(set(chosen)) == 5 and counts == sorted(counts, reverse=True)
    assert counts[0] == max(math.prod(layer.size) for layer in every)
    assert counts[-1] == min(math.prod(layer.size) for layer in every)
    assert set(layers.spread(every, 1000)) == set(every)


# The operations


LAYER = layers.Activation((6, 5, 7))
CONVOLUTION = layers.Depthwise((6, 5, 7), (3, 3), 1)


def layer_for(key: str) -> Any:
    return CONVOLUTION if BY_KEY[key].group == "depthwise" else LAYER


def test_bytes_and_multiply_adds_follow_from_the_declaration() -> None:
    elements = 2 * 6 * 5 * 7
    operands, attributes = BY_KEY["per_channel_gradient"].call(LAYER, 2, "")
    moved = work("FakeQuantWithMinMaxVarsPerChannelGradient", operands, attributes)
    assert moved == (4 * (3 * elements + 4 * 7), 0)
    operands, attributes = BY_KEY["depthwise"].call(CONVOLUTION, 2, "NCHW")
    rows, columns = 3 * 6 - 2, 3 * 5 - 2  # taps on the padding do not count
    assert work("DepthwiseConv2dNative", operands, attributes) == (4 * (2 * elements + 63), 2 * 7 * rows * columns)


@pytest.mark.parametrize("key", BY_KEY)
def test_both_layouts_hold_the_same_values_and_cost_the_same(key: str) -> None:
    operation = BY_KEY[key]
    calls = [operation.call(layer_for(key), 2, form) for form in operation.formats]
    assert len({work(operation.raw, *call) for call in calls}) == 1
    for operands, _ in calls:
        for name, description in operands.items():
            array, last = make(description), make(calls[0][0][name])
            assert array.shape == stored_shape(description) and array.dtype == np.float32
            moved = array.transpose(0, 2, 3, 1) if description.get("channels_first") else array
            assert moved.tobytes() == last.tobytes()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.key)
def test_every_operation_has_an_ordinary_test_case(operation: Any) -> None:
    case = of_largest_case(operation)
    assert case is not None
    _, (operands, attributes) = case
    assert all(make(description).shape == stored_shape(description) for description in operands.values())
    assert work(operation.raw, operands, attributes).bytes > 0


@pytest.mark.parametrize("device", layers.BATCHES)
def test_the_plan_holds_every_operation_network_and_batch(device: str) -> None:
    full, quick = run.plan(False, device=device), run.plan(True, device=device)
    for items in (full, quick):
        assert {item.operation.key for item in items} == set(BY_KEY)
        assert {item.operation.key for item in items if item.compiled} == set(BY_KEY)
    assert {name for item in full for name in item.networks} == set(layers.NETWORKS)
    assert {item.batch for item in full} == {0, *layers.BATCHES[device]}
    assert {item.batch for item in (*quick, *full) if item.compiled} == {run.COMPILED_BATCH[device]}
    assert {item.tensor for item in full if item.operation.key == "depthwise" and item.batch} == {
        str(layer) for layer in layers.depthwise_layers()
    }
    assert len(quick) < 70


# The contestants


def agree(key: str, peer: Any, ours: Any) -> None:
    """The largest result. Fake quantization may round a few values to the next step, or see one at the range's end on
    its other side."""
    first, second = (
        np.asarray(next(r for r in (results if isinstance(results, tuple) else (results,)) if r is not None))
        for results in (peer, ours)
    )
    if key == "depthwise_filter":
        first = first if first.shape == second.shape else first.transpose(2, 3, 0, 1)
    else:
        shape = (2, *layer_for(key).size)
        first, second = (a if a.shape == shape else a.transpose(0, 2, 3, 1) for a in (first, second))
    assert first.shape == second.shape
    far = np.abs(first - second) > 1e-4 * np.abs(second) + 1e-4
    assert far.mean() <= (0.02 if BY_KEY[key].group in ("whole tensor", "per channel") else 0), key


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("key", BY_KEY)
def test_peers_compute_what_we_compute(key: str, framework: str) -> None:
    pytest.importorskip(framework)
    import contestants

    operation = BY_KEY[key]
    variants = {}
    for form in operation.formats:
        operands, attributes = operation.call(layer_for(key), 2, form)
        variants[form] = {"operands": operands, "attributes": attributes}
    mine = contestants.ExactQat(1, "cpu").calls(raw=operation.raw, variants=variants)
    request = {"key": key, "raw": operation.raw, "variants": variants, "copied": 0, "eager": True}
    if framework == "torch":
        import torch

        threads = torch.get_num_threads()
        peers = contestants.Torch(threads, "cpu").calls(**request, formats=[])
    else:
        peers = contestants.Jax(1, "cpu").calls(**request, formats=list(operation.formats))
    assert peers
    for name, call in peers.items():
        form = "NCHW" if "NCHW" in name and "NCHW" in operation.formats else operation.formats[0]
        agree(key, call(), mine[f"fresh {form}".strip()]())
    for form in operation.formats:
        fresh, out = (mine[f"{kind} {form}".strip()]() for kind in ("fresh", "preallocated"))
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (fresh, out)), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("key", [operation.key for operation in OPERATIONS if operation.group != "depthwise"])
def test_the_formulas_mean_the_same_to_pytorch(key: str) -> None:
    torch = pytest.importorskip("torch")
    import contestants
    import formulas

    operation = BY_KEY[key]
    for form in operation.formats:
        operands, attributes = operation.call(LAYER, 2, form)
        variants = {form: {"operands": operands, "attributes": attributes}}
        mine = contestants.ExactQat(1, "cpu").calls(raw=operation.raw, variants=variants)[f"fresh {form}".strip()]
        arguments = {name: torch.from_numpy(make(description)) for name, description in operands.items()}
        arguments |= {k: torch.tensor(v) if k in ("min", "max") else v for k, v in attributes.items()}
        agree(key, getattr(formulas, key)(torch, **arguments), mine())


def test_a_worker_answers_and_says_what_went_wrong() -> None:
    from worker import Worker

    worker = Worker("exactqat", 1)
    try:
        operands, attributes = BY_KEY["vars"].call(LAYER, 1, "")
        variants = {"": {"operands": operands, "attributes": attributes}}
        assert worker.hold(raw="FakeQuantWithMinMaxVars", variants=variants) == ["preallocated", "fresh"]
        assert 0 < worker.turn("fresh") < 1
        attributes["num_bits"] = 99
        with pytest.raises(RuntimeError, match="num_bits"):
            worker.hold(raw="FakeQuantWithMinMaxVars", variants=variants)
    finally:
        worker.close()


# Times


def test_contestants_take_turns_and_slow_ones_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ENOUGH_SECONDS", 0.01)
    order = []

    def slow() -> float:
        order.append("slow")
        timing.time.sleep(0.02)
        return 0.02

    def fast() -> float:
        order.append("fast")
        return float(len(order))

    groups = timing.race([({"fast": fast}, 0.0), ({"slow": slow}, 0.0)], turns=5)
    assert order[:6] == ["fast", "slow"] * 3 and order[6:] == ["fast", "fast"]
    assert groups[1]["slow"].samples == timing.FEWEST_TURNS
    assert groups[0]["fast"] == timing.summarize([1.0, 3.0, 5.0, 7.0, 8.0])


def test_statistics() -> None:
    statistics = timing.summarize([1.0, 2.0, 3.0, 4.0, 5.0])
    assert statistics == (3.0, 2.0, 4.0, 5) and statistics.spread == pytest.approx(1 / 3)
    assert timing.summarize([2.0]) == (2.0, 2.0, 2.0, 1)
    assert timing.geometric_mean([1, 4]) == pytest.approx(2)


def test_a_turn_is_a_median_of_warm_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    durations = iter([0.9e-3, 0.3e-3, 0.1e-3, 0.2e-3, 0.8e-3])

    def call() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    # The calls of the first millisecond do not count, those of the second do.
    assert timing.turn(call) == pytest.approx(0.2e-3)
    durations = iter([0.5])
    assert timing.turn(call) == pytest.approx(0.5)  # a long one does


def test_others_are_what_the_cores_did_and_we_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import others

    before = others._own([others.os.getpid()]), others._busy()
    end = timing.time.process_time() + 0.2
    while timing.time.process_time() < end:
        pass
    assert others._own([others.os.getpid()]) - before[0] > 0.1 and others._busy() - before[1] > 0.1

    now, busy, own = iter([0.0, 2.0]), iter([100.0, 103.03]), iter([10.0, 12.0])
    monkeypatch.setattr(others, "TICK", 100)
    monkeypatch.setattr(others.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(others, "_busy", lambda: next(busy))
    monkeypatch.setattr(others, "_own", lambda processes: next(own))
    assert others.Watch([]).share() == pytest.approx(0.5)


def test_a_disturbed_race_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.9, 0.5, 0.7, 0.8, 0.0])

    class Watch:
        def __init__(self, processes: Any) -> None:
            self.found = next(shares)

        def share(self) -> float:
            return self.found

    monkeypatch.setattr(run.others, "Watch", Watch)
    calls: list[float] = []

    def take() -> float:
        calls.append(float(len(calls) // timing.TURNS))
        return calls[-1]

    # The least disturbed of three is kept, and it is said how much it was.
    times, share = run.undisturbed([({"a": take}, 0.0)], [])
    assert share == 0.5 and times[0]["a"].median == 1
    times, share = run.undisturbed([({"a": take}, 0.0)], [])
    assert share == 0 and times[0]["a"].median == 4


# On a GPU


def test_operands_rotate_through_more_than_the_cache() -> None:
    assert card.sets(600_000_000, 50_000_000) == card.FEWEST_SETS == 2
    assert card.sets(30_000_000, 50_000_000) == 4  # 3 would be a little less than 100 MB
    assert card.sets(0, 50_000_000) == card.sets(4, 50_000_000) == card.MOST_SETS
    moved = {
        work(item.operation.raw, *call).bytes
        for item in run.plan(False, ["args", "depthwise_filter"], "cuda")
        if item.batch
        for call in item.calls.values()
    }
    assert all(bytes * card.sets(bytes, 50_000_000) >= 100_000_000 for bytes in moved)


def test_a_turn_on_a_gpu_is_the_mean_of_warm_calls() -> None:
    runs = []

    def seconds(run: Any, repeats: int) -> float:
        for _ in range(repeats):
            run()
        return repeats * (0.25e-3 if len(runs) > 1 else 1e-3)  # the first rotation is slow

    rotation = card.Rotation(lambda: runs.append(1), 5, "graph", seconds)
    assert rotation.turn() == pytest.approx(0.05e-3) and len(runs) == 1 + 5
    slow = card.Rotation(lambda: runs.append(1), 5, "graph", lambda run, repeats: 0.5 * repeats)
    assert slow.turn() == pytest.approx(0.1)
    endless = card.Rotation(lambda: None, 1, "graph", lambda run, repeats: 0.0)
    assert endless.turn() == 0


def test_calls_by_the_hosts_clock_are_waited_for_together() -> None:
    order: list[str] = []
    calls = [lambda name=name: order.append(name) or name for name in "ab"]
    rotation = card.by_host(calls, lambda results: order.append("".join(results)))
    assert order == ["a", "b", "ab"] and rotation.count == 2
    assert 0 < rotation.seconds(rotation.run, 2) < 1
    assert order[3:] == ["a", "b", "a", "b", "ab"]


@pytest.mark.parametrize("waits", [False, True])
def test_what_waits_for_the_device_is_called_and_the_rest_replayed(waits: bool) -> None:
    """With a device that says what is done to it: PyTorch's is not there."""
    done: list[str] = []

    class Device:
        mode = 0

        def get_sync_debug_mode(self) -> int:
            return self.mode

        def set_sync_debug_mode(self, mode: Any) -> None:
            self.mode = mode

        def current_stream(self) -> None:
            return None

        def stream(self, stream: Any) -> Any:
            return contextlib.nullcontext()

        def graph(self, graph: Any, capture_error_mode: str) -> Any:
            done.append("capture")
            return contextlib.nullcontext()

        def CUDAGraph(self) -> Any:
            return SimpleNamespace(replay=lambda: done.append("replay"))

    device = Device()

    def call() -> None:
        if waits and device.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        done.append("call")

    rotation = card.replayed(SimpleNamespace(cuda=device), [call, call])
    assert (rotation.clock, rotation.count, device.mode) == ("calls" if waits else "graph", 2, 0)
    # Compiled before it is watched, watched before it is captured.
    assert done == ["call"] * 2 + ([] if waits else ["call"] * 2 + ["capture"] + ["call"] * 2)
    done.clear()
    rotation()
    assert done == (["call"] * 2 if waits else ["replay"])


@pytest.mark.parametrize("key", BY_KEY)
def test_contestants_rotate_over_operands_of_their_own(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but on the CPU, by a name that is taken for a GPU's; cuDNN's operators must fail there."""
    torch = pytest.importorskip("torch")
    import contestants

    monkeypatch.setattr(card, "replayed", lambda torch, calls: card.called(torch, calls)._replace(run=run_all(calls)))
    operation = BY_KEY[key]
    variants = {}
    for form in operation.formats:
        operands, attributes = operation.call(layer_for(key), 2, form)
        variants[form] = {"operands": operands, "attributes": attributes}

    def run_all(calls: Any) -> Any:
        results = [call() for call in calls]
        return lambda: results

    request = {"key": key, "raw": operation.raw, "variants": variants, "copied": 1 << 24, "eager": True, "formats": []}
    ours = contestants.ExactQat(1, "cpu")
    expected = ours.calls(raw=operation.raw, variants=variants)
    peers = contestants.Torch(torch.get_num_threads(), "cpu")
    ours.device = peers.device = "cpu:0"
    rotations = peers.calls(**request, sets=3)
    assert "copy, memcpy" not in rotations and rotations.pop("copy, PyTorch").count == 3
    assert len(peers.left_out) == (2 if key.startswith("batch_norm") else 0), peers.left_out
    assert all(" cuDNN: " in text for text in peers.left_out)
    assert rotations
    for name, contestant in rotations.items():
        form = "NCHW" if "NCHW" in name and "NCHW" in operation.formats else operation.formats[0]
        results = contestant()
        assert len(results) == 3
        for result in results:
            agree(key, result, expected[f"fresh {form}".strip()]())
    for name, contestant in ours.calls(**request, sets=3).items():
        results = [result if isinstance(result, tuple) else (result,) for result in contestant()]
        assert len({result[0].data_ptr() for result in results}) == 3
        wanted = expected[name]()
        for result in results:
            for a, b in zip(result, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
                assert a.numpy().tobytes() == b.tobytes()


@pytest.mark.parametrize("key", ["dequantize_gradient", "batch_norm", "batch_norm_gradient", *list(BY_KEY)[-3:]])
def test_peers_make_all_their_tensors_on_the_device(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PyTorch's device without memory, whose tensors do not mix with the CPU's; it has no fake quantization."""
    pytest.importorskip("torch")
    import contestants

    results = []

    def replayed(torch: Any, calls: Any) -> card.Rotation:
        results.extend(call() for call in calls)
        return card.called(torch, calls)

    monkeypatch.setattr(card, "replayed", replayed)
    operation = BY_KEY[key]
    variants = {}
    for form in operation.formats:
        operands, attributes = operation.call(layer_for(key), 2, form)
        variants[form] = {"operands": operands, "attributes": attributes}
    peers = contestants.Torch(1, "cpu")
    peers.device = "meta"
    peers.calls(key, variants, 1 << 24, True, [], sets=2)
    assert all(" cuDNN: " in text for text in peers.left_out)
    for result in results:
        for tensor in result if isinstance(result, tuple) else (result,):
            assert tensor is None or tensor.is_meta


def test_only_a_gpu_may_answer_nan_to_what_is_refused() -> None:
    low, high = np.array(2, np.float32), np.array(1, np.float32)
    operands = {"input": np.ones(3, np.float32), "input_min": low, "input_max": high}
    call = "a range upside down", "QuantizeAndDequantizeV2", operands, {"range_given": True}
    nan = (np.full(3, np.nan, np.float32),)
    check.compare(*call, lambda *call: nan, [1], unseen=True)
    for answer, unseen in ((nan, False), ((np.zeros(3, np.float32),), True)):
        with pytest.raises(check.Red):
            check.compare(*call, lambda *call, answer=answer: answer, [1], unseen=unseen)


def test_a_gpu_is_checked_on_tensors_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "activations", lambda: [LAYER, layers.Activation((160, 160, 32))])
    assert check.run_on_card([BY_KEY["vars"]], check.kernels, 0, batch=3)[1] == 1 + 2

    def wrong_where_large(*call: Any) -> Any:
        result = np.array(check.kernels(*call))
        if result.size > check.LARGEST:
            result[-1, -1, -1, -1] += 1
        return result

    with pytest.raises(check.Red, match="3x160x160x32"):
        check.run_on_card([BY_KEY["vars"]], wrong_where_large, 0, batch=3)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        (["--device", "cuda"], f"--device must be one that is there, got cuda; PyTorch {torch.__version__} sees cpu"),
        (["--device", "rocm"], "--device: invalid choice: 'rocm'"),
        (["--device", "cuda", "--threads", "2"], "--threads is for --device cpu, got --device cuda"),
        (["--device", "cuda", "--huge"], "--huge is for --device cpu"),
        (["--device", "cuda", "--halves"], "--halves is for --device cpu"),
    ):
        with pytest.raises(SystemExit):
            run.main(arguments)
        assert message in capsys.readouterr().err


def test_with_a_gpu_the_cpus_parts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "find", lambda: card.Card("NVIDIA H200", 50 << 20))
    options = run.parse(["--device", "cuda"])
    assert (options.threads, options.overhead, options.memory, options.tensorflow) == ([1], False, False, None)
    assert run.machine(options.gpu) == "nvidia-h200"


# What is derived


def row(key: str, tensor: str, threads: int = 2, form: str = "", ours: float = 1e-3, **peers: float) -> summary.Row:
    record: summary.Row = {
        "operation": key,
        "tensor": tensor,
        "batch": 8,
        "threads": threads,
        "format": form,
        "networks": ["MobileNetV2"],
        "bytes": 20_000_000,
        "multiply_adds": 30_000_000 if key.startswith("depthwise") else 0,
        "tensor_bytes": 10_000_000,
        "copy": [0.5e-3, 0.5e-3, 0.5e-3, 7],
        "preallocated": [ours / 2, ours / 2, ours / 2, 7],
        "fresh": [ours, ours * 0.9, ours * 1.1, 7],
        "peers": {name: [seconds, seconds, seconds, 7] for name, seconds in peers.items()},
    }
    return summary.finish(record, peak=1e11)


def test_rates_and_ratios() -> None:
    peers = {"PyTorch NCHW": 4e-3, "PyTorch channels_last": 2e-3, "TensorFlow": 3e-3}
    record = row("depthwise", "a", form="NHWC", **peers)
    assert record["gigabytes_per_second"] == pytest.approx(40)
    assert record["giga_multiply_adds_per_second"] == pytest.approx(60)
    assert record["bound"] == "copy" and record["fraction"] == pytest.approx(1)
    assert summary.ratio(record) == pytest.approx(2)  # the best peer, in its best layout
    assert summary.ratio(record, ("TensorFlow",)) == pytest.approx(3)
    assert summary.ratio(record, ("PyTorch",), "preallocated") == pytest.approx(4)
    assert summary.ratio(record, ("jax.jit",)) is None
    slower = summary.finish(record, peak=3e10)
    assert slower["bound"] == "multiply-adds" and slower["fraction"] == pytest.approx(2)


def test_goals_are_met_or_missed_and_nothing_is_hidden() -> None:
    fast = {"TensorFlow": 50e-3, "PyTorch": 20e-3, "torch.compile": 3e-3}
    rows = [row("per_channel", "a", **fast), row("per_channel", "b", **fast)]
    rows += [
        row("batch_norm", "a", form="NHWC", TensorFlow=9e-3),
        row("batch_norm", "b", form="NHWC", TensorFlow=0.5e-3),
    ]
    overhead = {"exactqat, NumPy|forward": [1e-6, 1.5e-6, 2e-6], "exactqat, PyTorch|forward": [1e-5, 2e-5, 3e-5]}
    goals = {goal.title: goal for goal in summary.goals(rows, overhead)}
    assert goals["fake quant, per channel / TensorFlow"].met is True
    assert goals["fake quant, per channel / best compiler"].measured == pytest.approx(3)
    elementwise = next(goal for title, goal in goals.items() if title.startswith("elementwise"))
    assert elementwise.met is True and elementwise.worst == pytest.approx(100)
    norm = goals["batch norm, training, NHWC / best peer, no layer below 1"]
    assert norm.measured == pytest.approx(4.5**0.5) and norm.worst == 0.5 and norm.where == "8xb"
    assert norm.met is False  # for the one layer, though the mean is above
    assert goals["depthwise, NHWC / jax.jit"].met is None
    assert goals["overhead of a call, exactqat, NumPy, forward: at most"].met is True
    assert goals["overhead of a call, exactqat, PyTorch, forward: at most"].met is False


def on_card(record: summary.Row, **clocks: str) -> summary.Row:
    """The row as a GPU gives it."""
    names = {"copy, PyTorch", "preallocated", *record["peers"]}
    clocks = dict.fromkeys(names, "graph") | {"fresh": "calls"} | clocks
    return summary.finish(record | {"clocks": clocks, "sets": 2, "threads": 1}, peak=1e12)


def test_peers_are_compared_with_ours_by_their_own_clock() -> None:
    # Ours takes 1 ms called and 0.5 ms replayed.
    record = on_card(row("vars", "a", PyTorch=2e-3, **{"torch.compile": 2e-3}), **{"PyTorch": "calls"})
    assert record["ratios"]["PyTorch"] == {"fresh": pytest.approx(2), "preallocated": pytest.approx(2)}
    assert record["ratios"]["torch.compile"] == {"fresh": pytest.approx(4), "preallocated": pytest.approx(4)}


def gpu_rows() -> list[summary.Row]:
    layouts = {"PyTorch NCHW": 4e-3, "PyTorch channels_last": 2e-3, "jax.jit NHWC": 0.1e-3}
    rows = [
        on_card(row("args", "a")) | {"tensor_bytes": 70_000_000, "fraction": 0.9},
        on_card(row("vars", "b")) | {"tensor_bytes": 70_000_000, "fraction": 0.8},
        on_card(row("vars", "small")) | {"fraction": 0.1},
        on_card(row("dequantize_from_data", "a")) | {"tensor_bytes": 70_000_000, "fraction": 0.6},
        on_card(row("vars_gradient", "b")) | {"tensor_bytes": 70_000_000, "fraction": 0.86},
        on_card(row("depthwise", "a", form="NHWC", **layouts)),
        on_card(row("depthwise_input", "a", form="NHWC", **{"PyTorch NCHW": 0.4e-3})),
    ]
    # Replayed ours takes 0.5 and 1.5 ms; the best of the two together is not the best of each.
    forward = {"PyTorch NCHW": 1e-3, "PyTorch channels_last": 3e-3, "torch.compile NHWC": 0.1e-3}
    gradient = {"PyTorch NCHW": 4e-3, "PyTorch channels_last": 2.2e-3}
    rows.append(on_card(row("batch_norm", "a", form="NHWC", **forward)))
    rows.append(on_card(row("batch_norm_gradient", "a", form="NHWC", ours=3e-3, **gradient)))
    return rows


STEP = {
    "network": "mobilenet_v2",
    "images": [128, 3, 160, 160],
    "steps": [
        {"contestant": "torch float", "ms": 10.0, "spread": 0.01},
        {"contestant": "exactqat float", "ms": 12.0, "spread": 0.01},
        {"contestant": "exactqat QAT, ema", "ms": 11.0, "spread": 0.01},
        {"contestant": "exactqat QAT, learned", "ms": 12.0, "spread": 0.01},
    ],
}


def test_goals_on_a_gpu() -> None:
    goals = {goal.title: goal for goal in summary.goals_on_card(gpu_rows(), STEP)}
    elementwise = goals["elementwise, range given, each tensor from 64 MB: of copy bandwidth"]
    assert elementwise.met is False and elementwise.worst == pytest.approx(80) and elementwise.where == "8xb"
    assert goals["gradients, range given, each tensor from 64 MB: of copy bandwidth"].met is True
    norm = goals["batch norm, training, forward and gradient, NHWC / best peer"]
    assert norm.measured == pytest.approx(5 / 2) and norm.met is True
    assert goals["batch norm, training, forward and gradient, NCHW / best peer"].met is None
    depthwise = goals["depthwise, NHWC / best of PyTorch's layouts, no layer below 1"]
    assert depthwise.measured == pytest.approx(4) and depthwise.met is True
    assert goals["depthwise, gradient of input, NHWC / best of PyTorch's layouts, no layer below 1"].met is False
    steps = [goals[f"QAT step of MobileNetV2, {r} ranges / the faster float step: at most"] for r in ("ema", "learned")]
    assert [(goal.measured, goal.met) for goal in steps] == [(pytest.approx(110), True), (pytest.approx(120), False)]
    assert all(goal.met is None for goal in summary.goals_on_card([], None))


# Refusal


def test_the_check_passes_and_counts() -> None:
    assert check.run([1], [BY_KEY["vars"]], seconds=0)[0] > 50


@pytest.mark.parametrize("wrong", ["one bit", "an answer to a bad call"])
def test_nothing_is_timed_when_a_result_is_wrong(
    wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(raw: str, operands: dict[str, np.ndarray], attributes: dict[str, Any]) -> Any:
        result = np.array(check.kernels(raw, operands, attributes))
        if wrong == "one bit" and result.size > 100:
            result.reshape(-1)[77] = np.nextafter(result.reshape(-1)[77], np.float32(np.inf))
        if wrong == "an answer to a bad call" and result.size > 100:
            raise ValueError
        return result

    monkeypatch.setattr(run, "collect", lambda *arguments: pytest.fail("something was timed"))
    assert run.main(["--only", "args", "--threads", "1"], broken) == 1
    shown = capsys.readouterr().out
    assert "Not timed" in shown and "FakeQuantWithMinMaxArgs" in shown and " ms" not in shown


# The report


def results() -> dict[str, Any]:
    peers = {"TensorFlow": 4e-3, "PyTorch channels_last": 2e-3, "jax.jit NHWC": 50e-3}
    rows = [row("depthwise", tensor, threads, "NHWC", **peers) for tensor in ("a", "b") for threads in (1, 2)]
    rows.append(row("per_channel", "a", TensorFlow=16e-3) | {"failures": {"jax": "jax: no"}})
    return {
        "machine": "a-machine",
        "versions": {"exactqat": "0", "torch": "1.2"},
        "settings": {"compilers": "a spread"},
        "peak_multiply_adds": {"1": 1e11, "2": 1e11},
        "rows": rows,
        "overhead": {"exactqat, NumPy|forward": [1e-6, 2e-6, 3e-6]},
        "memory": {"network": "n", "images": "1", "how": "So.", "step_mib": {"float": 100.0, "QAT": 150.0}},
    }


def test_the_tables_fit_120_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    console = report.console()
    content = results()
    report.print_rows(console, BY_KEY["depthwise"], 2, [r for r in content["rows"] if r["operation"] == "depthwise"])
    report.print_rows(console, BY_KEY["per_channel"], 2, content["rows"][-1:])
    report.print_summary(console, content)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 120
    for text in ("8xa", "2.0/4.0", "50/100", "16 (16)", "met", "missed", "jax: no", "QAT 150 MiB (1.50)"):
        assert text in shown, text


def test_the_tables_of_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    console = report.console()
    rows = gpu_rows()
    peers = ("channels_last", "NCHW", "channels_last cuDNN", "NCHW cuDNN")
    every = {f"PyTorch {peer}": 2e-3 for peer in peers} | {"torch.compile NHWC": 2e-3, "jax.jit NHWC": 2e-3}
    rows.append(on_card(row("batch_norm", "112x112x64", form="NHWC", **every), **{"jax.jit NHWC": "host"}))
    content = results() | {"device": "cuda", "rows": rows, "overhead": {}, "step": STEP, "machine": "nvidia-h200"}
    del content["memory"]
    report.print_rows(console, BY_KEY["batch_norm"], 1, rows[-1:])
    report.print_summary(console, content)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 120
    for text in ("on a GPU", "calls", "dnn NCHW", "2.0*", "by the same clock", "QAT step of MobileNetV2", "128x3x160"):
        assert text in shown, text
    assert report.markdown(content)  # as for every file of saved results
    pytest.importorskip("matplotlib")
    import roofline

    roofline.draw(content, tmp_path / "m.png")
    assert (tmp_path / "m.png").stat().st_size > 10_000


def test_the_page_is_written_from_the_rows(tmp_path: Path) -> None:
    page, saved = tmp_path / "performance.md", tmp_path / "m.json"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    saved_results.write(saved, results())
    report.write_page(page, saved)
    written = page.read_text()
    assert written.startswith("before\n") and written.endswith("\nafter\n") and "old" not in written
    assert "| depthwise | NHWC | 100% | 2.0 (2.0) | 4.0 (4.0) | 2.0 (2.0) | – | 50 (50) |" in written
    report.write_page(page, saved)
    assert page.read_text() == written
    with pytest.raises(ValueError, match="must contain"):
        report.with_table("no markers", "")


def test_saved_results_are_short_and_whole(tmp_path: Path) -> None:
    content = results()
    content["rows"][0] |= {"base": {"preallocated": [3e-3, 2e-3, 4e-3, 7], "fresh": [5e-3] * 3 + [7]}, "disturbed": 0.3}
    content["rows"].append(on_card(row("vars", "c", PyTorch=0.2e-3)))
    saved_results.write(tmp_path / "m.json", content)
    read = saved_results.read(tmp_path / "m.json")
    assert {name: read[name] for name in content if name != "rows"} == {k: v for k, v in content.items() if k != "rows"}

    def name(row: summary.Row) -> str:
        return str([row[part] for part in ("operation", "tensor", "batch", "threads", "format")])

    def middle(value: Any) -> Any:
        """Medians alone, to four digits."""
        if isinstance(value, list) and value and isinstance(value[0], float):
            value = value[0]
        if isinstance(value, dict):
            return {key: middle(entry) for key, entry in value.items()}
        return float(f"{value:.3g}") if isinstance(value, float) else value

    before, after = ({name(row): middle(row) for row in rows} for rows in (content["rows"], read["rows"]))
    assert len(before) == len(content["rows"]) and after == before
    base = next(row["base"]["preallocated"] for row in read["rows"] if "base" in row)
    assert base == pytest.approx([3e-3, 2e-3, 4e-3], rel=0.01)
    for path in run.RESULTS.glob("*.json"):
        assert path.stat().st_size < 400_000, path


def test_the_page_holds_the_table_of_saved_results_or_none() -> None:
    paths = [path for path in run.RESULTS.glob("*.json") if not path.stem.endswith(("-step", "-engine"))]
    text = (ROOT / "docs" / "performance.md").read_text()
    inside = text.partition(report.BEGIN)[2].partition(report.END)[0].strip()
    tables = [report.markdown(saved_results.read(path)) for path in paths]
    assert report.END in text and (inside in tables or (not tables and not inside))


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import roofline

    roofline.draw(results(), tmp_path / "m.png")
    assert (tmp_path / "m.png").stat().st_size > 10_000


# Beside the rows


def test_overhead_is_a_median_between_quartiles() -> None:
    import overhead

    times = overhead.measure({"nothing": lambda: None, "something": lambda: sum(range(2000))}, rounds=3)
    for low, median, high in times.values():
        assert 0 < low <= median <= high < 1e-3
    assert times["nothing"][1] < times["something"][1]


def test_a_huge_tensor_in_small() -> None:
    pytest.importorskip("torch")
    import huge

    table = huge.measure(1, 4 * huge.PIECE)
    assert len(table["rows"]) == 3 and all(r["gigabytes_per_second"] > 0 for r in table["rows"].values())
    with pytest.raises(MemoryError, match="needs"):
        huge.measure(1, 2**50)


def test_tensors_of_16_bits_in_small() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    import halves

    rows = halves.measure(1, 1, 2)["rows"]
    assert {(row["operation"], row["format"], row["dtype"]) for row in rows} == {
        (operation.key, data_format, dtype)
        for operation in OPERATIONS
        for data_format in operation.formats
        for dtype in halves.DTYPES
    }
    moved = {row["operation"]: row["bytes"] for row in rows if row["dtype"] == "bfloat16"}
    image = 2 * 2 * 56 * 56 * 64
    assert moved["args"] == 2 * image and 0 < moved["batch_norm_gradient"] - 3 * image < 4096
    assert all(row["of_copy"] > 0 for row in rows)


@pytest.mark.slow
def test_a_step_takes_memory() -> None:
    pytest.importorskip("torch")
    import memory

    done = subprocess.run(
        [sys.executable, memory.__file__, "mobilenet_v2", "QAT, ema ranges"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert 100 < json.loads(done.stdout) < 2000


def test_another_commit_must_exist() -> None:
    import base

    with base.environment(None) as python:
        assert python is None
    with pytest.raises(ValueError, match="--base"), base.environment("no-such-commit"):
        pass


def test_the_engine_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    import engine

    page, saved = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(engine.PAGE.read_text())
    monkeypatch.setattr(engine, "PAGE", page)
    with pytest.raises(SystemExit, match="run bench/engine.py --save first"):
        engine.write_page(saved)
    times = engine.rounded({"images": 8, "threads": 2, "litert": 10.123456, "micro": [5.061728, 0.500001]})
    rows = [{"network": "vit", "dtype": dtype, "times": [times]} for dtype in ("int8", "int16")]
    settings = {"turns": 15, "geometric_means": {"int8": 0.5, "int16": 0.5}}
    saved.write_text(json.dumps({"versions": {"ai-edge-litert": "2.1"}, "settings": settings, "results": rows}))
    for _ in range(2):  # the second one replaces the first
        engine.write_page(saved)
    text = page.read_text()
    assert text.count("| network | images | threads | LiteRT, ms | micro |\n") == 1
    assert "| vit | 8 | 2 | 10.12 | 0.50 |\n| vit, int16 | 8 | 2 | 10.12 | 0.50 |\n" in text
