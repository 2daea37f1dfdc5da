# SPDX-License-Identifier: Apache-2.0
"""The runtimes that files are compared on: LiteRT here and on an emulated ARM64, TFLite-Micro, onnxruntime.

A profile of `exactqat.kit.device` names its runtime; `profiles_here` says which profiles this machine can run.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Mapping, Sequence

import numpy as np

from ...kit.device import Profile, profile_named
from ...kit.device.profile import that_run, with_alias
from ..formats.tflite import end_names, import_deploy
from .emulation import SET_UP, EmulatedInterpreter, is_set_up
from .litert import LiteRT
from .micro import Micro
from .onnxruntime import saturates

# By the distribution that `device.Profile.runtime` names: its module, and the extra that installs it.
RUNTIMES = {
    "ai-edge-litert": ("ai_edge_litert", "deploy"),
    "tflite-micro": ("tflite_micro", "micro"),
    "onnxruntime": ("onnxruntime", "onnx"),
}


def profiles_here(file: str = ".tflite") -> tuple[str, ...]:
    """The profiles whose runtime this machine has: those it runs itself, then those it emulates.

    file: the kind of file they run, ".tflite" or ".onnx".
    """
    machine = platform.machine()
    installed = [
        profile
        for profile in map(profile_named, that_run(file))
        if profile.runtime in RUNTIMES and importlib.util.find_spec(RUNTIMES[profile.runtime][0]) is not None
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
    wanted = next((candidate for candidate in shared if candidate.name in here), None) or profile_named(profile)
    if wanted.name in here:
        return wanted.name
    if wanted.runtime not in RUNTIMES:
        raise ValueError(f"profile {wanted.name!r} has no runtime that can run here; available here: {', '.join(here)}")
    import_deploy(*RUNTIMES[wanted.runtime])
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


class Runtime:
    """A profile's runtime on a .tflite model: codes in and out by tensor name."""

    def __init__(
        self, content: bytes, inputs: Sequence[str], outputs: Sequence[str], profile: Profile, in_order: bool
    ) -> None:
        self.interpreter: LiteRT | Micro | EmulatedInterpreter
        if profile.emulated and not profile.runs_on(platform.machine()):
            self.interpreter = EmulatedInterpreter(content)
        else:
            self.interpreter = (Micro if profile.runtime == "tflite-micro" else LiteRT)(content, profile)
        self.inputs, self.outputs = (inputs, outputs) if in_order else end_names(content)
        for names, wanted in ((self.inputs, inputs), (self.outputs, outputs)):
            missing = [name for name in wanted if name not in names]
            if missing:
                raise ValueError(f"the file does not have {missing} where the graph does; it has {sorted(names)}")
        self.wanted = tuple(outputs)

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = self.interpreter.run([batch[name] for name in self.inputs])
        arrays = dict(zip(self.outputs, results, strict=True))
        return {name: arrays[name] for name in self.wanted}


def open_runtime(
    content: bytes, inputs: Sequence[str], outputs: Sequence[str], profile: str | Profile, in_order: bool = False
) -> Runtime:
    """The profile's runtime on a model: its method `run` takes and returns codes by tensor name.

    in_order: inputs and outputs name all of the file's, in its order, whatever it calls them.
    """
    return Runtime(content, inputs, outputs, profile_named(profile), in_order)
