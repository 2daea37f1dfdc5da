# SPDX-License-Identifier: Apache-2.0
"""Which part of a batch belongs to the model, the same in every framework.

Loaders give pairs: ``(x, y)``, perhaps with weights. If a model takes one argument, the first element of a longer tuple
or list is that argument, and the others, which it has no place for, are left out: a loader can be passed as it is. A
model with several arguments gets all elements or a `TypeError`, since targets cannot be recognized as targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from ....kit.planning.parts import ObservedParts
from ....kit.planning.plans import refuse_batch

# By position, in a call.
_PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def places(signature: inspect.Signature | None, flags: Collection[str] = ()) -> int | None:
    """How many positional arguments may hold arrays; None if any number may, or if it is unknown.

    An argument whose default is a number or a string is a setting, and so is one named in `flags`.
    """
    if signature is None:
        return None
    parameters = signature.parameters.values()
    if any(place.kind is inspect.Parameter.VAR_POSITIONAL for place in parameters):
        return None
    return sum(
        place.kind in _PLACES and place.name not in flags and not isinstance(place.default, bool | int | float | str)
        for place in parameters
    )


def arguments(batch: object, places: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's arguments: one, several in a tuple or list, or by name. places: see the function."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return (args[:1] if places == 1 else args), {}


def fitting(batch: Any, tree: Any, places: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `arguments`, of a calibration batch. tree: how the model's arguments nest.

    Raises:
        TypeError: they nest otherwise.
    """
    args, kwargs = arguments(batch, places)
    try:
        tree.flatten(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{error}; a batch holds the model's arguments alone (targets are left out by themselves where the model "
            "takes one): calibrate(model, (x for x, _ in loader)), or ((a, b) for a, b, *_ in loader) where it takes "
            "two"
        ) from None
    return args, kwargs


def checked(batches: object, is_array: bool, frozen: bool) -> Iterator[Any]:
    """An iterator over `batches`.

    Raises:
        TypeError: it is one array, or does not yield batches.
        ValueError: the network is frozen.
    """
    if is_array:
        shape = list(getattr(batches, "shape", ()))
        raise TypeError(f"batches must be an iterable of batches, got an array of shape {shape}; give [it]")
    if isinstance(batches, Mapping) or not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        kind = f"{type(batches).__name__}{'; give [it]' if isinstance(batches, Mapping) else ''}"
        raise TypeError(f"batches must be an iterable of batches, such as a loader, got {kind}")
    if frozen:
        raise ValueError("calibrate before freeze: the ranges of a frozen model are fixed")
    return iter(batches)


def show(
    batches: Iterable[Any], see: Callable[[Any], None], seen: Callable[[], Mapping[str, int]], parts: ObservedParts
) -> None:
    """Shows a calibration's batches to a network's ranges, and warns of parts that lose their signal.

    Args:
        see: runs the network on a batch.
        seen: by name, how many batches have moved a range so far.
        parts: what those runs see of them.

    Raises:
        ValueError: there is no batch, or one does not move all ranges, as with values that are not finite.
    """
    count, before = 0, seen()
    for count, batch in enumerate(batches, 1):
        see(batch)
        after = seen()
        refuse_batch(count, (name for name, number in after.items() if number == before[name]))
        before = after
        parts.end_of_batch(count)
    if count == 0:
        raise ValueError("batches is empty: ranges need at least one batch")
    parts.warn()
