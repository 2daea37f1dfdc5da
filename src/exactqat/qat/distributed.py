# SPDX-License-Identifier: Apache-2.0
"""Training in several processes: batch norm and observed ranges that see every process's share of the batch.

`torch.nn.parallel.DistributedDataParallel` averages gradients and nothing else. Without `synchronized`, batch norm
would normalize each share separately, and ranges would come from one process. `torch.nn.SyncBatchNorm` runs on GPUs
only; this runs wherever the process group does, and shares may differ in size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from .train.torch import layers
from .train.torch.collectives import normalized, several_processes
from .train.torch.layers import batch_norm_tensors, share_of_batch
from .train.torch.prepared import PreparedModel
from .train.torch.tree import Kept

__all__ = ["synchronized"]


def __dir__() -> list[str]:
    return __all__


@contextmanager
def synchronized(model: nn.Module) -> Iterator[None]:
    """While the context lasts, batch norm, folded or not, and observed ranges of `model` see all processes' batches.

    Enter it in every process, before the model is wrapped in ``DistributedDataParallel(..., broadcast_buffers=False)``
    (the buffers are equal everywhere, so there is nothing to broadcast). All processes must then train in step.
    Evaluation needs no other process. One process alone trains as it would outside of the context.

    A learned range starts from calibration, where each process has to see the same batches.

    Raises:
        ValueError: a batch norm without running statistics.
    """
    states = [module._state for module in model.modules() if isinstance(module, PreparedModel)]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    norms = [norm for norm in norms if not isinstance(norm, Kept)]
    if not all(norm.track_running_stats for norm in norms):
        raise ValueError("track_running_stats must be True: inference uses the running statistics")
    kinds = [type(norm) for norm in norms]
    for state in states:
        state.together = True
    for norm in norms:
        # Only the class is swapped: parameters, hooks and the place in the model stay as they are.
        norm.__class__ = CrossReplicaBatchNorm2d if isinstance(norm, nn.BatchNorm2d) else CrossReplicaBatchNorm1d
    try:
        yield
    finally:
        for state in states:
            state.together = False
        for norm, kind in zip(norms, kinds, strict=True):
            norm.__class__ = kind


class CrossReplica(nn.modules.batchnorm._NormBase):
    """A batch norm whose training statistics are those of all processes' batches together.

    The same sums and the same formulas as in one process: only the order of adding the shares differs, so per-channel
    values agree to the last bits of float64 before rounding.
    """

    def forward(self, features: Tensor) -> Tensor:
        self._check_input_dim(features)
        tensors = batch_norm_tensors(self)
        share = share_of_batch(tensors, self.momentum) if self.training else None
        if self.training and several_processes():
            return normalized(features, tensors, self.eps, share)[0]
        return layers.normalized(features, tensors, self.eps, self.training, share)


# Classes with names, so that a module can be pickled meanwhile.


class CrossReplicaBatchNorm2d(CrossReplica, nn.BatchNorm2d):
    """For [batch, channels, height, width]."""


class CrossReplicaBatchNorm1d(CrossReplica, nn.BatchNorm1d):
    """For [batch, features] and [batch, features, length]."""
