# SPDX-License-Identifier: Apache-2.0
"""`tf.raw_ops`: every declared operator under its CamelCase name, with keyword arguments only, as in TensorFlow."""

import inspect
from typing import Any

from exactqat.operators import OPERATORS
from exactqat.operators.declarations.op import Operator


def _keywords_only(op: Operator) -> Any:
    def raw_op(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if args:
            raise TypeError(f"{op.raw_name} takes keyword arguments only (such as {op.parameters[0]}=...)")
        return op.run((), kwargs, out)

    raw_op.__name__ = raw_op.__qualname__ = str(op.raw_name)
    raw_op.__doc__ = op.__doc__
    raw_op.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in op.__signature__.parameters.values()]
    )
    raw_op.autograph_info__ = op.autograph_info__  # type: ignore[attr-defined]
    return raw_op


def __getattr__(name: str) -> Any:
    for op in OPERATORS.values():
        if op.raw_name == name:
            globals()[name] = function = _keywords_only(op)
            return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(str(op.raw_name) for op in OPERATORS.values() if op.raw_name)
