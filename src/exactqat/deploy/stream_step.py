# SPDX-License-Identifier: Apache-2.0
"""The graph of one step of a stream.

What a convolution, a mean or a flattened window needs of earlier frames is an input of the streaming graph, and what
the next step needs is an output. So it is an ordinary graph: it is simulated, written and verified like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..kit.device import OPERATORS
from ..kit.device.in_time import time_axis_sizes
from ..kit.device.operator import Refusal, need
from ..kit.device.tensor import CODE_RANGES, Tensor
from .graph import Builder, Graph, Operator
from .signature import Port, Signature
from .tracks import Placed, Track, Tracks


@dataclass(frozen=True, eq=False)
class StreamState:
    """What one step leaves for the next.

    Attributes:
        input, output: tensors of the streaming graph: what a step takes, and what it returns for the next one.
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
        axis: its time axis; None: one result for each step, from all frames that the network looks at.
        frames: per step.
        first: the number of the stream's first frame, or step, that is the network's; earlier ones are left out.
    """

    tensor: str
    axis: int | None
    frames: int
    first: int


# A tensor whose earlier frames are kept: name, code before the first frame, and whether frames before it are replaced.
_Key = tuple[str, int, int]


class Streaming(Builder):
    """Builds the graph of one step, which takes a given number of input frames."""

    def __init__(self, tracks: Tracks, frames: int) -> None:
        super().__init__()
        self.tracks, self.frames, self.whole = tracks, frames, tracks.graph
        self.end = max(tracks.ends, default=0)
        self.states: list[StreamState] = []
        self.kept: dict[_Key, int] = {}
        self.joined: dict[_Key, str] = {}
        self.pieces: dict[tuple[_Key, int, int], str] = {}

    def run(self) -> tuple[Graph, list[StreamState], dict[str, Result]]:
        tracks = self.tracks.found
        for name in self.whole.inputs:
            tensor = self.whole.tensors[name]
            shape = list(tensor.shape)
            if name in tracks:
                shape[tracks[name].axis] = self.frames
            self._add_tensor(replace(tensor, shape=tuple(shape)))
            self._inputs.append(name)
        # How many earlier frames of each tensor are kept is known before the first of them is read.
        for placed in self.tracks.placed:
            for track in filter(None, placed.tracks):
                history, _ = self._read(placed, track)
                self._keep(track, history, placed)
        results = {name: self._result(name) for name in self.whole.outputs}
        for name, result in results.items():
            if name in tracks:
                self._keep(tracks[name], result.first - tracks[name].shift)
        for placed in self.tracks.placed:
            try:
                self._operator(placed)
            except Refusal as refusal:
                raise Refusal(
                    f"{placed.operator.kind} that makes {placed.operator.outputs[0]!r}, in a stream: {refusal}"
                ) from None
        taken = set(self._inputs)
        for name, result in results.items():
            returned = result.tensor
            if name in tracks:
                returned = self._piece(tracks[name], result.first - tracks[name].shift, result.frames)
            if returned in taken:
                returned = self._part(returned, 1, 0, self._tensors[returned].shape[1], f"{name}/result")
            taken.add(returned)
            results[name] = replace(result, tensor=returned)
        outputs = [*(result.tensor for result in results.values()), *(state.output for state in self.states)]
        graph = self.graph(outputs, True, self._signature(results))
        return (
            replace(
                graph, trained_for=self.whole.trained_for, metadata=self.whole.metadata, attached=self.whole.attached
            ),
            self.states,
            results,
        )

    def _signature(self, results: Mapping[str, Result]) -> Signature:
        """The network's, and states by their inputs' names."""
        ports = self.whole.signature
        axes = {state: tuple(range(state.codes.ndim)) for state in self.states}
        return Signature(
            (*ports.inputs, *(Port(state.input, state.input, axes[state]) for state in self.states)),
            (
                *(replace(port, tensor=results[port.tensor].tensor) for port in ports.outputs),
                *(Port(state.input, state.output, axes[state]) for state in self.states),
            ),
        )

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
        """Frames that a reader treats as padding hold the padding code, though the stream may have computed some."""
        before, fill = 0, track.fill
        if placed is not None and placed.about is not None and placed.about.before > 0:
            before, fill = placed.about.before, placed.about.fill if placed.about.fill is not None else fill
        padded = track.shift - before < track.start
        return (track.name, int(fill) if padded else track.fill, track.start if padded else 0)

    def _keep(self, track: Track, history: int, placed: Placed | None = None) -> None:
        key = self._key(track, placed)
        self.kept[key] = max(self.kept.get(key, 0), history)

    def _piece(self, track: Track, history: int, length: int, placed: Placed | None = None) -> str:
        """`length` frames, the first one `history` frames before the step's own."""
        key = self._key(track, placed)
        name, fill, start = key
        kept, new, axis = self.kept[key], self.frames // track.stride, track.axis
        if key not in self.joined:
            source = self._from_start(name, axis, fill, start, new)
            self.joined[key] = source
            if kept:
                need(axis > 0, "earlier frames lie along the batch's axis")
                held = self._state(f"{source}/state", source, axis, kept)
                grid, joined = self._tensors[name].quantization, self._free(f"{source}/joined")
                self.joined[key] = str(self.concatenation([held, source], grid, name=joined, axis=axis))
                self._next(held, self._part(joined, axis, new, new + kept, f"{source}/next_state"), fill)
        source, begin = self.joined[key], kept - history
        if (begin, length) == (0, kept + new):
            return source
        if begin == kept and length == new:
            return self._from_start(name, axis, fill, start, new)
        where = (key, begin, length)
        if where not in self.pieces:
            self.pieces[where] = self._part(source, axis, begin, begin + length, f"{source}/from_{begin}_{length}")
        return self.pieces[where]

    def _state(self, name: str, like: str, axis: int, frames: int) -> str:
        tensor = self._tensors[like]
        need(tensor.dtype in CODE_RANGES, f"earlier frames of {like!r} are kept, and {tensor.dtype} has no codes")
        need(tensor.shape[0] == 1, f"earlier frames of {like!r} are kept, whose batch's axis holds several rows")
        shape = (*tensor.shape[:axis], frames, *tensor.shape[axis + 1 :])
        return self.input(self._free(name), shape, tensor.quantization)

    def _next(self, held: str, output: str, codes: int | np.ndarray) -> None:
        """What a state holds at first, and from then on."""
        tensor = self._tensors[held]
        self.states.append(StreamState(held, output, np.broadcast_to(codes, tensor.shape).astype(tensor.dtype)))

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

        A state has a limit at that code for each of those frames, and after them limits that let every code through.
        """
        if not start:
            return name
        key = ((name, fill, start), -1, -1)
        if key not in self.pieces:
            lowest, highest = CODE_RANGES.get(self._tensors[name].dtype, (fill, fill))
            limited = name
            for limit, bound, word in ((self.maximum, lowest, "low"), (self.minimum, highest, "high")):
                if fill != bound:
                    limits = self._limits(f"{name}/{word}", self._tensors[name], axis, fill, start, bound, new)
                    limited = str(limit(limited, limits, name=self._free(f"{name}/from_start_{word}")))
            self.pieces[key] = limited
        return self.pieces[key]

    def _limits(self, name: str, like: Tensor, axis: int, code: int, start: int, following: int, new: int) -> str:
        """Codes for the frames of this step: `code` for the stream's first frames up to `start`, then `following`.

        A state holds the codes of all first frames and of one more step, whose end is repeated forever.
        """
        shape = tuple(start + new if at == axis else 1 for at in range(len(like.shape)))
        codes = np.full(shape, following)
        codes[(slice(None),) * axis + (slice(0, start),)] = code
        held = self.input(self._free(name), shape, like.quantization)
        now = self._part(held, axis, 0, new, f"{name}/now")
        rest = [self._part(held, axis, new, start + new, f"{name}/rest")]
        rest.append(self._part(held, axis, start, start + new, f"{name}/last"))
        output = self.concatenation(rest, like.quantization, name=self._free(f"{name}/next"), axis=axis)
        self._next(held, str(output), codes)
        return now

    # --- operators --------------------------------------------------------------------------------------------------

    def _operator(self, placed: Placed) -> None:
        operator, about = placed.operator, placed.about
        operands, read, frames = [], 1, 1
        for name, track in zip(operator.inputs, placed.tracks or [None] * len(operator.inputs), strict=True):
            if track is None:
                operands.append(self._fixed(name, placed))
                continue
            history, read = self._read(placed, track)
            if about is not None and about.axis is not None:
                frames = self.frames // track.stride // about.stride
            operands.append(self._piece(track, history, read, placed))
        attributes = operator.attributes
        if about is not None:
            attributes = about.attributes(attributes, read, frames)
            padded = self._free(f"{operator.outputs[0]}/padded")
            if about.around and about.below_all:
                operands[0] = str(self.padv2(operands[0], name=padded, paddings=about.around, value=None))
            elif about.around:
                operands[0] = str(self.pad(operands[0], about.around, name=padded))
        shapes = OPERATORS[operator.kind].checked_shapes([self._tensors[name].shape for name in operands], attributes)
        for name, shape in zip(operator.outputs, shapes, strict=True):
            tensor = self.whole.tensors[name]
            axis = None if about is None else about.axis
            expected = tuple(frames if at == axis else size for at, size in enumerate(tensor.shape))
            need(tuple(shape) == expected, f"{name!r} would be {list(shape)}, not {list(expected)}")
            self._add_tensor(replace(tensor, shape=expected))
        self._operators.append(Operator(operator.kind, tuple(operands), operator.outputs, attributes))

    def _fixed(self, name: str, placed: Placed) -> str:
        """An operand without time; for a constant that is the same for all frames, one of them."""
        tensor, about = self.whole.tensors[name], placed.about
        if about is not None and about.broadcasts and about.axis is not None and tensor.data is not None:
            rank = len(self.whole.tensors[placed.operator.outputs[0]].shape)
            axis, size = time_axis_sizes(tensor, about.axis, rank)
            if size > 1:
                data = tensor.data.take([0], axis)
                tensor = replace(tensor, name=f"{name}/frame", shape=data.shape, data=data)
        if tensor.name not in self._tensors and (tensor.data is not None or tensor.variable):
            self._add_tensor(tensor)
        return tensor.name

    def _free(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._tensors or name in self.whole.tensors:
            number += 1
            name = f"{wanted}_{number}"
        return name
