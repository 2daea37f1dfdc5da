# SPDX-License-Identifier: Apache-2.0
"""What commands print: sentences and tables that fit the terminal, progress, and streams that outlive their reader."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status
    from rich.text import Text

    from ..application.report.page import Table

# Columns that any output needs, and from which a bar has room.
NARROWEST, WIDE = 20, 90


def open_streams() -> None:
    """A program may be started without streams, and a name that cannot be encoded must not end it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # COLUMNS may hold anything; rich takes it literally, and prints nothing at all in 0 columns.
    width = os.environ.pop("COLUMNS", "")
    if re.fullmatch(r"0*[1-9][0-9]{0,4}", width, re.ASCII):
        os.environ["COLUMNS"] = str(max(NARROWEST, int(width)))


def to_nobody(stream: IO[str]) -> None:
    """From here on, what is written to the stream is lost, as is what it still holds."""
    with contextlib.suppress(OSError, ValueError):
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, stream.fileno())
        os.close(nobody)


def console_of(**options: Any) -> Console:
    """A console that prints names as they are: no markup, no emoji; and that outlives its reader."""
    from rich.console import Console

    class Lasting(Console):
        def on_broken_pipe(self) -> None:
            # `exactqat train | head`: the training matters more than its reader.
            self.quiet = True
            to_nobody(self.file)

    return Lasting(markup=False, emoji=False, highlight=False, **options)


def line_of(*parts: str | tuple[str, str]) -> Text:
    """Texts, or texts and their styles; unprintable characters are escaped."""
    from rich.text import Text

    from ..kit.display import printable

    styled = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text), style) for text, style in styled))


def in_terminal(console: Console) -> bool:
    """Whether what is printed there may be drawn over, and has to be cut to a width; whatever is forced on rich."""
    return console.is_interactive and console.file.isatty()


def columns() -> int:
    return max(NARROWEST, shutil.get_terminal_size().columns)


def say(console: Console, *parts: str | tuple[str, str], whole: bool = False) -> None:
    """A sentence. On a terminal, lines break between words; elsewhere, and if it is to be copied `whole`, it is one
    line."""
    console.print(line_of(*parts), soft_wrap=whole or not in_terminal(console))


def show_table(console: Console, shown: Table) -> None:
    """A table, as wide as it needs to be where nobody set a width. Several rows with the same first cell belong
    together."""
    from rich.measure import Measurement
    from rich.table import Table

    table = Table()
    for column, name in enumerate(shown.header):
        table.add_column(line_of(name), justify="left" if column < shown.texts else "right", overflow="fold")
    names = [row[0].text for _, row in shown.rows]
    grouped = 2 * len(list(itertools.groupby(names))) <= len(names)
    for place, (marked, row) in enumerate(shown.rows):
        if place and grouped and names[place] != names[place - 1]:
            table.add_section()
        colors = {"good": "green", "bad": "red", "": ""}
        table.add_row(
            *(line_of((cell.short or cell.text, colors[cell.tone])) for cell in row), style="bold" if marked else None
        )
    say(console, (shown.caption, "italic"))
    if not in_terminal(console) and "COLUMNS" not in os.environ:
        needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        console.width = max(console.width, needed)
    console.print(table)


@contextlib.contextmanager
def native_messages_kept_back() -> Iterator[None]:
    """Keeps the runtime's own lines on stderr out of the progress bar; they are printed if something fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            messages.seek(0)
            with contextlib.suppress(OSError):
                os.write(2, messages.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def bars_on(console: Console, disable: bool) -> Progress:
    """The current work, how far it is, the last epoch's number, loss and accuracy, and the time left; gone when it
    ends. A task's field `figures` is a text such as "loss 0.12, 93.1% right", and `epoch` one such as "epoch 3/6". On a
    terminal only.

    The time left is estimated from the last hour, so it is also shown during phases without training.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    work = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    parts: list[Any] = [TextColumn("{task.description}", table_column=work, markup=False)]
    if console.width >= WIDE:
        parts += [TextColumn("{task.fields[epoch]}", markup=False), BarColumn(20)]
    parts += [TaskProgressColumn()]
    if console.width >= WIDE // 2:
        parts += [TextColumn("{task.fields[figures]}", markup=False)]
    return Progress(
        *parts,
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        expand=True,
        speed_estimate_period=3600,
        disable=disable or not in_terminal(console),
    )


def status_on(console: Console, text: str) -> Status:
    """The current work, next to a spinner; on a terminal only."""
    return console.status(line_of(text), spinner="dots" if console.encoding.startswith("utf") else "line")
