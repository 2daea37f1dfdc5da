# SPDX-License-Identifier: Apache-2.0
"""Devices that nobody built, with arithmetic of their own, written without the package's: they run .tflite files.

Each computes in whole numbers as its few lines say; what it has no lines for, it rejects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from exactqat.deploy.formats.read_tflite import read_content
from exactqat.kit.device import Tensor

Codes = Mapping[str, np.ndarray]


def half_up(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    return (x + ((1 << bits) >> 1)) >> bits


def half_even(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    below = x >> bits
    twice, whole = 2 * (x - (below << bits)), 1 << bits
    return below + np.where(twice == whole, below & 1, twice > whole)


def half_away(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    return np.sign(x) * half_up(np.abs(x), bits)


def cut_off(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    return x >> bits


ROUND = {"half up": half_up, "half even": half_even, "half away": half_away, "cut off": cut_off}


@dataclass(frozen=True)
class MadeUp:
    """A device.

    Attributes:
        rounding: a word of `ROUND`.
        powers: it shifts alone, by the powers of two next to the scales.
        significant: bits of its multipliers; 0: it multiplies in float32 and rounds to even, with the zero point.
        cuts: these bits are cut off; otherwise rounded.
        accumulator: bits in which every sum of products saturates.
        entries: pieces of the straight lines of its functions.
    """

    rounding: str
    powers: bool = False
    significant: int = 31
    cuts: bool = False
    accumulator: int = 0
    entries: int = 256

    def __call__(self, content: bytes, codes: Codes) -> dict[str, np.ndarray]:
        graph = read_content(content).graph
        (operator,) = graph.operators
        compute = getattr(self, operator.kind.lower(), None)
        if max(operator.attributes.get("dilations", (1, 1))) > 1:
            raise RuntimeError("no dilations")
        tensors = [graph.tensors[name] for name in operator.inputs]
        output = graph.tensors[operator.outputs[0]]
        if compute is None or output.dtype != "int8":
            raise RuntimeError(f"no {operator.kind} of {output.dtype}")
        arrays = [codes[tensor.name] if tensor.data is None else tensor.data for tensor in tensors]
        steps = [array.astype(np.int64) for array in arrays]
        steps = [array - int(t.quantization.zero_point[0]) for array, t in zip(steps, tensors, strict=True)]
        result = compute(steps, tensors, output, **operator.attributes) + int(output.quantization.zero_point[0])
        low, high = -128, 127
        activation = operator.attributes.get("activation", "NONE")
        if activation != "NONE":
            low = int(output.quantization.zero_point[0])
        if activation == "RELU6":
            high = min(high, low + int(np.floor(np.float32(6) / np.float32(self.scale(output)) + 0.5)))
        return {output.name: np.clip(result, low, high).astype(np.int8)}

    # --- from sums to steps

    def scale(self, tensor: Tensor) -> float:
        scale = tensor.quantization.scale
        return float(np.float32(2.0 ** np.round(np.log2(scale[0])) if self.powers else scale[0]))

    def times(self, terms: list[np.ndarray], factors: list[np.ndarray], output: Tensor) -> np.ndarray:
        """Whole numbers times factors, added and rounded."""
        if not self.significant:
            total = np.float32(output.quantization.zero_point[0])
            products = [x.astype(np.float32) * np.asarray(f, np.float32) for x, f in zip(terms, factors, strict=True)]
            return np.rint(sum(products[1:], products[0]) + total).astype(np.int64) - int(total)
        largest = np.max(np.broadcast_arrays(*factors), 0)
        shift = self.significant - np.frexp(largest)[1].astype(np.int64)
        numbers = [np.asarray(factor) * 2.0**shift for factor in factors]
        whole = [(np.floor(n) if self.cuts else np.floor(n + 0.5)).astype(np.int64) for n in numbers]
        total = sum(x * n for x, n in zip(terms, whole, strict=True))
        left, right = np.maximum(-shift, 0), np.clip(shift, 0, 62)  # of channels that training killed, more
        return np.asarray(ROUND[self.rounding](total << left, right))

    def add_up(self, products: list[np.ndarray], bias: np.ndarray) -> np.ndarray:
        most = 1 << (self.accumulator - 1) if self.accumulator else 2**40
        total = np.minimum(np.maximum(bias, -most), most - 1)
        for product in products:
            total = np.minimum(np.maximum(total + product, -most), most - 1)
        return total

    # --- operators

    def channels(self, filter: Tensor, count: int) -> np.ndarray:
        scales = filter.quantization.scale.astype(np.float64)
        return np.broadcast_to(2.0 ** np.round(np.log2(scales)) if self.powers else scales, (count,))

    def weighted(self, total: np.ndarray, tensors: list[Tensor], output: Tensor) -> np.ndarray:
        scales = self.channels(tensors[1], total.shape[-1])
        factor = self.scale(tensors[0]) * scales / self.scale(output)
        if not self.significant:  # one after the other in float32
            scales = scales.astype(np.float32)
            factor = np.float32(self.scale(tensors[0])) * scales / np.float32(self.scale(output))
        return self.times([total], [factor], output)

    def fully_connected(self, steps, tensors, output, keep_axes, **_):  # type: ignore[no-untyped-def]
        x, filter, bias = steps
        x = x if keep_axes else x.reshape(-1, filter.shape[1])
        products = [x[..., k : k + 1] * filter[:, k] for k in range(filter.shape[1])]
        total = self.add_up(products, np.broadcast_to(bias, products[0].shape))
        return self.weighted(total, tensors, output)

    def conv_2d(self, steps, tensors, output, strides, padding, dilations, **_):  # type: ignore[no-untyped-def]
        x, filter, bias = steps
        outputs, size = len(filter), filter.shape[3]
        first = np.arange(outputs) // (outputs * size // x.shape[3]) * size  # of each output's group
        products = [
            part[..., first + k] * filter[:, i, j, k]
            for i, j, part in self.places(x, filter.shape[1:3], strides, padding, output)
            for k in range(size)
        ]
        return self.weighted(self.add_up(products, np.broadcast_to(bias, output.shape)), tensors, output)

    def depthwise_conv_2d(self, steps, tensors, output, strides, padding, dilations, **_):  # type: ignore[no-untyped-def]
        x, filter, bias = steps
        x = np.repeat(x, filter.shape[3] // x.shape[3], -1)
        places = self.places(x, filter.shape[1:3], strides, padding, output)
        products = [part * filter[0, i, j] for i, j, part in places]
        return self.weighted(self.add_up(products, np.broadcast_to(bias, output.shape)), tensors, output)

    @staticmethod
    def places(x, window, strides, padding, output, fill=0):  # type: ignore[no-untyped-def]
        sizes, pads = output.shape[1:3], [(0, 0), (0, 0)]
        if padding == "SAME":
            whole = [
                max((n - 1) * s + w - size, 0)
                for n, s, w, size in zip(sizes, strides, window, x.shape[1:3], strict=True)
            ]
            pads = [(n // 2, n - n // 2) for n in whole]
        x = np.pad(x, [(0, 0), *pads, (0, 0)], constant_values=fill)
        for i, j in np.ndindex(*window):
            yield i, j, x[:, i : i + (sizes[0] - 1) * strides[0] + 1 : strides[0],
                          j : j + (sizes[1] - 1) * strides[1] + 1 : strides[1]]  # fmt: skip

    def add(self, steps, tensors, output, **_):  # type: ignore[no-untyped-def]
        ratios = [self.ratio([tensor], output) for tensor in tensors]
        return self.times(steps, ratios, output)

    def mul(self, steps, tensors, output, **_):  # type: ignore[no-untyped-def]
        return self.times([steps[0] * steps[1]], [self.ratio(tensors, output)], output)

    def quantize(self, steps, tensors, output, **_):  # type: ignore[no-untyped-def]
        return self.times(steps, [self.ratio(tensors, output)], output)

    def relu(self, steps, tensors, output, **_):  # type: ignore[no-untyped-def]
        return np.maximum(self.quantize(steps, tensors, output), 0)

    def ratio(self, tensors: list[Tensor], output: Tensor, count: int = 1) -> np.ndarray:
        number = np.float64 if self.significant else np.float32
        product = number(1)
        for tensor in tensors:
            product = product * number(self.scale(tensor))
        return np.asarray(product / number(self.scale(output)) / number(count))

    def mean(self, steps, tensors, output, axes, keep_dims, **_):  # type: ignore[no-untyped-def]
        count = int(np.prod([steps[0].shape[axis] for axis in axes]))
        total = steps[0].sum(tuple(axes), keepdims=keep_dims)
        return self.times([total], [self.ratio(tensors, output, count)], output)

    def average_pool_2d(self, steps, tensors, output, filter_size, strides, padding):  # type: ignore[no-untyped-def]
        (x,) = steps
        total = sum(part for *_, part in self.places(x, filter_size, strides, padding, output))
        ones = np.ones((1, *x.shape[1:3], 1), np.int64)
        count = sum(part for *_, part in self.places(ones, filter_size, strides, padding, output))
        return self.times([np.asarray(total)], [1 / np.asarray(count, np.float64)], output)

    def max_pool_2d(self, steps, tensors, output, filter_size, strides, padding):  # type: ignore[no-untyped-def]
        places = self.places(steps[0], filter_size, strides, padding, output, fill=-1000)
        return np.max([part for *_, part in places], 0)

    def logistic(self, steps, tensors, output, **_):  # type: ignore[no-untyped-def]
        return self.in_pieces(steps[0], tensors[0], output, lambda x: 1 / (1 + np.exp(-x)))

    def tanh(self, steps, tensors, output, **_):  # type: ignore[no-untyped-def]
        return self.in_pieces(steps[0], tensors[0], output, np.tanh)

    def in_pieces(self, steps, source, output, function):  # type: ignore[no-untyped-def]
        zero, result_zero = int(source.quantization.zero_point[0]), int(output.quantization.zero_point[0])
        wide = 256 // self.entries
        ends = np.arange(-128, 129, wide)
        table = np.round(function((ends - zero) * self.scale(source)) / self.scale(output)) + result_zero
        table = np.clip(table, -128, 127).astype(np.int64)
        codes = steps + zero + 128
        first, rest = codes // wide, codes % wide
        bits = np.int64(wide.bit_length() - 1)
        round_line = cut_off if self.rounding == "cut off" else half_up
        return table[first] + round_line((table[first + 1] - table[first]) * rest, bits) - result_zero


DEVICES = {
    # 20-bit accumulators that saturate, shifts that round half up: as the vector unit of the ESP32-S3 is said to.
    "saturating shifts": MadeUp("half up", powers=True, accumulator=20),
    # The same shifts, halves to the even code: as that of the ESP32-P4.
    "even shifts": MadeUp("half even", powers=True),
    "16-bit multiplier": MadeUp("half away", significant=16, cuts=True),
    "64 entries": MadeUp("half up", significant=24, entries=64),
    "truncation": MadeUp("cut off", significant=31, entries=32),
    "float32": MadeUp("half even", significant=0),
}


class Noisy:
    """A device that is off by one in one code of 10,000, at random."""

    def __init__(self, device: MadeUp, share: float = 1e-4) -> None:
        self.device, self.share, self.rng = device, share, np.random.default_rng(0)

    def __call__(self, content: bytes, codes: Codes) -> dict[str, np.ndarray]:
        results = self.device(content, codes)
        for name, array in results.items():
            results[name] = np.where(self.rng.random(array.shape) < self.share, array ^ 1, array).astype(array.dtype)
        return results
