# SPDX-License-Identifier: Apache-2.0
"""One process or several: processes started together, as by `torchrun`, work with the same training loop as one.

Every process reads the same data, draws the same batch and takes its share of it, so the batch is that of a single
process, whatever their number. Only rank 0 writes and prints. Lightning Fabric finds out how the processes were
started, gives each its device, and sends what they exchange; one process alone needs none of it.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ...qat.distributed import synchronized

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """This process among `count`; the only one by default."""

    rank: int = 0
    count: int = 1
    fabric: Fabric | None = None

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def share(self, indices: Tensor) -> Tensor:
        """This process's part of [n]; the parts' lengths differ by at most one."""
        return indices[self.rank :: self.count]

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over all processes, in float64; the same bits in each process."""
        if self.fabric is None:
            return list(numbers)
        summed = self.fabric.all_reduce(torch.tensor(numbers, dtype=torch.float64), reduce_op="sum")
        return [float(number) for number in summed]

    def from_first(self, value: Result) -> Result:
        """The value from rank 0."""
        return value if self.fabric is None else self.fabric.broadcast(value)

    def first_does(self, work: Callable[[], Result]) -> Result:
        """What `work` returns in rank 0."""
        if self.count == 1:
            return work()
        value: Result | None = None
        failure: Exception | None = None
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
        return cast(Result, value)

    def synchronized(self, model: nn.Module) -> AbstractContextManager[None]:
        """In this context, batch norm and observed ranges of `model` are those of all processes."""
        return synchronized(model) if self.count > 1 else nullcontext()

    def replica(self, model: nn.Module) -> nn.Module:
        """The model to call in training, whose gradients are averaged over the processes. `model` stays usable."""
        # Not by Fabric.setup, whose wrapper shares attributes with the model by their names.
        return model if self.fabric is None else self.fabric.strategy.setup_module(model)


ALONE = Processes()


@contextmanager
def joined(accelerator: torch.device) -> Iterator[tuple[Processes, torch.device]]:
    """The processes that were started together, or this one alone, and the device of this process."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield ALONE, accelerator
        return
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    # Buffers are equal everywhere. PyTorch renamed the option that avoids sending them.
    names = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {option: False}
    # The others wait while the first writes, evaluates and compares. A process that ends is noticed at once anyway.
    strategy = DDPStrategy(timeout=timedelta(days=1), **options)
    fabric = Fabric(accelerator=accelerator.type, devices=here, num_nodes=count // here, strategy=strategy)
    fabric.launch()
    try:
        yield Processes(fabric.global_rank, count, fabric), fabric.device
    finally:
        torch.distributed.destroy_process_group()
