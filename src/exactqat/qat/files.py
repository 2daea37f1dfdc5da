# SPDX-License-Identifier: Apache-2.0
"""What a quantized .onnx file is, compared with its runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..deploy.formats.read_onnx import read_onnx
from ..deploy.inspect import EXAMPLES, SECONDS, Inspection
from ..deploy.inspect import inspect_onnx as inspect_network
from ..kit.device import Profile
from ..kit.train.files import OpenedFile


def inspect_onnx(
    path: str | os.PathLike[str],
    data: Any = None,
    examples: int = EXAMPLES,
    devices: Sequence[str | Profile] | None = None,
    seed: int = 0,
    seconds: float = SECONDS,
    progress: Callable[[str], None] | None = None,
) -> Inspection:
    """`deploy.inspect` for a quantized .onnx file, in QDQ or QOperator format: what is in it, run on onnxruntime and
    compared with the simulation.

    Equality is claimed for operators that other tools write as `deploy.write_onnx` does, in files whose codes are
    uint8.

    Args:
        data: inputs to run: an array for a network with one input, a mapping by the inputs' names, or a sequence in
            their order, each with the file's axes. Real numbers are quantized; integers are codes, laid out as in
            `Inspection.layers`, channels last. None: random codes.
        examples: how many random examples, or at most how many of `data`.
        devices: whose runtimes run the file; by default "onnxruntime-x86" if this processor computes the same.
        seed: for the random codes.
        seconds: time limit for a process that runs or simulates a device.
        progress: called with what is done next.

    Raises:
        OSError: the file cannot be read.
        Refusal: it is damaged, or in real numbers.
        UnsupportedOperator: a part of it cannot be computed here in the file's integers; every such part is named.
        ValueError: the data or another argument does not fit.
    """
    if progress is not None:
        progress("reading")
    network = OpenedFile(read_onnx(path)).on_onnxruntime()
    return inspect_network(network, data, examples, devices, seed, seconds, progress)


__all__ = ["inspect_onnx"]
