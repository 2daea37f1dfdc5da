# SPDX-License-Identifier: Apache-2.0
"""Random functions of one value that clip, compare and choose, with bounds from 1e-6 to 1e7, for any framework.

What is captured of one is computed at values beside, between and beyond its bounds. It gives what the function gives,
or `prepare` refuses it. As a program: `one_value.py keras COUNT`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Words:
    """A framework's functions: of arrays and numbers."""

    minimum: Callable[..., Any]
    maximum: Callable[..., Any]
    clip: Callable[..., Any]
    where: Callable[..., Any]
    relu: Callable[..., Any]
    tanh: Callable[..., Any]
    absolute: Callable[..., Any]
    both: Callable[..., Any]


NUMPY = Words(
    np.minimum, np.maximum, np.clip, np.where, lambda x: np.maximum(x, 0), np.tanh, np.abs, lambda a, b: a & b
)


@dataclass(frozen=True)
class Case:
    """A function as text, and the numbers in it."""

    text: str
    numbers: tuple[float, ...]

    def __call__(self, words: Words, x: Any) -> Any:
        return eval(self.text, {"w": words, "x": x})  # noqa: S307 - our own text


def cases(count: int, seed: int = 0) -> list[Case]:
    """Functions of two to three operations, each with bounds of its own."""
    return [_case(np.random.default_rng([seed, number])) for number in range(count)]


def _case(rng: np.random.Generator) -> Case:
    text, numbers = "x", list[float]()
    for _ in range(int(rng.integers(1, 4))):
        size = float(np.float32(f"{10 ** rng.uniform(-6, 7):.3g}"))
        other = float(np.float32(size * rng.choice([0.5, 1.00005, 1.5, 3.0])))
        low, high = sorted((size, other))
        numbers += [low, high]
        text = str(
            rng.choice(
                [
                    f"w.clip({text}, -{low!r}, {high!r})",
                    f"w.clip({text}, {low!r}, {high!r})",
                    f"w.minimum({text}, {low!r})",
                    f"w.maximum({text}, -{low!r})",
                    f"w.relu({text})",
                    f"w.where(w.absolute({text}) > {low!r}, 0.0 * x, {text})",
                    f"w.where(w.both({text} > {low!r}, {text} < {high!r}), 0.0 * x, {text})",
                    f"w.where({text} > {low!r}, x, 0.3 * {text})",
                    f"w.clip({text} * {size!r}, -{high!r}, {high!r})",
                    f"w.tanh({text} * {size!r})",
                ]
            )
        )
    return Case(text, tuple(numbers))


def inputs(case: Case) -> np.ndarray:
    """[n, 4]: values beside, between and beyond the numbers of a function, and products and quotients of these."""
    numbers = np.array([1.0, *case.numbers])
    sizes = np.concatenate([numbers, np.outer(numbers, [*numbers, *(1 / numbers)]).reshape(-1)])
    values = np.outer(sizes, [0.3, 0.7, 0.99, 1.00002, 1.01, 1.2, 2.5, 30.0, 2e3]).reshape(-1)
    values = np.concatenate([values, -values, [0.0]])
    return np.resize(values, (-(-len(values) // 4), 4)).astype(np.float32)


def error(case: Case, result: np.ndarray, x: np.ndarray) -> float:
    """The largest difference from the function relative to its value, away from where it jumps."""
    expected = np.asarray(case(NUMPY, x.astype(np.float64)), np.float64)
    beside = [np.asarray(case(NUMPY, x * (1 + step)), np.float64) for step in (-1e-6, 1e-6)]
    jumps = np.max([np.abs(neighbour - expected) for neighbour in beside], axis=0) > 1e-4 * np.abs(expected)
    difference = np.abs(result - expected) / np.maximum(np.abs(expected), 1e-12)
    return float(difference[~jumps].max(initial=0.0))


def values_of(network: Any, x: np.ndarray) -> np.ndarray:
    """What a captured network computes in real numbers."""
    from exactqat.kit.planning.kinds import KINDS

    values: dict[Any, Any] = {name: x.astype(np.float64) for name in network.inputs}
    values |= dict.fromkeys(network.constants, 1.0)  # JAX' function has a parameter
    for step in network.steps:
        operands = [values.get(name, name) for name in step.inputs]
        # Parts of a function that was recognised as a whole stay without a reader.
        with np.errstate(all="ignore"), suppress(NotImplementedError):
            values[step.output] = KINDS[step.kind].compute(operands, step.attributes)
    return np.asarray(values[network.outputs[0]], np.float64)


def check(count: int, seed: int, words: Words, captured: Callable[[Callable[[Any], Any]], Any]) -> list[str]:
    """What is wrong with the first `count` functions; prints how many were refused.

    captured: the network of a function; raises what `prepare` raises.
    """
    from exactqat.kit.planning import UnsupportedOperator

    wrong, refused = list[str](), 0
    for case in cases(count, seed):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                network = captured(lambda x, case=case: case(words, x))
        except UnsupportedOperator:
            refused += 1
            continue
        x = inputs(case)
        if not (distance := error(case, values_of(network, x), x)) < 1e-3:
            wrong.append(f"{case.text}: {distance:.2g}")
    print(f"{count} functions, {refused} refused, {len(wrong)} wrong")
    return wrong


def in_torch() -> tuple[Words, Callable[[Callable[[Any], Any]], Any]]:
    import torch

    from exactqat import qat

    words = Words(
        lambda x, y: torch.minimum(x, torch.tensor(y)),
        lambda x, y: torch.maximum(x, torch.tensor(y)),
        torch.clamp,
        torch.where,
        torch.relu,
        torch.tanh,
        torch.abs,
        torch.logical_and,
    )

    class Network(torch.nn.Module):
        def __init__(self, function: Callable[[Any], Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Any) -> Any:
            return self.function(x)

    example = torch.randn(4, 4)
    return words, lambda function: qat.prepare(Network(function).eval(), example, check=False).plan.network


def in_jax() -> tuple[Words, Callable[[Callable[[Any], Any]], Any]]:
    import jax
    import jax.numpy as jnp

    from exactqat import qat

    words = Words(jnp.minimum, jnp.maximum, jnp.clip, jnp.where, jax.nn.relu, jnp.tanh, jnp.abs, jnp.logical_and)
    example = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)

    def captured(function: Callable[[Any], Any]) -> Any:
        model = lambda params, x: function(x) * params["one"]  # noqa: E731
        return qat.jax.prepare(model, {"one": np.ones(4, np.float32)}, example, check=False).plan.network

    return words, captured


def in_keras() -> tuple[Words, Callable[[Callable[[Any], Any]], Any]]:
    import keras
    from keras import ops

    from exactqat import qat

    words = Words(ops.minimum, ops.maximum, ops.clip, ops.where, ops.relu, ops.tanh, ops.absolute, ops.logical_and)

    def captured(function: Callable[[Any], Any]) -> Any:
        x = keras.Input((4,))
        return qat.keras.prepare(keras.Model(x, function(x)), check=False).plan.network

    return words, captured


if __name__ == "__main__":
    problems = check(int(sys.argv[2]), 0, *{"torch": in_torch, "jax": in_jax, "keras": in_keras}[sys.argv[1]]())
    print("\n".join(problems))
    sys.exit(bool(problems))
