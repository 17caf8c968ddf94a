"""One HTML file of a record."""

from __future__ import annotations

import html
import json
from importlib import resources

from jtile.explorer.record import Record

# In the order in which they run; `base.js` has what the others use.
SCRIPTS = ("base.js", "state.js", "code.js", "grid.js", "main.js")


def document(record: Record) -> str:
    """The page of a record. The record is a script of JSON, in which no text can end the script; nothing is fetched."""
    read = lambda name: resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    parts = {
        "@TITLE@": html.escape(f"{record.title} for {record.target}"),
        "@STYLE@": read("style.css"),
        "@DATA@": embedded(record.json()),
        "@SCRIPT@": "\n".join(read(name) for name in SCRIPTS),
    }
    page = read("page.html")
    for mark, text in parts.items():
        before, _, after = page.partition(mark)
        page = before + text + after
    return page


def embedded(data: object) -> str:
    """JSON that may stand inside of a `<script>`: no `<`, so that nothing in it ends the script or begins a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
