# SPDX-License-Identifier: Apache-2.0
"""Several devices for JAX on one CPU."""

from __future__ import annotations


def environment(count: int) -> dict[str, str]:
    """The variables for `count` of them, to be set before JAX is imported.

    XLA runs programs, and starts the next ones, in one pool with a thread for each processor, or for each device if
    these are more. With no more threads than devices, an all-reduce can wait for a thread that it never gets, probably
    because the next program has it, and XLA ends the process after a minute. Small steps of plain JAX on two devices
    did so within seconds with two and with three threads, and not with four.
    """
    return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "PJRT_NPROC": str(2 * count)}
