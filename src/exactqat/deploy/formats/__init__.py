# SPDX-License-Identifier: Apache-2.0
"""Files: .tflite written and read, .onnx and C arrays written."""
