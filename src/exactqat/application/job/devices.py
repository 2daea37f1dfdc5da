# SPDX-License-Identifier: Apache-2.0
"""Devices by name, for all commands: what a job trains for, and what its files are compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...kit.device import PROFILES
from ...kit.device.profile import formerly, that_run, with_alias
from .options import defaults

# What Vela compiles for: its integers are not known here, so nothing is trained for it.
NPU = "ethos-u"
# Names from earlier versions that did not refer to a single device.
_UNNAMED = {
    "here": "omit --device to compare with the device that the job was trained for, or name one",
    "trained": "omit --device to compare with the device that the job was trained for",
}


def device_named(name: str) -> str:
    """A device that a job can be trained for.

    Raises:
        ValueError: there is none with that name; says what a name from an earlier version is called now.
    """
    if name in that_run(".tflite"):
        return name
    if name == NPU:
        raise ValueError(
            f"--device {NPU} cannot be trained for, because the integers that the NPU computes are unknown; train for "
            f"another device, then run `exactqat verify DIR --device {NPU}` to see what Vela compiles the file to"
        )
    raise ValueError(_refusal(name, that_run(".tflite")))


def device_to_verify(name: str) -> tuple[str, str]:
    """A device to compare with, or NPU, and the choice after a colon: a processor, or an accelerator.

    Raises:
        ValueError: there is none with that name, or it takes no choice.
    """
    kind, _, choice = name.partition(":")
    if kind not in (*that_run(".tflite"), NPU):
        raise ValueError(_refusal(name, (*that_run(".tflite"), NPU)))
    if choice and kind != NPU and not PROFILES[kind].emulated:
        raise ValueError(f"--device {kind} takes no option after a colon, got {choice!r}")
    return kind, choice


def _refusal(name: str, allowed: tuple[str, ...]) -> str:
    kind, colon, choice = str(name).partition(":")
    advice = _UNNAMED.get(kind, "")
    if with_alias(kind):
        names = " or ".join(profile.name for profile in with_alias(kind))
        advice = f"it rounds differently on different processors: use {names}"
    if kind in PROFILES:
        advice = f"{PROFILES[kind].title} runs {PROFILES[kind].file} files, and a job trains for .tflite files"
    if formerly(kind):
        advice = f"it is now called {formerly(kind)}{colon}{choice}"
    if re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        advice = f"to choose where networks train, use --accelerator {name}"
    return f"--device must be one of {', '.join(allowed)}, got {name!r}" + (f"; {advice}" if advice else "")


def current_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a job on disk by their current names; those that earlier versions lacked get their defaults.

    Raises:
        ValueError: it holds a setting under both names.
    """
    settings = dict(stored)
    if "profile" in settings:
        if "device" in settings:
            raise ValueError("settings must not contain both device and its former name, profile")
        settings["device"] = settings.pop("profile")
    return defaults() | settings
