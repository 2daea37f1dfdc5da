# SPDX-License-Identifier: Apache-2.0
"""The documentation: differences from TensorFlow are listed, examples run, and pages are built without a warning."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from bits import assert_same_bits
from cases import bad_calls, cases
from conftest import BY_RAW_NAME
from run_notebooks import NEEDS

from exactqat.operators import OPERATORS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import docstrings  # noqa: E402
import operator_pages  # noqa: E402

DIFFERENCES = tomllib.loads((ROOT / "docs" / "differences.toml").read_text())["difference"]
NAMES = {case.name for case in cases()} | {call.name for call in bad_calls()}


@pytest.mark.parametrize("entry", DIFFERENCES, ids=lambda e: f"{e['operators'][0]}: {e['about']}")
def test_differences_name_operators_and_cases_that_exist(entry: dict) -> None:
    assert set(entry) - {"cases"} == {"operators", "about", "tensorflow", "exactqat"}
    for pattern in entry["operators"]:
        assert any(fnmatchcase(name, pattern) for name in BY_RAW_NAME), pattern
    for pattern in entry.get("cases", ()):
        shown = [name for name in NAMES if fnmatchcase(name, pattern)]
        assert shown, f"no case is called {pattern}"
        for name in shown:
            assert any(fnmatchcase(name.partition("/")[0], operator) for operator in entry["operators"]), name


def test_every_case_that_differs_from_tensorflow_is_documented() -> None:
    documented = [pattern for entry in DIFFERENCES for pattern in entry.get("cases", ())]
    differing = [case.name for case in cases() if case.tags & {"deviation", "beyond_tensorflow", "tolerance"}]
    differing += [call.name for call in bad_calls() if call.aborts or call.accepted]
    assert [name for name in differing if not any(fnmatchcase(name, pattern) for pattern in documented)] == []


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_a_page(name: str) -> None:
    op = OPERATORS[name]
    page = operator_pages.page(op)
    for heading in ("Arguments", "Results", "Errors", "Gradient", "Differs from TensorFlow", "Meaning", "Source"):
        assert f"\n## {heading}\n" in page
    for parameter in op.parameters:
        assert f"| `{parameter}` |" in page
    for result in op.results:
        assert f"| `{result}` |" in page
    assert f"def {name}(" in page or any(f"def {kernel}(" in page for kernel in operator_pages.reference.KERNELS)
    if op.raw_name:
        assert "recorded with TensorFlow 2" in page


@pytest.mark.parametrize("name", [op.name for op in OPERATORS.values() if op.raw_name])
def test_examples_are_programs_that_give_the_recorded_results(name: str) -> None:
    op = OPERATORS[name]
    shown = operator_pages.example(op)
    assert shown is not None
    program = operator_pages.example_code(op, shown)
    if not program:
        assert max(array.size for array in shown.case.operands.values()) > operator_pages.READABLE
        return
    variables: dict = {}
    exec(program, variables)
    results = variables["results"]
    for result, value in zip(op.results, results if isinstance(results, tuple) else (results,), strict=True):
        assert_same_bits(value, shown.actual[result], what=f"the printed program's {result}")


def test_an_example_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPERATORS["fake_quant_with_min_max_args"]
    monkeypatch.setattr(operator_pages.raw_ops, "FakeQuantWithMinMaxArgs", lambda inputs, **_: np.nextafter(inputs, 9))
    with pytest.raises(ValueError, match="differs from TensorFlow's bits"):
        operator_pages.example(op)


def test_docstrings_are_taken_apart() -> None:
    def documented() -> None:
        """Sums `a` and `b`.

        Second
        paragraph.

        Args:
            a, b: vectors,
                of one length.
        Returns:
            sum: a_b * `c|d`.
            Free text: that runs
            on.
        Source: here
            and there.
        """

    parsed = docstrings.parse(documented)
    assert parsed.text == "Sums `a` and `b`.\n\nSecond paragraph."
    assert parsed.sections["Args"] == [docstrings.Entry(("a", "b"), "vectors, of one length.")]
    assert parsed.sections["Returns"] == [
        docstrings.Entry(("sum",), "a_b * `c|d`."),
        docstrings.Entry((), "Free text: that runs on."),
    ]
    assert parsed.sections["Source"] == [docstrings.Entry((), "here and there.")]
    assert docstrings.markdown("a_b * `c`", lambda name: f"{name}.md") == r"a\_b \* [`c`](c.md)"
    assert docstrings.table(["x"], [["a|b"]]).splitlines()[-1] == r"| a\|b |"


@pytest.mark.slow
def test_the_quick_start_runs() -> None:
    for needed in ("torch", "jax"):
        pytest.importorskip(needed)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "quick-start.md").read_text(), re.S)
    assert len(blocks) == 4
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True)


@pytest.mark.slow
def test_getting_started_runs(tmp_path: Path) -> None:
    for needed in ("torch", "sklearn", "typer", "matplotlib", "ai_edge_litert"):
        pytest.importorskip(needed, reason="needs exactqat[job]")
    page = (ROOT / "docs" / "getting-started.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 5
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, check=True)
    commands = [shlex.split(line) for line in re.findall(r"^exactqat ((?:train|verify) .*)$", page, re.M)]
    assert [command[0] for command in commands] == ["train", "verify"]
    random = np.random.default_rng(0)
    np.savez(tmp_path / "few.npz", x=random.random((60, 8, 8), np.float32), y=np.arange(60) % 3)
    for command in commands:
        shorter = ["--data", "few.npz", "--epochs-float", "1", "--epochs-qat", "1", "--keep-going"]
        shorter = shorter if command[0] == "train" else []
        subprocess.run([sys.executable, "-m", "exactqat", *command, *shorter], cwd=tmp_path, check=True)
    assert (tmp_path / "runs" / "first" / "report.html").exists()


def test_the_page_of_the_command_line_is_what_the_commands_are() -> None:
    pytest.importorskip("typer", reason="needs exactqat[job]")
    import cli_page

    page = cli_page.PAGE.read_text(encoding="utf-8")
    assert cli_page.page() == page, "run: python docs/cli_page.py"
    shown = [shlex.split(line) for line in re.findall(r"`exactqat ([a-z]+ [^`]*)`", page)]
    assert {command[0] for command in shown} >= {"train", "verify", "export", "compare", "check", "inspect"}
    for command in shown:
        text = page.partition(f"\n## {command[0]}\n")[2].partition("\n## ")[0]
        for option in (word for word in command if word.startswith("-")):
            assert re.search(rf"`{option}[ `]", text), f"{command} has an option that the page does not describe"


def test_the_page_of_runtime_versions_has_every_version_and_operator() -> None:
    pytest.importorskip("ai_edge_litert", reason="needs exactqat[deploy]")
    import run_versions
    from run_versions import Row

    page = run_versions.PAGE.read_text(encoding="utf-8")
    for name, versions in run_versions.VERSIONS.items():
        for profile in run_versions.PROFILES[name]:
            section = page.partition(f"\n## {run_versions.TITLES[profile]}\n")[2].partition("\n## ")[0]
            assert f"| operator | compared | {' | '.join(versions)} |" in section
            assert len(re.findall(r"^[|] [A-Z_0-9]+ [|]", section, re.M)) > 30
    rows = {
        "1": [Row("RELU", "micro", values=10, graphs=4), Row("ADD", "micro", crashed=True)],
        "2": [
            Row("RELU", "micro", values=9, differing=2, largest=1, graphs=4, refused=1),
            Row("ADD", "micro", graphs=4),
        ],
    }
    table = run_versions.page({"micro": rows}, 4)
    assert "| RELU | 10 | 0 | **2** (1 refused) |" in table and "| ADD | 0 | crashes | refused |" in table
    assert "No version is without differences. 1 differs or crashes in ADD. 2 differs or crashes in RELU." in table


@pytest.mark.slow
def test_every_role_can_do_what_its_page_shows(tmp_path: Path) -> None:
    """Programs are saved by their names, commands print what is shown."""
    for needed in ("torch", "jax", "keras", "typer", "ai_edge_litert", "tflite_micro"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    page = (ROOT / "docs" / "by-role.md").read_text(encoding="utf-8")
    for name, program in re.findall(r"```python\n# (\w+[.]py)\n(.*?)```", page, re.S):
        (tmp_path / name).write_text(program, encoding="utf-8")
    shown = re.findall(r"```console\n[$] (\w+) (.*?)\n(.*?)```", page, re.S)
    assert [command.split()[0] for _, command, _ in shown] == [*["check"] * 4, "foreign.py", "inspect"]
    for program, command, output in shown:
        words = [sys.executable, *(["-m", "exactqat"] if program == "exactqat" else []), *shlex.split(command)]
        environment = {**os.environ, "COLUMNS": "80", "KERAS_BACKEND": "jax", "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=True)
        # Which runtimes are not there differs from machine to machine.
        missing = re.compile(r".*runtime is not on this machine\n|.*not asked for\n")
        assert missing.sub("", done.stdout) == missing.sub("", output), command


def test_the_concepts_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "concepts.md").read_text(), re.S)
    assert len(blocks) == 3
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_headings_skip_no_level(page: Path) -> None:
    """Sphinx warns of it, and is not everywhere at hand."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    levels = [len(mark) for mark in re.findall(r"^(#+) ", text, re.M)]
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))


def test_the_pages_are_built_without_a_warning() -> None:
    for needed in ("sphinx", "myst_parser", "furo", "torch"):
        pytest.importorskip(needed)
    subprocess.run([sys.executable, "docs/build.py"], cwd=ROOT, check=True)
    html = ROOT / "build" / "docs" / "html"
    for page in ("index", "quick-start", "exactness", "contributing", "operators/index", "decisions/summation-order"):
        assert (html / f"{page}.html").exists()
    index = (html / "index.html").read_text()
    assert "sd-card" in index and "what was trained: none of" in index
    for picture in re.findall(r'(?:src|srcset)="(_static/pictures/[^"]*)"', index):
        assert (html / picture).exists(), picture
    sidebar = (
        (html / "operators" / "index.html").read_text().partition('class="sidebar-tree"')[2].partition("</div>")[0]
    )
    listed = {name for name in OPERATORS if f'href="{name}.html"' in sidebar}
    assert listed == {op.name for op in OPERATORS.values() if op.raw_name}
    assert public_names() <= inventory(html)
    for name in NEEDS:
        assert f"{name}.ipynb" in (html / "tutorials" / f"{name}.html").read_text()


# Resolves names as a reader would who types them after the imports that the pages show.
RESOLVE = """
import importlib, sys
import exactqat, exactqat as eq
from exactqat import deploy, qat
for name in sys.argv[1:]:
    head, *rest = name.split(".")
    thing = {"eq": eq, "exactqat": exactqat, "deploy": deploy, "qat": qat}[head]
    for number, part in enumerate(rest):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            if head != "exactqat":  # a whole path may be that of a module
                raise SystemExit(f"{name} is written about, but not there")
            thing = importlib.import_module(".".join([head, *rest[: number + 1]]))
        except ImportError as error:  # of a framework that is not here
            if "pip install" not in str(error):
                raise
            break
"""


def test_names_in_the_text_are_there() -> None:
    pytest.importorskip("torch")
    names = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]:
        for span in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
            names |= set(re.findall(r"(?<![\w./-])(?:eq|exactqat|deploy|qat)(?:[.][A-Za-z_]\w*)+", span))
    assert {"deploy.layer_values", "exactqat.qat.distributed.synchronized"} <= names
    subprocess.run([sys.executable, "-c", RESOLVE, *sorted(names)], check=True)


def public_names() -> set[str]:
    """Operators by every name of theirs, the functions around them, and what the kit exports."""
    import exactqat
    from exactqat import deploy, nn, qat, quantization

    names = {f"exactqat.{name}" for op in OPERATORS.values() for name in op.exports}
    names |= {f"exactqat.raw_ops.{op.raw_name}" for op in OPERATORS.values() if op.raw_name}
    for module, exported in ((exactqat, dir(exactqat)), (nn, dir(nn)), (quantization, dir(quantization))):
        own = (name for name in exported if not name.startswith("_") and inspect.isfunction(getattr(module, name)))
        names |= {f"{module.__name__}.{name}" for name in own}
    for module in (qat, deploy):
        for name in module.__all__:
            if inspect.isclass(getattr(module, name)) or inspect.isfunction(getattr(module, name)):
                names.add(f"{module.__name__}.{name}")
    return names


def inventory(html: Path) -> set[str]:
    """The names by which other projects' pages find places on these."""
    entries = zlib.decompress((html / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    return {line.split()[0] for line in entries.splitlines()}


def test_the_reference_begins_with_what_is_used_first() -> None:
    pytest.importorskip("torch")
    from build import DEPLOYMENT, TRAINING, module_page
    from exactqat import deploy, qat

    for module, tasks, first in (
        (qat, TRAINING, "prepare calibrate freeze"),
        (deploy, DEPLOYMENT, "lower write_tflite"),
    ):
        names = re.findall(r"^### (\w+)$", module_page("", module, tasks), re.M)
        assert names[: len(first.split())] == first.split()
        assert set(names) == {
            n for n in module.__all__ if not isinstance(getattr(module, n), Mapping | tuple | frozenset)
        }
        with pytest.raises(ValueError, match="exports no nonsense"):
            module_page("", module, {"": ("nonsense",)})


def test_the_picture_of_a_demo_has_its_accuracies(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import pictures

    networks = {"chosen": "qat_ema", "qat_ema": {"title": "QAT, EMA ranges", "device_accuracy": 0.75}}
    with pictures.charts.drawing():
        drawn = pictures.accuracies({"float": {"test_accuracy": 0.8125}, "networks": {"w4a4": networks}})
    assert re.findall(r">(\d+[.]\d%)<", drawn) == ["81.2%", "75.0%"] and "W4A4 QAT, EMA" in drawn


def test_pictures_are_whole_and_small() -> None:
    pictures = re.findall(r'(?:src|srcset)="(docs/_static/[^"]*)"', (ROOT / "README.md").read_text())
    concepts = (ROOT / "docs" / "concepts.md").read_text()
    sections = concepts.split("\n## ")[1:]
    assert len(sections) == 6 and all(section.count("<picture>") == 1 for section in sections)
    pictures += [f"docs/{name}" for name in re.findall(r'(?:src|srcset)="(_static/[^"]*)"', concepts)]
    assert len(pictures) == 14
    for name in pictures:
        ElementTree.parse(ROOT / name)
        assert (ROOT / name).stat().st_size < 50_000 and "var(" not in (ROOT / name).read_text()
