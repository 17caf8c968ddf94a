"""Sphinx: the pages are Markdown; `sphinx-build docs docs/_build`."""

project = "jtile"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "alabaster"
