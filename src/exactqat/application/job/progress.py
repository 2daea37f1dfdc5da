# SPDX-License-Identifier: Apache-2.0
"""How a job reports what it is doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..report.results import History


@dataclass(frozen=True)
class Progress:
    """How the job reports what it does. begin(text): a new piece of work; advance(n): n more training steps are done;
    skip(n): n steps were done in an earlier run, or are skipped, so they take no time; epoch(training, history, n): one
    more of a training's n epochs is done, or those done earlier; say(text): a sentence that the user should read;
    compared(n, m): n of the m comparisons of a file are done."""

    begin: Callable[[str], None] = lambda text: None
    advance: Callable[[int], None] = lambda steps: None
    skip: Callable[[int], None] = lambda steps: None
    epoch: Callable[[str, History, int], None] = lambda name, history, epochs: None
    say: Callable[[str], None] = lambda text: None
    compared: Callable[[int, int], None] = lambda done, all: None
