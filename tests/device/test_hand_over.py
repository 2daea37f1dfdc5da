# SPDX-License-Identifier: Apache-2.0
"""The first programs of a phone and of a board compare the device's answer with the one that was recorded."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

litert = pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from device_cases import with_sigmoid  # noqa: E402

from exactqat import deploy  # noqa: E402
from exactqat.deploy import Graph, profiles_here, write_c_array, write_firmware  # noqa: E402
from exactqat.deploy.runtimes import emulation  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PHONE = ROOT / "examples" / "phone"
COMPILERS = {"xnnpack-x86": "g++", "xnnpack-arm64": "aarch64-linux-gnu-g++"}


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A convolution, a sigmoid and a dense layer: LiteRT and TFLite-Micro give different codes."""
    return with_sigmoid()


def run(folder: Path, device: str) -> subprocess.CompletedProcess[str]:
    """The phone's program with the header that lies in the folder, on this computer or on an emulated phone."""
    emulated = device == "xnnpack-arm64"
    site = emulation.folder() / "site" / "ai_edge_litert" if emulated else Path(litert.__file__).parent
    options = ["-std=c++17", "-Wall", "-Wextra", "-pedantic", "-Werror", "-Wno-unused-variable", "-I."]
    link = [str(site / "libLiteRt.so"), f"-Wl,-rpath,{site},--allow-shlib-undefined"]
    compiler = COMPILERS[device]
    subprocess.run([compiler, *options, str(PHONE / "compare.cpp"), "-o", "compare", *link], cwd=folder, check=True)
    command = ["./compare"]
    if emulated:
        root = emulation.folder() / "cpus" / emulation.DEFAULT_CPU
        command = [emulation.versions()["emulator"], "-L", str(root), "-E", f"LD_LIBRARY_PATH={site}", *command]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("device", COMPILERS)
def test_a_phone_answers_what_was_recorded(device: str, graph: Graph, tmp_path: Path) -> None:
    if device not in profiles_here() or shutil.which(COMPILERS[device]) is None:
        pytest.skip(f"needs {device} and {COMPILERS[device]}")
    header = write_c_array(graph, tmp_path / "recorded.h", device=device)
    done = run(tmp_path, device)
    assert (done.returncode, done.stdout) == (0, "0 of 40 codes differ from the recorded answer\n"), done.stderr
    # Another device's answer, and one that is no device's.
    write_c_array(graph, header, device="micro")
    done = run(tmp_path, device)
    assert done.returncode == 1 and 0 < int(done.stdout.split()[0]) < 40, done.stderr
    data = re.search(r"recorded_data\[\d+\] = \{\s*(\d+, \d+, \d+, \d+,) ", header.read_text())
    assert data is not None
    header.write_text(header.read_text().replace(data[1], "1, 2, 3, 4,", 1))
    done = run(tmp_path, device)
    assert done.returncode == 2 and "failed with status" in done.stderr


# What TFLite-Micro declares of what the page's program uses; its interpreter answers what was recorded, or not.
BOARD = """
#pragma once
#include <cstdio>
#include <cstring>
enum TfLiteStatus { kTfLiteOk };
struct TfLiteTensor { union { signed char* int8; } data; };
inline void MicroPrintf(const char* text) { std::puts(text); }
namespace tflite {
struct Model {};
inline const Model* GetModel(const void* data) { return static_cast<const Model*>(data); }
template <unsigned count> struct MicroMutableOpResolver {
  void AddConv2D() {}
  void AddLogistic() {}
  void AddReshape() {}
  void AddFullyConnected() {}
};
struct MicroInterpreter {
  template <class Resolver> MicroInterpreter(const Model*, const Resolver&, unsigned char*, std::size_t) {
    in.data.int8 = codes;
    out.data.int8 = codes;
  }
  TfLiteStatus AllocateTensors() { return kTfLiteOk; }
  TfLiteStatus Invoke() {
    for (int at = 0; at < KEYWORDS_W8A8_OUTPUT_0_SIZE; ++at) {
      codes[at] = keywords_w8a8_recorded_output_0[at];
    }
    codes[1] += OFF;
    return kTfLiteOk;
  }
  TfLiteTensor* input(int) { return &in; }
  TfLiteTensor* output(int) { return &out; }
  signed char codes[1000];
  TfLiteTensor in, out;
};
}  // namespace tflite
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("off", [0, 1])
def test_the_program_for_a_board_compiles(off: int, graph: Graph, tmp_path: Path) -> None:
    (program,) = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs" / "microcontrollers.md").read_text(), re.S)
    header = write_c_array(graph, tmp_path / "keywords_w8a8.h")
    if "KEYWORDS_W8A8_ARENA_SIZE" not in header.read_text():
        header.write_text(header.read_text() + "#define KEYWORDS_W8A8_ARENA_SIZE 4096\n")
    for name in re.findall(r'#include "(tensorflow/.*)"', program):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#include "board.h"\n')
    (tmp_path / "board.h").write_text(BOARD)
    (tmp_path / "main.cpp").write_text(program)
    options = ["-std=c++17", "-Wall", "-Wextra", "-I.", f"-DOFF={off}"]
    subprocess.run(["g++", *options, "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    done = subprocess.run(["./main"], cwd=tmp_path, capture_output=True, text=True)
    said = ["the board computes what TFLite-Micro does", "the board differs"][off]
    assert (done.returncode, done.stdout) == (3 * off, f"{said}\n")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["esp-idf", "zephyr", "arduino"])
def test_components_of_firmwares_compile(kind: str, graph: Graph, tmp_path: Path) -> None:
    """Their sources, against a stand-in for TFLite-Micro that answers what was recorded, or not."""
    folder = write_firmware(graph, tmp_path / "keywords_w8a8", kind)
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    build_files = {
        "esp-idf": {"CMakeLists.txt", "idf_component.yml"},
        "zephyr": {"CMakeLists.txt", "Kconfig", "zephyr/module.yml"},
        "arduino": {"library.properties", "examples/check/check.ino"},
    }
    assert build_files[kind] < written and len(written) == len(build_files[kind]) + 3
    (source,) = folder.rglob("*_check.cpp")
    header = next(folder.rglob("keywords_w8a8.h"))
    for name in re.findall(r'#include "(tensorflow/.*)"', source.read_text()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#include "board.h"\n')
    (tmp_path / "board.h").write_text(BOARD.replace("signed char* int8;", "signed char* int8; char* raw;"))
    program = '#include "keywords_w8a8_check.h"\nint main() { return keywords_w8a8_check(); }\n'
    (tmp_path / "main.cpp").write_text(program)
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unused-variable", "-I.", f"-I{header.parent}"]
    options += [] if "ARENA_SIZE" in header.read_text() else ["-DKEYWORDS_W8A8_ARENA_SIZE=4096"]
    for off in (0, 1):
        command = ["g++", *options, f"-DOFF={off}", str(source), "main.cpp", "-o", "main"]
        subprocess.run(command, cwd=tmp_path, check=True)
        assert subprocess.run(["./main"], cwd=tmp_path).returncode == off
    with pytest.raises(ValueError, match="system must be one of esp-idf, zephyr, arduino, got 'mbed'"):
        write_firmware(graph, folder, "mbed")


def test_the_page_of_the_phone_runs(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "on-a-phone.md").read_text(), re.S)
    exec(program, {"deploy": deploy, "graph": graph, "image": np.zeros((1, 9, 9, 3), np.float32)})
    assert [(tmp_path / name).stat().st_size for name in ("input.bin", "output.bin")] == [9 * 9 * 3, 40]


@pytest.mark.slow
def test_devices_of_headers(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'phone'"):
        write_c_array(graph, tmp_path / "recorded.h", device="phone")
    assert not list(tmp_path.iterdir())
    for device, title in (("micro", "TFLite-Micro"), ("xnnpack-arm64", "LiteRT with XNNPACK on 64-bit ARM")):
        assert f"{title} returns these outputs" in deploy.c_array(graph, device=device)
