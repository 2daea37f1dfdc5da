# SPDX-License-Identifier: Apache-2.0
"""Calls of ATen operators by the names of their arguments, and the families of operators that look into a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.refusals import MIXES, CaptureError, Refused
from ..core.sizes import Batch, Size

Operator = torch._ops.OpOverload
# Arguments of a call by their names.
Bound = dict[str, Any]

# Where slices end that have no end.
_EVERYTHING = 2**62


def base_name(operator: Operator) -> str:
    return operator._schema.name.split("::")[1]


def full_name(operator: Operator) -> str:
    return f"{operator.namespace}.{base_name(operator)}.{operator._overloadname}"


def is_random(operator: Operator, bound: Bound | None = None) -> bool:
    """Whether a call draws random numbers. bound: its arguments, by which one that could may not."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    bound = bound or {}
    return bound.get("dropout_p") != 0 and bound.get("train") is not False and bound.get("training") is not False


def arguments(operator: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> Bound:
    """All arguments of a call by the names of the operator's schema."""
    bound = dict(kwargs)
    for position, argument in enumerate(operator._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        elif argument.name not in bound:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def without_out(operator: Operator) -> Operator:
    """The operator that returns what this one writes into its argument `out`."""
    packet = getattr(torch.ops.aten, base_name(operator))
    wanted = [argument.name for argument in operator._schema.arguments if argument.name != "out"]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if [argument.name for argument in candidate._schema.arguments] == wanted:
            return candidate
    raise CaptureError(f"{base_name(operator)}(out=...) is not understood")


def call_form(operator: Operator, bound: Bound) -> tuple[list[Any], dict[str, Any]]:
    """`arguments` back to positional and keyword arguments."""
    schema = operator._schema.arguments
    return (
        [bound[argument.name] for argument in schema if not argument.kwarg_only],
        {argument.name: bound[argument.name] for argument in schema if argument.kwarg_only},
    )


# Operators that give other shapes to what lies in the same order.
RESHAPES = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"),
    *("ravel", "_reshape_alias", "atleast_1d", "atleast_2d", "atleast_3d"),
}
PERMUTES = {
    *("permute", "transpose", "t", "numpy_T", "mT", "adjoint", "mH", "matrix_H", "movedim", "moveaxis"),
    *("swapaxes", "swapdims"),
}
IDENTITIES = {
    *("contiguous", "clone", "to", "_to_copy", "type_as", "float", "double", "half", "bfloat16", "alias", "lift_fresh"),
    *("lift_fresh_copy", "lift", "positive", "resolve_conj", "resolve_neg", "cpu", "cuda", "copy"),
}
DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}


def permutation(operator: Operator, bound: Bound, rank: int) -> list[int]:
    """For each axis of the result of an operator that permutes, the operand's."""
    args, kwargs = call_form(operator, {**bound, "self": torch.empty(list(range(rank)), device="meta")})
    return list(operator(*args, **kwargs).shape)


def slice_bounds(start: int | None, stop: int | None, step: int | None, size: Size) -> tuple[int, Size, int]:
    """Of a slice with any bounds, those within an axis."""
    if isinstance(size, Batch):
        whole = stop is None or stop == size or (isinstance(stop, int) and stop >= _EVERYTHING)
        if start in (0, None) and step in (1, None) and whole:
            return 0, size, 1
        raise Refused(MIXES)
    begin, end, stride = slice(start, stop, step).indices(size)
    return begin, max(begin, end), stride
