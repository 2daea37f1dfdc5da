# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's static quantization: weights per channel, by extremes, percentiles and entropy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from exchange import Case, NotOffered, Offer, main, session
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process


class Reader(CalibrationDataReader):
    def __init__(self, inputs: np.ndarray) -> None:
        # Percentiles need batches of one size.
        count = max(parts for parts in range(1, 9) if len(inputs) % parts == 0)
        self.batches: Iterator[np.ndarray] = iter(np.split(inputs, count))

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"x": batch}


def offers(case: Case) -> list[Offer]:
    types = {8: QuantType.QInt8, 16: QuantType.QInt16}
    if case.weights != 8 or case.activations not in types:
        raise NotOffered("its static quantization has activations of 8 and 16 bits, weights of 8")
    prepared = case.folder / "prepared.onnx"
    quant_pre_process(str(case.onnx()), str(prepared), skip_symbolic_shape=True)
    results = []
    methods = [CalibrationMethod.MinMax, CalibrationMethod.Percentile, CalibrationMethod.Entropy]
    for method in methods[:1] if case.quick else methods:
        path = case.folder / f"onnxruntime_{method.name}.onnx"
        quantize_static(
            str(prepared), str(path), Reader(case.calibration), quant_format=QuantFormat.QDQ, per_channel=True,
            calibrate_method=method, activation_type=types[case.activations], weight_type=QuantType.QInt8,
        )  # fmt: skip
        results.append(Offer(f"PTQ {method.name}", session(path, False), session(path, True)))
    return results


if __name__ == "__main__":
    main(offers)
