# SPDX-License-Identifier: Apache-2.0
"""ai-edge-quantizer on a float .tflite file of litert-torch: it predicts nothing; LiteRT runs its file."""

from __future__ import annotations

from typing import Any

import litert_torch
import torch
from ai_edge_litert.interpreter import Interpreter
from ai_edge_quantizer import quantizer, recipe
from exchange import Case, NotOffered, Offer, main
from litert import running


def offers(case: Case) -> list[Offer]:
    recipes = {8: recipe.static_wi8_ai8, 16: recipe.static_wi8_ai16}
    if case.activations not in recipes or case.weights != 8:
        raise NotOffered("its recipes for static quantization have activations of 8 and 16 bits, weights of 8")
    example = (torch.from_numpy(case.calibration[:1]),)
    path = case.folder / "float.tflite"
    litert_torch.convert(case.model, example).export(str(path))
    converter = quantizer.Quantizer(str(path), recipes[case.activations]())
    interpreter = Interpreter(model_path=str(path))
    (signature, names), *_ = interpreter.get_signature_list().items()
    (name,) = names["inputs"]
    data: dict[str, Any] = {signature: [{name: sample[None]} for sample in case.calibration]}
    result = converter.quantize(converter.calibrate(data))
    return [Offer("PTQ", None, running(bytes(result.quantized_model)))]


if __name__ == "__main__":
    main(offers)
