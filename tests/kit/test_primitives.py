# SPDX-License-Identifier: Apache-2.0
"""Frameworks offer what the training core and the device's declarations ask for (`train.core.primitives`)."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import exactqat
from exactqat.qat.train.core import primitives as protocols
from exactqat.qat.train.core import primitives_numpy

PACKAGE = Path(exactqat.__file__).parent
OFFERED = {
    "torch": protocols.Primitives,
    "jax": protocols.FunctionalPrimitives,
    "keras": protocols.FunctionalPrimitives,
}


def members(protocol: type) -> dict[str, Any]:
    return {
        name: member
        for base in reversed(protocol.__mro__)
        if getattr(base, "_is_protocol", False)
        for name, member in vars(base).items()
        if not name.startswith("_")
    }


def problems(module: Any, protocol: type) -> Iterator[str]:
    """What of a protocol a module does not have, or does not take as the protocol calls it."""
    for name, member in members(protocol).items():
        offered = getattr(module, name, None)
        if not callable(offered):
            yield f"{name} is missing"
            continue
        asked = list(inspect.signature(member).parameters.values())[1:]
        try:
            own = inspect.signature(offered)
        except ValueError:
            continue  # made in C++
        try:
            own.bind(*(None for slot in asked if slot.kind is slot.POSITIONAL_ONLY or slot.default is slot.empty))
            own.bind(*(None for _ in asked))
            if not any(slot.kind is slot.POSITIONAL_ONLY for slot in asked):
                own.bind(**{slot.name: None for slot in asked})
        except TypeError as error:
            yield f"{name}: {error}"


@pytest.mark.parametrize("framework", OFFERED)
def test_a_framework_offers_its_protocol(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    # In a process of its own, where Keras finds the backend that is asked for.
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_primitives as test\n"
        "module = test.import_module(f'exactqat.qat.train.{sys.argv[2]}.primitives')\n"
        "print(*test.problems(module, test.OFFERED[sys.argv[2]]), sep='\\n', end='')"
    )
    arguments = [sys.executable, "-c", program, str(Path(__file__).parent), framework]
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


def test_numpy_offers_what_makes_integers() -> None:
    assert not list(problems(primitives_numpy, protocols.NumberPrimitives))


def test_what_is_missing_or_taken_otherwise_is_found() -> None:
    complaints = list(problems(primitives_numpy, protocols.Primitives))
    assert "conv is missing" in complaints and "softmax is missing" in complaints

    class Other:
        maximum = staticmethod(lambda first: first)
        minimum, where, to_float = min, (lambda *operands: operands[1]), float

    assert [problem.partition(":")[0] for problem in problems(Other, protocols.RangePrimitives)] == ["maximum"]


@pytest.mark.parametrize("room", ["kit/device", "qat/train/core"])
def test_nothing_else_is_asked_for(room: str) -> None:
    asked = {
        node.attr
        for path in (PACKAGE / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("p", "primitives", "self.primitives")
    }
    assert {"maximum", "where"} <= asked
    allowed = members(protocols.Primitives if room == "kit/device" else protocols.FunctionalPrimitives)
    assert asked <= set(allowed)


__all__ = ["OFFERED", "import_module", "problems"]
