# SPDX-License-Identifier: Apache-2.0
"""Streams compute, frame by frame, the codes of the whole sequence: in the simulation and in the runtimes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

import torch
from test_state import sequence
from torch import nn
from torch.nn import functional as F

from exactqat import deploy, qat
from exactqat.deploy import (
    PROFILES,
    Builder,
    Graph,
    Quantization,
    Refusal,
    Stream,
    per_tensor,
    profiles_here,
    read_tflite,
    simulate,
    verify,
    write_tflite,
)
from exactqat.deploy.runtimes import open_runtime

GRID, WIDE = per_tensor(0.05, -7), per_tensor(0.0005, 0, "int16")


class Drawn:
    """A builder whose weights are drawn."""

    def __init__(self, shape: tuple[int, ...], seed: int = 0, grid: Quantization = GRID) -> None:
        self.rng, self.builder, self.grid = np.random.default_rng(seed), Builder(), grid
        first = per_tensor(0.04, 5) if grid is GRID else grid
        self.last = self.builder.input("x", shape, first)

    def shape(self) -> tuple[int, ...]:
        return self.builder.tensor(self.last).shape

    def conv(self, name: str, channels: int, window: tuple[int, int], **attributes: Any) -> str:
        taps = (channels, *window, self.shape()[3])
        return self._weighted("conv_2d", name, taps, channels, attributes)

    def depthwise(self, name: str, window: tuple[int, int], **attributes: Any) -> str:
        channels = self.shape()[3]
        return self._weighted("depthwise_conv_2d", name, (1, *window, channels), channels, attributes)

    def dense(self, name: str, units: int) -> str:
        return self._weighted("fully_connected", name, (units, self.shape()[-1]), units, {})

    def _weighted(
        self, method: str, name: str, taps: tuple[int, ...], channels: int, attributes: dict[str, Any]
    ) -> str:
        codes = self.rng.integers(-127, 128, taps).astype(np.int8)
        scale = np.array([0.9 / np.sqrt(np.prod(taps) / channels) / 73], np.float32)
        bias = self.rng.integers(-300, 300, channels).astype(np.int32 if self.grid is GRID else np.int64)
        make = getattr(self.builder, method)
        self.last = make(self.last, codes, scale, bias, self.grid, name=name, **attributes)
        return self.last

    def pad(self, name: str, before: int, after: int = 0) -> str:
        self.last = self.builder.pad(self.last, ((0, 0), (before, after), (0, 0), (0, 0)), name=name)
        return self.last

    def slice(self, name: str, begin: int, end: int) -> str:
        rank = len(self.shape())
        ends = (None, end, *self.shape()[2:])
        self.last = self.builder.strided_slice(
            self.last, name=name, begin=(0, begin, *[0] * (rank - 2)), end=ends, steps=(1,) * rank
        )
        return self.last

    def graph(self, *outputs: str) -> Graph:
        return self.builder.graph(outputs or [self.last])


def temporal(channels: int = 8, grid: Quantization = GRID) -> Graph:
    """Convolutions with dilations, padded in front, and residual additions."""
    drawn = Drawn((1, 24, 1, 6), grid=grid)
    drawn.conv("first", channels, (1, 1))
    for number in range(3):
        dilation, before = 2**number, drawn.last
        drawn.pad(f"pad_{number}", 2 * dilation)
        drawn.conv(f"conv_{number}", channels, (3, 1), dilations=(dilation, 1), padding="VALID", activation="RELU")
        drawn.last = drawn.builder.add(before, drawn.last, grid, name=f"sum_{number}")
    return drawn.graph()


def wide() -> Graph:
    """The same in int16, whose additions take 16 values at a time."""
    return temporal(16, WIDE)


def chomped() -> Graph:
    """Padded at both ends, and cut off at the last one."""
    drawn = Drawn((1, 20, 1, 5), 1)
    for number, dilation in enumerate((1, 3)):
        padding = 2 * dilation
        drawn.pad(f"pad_{number}", padding, padding)
        drawn.conv(f"conv_{number}", 7, (3, 1), dilations=(dilation, 1), padding="VALID", activation="RELU")
        drawn.slice(f"chomp_{number}", 0, 20)
    return drawn.graph()


def wake_word() -> Graph:
    """Strides over time and frequency, a mean over the window, a layer."""
    drawn = Drawn((1, 33, 10, 1), 2)
    drawn.builder.pad("x", ((0, 0), (0, 0), (1, 2), (0, 0)), name="sides")
    drawn.last = "sides"
    drawn.conv("first", 12, (5, 4), strides=(2, 2), padding="VALID", activation="RELU")
    for number in range(2):
        drawn.depthwise(f"depthwise_{number}", (3, 1), padding="VALID", activation="RELU")
        drawn.conv(f"pointwise_{number}", 12, (1, 1), activation="RELU")
    drawn.last = drawn.builder.mean(drawn.last, GRID, name="mean")
    drawn.dense("scores", 3)
    return drawn.graph()


def flattened() -> Graph:
    """A stack whose frames are flattened, with a pool in front and its last frame as an output of its own."""
    drawn = Drawn((1, 18, 4, 2), 3)
    drawn.last = drawn.builder.max_pool_2d(drawn.last, (2, 2), (2, 2), name="pool")
    features = drawn.conv("conv", 4, (3, 2), padding="VALID")
    last = drawn.slice("last", drawn.shape()[1] - 1, drawn.shape()[1])
    drawn.last = drawn.builder.reshape(features, (1, int(np.prod(drawn.builder.tensor(features).shape))), name="flat")
    drawn.dense("scores", 4)
    scores = drawn.last
    drawn.last = drawn.builder.reshape(last, (1, int(np.prod(drawn.builder.tensor(last).shape))), name="row")
    drawn.dense("tail", 2)
    return drawn.graph(scores, drawn.last)


def separable() -> Graph:
    """A convolution that begins late, and after it a causal stack: padding where the stream has computed already."""
    drawn = Drawn((1, 21, 3, 2), 4)
    drawn.conv("late", 6, (4, 2), padding="VALID", strides=(1, 1))
    for number in range(2):
        before = drawn.last
        drawn.pad(f"pad_{number}", 2)
        drawn.depthwise(f"depthwise_{number}", (3, 1), padding="VALID")
        drawn.conv(f"pointwise_{number}", 6, (1, 1), activation="RELU")
        drawn.last = drawn.builder.add(drawn.last, before, GRID, name=f"sum_{number}")
    drawn.last = drawn.builder.softmax(drawn.last, name="shares")
    return drawn.graph()


NETWORKS: dict[str, Callable[[], Graph]] = {
    make.__name__: make for make in (temporal, wide, chomped, wake_word, flattened, separable)
}
# Without anything padded in front, every window of a stream is what the network computes from it alone.
UNPADDED = ("wake_word", "flattened")


def codes_of(graph: Graph, streams: int = 2, more: int = 0) -> np.ndarray:
    (_, size, *rest), dtype = graph.tensors["x"].shape, graph.tensors["x"].dtype
    ends = np.iinfo(dtype)
    return np.random.default_rng(9).integers(ends.min, ends.max + 1, (streams, size + more, *rest)).astype(dtype)


def steps_of(stream: Stream, codes: np.ndarray) -> list[np.ndarray]:
    return np.split(codes, codes.shape[1] // stream.frames, 1)


def streamed(stream: Stream, codes: np.ndarray) -> dict[str, list[np.ndarray]]:
    stream.reset()
    results: dict[str, list[np.ndarray]] = {name: [] for name in stream.results}
    for part in steps_of(stream, codes):
        for name, array in stream.step(part).items():
            results[name].append(array)
    return results


def compared(graph: Graph, stream: Stream, codes: np.ndarray, profile: str) -> int:
    """Counts integers of the whole sequence that the stream has; all must be equal."""
    results = streamed(stream, codes)
    whole = simulate(graph, codes[:, : graph.tensors["x"].shape[1]], profile)
    count = 0
    for name, result in stream.results.items():
        if result.axis is None:
            expected, ours = whole[name], results[name][0]
        else:
            expected, ours = whole[name], np.concatenate(results[name], result.axis)
            size = expected.shape[result.axis]
            assert ours.shape[result.axis] >= size
            ours = ours.take(np.arange(size), result.axis)
        assert ours.size
        np.testing.assert_array_equal(ours, expected, err_msg=name)
        count += ours.size
    return count


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", NETWORKS)
def test_frames_are_those_of_the_whole_sequence(name: str, profile: str) -> None:
    graph = NETWORKS[name]()
    fewest = deploy.stream(graph).frames
    for frames in (fewest, 2 * fewest, 3 * fewest):
        stream = deploy.stream(graph, frames=frames, device=profile)
        size = graph.tensors["x"].shape[1]
        # What a step takes beyond the sequence's end, no frame of the sequence knows.
        codes = codes_of(graph, more=-size % frames)
        if frames == fewest or name not in UNPADDED:
            assert compared(graph, stream, codes, profile)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", UNPADDED)
def test_every_window_is_what_the_network_computes_from_it(name: str, profile: str) -> None:
    graph = NETWORKS[name]()
    stream = deploy.stream(graph, device=profile)
    size, frames = graph.tensors["x"].shape[1], stream.frames
    codes = codes_of(graph, more=3 * frames + -size % frames)
    results = streamed(stream, codes)
    for output in graph.outputs:
        first = frames * (stream.results[output].first + 1)
        ends = range(first, codes.shape[1] + 1, frames)
        assert len(results[output]) == len(ends) >= 3
        for end, ours in zip(ends, results[output], strict=True):
            window = codes[:, end - first : end - first + size]
            np.testing.assert_array_equal(ours, simulate(graph, window, profile)[output])


@pytest.mark.parametrize("profile", profiles_here())
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_with_variables_keeps_its_states_itself(name: str, profile: str, tmp_path: Path) -> None:
    stream = deploy.stream(NETWORKS[name](), device=profile)
    graph = stream.with_variables()
    assert graph.inputs == ("x",) and len(graph.variables) >= len(stream.states) > 0
    path = write_tflite(graph, tmp_path / "step.tflite")
    size, frames = NETWORKS[name]().tensors["x"].shape[1], stream.frames
    parts = steps_of(stream, codes_of(NETWORKS[name](), 1, 2 * frames + -size % frames))
    runtime = open_runtime(path.read_bytes(), graph.inputs, graph.outputs, profile)
    for part in parts:
        results = stream.step(part)
        kept = runtime.run({"x": part})
        for output, result in stream.results.items():
            ours = results.get(output)
            if ours is not None and ours.size:
                theirs = kept[result.tensor]
                at = -1 if result.axis is None else result.axis
                begin = 0 if result.axis is None else theirs.shape[at] - ours.shape[at]
                cut = theirs if result.axis is None else theirs.take(np.arange(begin, theirs.shape[at]), at)
                np.testing.assert_array_equal(cut, ours)
    assert verify(read_tflite(path), path, np.concatenate(parts), profile).differing == 0


@pytest.mark.parametrize("profile", profiles_here())
@pytest.mark.parametrize("name", NETWORKS)
def test_the_file_of_a_step_runs_frame_by_frame(name: str, profile: str, tmp_path: Path) -> None:
    graph = NETWORKS[name]()
    stream = deploy.stream(graph, device=profile)
    path = write_tflite(stream.graph, tmp_path / "stream.tflite")
    runtime = open_runtime(path.read_bytes(), stream.graph.inputs, stream.graph.outputs, profile)
    codes = codes_of(graph, 1)
    codes = codes[:, : codes.shape[1] // stream.frames * stream.frames]
    state = {variable.input: variable.codes for variable in stream.states}
    calls: list[dict[str, np.ndarray]] = []
    for part in steps_of(stream, codes):
        calls.append({"x": part, **state})
        results = runtime.run(calls[-1])
        ours = stream.step(part)
        for name_of_output, result in stream.results.items():
            if name_of_output in ours and result.axis is None:
                np.testing.assert_array_equal(results[result.tensor], ours[name_of_output])
        state = {variable.input: results[variable.output] for variable in stream.states}
        np.testing.assert_equal(state, {name: stream.inputs(part)[name] for name in state})
    together = {key: np.concatenate([call[key] for call in calls]) for key in calls[0]}
    report = verify(stream.graph, path, together, profile)
    assert report.values > 0 and report.differing == 0


def test_a_file_is_streamed_as_its_graph(tmp_path: Path) -> None:
    graph = temporal()
    read = read_tflite(write_tflite(graph, tmp_path / "whole.tflite"))
    codes = codes_of(graph)
    (ours,), (theirs,) = (streamed(deploy.stream(network, frames=4), codes).values() for network in (graph, read))
    np.testing.assert_array_equal(np.concatenate(ours, 1), np.concatenate(theirs, 1))


def test_a_stream_may_be_longer_than_the_sequence() -> None:
    graph = temporal()
    stream = deploy.stream(graph, frames=4)
    codes = codes_of(graph, more=24)
    frames = np.concatenate(streamed(stream, codes)["sum_2"], 1)
    assert frames.shape[1] == 48
    # What is far enough from the beginning does not know of it: 1 + 2 * (1 + 2 + 4) frames are looked at.
    later = np.concatenate(streamed(stream, codes[:, 20:])["sum_2"], 1)
    np.testing.assert_array_equal(frames[:, 34:], later[:, 14:])


@pytest.mark.parametrize("profile", PROFILES)
def test_an_lstm_of_a_file_keeps_its_state(profile: str) -> None:
    graph = sequence(9)
    for frames in (1, 3):
        assert compared(graph, deploy.stream(graph, frames=frames, device=profile), codes_of(graph), profile) == 54


class Chomped(nn.Module):
    """A block of a temporal network: padded at both ends, and cut off."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.padding = 2 * dilation
        self.conv = nn.Conv1d(channels, 8, 3, padding=self.padding, dilation=dilation)
        self.skip = nn.Conv1d(channels, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(x)[:, :, : -self.padding] + self.skip(x))


class Causal(nn.Module):
    """Depthwise and pointwise, padded in front, with a residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(6, 8, 3), nn.Conv1d(8, 8, 3, groups=8, dilation=2)
        self.third = nn.Conv1d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(F.pad(x, (2, 0))))
        return self.third(F.relu(self.second(F.pad(x, (4, 0)))) + x)


class Window(nn.Module):
    """Strides, the mean of a window, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(6, 8, 4, 2), nn.ReLU(), nn.Conv1d(8, 8, 3, groups=8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean(2))


class Last(nn.Module):
    """What the last frame says."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(Chomped(6, 1), Chomped(8, 2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x)[:, :, -1])


class Recurrent(nn.Module):
    """A recurrent layer, and a layer of all frames."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x.transpose(1, 2))[0])


def stack() -> nn.Module:
    return nn.Sequential(Chomped(6, 1), Chomped(8, 3))


def trained(make: Callable[[], nn.Module], x: torch.Tensor) -> Any:
    """A model after a few steps, frozen."""
    model = qat.prepare(make(), x[:1])
    qat.calibrate(model, [x])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        (model.train()(x) ** 2).mean().backward()
        optimizer.step()
    qat.freeze(model)
    return model.eval()


def streamed_once(stream: Stream, codes: np.ndarray) -> dict[str, np.ndarray]:
    """All frames of [streams, channels, time], and the first result of all of them."""
    parts = [stream.step(part) for part in np.split(codes, codes.shape[2] // stream.frames, 2)]
    results = {}
    for name, result in stream.results.items():
        arrays = [part[name] for part in parts if name in part]
        results[name] = arrays[0] if result.axis is None else np.concatenate(arrays, result.axis)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("make", [stack, Causal, Window, Last])
def test_a_trained_network_of_pytorch_is_streamed(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6, 20)
    model = trained(make, x)
    graph = deploy.lower(model)
    codes = deploy.input_codes(graph, x.numpy())
    (frames,) = codes.values()
    read = read_tflite(write_tflite(graph, tmp_path / "whole.tflite"))
    for profile in PROFILES:
        whole = simulate(graph, codes, profile)
        for network in (graph, read):
            np.testing.assert_equal(streamed_once(deploy.stream(network, 2, device=profile), frames), whole)
    # What the trained model itself computes from the whole sequence.
    stream = deploy.stream(graph, 2, device=graph.trained_for)
    (name,) = stream.results
    grid, port = graph.tensors[name].quantization, graph.signature.outputs[0]
    ours = port.to_user(deploy.dequantize(streamed_once(stream, frames)[name], grid))
    np.testing.assert_array_equal(ours, model(x).detach().numpy())
    for profile in profiles_here():
        stream = deploy.stream(graph, 2, frames=4, device=profile)
        path = write_tflite(stream.graph, tmp_path / "step.tflite")
        calls = []
        for part in np.split(frames[:1], 5, 2):
            calls.append(stream.inputs(part))
            stream.step(part)
        report = verify(
            stream.graph, path, {key: np.concatenate([call[key] for call in calls]) for key in calls[0]}, profile
        )
        assert report.values > 0 and report.differing == 0


@pytest.mark.slow
def test_an_unrolled_recurrent_layer_is_refused() -> None:
    model = trained(Recurrent, torch.randn(2, 6, 6))
    with pytest.raises(Refusal, match="as a recurrent layer does that is unrolled over its length; make a network of"):
        deploy.stream(deploy.lower(model), 2)


def both_ends() -> Graph:
    drawn = Drawn((1, 16, 1, 4))
    drawn.conv("conv", 4, (3, 1))
    return drawn.graph()


def excited() -> Graph:
    drawn = Drawn((1, 16, 1, 4))
    share = drawn.builder.mean("x", GRID, (1, 2), True, name="mean")
    drawn.builder.mul("x", share, GRID, name="scaled")
    return drawn.builder.graph(["scaled"])


def attention() -> Graph:
    drawn = Drawn((1, 16, 4))
    drawn.builder.batch_matmul("x", "x", GRID, name="scores", adj_y=True)
    return drawn.builder.graph(["scores"])


def weighed() -> Graph:
    drawn = Drawn((1, 4, 16))
    drawn.last = drawn.builder.softmax("x", name="shares")
    return drawn.graph()


def positions() -> Graph:
    drawn = Drawn((1, 16, 4))
    codes = np.random.default_rng(0).integers(-128, 128, (1, 16, 4)).astype(np.int8)
    drawn.builder.constant("places", codes, GRID)
    drawn.builder.add("x", "places", GRID, name="placed")
    return drawn.builder.graph(["placed"])


@pytest.mark.parametrize(
    ("make", "axis", "words"),
    [
        (both_ends, 1, "output 'conv': the network is not causal: 1 of 16 frames depend on the padding after the last"),
        (excited, 1, "MUL that makes 'scaled': every frame depends on 'mean', which is made of all frames, later ones"),
        (attention, 1, "BATCH_MATMUL that makes 'scores': it multiplies frames with frames, as attention does"),
        (temporal, 3, "CONV_2D that makes 'first': it sums over time as over channels; is time another axis"),
        (weighed, 2, "SOFTMAX that makes 'shares': it weighs frames against each other along time"),
        (
            lambda: temporal(8, WIDE),
            1,
            "ADD that makes 'sum_0': LiteRT adds 16 values of int16 at a time and rounds what",
        ),
        (positions, 1, "ADD that makes 'placed': the constant 'places' has other values for every frame"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_no_stream_computes_is_refused(make: Callable[[], Graph], axis: int, words: str) -> None:
    with pytest.raises(Refusal, match=re.escape(words)):
        deploy.stream(make(), axis=axis)


def test_arguments_that_do_not_fit_are_refused() -> None:
    graph = wake_word()
    with pytest.raises(ValueError, match="frames must be a multiple of 2, as the network's strides make it, got 3"):
        deploy.stream(graph, frames=3)
    with pytest.raises(ValueError, match=r"axis must be in 1\.\.3 for input 'x', got 4"):
        deploy.stream(graph, axis=4)
    with pytest.raises(ValueError, match=r"axis must name the inputs \['x'\], got \['y'\]"):
        deploy.stream(graph, axis={"y": 1})
    stream = deploy.stream(graph)
    stream.step(codes_of(graph)[:, :2])
    with pytest.raises(ValueError, match="x must hold 2 streams as before, got 1"):
        stream.step(codes_of(graph, 1)[:, :2])
    stream.reset()
    stream.step(codes_of(graph, 1)[:, :2])
