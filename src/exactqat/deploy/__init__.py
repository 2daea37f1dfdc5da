# SPDX-License-Identifier: Apache-2.0
"""From a trained network to the device: a graph of integer operators, its file, its exact simulation and its proof.

`graph` describes a fully quantized network, `simulate` computes it in exact integers, `tflite` writes it, `verify` runs
the real runtime beside the simulation; all are generic over the operators that `exactqat.device` declares. Importing
this package needs NumPy only; writing and running files needs `pip install exactqat[deploy]`.
"""

from .c_array import c_array, write_c_array
from .footprint import Footprint, NpuFootprint, footprint, npu_footprint
from .graph import Builder, Graph, Operator, Quantization, Tensor, per_tensor, place_codes
from .onnx import verify_onnx, write_onnx
from .simulate import EXACT, MEASURED, PROFILES, dequantize, quantize, simulate, unclaimed
from .tflite import write_tflite
from .verify import Report, profiles_here, verify

__all__ = [
    "EXACT",
    "MEASURED",
    "PROFILES",
    "Builder",
    "Footprint",
    "Graph",
    "NpuFootprint",
    "Operator",
    "Quantization",
    "Report",
    "Tensor",
    "c_array",
    "dequantize",
    "footprint",
    "npu_footprint",
    "per_tensor",
    "place_codes",
    "profiles_here",
    "quantize",
    "simulate",
    "unclaimed",
    "verify",
    "verify_onnx",
    "write_c_array",
    "write_onnx",
    "write_tflite",
]
