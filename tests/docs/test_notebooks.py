# SPDX-License-Identifier: Apache-2.0
"""The tutorials: listed, stored with what they printed, and one of them run; `make notebooks` runs all."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import run_notebooks
from run_notebooks import NEEDS, ROOT, TUTORIALS, execute, missing, printed

sys.path.insert(0, str(ROOT / "docs"))

import notebook_pages  # noqa: E402

SHORT = "debugging"  # seconds, with PyTorch
SENTENCE = "needs exactqat[notebooks]: pip install '.[notebooks]'"


def code(name: str) -> list[str]:
    cells = notebook_pages.cells(TUTORIALS / f"{name}.ipynb")
    return [notebook_pages.text(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_every_tutorial_is_listed() -> None:
    index = (TUTORIALS / "index.md").read_text()
    names = {path.stem for path in TUTORIALS.glob("*.ipynb")}
    assert names == set(NEEDS)
    assert re.findall(r"^\| \[.*?\]\((\w+)[.]ipynb\)", index, re.M) == list(NEEDS)
    assert index.partition(":maxdepth: 1\n\n")[2].partition("\n```")[0].split() == list(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_what_was_printed_is_stored_and_nothing_of_the_machine(name: str) -> None:
    path = TUTORIALS / f"{name}.ipynb"
    notebook = json.loads(path.read_text())
    assert path.stat().st_size < 400_000
    assert set(notebook["metadata"]) == {"kernelspec", "language_info", "license"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["execution_count"] is None
            assert not any(output.get("name") == "stderr" or "ename" in output for output in cell["outputs"])
    outputs = json.dumps([cell.get("outputs", []) for cell in notebook["cells"]])
    assert len(outputs) > 500 and not re.search(r"/(?:tmp|home|root|work|usr)/", outputs)


@pytest.mark.parametrize("name", NEEDS)
def test_a_tutorial_says_what_it_needs_and_checks_what_it_claims(name: str) -> None:
    heading = notebook_pages.text(notebook_pages.cells(TUTORIALS / f"{name}.ipynb")[0]["source"])
    assert heading.startswith("# ")
    (extras,) = re.findall(r"pip install 'exactqat\[([\w,]+)\]'", heading)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    trees = [ast.parse(source) for source in code(name) if not source.startswith("%")]
    asserts = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert any(re.search(r"differing|report\.equal", ast.unparse(node)) for node in asserts)
    imports = {
        module.split(".")[0]
        for tree in trees
        for node in ast.walk(tree)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imports - set(sys.stdlib_module_names) <= {*NEEDS[name], "exactqat", "numpy", "IPython"}


@pytest.mark.parametrize("name", NEEDS)
def test_links_of_a_tutorial_lead_somewhere(name: str) -> None:
    for cell in notebook_pages.cells(TUTORIALS / f"{name}.ipynb"):
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", notebook_pages.text(cell["source"])):
                assert "://" in target or (TUTORIALS / target).exists(), target


@pytest.mark.slow
def test_a_short_tutorial_runs(tmp_path: Path) -> None:
    if lacking := missing(SHORT):
        pytest.skip(f"{', '.join(lacking)} not installed; {SENTENCE}")
    source = TUTORIALS / f"{SHORT}.ipynb"
    notebook = execute(source, tmp_path)
    assert any(re.search(r"second: falls by \d+", text) for text in printed(notebook))
    assert (tmp_path / "network.tflite").exists()
    assert "second: falls by" in notebook_pages.page(source)
    copy = tmp_path / "copy.ipynb"
    copy.write_text(source.read_text())
    run_notebooks.store(notebook, copy, tmp_path)
    assert json.loads(copy.read_text())["metadata"] == json.loads(source.read_text())["metadata"]


@pytest.mark.slow
def test_what_a_tutorial_asserts_can_fail(tmp_path: Path) -> None:
    if lacking := [module for module in run_notebooks.RUNNER if module in missing(SHORT)]:
        pytest.skip(f"{', '.join(lacking)} not installed; {SENTENCE}")
    from nbclient.exceptions import CellExecutionError

    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps(notebook_of("assert 1 + 1 == 3")))
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(path, tmp_path)


def notebook_of(source: str, *outputs: Any) -> dict[str, Any]:
    title = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": "# Title\n\n[Jobs](../jobs.md)"}
    cell = {"cell_type": "code", "id": "code", "metadata": {}, "source": source, "outputs": list(outputs)}
    cells = [title, cell | {"execution_count": None}]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_notebooks.importlib.util, "find_spec", lambda name: None if name == "flax" else object())
    assert missing("jax") == ["flax"] and missing("rules") == []


def stream(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def shown(text: str, html: str | None = None) -> dict[str, Any]:
    data = {"text/plain": text} | ({} if html is None else {"text/html": html})
    return {"output_type": "display_data", "metadata": {}, "data": data}


def test_a_page_shows_what_was_printed(tmp_path: Path) -> None:
    own = tmp_path / "own.ipynb"
    outputs = [
        stream("50%\r100%\r\n"),
        stream("a runtime\n", "stderr"),
        shown("\x1b[1mbold\x1b[0m\n", "<pre>bold</pre>"),
        shown("plain", "<div>a table</div>"),
        shown("a frame", "<iframe src='x'></iframe>"),
        shown("```"),
    ]
    own.write_text(json.dumps(notebook_of("print(1)\n1", *outputs)))
    page = notebook_pages.page(own, lambda text: text.replace("../jobs.md", "jobs"))
    assert page.startswith("# Title\n\nA notebook: {download}`own.ipynb`. ")
    assert "[Jobs](jobs)" in page
    assert "```python\nprint(1)\n1\n```\n\n```text\n100%\nbold\n```\n\n```{raw} html\n<div>a table</div>\n```" in page
    assert page.endswith("\n\n````text\n```\n````\n")
    assert not any(word in page for word in ("50%", "a runtime", "\x1b", "<pre>", "frame"))
