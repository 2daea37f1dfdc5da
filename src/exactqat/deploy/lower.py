# SPDX-License-Identifier: Apache-2.0
"""Lowers a prepared and frozen PyTorch model to the graph of integer operators that the device runs.

Nothing is decided here that training did not see: weight codes, scales and bias codes are read from the layers' own
grids.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from ..qat.layers import (
    Pads,
    QuantizedAdd,
    QuantizedConcatenation,
    QuantizedInput,
    QuantizedLayer,
    QuantizedMaxPool,
    QuantizedMean,
    QuantizedMultiply,
    QuantizedPool,
    WeightedLayer,
)
from ..qat.modules import Conv2d, DepthwiseConv2d, FakeQuantize
from ..qat.prepare import PreparedModel
from .graph import Builder, Graph, Quantization, place_codes, same_padding


def placements(quantizer: FakeQuantize, activation: str = "NONE") -> tuple[Quantization, ...]:
    """Where the device stores the codes of a quantizer; the last one is how readers see the tensor."""
    scale, zero_point = quantizer.scale_and_zero_point()
    return place_codes(scale, zero_point, quantizer.bits, activation)


def device_codes(quantizer: FakeQuantize, values: Tensor, quantization: Quantization) -> np.ndarray:
    """int8 codes, channels last, of what a quantizer's forward gave in PyTorch's layout."""
    _, zero_point = quantizer.scale_and_zero_point()
    codes = quantizer.codes(values) - zero_point + int(quantization.zero_point[0])
    return (codes.transpose(0, 2, 3, 1) if codes.ndim == 4 else codes).astype(np.int8)


def layer_values(model: PreparedModel, features: Tensor) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What the float and the fake-quantized network store, by tensor name, channels last: for `verify`.

    The float network is the one with the same weights, without quantization.
    """

    def channels_last(values: Tensor) -> np.ndarray:
        array = values.detach().cpu().numpy()
        return array.transpose(0, 2, 3, 1) if array.ndim == 4 else array

    trained = {name: channels_last(values) for name, (_, values) in model.stored_tensors(features).items()}
    return {name: channels_last(values) for name, values in model.float_tensors(features).items()}, trained


def lower(model: PreparedModel, example_input: Tensor) -> Graph:
    """The integer graph of a frozen model.

    Args:
        model: prepared and frozen.
        example_input: a batch of the shape the device will get; its values do not matter.

    Returns:
        The graph. Every layer's stored tensor carries the layer's path as its name, "input" the network's input.

    Raises:
        ValueError: the model is not frozen, or a layer does not fit the device's integers (the message names it).
    """
    if not isinstance(model, PreparedModel):
        raise TypeError(f"model must come from exactqat.qat.prepare, got {type(model).__name__}")
    if not model.frozen:
        raise ValueError("model must be frozen before it is lowered: call exactqat.qat.freeze and train its last phase")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            fx.passes.shape_prop.ShapeProp(model.network).propagate(example_input)
            return _Lowering(model).run()
    finally:
        model.train(was_training)


class _Lowering:
    def __init__(self, model: PreparedModel) -> None:
        self.network = model.network
        self.builder = Builder()
        self.names: dict[fx.Node, str] = {}
        # [channels, height, width] before a flatten: the next Linear's columns must follow the device's order.
        self.flattened: dict[fx.Node, tuple[int, ...]] = {}

    def run(self) -> Graph:
        for node in self.network.graph.nodes:
            if node.op == "output":
                return self.builder.graph([self.names[cast(fx.Node, node.args[0])]])
            if node.op == "call_module":
                module = self.network.get_submodule(str(node.target))
                if isinstance(module, QuantizedLayer):
                    self.names[node] = self._layer(node, module)
                else:
                    self._pass_through(node)
            elif node.op == "call_function" and node.target is torch.flatten:
                self._flatten(node)
            elif node.op in ("call_function", "call_method"):
                self._pass_through(node)
        raise AssertionError("a traced graph ends with an output")

    def _source(self, node: fx.Node, position: int = 0) -> fx.Node:
        return cast(fx.Node, node.args[position])

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(node.meta["tensor_meta"].shape)

    def _pass_through(self, node: fx.Node) -> None:
        source = self._source(node)
        self.names[node] = self.names[source]
        if source in self.flattened:
            self.flattened[node] = self.flattened[source]

    def _flatten(self, node: fx.Node) -> None:
        source = self._source(node)
        shape = self._shape(source)
        if len(shape) == 2:
            self._pass_through(node)
            return
        features = int(np.prod(shape[1:]))
        self.names[node] = self.builder.reshape(
            self.names[source], (1, features), name=f"{self.names[source]}/{node.name}"
        )
        self.flattened[node] = shape[1:]

    def _layer(self, node: fx.Node, layer: QuantizedLayer) -> str:
        path = str(node.target)
        output = placements(layer.output_quantizer, layer.activation)
        if isinstance(layer, QuantizedInput):
            shape = self._shape(node)
            device_shape = (1, *shape[2:], shape[1]) if len(shape) == 4 else (1, *shape[1:])
            return self.builder.input(path, device_shape, output[-1])
        sources = [self.names[cast(fx.Node, source)] for source in node.args]
        if isinstance(layer, QuantizedAdd):
            return self.builder.add(sources[0], sources[1], output, name=path, activation=layer.activation)
        if isinstance(layer, QuantizedMean):
            return self.builder.mean(sources[0], output, name=path, keep_dims=layer.keep_dims)
        if isinstance(layer, QuantizedMultiply):
            return self.builder.mul(sources[0], sources[1], output, name=path, activation=layer.activation)
        if isinstance(layer, QuantizedConcatenation):
            stored = self.builder.tensor(sources[0]).quantization
            return self.builder.concatenation(sources, stored, name=path, axis=len(self._shape(node)) - 1)
        if isinstance(layer, QuantizedPool):
            return self._pool(path, layer, sources[0])
        assert isinstance(layer, WeightedLayer)
        return self._weighted(node, path, layer, sources[0], output)

    def _pool(self, path: str, layer: QuantizedPool, source: str) -> str:
        padding = layer.padding
        if not isinstance(padding, str):
            source, padding = self._pad(path, source, padding), "VALID"
        method = self.builder.max_pool_2d if isinstance(layer, QuantizedMaxPool) else self.builder.average_pool_2d
        return method(source, name=path, filter_size=layer.window, strides=layer.strides, padding=padding)

    def _pad(self, path: str, source: str, pads: Pads) -> str:
        return self.builder.pad(source, ((0, 0), *pads, (0, 0)), name=f"{path}/padded")

    def _weighted(
        self, node: fx.Node, path: str, layer: WeightedLayer, source: str, output: tuple[Quantization, ...]
    ) -> str:
        grid = layer.grid()
        codes = layer.weight_quantizer.codes(layer.stored_weight())
        signs = np.sign(grid.factor.detach().cpu().numpy()).astype(np.int64)
        codes = codes * signs.reshape(-1, *[1] * (codes.ndim - 1))
        scales = grid.weight_scale.detach().cpu().numpy()
        one_scale = not layer.weight_quantizer.rule.per_channel and bool(np.all(scales == scales[0]))
        common: dict[str, Any] = {
            "filter_scale": scales[:1] if one_scale else scales,
            "bias": grid.bias_code.detach().cpu().numpy().astype(np.float64),
            "output": output,
            "name": path,
            "activation": layer.activation,
        }
        if not isinstance(layer.operation, Conv2d):
            filter_ = self._device_columns(node, codes)
            return self.builder.fully_connected(source, filter_, **common)
        source, padding = self._padding(node, path, layer.operation, source)
        common.update(strides=layer.operation.stride, padding=padding, dilations=layer.operation.dilation)
        if isinstance(layer.operation, DepthwiseConv2d):
            # [channels * multiplier, 1, height, width] to [1, height, width, channels * multiplier]
            filter_ = codes.transpose(1, 2, 3, 0)
            if len(self._shape(node)) == 4:
                return self.builder.depthwise_conv_2d(source, filter_, **common)
            features = filter_.shape[3]
            image = self.builder.reshape(source, (1, 1, 1, features), name=f"{path}/as_image")
            common["name"] = f"{path}/of_image"
            result = self.builder.depthwise_conv_2d(image, filter_, **common)
            return self.builder.reshape(result, (1, features), name=path)
        return self.builder.conv_2d(source, codes.transpose(0, 2, 3, 1), **common)

    def _device_columns(self, node: fx.Node, codes: np.ndarray) -> np.ndarray:
        shape = self.flattened.get(self._source(node))
        if shape is None or len(shape) != 3:
            return codes
        return codes.reshape(-1, *shape).transpose(0, 2, 3, 1).reshape(codes.shape)

    def _padding(self, node: fx.Node, path: str, operation: Conv2d, source: str) -> tuple[str, str]:
        """The input (padded if need be) and the device's padding word that give the convolution's own zeros."""
        height, width = self._shape(self._source(node))[2:] or (1, 1)
        pads = operation.pads(height, width)
        if not any(pads[0] + pads[1]):
            return source, "VALID"
        same = tuple(
            same_padding(size, kernel, stride, dilation)
            for size, kernel, stride, dilation in zip(
                (height, width), operation.kernel_size, operation.stride, operation.dilation, strict=True
            )
        )
        if pads == same:
            return source, "SAME"
        return self._pad(path, source, pads), "VALID"
