"""The page: one file that fetches nothing, and what it does in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import browser as browsers
import jax
import jax.numpy as jnp
import pytest
from turned_ttgir import TTGIR

import jtile as jt
from jtile.explorer import View, links, record
from jtile.explorer.layouts import layouts
from jtile.explorer.page import document
from jtile.explorer.page.document import embedded
from jtile.explorer.places import Places, run_lengths
from jtile.lowering import targets

ENDING = "</script><script>window.bad = 1</script><!--"


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 4))
def softmax(x, o):
    rows = x.tiles(4, x.shape[1])[jt.program_id(0), 0]
    e = jnp.exp(rows - rows.max(1, keepdims=True))  # </script><script>window.bad = 1</script><!--
    o.tiles(4, x.shape[1])[jt.program_id(0), 0] = e / e.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def view():
    return jt.view(softmax, jax.ShapeDtypeStruct((10, 16), jnp.float32), target="cpu", run=False)


def test_the_page_is_one_file(view):
    """It names no other file and no server, and no text of the record ends its script."""
    text = view.html
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)", text)
    assert "@STYLE@" not in text and "@DATA@" not in text and "@SCRIPT@" not in text
    assert text.count("</script>") == 2 and "window.bad" in text
    kind, data = embedded({"a": f"{ENDING}\u2028"})
    assert kind == "application/json"
    assert data == '{"a":"\\u003c/script>\\u003cscript>window.bad = 1\\u003c/script>\\u003c!--\\u2028"}'
    kind, data = embedded({"a": ENDING * (1 << 15)})
    assert kind == "application/gzip" and len(data) < 20_000 and "<" not in data
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded([float("nan")])


def test_others_may_read_the_file(view, tmp_path):
    """As the umask says, like any file that a program writes for its user."""
    view.save(tmp_path / "page.html")
    (tmp_path / "other").touch()
    assert (tmp_path / "page.html").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_notebooks_show_it_in_a_frame(view):
    shown = view._repr_html_()
    assert shown.startswith('<iframe srcdoc="') and shown.count('"') == 6 and "<script" not in shown
    assert repr(view) == "<View of softmax, softmax_vjp for cpu>"


@pytest.fixture(scope="module")
def browser():
    if reason := browsers.missing():
        pytest.skip(f"no browser: {reason}")
    with browsers.chromium() as browser:
        yield browser


def opened(browser, view, tmp_path, hash="", width=1440):
    path = tmp_path / "page.html"
    view.save(path)
    browser.size(width, 800)
    browser.open("about:blank")
    browser.open(f"{path.as_uri()}#{hash}")
    browser.until("return document.querySelector('#main').children.length")


def line_of(word):
    text = Path(__file__).read_text().splitlines()
    return next(k for k, line in enumerate(text, 1) if word in line)


def test_lines_are_linked(browser, view, tmp_path):
    """A click on a line of source lights the lines of the level that come from it, and the address keeps it."""
    opened(browser, view, tmp_path, "level=tile_ir_opt")
    assert browser.run("return window.bad === undefined")
    number = line_of("jnp.exp(rows")
    click = (
        f"[...document.querySelectorAll('.row')].find(r => r.querySelector('.no').textContent === '{number}').click()"
    )
    browser.run(click)
    lit = "return [...document.querySelectorAll('[aria-label=Level] .row.held')].map(r => r.textContent)"
    assert any(" = exp " in text for text in browser.run(lit))
    assert f"place=0%3A{number}" in browser.run("return location.hash")
    browser.type("]")
    assert browser.run("return document.querySelector('[aria-label=Levels] [aria-selected=true]').textContent") != ""
    assert browser.run(lit), "the next level has the line lit, too"


@pytest.mark.parametrize("width", [360, 1440])
def test_every_view_fits(browser, view, tmp_path, width):
    """No view of any kernel is wider than the window or raises an error."""
    opened(browser, view, tmp_path, width=width)
    browser.run("window.failed = []; window.addEventListener('error', e => window.failed.push(e.message))")
    for k in range(len(view.record.pieces)):
        for name in browser.run("return Object.keys(views)"):
            browser.run("state.kernel = arguments[0]; go(arguments[1])", k, name)
            assert browser.run("return document.documentElement.scrollWidth") == width, name
            assert browser.run("return document.querySelector('#main').textContent.length") > 20, name
            wide = "return [...document.querySelectorAll('.sheet, .sheet *')].filter(e => e.scrollWidth > innerWidth"
            wide += " && !e.closest('.scroll'))"  # tables that are wider may be scrolled by themselves
            assert browser.run(f"{wide}.length") == 0, name
            assert "[object" not in browser.run("return document.querySelector('#main').textContent"), name
    assert browser.run("return window.failed") == []


def test_long_texts_stay_quick(browser, view, tmp_path, monkeypatch):
    """Of 10,000 lines those in sight are in the document, and a scroll makes no more than those anew; their text is
    compressed."""
    (piece, *_), n = view.record.pieces, 10_000
    body = record.Text(
        "\n".join(f"  %{k} = add %{k - 1}, %c1 : i32" for k in range(n)), run_lengths([1 + k % 2 for k in range(n)])
    )
    level = record.Level("tile_ir_opt", "Long", "", True, body)
    changed = record.Piece(**{**vars(piece), "levels": [level]})
    monkeypatch.setattr(document, "LONG", 1 << 17)
    opened(browser, View(record.Record(**{**vars(view.record), "pieces": [changed]})), tmp_path)
    made = browser.run("""
      const list = document.querySelector('[aria-label=Level]'), changes = new MutationObserver(() => {}), made = [];
      changes.observe(list, { childList: true, subtree: true });
      for (let k = 0; k < 50; k++) {
        list.scrollTop = k * 4000;
        list.dispatchEvent(new Event('scroll'));
        made.push(changes.takeRecords().reduce((n, change) => n + change.addedNodes.length, 0));
      }
      return made;
    """)
    assert browser.run("return document.querySelectorAll('.row').length") < 300
    assert 0 < max(made) < 300


def test_layouts_are_drawn(browser, view, tmp_path):
    """The wavefronts that the page draws are as many as the record says; a choice of another access draws that."""
    found = layouts({"ttgir": links.plain(TTGIR)}, targets.resolve("cuda:sm_90"), Places())
    piece = record.Piece(**{**vars(view.record.pieces[0]), "layouts": found})
    for width in (360, 1440):
        opened(
            browser, View(record.Record(**{**vars(view.record), "pieces": [piece]})), tmp_path, "view=layouts", width
        )
        assert browser.run("return record.pieces[0].layouts.accesses.map(one => wavefronts(one).length)") == [
            one["wavefronts"] for one in found.accesses
        ]
        text = "return document.querySelector('#main').textContent"
        assert "8-fold conflict" in browser.run(text) and "It takes 8, and 1 without conflicts" in browser.run(text)
        browser.run("[...document.querySelectorAll('button.plain')].find(b => b.textContent === 'product').click()")
        assert "It takes 1, and 1 without conflicts" in browser.run(text)
        assert browser.run("return document.querySelectorAll('canvas.cellmap').length") == 4
        assert browser.run("return document.documentElement.scrollWidth") == width
