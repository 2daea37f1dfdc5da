# SPDX-License-Identifier: Apache-2.0
"""Evaluates networks on the same examples, here or by the workers of an executor."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor
from dataclasses import dataclass

import numpy as np

from ..deploy.codes import codes_of, output_values
from ..deploy.graph import Graph
from ..deploy.simulate import compile as compiled
from ..kit.planning.callers import users_line
from .metrics import Data, Mark, Metric, score
from .network import Candidate
from .precisions import Precisions
from .variants import Variants

BATCH = 16


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

    def marks(self, graphs: Sequence[Graph]) -> list[Mark]:
        """How good each network is; in any process."""
        marks: list[Mark] = []
        codes: Mapping[str, np.ndarray] = {}
        before: object = None
        for graph in graphs:
            grids = [graph.tensors[name].quantization for name in graph.inputs]
            read = graph.signature.inputs, [(grid.scale.tobytes(), grid.zero_point.tobytes()) for grid in grids]
            if read != before:  # few read their inputs otherwise than the one before
                codes, before = codes_of(graph, self.data.inputs), read
            # Not `simulate`, which keeps the memory that a graph is computed in as long as the graph.
            results = compiled(graph, self.device).run(codes, batch_size=BATCH)
            marks.append(Mark.of(output_values(graph, results), self.data, self.metric, self.reference))
        return marks


class Evaluations:
    """Marks of networks, in order.

    Each worker of an executor gets its share of them at once, with the examples. If one is lost, the rest is evaluated
    here.
    """

    def __init__(
        self,
        base: Candidate,
        data: Data,
        metric: Metric,
        executor: Executor | None,
        reference: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """base: the network whose variants are evaluated. reference: its outputs in 16 bits, if they are known."""
        known = Variants(Precisions(base), data).fine_outputs if reference is None else reference
        self._task = Task(base.device, data, metric, known)
        self._executor = executor

    @property
    def float_metric(self) -> float:
        """The metric of the float network, in 16 bits."""
        return score(self._task.metric, self._task.reference, self._task.data.targets)

    def marks(self, candidates: Sequence[Candidate | None]) -> list[Mark | None]:
        """The mark of each network; None: there is none, or the device has no such network."""
        numbers, graphs = [], []
        for number, candidate in enumerate(candidates):
            with contextlib.suppress(ValueError):
                if candidate is not None:
                    graphs.append(candidate.graph())
                    numbers.append(number)
        marks: list[Mark | None] = [None] * len(candidates)
        # Not every executor says how many workers it has.
        workers = getattr(self._executor, "_max_workers", None) or os.cpu_count() or 1
        size = max(1, -(-len(graphs) // workers))
        shares = [graphs[at : at + size] for at in range(0, len(graphs), size)]
        for number, mark in zip(numbers, itertools.chain.from_iterable(self._of(shares)), strict=True):
            marks[number] = mark
        return marks

    def _of(self, shares: Sequence[Sequence[Graph]]) -> list[list[Mark]]:
        """The marks of each share."""
        marks: list[list[Mark]] = []
        if self._executor is not None and sum(map(len, shares)) > 1:
            try:
                for future in [self._executor.submit(Task.marks, self._task, share) for share in shares]:
                    marks.append(future.result())
            except (BrokenExecutor, CancelledError, RuntimeError) as error:  # a RuntimeError: it was shut down
                self._executor, reason = None, " ".join(str(error).split()) or type(error).__name__
                warnings.warn(
                    f"the executor is gone ({reason}): all else is evaluated in this process", stacklevel=users_line()
                )
        return marks + [self._task.marks(share) for share in shares[len(marks) :]]
