# SPDX-License-Identifier: Apache-2.0
"""The kit on a GPU, with PyTorch: training has the CPU's bits where float sums are exact, a frozen network the device's
codes. `make test-gpu` runs it.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import plain_networks  # noqa: E402
from agreement import frozen_differences, leaves, trained  # noqa: E402
from test_frozen import SAMPLE  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from exactqat import qat  # noqa: E402
from exactqat.deploy import PROFILES, lower, simulate, write_tflite  # noqa: E402

CORE = (
    ("convolution", "ema", 8, True),
    ("depthwise", "min_max", 8, True),
    ("residual", "learned", 4, False),
    ("gated", "percentile", 16, False),
    ("pools", "last_batch", 8, True),
    ("two_heads", "learned", 8, True),
    ("attention", "ema", 8, False),
)


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """Products of float32 as the CPU takes them."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, value in zip(backends, before, strict=True):
        backend.allow_tf32 = value


def on_gpu(name: str) -> tuple[Any, tuple[Any, ...]]:
    model, examples = plain_networks.NETWORKS[name]()
    return model.cuda(), tuple(example.cuda() for example in examples)


@pytest.mark.parametrize("case", CORE, ids=lambda case: "-".join(map(str, case)))
def test_training_has_the_bits_of_the_cpu(case: tuple[str, str, int, bool]) -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("needs exactqat[keras]")
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch; torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False\n"
        "from run_one_core import differences\n"
        f"found = differences(*{case}, ('torch', 'torch on a GPU'))\n"
        "assert not found, found\n"
    )
    setting = {**os.environ, "KERAS_BACKEND": "torch", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=setting)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", [name for name in SAMPLE if name != "lstm_time_first"])  # makes its state on the CPU
def test_a_frozen_network_has_the_devices_codes(name: str, bits: int) -> None:
    model, examples = on_gpu(name)
    rule = qat.Rule(weight_bits=bits, activation_bits=bits)
    prepared = trained(model, examples if len(examples) > 1 else examples[0], rule)
    assert all(parameter.is_cuda for parameter in prepared.parameters())
    for profile in PROFILES:
        compared, differing, _ = frozen_differences(prepared, examples, profile)
        assert compared > 100 and not differing, profile


@pytest.mark.parametrize("name", ["ds_cnn", "tiny_vit", "lstm_keywords"])
def test_a_network_that_moves_keeps_its_codes(name: str, tmp_path: Path) -> None:
    """What was trained on a GPU is frozen, saved and run on the CPU, and the other way about."""
    model, examples = on_gpu(name)
    batch = examples if len(examples) > 1 else examples[0]
    prepared = trained(model, batch)
    there = [result.detach().cpu() for result in leaves(prepared(*examples))]
    file = write_tflite(lower(prepared), tmp_path / "there.tflite").read_bytes()
    state = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), dict(prepared.state_dict()))
    moved = copy.deepcopy(prepared).cpu()
    here = tuple(example.cpu() for example in examples)
    for one, other in zip(leaves(moved(*here)), there, strict=True):
        assert torch.equal(one, other)
    assert write_tflite(lower(moved), tmp_path / "here.tflite").read_bytes() == file
    fresh = qat.prepare(plain_networks.NETWORKS[name]()[0], tuple(here) if len(here) > 1 else here[0])
    fresh.load_state_dict(state)
    fresh.eval()
    for one, other in zip(leaves(fresh(*here)), there, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(leaves(fresh.cuda()(*examples)), there, strict=True):
        assert torch.equal(one.cpu(), other)


def test_inputs_of_another_place_are_named() -> None:
    model, examples = on_gpu("ds_cnn")
    prepared = trained(model, examples[0])
    with pytest.raises((RuntimeError, ValueError), match="cuda|cpu|device"):
        prepared(examples[0].cpu())


def test_a_job_trains_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("ai_edge_litert")
    from exactqat.application.job import pipeline
    from exactqat.application.job.settings import Settings

    settings = Settings(tmp_path / "job", epochs_float=2, epochs_qat=1)
    results = pipeline.run(settings, keep_going=True, accelerator=torch.device("cuda"))
    assert results.equal and results.training.differing == 0 < results.training.values


@pytest.mark.parametrize("name", ["siamese", "ds_cnn"])
def test_products_in_tf32_are_none_of_the_devices(name: str) -> None:
    """In 16 bits, whose codes TF32 rounds."""
    model, examples = on_gpu(name)
    prepared = trained(model, examples if len(examples) > 1 else examples[0], qat.Rule(activation_bits=16))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    compared, differing, _ = frozen_differences(prepared, examples, "xnnpack-x86")
    assert compared > 100 and not differing


def test_mixed_precision() -> None:
    model, examples = on_gpu("ds_cnn")
    prepared = qat.prepare(model, examples[0])
    qat.calibrate(prepared, [examples[0]])
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-3)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            loss = prepared(examples[0]).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    qat.freeze(prepared)
    prepared.eval()
    compared, differing, codes = frozen_differences(prepared, examples, "xnnpack-x86")
    assert compared > 100 and not differing
    assert simulate(lower(prepared), codes, "xnnpack-x86")


def steps(model: Any, called: Any, batches: list[tuple[Any, ...]], accumulated: int = 1) -> list[Any]:
    """Losses of training steps, each of as many batches."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    losses = []
    for count, batch in enumerate(batches, 1):
        loss = sum(leaf.float().square().mean() for leaf in leaves(called(*batch)) if leaf.is_floating_point())
        loss.backward()
        losses.append(loss.detach().clone())
        if count % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=accumulated == 1)
    return losses


def assert_same_state(one: Any, other: Any) -> None:
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, name


@pytest.fixture
def deterministic() -> Iterator[None]:
    """PyTorch's own kernels with the same bits in every run."""
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("ds_cnn", "ema"),
        ("ds_cnn", "learned"),
        ("tiny_vit", "ema"),
        ("siamese", "min_max"),
        ("norms", "last_batch"),
        ("squeeze_excite_net", "percentile"),
        ("tied_weights", "learned"),
    ],
)
def test_cuda_graphs_train_the_same_bits(name: str, policy: Any, accumulated: int, deterministic: None) -> None:
    model, examples = on_gpu(name)
    batch = examples if len(examples) > 1 else examples[0]
    prepared = qat.prepare(model, batch, [qat.Rule(ranges=policy)], check=False)
    qat.calibrate(prepared, [batch])
    prepared.train()
    other = copy.deepcopy(prepared)
    before = copy.deepcopy(prepared)
    graphed = qat.graphed(prepared, *examples)
    assert_same_state(prepared, before)
    torch.manual_seed(1)
    batches = [tuple(example + 0.01 * torch.randn_like(example) for example in examples) for _ in range(6)]
    # An epoch's last batch is smaller.
    batches += [tuple(example[:1] for example in examples), batches[0]]
    torch.manual_seed(2)
    losses = steps(prepared, graphed, batches, accumulated)
    assert graphed.replays
    torch.manual_seed(2)
    wanted = steps(other, other, batches, accumulated)
    for position, (one, another) in enumerate(zip(losses, wanted, strict=True)):
        assert torch.equal(one, another), position
    assert_same_state(prepared, other)
    qat.freeze(prepared)
    graphed(*examples)
    assert not graphed.replays
    prepared.eval()
    compared, differing, _ = frozen_differences(prepared, examples, "xnnpack-x86")
    assert compared > 100 and not differing


def test_cuda_graphs_in_autocast_and_with_dropout(deterministic: None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)
    ).cuda()
    examples = (torch.randn(16, 3, 8, 8).cuda(),)
    prepared = qat.prepare(model, examples[0], check=False)
    qat.calibrate(prepared, [examples[0]])
    prepared.train()
    other = copy.deepcopy(prepared)
    with torch.autocast("cuda", torch.bfloat16):
        graphed = qat.graphed(prepared, *examples)
        torch.manual_seed(2)
        losses = steps(prepared, graphed, [examples] * 5)
        assert graphed.replays and len({float(loss) for loss in losses}) == 5
    torch.manual_seed(2)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        wanted = steps(other, other, [examples] * 5)
    assert [float(loss) for loss in losses] == [float(loss) for loss in wanted]
    assert_same_state(prepared, other)
    graphed(*examples)
    assert not graphed.replays  # without autocast


def test_cuda_graphs_see_what_changed() -> None:
    model, examples = on_gpu("ds_cnn")
    prepared = qat.prepare(model, examples[0], check=False)
    qat.calibrate(prepared, [examples[0]])
    with pytest.raises(ValueError, match="in evaluation"):
        qat.graphed(prepared.eval(), *examples)
    prepared.train()
    with pytest.raises(ValueError, match="on one GPU"):
        qat.graphed(prepared, examples[0].cpu())
    graphed = qat.graphed(prepared, *examples)
    graphed(*examples)
    assert graphed.replays
    with torch.no_grad():
        graphed(*examples)
    assert not graphed.replays
    first = next(iter(prepared.parameters()))
    first.requires_grad_(False)
    graphed(*examples)
    assert not graphed.replays
    first.requires_grad_(True)
    graphed(*examples)
    assert graphed.replays
    handle = prepared.register_forward_hook(lambda *arguments: None)
    graphed(*examples)
    assert not graphed.replays
    with pytest.raises(ValueError, match="no hooks"):
        qat.graphed(prepared, *examples)
    handle.remove()
    earlier, later = graphed(*examples), graphed(*examples)
    later.sum().backward()
    with pytest.raises(RuntimeError, match="must come before the next call"):
        earlier.sum().backward()
    first.data = first.data.clone()
    graphed(*examples)
    assert not graphed.replays
