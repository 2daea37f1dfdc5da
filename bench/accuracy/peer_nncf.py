# SPDX-License-Identifier: Apache-2.0
"""NNCF's post-training quantization of an ONNX file, with its bias correction; of transformers with and without its
smoothing of activations."""

from __future__ import annotations

from typing import Any

import nncf
import numpy as np
import onnx
from exchange import Case, Offer, main, session


def offers(case: Case) -> list[Offer]:
    case.need_eight()
    model = onnx.load(case.onnx())
    kind = nncf.ModelType.TRANSFORMER if case.name == "vit" else None
    results, failures = [], []
    for fast in (True,) if case.quick else (True, False):
        for smooth in (True, False) if kind is not None else (True,):
            data = nncf.Dataset(np.split(case.calibration, len(case.calibration)), lambda x: {"x": x})
            more: dict[str, Any] = {}
            if not smooth:
                off = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
                more["advanced_parameters"] = nncf.AdvancedQuantizationParameters(smooth_quant_alphas=off)
            method = f"PTQ {'fast' if fast else 'full'} bias correction{'' if smooth else ', not smoothed'}"
            try:
                network = nncf.quantize(
                    model, data, subset_size=len(case.calibration), fast_bias_correction=fast, model_type=kind, **more
                )
                path = case.folder / f"nncf_{fast}_{smooth}.onnx"
                onnx.save(network, path)
                results.append(Offer(method, session(path, False), session(path, True)))
            except Exception as error:  # noqa: BLE001 - files that ONNX Runtime refuses are a result
                failures.append(f"{method}: {type(error).__name__}: {error}")
    if not results:
        raise RuntimeError("; ".join(failures))
    return results


if __name__ == "__main__":
    main(offers)
