# SPDX-License-Identifier: Apache-2.0
"""The most accurate network that fits, chosen by the device's own integers.

`sensitivity` says which layers cost accuracy, how much and why.
"""

from .metrics import accuracy
from .sensitivity import PartSensitivity, Sensitivity, sensitivity

__all__ = ["PartSensitivity", "Sensitivity", "accuracy", "sensitivity"]
