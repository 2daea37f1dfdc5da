# SPDX-License-Identifier: Apache-2.0
"""A frozen network on four CPU devices computes what it does on one; test_jax_kit.py runs it."""

import warnings

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import exactqat.qat.jax  # noqa: F401
from exactqat import qat

rng = np.random.default_rng(0)
params = {"w": rng.standard_normal((6, 16)).astype("f"), "v": rng.standard_normal((16, 3)).astype("f")}
x = rng.standard_normal((8, 6)).astype("f")
prepared = qat.jax.prepare(lambda p, x: jax.nn.relu(x @ p["w"]) @ p["v"], params, x)
params, state = prepared.calibrate(*prepared.init(), [x])
params, state = prepared.freeze(params, state)
evaluate = jax.jit(lambda p, x: prepared.apply(p, state, x)[0])
step = jax.jit(jax.value_and_grad(lambda p, x: (prepared.apply(p, state, x, train=True)[0] ** 2).mean()))
alone, (loss, gradients) = np.asarray(evaluate(params, x)), step(params, x)
broken = x.copy()
broken[5, 1] = np.nan
warnings.simplefilter("error")
for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(kind,))
    place = NamedSharding(mesh, P("batch"))
    spread = jax.device_put(x, place)
    together = evaluate(params, spread)

    for _ in range(10):
        np.testing.assert_array_equal(evaluate(params, spread), alone)
    np.testing.assert_array_equal(prepared.apply(params, state, spread)[0], alone)
    found = np.asarray(evaluate(params, jax.device_put(broken, place)))
    assert np.isnan(found[5]).all()
    np.testing.assert_array_equal(np.delete(found, 5, 0), np.delete(alone, 5, 0))
    if kind == jax.sharding.AxisType.Auto:  # in the other one JAX wants to hear how each gradient is to lie
        for _ in range(10):
            ours = step(params, spread)
        np.testing.assert_allclose(ours[0], loss, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())
mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
shares = {"in_specs": (P(), P("batch")), "out_specs": P("batch")}
replicas = jax.jit(jax.shard_map(lambda p, x: prepared.apply(p, state, x)[0], mesh=mesh, **shares))
np.testing.assert_array_equal(replicas(params, x), alone)
