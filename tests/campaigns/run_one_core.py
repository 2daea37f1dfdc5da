# SPDX-License-Identifier: Apache-2.0
"""One training core: the same network, data, rules and seeds in PyTorch, JAX and Keras give the same bits.

    python tests/campaigns/run_one_core.py               all networks, policies and bits
    python tests/campaigns/run_one_core.py gated 8       those that these words describe

With a GPU that PyTorch sees, PyTorch trains there as well.

Compared are plans; ranges after calibration, every step of training and `freeze`; statistics of batch norm; weights'
codes, biases, multipliers, constants; the file; the results of the frozen network on every device. All numbers are
small integers and powers of two, so that float32 rounds no sum and the order in which a framework adds does not matter.

Two runs for each case. "calibrated": calibration by some batches, then freeze: float networks are exact, so every
tensor's range moves by its policy. "trained": hidden tensors have fixed ranges whose steps are powers of two, inputs
and outputs the policy (but for learned ranges of inputs in 4 bits); steps of SGD. To keep the steps of weights powers
of two while they train, the first input channel of a layer is always 0, and the largest weight of each output channel
reads it (`PILOT`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
import jax
import jax.numpy as jnp
import keras
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax
from torch import nn

from exactqat import deploy, qat
from exactqat.qat.train.core.engine import Functional

# The largest weight: 127 steps of 2**-6.
PILOT = 127 / 64
# What keeps the first channel of a layer at 0, after its ReLU.
DEAD = -64.0
RATE = 2.0**-14
FRAMEWORKS = ("torch", "jax", "keras")
Tensors = dict[str, dict[str, np.ndarray]]
Network = Callable[[Any, Any], Any]
NETWORKS: dict[str, tuple[Network, tuple[int, ...]]] = {}


def network(*shape: int) -> Callable[[Network], Network]:
    def register(build: Network) -> Network:
        NETWORKS[build.__name__] = (build, shape)
        return build

    return register


@network(4, 8, 8)
def convolution(o: Any, x: Any) -> Any:
    """Convolution, batch norm and ReLU6."""
    x = o.relu6(o.batch_norm("norm", o.conv("first", x, 8, 3)))
    return o.conv("last", x, 4, 1, bias=True)


@network(4, 8, 8)
def depthwise(o: Any, x: Any) -> Any:
    x = o.relu(o.conv("first", x, 8, 1, bias=True))
    x = o.relu(o.conv("depthwise", x, 8, 3, groups=8))
    return o.conv("last", x, 4, 1)


@network(16)
def dense(o: Any, x: Any) -> Any:
    x = o.relu(o.linear("first", x, 12))
    x = o.relu(o.linear("second", x, 8))
    return o.linear("last", x, 3)


@network(4, 8, 8)
def residual(o: Any, x: Any) -> Any:
    x = o.relu(o.conv("stem", x, 8, 1, bias=True))
    branch = o.relu(o.conv("first", x, 8, 3, bias=True))
    branch = o.conv("second", branch, 8, 1, bias=True)
    return o.conv("last", o.relu(o.add(x, branch)), 4, 1)


@network(4, 8, 8)
def concatenation(o: Any, x: Any) -> Any:
    x = o.relu(o.conv("stem", x, 4, 1, bias=True))
    branch = o.relu(o.conv("first", x, 4, 3, bias=True))
    return o.conv("last", o.concat([x, branch]), 4, 1)


@network(4, 8, 8)
def pools(o: Any, x: Any) -> Any:
    x = o.max_pool(o.relu(o.conv("first", x, 8, 3, bias=True)))
    x = o.mean(o.relu(o.conv("second", x, 8, 1, bias=True)))
    return o.linear("last", x, 4)


@network(4, 8, 8)
def gated(o: Any, x: Any) -> Any:
    x = o.relu(o.conv("first", x, 8, 1, bias=True))
    return o.conv("last", o.multiply(x, o.relu6(o.conv("gate", x, 8, 1, bias=True))), 4, 1)


@network(4, 8)
def attention(o: Any, x: Any) -> Any:
    """One projection for queries, keys and values, so that all frameworks run it in one order; without a softmax, which
    is not exact."""
    x = o.linear("first", x, 8, bias=False)
    return o.linear("last", o.matmul(o.relu(o.matmul(x, o.transpose(x))), x), 4)


@network(4, 16)
def one_dimensional(o: Any, x: Any) -> Any:
    x = o.relu(o.conv("first", x, 8, 3, bias=True))
    x = o.relu(o.conv("second", x, 8, 3, bias=True))
    return o.conv("last", x, 2, 1)


@network(4, 8, 8)
def two_heads(o: Any, x: Any) -> Any:
    x = o.relu(o.conv("stem", x, 8, 3, bias=True))
    return o.conv("first", x, 4, 1), o.linear("last", o.mean(x), 3)


@network(4, 8, 8)
def scaled(o: Any, x: Any) -> Any:
    """A constant operand, and a clamp by it."""
    x = o.relu(o.conv("first", x, 8, 1, bias=True))
    return o.conv("last", o.times(x, 0.75), 4, 1)


# --- the same network in each framework -------------------------------------------------------------------------------


class Shapes:
    """Draws the tensors of a network, by the names of its layers."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.random = np.random.default_rng(0)

    def weight(self, name: str, shape: Sequence[int], pilot: bool, bias: int) -> None:
        # Few bits, so that float32 holds the sums of several layers one after the other.
        weight = self.random.choice([-0.5, -0.25, 0.0, 0.0, 0.25, 0.5], shape)
        if pilot:
            weight[:, 0] = PILOT
        else:
            weight.reshape(len(weight), -1)[:, 0] = PILOT
        self.tensors[name] = {"weight": weight.astype(np.float32)}
        if bias:
            values = self.random.integers(-2, 3, bias).astype(np.float32)
            values[0] = DEAD if bias > 4 or name in ("stem", "first") else values[0]
            self.tensors[name]["bias"] = values

    def conv(self, name: str, x: Any, count: int, side: int, bias: bool = False, groups: int = 1) -> Any:
        shape = (count, x[0] // groups, *[side] * (len(x) - 1))
        self.weight(name, shape, groups == 1, count if bias else 0)
        return (count, *x[1:])

    def linear(self, name: str, x: Any, count: int, bias: bool = True) -> Any:
        self.weight(name, (count, x[-1]), True, count if bias else 0)
        if len(x) > 1:  # products of results have many bits
            weight = self.tensors[name]["weight"]
            weight[:, 1:] = np.round(weight[:, 1:] * 4) / 4
        return (*x[:-1], count)

    def batch_norm(self, name: str, x: Any) -> Any:
        channels = x[0]
        offset = self.random.integers(-2, 3, channels).astype(np.float32)
        offset[0] = DEAD
        self.tensors[name] = {
            "weight": np.resize(np.float32([1, 2, -0.5, 4]), channels),
            "bias": offset,
            "mean": self.random.integers(-2, 3, channels).astype(np.float32),
            "variance": np.resize(np.float32([15.75, 3.75, 0.75]), channels),
        }
        return x

    def relu(self, x: Any) -> Any:
        return x

    relu6 = relu

    def add(self, x: Any, y: Any) -> Any:
        return x

    multiply = add

    def times(self, x: Any, factor: float) -> Any:
        return x

    def concat(self, arrays: Any) -> Any:
        return (sum(shape[0] for shape in arrays), *arrays[0][1:])

    def max_pool(self, x: Any) -> Any:
        return (x[0], *(size // 2 for size in x[1:]))

    def mean(self, x: Any) -> Any:
        return x[:1]

    def matmul(self, x: Any, y: Any) -> Any:
        return (*x[:-1], y[-1])

    def transpose(self, x: Any) -> Any:
        return (*x[:-2], x[-1], x[-2])


class InTorch(nn.Module):
    def __init__(self, build: Network, tensors: Tensors) -> None:
        super().__init__()
        self.build = build
        for name, arrays in tensors.items():
            state = {key: torch.from_numpy(value.copy()) for key, value in arrays.items()}
            weight = state["weight"]
            layer: nn.Module
            if "mean" in arrays:
                layer = nn.BatchNorm2d(len(weight), eps=0.25, momentum=0.25)
                state = {"weight": weight, "bias": state["bias"]}
                layer.running_mean.copy_(torch.from_numpy(arrays["mean"]))
                layer.running_var.copy_(torch.from_numpy(arrays["variance"]))
            elif weight.dim() == 2:
                layer = nn.Linear(weight.shape[1], len(weight), "bias" in state)
            else:
                groups = len(weight) if name == "depthwise" else 1
                kind = nn.Conv2d if weight.dim() == 4 else nn.Conv1d
                side = weight.shape[-1]
                layer = kind(
                    weight.shape[1] * groups, len(weight), side, padding=side // 2, groups=groups, bias="bias" in state
                )
            for key, value in state.items():
                setattr(layer, key, nn.Parameter(value))
            self.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        return self.build(self, x)

    def conv(self, name: str, x: Any, *rest: Any, **others: Any) -> Any:
        return getattr(self, name)(x)

    linear = batch_norm = conv

    def relu(self, x: Any) -> Any:
        return F.relu(x)

    def relu6(self, x: Any) -> Any:
        return F.relu6(x)

    def add(self, x: Any, y: Any) -> Any:  # type: ignore[override]
        return x + y

    def multiply(self, x: Any, y: Any) -> Any:
        return x * y

    def times(self, x: Any, factor: float) -> Any:
        return x * factor

    def concat(self, arrays: Any) -> Any:
        return torch.cat(arrays, 1)

    def max_pool(self, x: Any) -> Any:
        return F.max_pool2d(x, 2)

    def mean(self, x: Any) -> Any:
        return x.mean((2, 3))

    def matmul(self, x: Any, y: Any) -> Any:
        return x @ y

    def transpose(self, x: Any) -> Any:
        return x.transpose(-1, -2)


class InJax:
    def __init__(self, params: Any) -> None:
        self.params = params

    def conv(self, name: str, x: Any, count: int, side: int, bias: bool = False, groups: int = 1) -> Any:
        words = ("NCHW", "OIHW", "NCHW") if x.ndim == 4 else ("NCH", "OIH", "NCH")
        around = [(side // 2, side // 2)] * (x.ndim - 2)
        layer = self.params[name]
        y = lax.conv_general_dilated(
            x, layer["weight"], (1,) * len(around), around, dimension_numbers=words, feature_group_count=groups
        )
        return y + layer["bias"].reshape(-1, *[1] * len(around)) if bias else y

    def linear(self, name: str, x: Any, count: int, bias: bool = True) -> Any:
        layer = self.params[name]
        y = x @ layer["weight"].T
        return y + layer["bias"] if bias else y

    def batch_norm(self, name: str, x: Any) -> Any:
        layer = self.params[name]
        return qat.jax.batch_norm(
            x, layer["weight"], layer["bias"], layer["mean"], layer["variance"], epsilon=0.25, momentum=0.75, axis=1
        )

    def relu(self, x: Any) -> Any:
        return jax.nn.relu(x)

    def relu6(self, x: Any) -> Any:
        return jax.nn.relu6(x)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def multiply(self, x: Any, y: Any) -> Any:
        return x * y

    def times(self, x: Any, factor: float) -> Any:
        return x * factor

    def concat(self, arrays: Any) -> Any:
        return jnp.concatenate(arrays, 1)

    def max_pool(self, x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    def mean(self, x: Any) -> Any:
        return x.mean((2, 3))

    def matmul(self, x: Any, y: Any) -> Any:
        return x @ y

    def transpose(self, x: Any) -> Any:
        return jnp.swapaxes(x, -1, -2)


class InKeras:
    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.layers: dict[str, Any] = {}

    def layer(self, name: str, layer: Any, x: Any) -> Any:
        self.layers[name] = layer
        return layer(x)

    def conv(self, name: str, x: Any, count: int, side: int, bias: bool = False, groups: int = 1) -> Any:
        settings = {"padding": "same", "use_bias": bias, "data_format": "channels_first", "name": name}
        if groups > 1:
            return self.layer(name, keras.layers.DepthwiseConv2D(side, **settings), x)
        kind = keras.layers.Conv2D if len(x.shape) == 4 else keras.layers.Conv1D
        return self.layer(name, kind(count, side, **settings), x)

    def linear(self, name: str, x: Any, count: int, bias: bool = True) -> Any:
        return self.layer(name, keras.layers.Dense(count, use_bias=bias, name=name), x)

    def batch_norm(self, name: str, x: Any) -> Any:
        return self.layer(name, keras.layers.BatchNormalization(1, momentum=0.75, epsilon=0.25, name=name), x)

    def relu(self, x: Any) -> Any:
        return keras.ops.relu(x)

    def relu6(self, x: Any) -> Any:
        return keras.ops.relu6(x)

    def add(self, x: Any, y: Any) -> Any:
        return keras.ops.add(x, y)

    def multiply(self, x: Any, y: Any) -> Any:
        return keras.ops.multiply(x, y)

    def times(self, x: Any, factor: float) -> Any:
        return x * factor

    def concat(self, arrays: Any) -> Any:
        return keras.ops.concatenate(arrays, 1)

    def max_pool(self, x: Any) -> Any:
        return keras.layers.MaxPooling2D(2, data_format="channels_first")(x)

    def mean(self, x: Any) -> Any:
        return keras.ops.mean(x, (2, 3))

    def matmul(self, x: Any, y: Any) -> Any:
        return keras.ops.matmul(x, y)

    def transpose(self, x: Any) -> Any:
        return keras.ops.swapaxes(x, -1, -2)

    def fill(self) -> None:
        for name, arrays in self.tensors.items():
            layer, weight = self.layers[name], arrays["weight"]
            if "mean" in arrays:
                layer.set_weights([arrays[key] for key in ("weight", "bias", "mean", "variance")])
                continue
            # A depthwise kernel is [*window, channels, 1].
            axes = (*range(2, weight.ndim), *((0, 1) if name == "depthwise" else (1, 0)))
            layer.set_weights([weight.transpose(axes), *([arrays["bias"]] if "bias" in arrays else [])])


# --- what each of them makes of a case --------------------------------------------------------------------------------


@dataclass
class Record:
    """What is compared: label -> arrays, in the network's order."""

    plan: list[Any]
    found: dict[str, Any]


class Torch:
    device = "cpu"

    def __init__(self, build: Network, tensors: Tensors, rules: Sequence[qat.Rule], x: np.ndarray) -> None:
        model = InTorch(build, tensors).train().to(self.device)
        self.model = qat.prepare(model, self.tensor(x), rules, check=False)
        self.plan = self.model.plan
        self.owned = dict(self.model.named_parameters())
        self.device_of = self.model

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def calibrate(self, batches: Sequence[np.ndarray]) -> None:
        qat.calibrate(self.model, map(self.tensor, batches))

    def step(self, x: np.ndarray, trained: frozenset[str]) -> list[np.ndarray]:
        results = self.model(self.tensor(x))
        results = results if isinstance(results, tuple) else (results,)
        self.model.zero_grad()
        sum((result * self.tensor(weights(result.shape))).sum() for result in results).backward()
        ranges = {id(parameter) for parameter in self.model.range_parameters()}
        with torch.no_grad():
            for name, parameter in self.owned.items():
                if parameter.grad is not None and (name.replace(".", "/") in trained or id(parameter) in ranges):
                    parameter -= RATE * parameter.grad
        return [result.detach().cpu().numpy() for result in results]

    def freeze(self) -> None:
        qat.freeze(self.model)

    def results(self, x: np.ndarray) -> list[np.ndarray]:
        self.model.eval()
        results = self.model(self.tensor(x))
        self.model.train()
        return [result.detach().cpu().numpy() for result in (results if isinstance(results, tuple) else (results,))]

    def deploy_to(self, device: str) -> None:
        self.model.profile = device

    def ends(self) -> dict[str, tuple[Any, Any, int]]:
        ranges = {}
        for name, grid in self.model._state.grids().items():
            low, high, batches = grid.held()
            ranges[name] = (low.detach().cpu().numpy(), high.detach().cpu().numpy(), int(batches))
        return ranges

    def statistics(self) -> dict[str, np.ndarray]:
        norms = [norm for norm in (step.weights and step.weights.batch_norm for step in self.plan.steps) if norm]
        state = self.model.state_dict()
        return {
            norm.mean.split(".")[0]: np.stack([state[norm.mean].cpu(), state[norm.variance].cpu()]) for norm in norms
        }

    def take(self, statistics: Mapping[str, np.ndarray]) -> None:
        for path, (mean, variance) in statistics.items():
            state = self.model.state_dict()
            state[f"{path}.running_mean"].copy_(torch.from_numpy(mean))
            state[f"{path}.running_var"].copy_(torch.from_numpy(variance))


class TorchOnGpu(Torch):
    device = "cuda"


class Jax:
    def __init__(self, build: Network, tensors: Tensors, rules: Sequence[qat.Rule], x: np.ndarray) -> None:
        self.device_of: Any = qat.jax.prepare(lambda params, x: build(InJax(params), x), tensors, x, rules, check=False)
        self.plan = self.device_of.plan
        self.params, self.state = self.device_of.init()
        self.gradients = jax.jit(jax.value_and_grad(self.loss, has_aux=True))

    def loss(self, params: Any, state: Any, x: Any) -> Any:
        results, state = self.device_of.apply(params, state, x, train=True)
        results = results if isinstance(results, tuple) else (results,)
        return sum((result * weights(result.shape)).sum() for result in results), (results, state)

    def calibrate(self, batches: Sequence[np.ndarray]) -> None:
        self.params, self.state = self.device_of.calibrate(self.params, self.state, batches)

    def step(self, x: np.ndarray, trained: frozenset[str]) -> list[np.ndarray]:
        (_, (results, self.state)), gradients = self.gradients(self.params, self.state, x)
        model = {
            name: {
                key: value - RATE * gradients["model"][name][key] if f"{name}/{key}" in trained else value
                for key, value in layer.items()
            }
            for name, layer in self.params["model"].items()
        }
        ranges = jax.tree.map(lambda p, g: p - RATE * g, self.params["range_parameters"], gradients["range_parameters"])
        self.params = {"model": model, "range_parameters": ranges}
        return [np.asarray(result) for result in results]

    def freeze(self) -> None:
        self.params, self.state = self.device_of.freeze(self.params, self.state)

    def results(self, x: np.ndarray) -> list[np.ndarray]:
        results, _ = self.device_of.apply(self.params, self.state, x)
        return [np.asarray(result) for result in (results if isinstance(results, tuple) else (results,))]

    def deploy_to(self, device: str) -> None:
        self.device_of._functional = for_device(self.device_of._functional, device)

    def ends(self) -> dict[str, tuple[Any, Any, int]]:
        return {
            name: (
                *({**grid, **self.params["range_parameters"].get(name, {})}[end] for end in ("minimum", "maximum")),
                int(grid["batches"]),
            )
            for name, grid in self.state.ranges.items()
        }

    def statistics(self) -> dict[str, np.ndarray]:
        names = [name.rpartition(".")[0] for name in self.state.variables if name.endswith(".mean")]
        known = self.state.variables
        return {name: np.stack([known[f"{name}.mean"], known[f"{name}.variance"]]) for name in names}

    def take(self, statistics: Mapping[str, np.ndarray]) -> None:
        arrays = {
            f"{path}.{word}": jnp.asarray(value)
            for path, both in statistics.items()
            for word, value in zip(("mean", "variance"), both, strict=True)
        }
        self.state = replace(self.state, variables={**self.state.variables, **arrays})

    @property
    def trained(self) -> Any:
        return self.device_of.trained(self.params, self.state)


class Keras:
    def __init__(self, build: Network, tensors: Tensors, rules: Sequence[qat.Rule], x: np.ndarray) -> None:
        keras.backend.clear_session()
        inputs = keras.Input(x.shape[1:])
        builder = InKeras(tensors)
        model = keras.Model(inputs, build(builder, inputs))
        builder.fill()
        self.device_of = qat.keras.prepare(model, rules=rules, check=False)
        self.plan = self.device_of.plan
        words = {"kernel": "weight", "gamma": "weight", "beta": "bias"}
        self.owned = {}
        for name, variable in self.device_of._held.variables.tensors.items():
            layer, _, word = name.replace("/", ".").rpartition(".")
            self.owned[f"{layer}/{words.get(word, word)}"] = variable

    def calibrate(self, batches: Sequence[np.ndarray]) -> None:
        qat.keras.calibrate(self.device_of, batches)

    def step(self, x: np.ndarray, trained: frozenset[str]) -> list[np.ndarray]:
        results = self.device_of(x, training=True)
        results = results if isinstance(results, tuple | list) else (results,)
        self.device_of.zero_grad()
        sum((result * torch.from_numpy(weights(result.shape))).sum() for result in results).backward()
        moved = [variable for name, variable in self.owned.items() if name in trained]
        with torch.no_grad():
            for variable in (*moved, *self.device_of.range_parameters()):
                if variable.value.grad is not None:
                    variable.assign(variable.value - RATE * variable.value.grad)
        return [result.detach().numpy() for result in results]

    def freeze(self) -> None:
        qat.keras.freeze(self.device_of)

    def results(self, x: np.ndarray) -> list[np.ndarray]:
        results = self.device_of(x, training=False)
        return [result.detach().numpy() for result in (results if isinstance(results, tuple | list) else (results,))]

    def deploy_to(self, device: str) -> None:
        self.device_of._held.functional = for_device(self.device_of._held.functional, device)

    def ends(self) -> dict[str, tuple[Any, Any, int]]:
        held, ranges = self.device_of._held.variables, {}
        for name, grid in held.ranges.items():
            ends = {**grid, **held.learned.get(name, {})}
            low, high = (keras.ops.convert_to_numpy(ends[end].value) for end in ("minimum", "maximum"))
            ranges[name] = (low, high, int(keras.ops.convert_to_numpy(grid["batches"].value)))
        return ranges

    def statistics(self) -> dict[str, np.ndarray]:
        names = [name.rpartition("/")[0] for name in self.owned if name.endswith("/moving_mean")]
        known = {name: keras.ops.convert_to_numpy(variable.value) for name, variable in self.owned.items()}
        return {name: np.stack([known[f"{name}/moving_mean"], known[f"{name}/moving_variance"]]) for name in names}

    def take(self, statistics: Mapping[str, np.ndarray]) -> None:
        for path, both in statistics.items():
            for word, value in zip(("moving_mean", "moving_variance"), both, strict=True):
                self.owned[f"{path}/{word}"].assign(value)


def for_device(functional: Functional, device: str) -> Functional:
    """The same network, whose frozen steps are another device's."""
    result = Functional(functional.plan, functional.primitives, device)
    result.moved = functional.moved
    return result


ENGINES: dict[str, Any] = {"torch": Torch, "jax": Jax, "keras": Keras, "torch on a GPU": TorchOnGpu}


def weights(shape: Sequence[int]) -> np.ndarray:
    """Of results in the loss: powers of two."""
    count = int(np.prod(shape[1:]))
    return np.resize(np.float32([1, -0.5, 0.25, 2, -1]), count).reshape(1, *shape[1:]) * np.ones(shape, np.float32)


def ordered(plan: Any) -> dict[str, int]:
    """Every grid's place in the network; frameworks name some of them otherwise."""
    names = [source.grid for source in plan.inputs] + [step.grid for step in plan.steps]
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def described(plan: Any) -> list[Any]:
    places = ordered(plan)
    paths = {source.path: f"input {at}" for at, source in enumerate(plan.inputs)}
    paths |= {step.path: f"step {at}" for at, step in enumerate(plan.steps)}
    rows: list[Any] = [(source.shape, places[source.grid]) for source in plan.inputs]
    for step in plan.steps:
        own = step.weights
        rows.append(
            (
                step.kind,
                tuple(paths.get(name, "constant") for name in step.operands),
                {name: value for name, value in step.attributes.items() if name != "channel_axis"},
                places[step.grid],
                (step.shape, step.batch_axis, step.activation, step.bounds, step.high, step.outside),
                None if own is None else (own.bias is not None, own.batch_norm is not None, own.channel_axis, own.rule),
            )
        )
    for name, grid in sorted(plan.grids.items(), key=lambda pair: places[pair[0]]):
        rows.append((places[name], grid.rule, grid.nonnegative, grid.writers, grid.fixed, grid.of_inputs))
    return rows


def integers(engine: Any) -> dict[str, Any]:
    """What lowering takes, and what it makes."""
    model = getattr(engine, "trained", engine.device_of)
    numbers, plan = model.numbers(), engine.plan
    places = ordered(plan)
    steps = {step.path: at for at, step in enumerate(plan.steps)}
    arrays: dict[str, Any] = {f"grid {places[name]}": grid for name, grid in numbers.grids.items()}
    for path, weight in numbers.weights.items():
        arrays |= {
            f"codes {steps[path]}": weight.codes,
            f"scale {steps[path]}": weight.scale,
            f"bias {steps[path]}": weight.bias,
        }
    for (path, position), (codes, scale) in numbers.constants.items():
        arrays[f"constant {steps[path]}, {position}"] = codes
        arrays[f"scale of constant {steps[path]}, {position}"] = scale
    graph = without_transposed_ends(deploy.lower(model))
    names = {name: f"t{at}" for at, name in enumerate(graph.tensors)}
    alike = replace(
        graph,
        tensors={names[name]: replace(tensor, name=names[name]) for name, tensor in graph.tensors.items()},
        operators=tuple(
            replace(layer, inputs=tuple(map(names.get, layer.inputs)), outputs=tuple(map(names.get, layer.outputs)))
            for layer in graph.operators
        ),
        inputs=tuple(names[name] for name in graph.inputs),
        outputs=tuple(names[name] for name in graph.outputs),
        ports=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.tflite"
        deploy.write_tflite(alike, path)
        arrays["file"] = np.frombuffer(path.read_bytes(), np.uint8)
    return arrays


def without_transposed_ends(graph: Any) -> Any:
    """PyTorch's inputs and outputs lie in the file as the device likes them, those of others as the user has them."""
    renamed, dropped = {}, []
    for operator in graph.operators:
        (source, *_), (target, *_) = operator.inputs, operator.outputs
        if operator.kind == "TRANSPOSE" and (source in graph.inputs or target in graph.outputs):
            renamed[source if source in graph.inputs else target] = target if source in graph.inputs else source
            dropped.append(operator)
    if not dropped:
        return graph
    return replace(
        graph,
        tensors={name: tensor for name, tensor in graph.tensors.items() if name not in renamed},
        operators=tuple(operator for operator in graph.operators if operator not in dropped),
        inputs=tuple(renamed.get(name, name) for name in graph.inputs),
        outputs=tuple(renamed.get(name, name) for name in graph.outputs),
    )


def after_each(engine: Any) -> dict[str, Any]:
    places = ordered(engine.plan)
    arrays: dict[str, Any] = {}
    for name, (low, high, batches) in engine.ends().items():
        arrays[f"range {places[name]}"] = np.asarray([low, high], np.float32)
        arrays[f"batches {places[name]}"] = np.asarray(batches)
    return arrays


def batch(shape: Sequence[int], number: int, bits: int, count: int = 4) -> np.ndarray:
    """Integers whose extremes give steps that are powers of two or small multiples of them; the first channel is 0."""
    random = np.random.default_rng(number)
    factor = 1 + number % 3
    x = random.integers(-3, 4, (count, *shape)).astype(np.float32) * factor
    if shape == NETWORKS["attention"][1]:  # products of three results have many bits
        x = np.sign(x)
        x[..., 0] = 0
        return x
    channel = -1 if len(shape) == 1 else 1
    ends = {8: (-128, 127), 4: (-8, 7), 16: (-32767 / 2**8, 32767 / 2**8)}[bits]
    moved = np.moveaxis(x, channel, -1)
    moved[..., 0] = 0
    moved[(0,) * (x.ndim - 1)][1:3] = np.float32(ends) * (factor / (1 if bits == 4 else 16))
    return x


# --- cases ------------------------------------------------------------------------------------------------------------

FIXED = {8: (-16.0, 15.875), 4: (-16.0, 14.0), 16: (-32767 / 2**8, 32767 / 2**8)}
POLICIES = ("ema", "last_batch", "percentile", "min_max", "learned", "fixed")
BITS = (8, 16, 4)


def rule(policy: str, bits: int, match: str = "*", **others: Any) -> qat.Rule:
    settings: dict[str, Any] = {"activation_bits": bits, "weight_bits": min(bits, 8), "ranges": policy, **others}
    if policy == "fixed":
        settings["fixed_range"] = FIXED[bits]
    return qat.Rule(match=match, **settings)


def differences(name: str, policy: str, bits: int, trained: bool, frameworks: Sequence[str] = FRAMEWORKS) -> list[str]:
    """What one case gives differently; empty: the same bits everywhere."""
    build, shape = NETWORKS[name]
    shapes = Shapes()
    build(shapes, shape)
    tensors = shapes.tensors
    for arrays in tensors.values() if bits == 4 else ():  # seven steps of a quarter
        if arrays["weight"].ndim > 1:
            arrays["weight"] = np.float32(np.round(arrays["weight"] * (7 / PILOT)) / 4)
    rules = [rule(policy, bits, percentile=97.0)]
    if trained:
        # In fewer than 8 bits the range of an input is trained too: its step would be no power of two after the first.
        inputs = "fixed" if policy == "learned" and bits < 8 else policy
        ends = {"input*": inputs, "last": policy}
        rules = [rule(ranges, bits, match, ema_decay=0.5, percentile=100.0) for match, ranges in ends.items()]
        rules.append(rule("fixed", bits))
    inexact = {layer for layer, arrays in tensors.items() if "mean" in arrays or layer == "depthwise"}
    # Products of 16 bits and gradients have too many bits for float32.
    keys = {"bias"} if bits == 16 else {"weight", "bias"}
    moved = frozenset(
        f"{layer}/{key}" for layer, arrays in tensors.items() for key in keys & {*arrays} if layer not in inexact
    )
    batches = [batch(shape, number, bits if trained else 8) for number in range(4)]
    engines = [ENGINES[framework] for framework in frameworks]
    runs = [engine(build, tensors, rules, batches[0]) for engine in engines]
    failed: list[str] = []

    def compare(what: str, sides: Sequence[Mapping[str, Any]]) -> None:
        for other, side in zip(frameworks[1:], sides[1:], strict=True):
            if sides[0].keys() != side.keys():
                failed.append(f"{what}: {sorted(sides[0].keys() ^ side.keys())} in {frameworks[0]} or {other} only")
            for key in sides[0].keys() & side.keys():
                one, two = np.asarray(sides[0][key]), np.asarray(side[key])
                if one.shape != two.shape or one.tobytes() != two.astype(one.dtype).tobytes():
                    detail = f": {one.ravel()[:4]} and {two.ravel()[:4]}" if one.size < 10**4 else ""
                    failed.append(f"{what}: {key} in {frameworks[0]} and {other}{detail}")

    plans = [described(run.plan) for run in runs]
    for other, plan in zip(frameworks[1:], plans[1:], strict=True):
        failed += [f"plan: {a} and {b} ({other})" for a, b in zip(plans[0], plan, strict=False) if a != b]
        if len(plan) != len(plans[0]):
            failed.append(f"plan: {len(plans[0])} and {len(plan)} rows ({other})")
    if failed:
        return failed
    for number, several in enumerate([batches[:1]] if trained else [batches[:1], batches[1:]]):
        for run in runs:
            run.calibrate(several)
        compare(f"calibration {number}", [after_each(run) for run in runs])
    for number, x in enumerate(batches if trained else ()):
        results = [run.step(x, moved) for run in runs]
        compare(f"results of step {number}", [{at: leaf + 0.0 for at, leaf in enumerate(side)} for side in results])
        compare(f"step {number}", [after_each(run) for run in runs])
        statistics = [run.statistics() for run in runs]
        for what, word in ((0, "means"), (1, "variances")):
            # Keras' batch norm computes in float32, and its running variance takes the batch's biased one.
            own = what == 1 or bits == 16
            sides = [
                statistics[0] if own and framework == "keras" else known
                for framework, known in zip(frameworks, statistics, strict=True)
            ]
            compare(f"{word} of step {number}", [{key: pair[what] for key, pair in known.items()} for known in sides])
    for run in runs[1:]:
        run.take(runs[0].statistics())
    for run in runs:
        run.freeze()
    compare("freeze", [after_each(run) for run in runs])
    compare("integers", [integers(run) for run in runs])
    for device in deploy.PROFILES:
        for run in runs:
            run.deploy_to(device)
        compare(f"results on {device}", [on_device(run, batches[1]) for run in runs])
    return failed


def on_device(run: Any, x: np.ndarray) -> dict[int | str, np.ndarray]:
    """What a frozen network gives, or why its device refuses it."""
    try:
        # Zeros have no sign on the device.
        return {at: result + 0.0 for at, result in enumerate(run.results(x))}
    except qat.UnsupportedOperator as refusal:
        return {f"refused: {refusal}": np.zeros(())}


def cases() -> Iterator[tuple[str, str, int, bool]]:
    for name in NETWORKS:
        for policy in POLICIES:
            for bits in BITS:
                for trained in (False, True):
                    if not (trained and name == "attention"):
                        yield name, policy, bits, trained


def main(words: Sequence[str]) -> int:
    failures = count = 0
    frameworks = (*FRAMEWORKS, "torch on a GPU") if torch.cuda.is_available() else FRAMEWORKS
    for name, policy, bits, trained in cases():
        label = f"{name} {policy} {bits} {'trained' if trained else 'calibrated'}"
        if words and not all(word in label.split() for word in words):
            continue
        count += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                lines = differences(name, policy, bits, trained, frameworks)
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
            if len(words) > 1:
                traceback.print_exc()
        failures += bool(lines)
        print(f"{label}: {'equal' if not lines else f'{len(lines)} differ'}", flush=True)
        for line in lines[: 40 if len(words) > 1 else 3]:
            print(f"    {line}"[:400])
    print(f"{count} cases, {failures} with differences")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
