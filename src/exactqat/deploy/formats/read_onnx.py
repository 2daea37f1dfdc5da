# SPDX-License-Identifier: Apache-2.0
"""Reads an .onnx file from any writer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...kit.device.operator import Refusal
from ...kit.display import shortened
from .read_tflite import path_of_file
from .tflite import import_deploy


@dataclass(frozen=True)
class OnnxModel:
    """An .onnx file, which `qat.prepare` turns into a trainable network.

    Attributes:
        name: of the file.
        content: its bytes.
        inputs, outputs: names, in the file's order.
    """

    name: str
    content: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __repr__(self) -> str:
        return f"OnnxModel({self.name!r}: {', '.join(self.inputs)} -> {', '.join(self.outputs)})"


def read_onnx(path: str | os.PathLike[str]) -> OnnxModel:
    """Reads an .onnx file in real numbers or in QDQ form, with the files next to it that hold its constants.

    Raises:
        OSError: the file cannot be read. TypeError: `path` is not a path.
        Refusal: it is damaged.
    """
    path = path_of_file(path)
    return model_of(path.read_bytes(), path.name, path.parent)


def model_of(content: bytes, name: str = "the file", folder: Path | None = None) -> OnnxModel:
    """As `read_onnx`, from a file's content; folder: where the files next to it are; without it, there may be none."""
    onnx = import_deploy("onnx", "onnx")
    try:
        model = onnx.load_model_from_string(content)
        held_by_operators = (entry.t for node in model.graph.node for entry in node.attribute if entry.HasField("t"))
        constants = [*model.graph.initializer, *held_by_operators]
        if any(constant.data_location == onnx.TensorProto.EXTERNAL for constant in constants):
            if folder is None:
                raise ValueError("its constants lie in other files")
            onnx.external_data_helper.load_external_data_for_model(model, str(folder))
            content = bytes(model.SerializeToString())
        onnx.checker.check_model(model)
    except Exception as error:  # noqa: BLE001 - protobuf and the checker raise errors of their own
        detail = shortened(" ".join(str(error).split()), 120)
        raise Refusal(f"{shortened(name)} cannot be read: it is damaged ({detail})") from None
    graph = model.graph
    outputs = [end.name for end in graph.output]
    if len(set(outputs)) < len(outputs):
        raise Refusal(f"{shortened(name)} cannot be read: its outputs must differ, got {shortened(', '.join(outputs))}")
    held = {constant.name for constant in graph.initializer}
    inputs = tuple(end.name for end in graph.input if end.name not in held)
    return OnnxModel(name, content, inputs, tuple(outputs))
