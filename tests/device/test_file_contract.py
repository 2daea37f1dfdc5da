# SPDX-License-Identifier: Apache-2.0
"""The file belongs to the user: fed with the user's arrays under the user's names, it gives what the model gives.

Nothing of this library comes between: LiteRT and onnxruntime run the files, the axes come from the files' metadata.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from torch import Tensor, nn  # noqa: E402

from exactqat import deploy, qat  # noqa: E402

BATCH = 4
# Every axis of one size: a wrong layout fits.
CUBE = (BATCH, 6, 6, 6)


def metadata(path: Path) -> dict[str, Any]:
    """The JSON of a .tflite file, read by the format's own classes."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(path.read_bytes())
    (entry,) = [entry for entry in model.metadata if entry.name == b"exactqat"]
    return dict(json.loads(bytes(model.buffers[entry.buffer].data)))


def by_litert(path: Path, data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the file makes of real numbers in the user's axes: real numbers in the user's axes, by name."""
    from ai_edge_litert.interpreter import Interpreter

    said = metadata(path)
    interpreter = Interpreter(model_content=path.read_bytes())
    runner = interpreter.get_signature_runner("serving_default")
    inputs, outputs = runner.get_input_details(), runner.get_output_details()
    assert set(inputs) == set(data)
    codes = {}
    for port in said["inputs"]:
        scale, zero_point = inputs[port["name"]]["quantization"]
        array = data[port["name"]].transpose(port["axes"])
        limits = np.iinfo(inputs[port["name"]]["dtype"])
        low, high = port["limits"] or (limits.min, limits.max)
        steps = np.floor(array / np.float32(scale) + np.float32(0.5)) + zero_point
        codes[port["name"]] = np.clip(steps, low, high).astype(inputs[port["name"]]["dtype"])
    results = runner(**codes)
    real = {}
    for port in said["outputs"]:
        scale, zero_point = outputs[port["name"]]["quantization"]
        array = results[port["name"]].transpose(np.argsort(port["axes"]))
        real[port["name"]] = array if scale == 0 else (array.astype(np.float32) - zero_point) * np.float32(scale)
    return real


def by_onnxruntime(path: Path, data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Likewise of an .onnx file, which takes and gives the user's axes as they are."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs exactqat[onnx]")
    session = onnxruntime.InferenceSession(path.read_bytes())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(data)), strict=True))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def near_the_original(results: Mapping[str, np.ndarray], original: Mapping[str, Any], bits: int = 8) -> None:
    """What a file makes of the user's arrays is what the user's own float model makes of them, but for some steps of
    the codes: axes that are mixed up are off by as much as the values themselves."""
    assert set(results) == set(original)
    for name, wanted in original.items():
        wanted = np.asarray(wanted)
        assert results[name].shape == wanted.shape
        error = np.linalg.norm(results[name] - wanted) / np.linalg.norm(wanted)
        assert error < (0.3 if bits == 4 else 0.03), f"{name}: {error:.1%}"


def trained(model: nn.Module, batch: Any, **how: Any) -> tuple[Any, deploy.Graph]:
    """Through all phases; a batch as the model is called with it."""
    how = {"keep_final_activation": False, "check": False} | how
    prepared = qat.prepare(model.eval(), batch, **how)
    qat.calibrate(prepared, [batch])
    qat.freeze(prepared)
    prepared.eval()
    return prepared, deploy.lower(prepared)


class Function(nn.Module):
    """A network around a function of itself and its arguments."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, image: Tensor) -> Any:
        return self.function(self, image)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Conv2d(6, 6, 1)
        self.last = nn.Linear(6, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        seen = self.logits(batch["image"])
        # "logits" is a layer's name too, of another tensor.
        return {"features": seen, "logits": self.last(seen.mean((2, 3)) + batch["bias"])}


def turned(self: Any, x: Tensor) -> Tensor:
    """Convolves images that come with their channels last, and gives them back so."""
    return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)  # type: ignore[no-any-return]


N_H_W_C, AS_GIVEN = (0, 2, 3, 1), (0, 1, 2, 3)
# name: network, shape, the file's axes of the input and of the output.
IN_PYTORCH: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "images flattened": (
        lambda: Function(lambda self, x: self.fc(x.flatten(1)), fc=nn.Linear(216, 5)), CUBE, N_H_W_C, (0, 1),
    ),
    "gray images flattened": (
        lambda: Function(lambda self, x: self.fc(x.flatten(1)), fc=nn.Linear(784, 5)), (BATCH, 1, 28, 28), N_H_W_C,
        (0, 1),
    ),
    "vectors": (lambda: Function(lambda self, x: self.fc(x), fc=nn.Linear(6, 5)), (BATCH, 6), (0, 1), (0, 1)),
    "images to a map": (lambda: Function(lambda self, x: self.conv(x), conv=nn.Conv2d(6, 6, 3, padding=1)), CUBE,
                        N_H_W_C, N_H_W_C),
    "a map that is permuted": (
        lambda: Function(lambda self, x: self.conv(x).permute(0, 2, 3, 1), conv=nn.Conv2d(6, 6, 1)), CUBE, N_H_W_C,
        AS_GIVEN,
    ),
    "a map that is permuted, then rectified": (
        lambda: Function(lambda self, x: self.conv(x).permute(0, 2, 3, 1).relu(), conv=nn.Conv2d(6, 6, 1)), CUBE,
        N_H_W_C, AS_GIVEN,
    ),
    "a map that is permuted, then split": (
        lambda: Function(
            lambda self, x: self.conv(x).permute(0, 2, 3, 1).reshape(-1, 36, 2, 3), conv=nn.Conv2d(6, 6, 1)
        ),
        CUBE, N_H_W_C, AS_GIVEN,
    ),
    "permuted in and out": (lambda: Function(turned, conv=nn.Conv2d(6, 6, 3)), CUBE, AS_GIVEN, AS_GIVEN),
    "features made a picture": (
        lambda: Function(lambda self, x: self.fc(x).reshape(-1, 6, 6, 6), fc=nn.Linear(6, 216)), (BATCH, 6), (0, 1),
        N_H_W_C,
    ),
    "sequences into a convolution": (
        lambda: Function(lambda self, x: self.conv(x), conv=nn.Conv1d(6, 6, 3, padding=1)), (BATCH, 6, 6), (0, 1, 2),
        (0, 1, 2),
    ),
    "sequences of features": (
        lambda: Function(lambda self, x: self.fc(x), fc=nn.Linear(6, 6)), (BATCH, 6, 6), (0, 1, 2), (0, 1, 2),
    ),
    "images added to themselves": (lambda: Function(lambda self, x: x + 1), CUBE, N_H_W_C, N_H_W_C),
    "five axes": (
        lambda: Function(lambda self, x: self.fc(x), fc=nn.Linear(3, 3)), (BATCH, 3, 3, 3, 3), (0, 1, 2, 3, 4),
        (0, 1, 2, 3, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PYTORCH)
def test_pytorch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape, inputs, outputs = IN_PYTORCH[name]
    x = random(*shape)
    model = make()
    with torch.no_grad():
        original = {"output": model(torch.from_numpy(x)).numpy()}
    prepared, graph = trained(model, torch.from_numpy(x))
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    near_the_original(by_litert(path, {"image": x}), original)
    said = metadata(path)
    assert [tuple(port["axes"]) for side in ("inputs", "outputs") for port in said[side]] == [inputs, outputs]
    with torch.no_grad():
        own = prepared(torch.from_numpy(x)).numpy()
    assert np.array_equal(by_litert(path, {"image": x})["output"], own)
    report = deploy.verify(graph, path, model=prepared, data=torch.from_numpy(x))
    assert report.equal and sum(row.values for row in report.predictions) == own.size
    onnx = by_onnxruntime(deploy.write_onnx(graph, tmp_path / "model.onnx"), {"image": x})["output"]
    # Ties between two codes fall otherwise in float arithmetic.
    assert onnx.shape == own.shape and np.mean(onnx != own) < 0.02


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_dictionary_of_inputs_and_outputs(bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {"image": random(*CUBE), "bias": random(BATCH, 6, seed=1)}
    arguments = ({name: torch.from_numpy(array) for name, array in batch.items()},)
    model = TwoInputs()
    with torch.no_grad():
        original = model(*arguments)
    prepared, graph = trained(model, arguments, rules=[qat.Rule("batch_*", activation_bits=bits), qat.Rule()])
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    with torch.no_grad():
        own = {name: tensor.numpy() for name, tensor in prepared(*arguments).items()}
    results = by_litert(path, batch)
    near_the_original(results, original, bits)
    assert all(np.array_equal(results[name], own[name]) for name in own)
    assert deploy.verify(graph, path, model=prepared, data=arguments).equal
    if bits < 16:
        onnx = by_onnxruntime(deploy.write_onnx(graph, tmp_path / "model.onnx"), batch)
        assert all(np.mean(onnx[name] != own[name]) < 0.02 for name in own)
    # The same by this library's own helpers.
    codes = deploy.simulate(graph, deploy.input_codes(graph, batch))
    assert all(np.array_equal(values, own[name]) for name, values in deploy.output_values(graph, codes).items())


def test_results_that_are_called_as_inputs(tmp_path: Path) -> None:
    """ONNX has one name for one tensor; TensorFlow Lite's signatures have no such rule."""
    torch.manual_seed(0)
    model = Function(lambda self, x: {"image": self.conv(x), "image_output": x * 2}, conv=nn.Conv2d(6, 6, 1))
    x = random(*CUBE)
    prepared, graph = trained(model, torch.from_numpy(x))
    assert set(by_litert(deploy.write_tflite(graph, tmp_path / "model.tflite"), {"image": x})) == {
        "image", "image_output",
    }  # fmt: skip
    path = deploy.write_onnx(graph, tmp_path / "model.onnx")
    assert deploy.verify(graph, path, deploy.input_codes(graph, x)).values
    results = by_onnxruntime(path, {"image": x})
    with torch.no_grad():
        own = prepared(torch.from_numpy(x))
    assert np.mean(results["image_output_output"] != own["image"].numpy()) < 0.02
    assert np.mean(results["image_output"] != own["image_output"].numpy()) < 0.02


class TestKeras:
    @pytest.fixture(autouse=True)
    def keras(self) -> None:
        self.keras = pytest.importorskip("keras", minversion="3")

    def check(self, model: Any, data: Any, named: Mapping[str, np.ndarray], tmp_path: Path) -> Any:
        original = model.predict(data, verbose=0)
        prepared = qat.keras.prepare(model, keep_final_activation=False)
        qat.keras.calibrate(prepared, [data])
        qat.keras.freeze(prepared)
        graph = deploy.lower(prepared)
        path = deploy.write_tflite(graph, tmp_path / "model.tflite")
        own = prepared.predict(data, verbose=0)
        results = by_litert(path, named)
        own, original = (
            outputs if isinstance(outputs, Mapping)
            else dict(zip(results, outputs if isinstance(outputs, list | tuple) else [outputs], strict=True))
            for outputs in (own, original)
        )  # fmt: skip
        near_the_original(results, original)
        assert set(own) == set(results)
        for name, wanted in own.items():
            assert np.array_equal(results[name], wanted), name
        assert deploy.verify(graph, path, model=prepared, data=data).equal
        said = metadata(path)
        for port in (*said["inputs"], *said["outputs"]):
            assert port["axes"] == list(range(len(port["axes"])))
        onnx = by_onnxruntime(deploy.write_onnx(graph, tmp_path / "model.onnx"), named)
        assert all(np.mean(onnx[name] != own[name]) < 0.02 for name in own)
        return results

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", [(28, 28, 1), (16, 16, 16)])
    def test_images_flattened(self, shape: tuple[int, ...], tmp_path: Path) -> None:
        layers = self.keras.layers
        model = self.keras.Sequential(
            [self.keras.Input(shape, name="image"), layers.Flatten(), layers.Dense(10, name="scores")]
        )
        x = random(BATCH, *shape)
        assert set(self.check(model, x, {"image": x}, tmp_path)) == {"scores"}

    def test_maps_and_sequences(self, tmp_path: Path) -> None:
        layers = self.keras.layers
        for shape, layer in (((6, 6, 6), layers.Conv2D(6, 3)), ((6, 6), layers.Conv1D(6, 3)), ((6,), layers.Dense(6))):
            x = random(BATCH, *shape)
            self.check(self.keras.Sequential([self.keras.Input(shape, name="x"), layer]), x, {"x": x}, tmp_path)

    @pytest.mark.parametrize("keyed", [True, False])
    def test_several_inputs_and_outputs(self, keyed: bool, tmp_path: Path) -> None:
        layers = self.keras.layers
        image, extra = self.keras.Input((6, 6, 6), name="image"), self.keras.Input((6,), name="extra")
        mask = layers.Conv2D(6, 1, name="mask")(image)
        scores = layers.Dense(3, name="scores")(layers.Concatenate()([layers.Flatten()(mask), extra]))
        x, y = random(BATCH, 6, 6, 6), random(BATCH, 6, seed=1)
        if keyed:
            model = self.keras.Model({"first": extra, "second": image}, {"a": scores, "b": mask})
            data = {"first": y, "second": x}
            assert set(self.check(model, data, data, tmp_path)) == {"a", "b"}
        else:
            model = self.keras.Model([image, extra], [mask, scores])
            assert list(self.check(model, [x, y], {"image": x, "extra": y}, tmp_path)) == ["mask", "scores"]


@pytest.mark.slow
class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self) -> Any:
        self.jax = pytest.importorskip("jax")

    def check(self, function: Any, params: Any, data: Any, named: Mapping[str, np.ndarray], tmp_path: Path) -> None:
        args, kwargs = ((), data) if isinstance(data, dict) else (data if isinstance(data, tuple) else (data,), {})
        original = function(params, *args, **kwargs)
        prepared = qat.jax.prepare(function, params, data, keep_final_activation=False)
        params, state = prepared.calibrate(*prepared.init(), [data])
        params, state = prepared.freeze(params, state)
        graph = prepared.lower(params, state)
        path = deploy.write_tflite(graph, tmp_path / "model.tflite")
        own, _ = prepared.apply(params, state, *args, **kwargs)
        own = own if isinstance(own, dict) else {"output": own}
        results = by_litert(path, named)
        near_the_original(results, original if isinstance(original, dict) else {"output": original})
        assert set(results) == set(own)
        assert all(np.array_equal(results[name], np.asarray(own[name])) for name in own)
        assert deploy.verify(graph, path, model=prepared.trained(params, state), data=data).equal
        said = metadata(path)
        for port in (*said["inputs"], *said["outputs"]):
            assert port["axes"] == list(range(len(port["axes"])))

    def test_images_flattened(self, tmp_path: Path) -> None:
        x = random(*CUBE)
        self.check(lambda params, image: image.reshape(image.shape[0], -1) @ params["w"], {"w": random(216, 5)}, x,
                   {"image": x}, tmp_path)  # fmt: skip

    @pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
    def test_convolutions(self, layout: tuple[str, str, str], tmp_path: Path) -> None:
        """Channels wherever the user has them: the axes are the user's."""
        x = random(*CUBE)

        def function(params: Any, x: Any) -> Any:
            return self.jax.lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=layout)

        window = (3, 3, 6, 6) if layout[1] == "HWIO" else (6, 6, 3, 3)
        self.check(function, {"w": random(*window)}, x, {"x": x}, tmp_path)

    @pytest.mark.slow
    def test_dictionaries(self, tmp_path: Path) -> None:
        data = {"image": random(*CUBE), "bias": random(BATCH, 5, seed=1)}

        def function(params: Any, batch: Any) -> Any:
            flat = batch["image"].reshape(batch["image"].shape[0], -1)
            return {"logits": flat @ params["w"] + batch["bias"], "same": batch["image"] * 0.5}

        self.check(function, {"w": random(216, 5)}, (data,), data, tmp_path)


# --- what verify sees -------------------------------------------------------------------------------------------------


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Writes other metadata into a file."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(path.read_bytes())
    (entry,) = [entry for entry in model.metadata if entry.name == b"exactqat"]
    said = json.loads(bytes(model.buffers[entry.buffer].data))
    change(said)
    model.buffers[entry.buffer].data = np.frombuffer(json.dumps(said).encode(), np.uint8)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))


def flattened() -> nn.Module:
    torch.manual_seed(0)
    return Function(lambda self, x: self.fc(x.flatten(1)), fc=nn.Linear(216, 5))


def test_verify_sees_a_file_that_states_other_axes(tmp_path: Path) -> None:
    """The integers are the graph's, none differs; only what the file says of them does."""
    x = torch.from_numpy(random(*CUBE))
    prepared, graph = trained(flattened(), x)
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")

    def change(said: dict[str, Any]) -> None:
        said["inputs"][0]["axes"] = [0, 1, 2, 3]

    changed(path, change)
    report = deploy.verify(graph, path, model=prepared, data=x)
    for seen in (report, deploy.verify(graph, path, data=x)):
        assert seen.differing == seen.predictions_differing == 0 < len(seen.declared) and not seen
        assert "but it is not the graph's file: the file's metadata says something else" in seen.sentences()[0]
    assert (
        "it returns what the model returns: none of" in repr(report)
        and "the model&#x27;s predict" in report._repr_html_()
    )


def test_verify_sees_another_model(tmp_path: Path) -> None:
    x = torch.from_numpy(random(*CUBE))
    prepared, graph = trained(flattened(), x)
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    with torch.no_grad():
        prepared.fc.bias += 1
    report = deploy.verify(graph, path, model=prepared, data=x)
    assert report.differing == 0 and report.predictions_differing > 0 and not report.equal


def test_verify_sees_results_beside_the_grid(tmp_path: Path) -> None:
    x = torch.from_numpy(random(*CUBE))
    prepared, graph = trained(flattened(), x)
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")

    class Beside:
        plan, frozen, profile, numbers = prepared.plan, True, prepared.profile, prepared.numbers

        @staticmethod
        def traced(batch: Any) -> Any:
            inputs, (result,), codes = prepared.trained().traced(batch)
            return inputs, [result + 0.3 * graph.tensors["fc"].quantization.scale[0]], codes

    report = deploy.verify(graph, path, model=Beside(), data=x)
    assert report.predictions_differing == report.predictions[0].values


def test_verify_says_what_it_needs(tmp_path: Path) -> None:
    x = torch.from_numpy(random(*CUBE))
    prepared, graph = trained(flattened(), x)
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    for arguments in ({}, {"model": prepared}):
        with pytest.raises(TypeError, match=r"needs x \(codes\) or data"):
            deploy.verify(graph, path, **arguments)
    with pytest.raises(ValueError, match="there is nothing to compare"):
        deploy.verify(graph, path, model=prepared, data=x[:0])
    changed(path, lambda said: said.clear())
    assert "metadata says nothing" in str(deploy.verify(graph, path, model=prepared, data=x))


def test_inputs_are_checked_by_name_and_shape() -> None:
    x = random(*CUBE)
    _, graph = trained(flattened(), torch.from_numpy(x))
    assert deploy.input_codes(graph, x)["input"].shape == CUBE
    with pytest.raises(ValueError, match=r"'image' must have shape \['batch', 6, 6, 6\]"):
        deploy.input_codes(graph, x[:, 1:])
    with pytest.raises(ValueError, match=r"\['image'\], got \['pixels'\]"):
        deploy.input_codes(graph, {"pixels": x})


def test_the_graph_says_how_it_lies() -> None:
    _, graph = trained(IN_PYTORCH["images to a map"][0](), torch.from_numpy(random(BATCH, 6, 8, 9)))
    (source,), (result,) = graph.signature.inputs, graph.signature.outputs
    assert source.described(graph.tensors["input"]) == "image [N, 6, 8, 9] as [N, 8, 9, 6]"
    assert result.described(graph.tensors[result.tensor]) == "output [N, 6, 8, 9] as [N, 8, 9, 6]"
    header = deploy.c_array(graph)
    assert "//   image [N, 6, 8, 9] as [N, 8, 9, 6]" in header


# --- a last softmax ---------------------------------------------------------------------------------------------------

LAST: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "softmax": (lambda x: x.softmax(1), "SOFTMAX", "softmax over axis 1"),
    "log_softmax": (lambda x: x.log_softmax(1), "LOG_SOFTMAX", "log_softmax over axis 1"),
    "sigmoid": (lambda x: x.sigmoid(), "LOGISTIC", "sigmoid"),
    "argmax": (lambda x: x.argmax(1), "ARG_MAX", "argmax over axis 1"),
}


def ending(last: Callable[[Tensor], Tensor], shape: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if shape == "vectors":
        return Function(lambda self, x: last(self.fc(x)), fc=nn.Linear(6, 6)), torch.from_numpy(random(BATCH, 6))
    return Function(lambda self, x: last(self.conv(x)), conv=nn.Conv2d(6, 6, 1)), torch.from_numpy(random(*CUBE))


@pytest.mark.parametrize("shape", ["vectors", "maps"])
@pytest.mark.parametrize("name", LAST)
def test_a_last_step_in_the_file(name: str, shape: str, tmp_path: Path) -> None:
    last, kind, _ = LAST[name]
    model, x = ending(last, shape)
    prepared, graph = trained(model, x, keep_final_activation=True)
    assert [operator.kind for operator in graph.operators].count(kind) == 1
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    assert metadata(path)["outputs"][0]["outside"] == []
    with torch.no_grad():
        own = prepared(x).numpy()
    assert np.array_equal(by_litert(path, {"image": x.numpy()})["output"], own)
    for profile in deploy.profiles_here():
        if profile == "xnnpack-arm64":
            continue
        prepared.profile = profile
        graph = deploy.lower(prepared)
        assert deploy.verify(graph, path, device=profile, model=prepared, data=x).equal, profile
    onnx = by_onnxruntime(deploy.write_onnx(graph, tmp_path / "model.onnx"), {"image": x.numpy()})["output"]
    assert onnx.shape == own.shape


@pytest.mark.parametrize("shape", ["vectors", "maps"])
@pytest.mark.parametrize("name", LAST)
def test_a_last_step_outside(name: str, shape: str, tmp_path: Path) -> None:
    """By default, with a warning; files say what they leave out, and the user's program gets the model's results."""
    last, kind, said = LAST[name]
    model, x = ending(last, shape)
    with pytest.warns(qat.FinalActivationWarning, match="keep_final_activation=True") as caught:
        prepared, graph = trained(model, x, keep_final_activation=None)
    assert sum(warning.category is qat.FinalActivationWarning for warning in caught) == 1
    assert caught[0].filename == __file__
    assert kind not in [operator.kind for operator in graph.operators]
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    assert metadata(path)["outputs"][0]["outside"] == [said]
    assert deploy.verify(graph, path, model=prepared, data=x).equal
    with torch.no_grad():
        own = prepared(x).numpy()
    results = last(torch.from_numpy(by_litert(path, {"image": x.numpy()})["output"])).numpy()
    assert np.array_equal(results, own) if name == "argmax" else np.allclose(results, own, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, x, keep_final_activation=False)
        trained(model, x, keep_final_activation=True)


def test_what_argmax_cannot_be_in_the_file() -> None:
    model, x = ending(lambda x: x.argmax(1, keepdim=True), "vectors")
    with pytest.raises(qat.UnsupportedOperator, match="keeps its axis"):
        trained(model, x, keep_final_activation=True)
    model, x = ending(lambda x: x.argmax(1), "vectors")
    with pytest.raises(qat.UnsupportedOperator, match="keep_final_activation=False"):
        trained(model, x, keep_final_activation=True, rules=[qat.Rule(activation_bits=16)])


@pytest.mark.slow
def test_a_last_step_in_jax_and_keras(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    x = random(BATCH, 6)
    with pytest.warns(qat.FinalActivationWarning, match="softmax of 'output'"):
        qat.jax.prepare(lambda params, x: jax.nn.softmax(x @ params["w"]), {"w": random(6, 5)}, x)
    prepared = qat.jax.prepare(
        lambda params, x: jax.nn.softmax(x @ params["w"]), {"w": random(6, 5)}, x, keep_final_activation=True
    )
    params, state = prepared.calibrate(*prepared.init(), [x])
    params, state = prepared.freeze(params, state)
    path = deploy.write_tflite(prepared.lower(params, state), tmp_path / "model.tflite")
    assert np.array_equal(by_litert(path, {"x": x})["output"], np.asarray(prepared.apply(params, state, x)[0]))

    keras = pytest.importorskip("keras", minversion="3")
    model = keras.Sequential([keras.Input((6,), name="x"), keras.layers.Dense(5, activation="softmax", name="scores")])
    with pytest.warns(qat.FinalActivationWarning, match="'scores'"):
        qat.keras.prepare(model)
    network = qat.keras.prepare(model, keep_final_activation=True)
    qat.keras.calibrate(network, [x])
    qat.keras.freeze(network)
    path = deploy.write_tflite(deploy.lower(network), tmp_path / "model.tflite")
    assert np.array_equal(by_litert(path, {"x": x})["scores"], network.predict(x, verbose=0))
    network.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(again.predict(x, verbose=0), network.predict(x, verbose=0))
    assert [port.name for port in deploy.lower(again).signature.outputs] == ["scores"]
