# SPDX-License-Identifier: Apache-2.0
"""A sample of `make zoo`: networks as people write them, from PyTorch to LiteRT and onnxruntime."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
pytest.importorskip("onnxruntime", reason="needs exactqat[onnx]")

from plain_networks import NETWORKS
from run_zoo import end_to_end


# onnxruntime rearranges the nodes of larger graphs: operators by themselves do not show what it makes of them.
@pytest.mark.parametrize("name", ["unet_nearest", "ssd_shared_head", "einsum_attention"])
@pytest.mark.slow
def test_a_network_goes_through(name: str, tmp_path: Path) -> None:
    model, examples = NETWORKS[name]()
    row = end_to_end(model, examples, tmp_path)
    assert row["values"] > 0 and row["differing"] == 0 and not row["unclaimed"]
    # Ties between two codes fall otherwise in float arithmetic.
    assert row["onnx_values"] > 0 and row["onnx_differing"] <= 0.02 * row["onnx_values"]
