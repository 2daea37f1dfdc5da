# SPDX-License-Identifier: Apache-2.0
"""From a trained network to the device: a graph of integer operators, its file, its exact simulation and its
verification.

`lower` turns a trained network into a `Graph`, `simulate` computes it in exact integers, `write_tflite` writes it, and
`verify` compares the real runtime with the simulation; all work on any operator that `exactqat.kit.device` declares.
Importing this package only requires NumPy; writing and running files requires `pip install 'exactqat[deploy]'`.
"""

from ..kit.device.operator import Refusal
from ..kit.device.tensor import dequantize, quantize
from ..kit.planning.plans import MissingData
from .codes import input_codes, output_values
from .comparison import Comparison, Report

# These functions shadow the modules they come from, which Python sets here only while loading them.
from .convert import Conversion, ConvertedFilter, convert
from .footprint import Footprint, NpuFootprint, footprint, npu_footprint
from .formats.c_array import c_array, write_c_array
from .formats.encodings import aimet_encodings, onnxruntime_overrides
from .formats.firmware import write_firmware
from .formats.onnx import write_onnx
from .formats.read_onnx import OnnxModel, read_onnx
from .formats.read_tflite import read_tflite
from .formats.tflite import write_tflite
from .formats.tflite_metadata import with_metadata
from .graph import Builder, Graph, Operator, Quantization, Tensor, per_tensor, place_codes
from .identify import Identification, identify
from .inspect import Inspection, inspect
from .lower import lower
from .packing import packed
from .receipt import Receipt, receipt
from .reduce import Reduction, reduce
from .runtimes import profiles_here
from .runtimes.trial import RuntimeRefusal
from .signature import Port, Signature
from .simulate import EXACT, MEASURED, PROFILES, Compiled, compile, simulate, unclaimed
from .streams import Stream, stream
from .values import device_codes, layer_values
from .verify import verify

__all__ = [
    "EXACT",
    "MEASURED",
    "PROFILES",
    "Builder",
    "Comparison",
    "Compiled",
    "Conversion",
    "ConvertedFilter",
    "Footprint",
    "Graph",
    "Identification",
    "Inspection",
    "MissingData",
    "NpuFootprint",
    "OnnxModel",
    "Operator",
    "Port",
    "Quantization",
    "Receipt",
    "Reduction",
    "Refusal",
    "Report",
    "RuntimeRefusal",
    "Signature",
    "Stream",
    "Tensor",
    "aimet_encodings",
    "c_array",
    "compile",
    "convert",
    "dequantize",
    "device_codes",
    "footprint",
    "identify",
    "input_codes",
    "inspect",
    "layer_values",
    "lower",
    "npu_footprint",
    "onnxruntime_overrides",
    "output_values",
    "packed",
    "per_tensor",
    "place_codes",
    "profiles_here",
    "quantize",
    "read_onnx",
    "read_tflite",
    "receipt",
    "reduce",
    "simulate",
    "stream",
    "unclaimed",
    "verify",
    "with_metadata",
    "write_c_array",
    "write_firmware",
    "write_onnx",
    "write_tflite",
]


def __dir__() -> list[str]:
    return __all__
