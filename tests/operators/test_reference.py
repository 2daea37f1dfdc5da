# SPDX-License-Identifier: Apache-2.0
"""The reference agrees with TensorFlow's recorded answers to the bit where promised, else with exact arithmetic.

RESULTS of tests/cases.py says what is promised for each output; tests/evaluations.py evaluates the formulas.
"""

from __future__ import annotations

import platform

import goldens
import numpy as np
import pytest
from bits import assert_same_bits, assert_within_ulp
from cases import FAMILIES, RESULTS, BadCall, Case, bad_calls, cases, family_of
from evaluations import (
    ACCURATE,
    Evaluated,
    assert_is_plain_rounding,
    depthwise_evaluated,
    depthwise_model,
    elementwise_bound,
    fake_quant_model,
    fake_quant_sums,
)

from exactqat.operators import reference

ALL = cases()


def call(case: Case | BadCall) -> dict[str, np.ndarray]:
    """The reference's results by output name."""
    results = reference.call(case.op, case.operands, case.attributes)
    names = tuple(RESULTS[case.op])
    if len(names) == 1:
        return {names[0]: np.asarray(results)}
    assert results._fields == names
    return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}


@pytest.mark.parametrize("case", ALL, ids=repr)
def test_reference(case: Case) -> None:
    recorded = goldens.load(family_of(case.op)).cases.get(case.name)
    assert recorded is not None or "beyond_tensorflow" in case.tags, (
        "not recorded: run tests/campaigns/record_goldens.py"
    )
    with np.errstate(all="ignore"):
        for output, result in call(case).items():
            what = f"{case.name}: {output}"
            golden = recorded.outputs.get(output) if recorded else None
            if output in case.expected:
                assert_same_bits(result, case.expected[output], what=what, operands=case.operands)
            else:
                CHECKS[RESULTS[case.op][output]](case, output, result, golden, what)


@pytest.mark.parametrize(("op", "output"), [("FusedBatchNorm", "y"), ("FusedBatchNormGrad", "x_backprop")])
@pytest.mark.parametrize("training", [True, False])
def test_elements_err_less_than_tensorflows(op: str, output: str, training: bool) -> None:
    """Over all recorded calls, in half units in the last place of a call's largest result. One by one, TensorFlow's are
    the better ones now and then, by luck."""
    ours, theirs = [], []
    for case in ALL:
        recorded = goldens.load(family_of(case.op)).cases.get(case.name)
        if case.op not in (op, op + "V2", op + "V3") or bool(case.attributes["is_training"]) != training:
            continue
        if recorded is None or recorded.outputs[output].dtype != np.float32:
            continue
        with np.errstate(all="ignore"):
            exact, result, golden = ACCURATE[case.op](case)[output].exact, call(case)[output], recorded.outputs[output]
        comparable = np.isfinite(exact) & np.isfinite(golden)
        if comparable.any() and np.abs(exact[comparable]).max() > 1e-3:
            unit = np.spacing(np.float32(np.abs(exact[comparable]).max())) / 2
            ours.append(np.abs(result[comparable] - exact[comparable]) / unit)
            theirs.append(np.abs(golden[comparable] - exact[comparable]) / unit)
    assert len(ours) > 15
    assert max(e.max() for e in ours) <= max(e.max() for e in theirs)
    assert np.mean([e.mean() for e in ours]) < np.mean([e.mean() for e in theirs])
    assert np.mean([e.max() for e in ours]) < np.mean([e.max() for e in theirs])


def as_recorded(operand: np.ndarray) -> np.ndarray:
    """Which of two zeros `np.unique` keeps depends on how a processor's NumPy sorts; x86 recorded."""
    if platform.machine() in ("x86_64", "AMD64") or operand.dtype.kind not in "fc":
        return operand
    return np.where(operand == 0, np.abs(operand), operand)


@pytest.mark.parametrize("family", FAMILIES)
def test_goldens_were_recorded_from_these_cases(family: str) -> None:
    recorded = goldens.load(family).cases
    generated = {case.name: case for case in ALL if family_of(case.op) == family}
    assert set(recorded) <= set(generated)
    for name, golden in recorded.items():
        case = generated[name]
        assert list(golden.operands) == list(case.operands), name
        for operand, array in golden.operands.items():
            original = as_recorded(case.operands[operand])
            assert_same_bits(original, as_recorded(array), what=f"operand {operand} of {name}")
        assert list(golden.attributes) == list(case.attributes), name
        for attribute, value in golden.attributes.items():
            original = case.attributes[attribute]
            original = list(original) if isinstance(original, tuple) else original
            assert value == original or (value != value and original != original), f"attribute {attribute} of {name}"


def test_every_output_is_either_recorded_or_documented() -> None:
    for case in ALL:
        recorded = goldens.load(family_of(case.op)).cases.get(case.name)
        if recorded is not None:
            assert set(recorded.outputs) | set(case.expected) == set(RESULTS[case.op]), case.name
            assert not set(recorded.outputs) & set(case.expected), case.name


@pytest.mark.parametrize("bad", bad_calls(), ids=repr)
def test_bad_call_is_refused(bad: BadCall) -> None:
    assert bad.name in goldens.load_json("errors"), "not recorded: run tests/campaigns/record_goldens.py"
    with pytest.raises(bad.error):
        reference.call(bad.op, bad.operands, bad.attributes)


# Checks, by promise


def check_bitwise(case: Case, output: str, result: np.ndarray, golden: np.ndarray | None, what: str) -> None:
    if golden is not None and "tolerance" not in case.tags:
        expected = golden
    else:
        expected = MODELS[family_of(case.op)](case)
        if golden is not None:  # TensorFlow rounds elsewhere, but it computes the same thing
            assert_is_plain_rounding(golden, depthwise_evaluated(case), f"{what} of TensorFlow")
    assert_same_bits(result, expected, what=what, operands=case.operands)


def check_sum(case: Case, output: str, result: np.ndarray, golden: np.ndarray | None, what: str) -> None:
    evaluated = fake_quant_sums(case)[output]
    if result.dtype == np.float64:
        assert_is_plain_rounding(result, evaluated, what)
    else:
        assert_within_ulp(result, evaluated.exact, 1, what=what)
    if golden is not None:
        assert_same_bits(np.isnan(result), np.isnan(golden), what=f"{what}: where it is NaN")
        assert_is_plain_rounding(golden, evaluated, f"{what} of TensorFlow")


def check_special(evaluated: Evaluated, result: np.ndarray, golden: np.ndarray | None, what: str) -> None:
    """What is no matter of accuracy: NaN and infinities, and that float64 and TensorFlow compute this formula."""
    exact = evaluated.exact
    assert result.shape == exact.shape, f"{what}: shape {result.shape}, expected {exact.shape}"
    assert_same_bits(np.isnan(result), np.isnan(exact), what=f"{what}: where it is NaN")
    infinite = np.isinf(exact)
    assert_same_bits(result[infinite], exact[infinite].astype(result.dtype), what=f"{what}: where infinite")
    if golden is not None:
        assert_is_plain_rounding(golden, evaluated, f"{what} of TensorFlow")
    if result.dtype == np.float64:
        assert_is_plain_rounding(result, evaluated, what)


def check_elements(case: Case, output: str, result: np.ndarray, golden: np.ndarray | None, what: str) -> None:
    evaluated = ACCURATE[case.op](case)[output]
    check_special(evaluated, result, golden, what)
    finite = np.isfinite(evaluated.exact)
    if result.dtype == np.float64 or not finite.any():
        return
    excess = (np.abs(result - evaluated.exact) / elementwise_bound(evaluated))[finite]
    assert excess.max() <= 1, f"{what}: {excess.max():.3f} times what its own roundings explain"


def check_accuracy(case: Case, output: str, result: np.ndarray, golden: np.ndarray | None, what: str) -> None:
    evaluated = ACCURATE[case.op](case)[output]
    exact = evaluated.exact
    check_special(evaluated, result, golden, what)
    finite = np.isfinite(exact)
    if result.dtype == np.float64 or not finite.any():
        return
    error = np.abs(result - exact)[finite].max()
    tensorflow_error = 0.0
    if golden is not None:
        # TensorFlow's filter gradient also multiplies what is not finite with padding, so has more NaNs.
        comparable = finite & np.isfinite(golden)
        tensorflow_error = np.abs(golden - exact)[comparable].max(initial=0.0)
    largest = np.abs(exact[finite]).max()
    half_ulp = np.spacing(np.float32(largest)).astype(np.float64) / 2
    allowed = max(tensorflow_error, half_ulp * (1 + 2.0**-20))  # the float64 evaluation has errors too
    assert error <= allowed, (
        f"{what}: error {error:.4g} is {error / half_ulp:.3f} half ulps of the largest result {largest:.6g}; "
        f"TensorFlow's is {tensorflow_error:.4g}"
    )


def check_placeholder(case: Case, output: str, result: np.ndarray, golden: np.ndarray | None, what: str) -> None:
    if golden is not None:
        assert_same_bits(result, golden, what=what)


CHECKS = {
    "bitwise": check_bitwise,
    "sum": check_sum,
    "accuracy": check_accuracy,
    "elements": check_elements,
    "placeholder": check_placeholder,
}


# QuantizeAndDequantize


def quantize_and_dequantize_model(case: Case) -> np.ndarray:
    """A range per slice is what the same call gives for each slice alone."""
    axis = int(str(case.attributes["axis"]))
    result = np.empty_like(case.operands["input"])
    for k in range(result.shape[axis]):
        place = (slice(None),) * axis + (k,)
        operands = {
            "input": case.operands["input"][place],
            "input_min": case.operands["input_min"][k, ...],
            "input_max": case.operands["input_max"][k, ...],
        }
        result[place] = reference.call(case.op, operands, {**case.attributes, "axis": -1})
    return result


MODELS = {
    "fake_quant": fake_quant_model,
    "quantize_and_dequantize": quantize_and_dequantize_model,
    "depthwise_conv2d": depthwise_model,
}
