# SPDX-License-Identifier: Apache-2.0
"""Texts for readers are in plain English: some words that sound translated are not used."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BANNED = re.compile(
    r"\b(?:told|stands|anew|whereof|behind|(?:is|are|be|was|were) put|of\s+which|by bits)\b", re.IGNORECASE
)
# Code in a text.
CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`", re.DOTALL)
CPP_TEXT = re.compile(r'//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def texts_of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and all other strings, which messages are made of, with their lines."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def texts_of_notebook(path: Path) -> Iterator[tuple[int, str]]:
    """The cells, numbered from 0."""
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        yield number, "".join(cell["source"])


def texts_of_cpp(path: Path) -> Iterator[tuple[int, str]]:
    """Comments, those of neighbouring lines as one text, and strings."""
    text = path.read_text(encoding="utf-8")
    for match in CPP_TEXT.finditer(text):
        yield 1 + text.count("\n", 0, match.start()), match[0]


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """The names that a Python program uses."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def pages() -> list[Path]:
    paths = [path for suffix in ("md", "toml", "py", "ipynb") for path in (ROOT / "docs").rglob(f"*.{suffix}")]
    return [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *sorted(paths)]


def sources() -> list[Path]:
    """Programs of every language, except for this one, which has to name the words."""
    paths = [
        path
        for folder in ("src/exactqat", "tests", "bench", "release", "examples", "integrations", ".github")
        for suffix in ("py", "cpp", "h", "yml", "sh")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    others = [ROOT / name for name in ("Makefile", "CMakeLists.txt", "pyproject.toml")]
    return sorted(path for path in (*paths, *others) if path != Path(__file__).resolve() and path.exists())


READERS = {".py": texts_of_python, ".ipynb": texts_of_notebook, ".cpp": texts_of_cpp, ".h": texts_of_cpp}


def banned_in(path: Path) -> list[str]:
    read = READERS.get(path.suffix)
    texts = read(path) if read else [(1, path.read_text(encoding="utf-8"))]
    problems = []
    for start, text in texts:
        if text.isidentifier():
            continue
        plain = CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
        for match in BANNED.finditer(plain):
            line = start + plain.count("\n", 0, match.start())
            problems.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}")
    return problems


@pytest.mark.parametrize("path", [*pages(), *sources()], ids=lambda path: str(path.relative_to(ROOT)))
def test_texts_are_in_plain_english(path: Path) -> None:
    problems = banned_in(path)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "path", [path for path in sources() if path.suffix == ".py"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_names_are_in_plain_english(path: Path) -> None:
    problems = [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in names_in(path) if BANNED.fullmatch(name)]
    assert not problems, "\n".join(problems)


def test_banned_words_are_found_outside_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("It outstands `told`.\n\n```python\nprint('told')\n```\n\nThe file\nstands behind it.\n")
    assert banned_in(page) == ["page.md:8: 'stands'", "page.md:8: 'behind'"]
    module = tmp_path / "module.py"
    module.write_text(
        'def told() -> str:\n    """Reads it.\n\n    Compared by bits.\n    """\n    return "once told"\n'
    )
    assert sorted(banned_in(module)) == ["module.py:4: 'by bits'", "module.py:6: 'told'"]
    assert [line for line, name in names_in(module) if BANNED.fullmatch(name)] == [1]
    kernel = tmp_path / "kernel.cpp"
    kernel.write_text('int told;  // What is\n  // put here.\nauto text = "behind \\" stands";\n')
    assert banned_in(kernel) == ["kernel.cpp:3: 'behind'", "kernel.cpp:3: 'stands'"]
    kernel.write_text("// Rows are put\n// there.\n/* Compared\n   anew. */\n")
    assert banned_in(kernel) == ["kernel.cpp:1: 'are put'", "kernel.cpp:4: 'anew'"]
