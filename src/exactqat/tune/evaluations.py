# SPDX-License-Identifier: Apache-2.0
"""Evaluates networks on the same examples, here or by the workers of an executor."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..deploy.codes import codes_of, output_values
from ..deploy.graph import Graph
from ..deploy.simulate import simulate
from ..kit.device.operator import Refusal
from ..kit.planning.callers import users_line
from .metrics import Data, Mark, Metric
from .network import Candidate

BATCH = 64


@dataclass(frozen=True)
class Task:
    """What all evaluations have in common.

    Attributes:
        reference: the float network's outputs.
    """

    device: str
    data: Data
    metric: Metric
    reference: Mapping[str, np.ndarray]

    def mark(self, graph: Graph) -> Mark:
        """How good a network is."""
        codes = simulate(graph, codes_of(graph, self.data.inputs), self.device, batch_size=BATCH, progress=False)
        return Mark.of(output_values(graph, codes), self.data, self.metric, self.reference)


# In a worker: the tasks that it was sent, the newest last, and how many it keeps.
_SENT: dict[str, Task] = {}
_KEPT = 4


def _work(key: str, graph: Graph, task: Task | None) -> Mark | None:
    """In any process; None: it was not sent the task yet."""
    if task is not None:
        _SENT[key] = task
        for old in [*_SENT][:-_KEPT]:
            del _SENT[old]
    return _SENT[key].mark(graph) if key in _SENT else None


class Evaluations:
    """Marks of networks, in order.

    The examples are sent along with one network for each worker, which keeps them, and again only to a worker that says
    that it lacks them. If a worker is lost, the rest is evaluated here.
    """

    def __init__(self, task: Task, executor: Executor | None) -> None:
        self._task, self._executor, self._key = task, executor, uuid.uuid4().hex
        # How many more networks take the examples along; not every executor says how many workers it has.
        self._unsent = getattr(executor, "_max_workers", None) or 1

    def marks(self, candidates: Sequence[Candidate | None]) -> Iterator[Mark | None]:
        """The mark of each network; None: there is none, or the device has no such network."""
        graphs = [graph_of(candidate) for candidate in candidates]
        submitted: list[Future[Mark | None] | None] = [None] * len(graphs)
        if sum(graph is not None for graph in graphs) > 1:
            for at, graph in enumerate(graphs):
                if graph is not None:
                    submitted[at] = self._submitted(graph, self._unsent > 0)
                    self._unsent -= 1
        for graph, future in zip(graphs, submitted, strict=True):
            mark = self._answer(future)
            if graph is None:
                yield None
                continue
            if mark is None and future is not None:
                mark = self._answer(self._submitted(graph, True))
            yield self._task.mark(graph) if mark is None else mark

    def close(self) -> None:
        """Forgets what workers in this process were sent."""
        _SENT.pop(self._key, None)

    def _submitted(self, graph: Graph, with_task: bool) -> Future[Mark | None] | None:
        if self._executor is None:
            return None
        try:
            return self._executor.submit(_work, self._key, graph, self._task if with_task else None)
        except RuntimeError as error:  # it is broken, or was shut down
            self._lost(error)
            return None

    def _answer(self, future: Future[Mark | None] | None) -> Mark | None:
        """None: the worker lacks the task, or there is none any more."""
        try:
            return None if future is None else future.result()
        except (BrokenExecutor, CancelledError) as error:
            self._lost(error)
            return None

    def _lost(self, error: BaseException) -> None:
        if self._executor is not None:
            self._executor = None
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(
                f"the executor is gone ({reason}): all else is evaluated in this process", stacklevel=users_line()
            )


def graph_of(candidate: Candidate | None) -> Graph | None:
    """A candidate's integers; None: the device has no such network."""
    try:
        return None if candidate is None else candidate.graph()
    except (ValueError, Refusal):
        return None


def require_executor(executor: Any) -> None:
    """Refuses anything but an executor before any computation."""
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise TypeError(f"executor must be a concurrent.futures.Executor, got {type(executor).__name__}")


__all__ = ["Evaluations", "Task", "graph_of", "require_executor"]
