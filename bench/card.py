# SPDX-License-Identifier: Apache-2.0
"""How calls are timed on a GPU: several sets of operands in rotation, by CUDA events, as replays where that works.

On a CPU the operands of a call are as near as they fit; on a GPU, whose second-level cache holds whole activations, a
kernel would look faster than the memory it meets in training. So every contestant has as many sets of operands as
exceed the cache together, results too, and calls them one after the other: a rotation.

A rotation is captured into a CUDA graph and replayed, so that small tensors tell about the kernels and not about
Python. What waits for the device cannot be captured, JAX's calls neither; a contestant's clock says which it was:

    graph   events around replays
    calls   events around calls, what Python takes before each among it
    host    the host's clock around calls; it waits for the last one

Our own calls are timed as graph and as calls, and each peer is compared with what has its own clock, or, for host, with
the calls. A sample is the mean of all calls of a turn. Nothing here imports a framework unless asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# What the sets of operands take together, in sizes of the cache; how many there are at least and at most.
CACHES = 2
FEWEST_SETS, MOST_SETS = 2, 512
# A turn after its untimed rotation.
BURST_SECONDS, MOST_REPEATS = 0.005, 1000
SETTINGS = "cuDNN benchmark on, TF32 off"

Seconds = Callable[[Callable[[], Any], int], float]  # of so many runs


class Card(NamedTuple):
    name: str
    cache_bytes: int  # of the second level


def find() -> Card:
    """The GPU that PyTorch uses.

    Raises:
        ValueError: there is none.
    """
    try:
        import torch
    except ImportError:
        raise ValueError("--device cuda needs PyTorch, which is not installed; without it there is cpu") from None
    if not torch.cuda.is_available():
        raise ValueError(f"--device must be one that is there, got cuda; PyTorch {torch.__version__} sees cpu alone")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Card(properties.name, properties.L2_cache_size)


def sets(moved: int, cache_bytes: int) -> int:
    """How many sets of operands a call of so many bytes rotates through."""
    return min(max(-(-CACHES * cache_bytes // max(moved, 1)), FEWEST_SETS), MOST_SETS)


def prepare(torch: Any) -> None:
    """PyTorch at its fastest in full float32."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


class Rotation(NamedTuple):
    """A contestant: `run` makes `count` calls, each on operands of its own."""

    run: Callable[[], Any]
    count: int
    clock: str
    seconds: Seconds

    def __call__(self) -> Any:
        return self.run()

    def turn(self) -> float:
        """Seconds of a call: one sample."""
        once = self.seconds(self.run, 1)
        repeats = min(max(round(BURST_SECONDS / once), 1), MOST_REPEATS) if once > 0 else MOST_REPEATS
        return self.seconds(self.run, repeats) / repeats / self.count


def called(torch: Any, calls: Sequence[Callable[[], Any]]) -> Rotation:
    """As a program makes the calls. All results of a rotation are held, so that they do not share memory."""
    return Rotation(lambda: [call() for call in calls], len(calls), "calls", _by_events(torch))


def replayed(torch: Any, calls: Sequence[Callable[[], Any]]) -> Rotation:
    """From a CUDA graph; as `called` if it cannot be captured."""
    rotation = called(torch, calls)
    replay = _captured(torch, rotation.run)
    return rotation if replay is None else rotation._replace(run=replay, clock="graph")


def by_host(calls: Sequence[Callable[[], Any]], wait: Callable[[Any], Any]) -> Rotation:
    """Calls that run in their order and are waited for together."""

    def seconds(run: Callable[[], Any], repeats: int) -> float:
        begun = time.perf_counter()
        for _ in range(repeats):
            results = run()
        wait(results)
        return time.perf_counter() - begun

    wait([call() for call in calls])  # compiles what has to be compiled
    return Rotation(lambda: [call() for call in calls], len(calls), "host", seconds)


def _by_events(torch: Any) -> Seconds:
    def seconds(run: Callable[[], Any], repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return seconds


def _captured(torch: Any, run: Callable[[], Any]) -> Callable[[], Any] | None:
    """A function that replays `run`; None if that waits for the device."""
    run()  # compiles and chooses algorithms, which may wait
    # A capture that fails leaves its stream and its memory in a state of their own, so what waits is found before.
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return None
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()):  # current again if the capture fails
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = run()
        except RuntimeError:
            return None

    def replay(results: Any = results) -> None:  # their memory stays theirs
        graph.replay()

    return replay
