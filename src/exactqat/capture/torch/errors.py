# SPDX-License-Identifier: Apache-2.0
"""What cannot be captured."""

from __future__ import annotations

MIXES = "it mixes the examples of a batch"


class CaptureError(ValueError):
    """The model is not a fixed sequence of operations on tensors; the message says where, and what to do."""


class Refused(Exception):
    """No kind of the vocabulary says what an operation does; the step becomes "unsupported"."""

    @staticmethod
    def argument(name: str, given: object, allowed: str) -> Refused:
        """An operation that is known, but not with this argument."""
        return Refused(f"{name}={given!r} is given, {allowed}")


class RowsDiffer(Refused):
    """A constant beside the batch has several different rows for each example."""
