# SPDX-License-Identifier: Apache-2.0
"""Single operators on ExecuTorch: a program with quantize and dequantize nodes on a graph's own grids, lowered by
ExecuTorch's XNNPACK flow, run by its runtime, compared code by code with the simulated devices.

    python tests/campaigns/run_executorch.py --count 20                all operators
    python tests/campaigns/run_executorch.py --count 20 CONV_2D ADD    some
    python tests/campaigns/run_executorch.py --networks                `qat.exported_program` of whole frozen networks
    python tests/campaigns/run_executorch.py --networks ds_cnn yolo_v8

Needs executorch 1.5 and torchao 0.18 beside the tested environment; nothing else does.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import _tests_folder  # noqa: F401
import numpy as np
import plain_networks
import torch
import torch.ao.quantization.fx._decomposed  # noqa: F401 - brings the operators
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from exactqat import deploy, qat
from exactqat.deploy import Builder, Graph, Tensor, per_tensor

# Relative: numbers nearer than that are of one code, also of 16 bits.
ONE_CODE = 1e-6
DEVICES = ("xnnpack-x86", "reference", "onnxruntime-x86")
NODES = torch.ops.quantized_decomposed
WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
# The filter's axes as PyTorch has them.
FILTERS = {"CONV_2D": (0, 3, 1, 2), "DEPTHWISE_CONV_2D": (3, 0, 1, 2), "FULLY_CONNECTED": (0, 1)}
PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "ADD": torch.add,
    "SUB": torch.sub,
    "MUL": torch.mul,
    "LOGISTIC": torch.sigmoid,
    "TANH": torch.tanh,
    "MEAN": lambda x: x.mean((2, 3), keepdim=True),
    "SOFTMAX": lambda x: torch.softmax(x, -1),
    "MAX_POOL_2D": lambda x: F.max_pool2d(x, 2, 2),
}
KINDS = (*WEIGHTED, *PLAIN)


class Program(nn.Module):
    """One operator of a graph in real numbers, between its grids."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, (self.operator,) = graph, graph.operators
        self.grids = [self.grid(graph.tensors[name]) for name in (*graph.inputs, *graph.outputs)]
        if self.operator.kind in WEIGHTED:
            filter, bias = (graph.tensors[name] for name in self.operator.inputs[1:])
            codes = np.ascontiguousarray(filter.data.transpose(FILTERS[self.operator.kind]))
            self.register_buffer("codes", torch.from_numpy(codes))
            self.register_buffer("scales", torch.from_numpy(filter.quantization.scale.copy()))
            self.register_buffer("zero_points", torch.zeros(len(filter.quantization.scale), dtype=torch.int64))
            self.single = float(filter.quantization.scale[0]) if filter.quantization.axis is None else None
            real = bias.data * bias.quantization.scale.astype(np.float64)
            self.bias = nn.Parameter(torch.from_numpy(real.astype(np.float32)))

    @staticmethod
    def grid(tensor: Tensor) -> tuple[float, int, int, int, torch.dtype]:
        return float(tensor.quantization.scale[0]), int(tensor.quantization.zero_point[0]), -128, 127, torch.int8

    def weight(self) -> torch.Tensor:
        narrow = -127, 127, torch.int8
        if self.single is not None:
            return NODES.dequantize_per_tensor.default(self.codes, self.single, 0, *narrow)
        return NODES.dequantize_per_channel.default(self.codes, self.scales, self.zero_points, 0, *narrow)

    def stored(self, x: torch.Tensor, at: int) -> torch.Tensor:
        codes = NODES.quantize_per_tensor.default(x, *self.grids[at])
        return NODES.dequantize_per_tensor.default(codes, *self.grids[at])

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        operands = [self.stored(x, at) for at, x in enumerate(given)]
        kind, attributes = self.operator.kind, self.operator.attributes
        if kind == "FULLY_CONNECTED":
            result = F.linear(operands[0], self.weight(), self.bias)
        elif kind in WEIGHTED:
            groups = 1 if kind == "CONV_2D" else operands[0].shape[1]
            result = F.conv2d(operands[0], self.weight(), self.bias, tuple(attributes["strides"]), groups=groups)
        else:
            result = PLAIN[kind](*operands)
        if attributes.get("activation") == "RELU":
            result = torch.relu(result)
        return self.stored(result, len(given))


def made(kind: str, rng: np.random.Generator) -> Graph:
    """A random graph of one operator, on random grids."""
    builder = Builder()

    def grid(times: float = 1.0) -> Any:
        return per_tensor(float(np.exp(rng.uniform(-4, -2))) * times, int(rng.integers(-30, 30)))

    def scales(channels: int) -> np.ndarray:
        return rng.uniform(0.5, 1, channels if rng.random() < 0.6 else 1).astype(np.float32) * 0.01

    activation = str(rng.choice(["NONE", "RELU"]))
    if kind == "FULLY_CONNECTED":
        x, filter = builder.input("x", (1, 24), grid()), rng.integers(-127, 128, (7, 24)).astype(np.int8)
        bias = rng.integers(-2000, 2000, 7)
        y = builder.fully_connected(x, filter, scales(7), bias, grid(4), name="y", activation=activation)
    elif kind in WEIGHTED:
        inputs, outputs = (int(each) for each in rng.integers(2, 9, 2))
        x = builder.input("x", (1, 9, 8, inputs), grid())
        shape = (outputs, 3, 3, inputs) if kind == "CONV_2D" else (1, 3, 3, inputs)
        channels = outputs if kind == "CONV_2D" else inputs
        filter, bias = rng.integers(-127, 128, shape).astype(np.int8), rng.integers(-2000, 2000, channels)
        convolve = builder.conv_2d if kind == "CONV_2D" else builder.depthwise_conv_2d
        how = {"padding": "VALID", "activation": activation}
        y = convolve(x, filter, scales(channels), bias, grid(4), name="y", **how)
    elif kind in ("ADD", "SUB", "MUL"):
        operands = [builder.input(name, (1, 6, 5, 4), grid()) for name in "ab"]
        y = builder.operator(kind, operands, grid(), name="y", activation="NONE")
    elif kind == "MEAN":
        y = builder.mean(builder.input("x", (1, 6, 5, 4), grid()), grid(), name="y", keep_dims=True)
    elif kind == "MAX_POOL_2D":
        y = builder.max_pool_2d(builder.input("x", (1, 6, 6, 4), grid()), name="y", filter_size=(2, 2), strides=(2, 2))
    else:
        y = getattr(builder, kind.lower())(builder.input("x", (1, 50), grid()), name="y")
    return builder.graph([y])


def computed_by_executorch(
    exported: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor]
) -> tuple[list[np.ndarray], Counter[str]]:
    """What its runtime returns, and the calls that the lowered program makes."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.kernels import quantized  # noqa: F401 - brings the operators that XNNPACK leaves
    from executorch.runtime import Runtime

    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    called = Counter(str(node.target) for node in lowered.exported_program().graph.nodes if node.op == "call_function")
    program = Runtime.get().load_program(lowered.to_executorch().buffer)
    return [each.numpy().copy() for each in program.load_method("forward").execute(list(inputs))], called


def network(name: str) -> str:
    """One frozen network's results on ExecuTorch beside the kit's, which are the integers of xnnpack-x86."""
    torch.manual_seed(0)
    model, examples = plain_networks.NETWORKS[name]()
    examples = examples if isinstance(examples, tuple) else (examples,)
    prepared = qat.prepare(model.train(), examples)
    for _ in range(2):
        prepared(*examples)
    qat.freeze(prepared)
    prepared.eval()
    with torch.no_grad():
        expected = [each.numpy() for each in tree_leaves(prepared(*examples)) if isinstance(each, torch.Tensor)]
    exported = qat.exported_program(prepared, len(examples[0]))
    with torch.no_grad():
        eager = [each.numpy() for each in tree_leaves(exported.module()(*examples)) if isinstance(each, torch.Tensor)]
    lost = _differing(expected, eager)
    found, called = computed_by_executorch(exported, [each for each in examples if isinstance(each, torch.Tensor)])
    values = sum(each.size for each in expected)
    differing = _differing(expected, found)
    others = sum(count for target, count in called.items() if "executorch_call_delegate" not in target)
    others -= called["<built-in function getitem>"]
    return f"{values:>10,}{lost:>10,}{differing:>10,}{others:>10}"


def _differing(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> int:
    """Results of other codes: numbers of one code may differ in float32's last place."""
    pairs = zip(ours, theirs, strict=True)
    return sum(int((~np.isclose(there, here, rtol=ONE_CODE, atol=0)).sum()) for here, there in pairs)


def on_executorch(graph: Graph, codes: dict[str, np.ndarray]) -> tuple[np.ndarray, bool]:
    """Codes that ExecuTorch's runtime makes, and whether XNNPACK took the whole program."""
    reals = []
    for name in graph.inputs:
        real = deploy.dequantize(codes[name], graph.tensors[name].quantization)
        reals.append(torch.from_numpy(np.ascontiguousarray(real.transpose(0, 3, 1, 2) if real.ndim == 4 else real)))
    exported = torch.export.export(Program(graph).eval(), tuple(reals), strict=False)
    (result, *_), called = computed_by_executorch(exported, reals)
    result = result.transpose(0, 2, 3, 1) if result.ndim == 4 else result
    grid = graph.tensors[graph.outputs[0]].quantization
    return (np.rint(result / grid.scale[0]) + grid.zero_point[0]).astype(np.int64), len(called) == 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--networks", nargs="*", metavar="NAME", help="whole networks of tests/plain_networks.py")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    if options.networks is not None:
        print(f"{'network':34}{'results':>10}{'exported':>10}{'differ':>10}{'nodes that XNNPACK leaves':>28}")
        for name in options.networks or plain_networks.NETWORKS:
            try:
                print(f"{name:34}{network(name)}", flush=True)
            except Exception as error:  # noqa: BLE001 - of ExecuTorch
                print(f"{name:34}not run: {type(error).__name__}: {' '.join(str(error).split())[:150]}", flush=True)
        return 0
    print(f"{'operator':20}{'codes':>10}  {'  '.join(DEVICES)}: differ")
    for kind in options.kinds or KINDS:
        rng, values, whole = np.random.default_rng(0), 0, True
        differing = dict.fromkeys(DEVICES, 0)
        for _ in range(options.count):
            graph = made(kind, rng)
            codes = {name: rng.integers(-128, 128, graph.tensors[name].shape).astype(np.int8) for name in graph.inputs}
            found, taken = on_executorch(graph, codes)
            values, whole = values + found.size, whole and taken
            for device in DEVICES:
                expected = deploy.simulate(graph, codes, device)[graph.outputs[0]].reshape(found.shape)
                differing[device] += int((expected != found).sum())
        note = "" if whole else "  (not all of it by XNNPACK)"
        print(f"{kind:20}{values:>10,}  {'  '.join(map(str, differing.values()))}{note}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
