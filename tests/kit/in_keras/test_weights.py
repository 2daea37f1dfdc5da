# SPDX-License-Identifier: Apache-2.0
"""The network of test_jax_kit.py::test_weights_move_between_frameworks in Keras beside PyTorch's: one graph.

JAX's graph equals PyTorch's there, so the three are equal.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from exactqat import qat
from exactqat.deploy.lower import lower

torch = pytest.importorskip("torch")

from moving_weights import Network  # noqa: E402

pytestmark = pytest.mark.slow


def numbers(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def in_keras(network: Network) -> Any:
    """The network in Keras, with the same weights."""
    model = keras.Sequential(
        [
            keras.Input((25, 10, 1)),
            layers.ZeroPadding2D((4, 1)),  # "same" pads 4 and 5 rows there
            layers.Conv2D(8, (10, 4), 2, name="stem"),
            layers.BatchNormalization(epsilon=1e-5, name="stem_norm"),
            layers.ReLU(),
            layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise"),
            layers.BatchNormalization(epsilon=1e-5, name="depthwise_norm"),
            layers.ReLU(),
            layers.Conv2D(8, 1, name="pointwise"),
            layers.BatchNormalization(epsilon=1e-5, name="pointwise_norm"),
            layers.ReLU(6.0),
            layers.Flatten(),
            layers.Dense(4, name="head"),
        ]
    )
    for name in ("stem", "depthwise", "pointwise"):
        layer, norm = getattr(network, name), getattr(network, f"{name}_norm")
        # [out, in / groups, height, width] as [height, width, in, out], or as [height, width, channels, 1].
        order = (2, 3, 0, 1) if name == "depthwise" else (2, 3, 1, 0)
        weights = [layer.weight.permute(*order), *([] if layer.bias is None else [layer.bias])]
        model.get_layer(name).set_weights([numbers(weight) for weight in weights])
        statistics = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        model.get_layer(f"{name}_norm").set_weights([numbers(statistic) for statistic in statistics])
    # Flattened in Keras' order of axes.
    matrix = network.head.weight.reshape(4, 8, 12, 5).permute(2, 3, 1, 0).reshape(-1, 4)
    model.get_layer("head").set_weights([numbers(matrix), numbers(network.head.bias)])
    return model


def test_weights_move_between_pytorch_and_keras() -> None:
    torch.manual_seed(0)
    network = Network()
    images = torch.randn(8, 1, 25, 10)
    theirs = qat.prepare(network, images)
    qat.calibrate(theirs, [images])
    qat.freeze(theirs)
    ours = qat.keras.prepare(in_keras(network))
    qat.keras.calibrate(ours, [images.permute(0, 2, 3, 1).numpy()])
    variables = ours._held.variables.ranges
    ranges = {path: layer.output_quantizer.range for path, layer in theirs.layers() if path in variables}
    assert set(ranges) == set(variables)
    for path, ends in ranges.items():
        # Sums in another order: the same ranges but for the last bits, and from here on to the bit.
        for name in ("minimum", "maximum"):
            expected = numbers(getattr(ends, name))
            variable = variables[path][name]
            np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected, rtol=1e-4, atol=1e-6)
            variable.assign(expected)
    qat.keras.freeze(ours)
    graphs = lower(theirs), lower(ours)
    kinds = [[(operator.kind, dict(operator.attributes)) for operator in graph.operators] for graph in graphs]
    assert kinds[0] == kinds[1]
    size = 0
    for operators in zip(*(graph.operators for graph in graphs), strict=True):
        for tensor_names in zip(*((*operator.inputs, *operator.outputs) for operator in operators), strict=True):
            expected, tensor = (graph.tensors[name] for graph, name in zip(graphs, tensor_names, strict=True))
            assert tensor.shape == expected.shape and tensor.dtype == expected.dtype, tensor_names
            assert tensor.quantization.equals(expected.quantization), tensor_names
            assert (tensor.data is None) == (expected.data is None)
            if tensor.data is not None:
                np.testing.assert_array_equal(tensor.data, expected.data, str(tensor_names))
                size += tensor.data.size
    assert size > 2000
