# SPDX-License-Identifier: Apache-2.0
"""The memory that a training step takes, float and quantization-aware.

Each network trains in a fresh process; what counts is how far the process's resident set rose, from before the network
existed to its peak in a few steps (VmHWM - VmRSS of /proc/self/status). That is weights, gradients, activations kept
for the backward pass, and whatever allocators hold on to: what the machine must have. Counting PyTorch's own
allocations would miss the results that exactqat puts into its own blocks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Images in a step, channels, height, width; classes.
TASKS = {"mobilenet_v2": ((16, 3, 96, 96), 1000)}
CONTESTANTS = ("float", "QAT, ema ranges", "QAT, learned ranges")
STEPS = 4


def compare(network: str) -> dict[str, Any]:
    """MiB of each contestant's step."""
    images, _ = TASKS[network]
    sizes = {}
    for contestant in CONTESTANTS:
        command = [sys.executable, str(Path(__file__).resolve()), network, contestant]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the step of {network}, {contestant}, failed:\n{done.stderr[-3000:]}")
        sizes[contestant] = json.loads(done.stdout.splitlines()[-1])
    return {
        "network": network,
        "images": "x".join(map(str, images)),
        "how": "Rise of the resident set to its peak, each in a fresh process.",
        "step_mib": sizes,
    }


def _resident(field: str) -> float:
    """MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure(network: str, contestant: str) -> float:
    import step
    import torch
    import torch.nn.functional as F

    from exactqat import qat

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape, classes = TASKS[network]
    images = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, shape[:1])
    before = _resident("VmRSS:")
    model = step.BUILDERS[network](shape[1:], classes).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if contestant != "float":
        model = qat.prepare(model, images[:2], [qat.Rule(ranges=contestant.split()[1])])
        qat.calibrate(model, [images])
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return _resident("VmHWM:") - before


if __name__ == "__main__":
    print(json.dumps(round(measure(sys.argv[1], sys.argv[2]), 1)))
