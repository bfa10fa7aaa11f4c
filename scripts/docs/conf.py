"""Sphinx's settings for the site; `scripts/docs/build.py` stages its pages and runs it."""

project = "Weft"
author = "The Weft authors"
project_copyright = "The Weft authors, Apache License 2.0"
extensions = ["myst_parser"]
root_doc = "index"
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "Weft"
# Everything that a reader's browser loads comes with the site.
html_theme_options = {"light_css_variables": {"font-stack": "system-ui, sans-serif"}}
html_copy_source = False
html_show_sphinx = False
myst_heading_anchors = 4
myst_enable_extensions = ["fieldlist"]
nitpicky = True
suppress_warnings = [
    # READMEs begin where their folder does, and tables of modules skip a level.
    "myst.header",
    # `http`, `toml` and samples of output that no highlighter reads.
    "misc.highlighting_failure",
]
highlight_language = "none"
