# SPDX-License-Identifier: Apache-2.0
"""A file's network as a trainable Keras model."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from ..core.trained import TrainedNetwork
from ..files import OpenedFile, preparing
from .prepared import FileModel, PreparedModel


@preparing
def prepare_file(
    file: OpenedFile, device: str | None, options: dict[str, Any]
) -> tuple[PreparedModel, Callable[[], TrainedNetwork]]:
    model = PreparedModel(
        FileModel(base64.b64encode(file.content()).decode(), name="file"),
        profile=device,
        **options,
    )
    return model, model.trained


__all__ = ["prepare_file"]
