# SPDX-License-Identifier: Apache-2.0
"""CPU kernels: the same C++ built once for each instruction set, chosen here at import.

`EXACTQAT_ISA` (avx512, avx2, neon or baseline) forces one; all give the same bits. `EXACTQAT_NUM_THREADS` limits the
threads, `EXACTQAT_KEEP_MIB` the memory of freed large results that is kept for the next ones.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TypeAlias

from exactqat.operators.cpu._features import instruction_sets
from exactqat.operators.declarations.op import OPERATORS, Operator, Shortcut
from exactqat.operators.declarations.specification import Attributes, Lowering, TensorSpec, Value

# How a call ran: its plan, for each result what makes it or the operand that it is like, and the attributes.
Learned: TypeAlias = tuple[Callable[..., None], Sequence[int | Callable[[], object]], tuple[Value, ...]]

INSTRUCTION_SETS: tuple[str, ...] = tuple(instruction_sets())  # those this processor can run, best first


def load(instruction_set: str) -> ModuleType:
    """The kernel module built for one instruction set."""
    if instruction_set not in INSTRUCTION_SETS:
        raise ValueError(
            f"EXACTQAT_ISA must be one of {', '.join(INSTRUCTION_SETS)} on this processor, got {instruction_set!r}"
        )
    return import_module(f"exactqat.operators.cpu._{instruction_set}")


kernels = load(os.environ.get("EXACTQAT_ISA") or INSTRUCTION_SETS[0])


def plan(module: ModuleType, operands: tuple[TensorSpec, ...], lowered: Lowering) -> Callable[..., None]:
    """A call of one kernel, ready to run on addresses: those of the operands, then those of the results."""
    arrays = [(spec.dtype, spec.shape) for spec in (*operands, *lowered.results)]
    return module.plan(lowered.kernel, arrays, len(operands), dict(lowered.numbers))


@lru_cache(maxsize=4096)
def planned(
    op: Operator, operands: tuple[TensorSpec, ...], attributes: Attributes
) -> tuple[Lowering, Callable[..., None]]:
    """`op.lower` and the plan for it, remembered: a call with known shapes costs one look-up."""
    lowered = op.lower(operands, attributes)
    return lowered, plan(kernels, operands, lowered)


def shortcut(
    op: Operator,
    types: tuple[type, ...],
    learn: Callable[[tuple[object, ...], dict[str, object]], Learned],
    *,
    numbers: tuple[type, ...] = (),
    unusual: tuple[Callable[[], object], ...] = (),
    exchange: object = None,
    to_dlpack: object = None,
    is_negated: object = None,
    offset: object = None,
    storage: object = None,
    bytes: object = None,
    like: object = None,
    is_grad_enabled: object = None,
    differentiable: object = None,
    is_inference: object = None,
    written: object = None,
) -> Shortcut:
    """`(args, kwargs, out) -> results` for calls of `op` that look like an earlier one, None for others (bind.cpp)."""
    parameters = [(name, name in op.operands) for name in op.parameters]
    wrap = op.result_type
    return kernels.shortcut(
        parameters, types, numbers, learn, wrap, unusual, exchange, to_dlpack, is_negated, offset, storage, bytes, like,
        is_grad_enabled, differentiable, is_inference, written, op.reuses,
    )  # fmt: skip


def forget_plans() -> None:
    """Plan all calls again, with the `kernels` loaded by then."""
    planned.cache_clear()
    for op in OPERATORS.values():
        op.shortcuts.clear()


# Results of at least this many bytes get memory from the library's own blocks (memory.h).
LARGE = 1 << 20


def block(bytes: int) -> memoryview:
    """Memory for one large result, as an object with the buffer protocol.

    Freed blocks are kept for the next results, up to `EXACTQAT_KEEP_MIB` (4,096) in all.
    """
    return kernels.Block(bytes)


def get_num_threads() -> int:
    """Number of threads that kernels may use."""
    return int(kernels.thread_count())


def set_num_threads(count: int) -> None:
    """Let kernels use `count` threads (at least 1). Results do not depend on it.

    There are fewer where the system gives no more, and never more than there are processors or, with few processors,
    64.

    Beside PyTorch kernels run on its OpenMP threads, so there `torch.set_num_threads` is a limit as well.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be an integer of at least 1, got {count!r}")
    kernels.set_thread_count(count)
