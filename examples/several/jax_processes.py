# SPDX-License-Identifier: Apache-2.0
"""The same over all machines' devices: python jax_processes.py ADDRESS:PORT COUNT NUMBER, once for each process.

Under SLURM, on Cloud TPUs and in Kubernetes, `jax.distributed.initialize()` finds the three by itself.
"""

import sys

import jax

if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # GPUs have NCCL
    jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    import jax_sharded

    jax_sharded.main()
