# SPDX-License-Identifier: Apache-2.0
"""What the device cannot run, in the user's terms: every place, grouped, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .network import Place, Step


class UnsupportedOperator(ValueError):
    """The model contains something that the device cannot run. The message lists every such place."""


class Refused(Exception):
    """One step cannot be run; the message says why and what could be done."""


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


@dataclass
class _Problem:
    label: str
    what: str
    places: list[Place]


class Problems:
    """Collects refusals and makes one message from them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], _Problem] = {}

    def add(self, label: str, what: str, place: Place) -> None:
        problem = self._found.setdefault((label, what), _Problem(label, what, []))
        problem.places.append(place)

    def raise_any(self, supported: Iterable[str]) -> None:
        """Raises UnsupportedOperator if there are problems."""
        if not self._found:
            return
        lines = []
        for number, problem in enumerate(self._found.values(), 1):
            first, count = problem.places[0], len(problem.places)
            if count == 1:
                lines.append(f"  {number}. {first}: {problem.what}")
            else:
                lines.append(f"  {number}. {problem.label}, {count} places, first at {first}: {problem.what}")
        total = sum(len(problem.places) for problem in self._found.values())
        listing = "\n".join(lines)
        raise UnsupportedOperator(
            f"{total} place(s) of the model cannot run on the device:\n{listing}\nSupported: {', '.join(supported)}."
        )


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
