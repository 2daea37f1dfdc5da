# SPDX-License-Identifier: Apache-2.0
"""Reads an .onnx file, whoever wrote it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...device.operator import Refusal
from ...display import shortened
from .tflite import import_deploy


@dataclass(frozen=True)
class OnnxModel:
    """An .onnx file in real numbers, which `qat.prepare` makes a trainable network of.

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
    """Reads an .onnx file in real numbers.

    Raises:
        OSError: the file cannot be read.
        Refusal: it is damaged, or quantized.
    """
    path = Path(path)
    return model_of(path.read_bytes(), path.name)


def model_of(content: bytes, name: str = "the file") -> OnnxModel:
    """As `read_onnx`, from a file's content."""
    onnx: Any = import_deploy("onnx", "onnx")
    try:
        model = onnx.load_model_from_string(content)
        onnx.checker.check_model(model)
    except Exception as error:  # noqa: BLE001 - protobuf and the checker raise errors of their own
        detail = shortened(" ".join(str(error).split()), 120)
        raise Refusal(f"{shortened(name)} cannot be read: it is damaged ({detail})") from None
    graph = model.graph
    held = {each.name for each in graph.initializer}
    inputs = tuple(each.name for each in graph.input if each.name not in held)
    return OnnxModel(name, content, inputs, tuple(each.name for each in graph.output))


__all__ = ["OnnxModel", "model_of", "read_onnx"]
