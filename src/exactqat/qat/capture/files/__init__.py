# SPDX-License-Identifier: Apache-2.0
"""Networks in real numbers that come from files, without the code that they were made by."""

from .reader import FileNetwork

__all__ = ["FileNetwork"]
