# SPDX-License-Identifier: Apache-2.0
"""MLPerf Tiny's recipes: the benchmark's networks, sizes and pass marks, on made-up data of the benchmark's shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("typer")

from exactqat import cli  # noqa: E402
from exactqat.application.job import data, judges, manner, models, recipes, restored, training  # noqa: E402
from exactqat.application.job.settings import METHODS, Settings  # noqa: E402
from exactqat.application.report import findings  # noqa: E402


def made_up(name: str, each: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of a recipe's shape, `each` of every class: a pattern of the class in noise. They are no benchmark's."""
    recipe = recipes.recipe_named(name)
    channels, height, width = recipe.shape
    generator = np.random.default_rng(seed)
    patterns = generator.uniform(0, 1, (recipe.classes, channels, height // 4 + 1, width // 2 + 1))
    patterns = patterns.repeat(4, 2).repeat(2, 3)[:, :, :height, :width]
    y = np.arange(each * recipe.classes) % recipe.classes
    x = 0.5 * patterns[y] + generator.uniform(0, 0.5, (len(y), channels, height, width))
    if channels == 3:
        return (x * 255).astype(np.uint8).transpose(0, 2, 3, 1), y
    # Features may be negative.
    return (40 * x[:, 0] - 20).astype(np.float32), y


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["exactqat", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    ("name", "parameters", "least"),
    [
        # The benchmark's published sizes (arXiv:2106.07597): 52.5 kB, 325 kB and 96 kB of int8 files.
        ("mlperf-tiny/kws", (22_000, 26_000), 0.90),
        ("mlperf-tiny/vww", (205_000, 225_000), 0.80),
        ("mlperf-tiny/ic", (76_000, 80_000), 0.85),
        # Its autoencoder has 270 kB.
        ("mlperf-tiny/ad", (264_000, 272_000), 0.85),
    ],
)
def test_networks_and_marks_are_the_benchmarks(name: str, parameters: tuple[int, int], least: float) -> None:
    recipe = recipes.recipe_named(name)
    assert recipe.mark.least == least
    settings = Settings(Path("x"), **recipes.chosen({"recipe": name}))
    assert settings.mark == recipe.mark and settings.precisions == {"w8a8": (8, 8)}
    outputs = 640 if recipe.reconstructs else recipe.classes
    network = models.network(settings.model, recipe.shape, outputs).eval()
    assert network(torch.zeros(2, *recipe.shape)).shape == (2, outputs)
    assert parameters[0] <= sum(each.numel() for each in network.parameters()) <= parameters[1]
    assert settings.commands()[0] == f"exactqat train --restart --out x --recipe {name}"


def test_what_is_given_replaces_what_a_recipe_says() -> None:
    given = {"recipe": "mlperf-tiny/ic", "epochs_float": 5, "optimizer": "sgd"}
    settings = Settings(Path("x"), **recipes.chosen(given))
    assert (settings.epochs_float, settings.optimizer, settings.model) == (5, "sgd", "resnet8")
    command = settings.commands()[0]
    assert command.endswith("--recipe mlperf-tiny/ic --epochs-float 5 --optimizer sgd")
    assert Settings(Path("x"), **json.loads(json.dumps(settings.stored()))) == settings
    with pytest.raises(ValueError, match="recipe must be one of mlperf-tiny/kws, .*, got 'kws'"):
        recipes.chosen({"recipe": "kws"})


def test_data_for_another_recipe_are_refused_with_both_shapes(tmp_path: Path) -> None:
    x, y = made_up("mlperf-tiny/kws", 5)
    np.savez(tmp_path / "words.npz", x=x, y=y)
    words = data.load(str(tmp_path / "words.npz"))
    assert recipes.check_data("mlperf-tiny/kws", words) == []
    with pytest.raises(ValueError, match=r"takes images in color, scaled to 32x32: .*\[3, 32, 32\]; .*\[1, 49, 10\]"):
        recipes.check_data("mlperf-tiny/ic", words)
    few = data.from_pairs([(image, label) for image, label in zip(x, y, strict=True) if label < 4])
    assert "has 12 classes, these data have 4" in recipes.check_data("mlperf-tiny/kws", few)[0]


@pytest.mark.parametrize(("accuracy", "passes"), [(0.9, True), (0.8999, False)])
def test_the_devices_accuracy_passes_or_does_not(accuracy: float, passes: bool) -> None:
    settings = Settings(Path("x"), **recipes.chosen({"recipe": "mlperf-tiny/kws"}))
    outcome = SimpleNamespace(device_accuracy=accuracy, test_accuracy=1.0)
    results: Any = SimpleNamespace(settings=settings, chosen=lambda precision: outcome)
    ((found, sentence),) = findings.passing(results)
    assert found is passes and sentence.startswith("MLPerf Tiny, keyword spotting: W8A8 ")
    assert ("does not pass" in sentence) is not passes and "on xnnpack-x86; at least 90% is asked" in sentence
    results.settings = Settings(Path("x"))
    assert findings.passing(results) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "each"), [("mlperf-tiny/kws", 15), ("mlperf-tiny/vww", 20), ("mlperf-tiny/ic", 15)])
def test_a_recipe_from_data_to_verdict(
    name: str, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tuple(method for method in METHODS if method.name == "qat_ema")
    monkeypatch.setattr("exactqat.application.job.settings.METHODS", kept)
    x, y = made_up(name, each)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    out = tmp_path / "job"
    status = call(
        monkeypatch, "train", "--recipe", name, "--data", tmp_path / "data.npz", "--out", out, "--epochs-float", 6,
        "--epochs-qat", 4, "--batch-size", 20, "--lr", 0.004, "--schedule", "cosine", "--keep-going",
    )  # fmt: skip
    output = capfd.readouterr().out
    metrics = json.loads((out / "metrics.json").read_text())
    (verdict,) = metrics["recipe"]
    passes = metrics["networks"]["w8a8"]["qat_ema"]["device_accuracy"] >= recipes.recipe_named(name).mark.least
    # Status 1 says no: the benchmark asks for more.
    assert status == (0 if passes else 1) and verdict["passes"] is passes and verdict["sentence"] in output
    assert ("validation sounds right" in output) == (name == "mlperf-tiny/kws")
    assert verdict["sentence"] in (out / "report.html").read_text()
    assert metrics["values_differing"] == metrics["training_differing"] == 0
    assert metrics["settings"]["recipe"] == name and metrics["settings"]["epochs_float"] == 6


def sounds(path: Path, count: int = 120) -> Path:
    """Made-up features of machines: normal ones are sums of few patterns, anomalies hold another."""
    generator = np.random.default_rng(0)
    patterns = generator.normal(size=(5, 640))

    def normal(number: int) -> np.ndarray:
        return generator.normal(size=(number, 4)) @ patterns[:4] + 0.3 * generator.normal(size=(number, 640))

    y = np.arange(40) % 2
    x = normal(40) + y[:, None] * 2 * patterns[4]
    np.savez(path, x_train=normal(count).astype(np.float32), x_test=x.astype(np.float32), y_test=y)
    return path


def test_anomalies_are_read_and_refused_by_name(tmp_path: Path) -> None:
    found = data.load(str(sounds(tmp_path / "sounds.npz")), None, None, True)
    assert [len(part) for part in (found.train, found.validation, found.test)] == [102, 18, 40]
    assert found.train.images.shape[1:] == (1, 1, 640) and found.outputs == 640 and found.reconstructs
    assert not found.train.labels.any() and found.test.labels.tolist() == [0, 1] * 20
    assert recipes.check_data("mlperf-tiny/ad", found) == []
    with np.load(tmp_path / "sounds.npz") as archive:
        good = dict(archive)
    for changed, message in (
        (
            {"y_test": None},
            r"must contain x_train \(normal examples\), x_test and y_test .* it contains x_test, x_train",
        ),
        ({"y_test": np.zeros(40, int)}, "y_test must hold 0 for normal examples and 1 for anomalies, both of them"),
        ({"x_train": good["x_train"] * np.nan}, r"x_train must be finite numbers .* got float32 \[120, 640\]"),
        ({"x_test": good["x_test"][:, :600]}, "the parts differ in the shape of their examples"),
        ({"x_train": good["x_train"][:3]}, "x_train has 3 examples, at least 4 are needed"),
    ):
        arrays = {name: array for name, array in (good | changed).items() if array is not None}
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            data.load(str(tmp_path / "bad.npz"), None, None, True)
    for given in ({"distill": 0.5}, {"class_weights": "balanced"}, {"ptq": True}, {"split": "1/1/1"}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} cannot be combined with recipe mlperf-tiny/ad"):
            Settings(Path("x"), **recipes.chosen({"recipe": "mlperf-tiny/ad", **given}))


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    generator = np.random.default_rng(0)
    scores, labels = generator.integers(0, 9, 70).astype(float), generator.integers(0, 2, 70)
    pairs = [
        1.0 if anomaly > normal else 0.5 if anomaly == normal else 0.0
        for anomaly in scores[labels == 1]
        for normal in scores[labels == 0]
    ]
    assert findings.area_under_curve(scores, labels) == pytest.approx(np.mean(pairs))
    assert findings.area_under_curve(np.array([1.0, 2, 3]), np.array([0, 1, 1])) == 1


def test_what_cannot_be_given_back_is_an_anomaly(tmp_path: Path) -> None:
    dataset = data.load(str(sounds(tmp_path / "sounds.npz")), None, None, True)
    how = manner.manner_of(Settings(Path("x"), recipe="mlperf-tiny/ad", augment=("none",)), dataset)
    torch.manual_seed(0)
    model = models.new_model("autoencoder", (1, 1, 640), 640)
    groups = [{"params": list(model.parameters()), "lr": 3e-3}]
    history = training.train(
        model, groups, dataset.train, dataset.validation, 20, 0, "test", lambda steps: None, tmp_path / "state.pt", 20,
        manner=how,
    )  # fmt: skip
    assert history.loss[-1] < 0.5 * history.loss[0]
    found = training.reconstruction_errors(model, dataset.test.images)
    with torch.no_grad():
        difference = model(dataset.test.images) - dataset.test.images.flatten(1)
    np.testing.assert_allclose(found, difference.square().mean(1).numpy(), rtol=1e-4)
    assert findings.area_under_curve(found, dataset.test.labels.numpy()) > 0.9
    limit = training.normal_threshold(model, dataset.train)
    own = training.reconstruction_errors(model, dataset.train.images)
    assert (own <= limit).mean() == pytest.approx(judges.NORMAL_SHARE, abs=0.02)
    answers = training.predictions(model, dataset.test, dataset.train).numpy()
    assert np.array_equal(answers, (found > limit).astype(int))


@pytest.mark.slow
def test_anomalies_from_data_to_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tuple(method for method in METHODS if method.name == "qat_ema")
    monkeypatch.setattr("exactqat.application.job.settings.METHODS", kept)
    out, path = tmp_path / "job", sounds(tmp_path / "sounds.npz")
    arguments = ("--epochs-float", 20, "--epochs-qat", 4, "--batch-size", 20, "--lr", 0.003)
    assert call(monkeypatch, "train", "--recipe", "mlperf-tiny/ad", "--data", path, "--out", out, *arguments) == 0
    output = capfd.readouterr().out
    assert (
        "MLPerf Tiny, anomaly detection: W8A8 passes, with an AUC of " in output and "at least 0.85 is asked" in output
    )
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["values_differing"] == metrics["training_differing"] == 0 and metrics["recipe"][0]["passes"]
    assert "counts as an anomaly" in (out / "report.html").read_text()
    (found,) = restored.verify_directory(out).values()
    assert found.differing == 0 and found.beside.answers_differing == 0
    assert found.beside.device_accuracy == metrics["networks"]["w8a8"]["qat_ema"]["device_accuracy"]
    assert call(monkeypatch, "gate", out, "--min-accuracy", 0.5) == 2
    assert "has no classes to be judged by" in " ".join(capfd.readouterr().err.split())
    checkpoint = restored.checkpoints.load_checkpoint(out / "w8a8" / "checkpoint.pt")
    for wrong in ({"outputs": 10**9}, {"threshold": float("nan")}, {"threshold": "1"}):
        restored.checkpoints.save_checkpoint(tmp_path / "forged.pt", checkpoint | wrong)
        with pytest.raises(ValueError, match="must have as many outputs as inputs, and a threshold of at least 0"):
            restored.restore(tmp_path / "forged.pt")
