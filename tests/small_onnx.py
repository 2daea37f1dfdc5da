# SPDX-License-Identifier: Apache-2.0
"""Small float networks in ONNX, an operator or two after a layer each, and what onnxruntime's `quantize_static` makes
of them with each of its options.

    for name, options in FILES:
        path = quantized(name, options, folder)
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_files import Reader

IMAGE, ROW = (4, 8, 8), (12,)
OPSET = 17


class Network:
    """The nodes and constants of a model."""

    def __init__(self, seed: int) -> None:
        self.onnx = pytest.importorskip("onnx")
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(self, kind: str, *inputs: str, results: int = 1, **attributes: Any) -> Any:
        names = [f"{kind.lower()}_{len(self.nodes)}_{number}" for number in range(results)]
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), names, name=names[0], **attributes))
        return names[0] if results == 1 else names

    def holds(self, values: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(np.asarray(values), name))
        return name

    def drawn(self, *shape: int, shift: float = 0.0) -> str:
        return self.holds((self.rng.standard_normal(shape) * 0.4 + shift).astype(np.float32))

    def conv(self, x: str, filters: int = 6, channels: int = 4, side: int = 3, shift: float = 0.0, **how: Any) -> str:
        """shift: of the weights from 0, so that their codes need a zero point."""
        depth = channels // int(how.get("group", 1))
        weights, pad = self.drawn(filters, depth, side, side, shift=shift), side // 2
        return str(self("Conv", x, weights, self.drawn(filters), kernel_shape=[side] * 2, pads=[pad] * 4, **how))

    def gemm(self, x: str, columns: int = 10, rows: int = 12) -> str:
        return str(self("Gemm", x, self.drawn(columns, rows), self.drawn(columns), transB=1))


Build = Callable[[Network, str], str]
NETWORKS: dict[str, tuple[tuple[int, ...], Build]] = {}


def of(shape: tuple[int, ...], **builds: Build) -> None:
    NETWORKS.update({name: (shape, build) for name, build in builds.items()})


def _end(n: Network, value: float) -> str:
    return n.holds(np.float32(value))


def _integers(n: Network, *values: int) -> str:
    return n.holds(np.array(values, np.int64))


def _resized(n: Network, x: str, **how: Any) -> str:
    scales = n.holds(np.array([1, 1, 2, 2], np.float32))
    return n.conv(n("Resize", n.conv(x), "", scales, **how), channels=6)


def _excited(n: Network, x: str) -> str:
    """Squeeze and excitation, as MobileNetV3 has it."""
    x = n("Relu", n.conv(x))
    pooled = n("GlobalAveragePool", x)
    gate = n("HardSigmoid", n.conv(n("Relu", n.conv(pooled, 4, 6, 1)), 6, 4, 1), alpha=1 / 6, beta=0.5)
    return n.conv(n("Mul", x, gate), channels=6, side=1)


def _classified(n: Network, x: str) -> str:
    x = n("Relu", n.conv(x, strides=[2, 2]))
    x = n("Relu", n.conv(x, 6, 6, group=6))
    x = n("Flatten", n("GlobalAveragePool", n("Relu", n.conv(x, 8, 6, 1))))
    return n("Softmax", n.gemm(x, rows=8), axis=1)


def _split(n: Network, x: str) -> str:
    first, second = n("Split", n.conv(x), results=2, axis=1)
    return n.conv(n("Concat", second, n("Relu", first), axis=1), channels=6)


of(
    IMAGE,
    conv=lambda n, x: n.conv(x),
    conv_shifted=lambda n, x: n.conv(x, shift=0.3),
    conv_relu=lambda n, x: n.conv(n("Relu", n.conv(x)), channels=6),
    conv_clip=lambda n, x: n.conv(n("Clip", n.conv(x), _end(n, 0), _end(n, 6)), channels=6),
    depthwise=lambda n, x: n.conv(n("Relu", n.conv(x, 4, group=4)), side=1),
    conv_transposed=lambda n, x: n("ConvTranspose", n.conv(x), n.drawn(6, 3, 2, 2), strides=[2, 2]),
    hard_sigmoid=lambda n, x: n("HardSigmoid", n.conv(x), alpha=1 / 6, beta=0.5),
    hard_swish=lambda n, x: n.conv(n("HardSwish", n.conv(x)), channels=6),
    excited=_excited,
    average_pool=lambda n, x: n.conv(n("AveragePool", n.conv(x), kernel_shape=[2, 2], strides=[2, 2]), channels=6),
    average_pool_padded=lambda n, x: n("AveragePool", n.conv(x), kernel_shape=[3, 3], pads=[1] * 4),
    global_average=lambda n, x: n.gemm(n("Flatten", n("GlobalAveragePool", n.conv(x))), rows=6),
    mean=lambda n, x: n.gemm(n("ReduceMean", n.conv(x), axes=[2, 3], keepdims=0), rows=6),
    max_pool=lambda n, x: n.conv(n("MaxPool", n.conv(x), kernel_shape=[2, 2], strides=[2, 2]), channels=6),
    resize_nearest=lambda n, x: _resized(
        n, x, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    ),
    resize_linear=lambda n, x: _resized(n, x, mode="linear", coordinate_transformation_mode="half_pixel"),
    concat=lambda n, x: n.conv(n("Concat", n.conv(x), n("Relu", n.conv(x, 2)), axis=1), channels=8),
    split=_split,
    add=lambda n, x: n("Relu", n("Add", n.conv(x, 4), x)),
    mul=lambda n, x: n("Mul", n.conv(x, 4), x),
    sigmoid=lambda n, x: n("Sigmoid", n.conv(x)),
    silu=lambda n, x: (lambda y: n.conv(n("Mul", y, n("Sigmoid", y)), channels=6))(n.conv(x)),
    tanh=lambda n, x: n("Tanh", n.conv(x)),
    leaky=lambda n, x: n.conv(n("LeakyRelu", n.conv(x), alpha=0.1), channels=6),
    prelu=lambda n, x: n("PRelu", n.conv(x), n.drawn(6, 1, 1)),
    padded=lambda n, x: n.conv(n("Pad", n.conv(x), _integers(n, 0, 0, 1, 1, 0, 0, 1, 1)), channels=6),
    moved=lambda n, x: n.gemm(n("Reshape", n("Transpose", n.conv(x), perm=[0, 2, 3, 1]), _integers(n, 0, -1)),
                              rows=384),
    classified=_classified,
)  # fmt: skip
of(
    ROW,
    gemm=lambda n, x: n.gemm(n("Relu", n.gemm(x))[:], rows=10),
    matmul=lambda n, x: n("Add", n("MatMul", x, n.drawn(12, 10)), n.drawn(10)),
    softmax=lambda n, x: n("Softmax", n.gemm(x), axis=1),
    layer_norm=lambda n, x: n.gemm(n("LayerNormalization", x, n.drawn(12, shift=1), n.drawn(12)), rows=12),
)

TYPES = ("QUInt8", "QInt8")
# The tool's own order of what its users choose: format, activations, weights, per channel; then one more each.
OPTIONS: dict[str, dict[str, Any]] = {
    f"{form},{activation},{weight}{',per_channel' if per_channel else ''}": {
        "form": form, "activation_type": activation, "weight_type": weight, "per_channel": per_channel
    }
    for form, activation, weight, per_channel in itertools.product(("QDQ", "QOperator"), TYPES, TYPES, (False, True))
} | {
    "QDQ,reduce_range": {"reduce_range": True},
    "QDQ,symmetric": {"activation_type": "QInt8", "extra_options": {"ActivationSymmetric": True}},
    "QDQ,asymmetric": {"extra_options": {"WeightSymmetric": False}},
    "QDQ,symmetric_unsigned": {"weight_type": "QUInt8", "extra_options": {"WeightSymmetric": True}},
}  # fmt: skip
FILES = tuple(itertools.product(NETWORKS, OPTIONS))


def in_float(name: str, folder: Path) -> Path:
    shape, build = NETWORKS[name]
    network = Network(sorted(NETWORKS).index(name))
    onnx, result = network.onnx, build(network, "x")
    ends = [
        [onnx.helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, shape)]
        for end, shape in (("x", ["N", *shape]), (result, None))
    ]
    graph = onnx.helper.make_graph(network.nodes, name, *ends, network.constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=8)
    path = folder / f"{name}.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def quantized(name: str, options: str, folder: Path) -> Path:
    """A network by `quantize_static` with options of `OPTIONS`."""
    tools = pytest.importorskip("onnxruntime.quantization")
    how = {"form": "QDQ", "activation_type": "QUInt8", "weight_type": "QInt8", **OPTIONS[options]}
    form = tools.QuantFormat[how.pop("form")]
    how |= {word: tools.QuantType[how[word]] for word in ("activation_type", "weight_type")}
    ready, file = folder / "ready.onnx", folder / f"{name}.{options}.onnx"
    before = logging.root.level
    logging.root.setLevel(logging.ERROR)  # the tool advises to prepare the model, which is done here
    try:
        tools.shape_inference.quant_pre_process(str(in_float(name, folder)), str(ready), skip_symbolic_shape=True)
        reader = Reader({"x": (8, *NETWORKS[name][0])})
        tools.quantize_static(str(ready), str(file), reader, quant_format=form, **how)
    finally:
        logging.root.setLevel(before)
    return file
