# SPDX-License-Identifier: Apache-2.0
"""One page for each tutorial, made from its notebook: text as it is, cells as code, followed by their output.

`make notebooks ARGS=--write` runs the notebooks and stores what they print. Building pages runs nothing.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"


def text(field: str | list[str]) -> str:
    """A field of a notebook, which may be a list of lines."""
    return field if isinstance(field, str) else "".join(field)


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def page(path: Path, changed: Callable[[str], str] = str) -> str:
    """The page of a notebook in MyST's Markdown.

    Args:
        changed: what is done to its texts, such as making links lead to pages.
    """
    heading, *rest = cells(path)
    title, _, introduction = text(heading["source"]).partition("\n")
    note = f"A notebook: {{download}}`{path.name}`. The outputs are from its last run."
    parts = [title, note, changed(introduction.strip())]
    for cell in rest:
        source = text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(changed(source))
            continue
        parts.append(fenced(source, "text" if source.startswith("%") else "python"))
        for is_text, outputs in groupby(map(_output, cell["outputs"]), lambda output: isinstance(output, Printed)):
            joined = "".join(outputs)
            if joined.strip():
                parts.append(fenced(joined.strip("\n"), "text") if is_text else joined)
    return "\n\n".join(parts) + "\n"


def fenced(body: str, language: str) -> str:
    """A block of code, whatever fences it contains."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return f"{fence}{language}\n{body}\n{fence}"


class Printed(str):
    """Text shown in one block with the text printed before and after it."""


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        # Runtimes announce themselves on the other stream.
        return Printed(_plain(text(output["text"])) if output["name"] == "stdout" else "")
    data = output.get("data", {})
    page = text(data.get("text/html", ""))
    # Embedded pages are left out; what a console prints in a notebook is HTML around the same text.
    if page and not page.startswith("<pre") and "<iframe" not in page:
        return "```{raw} html\n" + page + "\n```"
    if "image/png" in data:
        encoded = "".join(text(data["image/png"]).split())
        alt = html.escape(text(data.get("text/plain", "")), quote=True)
        return f'```{{raw}} html\n<img alt="{alt}" src="data:image/png;base64,{encoded}">\n```'
    return Printed("" if "<iframe" in page else _plain(text(data.get("text/plain", ""))).rstrip("\n") + "\n")


def _plain(printed: str) -> str:
    """Without colors; of a line that was overwritten, only the last text."""
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", printed).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)
