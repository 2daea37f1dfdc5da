# SPDX-License-Identifier: Apache-2.0
"""Modules that keep the user's parameters under the user's names in a prepared model.

They compute nothing; the layers under ``quantization`` read from them. So what PyTorch allows for a module that
computes (replacing it, pruning it, giving it a weight norm) would change nothing here, or leave a layer without its
weight: it is refused when it happens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .primitives import is_exporting

BEFORE = "change the float model and prepare it again; pruning, weight norm and the like are taken over from there"


class Owner(nn.Module):
    """Holds parameters, buffers and further owners, and keeps them there once it is closed."""

    # Names of the parameters and buffers, once it is closed.
    kept: frozenset[str] | None = None

    def close(self) -> None:
        """From here on nothing can be replaced."""
        self.kept = frozenset((*self._parameters, *self._buffers))

    def __setattr__(self, name: str, value: Any) -> None:
        if self.kept is not None:
            if name in self._modules and value is not self._modules[name]:
                raise TypeError(f"'{name}' of a prepared model cannot be replaced: {BEFORE}")
            held: Tensor | None = self._parameters.get(name)
            held = self._buffers.get(name) if held is None else held
            if held is not None:
                _require_alike(name, held, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self.kept is not None and (name in self.kept or name in self._modules):
            raise TypeError(f"'{name}' of a prepared model cannot be taken away: {BEFORE}")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # What PyTorch's utilities put in a parameter's place: weight_orig, weight_g, weight_u.
        taken = next((held for held in self.kept or () if name.startswith(f"{held}_")), None)
        if taken is not None:
            raise TypeError(f"'{taken}' of a prepared model cannot be computed from '{name}': {BEFORE}")
        super().register_parameter(name, param)


def _require_alike(name: str, held: Tensor, value: Any) -> None:
    if isinstance(value, Tensor) and value.shape == held.shape and value.dtype == held.dtype:
        return
    wanted = f"shape {list(held.shape)} in {str(held.dtype).removeprefix('torch.')}"
    given = type(value).__name__
    if isinstance(value, Tensor):
        given = f"shape {list(value.shape)} in {str(value.dtype).removeprefix('torch.')}"
    raise TypeError(f"'{name}' of a prepared model has {wanted}, got {given}")


def require_float32(convert: Any) -> None:
    """Refuses to `convert` a prepared model's tensors to another type of numbers."""
    converted = convert(torch.empty(0))
    if converted.dtype != torch.float32:
        given = str(converted.dtype).removeprefix("torch.")
        raise TypeError(
            f"a prepared model computes in float32, not in {given}: for mixed precision train it under "
            "torch.autocast; inputs of other types are converted"
        )


def require_called_plainly(args: Any, frozen: bool) -> None:
    """Refuses anything that would record one call of a prepared model as if that were the whole model."""
    if torch.compiler.is_compiling():
        if frozen and is_exporting():
            raise TypeError(f"a frozen model, which computes the device's integers, cannot be exported: {FILE}")
        return
    if not isinstance(args, tuple):
        raise TypeError(f"a prepared model cannot be traced by torch.fx: {FILE}")
    if torch.jit.is_tracing():
        raise TypeError(f"a prepared model cannot be traced by torch.jit: {FILE}")
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels):
        raise TypeError(
            "a prepared model cannot run under torch.func.vmap (or jacfwd, which uses it): it takes whole batches; "
            "give one, and use torch.func.jacrev or autograd for gradients"
        )


FILE = "exactqat.deploy.lower, then write_tflite or write_onnx make the file of a frozen model"
