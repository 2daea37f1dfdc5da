# SPDX-License-Identifier: Apache-2.0
"""The runtimes that files are compared on: LiteRT here and on an emulated ARM64, TFLite-Micro, onnxruntime.

A profile of `exactqat.kit.device` names its runtime; `profiles_here` says which profiles this machine can run.
"""

from __future__ import annotations

import importlib.util
import platform

from ...kit.device import Profile, profile_named
from ...kit.device.profile import that_run, with_alias
from .emulation import SET_UP, is_set_up
from .litert import Emulated, LiteRT
from .micro import Micro
from .onnxruntime import OnnxRuntime, saturates

# By the distribution that provides it; `device.Profile.runtime` names one of them.
RUNTIMES: dict[str, type[LiteRT] | type[Micro]] = {"ai-edge-litert": LiteRT, "tflite-micro": Micro}
# Likewise those for other files, which need the graph as well as the file.
_ALL: dict[str, type[LiteRT] | type[Micro] | type[OnnxRuntime]] = {**RUNTIMES, "onnxruntime": OnnxRuntime}


def profiles_here(file: str = ".tflite") -> tuple[str, ...]:
    """The profiles whose runtime this machine has: those it runs itself, then those it emulates.

    file: the kind of file they run, ".tflite" or ".onnx".
    """
    machine = platform.machine()
    installed = [
        profile
        for profile in map(profile_named, that_run(file))
        if profile.runtime in _ALL and importlib.util.find_spec(_ALL[profile.runtime].module) is not None
    ]
    native = [profile.name for profile in installed if profile.runs_on(machine) and not _saturates(profile)]
    emulated = [profile.name for profile in installed if profile.emulated and is_set_up()]
    return tuple(dict.fromkeys((*native, *emulated)))


def profile_here(profile: str | Profile) -> str:
    """The name of the profile, or of the one that "xnnpack" means on this machine.

    Raises:
        ValueError: no profile has that name, or this machine cannot run it.
        ImportError: its runtime is not installed.
    """
    here = (*profiles_here(), *profiles_here(".onnx"))
    shared = with_alias(profile) if isinstance(profile, str) else ()
    wanted = next((each for each in shared if each.name in here), None) or profile_named(profile)
    if wanted.name in here:
        return wanted.name
    if wanted.runtime not in _ALL:
        raise ValueError(f"profile {wanted.name!r} has no runtime that can run here; available here: {', '.join(here)}")
    _ALL[wanted.runtime].interpreters()
    if _saturates(wanted):
        raise ValueError(
            f"profile {wanted.name!r} needs a processor with VNNI instructions: without them, sums of onnxruntime can "
            f"saturate; available here: {', '.join(here)}"
        )
    if wanted.emulated:
        raise ValueError(
            f"profile {wanted.name!r} needs an ARM64 processor or its emulation; to set that up, run: {SET_UP}"
        )
    raise ValueError(f"profile {wanted.name!r} cannot run on this machine; available here: {', '.join(here)}")


def _saturates(profile: Profile) -> bool:
    return profile.rounds_as_onnx and saturates()


def open_runtime(
    content: bytes, inputs: tuple[str, ...], outputs: tuple[str, ...], profile: str | Profile, in_order: bool = False
) -> LiteRT | Micro | Emulated:
    """The profile's runtime on a model: its method `run` takes and returns codes by tensor name.

    in_order: inputs and outputs name all of the file's, in its order, whatever it calls them.
    """
    wanted = profile_named(profile)
    if wanted.emulated and not wanted.runs_on(platform.machine()):
        return Emulated(content, inputs, outputs, in_order)
    return RUNTIMES[wanted.runtime](content, inputs, outputs, wanted, in_order)
