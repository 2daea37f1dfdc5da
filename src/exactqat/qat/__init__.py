# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for PyTorch: `prepare` a plain model by rules, train, `freeze`, train on, deploy."""

from .layers import (
    QuantizedAdd,
    QuantizedAveragePool,
    QuantizedConcatenation,
    QuantizedInput,
    QuantizedLayer,
    QuantizedMaxPool,
    QuantizedMean,
    QuantizedMultiply,
    WeightedLayer,
)
from .modules import Conv2d, DepthwiseConv2d, FakeQuantize, FusedBatchNorm2d, WeightFakeQuantize
from .prepare import PreparedModel, UnsupportedOperator, calibrate, freeze, prepare
from .ranges import ActivationRange, WeightRange
from .rules import Rule, UnusedRuleWarning

__all__ = [
    "ActivationRange",
    "Conv2d",
    "DepthwiseConv2d",
    "FakeQuantize",
    "FusedBatchNorm2d",
    "PreparedModel",
    "QuantizedAdd",
    "QuantizedAveragePool",
    "QuantizedConcatenation",
    "QuantizedInput",
    "QuantizedLayer",
    "QuantizedMaxPool",
    "QuantizedMean",
    "QuantizedMultiply",
    "Rule",
    "UnsupportedOperator",
    "UnusedRuleWarning",
    "WeightFakeQuantize",
    "WeightRange",
    "WeightedLayer",
    "calibrate",
    "freeze",
    "prepare",
]
