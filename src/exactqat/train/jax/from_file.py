# SPDX-License-Identifier: Apache-2.0
"""A quantized file's network as functions of JAX that train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ...deploy.graph import Graph, require_graph
from ...deploy.trainable import compare_with_file, trainable
from ...device import DEFAULT_PROFILE, profile_named
from ..core.functional import Functional
from . import primitives as primitives_jax
from .prepared import Prepared, _Model


def prepare_file(graph: Graph, device: str | None = DEFAULT_PROFILE, check: bool = True) -> Prepared:
    """A network that computes a file's integers, and trains from there; see `exactqat.qat.prepare`.

    ``params["model"]`` is a dictionary by the names of the file's tensors.

    Args:
        graph: of `deploy.read_tflite`.
        device: whose integers it computes once it is frozen; None: it stays fake quantized.
        check: compare its integers with the file's, those of `device`.

    Raises:
        TypeError: graph is no Graph.
        UnsupportedOperator: an operator cannot be trained so that its integers stay what they are; each is named.
    """
    require_graph(graph)
    device = None if device is None else profile_named(device).name
    made = trainable(graph)
    leaves = {name: jnp.asarray(each) for name, each in {**made.parameters, **made.buffers}.items()}

    def tree(named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: named[name] for name in made.parameters}

    def no_model(*given: Sequence[Any]) -> Any:
        raise TypeError("a file has no function of the user's to run; call apply with params and state")

    known = _Model(
        no_model, list(leaves), list(leaves.values()), frozenset(made.parameters), tree, dict, dict, no_model, False
    )
    prepared = Prepared(known, Functional(made.plan, primitives_jax, device))
    if check:
        params, state = prepared.freeze(*prepared.init())
        compare_with_file(graph, made.plan, prepared.trained(params, state).numbers(), device or DEFAULT_PROFILE)
    return prepared
