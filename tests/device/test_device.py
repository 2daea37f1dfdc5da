# SPDX-License-Identifier: Apache-2.0
"""Every operator of the device by itself: declared whole, and equal to the runtimes integer for integer.

EXACTQAT_SWEEP=20 multiplies the random graphs; `python tests/campaigns/sweep.py --write` is the campaign whose counts
`EXACT` and `MEASURED` hold.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")

from device_cases import CASES, FOUR_BIT_KINDS, NAMES, PLAIN_KINDS, UNSIGNED_KINDS, random_quantization
from sweep import graphs, sweep

from exactqat.deploy import EXACT, MEASURED, Builder, Refusal, per_tensor, profiles_here, simulate, verify, write_tflite
from exactqat.deploy.graph import BUILT_IN
from exactqat.kit.device import OPERATORS, PROFILES
from exactqat.kit.device.presence import lacks
from exactqat.kit.device.tensor import INDICES
from exactqat.kit.device.weighted import SHORT_BIAS, Weighted

SWEEP = 40 * int(os.environ.get("EXACTQAT_SWEEP", "1"))
HERE = profiles_here()


def test_every_operator_has_its_cases_and_its_counts() -> None:
    assert set(CASES) == {kind for kind, operator in OPERATORS.items() if operator.dtypes}
    wide = {f"{kind}:int16" for kind in OPERATORS if "int16" in OPERATORS[kind].dtypes}
    full_range = {f"{kind}:full_range" for kind in OPERATORS if isinstance(OPERATORS[kind], Weighted)}
    four_bits = {f"{kind}:int4" for kind in FOUR_BIT_KINDS}
    projected = {"UNIDIRECTIONAL_SEQUENCE_LSTM:projection"}
    of_files = {f"{kind}:uint8" for kind in UNSIGNED_KINDS} | {f"{kind}:int32" for kind in PLAIN_KINDS}
    of_files |= {f"{kind}:int16:int32_bias" for kind in OPERATORS if isinstance(OPERATORS[kind], Weighted)}
    of_files |= {"CAST:int64", "CUMSUM:int64", "BATCH_MATMUL:int16:int8_constant"}
    assert set(NAMES) == set(CASES) | wide | full_range | {"QUANTIZE:float32"} | projected | four_bits | of_files
    for kind in NAMES:
        for profile in ("xnnpack-x86", "reference"):
            if lacks(PROFILES[profile], kind):
                assert (kind, profile) not in MEASURED
                continue
            assert MEASURED[kind, profile][0] >= 1000, f"{kind} was hardly compared under {profile}"
    counted = {pair: row[0] for pair, row in MEASURED.items() if row[1] == 0}
    assert {pair: values for pair, values in EXACT.items() if not pair[0].endswith(BUILT_IN)} == counted
    # What delegates leave to built-in kernels is claimed where there are none.
    for (kind, profile), values in EXACT.items():
        if kind.endswith(BUILT_IN):
            assert not PROFILES[profile].delegates and counted[kind.removesuffix(BUILT_IN), profile] == values


@pytest.mark.parametrize("profile", HERE)
@pytest.mark.parametrize("kind", NAMES)
def test_equals_the_runtime(kind: str, profile: str, tmp_path: Path) -> None:
    if (kind, profile) in (("SPACE_TO_BATCH_ND", "micro"), ("SUM:int16", "reference")):
        pytest.skip("the kernel's results are in part what lies in memory; nothing is claimed")
    if (kind, profile) not in MEASURED and profile == "xnnpack-arm64":
        pytest.skip("not compared under emulation yet; nothing is claimed")
    if (kind, profile) not in MEASURED:
        # The runtime has no such operator, as the sweep found; where the file holds a table instead, it has that.
        outcome = sweep(kind, profile, 4, tmp_path)
        assert lacks(PROFILES[profile], kind) and outcome.refused and not outcome.differing
        return
    # A function of one int16 has 65,536 inputs; all are compared.
    outcome = sweep(kind, profile, SWEEP // 4 if ":" in kind else SWEEP, tmp_path)
    # TFLite-Micro lacks some ranks.
    assert outcome.values > 0 or (profile == "micro" and outcome.refused)
    assert profile == "micro" or not outcome.refused
    print(f"{kind} {profile}: {outcome.values:,} compared, {outcome.differing} differ, by {outcome.largest} at most")
    values, differing, largest = MEASURED[kind, profile]
    assert outcome.largest <= largest, outcome.examples
    # What is measured over many graphs may be twice as much in a few; LiteRT's optimized kernels for four bits, where
    # nothing is claimed, differ in all ties of one graph and in none of another.
    most = 0.05 if differing and kind.endswith(":int4") else 2 * differing / values
    assert outcome.differing / outcome.values <= most, outcome.examples


# Steps: eight fractional bits of a ratio, a rounded sum of exponentials, four whole bits are coarse. Along rows of
# hundreds, rounded positions add up to a third of a pixel, and to another neighbour.
FURTHER_APART = {
    "QUANTIZE": 64,
    "LOG_SOFTMAX": 5,
    "LOGISTIC": 5,
    "SUM": 255,
    # Scaled after each factor by 15 bits; LiteRT's default kernel copies the code of an only factor.
    "REDUCE_PROD": 255,
    "REDUCE_PROD:int16": 65535,
    "RESIZE_BILINEAR": 90,
    "RESIZE_NEAREST_NEIGHBOR": 255,
    # Lines between 513 values beside fixed point, near 0.
    "RSQRT:int16": 32767,
    # Fixed point of 16 bits, where a scale is near a power of two, beside a table.
    "LOGISTIC:int16": 16,
    "TANH:int16": 32,
    # Defects of TFLite-Micro's kernels, and quotients too small for 32 bits.
    "RELU6": 255,
    "RELU6:int16": 65535,
    "SPACE_TO_BATCH_ND": 255,
    "BATCH_TO_SPACE_ND": 255,
    "DIV": 255,
    "DIV:int16": 65535,
    # Another function and another cell each moment, and a tanh that LiteRT leaves out.
    "UNIDIRECTIONAL_SEQUENCE_LSTM": 255,
}


@pytest.mark.parametrize("kind", NAMES)
def test_profiles_differ_by_one_step_at_most(kind: str) -> None:
    """Other runtimes' arithmetic is close: a formula that was mistyped for a machine that is not here is not."""
    for graph, codes in graphs(kind, "xnnpack-arm64", SWEEP // 4 if ":" in kind else SWEEP):
        profiles = list(PROFILES)
        if kind.removesuffix(":uint8") == "SOFTMAX" and graph.tensors["x"].shape[-1] == 1:
            # A defect of onnxruntime's kernel: it makes 0 of a row's only value, where 1 is right.
            profiles.remove("onnxruntime-x86")
        if kind.endswith(":projection"):
            profiles.remove("micro")  # which has none
        if kind.endswith(SHORT_BIAS) and OPERATORS[kind.partition(":")[0]].reads_long_biases:
            profiles.remove("micro")  # which reads these biases as int64, as measured.json has it
        results = [simulate(graph, codes, profile)[graph.outputs[0]].astype(np.int64) for profile in profiles]
        for other in results[1:]:
            assert np.abs(other - results[0]).max() <= FURTHER_APART.get(kind.removesuffix(":uint8"), 2), (
                graph.operators
            )


def test_rows_folded_into_the_batch(tmp_path: Path) -> None:
    """[batch, 3, 4] as [batch * 3, 4] through a matrix product and back, for one example and for several."""
    rng = np.random.default_rng(0)
    builder = Builder()
    x = builder.input("x", (1, 3, 4), per_tensor(0.05, -3))
    rows = builder.reshape(x, (3, 4), name="rows")
    y = builder.fully_connected(
        rows, rng.integers(-127, 128, (5, 4)), [0.01], rng.integers(-90, 90, 5), per_tensor(0.1, 4), name="y"
    )
    total = builder.add(y, y, per_tensor(0.2, 4), name="total")
    graph = builder.graph([builder.reshape(total, (1, 3, 5), name="back")])
    codes = rng.integers(-128, 128, (7, 3, 4)).astype(np.int8)
    assert simulate(graph, codes, tensors=["y", "back"])["y"].shape == (21, 5)
    for profile in HERE:
        values = {"y": np.zeros((21, 5), np.float32) + 0.1}
        report = verify(graph, write_tflite(graph, tmp_path / "model.tflite"), codes, profile, 2, values)
        assert report.differing == 0 and report.outputs[0].values == 7 * 3 * 5
        assert report.operators[1].device_sqnr is not None


def test_constants_do_not_differ_along_the_batch() -> None:
    builder = Builder()
    x = builder.input("x", (1, 3, 4), per_tensor(0.05, -3))
    rows = builder.reshape(x, (3, 4), name="rows")
    constant = builder.constant("c", np.zeros((3, 4), np.int8), per_tensor(0.1, 0))
    with pytest.raises(ValueError, match="is a constant, which cannot differ along the batch"):
        builder.graph([builder.add(rows, constant, per_tensor(0.2, 4), name="y")])
    builder = Builder()
    builder.input("x", (1, 3, 4), per_tensor(0.05, -3))
    builder.constant("c", np.zeros((3, 4), np.int8), per_tensor(0.1, 0))
    with pytest.raises(ValueError, match="'c' must be an activation, not a constant"):
        builder.graph([builder.pad("c", [(0, 0), (1, 1)], name="padded")])


def test_the_builder_knows_what_is_declared() -> None:
    builder = Builder()
    quantization = random_quantization(np.random.default_rng(0))
    builder.input("x", (1, 4, 4, 2), quantization)
    assert "conv_2d" in dir(builder) and "max_pool_2d" in dir(builder)
    with pytest.raises(AttributeError, match="Builder has no 'conv_3d'"):
        builder.conv_3d()
    with pytest.raises(ValueError, match="MAX_POOL_2D 'y': strides must be given"):
        builder.max_pool_2d("x", name="y", filter_size=(2, 2))
    with pytest.raises(ValueError, match="MAX_POOL_2D 'y': attributes must be"):
        builder.max_pool_2d("x", name="y", filter_size=(2, 2), strides=(1, 1), shape=3)
    with pytest.raises(ValueError, match="MEAN 'y': the result's quantization is missing"):
        builder.mean("x", name="y")
    with pytest.raises(ValueError, match="MEAN 'y': axes must be different ones in 1..3"):
        builder.mean("x", quantization, name="y", axes=(0, 1))


def test_what_a_machine_cannot_run_is_said(tmp_path: Path) -> None:
    builder = Builder()
    x = builder.input("x", (1, 4), per_tensor(1.0, 0))
    graph = builder.graph([builder.reshape(x, (1, 4), name="y")])
    path, codes = write_tflite(graph, tmp_path / "model.tflite"), np.zeros((1, 4), np.int8)
    if "xnnpack-x86" not in HERE:
        with pytest.raises(ValueError, match="profile 'xnnpack-x86' cannot run on this machine; available here: "):
            verify(graph, path, codes, "xnnpack-x86")
    if "micro" not in HERE:
        with pytest.raises(ImportError, match="tflite_micro"):
            verify(graph, path, codes, "micro")


def test_axes_that_runtimes_do_not_take() -> None:
    builder = Builder()
    builder.input("x", (1, 2, 1, 2, 1, 2, 2), per_tensor(0.5, 0))
    with pytest.raises(ValueError, match=r"REDUCE_MAX 'y': tensors have at most 6 axes here"):
        builder.reduce_max("x", name="y", axes=(1,))
    builder.reshape("x", (1, 2, 2, 2, 2, 1), name="six")
    with pytest.raises(ValueError, match=r"PAD 'y': tensors have at most 5 axes here"):
        builder.pad("six", [(0, 0)] * 6, name="y")
    builder.graph([builder.reduce_max("six", name="y", axes=(1, 4))])


def test_the_page_is_made_of_the_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    import device_page

    assert device_page.PAGE.read_text() == device_page.page(), "run python docs/device_page.py"


@pytest.mark.parametrize("bias", [2**47, 2**63 - 1, -(2**63)])
def test_a_bias_that_no_sum_holds_is_refused(bias: int) -> None:
    builder = Builder()
    x = builder.input("x", (1, 4), per_tensor(0.01, 0, "int16"))
    filter, scale = np.full((2, 4), 127, np.int8), np.float32([1e-4, 1e-4])
    y = builder.fully_connected(x, filter, scale, np.zeros(2, np.int64), per_tensor(0.1, 0, "int16"), name="y")
    graph = builder.graph([y])
    damaged = replace(graph.tensors["y/bias"], data=np.array([0, bias], np.int64))
    with pytest.raises(Refusal, match="48-bit accumulator can overflow"):
        replace(graph, tensors={**graph.tensors, "y/bias": damaged}).validate()


def test_a_computed_index_outside_of_its_table_is_refused() -> None:
    builder = Builder()
    x, y = (builder.input(name, (1, 3), INDICES) for name in "xy")
    rows = builder.constant("rows", np.zeros((20, 2), np.int8), per_tensor(0.1, 0))
    graph = builder.graph([builder.embedding(builder.add(x, y, INDICES, name="sum"), rows, name="found")])
    codes = {"x": np.int32([[5, 6, 7]]), "y": np.int32([[0, 1, 2]])}
    assert simulate(graph, codes, "reference")["found"].shape == (1, 3, 2)
    for offset in (20, -30):
        with pytest.raises(ValueError, match="is outside of the table's 20 rows"):
            simulate(graph, {**codes, "y": codes["y"] + np.int32(offset)}, "reference")
