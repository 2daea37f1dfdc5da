# SPDX-License-Identifier: Apache-2.0
"""Distillation from the float network: from its answers, and from what chosen layers store."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..core import batches as loading
from .prepared import PreparedModel
from .recovery import distillation_loss, require_reduction


class Distillation:
    """How far a prepared model is from its float network, as part of the loss::

        distillation = qat.Distillation(model, float_model, layers=["stage2.*", "neck"])
        for images, labels in loader:
            outputs = model(images)
            loss = 0.5 * F.cross_entropy(outputs, labels) + 0.5 * distillation(outputs, images)

    For the answers it is `distillation_loss`. For each layer it is the squared error of what the layer stores,
    including activation and batch norm, relative to the teacher's mean square, so that layers of all sizes count
    equally; the mean over layers is added. Without layers: the answers alone.

    Attributes:
        layers: paths of the compared layers, in order of execution.
        temperature: see `distillation_loss`.
    """

    def __init__(
        self, model: PreparedModel, teacher: nn.Module, layers: Sequence[str] = (), temperature: float | None = 4.0
    ) -> None:
        """
        Args:
            model: what `prepare` returned. It must be called in training mode between two calls of the distillation,
                which takes what its layers store from that call.
            teacher: the trained float network that `model` was prepared from; without layers, any module with the same
                inputs and outputs. It is not changed, except that it is set to evaluation mode.
            layers: paths as `model.layers()` has them, or patterns such as "stage2.*".
            temperature: above 0. None: the outputs are not class scores, and are compared like a layer.

        Raises:
            TypeError: the model is not prepared, or the teacher is not a module, or is prepared.
            ValueError: a pattern matches no layer, or the teacher is not the model's network.
        """
        if not isinstance(model, PreparedModel):
            raise TypeError(f"model must be what exactqat.qat.prepare returns for PyTorch, got {type(model).__name__}")
        if not isinstance(teacher, nn.Module) or isinstance(teacher, PreparedModel):
            raise TypeError(f"teacher must be the float torch.nn.Module, got {type(teacher).__name__}")
        if isinstance(layers, str):
            raise TypeError(f"layers must be a list of paths or patterns, got {layers!r}")
        inputs = {each.path for each in model.plan.inputs}
        known = [path for path, _ in model.layers() if path not in inputs]
        for pattern in layers:
            if not any(fnmatchcase(path, pattern) for path in known):
                raise ValueError(f"layers: {pattern!r} matches no layer; those are: {', '.join(known)}")
        self.layers = tuple(path for path in known if any(fnmatchcase(path, pattern) for pattern in layers))
        self.temperature = temperature
        self._model, self._given = model, teacher.eval()
        self._teacher = _in_float(model, teacher) if self.layers else None
        if self.layers:
            model.watch()
        self._compared = False

    def __call__(self, outputs: Tensor, batch: Any, reduction: str = "mean") -> Tensor:
        """The loss for one call of the model.

        Args:
            outputs: what the model returned in training mode, [n, ...].
            batch: the model's input: a tensor, or a tuple of positional or a dictionary of keyword arguments.
            reduction: "mean" over the examples, "sum", or "none" for [n].

        Raises:
            ValueError: there is no such reduction; outputs do not suit the temperature; the teacher is not the model's
                network.
            RuntimeError: the model was not called in training mode before.
        """
        require_reduction(reduction)
        args, kwargs = loading.arguments(batch)
        with torch.no_grad():
            taught, values = self._taught(args, kwargs)
        if not isinstance(outputs, Tensor) or not isinstance(taught, Tensor):
            raise ValueError(f"outputs must be one tensor, got {type(outputs).__name__}")
        if self.temperature is None:
            each = _of_values("the outputs", outputs, taught, len(outputs))
        else:
            each = distillation_loss(outputs, taught, self.temperature, "none")
        if self.layers:
            own = self._model.watched()
            if not own:
                raise RuntimeError("call the model in training mode first: no values of its layers are there")
            parts = [_of_values(f"layer {path!r}", own[path], values[path], len(outputs)) for path in self.layers]
            each = each + torch.stack(parts).mean(0)
        return {"mean": each.mean, "sum": each.sum}[reduction]() if reduction != "none" else each

    def to(self, device: torch.device | str) -> Distillation:
        """Moves the teacher."""
        self._given.to(device)
        if self._teacher is not None:
            self._teacher.to(device)
        return self

    def _taught(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        """The teacher's answers, and what its layers store."""
        if self._teacher is None:
            self._given.eval()
            return self._given(*args, **kwargs), {}
        values: dict[str, Tensor] = {}
        taught = self._teacher._run(args, kwargs, values)
        if not self._compared:
            self._require_the_same(taught, self._given.eval()(*args, **kwargs))
            self._compared = True
        return taught, values

    def _require_the_same(self, found: Any, expected: Any) -> None:
        alike = isinstance(found, Tensor) and isinstance(expected, Tensor) and found.shape == expected.shape
        if not alike or not torch.allclose(found, expected.float(), rtol=1e-2, atol=1e-3 * float(expected.abs().max())):
            raise ValueError("teacher is another network than the one that model was prepared from")


def _in_float(model: PreparedModel, teacher: nn.Module) -> PreparedModel:
    """The teacher with the layers of the prepared model, without quantization."""
    tensors: dict[str, Tensor] = dict(teacher.named_parameters(remove_duplicate=False))
    tensors |= dict(teacher.named_buffers(remove_duplicate=False))
    try:
        made = PreparedModel(model.plan, tensors, None)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"teacher is another network than the one that model was prepared from: {error}") from error
    return made.as_float()


def _of_values(name: str, own: Tensor, taught: Tensor, examples: int) -> Tensor:
    """The squared error of each example relative to the teacher's mean square, [n]."""
    if own.shape != taught.shape or not own.ndim or len(own) != examples:
        raise ValueError(f"{name} must have one value or more for each of {examples} examples, got {list(own.shape)}")
    errors = (own - taught).square().reshape(examples, -1).mean(1)
    return errors / taught.square().mean().clamp(min=torch.finfo(torch.float32).tiny)


__all__ = ["Distillation"]
