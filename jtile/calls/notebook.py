"""What a notebook shows of a kernel and of its lowered form: plain HTML, without scripts or colours of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from jtile.calls.signature import REQUIRED

_LINES = 2000  # lines of a level that are shown, at most: a notebook's file keeps what it shows
_PRE = '<pre style="max-height:30em;overflow:auto;margin:0.3em 0">'


def source_of(fn: Callable[..., Any], lines: list[str]) -> str:
    """The text of a function with its decorators, from the lines of its file; "" where there are none."""
    code = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__code__", None)
    return "".join(inspect.getblock(lines[code.co_firstlineno - 1 :])) if code is not None and lines else ""


def kernel_html(name: str, refs: Sequence[str], meta: Mapping[str, object], source: str) -> str:
    """The parameters of a kernel, and its source behind a triangle."""
    given = ", ".join(k if v is REQUIRED else f"{k}={v!r}" for k, v in meta.items())
    rows = [("Refs", ", ".join(refs)), ("meta-parameters", given)]
    shown = "; ".join(f"{what} <code>{escape(text)}</code>" for what, text in rows if text)
    return f"<div>kernel <b>{escape(name)}</b>: {shown}</div>{_folded('source', source) if source else ''}"


def lowered_html(name: str, target: str, texts: Mapping[str, str]) -> str:
    """The levels of a kernel, each behind a triangle."""
    levels = "".join(_folded(level, text) for level, text in texts.items())
    return f"<div>kernel <b>{escape(name)}</b> for <code>{escape(target)}</code></div>{levels}"


def _folded(title: str, text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    kept = escape("\n".join(lines[:_LINES]))
    rest = f"\n... and {len(lines) - _LINES} lines more" if len(lines) > _LINES else ""
    return f"<details><summary>{escape(title)} ({len(lines)} lines)</summary>{_PRE}{kept}{rest}</pre></details>"
