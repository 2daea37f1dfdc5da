# SPDX-License-Identifier: Apache-2.0
"""What `make release-check` refuses; the check itself takes long and is run before a release."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

RELEASE = Path(__file__).resolve().parents[2] / "release"
sys.path.insert(0, str(RELEASE))

# By its path: the benchmarks have a module of that name too.
specification = importlib.util.spec_from_file_location("release_check", RELEASE / "check.py")
check = importlib.util.module_from_spec(specification)
specification.loader.exec_module(check)
from dependencies import compatible, judged, license_of  # noqa: E402
from links import broken  # noqa: E402


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSL-1.0", True),
        ("Apache-2.0 WITH Classpath-exception-2.0", False),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT", True),
        ("MIT AND (GPL-3.0-only OR MIT)", False),  # read strictly
        ("LGPL-2.1-or-later", False),
        ("", False),
    ],
)
def test_licenses_are_compatible(expression: str, expected: bool) -> None:
    assert compatible(expression) is expected


def test_the_license_is_read_from_what_metadata_has() -> None:
    named = {"name": "a", "license_expression": "MIT", "classifier": ["License :: OSI Approved :: BSD License"]}
    assert license_of(named) == "MIT"
    classified = {"name": "a", "license": "see LICENSE", "classifier": ["License :: OSI Approved :: BSD License"]}
    assert license_of(classified) == "BSD-3-Clause"
    assert license_of({"name": "a", "license": "MPL-2.0 AND MIT"}) == "MPL-2.0 AND MIT"
    assert license_of({"name": "a", "license": "Whoever uses this\nmust ..."}) == ""


def test_a_dependency_without_a_compatible_license_is_refused() -> None:
    entries = [
        {"name": "good", "version": "1", "license_expression": "MIT"},
        {"name": "Viral_One", "version": "2", "license_expression": "AGPL-3.0-only"},
        {"name": "silent", "version": "3"},
        {"name": "nvidia-cublas-cu12", "version": "4", "license_expression": "LicenseRef-NVIDIA-Proprietary"},
    ]
    lines, refused = judged(entries)
    assert len(lines) == 4 and "allowed: PyTorch's own choice" in lines[1]
    assert refused == ["silent 3: no license named", "viral-one 2: AGPL-3.0-only"]


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "index.html").write_text(
        "<h1 id='top1'>x</h1><a href='#top1'>1</a><a href='deep/page.html#there'>2</a><a href='https://example.org'>3</a>"
        "<img src='missing.png'><a href='deep/page.html#not%20there'>4</a><a href='gone.html'>5</a>"
    )
    (tmp_path / "deep" / "page.html").write_text("<p id='there'><a href='../index.html'>back</a></p>")
    count, problems = broken(tmp_path)
    assert count == 6
    assert [line.split(": ")[1] for line in problems] == ["missing.png", "deep/page.html#not%20there", "gone.html"]


def test_the_version_must_be_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    check.version()
    monkeypatch.setattr(check, "VERSION", "9.9.9")
    with pytest.raises(SystemExit, match=r"the versions differ: pyproject.toml 9.9.9, .*CITATION.cff 0"):
        check.version()


def test_a_failed_step_is_named_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def first() -> None:
        """Fails."""
        raise SystemExit("why")

    def second() -> None:
        """Works."""
        ran.append("second")

    monkeypatch.setattr(check, "STEPS", (first, second))
    assert list(check.failures(["first", "second"])) == ["first"] and ran == ["second"]
