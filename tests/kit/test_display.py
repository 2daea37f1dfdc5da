# SPDX-License-Identifier: Apache-2.0
"""What a notebook and a debugger show of a network: short, without arrays of weights, with names escaped."""

from __future__ import annotations

import re

import numpy as np
import pytest

from exactqat.deploy import PROFILES
from exactqat.deploy.comparison import Comparison, Report
from exactqat.deploy.graph import Builder, Graph, Operator, per_tensor
from exactqat.kit.device.tensor import Quantization, Tensor
from exactqat.kit.display import ROWS, listed, table

EVIL = "<script>alert('x')</script>&\x1b[31m\u202e"


def cells(page: str) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", page)
    return [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]


def graph(name: str = "first") -> Graph:
    """A convolution of 4 bits with a fused ReLU6, and its mean."""
    builder = Builder()
    x = builder.input("input", (1, 8, 8, 3), per_tensor(0.1, -3))
    codes = np.resize(np.arange(-7, 8), (200, 3, 3, 3)).astype(np.int8)
    scales = np.linspace(0.01, 0.02, 200, dtype=np.float32)
    y = builder.conv_2d(
        x, codes, scales, np.zeros(200, np.int32), per_tensor(0.05, -128), name=name, activation="RELU6"
    )
    return builder.graph([builder.mean(y, per_tensor(0.05, -128), name="pooled", axes=(1, 2))])


def test_a_graph_is_short() -> None:
    example = graph()
    # 200 filters of 3x3x3, and their biases.
    assert repr(example) == "Graph(2 operators, 5,600 parameters: input int8[1x8x8x3] -> pooled int8[1x200])"
    header, first, second = cells(example._repr_html_())
    assert dict(zip(header, first, strict=True)) == {
        "output": "first", "kind": "CONV_2D", "activation": "RELU6", "dtype": "int8", "shape": "1x8x8x200",
        "weights": "200x3x3x3", "weight bits": "4", "scale": "0.05", "zero point": "-128", "parameters": "5,600",
        "multiply accumulates": f"{64 * 200 * 27:,}",
    }  # fmt: skip
    assert second[1] == "MEAN"
    for tensor in example.tensors.values():
        assert len(repr(tensor)) < 160 and "array" not in repr(tensor)
    grid = example.tensors["first/filter"].quantization
    assert repr(grid) == "Quantization(int8, scale 0.01..0.02, zero point 0, 200 channels along axis 0)"
    assert repr(per_tensor(0.5, -3)) == "Quantization(int8, scale 0.5, zero point -3)"


def test_a_graph_that_would_be_refused_is_shown_too() -> None:
    tensors = {"x": Tensor("x", (1, 2), "int8", per_tensor(1, 0)), "y": Tensor("y", (1, 2), "int8", per_tensor(1, 0))}
    operators = (Operator("CONV_2D", ("x",), ("y",)), Operator("ADD", ("x", "gone"), ("y",)), Operator("WHAT", (), ()))
    example = Graph(tensors, (*operators, Operator("NOTHING", ("x",), ("y",))), ("x", "nowhere"), ("y",))
    assert "nowhere missing" in repr(example)


def test_names_are_escaped() -> None:
    report = Report("micro", (Comparison(EVIL, EVIL, 10, 3, 1, True),), (), EVIL)
    empty = Quantization(np.zeros(0, np.float32), np.zeros(0, np.int64), 0)
    for shown in (graph(EVIL), report, graph(EVIL).tensors[EVIL]):
        assert "\x1b" not in repr(shown) and "\u202e" not in repr(shown)
        if hasattr(shown, "_repr_html_"):
            page = shown._repr_html_()
            assert "<script" not in page and "&lt;script&gt;" in page and "\x1b" not in page and "\u202e" not in page
    assert "none" in repr(empty)


def test_a_report_says_what_it_found() -> None:
    rows = (Comparison("a", "CONV_2D", 1000, 0, 0, True, 1e4, 10.0, 7.5), Comparison("b", "ADD", 500, 0, 0, False))
    report = Report("xnnpack-x86", rows, (Comparison("b", "whole graph", 500, 0, 0, False),), "xnnpack-x86")
    assert repr(report) == (
        f"Report(On {PROFILES['xnnpack-x86'].title} the file runs as simulated: none of 2,000 integers differs; What "
        f"{PROFILES['xnnpack-x86'].title} computes was not compared with what was trained; It was trained for "
        "xnnpack-x86, this device)"
    )
    header, first, second, whole = cells(report._repr_html_())
    assert first == ["a", "CONV_2D", "1,000", "0", "0", "exact", "30", "31.25"] and len(header) == len(first)
    assert second[5:] == ["none", "–", "–"] and whole[1] == "whole graph"
    worse = Report("micro", (Comparison("a", "ADD", 10, 3, 1, True),), (), "reference")
    assert "the file does not run as simulated: 3 of 10 integers differ; " in repr(worse)
    assert repr(worse).endswith(
        "was not compared with what was trained; It was trained for reference, and not for micro)"
    )
    assert len(cells(worse._repr_html_())[0]) == 6


def test_long_tables_end() -> None:
    page = table("t", ["a"], ([number] for number in range(ROWS + 7)), 1)
    assert len(cells(page)) == ROWS + 1 and "… and 7 more" in page
    assert listed(["a", "b", "c", "d"]) == "a, b, c and 1 more"


def test_a_prepared_model_shows_activations_and_bits() -> None:
    torch = pytest.importorskip("torch")
    from exactqat import qat

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<b>first", torch.nn.Conv2d(3, 8, 3))
            self.dropout = torch.nn.Dropout()
            self.last = torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = torch.nn.functional.relu6(self._modules["<b>first"](x))
            return torch.softmax(self.last(self.dropout(features).mean((2, 3))), 1)

    rules = [qat.Rule("last", weight_bits=8, activation_bits=8), qat.Rule("*", weight_bits=4, activation_bits=4)]
    model = qat.prepare(Net(), torch.zeros(2, 3, 8, 8), rules)
    assert repr(model).endswith("2 layers with weights, 1 W4A4, 1 W8A8, not frozen, xnnpack-x86)")
    assert "tensor(" not in repr(model) and len(repr(model)) < 160
    rows = {row[0]: row for row in cells(model._repr_html_())}
    header = rows["layer"]
    first = dict(zip(header, next(row for name, row in rows.items() if "first" in name), strict=True))
    assert first["activation"] == "RELU6" and (first["bits of weights"], first["bits of result"]) == ("4", "4")
    assert first["weights"] == "8x3x3x3" and first["range"] == "no data seen yet" and "<b>first" not in first["layer"]
    assert rows["last"][-2:] == ["8", "8"] and any("not on the device" in cell for row in rows.values() for cell in row)
    qat.calibrate(model, [torch.rand(2, 3, 8, 8)])
    qat.freeze(model)
    shown = model._repr_html_()
    assert "no data seen yet" not in shown and " .. " in shown and ", frozen" in repr(model)


def test_a_prepared_function_shows_activations_and_bits() -> None:
    jax = pytest.importorskip("jax")
    from exactqat import qat

    def model(params: dict[str, np.ndarray], x: np.ndarray) -> object:
        return jax.nn.softmax(jax.nn.relu(x @ params["<b>first"]) @ params["last"])

    params = {"<b>first": np.ones((6, 5), np.float32), "last": np.ones((5, 4), np.float32)}
    rules = [qat.Rule("last", weight_bits=8, activation_bits=8), qat.Rule("*", weight_bits=4, activation_bits=4)]
    prepared = qat.jax.prepare(model, params, np.ones((2, 6), np.float32), rules=rules)
    assert repr(prepared).endswith("2 layers with weights, 1 W4A4, 1 W8A8)") and len(repr(prepared)) < 120
    page = prepared._repr_html_()
    header, first, second, *others = cells(page)
    assert (
        header[0] == "layer" and first[1] == "input" and second[1:] == ["FULLY_CONNECTED", "RELU", "batchx5", "4", "4"]
    )
    assert "<b>first" not in page and others[-1][1].endswith("not on the device") and others[-1][4:] == ["–", "–"]
