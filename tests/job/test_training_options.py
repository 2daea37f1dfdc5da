# SPDX-License-Identifier: Apache-2.0
"""Options of training: each does what it says, is checked before data are read, and is stored and compared."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("typer")

from exactqat import cli, deploy, qat  # noqa: E402
from exactqat.application.job import (  # noqa: E402
    augmentation,
    checkpoints,
    data,
    models,
    pipeline,
    recipes,
    settings,
    store,
    training,
)
from exactqat.application.job.results import (  # noqa: E402
    History,
    Progress,  # noqa: E402
    Split,
)
from exactqat.application.job.settings import (  # noqa: E402
    METHODS,
    Settings,
    option_of,  # noqa: E402
)
from exactqat.application.report import job_page, metrics  # noqa: E402
from exactqat.kit.device import DEFAULT_PROFILE  # noqa: E402


def rows(count: int = 90, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images of 8x8 with one, two or no bright halves, easy to tell apart."""
    generator = np.random.default_rng(seed)
    x, y = generator.uniform(0, 0.3, (count, 8, 8)).astype(np.float32), np.arange(count) % 3
    for image, label in zip(x, y, strict=True):
        image[: 4 * label] += 0.6
    return x, y


@pytest.fixture(scope="module")
def dataset() -> data.Dataset:
    torch.set_num_threads(1)
    return data.from_arrays({"": rows()}, "rows")


@pytest.fixture
def one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tuple(method for method in METHODS if method.name == "qat_learned")
    monkeypatch.setattr("exactqat.application.job.settings.METHODS", kept)


SMALL: dict[str, Any] = {"epochs_float": 3, "epochs_qat": 3, "weight_bits": 4, "activation_bits": 4, "batch_size": 16}


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["exactqat", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", "0", "must be above 0 and at most 100, got '0'"),
        ("lr", "fast", "must be a number, got 'fast'"),
        ("lr-qat", "nan", "must be a number, got 'nan'"),
        ("lr-ranges", "-1", "must be above 0 and at most 100, got '-1'"),
        ("optimizer", "lion", "must be one of adam, adamw, sgd, got 'lion'"),
        ("schedule", "Cosine", "must be one of constant, cosine, step, warm-up, got 'Cosine'"),
        ("augment", "none,flip", "must be none alone, or some of shift, time-shift, flip"),
        ("augment", "spin", "got 'spin'"),
        ("class-weights", "nowhere.json", "must be one of balanced, got 'nowhere.json'"),
        ("split", "80/20", "must be three parts above 0 of training, validation and test, such as 70/15/15"),
        ("split", "80/20/0", "got '80/20/0'"),
        ("early-stopping", "0", "must be at least 1, got 0"),
        ("early-stopping", "1.5", "must be an integer, got '1.5'"),
        ("distill", "2", "must be above 0 and at most 1, got '2'"),
        ("distill", "0.5:4", "must be a number, got '0.5:4'"),
        ("rules", "nowhere.txt", "must be a file of rules, such as exactqat tune --plan writes; there is no file"),
        ("rules", "stem W4A4; head", "must be rules such as 'stem W8A16; * W4A8': rules, line 2: the bits of 'head'"),
        ("epochs-qat", "0", "must be at least 1, got 0"),
        ("batch-size", "many", "must be an integer, got 'many'"),
    ],
)
def test_bad_values_name_the_option_and_what_is_allowed(
    option: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(data, "load", lambda *given: pytest.fail("data were read"))
    assert call(monkeypatch, "train", "--out", tmp_path / "job", f"--{option}", value) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"--{option}" in said and message in said
    assert not (tmp_path / "job").exists()


def test_a_setting_is_declared_once() -> None:
    assert Settings(Path("x")).device == DEFAULT_PROFILE
    chosen = Settings(
        Path("x"), lr=0.01, optimizer="sgd", schedule="step", augment=["flip", "shift"], split="60/20/20:3",
        class_weights="balanced", early_stopping=4, distill=0.5,
    )  # fmt: skip
    assert chosen.augment == ("shift", "flip") and chosen.distill == 0.5
    assert Settings(Path("x"), **json.loads(json.dumps(chosen.stored()))) == chosen
    command, _ = chosen.commands()
    for part in ("--lr 0.01", "--optimizer sgd", "--augment shift,flip", "--split 60/20/20:3", "--distill 0.5",
                 "--class-weights balanced", "--early-stopping 4"):  # fmt: skip
        assert part in command
    with pytest.raises(ValueError, match="epochs_float must be at least 1 without weights, got 0"):
        Settings(Path("x"), epochs_float=0)
    with pytest.raises(ValueError, match="rules cannot be combined with weight_bits"):
        Settings(Path("x"), rules="* W8A8", weight_bits=4)
    planned = Settings(Path("x"), rules="stem.*  W8A16\n*  W4A8 ranges=learned", distill="0.25")
    assert planned.rules == "stem.* W8A16; * W4A8 ranges=learned" and planned.distill == 0.25
    assert planned.precisions == {"mixed": (4, 8)} and Settings(Path("x"), **planned.stored()) == planned
    command, _ = planned.commands()
    assert "--rules 'stem.* W8A16; * W4A8 ranges=learned'" in command
    assert settings.rules(settings.rules_in(planned.rules)) == planned.rules


def test_resume_refuses_other_options(dataset: data.Dataset, tmp_path: Path) -> None:
    chosen = Settings(tmp_path, **SMALL)
    store.start(chosen, dataset)
    for name, value, shown in (
        ("lr", 0.1, "0.1"), ("schedule", "step", "step"), ("augment", ("none",), "none"), ("distill", "0.50", "0.5"),
        ("class_weights", "balanced", "balanced"), ("early_stopping", 3, "3"), ("split", "60/20/20", "60/20/20:0"),
    ):  # fmt: skip
        option = name.replace("_", "-")
        with pytest.raises(ValueError, match=re.escape(f"it cannot be continued with --{option} {shown}")):
            store.start(replace(chosen, **{name: value}), dataset, resume=True)
    # A job of before there were these options has their defaults.
    job = json.loads((tmp_path / "job.json").read_text())
    for name in ("lr", "schedule", "augment", "distill", "optimizer"):
        del job["settings"][name]
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert store.start(chosen, dataset, resume=True)


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("constant", {0: 1, 50: 1, 99: 1}),
        ("cosine", {0: 1, 50: 0.5, 100: 0}),
        ("step", {0: 1, 49: 1, 50: 0.1, 74: 0.1, 75: 0.01}),
        ("warm-up", {0: 0.1, 9: 1, 10: 1, 55: 0.5, 100: 0}),
    ],
)
def test_schedules(name: str, factors: dict[int, float]) -> None:
    assert {step: round(training.learning_rate_factor(name, step, 100), 9) for step in factors} == factors
    assert math.isfinite(training.learning_rate_factor(name, 1, 1))


def test_augmentations_do_what_they_say_and_keep_to_the_range() -> None:
    images = torch.rand(64, 3, 8, 12, generator=torch.Generator().manual_seed(1)) * 1.5 - 0.5
    limits = (float(images.min()), float(images.max()))

    def changed(*names: str) -> Any:
        found = augmentation.augmented(images, names, torch.Generator().manual_seed(0), limits)
        again = augmentation.augmented(images, names, torch.Generator().manual_seed(0), limits)
        assert torch.equal(found, again) and found.shape == images.shape and found.dtype == images.dtype
        assert found.min() >= limits[0] and found.max() <= limits[1]
        return found

    assert torch.equal(changed("none"), images)
    flipped = changed("flip")
    mirrored = [torch.equal(new, old.flip(2)) for new, old in zip(flipped, images, strict=True)]
    same = [torch.equal(new, old) for new, old in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True)) and 10 < sum(mirrored) < 54
    assert torch.equal(changed("shift"), augmentation.shifted(images, torch.Generator().manual_seed(0)))
    later = changed("time-shift")
    moves = [{move for move in (-1, 0, 1) if torch.equal(new[:, 1:7], old.roll(move, 1)[:, 1:7])}
             for new, old in zip(later, images, strict=True)]  # fmt: skip
    assert all(len(move) == 1 for move in moves) and {-1, 0, 1} == set().union(*moves)
    spread = limits[1] - limits[0]
    assert 0 < (changed("noise") - images).abs().max() <= spread / 20 + 1e-6
    moved = changed("brightness") - images
    assert 0 < moved.abs().max() <= spread / 5 + 1e-6
    ratio = changed("contrast").std((1, 2, 3)) / images.std((1, 2, 3))
    assert 0.7 < ratio.min() < 0.9 and 1.05 < ratio.max() < 1.3
    assert Settings(Path("x"), augment="flip").options() == " --augment flip" and not Settings(Path("x")).options()


def test_balanced_classes_count_the_same(dataset: data.Dataset) -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    few = replace(dataset, train=Split(dataset.train.images[:10], labels))
    found = training.manner_of(Settings(Path("x"), class_weights="balanced"), few).class_weights
    assert found is not None
    totals = [float((found[labels] * (labels == code)).sum()) for code in range(3)]
    assert totals == pytest.approx([10 / 3] * 3)
    assert float(found[labels].mean()) == pytest.approx(1)
    outputs = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.cross_entropy(outputs, labels, found, reduction="sum")
    how = training.Manner(Settings(Path("x")), class_weights=found)
    loss = training.loss_of(outputs, labels, few.train.images[:10], how)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_splits_have_their_shares_and_seeds(tmp_path: Path) -> None:
    x, y = rows(90)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    path = str(tmp_path / "data.npz")

    def sizes(found: data.Dataset) -> list[int]:
        return [len(part) for part in (found.train, found.validation, found.test)]

    assert sizes(data.load(path, split="60/20/20:0")) == [54, 18, 18]
    assert sizes(data.load(path, split="1/1/1:0")) == [30, 30, 30]
    assert sizes(data.load(path, split="1/1/8:0")) == [9, 9, 72]
    prints = {data.load(path, split=f"60/20/20:{seed}").fingerprint() for seed in (0, 0, 1)}
    assert len(prints) == 2
    assert data.load(path, split="65/15/20:0").fingerprint() == data.load(path).fingerprint()
    np.savez(tmp_path / "parts.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(ValueError, match="parts.npz is divided into train and test already: omit --split 60/20/20:0"):
        data.load(str(tmp_path / "parts.npz"), split="60/20/20:0")


def manner(**options: Any) -> training.Manner:
    return training.Manner(Settings(Path("x"), batch_size=16, **options))


def trained(dataset: data.Dataset, path: Path, how: training.Manner, epochs: int, **given: Any) -> tuple[Any, History]:
    torch.manual_seed(0)
    model = models.new_model("small_mobilenet", (1, 8, 8), 3)
    groups = [{"params": list(model.parameters()), "lr": 1e-3}]
    progress = Progress(advance=given.pop("on_step", lambda steps: None), skip=given.pop("on_skip", lambda steps: None))
    history = training.train(
        model, groups, dataset.train, dataset.validation, epochs, "test", path, how,
        progress=progress, **given,
    )  # fmt: skip
    return model, history


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_training_of_any_manner_goes_on_with_the_same_bits(
    optimizer: str, dataset: data.Dataset, tmp_path: Path
) -> None:
    how = manner(optimizer=optimizer, schedule="warm-up", augment=("shift", "noise"))
    whole, history = trained(dataset, tmp_path / "whole.pt", how, 3)
    steps = training.steps_per_epoch(dataset.train, 16)
    factors = [training.learning_rate_factor("warm-up", epoch * steps, 3 * steps) for epoch in range(3)]
    assert history.learning_rate == pytest.approx([1e-3 * factor for factor in factors])

    class Stop(Exception):
        pass

    taken: list[int] = []
    steps_each = steps

    def stop(steps: int) -> None:
        taken.append(steps)
        if len(taken) == 2 * steps_each + 1:
            raise Stop

    with pytest.raises(Stop):
        trained(dataset, tmp_path / "state.pt", how, 3, on_step=stop)
    skipped: list[int] = []
    again, _ = trained(dataset, tmp_path / "state.pt", how, 3, resume=True, on_skip=skipped.append)
    assert skipped == [2 * steps]
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    assert (tmp_path / "state.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


def test_a_training_ends_early_and_stays_ended(dataset: data.Dataset, tmp_path: Path) -> None:
    # So large a rate that the validation loss rises at once.
    path, steps = tmp_path / "state.pt", training.steps_per_epoch(dataset.train, 16)
    how, skipped = manner(early_stopping=2), list[int]()
    torch.manual_seed(0)
    losses = iter([1.0, 0.5, 0.7, 0.6, 0.1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "accuracy_and_loss", lambda *given: (0.5, next(losses)))
        _, history = trained(dataset, path, how, 9, on_skip=skipped.append)
    assert history.validation_loss == [1.0, 0.5, 0.7, 0.6] and skipped == [5 * steps]
    training.check_finished(path)
    best = checkpoints.load_checkpoint(path)["best"]
    model, again = trained(dataset, path, how, 9, resume=True, on_skip=skipped.append)
    assert again == history and skipped == [5 * steps, 9 * steps]
    assert all(torch.equal(best[name], value) for name, value in model.state_dict().items())


def test_only_frozen_epochs_end_a_quantized_training() -> None:
    history = History([1.0] * 6, [0.5] * 6, 4, [1.0, 2.0, 3.0, 4.0, 9.0, 9.5], [1e-3] * 6)
    assert not training._stops(history, 2) and training._stops(history, 1)
    assert not training._stops(replace(history, frozen_from=6), 1)


@pytest.mark.slow
def test_the_teacher_is_learned_from_and_stays_as_it_is(dataset: data.Dataset, tmp_path: Path) -> None:
    teacher, _ = trained(dataset, tmp_path / "teacher.pt", manner(), 2)
    teacher.eval()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    images, labels = dataset.train.images[:8], dataset.train.labels[:8]
    outputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    distillation = qat.Distillation(teacher)
    how = replace(manner(distill=0.25), teacher=distillation)
    expected = 0.75 * torch.nn.functional.cross_entropy(outputs, labels, reduction="sum")
    expected += 0.25 * qat.distillation_loss(outputs, teacher(images), 4.0, "sum")
    assert float(training.loss_of(outputs, labels, images, how)) == pytest.approx(float(expected.detach()), rel=1e-6)
    other, _ = trained(dataset, tmp_path / "taught.pt", how, 2)
    plain, _ = trained(dataset, tmp_path / "plain.pt", manner(), 2)
    assert not torch.equal(other.classifier.weight, plain.classifier.weight)
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


@pytest.mark.slow
def test_rules_and_distillation_name_layers_of_the_network(dataset: data.Dataset, tmp_path: Path) -> None:
    for given, message in (({"rules": "stem9 W4A8"}, "rules do not fit model small_mobilenet: .*no rule matches"),):
        with pytest.raises(ValueError, match=message):
            pipeline.run(Settings(tmp_path / "job", epochs_float=1, epochs_qat=1, **given), dataset=dataset)
    assert not (tmp_path / "job").exists()


@pytest.mark.slow
def test_a_plan_is_trained_with(
    dataset: data.Dataset, tmp_path: Path, one_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of rules that a plan saves; every layer of the delivered network has the bits that it says."""
    network = models.new_model("small_mobilenet", (1, 8, 8), 3).eval()
    prepared = qat.prepare(network, torch.zeros(2, 1, 8, 8), keep_final_activation=False)
    names = [path for path, _ in prepared.layers()]
    given = [qat.Rule("input"), qat.Rule(names[2], 4, 16), qat.Rule(names[3], 8, 4), qat.Rule("*", 4, 8)]
    rules = qat.save_rules(given, tmp_path / "rules.txt", "What a plan says of itself.")
    x, y = rows()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    out = tmp_path / "job"
    status = call(
        monkeypatch, "train", "--out", out, "--data", tmp_path / "data.npz", "--rules", rules, "--epochs-float", 2,
        "--epochs-qat", 3, "--distill", "0.5", "--keep-going", "--quiet",
    )  # fmt: skip
    assert status == 0
    network = json.loads((out / "metrics.json").read_text())["networks"]["mixed"]["qat_learned"]
    assert network["values_compared"] > 0 and network["values_differing"] == network["training_differing"] == 0
    checkpoint = torch.load(out / "mixed" / "checkpoint.pt", weights_only=True)
    found = {rule["match"]: (rule["weight_bits"], rule["activation_bits"]) for rule in checkpoint["rules"]}
    assert found == {"input": (8, 8), names[2]: (4, 16), names[3]: (8, 4), "*": (4, 8)}
    graph = deploy.read_tflite(out / "mixed" / "model.tflite")
    assert {tensor.dtype for tensor in graph.tensors.values() if tensor.data is None} == {"int8", "int16"}
    assert call(monkeypatch, "verify", out, "--quiet") == 0
    assert call(monkeypatch, "gate", out, "--min-accuracy", 0, "--max-differ", 0, "--run") == 0
    page = (out / "report.html").read_text("utf-8")
    assert "--rules" in page


@pytest.mark.slow
def test_mixed_precision_is_for_float_training_alone(
    dataset: data.Dataset, tmp_path: Path, one_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[bool]] = {}
    train = training.train

    def watched(*given: Any, **options: Any) -> Any:
        how = next(value for value in (*given, *options.values()) if isinstance(value, training.Manner))
        seen.setdefault(given[5], set()).add(how.settings.mixed_precision)
        return train(*given, **options)

    monkeypatch.setattr(training, "train", watched)
    chosen = Settings(tmp_path / "job", **SMALL, mixed_precision=True)
    results = pipeline.run(chosen, dataset=dataset, keep_going=True)
    assert seen == {"float training": {True}, "W4A4 QAT, learned ranges": {False}}
    assert results.simulation.differing == results.training.differing == 0
    monkeypatch.undo()
    plain, _ = trained(dataset, tmp_path / "plain.pt", manner(), 1)
    mixed, _ = trained(dataset, tmp_path / "mixed.pt", manner(mixed_precision=True), 1)
    assert not torch.equal(plain.classifier.weight, mixed.classifier.weight)
    assert mixed.classifier.weight.dtype == torch.float32


@pytest.mark.slow
def test_all_options_in_one_job(dataset: data.Dataset, tmp_path: Path, one_network: None) -> None:
    chosen = Settings(
        tmp_path / "job", **SMALL, lr=0.05, optimizer="sgd", schedule="warm-up", augment=("shift", "flip", "noise"),
        class_weights="balanced", early_stopping=1, distill="0.5",
    )  # fmt: skip
    said: list[str] = []
    results = pipeline.run(chosen, Progress(say=said.append), dataset, keep_going=True)
    assert results.simulation.differing == results.training.differing == 0
    for name, history in (("float", results.float_history), ("w4a4-qat_learned", results.outcomes[0].history)):
        assert history is not None
        with (chosen.out / "training" / f"{name}.csv").open() as file:
            table = list(csv.DictReader(file))
        assert [float(row["loss"]) for row in table] == history.loss
        assert [float(row["validation_loss"]) for row in table] == history.validation_loss
        assert tuple(table[0]) == ("epoch", *store.CURVES, "frozen")
    metrics.write_metrics(results)
    page = html.unescape(job_page.written(results))
    assert chosen.options().strip() in page and "--augment shift,flip,noise" in page
    # The float network learned in so few steps, or the report says that it did not.
    again = pipeline.run(store.stored_settings(chosen.out), dataset=dataset, resume=True)
    assert again.outcomes[0].device_accuracy == results.outcomes[0].device_accuracy and again.seconds == round(
        results.seconds, 2
    )


@pytest.mark.slow
def test_a_network_at_chance_ends_the_job_with_what_to_try(tmp_path: Path, one_network: None) -> None:
    x, y = np.random.default_rng(0).uniform(0, 1, (300, 8, 8)).astype(np.float32), np.minimum(np.arange(300) % 4, 2)
    noise = data.from_arrays({"": (x, y)}, "noise")
    chosen = Settings(tmp_path / "job", **SMALL | {"epochs_float": 1, "epochs_qat": 1, "lr": 1e-9})
    with pytest.raises(ValueError, match=r"(?s)has learned nothing: .*--epochs-float.*--lr.*--keep-going"):
        pipeline.run(chosen, dataset=noise)
    assert not list(tmp_path.rglob("*.tflite"))
    results = pipeline.run(chosen, dataset=noise, resume=True, keep_going=True)
    assert results.outcomes and results.runs == 2
    # Too few images to tell are no reason to stop.
    few = replace(noise, validation=Split(noise.test.images[:4], torch.tensor([0, 0, 1, 2])))
    assert pipeline.run(replace(chosen, out=tmp_path / "few"), dataset=few).outcomes


def test_the_time_is_that_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(store.time, "perf_counter", lambda: now[0])
    history = History([1.0], [0.5], None, [1.0], [0.1])
    first = store.Logs(tmp_path)
    now[0] += 7
    first.epoch("float", history)
    now[0] += 1000  # the machine is off
    second = store.Logs(tmp_path)
    now[0] += 3
    second.epoch("float", history)
    assert (second.close(), second.runs) == (10.0, 2)
    again = store.Logs(tmp_path, records=False)
    now[0] += 50
    again.epoch("float", history)
    assert (again.close(), again.runs) == (10.0, 2)
    (tmp_path / "training" / "elapsed.json").write_text('{"seconds": "x", "runs": 1, "processes": 1}')
    with pytest.raises(ValueError, match="elapsed.json: seconds must be a number of at least 0, got 'x'"):
        store.Logs(tmp_path)


@pytest.mark.slow
def test_the_command_says_what_is_applied(
    tmp_path: Path, one_network: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    x, y = rows()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    status = call(
        monkeypatch, "train", "--out", tmp_path / "job", "--data", tmp_path / "data.npz", "-w", 4, "--epochs-float", 2,
        "--epochs-qat", 1, "--augment", "flip", "--class-weights", "balanced", "--lr", 0.01,
        "--distill", "0.5", "--keep-going",
    )  # fmt: skip
    output = capfd.readouterr().out
    assert status == 0
    for sentence in (
        "Options that are not the defaults:",
        "--augment flip --class-weights balanced --epochs-float 2 --epochs-qat 1 --lr 0.01 --distill 0.5",
    ):
        assert sentence in output
    assert json.loads((tmp_path / "job" / "job.json").read_text())["settings"]["class_weights"] == "balanced"
    assert "seconds" in json.loads((tmp_path / "job" / "training" / "elapsed.json").read_text())


@pytest.mark.slow
def test_the_page_names_all_and_its_loop_runs(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "training-options.md").read_text("utf-8")
    named = set(re.findall(r"^\| `([^`]+)` \|", page, re.M))
    assert {*settings.AUGMENTATIONS, *settings.SCHEDULES, *recipes.RECIPES, "none"} <= named
    for option in re.findall(r"`(--[a-z-]+)", page):
        known = {option_of(entry.name) for entry in settings.declared()} | {"--resume", "--keep-going"}
        assert option in known | {"--min-accuracy", "--out"}, option
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, timeout=300)
