# SPDX-License-Identifier: Apache-2.0
"""Random compositions of JAX's transformations about an operator, against NumPy's answer for each member.

`python tests/campaigns/jax_compositions.py --count 200 --seed 1` is a campaign; test_jax.py runs a few.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import _tests_folder  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from bits import assert_same_bits
from jax_table import BY_RAW_NAME, EXAMPLES, function_of, near, normal

NAMES = [name for name in EXAMPLES if "Grad" not in name and "Backprop" not in name]
TANGENT = normal(8, 4, 6, 4, seed=9)

Function = Callable[[Any], Any]  # of the first operand, to the first result


def jit(f: Function) -> Function:
    return jax.jit(f)


def remat(f: Function) -> Function:
    return jax.checkpoint(f)


def cond(f: Function) -> Function:
    return lambda x: jax.lax.cond(x.size > 0, f, lambda x: f(x) * 0, x)


def scan(f: Function) -> Function:
    """The second of two steps, the first on other data."""
    return lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0, jnp.stack([-x, x]))[1][1]


def loop(f: Function) -> Function:
    """Carried on by a loop that computes it again."""
    return lambda x: jax.lax.scan(lambda c, _: (f(x), None), f(x), None, length=2)[0]


def vmap(f: Function) -> Function:
    return lambda x: jax.vmap(f)(jnp.stack([x[::-1], x, -x]))[1]


def vmap_inside(f: Function) -> Function:
    """With the batch after the other dimensions."""
    return lambda x: jax.vmap(f, in_axes=2, out_axes=1)(jnp.stack([x, x * 0.5], axis=2))[:, 0]


def mapped(f: Function) -> Function:
    return lambda x: jax.lax.map(f, jnp.stack([x, x + 1]))[0]


def linear(f: Function) -> Function:
    """The primal that `linearize` gives."""
    return lambda x: jax.linearize(f, x)[0]


def pulled(f: Function) -> Function:
    """The primal that `vjp` gives."""
    return lambda x: jax.vjp(f, x)[0]


def pushed(f: Function) -> Function:
    """The primal that `jvp` gives."""
    return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[0]


WRAPPERS = (jit, remat, cond, scan, loop, vmap, vmap_inside, mapped, linear, pulled, pushed)


def composition(seed: int) -> tuple[str, list[Callable[[Function], Function]]]:
    choose = random.Random(seed)
    return choose.choice(NAMES), [choose.choice(WRAPPERS) for _ in range(choose.randint(2, 4))]


def check(seed: int) -> None:
    """Values are NumPy's bits; both modes' derivatives are those of the bare function."""
    name, wrappers = composition(seed)
    function, operands = function_of(name)
    first, *rest = operands
    assert BY_RAW_NAME[name].vjp is not None

    def bare(x: Any) -> Any:
        return function(x, *rest)[0]

    composed = bare
    for wrapper in wrappers:
        composed = wrapper(composed)
    what = f"seed {seed}: {' of '.join(w.__name__ for w in reversed(wrappers))} of {name}"
    assert_same_bits(np.asarray(composed(jnp.asarray(first))), np.asarray(bare(first)), what=what)
    weights = jnp.asarray(TANGENT)
    got, wanted = (jax.grad(lambda x, f=f: (f(x) ** 2 * weights).sum())(jnp.asarray(first)) for f in (composed, bare))
    near(got, wanted, f"gradient, {what}")
    got, wanted = (jax.jvp(f, (jnp.asarray(first),), (weights,))[1] for f in (composed, bare))
    near(got, wanted, f"tangent, {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    failed = 0
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        try:
            check(seed)
        except Exception as error:
            failed += 1
            print(f"{composition(seed)[0]}, seed {seed}: {type(error).__name__}: {str(error)[:500]}", flush=True)
    print(f"{chosen.count} compositions, {failed} failed")


if __name__ == "__main__":
    main()
