# SPDX-License-Identifier: Apache-2.0
"""One page for each tutorial, made from its notebook: text as it is, cells as code, and what was printed below.

The repository holds notebooks without output. `make notebooks` runs them and leaves copies with output in
build/notebooks; a page shows the output of its copy as long as the cells are the same. Building pages runs nothing.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
EXECUTED = ROOT / "build" / "notebooks"

SHOWN = "What stands below the cells is what they printed when `make notebooks` ran last."
BARE = "This page was built without running it; `make notebooks`, then `make docs` shows what the cells print."


def text(field: str | list[str]) -> str:
    """A field of a notebook, which may be a list of lines."""
    return field if isinstance(field, str) else "".join(field)


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def with_output(path: Path, executed: Path) -> tuple[list[dict[str, Any]], bool]:
    """The cells to be shown, and whether they are those of the copy that was run."""
    own = cells(path)
    if executed.exists():
        run = cells(executed)
        if [(c["cell_type"], text(c["source"])) for c in run] == [(c["cell_type"], text(c["source"])) for c in own]:
            return run, True
    return own, False


def page(path: Path, changed: Callable[[str], str] = str, executed: Path | None = None) -> str:
    """The page of a notebook in MyST's Markdown.

    Args:
        changed: what is done to its texts, such as making links lead to pages.
        executed: the copy that was run; in EXECUTED unless given.
    """
    shown, was_run = with_output(path, executed or EXECUTED / path.name)
    heading, *rest = shown
    title, _, introduction = text(heading["source"]).partition("\n")
    note = f"A notebook: {{download}}`{path.name}`. {SHOWN if was_run else BARE}"
    parts = [title, note, changed(introduction.strip())]
    for cell in rest:
        source = text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(changed(source))
            continue
        parts.append(fenced(source, "text" if source.startswith("%") else "python"))
        parts += [part for output in cell["outputs"] for part in _output(output)]
    return "\n\n".join(parts) + "\n"


def fenced(body: str, language: str) -> str:
    """A block of code, whatever fences stand in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return f"{fence}{language}\n{body}\n{fence}"


def _output(output: dict[str, Any]) -> Iterator[str]:
    if output["output_type"] == "stream":
        if output["name"] == "stdout":  # on the other stream runtimes say that they are there
            yield fenced(_plain(text(output["text"])), "text")
        return
    data = output.get("data", {})
    if "text/html" in data and "<iframe" not in text(data["text/html"]):
        # Without a line that is empty, at which Markdown would end it.
        yield "```{raw} html\n" + re.sub(r"\n\s*\n", "\n", text(data["text/html"])) + "\n```"
    elif "image/png" in data:
        encoded = "".join(text(data["image/png"]).split())
        alt = html.escape(text(data.get("text/plain", "")), quote=True)
        yield f'```{{raw}} html\n<img alt="{alt}" src="data:image/png;base64,{encoded}">\n```'
    elif "text/plain" in data:
        yield fenced(_plain(text(data["text/plain"])), "text")


def _plain(printed: str) -> str:
    """Without colors, and of a line that was written over what stood there last."""
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", printed).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines).strip("\n")
