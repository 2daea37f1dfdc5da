# SPDX-License-Identifier: Apache-2.0
"""Functions whose gradient differs from that of their computation."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from exactqat.operators.declarations.dispatch import framework_of, frontend
from exactqat.operators.declarations.op import Operator

Results = TypeVar("Results")


def grad_pass_through(f: Callable[..., Results]) -> Callable[..., Results]:
    """Make a function through which gradients pass as if it were the identity; also a decorator.

    Args:
        f: takes k arrays of one framework and returns k arrays, or one array if k is 1.
    Returns:
        A function that computes what `f` does. In the backward pass, the gradient of its n-th output becomes the
        gradient of its n-th input, and anything else `f` uses gets none.
    Raises:
        ValueError: `f` returns a different number of arrays than it takes.
    Source: `tf.grad_pass_through`.
    """

    def checked(*arrays: object) -> Results:
        results = f(*arrays)
        count = len(results) if isinstance(results, tuple | list) else 1
        if count != len(arrays):
            raise ValueError(f"f must return as many arrays as it takes: it takes {len(arrays)} and returned {count}")
        return results

    @wraps(f)
    def passing(*arrays: object) -> Results:
        frameworks = [framework for framework in map(framework_of, arrays) if framework]
        framework = next((name for name in frameworks if name != "numpy"), "numpy")
        return frontend(framework).pass_through(checked, arrays)

    passing.autograph_info__ = Operator.autograph_info__  # type: ignore[attr-defined]
    return passing
