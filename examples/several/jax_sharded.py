# SPDX-License-Identifier: Apache-2.0
"""JAX, jit over a mesh of all devices, each with its part of the batch: python jax_sharded.py."""

import digits
import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from exactqat import qat

optimizer = optax.adam(5e-3)
images, labels = digits.images[..., None], digits.labels


def network(params, x):
    order = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, params["conv"], (1, 1), "SAME", dimension_numbers=order)
    y = jax.nn.relu(qat.jax.batch_norm(y, **params["norm"], momentum=0.9))
    y = jax.lax.conv_general_dilated(y, params["deep"], (2, 2), "SAME", dimension_numbers=order, feature_group_count=16)
    return jax.nn.relu(y).reshape(x.shape[0], -1) @ params["head"]


def initial():
    random, ones = np.random.default_rng(0), np.ones(16, np.float32)
    shapes = {"conv": (3, 3, 1, 16), "deep": (3, 3, 1, 16), "head": (256, 10)}
    kernels = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    return kernels | {"norm": {"scale": ones, "bias": 0 * ones, "mean": 0 * ones, "variance": ones}}


def main():
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    everywhere, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    prepared = qat.jax.prepare(network, initial(), images[:2])
    params, state = prepared.calibrate(*prepared.init(), np.split(images[digits.train], 12))

    @jax.jit
    def step(params, state, moments, x, y):
        def loss(params):
            logits, after = prepared.apply(params, state, x, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), after

        gradients, state = jax.grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(params, updates), state, moments

    params, state, moments = jax.device_put((params, state, optimizer.init(params)), everywhere)
    for epoch in range(digits.EPOCHS):
        if epoch == digits.EPOCHS - digits.FROZEN:
            params, state = jax.device_put(prepared.freeze(params, state), everywhere)
        for batch in digits.batches(epoch):
            x, y = jax.device_put((images[batch], labels[batch]), spread)
            params, state, moments = step(params, state, moments, x, y)

    params, state = jax.tree.map(np.asarray, (params, state))
    model = prepared.trained(params, state)
    digits.deliver(prepared.lower(params, state), model, images[digits.test], jax.process_index())


if __name__ == "__main__":
    main()
