# SPDX-License-Identifier: Apache-2.0
"""The stub files say what the declarations say, and type checkers understand them."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import exactqat

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "exactqat"
sys.path.insert(0, str(ROOT / "release"))

import stubs  # noqa: E402

# `# is T`: the revealed type; `# refused`: an error on this line, and nowhere else.
SAMPLE = """
import numpy as np
import torch
import jax.numpy as jnp
import exactqat as eq

n, t, j = np.zeros((2, 3), np.float32), torch.zeros(2, 3), jnp.zeros((2, 3))
half, window = np.zeros(3, np.float16), [1, 1, 1, 1]

reveal_type(eq.quantization.fake_quant_with_min_max_vars(n, n.min(), np.float32(6)))  # is ndarray
reveal_type(eq.quantization.fake_quant_with_min_max_vars(t, t.min(), 6))  # is Tensor
reveal_type(eq.fake_quant_with_min_max_vars(j, -6.0, j.max()))  # is Array
reveal_type(eq.fake_quant_with_min_max_vars_per_channel(half, np.zeros(3, np.float32), [1.0, 2, 3]))  # is ndarray
reveal_type(eq.fake_quant_with_min_max_vars_gradient(t, t, 0.0, 6.0).backprop_wrt_min)  # is Tensor
reveal_type(eq.raw_ops.FusedBatchNormV3(x=n, scale=n, offset=n, mean=[], variance=[])[5])  # is ndarray
reveal_type(eq.quantization.quantize_and_dequantize_v2(t, 0.0, 1.0, axis=1))  # is Tensor
reveal_type(
    eq.raw_ops.DepthwiseConv2dNativeBackpropInput(  # is Tensor
        input_sizes=t.shape, filter=t, out_backprop=t, strides=window, padding="SAME"
    )
)
reveal_type(eq.fake_quant_with_min_max_vars(t, n, n))  # is Tensor
reveal_type(eq.nn.depthwise_conv2d(t, n, window, "SAME"))  # is Tensor
reveal_type(eq.nn.depthwise_conv2d(j, j, window, [[0, 0], [1, 1], [1, 1], [0, 0]], "NHWC", [1, 2]))  # is Array
reveal_type(eq.nn.depthwise_conv2d_backprop_filter(n, (3, 3, 1, 1), n, window, "VALID", out=n))  # is ndarray
reveal_type(eq.nn.fused_batch_norm(t, t, t, data_format="NCHW", out=(t, None, None))[1])  # is Tensor
reveal_type(eq.get_num_threads())  # is int
eq.quantization.quantize_and_dequantize_v2(t, 0.0, 1.0, round_mode="HALF_UP", out=t)
eq.fake_quant_with_min_max_args(n, out=n)

eq.fake_quant_with_min_max_args(n, minimum=-1.0)  # refused
eq.fake_quant_with_min_max_args("n")  # refused
eq.fake_quant_with_min_max_args(n, -1.0, 1.0, 8, False, None, n)  # refused
eq.fake_quant_with_min_max_args(j, out=j)  # refused
eq.fake_quant_with_min_max_vars(n, t, t)  # refused
eq.raw_ops.FakeQuantWithMinMaxArgs(n)  # refused
eq.raw_ops.QuantizeAndDequantizeV2(input=t, input_min=0.0, input_max=1.0, round_mode="UP")  # refused
eq.fake_quant_with_min_max_vars_gradient(t, t, 0.0, 6.0).backprop_wrt_range  # refused
eq.no_such_operator(n)  # refused
eq.nn.depthwise_conv2d(t, t, window, "FULL")  # refused
eq.nn.depthwise_conv2d(t, t, window, "SAME", "NCWH")  # refused
eq.nn.fused_batch_norm(j, t, j)  # refused
eq.quantization.quantize_and_dequantize(t, 0.0, 1.0, round_mode="UP")  # refused
eq.quantization.quantize_and_dequantize(j, 0.0, 1.0, out=j)  # refused
"""

# What the sample's types do not come from; reading it takes three quarters of a type checker's time.
UNSEEN = [
    *(f"exactqat.{room}" for room in ("capture", "deploy", "device", "engine", "planning", "qat", "reference")),
    *(f"exactqat.{room}" for room in ("train", "tune")),
    *(f"torch.{name}" for name in ("_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_library")),
    *(f"torch.{name}" for name in ("_prims", "_refs", "_subclasses", "ao", "cuda", "distributed", "distributions")),
    *(f"torch.{name}" for name in ("export", "fx", "jit", "masked", "nested", "nn", "onnx", "optim", "package")),
    *(f"torch.{name}" for name in ("profiler", "testing", "utils")),
    *("jax._src.pallas", "jax._src.scipy", "jax.scipy", "jaxlib.mlir"),
    *("IPython", "matplotlib", "sympy", "traitlets"),
]


@pytest.mark.parametrize("name", stubs.STUBS)
def test_the_build_installs_the_stubs(name: str) -> None:
    # An editable installation has them in another folder than the Python files.
    stub = next((path for folder in exactqat.__path__ if (path := Path(folder) / name).exists()), None)
    if stub is None:
        pytest.skip("runs from the sources, which have no stubs")
    assert stub.read_text() == stubs.STUBS[name]()


def test_stubs_need_nothing_that_is_built(tmp_path: Path) -> None:
    """The build runs it before there is a package, with no library at hand."""
    command = [sys.executable, "-I", "-S", "-B", str(ROOT / "release" / "stubs.py"), str(tmp_path)]
    subprocess.run(command, check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: text() for name, text in stubs.STUBS.items()
    }
    assert set(exactqat.__all__) == {
        element.value
        for node in ast.parse((tmp_path / "__init__.pyi").read_text()).body
        if isinstance(node, ast.Assign)
        for element in node.value.elts
    }


@pytest.mark.parametrize("name", ["raw_ops", "quantization", "nn"])
def test_stubs_hold_the_documentation(name: str) -> None:
    module = getattr(exactqat, name)
    functions = [node for node in ast.parse(stubs.STUBS[f"{name}.pyi"]()).body if type(node) is ast.FunctionDef]
    public = {key for key in dir(module) if not key.startswith("_") and hasattr(getattr(module, key), "__signature__")}
    assert {function.name for function in functions} == public
    for function in functions:
        assert ast.get_docstring(function) == inspect.getdoc(getattr(module, function.name)), function.name


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "src" / "exactqat" / "py.typed").exists()


@pytest.mark.slow
def test_type_checkers_know_results_and_refuse_wrong_calls(tmp_path: Path) -> None:
    for needed in ("mypy", "torch", "jax"):
        pytest.importorskip(needed)
    package = tmp_path / "src" / "exactqat"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "*.cpp", "*.h", "__pycache__"))
    stubs.write(package)
    sample = tmp_path / "sample.py"
    sample.write_text(SAMPLE)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nmypy_path = src\npython_version = 3.11\nignore_missing_imports = True\n"
        f"[mypy-{','.join(f'{name}.*' for name in UNSEEN)}]\nfollow_imports = skip\n"
    )
    options = ["--config-file", "mypy.ini", "--hide-error-context", "--cache-dir", os.devnull]
    command = [sys.executable, "-m", "mypy", *options, str(sample)]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MYPYPATH")}
    output = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    said: dict[int, list[str]] = {}
    for line, message in re.findall(r"sample\.py:(\d+): ((?:error|note: Revealed).*)", output):
        said.setdefault(int(line), []).append(message)
    for number, line in enumerate(SAMPLE.splitlines(), start=1):
        messages = said.get(number, [])
        if "# is " in line:
            (message,) = messages
            assert re.search(rf'Revealed type is "(?:[\w.]+\.)?{line.split("# is ")[1]}\b', message), (line, message)
        elif "# refused" in line:
            assert any(message.startswith("error") for message in messages), (line, output)
        else:
            assert not messages, (line, messages)
