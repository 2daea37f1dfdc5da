# SPDX-License-Identifier: Apache-2.0
"""What the device cannot run, in the user's terms: every place, grouped, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

from ..device.operator import Refusal
from .network import Place, Step


class UnsupportedOperator(Refusal):
    """The model contains what the device cannot run, or cannot be read. The message lists every such place."""


class Refused(Exception):
    """One step cannot be captured or run; the message says why and what could be done. Whoever goes over a network's
    steps collects these, and raises one `UnsupportedOperator` for all of them. It is not a ValueError, as those come
    from frameworks, too."""

    @staticmethod
    def argument(name: str, value: object, allowed: str) -> Refused:
        """An operation that is known, but not with this argument."""
        return Refused(f"{name}={value!r} is given, {allowed}")


# By labels in lower case without underscores: what to do instead. Only what has been tested.
_INSTEAD = {
    **dict.fromkeys(("conv3d", "maxpool3d", "avgpool3d", "batchnorm3d"), "use layers for images, frame by frame"),
    **dict.fromkeys(("embeddingbag", "onehot"), "use an Embedding, or look it up outside the device's network"),
    **dict.fromkeys(("topk", "sort", "argsort", "nms", "nonzero"), "leave it to the program that runs the network"),
    **dict.fromkeys(("where", "maskedfill", "gt", "lt", "ge", "le", "eq"), "multiply by a mask, or use ReLU"),
    **dict.fromkeys(("maxunpool2d",), "upsample with ConvTranspose2d or interpolate"),
    **dict.fromkeys(("remainder", "fmod", "floor", "round", "ceil", "sign"), "remove it, it has no gradient"),
    **dict.fromkeys(("sin", "cos", "erf"), "compute it outside the device's network"),
}


class Problems:
    """Collects refusals and makes one message from them."""

    def __init__(self) -> None:
        # By the step's word and what is wrong with it.
        self._places: dict[tuple[str, str], list[Place]] = {}

    def add(self, label: str, what: str, place: Place) -> None:
        self._places.setdefault((label, what), []).append(place)

    def raise_any(self, supported: Iterable[str]) -> None:
        """Raises UnsupportedOperator if there are problems."""
        lines = []
        for number, ((label, what), places) in enumerate(self._places.items(), 1):
            many = f"{label}, {len(places)} places, first at " if len(places) > 1 else ""
            lines.append(f"  {number}. {many}{places[0]}: {what}")
        if lines:
            total = sum(map(len, self._places.values()))
            listing = "\n".join([f"{total} place(s) of the model cannot run on the device:", *lines])
            raise UnsupportedOperator(f"{listing}\nSupported: {', '.join(supported)}.")


def word(step: Step) -> str:
    """The user's word for a step."""
    return step.label or step.kind


def need_separate(step: Step, separate: bool, how: str = "along") -> None:
    """Refuses a step that mixes the examples of a batch."""
    if not separate:
        raise Refused(f"{word(step)} {how} the batch; every example is computed separately")


def no_operator(step: Step) -> Refused:
    """The refusal of a step that the device does not support."""
    name = word(step).rsplit(".", 1)[-1].lower().replace("_", "")
    reason = step.attributes.get("reason")
    what = f"{word(step)}: {reason}" if reason else f"{word(step)} has no int8 operator in this library"
    if reason and "batch" in reason:
        return Refused(f"{what}; the device computes every example separately")
    if reason and "; give " in reason:  # it already says what to do
        return Refused(what)
    return Refused(f"{what}; {_INSTEAD.get(name, 'replace it with a supported one or remove it')}")
