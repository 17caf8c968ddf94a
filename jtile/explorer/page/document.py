"""One HTML file of a record."""

from __future__ import annotations

import base64
import gzip
import html
import json
from importlib import resources

from jtile.explorer.record import Record

# The scripts in the order in which they run; `base.js` has what the others use.
SCRIPTS = ("base.js", "state.js", "code.js", "grid.js", "speed.js", "roles.js", "layouts.js", "main.js")


LONG = 1 << 20  # bytes of JSON from which on it is compressed


def document(record: Record) -> str:
    """The page of a record. The record is a script of data, in which no text can end the script; nothing is fetched."""
    read = lambda name: resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    kind, data = embedded(record.json())
    parts = {
        "@TITLE@": html.escape(f"{record.title} for {record.target}"),
        "@STYLE@": read("style.css"),
        "@TYPE@": kind,
        "@DATA@": data,
        "@SCRIPT@": "\n".join(read(name) for name in SCRIPTS),
    }
    page = read("page.html")
    for mark, text in parts.items():
        before, _, after = page.partition(mark)
        page = before + text + after
    return page


def embedded(data: object) -> tuple[str, str]:
    """Data as the type and the text of a `<script>`: JSON without any `<`, so that nothing in it ends the script or
    begins a comment; long JSON as base 64 of gzip, which takes a tenth."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if len(text) >= LONG:
        packed = gzip.compress(text.encode(), compresslevel=6, mtime=0)
        return "application/gzip", base64.b64encode(packed).decode()
    return "application/json", text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
