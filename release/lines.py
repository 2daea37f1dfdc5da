# SPDX-License-Identifier: Apache-2.0
"""Counts the lines of src by room: `python release/lines.py`, or `--at COMMIT` for an earlier state.

Each line is counted once, as code, docstring, comment or blank. A room is a folder of `src/exactqat`; the wings `kit`
and `application` are counted by the folders in them. Below the table: the median length of a function, the longest
line, annotations that are `Any`, and names that several classes have.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "src/exactqat"
WINGS = ("application", "kit", "operators")
TRAINING = ("capture", "train")  # rooms beside the names of qat
SUFFIXES = (".py", ".cpp", ".h", ".c", ".html", ".css", ".js", ".j2")
KINDS = ("code", "docstring", "comment", "blank")


def files(commit: str | None) -> Iterator[tuple[PurePosixPath, str]]:
    """Path inside the package and text of every source file."""
    if commit is None:
        for path in sorted((ROOT / SOURCE).rglob("*")):
            if path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                yield PurePosixPath(path.relative_to(ROOT / SOURCE).as_posix()), path.read_text("utf-8")
        return
    archive = subprocess.run(["git", "archive", commit, SOURCE], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            content = tar.extractfile(member) if path.suffix in SUFFIXES else None
            if content is not None:
                yield path.relative_to(SOURCE), content.read().decode("utf-8")


def room_of(path: PurePosixPath) -> str:
    folders = path.parts[:-1]
    if not folders:
        return "(top)"
    inner = folders[0] in WINGS or folders[1:2] and folders[1] in TRAINING
    return "/".join(folders[:2] if inner else folders[:1])


def kinds_of_python(text: str, tree: ast.Module) -> Counter[str]:
    """How many lines are of each kind; a line with code and a comment is code."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or node.body[0].lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    silent = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in silent:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    comments -= code | docstrings
    total = len(text.splitlines())
    counts = {"code": len(code), "docstring": len(docstrings), "comment": len(comments)}
    return Counter({**counts, "blank": total - sum(counts.values())})


def kinds_of_other(text: str) -> Counter[str]:
    """Of C++ and of templates: comments are lines that begin with // or lie between /* and */."""
    counts: Counter[str] = Counter()
    inside = False
    for line in map(str.strip, text.splitlines()):
        starts = line.startswith(("/*", "<!--", "{#"))
        if not line:
            counts["blank"] += 1
        elif inside or starts or line.startswith("//"):
            counts["comment"] += 1
        else:
            counts["code"] += 1
        if inside or starts:
            inside = not line.endswith(("*/", "-->", "#}"))
    return counts


def functions_of(tree: ast.Module) -> Iterator[int]:
    """The length of every function in lines, without decorators."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def annotations_of(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            yield node.returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT", help="count this commit; default: the working tree")
    commit = parser.parse_args().at
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    count: Counter[str] = Counter()
    lengths: list[int] = []
    classes: defaultdict[str, int] = defaultdict(int)
    longest, untyped = 0, 0
    for path, text in files(commit):
        room = room_of(path)
        count[room] += 1
        longest = max([longest, *(len(line) for line in text.splitlines())])
        if path.suffix != ".py":
            rooms[room] += kinds_of_other(text)
            continue
        tree = ast.parse(text)
        rooms[room] += kinds_of_python(text, tree)
        lengths += functions_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
        names = (name for annotation in annotations_of(tree) for name in ast.walk(annotation))
        untyped += sum(isinstance(name, ast.Name) and name.id == "Any" for name in names)
    print(f"{'room':24}{'files':>7}{'lines':>8}" + "".join(f"{kind:>11}" for kind in KINDS))
    rooms["all of src"] = sum(rooms.values(), Counter())
    count["all of src"] = count.total()
    for room, kinds in rooms.items():
        print(f"{room:24}{count[room]:7}{kinds.total():8}" + "".join(f"{kinds[kind]:11}" for kind in KINDS))
    print(f"median function: {statistics.median(lengths):g} lines of {len(lengths)}; longest line: {longest}")
    print(f"annotations with Any: {untyped}")
    print(f"class names used more than once: {sum(number > 1 for number in classes.values())}")


if __name__ == "__main__":
    main()
