# SPDX-License-Identifier: Apache-2.0
"""What each step of quantizing a real network costs: processor seconds and the process' peak memory, a process each.

    python bench/real_steps.py --data FOLDER [--network efficientnet_lite0] [--steps "NAME;NAME"] [--package FOLDER]

FOLDER is laid out as docs/real-data.md says. The network gets weights of four bits and results of eight; 96 photos
calibrate it. Processor seconds are those of all threads together. --package: the folder of another version of the
package, such as `src` of an older commit with its kernels; steps that it does not have are left out.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUDGET = 80
TRAINED_AT_ONCE, TRAINED = 16, 6


def measured(name: str, network: str) -> None:
    """Prints the seconds of a step, and the peak so far, in MiB."""
    sys.path.insert(0, str(Path(__file__).parent / "accuracy"))
    import numpy as np
    import torch
    from networks import TASKS, accuracy
    from torch.nn import functional as F

    from exactqat import qat, tune

    warnings.simplefilter("ignore")
    task = TASKS[network]
    model = task.network().eval()
    inputs, targets = task.data(0)[0]
    inputs, targets = inputs[: task.calibration], targets[: task.calibration]
    images = torch.from_numpy(inputs)

    def prepared(ranges: str = "ema", check: bool = False) -> Any:
        rules = [qat.Rule("input", activation_bits=8), qat.Rule(weight_bits=4, activation_bits=8, ranges=ranges)]
        return qat.prepare(model, images[:2], rules, check=check)

    def calibrated(ranges: str = "ema") -> Any:
        network = prepared(ranges)
        qat.calibrate(network, images.split(32))
        return network

    def searched(**options: Any) -> Callable[[], object]:
        network = calibrated()
        return lambda: tune.search(network, (inputs, targets), accuracy, budget=BUDGET, progress=False, **options)

    def trained(ranges: str, frozen: bool = False) -> Callable[[], object]:
        network = calibrated(ranges)
        if frozen:
            qat.freeze(network)
        optimizer = torch.optim.SGD(network.train().parameters(), 1e-4)
        batch, classes = images[:TRAINED_AT_ONCE], torch.from_numpy(np.asarray(targets[:TRAINED_AT_ONCE]))

        def train(count: int) -> None:
            for _ in range(count):
                F.cross_entropy(network(batch), classes).backward()
                optimizer.step()
                optimizer.zero_grad()

        train(1)
        return lambda: train(TRAINED)

    def calibrating(ranges: str) -> Callable[[], object]:
        network = prepared(ranges)
        return lambda: qat.calibrate(network, images.split(32))

    def applied(method: str) -> Callable[[], object]:
        network = calibrated()
        return lambda: getattr(qat, method)(network, images)

    starts: dict[str, Callable[[], Callable[[], object]]] = {
        "network and photos": lambda: lambda: None,
        "prepare": lambda: lambda: prepared(check=True),
        "calibrate, averages": lambda: calibrating("ema"),
        "calibrate, learned": lambda: calibrating("learned"),
        "reestimate": lambda: applied("reestimate"),
        "round_weights": lambda: applied("round_weights"),
        "correct_biases": lambda: applied("correct_biases"),
        "search": searched,
        "search: batch_norm, rounding, bias": lambda: searched(methods=["batch_norm", "rounding", "bias"]),
        "training step, averages": lambda: trained("ema"),
        "training step, learned": lambda: trained("learned"),
        "training step, frozen": lambda: trained("ema", frozen=True),
    }
    run = starts[name]()
    began = time.process_time()
    run()
    seconds = (time.process_time() - began) / (TRAINED if name.startswith("training step") else 1)
    print(f"\n{seconds:.2f} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")


STEPS = (
    "network and photos", "prepare", "calibrate, averages", "calibrate, learned", "reestimate", "round_weights",
    "correct_biases", "search", "search: batch_norm, rounding, bias", "training step, averages",
    "training step, learned", "training step, frozen",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", default="efficientnet_lite0")
    parser.add_argument("--steps", default=";".join(STEPS), help="between semicolons")
    parser.add_argument("--package", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    os.environ["REAL_DATA"] = str(flags.data.resolve())
    if flags.one:
        measured(flags.steps, flags.network)
        return
    paths = [str(flags.package.resolve())] if flags.package else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    print(f"| {flags.network} | processor seconds | peak, MiB |\n| --- | --- | --- |")
    for step in flags.steps.split(";"):
        command = [sys.executable, __file__, "--data", str(flags.data), "--network", flags.network, "--steps", step]
        done = subprocess.run([*command, "--one"], capture_output=True, text=True, env=environment)
        seconds, peak = done.stdout.splitlines()[-1].split() if done.returncode == 0 else ("-", "-")
        print(f"| {step} | {seconds} | {peak} |", flush=True)


if __name__ == "__main__":
    main()
