# SPDX-License-Identifier: Apache-2.0
"""A finished job's networks for another device: their trained states are copied and retrained with the new device's
arithmetic.

What was trained for one device is not what another computes: they round differently. The float network and the trained
weights and ranges are just as good for the other, though, so only the last phase is trained again. This is a job like
any other, in its own directory. At the start it copies what it needs from the finished job, and changes nothing there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import qat
from . import checkpoints, files, training
from .devices import current_settings

# Epochs of the new job per epoch of the finished job, if the user gives none.
EPOCHS_SHARE = 1 / 8
# Settings that may be given; the others are the finished job's.
GIVEN = ("device", "epochs_qat", "data", "model", "from_job")


def taken_over(trainings: Sequence[str]) -> dict[str, str]:
    """Files below training/ in the finished job, and what they are called in the new one.

    Args:
        trainings: names of the quantization-aware trainings.
    """
    return {"float.pt": "float.pt"} | {f"{name}.pt": f"{name}-start.pt" for name in trainings}


def description(source: Path, trainings: Sequence[str], fingerprint: str) -> dict[str, Any]:
    """What job.json says about the finished job: its device, and digests of what is taken over.

    Args:
        fingerprint: of the new job's images.

    Raises:
        ValueError: the finished job has other images, or a training in it is not finished.
        FileNotFoundError: a file is missing.
    """
    job = files.read_json(source / "job.json")
    if job.get("images") != fingerprint:
        raise ValueError(f"the job in {source} was started with other images; pass its own with --data")
    digests = {}
    with files.locked(source, writes=False):
        for name in taken_over(trainings):
            path = source / "training" / name
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing; without it the job cannot be retrained")
            if not training.finished(path):
                raise ValueError(f"{path} belongs to an unfinished training")
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"device": current_settings(job["settings"])["device"], "files": digests}


def take_over(source: Path, out: Path, trainings: Sequence[str]) -> None:
    """Copies what is not yet copied from the finished job to the new one, whose job.json holds the `description`.

    Raises:
        FileNotFoundError, ValueError: it no longer exists, or has changed since the job began.
    """
    begun = files.read_json(out / "job.json").get("from")
    digests = begun.get("files") if isinstance(begun, dict) else None
    if not isinstance(digests, dict):
        raise ValueError(f"{out / 'job.json'} does not record what was copied from {source}")
    for name, own in taken_over(trainings).items():
        if (out / "training" / own).exists():
            continue
        path = source / "training" / name
        files.check_file(path)
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing, and had not been copied when the job in {out} was interrupted")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != digests.get(name):
            raise ValueError(f"{path} has changed since the job in {out} started")
        files.write_atomically(out / "training" / own, content)


def begin_with(model: qat.PreparedModel, path: Path, device: str) -> None:
    """Loads a trained state of the finished job into a network, which then computes with another device's arithmetic.

    Args:
        path: where `take_over` copied it to.

    Raises:
        ValueError: the file is damaged, or holds no such state.
    """
    state = checkpoints.load_checkpoint(path)
    if not isinstance(state.get("best"), dict):
        raise ValueError(f"{path} does not contain the state of a finished training")
    training.load_state(model, state["best"], path)
    if not model.frozen:
        raise ValueError(f"{path} contains a state that is not frozen")
    # The device is part of the state.
    model.profile = device


def formerly(out: Path) -> str:
    """The device that the networks of the job in a directory were first trained for; empty: for its own."""
    begun = files.read_json(out / "job.json").get("from")
    return str(begun.get("device", "")) if isinstance(begun, dict) else ""
