# SPDX-License-Identifier: Apache-2.0
"""The TOSA reference model driven through a pipe, in the environment of `tosa-tools`: what `tosa_model` starts.

    ENVIRONMENT/bin/python tosa_process.py FOLDER

FOLDER holds `emulated_runtime.py`, whose messages these are. The header of a message describes a graph: its `inputs`
and `outputs` by name, `tensors` (name: shape and dtype), `constants` (names, whose arrays come first, then those of the
inputs), `shapes` (name: numbers) and `operations` (TOSA's name, inputs, output, attributes in the serializer's order).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

sys.path.insert(0, sys.argv[1])
from emulated_runtime import read, write  # noqa: E402
from serializer.tosa_serializer import TosaSerializer, TosaSerializerAttribute  # noqa: E402
from tosa.DType import DType  # noqa: E402
from tosa.Op import Op  # noqa: E402
from tosa_reference_model import GraphStatus, run  # noqa: E402

PROPAGATE = 1  # NanPropagationMode, which integers have no use for
DTYPES: dict[str, Any] = {"int8": np.int8, "int16": np.int16, "int32": np.int32}


def serialized(header: dict[str, Any], constants: dict[str, np.ndarray]) -> bytes:
    """A TOSA graph as the serializer writes it."""
    serializer = TosaSerializer(None)
    block = serializer.currRegion.basicBlocks[0]

    def add(name: str, inputs: list[str], output: str, arguments: list[Any]) -> None:
        attributes, op = TosaSerializerAttribute(), getattr(Op, name)
        if name == "CLAMP":
            dtype = DTYPES[header["tensors"][output][1]]
            ends = (np.array([end], dtype).view(np.uint8).tolist() for end in arguments)
            arguments = [serializer.builder, *ends, PROPAGATE]
        attributes.setAttribute(op, *arguments)
        block.addOperator(op, inputs, [output], attributes)

    for name, (shape, dtype) in header["tensors"].items():
        block.addTensor(name, shape, getattr(DType, dtype.upper()), constants.get(name))
    for name in header["inputs"]:
        block.addInput(name)
    for name in constants:
        add("CONST", [], name, [])
    for name, numbers in header["shapes"].items():
        block.addShape(name, len(numbers), numbers)
        add("CONST_SHAPE", [], name, [])
    for operation in header["operations"]:
        add(*operation)
    for name in header["outputs"]:
        block.addOutput(name)
    return bytes(serializer.serialize())


def computed(header: dict[str, Any], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs for the inputs."""
    count = len(header["constants"])
    content = serialized(header, dict(zip(header["constants"], arrays[:count], strict=True)))
    results, status = run(content, arrays[count:])
    if status != GraphStatus.TOSA_VALID:
        raise RuntimeError(f"the reference model says {status.name}")
    shapes = [header["tensors"][name] for name in header["outputs"]]
    return [
        np.frombuffer(np.asarray(result).tobytes(), DTYPES[dtype]).reshape(shape)
        for result, (shape, dtype) in zip(results, shapes, strict=True)
    ]


def main() -> None:
    """Answers until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    while (message := read(sys.stdin.buffer)) is not None:
        try:
            write(answers, {}, computed(*message))
        except Exception as error:  # noqa: BLE001 - whatever it raises is the answer
            write(answers, {"error": f"{type(error).__name__}: {error}"}, [])


if __name__ == "__main__":
    main()
