# SPDX-License-Identifier: Apache-2.0
"""A network as a component of a firmware: for ESP-IDF, Zephyr or Arduino, with a function that checks the board.

Each is a folder with the header of `c_array`, a source file that runs the recorded example with TFLite-Micro and counts
the codes that differ, and what the build system asks for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..graph import Graph
from .c_array import c_array, c_name
from .tflite import write_whole


def firmware_files(graph: Graph, system: str, name: str, **header: Any) -> dict[str, str]:
    """The files of a component by their path in its folder.

    Args:
        system: the build system: "esp-idf", "zephyr" or "arduino".
        name: prefix of all names in C and C++; for several networks in a firmware they have to differ.
        header: more arguments of `c_array`: x, description, class_names, device.

    Raises:
        ValueError: there is no such build system, or `c_array` refuses the network or the name.
    """
    if system not in SYSTEMS:
        raise ValueError(f"system must be one of {', '.join(SYSTEMS)}, got {system!r}")
    include, source, own = SYSTEMS[system]
    files = {
        f"{include}/{name}.h": c_array(graph, name=name, **header),
        f"{include}/{name}_check.h": _CHECK_HEADER,
        f"{source}/{name}_check.cpp": _check(graph, name),
        **own(name),
    }
    return {path: text.replace("@NAME@", name).replace("@UPPER@", name.upper()) for path, text in files.items()}


def write_firmware(
    graph: Graph, path: str | os.PathLike[str], system: str, name: str | None = None, **header: object
) -> Path:
    """Writes the component's folder; see `firmware_files`. By default its names start with the folder's."""
    path = Path(path)
    for file, text in firmware_files(graph, system, c_name(path.name) if name is None else name, **header).items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        write_whole(path / file, text.encode())
    return path


def _check(graph: Graph, name: str) -> str:
    fill = [
        f"  std::memcpy(interpreter.input({at})->data.raw, {name}_recorded_input_{at},\n"
        f"              sizeof {name}_recorded_input_{at});"
        for at in range(len(graph.inputs))
    ]
    count = [
        f"  wrong += differing(interpreter.output({at})->data.raw, {name}_recorded_output_{at});"
        for at in range(len(graph.outputs))
    ]
    return _CHECK.replace("@FILL@", "\n".join(fill)).replace("@COUNT@", "\n".join(count))


_CHECK_HEADER = """// Made by exactqat. Do not edit.
#ifndef @UPPER@_CHECK_H_
#define @UPPER@_CHECK_H_

// Runs the recorded example: how many of the outputs' codes differ from those that the network was made for, 0 if the
// board computes what training did; -1 if the arena is too small or an operator is missing, -2 if it cannot run.
int @NAME@_check(void);

#endif  // @UPPER@_CHECK_H_
"""

_CHECK = """// Made by exactqat. Do not edit.
#include "@NAME@_check.h"

#include <cstddef>
#include <cstring>

#include "@NAME@.h"
#ifdef ARDUINO
#include <Chirale_TensorFlowLite.h>  // Arduino finds a library by a header in its folder
#endif
#include "tensorflow/lite/micro/micro_interpreter.h"
#include "tensorflow/lite/micro/micro_mutable_op_resolver.h"
#include "tensorflow/lite/schema/schema_generated.h"

#ifndef @UPPER@_ARENA_SIZE
#error "the arena was not measured: define @UPPER@_ARENA_SIZE"
#endif

namespace {

alignas(16) unsigned char arena[@UPPER@_ARENA_SIZE];

template <typename Code, std::size_t size>
int differing(const void* data, const Code (&expected)[size]) {
  int wrong = 0;
  for (std::size_t at = 0; at < size; ++at) {
    Code code;
    std::memcpy(&code, static_cast<const unsigned char*>(data) + at * sizeof code, sizeof code);
    wrong += code != expected[at];
  }
  return wrong;
}

}  // namespace

int @NAME@_check(void) {
  tflite::MicroMutableOpResolver<@UPPER@_OPERATOR_COUNT> resolver;
  @UPPER@_ADD_OPERATORS(resolver);
  tflite::MicroInterpreter interpreter(tflite::GetModel(@NAME@_data), resolver, arena, sizeof arena);
  if (interpreter.AllocateTensors() != kTfLiteOk) return -1;
@FILL@
  if (interpreter.Invoke() != kTfLiteOk) return -2;
  int wrong = 0;
@COUNT@
  return wrong;
}
"""


def _esp_idf(name: str) -> dict[str, str]:
    register = f'idf_component_register(SRCS "{name}_check.cpp" INCLUDE_DIRS "include")\n'
    manifest = 'version: "0.1.0"\ndescription: A network of exactqat.\n'
    return {
        "CMakeLists.txt": register,
        "idf_component.yml": f'{manifest}dependencies:\n  espressif/esp-tflite-micro: ">=1.3"\n',
    }


def _zephyr(name: str) -> dict[str, str]:
    option = f"EXACTQAT_{name.upper()}"
    return {
        "zephyr/module.yml": f"name: {name}\nbuild:\n  cmake: .\n  kconfig: Kconfig\n",
        "Kconfig": f'config {option}\n\tbool "The network {name}, made by exactqat"\n\tdepends on '
        "TENSORFLOW_LITE_MICRO\n\tdefault y\n",
        "CMakeLists.txt": f"if(CONFIG_{option})\n  zephyr_include_directories(include)\n  zephyr_library()\n"
        f"  zephyr_library_sources(src/{name}_check.cpp)\nendif()\n",
    }


def _arduino(name: str) -> dict[str, str]:
    properties = {
        "name": name,
        "version": "0.1.0",
        "author": "exactqat",
        "maintainer": "exactqat",
        "sentence": "A quantized network that checks itself.",
        "paragraph": "Call its check function at start-up.",
        "category": "Data Processing",
        "architectures": "*",
        "depends": "Chirale_TensorFlowLite",
        "includes": f"{name}_check.h",
    }
    sketch = f"""#include <{name}_check.h>

void setup() {{
  Serial.begin(115200);
  const int wrong = {name}_check();
  Serial.println(wrong == 0 ? "the board computes what was trained" : "the board differs");
}}

void loop() {{}}
"""
    return {
        "library.properties": "".join(f"{key}={value}\n" for key, value in properties.items()),
        "examples/check/check.ino": sketch,
    }


# By build system: the folder of headers, that of sources, and what is its own.
SYSTEMS: dict[str, tuple[str, str, Callable[[str], dict[str, str]]]] = {
    "esp-idf": ("include", ".", _esp_idf),
    "zephyr": ("include", "src", _zephyr),
    "arduino": ("src", "src", _arduino),
}
