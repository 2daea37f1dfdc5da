# SPDX-License-Identifier: Apache-2.0
"""Which operators a device's runtime has, as the sweep found by running each of them."""

from __future__ import annotations

import json
from importlib import resources

from .profile import Profile


def _absent() -> frozenset[tuple[str, str]]:
    content = json.loads(resources.files(__package__).joinpath("measured.json").read_text("utf-8"))
    return frozenset((name, profile) for profile, names in content["absent"].items() for name in names)


# (kind, profile) of the operators that the profile's runtime rejects in every form that was tried, under the names of
# `DeviceOperator.measured_as`. Written by `tests/campaigns/sweep.py --write`.
ABSENT = _absent()


def lacks(profile: Profile, name: str) -> str:
    """Why a device's runtime does not run an operator of that name; "": it does, or it was never tried."""
    if (name, profile.name) not in ABSENT and name not in profile.absent:
        return ""
    kind, _, dtype = name.partition(":")
    words = (dtype or "int8").replace(":", " with ").replace("_", " ")
    return f"{profile.title} has no {kind} in {words}"
