# SPDX-License-Identifier: Apache-2.0
"""The network of test_jax_kit.py::test_weights_move_between_frameworks in Keras beside PyTorch's: one graph.

test_keras_kit.py runs it. JAX's graph equals PyTorch's there, so the three are equal.
"""

from __future__ import annotations

import keras
import numpy as np
import torch
from keras import layers
from torch import nn

from exactqat import qat
from exactqat.deploy.lower import lower


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, (10, 4), 2, (4, 1), bias=True)
        self.stem_norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(8)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.pointwise_norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 12 * 5, 4)

    def forward(self, x):
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(self.depthwise_norm(self.depthwise(x)))
        x = nn.functional.relu6(self.pointwise_norm(self.pointwise(x)))
        return self.head(x.flatten(1))


torch.manual_seed(0)
network = Network()
for module in network.modules():
    if isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 0.0, 1.0)  # some factors are negative
        nn.init.normal_(module.bias)
        nn.init.normal_(module.running_mean)
        nn.init.uniform_(module.running_var, 0.1, 2.0)
images = torch.randn(8, 1, 25, 10)
theirs = qat.prepare(network, images)
qat.calibrate(theirs, [images])
qat.freeze(theirs)

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


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


for name in ("stem", "depthwise", "pointwise"):
    given, norm = getattr(network, name), getattr(network, f"{name}_norm")
    # [out, in / groups, height, width] as [height, width, in, out], or as [height, width, channels, 1].
    order = (2, 3, 0, 1) if name == "depthwise" else (2, 3, 1, 0)
    own = [numbers(given.weight.permute(*order))] + ([] if given.bias is None else [numbers(given.bias)])
    model.get_layer(name).set_weights(own)
    statistics = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    model.get_layer(f"{name}_norm").set_weights([numbers(each) for each in statistics])
# Flattened in Keras' order of axes.
matrix = network.head.weight.reshape(4, 8, 12, 5).permute(2, 3, 1, 0).reshape(-1, 4)
model.get_layer("head").set_weights([numbers(matrix), numbers(network.head.bias)])

ours = qat.keras.prepare(model)
x = images.permute(0, 2, 3, 1).numpy()
qat.keras.calibrate(ours, [x])
ranges = {path: layer.output_quantizer.range for path, layer in theirs.layers() if path in ours._held.variables.ranges}
assert set(ranges) == set(ours._held.variables.ranges), (set(ranges), set(ours._held.variables.ranges))
for path, found in ranges.items():
    # Sums in another order: the same ranges but for the last bits, and from here on to the bit.
    for end in ("minimum", "maximum"):
        wanted = numbers(getattr(found, end))
        variable = ours._held.variables.ranges[path][end]
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-4, atol=1e-6)
        variable.assign(wanted)
qat.keras.freeze(ours)
first, second = lower(theirs), lower(ours)
kinds = [[(each.kind, dict(each.attributes)) for each in graph.operators] for graph in (first, second)]
assert kinds[0] == kinds[1], kinds
compared = 0
for one, other in zip(first.operators, second.operators, strict=True):
    for left, right in zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True):
        mine, your = first.tensors[left], second.tensors[right]
        assert mine.shape == your.shape and mine.dtype == your.dtype, (left, right)
        assert mine.quantization.equals(your.quantization), (left, right)
        assert (mine.data is None) == (your.data is None)
        if mine.data is not None:
            np.testing.assert_array_equal(mine.data, your.data, left)
            compared += mine.data.size
assert compared > 2000
print(f"{compared} integers of weights, one graph")
