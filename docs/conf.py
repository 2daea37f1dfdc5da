# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for the pages that `docs/build.py` puts together."""

from docutils import nodes
from sphinx.application import Sphinx

project = "exactqat"
copyright = "the exactqat authors"
extensions = ["myst_parser", "sphinx_design"]
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["README.md"]  # which the site shows as its own first page
nitpicky = True
smartquotes_action = "qe"  # quotes and ellipses; two hyphens begin an option
highlight_language = "none"  # of blocks that name none
myst_heading_anchors = 3
html_theme = "furo"
html_title = "exactqat"
pygments_dark_style = "github-dark"  # which underlines no imports
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["site.css"]


def setup(app: Sphinx) -> None:
    """Marks short code, which site.css keeps on one line."""

    def mark(app: Sphinx, doctree: nodes.document) -> None:
        for code in doctree.findall(nodes.literal):
            if len(code.astext()) <= 20:
                code["classes"].append("short")

    app.connect("doctree-read", mark)
