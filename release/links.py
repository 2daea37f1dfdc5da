# SPDX-License-Identifier: Apache-2.0
"""Links within the built documentation: every page and every place that a page links to must be there."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = {"", "top"}
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            if (tag, name) in {("a", "href"), ("img", "src"), ("source", "srcset"), ("link", "href")} and value:
                self.targets.append(value)


def broken(folder: Path) -> tuple[int, list[str]]:
    """How many links within the folder's pages there are, and those that lead nowhere."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text("utf-8"))
        pages[path.resolve()] = page
    count, problems = 0, []
    for path, page in pages.items():
        for target in page.targets:
            link = urlsplit(target)
            if link.scheme or link.netloc:
                continue
            count += 1
            file = (path.parent / unquote(link.path)).resolve() if link.path else path
            there = file.exists() if file not in pages else unquote(link.fragment) in pages[file].places
            if not there:
                problems.append(f"{path.relative_to(folder.resolve())}: {target}")
    return count, problems
