# SPDX-License-Identifier: Apache-2.0
"""Why a layer loses accuracy in few bits, from its values and their grid."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .network import FineWeights

# Share of values that counts as few, and how many times the range of all others theirs has to be to count as a reason.
FEW, WIDER = 0.001, 4.0
# How many times the median channel the largest has to be to count as a reason.
UNEQUAL = 8.0
# A grid of at most this many bits has few codes whatever the values are.
FEW_BITS = 4
# How many values are looked at for each part.
SAMPLE = 2**18
# A layer's int32 bias is at most this many steps of its grid, or its channel becomes constant.
LARGEST_BIAS = 2.0**30


@dataclass
class Values:
    """What a tensor holds, gathered from some batches in real numbers.

    Attributes:
        low, high: ends of the grid. bits: of its codes.
    """

    low: float
    high: float
    bits: int
    count: int = 0
    outside: int = 0
    clipped: float = 0.0
    rounded: float = 0.0
    least: float = 0.0
    most: float = 0.0
    channels: np.ndarray | None = None
    sample: list[np.ndarray] = field(default_factory=list)

    def add(self, values: np.ndarray) -> None:
        """values: [..., channels]."""
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
        step = (self.high - self.low) / (2**self.bits - 1)
        beyond = np.maximum(flat - self.high, 0) + np.maximum(self.low - flat, 0)
        inside = flat.size - int(np.count_nonzero(beyond))
        self.count += flat.size
        self.outside += int(np.count_nonzero(beyond > step / 2))
        self.clipped += float(np.square(beyond).sum())
        self.rounded += inside * step**2 / 12
        self.least, self.most = min(self.least, float(flat.min())), max(self.most, float(flat.max()))
        largest = np.abs(flat).max(0)
        if self.channels is None:
            self.channels = largest
        elif len(largest) == len(self.channels):
            self.channels = np.maximum(self.channels, largest)
        room = SAMPLE - sum(block.size for block in self.sample)
        rows = room // flat.shape[1]
        if rows > 0:
            self.sample.append(flat[:: max(1, -(-len(flat) // rows))].astype(np.float32))

    def reasons(self) -> tuple[str, ...]:
        """Sentences without a subject, the most important first; none if nothing is unusual."""
        if not self.count or self.most == self.least:
            return ()
        if self.clipped > self.rounded and self.outside:
            ends = f"[{self.low:.3g}, {self.high:.3g}], up to [{self.least:.3g}, {self.most:.3g}]"
            return (f"saturates: {max(self.outside / self.count, 1e-6):.2g} of its values lie beyond {ends}",)
        reasons: list[tuple[float, str]] = []
        wider, codes = (self.high - self.low) / (self.most - self.least), 2**self.bits
        if self.bits <= FEW_BITS:
            reasons.append((2.0 ** (8 - self.bits), f"has too few codes: {codes}, of {self.bits} bits"))
        elif wider > WIDER:
            needed = f"its values need {max(1, round(codes / wider))} of {codes}, the range is {wider:.0f} times wider"
            reasons.append((wider, f"uses too few codes: {needed}"))
        width = self.sample[0].shape[1]
        values = np.concatenate([rows for rows in self.sample if rows.shape[1] == width])
        assert self.channels is not None
        reasons += _outliers_or_channels(values, self.channels)
        return tuple(text for _, text in sorted(reasons, reverse=True))


def _outliers_or_channels(values: np.ndarray, channels: np.ndarray) -> list[tuple[float, str]]:
    """values: [n, channels]; channels: the largest magnitude of each."""
    if not values.size:
        return []
    bulk, largest, alive = _bulk(values), float(channels.max()), channels[channels > 0]
    typical = float(np.median(alive)) if alive.size else 0.0
    # The widest channel by itself: whether few of its values make it wide, or all of them.
    own = _bulk(values[:, int(channels.argmax())]) if values.shape[1] == len(channels) else bulk
    if typical and len(alive) > 1 and largest > UNEQUAL * typical and largest <= WIDER * max(own, 1e-30):
        sizes = f"the largest reaches {largest:.3g}, half of them below {typical:.3g}"
        return [(largest / typical, f"has channels of very different size: {sizes}")]
    if bulk and largest > WIDER * bulk:
        sizes = f"they reach {largest:.3g}, {1 - FEW:.1%} of the values {bulk:.3g}"
        return [(largest / bulk, f"has a range too wide for few outliers: {sizes}")]
    return []


def _bulk(values: np.ndarray) -> float:
    """The magnitude that all but a few values stay within."""
    return float(np.quantile(np.abs(values), 1 - FEW))


def reasons_of_weights(
    codes: np.ndarray, scale: np.ndarray, fine: FineWeights, axis: int, input_scale: float
) -> tuple[str, ...]:
    """As `Values.reasons`, for the weights of an operator.

    Args:
        codes: int8, in the filter's shape. scale: float32 [1] or [channels].
        fine: the same in 16 bits. axis: of the output channels. input_scale: of the activation that they meet.
    """
    channels = codes.shape[axis]

    def rows(values: np.ndarray) -> np.ndarray:
        return np.moveaxis(values.astype(np.float64), axis, 0).reshape(channels, -1)

    own, scales = rows(codes), np.broadcast_to(scale.astype(np.float64), (channels,))
    real, stored = rows(fine.codes) * fine.scale.astype(np.float64).reshape(-1, 1), own * scales[:, None]
    largest, used = np.abs(real).max(1), np.abs(own).max(1)
    reasons: list[tuple[float, str]] = []
    dropped = (largest > 0) & (used == 0)
    beyond = dropped & (np.abs(fine.bias) / np.maximum(input_scale * largest / 127, 1e-300) > LARGEST_BIAS)
    if beyond.any():
        count = f"{int(beyond.sum())} of {channels} channels keep nothing but their bias"
        reasons.append((float("inf"), f"has a bias beyond its grid: {count}"))
    alive = (largest > 0) & ~dropped
    if not alive.any():
        return tuple(text for _, text in reasons)
    real, stored, largest, used, scales = real[alive], stored[alive], largest[alive], used[alive], scales[alive]
    over = np.maximum(np.abs(real) - 127 * scales[:, None] * (1 + 1 / 254), 0)
    if np.square(over).sum() > np.square(real - stored).sum() / 2:
        reasons.append((1e6, f"saturate: {float((over > 0).mean()):.2g} of them lie beyond their range"))
    highest = int(used.max())
    bits = highest.bit_length() + 1
    if bits <= FEW_BITS:
        reasons.append((2.0 ** (8 - bits), f"have too few codes: {2 * highest + 1}, of {bits} bits"))
    elif scale.size > 1 and np.median(used) < 127 / WIDER:
        half = int(np.median(used))
        reasons.append((127 / float(np.median(used)), f"use too few codes: {half} of 127 in half of the channels"))
    if scale.size == 1 and channels > 1:
        typical = float(np.median(largest))
        if largest.max() > UNEQUAL * typical:
            sizes = f"the largest reaches {largest.max():.3g}, half of them below {typical:.3g}"
            reasons.append((largest.max() / typical, f"have channels of very different size on one scale: {sizes}"))
    else:
        ratio = float(np.median(largest / np.maximum(np.quantile(np.abs(real), 0.9, axis=1), 1e-30)))
        if ratio > 2 * WIDER:
            reasons.append((ratio, f"have a range too wide for few outliers: {ratio:.0f} times what nine of ten need"))
    return tuple(text for _, text in sorted(reasons, reverse=True))
