# SPDX-License-Identifier: Apache-2.0
"""The layout and names of a network's inputs and outputs in files: a contract, whatever the network contains.

A tensor keeps the user's axes, with the batch first. Frameworks that write images as [N, C, H, W] differ in one thing:
a tensor of four axes is such an image, and the device has it as [N, H, W, C]. Where the network itself permutes an
input from [N, H, W, C], or a result to it, that tensor is already channels last and stays as it is
(docs/decisions/file-layout.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from .network import Network, Step

CHANNELS_LAST = (0, 2, 3, 1)
# The axis of channels in [N, C, H, W].
_CHANNELS = 1
# Steps whose results have their own axes, whatever their operand's were.
_OWN_AXES = ("reshape", "matmul", "attention")


def input_axes(network: Network, name: str) -> tuple[int, ...]:
    """For an input, the user's axis that each axis of the file's tensor holds."""
    value = network.values[name]
    is_image = network.channels_first and len(value.shape) == 4 and value.batch_axis == 0
    if is_image and _channels_of_input(network, name) == _CHANNELS:
        return CHANNELS_LAST
    return _batch_first(len(value.shape), value.batch_axis)


def axes(network: Network, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Likewise for values that the device returns."""
    channels: dict[str, int] = {}
    if network.channels_first:
        for name in network.inputs:
            if len(network.values[name].shape) == 4:
                channels[name] = _channels_of_input(network, name)
        for step in network.steps:
            if len(network.values[step.output].shape) == 4:
                channels[step.output] = _channels_of_result(step, channels)
    orders: list[tuple[int, ...]] = []
    for name in names:
        value = network.values[name]
        if channels.get(name) == _CHANNELS and value.batch_axis == 0:
            orders.append(CHANNELS_LAST)
        else:
            orders.append(_batch_first(len(value.shape), value.batch_axis))
    return orders


def _batch_first(rank: int, batch_axis: int) -> tuple[int, ...]:
    return (batch_axis, *[axis for axis in range(rank) if axis != batch_axis])


def _channels_of_input(network: Network, name: str) -> int:
    """The axis of an input's channels: the second, or the one that the network's own permutation puts there."""
    # By value: the input's axis that each of its axes is.
    known = {name: tuple(range(4))}
    permuted = None
    for step in network.steps:
        source = next((operand for operand in step.inputs if isinstance(operand, str) and operand in known), None)
        if source is None:
            continue
        own = known[source]
        if "channel_axis" in step.attributes:
            return own[int(step.attributes["channel_axis"])]
        if step.kind in _OWN_AXES or len(network.values[step.output].shape) != 4:
            continue
        if step.kind == "permute":
            own = tuple(own[int(axis)] for axis in step.attributes["axes"])
            permuted = own if permuted is None else permuted
        known[step.output] = own
    # Nothing reads channels: the permutation itself says where they were.
    return 3 if permuted == (0, 3, 1, 2) else _CHANNELS


def _channels_of_result(step: Step, channels: dict[str, int]) -> int:
    """The axis of a result's channels: its operand's, followed through permutations."""
    known = [channels[operand] for operand in step.inputs if isinstance(operand, str) and operand in channels]
    if step.kind == "reshape" and known:
        return known[0]  # a model that moves channels away has its own order
    if "channel_axis" in step.attributes or step.kind in _OWN_AXES or not known:
        return _CHANNELS
    if step.kind == "permute":
        return [int(axis) for axis in step.attributes["axes"]].index(known[0])
    return known[0]


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, repeated ones with numbers."""
    result: list[str] = []
    for name in names:
        number, unique = 1, name
        while unique in result or (number > 1 and unique in names):
            number += 1
            unique = f"{name}_{number}"
        result.append(unique)
    return tuple(result)


def short_names(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """What the user calls the leaves of nested arguments or results, by their paths: the last word if that is
    unambiguous, else all words.

    ``f(batch)`` with a dictionary of images and lengths has inputs called ``images`` and ``lengths``.
    """
    last = [path[-1] if path else "" for path in paths]
    if all(word and not word[0].isdigit() for word in last) and len(set(last)) == len(last):
        return tuple(last)
    return distinct(["_".join(path) for path in paths])
