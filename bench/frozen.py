# SPDX-License-Identifier: Apache-2.0
"""What the device's own integers cost in the frozen phase: a step, and an evaluation, beside the same ones in real
numbers with fake quantization; both take turns.

    python bench/frozen.py [--framework torch] [--networks mobilenet_v2 dscnn] [--profiles xnnpack-x86 reference]
                           [--repeats 10] [--threads 2] [--device cpu]

Networks and images are those of bench/step.py. In JAX (plain functions) and Keras (on JAX, unless KERAS_BACKEND says
otherwise) frozen_elsewhere.py builds them, with weights of their own. Machines are shared and noisy: read the ratio,
which is the median over the turns, and the spread beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import step
import torch
from rich.console import Console
from rich.table import Table

from exactqat import qat

INTEGERS, REAL = "the device's integers", "real numbers"


def frozen(case: step.Task, profile: str, real: bool) -> qat.PreparedModel:
    """A network in its frozen phase. real: as if there were no device for its rules."""
    model = qat.prepare(case.model, case.images, device=profile).to(case.images.device)
    qat.calibrate(model, [case.images])
    qat.freeze(model)
    if real:
        model.profile = None
    return model.train()


def training(model: qat.PreparedModel, case: step.Task) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.other_parameters(), 1e-6)

    def run() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(case.images), case.labels).backward()
        optimizer.step()
        if case.images.is_cuda:
            torch.cuda.synchronize()

    return run


def evaluation(model: qat.PreparedModel, case: step.Task) -> Callable[[], None]:
    def run() -> None:
        model.eval()
        with torch.no_grad():
            model(case.images)
        if case.images.is_cuda:
            torch.cuda.synchronize()
        model.train()

    return run


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compared(integers: Callable[[], None], real: Callable[[], None], repeats: int) -> dict[str, list[float]]:
    """Seconds of every turn."""
    times: dict[str, list[float]] = {INTEGERS: [], REAL: []}
    for turn in range(repeats + 2):  # two to warm up
        pair = {INTEGERS: seconds(integers), REAL: seconds(real)}
        if turn >= 2:
            for name, value in pair.items():
                times[name].append(value)
    return times


def raced(framework: str, case: step.Task, profile: str, repeats: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """A step and an evaluation, and seconds of every turn."""
    if framework == "torch":
        # Not one model that changes its device: it would forget what it has prepared for the device before.
        models = [frozen(case, profile, real) for real in (False, True)]
        for what, make in (("step", training), ("evaluation", evaluation)):
            yield what, compared(*(make(model, case) for model in models), repeats)
        return
    import frozen_elsewhere

    layers = step.keras_layers(case.model, case.shape)
    images, labels = case.images.permute(0, 2, 3, 1).contiguous().numpy(), case.labels.numpy()
    sides = [frozen_elsewhere.KITS[framework](layers, images, labels, device) for device in (profile, None)]
    for what in ("step", "evaluation"):
        yield what, compared(*(side[what] for side in sides), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=["torch", "jax", "keras"], default="torch")
    parser.add_argument("--networks", nargs="+", choices=list(step.TASKS), default=["mobilenet_v2", "dscnn"])
    parser.add_argument("--profiles", nargs="+", default=["xnnpack-x86", "reference"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, help="in a step; else those of bench/step.py")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table("network", "profile", "", INTEGERS, REAL, "ratio", "spread")
    for network in options.networks:
        for profile in options.profiles:
            case = step.task(network, options.device, options.images)
            for what, times in raced(options.framework, case, profile, options.repeats):
                ratios = sorted(a / b for a, b in zip(times[INTEGERS], times[REAL], strict=True))
                medians = [f"{1e3 * statistics.median(times[name]):.1f} ms" for name in (INTEGERS, REAL)]
                spread = f"{ratios[len(ratios) // 4]:.2f}..{ratios[-1 - len(ratios) // 4]:.2f}"
                table.add_row(network, profile, what, *medians, f"{statistics.median(ratios):.2f}", spread)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
