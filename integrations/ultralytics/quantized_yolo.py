# SPDX-License-Identifier: Apache-2.0
"""Trains a YOLO detector quantized, in Ultralytics' own loop, and writes a .tflite file that is verified.

    from ultralytics import YOLO
    from quantized_yolo import train_quantized

    result = train_quantized(YOLO("best.pt"), "yolo.tflite", data="data.yaml", epochs=5, imgsz=320)
    assert result.report.equal

Ultralytics is licensed under AGPL-3.0. This file works with the object that you give it, and neither contains nor
imports any of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exactqat import deploy, qat

# What changes the arithmetic while it trains, and a validation that would see the float network.
SETTINGS = {"amp": False, "val": False, "multi_scale": 0.0}
# How many images set the ranges, and how many the file is verified on.
CALIBRATED, VERIFIED = 256, 8


@dataclass(frozen=True)
class QuantizedYolo:
    """What `train_quantized` returns.

    Attributes:
        path: the .tflite file, with outputs "boxes" (distributions of distances) and "scores" (logits of classes), each
            on a grid of its own, and Ultralytics' ``metadata.json``.
        report: of `deploy.verify`: the file beside the simulation, and beside the network that was trained.
        graph: the device's integers. network: the frozen network.
    """

    path: Path
    report: deploy.Report
    graph: deploy.Graph
    network: qat.PreparedModel


class _Head(torch.nn.Module):
    """The detector up to what its boxes and scores are decoded from."""

    def __init__(self, detector: torch.nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        raw: Any = self.detector(images)
        raw = raw if isinstance(raw, dict) else raw[1]  # in evaluation beside the decoded boxes
        raw = raw.get("one2many", raw)  # a head that selects its boxes itself has two of them
        return {"boxes": raw["boxes"], "scores": raw["scores"]}


class _Callbacks:
    """The network that is trained, in place of the detector's; its parameters are the detector's own."""

    def __init__(self, device: str, rules: Iterable[qat.Rule]) -> None:
        self.device, self.rules = device, tuple(rules)
        self.network: Any = None
        self.images: Any = None

    def on_pretrain_routine_end(self, trainer: Any) -> None:
        detector, batches = trainer.model, []
        for batch in trainer.train_loader:
            batches.append(trainer.preprocess_batch(batch)["img"])
            if sum(map(len, batches)) >= CALIBRATED:
                break
        self.images = torch.cat(batches)[:VERIFIED]
        self.network = qat.prepare(_Head(detector).train(), self.images[:2], self.rules, device=self.device)
        qat.calibrate(self.network, batches)
        height, width = self.images.shape[2:]
        shapes = [(height // int(stride), width // int(stride)) for stride in detector.stride]
        feats = [torch.empty(1, 1, *shape, device=self.images.device) for shape in shapes]  # the loss asks for shapes
        detector.predict = lambda images, *args, **more: {**self.network(images), "feats": feats}

    def on_train_epoch_start(self, trainer: Any) -> None:
        self.network.train()
        if trainer.epoch + 1 == trainer.epochs:
            qat.freeze(self.network)  # the last epoch trains the device's integers


def train_quantized(
    yolo: Any,
    path: str | os.PathLike[str],
    *,
    target: str = "xnnpack-x86",
    rules: Iterable[qat.Rule] = (qat.Rule(),),
    inputs: Any = None,
    outputs: Any = None,
    **settings: Any,
) -> QuantizedYolo:
    """Trains a detector's quantized network and writes its file.

    Args:
        yolo: an ``ultralytics.YOLO`` of the task "detect", trained in float.
        path: the .tflite file to write.
        target: the device whose integers are trained, a name in `deploy.PROFILES`; Ultralytics' ``device`` is where.
        rules: bits and ranges by the paths of layers; see `qat.Rule`.
        inputs, outputs: what the file takes and returns; see `deploy.write_tflite`.
        settings: of Ultralytics' ``train``: data, epochs, imgsz, batch, lr0 and so on. The last epoch is frozen.

    Raises:
        ValueError: the task is another one, there is only one epoch, or a setting would change the arithmetic.
        UnsupportedOperator: a layer cannot run on the device.
    """
    if yolo.task != "detect":
        raise ValueError(f"yolo must be for the task detect, got {yolo.task}")
    if settings.get("epochs", 100) < 2:
        raise ValueError("epochs must be 2 or more: the last one is frozen")
    others = [name for name, value in SETTINGS.items() if settings.get(name, value) != value]
    if others:
        raise ValueError(f"{others[0]} must be {SETTINGS[others[0]]}, got {settings[others[0]]!r}")
    callbacks = _Callbacks(target, rules)
    for event in ("on_pretrain_routine_end", "on_train_epoch_start"):
        yolo.add_callback(event, getattr(callbacks, event))
    yolo.train(**{"warmup_epochs": 0, **settings, **SETTINGS})
    network, images = callbacks.network.eval().cpu(), callbacks.images.cpu()
    detector = yolo.model  # the module within, which has names and strides
    properties = {
        "description": "detector trained in the device's integers; boxes and scores are to be decoded",
        "task": "detect",
        "head": type(detector.model[-1]).__name__,
        "batch": 1,
        "imgsz": list(images.shape[2:]),
        "stride": int(max(detector.stride)),
        "names": {int(number): name for number, name in detector.names.items()},
        "channels": int(images.shape[1]),
        "end2end": False,
        "device": target,
    }
    graph = deploy.with_metadata(deploy.lower(network), mean=0, std=255, properties=properties)
    written = deploy.write_tflite(graph, path, inputs=inputs, outputs=outputs)
    return QuantizedYolo(written, deploy.verify(graph, written, model=network, data=images), graph, network)
