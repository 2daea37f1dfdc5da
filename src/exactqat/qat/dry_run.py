# SPDX-License-Identifier: Apache-2.0
"""Whether a model will run on a device, and what becomes of it there, before anything is trained."""

from __future__ import annotations

import html
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..deploy import Footprint, Graph, footprint, lower, unclaimed
from ..kit.device import DEFAULT_PROFILE, profile_named
from ..kit.display import aligned
from ..kit.planning import UnsupportedOperator
from ..kit.planning.rules import Rule
from .train.core.frameworks import kit_of

HEADER = ("operator", "result", "shape", "parameters", "multiply-adds")


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    Attributes:
        device: the device asked about, a name in `deploy.PROFILES`.
        refusal: why the model cannot be prepared for it, with every place and what to do instead; empty if it can.
        warnings: the warnings from preparing the model, a sentence each.
        graph: the device's operators in order, with the shapes of their results; None if refused. Its scales come from
            random numbers: look at its structure, not at its integers.
        footprint: bytes of the file, memory of the tensors on a microcontroller, multiply-adds for one example;
            None if refused, or where the packages that write files are not installed.
        not_exact: kinds of operators in the graph for which the simulation's integers are not shown to equal the
            device's.
    """

    device: str
    refusal: str = ""
    warnings: tuple[str, ...] = ()
    graph: Graph | None = None
    footprint: Footprint | None = None
    not_exact: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether the model will run on the device."""
        return not self.refusal

    def rows(self) -> list[tuple[str, ...]]:
        """One row for each operator of the device, with the columns of HEADER."""
        if self.graph is None:
            return []
        return [
            (
                str(row["kind"]),
                str(row["output"]),
                str(row["shape"]),
                f"{row['parameters']:,}",
                f"{row['multiply_accumulates']:,}",
            )
            for row in self.graph.summary()
        ]

    def sentences(self) -> list[str]:
        """What was found, without the table."""
        if self.refusal or self.graph is None:
            return [f"This model cannot run on {self.device} yet.", self.refusal]
        kinds = Counter(operator.kind for operator in self.graph.operators)
        count = len(self.graph.operators)
        listed = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        found = [f"This model runs on {self.device} as {count} operator{'s' * (count != 1)}: {listed}."]
        if self.footprint is not None:
            size = f"The .tflite file will have about {self.footprint.flash_bytes:,} bytes"
            arena = self.footprint.arena_bytes
            memory = "" if arena is None else f", the tensors need {arena:,} bytes of memory in TFLite-Micro"
            file = f"{size}{memory}; " if profile_named(self.device).file == ".tflite" else ""
            found.append(f"{file}{self.footprint.multiply_accumulates:,} multiply-adds for an example.")
        if self.not_exact:
            found.append(f"Integers of {', '.join(self.not_exact)} may differ from the device's.")
        return found + [f"Warning: {each}" for each in self.warnings]

    def __str__(self) -> str:
        lines = self.sentences()
        if rows := self.rows():
            lines += aligned([HEADER, *rows], range(3))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(
    model: Any,
    example: Any = None,
    *,
    variables: Any = None,
    rules: Iterable[Rule] = (Rule(),),
    device: str = DEFAULT_PROFILE,
    keep_final_activation: bool | None = None,
    check: bool = False,
) -> Explanation:
    """Says whether a model will run on a device, as which operators and how large, without training it.

    The model is prepared, its ranges are set from random numbers, and it is frozen and lowered; the original does not
    change.

    Args:
        model: what `prepare` takes: a PyTorch module, a Keras model, a Flax module, or a function of ``(params,
            *arguments)`` for JAX.
        example: a batch as the model takes it, as for `prepare`. Keras models that know their sizes need none.
        variables: the parameters of a JAX function, or the variables of a Flax Linen module.
        rules: settings by the paths of layers; see `Rule`.
        device: a name in `deploy.PROFILES`.
        keep_final_activation: as for `prepare`.
        check: compare the prepared network with the model too, as `prepare` does by default.

    Raises:
        TypeError: the model's framework is not supported, or an argument is missing.
        ValueError: there is no such device, or a rule cannot be used.
    """
    device = profile_named(device).name
    framework = kit_of(model)
    options: dict[str, Any] = {
        "rules": rules,
        "device": device,
        "keep_final_activation": keep_final_activation,
        "check": check,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            graph = _FROZEN[framework](model, example, variables, options)
        except UnsupportedOperator as refusal:
            return Explanation(device, str(refusal), _sentences(caught))
    try:
        size = footprint(graph)
    except ImportError:
        size = None
    return Explanation(device, "", _sentences(caught), graph, size, unclaimed(graph, device))


def _sentences(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """This package's warnings, except those about ranges, which mean nothing before there is data."""
    kept = [each for each in caught if each.category.__module__.startswith("exactqat.") and _concerns(each.category)]
    return tuple(dict.fromkeys(str(each.message) for each in kept))


def _concerns(category: type[Warning]) -> bool:
    return category.__name__ not in ("RangesMovedWarning", "UnsettledStatisticsWarning")


def _random(shape: Sequence[int], dtype: Any) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(tuple(shape)).astype(dtype)


def _of_torch(model: Any, example: Any, variables: Any, options: Mapping[str, Any]) -> Graph:
    import torch
    from torch.utils._pytree import tree_map_only

    from .train.torch.prepare import prepare
    from .train.torch.prepared import calibrate, freeze

    _refuse_variables(variables, "torch.nn.Module")
    if example is None:
        raise TypeError("example is missing: a batch as the model gets it, such as torch.zeros(1, 3, 224, 224)")

    def drawn(given: torch.Tensor) -> torch.Tensor:
        if not given.is_floating_point():
            return given
        return torch.from_numpy(_random(given.shape, np.float32)).to(given.device, given.dtype)

    prepared = prepare(model, example, **options)
    with torch.random.fork_rng(devices=[]):
        calibrate(prepared, [tree_map_only(torch.Tensor, drawn, example)])
    freeze(prepared)
    return lower(prepared)


def _of_keras(model: Any, example: Any, variables: Any, options: Mapping[str, Any]) -> Graph:
    import keras

    from .train.keras.prepare import prepare
    from .train.keras.prepared import calibrate, freeze

    _refuse_variables(variables, "keras.Model")
    prepared = prepare(model, example=example, **options)
    inputs = [keras.ops.convert_to_tensor(_random((2, *each.shape[1:]), np.float32)) for each in prepared.plan.inputs]
    calibrate(prepared, [keras.tree.pack_sequence_as(prepared.plan.network.input_tree.inputs, inputs)])
    freeze(prepared)
    return lower(prepared)


def _of_jax(model: Any, example: Any, variables: Any, options: Mapping[str, Any]) -> Graph:
    import jax
    import jax.numpy as jnp

    from .train.jax.prepare import prepare

    prepared = prepare(model, *(() if variables is None else (variables,)), example=example, **options)

    def drawn(given: Any) -> Any:
        is_array = isinstance(given, jax.Array | np.ndarray) and jnp.issubdtype(given.dtype, jnp.floating)
        return jnp.asarray(_random(given.shape, np.float32), given.dtype) if is_array else given

    params, state = prepared.calibrate(*prepared.init(), [jax.tree.map(drawn, example)])
    return prepared.lower(*prepared.freeze(params, state))


def _refuse_variables(variables: Any, kind: str) -> None:
    if variables is not None:
        raise TypeError(f"variables are for functions and Linen modules of JAX; a {kind} holds its own")


_FROZEN = {"torch": _of_torch, "keras": _of_keras, "jax": _of_jax}
