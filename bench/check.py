# SPDX-License-Identifier: Apache-2.0
"""Before anything is timed: does every operation give the reference's bits?

All test cases of the operators that are timed, and a few of the tensors that are, at every number of threads that is
timed. A fast wrong answer is worth nothing, so the benchmark prints no figure if one differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from layers import Activation, Depthwise, activations, depthwise_layers, spread
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


def reference(raw: str, operands: dict[str, np.ndarray], attributes: dict[str, Any]) -> Any:
    from exactqat import reference

    return reference.call(raw, operands, attributes)


def _answer(evaluate: Evaluate, call: tuple[str, dict[str, np.ndarray], dict[str, Any]]) -> Any:
    try:
        results = evaluate(*call)
    except (ValueError, TypeError) as error:
        return type(error)
    return results if isinstance(results, tuple) else (results,)


def compare(what: str, raw: str, operands: dict[str, np.ndarray], attributes: dict[str, Any], under_test: Evaluate,
            threads: Sequence[int]) -> None:  # fmt: skip
    """Raises Red unless `under_test` gives the reference's bits, or its error, at each number of threads."""
    from bits import assert_same_bits  # of tests/

    import exactqat as eq

    call = raw, operands, attributes
    expected = _answer(reference, call)
    before = eq.get_num_threads()
    try:
        for count in threads:
            eq.set_num_threads(count)
            found = _answer(under_test, call)
            if isinstance(expected, type) or isinstance(found, type):
                if found != expected:
                    raise Red(f"{what}, {count} threads: got {found}, expected {expected}")
                continue
            for number, (result, wanted) in enumerate(zip(found, expected, strict=True)):
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


def _calls(operation: Operation) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, Any]]]:
    for layer in shapes_of(operation):
        for form in operation.formats:
            operands, attributes = operation.call(layer, 1, form)
            what = f"{operation.title} {form} of 1x{layer}"
            yield what, {name: make(description) for name, description in operands.items()}, attributes


def run(
    threads: Sequence[int],
    operations: Sequence[Operation] = OPERATIONS,
    under_test: Evaluate = kernels,
    seconds: float = SECONDS,
) -> tuple[int, int]:
    """How many test cases and how many layers' tensors were compared. Raises Red at the first that differs.

    All test cases are compared; layers, the largest of each operation first, for as long as `seconds` allow.
    """
    from cases import cases  # of tests/

    started, found = time.monotonic(), [0, 0]
    for raw in sorted({operation.raw for operation in operations}):
        for case in cases(raw):
            operands = {name: np.array(array, order="C") for name, array in case.operands.items()}
            compare(case.name, raw, operands, dict(case.attributes), under_test, threads)
            found[0] += 1
    waiting = [(operation.raw, _calls(operation)) for operation in operations]
    while waiting:
        for raw, calls in list(waiting):
            call = next(calls, None)
            if call is None or (found[1] >= len(operations) and time.monotonic() - started > seconds):
                waiting.remove((raw, calls))
            else:
                compare(call[0], raw, call[1], call[2], under_test, threads)
                found[1] += 1
    return found[0], found[1]
