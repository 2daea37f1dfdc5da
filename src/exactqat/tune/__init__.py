# SPDX-License-Identifier: Apache-2.0
"""The most accurate network that fits, chosen by the device's own integers.

`sensitivity` says which layers cost accuracy, how much and why. `gate` says whether a network reaches what is asked of
it on its devices, and `Gate` keeps the best one in training (`callbacks` for other people's loops). `search` finds the
ranges, biases and roundings with which it is most accurate without training.
"""

from . import callbacks
from .gate import Gate, OnDevice, Verdict, gate
from .metrics import accuracy
from .search import Mark, Search, Trial, search
from .sensitivity import PartSensitivity, Sensitivity, sensitivity

__all__ = [
    "Gate",
    "Mark",
    "OnDevice",
    "PartSensitivity",
    "Search",
    "Sensitivity",
    "Trial",
    "Verdict",
    "accuracy",
    "callbacks",
    "gate",
    "search",
    "sensitivity",
]
