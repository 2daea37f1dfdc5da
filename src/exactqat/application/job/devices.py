# SPDX-License-Identifier: Apache-2.0
"""Devices by name, for all commands: what a job trains for, and what its files are compared with."""

from __future__ import annotations

import re

from ...kit.device.profile import formerly, that_run, with_alias


def device_named(name: str) -> str:
    """A device that a job can be trained for.

    Raises:
        ValueError: there is none with that name; says what a name from an earlier version is called now.
    """
    if name in that_run(".tflite"):
        return name
    advice = ""
    if with_alias(name):
        names = " or ".join(profile.name for profile in with_alias(name))
        advice = f"; it rounds differently on different processors: use {names}"
    elif formerly(name):
        advice = f"; it is now called {formerly(name)}"
    elif re.fullmatch(r"cpu|cuda(:\d+)?", name):
        advice = f"; to choose where networks train, use --accelerator {name}"
    raise ValueError(f"--device must be one of {', '.join(that_run('.tflite'))}, got {name!r}{advice}")
