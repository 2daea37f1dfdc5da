# SPDX-License-Identifier: Apache-2.0
"""What the kit reaches, trained: a U-Net that segments, a YOLO-like detector with three outputs, keywords by Conv1d.

Each is trained in float, prepared, trained on and frozen; the device's integers are then judged as the network is. It
may lose one point against float, and what PyTorch says of the frozen model is what the device gives.

EXACTQAT_ACCURACY=1 trains them whole (two minutes); the default run trains a tenth and asks for the equality alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import TASKS, Task, train

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from exactqat import deploy, qat
from exactqat.deploy.axes import on_device
from exactqat.deploy.lower import lower_with_layouts

WHOLE = os.environ.get("EXACTQAT_ACCURACY") == "1"


def device_outputs(graph: deploy.Graph, layouts: dict[str, Any], images: torch.Tensor) -> list[torch.Tensor]:
    """What the device's integers represent, in PyTorch's order of axes."""
    (feature,) = graph.inputs
    codes = deploy.quantize(on_device(images.numpy(), layouts[feature]), graph.tensors[feature].quantization)
    results = deploy.simulate(graph, codes, batch_size=64)
    outputs = []
    for name in graph.outputs:
        real = deploy.dequantize(results[name], graph.tensors[name].quantization)
        outputs.append(torch.from_numpy(real.transpose(0, 3, 1, 2).copy() if real.ndim == 4 else real))
    return outputs


def judged(task: Task, outputs: Any, targets: Any) -> float:
    return task.score(outputs[0] if isinstance(outputs, list) and len(outputs) == 1 else outputs, targets)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.slow
def test_little_is_lost_and_the_device_gives_it(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    torch.manual_seed(0)
    network = task.build()
    share = 1 if WHOLE else 10
    train(network, task, task.batches // share, task.rate, seed=1)
    rng = np.random.default_rng(2)
    images, targets = task.data(rng, 1024 if WHOLE else 64)

    network.eval()
    with torch.no_grad():
        in_float = task.score(network(images), targets)
    model = qat.prepare(network, images[:2])
    qat.calibrate(model, task.data(rng, 128)[0].split(32))
    train(model, task, task.tuning // share, task.rate / 5, seed=3)
    qat.freeze(model)
    train(model, task, task.tuning // share // 2, task.rate / 20, seed=4)
    model.eval()
    with torch.no_grad():
        in_pytorch = judged(task, model(images), targets)

    graph, layouts = lower_with_layouts(model)
    on_the_device = judged(task, device_outputs(graph, layouts, images), targets)
    print(f"{name}: float {in_float:.4f}, PyTorch {in_pytorch:.4f}, device {on_the_device:.4f}")
    assert on_the_device == in_pytorch
    if WHOLE:
        assert on_the_device >= in_float - 0.01

    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    (feature,) = graph.inputs
    codes = deploy.quantize(on_device(images[:4].numpy(), layouts[feature]), graph.tensors[feature].quantization)
    for profile in ("xnnpack-x86", "reference"):
        report = deploy.verify(graph, path, codes, profile)
        assert report.differing == 0 and report.values > 0
