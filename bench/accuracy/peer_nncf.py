# SPDX-License-Identifier: Apache-2.0
"""NNCF's post-training quantization of an ONNX file, with its bias correction."""

from __future__ import annotations

import nncf
import numpy as np
import onnx
from exchange import Case, Offer, main, session


def offers(case: Case) -> list[Offer]:
    case.need_eight()
    model = onnx.load(case.onnx())
    found = []
    for fast in (True,) if case.quick else (True, False):
        data = nncf.Dataset(np.split(case.calibration, len(case.calibration)), lambda x: {"x": x})
        kind = nncf.ModelType.TRANSFORMER if case.name == "vit" else None
        made = nncf.quantize(model, data, subset_size=len(case.calibration), fast_bias_correction=fast, model_type=kind)
        path = case.folder / f"nncf_{fast}.onnx"
        onnx.save(made, path)
        found.append(
            Offer(f"PTQ {'fast' if fast else 'full'} bias correction", session(path, False), session(path, True))
        )
    return found


if __name__ == "__main__":
    main(offers)
