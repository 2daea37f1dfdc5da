# SPDX-License-Identifier: Apache-2.0
"""The job's directory: written completely or not at all, by one process at a time, without overwriting existing files.

What a job writes has the names in `entries`. Nothing that another program or another job wrote is deleted or
overwritten: a job starts only if none of these names is taken, and an existing job's directory is renamed if the user
asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from ...deploy.formats.tflite import write_whole
from ...kit.display import on_one_line
from .settings import PRECISION

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

# What a file of data holds by name.
Record = dict[str, Any]
ENTRIES = ("metrics.json", "report.html", "training", "float", PRECISION, "job.json")
# What a process leaves if it is killed while it writes.
HALF = ".exactqat-"


def write_atomically(path: Path, content: bytes) -> None:
    """Writes the file completely or not at all, even if power fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content, HALF)
    except OSError as error:
        raise cannot_write(path, error) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its name if it has none."""
    lines = str(getattr(error, "strerror", None) or error).splitlines()
    return on_one_line(lines[0] if lines else type(error).__name__)


def cannot_write(path: Path, error: OSError) -> OSError:
    """An error that says so, and what is kept."""
    kept = "; the previous file is intact" if path.is_file() else ""
    advice = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = ". Finished epochs are kept: make room, then continue with --resume"
    return OSError(f"{path} cannot be written: {error.strerror or error}{kept}{advice}")


def check_writable(path: Path, is_folder: bool = False) -> None:
    """Refuses a file that cannot be written, or a folder, with those above it, that cannot be created: before any
    work."""
    above = path.absolute().parent
    if is_folder:
        above = path if path.is_dir() else next(parent for parent in path.absolute().parents if parent.exists())
    elif path.is_dir():
        raise OSError(f"{path} cannot be written: it is a directory")
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        why = f"{error.strerror} in {above}" if above.exists() else f"there is no folder {above}"
        raise OSError(f"{path} cannot be written: {why}") from error


def check_file(path: Path) -> None:
    """Refuses files that never end, such as a pipe or a device."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")


def read_json(path: Path) -> Record:
    """The object in a JSON file."""
    check_file(path)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read: it contains a {type(content).__name__} where an object is expected")
    return content


@contextlib.contextmanager
def locked(directory: Path, writes: bool = True) -> Iterator[None]:
    """In this context, no other process writes in the directory, or uses it at all if this one writes.

    The lock is the operating system's: it ends with the process, however that ends, and leaves no file.
    """
    with contextlib.ExitStack() as held:
        if fcntl is not None:
            descriptor = os.open(directory, os.O_RDONLY)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_EX if writes else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                advice = "wait until it has finished, or use another directory"
                raise ValueError(f"another process is using {directory}: {advice}") from None
            except OSError:
                pass  # some file systems have no locks; refusing them would be worse
        yield


def entries(out: Path) -> list[str]:
    """The names in a directory that a job uses for itself, even if written by others."""
    try:
        names = os.listdir(out)
    except FileNotFoundError:
        if out.is_symlink():
            raise NotADirectoryError(f"{out} is a link to {os.readlink(out)}, which does not exist") from None
        return []
    except NotADirectoryError as error:
        raise NotADirectoryError(f"{out} is a file; a job needs its own directory") from error
    return [name for pattern in ENTRIES for name in sorted(names) if re.fullmatch(pattern, name)]


def move_aside(out: Path) -> Path:
    """Renames a job's directory to `out`.1 or the next free number, and puts an empty one in its place."""
    home = out.resolve()
    aside = next(home.with_name(f"{home.name}.{n}") for n in count(1) if not os.path.lexists(f"{home}.{n}"))
    with locked(home):
        try:
            os.rename(home, aside)
        except OSError as error:
            raise OSError(f"the job in {out} cannot be moved aside to {aside}: {error.strerror or error}") from error
    home.mkdir()
    return aside
