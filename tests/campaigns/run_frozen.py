# SPDX-License-Identifier: Apache-2.0
"""A frozen network in PyTorch beside the device: all codes of all layers, profile by profile, and the .tflite file on
the runtimes that this machine has.

    python tests/campaigns/run_frozen.py                 all networks
    python tests/campaigns/run_frozen.py plain deep      those with one of these words in their name
    python tests/campaigns/run_frozen.py --one NAME      one network here; prints its row as JSON

Networks: those of tests/plain_networks.py after a few steps, the job's own ones after some hundred steps on digits,
deep ones without training, and torchvision's and timm's where they are installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _tests_folder  # noqa: F401
import torch
from agreement import frozen_differences, leaves
from torch import nn

from exactqat import deploy, qat
from exactqat.deploy import PROFILES, unclaimed
from exactqat.deploy.lower import lower
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.kit.device import Refusal

SECONDS = 1800
BITS = {"": {}, " 4 bits": {"weight_bits": 4, "activation_bits": 4}}
OF_THE_JOB = {
    "small_mobilenet": (1, 8, 8),
    "dscnn": (1, 25, 10),
    "mobilenet_v1": (3, 48, 48),
    "resnet8": (3, 16, 16),
}
# Some of tests/campaigns/networks.txt.
OF_COLLECTIONS = (
    *(f"torchvision {name}" for name in ("resnet18", "resnet50", "squeezenet1_1", "shufflenet_v2_x0_5", "googlenet")),
    *(f"torchvision {name}" for name in ("efficientnet_b0", "vit_tiny", "mobilenet_v3_small", "regnet_x_400mf")),
    *(f"timm {name}" for name in ("mobilenetv2_050", "efficientnet_lite0", "ghostnet_100", "repvgg_a0", "lcnet_050")),
    *(f"timm {name}" for name in ("edgenext_xx_small", "mobilevit_xxs")),
)


def plain_steps(prepared: qat.PreparedModel, examples: tuple[Any, ...], steps: int = 4) -> None:
    """A few steps towards random targets, the second half of them frozen."""
    parameters = [parameter for parameter in prepared.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, 1e-3) if parameters else None
    prepared.train()
    for step in range(steps):
        if step == steps // 2:
            qat.freeze(prepared)
        results = leaves(prepared(*examples))
        if optimizer is not None:
            optimizer.zero_grad()
            loss = sum((result - torch.randn_like(result)).square().mean() for result in results)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()


def digits(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits that scikit-learn brings along, in the shape of a network's input."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    if len(shape) == 1:
        return images.flatten(1)[:, : shape[0]], torch.from_numpy(data.target)
    resized = nn.functional.interpolate(images, shape[1:], mode="bilinear").expand(-1, shape[0], -1, -1)
    return resized.contiguous(), torch.from_numpy(data.target)


def trained_on_digits(name: str, rule: qat.Rule, steps: int = 300) -> tuple[qat.PreparedModel, tuple[Any, ...]]:
    from exactqat.application.job import models

    shape = OF_THE_JOB[name]
    images, labels = digits(shape)
    prepared = qat.prepare(models.network(name, shape, 10), images[:2], [rule])
    qat.calibrate(prepared, [images[:128]])
    optimizer = torch.optim.Adam(prepared.parameters(), 1e-3)
    prepared.train()
    for step in range(steps):
        if step == steps - 20:
            qat.freeze(prepared)
        rows = torch.randint(0, 1500, (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(prepared(images[rows]), labels[rows]).backward()
        optimizer.step()
    return prepared, (images[1500:1516],)


def a_few_steps(
    model: nn.Module, examples: tuple[Any, ...], rule: qat.Rule
) -> tuple[qat.PreparedModel, tuple[Any, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # With auxiliary results, training computes something else.
        model.train(not getattr(model, "aux_logits", False))
        prepared = qat.prepare(model, examples if len(examples) > 1 else examples[0], [rule])
    qat.calibrate(prepared, [examples if len(examples) > 1 else examples[0]])
    plain_steps(prepared, examples)
    return prepared, examples


def untrained(model: nn.Module, examples: tuple[Any, ...], rule: qat.Rule) -> tuple[qat.PreparedModel, tuple[Any, ...]]:
    prepared = qat.prepare(model, examples[0], [rule])
    qat.calibrate(prepared, [examples[0]])
    qat.freeze(prepared)
    return prepared, examples


def deep(blocks: int, channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for block in range(blocks):
        layers += [nn.Conv2d(channels if block else 3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
        layers += [nn.ReLU() if block % 2 else nn.Identity()]
    return nn.Sequential(*layers)


def networks() -> dict[str, Callable[[], tuple[qat.PreparedModel, tuple[Any, ...]]]]:
    """Name -> what makes a frozen network and inputs for it."""
    import plain_networks

    builders: dict[str, Any] = {}
    for bits, settings in BITS.items():
        rule = qat.Rule(**settings)
        for name in OF_THE_JOB:
            builders[f"digits {name}{bits}"] = lambda name=name, rule=rule: trained_on_digits(name, rule)
        for blocks, channels in ((20, 16), (50, 8), (12, 320)):
            builders[f"deep {blocks} x {channels}{bits}"] = lambda b=blocks, c=channels, rule=rule: untrained(
                deep(b, c), (torch.randn(2, 3, 16, 16),), rule
            )
    for name, build in plain_networks.NETWORKS.items():
        builders[f"plain {name}"] = lambda build=build: a_few_steps(*build(), qat.Rule())
        builders[f"plain {name} 4 bits"] = lambda build=build: a_few_steps(*build(), qat.Rule(**BITS[" 4 bits"]))
    if find_spec("torchvision") and find_spec("timm"):
        import zoo

        for name, build in zoo.builders().items():
            if name in OF_COLLECTIONS:
                builders[name] = lambda build=build: a_few_steps(*build(), qat.Rule())
    return builders


def one(name: str) -> dict[str, Any]:
    """What came of one network: codes compared and differing, by profile."""
    start = time.monotonic()
    torch.manual_seed(0)
    row: dict[str, Any] = {"name": name, "outcome": "through", "values": 0, "differing": {}, "runtime_values": 0}
    try:
        prepared, examples = networks()[name]()
        prepared.eval()
        for profile in PROFILES:
            values, differing, codes = frozen_differences(prepared, examples, profile)
            row["values"] += values
            if differing:
                row["differing"][profile] = differing
            if profile in deploy.profiles_here():
                graph = lower(prepared)
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        path = deploy.write_tflite(graph, Path(folder) / "model.tflite")
                        report = deploy.verify(graph, path, codes, profile)
                    except (Refusal, RuntimeRefusal):
                        row["refused_by"] = [*row.get("refused_by", []), profile]
                        continue
                claimed = not unclaimed(graph, profile)
                row["runtime_values"] += report.values
                if claimed and report.differing:
                    row["differing"][f"{profile} runtime"] = report.differing
                elif report.differing:
                    row["unclaimed"] = row.get("unclaimed", 0) + report.differing
    except qat.UnsupportedOperator as refusal:
        row |= {"outcome": "refused", "reason": str(refusal)[:300]}
    except Exception as error:
        row |= {"outcome": "error", "reason": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return {**row, "seconds": round(time.monotonic() - start)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--rows", type=Path, help="also keep the rows here, as JSON lines")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return 0
    rows = []
    for name in networks():
        if options.words and not any(word in name for word in options.words):
            continue
        command = [sys.executable, __file__, "--one", name]
        try:
            child = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            lines = child.stdout.strip().splitlines()
            row = json.loads(lines[-1]) if lines else {"name": name, "outcome": "died", "reason": child.stderr[-300:]}
        except subprocess.TimeoutExpired:
            row = {"name": name, "outcome": "took too long"}
        rows.append(row)
        print(
            f"{name}: {row['outcome']}, {row.get('values', 0):,} codes, {row.get('runtime_values', 0):,} on runtimes, "
            f"differing {row.get('differing', '')} {row.get('unclaimed', '')} {row.get('reason', '')[:200]}",
            flush=True,
        )
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    through = [row for row in rows if row["outcome"] == "through"]
    wrong = [row["name"] for row in rows if row.get("differing") or row["outcome"] not in ("through", "refused")]
    values, on_runtimes = (sum(row[key] for row in through) for key in ("values", "runtime_values"))
    print(f"{len(through)} of {len(rows)} networks, {values:,} codes, {on_runtimes:,} on runtimes; wrong: {wrong or 0}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
