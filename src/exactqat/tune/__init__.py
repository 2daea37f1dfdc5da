# SPDX-License-Identifier: Apache-2.0
"""The most accurate network that fits, chosen by the device's own integers.

`sensitivity` says which layers cost accuracy, how much and why; `gate` whether a network reaches what is asked of it on
its devices, and `Gate` keeps the best one in training (`callbacks` for other people's loops).
"""

from . import callbacks
from .gate import Gate, OnDevice, Verdict, gate
from .metrics import accuracy
from .sensitivity import PartSensitivity, Sensitivity, sensitivity

__all__ = [
    "Gate",
    "OnDevice",
    "PartSensitivity",
    "Sensitivity",
    "Verdict",
    "accuracy",
    "callbacks",
    "gate",
    "sensitivity",
]
