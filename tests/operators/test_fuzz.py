# SPDX-License-Identifier: Apache-2.0
"""The fuzzer of fuzz.py under hypothesis: the same calls on every run, shrunk when one fails; and tests of the fuzzer.

The long campaign is `python tests/campaigns/fuzz.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("ml_dtypes")

import fuzz
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactqat.operators import OPERATORS, cpu

EXAMPLES = 250  # of each operator


class Drawn:
    """Choices drawn by hypothesis. Arrays are filled from one drawn seed."""

    def __init__(self, data: Any):
        self.draw = data.draw
        self.numbers = np.random.default_rng(self.draw(st.integers(0, 2**32 - 1), label="seed of the values"))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))


@pytest.fixture(autouse=True, scope="module")
def restore_thread_counts() -> Iterator[None]:
    before = {name: cpu.load(name).thread_count() for name in cpu.INSTRUCTION_SETS}
    yield
    for name, count in before.items():
        cpu.load(name).set_thread_count(count)


@pytest.mark.parametrize("name", fuzz.FUZZED)
def test_random_calls(name: str) -> None:
    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def random_calls(data: Any) -> None:
        call = fuzz.generate(Drawn(data), OPERATORS[name])
        try:
            fuzz.check(call)
        except Exception as error:
            error.add_note(str(call))
            raise

    random_calls()


def test_everything_is_generated() -> None:
    """Every operator, dtype, layout, choice of an attribute and kind of flaw; shapes of all ranks, empty and large."""
    seen: Counter[Any] = Counter()
    for case in range(4000):
        call = fuzz.generate(fuzz.Random(0, case))
        seen[call.op.name] += 1
        seen.update(call.layouts.values())
        seen.update(value.dtype.name for value in call.operands.values() if isinstance(value, np.ndarray))
        shapes = [value.shape for value in call.operands.values() if isinstance(value, np.ndarray)]
        seen.update(("rank", len(shape)) for shape in shapes)
        seen.update("empty" for shape in shapes if 0 in shape)
        seen.update("for several threads" for shape in shapes if np.prod(shape) > 40000)
        seen["flaw"] += bool(call.flaw)
        seen["out"] += bool(call.out)
        seen["must be refused"] += call.refused
        if not call.flaw:
            seen.update((name, value) for name, value in call.attributes.items() if name in call.op.choices)
    wanted = {
        *fuzz.FUZZED,
        *fuzz.LAYOUTS,
        *fuzz.DTYPES,
        "empty",
        "for several threads",
        "flaw",
        "must be refused",
        "out",
    }
    wanted |= {("rank", rank) for rank in range(7)}
    wanted |= {(name, value) for op in fuzz.FUZZED.values() for name, values in op.choices.items() for value in values}
    assert not [item for item in wanted if seen[item] < 10]


def calls(count: int) -> list[fuzz.Call]:
    return [fuzz.generate(fuzz.Random(1, case)) for case in range(count)]


def failures(count: int) -> int:
    failed = 0
    for call in calls(count):
        try:
            fuzz.check(call)
        except AssertionError:
            failed += 1
    return failed


def test_a_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device, run = next(iter(fuzz.DEVICES.items()))

    def off_by_one_bit(*arguments: Any) -> list[np.ndarray]:
        results = run(*arguments)
        for result in results[:1]:
            result.reshape(-1).view(np.uint8)[:1] ^= 1
        return results

    assert failures(100) == 0
    monkeypatch.setitem(fuzz.DEVICES, device, off_by_one_bit)
    assert failures(100) > 30  # the others are refused or empty


def test_an_unwritten_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device, run = next(iter(fuzz.DEVICES.items()))

    def forgetful(*arguments: Any) -> list[np.ndarray]:
        results = run(*arguments)
        results[-1][...] = np.nan
        return results

    monkeypatch.setitem(fuzz.DEVICES, device, forgetful)
    assert failures(100) > 30  # the others are refused or empty


def test_a_call_that_is_not_refused_is_found() -> None:
    good = next(call for call in calls(100) if not call.flaw)
    good.refused = True
    with pytest.raises(AssertionError, match="was not refused"):
        fuzz.check(good)


@pytest.mark.slow
def test_a_crash_is_counted_and_the_campaign_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A stand-in for fuzz.py dies in case 7, in its own process."""
    script = tmp_path / "dies.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(fuzz.Path(fuzz.__file__).parent)!r}); import fuzz\n"
        "check = fuzz.check\n"
        "generate = fuzz.generate\n"
        "fuzz.generate = lambda source: os.abort() if source.case == 7 else generate(source)\n"
        "begin, end, current = sys.argv[4:]\n"
        "Random = fuzz.Random\n"
        "class Numbered(Random):\n"
        "    def __init__(self, seed, case):\n"
        "        super().__init__(seed, case)\n"
        "        self.case = case\n"
        "fuzz.Random = Numbered\n"
        "fuzz.run_cases(int(sys.argv[2]), int(begin), int(end), fuzz.Path(current))\n"
    )
    monkeypatch.setattr(fuzz, "__file__", str(script))
    totals = fuzz.Totals()
    fuzz.run_batch(1, 0, 20, totals, lambda count: None)
    assert totals.counts["cases"] == 19
    assert len(totals.crashes) == 1 and totals.crashes[0].startswith("case 7: exit status -6")
