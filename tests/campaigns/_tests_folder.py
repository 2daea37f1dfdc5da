# SPDX-License-Identifier: Apache-2.0
"""Importing this lets a campaign that is run by its path import the modules in tests/ that it shares with the tests."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parents[1])
if FOLDER not in sys.path:
    sys.path.append(FOLDER)
