# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for PyTorch: `prepare` a module, `calibrate`, train, `freeze`, train on, deploy."""

from ..kit.train.torch.from_file import prepare_file
from ..kit.train.torch.prepare import prepare
from ..kit.train.torch.prepared import PreparedModel, calibrate, freeze

__all__ = ["PreparedModel", "calibrate", "freeze", "prepare", "prepare_file"]
