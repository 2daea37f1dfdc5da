# SPDX-License-Identifier: Apache-2.0
"""AIMET on ONNX: its simulation, as calibrated, with layers equalized, and with rounding learned (AdaRound); and the
file with QuantizeLinear that it writes, which ONNX Runtime runs. Inputs and results keep eight bits, as ours do."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from aimet_onnx import QuantizationSimModel, qtype
from exchange import Case, Computes, Offer, main, session

ITERATIONS = 200


def simulated(case: Case, model: Any) -> Any:
    sim = QuantizationSimModel(
        model,
        param_type=qtype.int(case.weights),
        activation_type=qtype.int(case.activations),
        providers=["CPUExecutionProvider"],
    )
    for name in ("x", "y"):
        if name in sim.qc_quantize_op_dict:
            sim.qc_quantize_op_dict[name].set_bitwidth(8)
    return sim


def offered(case: Case, sim: Any, method: str) -> Offer:
    sim.compute_encodings([{"x": batch} for batch in np.array_split(case.calibration, 4)])
    network = sim.session
    # Writing the file takes the encodings away: what it predicts is computed before.
    known = {
        len(x): np.concatenate([network.run(None, {"x": part})[0] for part in np.array_split(x, -(-len(x) // 250))])
        for x, _ in case.parts[1:]
    }
    runtime: Computes | None = None
    try:
        path = case.folder / f"aimet_{method.replace(' ', '_')}.onnx"
        onnx.save(sim.to_onnx_qdq(), path)
        runtime = session(path, True)
    except Exception as error:  # noqa: BLE001 - what the peer cannot write is a result
        print(f"no file: {type(error).__name__}: {error}")
    return Offer(method, lambda x: known[len(x)], runtime)


def offers(case: Case) -> list[Offer]:
    results = [offered(case, simulated(case, onnx.load(case.onnx())), "PTQ")]
    if case.quick:
        return results
    for method, change in (("PTQ equalized", equalized), ("PTQ AdaRound", rounded)):
        try:
            results.append(offered(case, change(case), method))
        except Exception as error:  # noqa: BLE001 - what the peer cannot do is a result
            print(f"{method}: {type(error).__name__}: {error}")
    return results


def equalized(case: Case) -> Any:
    from aimet_onnx.cross_layer_equalization import equalize_model

    model = onnx.load(case.onnx())
    equalize_model(model)
    return simulated(case, model)


def rounded(case: Case) -> Any:
    from aimet_onnx import apply_adaround

    sim = simulated(case, onnx.load(case.onnx()))
    batches = [{"x": batch} for batch in np.array_split(case.calibration, 8)]
    apply_adaround(sim, batches, ITERATIONS)
    return sim


if __name__ == "__main__":
    main(offers)
