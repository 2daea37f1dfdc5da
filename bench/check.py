# SPDX-License-Identifier: Apache-2.0
"""Before anything is timed: does every operation give the reference's bits?

All test cases of the operators that are timed, and a few of the tensors that are, at every number of threads that is
timed. A fast wrong answer is worth nothing, so the benchmark prints no figure if one differs. A GPU's results of
tensors that are too large for the reference are compared with the CPU's, which are the reference's.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from layers import BATCHES, Activation, Depthwise, activations, depthwise_layers, spread
from operations import OPERATIONS, Operation, make

SECONDS = 40.0
# The reference is slow: larger tensors than this are left to their test cases and smaller sisters.
LARGEST = 1_500_000


class Red(Exception):
    """Some result is not the reference's."""


Evaluate = Callable[[str, dict[str, np.ndarray], dict[str, Any]], Any]


def kernels(raw: str, operands: dict[str, np.ndarray], attributes: dict[str, Any]) -> Any:
    import exactqat as eq

    return getattr(eq.raw_ops, raw)(**operands, **attributes)


def on_card(raw: str, operands: dict[str, np.ndarray], attributes: dict[str, Any]) -> Any:
    """The kernels on the GPU."""
    from conftest import as_array, as_tensor  # of tests/

    tensors = {name: as_tensor(array).to("cuda") for name, array in operands.items()}
    results = kernels(raw, tensors, attributes)
    return tuple(as_array(result) for result in (results if isinstance(results, tuple) else (results,)))


def reference(raw: str, operands: dict[str, np.ndarray], attributes: dict[str, Any]) -> Any:
    from exactqat.operators import reference

    return reference.call(raw, operands, attributes)


def _answer(evaluate: Evaluate, call: tuple[str, dict[str, np.ndarray], dict[str, Any]]) -> Any:
    try:
        results = evaluate(*call)
    except (ValueError, TypeError) as error:
        return type(error)
    return results if isinstance(results, tuple) else (results,)


def compare(what: str, raw: str, operands: dict[str, np.ndarray], attributes: dict[str, Any], under_test: Evaluate,
            threads: Sequence[int], wanted_of: Evaluate = reference, unseen: bool = False) -> None:  # fmt: skip
    """Raises Red unless `under_test` gives the bits of `wanted_of`, or its error, at each number of threads.

    unseen: it cannot look at values before it answers; what is refused for its values may be NaN.
    """
    from bits import assert_same_bits  # of tests/

    import exactqat as eq

    call = raw, operands, attributes
    expected = _answer(wanted_of, call)
    before = eq.get_num_threads()
    try:
        for count in threads:
            eq.set_num_threads(count)
            answer = _answer(under_test, call)
            if isinstance(expected, type) or isinstance(answer, type):
                late = unseen and isinstance(answer, tuple) and all(np.isnan(result).all() for result in answer)
                if answer != expected and not late:
                    raise Red(f"{what}, {count} threads: got {answer}, expected {expected}")
                continue
            for number, (result, wanted) in enumerate(zip(answer, expected, strict=True)):
                try:
                    assert_same_bits(result, wanted, what=f"{what}, result {number}, {count} threads")
                except AssertionError as error:
                    raise Red(str(error)) from None
    finally:
        eq.set_num_threads(before)


def shapes_of(operation: Operation) -> list[Activation] | list[Depthwise]:
    """Some of the layers that are timed, small enough for the reference, the largest of them first."""
    every: Iterable[Any] = depthwise_layers() if operation.group == "depthwise" else activations()
    return spread([layer for layer in every if math.prod(layer.size) <= LARGEST], 6)


def _calls(
    operation: Operation, layers: Iterable[Any], batch: int
) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, Any]]]:
    for layer in layers:
        for form in operation.formats:
            operands, attributes = operation.call(layer, batch, form)
            what = f"{operation.title} {form} of {batch}x{layer}"
            yield what, {name: make(description) for name, description in operands.items()}, attributes


def run(
    threads: Sequence[int],
    operations: Sequence[Operation] = OPERATIONS,
    under_test: Evaluate = kernels,
    seconds: float = SECONDS,
    unseen: bool = False,
) -> tuple[int, int]:
    """How many test cases and how many layers' tensors were compared. Raises Red at the first that differs.

    All test cases are compared; layers, the largest of each operation first, for as long as `seconds` allow. unseen: as
    for `compare`.
    """
    from cases import cases  # of tests/

    started, counts = time.monotonic(), [0, 0]
    for raw in sorted({operation.raw for operation in operations}):
        for case in cases(raw):
            operands = {name: np.array(array, order="C") for name, array in case.operands.items()}
            compare(case.name, raw, operands, dict(case.attributes), under_test, threads, unseen=unseen)
            counts[0] += 1
    waiting = [(operation.raw, _calls(operation, shapes_of(operation), 1)) for operation in operations]
    while waiting:
        for raw, calls in list(waiting):
            call = next(calls, None)
            if call is None or (counts[1] >= len(operations) and time.monotonic() - started > seconds):
                waiting.remove((raw, calls))
            else:
                compare(call[0], raw, call[1], call[2], under_test, threads)
                counts[1] += 1
    return counts[0], counts[1]


def run_on_card(
    operations: Sequence[Operation] = OPERATIONS,
    under_test: Evaluate = on_card,
    seconds: float = SECONDS,
    batch: int = BATCHES["cuda"][0],
) -> tuple[int, int]:
    """`run` for a GPU; then, with the CPU's kernels, the largest and the smallest layers that are timed."""
    count, tensors = run([1], operations, under_test, seconds, unseen=True)
    cores = [len(os.sched_getaffinity(0))]
    for operation in operations:
        every: Iterable[Any] = depthwise_layers() if operation.group == "depthwise" else activations()
        for call in _calls(operation, spread(every, 2), batch):
            what, operands, attributes = call
            compare(what, operation.raw, operands, attributes, under_test, cores, wanted_of=kernels)
            tensors += 1
    return count, tensors
