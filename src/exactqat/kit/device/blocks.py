# SPDX-License-Identifier: Apache-2.0
"""Large arrays in blocks that stay in a core's own cache, shared by threads."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ... import get_num_threads

try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # an extra: without it one thread does it all, beside those of BLAS
    ThreadpoolController = None

# Of float32, what a core's second-level cache holds beside the other things.
CACHED_VALUES = 1 << 16
# Of `scratch`, for each of a thread's names.
KEPT_BYTES = 1 << 23
# More would have to wait for the interpreter's lock.
MOST_THREADS = 4

Block = TypeVar("Block")


def rows_of_block(values: int, most: int, fewest: int = 1) -> int:
    """How many rows of that many values make a block that stays in the core's own cache."""
    return max(min(CACHED_VALUES // values, most), fewest)


def blocks(places: Sequence[int], rows: int) -> list[tuple[slice, slice]]:
    """Parts of [batch, height, width] of at most `rows` places: several images, or several lines of one."""
    images, height, width = places
    if height * width <= rows:
        together = rows // (height * width)
        return [(slice(first, first + together), slice(None)) for first in range(0, images, together)]
    together = rows // width
    lines = range(0, height, together)
    return [(slice(image, image + 1), slice(line, line + together)) for image in range(images) for line in lines]


def share(work: Callable[[Sequence[Block]], None], todo: Sequence[Block]) -> None:
    """Calls `work` with all blocks; where there are several, in threads that have a part of them each.

    What is done with one block must not depend on another.
    """
    pool = executor() if len(todo) > 1 and threads() > 1 else None
    count = min(len(todo), threads()) if pool else 1
    edges = [len(todo) * part // count for part in range(count + 1)]
    with one_thread_for_blas():
        others = [pool.submit(work, todo[start:end]) for start, end in itertools.pairwise(edges[1:])] if pool else []
        try:
            work(todo[: edges[1]])
        finally:
            errors = [other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.kept: dict[str, np.ndarray] = {}


_scratch = _Scratch()


def scratch(name: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Memory of this thread, whatever is in it, until the thread asks for that name again.

    Fresh memory of such sizes would cost as much as what is computed in it.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size > KEPT_BYTES:
        return np.empty(shape, dtype)
    kept = _scratch.kept.get(name)
    if kept is None or kept.nbytes < size:
        kept = _scratch.kept[name] = np.empty(size, np.uint8)
    return kept[:size].view(dtype).reshape(shape)


def repeated(name: str, values: np.ndarray, rows: int, dtype: object = None) -> np.ndarray:
    """`scratch` [rows, channels] with values [channels] in every row: NumPy is three times slower on rows as short as
    there are channels than on whole blocks of them."""
    result = scratch(name, (rows, len(values)), dtype or values.dtype)
    result[...] = values
    return result


def threads() -> int:
    """How many may work at once."""
    if ThreadpoolController is None:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(cores, get_num_threads(), MOST_THREADS), 1)


@functools.cache
def executor() -> ThreadPoolExecutor | None:
    """The other threads, all of them started; None where the system gives none."""
    pool = ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="exactqat")
    meeting = threading.Barrier(MOST_THREADS)
    try:
        # Each waits for the others, so that no later task asks for a thread.
        for _ in range(MOST_THREADS - 1):
            pool.submit(meeting.wait)
        meeting.wait()
    except RuntimeError:
        meeting.abort()
        pool.shutdown(wait=False)
        return None
    return pool


class _Blas:
    """The libraries that compute NumPy's products, and how many callers restrict them to one thread."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0
        self.controller: Any = None
        self.limits: Any = None


_blas = _Blas()


@contextlib.contextmanager
def one_thread_for_blas() -> Iterator[None]:
    """BLAS, in all of the process, uses one thread for a product meanwhile.

    The threads of `share` have products of their own, and those of BLAS wait for each other in all of them: where
    another process takes a core from one, that is a hundred times slower than none.
    """
    if ThreadpoolController is None:
        yield
        return
    blas = _blas
    with blas.lock:
        blas.users += 1
        if blas.users == 1:
            blas.controller = blas.controller or ThreadpoolController()
            blas.limits = blas.controller.limit(limits=1, user_api="blas")
    try:
        yield
    finally:
        with blas.lock:
            blas.users -= 1
            if blas.users == 0:
                blas.limits.restore_original_limits()


def _forget_threads() -> None:
    """A forked child has none of its parent's."""
    global _blas
    _blas = _Blas()
    executor.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
