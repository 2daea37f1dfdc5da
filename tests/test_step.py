# SPDX-License-Identifier: Apache-2.0
"""The benchmark of training steps runs, and compares networks that do the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

import exactqat as eq  # noqa: E402
from exactqat.job import models  # noqa: E402


@pytest.fixture(scope="module")
def step() -> Any:
    path = Path(__file__).parent.parent / "bench" / "step.py"
    spec = importlib.util.spec_from_file_location("step", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_repeat_of_a_tiny_network(
    step: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    threads = torch.get_num_threads(), eq.get_num_threads()
    try:
        step.main(["--networks", "small_mobilenet", "--repeats", "1"])
    finally:
        torch.set_num_threads(threads[0])
        eq.set_num_threads(threads[1])
    shown = capsys.readouterr().out
    for name in ("torch float", "exactqat float", "exactqat QAT, ema", "exactqat QAT, learned"):
        assert name in shown


@pytest.mark.parametrize("network", ["small_mobilenet", "mobilenet_v2", "dscnn"])
def test_the_networks_compared_have_the_same_sizes(step: Any, network: str) -> None:
    shape, _, classes = step.TASKS[network]
    ours = models.network(network, shape, classes).eval()
    plain = step.of_torch_modules(ours, shape).eval()
    assert not any(isinstance(module, step.qat.Conv2d) for module in plain.modules())
    sizes: list[list[Any]] = [[], []]
    for found, model in zip(sizes, (ours, plain), strict=True):
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(lambda module, x, y, found=found: found.append(tuple(y.shape)))
        model(torch.randn(1, *shape))
    assert sizes[0] == sizes[1] and len(sizes[0]) > 5


def test_torch_fuses_every_convolution(step: Any) -> None:
    pytest.importorskip("torch.ao.quantization")
    shape, _, classes = step.TASKS["small_mobilenet"]
    prepared = step.torch_qat(step.of_torch_modules(models.network("small_mobilenet", shape, classes), shape))
    kinds = {type(module).__name__ for module in prepared.modules()}
    assert {"ConvBnReLU2d", "ConvBn2d"} <= kinds and "BatchNorm2d" in kinds
    assert not any(type(module) is torch.nn.Conv2d for module in prepared.modules())
