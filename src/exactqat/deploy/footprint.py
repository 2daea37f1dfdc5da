# SPDX-License-Identifier: Apache-2.0
"""A network's footprint on a microcontroller (flash, tensor memory, multiply-accumulates) and on an NPU.

Memory is measured, not estimated: the smallest arena in which TFLite-Micro's interpreter runs the network. Vela, the
compiler for Arm's Ethos-U, reports which operators it leaves to the CPU, and what the others need.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..kit.display import Finding
from .formats.tflite import file_schema, import_deploy, tflite_bytes, words_of
from .graph import Graph, require_graph
from .runtimes.trial import RuntimeRefusal, try_in_a_child

MICRO = "pip install 'exactqat[micro]'"
NPU = "pip install 'exactqat[npu]'"
# What Vela's `--accelerator-config` takes.
ACCELERATORS = ("ethos-u55-32", "ethos-u55-64", "ethos-u55-128", "ethos-u55-256", "ethos-u65-256", "ethos-u65-512")
DEFAULT_ACCELERATOR = "ethos-u55-128"
# How far beyond the bytes that a file used its smallest arena is searched for.
_MOST_BEYOND = 1 << 30
_OUTSIDE = ("on_chip_flash", "off_chip_flash", "dram")


@dataclass(frozen=True, repr=False)
class Footprint(Finding):
    """Footprint of one network on a microcontroller.

    Attributes:
        flash_bytes: size of the file, which a microcontroller reads in place.
        arena_bytes: the smallest arena in which TFLite-Micro's interpreter runs it, measured with eight-byte pointers;
            a processor with four-byte pointers needs less. None if it was not measured; see `why_not`.
        multiply_accumulates: for one example.
        operators: number of operators of each kind.
        why_not: why the arena was not measured, as a sentence.
        parts: bytes of the file by content; they add up to the whole file.
    """

    flash_bytes: int
    arena_bytes: int | None
    multiply_accumulates: int
    operators: Mapping[str, int] = field(default_factory=dict)
    why_not: str = ""
    parts: Mapping[str, int] = field(default_factory=dict)

    def text(self) -> str:
        arena = f"{self.arena_bytes:,} bytes of arena" if self.arena_bytes is not None else f"no arena: {self.why_not}"
        return f"{self.flash_bytes:,} bytes of flash, {arena}, {self.multiply_accumulates:,} multiply-adds"


@dataclass(frozen=True, repr=False)
class NpuFootprint(Finding):
    """Footprint of a network compiled by Vela.

    Attributes:
        accelerator: one of ACCELERATORS.
        operators_on_cpu: number of operators of each kind that the NPU does not run.
        sram_bytes: SRAM used by the compiled network.
        flash_bytes: outside SRAM: in flash, or in DRAM for Ethos-U65.
        cycles: estimated for one example.
    """

    accelerator: str
    operators_on_cpu: Mapping[str, int]
    sram_bytes: int
    flash_bytes: int
    cycles: int

    def text(self) -> str:
        left = ", ".join(f"{count} {name}" for name, count in self.operators_on_cpu.items()) or "none"
        return (
            f"{self.accelerator}: {self.sram_bytes:,} bytes of SRAM, {self.flash_bytes:,} bytes of flash, "
            f"{self.cycles:,} cycles; operators left to the processor: {left}"
        )


def footprint(graph: Graph, content: bytes | None = None) -> Footprint:
    """Measures the network's footprint on a microcontroller.

    Args:
        content: its .tflite file, if already written; by default the one that the graph was read from.
    """
    require_graph(graph)
    content = content or graph.file or tflite_bytes(graph)
    arena, why_not = arena_of(content)
    work = sum(graph.multiply_accumulates(operator) for operator in graph.operators)
    kinds = dict(Counter(operator.kind for operator in graph.operators))
    return Footprint(len(content), arena, work, kinds, why_not, file_parts(content))


def file_parts(content: bytes) -> dict[str, int]:
    """The bytes of a .tflite file by content: weights (int8 and int16 constants), biases and indices, scales and
    zero points, names, and the structure around them, including padding."""
    schema = file_schema()
    model = schema.ModelT.InitFromPackedBuf(content)
    narrow = (schema.TensorType.INT8, schema.TensorType.INT16)
    parts = dict.fromkeys(("weights", "biases and indices", "scales and zero points", "names"), 0)
    seen: set[int] = set()
    for tensor in model.subgraphs[0].tensors:
        data = model.buffers[tensor.buffer].data
        if data is not None and tensor.buffer not in seen:
            parts["weights" if tensor.type in narrow else "biases and indices"] += len(data)
        seen.add(tensor.buffer)
        parts["names"] += len(tensor.name or b"")
        grid = tensor.quantization
        for numbers in () if grid is None else (grid.scale, grid.zeroPoint):
            parts["scales and zero points"] += 0 if numbers is None else np.asarray(numbers).nbytes
    return parts | {"structure": len(content) - sum(parts.values())}


# In a process of its own: the interpreter prints at will, and could end the process.


def _print_smallest(content: bytes) -> None:
    """Prints the smallest arena in which a file runs, or why the runtime refuses it.

    While they are prepared, kernels may briefly need more than they keep, and not all survive a lack of it.
    """
    runtime = import_deploy("tflite_micro", "micro").runtime
    with tempfile.TemporaryFile() as said:

        def show_used() -> None:
            os.dup2(said.fileno(), 2)
            interpreter = runtime.Interpreter.from_bytes(content, arena_size=1 << 30)
            interpreter.invoke()
            interpreter.print_allocations()

        status = _in_a_fork(show_used)
        said.seek(0)
        words = said.read().decode(errors="replace")
    used = re.search(r"Arena allocation total (\d+) bytes", words)
    if used is None or status:
        print(words, file=sys.stderr, flush=True)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        return

    def runs(size: int) -> bool:
        return _in_a_fork(lambda: runtime.Interpreter.from_bytes(content, arena_size=size).invoke()) == 0

    low, step = int(used[1]) - 16, 16
    while not runs(low + step):
        low, step = low + step, 2 * step
        if step > _MOST_BEYOND:
            raise RuntimeError("it does not run again")
    while step > 16:
        step //= 2
        low += 0 if runs(low + step) else step
    print(f"smallest arena {low + step} bytes", file=sys.stderr)


def _in_a_fork(function: Callable[[], object]) -> int:
    """The exit status of a process that ran the function: 0 if it completed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def arena_of(content: bytes, seconds: float | None = None) -> tuple[int | None, str]:
    """The smallest arena in which TFLite-Micro runs a file; or None, and why it was not measured.

    seconds: time limit for the process that measures it; None: no limit.
    """
    if importlib.util.find_spec("tflite_micro") is None:
        return None, f"TFLite-Micro is not installed: {MICRO}"
    try:
        said = try_in_a_child(_print_smallest, content, seconds=seconds)
    except RuntimeRefusal as error:
        return None, f"TFLite-Micro does not run it: {error}"
    smallest = re.search(r"smallest arena (\d+) bytes", said)
    if smallest is not None:
        return int(smallest[1]), ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    missing = [line for line in lines if "Didn't find op" in line]
    return None, f"TFLite-Micro rejects it: {(missing or lines[-1:] or ['no reason given'])[0]}"


def npu_footprint(graph: Graph, accelerator: str = DEFAULT_ACCELERATOR, content: bytes | None = None) -> NpuFootprint:
    """Compiles the network with Vela.

    Args:
        accelerator: one of ACCELERATORS.
        content: its .tflite file, if already written.

    Raises:
        ValueError: unknown accelerator.
        ImportError: Vela is not installed.
        RuntimeError: Vela rejects the file; the error contains its message.
    """
    if accelerator not in ACCELERATORS:
        raise ValueError(f"accelerator must be one of {', '.join(ACCELERATORS)}, got {accelerator!r}")
    if importlib.util.find_spec("ethosu") is None:
        raise ImportError(f"this needs Vela: {NPU}")
    content = tflite_bytes(graph) if content is None else content
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        path.write_bytes(content)
        options = ["--accelerator-config", accelerator, "--output-dir", folder]
        command = [sys.executable, "-P", "-m", "ethosu.vela", *options, str(path)]
        environment = os.environ | {"PYTHONWARNINGS": "ignore"}
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        summaries = list(Path(folder).glob("*_summary_*.csv"))
        if result.returncode or not summaries:
            said = (result.stderr.strip() or result.stdout.strip()).splitlines()
            raise RuntimeError(f"Vela rejects the network: {said[-1] if said else 'no reason given'}")
        with summaries[0].open(newline="") as file:
            row = next(csv.DictReader(file))
        model = file_schema().ModelT.InitFromPackedBuf(next(Path(folder).glob("*_vela.tflite")).read_bytes())
    words, codes = words_of("BuiltinOperator"), model.operatorCodes
    kinds = [words[max(code.builtinCode, code.deprecatedBuiltinCode)] for code in codes]
    left = Counter(kinds[operator.opcodeIndex] for operator in model.subgraphs[0].operators)
    del left["CUSTOM"]  # the NPU's own
    return NpuFootprint(
        accelerator,
        dict(left),
        round(float(row["sram_memory_used"]) * 1024),
        round(sum(float(row[f"{place}_memory_used"]) for place in _OUTSIDE) * 1024),
        round(float(row["cycles_total"])),
    )
