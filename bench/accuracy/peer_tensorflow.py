# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's converter, with full integer quantization: it predicts nothing; LiteRT runs its file.

Networks are written again with TensorFlow's operations, channels last, on the same weights; before anything is
quantized, both must give the same real numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from exchange import Case, NotOffered, Offer, main
from litert import running
from networks import Segmenter, Transformer, outputs_of
from torch import nn


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def convolution(layer: nn.Conv2d, x: Any) -> Any:
    weight, (down, right) = array(layer.weight), layer.padding
    x = tf.pad(x, [(0, 0), (down, down), (right, right), (0, 0)]) if down or right else x
    if layer.groups > 1:
        y = tf.nn.depthwise_conv2d(x, weight.transpose(2, 3, 0, 1), (1, *layer.stride, 1), "VALID")
    else:
        y = tf.nn.conv2d(x, weight.transpose(2, 3, 1, 0), layer.stride, "VALID")
    return y if layer.bias is None else y + array(layer.bias)


def batch_norm(layer: nn.BatchNorm2d, x: Any) -> Any:
    assert layer.running_mean is not None and layer.running_var is not None
    factor = array(layer.weight) / np.sqrt(array(layer.running_var) + layer.eps)
    return x * factor + (array(layer.bias) - array(layer.running_mean) * factor)


def linear(layer: nn.Linear, x: Any) -> Any:
    return tf.matmul(x, array(layer.weight).T) + array(layer.bias)


def norm(layer: nn.LayerNorm, x: Any) -> Any:
    middle = x - tf.reduce_mean(x, -1, keepdims=True)
    return middle * tf.math.rsqrt(tf.reduce_mean(middle**2, -1, keepdims=True) + layer.eps) * array(
        layer.weight
    ) + array(layer.bias)


def sequence(model: nn.Sequential, x: Any) -> Any:
    flattened: tuple[int, ...] | None = None
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            x = convolution(layer, x)
        elif isinstance(layer, nn.BatchNorm2d):
            x = batch_norm(layer, x)
        elif isinstance(layer, nn.ReLU):
            x = tf.nn.relu(x)
        elif isinstance(layer, nn.AvgPool2d):
            x = tf.nn.avg_pool2d(x, layer.kernel_size, layer.kernel_size, "VALID")
        elif isinstance(layer, nn.Flatten):
            flattened = tuple(x.shape[1:])
            x = tf.reshape(x, (-1, int(np.prod(flattened))))
        elif isinstance(layer, nn.Linear) and flattened is not None:
            # Of features with channels first.
            height, width, channels = flattened
            weight = array(layer.weight).reshape(-1, channels, height, width).transpose(2, 3, 1, 0)
            x = tf.matmul(x, weight.reshape(-1, weight.shape[-1])) + array(layer.bias)
        else:
            raise NotOffered(f"this adapter does not write {type(layer).__name__} with TensorFlow")
    return x


def segmented(model: Segmenter, x: Any) -> Any:
    def up(layer: nn.ConvTranspose2d, x: Any) -> Any:
        shape = (tf.shape(x)[0], 2 * x.shape[1], 2 * x.shape[2], layer.out_channels)
        weight = array(layer.weight).transpose(2, 3, 1, 0)
        assert layer.bias is not None
        return tf.nn.conv2d_transpose(x, weight, shape, 2, "VALID") + array(layer.bias)

    x = tf.nn.relu(convolution(model.first, x))
    y = tf.nn.relu(convolution(model.low, tf.nn.relu(convolution(model.down, x))))
    x = tf.concat([x, tf.nn.relu(up(model.up, y))], -1)
    return convolution(model.scores, tf.nn.relu(convolution(model.last, x)))


def transformed(model: Transformer, x: Any) -> Any:
    x = tf.reshape(convolution(model.patches, x), (-1, 16, 32)) + array(model.places)
    for block in model.blocks:
        y = norm(block.norms[0], x)
        query, key, value = (
            tf.transpose(tf.reshape(linear(layer, y), (-1, 16, 2, 16)), (0, 2, 1, 3))
            for layer in (block.query, block.key, block.value)
        )
        weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * 0.25)
        together = tf.reshape(tf.transpose(tf.matmul(weights, value), (0, 2, 1, 3)), (-1, 16, 32))
        x = x + linear(block.out, together)
        x = x + linear(block.narrow, tf.nn.relu(linear(block.wide, norm(block.norms[1], x))))
    return linear(model.scores, tf.reduce_mean(norm(model.norm, x), 1))


def written_again(model: nn.Module) -> Callable[[Any], Any]:
    if isinstance(model, Segmenter):
        return lambda x: segmented(model, x)
    if isinstance(model, Transformer):
        return lambda x: transformed(model, x)
    assert isinstance(model, nn.Sequential)
    return lambda x: sequence(model, x)


def channels_last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1))


def channels_first(outputs: np.ndarray) -> np.ndarray:
    return outputs.transpose(0, 3, 1, 2) if outputs.ndim == 4 else outputs


def offers(case: Case) -> list[Offer]:
    if case.activations != 8 or case.weights != 8:
        raise NotOffered("it quantizes to activations of 8 and 16 bits, weights of 8")
    computes = written_again(case.model)
    some = case.calibration[:64]
    real, again = outputs_of(case.model, some), channels_first(computes(channels_last(some)).numpy())
    if np.abs(real - again).max() > 1e-3 * np.abs(real).max():
        raise AssertionError("the network written with TensorFlow's operations is another one")
    shape = channels_last(some).shape[1:]
    traced = tf.function(computes).get_concrete_function(tf.TensorSpec((1, *shape), tf.float32))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced], tf.Module())
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([channels_last(example[None])] for example in case.calibration)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    run = running(converter.convert())
    return [Offer("PTQ", None, lambda x: channels_first(run(channels_last(x))))]


if __name__ == "__main__":
    main(offers)
