# SPDX-License-Identifier: Apache-2.0
"""From a function, a Flax Linen or an NNX module to functions that train under the device's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from ....kit.device import DEFAULT_PROFILE, DeviceName
from ....kit.planning import UnsupportedOperator, plan, warn_of_plan
from ....kit.planning.masks import with_examples
from ....kit.planning.rules import Rule, checked_rules
from ...capture.core.progress import at_work
from ...capture.jax.model import capture
from ...capture.proof import accept
from ..core import batches as loading
from ..core.engine import Functional
from ..core.frameworks import elsewhere, framework_of
from ..core.trained import TrainedNetwork
from ..files import OpenedFile, preparing
from . import primitives as primitives_jax
from .models import UserModel, function_model, is_linen, is_nnx, linen_model, nnx_model
from .prepared import Prepared
from .proof import compare_with_original


def prepare(
    model: Any,
    *arguments: Any,
    example: Any = None,
    rules: Iterable[Rule] = (Rule(),),
    device: DeviceName | str | None = DEFAULT_PROFILE,
    deployable: bool = True,
    keep_final_activation: bool | None = None,
    check: bool = True,
) -> Prepared:
    """A model that trains under the device's arithmetic, in float32.

        prepare(apply, params, example)             # a function apply(params, x)
        prepare(linen_module, variables, example)   # what its init gave
        prepare(nnx_module, example)

    Args:
        model: a pure function of (params, *arguments), as in evaluation; or a Flax module. Flags that switch between
            training and evaluation (`train`, `training`, `is_train`, `is_training`, `deterministic`,
            `use_running_average`, `eval_mode`, `is_eval`, `inference`, `is_inference`) are set to evaluation if the
            example gives none, among the arguments of functions and of modules' methods and among the fields of a Linen
            module; so are `mode` and `phase` if their default is a string such as "train" or "eval". Batch norms and
            dropouts train nevertheless. A function marks such layers with `batch_norm` and `dropout` of this file.
        arguments: parameters (not for NNX), the example and, if needed, the rules.
        rules, example and others: as in `exactqat.qat.prepare`. A frozen network's integers are computed on the host:
            on CPUs with a custom call, elsewhere with callbacks; `device=None` needs none, for `jax.export` for
            instance. `Prepared.proof` holds what `check` has compared.

    Raises:
        UnsupportedOperator, ValueError, TypeError: likewise.
    """
    if isinstance(model, Prepared):
        raise ValueError("model is prepared already: give the one that prepare was given")
    of_nnx, of_linen = is_nnx(model), is_linen(model)
    if not callable(model) or framework_of(model) in ("torch", "keras"):
        raise TypeError(
            f"model must be a function or a module of Flax, got {type(model).__name__}{elsewhere(model, 'jax')}"
        )
    words = ["example", "rules"] if of_nnx else ["variables", "example", "rules"]
    named = dict(zip(words, arguments, strict=False))
    if len(arguments) > len(words) or (example is not None and "example" in named):
        raise TypeError(f"prepare takes the model, {', '.join(words)}; got {len(arguments)} arguments after the model")
    example = named.get("example", example)
    if example is None or (not of_nnx and "variables" not in named):
        missing = "example" if example is None else "variables"
        raise TypeError(f"prepare needs {' and '.join(words[:-1])} after the model; {missing} is missing")
    rules = checked_rules(named.get("rules", rules))
    args, kwargs = loading.arguments(example)
    if of_nnx:
        known = nnx_model(model)
    elif of_linen:
        known = linen_model(model, named["variables"], args, kwargs)
    else:
        known = function_model(model, named["variables"], args, kwargs)
    with at_work("prepare reads the model"):
        network = capture(
            known.function,
            known.leaves,
            args,
            kwargs,
            trainable=known.trained.__contains__,
            signature=known.signature,
            in_training=known.in_training if known.trains else None,
        )
    norms = [step for step in network.steps if "training" in step.attributes]
    if known.words and norms and not any(step.attributes["training"] for step in norms):
        raise UnsupportedOperator(
            f"{norms[0].place}: {norms[0].label} does not train with {known.words} either, which is taken for "
            "training: name the argument train, training, deterministic or use_running_average, and give truth values"
        )
    network = with_examples(network, network.input_tree.flatten(*args, **dict(kwargs or {})))
    planned = plan(network, rules, deployable, keep_final_activation, device)
    warn_of_plan(planned, keep_final_activation)
    functional = Functional(planned, primitives_jax, device)
    if not (of_nnx or of_linen):
        # Only now is it known which of its leaves are statistics, and whether it has layers that train by themselves,
        # which it does not do alone.
        known = function_model(model, named["variables"], args, kwargs, frozenset(functional.statistics))
        known = replace(known, trains=known.trains and not (functional.statistics or functional.random_steps))
    prepared = Prepared(known, functional)
    if check:
        with at_work("prepare compares what it made with the model"):
            prepared.proof = accept(compare_with_original(known, prepared))
    return prepared


@preparing
def prepare_file(
    file: OpenedFile, device: str | None, options: dict[str, Any]
) -> tuple[Prepared, Callable[[], TrainedNetwork]]:
    def run(*inputs: object) -> NoReturn:
        raise TypeError("a file has no function of the user's to run; call apply with params and state")

    leaves = {name: jnp.asarray(array) for name, array in {**file.parameters, **file.buffers}.items()}
    trained = tuple(sorted(file.parameters))
    model = UserModel(leaves, trained, jax.tree.structure(dict.fromkeys(trained, 0)), dict, run)
    functional = Functional(file.plan(device=device, **options), primitives_jax, device)
    prepared = Prepared(model, functional)
    return prepared, lambda: prepared.trained(*prepared.init())


def takes_variables(model: Any) -> bool:
    """Whether its parameters are kept outside it, and `prepare` needs them: a function, or a Linen module."""
    return not is_nnx(model) and not isinstance(model, Prepared)
