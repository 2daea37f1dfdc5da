# SPDX-License-Identifier: Apache-2.0
"""What planning and the frozen phase make of a network is the user's network, compared with the user's own model."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from exactqat import deploy, qat  # noqa: E402
from exactqat.kit.planning import UnsupportedOperator, normalization  # noqa: E402
from exactqat.kit.planning.inputs import require_input  # noqa: E402
from exactqat.kit.planning.plans import PlanInput  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Function(nn.Module):
    """A model that is one expression."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.modules_ = nn.ModuleList(modules)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.modules_, *inputs)


def image_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 4))


def frozen(model: nn.Module, *example: torch.Tensor, **how: Any) -> qat.PreparedModel:
    prepared = qat.prepare(model, example, **how)
    qat.calibrate(prepared, [example])
    qat.freeze(prepared)
    return prepared.eval()


def plain(prepared: qat.PreparedModel, *inputs: torch.Tensor) -> Any:
    """The captured network in real numbers."""
    from exactqat.qat.train.torch.prepared import without_quantization

    with without_quantization(prepared), torch.no_grad():
        return prepared.eval()(*inputs)


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 3, 24, 24), r"input must have shape \[batch, 3, 12, 12\].*got \[2, 3, 24, 24\].*prepare the model again"),
        ((2, 12, 12, 3), r"got \[2, 12, 12, 3\].*transpose it with \[0, 3, 1, 2\]"),
        ((3, 12, 12), r"got \[3, 12, 12\]; it has no batch axis"),
        ((2, 4, 12, 12), r"got \[2, 4, 12, 12\]"),
    ],
)
def test_an_input_of_another_shape_is_refused_at_every_call(shape: tuple[int, ...], words: str) -> None:
    model, example = image_network(), torch.randn(4, 3, 12, 12)
    prepared = qat.prepare(model, example)
    qat.calibrate(prepared, [example])
    for phase in (prepared.train(), prepared.eval(), frozen(model, example)):
        with pytest.raises(ValueError, match=words):
            phase(torch.randn(shape))
        assert phase(torch.randn(9, 3, 12, 12)).shape == (9, 4)
    with pytest.raises(ValueError, match=words):
        qat.calibrate(qat.prepare(model, example), [torch.randn(shape)])


def test_inputs_hold_real_numbers() -> None:
    prepared = qat.prepare(image_network(), torch.randn(4, 3, 12, 12))
    for dtype in (torch.uint8, torch.int64, torch.complex64):
        with pytest.raises(TypeError, match=f"input must contain real numbers.*{dtype}"):
            prepared(torch.ones(4, 3, 12, 12, dtype=dtype))
    assert prepared(torch.ones(4, 3, 12, 12, dtype=torch.float64)).shape == (4, 4)


def test_each_input_is_called_by_its_name() -> None:
    def both(linear: nn.Module, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return linear(left) + right

    class Pair(Function):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return both(self.modules_[0], left, right)

    prepared = qat.prepare(Pair(both, nn.Linear(6, 4)), (torch.randn(3, 6), torch.randn(3, 4)))
    with pytest.raises(ValueError, match=r"right must have shape \[batch, 4\].*got \[3, 1\]"):
        prepared(torch.randn(3, 6), torch.randn(3, 1))


@pytest.mark.slow
def test_the_check_is_traced_and_knows_rows_of_examples() -> None:
    prepared = qat.prepare(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), torch.randn(3, 6)).eval()
    qat.calibrate(prepared, [torch.randn(3, 6)])
    x = torch.randn(5, 6)
    compiled = torch.compile(prepared, backend="eager")
    assert torch.equal(compiled(x), prepared(x))
    with pytest.raises(ValueError, match=r"got \[5, 7\]"):
        compiled(torch.randn(5, 7))
    rows = PlanInput("x", "x", (4, 6))
    require_input(rows, (8, 6), "float32", True)
    require_input(rows, (None, None), "float32", True)  # sizes that are not known yet
    with pytest.raises(ValueError, match=r"x must have shape \[4 \* batch, 6\].*got \[7, 6\]"):
        require_input(rows, (7, 6), "float32", True)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 12, 12, 3), r"example, input \[2, 12, 12, 3\]: it expects its channels first"),
        ((2, 4, 12, 12), r"example, input \[2, 4, 12, 12\].*expected input\[2, 4, 12, 12\] to have 3 channels"),
        ((3, 12, 12), r"example, input \[3, 12, 12\]: it has no batch axis"),
    ],
)
def test_an_example_that_does_not_fit_is_described_in_its_own_sizes(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(UnsupportedOperator, match=words) as refusal:
        qat.prepare(image_network(), torch.randn(shape))
    assert "1009" not in str(refusal.value)


# --- normalization ----------------------------------------------------------------------------------------------------


def over_channels(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return norm(x.permute(0, 2, 3, 1))


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(16), (4, 16)),
    "layer_of_sequences": (lambda: nn.LayerNorm(16, eps=1e-6), (4, 7, 16)),
    "layer_large_epsilon": (lambda: nn.LayerNorm(16, eps=1e-3), (4, 7, 16)),
    "layer_of_windows": (lambda: nn.LayerNorm(16), (4, 2, 3, 5, 16)),
    "layer_plain": (lambda: nn.LayerNorm(16, elementwise_affine=False), (4, 7, 16)),
    "layer_of_channels": (lambda: Function(over_channels, nn.LayerNorm(8)), (4, 8, 5, 6)),
    "layer_of_two_axes": (lambda: nn.LayerNorm((7, 16)), (4, 7, 16)),
    "layer_of_long_rows": (lambda: nn.LayerNorm(1100), (4, 1100)),
    "rms": (lambda: nn.RMSNorm(16, eps=1e-5), (4, 7, 16)),
    "group": (lambda: nn.GroupNorm(2, 8), (4, 8, 5, 5)),
    "instance": (lambda: nn.InstanceNorm2d(8, affine=True), (4, 8, 5, 5)),
    "length": (lambda: Function(lambda x: F.normalize(x, dim=-1)), (4, 16)),
    "length_1e-3": (lambda: Function(lambda x: F.normalize(x, dim=-1, eps=1e-3)), (4, 16)),
    "length_1e-5": (lambda: Function(lambda x: F.normalize(x, dim=1, eps=1e-5)), (4, 8, 5, 5)),
    "deviation": (
        lambda: Function(lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)), (4, 16)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_an_epsilon_stays_what_it_is_at_every_scale(name: str) -> None:
    make, shape = NORMS[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    prepared = qat.prepare(model, x)
    for scale in (1.0, 0.1, 0.01, 0.001, 1e-5):
        wanted, got = model(scale * x), plain(prepared, scale * x)
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max(), f"at {scale}"
    # On eight bits too; and training's integers are the runtime's.
    for scale in (1.0, 0.01, 0.001):
        quantized = frozen(model, scale * x)
        wanted = model(scale * x)
        with torch.no_grad():
            assert (quantized(scale * x) - wanted).norm() <= 0.05 * wanted.norm(), f"int8 at {scale}"
        graph = deploy.lower(quantized)
        stored = quantized.trained().stored_codes(scale * x)
        codes = deploy.quantize((scale * x).numpy(), graph.tensors[graph.inputs[0]].quantization)
        axes = (0, 2, 3, 1) if graph.tensors[graph.inputs[0]].shape[1:] != shape[1:] else tuple(range(len(shape)))
        (simulated,) = deploy.simulate(graph, codes.transpose(axes)).values()
        last = stored[quantized.plan.outputs[0]]
        last = last.transpose(0, 2, 3, 1) if simulated.shape != last.shape else last
        assert np.array_equal(simulated.astype(np.int64) + 128, last)


def test_the_check_finds_a_lost_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(maker: Any, x: Any, one_value: Any, axis: int, epsilon: float) -> Any:
        return maker.unary("L2_NORMALIZATION", x, "normalized", attributes={"axis": axis})

    monkeypatch.setattr(normalization, "_of_length_one", without)
    model, x = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16)), torch.randn(4, 8)
    with pytest.raises(UnsupportedOperator, match="is not the model"):
        qat.prepare(model, x)
    prepared = qat.prepare(model, x, check=False)
    assert (plain(prepared, x / 1000) - model(x / 1000)).abs().max() > 1e-3


# --- pools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "size", "kinds"),
    [
        (nn.AvgPool2d(7), 7, {"MEAN"}),
        (nn.AvgPool2d(7, divisor_override=10), 7, {"MEAN", "DEPTHWISE_CONV_2D"}),
        (nn.AvgPool2d(7), 8, {"AVERAGE_POOL_2D"}),
        (nn.AvgPool2d((7, 3), 1), 7, {"AVERAGE_POOL_2D"}),
        (nn.AvgPool2d(64, ceil_mode=True), 7, {"MEAN"}),
        (nn.AvgPool2d(64, ceil_mode=True, count_include_pad=False), 49, {"MEAN"}),
        (nn.AvgPool2d(64, ceil_mode=True, divisor_override=10), 7, {"MEAN", "DEPTHWISE_CONV_2D"}),
        (nn.AvgPool2d(5, padding=2), 3, {"MEAN", "DEPTHWISE_CONV_2D"}),
        (nn.AvgPool2d(5, padding=2, count_include_pad=False), 3, {"MEAN"}),
        (nn.AvgPool2d((64, 2), (64, 2), (0, 1), count_include_pad=False, ceil_mode=True), 7, None),
        (nn.AvgPool2d(32, ceil_mode=True), 33, None),
        (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), 8, None),
        (nn.AvgPool2d(3, 2, 1, ceil_mode=True), 8, None),
        (nn.AvgPool2d((2, 64), 1, (1, 32), count_include_pad=False), 5, None),
        (nn.MaxPool2d(64, ceil_mode=True), 7, {"MAX_POOL_2D"}),
        (nn.MaxPool2d(64, padding=32), 7, {"MAX_POOL_2D"}),
        (nn.MaxPool2d((64, 3), (64, 2), (0, 1), ceil_mode=True), 9, {"MAX_POOL_2D"}),
        (nn.AdaptiveAvgPool2d((1, 3)), 7, None),
        (nn.AdaptiveMaxPool2d((1, 3)), 7, None),
        (nn.AdaptiveAvgPool2d((5, 1)), 7, None),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_padding_that_is_not_counted_costs_nothing(pool: nn.Module, size: int, kinds: set[str] | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, size, size) + 1
    model = nn.Sequential(pool)
    prepared, wanted = frozen(model, x), model(x)
    assert torch.allclose(plain(prepared, x), wanted, atol=1e-5)
    noise = prepared(x) - wanted
    assert 10 * torch.log10(wanted.square().mean() / noise.square().mean()) > 35
    device_kinds = {operator.kind for operator in deploy.lower(prepared).operators}
    assert kinds is None or device_kinds == kinds


# --- the frozen phase -------------------------------------------------------------------------------------------------


def sequence_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.LayerNorm((10, 10)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        nn.Sigmoid(), nn.Linear(4, 2),
    )  # fmt: skip


def test_nan_in_one_example_leaves_the_others_what_they_are() -> None:
    x = torch.randn(6, 3, 12, 12)
    prepared = frozen(sequence_network(), x)
    broken = x.clone()
    broken[2, 1, 3, 4] = torch.nan
    others = [0, 1, 3, 4, 5]
    wanted, got = prepared(x), prepared(broken)
    assert torch.equal(got[others], wanted[others])
    assert got[2].isnan().all()
    got.sum().backward()
    assert prepared.get_parameter("7.weight").grad.isnan().any()


@pytest.mark.slow
def test_nan_in_jax_breaks_its_example_alone() -> None:
    jax = pytest.importorskip("jax")
    import exactqat.qat.jax as kit

    random = np.random.default_rng(0)
    params = {
        name: random.standard_normal(shape).astype("f")
        for name, shape in {"a": (6, 8), "c": (8, 4), "d": (4, 3)}.items()
    }

    def model(params: Any, x: Any) -> Any:
        rows = jax.nn.relu(x @ params["a"]).reshape(-1, 8)  # three rows for each example
        return jax.numpy.tanh(rows @ params["c"]).reshape(-1, 3, 4).mean(1) @ params["d"]

    x = random.standard_normal((5, 3, 6)).astype("f")
    prepared = kit.prepare(model, params, x)
    params, state = prepared.calibrate(*prepared.init(), [x])
    params, state = prepared.freeze(params, state)
    broken = x.copy()
    broken[1, 2, 3] = np.nan
    for apply in (prepared.apply, jax.jit(prepared.apply)):
        wanted, got = (np.asarray(apply(params, state, batch)[0]) for batch in (x, broken))
        assert np.isnan(got[1]).all()
        assert np.array_equal(np.delete(got, 1, 0), np.delete(wanted, 1, 0))


@pytest.mark.parametrize("ranges", ["ema", "learned"])
def test_a_frozen_model_sees_what_is_written_through_data(ranges: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.PReLU()), torch.randn(6, 6)
    prepared = frozen(model, x, rules=[qat.Rule(ranges=ranges)])
    before = prepared(x)
    held = {**dict(prepared.named_buffers()), **dict(prepared.named_parameters())}
    end = prepared.step("0").output_quantizer.range.maximum
    assert any(tensor is end for tensor in held.values())
    end.data.mul_(2)
    after = prepared(x)
    assert not torch.equal(before, after)
    for name in ("0.weight", "3.weight"):
        held[name].data.mul_(1.5)
        last, after = after, prepared(x)
        assert not torch.equal(last, after)
    assert np.array_equal(
        deploy.simulate(
            (graph := deploy.lower(prepared)), deploy.quantize(x.numpy(), graph.tensors["input"].quantization)
        )[graph.outputs[0]].astype(np.int64)
        + 128,
        prepared.trained().stored_codes(x)[prepared.plan.outputs[0]],
    )


@pytest.mark.slow
def test_a_frozen_jax_state_does_not_thaw(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    checkpoint = pytest.importorskip("orbax.checkpoint")
    import exactqat.qat.jax as kit

    random = np.random.default_rng(0)
    params, x = {"w": random.standard_normal((6, 4)).astype("f")}, random.standard_normal((5, 6)).astype("f")
    prepared = kit.prepare(lambda params, x: jax.numpy.tanh(x @ params["w"]), params, x)
    params, state = prepared.calibrate(*prepared.init(), [x])
    params, state = prepared.freeze(params, state)
    wanted, _ = prepared.apply(params, state, x)
    store = checkpoint.StandardCheckpointer()
    store.save(tmp_path / "state", {"params": params, "state": state})
    store.wait_until_finished()
    template = dict(zip(("params", "state"), prepared.init(), strict=True))
    with pytest.raises(ValueError, match="frozen"):
        store.restore(tmp_path / "state", template)
    with pytest.raises(ValueError, match="leaves"):
        jax.tree.unflatten(jax.tree.structure(template["state"]), jax.tree.leaves(state))
    template["state"] = dataclasses.replace(template["state"], frozen=True)
    restored = store.restore(tmp_path / "state", template)
    assert restored["state"].frozen
    assert np.array_equal(prepared.apply(restored["params"], restored["state"], x)[0], wanted)
    assert jax.jit(lambda tree: tree)(state).frozen


# --- results that are one tensor --------------------------------------------------------------------------------------


def with_softmax(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return y.softmax(1), y


def by_names(linear: nn.Module, x: torch.Tensor) -> Any:
    y = linear(x)
    return {"scores": y, "again": y, "x": x}


def in_other_shapes(convolution: nn.Module, x: torch.Tensor) -> Any:
    y = convolution(x)
    return y, y.permute(0, 2, 3, 1), y.flatten(1), (y, y.argmax(1))


def require_files_of_all_results(graph: deploy.Graph, model: Any, x: np.ndarray, results: int, path: Path) -> None:
    """Simulation, LiteRT and onnxruntime give every result, of as many examples as they get."""
    interpreter = pytest.importorskip("ai_edge_litert.interpreter")
    assert len(set(graph.outputs)) == len(graph.outputs)
    assert len(graph.signature.outputs) == results
    codes = deploy.input_codes(graph, x)
    values = deploy.output_values(graph, deploy.simulate(graph, codes))
    assert len(values) == results
    assert all(len(value) == len(x) for value in values.values())
    file = deploy.write_tflite(graph, path / "network.tflite")
    report = deploy.verify(graph, file, model=model, data=x)
    assert report.equal
    assert len(report.predictions) == results
    runner = interpreter.Interpreter(str(file)).get_signature_runner()
    (name,) = runner.get_input_details()
    example = codes[graph.inputs[0]][:1]
    assert len(runner(**{name: example})) == results
    pytest.importorskip("onnxruntime")
    assert deploy.verify(graph, deploy.write_onnx(graph, path / "network.onnx"), codes).differing == 0


@pytest.mark.parametrize(
    ("function", "results"), [(with_softmax, 2), (by_names, 3), (in_other_shapes, 5)], ids=lambda case: str(case)[:20]
)
def test_results_that_are_one_tensor_are_one_output_with_two_names(
    function: Callable[..., Any], results: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layer, x = (
        (nn.Conv2d(3, 4, 3), torch.randn(9, 3, 6, 6))
        if function is in_other_shapes
        else (nn.Linear(6, 4), torch.randn(9, 6))
    )
    prepared = frozen(Function(function, layer), x)
    graph = deploy.lower(prepared)
    require_files_of_all_results(graph, prepared, x.numpy(), results, tmp_path)
    with pytest.raises(ValueError, match="outputs must differ"):
        graph.with_outputs(graph.outputs * 2).validate()


@pytest.mark.slow
def test_jax_results_that_are_one_tensor(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    import exactqat.qat.jax as kit

    random = np.random.default_rng(0)
    x = random.standard_normal((9, 6)).astype("f")

    def model(params: Any, x: Any) -> Any:
        y = x @ params["w"]
        return jax.nn.softmax(y), {"logits": y, "again": y}

    prepared = kit.prepare(model, {"w": random.standard_normal((6, 4)).astype("f")}, x)
    params, state = prepared.calibrate(*prepared.init(), [x])
    params, state = prepared.freeze(params, state)
    require_files_of_all_results(prepared.lower(params, state), prepared.trained(params, state), x, 3, tmp_path)


# --- the other frameworks ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_jax_says_what_shape_it_was_prepared_for() -> None:
    jax = pytest.importorskip("jax")
    import exactqat.qat.jax as kit

    random = np.random.default_rng(0)
    params = {"k": random.standard_normal((3, 3, 3, 4)).astype("f"), "w": random.standard_normal((4, 2)).astype("f")}

    def model(params: Any, x: Any) -> Any:
        x = jax.lax.conv_general_dilated(x, params["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(x).mean((1, 2)) @ params["w"]

    x = random.standard_normal((4, 8, 8, 3)).astype("f")
    prepared = kit.prepare(model, params, x)
    params_, state = prepared.calibrate(*prepared.init(), [x])
    for state_ in (state, prepared.freeze(params_, state)[1]):
        for images, words in (
            (np.zeros((4, 16, 16, 3), "f"), r"x must have shape \[batch, 8, 8, 3\].*got \[4, 16, 16, 3\]"),
            (np.zeros((4, 3, 8, 8), "f"), r"transpose it with \[0, 2, 3, 1\]"),
            (np.zeros((8, 8, 3), "f"), "no batch axis"),
        ):
            for apply in (prepared.apply, jax.jit(prepared.apply)):
                with pytest.raises(ValueError, match=words):
                    apply(params_, state_, images)
    with pytest.raises(TypeError, match="x must contain real numbers.*int32"):
        prepared.apply(params_, state, np.zeros((4, 8, 8, 3), np.int32))
    with pytest.raises(UnsupportedOperator, match=r"input \[4, 3, 8, 8\]: it expects its channels last") as refusal:
        kit.prepare(model, params, np.zeros((4, 3, 8, 8), "f"))
    assert "1009" not in str(refusal.value)


KERAS = """
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from exactqat import deploy, qat
from exactqat.kit.planning import UnsupportedOperator

keras.utils.set_random_seed(0)
images = np.random.default_rng(0).standard_normal((6, 8, 8, 3)).astype("f")
network = lambda: keras.Sequential(
    [keras.Input((None, None, 3)), layers.Conv2D(4, 3), layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(2)]
)
prepared = qat.keras.prepare(network(), example=images)
qat.keras.calibrate(prepared, [images])
for frozen in (False, True):
    if frozen:
        qat.keras.freeze(prepared)
    with pytest.raises(ValueError, match=r"must have shape .batch, 8, 8, 3.*got .6, 7, 8, 3."):
        prepared(images[:, 1:])
    assert prepared.predict(images[:3], verbose=0).shape == (3, 2)
misfits = {(6, 3, 8, 8): "channels last", (8, 8, 3): "no batch axis", (6, 8, 8, 4): "6, 8, 8, 4"}
for shape, words in misfits.items():
    with pytest.raises(UnsupportedOperator, match=words) as found:
        qat.keras.prepare(network(), example=np.zeros(shape, "f"))
    assert "1009" not in str(found.value)
broken = images.copy()
broken[2, 1, 1, 1] = np.nan
wanted, got = prepared.predict(images, verbose=0), prepared.predict(broken, verbose=0)
assert np.isnan(got[2]).all() and np.array_equal(np.delete(got, 2, 0), np.delete(wanted, 2, 0))

for norm in (layers.LayerNormalization(epsilon=1e-5), layers.LayerNormalization(), layers.UnitNormalization()):
    model = keras.Sequential([keras.Input((16,)), norm])
    x = np.random.default_rng(0).standard_normal((4, 16)).astype("f")
    prepared = qat.keras.prepare(model)
    for scale in (1, 0.1, 0.01, 0.001):
        qat.keras.calibrate(prepared, [scale * x], restart=True)
        floats, _ = prepared.trained().layer_values(scale * x)
        wanted = np.asarray(model.predict(scale * x, verbose=0))
        assert np.abs(floats[prepared.plan.outputs[0]] - wanted).max() <= 1e-5 * np.abs(wanted).max(), (norm, scale)

inputs = keras.Input((6,))
y = layers.Dense(4)(inputs)
model = keras.Model(inputs, [layers.Softmax()(y), y])
x = np.random.default_rng(0).standard_normal((9, 6)).astype("f")
prepared = qat.keras.prepare(model)
qat.keras.calibrate(prepared, [x])
qat.keras.freeze(prepared)
graph = deploy.lower(prepared)
assert len(graph.outputs) == 1 and len(graph.signature.outputs) == 2
values = deploy.output_values(graph, deploy.simulate(graph, deploy.input_codes(graph, x)))
assert [each.shape for each in values.values()] == [(9, 4)] * 2
file = deploy.write_tflite(graph, Path(sys.argv[1]) / "network.tflite")
report = deploy.verify(graph, file, model=prepared, data=x)
assert report.equal and len(report.predictions) == 2
print("done")
"""


@pytest.mark.slow
def test_keras_keeps_the_same_promises(tmp_path: Path) -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("needs exactqat[keras]")
    done = subprocess.run(
        [sys.executable, "-c", KERAS, str(tmp_path)],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n", done.stderr[-3000:]


@pytest.mark.slow
def test_flax_keeps_epsilons() -> None:
    jax = pytest.importorskip("jax")
    flax = pytest.importorskip("flax.linen")
    import exactqat.qat.jax as kit

    x = np.random.default_rng(0).standard_normal((4, 5, 16)).astype("f")
    for norm in (flax.LayerNorm(), flax.LayerNorm(epsilon=1e-5), flax.RMSNorm(), flax.GroupNorm(4)):
        variables = norm.init(jax.random.key(0), x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = kit.prepare(norm, variables, x)
        for scale in (1, 0.1, 0.01, 0.001):
            params, state = prepared.calibrate(*prepared.init(), [scale * x])
            floats, _ = prepared.trained(params, state).layer_values(scale * x)
            wanted = np.asarray(norm.apply(variables, scale * x))
            path = next(reversed(floats))  # of group norm, whose axes are turned last, that which is turned
            got = floats[path].reshape(wanted.shape) if path in prepared.plan.outputs else floats[path].mT
            assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max(), (norm, scale)


@pytest.mark.slow
def test_clamps_in_16_bits_clamp_without_quantization_too() -> None:
    torch.manual_seed(0)
    wide = qat.Rule(activation_bits=16)
    for function in (lambda x: x.clamp(-1, 1), F.hardswish, F.hardsigmoid, lambda x: x.clamp(0, 0.5)):
        model, x = Function(lambda layer, x, function=function: function(layer(x)), nn.Linear(6, 8)), torch.randn(9, 6)
        x *= 4
        prepared = frozen(model, x, rules=[wide])
        assert torch.allclose(plain(prepared, x), model(x), atol=1e-5)
        assert torch.allclose(prepared(x), model(x), atol=0.03)
