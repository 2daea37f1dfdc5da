# SPDX-License-Identifier: Apache-2.0
"""Other people's files: every kind of operator is analysed, and 16 bits are nearer to the float network than 8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exactqat import deploy, tune

FILES = Path(__file__).parents[1] / "goldens" / "files"
# Read as graphs of integers; loop.int8 has several subgraphs.
NAMES = sorted(path.name for path in FILES.glob("*.tflite") if "int8" in path.name or "fixed_batch" in path.name)


def inputs_of(graph: deploy.Graph, examples: int = 8) -> dict[str, np.ndarray]:
    """Values well within the grids of the inputs, by name."""
    rng, inputs = np.random.default_rng(0), {}
    for port in graph.signature.inputs:
        tensor = graph.tensors[port.tensor]
        shape = (examples * tensor.shape[0], *tensor.shape[1:])
        low, high = graph.limits(port.tensor) if tensor.dtype != "float32" else (0, 0)
        if tensor.dtype in ("int8", "int16"):
            grid = tensor.quantization
            codes = rng.normal((low + high) / 2, (high - low) / 16, shape)
            inputs[port.name] = ((codes - grid.zero_point[0]) * grid.scale[0]).astype(np.float32)
        elif tensor.dtype == "float32":
            inputs[port.name] = rng.normal(0, 0.5, shape).astype(np.float32)
        else:
            inputs[port.name] = rng.integers(low, min(high, 3) + 1, shape).astype(tensor.dtype)
    return inputs


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("loop")])
def test_files_are_analysed(name: str) -> None:
    graph = deploy.read_tflite(FILES / name)
    analysis = tune.sensitivity(graph, inputs_of(graph), None, progress=False)
    if "int8" in name:
        assert analysis.parts
    for part in analysis.parts:
        # No part alone is noisier than all together, beyond chance.
        assert part.decibels is not None and part.decibels > analysis.decibels - 6, part


@pytest.mark.parametrize("name", ["convolutions", "enlarged"])
def test_16_bits_are_nearer_to_the_float_file(name: str) -> None:
    runtime: Any = pytest.importorskip("ai_edge_litert.interpreter")
    graph = deploy.read_tflite(FILES / f"{name}.int8.tflite")
    batch = inputs_of(graph)
    (values,) = batch.values()
    interpreter = runtime.Interpreter(model_path=str(FILES / f"{name}.float32.tflite"))
    interpreter.allocate_tensors()
    (at,), (to,) = interpreter.get_input_details(), interpreter.get_output_details()
    results = []
    for value in values:
        interpreter.set_tensor(at["index"], value[None])
        interpreter.invoke()
        results.append(interpreter.get_tensor(to["index"]))
    wanted = np.concatenate(results)

    def error(outputs: np.ndarray, targets: np.ndarray) -> float:
        return float(np.square(outputs - wanted[targets]).mean())

    analysed = tune.sensitivity(graph, (batch, np.arange(len(values))), error, measure=["fine"], higher_is_better=False)
    assert analysed.reference is not None and analysed.device_metric is not None
    assert analysed.reference < analysed.device_metric
