# SPDX-License-Identifier: Apache-2.0
"""Quantizes a network of timm and writes a verified .tflite file that takes an application's images.

    python quantize_timm.py mobilenetv3_small_050 --data images.npz --out model.tflite --pretrained --epochs 2

``images.npz`` holds pixels `x` [N, H, W, 3] in 0..255 and classes `y`. The network's own normalization is part of the
file's metadata, and `labels` of the archive, if it has any, are its labels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

from exactqat import deploy, qat


def quantize(
    model: torch.nn.Module,
    pixels: np.ndarray,
    classes: np.ndarray,
    out: Path,
    labels: Any = (),
    epochs: int = 1,
    device: str = "xnnpack-x86",
    rate: float = 1e-4,
) -> deploy.Report:
    """Trains the quantized network, writes it and verifies it; the file takes and returns real numbers.

    Args:
        model: from ``timm.create_model``; its ``pretrained_cfg`` says how images are normalized.
        pixels, classes: images [N, H, W, 3] in 0..255, and their classes.
    """
    own = timm.data.resolve_data_config({}, model=model)
    mean, std = (255 * np.asarray(own[key], np.float32) for key in ("mean", "std"))
    images = torch.from_numpy(((pixels.astype(np.float32) - mean) / std).transpose(0, 3, 1, 2).copy())
    targets = torch.from_numpy(np.asarray(classes, np.int64))
    prepared = qat.prepare(model.train(), images[:2], device=device)
    qat.calibrate(prepared, images[:256].split(32))
    optimizer = torch.optim.AdamW(prepared.parameters(), rate)
    for epoch in range(epochs + 1):
        if epoch == epochs:
            qat.freeze(prepared)  # the last epoch trains the device's integers
        for rows in torch.randperm(len(images)).split(32):
            loss = torch.nn.functional.cross_entropy(prepared(images[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    graph = deploy.lower(prepared.eval())
    graph = deploy.with_metadata(graph, labels=labels, mean=mean.tolist(), std=std.tolist())
    deploy.write_tflite(graph, out, inputs="float32", outputs="float32")
    return deploy.verify(graph, out, model=prepared, data=images[:8])


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantizes a network of timm.")
    parser.add_argument("name")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--device", default="xnnpack-x86")
    options = parser.parse_args()
    with np.load(options.data) as data:
        pixels, classes, labels = data["x"], data["y"], data["labels"].tolist() if "labels" in data else ()
    model = timm.create_model(options.name, options.pretrained, num_classes=int(classes.max()) + 1)
    report = quantize(model, pixels, classes, options.out, labels, options.epochs, options.device)
    print(report)
    raise SystemExit(0 if report.equal else 1)


if __name__ == "__main__":
    main()
