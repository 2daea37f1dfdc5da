# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for Keras 3, on any of its backends: `prepare` gives a `keras.Model` for `fit`.

model = qat.keras.prepare(network)
qat.keras.calibrate(model, [images])
model.compile(...); model.fit(...)
qat.keras.freeze(model)
model.fit(...)
graph = deploy.lower(model)

`prepare_file` does the same for the `Graph` of a file.
"""

from .train.keras.prepare import prepare, prepare_file
from .train.keras.prepared import PreparedModel, calibrate, freeze

__all__ = ["PreparedModel", "calibrate", "freeze", "prepare", "prepare_file"]
