# SPDX-License-Identifier: Apache-2.0
"""One process or several: what `torchrun` starts works together here, with the same training loop as a single process.

Every process holds the whole data, draws the same batch and takes its share of it, so the batch is that of a single
process, whatever their number. Only the process of rank 0 writes and prints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..qat.distributed import synchronize


@dataclass(frozen=True)
class Processes:
    """This process among `count`; the only one by default."""

    rank: int = 0
    count: int = 1

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def share(self, indices: Tensor) -> Tensor:
        """This process's part of [n]; the parts' lengths differ by at most one."""
        return indices[self.rank :: self.count]

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over all processes, in float64; the same bits in each process."""
        if self.count == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def from_first(self, value: Any) -> Any:
        """What the process of rank 0 gave."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]

    def replica(self, model: nn.Module) -> nn.Module:
        """The model to call in training: gradients are averaged, statistics and ranges shared. `model` stays usable."""
        if self.count == 1:
            return model
        synchronize(model)
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)


ALONE = Processes()


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that `torchrun` started together, or this one alone."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield ALONE
        return
    dist.init_process_group("gloo")
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()
