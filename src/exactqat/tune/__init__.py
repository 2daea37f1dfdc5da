# SPDX-License-Identifier: Apache-2.0
"""The most accurate network that fits, chosen by the device's own integers.

`sensitivity` says which layers cost accuracy, how much and why. `gate` says whether a network meets its requirements on
its devices, and `Gate` keeps the best one in training (`callbacks` for other people's loops). `search` finds the
ranges, biases and roundings that make it most accurate without training. `plan` finds the bits of each layer that keep
it within budgets of memory and work.
"""

from . import callbacks
from .gate import Gate, OnDevice, Verdict, gate
from .metrics import Mark, accuracy
from .plan import plan
from .planned import PlanPoint, PrecisionPlan
from .proposal import Proposal
from .search import Search, Trial, search
from .sensitivity import PartSensitivity, Sensitivity, sensitivity

__all__ = [
    "Gate",
    "Mark",
    "OnDevice",
    "PartSensitivity",
    "PlanPoint",
    "PrecisionPlan",
    "Proposal",
    "Search",
    "Sensitivity",
    "Trial",
    "Verdict",
    "accuracy",
    "callbacks",
    "gate",
    "plan",
    "search",
    "sensitivity",
]


def __dir__() -> list[str]:
    return __all__
