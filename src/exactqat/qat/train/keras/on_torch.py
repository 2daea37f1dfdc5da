# SPDX-License-Identifier: Apache-2.0
"""What is needed of PyTorch itself, where it is Keras' backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from keras.ops import convert_to_numpy, convert_to_tensor
from torch import Tensor

from ..core.primitives import HostFunction
from ..torch import primitives

rounded_sums = primitives.rounded_sums


def fake_quantize(x: Tensor, minimum: Tensor, maximum: Tensor, bits: int, narrow_range: bool) -> Tensor:
    return primitives.fake_quantize(x.contiguous(), minimum, maximum, bits, narrow_range)


def on_host(function: HostFunction, like: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    return primitives.with_gradient_of(_tensor(function(_arrays(first), _arrays(second))), like)


def network_on_host(
    function: HostFunction, like: Callable[[], Sequence[Tensor]], first: Sequence[Tensor], second: Sequence[Tensor]
) -> list[Tensor] | None:
    if torch.is_grad_enabled():
        return None
    return [_tensor(array) for array in function(_arrays(first), _arrays(second))]


def sums_are_exact() -> bool:
    # Without oneDNN PyTorch may transform before it sums, which rounds.
    return not torch.accelerator.is_available() and bool(
        torch._C._get_mkldnn_enabled() and torch.backends.mkldnn.is_available()
    )


def numbers_on_host(function: HostFunction, likes: Sequence[Tensor], arrays: Sequence[Tensor]) -> list[Tensor]:
    return [_tensor(array) for array in function(_arrays(arrays), [])]


def differentiated(
    step: Callable[..., tuple[Any, Any]], leaves: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Any]:
    """Gradients of what ``step(leaves, others)`` returns first, by the names of leaves, and what it returns second."""
    with torch.enable_grad():
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
        # The model may write into its inputs.
        total, results = step({name: tensor.clone() for name, tensor in leaves.items()}, others)
        if not isinstance(total, Tensor) or not total.requires_grad:
            return {}, results
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {name: x for name, x in zip(leaves, gradients, strict=True) if x is not None}, results


def _arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    return [convert_to_numpy(tensor) for tensor in tensors]


def _tensor(array: np.ndarray) -> Tensor:
    return cast(Tensor, convert_to_tensor(array))
