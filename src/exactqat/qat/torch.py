# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for PyTorch: `prepare` a module, `calibrate`, train, `freeze`, train on, deploy."""

from .train.torch.prepare import prepare, prepare_file
from .train.torch.prepared import PreparedModel, calibrate, freeze

__all__ = ["PreparedModel", "calibrate", "freeze", "prepare", "prepare_file"]
