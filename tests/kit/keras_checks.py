# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of a module that a process with its own Keras backend executes; test_keras_kit.py starts these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras


def run_checks(module: Mapping[str, Any]) -> None:
    """Calls every function of the module whose name begins with check_, each with the same random numbers; prints how
    many."""
    checks = [function for name, function in module.items() if name.startswith("check_")]
    for check in checks:
        keras.utils.set_random_seed(0)
        check()
    print(f"{len(checks)} checks passed")
