# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training for Keras 3, on any of its backends: `prepare` gives a `keras.Model` for `fit`.

model = qat.keras.prepare(network)
qat.keras.calibrate(model, [images])
model.compile(...); model.fit(...)
qat.keras.freeze(model)
model.fit(...)
graph = deploy.lower(model)

`prepare_file` does the same for the `Graph` of a file; `load_h5` reads the float models of Keras 2.
"""

from .train.keras.files import load_h5
from .train.keras.prepare import prepare, prepare_file
from .train.keras.prepared import PreparedModel, calibrate, freeze

__all__ = ["PreparedModel", "calibrate", "freeze", "load_h5", "prepare", "prepare_file"]
