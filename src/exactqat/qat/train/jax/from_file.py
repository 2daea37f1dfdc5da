# SPDX-License-Identifier: Apache-2.0
"""A file's network as trainable JAX functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core.engine import Functional
from ..core.trained import TrainedNetwork
from ..files import OpenedFile, preparing
from . import primitives as primitives_jax
from .models import UserModel
from .prepared import Prepared


@preparing
def prepare_file(
    file: OpenedFile, device: str | None, options: dict[str, Any]
) -> tuple[Prepared, Callable[[], TrainedNetwork]]:
    plan = file.plan(device=device, **options)
    leaves = {name: jnp.asarray(array) for name, array in {**file.parameters, **file.buffers}.items()}
    trained = tuple(sorted(file.parameters))
    structure = jax.tree.structure(dict.fromkeys(trained, 0))
    model = UserModel(leaves, trained, structure, dict, _no_model)
    prepared = Prepared(model, Functional(plan, primitives_jax, device))
    return prepared, lambda: prepared.trained(*prepared.init())


def _no_model(*inputs: Any) -> Any:
    raise TypeError("a file has no function of the user's to run; call apply with params and state")


__all__ = ["prepare_file"]
