# SPDX-License-Identifier: Apache-2.0
"""Two processes give the result of one: batch norm, ranges, a whole training, and the command under torchrun.

How close: ranges are equal, as a maximum has no rounding. Batch norm adds float64 sums of the shares in
another order, so what belongs to a channel differs by at most one unit in the last place. A training
adds the float32 gradients of two shares, which is another order of the additions inside each gradient. Where a gradient
is almost nothing, Adam, which divides by its size, makes a step of its last bits, and a quantizer now and then decides
otherwise between two codes. So a training is judged as a whole: how far the results are apart, as a share of how far
training moved. It is 1e-5 at most; shares weighted wrongly make it 8e-3 or more, statistics of half a batch much more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert")
pytest.importorskip("typer")
pytest.importorskip("lightning_fabric")

import torch.distributed as dist  # noqa: E402
from one_grid import one_grid  # noqa: E402
from torch import nn  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.application.job import data, models, processes, training  # noqa: E402
from exactqat.application.job.settings import Settings  # noqa: E402
from exactqat.qat.distributed import synchronized  # noqa: E402

COUNT = 2
# How eight images are divided among the two: unevenly, and one of them with nothing.
SHARES = {"uneven": (3, 5), "empty": (8, 0)}


POLICIES = ("ema", "last_batch", "min_max", "percentile", "far_percentile")


def images() -> tuple[Any, Any]:
    """A batch and the gradient that arrives at its normalized form."""
    generator = torch.Generator().manual_seed(1)
    # A mean far from zero: sums of squares would cancel.
    batch = torch.randn(8, 6, 5, 7, generator=generator) + 30.0
    return batch, torch.randn(8, 6, 5, 7, generator=generator)


def normalize(share: slice, dtype: Any = torch.float32) -> dict[str, Any]:
    """One training step of batch norm on some of the images, by this process."""
    module = qat.FusedBatchNorm2d(6, momentum=0.3)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        module.weight.copy_(torch.rand(6, generator=generator) + 0.5)
        module.bias.copy_(torch.randn(6, generator=generator))
    features, gradient = (tensor.to(dtype) for tensor in images())
    features = features[share].clone().requires_grad_()
    with synchronized(module) if dist.is_initialized() else torch.enable_grad():
        y = module(features)
        y.backward(gradient[share])
    return {
        "y": y.detach(), "x": features.grad, "weight": module.weight.grad, "bias": module.bias.grad,
        "mean": module.running_mean, "variance": module.running_var, "batches": module.num_batches_tracked,
    }  # fmt: skip


def observe(policy: str, share: slice) -> tuple[Any, Any, Any]:
    """Three batches seen by a range; the later ones are wider. Those with NaN or infinity in one share say nothing."""
    percentile = 60.0 if policy == "far_percentile" else 99.0
    rule = qat.Rule(ranges=policy.removeprefix("far_"), ema_decay=0.9, percentile=percentile)
    model, observed = one_grid(rule)
    with synchronized(model) if dist.is_initialized() else torch.enable_grad():
        for step in range(3):
            observed.observe((images()[0][share] - 30.0) * (step + 1))
            for image, value in ((0, torch.nan), (7, torch.nan), (3, torch.inf), (7, -torch.inf)):
                broken = images()[0] - 30.0
                broken[image] = value
                observed.observe(broken[share])
    assert policy.endswith("percentile") or observed.batches == 3
    return observed.held()


def fold(share: slice) -> dict[str, Any]:
    """One training step of a convolution with folded batch norm on some of the images, by this process."""
    torch.manual_seed(4)
    network = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4))
    with torch.no_grad():
        network[1].weight.copy_(torch.rand(4) + 0.5)
        network[1].running_var.copy_(torch.rand(4) + 0.5)
    batch = images()[0] - 30.0
    model = qat.prepare(network, batch, [qat.Rule(per_channel=False, fold_batch_norm=True)])
    # A value between two codes would be decided by its last bits.
    model.quantizing = False
    model.train()
    features = batch[share].clone().requires_grad_()
    with synchronized(model) if dist.is_initialized() else torch.enable_grad():
        y = model(features)
        y.backward(images()[1][share, :4, :3, :5])
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    statistics = {name: buffer for name, buffer in model.named_buffers() if name.startswith("1.")}
    return {"y": y.detach(), "x": features.grad, "gradients": gradients, "statistics": statistics}


def dense() -> nn.Module:
    """Dense layers with their kind of batch norm."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def dataset() -> data.Dataset:
    """80 random images: 53 to train on, so that batches of 5 leave a rest, and every share differs in size."""
    generator = np.random.default_rng(0)
    labels = np.arange(80) % 3
    pictures = generator.uniform(0, 0.7, (80, 8, 8)).astype(np.float32) + 0.1 * labels[:, None, None].astype(np.float32)
    return data.from_arrays({"": (pictures, labels)})


def train(kind: str, path: Path, together: processes.Processes, epochs: int = 2) -> tuple[Any, training.History]:
    """Two epochs: float, dense, or quantized with the second one frozen."""
    torch.manual_seed(1)
    source = dataset()
    model = dense() if kind == "dense" else models.new_model("small_mobilenet", (1, 8, 8), 3)
    groups = [{"params": list(model.parameters()), "lr": 1e-3}]
    if kind in QUANTIZED:
        model = qat.prepare(model, source.train.images[:2], [QUANTIZED[kind]])
        qat.calibrate(model, [source.train.images[:]])
        groups = [
            {"params": model.other_parameters(), "lr": 1e-3},
            {"params": model.range_parameters(), "lr": 1e-3},
        ]
    if epochs == 0:
        return dict(model.state_dict()), training.History()
    history = training.train(
        model, groups, source.train, source.validation, 2, kind, path / f"{kind}.pt",
        training.Manner(Settings(path, batch_size=5)), freeze_at=1 if kind in QUANTIZED else None, processes=together,
    )  # fmt: skip
    return {name: entry for name, entry in model.state_dict().items() if isinstance(entry, torch.Tensor)}, history


QUANTIZED = {"ema": qat.Rule(), "learned": qat.Rule(ranges="learned")}
TRAININGS = ("float", "dense", *QUANTIZED)
TOLERANCE = 1e-3


def work(rank: int, folder: str) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    path = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=COUNT)
    found: dict[str, Any] = {}
    for name, (first, second) in SHARES.items():
        share = slice(0, first) if rank == 0 else slice(first, first + second)
        found[name] = normalize(share)
        found[f"{name} bfloat16"] = normalize(share, torch.bfloat16)
        found[f"{name} folded"] = fold(share)
        for policy in POLICIES:
            found[f"{name} {policy}"] = observe(policy, share)
    try:
        prepared = qat.prepare(dense(), torch.zeros(2, 1, 8, 8), [qat.Rule(fold_batch_norm=True)]).train()
        prepared(torch.rand(4, 1, 8, 8))
    except RuntimeError as error:
        found["not synchronized"] = str(error)
    # As torchrun does; the group is there.
    os.environ |= {"WORLD_SIZE": str(COUNT), "LOCAL_WORLD_SIZE": str(COUNT), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    with processes.joined(torch.device("cpu")) as (together, device):
        assert (together.rank, together.count, device.type) == (rank, COUNT, "cpu")
        for kind in TRAININGS:
            state, history = train(kind, path / f"rank{rank}", together)
            found[kind] = (state, history.loss, history.validation_accuracy)
    torch.save(found, path / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What both processes found."""
    folder = tmp_path_factory.mktemp("distributed")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_distributed as t; "
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", f"{code}t.work({rank}, {str(folder)!r})"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(COUNT)
    ]  # fmt: skip
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(COUNT)]


def units_apart(first: Any, second: Any) -> int:
    """The largest distance in units in the last place."""
    codes = [
        torch.where(bits < 0, -(2**31) - bits, bits) for bits in (t.view(torch.int32).long() for t in (first, second))
    ]
    return int((codes[0] - codes[1]).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
def test_batch_norm_over_two_shares_is_batch_norm_over_the_whole(
    ranks: tuple[Path, list[dict[str, Any]]], shares: str
) -> None:
    whole = normalize(slice(None), torch.float32)
    parts = [found[shares] for found in ranks[1]]
    for name in ("y", "x"):
        # Where the last bit of a coefficient differs all elements of its channel do; in units of the largest of them.
        largest = float(whole[name].abs().max())
        together = torch.cat([part[name] for part in parts])
        torch.testing.assert_close(together, whole[name], rtol=0, atol=2**-22 * largest)
    for name in ("mean", "variance"):
        assert torch.equal(parts[0][name], parts[1][name])
        assert units_apart(parts[0][name], whole[name]) <= 1, name
    for name in ("weight", "bias"):
        # Each share rounds its own sum; the bound is in units of the larger one.
        largest = max(part[name].abs().max() for part in parts)
        torch.testing.assert_close(parts[0][name] + parts[1][name], whole[name], rtol=0, atol=2**-22 * float(largest))
    assert parts[0]["batches"] == whole["batches"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
def test_elements_of_16_bits_are_those_of_float32_rounded_once(
    ranks: tuple[Path, list[dict[str, Any]]], shares: str
) -> None:
    whole = normalize(slice(None), torch.bfloat16)
    parts = [found[f"{shares} bfloat16"] for found in ranks[1]]
    for name in ("y", "x"):
        together = torch.cat([part[name] for part in parts])
        assert together.dtype == torch.bfloat16
        # A coefficient's last bit in float32 turns a rounding to 16 bits over once in a thousand times.
        assert (together != whole[name]).float().mean() <= 0.01, name


@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
def test_folded_batch_norm_over_two_shares_is_that_over_the_whole(
    ranks: tuple[Path, list[dict[str, Any]]], shares: str
) -> None:
    whole, parts = fold(slice(None)), [found[f"{shares} folded"] for found in ranks[1]]
    for name in ("y", "x"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), whole[name], rtol=1e-5, atol=1e-5)
    assert {"0.weight", "0.bias", "1.weight", "1.bias"} == set(whole["gradients"])
    for name, gradient in whole["gradients"].items():
        total = sum(part["gradients"][name] for part in parts)
        # The convolution's bias has none: batch norm takes it away.
        largest = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(total, gradient, rtol=1e-5, atol=1e-5 * largest)
    for name, statistic in whole["statistics"].items():
        assert torch.equal(parts[0]["statistics"][name], parts[1]["statistics"][name]), name
        torch.testing.assert_close(parts[0]["statistics"][name], statistic, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_folded_batch_norm_refuses_to_train_in_several_processes_that_are_not_synchronized(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert all("Rule.fold_batch_norm" in found["not synchronized"] for found in ranks[1])


@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("policy", POLICIES)
def test_ranges_are_those_of_all_data(ranks: tuple[Path, list[dict[str, Any]]], shares: str, policy: str) -> None:
    whole = observe(policy, slice(None))
    for found in ranks[1]:
        assert all(torch.equal(a, b) for a, b in zip(found[f"{shares} {policy}"], whole, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAININGS)
def test_a_training_by_two_processes_is_that_of_one(
    ranks: tuple[Path, list[dict[str, Any]]], kind: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    expected, history = train(kind, tmp_path, processes.ALONE)
    (first, loss, accuracy), (second, *_) = (found[kind] for found in ranks[1])
    # Both hold the same bits: nothing may drift apart.
    assert all(torch.equal(entry, second[name]) for name, entry in first.items())
    np.testing.assert_allclose(loss, history.loss, rtol=TOLERANCE)
    start, _ = train(kind, tmp_path / "start", processes.ALONE, epochs=0)
    apart = moved = 0.0
    for name, entry in expected.items():
        if entry.is_floating_point():
            apart += float((first[name].double() - entry.double()).square().sum())
            moved += float((entry.double() - start[name].double()).square().sum())
    assert (apart / moved) ** 0.5 < TOLERANCE


@pytest.mark.slow
def test_only_the_first_process_writes(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    assert sorted(path.name for path in (ranks[0] / "rank0").iterdir()) == sorted(f"{kind}.pt" for kind in TRAININGS)
    assert not (ranks[0] / "rank1").exists()


def test_classes_are_restored() -> None:
    model = dense()
    before = [type(module) for module in model.modules()]
    with synchronized(model):
        assert [type(module) for module in model.modules()] != before
    assert [type(module) for module in model.modules()] == before
    with (
        pytest.raises(ValueError, match="track_running_stats must be True"),
        synchronized(nn.BatchNorm2d(2, track_running_stats=False)),
    ):
        pass


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    source = dataset()
    np.savez(tmp_path / "data.npz", x=source.train.images.numpy(), y=source.train.labels.numpy())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(COUNT), "-m",
        "exactqat.cli", "train", "--data", "data.npz", "--out", "out", "--epochs-float", "1", "--epochs-qat", "1",
        "--weight-bits", "4", "--activation-bits", "4", "--batch-size", "8", "--keep-going",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all are equal" in done.stdout
    assert done.stdout.count("To compare again at any time") == 1  # one process speaks
    assert "2 processes" in done.stdout
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["values_differing"] == 0
    assert (tmp_path / "out" / "w4a4" / "model.tflite").exists()
    assert not list(tmp_path.rglob("*.tmp"))
