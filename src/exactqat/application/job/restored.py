# SPDX-License-Identifier: Apache-2.0
"""Delivered networks, restored from their checkpoints: written as files again, verified, judged on examples."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ... import qat
from ...deploy.comparison import Comparison, Report
from ...deploy.examples import TARGETS, read_examples
from ...deploy.formats.c_array import MADE_BY, c_array, c_name
from ...deploy.formats.onnx import onnx_bytes
from ...deploy.formats.read_tflite import read_tflite
from ...deploy.formats.tflite import tflite_bytes
from ...deploy.graph import Graph
from ...deploy.lower import lower
from ...deploy.runtimes import profile_here
from ...deploy.verify import verify
from ..report.results import Beside, Dataset, Outcome, Split
from . import checkpoints, data, files, training
from .beside import about, beside_training, input_codes, runs_here, users_own
from .models import named_in, new_model
from .progress import Progress
from .settings import Settings
from .store import delivered


def describe_network(settings: Settings, dataset: Dataset) -> dict[str, Any]:
    """What a checkpoint says of its network and data."""
    return {
        "format": checkpoints.CHECKPOINT_FORMAT,
        "data": settings.data,
        "split": settings.split,
        "image_size": settings.image_size,
        "network": settings.model,
        "seed": settings.seed,
        "input_shape": list(dataset.train.images.shape[1:]),
        "class_names": list(dataset.class_names),
    }


def describe_checkpoint(settings: Settings, dataset: Dataset, outcome: Outcome) -> dict[str, Any]:
    """A checkpoint's content; `restore` is its counterpart."""
    return describe_network(settings, dataset) | {
        "precision": outcome.precision,
        "method": outcome.method.name,
        "rules": [asdict(rule) for rule in outcome.rules],
        "state": outcome.model.state_dict(),
    }


def restore(path: Path, model: str | None = None) -> tuple[qat.PreparedModel, dict[str, Any]]:
    """The network of a checkpoint, and the checkpoint with its `profile`. Needs no data, and runs no code named in the
    file.

    Args:
        model: the network as the user names it; needed if it is not one of exactqat's own, see `models.named_in`.

    Raises:
        ValueError: the file is damaged or of another format, or the network is not the user's.
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
    return restored, checkpoint | {"profile": restored.profile}


def data_of(checkpoint: Mapping[str, Any]) -> Dataset:
    """The data a checkpoint's network was trained, validated and tested on."""
    return data.load(checkpoint["data"], checkpoint["image_size"], checkpoint.get("split"))


def restore_graph(path: Path, model: str | None = None) -> tuple[Graph, dict[str, Any]]:
    """The integer network of a checkpoint, and the checkpoint; see `restore`."""
    restored, checkpoint = restore(path, model)
    return lowered(restored, path), checkpoint


def lowered(restored: qat.PreparedModel, path: Path) -> Graph:
    try:
        return lower(restored)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{path}: its network cannot be lowered: {error}") from error


def export_directory(
    out: Path, model: str | None = None, headers: bool = False, name: str | None = None, device: str = "micro"
) -> list[Path]:
    """Rewrites the files of every delivered network from its checkpoint, and returns their paths. Needs no data.

    model.tflite always, model.onnx if the package onnx is installed.

    Args:
        model: see `restore`.
        headers: also write a C header, with the same name as its identifiers' prefix.
        name: the prefix of these names; by default the directory's name and the precision, so that networks of several
            jobs can be part of one program. If a job has several networks, each gets its precision after it.
        device: whose answers to one example the header holds.

    Raises:
        FileNotFoundError: the directory holds no checkpoint of a delivered network.
        FileExistsError: a file with a header's name exists that is not exactqat's.
        ValueError: a checkpoint cannot be read, or `name` is not a C identifier. Nothing is written then.
    """
    contents: dict[Path, bytes] = {}
    folders = delivered(out, "checkpoint.pt")
    with files.locked(out):
        for folder in folders:
            graph, checkpoint = restore_graph(folder / "checkpoint.pt", model)
            description = f"{checkpoint['precision']} {checkpoint['method']}"
            contents[folder / "model.tflite"] = tflite_bytes(graph, description)
            if importlib.util.find_spec("onnx"):
                contents[folder / "model.onnx"] = onnx_bytes(graph, description)
            if headers:
                own = f"{c_name(out.resolve().name) if name is None else name}_{folder.name}"
                own = name if name is not None and len(folders) == 1 else own
                names = checkpoint["class_names"]
                text = c_array(graph, None, own, description, class_names=names, device=device)
                header = folder / f"{own}.h"
                if header.exists() and not header.read_bytes().startswith(MADE_BY.encode()):
                    raise FileExistsError(
                        f"{header} already exists and was not written by exactqat: use another --name"
                    )
                contents[header] = text.encode()
        for path, content in contents.items():
            files.write_atomically(path, content)
    return list(contents)


@dataclass(frozen=True)
class Verified:
    """A delivered file on a device, and the device compared with what was trained.

    Attributes:
        report: of the file and the integers.
        beside: of the answers to the test images, by the device's exact simulation.
        not_run: why the file was not run; empty: it was.
    """

    report: Report
    beside: Beside
    not_run: str = ""

    @property
    def differing(self) -> int:
        """Integers that differ, between the file and its simulation, between the device and training, or between the
        file fed with the user's images and the model."""
        return self.report.differing + self.report.training_differing + self.report.predictions_differing


def verify_directory(
    out: Path,
    progress: Progress | None = None,
    dataset: Dataset | None = None,
    model: str | None = None,
    device: str = "",
) -> dict[str, Verified]:
    """Reruns the delivered files on a device, and compares them with the simulation of the networks in the checkpoints,
    and what the device computes with what was trained.

    Args:
        model: see `restore`.
        device: a name in `devices`; by default the one that each network was trained for. Its file then runs on
            LiteRT's default kernels if this machine does not have that device's runtime.

    Raises:
        FileNotFoundError: the directory holds no delivered network.
        ValueError: a file cannot be compared.
    """
    progress = progress or Progress()
    found = {}
    folders = delivered(out, "checkpoint.pt", "model.tflite")
    for folder in folders:
        files.check_file(folder / "model.tflite")
    with files.locked(out, writes=False):
        for folder in folders:
            progress.begin(f"{folder.name.upper()} on the runtime")
            restored, checkpoint = restore(folder / "checkpoint.pt", model)
            graph = lowered(restored, folder / "checkpoint.pt")
            dataset = dataset or data_of(checkpoint)
            path, codes = folder / "model.tflite", input_codes(graph, dataset)
            wanted, not_run = device or cast(str, restored.profile), ""
            try:
                runs = profile_here(wanted if device else runs_here(wanted, graph))
            except (ValueError, ImportError) as error:
                runs, not_run = "", str(error)
            try:
                beside = beside_training(restored, graph, dataset.test, codes, [wanted])[wanted]
                if runs:
                    own = users_own(restored, dataset, runs)
                    report = verify(graph, path, codes, runs, progress=progress.compared, trained_codes={}, **own)
                else:
                    nothing = tuple(Comparison(name, "whole graph", 0, 0, 0, False) for name in graph.outputs)
                    report = Report(wanted, (), nothing, graph.trained_for)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{path} cannot be compared: {error}") from error
            found[folder.name] = Verified(about(report, wanted, beside), beside, not_run)
    return found


@dataclass(frozen=True)
class Judged:
    """A network and examples.

    Attributes:
        name: of its folder in a job, or of the file.
        path: of the .tflite file.
        graph: what the file holds.
        model: the prepared model, frozen; None for a file.
        data: inputs and classes; None in place of these if there are none and none are needed.
    """

    name: str
    path: Path
    graph: Graph
    model: Any
    data: tuple[Any, np.ndarray | None]


def networks_of(
    path: Path,
    data: Path | None,
    model: str | None,
    part: str = "test",
    precision: str | None = None,
    classes: bool = True,
) -> list[Judged]:
    """The networks of a job's directory, or of a .tflite file.

    Args:
        data: a file of examples (`deploy.examples.read_examples`); by default a part of the job's own data. A .tflite
            file has none.
        model: see `restore`.
        part: of the job's data: train, validation or test.
        precision: the only folder to look at, such as w8a8.
        classes: whether they are needed.

    Raises:
        FileNotFoundError: there is no such job, file, or folder.
        ValueError: a file cannot be read, or examples are missing.
    """
    given = None
    if data is not None:
        held = read_examples(data, part, classes)
        given = held.inputs, held.targets
    if not path.is_dir():
        chosen = {"--precision": precision, "--model": model}
        for option in (name for name, value in chosen.items() if value is not None):
            raise ValueError(f"{option} is for the directory of a job; {path} is not one")
        if given is None:
            raise ValueError(f"{path} says nothing of examples: give --data FILE.npz with the inputs and {TARGETS}")
        return [Judged(path.name, path, read_tflite(path), None, given)]
    found = []
    for folder in delivered(path, "checkpoint.pt", "model.tflite"):
        if precision is not None and folder.name != precision:
            continue
        restored, checkpoint = restore(folder / "checkpoint.pt", model)
        graph = replace(read_tflite(folder / "model.tflite"), trained_for=restored.profile or "")
        if given is None:
            split: Split = getattr(data_of(checkpoint), part)
            given = split.images.numpy(), split.labels.numpy()
        found.append(Judged(folder.name, folder / "model.tflite", graph, restored, given))
    if not found:
        raise FileNotFoundError(f"{path} has no network {precision}")
    return found
