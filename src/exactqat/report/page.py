# SPDX-License-Identifier: Apache-2.0
"""Single-file pages, light or dark by the reader's preference, from a phone's screen up. Names from others are
escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from .text import printable

# The colors of pages and charts, and what replaces each on a dark screen.
DARK = {
    "#1c2430": "#e8ebf0",  # ink
    "#5a6675": "#9aa7b6",  # side remarks
    "#e3e7ec": "#333c48",  # lines
    "#f6f7f9": "#12161c",  # the page's background
    "#ffffff": "#1b2129",  # paper
    "#eef4fb": "#1d3049",  # what is delivered
    "#fff6e5": "#3b2f14",  # warnings
    "#146c43": "#5fc795",
    "#b02a37": "#ff8a93",
    "#6b7280": "#a3acb9",
    "#f2b77c": "#c98f52",
    "#e08a3c": "#f0a356",
    "#6fa8dc": "#4f86b8",
    "#1f5fa8": "#7cb4f2",
}
INK, NOTE, LINE, BACKGROUND, PAPER, DELIVERED, WARNING, GOOD, BAD = list(DARK)[:9]


def variable(color: str) -> str:
    """The variable for a color in the page's styles."""
    return f"var(--c{color[1:]})"


def escape(text: object) -> str:
    """Names chosen by others, as text of the page and of its attributes."""
    return html.escape(printable(text))


def page(title: str, body: str) -> str:
    """The whole page; `body` is HTML."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_style()}</style></head><body><main>{body}</main></body></html>\n"
    )


def section(title: str, body: str, kind: str = "") -> str:
    return f"<section class='{kind}'><h2>{escape(title)}</h2>{body}</section>"


def table(header: Sequence[str], rows: Iterable[tuple[bool, Sequence[str]]], text_columns: int) -> str:
    """rows: (highlighted, cells); the first `text_columns` columns are aligned left. Wide tables scroll."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=t' if column < text_columns else ''}>{escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )

    body = "".join(f"<tr{' class=delivered' if marked else ''}>{line(cells, 'td')}</tr>" for marked, cells in rows)
    return f"<div class='wide'><table><thead><tr>{line(header, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"


def cards(pairs: Iterable[tuple[str, str]]) -> str:
    """The figures to see first, each with its label."""
    shown = "".join(
        f"<div class='card'><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in pairs
    )
    return f"<div class='cards'>{shown}</div>"


def warnings(sentences: Iterable[str]) -> str:
    """What readers must know before the figures."""
    return "".join(f"<p class='warning'><strong>Warning:</strong> {escape(sentence)}.</p>" for sentence in sentences)


def charts(*pictures: str) -> str:
    """Side by side where there is room."""
    return f"<div class='charts'>{''.join(pictures)}</div>"


def _style() -> str:
    light = "".join(f"--c{color[1:]}:{color};" for color in DARK)
    dark = "".join(f"--c{color[1:]}:{other};" for color, other in DARK.items())
    rules = _RULES
    for color in DARK:
        rules = rules.replace(color, variable(color))
    return f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{rules}"


_RULES = """
*{box-sizing:border-box}
body{margin:0;background:#f6f7f9;color:#1c2430;font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 64px;overflow-wrap:anywhere}
h1{font-size:30px;line-height:1.2;margin:0}h2{font-size:21px;margin:0 0 8px}h3{font-size:16px;margin:18px 0 4px}
a{color:#1f5fa8}
.lead{color:#5a6675;margin:4px 0 20px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:14px}
.card,section{background:#ffffff;border:1px solid #e3e7ec;border-radius:10px}
.card{padding:14px 16px}.card b{display:block;font-size:28px}.card span{color:#5a6675;font-size:14px}
section{padding:20px 22px;margin-top:18px}
.warning{background:#fff6e5;border-left:4px solid #e08a3c;border-radius:6px;padding:10px 14px;margin:0 0 14px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:5px 9px;text-align:right;border-bottom:1px solid #e3e7ec;white-space:nowrap}
.layers table{font-size:12px}.layers th,.layers td{padding:4px}
.layers th{white-space:normal;vertical-align:bottom}
th{color:#5a6675;font-weight:600;overflow-wrap:normal}.prose td.t{white-space:normal;overflow-wrap:break-word}
th.t,td.t{text-align:left}
tr.delivered td{background:#eef4fb;font-weight:600}
.good{color:#146c43;font-weight:600}.bad{color:#b02a37;font-weight:600}.note{color:#5a6675;font-size:14px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:8px 24px}
figure{margin:14px 0 0;overflow-x:auto}figcaption{color:#5a6675;font-size:14px}
figure.broad{grid-column:1/-1}
figure svg{display:block;width:100%;height:auto}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figure svg text{font-family:system-ui,-apple-system,"Segoe UI",sans-serif!important}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:14px}
.gallery figure{margin:0}
.gallery img{width:112px;height:112px;object-fit:contain;background:#e3e7ec;border:1px solid #e3e7ec}
.gallery img.small{image-rendering:pixelated}
pre{background:#f6f7f9;padding:12px;border-radius:6px;white-space:pre-wrap}
details summary{cursor:pointer;color:#5a6675}
@media(max-width:600px){main{padding:20px 10px 40px}section{padding:14px 12px}h1{font-size:25px}}
"""
