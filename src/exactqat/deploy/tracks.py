# SPDX-License-Identifier: Apache-2.0
"""Time in a network: which frames of every tensor a stream has, and which earlier ones operators read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..kit.device import OPERATORS, Tensor
from ..kit.device.in_time import InTime, in_time, time_axis_sizes
from ..kit.device.operator import Refusal, need
from .graph import Graph, Operator


@dataclass(frozen=True)
class Track:
    """Frames of a tensor. Frame t of the whole sequence is frame t + shift of the stream.

    Attributes:
        name: the tensor of the stream that holds them.
        axis: the tensor's time axis.
        stride: input frames per frame of the tensor.
        size: frames of the whole sequence.
        shift: as above; below `start`, the frames in between are padding.
        start: the stream's first frame that does not depend on anything before the stream.
        fill: the code of padding frames.
        clean: how many of `size` do not depend on anything after the sequence's end.
        beyond: what reads beyond that end.
    """

    name: str
    axis: int
    stride: int
    size: int
    shift: int = 0
    start: int = 0
    fill: int = 0
    clean: int = 0
    beyond: str = ""

    def need_clean(self) -> None:
        """Refuses a tensor that depends on the end of the sequence."""
        need(
            self.clean >= self.size,
            f"the network is not causal: {self.size - self.clean} of {self.size} frames depend on the padding after "
            f"the last frame, which {self.beyond!r} reads; pad the beginning alone, or cut these frames off",
        )


@dataclass(frozen=True)
class Placed:
    """An operator of the network in the stream.

    Attributes:
        operator: as in the whole network.
        about: what it does along time; None: it has no operand with time.
        tracks: those of its operands that have time.
        offset: frame t of the whole result is frame t + offset of the stream's; meaningless for a result of all frames.
    """

    operator: Operator
    about: InTime | None = None
    tracks: tuple[Track | None, ...] = ()
    offset: int = 0

    def history(self, track: Track) -> int:
        """How many frames before the step's own it begins to read."""
        assert self.about is not None
        return self.offset * self.about.stride - track.shift + self.about.before


@dataclass
class Tracks:
    """Every tensor of a network in time, and its operators in order.

    Attributes:
        ends: for results of all frames, how many input frames they need.
    """

    graph: Graph
    found: dict[str, Track] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    placed: list[Placed] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def follow(self, axes: Mapping[str, int | None]) -> Tracks:
        """axes: the time axis of each of the graph's inputs, in the graph's order; None: it has none.

        Raises:
            Refusal: the network is not causal, or has an operator that cannot be streamed.
        """
        for name, axis in axes.items():
            tensor = self.graph.tensors[name]
            if axis is None:
                continue
            size = tensor.shape[axis]
            self.found[name] = Track(name, axis, 1, size, fill=_zero(tensor), clean=size)
        for operator in self.graph.operators:
            try:
                self._operator(operator)
            except Refusal as refusal:
                raise Refusal(f"{operator.kind} that makes {operator.outputs[0]!r}: {refusal}") from None
        return self

    def _operator(self, operator: Operator) -> None:
        tensors = self.graph.tensors
        inputs, outputs = ([tensors[name] for name in names] for names in (operator.inputs, operator.outputs))
        tracks = tuple(self.found.get(name) for name in operator.inputs)
        timed = [track for track in tracks if track is not None]
        everything = self.whole.intersection(operator.inputs)
        if not timed:
            self.placed.append(Placed(operator))
            if everything:
                self.whole.update(operator.outputs)
            return
        need(
            not everything,
            f"every frame depends on {', '.join(map(repr, sorted(everything)))}, which is made of all frames, later "
            "ones too",
        )
        declaration = OPERATORS[operator.kind]
        axes = [None if track is None else track.axis for track in tracks]
        about = in_time(declaration, inputs, outputs, operator.attributes, axes)
        need(
            not about.joins,
            "it joins frames one after the other, as a recurrent layer does that is unrolled over its length; make a "
            "network of one step of that layer, whose state is an input and an output",
        )
        need(len({track.stride for track in timed}) == 1, "its operands have different numbers of frames")
        if about.axis is None:
            for track in timed:
                last = track.size if about.only is None else about.only[1]
                replace(track, size=last).need_clean()
                self.ends.append((last + track.shift) * track.stride)
            self.placed.append(Placed(operator, about, tracks))
            self.whole.update(operator.outputs)
            return
        need(len({track.size for track in timed}) == 1, "one frame of an operand serves all frames of another one")
        if about.broadcasts:
            for tensor, known in zip(inputs, tracks, strict=True):
                own, size = time_axis_sizes(tensor, about.axis, len(outputs[0].shape))
                if known is None and size > 1:
                    name, data = tensor.name, tensor.data
                    need(data is not None, f"{name!r} has other values for every frame, and no time")
                    assert data is not None
                    need(
                        bool(np.all(data == data.take([0], own))),
                        f"the constant {name!r} has other values for every frame, as positions have; a stream has no "
                        "last frame",
                    )
        if about.pads or (
            len(timed) == 1 and about.keeps_zero and timed[0].fill == _zero(inputs[tracks.index(timed[0])])
        ):
            self._moved(operator, about, tracks, timed[0])
            return
        offset = 0
        for track in timed:
            conflict = about.before > 0 and track.shift < track.start and track.fill != about.fill
            need(not conflict, "it pads what is padded with another code already")
            fewest = max(about.reach - about.stride, 0) + track.shift - about.before
            offset = max(offset, -(-fewest // about.stride))
        if about.remembers:
            need(
                all(track.shift == track.start == 0 for track in timed),
                "it remembers all frames, and the first ones that reach it are padding, or depend on frames before the "
                "stream",
            )
        self.placed.append(Placed(operator, about, tracks, offset))
        clean = min((track.clean - about.reach + about.before) // about.stride + 1 for track in timed)
        for tensor in outputs:
            size = tensor.shape[about.axis]
            beyond = next((track.beyond for track in timed if track.beyond), "") or tensor.name
            self.found[tensor.name] = Track(
                tensor.name, about.axis, timed[0].stride * about.stride, size, offset, offset, _zero(tensor),
                max(min(clean, size), 0), beyond if clean < size else "",
            )  # fmt: skip

    def _moved(self, operator: Operator, about: InTime, tracks: tuple[Track | None, ...], track: Track) -> None:
        """Enters an operator that only pads along time, or leaves padding frames as they are."""
        (output,) = (self.graph.tensors[name] for name in operator.outputs[:1])
        assert about.axis is not None
        fill = _zero(output) if about.fill is None else about.fill
        need(not about.before or track.shift >= track.start or track.fill == fill, "it pads what is padded already")
        if about.before == 0 and about.fill is not None:
            fill = track.fill
        size, name = output.shape[about.axis], output.name
        if about.pads and not any(map(any, about.attributes(operator.attributes, 1, 1)["paddings"])):
            name = track.name
        else:
            self.placed.append(Placed(operator, replace(about, before=0), tracks, track.shift))
        clean = track.clean + about.before
        beyond = track.beyond or (output.name if clean < size else "")
        for result in operator.outputs:
            self.found[result] = Track(
                name if result == output.name else result, about.axis, track.stride, size, track.shift - about.before,
                track.start, fill, min(clean, size), beyond,
            )  # fmt: skip


def _zero(tensor: Tensor) -> int:
    return int(tensor.quantization.zero_point[0])
