# SPDX-License-Identifier: Apache-2.0
"""Single operators on ExecuTorch: a program with quantize and dequantize nodes on a graph's own grids, lowered by
ExecuTorch's XNNPACK flow, run by its runtime, compared code by code with the simulated devices.

With --cortex-m its Cortex-M flow lowers them for a Cortex-M55. ExecuTorch's wheel has no such kernels for this machine;
what it has is a Python implementation of each of them, and that is what is compared.

    python tests/campaigns/run_executorch.py --count 20                all operators
    python tests/campaigns/run_executorch.py --count 20 CONV_2D ADD    some
    python tests/campaigns/run_executorch.py --networks                examples/executorch of whole frozen networks
    python tests/campaigns/run_executorch.py --networks ds_cnn yolo_v8 --cortex-m

Needs executorch 1.5, torchao 0.18 and, for --cortex-m, tosa-tools beside the tested environment; nothing else does.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
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

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "executorch"))

from cortex_m import mark_for_cmsis_nn  # noqa: E402
from exported_program import exported_program  # noqa: E402

# Relative: numbers nearer than that are of one code, also of 16 bits.
ONE_CODE = 1e-6
DEVICES = {
    "xnnpack": ("xnnpack-x86", "reference", "onnxruntime-x86"),
    "cortex-m": ("micro", "reference", "xnnpack-x86"),
}
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

    def __init__(self, graph: Graph, flow: str) -> None:
        super().__init__()
        self.graph, (self.operator,) = graph, graph.operators
        self.grids = [self.grid(graph.tensors[name]) for name in (*graph.inputs, *graph.outputs)]
        if self.operator.kind in WEIGHTED:
            filter, bias = (graph.tensors[name] for name in self.operator.inputs[1:])
            codes = np.ascontiguousarray(filter.data.transpose(FILTERS[self.operator.kind]))
            self.register_buffer("codes", laid_out(torch.from_numpy(codes), flow))
            self.register_buffer("scales", torch.from_numpy(filter.quantization.scale.copy()))
            self.register_buffer("zero_points", torch.zeros(len(filter.quantization.scale), dtype=torch.int64))
            self.single = float(filter.quantization.scale[0]) if filter.quantization.axis is None else None
            if flow == "cortex-m":
                self.register_buffer("held_bias", torch.from_numpy(bias.data))
                self.register_buffer("bias_steps", torch.from_numpy(bias.quantization.scale))
                self.bias_step = float(bias.quantization.scale[0])
            else:
                real = bias.data * bias.quantization.scale.astype(np.float64)
                self.held_bias = nn.Parameter(torch.from_numpy(real.astype(np.float32)))

    @staticmethod
    def grid(tensor: Tensor) -> tuple[float, int, int, int, torch.dtype]:
        return float(tensor.quantization.scale[0]), int(tensor.quantization.zero_point[0]), -128, 127, torch.int8

    def weight(self) -> torch.Tensor:
        narrow = -127, 127, torch.int8
        if self.single is not None:
            return NODES.dequantize_per_tensor.default(self.codes, self.single, 0, *narrow)
        return NODES.dequantize_per_channel.default(self.codes, self.scales, self.zero_points, 0, *narrow)

    def bias(self) -> torch.Tensor:
        limits = -(2**31), 2**31 - 1, torch.int32
        if self.held_bias.dtype != torch.int32:
            return self.held_bias
        if self.single is not None:
            return NODES.dequantize_per_tensor.default(self.held_bias, self.bias_step, 0, *limits)
        return NODES.dequantize_per_channel.default(self.held_bias, self.bias_steps, self.zero_points, 0, *limits)

    def stored(self, x: torch.Tensor, at: int) -> torch.Tensor:
        codes = NODES.quantize_per_tensor.default(x, *self.grids[at])
        return NODES.dequantize_per_tensor.default(codes, *self.grids[at])

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        operands = [self.stored(x, at) for at, x in enumerate(tensors)]
        kind, attributes = self.operator.kind, self.operator.attributes
        if kind == "FULLY_CONNECTED":
            result = F.linear(operands[0], self.weight(), self.bias())
        elif kind in WEIGHTED:
            groups = 1 if kind == "CONV_2D" else operands[0].shape[1]
            result = F.conv2d(operands[0], self.weight(), self.bias(), tuple(attributes["strides"]), groups=groups)
        else:
            result = PLAIN[kind](*operands)
        if attributes.get("activation") == "RELU":
            result = torch.relu(result)
        return self.stored(result, len(tensors))


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
        inputs, outputs = (int(size) for size in rng.integers(2, 9, 2))
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
    called = _calls(lowered.exported_program())
    program = Runtime.get().load_program(lowered.to_executorch().buffer)
    return [tensor.numpy().copy() for tensor in program.load_method("forward").execute(list(inputs))], called


def computed_for_cortex_m(
    exported: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor]
) -> tuple[list[np.ndarray], Counter[str]]:
    """What ExecuTorch's Python implementations of the kernels return, and the calls of the lowered program."""
    from executorch.backends.cortex_m.edge_compile_config import cortex_m_edge_compile_config
    from executorch.backends.cortex_m.passes.cortex_m_pass_manager import CortexMPassManager
    from executorch.backends.cortex_m.target_config import CortexM, CortexMTargetConfig
    from executorch.exir import to_edge

    edge = to_edge(exported, compile_config=cortex_m_edge_compile_config()).exported_program()
    lowered = CortexMPassManager(edge, target_config=CortexMTargetConfig(cpu=CortexM.M55)).transform()
    with torch.no_grad():
        results = tree_leaves(lowered.module()(*[laid_out(tensor, "cortex-m") for tensor in inputs]))
    return [result.numpy().copy() for result in results], _calls(lowered)


COMPUTED = {"xnnpack": computed_by_executorch, "cortex-m": computed_for_cortex_m}


def laid_out(tensor: torch.Tensor, flow: str) -> torch.Tensor:
    """As a flow has it in memory."""
    last = flow == "cortex-m" and tensor.dim() == 4
    return tensor.contiguous(memory_format=torch.channels_last) if last else tensor


def _calls(program: torch.export.ExportedProgram) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")


def _left(called: Counter[str]) -> int:
    """Calls that the flow leaves to ExecuTorch's portable kernels, with quantize and dequantize nodes around them."""
    taken = ("executorch_call_delegate", "cortex_m.", "getitem", "function alloc", "view_copy")
    return sum(count for target, count in called.items() if not any(word in target for word in taken))


def network(name: str, flow: str) -> str:
    """One frozen network's results on ExecuTorch beside the kit's: the integers of xnnpack-x86, or of micro."""
    torch.manual_seed(0)
    model, examples = plain_networks.NETWORKS[name]()
    examples = examples if isinstance(examples, tuple) else (examples,)
    prepared = qat.prepare(model.train(), examples)
    for _ in range(2):
        prepared(*examples)
    qat.freeze(prepared)
    prepared.eval()
    if flow == "cortex-m":
        # Its depthwise kernel takes one image.
        examples, prepared.profile = tuple(example[:1] for example in examples), "micro"
    with torch.no_grad():
        expected = [leaf.numpy() for leaf in tree_leaves(prepared(*examples)) if isinstance(leaf, torch.Tensor)]
    exported = exported_program(prepared, len(examples[0]), flow)
    with torch.no_grad():
        eager = [leaf.numpy() for leaf in tree_leaves(exported.module()(*examples)) if isinstance(leaf, torch.Tensor)]
    lost = _differing(expected, eager)
    results, called = COMPUTED[flow](exported, [example for example in examples if isinstance(example, torch.Tensor)])
    values = sum(array.size for array in expected)
    differing = _differing(expected, results)
    return f"{values:>10,}{lost:>10,}{differing:>10,}{_left(called):>10}"


def _differing(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> int:
    """Results of other codes: numbers of one code may differ in float32's last place."""
    pairs = zip(ours, theirs, strict=True)
    return sum(int((~np.isclose(there, here, rtol=ONE_CODE, atol=0)).sum()) for here, there in pairs)


def on_executorch(graph: Graph, codes: dict[str, np.ndarray], flow: str) -> tuple[np.ndarray, bool]:
    """Codes that ExecuTorch makes, and whether the flow took the whole program."""
    reals = []
    for name in graph.inputs:
        real = deploy.dequantize(codes[name], graph.tensors[name].quantization)
        tensor = torch.from_numpy(np.ascontiguousarray(real.transpose(0, 3, 1, 2) if real.ndim == 4 else real))
        reals.append(laid_out(tensor, flow))
    exported = torch.export.export(Program(graph, flow).eval(), tuple(reals), strict=False)
    if flow == "cortex-m":
        mark_for_cmsis_nn(exported.graph_module)
    (result, *_), called = COMPUTED[flow](exported, reals)
    result = result.transpose(0, 2, 3, 1) if result.ndim == 4 else result
    grid = graph.tensors[graph.outputs[0]].quantization
    return (np.rint(result / grid.scale[0]) + grid.zero_point[0]).astype(np.int64), _left(called) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--networks", nargs="*", metavar="NAME", help="whole networks of tests/plain_networks.py")
    parser.add_argument("--cortex-m", action="store_true", help="ExecuTorch's Cortex-M flow instead of XNNPACK's")
    options = parser.parse_args()
    flow = "cortex-m" if options.cortex_m else "xnnpack"
    devices = DEVICES[flow]
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    if options.networks is not None:
        print(f"{'network':34}{'results':>10}{'exported':>10}{'differ':>10}{'nodes that the flow leaves':>28}")
        for name in options.networks or plain_networks.NETWORKS:
            try:
                print(f"{name:34}{network(name, flow)}", flush=True)
            except Exception as error:  # noqa: BLE001 - of ExecuTorch
                print(f"{name:34}not run: {type(error).__name__}: {' '.join(str(error).split())[:150]}", flush=True)
        return 0
    print(f"{'operator':20}{'codes':>10}  {'  '.join(devices)}: differ")
    for kind in options.kinds or KINDS:
        rng, values, left = np.random.default_rng(0), 0, 0
        differing = dict.fromkeys(devices, 0)
        for _ in range(options.count):
            graph = made(kind, rng)
            codes = {name: rng.integers(-128, 128, graph.tensors[name].shape).astype(np.int8) for name in graph.inputs}
            result, taken = on_executorch(graph, codes, flow)
            left += not taken
            if not taken:
                continue
            values += result.size
            for device in devices:
                expected = deploy.simulate(graph, codes, device)[graph.outputs[0]].reshape(result.shape)
                differing[device] += int((expected != result).sum())
        note = f"  ({left} of {options.count} programs not taken whole, and not counted)" if left else ""
        print(f"{kind:20}{values:>10,}  {'  '.join(map(str, differing.values()))}{note}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
