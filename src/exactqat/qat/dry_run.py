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
from ..kit.device import DEFAULT_PROFILE, DeviceName, profile_named
from ..kit.display import aligned
from ..kit.planning import UnsupportedOperator
from ..kit.planning.fitting import RangesMovedWarning
from ..kit.planning.rules import Rule
from .surface import calibrate, freeze, prepare
from .train.core.frameworks import kit_of
from .train.core.freezing import UnsettledStatisticsWarning

# A model of any framework, and arrays or tensors nested as it takes them.
Tree = Any

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
        sentences = [f"This model runs on {self.device} as {count} operator{'s' * (count != 1)}: {listed}."]
        if self.footprint is not None:
            size = f"The .tflite file will have about {self.footprint.flash_bytes:,} bytes"
            arena = self.footprint.arena_bytes
            memory = "" if arena is None else f", the tensors need {arena:,} bytes of memory in TFLite-Micro"
            file = f"{size}{memory}; " if profile_named(self.device).file == ".tflite" else ""
            sentences.append(f"{file}{self.footprint.multiply_accumulates:,} multiply-adds for an example.")
        if self.not_exact:
            sentences.append(f"Integers of {', '.join(self.not_exact)} may differ from the device's.")
        return sentences + [f"Warning: {warning}" for warning in self.warnings]

    def __str__(self) -> str:
        lines = self.sentences()
        if rows := self.rows():
            lines += aligned([HEADER, *rows], range(3))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(
    model: Tree,
    example: Tree = None,
    *,
    variables: Tree = None,
    rules: Iterable[Rule] = (Rule(),),
    device: DeviceName | str = DEFAULT_PROFILE,
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
            graph = _frozen(framework, model, example, variables, options)
        except UnsupportedOperator as refusal:
            return Explanation(device, str(refusal), _sentences(caught))
    try:
        size = footprint(graph)
    except ImportError:
        size = None
    return Explanation(device, "", _sentences(caught), graph, size, unclaimed(graph, device))


def _sentences(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """This package's warnings, except those about ranges, which mean nothing before there is data."""
    of_ranges = (RangesMovedWarning, UnsettledStatisticsWarning)
    kept = [warning for warning in caught if warning.category.__module__.startswith("exactqat.")]
    return tuple(dict.fromkeys(str(warning.message) for warning in kept if not issubclass(warning.category, of_ranges)))


def _frozen(framework: str, model: Any, example: Tree, variables: Tree, options: Mapping[str, Any]) -> Graph:
    """The graph of a model whose ranges come from random numbers, as the model takes them."""
    prepared = prepare(model, example, variables=variables, **options)
    random = np.random.default_rng(0)

    def drawn(x: Tree) -> np.ndarray:
        return random.standard_normal(tuple(x.shape)).astype(np.float32)

    if framework == "jax":
        import jax
        import jax.numpy as jnp

        def like(x: Tree) -> Tree:
            is_real = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
            return jnp.asarray(drawn(x), x.dtype) if is_real else x

        params, state = prepared.calibrate(*prepared.init(), [jax.tree.map(like, example)])
        return lower(prepared.trained(*prepared.freeze(params, state)))
    if framework == "keras":
        import keras

        inputs = [keras.ops.convert_to_tensor(drawn(np.empty((2, *step.shape[1:])))) for step in prepared.plan.inputs]
        calibrate(prepared, [keras.tree.pack_sequence_as(prepared.plan.network.input_tree.inputs, inputs)])
    else:
        import torch
        from torch.utils._pytree import tree_map_only

        def like_tensor(x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(drawn(x)).to(x.device, x.dtype) if x.is_floating_point() else x

        with torch.random.fork_rng(devices=[]):
            calibrate(prepared, [tree_map_only(torch.Tensor, like_tensor, example)])
    freeze(prepared)
    return lower(prepared)
