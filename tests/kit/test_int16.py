# SPDX-License-Identifier: Apache-2.0
"""int16 activations with int8 weights: rules, ranges, borders to int8, refusals, and networks end to end.

Single operators are compared with the runtimes in `test_device.py`, as "CONV_2D:int16" and so on.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

import plain_networks
from one_grid import one_grid

from exactqat import deploy, qat
from exactqat.deploy import EXACT, Builder, Graph, per_tensor, place_codes, profiles_here, quantize, simulate, verify
from exactqat.deploy.lower import lower, lower_with_layouts
from exactqat.deploy.runtimes.trial import RuntimeRefusal
from exactqat.deploy.values import device_codes
from exactqat.kit.device.tensor import CODE_RANGES, dequantize

WIDE = qat.Rule(activation_bits=16)
SAMPLE = ("fsrcnn", "causal_tcn", "keyword_transformer")


class Audio(nn.Module):
    """What speech and music networks are made of: convolutions along time, a gate, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 8, 9, 2, 4),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Conv1d(8, 8, 5, padding=2, groups=8),
            nn.BatchNorm1d(8),
            nn.ReLU6(),
            nn.Conv1d(8, 16, 1),
            nn.LeakyReLU(0.2),
            nn.MaxPool1d(2),
        )
        self.content, self.gate = nn.Conv1d(16, 16, 3, padding=1), nn.Conv1d(16, 16, 1)
        self.up = nn.ConvTranspose1d(16, 4, 4, 2, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        x = torch.tanh(self.content(x)) * torch.sigmoid(self.gate(x))
        return self.up(x), self.head(x.mean(-1))


class SuperResolution(nn.Module):
    """Three colours at twice the size, with a residual and PReLU as such networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 5, padding=2), nn.Conv2d(8, 8, 3, padding=1)
        self.activation = nn.PReLU(8)
        self.last = nn.Conv2d(8, 12, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        features = self.activation(self.first(x))
        return self.shuffle(self.last(torch.relu(self.second(features)) + features))


class EncoderDecoder(nn.Module):
    """int8 before and after, int16 in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
        )
        self.decoder = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1))
        self.tail = nn.Sequential(nn.Conv2d(12, 4, 1), nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.encoder(x)
        decoded = self.decoder(encoded)
        return torch.cat([encoded, decoded], 1), self.tail(decoded)


MIXED = [qat.Rule("decoder.*", activation_bits=16), qat.Rule("cat*", activation_bits=16), qat.Rule()]


def trained(model: nn.Module, x: Tensor, rules: list[qat.Rule], steps: int = 3) -> qat.PreparedModel:
    """Two steps, and one more frozen; in evaluation mode."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = qat.prepare(model.train(), x, rules)
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-3)
    for step in range(steps):
        if step == steps - 1:
            qat.freeze(prepared)
        optimizer.zero_grad()
        results = prepared(x)
        results = results if isinstance(results, tuple) else (results,)
        sum(result.square().mean() for result in results).backward()
        optimizer.step()
    return prepared.eval()


def random_codes(graph: Graph, batch: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {name: graph.tensors[name] for name in graph.inputs}
    return {
        name: rng.integers(
            CODE_RANGES[tensor.dtype][0], CODE_RANGES[tensor.dtype][1] + 1, (batch, *tensor.shape[1:])
        ).astype(tensor.dtype)
        for name, tensor in tensors.items()
    }


def assert_equal_on_devices(graph: Graph, folder: Path, profiles: tuple[str, ...] | None = None) -> None:
    path = deploy.write_tflite(graph, folder / "model.tflite")
    for profile in profiles or profiles_here():
        report = verify(graph, path, random_codes(graph), profile)
        assert report.differing == 0 and report.values > 0, report.table()
        for row in report.operators:
            assert row.exact == ((row.kind, profile) in EXACT)
        assert all(row.exact for row in report.operators), report.table()


NETWORKS = {
    "audio": (Audio, (2, 1, 64), [WIDE], {"int16"}),
    "super resolution": (SuperResolution, (2, 3, 8, 8), [WIDE], {"int16"}),
    "mixed": (EncoderDecoder, (2, 3, 12, 12), MIXED, {"int8", "int16"}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_end_to_end(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    build, shape, rules, dtypes = NETWORKS[name]
    x = torch.randn(shape)
    model = trained(build(), x, rules)
    graph, layouts = lower_with_layouts(model)
    assert {graph.tensors[result].dtype for result in graph.results()} == dtypes
    borders = sum(operator.kind == "QUANTIZE" for operator in graph.operators)
    assert borders == {"mixed": 2}.get(name, 0)
    assert_equal_on_devices(graph, tmp_path)
    # What PyTorch stores lies within a few codes of 65,536; tables of tanh and sigmoid are coarser than its own.
    stored = device_codes(model, x, lowered=(graph, layouts))
    integers = simulate(graph, {feature: stored[feature] for feature in graph.inputs}, tensors=list(stored))
    grids = model.numbers().grids
    for path, codes in stored.items():
        # Training and device count in the same steps, also where the device fixes them.
        assert grids[model.plan.stored(path).grid][0] == graph.tensors[path].quantization.scale[0]
        assert np.abs(codes.astype(np.int64) - integers[path]).max() <= 8, path
    onnx = pytest.importorskip("onnx")
    del onnx
    report = deploy.verify(graph, deploy.write_onnx(graph, tmp_path / "model.onnx"), random_codes(graph))
    assert max(row.largest_difference for row in report.operators) <= 2


def test_16_bits_hold_what_8_do_not() -> None:
    """A signal 60 dB below the loudest one is lost in 8 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    x = torch.sin(torch.arange(256.0)).reshape(1, 1, -1) * torch.tensor([1.0, 1e-3]).repeat_interleave(128)
    errors = {}
    for bits in (8, 16):
        prepared = qat.prepare(model, x, [qat.Rule(activation_bits=bits, ranges="min_max")])
        qat.calibrate(prepared, [x])
        qat.freeze(prepared)
        graph = lower(prepared.eval())
        tensor = graph.tensors[graph.inputs[0]]
        codes = simulate(graph, quantize(x.numpy().reshape(1, *tensor.shape[1:]), tensor.quantization))[
            graph.outputs[0]
        ]
        quiet = (
            dequantize(codes, graph.tensors[graph.outputs[0]].quantization).reshape(-1)[128:]
            - x.numpy().reshape(-1)[128:]
        )
        errors[bits] = float(np.abs(quiet).max())
    assert errors[16] < 1e-4 < 5e-4 < errors[8]


@pytest.mark.parametrize("name", plain_networks.NETWORKS if os.environ.get("EXACTQAT_ALL_NETWORKS") else SAMPLE)
def test_plain_networks(name: str, tmp_path: Path) -> None:
    """Whole in 16 bits; EXACTQAT_ALL_NETWORKS=1 takes all of them through (a minute)."""
    torch.manual_seed(0)
    model, examples = plain_networks.NETWORKS[name]()
    examples = examples if isinstance(examples, tuple) else (examples,)
    prepared = qat.prepare(model.train(), examples if len(examples) > 1 else examples[0], [WIDE])
    prepared(*examples)
    qat.freeze(prepared)
    graph = lower(prepared.eval())
    assert {graph.tensors[result].dtype for result in graph.results()} == {"int16"}
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    for profile in profiles_here():
        try:
            report = verify(graph, path, random_codes(graph), profile)
        except RuntimeRefusal:
            assert profile == "micro"  # which lacks some operators in int16
            continue
        assert report.differing == 0 and all(row.exact for row in report.operators), report.table()


# Grids


@pytest.mark.parametrize("ranges", ["ema", "last_batch", "min_max", "percentile", "learned"])
def test_ranges_of_16_bits_are_symmetric(ranges: str) -> None:
    model, quantizer = one_grid(qat.Rule(activation_bits=16, ranges=ranges, percentile=100))
    qat.calibrate(model, [torch.linspace(-0.7, 2.9, 1004).reshape(-1, 4)])
    model.eval()
    scale, zero_point = quantizer.scale_and_zero_point()
    assert zero_point == 2**15
    expected = 2.9 / 32767 if ranges != "learned" else float(quantizer.range.maximum) / 32767
    assert abs(float(scale) / expected - 1) < 1e-6
    codes = quantizer.codes(quantizer(torch.tensor([-9.0, -0.7, 0.0, 9.0]))) - zero_point
    assert codes.tolist()[0] == -(2**15) and codes.tolist()[2:] == [0, 2**15 - 1]
    (placement,) = place_codes(scale, zero_point, 16, "RELU")
    assert placement.dtype == "int16" and placement.zero_point[0] == 0


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (-1.0, 0.0), (-8.0, 8.0), (-1e-3, 3e4), (-0.1, 0.1)])
def test_fixed_ranges_of_16_bits(low: float, high: float) -> None:
    _, quantizer = one_grid(qat.Rule(activation_bits=16, ranges="fixed", fixed_range=(low, high)))
    scale, zero_point = quantizer.scale_and_zero_point()
    values = torch.linspace(low, high, 4001)
    quantized = quantizer(values)
    codes = quantizer.codes(quantized) - zero_point
    assert zero_point == 2**15 and np.abs(codes).max() == 32767
    assert np.array_equal(codes.astype(np.float32) * scale, quantized.numpy())
    assert np.abs(quantized.numpy() - values.numpy()).max() <= 0.51 * scale
    # Codes are found again from real numbers.
    assert np.array_equal(quantize(quantized.numpy(), per_tensor(scale, 0, "int16")), codes)


def test_int16_has_its_zero_at_0() -> None:
    with pytest.raises(ValueError, match="the zero point of int16 is 0, got"):
        per_tensor(0.1, 3, "int16")
    with pytest.raises(ValueError, match="dtype must be one of int8, int16, got 'uint8'"):
        per_tensor(0.1, 3, "uint8")
    with pytest.raises(ValueError, match="16-bit codes are symmetric"):
        place_codes(0.1, 0, 16)
    assert not per_tensor(0.1, 0).equals(per_tensor(0.1, 0, "int16"))


# Graphs


def wide_input(shape: tuple[int, ...] = (1, 4, 4, 2)) -> Builder:
    builder = Builder()
    builder.input("x", shape, per_tensor(1e-3, 0, "int16"))
    return builder


def test_operators_take_one_dtype() -> None:
    builder = wide_input()
    builder.input("z", (1, 4, 4, 2), per_tensor(0.1, 0))
    total = builder.add("x", "z", per_tensor(2e-3, 0, "int16"), name="total")
    with pytest.raises(ValueError, match="'z' is int8 but the result is int16; insert a QUANTIZE before it"):
        builder.graph([total])
    builder = wide_input()
    total = builder.add("x", "x", per_tensor(0.1, 0), name="total")
    with pytest.raises(ValueError, match="'x' is int16 but the result is int8; insert a QUANTIZE before it"):
        builder.graph([total])
    builder = wide_input()
    with pytest.raises(
        ValueError,
        match="'x' must be int8 or float32, got int16, in which LiteRT has no usable LOG_SOFTMAX",
    ):
        builder.graph([builder.log_softmax("x", name="y")])


def test_inputs_are_of_the_graphs_dtype() -> None:
    builder = wide_input((1, 3))
    graph = builder.graph([builder.reshape("x", (1, 3), name="y")])
    with pytest.raises(TypeError, match="input 'x' must be int16 codes, got int8; use `quantize`"):
        simulate(graph, np.zeros((1, 3), np.int8))
    codes = quantize(np.array([[-99, 0.25, 99]]), graph.tensors["x"].quantization)
    assert codes.dtype == np.int16 and codes.tolist() == [[-32768, 250, 32767]]
    assert simulate(graph, codes)["y"].dtype == np.int16
    assert np.array_equal(dequantize(codes, graph.tensors["x"].quantization)[0, 1:2], np.float32([0.25]))


def test_biases_are_of_64_bits(tmp_path: Path) -> None:
    """Sums too beyond 32 bits, as audio has them on fine grids."""
    builder = wide_input((1, 8))
    filter = np.full((2, 8), 127)
    bias = np.array([2**36, -(2**35)])
    y = builder.fully_connected("x", filter, [1e-4, 1e-4], bias, per_tensor(5e-1, 0, "int16"), name="y")
    graph = builder.graph([y])
    assert graph.tensors["y/bias"].dtype == "int64"
    codes = np.random.default_rng(0).integers(-32768, 32768, (4, 8)).astype(np.int16)
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    for profile in profiles_here():
        report = verify(graph, path, codes, profile)
        assert report.differing == 0
    assert np.ptp(simulate(graph, codes)["y"]) > 0
    builder = wide_input((1, 8))
    with pytest.raises(ValueError, match="the 48-bit accumulator can overflow"):
        builder.graph([builder.fully_connected("x", filter, [1e-4], [2**47, 0], per_tensor(1.0, 0, "int16"), name="y")])


# Rules


@pytest.mark.slow
def test_bits_between_are_refused() -> None:
    for bits in (9, 12, 15):
        with pytest.raises(
            ValueError, match=f"activation_bits={bits}, but the device's tensors have 2 to 8 bits, or 16"
        ):
            qat.prepare(Audio(), torch.randn(2, 1, 64), [qat.Rule(activation_bits=bits)])
    qat.prepare(Audio(), torch.randn(2, 1, 64), [qat.Rule(activation_bits=12)], deployable=False)


class Logarithms(nn.Module):
    def __init__(self, multiplied: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.multiplied = nn.Linear(6, 6), nn.Linear(6, 3), multiplied

    def forward(self, x: Tensor) -> Tensor:
        x = torch.log_softmax(torch.log_softmax(self.first(x), -1), -1)
        return self.last(x.cumprod(-1) if self.multiplied else x)


def test_what_no_runtime_has_is_refused_in_one_list() -> None:
    with pytest.raises(qat.UnsupportedOperator) as caught:
        qat.prepare(Logarithms(), torch.randn(2, 6), [WIDE])
    message = str(caught.value)
    assert message.startswith("3 place(s) of the model cannot run on the device:")
    assert "torch.log_softmax, 2 places, first at" in message and "cumprod" in message
    assert "in 16 bits (rule match='*'): LOG_SOFTMAX is not simulated in int16; give it an 8-bit rule" in message
    assert message.count("CONV_2D, DEPTHWISE_CONV_2D") == 1 and "in 16 bits LOGISTIC, TANH" in message
    assert "test_int16.py, line" in message
    rules = [qat.Rule("log_softmax*"), WIDE]
    graph = lower(trained(Logarithms(multiplied=False), torch.randn(2, 6), rules))
    kinds = [operator.kind for operator in graph.operators]
    # Down to int8 in front of the first of them, and up again after the last.
    assert kinds.count("QUANTIZE") == 2 and graph.tensors[graph.outputs[0]].dtype == "int16"


def test_a_border_is_stored_once_for_all_its_readers() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.left(x) + self.right(x)

    rules = [qat.Rule("stem"), qat.Rule("input"), WIDE]
    graph = lower(trained(Fork(), torch.randn(2, 3, 6, 6), rules))
    assert [operator.kind for operator in graph.operators].count("QUANTIZE") == 1
    assert {graph.tensors[name].dtype for name in graph.outputs} == {"int16"}


class Functions(nn.Module):
    """What has no int16 operator of its own and is built, or looked up among 65,536 codes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.prelu = nn.Conv2d(2, 4, 1), nn.LayerNorm(6), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.nn.functional.gelu(x) + torch.nn.functional.hardswish(x) * x.clamp(-1, 1) + x.clamp(-0.5, 2)
        x = self.norm(self.prelu(x)) + torch.nn.functional.normalize(x, dim=1)
        return (
            torch.softmax(x, -1) + torch.nn.functional.softplus(x) + torch.maximum(x, x.flip(2)) - x.abs().mean(1, True)
        )


def test_functions_in_16_bits(tmp_path: Path) -> None:
    x = torch.randn(2, 2, 6, 6)
    graph = lower(trained(Functions(), x, [WIDE]))
    assert {graph.tensors[name].dtype for name in graph.results()} == {"int16"}
    # TFLite-Micro has no GATHER in int16, by which tables are looked up.
    assert_equal_on_devices(graph, tmp_path, tuple(name for name in profiles_here() if name != "micro"))


class RowLength(nn.Module):
    """Rows divided by their lengths."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)


@pytest.mark.parametrize(
    "model", [nn.LayerNorm(32), nn.LayerNorm((6, 32)), nn.LayerNorm(32, eps=1e-3), nn.RMSNorm(32), RowLength()], ids=str
)
def test_rows_beside_few_large_values(model: nn.Module, tmp_path: Path) -> None:
    """A transformer has tokens with a value hundreds of times as large as all others: 48,631 beside 0.2, squared, in a
    sentence encoder. Other rows keep their values."""
    x = torch.randn(16, 6, 32, generator=torch.Generator().manual_seed(0))
    x[::2, 1, 3] = 100.0
    prepared = qat.prepare(model.eval(), x, [WIDE], check=False)
    qat.calibrate(prepared, [x])
    qat.freeze(prepared)
    graph = lower(prepared)
    codes = simulate(graph, deploy.input_codes(graph, x.numpy()), "reference")
    (values,) = deploy.output_values(graph, codes).values()
    errors = np.abs(values - model(x).detach().numpy()).reshape(16, 6, 32).max(2)
    ordinary = errors[1::2] if isinstance(model, nn.LayerNorm) and len(model.normalized_shape) > 1 else errors[:, 2:]
    assert ordinary.max() < 0.015
    assert_equal_on_devices(graph, tmp_path, tuple(name for name in profiles_here() if name != "micro"))


@pytest.mark.parametrize("kind", ["add", "sub"])
@pytest.mark.parametrize("shapes", [((1, 5003), (1, 5003)), ((1, 40, 125), (1, 1, 125)), ((1, 15), (1, 15))])
def test_sums_of_very_different_grids(kind: str, shapes: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    """LiteRT adds vectors of 16 by shifts of its own; steps of the result that are this small show it."""
    rng = np.random.default_rng(0)
    for exponent in (-4.3, -9.2, -16.3, -18.0):
        builder = Builder()
        builder.input("x", shapes[0], per_tensor(1.0, 0, "int16"))
        builder.input("z", shapes[1], per_tensor(2.0**exponent, 0, "int16"))
        result = getattr(builder, kind)("x", "z", per_tensor(1 / 255, 0, "int16"), name="y")
        graph = builder.graph([result])
        path = deploy.write_tflite(graph, tmp_path / "model.tflite")
        low, high = np.random.default_rng(1).integers(-20, 20, shapes[0]), rng.integers(-32768, 32768, shapes[1])
        codes = {"x": low.astype(np.int16), "z": (high // (512 if exponent > -5 else 1)).astype(np.int16)}
        for profile in profiles_here():
            assert verify(graph, path, codes, profile).differing == 0, (exponent, profile)


@pytest.mark.slow
def test_jax_in_16_bits(tmp_path: Path) -> None:
    """The same rule, the same symmetric grids, borders and biases as in PyTorch."""
    jax = pytest.importorskip("jax")
    import exactqat.qat.jax as kit

    rng = np.random.default_rng(0)
    params = {
        name: {"w": rng.normal(size=shape).astype(np.float32), "b": rng.normal(size=shape[-1]).astype(np.float32)}
        for name, shape in {"first": (6, 8), "head": (8, 4)}.items()
    }

    def apply(params: dict[str, dict[str, np.ndarray]], x: np.ndarray) -> np.ndarray:
        y = x @ params["first"]["w"] + params["first"]["b"]
        y = jax.numpy.tanh(y) * jax.nn.sigmoid(y) + 0.3
        return y @ params["head"]["w"] + params["head"]["b"]

    x = rng.normal(size=(2, 6)).astype(np.float32)
    part = [qat.Rule("head*", activation_bits=16, ranges="learned"), qat.Rule()]
    for rules in ([WIDE], part):
        model = kit.prepare(apply, params, x, rules)
        trained_params, state = model.calibrate(*model.init(), [x])
        _, state = model.apply(trained_params, state, x, train=True)
        trained_params, state = model.freeze(trained_params, state)
        y, _ = model.apply(trained_params, state, x)
        graph = model.lower(trained_params, state)
        (result,), (source,) = graph.outputs, graph.inputs
        assert graph.tensors[result].dtype == "int16"
        assert_equal_on_devices(graph, tmp_path)
        codes = simulate(graph, quantize(x, graph.tensors[source].quantization))[result]
        real = dequantize(codes, graph.tensors[result].quantization)
        assert np.abs(real - np.asarray(y)).max() <= 8.5 * graph.tensors[result].quantization.scale[0]
