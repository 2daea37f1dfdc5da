# SPDX-License-Identifier: Apache-2.0
"""Random small networks trained for a few steps: the process lives, its heap is whole and the gradients are right.

Training hands PyTorch's own kernels tensors that a user's float network never did: channels last in memory, results of
this library's operators, views. What they do with those is asked here, in the memory checks of the C library:

    python tests/campaigns/fuzz_steps.py --cases 2000

Each case has a process of its own. Its network is a convolution before, one of any window, strides, dilation, groups,
padding and direction, a batch norm, an activation and another convolution. Of each it is asked that

- the gradients of its float phase are those that the same network has with PyTorch's plain kernels;
- a step of every phase (float, quantized, frozen) is taken and no block of memory was written past its end.

It prints its seed; `--seed S --case N ...` runs cases again.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import random
import secrets
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exactqat import qat

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}
SIZES = {1: (16, 33, 96), 2: (8, 15, 24, 48, 96)}
# Sums of ten thousands of float32 products in another order.
TOLERANCE = 2e-3
SECONDS = 120


def draw(choose: random.Random) -> dict[str, Any]:
    """One network and its input."""
    rank = choose.choice([1, 2, 2, 2, 2])
    transposed = choose.random() < 0.1
    groups = 1 if transposed else choose.choice([1, 1, 1, 2, 4])
    window = [choose.choice([1, 1, 1, 2, 3, 5])] * rank if choose.random() < 0.7 else [1, 3][:rank]
    return {
        "rank": rank,
        "transposed": transposed,
        "groups": groups,
        "channels": groups * choose.choice([1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 32]),
        "outputs": groups * choose.choice([1, 2, 3, 4, 8, 12, 16, 17, 24, 48]),
        "window": window,
        "strides": [choose.choice([1, 2, 2, 3, 4]) for _ in range(rank)],
        "padding": [choose.choice([0, 0, size // 2]) for size in window],
        "dilation": [choose.choice([1, 1, 1, 2]) if size > 1 else 1 for size in window],
        "batch": choose.choice([1, 2, 3, 4]),
        "size": [choose.choice(SIZES[rank]) for _ in range(rank)],
        "last": choose.random() < 0.5,
        "bias": choose.random() < 0.5,
        "norm": choose.random() < 0.7,
    }


def network(case: dict[str, Any]) -> nn.Module:
    rank, channels, outputs = case["rank"], case["channels"], case["outputs"]
    middle: nn.Module
    if case["transposed"]:
        # A device cuts off no more than the window less one position.
        middle = TRANSPOSED[rank](channels, outputs, case["window"], case["strides"], bias=case["bias"])
    else:
        middle = CONVOLUTIONS[rank](
            channels, outputs, case["window"], case["strides"], case["padding"], case["dilation"], case["groups"],
            case["bias"],
        )  # fmt: skip
    norm = NORMS[rank](outputs) if case["norm"] else nn.Identity()
    return nn.Sequential(
        CONVOLUTIONS[rank](3, channels, 3, padding=1), nn.ReLU(), middle, norm, nn.ReLU6(),
        CONVOLUTIONS[rank](outputs, 5, 1),
    )  # fmt: skip


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def quantize(model: nn.Module, on: bool) -> None:
    model.quantizing = on


def run(case: dict[str, Any], seed: int) -> str:
    """What came of it: "ok", or "refused" where the device has no such operator.

    Raises:
        AssertionError: a gradient is not what plain kernels give.
    """
    torch.manual_seed(seed)
    x = torch.randn(case["batch"], 3, *case["size"])
    if case["last"] and case["rank"] == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    try:
        model = qat.prepare(network(case).train(), x)
    except (qat.UnsupportedOperator, RuntimeError) as error:
        return f"refused: {error}"
    qat.calibrate(model, [x])
    model.train()
    quantize(model, False)
    results = gradients(model, x)
    with torch.backends.mkldnn.flags(enabled=False):
        wanted = gradients(model, x)
    largest = max(float(gradient.abs().max()) for gradient in wanted)
    for first, second in zip(results, wanted, strict=True):
        assert torch.allclose(first, second, TOLERANCE, TOLERANCE * largest), (first - second).abs().max()
    quantize(model, True)
    for _ in range(3):
        gradients(model, x)
    qat.freeze(model)
    model.train()
    for _ in range(2):
        gradients(model, x)
    return "ok"


def in_child(case: dict[str, Any], seed: int) -> str:
    """`run` in a forked process, and what became of that."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(SECONDS)
        try:
            said = run(case, seed)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        # In order, as it is giving memory back that finds what was written past an end.
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said if status == 0 else f"ended with {status} after {said!r}"


def checked_again() -> None:
    """Starts this program again with the C library's checks of its heap, where it has them."""
    if "MALLOC_CHECK_" in os.environ:
        return
    library = ctypes.util.find_library("c_malloc_debug")
    libraries = [library] if library else [str(p) for p in Path("/lib").glob("*/libc_malloc_debug.so.0")]
    environment = os.environ | {"MALLOC_CHECK_": "3", "OMP_NUM_THREADS": "1"}
    environment |= {"LD_PRELOAD": libraries[0]} if libraries else {}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", type=int, nargs="+", default=None)
    arguments = parser.parse_args()
    checked_again()
    warnings.filterwarnings("ignore")
    # One thread, which makes forking safe and repeats a case to the bit.
    torch.set_num_threads(1)
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    # Brings what every child would else import on its own.
    run(draw(random.Random(0)), 0)
    numbers = range(arguments.cases) if arguments.case is None else arguments.case
    refused = failed = 0
    for number in numbers:
        case = draw(random.Random(f"{seed} {number}"))
        said = in_child(case, number)
        refused += said.startswith("refused")
        if said != "ok" and not said.startswith("refused"):
            failed += 1
            print(f"case {number}: {said}\n  {json.dumps(case)}", flush=True)
        elif arguments.case is not None:
            print(said)
    print(f"{len(numbers)} cases: {failed} failed, {refused} refused")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
