# SPDX-License-Identifier: Apache-2.0
"""What the device computes, in exact integers, for each rounding profile.

`xnnpack-x86` and `xnnpack-arm64` are the runtime's defaults on these processors: the XNNPACK delegate, and the built-in
kernels for what XNNPACK does not support. `reference` is the runtime's reference kernels, `micro` those of TFLite-Micro
and CMSIS-NN. The arithmetic is declared with each operator in `exactqat.kit.device`; EXACT lists where equality was
shown, and MEASURED over how many results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

import numpy as np

from ..kit.device import PROFILES, Profile, profile_named
from ..kit.device.tensor import RAW
from ..kit.engine import Compiled, compiled_for
from ..kit.progress import Clock
from .graph import BUILT_IN, Graph, Operator, require_graph

# (kind, profile) -> results compared with the runtime, how many differed, and by how much at most. Written by
# `tests/campaigns/sweep.py --write`, never by hand. An operator with int16 activations is listed as "CONV_2D:int16".
_MEASURED = json.loads(resources.files("exactqat.kit.device").joinpath("measured.json").read_text("utf-8"))
MEASURED: dict[tuple[str, str], tuple[int, int, int]] = {
    (kind, profile): tuple(row) for kind, rows in _MEASURED["results"].items() for profile, row in rows.items()
}
# By device, the runtime that all this was compared with, and its version.
COMPARED_ON: dict[str, str] = _MEASURED["runtimes"]
# (kind, profile) -> results compared without a single difference. A pair missing here is not claimed to be exact.
EXACT: dict[tuple[str, str], int] = {pair: values for pair, (values, differing, _) in MEASURED.items() if not differing}
# Without delegates, what they leave to built-in kernels is the same operator.
EXACT |= {
    (f"{kind}{BUILT_IN}", profile): values
    for (kind, profile), values in EXACT.items()
    if not PROFILES[profile].delegates
}


def unclaimed(graph: Graph, device: str | Profile) -> tuple[str, ...]:
    """The kinds of operators in a graph whose equality with the device's runtime has not been shown; usually none."""
    profile = profile_named(device)
    require_graph(graph)
    kinds = dict.fromkeys(graph.measured_as(operator) for operator in graph.operators)
    return tuple(kind for kind in kinds if not is_claimed(kind, profile))


def is_claimed(name: str, device: str | Profile) -> bool:
    """Whether operators of that name (`Graph.measured_as`) were compared with the device, and no code differed."""
    profile = profile_named(device)
    return (name, profile.name) in EXACT or name in dict(profile.compared)


def simulate(
    graph: Graph,
    x: np.ndarray | Mapping[str, np.ndarray],
    device: str | Profile = "xnnpack",
    tensors: Sequence[str] | None = None,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | bool | None = None,
    state: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Codes of `tensors` (default: the graph's outputs) for a batch of input codes.

    x: int8 or int16, like the graph's input, [batch, ...] for a graph with one input, or one such array per input name.
    Indices (of words): any integers, within the table.
    device: one of `PROFILES`, a short name of one, or a `Profile`; every (operator, device) pair in EXACT is bit-exact.
    `batch_size` examples are computed at a time: memory is that of their activations and of what is returned.
    progress: called after each of these with the number of examples done and the total; True: a line on standard error;
    None: likewise if that is a terminal and it takes more than a moment; False: nothing.
    state: for a network with variables (`Graph.variables`), what they hold; it is updated to what they hold afterwards.
    Begin with an empty dictionary and pass it to every call of a stream (or of `batch` parallel streams); without it,
    every call is the first one.
    """
    inputs = check_inputs(graph, x)
    wanted = tuple(dict.fromkeys(graph.outputs if tensors is None else tensors))
    unknown = [name for name in wanted if name not in (*graph.inputs, *graph.results())]
    if unknown:
        raise ValueError(f"tensors names {unknown}, which the graph does not compute")
    profile = profile_named(device)
    tell = progress if callable(progress) else Clock.counting(f"simulating {profile.name}", progress)
    return compiled_for(graph, profile).run(inputs, wanted, batch_size, tell, state)


def check_inputs(graph: Graph, x: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One [batch, ...] array of codes per input name, or an error that says what is wrong."""
    require_graph(graph)
    arrays = dict(x) if isinstance(x, Mapping) else {graph.inputs[0]: x}
    if set(arrays) != set(graph.inputs):
        raise ValueError(f"x must contain the inputs {list(graph.inputs)}, got {list(arrays)}")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"input {name!r} must be a NumPy array of codes, got {type(array).__name__}; use `quantize`"
            )
        expected = graph.tensors[name].shape
        dtype = graph.tensors[name].dtype
        if dtype in ("int32", RAW) and np.issubdtype(array.dtype, np.integer):
            arrays[name] = graph.as_indices(name, array)
        elif array.dtype != dtype:
            wanted, hint = ("integers", "") if dtype in ("int32", RAW) else (f"{dtype} codes", "; use `quantize`")
            raise TypeError(f"input {name!r} must be {wanted}, got {array.dtype}{hint}")
        if array.ndim != len(expected) or array.shape[1:] != expected[1:]:
            sizes = ", ".join(map(str, expected[1:]))
            raise ValueError(f"input {name!r} must have shape [batch, {sizes}], got {array.shape}")
    if len({array.shape[0] for array in arrays.values()}) != 1:
        raise ValueError("all inputs must have the same batch size")
    return arrays


def simulate_operator(
    graph: Graph, operator: Operator, values: Mapping[str, np.ndarray], profile: str | Profile
) -> np.ndarray:
    """Codes of one operator's result (the first of several) from those of its operands, by tensor name."""
    return compiled_for(graph, profile).operator(operator.outputs[0], values)


def simulate_results(
    graph: Graph, operator: Operator, values: Mapping[str, np.ndarray], profile: str | Profile
) -> dict[str, np.ndarray]:
    """As `simulate_operator`, all results by name, and what the operator's variables hold afterwards."""
    return compiled_for(graph, profile).results(operator.outputs[0], values)


def compile(graph: Graph, device: str | Profile = "xnnpack", like: Compiled | None = None) -> Compiled:
    """Compiles the graph for many evaluations: weights packed, memory planned, all threads used.

    ``compiled.run(codes)`` returns what `simulate` returns, which compiles too and caches the result as long as the
    graph lives. What was computed before a layer that changes may be passed back in, so that only the rest is
    computed::

        kept = compiled.run({"input": codes}, ["block_3"])
        changed = deploy.compile(other_graph, like=compiled).run(kept)

    Args:
        device: one of `PROFILES`, a short name of one, or a `Profile`.
        like: that of a graph that shares operators and tensors with this one; these are not prepared again.
    """
    require_graph(graph)
    return Compiled(graph, device, like)
