# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for the pages that `docs/build.py` puts together."""

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
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["site.css"]
