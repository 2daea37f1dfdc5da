# SPDX-License-Identifier: Apache-2.0
"""Networks of tests/plain_networks.py as .onnx files, in real numbers and quantized by onnxruntime's own tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_networks import NETWORKS


def exported(name: str, folder: Path, **how: object) -> Path:
    pytest.importorskip("onnx")
    model, examples = NETWORKS[name]()
    path = folder / f"{name}.onnx"
    words = [f"input_{number}" for number in range(len(examples))]
    how = {"dynamic_axes": {word: {0: "batch"} for word in words}, **how}
    with pytest.warns() as _:
        torch.onnx.export(model.eval(), examples, str(path), dynamo=False, opset_version=17, input_names=words, **how)
    return path


class Reader:
    """Batches by which onnxruntime chooses ranges."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        rng = np.random.default_rng(0)
        feeds = ({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in "123")
        self.batches: Iterator[Any] = iter(feeds)

    def get_next(self) -> Any:
        return next(self.batches, None)


def quantized(name: str, folder: Path, form: str = "QDQ", **how: Any) -> Path:
    """A network by `quantize_static`, as its documentation says."""
    tools = pytest.importorskip("onnxruntime.quantization")
    path = exported(name, folder)
    ready, file = folder / "ready.onnx", folder / "quantized.onnx"
    tools.shape_inference.quant_pre_process(str(path), str(ready), skip_symbolic_shape=True)
    examples = NETWORKS[name]()[1]
    shapes = {f"input_{number}": tuple(example.shape) for number, example in enumerate(examples)}
    types = {"activation_type": tools.QuantType.QUInt8, "weight_type": tools.QuantType.QInt8, **how}
    tools.quantize_static(str(ready), str(file), Reader(shapes), quant_format=tools.QuantFormat[form], **types)
    return file


def on_onnxruntime(path: Path, reals: list[np.ndarray]) -> list[np.ndarray]:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return list(session.run(None, {port.name: x for port, x in zip(session.get_inputs(), reals, strict=True)}))
