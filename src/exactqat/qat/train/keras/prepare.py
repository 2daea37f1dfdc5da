# SPDX-License-Identifier: Apache-2.0
"""From a Keras 3 model to one that trains under the device's arithmetic."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from ....kit.device import DEFAULT_PROFILE, DeviceName
from ....kit.display import listed
from ....kit.planning import warn_of_plan
from ....kit.planning.callers import users_line
from ....kit.planning.rules import Rule, checked_rules
from ...capture.core.progress import at_work
from ...capture.proof import accept
from ..core.frameworks import elsewhere
from ..core.trained import TrainedNetwork
from ..files import OpenedFile, preparing
from .prepared import FileModel, PreparedModel
from .proof import compare_with_original


def prepare(
    model: object,
    example: object = None,
    rules: Iterable[Rule] = (Rule(),),
    *,
    device: DeviceName | str | None = DEFAULT_PROFILE,
    deployable: bool = True,
    keep_final_activation: bool | None = None,
    check: bool = True,
) -> PreparedModel:
    """A model that trains under the device's arithmetic, in float32. Arguments and errors as in `exactqat.qat.prepare`.

    `model` is any built Keras 3 model: functional, Sequential or subclassed, with models inside. It is not changed; the
    values of its variables are taken over, with their regularizers and constraints and which of them are trained. To be
    saved, it must be one that Keras can save. It needs an example if it does not know the sizes of its inputs. A frozen
    network's integers are computed on the host, layer by layer, which `device=None` needs not. `PreparedModel.proof`
    holds what `check` has compared.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"model must be a keras.Model, got {type(model).__name__}{elsewhere(model, 'keras')}")
    rules = checked_rules(rules)
    if isinstance(model, PreparedModel):
        raise TypeError("model is prepared already; prepare the float model that it was made from")
    shapes, dtypes = None, list[str]()
    if example is not None:
        others = [type(leaf).__name__ for leaf in keras.tree.flatten(example) if not hasattr(leaf, "dtype")]
        if others:
            raise TypeError(
                f"example must be an array, or arrays as the model takes them, got {others[0]}"
                + ("; give rules by their name, as rules=[...]" if "Rule" in others else "")
            )
        if not model.built:
            model(example)
        shapes = keras.tree.map_structure(lambda leaf: tuple(np.shape(leaf)), example)
        dtypes = [keras.backend.standardize_dtype(leaf.dtype) for leaf in keras.tree.flatten(example)]
    prepared = PreparedModel(
        model,
        list(rules),
        shapes,
        deployable,
        profile=device,
        keep_final_activation=keep_final_activation,
        dtypes=dtypes,
        name=f"{model.name}_prepared",
    )
    if check:
        with at_work("prepare compares what it made with the model"):
            prepared.proof = accept(compare_with_original(model, prepared, example))
    if prepared.losses_left_out:
        warnings.warn(
            f"losses that layers add of their results are left out: {listed(prepared.losses_left_out)} (add_loss, "
            "activity_regularizer); regularizers and constraints of weights are kept",
            UserWarning,
            stacklevel=users_line(),
        )
    if prepared.steps_left_out:
        warnings.warn(
            f"{type(model).__name__} has its own {listed(prepared.steps_left_out)}, which the prepared model does not "
            "run: its fit and evaluate refuse; write the loop yourself, with prepared(x, training=True)",
            UserWarning,
            stacklevel=users_line(),
        )
    warn_of_plan(prepared.plan, keep_final_activation)
    return prepared


@preparing
def prepare_file(
    file: OpenedFile, device: str | None, options: dict[str, Any]
) -> tuple[PreparedModel, Callable[[], TrainedNetwork]]:
    content = base64.b64encode(file.content()).decode()
    model = PreparedModel(FileModel(content, name="file"), profile=device, **options)
    return model, model.trained
