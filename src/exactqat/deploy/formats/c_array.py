# SPDX-License-Identifier: Apache-2.0
"""A network as a C header, with everything the first program on a board or a phone needs.

The model itself, the size of its arena, the operators it needs, the quantization of its inputs and outputs, and one
recorded input with the codes that the device must return, so that the program can check itself without a sensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ...kit.device import profile_named
from ..footprint import Footprint, footprint
from ..graph import Graph
from ..signature import Port
from ..simulate import check_inputs, simulate
from .tflite import file_schema, tflite_bytes, words_of, write_whole
from .tflite_steps import CUSTOM

# How every header begins.
MADE_BY = "// Made by exactqat"
_WIDTH = 120
_TYPES = {"int8": "signed char", "uint8": "unsigned char", "int16": "short", "int32": "int", "int64": "long long"}


def write_c_array(
    graph: Graph,
    path: str | os.PathLike[str],
    x: np.ndarray | Mapping[str, np.ndarray] | None = None,
    name: str | None = None,
    description: str = "",
    class_names: Sequence[str] = (),
    device: str = "micro",
) -> Path:
    """Writes the header; see `c_array`. Its names start with the file's name by default, so that one program can
    contain several networks."""
    path = Path(path)
    name = c_name(path.stem) if name is None else name
    return write_whole(path, c_array(graph, x, name, description, class_names=class_names, device=device).encode())


def c_name(text: str) -> str:
    """A C identifier that resembles the text."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_") or "model"
    return f"model_{name}" if name[0].isdigit() else name


def check_identifier(name: str) -> None:
    """
    Raises:
        ValueError: it is not a C identifier.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            f"name must be a C identifier (letters, digits and _, not starting with a digit), got {name!r}"
        )


def c_array(
    graph: Graph,
    x: np.ndarray | Mapping[str, np.ndarray] | None = None,
    name: str = "model",
    description: str = "",
    cost: Footprint | None = None,
    class_names: Sequence[str] = (),
    device: str = "micro",
) -> str:
    """The text of a C header that contains the network.

    Args:
        x: codes [1, ...] of one example (or one such array per input name), recorded together with the codes that
            the device returns for it. Random codes by default.
        name: prefix of every name in the header, including its guard. Two headers in one program need different ones.
        description: stored in the model and in the comment at the top of the header.
        cost: the network's footprint, if already known.
        class_names: names of the first output's values, written into the header.
        device: what the header's program runs on: "micro" for a board, "xnnpack-arm64" for a phone.

    Raises:
        ValueError: `name` is not a C identifier, x or class_names do not match the network, there is no such device, or
            the network takes or returns real numbers.
    """
    check_identifier(name)
    profile = profile_named(device)
    for end in (*graph.inputs, *graph.outputs):
        dtype = graph.tensors[end].dtype
        if dtype not in _TYPES:
            allowed = ", ".join(_TYPES)
            raise ValueError(f"graph must take and return integers, {end!r} is {dtype}; allowed are {allowed}")
    values = graph.tensors[graph.outputs[0]].shape[-1]
    if class_names and len(class_names) != values:
        raise ValueError(
            f"class_names must have one name for each of the first output's {values} values, got {len(class_names)}"
        )
    content = tflite_bytes(graph, description)
    cost = footprint(graph, content) if cost is None else cost
    if x is None:
        rng, tensors = np.random.default_rng(0), [graph.tensors[end] for end in graph.inputs]
        x = {
            tensor.name: rng.integers(*graph.limits(tensor.name), tensor.shape, tensor.dtype, endpoint=True)
            for tensor in tensors
        }
    inputs = check_inputs(graph, x)
    if {len(codes) for codes in inputs.values()} != {1}:
        raise ValueError(f"x must contain one example, got {len(next(iter(inputs.values())))}")
    outputs = simulate(graph, inputs, profile.name)
    upper = name.upper()
    guard = f"{upper}_H_"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(cost.operators.items()))
    sentences = [
        f"{MADE_BY.removeprefix('// ')}{': ' + description if description else ''}. Do not edit.",
        f"{cost.flash_bytes:,} bytes of flash, {cost.multiply_accumulates:,} multiply-accumulates for one example.",
        f"Operators: {kinds}.",
    ]
    arena = [f"// The arena size was not measured. {cost.why_not}"]
    if cost.arena_bytes is not None:
        arena = [
            "// The smallest arena in which TFLite-Micro ran it, with 8-byte pointers; 4-byte pointers need less.",
            f"#define {upper}_ARENA_SIZE {cost.arena_bytes}",
        ]
    classes = []
    if class_names:
        classes = [
            "",
            "// The meaning of each value of output 0, in UTF-8.",
            f"#define {upper}_CLASS_COUNT {len(class_names)}",
            f"static const char* const {name}_class_names[{len(class_names)}] = {{",
        ]
        classes += [*(f"  {literal(text)}," for text in class_names), "};"]
    lines = [
        # A description could close the comment.
        *(f"// {re.sub(r'[^ -~]', '?', line)}".rstrip("\\") for line in sentences),
        f"#ifndef {guard}",
        f"#define {guard}",
        "",
        f"#define {upper}_SIZE {len(content)}",
        *arena,
        "",
        *_operators(upper, content),
        "",
        *_quantizations(upper, "INPUT", graph, graph.inputs, graph.signature.inputs),
        *_quantizations(upper, "OUTPUT", graph, graph.outputs, graph.signature.outputs),
        *classes,
        "",
        "// TFLite-Micro reads it in place: it must be aligned.",
        "#ifdef __cplusplus",
        "alignas(16)",
        "#elif defined(__GNUC__)",
        "__attribute__((aligned(16)))",
        "#endif",
        *array_lines(f"static const unsigned char {name}_data", np.frombuffer(content, np.uint8)),
        "",
        f"// One recorded example: {profile.title} returns these outputs for these inputs; other devices may differ.",
        *_recorded(name, "input", [inputs[end] for end in graph.inputs]),
        *_recorded(name, "output", [outputs[end] for end in graph.outputs]),
        "",
        f"#endif  // {guard}",
        "",
    ]
    return "\n".join(lines)


def literal(text: str) -> str:
    """A C literal that reads back as the same bytes of UTF-8, whatever they are; ? could start a trigraph."""
    letters = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\?' else f"\\{byte:03o}"
        for byte in text.encode("utf-8", "surrogatepass")
    )
    return f'"{"".join(letters)}"'


def _operators(upper: str, content: bytes) -> list[str]:
    """A macro that adds what the model needs to a MicroMutableOpResolver."""
    words = words_of("BuiltinOperator")
    model = file_schema().ModelT.InitFromPackedBuf(content)
    kinds = sorted(
        {
            CUSTOM[code.customCode.decode()]
            if code.customCode
            else words[max(code.builtinCode, code.deprecatedBuiltinCode)]
            for code in model.operatorCodes
        }
    )
    # TFLite-Micro's resolver separates version and dimensions as words.
    words_in = [re.sub(r"(V\d)$", r"_\1", kind).split("_") for kind in kinds]
    names = ["".join(word if word[0].isdigit() else word.capitalize() for word in phrase) for phrase in words_in]
    calls = [f"(resolver).Add{name}()" for name in names]
    return [
        f"#define {upper}_OPERATOR_COUNT {len(kinds)}",
        f"// tflite::MicroMutableOpResolver<{upper}_OPERATOR_COUNT> resolver; {upper}_ADD_OPERATORS(resolver);",
        f"#define {upper}_ADD_OPERATORS(resolver) \\",
        "  do { \\",
        *(f"    {call}; \\" for call in calls),
        "  } while (0)",
    ]


def _quantizations(upper: str, side: str, graph: Graph, names: Sequence[str], ports: Sequence[Port]) -> list[str]:
    """real value = (code - zero point) * scale"""
    lines = [f"#define {upper}_{side}_COUNT {len(names)}"]
    for number, tensor in enumerate(graph.tensors[name] for name in names):
        begin = f"#define {upper}_{side}_{number}"
        shape = "x".join(map(str, tensor.shape))
        lines.append(f"// {side.lower()} {number}: {tensor.dtype} [{shape}], real = (code - zero point) * scale")
        # What the user's program knows about it.
        said = [port.described(tensor) for port in ports if port.tensor == tensor.name]
        lines += [re.sub(r"[^ -~]", "?", f"//   {text}").rstrip("\\") for text in said]
        lines.append(f"{begin}_SIZE {int(np.prod(tensor.shape))}")
        if len(tensor.quantization.scale):
            lines.append(f"{begin}_SCALE {_float(tensor.quantization.scale[0])}")
            lines.append(f"{begin}_ZERO_POINT {int(tensor.quantization.zero_point[0])}")
    return lines


def _float(value: np.floating) -> str:
    """A literal that reads back as the same bits."""
    text = f"{np.float32(value):.9g}"
    return f"{text}f" if any(sign in text for sign in ".e") else f"{text}.0f"


def _recorded(name: str, side: str, arrays: Sequence[np.ndarray]) -> list[str]:
    return [
        line
        for number, array in enumerate(arrays)
        for line in array_lines(
            f"static const {_TYPES[str(array.dtype)]} {name}_recorded_{side}_{number}", array.ravel()
        )
    ]


def array_lines(declaration: str, values: np.ndarray) -> list[str]:
    """C source of an array with these values."""
    lines, line = [f"{declaration}[{values.size}] = {{"], ""
    for text in map(str, values.tolist()):
        if len(line) + len(text) + 4 > _WIDTH:
            lines.append(f"  {line}")
            line = ""
        line += f"{text}, " if len(line) + len(text) + 6 <= _WIDTH else f"{text},"
    return [row.rstrip() for row in (*lines, f"  {line}", "};")]
