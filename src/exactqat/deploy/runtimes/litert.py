# SPDX-License-Identifier: Apache-2.0
"""LiteRT's interpreter on one model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...kit.device import Profile
from ..formats.tflite import import_deploy
from .trial import RuntimeRefusal


class LiteRT:
    """The interpreter on one model, resized to the batch at hand; arrays are in the file's order."""

    def __init__(self, content: bytes, profile: Profile) -> None:
        runtime = import_deploy("ai_edge_litert.interpreter")
        resolvers = runtime.OpResolverType
        resolver = resolvers.AUTO if profile.optimized else resolvers.BUILTIN_REF
        try:
            self.interpreter = runtime.Interpreter(
                model_content=content, experimental_op_resolver_type=resolver, num_threads=1
            )
        except ValueError as error:
            raise RuntimeRefusal(f"LiteRT rejects the file: {' '.join(str(error).split())}") from error
        self.inputs, self.outputs = (
            [detail["index"] for detail in details]
            for details in (self.interpreter.get_input_details(), self.interpreter.get_output_details())
        )
        self.shapes: list[tuple[int, ...]] = []

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        shapes = [array.shape for array in arrays]
        if shapes != self.shapes:
            for index, shape in zip(self.inputs, shapes, strict=True):
                self.interpreter.resize_tensor_input(index, shape)
            try:
                self.interpreter.allocate_tensors()
            except RuntimeError as error:
                raise RuntimeRefusal(f"LiteRT rejects the file: {error}") from error
            self.shapes = shapes
        for index, array in zip(self.inputs, arrays, strict=True):
            self.interpreter.set_tensor(index, array)
        try:
            self.interpreter.invoke()
        except RuntimeError as error:
            raise RuntimeRefusal(f"LiteRT fails to run the file: {error}") from error
        return [self.interpreter.get_tensor(index) for index in self.outputs]
