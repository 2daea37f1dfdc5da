# SPDX-License-Identifier: Apache-2.0
"""Weights to begin with: what fits is taken and the rest is reported; files are data, whoever wrote them."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

import fuzz_jobs  # noqa: E402

from exactqat import cli  # noqa: E402
from exactqat.application.job import data, models, pipeline, store, training, weights  # noqa: E402
from exactqat.application.job.results import Progress  # noqa: E402
from exactqat.application.job.settings import METHODS, Settings  # noqa: E402
from exactqat.application.report import metrics  # noqa: E402

SHAPE, CLASSES = (1, 8, 8), 3


def network(classes: int = CLASSES, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return models.network("small_mobilenet", SHAPE, classes)


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def put(content: bytes, tmp_path: Path, model: Any = None) -> tuple[Any, weights.Fit]:
    path = tmp_path / "given.pt"
    path.write_bytes(content)
    model = network(seed=1) if model is None else model
    return model, weights.put(model, path)


def same(one: Any, other: Any) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(entry, theirs[name]) for name, entry in one.state_dict().items())


@pytest.mark.parametrize(
    ("wrapped", "prefix"),
    [
        (lambda state: state, ""),
        (lambda state: {"state_dict": state, "epoch": 3, "loss": torch.tensor(0.5)}, ""),
        (lambda state: {"model": state, "optimizer": {"state": {}, "param_groups": [{"lr": 1.0}]}}, ""),
        (lambda state: {"model_state_dict": {f"module.{name}": entry for name, entry in state.items()}}, "module."),
        (lambda state: {f"module._orig_mod.{name}": entry for name, entry in state.items()}, "module._orig_mod."),
        (lambda state: {f"model.{name}": entry for name, entry in state.items()} | {"teacher.x": torch.zeros(1)},
         "model."),
        (lambda state: {name: entry.double() if entry.is_floating_point() else entry.int()
                        for name, entry in state.items()}, ""),
        (lambda state: {name: torch.nn.Parameter(entry) if entry.is_floating_point() else entry
                        for name, entry in state.items()}, ""),
    ],
)  # fmt: skip
def test_a_state_dict_fits_however_it_is_wrapped(tmp_path: Path, wrapped: Callable[[Any], Any], prefix: str) -> None:
    source = network()
    model, fit = put(saved(wrapped(source.state_dict())), tmp_path)
    assert same(model, source) and "(100% of its numbers" in fit.sentences[0]
    assert (f"their names without {prefix!r}" in fit.sentences[0]) == bool(prefix)
    assert fit.sentences[1:] == (["  not in this network, ignored: teacher.x"] if prefix == "model." else [])


def test_safetensors_fit(tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch").save
    source = network()
    model, fit = put(save(source.state_dict()), tmp_path)
    assert same(model, source) and "100%" in fit.sentences[0]
    for content in (save(source.state_dict())[:-3], save(source.state_dict())[:200]):
        with pytest.raises(ValueError, match="given.pt cannot be read as weights"):
            put(content, tmp_path)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """The usual case: a network of other classes, one layer gone and one too many."""
    source, before = network(classes=10), network(seed=1)
    state = source.state_dict()
    del state["stem.1.weight"]
    state["more.\x1b[31mred"] = torch.zeros(3)
    state["stem.1.bias"] = torch.zeros(16, dtype=torch.int64)
    model, fit = put(saved(state), tmp_path)
    total = len(model.state_dict())
    lines = "\n".join(fit.sentences)
    assert f"{total - 4} of the network's {total} tensors match (98" in lines
    assert "stem.1.bias (float32 [16] in the network, int64 [16] in the file)" in lines
    assert "missing from the file, initialized as in a new network: stem.1.weight" in lines
    assert "classifier.weight (float32 [3, 48] in the network, float32 [10, 48] in the file)" in lines
    assert "not in this network, ignored: more.\\x1b[31mred" in lines and "100%" not in lines
    own = model.state_dict()
    assert torch.equal(own["stem.0.weight"], state["stem.0.weight"])
    assert torch.equal(own["classifier.weight"], before.state_dict()["classifier.weight"])


def spoiled(name: str, change: Callable[[Any], Any]) -> bytes:
    state = network().state_dict()
    state[name] = change(state[name].clone())
    return saved(state)


def npz(save: Callable[..., None] = np.savez) -> bytes:
    buffer = io.BytesIO()
    save(buffer, weight=np.zeros(3))
    return buffer.getvalue()


def program() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), buffer)
    return buffer.getvalue()


def wider() -> dict[str, torch.Tensor]:
    """Twice as many channels everywhere: counts of batches fit, and nothing else."""
    state = network().state_dict()
    return {name: torch.cat([entry, entry]) if entry.dim() else entry for name, entry in state.items()}


HOSTILE = [
    (lambda canary: b"", "neither a state dict"),
    (lambda canary: b"no weights", "neither a state dict written by torch.save"),
    (lambda canary: pickle.dumps(fuzz_jobs.Touch(canary)), "neither a state dict"),
    (lambda canary: saved(fuzz_jobs.Touch(canary)), "code that a file names is not run"),
    (lambda canary: saved(network()), "save model.state_dict()"),
    (lambda canary: saved(network().state_dict(), _use_new_zipfile_serialization=False), "(since PyTorch 1.6)"),
    (lambda canary: saved({"state_dict": {"x": fuzz_jobs.Touch(canary)}}), "code that a file names is not run"),
    (lambda canary: saved([1, 2]), "it contains a list where a state dict is expected"),
    (lambda canary: saved({"a": 1}), "it contains no named tensors; it has a"),
    (lambda canary: saved({}), "it has nothing"),
    (lambda canary: saved({"other.weight": torch.zeros(3)}), "no weights of this network: its tensors are other"),
    (lambda canary: saved({"stem.0.weight": torch.zeros(3)}), "its tensors are stem.0.weight float32 [3]; the"),
    (lambda canary: saved(wider()), "contains no weights of this network: its tensors are stem.0.weight float32 [32,"),
    (lambda canary: saved(network().state_dict())[:-500], "cannot be read as weights"),
    (lambda canary: npz(), "it is an archive, but not one written by torch.save"),
    (lambda canary: npz(np.savez_compressed), "it is an archive, but not one written by torch.save"),
    (lambda canary: program(), "it is a TorchScript program; save its state_dict() "),
    (lambda canary: b"PK\x03\x04", "cannot be read as weights"),
    (lambda canary: (2**63).to_bytes(8, "little") + b"{}", "neither"),
    (lambda canary: spoiled("stem.0.weight", lambda w: w * float("nan")), "stem.0.weight contains NaN or infinity"),
    (lambda canary: spoiled("stem.0.weight", lambda w: w.double() + 1e300), "stem.0.weight contains NaN or infinity"),
    (lambda canary: spoiled("stem.1.running_var", lambda v: v - 5), "stem.1.running_var contains negative variances"),
    (lambda canary: spoiled("stem.0.weight", lambda w: w.to_sparse()), "stem.0.weight is not a dense tensor"),
    (lambda canary: spoiled("stem.0.weight", lambda w: w.to("meta")), "stem.0.weight is not a dense tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), HOSTILE)
def test_hostile_and_damaged_files_are_refused(tmp_path: Path, content: Callable[[Path], bytes], message: str) -> None:
    model = network(seed=1)
    before = network(seed=1)
    with pytest.raises(ValueError, match="given.pt") as refusal:
        put(content(tmp_path / "canary"), tmp_path, model)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
    assert same(model, before) and not (tmp_path / "canary").exists()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="is not a regular file"):
            weights.put(network(), tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nowhere.pt does not exist"):
        weights.put(network(), tmp_path / "nowhere.pt")


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_random_damage_is_refused_or_tells_what_fitted(tmp_path: Path, kind: str) -> None:
    """What is neither refused nor a whole set of finite numbers would be a loss; a sample, EXACTQAT_FUZZ for more."""
    choose = random.Random(7)
    if kind == "torch":
        content = saved(network().state_dict())
    else:
        content = pytest.importorskip("safetensors.torch").save(network().state_dict())
    refused = 0
    for _ in range(int(os.environ.get("EXACTQAT_FUZZ", 60))):
        damaged = bytearray(content)
        where = choose.randrange(len(damaged))
        match choose.choice(["flip", "zero", "cut", "insert", "head"]):
            case "flip":
                damaged[where] ^= 1 << choose.randrange(8)
            case "zero":
                damaged[where : where + 64] = bytes(len(damaged[where : where + 64]))
            case "cut":
                del damaged[where:]
            case "insert":
                damaged[where:where] = choose.randbytes(8)
            case _:
                damaged[choose.randrange(400)] = choose.randrange(256)
        model = network(seed=1)
        try:
            _, fit = put(bytes(damaged), tmp_path, model)
        except ValueError as error:
            refused += 1
            assert "given.pt" in str(error)
        else:
            assert fit.sentences and all(torch.isfinite(entry).all() for entry in model.state_dict().values())
    assert refused > 10


def test_members_of_archives_that_are_forged(tmp_path: Path) -> None:
    """A pickle with the right checksums that runs a command, under the state's own name."""
    canary = tmp_path / "canary"
    with zipfile.ZipFile(io.BytesIO(saved(network().state_dict()))) as source:
        members = {name: source.read(name) for name in source.namelist()}
    for name in ("archive/data.pkl", "archive/constants.pkl", "archive/code/__torch__.py"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as target:
            for member, content in (members | {name: pickle.dumps(fuzz_jobs.Touch(canary), protocol=2)}).items():
                target.writestr(member, content)
        try:
            put(buffer.getvalue(), tmp_path)
        except ValueError as error:
            assert "given.pt" in str(error)
        assert not canary.exists()


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, data.Dataset]:
    """Settings of a job with weights, of one network, and its data."""
    kept = ("ptq_min_max", "qat_ema")
    monkeypatch.setattr(
        "exactqat.application.job.settings.METHODS", tuple(method for method in METHODS if method.name in kept)
    )
    torch.set_num_threads(1)
    x, y = fuzz_jobs.patterns(30)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    state = network().state_dict()
    del state["classifier.bias"]
    torch.save(state, tmp_path / "given.pt")
    settings = Settings(
        tmp_path / "job",
        epochs_float=2,
        epochs_qat=1,
        data=str(tmp_path / "data.npz"),
        weight_bits=4,
        weights=str(tmp_path / "given.pt"),
    )
    return settings, data.load(settings.data)


@pytest.mark.slow
def test_a_job_with_weights_begins_with_them_and_goes_on_without(
    begun: tuple[Settings, data.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, dataset = begun
    given = Path(settings.weights or "")
    said: list[str] = []
    progress = Progress(say=said.append)
    begins: list[Any] = []
    train = training.train

    def watched(model: Any, groups: Any, *arguments: Any, **options: Any) -> Any:
        if arguments[3] == "float training":
            begins.append((model.state_dict()["stem.0.weight"].clone(), groups[0]["lr"]))
            if len(begins) == 1:
                raise KeyboardInterrupt
        return train(model, groups, *arguments, **options)

    monkeypatch.setattr(training, "train", watched)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(settings, progress, dataset)
    assert torch.equal(begins[0][0], network().state_dict()["stem.0.weight"])
    assert begins[0][1] == training.GIVEN_WEIGHTS_RATE < training.FLOAT_RATE
    assert "tensors match" in said[0] and "classifier.bias" in said[1]
    content = given.read_bytes()
    given.write_bytes(saved(network(seed=5).state_dict()))
    with pytest.raises(ValueError, match="--weights .*given.pt is not the file the job in .* started from"):
        pipeline.run(settings, progress, dataset, resume=True, keep_going=True)
    given.write_bytes(content)
    results = pipeline.run(settings, progress, dataset, resume=True, keep_going=True)
    metrics.write_metrics(results)
    stored = json.loads((settings.out / "metrics.json").read_text())["weights"]
    assert "classifier.bias" in stored["sentences"][1]
    # From here on the job has all that it needs.
    given.unlink()
    again = pipeline.run(store.stored_settings(settings.out), resume=True)
    assert again.fit == results.fit and again.float_test_accuracy == results.float_test_accuracy
    job = json.loads((settings.out / "job.json").read_text())
    for wild in ([], 5, {"digest": "x"}, stored | {"sentences": [5]}, stored | {"digest": 5}):
        (settings.out / "job.json").write_text(json.dumps(job | {"weights": wild}))
        with pytest.raises(ValueError, match="job.json: weights"):
            pipeline.run(store.stored_settings(settings.out), resume=True)


def test_the_command_refuses_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "given.pt").write_bytes(pickle.dumps(fuzz_jobs.Touch(tmp_path / "canary")))
    for name, message in (("given.pt", "neither a state dict"), ("nowhere.pt", "nowhere.pt does not exist")):
        arguments = ["train", "--out", str(tmp_path / "job"), "--weights", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", ["exactqat", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 2
        errors = capfd.readouterr().err
        assert message in errors and "Traceback" not in errors
    assert not (tmp_path / "job").exists() and not (tmp_path / "canary").exists()
