# SPDX-License-Identifier: Apache-2.0
"""Turns a network over a sequence into one that takes a few frames at a time and computes the same integers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..kit.device import Profile, profile_named
from ..kit.device.operator import Refusal
from ..kit.display import listed
from .graph import Graph, require_graph
from .signature import Signature
from .simulate import simulate
from .stream_step import Result, Streaming, StreamState
from .tracks import Tracks


@dataclass(eq=False, repr=False)
class Stream:
    """A network that takes `frames` frames at a time; see `stream`.

    Attributes:
        graph: one step: its inputs are the network's, of `frames` frames each, then the states.
        frames: input frames per step.
        states: what to pass from each step to the next.
        results: by the network's outputs.
        device: whose integers `step` computes.
    """

    graph: Graph
    frames: int
    states: Sequence[StreamState]
    results: Mapping[str, Result]
    device: str | Profile = "xnnpack"

    def __post_init__(self) -> None:
        self.device = profile_named(self.device)
        self.reset()

    def reset(self) -> None:
        """Starts over: the next step is the first."""
        self._step = 0
        self._codes: dict[str, np.ndarray] = {}
        self._variables: dict[str, np.ndarray] = {}

    def inputs(self, x: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All inputs of the graph for the next step: these frames and the current states."""
        states = {state.input for state in self.states}
        own = [name for name in self.graph.inputs if name not in states]
        arrays = dict(x) if isinstance(x, Mapping) else {own[0]: x}
        if set(arrays) != set(own):
            raise ValueError(f"x must contain the inputs {own}, got {list(arrays)}")
        count = max(np.shape(array)[0] if np.ndim(array) else 0 for array in arrays.values())
        held = self._codes or {state.input: np.repeat(state.codes, count, 0) for state in self.states}
        before = len(next(iter(held.values()), range(count)))
        if before != count:
            raise ValueError(f"x must hold {before} streams as before, got {count}; reset() begins again")
        return arrays | held

    def step(self, x: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Codes of the network's outputs for the next frames, by tensor name.

        Args:
            x: codes [streams, ...] of `frames` frames, or such an array for each of the network's inputs.

        Returns:
            The new frames, at the beginning perhaps none; for an output computed from all frames, its codes, from the
            first step that has seen as many frames as the network looks at.

        Raises:
            ValueError, TypeError: as `simulate`.
        """
        state = self._variables if self.graph.variables else None
        codes = simulate(self.graph, self.inputs(x), self.device, progress=False, state=state)
        self._codes = {buffer.input: codes[buffer.output] for buffer in self.states}
        outputs = {}
        for name, result in self.results.items():
            array = codes[result.tensor]
            if result.axis is None:
                if self._step >= result.first:
                    outputs[name] = array
                continue
            begin = min(max(result.first - self._step * result.frames, 0), result.frames)
            outputs[name] = array[(slice(None),) * result.axis + (slice(begin, None),)]
        self._step += 1
        return outputs

    def with_variables(self) -> Graph:
        """The same step as a graph that keeps the states itself: they are its variables, not inputs and outputs.

        Its file has resource variables, which runtimes keep from call to call, for one stream. `simulate` keeps them in
        `state`. The graph returns results at every step; `results` says which frames are the network's.
        """
        tensors, graph = dict(self.graph.tensors), self.graph
        for state in self.states:
            tensors[state.input] = replace(
                tensors[state.input], variable=True, initial=state.codes, successor=state.output
            )
        kept, left = ({state.input for state in self.states}, {state.output for state in self.states})
        ports = graph.signature
        signature = Signature(
            tuple(port for port in ports.inputs if port.tensor not in kept),
            tuple(port for port in ports.outputs if port.name not in kept),
        )
        inputs = tuple(name for name in graph.inputs if name not in kept)
        results = {port.tensor for port in signature.outputs}
        outputs = tuple(name for name in graph.outputs if name not in left or name in results)
        step = replace(graph, tensors=tensors, inputs=inputs, outputs=outputs, ports=signature)
        step.validate()
        return step

    def __repr__(self) -> str:
        kept = sum(state.codes.nbytes for state in self.states)
        return f"Stream({self.frames} frames a step, {len(self.states)} states of {kept:,} bytes: {self.graph!r})"


def stream(
    graph: Graph,
    axis: int | Mapping[str, int | None] = 1,
    frames: int | None = None,
    device: str | Profile = "xnnpack",
) -> Stream:
    """Turns a network over a sequence into one that takes a few frames at a time and computes the same integers.

    Every frame of an output has the codes that the network computes from the whole sequence, however long the stream
    is, on every device. An output without time, as after a mean over the sequence or of its last frame, is computed at
    each step from the latest frames, as many as the network looks at: it is what the network computes from them if
    nothing is padded before its first frame. If the beginning is padded, as by causal convolutions, the first such
    result is the network's, and later ones see the frames before.

    Args:
        graph: lowered from a frozen network, or read from a file.
        axis: the time axis of the network's inputs as its user knows them: 2 for PyTorch's [N, C, T] and [N, C, T, F],
            1 for [N, T, C]. If inputs differ: by name (`graph.signature`), None for one without time.
        frames: input frames at a time; by default the fewest, which is 1 unless convolutions have strides.
        device: whose integers `Stream.step` computes.

    Raises:
        Refusal: a frame depends on later ones, or an operator cannot be computed frame by frame. The message names it.
        ValueError: `frames` or `axis` do not fit.
    """
    require_graph(graph)
    kept = [name for name, tensor in graph.tensors.items() if tensor.successor]
    if kept:
        raise Refusal(f"the network is a stream already: it keeps {listed(kept)} from call to call")
    ports = graph.signature.inputs
    axes = dict(axis) if isinstance(axis, Mapping) else dict.fromkeys([port.name for port in ports], axis)
    if set(axes) != {port.name for port in ports}:
        raise ValueError(f"axis must name the inputs {[port.name for port in ports]}, got {list(axes)}")
    for port in ports:
        wanted, rank = axes[port.name], len(port.axes)
        if wanted is not None and (wanted not in range(1, rank) or port.axes.index(wanted) == 0):
            raise ValueError(f"axis must be in 1..{rank - 1} for input {port.name!r}, got {wanted!r}")
    time_axes = {port.tensor: axes[port.name] for port in ports}
    own = {port.tensor: port.axes for port in ports}
    tracks = Tracks(graph).follow({name: None if at is None else own[name].index(at) for name, at in time_axes.items()})
    if not tracks.found:
        raise ValueError("axis names no input with time")
    fewest = math.lcm(*(track.stride for track in tracks.found.values()))
    frames = fewest if frames is None else frames
    if isinstance(frames, bool) or not isinstance(frames, int | np.integer) or frames < 1 or frames % fewest:
        raise ValueError(f"frames must be a multiple of {fewest}, as the network's strides make it, got {frames!r}")
    step, states, results = Streaming(tracks, int(frames)).run()
    return Stream(step, int(frames), states, results, device)
