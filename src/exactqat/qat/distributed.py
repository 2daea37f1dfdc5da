# SPDX-License-Identifier: Apache-2.0
"""Training in several processes: batch norm and observed ranges that see every process's share of the batch.

`torch.nn.parallel.DistributedDataParallel` averages gradients and nothing else. Without `synchronized`, batch norm
would normalize each share separately, and ranges would come from one process. `torch.nn.SyncBatchNorm` runs on GPUs
only; this runs wherever the process group does, and shares may differ in size.
"""

from .train.torch.distributed import synchronized

__all__ = ["synchronized"]
