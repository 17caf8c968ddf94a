"""Sphinx: `make docs` writes the site to docs/_build. Pages are Markdown; those of the API come from docstrings."""

import re
from importlib.metadata import version as installed

project = "jtile"
author = "the authors of jtile"
copyright = "the authors of jtile"
version = release = installed("jtile")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "examples"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

html_theme = "furo"
html_title = "jtile"
html_static_path = ["_static"]
html_css_files = ["pictures.css"]
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

autodoc_typehints = "none"  # the text of `Args` says what an argument is; annotations of tiles would all be `Any`
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def docstring_as_rst(app, what, name, obj, options, lines):
    """The docstrings are written as Markdown: their `code` becomes ``code``, and stars outside of it stay stars."""
    text = _one_name_a_line("\n".join(lines) + "\n")
    fenced = re.sub(r"(?ms)^```(?:python)?\n(.*?)^```$", lambda m: re.sub("(?m)^(?=.)", "    ", m[1]), text)
    # a code block is either fenced, or indented by four behind an empty line
    parts = re.split(r"(?m)((?<=\n\n)(?:    .*\n|\n(?=    ))+)", fenced)
    lines[:] = "".join(
        _inline(p) if k % 2 == 0 else f".. code-block:: python\n\n{p}\n" for k, p in enumerate(parts)
    ).split("\n")


def _one_name_a_line(text):
    """Entries of `Attributes` and `Raises` that share a text get one each, as napoleon does for arguments."""
    sections = re.split(r"(?m)^((?:Attributes|Raises):\n(?:(?:  .*)?\n)*)", text)
    for k in range(1, len(sections), 2):
        part = re.sub(r"(?<=\.) (?=\w+Error: )", "\n  ", sections[k])
        entry = r"(?m)^  (\w+(?:, \w+)+)(: .*(?:\n    .*)*)"
        sections[k] = re.sub(entry, lambda m: "\n".join(f"  {n}{m[2]}" for n in m[1].split(", ")), part)
    return "".join(sections)


def _inline(text):
    pieces = re.split(r"(?s)(?<!`)`([^`]+)`(?!`)", text)
    plain = lambda piece: re.sub(r"(?<!\*)([*|])(?!\*)", r"\\\1", piece)
    # behind inline code reStructuredText wants no letter: `Ref`s becomes ``Ref``\ s
    marked = lambda k: f"``{' '.join(pieces[k].split())}``" + ("\\ " if pieces[k + 1][:1].isalnum() else "")
    return "".join(marked(k) if k % 2 else plain(piece) for k, piece in enumerate(pieces))


def setup(app):
    # before napoleon, which reads `Args:` and turns it into fields
    app.connect("autodoc-process-docstring", docstring_as_rst, priority=400)
