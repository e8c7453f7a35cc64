"""Sphinx configuration: `make docs`."""

project = "advbayes"
author = "The advbayes developers"
copyright = "2026, the advbayes developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
extensions += [
    "sphinx-mathjax-offline"
]  # MathJax as files of the site: nothing is loaded from afar
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "advbayes"
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
suppress_warnings = ["myst.header"]


def _as_written(app, what, name, obj, options, lines):
    """Docstrings are plain text with formulas, not markup: |x| is a norm."""
    if lines:
        lines[:] = ["::", "", *(f"   {line}" for line in lines), ""]


def setup(app):
    app.connect("autodoc-process-docstring", _as_written)
