# SPDX-License-Identifier: Apache-2.0
"""Four-bit weights, two per byte: this halves a file's weights if the device computes the same with them."""

from __future__ import annotations

from dataclasses import replace

from ..kit.device import DEFAULT_PROFILE, OPERATORS, Profile, profile_named
from ..kit.device.tensor import INT4, INT4_MAX, INT4_MIN
from ..kit.device.weighted import Weighted
from .graph import Graph, require_graph
from .simulate import EXACT


def packed(graph: Graph, device: str | Profile | None = None) -> Graph:
    """The same network with filters that fit into four bits stored in four bits (TensorFlow Lite's int4).

    No code and no result changes. A filter stays as it is if the device's runtime does not take it packed, or equality
    with it has not been shown: LiteRT's own kernels on x86 and ARM compute other results with four bits, no runtime
    combines them with int16 activations, and TFLite-Micro's FULLY_CONNECTED takes them only with a single scale
    (`Rule(per_channel=False)`).

    Args:
        graph: a lowered network.
        device: a name in `deploy.PROFILES`; by default the one the graph was trained for.
    """
    require_graph(graph)
    profile = profile_named(device or graph.trained_for or DEFAULT_PROFILE)
    result = graph
    for operator in graph.operators:
        declaration = OPERATORS[operator.kind]
        if not isinstance(declaration, Weighted):
            continue
        filter = graph.tensors[operator.inputs[1]]
        if filter.dtype != "int8" or filter.data is None or not filter.data.size:
            continue
        if filter.data.min() < INT4_MIN or filter.data.max() > INT4_MAX:
            continue
        tried = replace(result, tensors={**result.tensors, filter.name: replace(filter, dtype=INT4)})
        claimed = (tried.measured_as(operator), profile.name) in EXACT
        if claimed and declaration.takes_four_bits(filter, profile):
            result = tried
    return result
