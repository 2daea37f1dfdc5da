# SPDX-License-Identifier: Apache-2.0
"""PyTorch's GPU rows without a GPU: the same functions run the interpreted kernels on CPU tensors."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from conftest import DEVICES, as_array

torch = pytest.importorskip("torch")
if "triton-interpreter" not in DEVICES:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import exactqat as eq  # noqa: E402
import exactqat.operators.torch as frontend  # noqa: E402
from exactqat.operators import OPERATORS, Operator  # noqa: E402

RANDOM = np.random.Generator(np.random.PCG64(3))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """CPU tensors take the way of CUDA tensors; the names of the operators that did."""
    names: list[str] = []

    def row(op: Operator) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            names.append(op.name)
            values = (tuple(v) if isinstance(v, list) else v for v in arguments[len(op.operands) :])
            attributes = tuple(zip(op.attributes, values, strict=True))
            results = frontend._on_gpu(op, arguments[: len(op.operands)], attributes)
            return results[0] if len(results) == 1 else tuple(results)

        return run

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    # Known calls on CPU tensors would not come by here.
    monkeypatch.setattr(frontend, "_shortcut", lambda op, **options: lambda *call: None)
    for op in OPERATORS.values():
        monkeypatch.setattr(op, "shortcuts", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that are replaced
        with torch.library._scoped_library("exactqat", "IMPL") as library:
            for op in OPERATORS.values():
                library.impl(op.name, row(op), "CPU", allow_override=True)
            yield names


def tensor(*shape: int, dtype: Any = None) -> Any:
    return torch.from_numpy(np.asarray(RANDOM.standard_normal(shape), np.float32)).to(dtype or torch.float32)


def first_and_second_order(function: Callable[..., Any], tensors: list[Any]) -> list[Any]:
    """The result, its gradients along the tensors' cosines, and the gradients of their sum of squares."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    result = function(*leaves)
    first = torch.autograd.grad(result, leaves, torch.cos(result).to(result.dtype), create_graph=True)
    second = torch.autograd.grad(sum((g.float() ** 2).sum() for g in first), leaves, allow_unused=True)
    return [result, *first, *second]


def calls() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    image, low, high = tensor(3, 7, 5, 9), -tensor(9).abs() - 0.1, tensor(9).abs() + 0.1
    return {
        "args": (eq.fake_quant_with_min_max_args, [image]),
        "vars": (eq.fake_quant_with_min_max_vars, [image, low[0], high[0]]),
        "per_channel": (eq.fake_quant_with_min_max_vars_per_channel, [image, low, high]),
        "vars_bfloat16": (eq.fake_quant_with_min_max_vars, [image.bfloat16(), low[0], high[0]]),
        "quantize_and_dequantize": (
            lambda x, a, b: eq.quantization.quantize_and_dequantize_v2(x, a, b, range_given=True, axis=3),
            [image, low, high],
        ),
        "quantize_and_dequantize_of_data": (
            lambda x: eq.quantization.quantize_and_dequantize(x, 0.0, 0.0, axis=1),
            [image],
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_gradients_of_both_orders_have_the_bits_of_the_cpu(name: str, request: pytest.FixtureRequest) -> None:
    function, tensors = calls()[name]
    wanted = first_and_second_order(function, tensors)
    ran = request.getfixturevalue("ran")
    got = first_and_second_order(function, tensors)
    assert ran
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(as_array(a.detach()), as_array(b.detach()), what=f"{name} {i}")


def test_a_range_that_is_not_one_gives_nan(ran: list[str]) -> None:
    result = eq.quantization.quantize_and_dequantize_v2(tensor(5), 1.0, -1.0, range_given=True)
    assert ran and torch.isnan(result).all()


def test_operands_need_not_be_dense(ran: list[str]) -> None:
    x = tensor(6, 8)
    assert torch.equal(eq.fake_quant_with_min_max_args(x.T), eq.fake_quant_with_min_max_args(x).T)
    assert ran


def test_a_machine_without_triton_hears_what_to_install() -> None:
    script = "import sys; sys.modules['triton'] = None; import exactqat.operators.triton"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install 'exactqat[triton]'" in done.stderr


@pytest.mark.slow
def test_importing_the_library_leaves_triton_alone() -> None:
    imports = "import sys; import torch, exactqat, exactqat.operators.torch"
    script = f"{imports}; assert 'exactqat.operators.triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_real_attributes_arrive_with_all_their_bits() -> None:
    from exactqat.operators.triton.launch import bits_of

    for value in (0.1, -6.0, 1e-300, 3e300, 0.0):
        assert struct.pack("q", bits_of("float64", value)) == struct.pack("d", value)
    assert struct.pack("i", bits_of("float32", 0.1)) == struct.pack("f", 0.1)
    assert bits_of("float32", 1e-40) == 0  # denormal
