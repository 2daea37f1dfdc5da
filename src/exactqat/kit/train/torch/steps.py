# SPDX-License-Identifier: Apache-2.0
"""The steps of a prepared model that PyTorch computes in its own way: inputs, and what no device has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.steps import Input
from . import primitives
from .state import Source


class ModuleInput(Input):
    """An input of the network as the device gets it."""

    def compose(self, *features: Tensor) -> Tensor:
        (x,) = features
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return cast(Tensor, self.output_quantizer(x))


class TrainingOnly:
    """What exists in training alone, such as dropout; what is stored stays stored.

    Attributes:
        module: of the user's; it decides whether this is training.
        expression: computes what training continues with, from `sources` and the tensor itself.
        dropout: share of dropped values.
        stop_gradient: no gradient passes.
    """

    def __init__(
        self,
        module: nn.Module,
        expression: nn.Module | None = None,
        sources: Sequence[Source] = (),
        dropout: float = 0.0,
        stop_gradient: bool = False,
    ) -> None:
        self.module, self.expression, self.sources = module, expression, tuple(sources)
        self.dropout, self.stop_gradient = dropout, stop_gradient

    @property
    def noisy(self) -> bool:
        """Whether it changes a tensor that stays as it is on the device."""
        return self.module.training and (self.expression is not None or self.dropout > 0) and not self.stop_gradient

    def __call__(self, features: Tensor) -> Tensor:
        if self.stop_gradient:
            return features.detach()
        if not self.noisy:
            return features
        if self.expression is None:
            return F.dropout(features, self.dropout)
        if not self.expression.training:
            self.expression.training = True
        return cast(Tensor, self.expression(*(source() for source in self.sources), features))


class Outside:
    """A final function of the device's results: computed in training, left to the program that runs the device."""

    def __init__(self, kind: str, attributes: Mapping[str, Any]) -> None:
        self.kind, self.attributes = kind, dict(attributes)

    def __call__(self, features: Tensor) -> Tensor:
        return primitives.FUNCTIONS[self.kind](features, **self.attributes)
