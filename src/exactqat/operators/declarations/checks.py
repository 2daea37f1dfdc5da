# SPDX-License-Identifier: Apache-2.0
"""Checks that several families share. Each names the argument, what was given and what is allowed."""

from exactqat.operators.declarations.specification import FLOATS, TensorSpec, wide


def check_dtypes(**specs: TensorSpec) -> None:
    """Checks that all have one dtype, which the kernels support."""
    (first, leading), *others = specs.items()
    if leading.dtype not in FLOATS:
        raise TypeError(f"{first} must be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}, got {leading.dtype}")
    for name, spec in others:
        if spec.dtype != leading.dtype:
            raise TypeError(f"{name} must be {leading.dtype} like {first}, got {spec.dtype}")


def check_wide_dtypes(leading: TensorSpec, first: str, **specs: TensorSpec) -> None:
    """Ranges and statistics of a tensor: of its dtype, or float32 if it has 16 bits."""
    for name, spec in specs.items():
        if spec.dtype != wide(leading.dtype):
            raise TypeError(f"{name} must be {wide(leading.dtype)} for {leading.dtype} {first}, got {spec.dtype}")


def check_rank(rank: int, **specs: TensorSpec) -> None:
    for name, spec in specs.items():
        if spec.rank != rank:
            raise ValueError(f"{name} must be rank {rank} but is rank {spec.rank} (shape {list(spec.shape)})")


def check_same_shape(**specs: TensorSpec) -> None:
    (first, leading), *others = specs.items()
    for name, spec in others:
        if spec.shape != leading.shape:
            raise ValueError(
                f"{first} and {name} must be the same size, got {list(leading.shape)} and {list(spec.shape)}"
            )


def check_length(length: int, of: str, **specs: TensorSpec) -> None:
    """Vectors of one length; `of` tells what the length is taken from."""
    check_rank(1, **specs)
    for name, spec in specs.items():
        if spec.shape[0] != length:
            raise ValueError(f"{name} has incorrect size, expected {length} ({of}), got {spec.shape[0]}")
