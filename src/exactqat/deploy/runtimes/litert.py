# SPDX-License-Identifier: Apache-2.0
"""LiteRT's interpreter on one model, on this processor or on an emulated one; tensors are addressed by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...kit.device import Profile
from ..formats.tflite import import_deploy
from .emulation import EmulatedInterpreter
from .trial import RuntimeRefusal


class LiteRT:
    """The interpreter on one model, addressed by tensor names and resized to the batch at hand."""

    module = "ai_edge_litert"

    def __init__(
        self,
        content: bytes,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        profile: Profile,
        in_order: bool = False,
    ) -> None:
        runtime = self.interpreters()
        resolvers = runtime.OpResolverType
        resolver = resolvers.AUTO if profile.optimized else resolvers.BUILTIN_REF
        try:
            self.interpreter: Any = runtime.Interpreter(
                model_content=content, experimental_op_resolver_type=resolver, num_threads=1
            )
        except ValueError as error:
            raise RuntimeRefusal(f"LiteRT rejects the file: {' '.join(str(error).split())}") from error
        self.inputs = indices_of(self.interpreter.get_input_details(), inputs, in_order)
        self.outputs = indices_of(self.interpreter.get_output_details(), outputs, in_order)
        self.shapes: list[tuple[int, ...]] = []

    @staticmethod
    def interpreters() -> Any:
        """The module that holds the interpreter, or an ImportError that says how to install it."""
        return import_deploy("ai_edge_litert.interpreter")

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes = [batch[name].shape for name in self.inputs]
        if shapes != self.shapes:
            for name, index in self.inputs.items():
                self.interpreter.resize_tensor_input(index, batch[name].shape)
            try:
                self.interpreter.allocate_tensors()
            except RuntimeError as error:
                raise RuntimeRefusal(f"LiteRT rejects the file: {error}") from error
            self.shapes = shapes
        for name, index in self.inputs.items():
            self.interpreter.set_tensor(index, batch[name])
        try:
            self.interpreter.invoke()
        except RuntimeError as error:
            raise RuntimeRefusal(f"LiteRT fails to run the file: {error}") from error
        return {name: self.interpreter.get_tensor(index) for name, index in self.outputs.items()}


class Emulated:
    """LiteRT on an emulated processor, addressed by tensor names."""

    def __init__(
        self, content: bytes, inputs: tuple[str, ...], outputs: tuple[str, ...], in_order: bool = False
    ) -> None:
        self.interpreter = EmulatedInterpreter(content)
        self.inputs = indices_of(self.interpreter.inputs, inputs, in_order)
        self.outputs = indices_of(self.interpreter.outputs, outputs, in_order)

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {index: np.ascontiguousarray(batch[name]) for name, index in self.inputs.items()}
        try:
            results = self.interpreter.run(given, list(self.outputs.values()))
        except RuntimeError as error:
            raise RuntimeRefusal(f"LiteRT rejects the file on ARM64: {error}") from error
        if not self.interpreter.delegated():
            raise RuntimeError("LiteRT runs without XNNPACK on the emulated processor, unlike on any phone")
        return dict(zip(self.outputs, results, strict=True))


def indices_of(details: list[dict[str, Any]], names: tuple[str, ...], in_order: bool) -> dict[str, int]:
    if in_order:
        return {name: int(detail["index"]) for name, detail in zip(names, details, strict=True)}
    found = {detail["name"]: int(detail["index"]) for detail in details}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"the file does not have {missing} where the graph does; it has {sorted(found)}")
    return {name: found[name] for name in names}
