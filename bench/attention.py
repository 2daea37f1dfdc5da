# SPDX-License-Identifier: Apache-2.0
"""Accuracy of small transformers: float, after calibration alone and after training, as the device's integers give it.

    python bench/attention.py [--networks ViT,DeiT,reader] [--seeds 3] [--bits 8] [--save FILE]

Trained here on made-up data (`bench/accuracy/attention_networks.py`). The device is LiteRT's default kernels: the
accuracy is that of what it returns, and every integer of every operator is compared with the simulation on a part of
the examples.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "accuracy"))
from attention_networks import ATTENTION, trained_attention  # noqa: E402
from networks import Task, fit, outputs_of, tensors_of  # noqa: E402

from exactqat import deploy, qat  # noqa: E402

DEVICE = "xnnpack-x86"
CALIBRATION = 512
COMPARED = 100


@dataclass
class Row:
    """One network with one seed.

    Attributes:
        plain, calibrated, trained: shares of the test examples that are right: in float, and by the device's integers
            after calibration alone, and after training.
        integers, differing: of the trained file, all operators, LiteRT beside the simulation.
        seconds: of training in float and with quantization.
    """

    network: str
    data: str
    seed: int
    bits: int
    plain: float
    calibrated: float
    trained: float
    integers: int
    differing: int
    seconds: tuple[int, int]

    def cells(self) -> tuple[str, ...]:
        shares = (f"{100 * score:.1f}" for score in (self.plain, self.calibrated, self.trained))
        return (self.network, str(self.seed), str(self.bits), *shares, f"{self.integers:,}", str(self.differing))


HEADER = ("network", "seed", "bits", "float", "PTQ", "QAT", "integers", "differ")


def on_the_device(task: Task, network: torch.nn.Module, test: tuple[Any, np.ndarray], folder: Path) -> tuple[Any, ...]:
    """The metric by the device's integers; how many were compared with the runtime, how many differ.

    Raises:
        AssertionError: the file computes something else than the simulation.
    """
    inputs, targets = test
    graph = deploy.lower(network.eval())
    path = deploy.write_tflite(graph, folder / "model.tflite")
    several = inputs if isinstance(inputs, tuple) else (inputs,)
    some = tuple(array[:COMPARED] for array in several)
    report = deploy.verify(graph, path, device=DEVICE, data=some if len(some) > 1 else some[0], batch_size=50)
    (port,) = graph.signature.outputs
    arrays = dict(zip([source.name for source in graph.signature.inputs], several, strict=True))
    codes = deploy.input_codes(graph, arrays)
    simulated = deploy.simulate(graph, codes, DEVICE)
    runtime = on_litert(graph, path, codes)
    np.testing.assert_array_equal(simulated[graph.outputs[0]], runtime)
    values = deploy.output_values(graph, {graph.outputs[0]: runtime})[port.name]
    return task.metric(values, targets), report.values, report.differing


def on_litert(graph: deploy.Graph, path: Path, codes: Any) -> np.ndarray:
    """The codes that the file itself gives, example after example."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    runner = interpreter.get_signature_runner()
    details, results = runner.get_input_details(), []
    (output,) = runner.get_output_details()
    names = {port.name: name for port, name in zip(graph.signature.inputs, graph.inputs, strict=True)}
    for at in range(len(next(iter(codes.values())))):
        operands = {word: codes[names[word]][at : at + 1].astype(details[word]["dtype"]) for word in details}
        results.append(runner(**operands)[output])
    return np.concatenate(results)


def measured(name: str, seed: int, bits: int, epochs: int) -> Row:
    task = ATTENTION[name]
    parts = task.data(seed)
    began = time.monotonic()
    model = trained_attention(name, seed, parts)
    after_float = time.monotonic()
    plain = task.metric(outputs_of(model, parts[2][0]), parts[2][1])
    tensors = tensors_of(parts[0][0])
    first = tuple(x[:2] for x in tensors)
    batch = tuple(x[:CALIBRATION] for x in tensors)
    rules = [qat.Rule()] if bits == 8 else [qat.Rule("input", activation_bits=8), qat.Rule(activation_bits=bits)]

    def prepared() -> Any:
        result = qat.prepare(model.train(), first if len(first) > 1 else first[0], rules)
        qat.calibrate(result, [batch if len(batch) > 1 else batch[0]])
        return result

    with tempfile.TemporaryDirectory() as place:
        network = prepared()
        qat.freeze(network)
        calibrated, *_ = on_the_device(task, network, parts[2], Path(place))
        after_calibration = time.monotonic()
        network = prepared()
        torch.manual_seed(seed)
        fit(task, network.train(), *parts[0], epochs, 5e-4)
        qat.freeze(network)
        fit(task, network.train(), *parts[0], max(1, epochs // 4), 5e-5)
        trained, integers, differing = on_the_device(task, network, parts[2], Path(place))
    seconds = round(after_float - began), round(time.monotonic() - after_calibration)
    return Row(name, task.title, seed, bits, plain, calibrated, trained, integers, differing, seconds)


def printed(rows: list[Row]) -> str:
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(HEADER))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--networks", default=",".join(ATTENTION), help=f"some of {', '.join(ATTENTION)}")
    parser.add_argument("--seeds", default="0,1,2", help="numbers, between commas")
    parser.add_argument("--bits", type=int, choices=(8, 16), default=8, help="of what layers give; weights have 8")
    parser.add_argument("--epochs", type=int, default=8, help="of training with quantization")
    parser.add_argument("--save", type=Path, help="add the rows to this file, as JSON lines")
    options = parser.parse_args()
    names = options.networks.split(",")
    if unknown := set(names) - set(ATTENTION):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    rows = []
    for name in names:
        for seed in map(int, options.seeds.split(",")):
            rows.append(measured(name, seed, options.bits, options.epochs))
            print(f"{rows[-1].cells()} {rows[-1].seconds}", file=sys.stderr, flush=True)
            if options.save is not None:
                with options.save.open("a") as file:
                    file.write(json.dumps(asdict(rows[-1])) + "\n")
    print(printed(rows))


if __name__ == "__main__":
    main()
