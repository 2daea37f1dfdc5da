# SPDX-License-Identifier: Apache-2.0
"""What applications read of a file besides its network: names of classes, the normalization of images, properties.

A .tflite file holds them twice. MediaPipe's tasks and Android Studio read TensorFlow Lite's metadata, a table of its
own format in the buffer ``TFLITE_METADATA``, whose labels are files in a ZIP archive after the network. Ultralytics
reads ``metadata.json`` in that archive. An .onnx file has them as ``metadata_props``.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..graph import Graph
from ..signature import METADATA, Port
from .tflite import import_deploy

# Names in a file: of the table, and of the properties in the archive.
TABLE, PROPERTIES = "TFLITE_METADATA", "metadata.json"
_IDENTIFIER, _PARSER = b"M001", "1.0.0"
# Values of the format's enumerations.
_AXIS_LABELS, _FEATURES, _IMAGE, _NORMALIZATION = 2, 1, 2, 1
_COLORS = {3: 1, 1: 2}  # RGB, grayscale


def with_metadata(
    graph: Graph,
    *,
    name: str = "",
    description: str = "",
    labels: Sequence[str] | Mapping[str, Sequence[str]] = (),
    mean: Sequence[float] | float | None = None,
    std: Sequence[float] | float | None = None,
    properties: Mapping[str, Any] | None = None,
) -> Graph:
    """The same network with what applications read of its file; `write_tflite` and `write_onnx` write it.

    Args:
        name, description: of the network, for people.
        labels: the names of the classes, for the last axis of the only output, or by the output's name. They become
            ``labels.txt``, or ``labels_<output>.txt`` where there are several outputs.
        mean, std: what an application subtracts from pixels in 0..255 and divides by, one number or one for each
            channel: 0 and 255 for a network trained with images in 0..1. Applications use them for files written with
            ``inputs="float32"``; a file that takes codes gets the pixels as they are. MediaPipe takes the same for all
            channels only.
        properties: anything that JSON can say, for ``metadata.json`` and an .onnx file's ``metadata_props``.

    Raises:
        ValueError: there are more or fewer labels than values on the output's last axis, a label has several lines,
            there is no such output, only one of mean and std is given, they have different numbers of
            numbers, or std is not positive.
    """
    outputs = graph.signature.outputs
    if labels and not isinstance(labels, Mapping):
        if len(outputs) > 1:
            raise ValueError(f"labels must be by output, one of {', '.join(port.name for port in outputs)}")
        labels = {outputs[0].name: labels}
    named = dict(labels) if isinstance(labels, Mapping) else {}
    files = {}
    for output, words in named.items():
        port = next((port for port in outputs if port.name == output), None)
        if port is None:
            raise ValueError(f"labels are for {output!r}; the outputs are {', '.join(port.name for port in outputs)}")
        size = graph.tensors[port.tensor].shape[port.order[-1]]
        if len(words) != size:
            raise ValueError(f"labels of {output!r} must be {size}, one for each value of its last axis, "
                             f"got {len(words)}")  # fmt: skip
        if any("\n" in word or not word for word in words):
            raise ValueError(f"labels of {output!r} must be lines of text")
        files[_labels_file(output, len(outputs))] = "\n".join(words).encode() + b"\n"
    if (mean is None) != (std is None):
        raise ValueError("mean and std go together, got only one of them")
    means, deviations = (
        [float(value) for value in (values if isinstance(values, Sequence) else [values])] if values is not None else []
        for values in (mean, std)
    )
    means, deviations = (means * len(deviations) if len(means) == 1 else means,
                         deviations * len(means) if len(deviations) == 1 else deviations)  # fmt: skip
    if len(means) != len(deviations):
        raise ValueError(f"mean and std must have as many numbers, got {len(means)} and {len(deviations)}")
    if not all(value > 0 for value in deviations):
        raise ValueError(f"std must be positive, got {deviations}")
    if properties is not None:
        files[PROPERTIES] = json.dumps(dict(properties), indent=2, ensure_ascii=True).encode()
    table = _Table().model(graph, name, description, set(named), (means, deviations))
    return replace(graph, metadata={**graph.metadata, TABLE: table}, attached={**graph.attached, **files})


def as_properties(attached: Mapping[str, bytes]) -> dict[str, str]:
    """What an .onnx file says: each property, and every other file that is text, by its name."""
    properties: dict[str, str] = {}
    for name, content in attached.items():
        try:
            text = content.decode()
            if name == PROPERTIES:
                known = json.loads(text)
                properties |= {key: value if isinstance(value, str) else json.dumps(value)
                               for key, value in known.items() if key != METADATA}  # fmt: skip
            elif name != METADATA:
                properties[name] = text
        except (ValueError, AttributeError):  # another writer's, which may hold anything
            continue
    return properties


def attached_files(content: bytes, most_bytes: int) -> dict[str, bytes]:
    """The files in the archive after a .tflite file; none if it has no readable archive, or one that unpacks to more
    bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > most_bytes:
                return {}
            return {entry.filename: archive.read(entry) for entry in entries if not entry.is_dir()}
    except Exception:  # noqa: BLE001 - an archive of any writer may hold anything
        return {}


def _labels_file(output: str, outputs: int) -> str:
    return "labels.txt" if outputs == 1 else f"labels_{output.replace('/', '_')}.txt"


class _Table:
    """A table of TensorFlow Lite's metadata, by the numbers of its fields (metadata_schema.fbs): no package that is
    still released has its classes."""

    def __init__(self) -> None:
        self.builder = import_deploy("flatbuffers").Builder(1024)

    def model(
        self, graph: Graph, name: str, description: str, labelled: set[str], normalization: tuple[list[float], ...]
    ) -> bytes:
        inputs, outputs = graph.signature.inputs, graph.signature.outputs
        taken = self.tables([self.input(graph, port, normalization) for port in inputs])
        returned = self.tables(
            [self.output(port, _labels_file(port.name, len(outputs)) if port.name in labelled else "")
             for port in outputs]
        )  # fmt: skip
        subgraphs = self.tables([self.table({2: taken, 3: returned})])
        texts = {0: self.text(name), 1: self.text(description), 7: self.text(_PARSER)}
        self.builder.Finish(self.table({**texts, 3: subgraphs}), _IDENTIFIER)
        return bytes(self.builder.Output())

    def input(self, graph: Graph, port: Port, normalization: tuple[list[float], ...]) -> int:
        shape = graph.tensors[port.tensor].shape
        color = _COLORS.get(shape[-1]) if len(shape) == 4 else None
        if color is None:
            return self.table({0: self.text(port.name), 3: self.content(_FEATURES, self.table({}))})
        properties = self.content(_IMAGE, self.table({}, {0: color}))
        units = 0
        if normalization[0]:
            options = self.table(dict(enumerate(map(self.floats, normalization))))
            units = self.tables([self.table({1: options}, {0: _NORMALIZATION})])
        return self.table({0: self.text(port.name), 3: properties, 4: units})

    def output(self, port: Port, labels: str) -> int:
        files = self.tables([self.table({0: self.text(labels)}, {2: _AXIS_LABELS})]) if labels else 0
        return self.table({0: self.text(port.name), 3: self.content(_FEATURES, self.table({})), 6: files})

    def content(self, kind: int, properties: int) -> int:
        return self.table({1: properties}, {0: kind})

    def text(self, text: str) -> int:
        return int(self.builder.CreateString(text)) if text else 0

    def floats(self, values: Sequence[float]) -> int:
        self.builder.StartVector(4, len(values), 4)
        for value in reversed(values):
            self.builder.PrependFloat32(value)
        return int(self.builder.EndVector())

    def tables(self, offsets: Sequence[int]) -> int:
        self.builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self.builder.PrependUOffsetTRelative(offset)
        return int(self.builder.EndVector())

    def table(self, offsets: Mapping[int, int], numbers: Mapping[int, int] | None = None) -> int:
        """A table of offsets and of numbers of a byte, by field; fields of 0 are left out."""
        numbers = numbers or {}
        self.builder.StartObject(1 + max((*offsets, *numbers), default=0))
        for field, offset in offsets.items():
            self.builder.PrependUOffsetTRelativeSlot(field, offset, 0)
        for field, number in numbers.items():
            self.builder.PrependUint8Slot(field, number, 0)
        return int(self.builder.EndObject())
