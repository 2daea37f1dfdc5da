# SPDX-License-Identifier: Apache-2.0
"""One process or several: processes started by `torchrun` work together here, with the same training loop as a single
process.

Every process holds the whole data, draws the same batch and takes its share of it, so the batch is that of a single
process, whatever their number. Only rank 0 writes and prints.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..train.torch.distributed import synchronized

Result = TypeVar("Result")


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
        """The value from rank 0."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]

    def first_does(self, work: Callable[[], Result]) -> Result:
        """What `work` returns in rank 0.

        Raises:
            ValueError, OSError: `work` raised it there, so no process waits for one that has ended.
        """
        if self.count == 1:
            return work()
        value, failure = None, None
        if self.writes:
            try:
                value = work()
            except (ValueError, OSError) as error:
                failure = error
        value, message = self.from_first((value, failure and str(failure)))
        if failure is not None:
            raise failure
        if message is not None:
            raise ValueError(f"the first process reports: {message}")
        return value

    def synchronized(self, model: nn.Module) -> AbstractContextManager[None]:
        """In this context, batch norm and observed ranges of `model` are those of all processes."""
        return synchronized(model) if self.count > 1 else nullcontext()

    def replica(self, model: nn.Module) -> nn.Module:
        """The model to call in training, whose gradients are averaged over the processes. `model` stays usable."""
        if self.count == 1:
            return model
        wrapper: Any = nn.parallel.DistributedDataParallel
        # The buffers are equal everywhere. PyTorch renamed the option that avoids sending them.
        names = inspect.signature(wrapper.__init__).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        return wrapper(model, **{option: False})


ALONE = Processes()


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that `torchrun` started together, or this one alone."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield ALONE
        return
    # The others wait while the first writes, evaluates and compares. A process that ends is noticed at once anyway.
    dist.init_process_group("gloo", timeout=timedelta(days=1))
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()
