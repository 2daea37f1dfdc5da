# SPDX-License-Identifier: Apache-2.0
"""What helps a quantized network recover the float network's accuracy, for training loops of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import batches as loading
from ..core.arrays import weights_of
from .prepared import PreparedModel, prepared_model

# How many times more slowly a weight's range is trained than a result's, by default.
_WEIGHTS_SLOWER = 5


def distillation_loss(
    outputs: Tensor, teacher_outputs: Tensor, temperature: float = 4.0, reduction: str = "mean"
) -> Tensor:
    """How far a network's answers are from a teacher's: the Kullback-Leibler divergence of the softened classes, times
    the squared temperature, so that its gradients keep their size (arXiv:1503.02531)::

        with torch.no_grad():
            taught = float_model(images)
        loss = 0.5 * F.cross_entropy(outputs, labels) + 0.5 * qat.distillation_loss(outputs, taught)

    Args:
        outputs: [n, classes] logits of the network being trained, with gradients.
        teacher_outputs: [n, classes] logits of the teacher, such as the float network; no gradient flows to it.
        temperature: above 0; the higher, the more the order of the wrong classes counts.
        reduction: "mean" over the examples, "sum", or "none" for [n].

    Returns:
        float, a number or [n].

    Raises:
        ValueError: shapes differ or are not [n, classes], the temperature is not above 0, or there is no such
            reduction.
    """
    if outputs.shape != teacher_outputs.shape or outputs.ndim != 2:
        raise ValueError(
            "outputs and teacher_outputs must have one shape [n, classes], got "
            f"{list(outputs.shape)} and {list(teacher_outputs.shape)}"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a number above 0, got {temperature!r}")
    reduced = _reduction(reduction)
    own = F.log_softmax(outputs / temperature, 1)
    taught = F.log_softmax(teacher_outputs.detach() / temperature, 1)
    losses = F.kl_div(own, taught, reduction="none", log_target=True).sum(1) * temperature**2
    return reduced(losses)


def _reduction(name: str) -> Callable[[Tensor], Tensor]:
    """Of all examples' losses, [n]."""
    reductions: dict[str, Any] = {"mean": torch.mean, "sum": torch.sum, "none": lambda losses: losses}
    if name not in reductions:
        raise ValueError(f"reduction must be mean, sum or none, got {name!r}")
    return cast(Callable[[Tensor], Tensor], reductions[name])


class Distillation:
    """How far a network's answers are from those of its float network, as part of the loss::

        distillation = qat.Distillation(float_model)
        for images, labels in loader:
            outputs = model(images)
            loss = 0.5 * F.cross_entropy(outputs, labels) + 0.5 * distillation(outputs, images)

    Attributes:
        temperature: see `distillation_loss`.
    """

    def __init__(self, teacher: nn.Module, temperature: float | None = 4.0) -> None:
        """
        Args:
            teacher: the trained float network, or any module with the same inputs and outputs. It is only set to
                evaluation mode.
            temperature: above 0. None: the outputs are not class scores; the loss is their squared error relative to
                the mean square of the teacher's.

        Raises:
            TypeError: the teacher is not a module, or is prepared.
        """
        if not isinstance(teacher, nn.Module) or isinstance(teacher, PreparedModel):
            raise TypeError(f"teacher must be the float torch.nn.Module, got {type(teacher).__name__}")
        self.temperature, self._teacher = temperature, teacher.eval()

    def __call__(self, outputs: Tensor, batch: object, reduction: str = "mean") -> Tensor:
        """The loss for one call of the model.

        Args:
            outputs: what the model returned in training mode, [n, ...].
            batch: the model's input: a tensor, or a tuple of positional or a dictionary of keyword arguments.
            reduction: "mean" over the examples, "sum", or "none" for [n].

        Raises:
            ValueError: there is no such reduction; outputs do not suit the temperature or the teacher's outputs.
        """
        args, kwargs = loading.arguments(batch)
        with torch.no_grad():
            taught = self._teacher.eval()(*args, **kwargs)
        if not isinstance(outputs, Tensor) or not isinstance(taught, Tensor):
            raise ValueError(f"outputs must be one tensor, got {type(outputs).__name__}")
        if self.temperature is not None:
            return distillation_loss(outputs, taught, self.temperature, reduction)
        reduced = _reduction(reduction)
        if outputs.shape != taught.shape or not outputs.ndim:
            raise ValueError(
                f"outputs must have the shape of the teacher's, {list(taught.shape)}, got {list(outputs.shape)}"
            )
        errors = (outputs - taught).square().flatten(1).mean(1) if outputs.ndim > 1 else (outputs - taught).square()
        return reduced(errors / taught.square().mean().clamp(min=torch.finfo(torch.float32).tiny))

    def to(self, device: torch.device | str) -> Distillation:
        """Moves the teacher."""
        self._teacher.to(device)
        return self


def parameter_groups(
    model: PreparedModel,
    lr: float,
    range_lr: float = 3e-3,
    range_lrs: Mapping[str, float] | None = None,
    weight_range_lr: float | None = None,
) -> list[dict[str, Any]]:
    """An optimizer's groups for a prepared model: weights, then its learned ranges, optionally with their own rates
    layer by layer. Ranges have no weight decay::

        groups = qat.parameter_groups(model, lr=1e-3, range_lrs={"stem.*": 0.0, "classifier": 1e-2})
        optimizer = torch.optim.AdamW(groups)

    Args:
        lr: learning rate of everything but ranges; 0 or more; in a file's network relative to each layer's weights.
        range_lr: for ranges of results that no pattern matches.
        range_lrs: rates by the path of a layer, or a pattern such as ``"stem.*"``; the first that matches counts, for
            the layer's result and its weight.
        weight_range_lr: for ranges of weights that no pattern matches; None: a fifth of `range_lr`, since weights are
            smaller than results.

    Raises:
        TypeError: the model is not prepared.
        ValueError: a rate is not a number of at least 0, or a pattern matches no layer with a learned range.
    """
    model = prepared_model(model)
    patterns = dict(range_lrs or {})
    rates = {"lr": lr, "range_lr": range_lr} | {f"range_lrs[{pattern!r}]": rate for pattern, rate in patterns.items()}
    if weight_range_lr is not None:
        rates["weight_range_lr"] = weight_range_lr
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {rate!r}")
    layers = _layers_of_ranges(model)
    for pattern in patterns:
        if not any(fnmatchcase(layer, pattern) for layer, _ in layers):
            known = ", ".join(dict.fromkeys(layer for layer, _ in layers)) or "none"
            raise ValueError(f"range_lrs[{pattern!r}] matches no layer with a learned range; those are: {known}")
    # At least one group, whether there are ranges or not.
    members: dict[float, list[nn.Parameter]] = {} if layers else {float(range_lr): []}
    of_weights = {id(end) for end in model.weight_range_parameters()}
    slower = range_lr / _WEIGHTS_SLOWER if weight_range_lr is None else weight_range_lr
    for layer, parameter in layers:
        own = slower if id(parameter) in of_weights else range_lr
        rate = next((patterns[pattern] for pattern in patterns if fnmatchcase(layer, pattern)), own)
        members.setdefault(float(rate), []).append(parameter)
    ranges = [{"params": params, "lr": rate, "weight_decay": 0.0} for rate, params in members.items()]
    return [{"params": model.other_parameters(), "lr": float(lr)}, *ranges]


def _layers_of_ranges(model: PreparedModel) -> list[tuple[str, nn.Parameter]]:
    """The learned ranges, each with the path of its layer."""
    learned = model._state.trained_ranges.items()
    layers = {id(end): name.removeprefix(weights_of("")) for name, held in learned for end in held.parameters()}
    return [(layers[id(parameter)], parameter) for parameter in model.range_parameters()]
