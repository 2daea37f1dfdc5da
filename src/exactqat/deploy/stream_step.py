# SPDX-License-Identifier: Apache-2.0
"""The graph of one step of a stream.

What a convolution, a mean or a flattened window needs of earlier frames is an input of the streaming graph, and what
the next step needs is an output. So it is an ordinary graph: it is simulated, written and verified like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..kit.device import OPERATORS
from ..kit.device.in_time import time_axis_sizes
from ..kit.device.operator import Refusal, need
from ..kit.device.tensor import CODE_RANGES, Tensor
from .graph import Builder, Graph, Operator
from .recurrence import Key
from .signature import Port, Signature
from .tracks import Placed, Track, Tracks


@dataclass(frozen=True, eq=False)
class State:
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
        self.states: list[State] = []
        self.kept: dict[_Key, int] = {}
        self.joined: dict[_Key, str] = {}
        self.pieces: dict[tuple[_Key, int, int], str] = {}

    def run(self) -> tuple[Graph, list[State], dict[str, Result]]:
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
        return graph, self.states, dict(zip(self.whole.outputs, results, strict=True))

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

        A state has a limit at that code for each of those frames, and after them limits that let every code through.
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
            limits = self._limits(f"{name}/{word}", tensor, axis, (fill, start), (bound, new))
            made = str(limit(made, limits, name=self._free(f"{name}/from_start_{word}")))
        self.pieces[key] = made
        return made

    def _limits(self, name: str, like: Tensor, axis: int, begins: tuple[int, int], then: tuple[int, int]) -> str:
        """Codes for the frames of this step: one code for the stream's first frames, and then another one.

        A state holds the codes of all first frames and of one more step, whose end is repeated forever.
        """
        (code, start), (following, new) = begins, then
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

    # --- recurrent layers -------------------------------------------------------------------------------------------

    def _recurrent(self, placed: Placed) -> None:
        """The repeated step, once for every frame; at the stream's first frame the first step's results count."""
        layer, (track,) = placed.recurrence, placed.tracks
        assert layer is not None and track is not None
        new = self.frames // track.stride
        x = self._piece(track, placed.offset - track.shift, new, placed)
        wanted = tuple(dict.fromkeys((*layer.kept, *layer.joined.values(), *layer.last.values())))
        models = {key: self.whole.tensors[layer.later[key[0]].outputs[key[1]]] for key in wanted}
        before: dict[Key, str] = {}
        for key in layer.kept:
            model = models[key]
            before[key] = self.input(self._free(f"{model.name}/state"), model.shape, model.quantization)
        held = dict(before)
        known: dict[tuple[str, str], str] = {}
        made: dict[Key, list[str]] = {key: [] for key in wanted}
        for at in range(new):
            frame = x if new == 1 else self._part(x, track.axis, at, at + 1, f"{x}/frame_{at}")
            begun = {layer.frame: frame}
            for operator in layer.first:
                operands = [begun.get(name) or self._fixed(name) for name in operator.inputs]
                begun |= self._again(operator, operands)
            own: dict[Key, str] = {}
            for index, (operator, sources) in enumerate(zip(layer.later, layer.sources, strict=True)):
                operands = []
                for (word, source), name in zip(sources, operator.inputs, strict=True):
                    if word == "constant":
                        operands.append(self._fixed(name))
                    elif word == "frame":
                        operands.append(frame)
                    else:
                        assert source is not None
                        operands.append((own if word == "own" else before)[source])
                results = self._again(operator, operands)
                own |= {(index, place): results[name] for place, name in enumerate(operator.outputs)}
            for key in wanted:
                result = own[key]
                if key in layer.begun:
                    gates = self._gates(models[key], layer.axis, at, placed.offset, new, known)
                    result = self._chosen(begun[layer.begun[key]], result, gates)
                made[key].append(result)
            before = {key: made[key][-1] for key in layer.kept}
        for key, name in held.items():
            self._next(name, before[key], int(models[key].quantization.zero_point[0]))
        for name, key in (*layer.joined.items(), *layer.last.items()):
            grid = self.whole.tensors[name].quantization
            self.concatenation(made[key], grid, name=name, axis=layer.axis)

    def _again(self, operator: Operator, operands: Sequence[str]) -> dict[str, str]:
        """A copy of a one-frame operator under its own names; returns these by the network's."""
        names = {}
        for name in operator.outputs:
            names[name] = self._free(f"{name}/in_stream")
            self._add_tensor(replace(self.whole.tensors[name], name=names[name]))
        self._operators.append(Operator(operator.kind, tuple(operands), tuple(names.values()), operator.attributes))
        return names

    def _gates(
        self, model: Tensor, axis: int, at: int, offset: int, new: int, known: dict[tuple[str, str], str]
    ) -> list[str]:
        """The largest codes that the first step's result and a later one's may have at one frame of this step: all, or
        none but the smallest."""
        lowest, highest = CODE_RANGES[model.dtype]
        found = []
        for word, begins, then in (("first", highest, lowest), ("later", lowest, highest)):
            if (model.name, word) not in known:
                name = f"{model.name}/{word}"
                known[(model.name, word)] = self._limits(name, model, axis, (begins, offset + 1), (then, new))
            gate = known[(model.name, word)]
            found.append(gate if new == 1 else self._part(gate, axis, at, at + 1, f"{gate}/{at}"))
        return found

    def _chosen(self, first: str, later: str, gates: Sequence[str]) -> str:
        """The first step's result at the stream's first frame, otherwise the later one's: the larger of both, as its
        gate makes one of them the smallest code."""
        parts = [
            str(self.minimum(result, gate, name=self._free(f"{result}/gated")))
            for result, gate in zip((first, later), gates, strict=True)
        ]
        return str(self.maximum(*parts, name=self._free(f"{later}/chosen")))

    # --- operators --------------------------------------------------------------------------------------------------

    def _operator(self, placed: Placed) -> None:
        operator, about = placed.operator, placed.about
        if placed.recurrence is not None:
            self._recurrent(placed)
            return
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
        """An operand without time; for a constant that is the same for all frames, one of them."""
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
        """A copy of one of the network's operators on these operands."""
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


__all__ = ["Result", "State", "Streaming"]
