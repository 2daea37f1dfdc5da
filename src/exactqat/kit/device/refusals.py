# SPDX-License-Identifier: Apache-2.0
"""What users read when something cannot be done. Every other refusal of this package is one of these."""

from __future__ import annotations


class Refusal(ValueError):
    """The device cannot run an operator with these attributes, shapes or scales, or there is no way to do what was
    asked; the message says what it could.

    Attributes:
        reason: what is wrong.
        place: where, in the user's words; "": the message's reader knows it.
        remedy: what to do instead; "": the reason says it.
    """

    def __init__(self, reason: str, place: str = "", remedy: str = "") -> None:
        super().__init__("; ".join(filter(None, (": ".join(filter(None, (place, reason))), remedy))))
        self.reason, self.place, self.remedy = reason, place, remedy


class Unreadable(Refusal):
    """A file says something of an operator that its declaration has no words for."""


def need(condition: bool, message: str) -> None:
    """Raises `Refusal` with the message unless the condition holds."""
    if not condition:
        raise Refusal(message)
