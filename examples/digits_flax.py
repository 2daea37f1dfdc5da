# SPDX-License-Identifier: Apache-2.0
"""Digits in Flax NNX, with learned ranges, to LiteRT (pip install 'exactqat[flax,deploy]' scikit-learn)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from exactqat import deploy, qat

digits = load_digits()
images, labels = jnp.asarray(digits.images[..., None] / 16, jnp.float32), jnp.asarray(digits.target)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.depthwise = nnx.Conv(16, 16, (3, 3), strides=2, feature_group_count=16, rngs=rngs)
        self.head = nnx.Linear(16 * 4 * 4, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.depthwise(nnx.relu(self.norm(self.conv(x)))))
        return self.head(x.reshape(x.shape[0], -1))


prepared = qat.jax.prepare(Network(nnx.Rngs(0)), images[:2], rules=[qat.Rule(ranges="learned")])
params, state = prepared.calibrate(*prepared.init(), [images[:256]])
optimizer = optax.adam(5e-3)


def step(carry, batch):
    params, state, moments = carry

    def loss(params):
        logits, after = prepared.apply(params, state, images[batch], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[batch]).mean(), after

    (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    updates, moments = optimizer.update(gradients, moments)
    return (optax.apply_updates(params, updates), after, moments), value


epoch = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches))
carry = params, state, optimizer.init(params)
for number in range(8):
    if number == 6:  # the last phase: what the device computes, to the bit
        carry = (*prepared.freeze(*carry[:2]), carry[2])
    carry, losses = epoch(carry, np.random.default_rng(number).permutation(1408).reshape(22, 64))
graph = prepared.lower(*carry[:2])
codes = deploy.input_codes(graph, images[1408:])
scores = deploy.simulate(graph, codes)[graph.outputs[0]]
path = deploy.write_tflite(graph, "digits.tflite")
report = deploy.verify(graph, path, model=prepared.trained(*carry[:2]), data=images[1408:])
print(f"accuracy {(scores.argmax(1) == labels[1408:]).mean():.3f}; {report.values} integers, {report.differing} differ")
assert report.equal
