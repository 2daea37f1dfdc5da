# SPDX-License-Identifier: Apache-2.0
"""What "equal" is said of: a file and its simulation, a device and training; and which device was trained for."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from exactqat import cli, deploy, qat, tune  # noqa: E402
from exactqat.application.job import data, pipeline, restored  # noqa: E402
from exactqat.application.job.results import Results  # noqa: E402
from exactqat.application.job.settings import METHODS, Settings  # noqa: E402
from exactqat.application.report import findings, metrics  # noqa: E402
from exactqat.application.report import job_page as report  # noqa: E402
from exactqat.application.report.luck import paired  # noqa: E402
from exactqat.deploy import profiles_here  # noqa: E402
from exactqat.kit.device.profile import that_run  # noqa: E402

Call = Callable[..., tuple[int, str, str]]
FORMER, NOW = "xnnpack-x86", "reference"


def two_methods(patch: pytest.MonkeyPatch) -> None:
    """One way without training, one with it: they take a third of the time of four."""
    kept = ("ptq_min_max", "qat_ema")
    patch.setattr(
        "exactqat.application.job.settings.METHODS", tuple(method for method in METHODS if method.name in kept)
    )


def settings(out: Path, **options: Any) -> Settings:
    return Settings(out, epochs_float=1, epochs_qat=2, weight_bits=4, activation_bits=4, **options)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Results]]:
    """Trained for XNNPACK on x86."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("jobs") / "digits"
    with pytest.MonkeyPatch.context() as patch:
        two_methods(patch)
        results = pipeline.run(settings(out, device=FORMER), keep_going=True)
        metrics.write_metrics(results)
        metrics.write_report(results)
        yield out, results


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["exactqat", *arguments])
        status: Any = 0
        try:
            cli.main()
        except SystemExit as error:
            status = error.code or 0
        captured = capfd.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return status, captured.out, captured.err

    return run


@pytest.mark.slow
def test_another_device_is_not_what_was_trained(job: tuple[Path, Results], call: Call) -> None:
    """The file runs there as simulated, and yet status 0 would be wrong."""
    out, _ = job
    status, output, _ = call("verify", str(out), "--device", NOW, "--quiet")
    assert status == 1 and "all are equal" not in output
    assert "On LiteRT with its reference kernels the file runs as simulated: none of " in output
    (count,) = re.findall(
        r"computes something other than was trained: ([\d,]+) of 3,590 integers of the outputs", output
    )
    assert re.search(
        r"accuracy on 359 test examples \d+\.\d%, in training \d+\.\d%, (\d+ of 359 answers|no answer)", output
    )
    assert f"It was trained for {FORMER}, and not for {NOW}" in output
    assert f"--weights {out}/float/checkpoint.pt --epochs-float 0 --device {NOW} --out {out}-{NOW}\n" in output
    # The same from the user's side: the file itself, on both runtimes.
    graph, _ = restored.restore_graph(out / "w4a4" / "checkpoint.pt")
    codes = deploy.input_codes(graph, data.load("digits").test.images.numpy())
    content = (out / "w4a4" / "model.tflite").read_bytes()
    answers = [
        next(iter(runtime.run(codes).values()))
        for runtime in (deploy_runtime(content, graph, device) for device in (FORMER, NOW))
    ]
    assert int((answers[0] != answers[1]).sum()) == int(count.replace(",", ""))


def deploy_runtime(content: bytes, graph: deploy.Graph, device: str) -> Any:
    from exactqat.deploy.runtimes import open_runtime

    return open_runtime(content, graph.inputs, graph.outputs, device)


@pytest.mark.slow
def test_its_own_device_computes_what_was_trained(job: tuple[Path, Results], call: Call) -> None:
    out, results = job
    for arguments in ([], ["--device", FORMER]):
        status, output, _ = call("verify", str(out), *arguments)
        assert status == 0 and f"It was trained for {FORMER}, this device" in output
        assert "computes what was trained: none of 3,590 integers of the outputs differs" in output
        assert "no answer changes" in output
    assert results.equal and results.training.differing == 0 < results.training.values


@pytest.mark.slow
def test_all_devices_beside_training_need_no_runtime(job: tuple[Path, Results]) -> None:
    """What is said of every device is what its simulation gives for the trained network's own codes."""
    out, results = job
    metrics = json.loads((out / "metrics.json").read_text())
    network = metrics["networks"]["w4a4"]["qat_ema"]
    assert metrics["device"] == metrics["ran_as"] == FORMER
    graph, _ = restored.restore_graph(out / "w4a4" / "checkpoint.pt")
    assert graph.trained_for == FORMER
    codes = deploy.input_codes(graph, results.dataset.test.images.numpy())
    (trained,) = deploy.simulate(graph, codes, FORMER).values()
    labels = results.dataset.test.labels.numpy()
    assert list(network["devices"]) == list(that_run(".tflite"))
    for device, figures in network["devices"].items():
        (logits,) = deploy.simulate(graph, codes, device).values()
        assert figures["logits_differing"] == int((logits != trained).sum())
        assert figures["answers_differing"] == int((logits.argmax(1) != trained.argmax(1)).sum())
        assert figures["accuracy"] == pytest.approx((logits.argmax(1) == labels).mean())
    assert network["devices"][FORMER]["differing"] == 0 < network["devices"][NOW]["differing"]
    page = (out / "report.html").read_text()
    differing = network["devices"]["micro"]["logits_differing"]
    figures = network["devices"]["micro"]
    share, instead = 100 * figures["differing"] / figures["values"], 100 * figures["trained_accuracy"]
    words = f"{share:.2g} % of codes differ; {100 * figures['accuracy']:.1f} instead of {instead:.1f} % right"
    assert "micro (TFLite-Micro): the delivered networks" in page and words in page
    assert f">✗ {differing:,} of 3,590</td>" in page
    assert "every integer is claimed to be equal" not in page and "claimed to be as simulated" in page


def test_a_report_of_a_deployment_states_three_things(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1, 8, 8)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
    )
    model = qat.prepare(network, x)
    qat.calibrate(model, [x])
    qat.freeze(model)
    model.eval()
    graph = deploy.lower(model)
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    codes = deploy.quantize(x.numpy().transpose(0, 2, 3, 1), graph.tensors["input"].quantization)
    own = deploy.device_codes(model, x)
    same = deploy.verify(graph, path, codes, FORMER, trained_codes=own)
    other = deploy.verify(graph, path, codes, NOW, trained_codes=own)
    assert same.differing == other.differing == 0
    assert same.equal and same.training_differing == 0 < same.training_values
    logits = [next(iter(deploy.simulate(graph, codes, device).values())) for device in (FORMER, NOW)]
    assert not other.equal and other.outputs_beside_training == (int((logits[0] != logits[1]).sum()), 640)
    assert other.outputs_beside_training[0] > 0
    # Without the trained codes the simulation of the device that was trained for takes their place.
    assert not deploy.verify(graph, path, codes, NOW).equal
    ran, computes, trained = other.sentences()
    assert "runs as simulated: none of" in ran and "something other than was trained" in computes
    assert trained == f"It was trained for {FORMER}, and not for {NOW}"
    assert "something other than was trained" in repr(other) and "differ from training" in other._repr_html_()
    unknown = deploy.verify(replace(graph, trained_for=""), path, codes, NOW)
    assert unknown.equal and "trained for is unknown" in unknown.sentences()[2]
    # A network that ends with a move of values: training stores no output.
    stored = {name: array for name, array in own.items() if name not in graph.outputs}
    ends = deploy.verify(graph, path, codes, FORMER, trained_codes=stored)
    assert ends.sentences()[1].endswith(f"none of {ends.training_values:,} integers of all stored tensors differs")


@pytest.mark.slow
def test_a_runtime_that_is_not_here_is_no_proof(
    job: tuple[Path, Results], call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from exactqat.deploy.runtimes import emulation

    monkeypatch.setenv("EXACTQAT_ARM64", str(tmp_path / "nothing"))
    if "xnnpack-arm64" in profiles_here() or emulation.is_set_up():
        pytest.skip("this machine runs ARM64 files")
    out, _ = job
    # The same integers as on x86, by the simulation; and the file did not run.
    status, output, errors = call("verify", str(out), "--device", "xnnpack-arm64", "--quiet")
    assert status == 2 and "the files were not run: profile 'xnnpack-arm64' needs an ARM64 processor" in errors
    assert "LiteRT with XNNPACK on 64-bit ARM the file was not run" in output
    assert "LiteRT with XNNPACK on 64-bit ARM computes what was trained: none of" in output


@pytest.mark.slow
def test_the_float_network_is_quantized_for_another_device(
    job: tuple[Path, Results], call: Call, tmp_path: Path
) -> None:
    source, _ = job
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    out = tmp_path / "other"
    options = ["--weights", str(source / "float" / "checkpoint.pt"), "--epochs-float", "0", "--epochs-qat", "3"]
    status, output, _ = call("train", *options, "-w", "4", "--device", NOW, "--out", str(out), "--keep-going")
    assert status == 0 and f"Trained for {NOW}." in output and "100% of its numbers" in output
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    assert call("verify", str(out), "--quiet")[0] == 0 and call("verify", str(out), "--device", FORMER)[0] == 1
    first, second = (torch.load(path / "float" / "checkpoint.pt", weights_only=True)["state"] for path in (source, out))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert call("report", str(out))[0] == 0


@pytest.mark.slow
def test_a_device_without_its_runtime_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: tuple[Path, Results]
) -> None:
    """Trained for a device that this machine does not have: what ran is named as what it was."""
    _, results = job
    here = [name for name in profiles_here() if name != "micro"]
    monkeypatch.setattr(sys.modules["exactqat.deploy.verify"], "profiles_here", lambda *file: tuple(here))
    others = pipeline.run(settings(tmp_path / "micro", device="micro"), dataset=results.dataset, keep_going=True)
    outcome = others.outcomes[-1].report
    assert outcome is not None and (outcome.profile, outcome.ran_as, outcome.trained_for) == (
        "micro",
        NOW,
        "micro",
    )  # XNNPACK computes weights of four bits otherwise
    assert others.equal and outcome.training_differing == 0 < outcome.training_values
    ran, computes, trained = outcome.sentences()
    assert ran.startswith(
        "On LiteRT with its reference kernels (TFLite-Micro was not run here) the file runs as simulated"
    )
    assert computes.startswith("TFLite-Micro computes what was trained") and trained.endswith("micro, this device")
    sentences = [sentence for _, sentence in findings.closing_sentences(others)]
    assert "the runtime (LiteRT with its reference kernels)" in sentences[0]
    assert "The files were not run there: this machine does not have TFLite-Micro" in sentences[2]


@pytest.mark.slow
def test_an_unfinished_job_is_called_one(job: tuple[Path, Results], call: Call, tmp_path: Path) -> None:
    source, _ = job
    out = tmp_path / "cut short"
    shutil.copytree(source, out)
    (out / "metrics.json").unlink()
    status, output, errors = call("verify", str(out), "--quiet")
    assert status == 0 and "computes what was trained" in output
    assert "contains an unfinished job: continue it with `exactqat train --resume --out '" in errors
    shutil.rmtree(out / "w4a4")
    for command in ("verify", "export"):
        status, _, errors = call(command, str(out))
        assert status == 2 and "contains an unfinished job" in errors and "run `exactqat train` first" not in errors


@pytest.mark.slow
def test_luck_is_judged_pair_by_pair(job: tuple[Path, Results]) -> None:
    binomtest = pytest.importorskip("scipy.stats").binomtest
    generator = np.random.default_rng(0)
    for images, share, other in ((359, 0.9, 0.93), (1000, 0.5, 0.5), (40, 0.9, 0.2), (5, 1.0, 0.0), (2000, 0.95, 0.9)):
        first, second = generator.random(images) < share, generator.random(images) < other
        comparison = paired(first, second)
        gained, disagree = int((first & ~second).sum()), int((first != second).sum())
        exact = binomtest(gained, disagree)
        interval = exact.proportion_ci(0.95, "exact")
        assert comparison.p == pytest.approx(exact.pvalue)
        assert comparison.low == pytest.approx((2 * interval.low - 1) * disagree / images)
        assert comparison.high == pytest.approx((2 * interval.high - 1) * disagree / images)
        # The interval and the test are one.
        assert comparison.may_be_luck == (comparison.low <= 0 <= comparison.high)
    alike = paired(first, first)
    assert (alike.difference, alike.p, alike.in_short()) == (0, 1, "+0.0, p 1")
    with pytest.raises(ValueError, match="cover the same images, got shapes"):
        paired(first, second[1:])
    # The same two accuracies, luck or none: what decides is on which images they differ.
    truth = np.ones(100, bool)
    few, many = truth.copy(), truth.copy()
    few[:6], many[:40] = False, False
    swapped = truth.copy()
    swapped[6:40] = False
    assert not paired(few, truth).may_be_luck and paired(many, swapped).difference == -0.06
    shifted = truth.copy()
    shifted[50:84] = False
    assert paired(many, shifted).may_be_luck

    out, results = job
    metrics = json.loads((out / "metrics.json").read_text())
    labels, floats = np.array(metrics["labels"]), np.array(metrics["float"]["answers"])
    for name in ("ptq_min_max", "qat_ema"):
        network = metrics["networks"]["w4a4"][name]
        right = np.array(network["answers"]) == labels
        assert right.mean() == pytest.approx(network["device_accuracy"])
        row = network["beside_float"]
        assert row["gained"] - row["lost"] == int(right.sum()) - int((floats == labels).sum())
    page = (out / "report.html").read_text()
    for outcome in results.outcomes:
        pair = findings.beside_float(results, outcome)
        assert pair.points() in page and f"chance: {pair.in_short()}".replace("<", "&lt;") in page
    assert "differences below" not in page


def test_photos_are_called_by_their_files(tmp_path: Path) -> None:
    from PIL import Image

    generator = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        for number in range(10):
            folder = tmp_path / "photos" / kind / ("more" if number > 7 else "")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (8, 8), np.uint8)).save(folder / f"{kind}_{number}.png")
    dataset = data.load(str(tmp_path / "photos"))
    for part in (dataset.train, dataset.validation, dataset.test):
        assert len(part.names) == len(part)
        for name, image, label in zip(part.names, part.images, part.labels, strict=True):
            pixels = np.asarray(Image.open(tmp_path / "photos" / name), np.float32) / 255
            assert np.array_equal(pixels, image[0].numpy()) and name.startswith(dataset.class_names[label])
    two = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    wrong = 1 - dataset.test.labels.numpy()
    results = Results(settings(tmp_path), dataset, two, None, 0.0, 0.0, 0, wrong)  # type: ignore[arg-type]
    object.__setattr__(results.settings, "weight_bits", None)
    results.outcomes = []

    class Chosen:
        device_predictions = wrong

    results.chosen = lambda precision: Chosen()  # type: ignore[assignment, return-value, method-assign]
    listed = findings.mistakes(results)["listed"]
    assert sorted(entry["file"] for entry in listed) == sorted(dataset.test.names)
    mistakes = report.mistakes(results)
    assert {shown["name"] for shown in mistakes["shown"]} == set(dataset.test.names) and mistakes["named"]


@pytest.mark.slow
def test_two_headers_are_part_of_one_program(job: tuple[Path, Results], call: Call, tmp_path: Path) -> None:
    source, _ = job
    headers = []
    for name in ("keywords", "2 faces"):
        out = tmp_path / name
        shutil.copytree(source, out)
        assert call("export", str(out), "--c-array")[0] == 0
        headers += list((out / "w4a4").glob("*.h"))
    assert [header.name for header in headers] == ["keywords_w4a4.h", "model_2_faces_w4a4.h"]
    texts = [header.read_text() for header in headers]
    defined = [set(re.findall(r"#define (\w+)", text)) | set(re.findall(r"(\w+)\[\d+\] = ", text)) for text in texts]
    assert not defined[0] & defined[1] and {"KEYWORDS_W4A4_H_", "keywords_w4a4_data"} <= defined[0]
    assert "#define KEYWORDS_W4A4_CLASS_COUNT 10" in texts[0]
    assert re.search(r'keywords_w4a4_class_names\[10\] = {\n  "0",\n  "1",\n', texts[0])
    assert call("export", str(tmp_path / "keywords"), "--c-array", "--name", "mine")[0] == 0
    own = tmp_path / "keywords" / "w4a4" / "mine.h"
    assert "#ifndef MINE_H_" in own.read_text()
    own.write_text("of others")
    status, _, errors = call("export", str(tmp_path / "keywords"), "--c-array", "--name", "mine")
    assert status == 2 and "already exists and was not written by exactqat" in errors and own.read_text() == "of others"
    assert call("export", str(tmp_path / "keywords"), "--name", "mine")[0] == 2
    assert call("export", str(tmp_path / "2 faces"), "--c-array", "--device", "xnnpack-arm64")[0] == 0
    assert "// One recorded example: LiteRT with XNNPACK on 64-bit ARM returns" in headers[1].read_text()
    for wrong in (["--device", "micro"], ["--c-array", "--device", "phone"]):
        assert call("export", str(tmp_path / "2 faces"), *wrong)[0] == 2
    assert call("export", str(tmp_path / "keywords"), "--c-array", "--name", "1st")[0] == 2
    graph, checkpoint = restored.restore_graph(source / "w4a4" / "checkpoint.pt")
    written = deploy.write_c_array(
        graph, tmp_path / "small-net.h", class_names=['a"b\\', "??/", "ä", *map(str, range(7))]
    )
    text = written.read_text()
    assert "#ifndef SMALL_NET_H_" in text and '"a\\042b\\134"' in text
    assert '"\\077\\077/"' in text and '"\\303\\244"' in text
    with pytest.raises(ValueError, match="one name for each of the first output's 10 values, got 2"):
        deploy.c_array(graph, class_names=["a", "b"])


@pytest.fixture(scope="module")
def small() -> tuple[Any, deploy.Graph, Any]:
    """A network for TFLite-Micro, its graph, and images."""
    pytest.importorskip("tflite_micro")
    torch.manual_seed(0)
    x = torch.rand(96, 1, 8, 8)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )
    model = qat.prepare(network, x[:2], device="micro")
    qat.calibrate(model, [x])
    qat.freeze(model)
    model.eval()
    return model, deploy.lower(model), x


def test_by_default_the_device_that_was_trained_for(small: tuple[Any, deploy.Graph, Any], tmp_path: Path) -> None:
    model, graph, x = small
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    report = deploy.verify(graph, path, model=model, data=x)
    assert report.profile == "micro" and bool(report) and report.training_values > 0
    assert "was not compared" not in str(report) and "micro, this device" in str(report)
    assert "\n" not in repr(report)
    with torch.no_grad():
        weight = next(model.parameters())
        weight[0] *= -1
    try:
        other = deploy.verify(graph, path, model=model, data=x)
        assert not other and not other.equal and other.training_differing > 0 and "not as trained" in str(other)
    finally:
        with torch.no_grad():
            weight[0] *= -1


def test_data_in_every_form_gives_the_same_counts(small: tuple[Any, deploy.Graph, Any], tmp_path: Path) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    model, graph, x = small
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    y = torch.zeros(len(x))
    whole = deploy.verify(graph, path, model=model, data=x)
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    forms = (
        x.numpy(),
        (x, y),
        DataLoader(TensorDataset(x, y), 40),
        (batch for batch in x.split(31)),
        [(part, part[:, 0, 0, 0]) for part in x.split(50)],
        {"input": x},
        tmp_path / "data.npz",
    )
    for form in forms[:5]:
        assert deploy.verify(graph, path, model=model, data=form) == whole
    for form in forms[5:]:
        assert deploy.verify(graph, path, data=form).operators == whole.operators
    shards = [deploy.verify(graph, path, model=model, data=part) for part in x.split(32)]
    assert shards[0] + shards[1] + shards[2] == whole
    with pytest.raises(ValueError, match="add up"):
        shards[0] + deploy.verify(graph, path, device="reference", data=x)
    for nothing in ([], iter(()), x[:0]):
        with pytest.raises(ValueError, match="nothing to compare"):
            deploy.verify(graph, path, data=nothing)
    with pytest.raises(TypeError, match="a loader"):
        deploy.verify(graph, path, data=3)


def test_codes_and_images_mean_the_same_everywhere(small: tuple[Any, deploy.Graph, Any]) -> None:
    _, graph, _ = small
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
    real = (pixels / np.float32(255))[:, None]
    codes = deploy.input_codes(graph, real)
    for same in (pixels, pixels[:, None], pixels[..., None], codes["input"], codes["input"].transpose(0, 3, 1, 2)):
        assert np.array_equal(deploy.input_codes(graph, same)["input"], codes["input"])
    with pytest.raises(ValueError, match=r"must have shape \['batch', 1, 8, 8\], got \[6, 8, 8, 3\]"):
        deploy.input_codes(graph, np.repeat(pixels[..., None], 3, -1))


@pytest.mark.filterwarnings("error")
def test_values_far_beyond_the_range_are_said_once(small: tuple[Any, deploy.Graph, Any], tmp_path: Path) -> None:
    model, graph, x = small
    path = deploy.write_tflite(graph, tmp_path / "model.tflite")
    wrong, y = x.numpy() * 255, np.zeros(len(x), int)
    callers: tuple[Callable[[], Any], ...] = (
        lambda: deploy.input_codes(graph, wrong),
        lambda: deploy.verify(graph, path, data=wrong, batch_size=8),
        lambda: deploy.verify(graph, path, model=model, data=wrong, batch_size=8),
        lambda: deploy.inspect(path, wrong, 4),
        lambda: tune.gate(graph, (wrong, y), minimum=0),
        lambda: tune.sensitivity(graph, (wrong, y)),
    )
    said = set()
    for call in callers:
        with pytest.warns(UserWarning, match="lie far beyond its range on the device") as warned:
            call()
        assert len(warned) == 1 and warned[0].filename == __file__
        said.add(re.sub(r"\d+%", "", str(warned[0].message)))
    assert len(said) == 1


@pytest.mark.parametrize("what", ["scale", "zero_point", "metadata"])
def test_what_a_file_says_of_its_tensors_counts(
    what: str, small: tuple[Any, deploy.Graph, Any], tmp_path: Path
) -> None:
    """The runtime's integers are the graph's whatever the file calls their scale."""
    _, graph, x = small
    tensors, output = dict(graph.tensors), graph.tensors[graph.outputs[0]]
    if what == "metadata":
        ports = replace(graph.signature, outputs=(replace(graph.signature.outputs[0], name="other"),))
        written = replace(graph, ports=ports)
    else:
        grid = output.quantization
        changes: dict[str, Any] = {
            "scale": {"quantization": replace(grid, scale=grid.scale * 2)},
            "zero_point": {"quantization": replace(grid, zero_point=grid.zero_point + 1)},
        }[what]
        written = replace(graph, tensors={**tensors, output.name: replace(output, **changes)})
    report = deploy.verify(graph, deploy.write_tflite(written, tmp_path / "model.tflite"), data=x)
    assert not report and report.declared, report
    assert what.replace("_", " ") in report.declared[0]


def test_weights_of_four_bits_are_packed_where_the_device_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("tflite_micro")
    torch.manual_seed(0)
    x = torch.rand(64, 8, 8, 8)
    network = torch.nn.Sequential(torch.nn.Conv2d(8, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3))
    sizes = {}
    for device in ("micro", "xnnpack-x86"):
        model = qat.prepare(network, x[:2], [qat.Rule(weight_bits=4)], device=device)
        qat.calibrate(model, [x])
        qat.freeze(model)
        graph = deploy.lower(model.eval())
        path = deploy.write_tflite(graph, tmp_path / f"{device}.tflite")
        assert deploy.verify(graph, path, model=model, data=x), device
        plain = deploy.write_tflite(graph, tmp_path / "plain.tflite", packed=False)
        assert deploy.verify(graph, plain, model=model, data=x)
        sizes[device] = (path.stat().st_size, plain.stat().st_size)
        assert deploy.footprint(graph).flash_bytes == path.stat().st_size
    weights = 9 * 32 * (8 + 32)
    assert sizes["micro"][1] - sizes["micro"][0] == pytest.approx(weights / 2, abs=64)
    assert sizes["xnnpack-x86"][0] == sizes["xnnpack-x86"][1]
