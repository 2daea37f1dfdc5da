# SPDX-License-Identifier: Apache-2.0
"""Times a whole training step, float and quantization-aware, beside torch.ao's eager QAT; the contestants take turns.

    python bench/step.py [--networks mobilenet_v2 dscnn] [--repeats 10] [--threads 1]

A step is forward, cross entropy, backward and SGD, on random images in channels_last. `torch float` and `torch.ao QAT`
run the same network out of torch.nn's modules, with as many zeros on both sides where ours has TensorFlow's padding:
the same sizes and the same work. In favor of torch.ao ReLU6 is ReLU, which it can fuse, and sums stay unquantized, as
its eager mode does not see them. Machines are shared and noisy: read the ratios, and the spread beside them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import exactqat as eq
from exactqat import qat
from exactqat.job import models

# Channels, height, width; images in a step; classes.
TASKS = {
    "mobilenet_v2": ((3, 96, 96), 16, 1000),
    "dscnn": ((1, 49, 10), 64, 12),
    "small_mobilenet": ((1, 8, 8), 16, 10),
}
FLOAT, TORCH_QAT, OUR_FLOAT = "torch float", "torch.ao QAT", "exactqat float"


def of_torch_modules(model: nn.Module, shape: Sequence[int]) -> nn.Module:
    """A copy whose convolutions are torch.nn's and whose ReLU6 is ReLU; `shape` is that of one image."""
    model = copy.deepcopy(model)
    paddings: dict[nn.Module, tuple[int, int]] = {}

    def note(module: qat.Conv2d, inputs: tuple[torch.Tensor]) -> None:
        rows, columns = module.pads(*inputs[0].shape[2:])
        paddings[module] = (max(rows), max(columns))

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, qat.Conv2d)]
    with torch.no_grad():
        model.eval()(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, qat.Conv2d):
                plain = nn.Conv2d(
                    child.in_channels, child.out_channels, child.kernel_size, child.stride, paddings[child],
                    child.dilation, child.groups, child.bias is not None,
                )  # fmt: skip
                plain.load_state_dict(child.state_dict())
                setattr(parent, name, plain)
            elif isinstance(child, nn.ReLU6):
                setattr(parent, name, nn.ReLU())
    return model


def torch_qat(model: nn.Module) -> nn.Module:
    """torch.ao's eager quantization-aware training of a network of torch's modules, fused as far as it can."""
    from torch.ao import quantization

    model = copy.deepcopy(model).train()
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU)
    groups = []
    for path, parent in model.named_modules():
        if isinstance(parent, nn.Sequential):
            children = list(parent.named_children())
            for start, (_, child) in enumerate(children):
                run = [
                    f"{path}.{name}" if path else name
                    for (name, follower), kind in zip(children[start:], kinds, strict=False)
                    if isinstance(follower, kind)
                ]
                if isinstance(child, nn.Conv2d) and len(run) > 1:
                    groups.append(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = quantization.fuse_modules_qat(model, groups)
        fused.qconfig = quantization.get_default_qat_qconfig("x86")
        return quantization.prepare_qat(nn.Sequential(quantization.QuantStub(fused.qconfig), fused).train())


def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """One training step, to be called again and again."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return run


def contestants(network: str) -> dict[str, Callable[[], None]]:
    """The step of every contestant on the same images, all networks with the same weights."""
    shape, batch, classes = TASKS[network]
    torch.manual_seed(0)
    images = torch.randn(batch, *shape).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, (batch,))
    ours = models.network(network, shape, classes).to(memory_format=torch.channels_last)
    plain = of_torch_modules(ours, shape).to(memory_format=torch.channels_last)
    entries = {FLOAT: step(plain, images, labels)}
    try:
        entries[TORCH_QAT] = step(torch_qat(plain), images, labels)
    except ImportError:
        warnings.warn("this PyTorch has no torch.ao.quantization", stacklevel=1)
    entries[OUR_FLOAT] = step(ours, images, labels)
    for ranges in ("ema", "learned"):
        prepared = qat.prepare(ours, images[:2], [qat.Rule(ranges=ranges)])
        qat.calibrate(prepared, [images])
        entries[f"exactqat QAT, {ranges}"] = step(prepared, images, labels)
    frozen = qat.prepare(ours, images[:2], [qat.Rule()])
    qat.calibrate(frozen, [images])
    qat.freeze(frozen)
    entries["exactqat QAT, frozen"] = step(frozen, images, labels)
    return entries


def race(entries: dict[str, Callable[[], None]], repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each step; the contestants take turns."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    for repeat in range(warm_up + repeats):
        for name, call in entries.items():
            start = time.perf_counter()
            call()
            if repeat >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=TASKS, default=["mobilenet_v2", "dscnn"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    eq.set_num_threads(options.threads)

    for network in options.networks:
        shape, batch, _ = TASKS[network]
        table = Table(
            title=f"{network}, images {'x'.join(map(str, (batch, *shape)))}: one training step, "
            f"medians of {options.repeats}, {options.threads} threads",
            title_justify="left",
        )
        table.add_column("contestant")
        bases = (FLOAT, TORCH_QAT, OUR_FLOAT)
        for column in ("ms", "spread", *(f"/ {base}" for base in bases)):
            table.add_column(column, justify="right")
        times = race(contestants(network), options.repeats)
        medians = {name: statistics.median(values) for name, values in times.items()}
        for name, values in times.items():
            # Half of the distance between the quartiles; of a single value there is none.
            quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [medians[name]] * 3
            table.add_row(
                name,
                f"{1e3 * medians[name]:.1f}",
                f"±{(quartiles[2] - quartiles[0]) / 2 / medians[name]:.0%}",
                *(f"{medians[name] / medians[base]:.2f}" if base in medians else "–" for base in bases),
            )
        Console().print(table)


if __name__ == "__main__":
    main()
