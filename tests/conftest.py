# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the reference's answers, and the devices on which kernels are compared with them.

Adding a device is one more entry in DEVICES: a name and a function (operator, operands, attributes) -> result arrays,
which fills the results with NaN before the kernel runs.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import Case

from exactqat.operators import OPERATORS, Operator, cpu, reference
from exactqat.operators.declarations.specification import Lowering, TensorSpec

# Tests import what campaigns share with them, and so do the programs that tests start.
HERE = Path(__file__).resolve().parent
SHARED = [str(HERE), str(HERE / "campaigns")]
sys.path += [folder for folder in SHARED if folder not in sys.path]
_given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, (*_given, *SHARED))))
# The backend of Keras in this process, which has one, and in those that it starts: PyTorch, which compiles nothing.
os.environ.setdefault("KERAS_BACKEND", "torch")

# Few tests that take long: their files come first, so that no process is left with one while others have nothing to do.
LONG = [
    f"test_{name}.py"
    for name in ("keras_kit", "ptx", "resume", "job_safety", "jax_devices", "job", "distributed", "networks", "jax_kit")
] + [f"test_{name}.py" for name in ("stubs", "frontends", "docs", "notebooks", "devices", "train", "end_to_end")]


# Of a test with many cases, `--cases` runs one in so many, and at least one.
SHARES = {"few": 24, "most": 14, "every": 1}
# What is compared with TensorFlow's goldens and with the reference is cheap, and `most` runs it whole: all operators
# but not where kernels are interpreted, and not what compiles each case or draws it at random.
WHOLE = "tests/operators/"
SAMPLED = {f"test_{name}.py" for name in ("frontends", "fuzz", "gradients", "jax", "jax_portable", "jax_table")}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: `make test` leaves it out, `make test-all` runs it")
    config.addinivalue_line("markers", "campaign: `make test-every-case` runs it")
    share_what_jax_compiles()


def share_what_jax_compiles() -> None:
    """Tests, and the processes that they start, compile many equal programs; a run keeps them in one place."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="exactqat-jax-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=SHARES,
        default="every",
        help=f"few: no slow tests, and one in {SHARES['few']} cases of every other test; most: no campaigns, and one "
        f"in {SHARES['most']} cases of every test that compares no operators, or compiles or interprets them",
    )


def sample(items: list[Any], cases: str) -> list[Any]:
    """Tests without those that take too long for `cases`; of one with many cases a fixed share, by their names."""
    left_out = {"few": ("slow", "campaign"), "most": ("campaign",), "every": ()}[cases]
    by_test: dict[tuple[str, bool], list[Any]] = {}
    for item in items:
        if not any(item.get_closest_marker(marker) for marker in left_out):
            device = getattr(item, "callspec", SimpleNamespace(params={})).params.get("device")
            whole = item.nodeid.startswith(WHOLE) and item.path.name not in SAMPLED and device not in SLOW
            by_test.setdefault((item.nodeid.partition("[")[0], whole), []).append(item)
    kept = set()
    for (_, whole), of_one_test in by_test.items():
        of_one_test.sort(key=lambda item: zlib.crc32(item.name.encode()))
        share = 1 if cases == "most" and whole else SHARES[cases]
        kept.update(item.nodeid for item in of_one_test[: -(-len(of_one_test) // share)])
    return [item for item in items if item.nodeid in kept]


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if config.getoption("--cases") != "every":
        kept = sample(items, config.getoption("--cases"))
        config.hook.pytest_deselected(items=list(set(items).difference(kept)))
        items[:] = kept
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What was collected and imported stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """What a test draws follows from the names of its file and its own: what fails once fails again, alone too.
    Campaigns draw other numbers."""
    file = request.node.path.name
    _, _, name = request.node.nodeid.partition(file)
    seed = zlib.crc32(f"tests/{file}{name}".encode())
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, whose drawing takes a third of a small job's time, for tests of what is around them."""
    monkeypatch.setattr("exactqat.application.report.charts.svg", lambda figure, caption: "")


BY_RAW_NAME = {op.raw_name: op for op in OPERATORS.values() if op.raw_name}


@lru_cache(maxsize=256)
def expected_of(case: Case) -> tuple[np.ndarray, ...] | Exception:
    """The reference's results for a case, or the error it answers with."""
    try:
        results = reference.call(case.op, case.operands, case.attributes)
    except (ValueError, TypeError) as error:
        return error
    return results if isinstance(results, tuple) else (results,)


# Ranges and statistics stay float32 beside 16-bit tensors.
WIDE = {"magnitudes", "min", "max", "scale", "offset", "mean", "variance"}
WIDE |= {"reserve_space_1", "reserve_space_2", "reserve_space_3"}


def in_halves(case: Case, dtype: np.dtype) -> Case:
    """A float32 case with its tensors in 16 bits."""
    operands = {n: a if n in WIDE else a.astype(dtype) for n, a in case.operands.items()}
    return replace(case, name=f"{case.name} in {dtype}", operands=operands, expected={})


def unwritten(lowered: Lowering, operands: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Arrays for the results, filled with what no kernel should leave in them."""
    dtypes = {array.dtype.name: array.dtype for array in operands}
    return [
        np.full(spec.shape, 0xAA if spec.dtype == "uint8" else np.nan, dtypes.get(spec.dtype, spec.dtype))
        for spec in lowered.results
    ]


def _on_instruction_set(name: str) -> Callable[[Operator, list[np.ndarray], dict[str, Any]], list[np.ndarray]]:
    def run(op: Operator, operands: list[np.ndarray], attributes: dict[str, Any]) -> list[np.ndarray]:
        specs = tuple(TensorSpec(a.shape, a.dtype.name) for a in operands)
        lowered = op.lower(specs, tuple(attributes.items()))
        results = unwritten(lowered, operands)
        memory = [a.view(np.uint16) if a.itemsize == 2 else a for a in (*operands, *results)]
        cpu.plan(cpu.load(name), specs, lowered)(*memory)
        return results

    return run


DEVICES = {f"cpu-{name}": _on_instruction_set(name) for name in cpu.INSTRUCTION_SETS}
ON_CPU = tuple(DEVICES)  # for what the kit asks for on the CPU only
# Devices that cannot look at values before they answer: what the others refuse when they see the values is NaN there.
ANSWERS_NAN = {"triton-interpreter", "cuda"}
# Where a call takes a tenth of a second, tests that repeat the cases take every fourth.
SLOW = {"triton-interpreter"}


def _by_triton(device: str) -> Callable[[Operator, list[np.ndarray], dict[str, Any]], list[np.ndarray]]:
    """The GPU kernels on PyTorch's tensors there: on "cpu" interpreted, program by program."""

    def run(op: Operator, operands: list[np.ndarray], attributes: dict[str, Any]) -> list[np.ndarray]:
        import torch

        from exactqat.operators import triton

        specs = tuple(TensorSpec(a.shape, a.dtype.name) for a in operands)
        lowered = op.lower(specs, tuple(attributes.items()))
        plan = triton.plan(specs, lowered)
        tensors = [as_tensor(array).to(device) for array in operands]
        buffers = [
            # Bits of numbers and masks start as any pattern.
            torch.full(spec.shape, float("nan") if dtype.is_floating_point else 0x2A, dtype=dtype, device=device)
            for spec in (*lowered.results, *plan.scratch)
            for dtype in [getattr(torch, spec.dtype)]
        ]
        with np.errstate(all="ignore"):
            triton.run(plan, [*tensors, *buffers])
        return [as_array(tensor) for tensor in buffers[: len(lowered.results)]]

    return run


def as_tensor(array: np.ndarray) -> Any:
    """The same memory as a PyTorch tensor."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Any) -> np.ndarray:
    """A tensor of any device as an array."""
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


def _correct_interpreter() -> None:
    """Its conversions to bfloat16 truncate, where every GPU rounds to nearest even; and it replaces the language's
    functions again at each call of each function, which takes most of its time."""
    import ml_dtypes
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    theirs, patch_language = interpreter._convert_float, interpreter._patch_lang

    def convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            return data.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.view(ml_dtypes.bfloat16).astype(np.float32)
        return theirs(data, source, target, rounding_mode)

    patched = set()

    def patch_language_once(function: Any) -> Any:
        used = {module for module in (tl, tl.core) if module in function.__globals__.values()}
        if not used <= patched:
            patched.update(used)
            patch_language(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._convert_float = convert
    interpreter._patch_lang = patch_language_once


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


# Triton reads the variable when a kernel is defined.
if find_spec("triton") and find_spec("torch"):
    if _has_gpu():
        DEVICES["cuda"] = _by_triton("cuda")
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        _correct_interpreter()
        DEVICES["triton-interpreter"] = _by_triton("cpu")
