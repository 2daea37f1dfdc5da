# SPDX-License-Identifier: Apache-2.0
"""Inputs that crashed TensorFlow, leaked memory or gave silently wrong results, in NumPy, PyTorch and JAX.

ADVISORIES and STILL_BAD are the inputs of TensorFlow's security advisories and of its open issues about these
operators; limits() are sizes at the ends of what integers hold, empty arrays and values that are not finite. Every
framework runs all of them in one process of its own, which says what it is about to do before it does it, so that a
crash is seen as one. docs/advisories.md is made of the same tables:

    PYTHONPATH=tests python tests/operators/test_bad_input.py --write-docs
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from cases import RESULTS, Case
from conftest import BY_RAW_NAME
from evaluations import assert_is_plain_rounding, depthwise_evaluated, depthwise_model

import exactqat as eq
from exactqat.operators import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "advisories.md"
WAYS = ("numpy", "torch", "torch.compile", "jax", "jax.jit")
COMPILERS = ("torch.compile", "jax.jit")

REFUSED: tuple[type[Exception], ...] = (ValueError, TypeError)
TOO_LARGE: tuple[type[Exception], ...] = (MemoryError, ValueError, RuntimeError)  # by framework

Expected = type[Exception] | tuple[type[Exception], ...] | dict[str, np.ndarray] | Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a raw operator; `expected` is an error, the documented results by name, or AS_REFERENCE."""

    name: str
    op: str
    arguments: dict[str, Any]
    expected: Expected

    def __repr__(self) -> str:
        return self.name

    @property
    def operands(self) -> dict[str, np.ndarray]:
        return {key: self.arguments[key] for key in BY_RAW_NAME[self.op].operands}

    @property
    def attributes(self) -> dict[str, Any]:
        return {key: value for key, value in self.arguments.items() if key not in self.operands}


@dataclass(frozen=True)
class Entry:
    """A row of the page: what is wrong with an input, what TensorFlow makes of it, and calls that have it."""

    id: str
    operators: str
    bad_input: str
    tensorflow: str
    calls: tuple[Call, ...]
    ours: str = ""  # for the page; by default the error of the first call
    traced: bool = False  # it is about tracing


AS_REFERENCE = reference.call


# Good arguments; each call changes some


def array(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def counted(*shape: int) -> np.ndarray:
    """Small numbers that all differ."""
    return (np.arange(np.prod(shape)) % 13 - 6).astype(np.float32).reshape(shape) / np.float32(4)


SCALAR = np.array(1, np.float32)
WINDOW: dict[str, Any] = {"strides": (1, 1, 1, 1), "padding": "SAME"}

GOOD: dict[str, dict[str, Any]] = {
    "FakeQuantWithMinMaxArgs": {"inputs": counted(4, 3), "min": -1.0, "max": 1.0},
    "FakeQuantWithMinMaxArgsGradient": {"gradients": ones(4, 3), "inputs": counted(4, 3), "min": -1.0, "max": 1.0},
    "FakeQuantWithMinMaxVars": {"inputs": counted(4, 3), "min": -SCALAR, "max": SCALAR},
    "FakeQuantWithMinMaxVarsGradient": {
        "gradients": ones(4, 3),
        "inputs": counted(4, 3),
        "min": -SCALAR,
        "max": SCALAR,
    },
    "FakeQuantWithMinMaxVarsPerChannel": {"inputs": counted(4, 3), "min": -ones(3), "max": ones(3)},
    "FakeQuantWithMinMaxVarsPerChannelGradient": {
        "gradients": ones(4, 3),
        "inputs": counted(4, 3),
        "min": -ones(3),
        "max": ones(3),
    },
    "QuantizeAndDequantize": {"input": counted(4, 3), "range_given": True, "input_min": -1.0, "input_max": 1.0},
    "QuantizeAndDequantizeV2": {
        "input": counted(4, 3),
        "input_min": -SCALAR,
        "input_max": SCALAR,
        "range_given": True,
    },
    "QuantizeAndDequantizeV3": {"input": counted(4, 3), "input_min": -SCALAR, "input_max": SCALAR, "num_bits": 8},
    "QuantizeAndDequantizeV4": {
        "input": counted(4, 3),
        "input_min": -SCALAR,
        "input_max": SCALAR,
        "range_given": True,
    },
    "QuantizeAndDequantizeV4Grad": {
        "gradients": ones(4, 3),
        "input": counted(4, 3),
        "input_min": -SCALAR,
        "input_max": SCALAR,
    },
    **{
        f"FusedBatchNorm{version}": {
            "x": counted(2, 3, 2, 3),
            "scale": array(1, 2, 3),
            "offset": array(-1, 0, 1),
            "mean": array(0.25, 0.5, 0.75),
            "variance": array(1, 2, 4),
        }
        for version in ("", "V2", "V3")
    },
    **{
        f"FusedBatchNormGrad{version}": {
            "y_backprop": counted(2, 3, 2, 3),
            "x": counted(2, 3, 2, 3) + 1,
            "scale": array(1, 2, 3),
            "reserve_space_1": array(0.25, 0.5, 0.75),
            "reserve_space_2": array(1, 2, 4),
            **({"reserve_space_3": ones(0)} if version == "V3" else {}),
        }
        for version in ("", "V2", "V3")
    },
    "DepthwiseConv2dNative": {"input": counted(2, 5, 4, 3), "filter": counted(3, 3, 3, 2), **WINDOW},
    "DepthwiseConv2dNativeBackpropInput": {
        "input_sizes": (2, 5, 4, 3),
        "filter": counted(3, 3, 3, 2),
        "out_backprop": counted(2, 5, 4, 6),
        **WINDOW,
    },
    "DepthwiseConv2dNativeBackpropFilter": {
        "input": counted(2, 5, 4, 3),
        "filter_sizes": (3, 3, 3, 2),
        "out_backprop": counted(2, 5, 4, 6),
        **WINDOW,
    },
}

# Short names for the tables

ARGS, VARS, CHANNELS = (f"FakeQuantWithMinMax{kind}" for kind in ("Args", "Vars", "VarsPerChannel"))
V2, V3, V4, V4_GRAD = (f"QuantizeAndDequantize{version}" for version in ("V2", "V3", "V4", "V4Grad"))
NORM, NORM_GRAD = "FusedBatchNormV3", "FusedBatchNormGradV3"
CONVOLUTION = "DepthwiseConv2dNative"
TO_INPUT, TO_FILTER = f"{CONVOLUTION}BackpropInput", f"{CONVOLUTION}BackpropFilter"


def call(op: str, expected: Expected = ValueError, **changes: Any) -> Call:
    """A good call with changes; the name says what these are."""
    words = []
    for key, value in changes.items():
        text = str(list(value.shape) if isinstance(value, np.ndarray) else value).replace(" ", "")
        words.append(f"{key}={text if len(text) < 80 else text[:12] + '...'}")
    return Call(f"{op}({', '.join(words)})", op, GOOD[op] | changes, expected)


def every(ops: tuple[str, ...], expected: Expected = ValueError, **changes: Any) -> tuple[Call, ...]:
    return tuple(call(op, expected, **changes) for op in ops)


# The tables. What TensorFlow does was seen with version 2.21 on a CPU.

CLEAN = "InvalidArgumentError or ValueError"
ABORT = "the process aborts"
LARGEST = 2**31 - 1
VECTORS = ("scale", "offset", "mean", "variance")

ADVISORIES = (
    Entry(
        "CVE-2020-15265, GHSA-rrfp-j2mp-hq9c, TFSA-2020-027",
        V2,
        "rank-1 input with axis=10; was a read out of bounds",
        CLEAN,
        tuple(
            call(V2, input=array(2.5, 2.5), input_min=array(0, 0), input_max=array(1, 1), axis=10, range_given=flag)
            for flag in (False, True)
        ),
    ),
    Entry(
        "CVE-2021-29544, GHSA-6g85-3hm8-83f9",
        V4_GRAD,
        "bounds of rank 2; aborted",
        CLEAN,
        (
            call(V4_GRAD, input_min=ones(2, 2), input_max=ones(2, 2)),
            call(V4_GRAD, input_min=ones(1, 3), input_max=ones(1, 3), axis=1),
        ),
    ),
    Entry(
        "CVE-2021-29553, GHSA-h9px-9vqg-222h",
        V3,
        "rank-1 input with axis=3; was a read out of bounds",
        CLEAN,
        tuple(
            call(V3, input=array(1, 2), input_min=ones(1), input_max=ones(1), axis=3, range_given=flag)
            for flag in (False, True)
        ),
    ),
    Entry(
        "CVE-2021-29555, TFSA-2021-043",
        NORM,
        "inference with no channels; divided by 0",
        "empty results",
        (
            call(
                NORM,
                {
                    "y": ones(1, 1, 1, 0),
                    "batch_mean": ones(0),
                    "batch_variance": ones(0),
                    "reserve_space_1": ones(0),
                    "reserve_space_2": ones(0),
                },
                x=ones(1, 1, 1, 0),
                scale=ones(0),
                offset=ones(0),
                mean=ones(0),
                variance=ones(0),
                is_training=False,
            ),
        ),
        "empty results",
    ),
    Entry(
        "CVE-2021-29583, GHSA-9xh4-23q4-v6wr, TFSA-2021-072",
        NORM,
        "vectors that are shorter than the channels, or empty; read out of bounds, or from null",
        CLEAN,
        tuple(
            call(NORM, x=ones(1, 1, 1, channels), is_training=training, **dict.fromkeys(VECTORS, ones(length)))
            for channels, length in ((6, 1), (1, 0))
            for training in (False, True)
        ),
    ),
    Entry(
        "CVE-2021-29610, GHSA-mq5c-prh3-3f3h, TFSA-2021-099",
        V2,
        "axis=-2; read and wrote before the array",
        CLEAN,
        tuple(call(V2, axis=-2, range_given=flag) for flag in (False, True)),
    ),
    Entry(
        "CVE-2021-37645, GHSA-9w2p-5mgw-p94c, TFSA-2021-119",
        V4_GRAD,
        "axis=-100; became a huge unsigned number",
        CLEAN,
        (call(V4_GRAD, axis=-100),),
    ),
    Entry(
        "CVE-2021-41205, GHSA-49rx-x2rw-pc6f, TFSA-2021-185",
        "QuantizeAndDequantizeV2, V3, V4, V4Grad, traced",
        "axis=-100; read out of bounds in the shape function",
        CLEAN,
        every((V2, V3, V4, V4_GRAD), axis=-100, input=ones(2)),
        traced=True,
    ),
    Entry(
        "CVE-2021-41209, GHSA-6hpv-v2rx-c5g6",
        CONVOLUTION,
        "a filter with a dimension of 0; divided by 0",
        "zeros, an empty result or InvalidArgumentError; with oneDNN always the latter",
        (
            call(CONVOLUTION, {"output": np.zeros((2, 5, 4, 6), np.float32)}, filter=ones(0, 3, 3, 2)),
            call(CONVOLUTION, {"output": np.zeros((2, 5, 4, 6), np.float32)}, filter=ones(3, 0, 3, 2)),
            call(CONVOLUTION, {"output": ones(2, 5, 4, 0)}, filter=ones(3, 3, 3, 0)),
            call(CONVOLUTION, filter=ones(3, 3, 0, 2)),
        ),
        "zeros or an empty result; ValueError where the depths differ",
    ),
    Entry(
        "CVE-2021-41223, GHSA-f54p-f6jp-4rhr",
        NORM_GRAD,
        "y_backprop of another shape than x, and reserve spaces of other lengths; read out of bounds",
        CLEAN,
        (
            call(NORM_GRAD, y_backprop=ones(1, 1, 3, 3), x=ones(1, 1, 1, 2)),
            call(
                NORM_GRAD,
                y_backprop=ones(1, 1, 1, 2),
                x=ones(1, 1, 1, 2),
                scale=ones(2),
                reserve_space_1=ones(1),
                reserve_space_2=ones(3),
            ),
        ),
    ),
    Entry(
        "CVE-2022-29192, TFSA-2022-062",
        V4_GRAD,
        "empty bounds with axis=-1; aborted",
        CLEAN,
        (call(V4_GRAD, input_min=ones(0), input_max=ones(0)), call(V4_GRAD, input_min=ones(0))),
    ),
    Entry(
        "CVE-2022-35971, GHSA-9fpg-838v-wpv7, TFSA-2022-103",
        VARS,
        "bounds of rank 2; aborted",
        CLEAN,
        (call(VARS, min=ones(2, 2), max=ones(2, 2)),),
    ),
    Entry(
        "CVE-2022-35990, GHSA-h7ff-cfc9-wmmh",
        f"{CHANNELS}Gradient",
        "bounds of rank 2; aborted",
        CLEAN,
        (call(f"{CHANNELS}Gradient", min=ones(3, 3), max=ones(3, 3)),),
    ),
    Entry(
        "CVE-2022-36005, GHSA-r26c-679w-mrjm, TFSA-2022-131",
        f"{VARS}Gradient",
        "bounds of rank 2; aborted",
        CLEAN,
        (call(f"{VARS}Gradient", min=ones(2, 2), max=ones(2, 2)),),
    ),
    Entry(
        "CVE-2022-36019, GHSA-9j4v-pp28-mxv7, TFSA-2022-106",
        CHANNELS,
        "min of shape [4, 0, 0]; aborted",
        CLEAN,
        (call(CHANNELS, min=ones(4, 0, 0)), call(CHANNELS, min=ones(4, 0, 0), max=ones(4, 0, 0))),
    ),
    Entry(
        "CVE-2022-36026, GHSA-9cr2-8pwr-fhfq",
        V3,
        "num_bits of shape [0]; aborted",
        CLEAN,
        (call(V3, TypeError, num_bits=np.zeros((0,), np.int32)), call(V3, TypeError, num_bits=[])),
    ),
    Entry(
        "CVE-2022-41910, GHSA-frqp-wp83-qggv",
        "QuantizeAndDequantizeV2, traced",
        "axis=0x7fffffff; read out of bounds",
        CLEAN,
        (call(V2, axis=LARGEST, input=ones(2)),),
        traced=True,
    ),
    Entry(
        "CVE-2023-25668, GHSA-gw97-ff7c-9v96",
        "QuantizeAndDequantizeV2, V3, V4, V4Grad",
        "axis=0x7fffffff; read out of bounds",
        CLEAN,
        (
            *every((V2, V3, V4, V4_GRAD), axis=LARGEST),
            *every((V2, V3, V4), axis=2, range_given=False),
        ),
    ),
)

MEAN, VARIANCE = GOOD[NORM]["mean"], GOOD[NORM]["variance"]
ZEROS, NANS = np.zeros(3, np.float32), np.full(3, np.nan, np.float32)

STILL_BAD = (
    Entry(
        "issues 62562, 63351, 63355, 65728, 74932",
        f"{CHANNELS}, {CHANNELS}Gradient",
        "inputs of rank 0",
        ABORT,
        (call(CHANNELS, inputs=SCALAR), call(f"{CHANNELS}Gradient", inputs=SCALAR, gradients=SCALAR)),
        traced=True,
    ),
    Entry(
        "issues 60124, 99456, 99458",
        V3,
        "given bounds of several elements with axis=-1",
        ABORT,
        (
            call(V3, input_min=-ones(3), input_max=ones(3)),
            call(V3, input_min=-ones(2, 1)),
            call(V3, input_max=ones(0)),
        ),
    ),
    Entry("issues 87421, 94116", V3, "axis below -1", ABORT, tuple(call(V3, axis=axis) for axis in (-2, -4, -(2**31)))),
    Entry(
        "issues 58180, 85258, 89845, 104881",
        CONVOLUTION,
        "input of rank 3; a stride beyond int32 (oneDNN)",
        ABORT,
        (
            call(CONVOLUTION, input=ones(5, 4, 3)),
            call(CONVOLUTION, strides=(1, 2**31, 2**31, 1)),
            call(CONVOLUTION, filter=ones(3, 3, 3)),
        ),
    ),
    Entry(
        "issues 58180, 85258, 89845, 104881",
        TO_INPUT,
        "two strides; three input_sizes, negative ones, or more than fit (oneDNN)",
        ABORT,
        (
            call(TO_INPUT, strides=(1, 1)),
            call(TO_INPUT, input_sizes=(5, 4, 3)),
            call(TO_INPUT, input_sizes=(2, -5, 4, 3)),
            call(TO_INPUT, input_sizes=(2, 2**31, 2**31, 2**31)),
        ),
    ),
    Entry(
        "issues 58180, 85258, 89845, 104881",
        TO_FILTER,
        "input of rank 3 or 0; out_backprop of rank 1; no strides (oneDNN)",
        ABORT,
        (
            call(TO_FILTER, input=ones(5, 4, 3)),
            call(TO_FILTER, input=SCALAR),
            call(TO_FILTER, out_backprop=ones(6)),
            call(TO_FILTER, strides=()),
        ),
    ),
    Entry(
        "found by running it",
        NORM,
        "inference: reserve_space_1 and 2",
        "uninitialized memory",
        tuple(
            call(
                op,
                {
                    "batch_mean": MEAN,
                    "batch_variance": VARIANCE,
                    "reserve_space_1": MEAN,
                    "reserve_space_2": VARIANCE,
                },
                is_training=False,
            )
            for op in ("FusedBatchNorm", "FusedBatchNormV2", NORM)
        ),
        "copies of mean and variance",
    ),
    Entry(
        "found by running it",
        NORM,
        "empty x: reserve_space_1 and 2",
        "uninitialized memory",
        tuple(
            call(
                op,
                {
                    "y": ones(0, 3, 2, 3),
                    "batch_mean": NANS,
                    "batch_variance": NANS,
                    "reserve_space_1": ZEROS,
                    "reserve_space_2": ZEROS,
                },
                x=ones(0, 3, 2, 3),
                is_training=training,
            )
            for op in ("FusedBatchNorm", "FusedBatchNormV2", NORM)
            for training in (False, True)
        ),
        "zeros",
    ),
    Entry(
        "found by running it",
        TO_FILTER,
        "empty batch",
        "uninitialized memory",
        (
            call(
                TO_FILTER,
                {"output": np.zeros((3, 3, 3, 2), np.float32)},
                input=ones(0, 5, 4, 3),
                out_backprop=ones(0, 5, 4, 6),
            ),
        ),
        "zeros",
    ),
    Entry(
        "found by running it",
        TO_INPUT,
        "multiplier 0",
        "uninitialized memory",
        (
            call(
                TO_INPUT,
                {"output": np.zeros((2, 5, 4, 3), np.float32)},
                filter=ones(3, 3, 3, 0),
                out_backprop=ones(2, 5, 4, 0),
            ),
        ),
        "zeros",
    ),
    Entry(
        "found by running it",
        CONVOLUTION,
        "a filter larger than the input, with VALID (oneDNN)",
        "uninitialized memory of the input's shape",
        (
            call(CONVOLUTION, {"output": ones(2, 0, 2, 6)}, filter=ones(6, 3, 3, 2), padding="VALID"),
            call(CONVOLUTION, filter=ones(9, 3, 3, 2), padding="VALID"),
        ),
        "an empty result if the size formula gives 0, else ValueError",
    ),
    Entry(
        "found by running it",
        CONVOLUTION,
        "empty batch (oneDNN)",
        "a result of the input's shape",
        (call(CONVOLUTION, {"output": ones(0, 5, 4, 6)}, input=ones(0, 5, 4, 3)),),
        "an empty result of the right shape",
    ),
    Entry(
        "found by running it",
        "DepthwiseConv2dNative and both gradients",
        "explicit_paddings with SAME; padding of the batch",
        "used; ignored (oneDNN)",
        (
            *every((CONVOLUTION, TO_INPUT, TO_FILTER), explicit_paddings=(0, 0, 1, 1, 1, 1, 0, 0)),
            *every((CONVOLUTION, TO_INPUT, TO_FILTER), padding="EXPLICIT", explicit_paddings=(1, 0, 1, 1, 1, 1, 0, 0)),
            *every((CONVOLUTION, TO_INPUT, TO_FILTER), padding="EXPLICIT"),
        ),
    ),
    Entry(
        "issue 60201",
        TO_INPUT,
        "three input_sizes, five dilations",
        "zeros of shape (3, 4, 5) (oneDNN)",
        (call(TO_INPUT, input_sizes=(3, 4, 5), dilations=(1, 1, 1, 1, 1)), call(TO_INPUT, dilations=(1,) * 5)),
    ),
    Entry(
        "found by running it",
        "QuantizeAndDequantizeV2, V3, V4",
        "unsigned with negative data; a reversed range along an axis; one signed bit, narrow",
        "infinities and NaN, no error",
        (
            *every((V2, V3, V4), AS_REFERENCE, input=array(-5, -1), signed_input=False, range_given=False),
            call(V3, AS_REFERENCE, input_min=ones(3), input_max=-ones(3), axis=1),
            *every((V2, V3, V4), AS_REFERENCE, num_bits=1, narrow_range=True),
        ),
        "what the formulas give, as in TensorFlow",
    ),
    Entry(
        "found by running it",
        "FakeQuantWithMinMaxVars, PerChannel",
        "a reversed range, or a point",
        "a constant; NaN; no error",
        (
            call(VARS, AS_REFERENCE, min=SCALAR, max=-SCALAR),
            call(VARS, AS_REFERENCE, min=SCALAR, max=SCALAR),
            call(CHANNELS, AS_REFERENCE, min=array(1, 2, 3), max=array(-1, 2, 2)),
        ),
        "what the formulas give, as in TensorFlow; the training kit refuses reversed ranges",
    ),
)


def limits() -> Iterator[Call]:
    """Numbers at the ends of their types, empty arrays, values that are not finite."""
    beyond = (2**31, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1)
    quantizers = (V2, V3, V4)
    fake_quant = tuple(op for op in RESULTS if op.startswith("FakeQuant"))
    convolutions = (CONVOLUTION, TO_INPUT, TO_FILTER)
    for value in beyond:
        yield from every((*quantizers, V4_GRAD), axis=value)
        yield from every((*quantizers, *fake_quant), num_bits=value)
        yield from every(convolutions, strides=(1, value, value, 1))
        yield from every(convolutions, dilations=(1, value, value, 1))
        yield from every(convolutions, padding="EXPLICIT", explicit_paddings=(0, 0, value, 0, 0, value, 0, 0))
        yield call(TO_INPUT, input_sizes=(2, value, 4, 3))
        yield call(TO_INPUT, input_sizes=(2, 5, value, value))
        yield call(TO_FILTER, filter_sizes=(3, value, 3, 2), padding="VALID")
        yield call(TO_FILTER, filter_sizes=(value, value, 3, 2))
    for op in (ARGS, f"{ARGS}Gradient"):
        yield call(op, AS_REFERENCE, min=-1e308, max=1e308)
        yield call(op, REFUSED, min=-(10**400))
    for epsilon in (np.nan, np.inf, -np.inf, -1.0, 1e308):
        yield from every((NORM, NORM_GRAD), AS_REFERENCE, epsilon=epsilon)
        yield call(NORM, AS_REFERENCE, exponential_avg_factor=epsilon)
    # The largest numbers that are allowed.
    yield call(CONVOLUTION, AS_REFERENCE, strides=(1, LARGEST, LARGEST, 1))
    yield call(CONVOLUTION, AS_REFERENCE, dilations=(1, LARGEST, LARGEST, 1))
    yield call(TO_INPUT, AS_REFERENCE, strides=(1, LARGEST, LARGEST, 1), out_backprop=counted(2, 1, 1, 6))
    yield call(TO_FILTER, AS_REFERENCE, strides=(1, LARGEST, LARGEST, 1), out_backprop=counted(2, 1, 1, 6))
    yield from every((TO_INPUT, TO_FILTER), AS_REFERENCE, dilations=(1, LARGEST, LARGEST, 1))
    wide = {"padding": "EXPLICIT", "explicit_paddings": (0, 0, LARGEST, LARGEST, LARGEST, LARGEST, 0, 0)}
    yield call(CONVOLUTION, AS_REFERENCE, strides=(1, LARGEST, LARGEST, 1), **wide)
    # Results that no machine holds: of 2**40 elements and more, from small operands.
    pixel, huge = ones(1, 1, 1, 1), (1, 2**20, 2**20, 1)
    yield call(CONVOLUTION, TOO_LARGE, **wide)
    yield call(CONVOLUTION, TOO_LARGE, padding="EXPLICIT", explicit_paddings=(0, 0, 2**20, 0, 0, 2**20, 0, 0))
    yield call(TO_INPUT, TOO_LARGE, input_sizes=huge, filter=pixel, out_backprop=pixel, strides=huge)
    yield call(
        TO_FILTER, TOO_LARGE, filter_sizes=(2**20, 2**20, 1, 1), input=pixel, out_backprop=pixel, strides=(1, 1, 1, 1)
    )
    for sizes in ((2**31,) * 4, (2**62, 2, 2, 2), (0, 2**40, 2**40, 1)):
        yield call(TO_INPUT, input_sizes=sizes)
        yield call(TO_FILTER, filter_sizes=sizes)
    for op in ("FusedBatchNormGrad", "FusedBatchNormGradV2", NORM_GRAD):
        for training in (False, True):
            empty = ones(0, 3, 2, 3)
            zeros = {"x_backprop": empty, "scale_backprop": ZEROS, "offset_backprop": ZEROS}
            yield call(op, zeros, x=empty, y_backprop=empty, is_training=training)
    # Shapes with every dimension 0 in turn.
    for op in fake_quant:
        for shape in ((0, 3), (4, 0), (0, 0)):
            arrays = {key: ones(*shape) for key in ("inputs", "gradients") if key in GOOD[op]}
            if "Channel" in op:
                arrays |= {key: ones(shape[1]) for key in ("min", "max")}
            yield call(op, AS_REFERENCE, **arrays)
    for op in (*quantizers, V4_GRAD):
        for shape in ((0, 3), (4, 0), (0, 0)):
            arrays = {key: ones(*shape) for key in ("input", "gradients") if key in GOOD[op]}
            yield call(op, AS_REFERENCE, **arrays)
            yield call(op, AS_REFERENCE, **arrays, input_min=-ones(shape[1]), input_max=ones(shape[1]), axis=1)
    for training in (False, True):
        for shape in ((2, 0, 2, 3), (2, 3, 0, 3), (2, 3, 2, 0), (0, 0, 0, 0), (2, 0, 3, 2, 3)):
            for op in (NORM, NORM_GRAD):
                images = {key: ones(*shape) for key in ("x", "y_backprop") if key in GOOD[op]}
                vectors = {k: v[: shape[-1]] for k, v in GOOD[op].items() if np.shape(v) == (3,)}
                yield call(op, AS_REFERENCE, **images, **vectors, is_training=training)
    for shape in ((0, 5, 4, 3), (2, 0, 4, 3), (2, 5, 0, 3), (2, 5, 4, 0), (0, 0, 0, 0)):
        gradient, weights = ones(*shape[:3], 2 * shape[3]), ones(3, 3, shape[3], 2)
        yield call(CONVOLUTION, AS_REFERENCE, input=ones(*shape), filter=weights)
        yield call(TO_INPUT, AS_REFERENCE, input_sizes=shape, filter=weights, out_backprop=gradient)
        yield call(TO_FILTER, AS_REFERENCE, input=ones(*shape), filter_sizes=weights.shape, out_backprop=gradient)
    # Each array operand in turn, and then all of them.
    for value in (np.nan, np.inf, -np.inf):
        for op, arguments in GOOD.items():
            arrays = {key: np.full_like(a, value) for key, a in arguments.items() if isinstance(a, np.ndarray)}
            bounds = set(arrays) & {"input_min", "input_max"}
            for key in arrays:
                ordered = key == "input" or (key == "input_min" and value < 0) or (key == "input_max" and value > 0)
                if not bounds or op == V4_GRAD or ordered:
                    yield named(call(op, AS_REFERENCE, **{key: arrays[key]}), value)
            if not bounds or op == V4_GRAD:
                yield named(call(op, AS_REFERENCE, **arrays), value)


def named(case: Call, value: float) -> Call:
    return Call(f"{case.name} of {value}", case.op, case.arguments, case.expected)


ENTRIES = (*ADVISORIES, *STILL_BAD)
CALLS: dict[str, Call] = {}
for _made in itertools.chain((case for entry in ENTRIES for case in entry.calls), limits()):
    CALLS.setdefault(_made.name, _made)
TABLED = {case.name for entry in ENTRIES for case in entry.calls}
TRACED = {case.name for entry in ENTRIES for case in entry.calls if entry.traced}


def ways_of(case: Call) -> list[str]:
    """Compilers are slow, so jax.jit gets what the tables name and what must fail, and torch.compile what is traced."""
    refused = case.name in TABLED or case.expected is not AS_REFERENCE
    return [way for way in WAYS if case.name in TRACED or way != "torch.compile" and (refused or way != "jax.jit")]


# The process that may crash

CRASH = "crash on purpose"


def run(way: str, first: int) -> None:
    """Runs the calls from the `first` on; says before each what comes, and after it what came."""
    import resource

    # The calls that ask for terabytes must be refused, not tried, also where the system overcommits.
    resource.setrlimit(resource.RLIMIT_AS, (2**41, resource.RLIM_INFINITY))
    convert, evaluate = ENGINES[way]()
    for case in list(CALLS.values())[first:]:
        if way in ways_of(case):
            print(f"begin {case.name}", flush=True)
            print(f"{case.name}: {json.dumps(attempt(case, convert, evaluate))}", flush=True)


def attempt(case: Call, convert: Callable[[np.ndarray], Any], evaluate: Callable[..., Any]) -> dict[str, Any]:
    poison(convert)
    operands = {key: convert(value) for key, value in case.operands.items()}
    try:
        results = evaluate(case.op, operands, case.attributes)
    except (Exception, MemoryError) as error:
        return {
            "error": type(error).__name__,
            "ancestors": [t.__name__ for t in type(error).__mro__],
            "text": str(error),
        }
    arrays = [np.asarray(result) for result in (results if isinstance(results, tuple) else (results,))]
    return {"results": [[a.dtype.name, list(a.shape), a.tobytes().hex()] for a in arrays]}


def poison(convert: Callable[[np.ndarray], Any]) -> None:
    """Leaves a strange number in the memory that small arrays are likely to get next."""
    kept = [convert(np.full(size, 7e33, np.float32)) for size in (1, 3, 12, 36, 54, 120, 240) for _ in range(4)]
    del kept


def with_numpy() -> Any:
    return np.array, lambda op, operands, attributes: getattr(eq.raw_ops, op)(**operands, **attributes)


def with_torch() -> Any:
    import torch

    torch.set_num_threads(1)
    function = with_numpy()[1]
    return torch.tensor, function


def with_torch_compile() -> Any:
    import torch

    convert, function = with_torch()

    def evaluate(op: str, operands: dict[str, Any], attributes: dict[str, Any]) -> Any:
        torch._dynamo.reset()
        return torch.compile(lambda arrays: function(op, arrays, attributes), backend="eager")(operands)

    return convert, evaluate


def with_jax() -> Any:
    import jax

    function = with_numpy()[1]
    return jax.numpy.array, lambda *arguments: jax.block_until_ready(function(*arguments))


def with_jax_jit() -> Any:
    import jax

    convert, function = with_jax()

    def evaluate(op: str, operands: dict[str, Any], attributes: dict[str, Any]) -> Any:
        return jax.block_until_ready(jax.jit(lambda arrays: function(op, arrays, attributes))(operands))

    return convert, evaluate


ENGINES: dict[str, Callable[[], Any]] = {
    "numpy": with_numpy,
    "torch": with_torch,
    "torch.compile": with_torch_compile,
    "jax": with_jax,
    "jax.jit": with_jax_jit,
}


# The tests


@lru_cache
def answers(way: str) -> dict[str, Any]:
    """What each call came to, by name; a process that died is started again after the call it died of."""
    names = list(CALLS)
    results: dict[str, Any] = {}
    first = 0
    while first < len(names):
        command = [sys.executable, __file__, "--run", way, "--first", str(first)]
        process = subprocess.run(command, capture_output=True, text=True)
        fatal = collect(process.stdout, process.returncode, process.stderr, results)
        if fatal is None:
            break
        first = names.index(fatal) + 1
    return results


def collect(output: str, status: int, errors: str, results: dict[str, Any]) -> str | None:
    """Adds the answers of one process; the name of the call that ended it, if one did."""
    begun = None
    for line in output.splitlines():
        if line.startswith("begin "):
            begun = line.removeprefix("begin ")
        elif begun is not None and line.startswith(f"{begun}: "):
            results[begun] = json.loads(line.removeprefix(f"{begun}: "))
            begun = None
    if status == 0 and begun is None:
        return None
    if begun is None:
        raise RuntimeError(
            f"the process did not start, or ended between two calls, with status {status}:\n{errors[-2000:]}"
        )
    ended = signal.Signals(-status).name if status < 0 else f"status {status}"
    results[begun] = {"crash": f"the process ended with {ended}: {errors[-1000:]}"}
    return begun


PARAMETERS = [
    pytest.param(way, case, id=f"{way}-{case.name}", marks=[pytest.mark.slow] if way in COMPILERS else [])
    for case in CALLS.values()
    for way in WAYS
    if way in ways_of(case)
]


@pytest.mark.parametrize(("way", "case"), PARAMETERS)
def test_bad_input(way: str, case: Call) -> None:
    if way != "numpy":
        pytest.importorskip(way.split(".")[0])
    answer = answers(way)[case.name]
    assert "crash" not in answer, answer["crash"]
    errors = case.expected if isinstance(case.expected, tuple) else (case.expected,)
    if all(isinstance(error, type) for error in errors):
        assert "error" in answer, f"is accepted, gives {answer}"
        wanted = {error.__name__ for error in errors if isinstance(error, type)}
        assert wanted & set(answer["ancestors"]), f"{answer['error']}: {answer['text']}"
        if errors != TOO_LARGE:
            names_an_argument(case.op, answer["text"])
        return
    assert "results" in answer, f"{answer['error']}: {answer['text']}"
    results = {
        name: np.frombuffer(bytes.fromhex(content), dtype).reshape(shape)
        for name, (dtype, shape, content) in zip(RESULTS[case.op], answer["results"], strict=True)
    }
    for name, expected in expected_results(case).items():
        assert_same_bits(results[name], expected, what=name)


def expected_results(case: Call) -> dict[str, np.ndarray]:
    if isinstance(case.expected, dict):
        return case.expected
    with np.errstate(all="ignore"):
        results = reference.call(case.op, case.operands, bound_attributes(case))
    return dict(zip(RESULTS[case.op], results if isinstance(results, tuple) else (results,), strict=True))


def bound_attributes(case: Call) -> dict[str, Any]:
    return BY_RAW_NAME[case.op].bind((), case.arguments)[1]


def names_an_argument(op: str, text: str) -> None:
    declared = BY_RAW_NAME[op]
    words = {word.strip("`'\":,.()[]") for word in text.split()}
    assert words & set(declared.parameters), f"no argument of {op} is named in: {text}"
    assert declared.name in words, f"the operator is not named in: {text}"


def test_a_crash_would_be_noticed() -> None:
    """The lines of a process that kills itself between two calls' lines, read as the tests read them."""
    program = (
        "import os, signal\n"
        "print('begin one', flush=True)\nprint('one: {\"results\": []}', flush=True)\n"
        f"print('begin {CRASH}', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)\nprint('begin two')"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    results: dict[str, Any] = {}
    assert collect(process.stdout, process.returncode, process.stderr, results) == CRASH
    assert results["one"] == {"results": []}
    assert "SIGSEGV" in results[CRASH]["crash"]
    assert "two" not in results


def test_every_operator_has_bad_input() -> None:
    assert {case.op for case in CALLS.values()} == set(RESULTS)


# Where TensorFlow is broken or silent and exactqat does what the documentation says

FRAMEWORKS = ("numpy", "torch", "jax")


def evaluate_in(way: str, op: str, operands: dict[str, np.ndarray], **attributes: Any) -> list[np.ndarray]:
    """The results of a raw operator."""
    if way != "numpy":
        pytest.importorskip(way.split(".")[0])
    convert, evaluate = ENGINES[way]()
    results = evaluate(op, {key: convert(value) for key, value in operands.items()}, attributes)
    return [np.asarray(result) for result in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.parametrize("way", (*FRAMEWORKS, "jax.jit"))
@pytest.mark.parametrize("op", (V2, V4))
def test_given_ranges_along_an_axis(op: str, way: str) -> None:
    """TensorFlow refuses them with every shape of bounds, although they are documented; here as in its version 3."""
    data = 3 * counted(3, 4, 5)
    for axis, length in enumerate(data.shape):
        low = -np.arange(1, length + 1, dtype=np.float32)
        operands = {"input": data, "input_min": low, "input_max": -low / 2}
        (result,) = evaluate_in(way, op, operands, range_given=True, axis=axis, num_bits=5)
        (third,) = evaluate_in("numpy", V3, operands, axis=axis, num_bits=5)
        assert_same_bits(result, third, what=f"axis {axis}")
        for k in range(length):
            alone = {"input": data.take(k, axis), "input_min": low[k, ...], "input_max": -low[k, ...] / 2}
            (expected,) = evaluate_in("numpy", op, alone, range_given=True, num_bits=5)
            assert_same_bits(result.take(k, axis), expected, what=f"slice {k} of axis {axis}")


@pytest.mark.parametrize("way", FRAMEWORKS)
@pytest.mark.parametrize("op", (V2, V3, V4))
def test_a_range_from_data_that_hold_nan(op: str, way: str) -> None:
    """In TensorFlow the result depends on where the NaN is; here its whole slice is NaN, and no other."""
    for place in range(9):
        data = np.stack([np.arange(9, dtype=np.float32), np.arange(9, dtype=np.float32) - 4])
        expected = evaluate_in(
            "numpy", op, {"input": data, "input_min": ZEROS[:2], "input_max": ZEROS[:2]}, **FROM_DATA
        )
        data[0, place] = np.nan
        operands = {"input": data, "input_min": ZEROS[:2], "input_max": ZEROS[:2]}
        (result,) = evaluate_in(way, op, operands, **FROM_DATA)
        assert np.isnan(result[0]).all()
        assert_same_bits(result[1], expected[0][1], what="the slice without NaN")


FROM_DATA = {"range_given": False, "axis": 0, "num_bits": 8}


@pytest.mark.parametrize("way", FRAMEWORKS)
@pytest.mark.parametrize("op", (V2, V3, V4))
def test_a_range_from_denormal_data(op: str, way: str) -> None:
    """In TensorFlow the sign of zero is not reproducible; here it is that of the formula with denormals as zeros.

    The scale is then the largest number and its inverse the largest of the data divided by the highest code: a zero of
    its sign, +0 if there is any +0 among the data.
    """
    denormal = np.float32(1e-40)
    for values, signs in (
        ([1, 1, 1], [0, 0, 0]),
        ([-1, -1, -1], [0, 0, 0]),
        ([1, -1, 1], [0, 1, 0]),
        ([-1, 1, -1], [1, 0, 1]),
    ):
        operands = {"input": np.array(values, np.float32) * denormal, "input_min": SCALAR, "input_max": SCALAR}
        (result,) = evaluate_in(way, op, operands, range_given=False, num_bits=8)
        assert (result == 0).all()
        assert np.signbit(result).tolist() == [bool(sign) for sign in signs], values


def test_the_gradient_uses_the_range_that_was_used() -> None:
    """TensorFlow masks `quantize_and_dequantize_v2`'s gradient with bounds that are not used; here all of it passes.

    The raw operator's gradient is kept as it is in TensorFlow.
    """
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    data = counted(13)
    data[0] = np.nan_to_num(data[0])
    public, raw = eq.quantization.quantize_and_dequantize_v2, eq.raw_ops.QuantizeAndDequantizeV4
    for function, expected in (
        (public, np.ones(13)),
        (lambda x, low, high: raw(input=x, input_min=low, input_max=high), data == 0),
    ):
        x = torch.tensor(data, requires_grad=True)
        function(x, torch.tensor(0.0), torch.tensor(0.0)).sum().backward()
        assert x.grad.tolist() == list(expected)
        zero = jax.numpy.float32(0)
        gradient = jax.grad(lambda x, f=function, zero=zero: f(x, zero, zero).sum())(jax.numpy.asarray(data))
        assert gradient.tolist() == list(expected)
    inside = (data >= -1) & (data <= 0.5)
    x = torch.tensor(data, requires_grad=True)
    public(x, torch.tensor(-1.0), torch.tensor(0.5), range_given=True).sum().backward()
    assert x.grad.tolist() == list(inside.astype(float))


def test_second_derivatives_of_quantizers() -> None:
    """None or a TypeError in TensorFlow. Here the gradient is linear in what arrives, and its slope in x is zero."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    jnp = jax.numpy
    data, arriving = counted(13), np.linspace(0.5, 2, 13, dtype=np.float32)
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "Args": lambda x, b: eq.quantization.fake_quant_with_min_max_args(x, -1.0, 0.5),
        "Vars": lambda x, b: eq.quantization.fake_quant_with_min_max_vars(x, -b, b / 2),
        "V4": lambda x, b: eq.quantization.quantize_and_dequantize_v2(x, -b, b / 2, range_given=True),
    }
    for name, function in functions.items():
        x, g, bound = (
            torch.tensor(data, requires_grad=True),
            torch.tensor(arriving, requires_grad=True),
            torch.tensor(1.0),
        )
        (slope,) = torch.autograd.grad((function(x, bound) * g).sum(), x, create_graph=True)
        with_respect_to_x, with_respect_to_g = torch.autograd.grad(slope.sum(), (x, g), allow_unused=True)
        passes = (slope / g).detach().numpy()
        assert with_respect_to_x is None or not with_respect_to_x.any(), name
        np.testing.assert_array_equal(with_respect_to_g.numpy(), passes, err_msg=name)
        assert 0 < passes.sum() < 13, name

        def jax_slope(x: Any, g: Any, function: Any = function) -> Any:
            return jax.grad(lambda x: (function(x, jnp.float32(1)) * g).sum())(x).sum()

        to_x, to_g = jax.grad(jax_slope, (0, 1))(jnp.asarray(data), jnp.asarray(arriving))
        assert not to_x.any(), name
        np.testing.assert_array_equal(to_g, with_respect_to_g.numpy(), err_msg=name)


@pytest.mark.parametrize("way", FRAMEWORKS)
def test_the_first_version_can_be_called(way: str) -> None:
    """TensorFlow refuses to run raw QuantizeAndDequantize; it is version 2 with the range as attributes."""
    data = counted(4, 3)
    for flag in (False, True):
        (result,) = evaluate_in(
            way, "QuantizeAndDequantize", {"input": data}, range_given=flag, input_min=-0.5, input_max=1.0
        )
        operands = {"input": data, "input_min": np.float32(-0.5), "input_max": SCALAR}
        (second,) = evaluate_in("numpy", V2, operands, range_given=flag)
        assert_same_bits(result, second, what=f"range_given={flag}")


@pytest.mark.parametrize("way", FRAMEWORKS)
def test_reversed_ranges_are_kept(way: str) -> None:
    """TensorFlow gives a constant without an error; so do the operators here. (The kit's modules refuse the range.)"""
    for low, high, constant in ((1.0, -1.0, 0.99607849), (2.0, 1.0, 1.0)):
        inputs = array(-3, 0, 0.5, 3, np.inf, np.nan)
        operands = {"inputs": inputs, "min": np.float32(low), "max": np.float32(high)}
        (result,) = evaluate_in(way, VARS, {key: np.asarray(value) for key, value in operands.items()})
        assert_same_bits(result, array(*[constant] * 5, np.nan), what=f"({low}, {high})")


@pytest.mark.parametrize("op", (CONVOLUTION, TO_INPUT, TO_FILTER))
@pytest.mark.parametrize("way", FRAMEWORKS)
def test_strides_dilations_layouts_and_paddings_together(way: str, op: str) -> None:
    """TensorFlow rejects, ignores or miscomputes unequal strides, dilations, NCHW and explicit padding by its build:

    dilations are ignored by both gradients, and Eigen knows neither unequal strides nor NCHW. Here every combination is
    the convolution that was asked for: the taps' chain to the bit, and the sum in float64 to rounding.
    """
    for strides, dilations, data_format, padding in itertools.product(
        ((1, 1), (2, 1)), ((1, 1), (1, 2)), ("NHWC", "NCHW"), ("SAME", "EXPLICIT")
    ):

        def ordered(n: int, h: int, w: int, c: int, data_format: str = data_format) -> tuple[int, ...]:
            return (n, c, h, w) if data_format == "NCHW" else (n, h, w, c)

        pads = ((2, 1), (0, 3))
        explicit = tuple(
            itertools.chain(*(pads[i] if letter == "HW"[i] else () for letter in data_format for i in (0, 1)))
        )
        full = (0, 0, *explicit, 0, 0) if data_format == "NHWC" else (0, 0, 0, 0, *explicit)
        attributes: dict[str, Any] = {
            "strides": ordered(1, *strides, 1),
            "dilations": ordered(1, *dilations, 1),
            "data_format": data_format,
            "padding": padding,
            "explicit_paddings": full if padding == "EXPLICIT" else (),
        }
        image, weights = ordered(2, 6, 7, 3), (3, 2, 3, 2)
        forward = {"input": counted(*image), "filter": counted(*weights)}
        output = reference.call(CONVOLUTION, forward, attributes)
        if op == CONVOLUTION:
            operands = forward
        elif op == TO_INPUT:
            operands = {"filter": forward["filter"], "out_backprop": counted(*output.shape) / 3}
            attributes = {"input_sizes": image} | attributes
        else:
            operands = {"input": forward["input"], "out_backprop": counted(*output.shape) / 3}
            attributes = {"filter_sizes": weights} | attributes
        asked = Case(op, op, operands, attributes)
        (result,) = evaluate_in(way, op, operands, **attributes)
        what = f"{op} {attributes}"
        evaluated = depthwise_evaluated(asked)
        assert result.shape == evaluated.exact.shape, what
        assert_is_plain_rounding(result, evaluated, what)
        if op != TO_FILTER:
            assert_same_bits(result, depthwise_model(asked), what=what)


def test_dilation_with_strides_in_the_public_function() -> None:
    """TensorFlow warns and returns (2, 3, 4, 6); here it is the dilated strided convolution, (2, 4, 4, 6)."""
    x, weights = counted(2, 7, 8, 3), counted(3, 3, 3, 2)
    attributes = {"strides": (1, 2, 2, 1), "padding": "SAME", "explicit_paddings": (), "data_format": "NHWC"}
    asked = Case("", CONVOLUTION, {"input": x, "filter": weights}, attributes | {"dilations": (1, 2, 2, 1)})
    result = eq.nn.depthwise_conv2d(x, weights, [1, 2, 2, 1], "SAME", dilations=[2, 2])
    assert result.shape == (2, 4, 4, 6)
    assert_same_bits(result, depthwise_model(asked), what="output")


@pytest.mark.parametrize("way", ("numpy", "torch"))
def test_batch_norm_in_float64(way: str) -> None:
    """TensorFlow has no float64 kernel. Here the statistics and the result agree with numpy's to float64's rounding."""
    x = counted(2, 3, 2, 3).astype(np.float64) * 1.25 + 100
    vectors = {key: GOOD[NORM][key].astype(np.float64) for key in VECTORS}
    y, mean, variance, *_ = evaluate_in(way, NORM, {"x": x} | vectors, epsilon=1e-3)
    exact = x.reshape(-1, 3)
    assert y.dtype == np.float64
    np.testing.assert_allclose(mean, exact.mean(axis=0), rtol=1e-15)
    np.testing.assert_allclose(variance, exact.var(axis=0, ddof=1), rtol=1e-13)
    expected = (x - exact.mean(axis=0)) / np.sqrt(exact.var(axis=0) + 1e-3) * vectors["scale"] + vectors["offset"]
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


def test_batch_norm_gradients_of_given_statistics() -> None:
    """TensorFlow has none with respect to mean and variance in inference; here they are the formula's derivatives."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    jnp = jax.numpy
    good = GOOD[NORM]
    x, arriving = good["x"], counted(2, 3, 2, 3) + np.float32(0.5)
    x64, scale, mean, variance, dy = (
        a.astype(np.float64) for a in (x, good["scale"], good["mean"], good["variance"], arriving)
    )
    inverse = 1 / np.sqrt(variance + np.float64(np.float32(1e-3)))
    to_mean = -(dy.sum(axis=(0, 1, 2)) * scale * inverse)
    to_variance = -0.5 * (dy * (x64 - mean)).sum(axis=(0, 1, 2)) * scale * inverse**3

    def function(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        return eq.nn.fused_batch_norm(x, scale, offset, mean, variance, 1e-3, is_training=False)[0]

    operands = [x, *(good[key] for key in VECTORS)]
    tensors = [torch.tensor(a, requires_grad=True) for a in operands]
    in_torch = torch.autograd.grad((function(*tensors) * torch.tensor(arriving)).sum(), tensors[3:])
    in_jax = jax.grad(lambda *a: (function(*a) * arriving).sum(), (3, 4))(*(jnp.asarray(a) for a in operands))
    for gradients in (in_torch, in_jax):
        for gradient, exact in zip(gradients, (to_mean, to_variance), strict=True):
            np.testing.assert_allclose(np.asarray(gradient), exact, rtol=1e-6)


@pytest.mark.parametrize("way", ("torch.compile", "jax.jit"))
def test_per_channel_gradient_of_high_rank_when_traced(way: str) -> None:
    """TensorFlow's shape function refuses ranks above 4; here any rank works, and gives the bits of the flat one."""
    op = f"{CHANNELS}Gradient"
    bounds = {"min": array(-1, -0.5, 0), "max": array(1, 0.25, 0)}
    for shape in ((2, 2, 1, 2, 3), (2, 1, 2, 1, 2, 3)):
        arrays = {"gradients": counted(*shape) + 1, "inputs": counted(*shape)}
        traced = evaluate_in(way, op, arrays | bounds)
        flat = evaluate_in("numpy", op, {key: value.reshape(-1, 3) for key, value in arrays.items()} | bounds)
        for name, result, expected in zip(RESULTS[op], traced, flat, strict=True):
            assert_same_bits(result, expected.reshape(result.shape), what=name)


# The page


def page() -> str:
    def table(entries: tuple[Entry, ...]) -> list[str]:
        rows = ["| source | operator | input | TensorFlow 2.21 | exactqat |", "|---|---|---|---|---|"]
        for entry in entries:
            ours = entry.ours or answer_of(entry.calls[0])
            rows.append(f"| {entry.id} | {entry.operators} | {entry.bad_input} | {entry.tensorflow} | {ours} |")
        return rows

    lines = [
        "# Inputs that broke TensorFlow",
        "",
        "How exactqat answers the inputs of TensorFlow's security advisories and crash reports, beside TensorFlow",
        "2.21. The tests run each of them in NumPy, PyTorch and JAX;",
        "`PYTHONPATH=tests python tests/operators/test_bad_input.py --write-docs` writes this page. Issue numbers",
        "refer to tensorflow/tensorflow.",
        "",
        "## Security advisories",
        "",
        "Published as aborts or as out-of-bounds reads or writes, and fixed in TensorFlow 2.21.",
        "",
        *table(ADVISORIES),
        "",
        "## Inputs that TensorFlow 2.21 still does not handle",
        "",
        *table(STILL_BAD),
    ]
    return "\n".join(lines) + "\n"


def answer_of(case: Call) -> str:
    try:
        getattr(eq.raw_ops, case.op)(**case.arguments)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}".replace("|", "\\|")
    raise RuntimeError(f"{case.name} is accepted: its entry must say with which result")


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: PYTHONPATH=tests python tests/operators/test_bad_input.py --write-docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help="writes docs/advisories.md")
    parser.add_argument("--run", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run, options.first)
    elif options.write_docs:
        PAGE.write_text(page())
    else:
        parser.error("nothing to do; this file is for pytest")


if __name__ == "__main__":
    main()
