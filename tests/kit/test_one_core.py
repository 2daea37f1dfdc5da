# SPDX-License-Identifier: Apache-2.0
"""PyTorch, JAX and Keras train by one core: a sample of campaigns/run_one_core.py, and its rules by themselves."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.operators.cpu import kernels  # noqa: E402
from exactqat.qat.train.core import primitives_numpy, ranges  # noqa: E402
from exactqat.qat.train.jax import primitives as primitives_jax  # noqa: E402
from exactqat.qat.train.torch import primitives as primitives_torch  # noqa: E402

SAMPLE = (
    ("convolution", "ema", 8, True),
    ("residual", "learned", 4, False),
    ("gated", "percentile", 16, False),
    ("two_heads", "learned", 8, True),
)


@pytest.mark.slow
def test_the_same_network_trains_to_the_same_bits_in_all_frameworks() -> None:
    """In a process of its own, as Keras has one backend only."""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("needs exactqat[keras]")
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from run_one_core import differences\n"
        f"for case in {SAMPLE}:\n"
        "    found = differences(*case)\n"
        "    assert not found, (case, found)\n"
    )
    setting = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=setting)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("policy", ["ema", "last_batch", "min_max", "percentile"])
@pytest.mark.parametrize("nonnegative", [False, True])
def test_averages_have_the_same_bits_everywhere(policy: str, nonnegative: bool) -> None:
    """Compiled by XLA too, which contracts products and sums where nothing keeps it from that; and at addresses."""
    random = np.random.default_rng(0)
    extremes = [np.sort(random.normal(size=2) * 10.0 ** random.integers(-3, 4)).astype(np.float32) for _ in range(200)]
    extremes[5] = np.array([-np.inf, 1], np.float32)
    extremes[9] = np.array([-3e38, 3e38], np.float32)
    extremes[12] = np.array([np.nan, np.nan], np.float32)

    def after(p: Any, shown: Any, before: Any, batches: Any) -> Any:
        ends = ranges.with_zero(p, shown[0], shown[1], nonnegative)
        return ranges.observed(p, policy, 0.99, [ends], 1, before, batches)

    compiled = jax.jit(lambda *operands: after(primitives_jax, *operands))
    moved, moved_count = np.zeros(2, np.float32), np.zeros((), np.int64)
    moved_at = [moved.ctypes.data, moved.ctypes.data + 4, moved_count.ctypes.data]
    number = {"last_batch": 1, "min_max": 2}.get(policy, 0)
    states = {
        "torch": ((torch.zeros(()), torch.zeros(())), torch.tensor(0)),
        "jax": ((jnp.zeros(()), jnp.zeros(())), jnp.zeros((), jnp.int32)),
        "numpy": ((np.zeros((), np.float32), np.zeros((), np.float32)), np.zeros((), np.int32)),
    }
    for shown in extremes:
        *ends, count = after(primitives_torch, torch.from_numpy(shown), *states["torch"])
        states["torch"] = ((ends[0], ends[1]), count)
        *ends, count = compiled(shown, *states["jax"])
        states["jax"] = ((ends[0], ends[1]), count)
        with np.errstate(over="ignore", invalid="ignore"):
            *ends, count = after(primitives_numpy, shown, *states["numpy"])
            states["numpy"] = ((ends[0], ends[1]), count)
        kernels.move_range(shown.ctypes.data, shown.ctypes.data + 4, *moved_at, number, 0.99, nonnegative)
        states["addresses"] = ((moved[0], moved[1]), moved_count)
        for (low, high), count in states.values():
            bits = [np.float32(end).tobytes() for end in (low, high)]
            assert bits == [np.float32(end).tobytes() for end in states["torch"][0]]
            assert int(count) == int(states["torch"][1])
    assert int(states["torch"][1]) == 197 + 2 * nonnegative


@pytest.mark.slow
def test_a_learned_end_beyond_zero_counts_as_zero_and_finds_its_way_back() -> None:
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    network = torch.nn.Linear(8, 4, bias=False)
    rules = [qat.Rule(ranges="learned")]
    model = qat.prepare(network, x, rules)
    qat.calibrate(model, [x])
    ((name, minimum),) = ((name, parameter) for name, parameter in model.named_parameters() if name.endswith("minimum"))
    with torch.no_grad():
        minimum.fill_(0.25)
    model(x).sum().backward()
    assert float(minimum) == 0.25 and minimum.grad is not None and float(minimum.grad) != 0
    # Such a state loads; one whose range is none does not.
    state = model.state_dict()
    model.load_state_dict(state)
    with pytest.raises(ValueError, match="must hold min <= 0 <= max"):
        model.load_state_dict({**state, name: torch.tensor(torch.nan)})
    prepared = qat.jax.prepare(lambda p, x: x @ p["w"], {"w": network.weight.detach().numpy().T}, x.numpy(), rules)
    params, state_ = prepared.calibrate(*prepared.init(), [x.numpy()])
    (grid,) = (name for name in params["range_parameters"] if not name.startswith("weights"))
    params["range_parameters"][grid]["minimum"] = jnp.float32(0.25)
    gradients = jax.grad(lambda params: prepared.apply(params, state_, x.numpy(), train=True)[0].sum())(params)
    assert float(gradients["range_parameters"][grid]["minimum"]) == float(minimum.grad)


def test_freeze_moves_learned_ranges_in_jax_too() -> None:
    """Of a branch that was always zero: as fine as the sum that reads it."""
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    params = {"w": np.zeros((6, 6), np.float32), "v": 0.05 * np.eye(6, dtype=np.float32)}
    prepared = qat.jax.prepare(lambda p, x: x @ p["w"] + x @ p["v"], params, x, [qat.Rule(ranges="learned")])
    params, state = prepared.calibrate(*prepared.init(), [x])
    activations = [name for name in params["range_parameters"] if not name.startswith("weights")]
    (grid,) = (name for name in activations if float(params["range_parameters"][name]["maximum"]) == 0)
    after, frozen = prepared.freeze(params, state)
    before, moved = (tree["range_parameters"][grid]["maximum"] for tree in (params, after))
    assert frozen.frozen and float(before) == 0 < float(moved)


@pytest.mark.slow
@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("framework", ["jax", "keras"])
def test_unsettled_statistics_are_named(framework: str, pretrained: bool) -> None:
    """Not those that a checkpoint brought, which need not keep a count of batches."""
    random = np.random.default_rng(0)
    x = random.standard_normal((16, 8)).astype(np.float32)
    pairs = (("mean", 0), ("var", 4 if pretrained else 1), ("scale", 1), ("bias", 0))
    norm = {name: np.full(6, value, np.float32) for name, value in pairs}
    if framework == "jax":

        def network(p: Any, x: Any) -> Any:
            y = x @ p["w"]
            return qat.jax.batch_norm(y, p["scale"], p["bias"], p["mean"], p["var"], momentum=0.9)

        prepared = qat.jax.prepare(network, {"w": random.standard_normal((8, 6)).astype("f"), **norm}, x)
        params, state = prepared.calibrate(*prepared.init(), [x])

        def train(steps: int) -> None:
            nonlocal state
            for _ in range(steps):
                _, state = prepared.apply(params, state, x, train=True)

        def freeze() -> None:
            prepared.freeze(params, state)
    else:
        keras = pytest.importorskip("keras")
        inputs = keras.Input((8,))
        outputs = keras.layers.BatchNormalization(momentum=0.9)(keras.layers.Dense(6, use_bias=False)(inputs))
        network = keras.Model(inputs, outputs)
        network.layers[-1].moving_variance.assign(norm["var"])
        model = qat.keras.prepare(network)
        qat.keras.calibrate(model, [x])

        def train(steps: int) -> None:
            for _ in range(steps):
                model(x, training=True)

        def freeze() -> None:
            if pretrained:
                return qat.keras.freeze(model)
            config, weights = model.get_config(), model.get_weights()
            again = type(model).from_config(config)
            again.set_weights(weights)
            qat.keras.freeze(again)

    with warnings.catch_warnings():
        warnings.simplefilter("error", qat.UnsettledStatisticsWarning)
        freeze()  # ranges were measured with these very statistics
    train(3)
    if pretrained:
        with warnings.catch_warnings():
            warnings.simplefilter("error", qat.UnsettledStatisticsWarning)
            return freeze()
    with pytest.warns(qat.UnsettledStatisticsWarning, match="73%.* 3 training batches at momentum 0.1"):
        freeze()
    train(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", qat.UnsettledStatisticsWarning)
        freeze()


@pytest.mark.parametrize("activation", ["relu", "relu6"])
@pytest.mark.parametrize("framework", ["torch", "jax", "keras"])
def test_a_training_that_fails_shows_it(framework: str, activation: str) -> None:
    """NaN in a weight is NaN in every result, as in the user's model: a clamp that lost it would hide the failure."""
    random = np.random.default_rng(0)
    x, first, last = (random.standard_normal(shape).astype("f") for shape in ((8, 4), (4, 5), (5, 3)))
    broken = first.copy()
    broken[0, 0] = np.nan
    if framework == "torch":
        model = torch.nn.Sequential(torch.nn.Linear(4, 5, False), torch.nn.ReLU(), torch.nn.Linear(5, 3, False))
        model[1] = torch.nn.ReLU6() if activation == "relu6" else model[1]
        prepared = qat.prepare(model, torch.from_numpy(x))
        qat.calibrate(prepared, [torch.from_numpy(x)])
        with torch.no_grad():
            prepared.get_parameter("0.weight").copy_(torch.from_numpy(broken.T))
        result = prepared.train()(torch.from_numpy(x)).detach().numpy()
    elif framework == "jax":
        function = getattr(jax.nn, activation)
        prepared = qat.jax.prepare(lambda p, x: function(x @ p["w"]) @ p["v"], {"w": first, "v": last}, x)
        params, state = prepared.calibrate(*prepared.init(), [x])
        params["model"]["w"] = jnp.asarray(broken)
        result = np.asarray(prepared.apply(params, state, x, train=True)[0])
    else:
        keras = pytest.importorskip("keras")
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(5, activation, use_bias=False)(inputs)
        prepared = qat.keras.prepare(keras.Model(inputs, keras.layers.Dense(3, use_bias=False)(hidden)))
        qat.keras.calibrate(prepared, [x])
        kernel = next(variable for variable in prepared.trainable_variables if tuple(variable.shape) == (4, 5))
        kernel.assign(broken)
        result = keras.ops.convert_to_numpy(prepared(x, training=True))
    assert np.isnan(result).all()


@pytest.mark.slow
def test_a_batch_without_examples_is_named() -> None:
    """Where ranges and statistics follow it; a frozen network has none to give results for, and gives none."""
    x = np.random.default_rng(0).standard_normal((8, 4)).astype("f")
    model = qat.prepare(
        torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5)).train(), torch.from_numpy(x)
    )
    qat.calibrate(model, [torch.from_numpy(x)])
    state_of = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: tensor.detach().clone() for name, tensor in state_of.items()}
    nothing = torch.from_numpy(x[:0])
    with pytest.raises(ValueError, match=r"input has no examples, got shape \[0, 4\]"):
        model(nothing)
    with pytest.raises(ValueError, match=r"input has no examples, got shape \[0, 4\]"):
        qat.calibrate(model, [nothing])
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state_of.items())
    assert model.eval()(nothing).shape == (0, 5)
    qat.freeze(model)
    assert model.train()(nothing).shape == model.eval()(nothing).shape == (0, 5)
    prepared = qat.jax.prepare(lambda p, x: x @ p, np.ones((4, 5), np.float32), x)
    params, state = prepared.calibrate(*prepared.init(), [x])
    with pytest.raises(ValueError, match=r"x has no examples, got shape \[0, 4\]"):
        prepared.apply(params, state, x[:0], train=True)
    with pytest.raises(ValueError, match=r"x has no examples, got shape \[0, 4\]"):
        prepared.calibrate(params, state, [x[:0]])
    assert prepared.apply(params, state, x[:0])[0].shape == (0, 5)


def test_without_a_profile_a_frozen_network_stays_fake_quantization() -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    network = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    model = qat.prepare(network, x, device=None).eval()
    qat.calibrate(model, [x])
    before = model(x)
    qat.freeze(model)
    assert model.profile is None and "None" not in repr(model)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0.05)
    assert not model._device.ready()
    model.profile = "reference"
    assert model._device.ready()
    model.load_state_dict(qat.prepare(network, x, device=None).state_dict())
    assert model.profile is None


def test_the_core_knows_no_framework() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'jax', 'keras', 'tensorflow')))\n"
        "import exactqat.qat.train.core.freezing, exactqat.qat.train.core.ranges, exactqat.qat.train.core.weights\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert importlib.import_module("exactqat.qat").UnsettledStatisticsWarning is qat.UnsettledStatisticsWarning
