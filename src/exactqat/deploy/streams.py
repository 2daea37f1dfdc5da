# SPDX-License-Identifier: Apache-2.0
"""A network over a sequence as one that takes a few frames at a time and computes the same integers.

What a convolution, a mean or a flattened window needs of earlier frames is an input of the streaming graph, and what
the next step needs an output. So it is an ordinary graph: it is simulated, written and verified as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..device import OPERATORS, Profile, profile_named
from ..device.in_time import time_axis_sizes
from ..device.operator import Refusal, need
from ..device.tensor import CODE_RANGES
from .graph import Builder, Graph, Operator, require_graph
from .signature import Port, Signature
from .simulate import simulate
from .tracks import Placed, Track, Tracks


@dataclass(frozen=True, eq=False)
class State:
    """What one step leaves for the next.

    Attributes:
        input, output: tensors of the streaming graph: what a step takes, and what it gives for the next one.
        codes: of the input before the first step, [1, ...].
    """

    input: str
    output: str
    codes: np.ndarray


@dataclass(frozen=True)
class Result:
    """An output of the network in the stream.

    Attributes:
        tensor: of the streaming graph.
        axis: that is time; None: one result for each step, of all frames that the network looks at.
        frames: of each step.
        first: the number of the stream's first frame, or step, that is the network's; what comes before is left out.
    """

    tensor: str
    axis: int | None
    frames: int
    first: int


class Stream:
    """A network that takes `frames` frames at a time; see `stream`.

    Attributes:
        graph: one step: inputs are the network's, of `frames` frames each, and then the states.
        frames: of the input for each step.
        states: what to hand from each step to the next.
        results: by the network's outputs.
        device: whose integers `step` computes.
    """

    def __init__(
        self,
        graph: Graph,
        frames: int,
        states: Sequence[State],
        results: Mapping[str, Result],
        device: str | Profile = "xnnpack",
    ) -> None:
        self.graph = graph
        self.frames = frames
        self.states = tuple(states)
        self.results = dict(results)
        self.device = profile_named(device)
        self.reset()

    def reset(self) -> None:
        """Begins again: the next step is the first."""
        self._step = 0
        self._codes: dict[str, np.ndarray] = {}
        self._variables: dict[str, np.ndarray] = {}

    def inputs(self, x: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All inputs of the graph for the next step: these frames, and the states as they are now."""
        kept = {state.input for state in self.states}
        own = [name for name in self.graph.inputs if name not in kept]
        given = dict(x) if isinstance(x, Mapping) else {own[0]: x}
        if set(given) != set(own):
            raise ValueError(f"x must contain the inputs {own}, got {list(given)}")
        streams = {np.shape(array)[0] if np.ndim(array) else 0 for array in given.values()}
        count = max(streams)
        begun = {state.input: np.repeat(state.codes, count, 0) for state in self.states}
        held = self._codes or begun
        for name, array in held.items():
            if len(array) != count:
                raise ValueError(f"x must hold {len(array)} streams as before, got {count}; reset() begins again")
            given[name] = array
        return given

    def step(self, x: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Codes of the network's outputs for the next frames, by tensor name.

        Args:
            x: codes [streams, ...] of `frames` frames, or such an array for each of the network's inputs.

        Returns:
            The frames that are new, of which there may be none at the beginning; of an output that all frames make, its
            codes, from the first step on that has seen as many frames as the network looks at.

        Raises:
            ValueError, TypeError: as `simulate`.
        """
        given = self.inputs(x)
        state = self._variables if self.graph.variables else None
        codes = simulate(self.graph, given, self.device, progress=False, state=state)
        self._codes = {each.input: codes[each.output] for each in self.states}
        found = {}
        for name, result in self.results.items():
            array = codes[result.tensor]
            if result.axis is None:
                if self._step >= result.first:
                    found[name] = array
                continue
            begin = min(max(result.first - self._step * result.frames, 0), result.frames)
            found[name] = array[(slice(None),) * result.axis + (slice(begin, None),)]
        self._step += 1
        return found

    def __repr__(self) -> str:
        kept = sum(state.codes.nbytes for state in self.states)
        return f"Stream({self.frames} frames a step, {len(self.states)} states of {kept:,} bytes: {self.graph!r})"


def stream(
    graph: Graph,
    axis: int | Mapping[str, int | None] = 1,
    frames: int | None = None,
    device: str | Profile = "xnnpack",
) -> Stream:
    """A network over a sequence as one that takes a few frames at a time and computes the same integers.

    Every frame of an output has the codes that the network computes from the whole sequence, however long the stream
    is, on every device. An output without time, as after a mean over the sequence or of its last frame, is computed at
    each step from the latest frames, as many as the network looks at: it is what the network computes from them if
    nothing is padded in front of its first frame. Where the beginning is padded, as causal convolutions do it, the
    first such result is the network's, and later ones know the frames before.

    Args:
        graph: lowered from a frozen network, or read from a file.
        axis: of the network's inputs as its user knows them, that is time: 2 for PyTorch's [N, C, T] and [N, C, T, F],
            1 for [N, T, C]. Where inputs differ: by name (`graph.signature`), None for one that has no time.
        frames: of the input at a time; by default the fewest, which is 1 unless convolutions have strides.
        device: whose integers `Stream.step` computes.

    Raises:
        Refusal: a frame depends on later ones, or an operator is not computed frame by frame. The message names it.
        ValueError: `frames` or `axis` do not fit.
    """
    require_graph(graph)
    ports = graph.signature.inputs
    axes = dict(axis) if isinstance(axis, Mapping) else dict.fromkeys([port.name for port in ports], axis)
    if set(axes) != {port.name for port in ports}:
        raise ValueError(f"axis must name the inputs {[port.name for port in ports]}, got {list(axes)}")
    for port in ports:
        wanted, rank = axes[port.name], len(port.axes)
        if wanted is not None and (wanted not in range(1, rank) or port.axes.index(wanted) == 0):
            raise ValueError(f"axis must be in 1..{rank - 1} for input {port.name!r}, got {wanted!r}")
    found = {port.tensor: axes[port.name] for port in ports}
    own = {port.tensor: port.axes for port in ports}
    tracks = Tracks(graph).follow({name: None if at is None else own[name].index(at) for name, at in found.items()})
    if not tracks.found:
        raise ValueError("axis names no input with time")
    fewest = math.lcm(*(track.stride for track in tracks.found.values()))
    frames = fewest if frames is None else frames
    if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1 or frames % fewest:
        raise ValueError(f"frames must be a multiple of {fewest}, as the network's strides make it, got {frames!r}")
    return _Streaming(tracks, frames).run(device)


# A tensor whose earlier frames are kept: name, code before the first frame, and whether frames before it are replaced.
_Key = tuple[str, int, int]


class _Streaming(Builder):
    """Builds the graph of one step."""

    def __init__(self, tracks: Tracks, frames: int) -> None:
        super().__init__()
        self.tracks, self.frames, self.whole = tracks, frames, tracks.graph
        self.end = max(tracks.ends, default=0)
        self.states: list[State] = []
        self.kept: dict[_Key, int] = {}
        self.joined: dict[_Key, str] = {}
        self.pieces: dict[tuple[_Key, int, int], str] = {}

    def run(self, device: str | Profile) -> Stream:
        found = self.tracks.found
        for name in self.whole.inputs:
            tensor = self.whole.tensors[name]
            shape = list(tensor.shape)
            if name in found:
                shape[found[name].axis] = self.frames
            self._add_tensor(replace(tensor, shape=tuple(shape)))
            self._inputs.append(name)
        for placed in self.tracks.placed:
            for track in placed.tracks:
                if track is not None:
                    history, _ = self._read(placed, track)
                    self._keep(track, history, placed)
        results = [self._result(name) for name in self.whole.outputs]
        for track, result in zip(map(found.get, self.whole.outputs), results, strict=True):
            if track is not None:
                self._keep(track, result.first - track.shift)
        for placed in self.tracks.placed:
            try:
                self._operator(placed)
            except Refusal as refusal:
                raise Refusal(
                    f"{placed.operator.kind} that makes {placed.operator.outputs[0]!r}, in a stream: {refusal}"
                ) from None
        taken = set(self._inputs)
        for position, (name, result) in enumerate(zip(self.whole.outputs, results, strict=True)):
            made, track = result.tensor, found.get(name)
            if track is not None:
                made = self._piece(track, result.first - track.shift, result.frames)
            if made in taken:
                made = self._part(made, 1, 0, self._tensors[made].shape[1], f"{name}/result")
            taken.add(made)
            results[position] = replace(result, tensor=made)
        outputs = [*(result.tensor for result in results), *(state.output for state in self.states)]
        graph = self.graph(outputs, True, self._signature([result.tensor for result in results]))
        graph = replace(graph, trained_for=self.whole.trained_for, metadata=self.whole.metadata)
        return Stream(graph, self.frames, self.states, dict(zip(self.whole.outputs, results, strict=True)), device)

    def _signature(self, outputs: Sequence[str]) -> Signature:
        ports, made = self.whole.signature, dict(zip(self.whole.outputs, outputs, strict=True))
        states = [tuple(range(self._states_rank(state))) for state in self.states]
        ends = list(zip(self.states, states, strict=True))
        return Signature(
            (*ports.inputs, *(Port(state.input, state.input, axes) for state, axes in ends)),
            (
                *(replace(port, tensor=made[port.tensor]) for port in ports.outputs),
                *(Port(state.input, state.output, axes) for state, axes in ends),
            ),
        )

    def _states_rank(self, state: State) -> int:
        return len(self._tensors[state.input].shape)

    def _result(self, name: str) -> Result:
        track = self.tracks.found.get(name)
        if track is not None:
            try:
                track.need_clean()
            except Refusal as refusal:
                raise Refusal(f"output {name!r}: {refusal}") from None
            return Result(track.name, track.axis, self.frames // track.stride, max(track.shift, 0))
        need(name in self.tracks.whole, f"output {name!r} depends on no frame")
        return Result(name, None, 1, -(-self.end // self.frames) - 1)

    # --- earlier frames ---------------------------------------------------------------------------------------------

    def _read(self, placed: Placed, track: Track) -> tuple[int, int]:
        """How many frames before the step's own an operator begins to read, and how many it reads."""
        about = placed.about
        assert about is not None
        new = self.frames // track.stride
        if about.axis is not None:
            return placed.history(track), (new // about.stride - 1) * about.stride + about.reach
        first, last = (0, track.size) if about.only is None else about.only
        later, rest = divmod(self.end - (last + track.shift) * track.stride, track.stride)
        need(rest == 0, f"{placed.operator.outputs[0]!r} needs frames between those of {track.name!r}")
        return last - first + later - new, last - first

    def _key(self, track: Track, placed: Placed | None = None) -> _Key:
        """Frames that a reader takes for padding hold the code of padding, though the stream may have computed some."""
        before, fill = 0, track.fill
        if placed is not None and placed.about is not None and placed.about.before > 0:
            before, fill = placed.about.before, placed.about.fill if placed.about.fill is not None else fill
        padded = track.shift - before < track.start
        return (track.name, int(fill) if padded else track.fill, track.start if padded else 0)

    def _keep(self, track: Track, history: int, placed: Placed | None = None) -> None:
        key = self._key(track, placed)
        self.kept[key] = max(self.kept.get(key, 0), history)

    def _piece(self, track: Track, history: int, length: int, placed: Placed | None = None) -> str:
        """So many frames, the first one so many before the step's own."""
        key = self._key(track, placed)
        name, fill, start = key
        kept, new = self.kept[key], self.frames // track.stride
        axis = track.axis
        begin = kept - history
        if key not in self.joined:
            source = self._from_start(name, axis, fill, start, new)
            self.joined[key] = source
            if kept:
                need(axis > 0, "earlier frames lie along the batch's axis")
                grid = self._tensors[name]
                held = self._state(f"{source}/state", source, axis, kept, fill)
                joined = str(
                    self.concatenation(
                        [held, source], grid.quantization, name=self._free(f"{source}/joined"), axis=axis
                    )
                )
                self.joined[key] = joined
                self._next(held, self._part(joined, axis, new, new + kept, f"{source}/next_state"), fill)
        source = self.joined[key]
        if (begin, length) == (0, kept + new):
            return source
        if begin == kept and length == new:
            return self._from_start(name, axis, fill, start, new)
        where = (key, begin, length)
        if where not in self.pieces:
            self.pieces[where] = self._part(source, axis, begin, begin + length, f"{source}/from_{begin}_{length}")
        return self.pieces[where]

    def _state(self, name: str, like: str, axis: int, frames: int, fill: int) -> str:
        tensor = self._tensors[like]
        need(tensor.dtype in CODE_RANGES, f"earlier frames of {like!r} are kept, and {tensor.dtype} has no codes")
        need(tensor.shape[0] == 1, f"earlier frames of {like!r} are kept, whose batch's axis holds several rows")
        shape = (*tensor.shape[:axis], frames, *tensor.shape[axis + 1 :])
        return self.input(self._free(name), shape, tensor.quantization)

    def _next(self, held: str, output: str, fill: int | np.ndarray) -> None:
        tensor = self._tensors[held]
        codes = np.broadcast_to(np.asarray(fill), tensor.shape).astype(tensor.dtype)
        self.states.append(State(held, output, codes))

    def _part(self, name: str, axis: int, begin: int, end: int, wanted: str) -> str:
        rank = len(self._tensors[name].shape)
        columns = {
            "begin": tuple(begin if at == axis else 0 for at in range(rank)),
            "end": tuple(
                end if at == axis else None if at == 0 else self._tensors[name].shape[at] for at in range(rank)
            ),
            "steps": (1,) * rank,
        }
        return str(self.strided_slice(name, name=self._free(wanted), **columns))

    def _from_start(self, name: str, axis: int, fill: int, start: int, new: int) -> str:
        """A tensor whose frames before the stream's frame `start` hold the code of padding.

        A state has a limit for each of those frames, at that code, and after them limits that let every code through.
        """
        if not start:
            return name
        key = ((name, fill, start), -1, -1)
        if key in self.pieces:
            return self.pieces[key]
        tensor = self._tensors[name]
        lowest, highest = CODE_RANGES.get(tensor.dtype, (fill, fill))
        made = name
        for limit, bound, word in ((self.maximum, lowest, "low"), (self.minimum, highest, "high")):
            if fill == bound:
                continue
            shape = tuple(start + new if at == axis else 1 for at in range(len(tensor.shape)))
            codes = np.full(shape, bound)
            codes[(slice(None),) * axis + (slice(0, start),)] = fill
            held = self.input(self._free(f"{name}/{word}"), shape, tensor.quantization)
            limits = self._part(held, axis, 0, new, f"{name}/{word}_now")
            rest = [self._part(held, axis, new, start + new, f"{name}/{word}_rest")]
            rest.append(self._part(held, axis, start, start + new, f"{name}/{word}_last"))
            following = str(
                self.concatenation(rest, tensor.quantization, name=self._free(f"{name}/{word}_next"), axis=axis)
            )
            self._next(held, following, codes)
            made = str(limit(made, limits, name=self._free(f"{name}/from_start_{word}")))
        self.pieces[key] = made
        return made

    # --- operators --------------------------------------------------------------------------------------------------

    def _operator(self, placed: Placed) -> None:
        operator, about = placed.operator, placed.about
        if about is None:
            self._copy(operator, [self._fixed(name) for name in operator.inputs], operator.attributes)
            return
        operands = []
        read, results = 1, 1
        for name, track in zip(operator.inputs, placed.tracks, strict=True):
            if track is None:
                operands.append(self._fixed(name, operator, placed))
                continue
            history, read = self._read(placed, track)
            if about.axis is not None:
                results = self.frames // track.stride // about.stride
            operands.append(self._piece(track, history, read, placed))
        if about.around:
            padded = self._free(f"{operator.outputs[0]}/padded")
            if about.below_all:
                operands[0] = str(self.padv2(operands[0], name=padded, paddings=about.around, value=None))
            else:
                operands[0] = str(self.pad(operands[0], about.around, name=padded))
        attributes = about.attributes(operator.attributes, read, results)
        self._copy(operator, operands, attributes, about.axis, results)

    def _fixed(self, name: str, operator: Operator | None = None, placed: Placed | None = None) -> str:
        """An operand without time; of a constant that is the same for all frames, one."""
        tensor = self.whole.tensors[name]
        about = None if placed is None else placed.about
        if operator is not None and about is not None and about.broadcasts and about.axis is not None:
            rank = len(self.whole.tensors[operator.outputs[0]].shape)
            own, size = time_axis_sizes(tensor, about.axis, rank)
            if size > 1 and tensor.data is not None:
                data = tensor.data.take([0], own)
                tensor = replace(tensor, name=f"{name}/frame", shape=data.shape, data=data)
        if tensor.name not in self._tensors and (tensor.data is not None or tensor.variable):
            self._add_tensor(tensor)
        return tensor.name

    def _copy(
        self,
        operator: Operator,
        operands: Sequence[str],
        attributes: Mapping[str, Any],
        axis: int | None = None,
        frames: int = 0,
    ) -> None:
        """An operator of the network on these operands."""
        shapes = OPERATORS[operator.kind].checked_shapes([self._tensors[name].shape for name in operands], attributes)
        for name, shape in zip(operator.outputs, shapes, strict=True):
            tensor = self.whole.tensors[name]
            expected = tuple(frames if at == axis else size for at, size in enumerate(tensor.shape))
            need(tuple(shape) == expected, f"{name!r} would be {list(shape)}, not {list(expected)}")
            self._add_tensor(replace(tensor, shape=expected))
        self._operators.append(Operator(operator.kind, tuple(operands), operator.outputs, attributes))

    def _free(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._tensors or name in self.whole.tensors:
            number += 1
            name = f"{wanted}_{number}"
        return name


__all__ = ["Result", "State", "Stream", "stream"]
