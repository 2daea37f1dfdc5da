# SPDX-License-Identifier: Apache-2.0
"""A prepared model in two processes: what a user reads, what `fully_shard` divides, how often they exchange.

How close two processes come to one is in `test_distributed`.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from exactqat import deploy, qat  # noqa: E402
from exactqat.qat.distributed import synchronized  # noqa: E402
from exactqat.tune import Gate  # noqa: E402
from exactqat.tune.callbacks._modules import Checkpoint  # noqa: E402

COUNT = 2
POLICIES = ("ema", "learned")
WRAPPERS = ("DistributedDataParallel", "fully_shard", "fully_shard around it")


def conv_norm(inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """MobileNetV2's."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.widen = conv_norm(inputs, wide) if expansion > 1 else None
        self.filter, self.narrow = conv_norm(wide, wide, 3, stride, wide), conv_norm(wide, outputs)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.widen is None else F.relu6(self.widen(x))
        y = self.narrow(F.relu6(self.filter(y)))
        return x + y if self.adds else y


def mobilenet_v2(blocks: tuple[tuple[int, int, int, int], ...]) -> nn.Module:
    """blocks: expansion, channels, how many, stride of the first."""
    layers, channels = [conv_norm(3, 8, 3, 2), nn.ReLU6()], 8
    for expansion, outputs, count, stride in blocks:
        for position in range(count):
            layers.append(Block(channels, outputs, 1 if position else stride, expansion))
            channels = outputs
    return nn.Sequential(*layers, conv_norm(channels, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5))


SMALL = ((1, 8, 1, 1), (2, 8, 2, 2))
WHOLE = ((1, 4, 1, 1), (6, 6, 2, 2), (6, 8, 3, 2), (6, 16, 4, 2), (6, 24, 3, 1), (6, 40, 3, 2), (6, 80, 1, 1))


def examples(seed: int, count: int = 8) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def prepared(ranges: str = "ema") -> Any:
    torch.manual_seed(0)
    return qat.prepare(mobilenet_v2(SMALL), examples(0), [qat.Rule(ranges=ranges)], check=False)


def steps(model: nn.Module, called: nn.Module, count: int = 2) -> None:
    """Training on this process's half of the examples."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(count):
        optimizer.zero_grad()
        share = examples(step + 1)[dist.get_rank() :: COUNT] if dist.is_initialized() else examples(step + 1)
        called(share).square().mean().backward()
        optimizer.step()


def messages_of(function: Any) -> list[str]:
    """What a user reads: warnings about several processes, or the error."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        try:
            function()
        except (RuntimeError, TypeError, ValueError) as error:
            return [str(error)]
    return [str(record.message) for record in records if "processes" in str(record.message)]


def unsynchronized() -> dict[str, list[str]]:
    model = prepared()
    calibration = messages_of(lambda: qat.calibrate(model, [examples(0)]))
    replica = DistributedDataParallel(model, broadcast_buffers=False)
    training = messages_of(lambda: steps(model, replica))
    again = prepared()
    qat.calibrate(again, [examples(0)])
    with synchronized(again):
        inside = messages_of(lambda: steps(again, DistributedDataParallel(again, broadcast_buffers=False)))
    return {"calibration": calibration, "training": training, "synchronized": inside}


def frozen_in_the_same_wrapper(find_unused_parameters: bool) -> tuple[list[str], bool]:
    """What a user reads, and whether the learned ranges stay."""
    model = prepared("learned")
    with synchronized(model):
        qat.calibrate(model, [examples(0)])
        options = {"broadcast_buffers": False, "find_unused_parameters": find_unused_parameters}
        replica = DistributedDataParallel(model, **options)
        steps(model, replica)
        qat.freeze(model)
        before = [end.clone() for end in model.range_parameters()]
        words = messages_of(lambda: steps(model, replica))
        return words, all(map(torch.equal, before, model.range_parameters()))


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if wrapper == "DistributedDataParallel":
        return DistributedDataParallel(model, broadcast_buffers=False)
    mesh, called = init_device_mesh("cpu", (COUNT,)), model
    if wrapper == "fully_shard around it":
        called = nn.Sequential(model)
    fully_shard(called, mesh=mesh)
    return called


def whole_flow(ranges: str, wrapper: str, path: Path) -> dict[str, Any]:
    """prepare, divide, calibrate, train, evaluate, freeze, train, lower."""
    model = prepared(ranges)
    with synchronized(model):
        called = wrapped(model, wrapper)
        qat.calibrate(model, [examples(0)])
        steps(model, called)
        with torch.no_grad():  # after which `fully_shard` leaves parameters whole
            called.eval()(examples(9))
        words = []
        if wrapper == "fully_shard around it":
            words = messages_of(lambda: qat.freeze(model))
            called.reshard()
        qat.freeze(model)
        steps(model, wrapped(model, wrapper) if wrapper == "DistributedDataParallel" else called)
        network = deploy.lower(model)
    deploy.write_tflite(network, path)
    with torch.no_grad():
        answers = called.eval()(examples(9))
    stored = {name: value for name, (_, value) in model.stored_tensors(examples(9)).items()}
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    state = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    return {"file": path.read_bytes(), "answers": answers, "stored": stored, "state": state, "messages": words}


def not_divided() -> list[list[str]]:
    """What a user reads of an inner module, of `prepare` after `fully_shard`, and of a checkpoint that only the first
    process would write."""
    from torch.distributed.fsdp import fully_shard

    model = prepared()
    inner = messages_of(lambda: fully_shard(model.get_submodule("0.0")))
    sharded = wrapped(conv_norm(3, 4), "fully_shard")
    early = messages_of(lambda: qat.prepare(sharded, torch.zeros(2, 3, 8, 8)))
    wrapped(model, "fully_shard")
    checkpoint = Checkpoint(Gate((examples(0).numpy(), np.zeros(8, np.int64))))
    return [inner, early, messages_of(lambda: checkpoint._score(model, 0, dist.get_rank() == 0, lambda value: value))]


def exchanges() -> tuple[int, int]:
    """Those of one training step of MobileNetV2: forward, and in all."""
    torch.manual_seed(0)
    model = qat.prepare(mobilenet_v2(WHOLE), torch.rand(2, 3, 32, 32), check=False).train()
    assert len([module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]) == 52
    calls = []

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    collectives = (
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "broadcast",
        "barrier",
    )
    with pytest.MonkeyPatch.context() as patch, synchronized(model):
        for name in collectives:
            patch.setattr(dist, name, counted(getattr(dist, name)))
        answers = model(torch.rand(2, 3, 32, 32))
        forward = len(calls)
        answers.square().mean().backward()
    return forward, len(calls)


def work(rank: int, folder: str) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=COUNT)
    results: dict[str, Any] = {"unsynchronized": unsynchronized()}
    results["same wrapper"] = [frozen_in_the_same_wrapper(unused) for unused in (False, True)]
    results["not divided"], results["exchanges"] = not_divided(), exchanges()
    for ranges in POLICIES:
        for wrapper in WRAPPERS:
            results[f"{ranges} {wrapper}"] = whole_flow(ranges, wrapper, Path(folder) / f"{rank}.tflite")
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes results."""
    folder = tmp_path_factory.mktemp("processes")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_several_processes as t; "
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", f"{code}t.work({rank}, {str(folder)!r})"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(COUNT)
    ]  # fmt: skip
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(COUNT)]


@pytest.mark.slow
def test_training_that_is_not_synchronized_warns_once(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        words = results["unsynchronized"]
        assert words["calibration"] == words["synchronized"] == []
        (sentence,) = words["training"]
        assert "with exactqat.qat.distributed.synchronized(model)" in sentence


@pytest.mark.slow
def test_a_wrapper_from_before_freeze_is_refused_where_ranges_were_learned(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        ((sentence,), _), (nothing, stay) = results["same wrapper"]
        assert "wrap the model again after freeze" in sentence and "find_unused_parameters=True" in sentence
        assert nothing == [] and stay


@pytest.mark.slow
@pytest.mark.parametrize("ranges", POLICIES)
def test_fully_shard_has_the_bits_of_distributed_data_parallel(ranks: list[dict[str, Any]], ranges: str) -> None:
    expected = ranks[0][f"{ranges} DistributedDataParallel"]
    assert expected["messages"] == []
    for results in ranks:
        for wrapper in WRAPPERS:
            result = results[f"{ranges} {wrapper}"]
            assert result["file"] == expected["file"], wrapper
            assert torch.equal(result["answers"], expected["answers"])
            for values in ("stored", "state"):
                assert result[values].keys() == expected[values].keys()
                assert all(torch.equal(value, expected[values][name]) for name, value in result[values].items())
        (sentence,) = results[f"{ranges} fully_shard around it"]["messages"]
        assert "call reshard() of that module first" in sentence
    # What is divided is loaded by a model in one process.
    model = prepared(ranges)
    model.load_state_dict({**model.state_dict(), **ranks[1][f"{ranges} fully_shard"]["state"]})


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        (inner,), (early,), (checkpoint,) = results["not divided"]
        assert "prepare it first and call fully_shard on the prepared model" in early
        assert "fully_shard takes the whole prepared model" in inner
        assert "call the gate in every process" in checkpoint


@pytest.mark.slow
def test_a_batch_norm_exchanges_once_forward_and_once_backward(ranks: list[dict[str, Any]]) -> None:
    # MobileNetV2 has 52 batch norms, whose exchanges bring the ranges of their layers, and 12 other ranges: of the
    # input, of ten sums and of the answers.
    assert [results["exchanges"] for results in ranks] == [(52 + 12, 52 + 12 + 52)] * COUNT


@pytest.mark.parametrize("ranges", POLICIES)
def test_one_process_trains_in_the_context_as_outside(ranges: str) -> None:
    states = []
    for inside in (True, False):
        model = prepared(ranges)
        with synchronized(model) if inside else nullcontext():
            qat.calibrate(model, [examples(0)])
            steps(model, model)
        states.append({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_sync_batch_norm_says_what_happens_to_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4))
    with pytest.warns(UserWarning, match="SyncBatchNorm trains like BatchNorm.*distributed.synchronized"):
        qat.prepare(model, examples(0))
    with pytest.raises(TypeError, match="cannot be replaced: .*distributed.synchronized.* as SyncBatchNorm would"):
        nn.SyncBatchNorm.convert_sync_batchnorm(prepared())


def test_learned_ranges_have_one_dimension_and_scalars_are_loaded() -> None:
    model = prepared("learned")
    qat.calibrate(model, [examples(0)])
    assert all(end.dim() == 1 for end in model.range_parameters())
    state = model.state_dict()
    scalars = {name: state[name].reshape(()) for name in state if name.endswith("imum") and state[name].numel() == 1}
    again = prepared("learned")
    again.load_state_dict(state | scalars)
    assert all(map(torch.equal, model.range_parameters(), again.range_parameters()))
    others = prepared("ema")  # whose ends are buffers
    others.load_state_dict(state, strict=False)
    for name, grid in model._state.grids().items():
        assert [end.item() for end in grid.held()] == [end.item() for end in others._state.grid(name).held()]
