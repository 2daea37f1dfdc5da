# SPDX-License-Identifier: Apache-2.0
"""Sizes of symbolic tensors as watched numbers, while a model is captured; see `core.watched`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import keras
from keras.src.backend.common.dtypes import PYTHON_DTYPES_MAP

from ..core.watched import Watch, WatchedFloat, WatchedInt, is_users

# Keras knows Python's numbers by their classes.
PYTHON_DTYPES_MAP.update({WatchedInt: "int", WatchedFloat: "float"})
# The file of `keras.ops.shape`, which passes the question on.
_PASSING = keras.ops.shape.__code__.co_filename


@contextmanager
def watching(watch: Watch | None, examples: int) -> Iterator[None]:
    """The user's own code gets watched sizes of symbolic tensors of so many examples; Keras gets plain ones."""
    if watch is None:
        yield
        return
    tensor = keras.KerasTensor
    own = tensor.shape

    def shape(value: Any) -> Any:
        found = own.fget(value)
        return watch.shape(found) if _for_the_user() else found

    tensor.shape = property(shape, own.fset)
    try:
        with watch.of(examples, tensor):
            yield
    finally:
        tensor.shape = own


def _for_the_user() -> bool:
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code.co_filename == _PASSING and frame.f_code.co_name == "shape":
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)
