# SPDX-License-Identifier: Apache-2.0
"""The job's directory: its job.json, what may be continued or moved aside, and which networks are delivered there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...kit.device.profile import that_run
from ..report.results import Dataset
from ..report.text import option_of, option_value, shell_word
from . import files, retrained
from .devices import current_settings, device_named
from .models import named_in
from .options import PRECISION
from .settings import Settings
from .weights import Fit, restored

JOB_FORMAT = 1


def check_free(out: Path, resume: bool, restart: bool) -> None:
    """Refuses a directory with files that a new job would overwrite.

    Raises:
        ValueError: it holds a job and neither option is given, or other files with the names of a job's.
    """
    taken = files.entries(out)
    if "job.json" not in taken:
        if taken:
            raise ValueError(
                f"{out} contains {', '.join(taken)} but no job.json, so another program wrote that and a job would "
                "overwrite it. Use another directory"
            )
        return
    if not resume and not restart:
        finished = "metrics.json" in taken
        raise ValueError(
            f"{out} contains {'a finished' if finished else 'an unfinished'} job: "
            + ("use another directory" if finished else "continue it with --resume")
            + ", or move it aside and start over with --restart"
        )


def start(
    settings: Settings,
    dataset: Dataset,
    resume: bool = False,
    restart: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
    fit: Fit | None = None,
) -> bool:
    """Prepares `settings.out`: records the settings in job.json, or compares them with those of the job to continue.

    Args:
        resume: continue the job in the directory, if there is one.
        restart: move an existing job aside, finished or not; `say` reports where to.
        fit: what the network took from `settings.weights`, if they were read.

    Returns:
        Whether there is something to continue.

    Raises:
        ValueError: the directory is not free (see `check_free`), or holds a job with other settings. Nothing is changed
            then.
    """
    out, job = settings.out, settings.out / "job.json"
    check_free(out, resume, restart)
    fingerprint = dataset.fingerprint()
    if resume and job.exists():
        given, (stored, stored_fingerprint, stored_fit) = settings.stored(), read_job(out)
        for name, value in given.items():
            if stored.get(name) != value:
                option = option_of(name)
                raise ValueError(
                    f"{out} contains a job with {option} {option_value(stored.get(name))}, it cannot be continued with "
                    f"{option} {option_value(value)}"
                )
        if stored_fingerprint != fingerprint:
            raise ValueError(f"the images in --data {settings.data} differ from those the job in {out} started with")
        if fit is not None and stored_fit is not None and fit.digest != stored_fit.digest:
            raise ValueError(f"--weights {settings.weights} is not the file the job in {out} started from")
        files.remove_halves(out)
        return True
    origin = {}
    if settings.from_job is not None:
        source = Path(settings.from_job)
        if out.resolve() == source.resolve():
            raise ValueError(
                f"--out and --from must be different directories, since the job in --from is kept; both are {out}"
            )
        origin = {"from": retrained.description(source, settings.trainings, fingerprint)}
    if job.exists():
        files.remove_halves(out)
        aside = files.move_aside(out)
        say(f"The previous job in {out} is now in {aside}")
    content = {"format": JOB_FORMAT, "settings": settings.stored(), "images": fingerprint} | origin
    if fit is not None:
        content["weights"] = fit.stored()
    files.write_atomically(job, (json.dumps(content, indent=2) + "\n").encode())
    return False


def read_job(out: Path) -> tuple[dict[str, Any], str, Fit | None]:
    """The settings, the fingerprint of the images, and which of the weights fitted."""
    files.check_there(out)
    path = out / "job.json"
    if not path.exists():
        raise FileNotFoundError(f"{out} contains no job.json; run `exactqat train` first")
    content = files.read_json(path)
    try:
        if content["format"] != JOB_FORMAT:
            raise ValueError(f"it has format {content['format']!r}; this version reads {JOB_FORMAT}")
        if not isinstance(content["settings"], dict) or not isinstance(content["images"], str):
            raise ValueError("settings must be an object and images a string")
        settings = current_settings(content["settings"])
        return settings, content["images"], restored(content["weights"]) if "weights" in content else None
    except KeyError as error:
        raise ValueError(f"{path} cannot be read: it has no field {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def stored_settings(out: Path, model: str | None = None) -> Settings:
    """The settings of the job in a directory.

    Args:
        model: the network as the user names it; needed if it is not one of exactqat's own, see `models.named_in`.

    Raises:
        FileNotFoundError: there is no job.
        ValueError: job.json is damaged, or the network is not the user's.
    """
    stored, *_ = read_job(out)
    try:
        settings = Settings(out, **stored)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{out / 'job.json'} cannot be read: {error}") from error
    named_in(out / "job.json", settings.model, model)
    return settings


def settings_from(source: Path, out: Path, given: Mapping[str, Any]) -> Settings:
    """The settings of a job in `out` that continues training the networks of the finished job in `source` for another
    device.

    Args:
        given: by the user; the other settings are the finished job's. `device` must be among them.

    Raises:
        FileNotFoundError: there is no job in `source`.
        ValueError: it is unfinished, or was trained for that device; or `given` holds settings that belong to the
            finished job.
    """
    own = [option_of(name) for name in given if name not in retrained.GIVEN]
    if own:
        raise ValueError(f"--from takes {', '.join(own)} from the finished job: omit it")
    if "device" not in given:
        raise ValueError(f"--from needs --device, the device to train for: one of {', '.join(that_run('.tflite'))}")
    finished = stored_settings(source, given.get("model"))
    if unfinished(source):
        raise ValueError(unfinished(source))
    if device_named(given["device"]) == finished.device:
        raise ValueError(f"the job in {source} was already trained for {finished.device}")
    epochs = max(1, round(finished.epochs_qat * retrained.EPOCHS_SHARE))
    of_this = {"weights": None, "freeze_base": False, "from_job": str(source.resolve())}
    chosen = {"epochs_qat": epochs, **given, **of_this}
    return replace(finished, out=out, **chosen)


def float_state(settings: Settings) -> Path:
    return settings.out / "training" / "float.pt"


def quantized_before(settings: Settings) -> bool:
    """Whether an earlier run of the job has begun to train a quantized network."""
    of_float = float_state(settings)
    return any(each != of_float for each in of_float.parent.glob("*.pt"))


def delivered(out: Path, *names: str) -> list[Path]:
    """The folders below `out` that hold all of these files, finest precision first.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
    """
    files.check_there(out)
    folders = [
        out / name
        for name in files.entries(out)
        if re.fullmatch(PRECISION, name) and all((out / name / file).exists() for file in names)
    ]
    if not folders and unfinished(out):
        raise FileNotFoundError(f"{unfinished(out)}. It has not delivered a network yet")
    if not folders:
        raise FileNotFoundError(
            f"no {' with a '.join(names)} beside it in a folder such as {out / 'w8a8'}; run `exactqat train` first"
            if len(names) > 1
            else f"no {names[0]} in a folder such as {out / 'w8a8'}; run `exactqat train` first"
        )
    return sorted(folders, reverse=True)


def unfinished(out: Path) -> str:
    """A sentence on a job that is not finished, or on what it has not delivered yet; empty: it is finished, or there is
    no job.json to say so."""
    if not (out / "job.json").exists() or (out / "metrics.json").exists():
        return ""
    return f"{out} contains an unfinished job: continue it with `exactqat train --resume --out {shell_word(out)}`"
