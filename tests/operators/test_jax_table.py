# SPDX-License-Identifier: Apache-2.0
"""Every cell of the table in docs/jax.md is what is found. `EXACTQAT_TABLE=all` tries all operators, otherwise one of
each kind: the others are versions of these or run the same rules."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import jax_table  # noqa: E402

KINDS = (
    "FakeQuantWithMinMaxVars",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    "FusedBatchNormV3",
    "DepthwiseConv2dNative",
)
CHOSEN = tuple(jax_table.EXAMPLES) if os.environ.get("EXACTQAT_TABLE") == "all" else KINDS
WRITTEN = jax_table.written_cells()


def test_the_table_has_every_operator_and_column() -> None:
    assert set(jax_table.EXAMPLES) == set(jax_table.BY_RAW_NAME)
    assert set(WRITTEN) == {(column, name) for column in jax_table.COLUMNS for name in jax_table.EXAMPLES}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("column", jax_table.ALONE)
def test_cell(column: str, name: str) -> None:
    assert jax_table.ALONE[column](name) == WRITTEN[column, name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("column", jax_table.SPREAD)
def test_cell_with_several_devices(column: str, name: str) -> None:
    assert jax_table.spread_cells(CHOSEN)[column][name] == WRITTEN[column, name]


@pytest.mark.slow
def test_the_examples_of_the_page_run() -> None:
    for block in jax_table.PAGE.read_text().split("```python\n")[1:]:
        subprocess.run([sys.executable, "-c", block.split("```")[0]], check=True, stdout=subprocess.DEVNULL)
