# SPDX-License-Identifier: Apache-2.0
"""Where a call goes: the module for each framework, loaded when its first array comes."""

from types import ModuleType

from exactqat.operators.op import FRONTENDS

# Import statements rather than import_module: torch.compile can follow them when the first call is a compiled one.


def _numpy() -> ModuleType:
    import exactqat.numpy

    return exactqat.numpy


def _torch() -> ModuleType:
    import exactqat.torch

    return exactqat.torch


def _jax() -> ModuleType:
    import exactqat.jax

    return exactqat.jax


def _tensorflow() -> ModuleType:
    import exactqat.tensorflow

    return exactqat.tensorflow


FRONTENDS.update(numpy=_numpy, torch=_torch, jax=_jax, tensorflow=_tensorflow)
