# SPDX-License-Identifier: Apache-2.0
"""Files on LiteRT, for the adapters of tools that write them."""

from __future__ import annotations

import numpy as np
from exchange import Computes


def running(content: bytes) -> Computes:
    """A .tflite file with one input and one output, fed and read in real numbers, example by example."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content, num_threads=1)
    interpreter.allocate_tensors()
    (feature,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()

    def computed(x: np.ndarray) -> np.ndarray:
        results = []
        scale, zero_point = feature["quantization"]
        if scale:
            ends = np.iinfo(feature["dtype"])
            x = np.clip(np.rint(x / scale) + zero_point, ends.min, ends.max).astype(feature["dtype"])
        for example in x:
            interpreter.set_tensor(feature["index"], example[None])
            interpreter.invoke()
            results.append(interpreter.get_tensor(result["index"])[0].astype(np.float32))
        scale, zero_point = result["quantization"]
        return (np.stack(results) - zero_point) * scale if scale else np.stack(results)

    return computed


__all__ = ["running"]
