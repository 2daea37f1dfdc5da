# SPDX-License-Identifier: Apache-2.0
"""Delivered networks, restored from their checkpoints: written as files again, verified, judged on examples."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import qat
from ...deploy.codes import input_codes
from ...deploy.examples import TARGETS, read_examples
from ...deploy.formats.c_array import MADE_BY, c_array, c_name
from ...deploy.formats.firmware import firmware_files
from ...deploy.formats.onnx import onnx_bytes
from ...deploy.formats.read_tflite import read_tflite
from ...deploy.formats.tflite import tflite_bytes
from ...deploy.graph import Graph
from ...deploy.lower import lower
from ...deploy.receipt import EXAMPLES, receipt
from . import checkpoints, data, files, training
from .beside import compared
from .files import Record
from .models import named_in, new_model
from .results import Beside, Dataset, Progress, Split
from .settings import Settings
from .store import delivered


def describe_network(settings: Settings, dataset: Dataset) -> Record:
    """What a checkpoint says of its network and data."""
    return {
        "format": checkpoints.CHECKPOINT_FORMAT,
        **{name: getattr(settings, name) for name in ("data", "split", "image_size")},
        "network": settings.model,
        "seed": settings.seed,
        "input_shape": list(dataset.train.images.shape[1:]),
        "class_names": list(dataset.class_names),
    }


def restore(path: Path, model: str | None = None) -> tuple[qat.PreparedModel, Record]:
    """The network of a checkpoint, and the checkpoint. Needs no data, and runs no code named in the file.

    Args:
        model: the network as the user names it; needed if it is not one of exactqat's own, see `models.named_in`.
    """
    checkpoint = checkpoints.load_checkpoint(path)
    checkpoints.check_network(checkpoint, path)
    shape = checkpoint["input_shape"]
    original = new_model(named_in(path, checkpoint["network"], model), shape, len(checkpoint["class_names"]))
    try:
        rules = [qat.Rule(**rule) for rule in checkpoint["rules"]]
        # The captured network was checked when it was trained; its state fits no other.
        restored = qat.prepare(original, torch.zeros(2, *shape), rules, check=False, keep_final_activation=False)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path}: its network cannot be prepared by its rules: {error}") from error
    training.load_state(restored, checkpoint["state"], path)
    restored.eval()
    return restored, checkpoint


def restore_graph(path: Path, model: str | None = None) -> tuple[Graph, Record]:
    """The integer network of a checkpoint, and the checkpoint; see `restore`."""
    restored, checkpoint = restore(path, model)
    return lowered(restored, path), checkpoint


def lowered(restored: qat.PreparedModel, path: Path) -> Graph:
    try:
        return lower(restored)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{path}: its network cannot be lowered: {error}") from error


def data_of(checkpoint: Mapping[str, Any]) -> Dataset:
    """The data a checkpoint's network was trained, validated and tested on."""
    return data.load(checkpoint["data"], checkpoint["image_size"], checkpoint.get("split"))


def export_directory(
    out: Path, model: str | None = None, headers: bool = False, name: str | None = None, device: str | None = None,
    receipts: bool = False, firmware: str | None = None,
) -> list[Path]:  # fmt: skip
    """Rewrites the files of every delivered network from its checkpoint, and returns their paths: model.tflite, and
    model.onnx if the package onnx is installed. Needs no data, but for receipts.

    Args:
        model: see `restore`.
        headers, name, device, receipts, firmware: the options --c-array, --name, --device, --receipt and --firmware of
            `exactqat export`, which says what they are.
    """
    contents: dict[Path, bytes] = {}
    folders = delivered(out, "checkpoint.pt")
    with files.locked(out):
        for folder in folders:
            files.check_writable(folder, is_folder=True)
            graph, checkpoint = restore_graph(folder / "checkpoint.pt", model)
            description = f"{checkpoint['precision']} {checkpoint['method']}"
            contents[folder / "model.tflite"] = tflite_bytes(graph, description)
            if importlib.util.find_spec("onnx"):
                contents[folder / "model.onnx"] = onnx_bytes(graph, description)
            own = f"{c_name(out.resolve().name) if name is None else name}_{folder.name}"
            own = name if name is not None and len(folders) == 1 else own
            texts, names = {}, checkpoint["class_names"]
            if firmware:
                parts = firmware_files(
                    graph, firmware, own, description=description, class_names=names, device=device or "micro"
                )
                contents |= {folder / own / part: text.encode() for part, text in parts.items()}
            if headers:
                texts[f"{own}.h"] = c_array(graph, None, own, description, class_names=names, device=device or "micro")
            if receipts:
                images = data_of(checkpoint).test.images[:EXAMPLES].numpy()
                known = _device_accuracy(out, folder.name, device or graph.trained_for)
                content = contents[folder / "model.tflite"]
                given = receipt(graph, input_codes(graph, images), device, content, known)
                contents[folder / "receipt.json"] = f"{given.as_json()}\n".encode()
                texts[f"{own}_receipt.h"] = given.c_source(own)
            for header, text in texts.items():
                path = folder / header
                if path.exists() and not path.read_bytes().startswith(MADE_BY.encode()):
                    raise FileExistsError(f"{path} already exists and was not written by exactqat: use another --name")
                contents[path] = text.encode()
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomically(path, content)
    return list(contents)


def _device_accuracy(out: Path, precision: str, device: str) -> float | None:
    """On all test images, by the metrics of a finished job for this device."""
    if not (out / "metrics.json").exists():
        return None
    metrics = files.read_json(out / "metrics.json")
    methods = metrics["networks"][precision]
    return float(methods[methods["chosen"]]["device_accuracy"]) if metrics["device"] == device else None


def verify_directory(
    out: Path, progress: Progress | None = None, dataset: Dataset | None = None, model: str | None = None,
    device: str = "",
) -> dict[str, Beside]:  # fmt: skip
    """Reruns the delivered files on a device, and compares them with the simulation of the networks in the checkpoints,
    and what the device computes with what was trained.

    Args:
        model: see `restore`.
        device: see `beside.compared`.
    """
    progress = progress or Progress()
    verified = {}
    folders = delivered(out, "checkpoint.pt", "model.tflite")
    for folder in folders:
        files.check_file(folder / "model.tflite")
    with files.locked(out, writes=False):
        for folder in folders:
            progress.begin(f"{folder.name.upper()} on the runtime")
            restored, checkpoint = restore(folder / "checkpoint.pt", model)
            graph, path = lowered(restored, folder / "checkpoint.pt"), folder / "model.tflite"
            dataset = dataset or data_of(checkpoint)
            try:
                verified[folder.name] = compared(restored, graph, path, dataset, device, progress=progress.compared)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{path} cannot be compared: {error}") from error
    return verified


@dataclass(frozen=True)
class Judged:
    """A network and examples.

    Attributes:
        name: of its folder in a job, or of the file.
        path: of the .tflite file.
        graph: what the file holds.
        model: the prepared model, frozen; None for a file.
        inputs: of the examples, an array or one by name.
        targets: their classes; None if there are none and none are needed.
    """

    name: str
    path: Path
    graph: Graph
    model: qat.PreparedModel | None
    inputs: np.ndarray | dict[str, np.ndarray]
    targets: np.ndarray | None

    def examples(self, most: int | None = None) -> Any:
        """The first examples (None: all), with targets if there are any."""
        inputs = self.inputs
        inputs = {n: a[:most] for n, a in inputs.items()} if isinstance(inputs, dict) else inputs[:most]
        return inputs if self.targets is None else (inputs, self.targets[:most])


def networks_of(
    path: Path, examples: Path | None, model: str | None, part: str = "test", precision: str | None = None,
    classes: bool = True,
) -> list[Judged]:  # fmt: skip
    """The networks of a job's directory, or of a .tflite file.

    Args:
        examples: a file of them (`deploy.examples.read_examples`); by default a part of the job's own data. A .tflite
            file has none.
        model: see `restore`.
        part: of the job's data: train, validation or test.
        precision: the only folder to look at, such as w8a8.
        classes: whether they are needed.
    """
    held = None if examples is None else read_examples(examples, part, classes)
    arrays = None if held is None else (held.inputs, held.targets)
    if not path.is_dir():
        for option, value in {"--precision": precision, "--model": model}.items():
            if value is not None:
                raise ValueError(f"{option} is for the directory of a job; {path} is not one")
        if arrays is None:
            raise ValueError(f"{path} says nothing of examples: give --data FILE.npz with the inputs and {TARGETS}")
        return [Judged(path.name, path, read_tflite(path), None, *arrays)]
    networks = []
    for folder in delivered(path, "checkpoint.pt", "model.tflite"):
        if precision is not None and folder.name != precision:
            continue
        restored, checkpoint = restore(folder / "checkpoint.pt", model)
        graph = replace(read_tflite(folder / "model.tflite"), trained_for=restored.profile or "")
        if arrays is None:
            split: Split = getattr(data_of(checkpoint), part)
            arrays = split.images.numpy(), split.labels.numpy()
        networks.append(Judged(folder.name, folder / "model.tflite", graph, restored, *arrays))
    if not networks:
        raise FileNotFoundError(f"{path} has no network {precision}")
    return networks
