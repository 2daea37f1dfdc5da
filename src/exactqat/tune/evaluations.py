# SPDX-License-Identifier: Apache-2.0
"""Evaluates networks on the same examples, here or by the workers of an executor."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..deploy.codes import codes_of, output_values
from ..deploy.graph import Graph
from ..deploy.simulate import simulate
from ..kit.device.operator import Refusal
from ..kit.planning.callers import users_line
from .metrics import Data, Mark, Metric, score
from .network import Candidate
from .variants import fine_outputs

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

    def marks(self, graphs: Sequence[Graph]) -> list[Mark]:
        """How good each network is; in any process."""
        return [self.mark(graph) for graph in graphs]


class Evaluations:
    """Marks of networks, in order.

    Each worker gets its share of them at once, with the examples. If a worker is lost, the rest is evaluated here.
    """

    def __init__(self, base: Candidate, data: Data, metric: Metric, executor: Executor | None) -> None:
        """base: the network whose variants are evaluated."""
        self._task = Task(base.device, data, metric, fine_outputs(base, data))
        self._executor = executor

    @property
    def float_metric(self) -> float:
        """The metric of the float network, in 16 bits."""
        return score(self._task.metric, self._task.reference, self._task.data.targets)

    def marks(self, candidates: Sequence[Candidate | None]) -> list[Mark | None]:
        """The mark of each network; None: there is none, or the device has no such network."""
        graphs = [_graph_of(candidate) for candidate in candidates]
        marks = iter(self._of([graph for graph in graphs if graph is not None]))
        return [None if graph is None else next(marks) for graph in graphs]

    def _of(self, graphs: list[Graph]) -> list[Mark]:
        # Not every executor says how many workers it has.
        workers = getattr(self._executor, "_max_workers", None) or os.cpu_count() or 1
        size = max(1, -(-len(graphs) // workers))
        shares = [graphs[at : at + size] for at in range(0, len(graphs), size)]
        futures: list[Future[list[Mark]]] = []
        marks: list[Mark] = []
        for share in shares:
            try:
                if self._executor is not None and len(graphs) > 1:
                    futures.append(self._executor.submit(Task.marks, self._task, share))
            except RuntimeError as error:  # it is broken, or was shut down
                self._lost(error)
        for at, share in enumerate(shares):
            try:
                marks += futures[at].result() if at < len(futures) else self._task.marks(share)
            except (BrokenExecutor, CancelledError) as error:
                self._lost(error)
                marks += self._task.marks(share)
        return marks

    def _lost(self, error: BaseException) -> None:
        if self._executor is not None:
            self._executor = None
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(
                f"the executor is gone ({reason}): all else is evaluated in this process", stacklevel=users_line()
            )


def _graph_of(candidate: Candidate | None) -> Graph | None:
    """A candidate's integers; None: the device has no such network."""
    try:
        return None if candidate is None else candidate.graph()
    except (ValueError, Refusal):
        return None


def require_executor(executor: Any) -> None:
    """Refuses anything but an executor before any computation."""
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise TypeError(f"executor must be a concurrent.futures.Executor, got {type(executor).__name__}")


__all__ = ["Evaluations", "Task", "require_executor"]
