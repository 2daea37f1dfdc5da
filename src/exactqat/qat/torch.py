# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for PyTorch: `prepare` a module, `calibrate`, train, `freeze`, train on, deploy."""

from .train.torch.from_file import prepare_file
from .train.torch.prepare import prepare
from .train.torch.prepared import PreparedModel, calibrate, freeze

__all__ = ["PreparedModel", "calibrate", "freeze", "prepare", "prepare_file"]
