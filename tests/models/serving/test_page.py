"""The page at `/`: what is sent, and what it does in a real browser."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import browser as browsers
import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'jtile[serve]'")
pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'jtile[serve]'")

from serving_checks import until
from starlette.testclient import TestClient

from jtile.models.serving.http import make_app
from jtile.models.serving.http.answers import Answer

HOSTILE = """<script>window.bad = 1</script><img src=x onerror="window.bad = 2"> **bold** [a](javascript:window.bad=3)
[b](https://example.com/"onmouseover="window.bad=4") <b>tag</b>

```html
<svg onload="window.bad = 5">
```
| <i>x</i> | y |
|---|---|
| `<u>` | 2 |

- one
  1. in it

3. another list
"""


def test_files_of_the_page(engine):
    """They take no key, name no other server, and nothing else lies there."""
    client = TestClient(make_app(engine, "tiny", api_keys=["k"]))
    index = client.get("/")
    assert index.status_code == 200
    assert index.headers["content-type"].startswith("text/html")
    policy = index.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "http" not in index.text
    for name in ("app.js", "style.css", "markdown.js", "icon.svg"):
        assert client.get(f"/page/{name}").headers["content-security-policy"] == policy
    known = {"if-none-match": client.get("/page/app.js").headers["etag"]}
    assert client.get("/page/app.js", headers=known).status_code == 304
    for path in ("/page/", "/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py"):
        assert client.get(path).status_code in (401, 404)
    assert client.get("/v1/models").status_code == 401


@pytest.fixture(scope="module")
def browser():
    if reason := browsers.missing():
        pytest.skip(f"no browser: {reason}")
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(engine, started):
    """The address of a page whose server asks for a key."""
    server, url, thread = started(make_app(engine, "tiny", api_keys=["key"]))
    yield url
    server.handle_exit(signal.SIGTERM, None)
    thread.join(600)


def enter(browser, page: str, width: int = 1280, **settings) -> None:
    """Opens the page as one who knows the key."""
    browser.size(width, 740)
    browser.open(page)
    keep = "localStorage.clear(); sessionStorage.setItem('jtile.key', '\"key\"');"
    browser.run(keep + "localStorage.setItem('jtile.settings', JSON.stringify(arguments[0]))", settings)
    browser.open(page)
    browser.until("return document.querySelector('#model').value === 'tiny'")


ENDED = "return document.querySelector('#send').textContent === 'Send' && document.querySelector('.assistant .stats')"


def test_a_chat(browser, page, engine):
    """The key is asked for; Enter sends, Shift+Enter does not; the answer comes in pieces and is the model's; the next
    message goes on with it, and a new start of the page has it still."""
    browser.size(1280, 740)
    browser.open(page)
    browser.until("return document.querySelector('#settings').open")
    browser.until("return document.activeElement.name === 'key'")
    assert "no API key" in browser.run("return document.querySelector('#key-error').textContent")
    browser.type("key\ue007")
    browser.until("return document.querySelector('#model').value === 'tiny' && document.activeElement.id === 'text'")
    enter(browser, page, temperature="0", max_tokens="12")
    browser.type("Hi")
    browser.type("\ue007", shift=True)
    browser.type("you\ue007")
    browser.until(ENDED)
    sent = "[user]Hi\nyou\n[assistant]"
    (answer,) = engine.generate([sent], max_tokens=12)
    shown = "return JSON.parse(localStorage.getItem(Object.keys(localStorage).find(k => k.startsWith('jtile.chat.'))))"
    messages = browser.run(shown)["messages"]
    assert [m["content"] for m in messages] == ["Hi\nyou", answer.text]
    stats = browser.run("return document.querySelector('.assistant .stats').textContent")
    assert stats.startswith("12 tokens · ") and "cut off: length" in stats and "tokens/s" in stats
    browser.open(page)
    browser.until("return document.querySelector('#chats .open').textContent === 'Hi'")
    browser.run("document.querySelector('#chats .open').click()")
    assert browser.run("return document.querySelectorAll('.message').length") == 2


def test_stopping_an_answer(browser, page, engine, monkeypatch):
    """Escape ends the request at the server; what there is of the answer stays."""
    step, turns, stopped = engine._core.step, itertools.count(), threading.Event()
    cancelled = engine.stats()["requests_cancelled_total"]

    def slowly(*of):
        """Six tokens at once, so that the browser sees some; the others when it has stopped."""
        if next(turns) >= 6:
            stopped.wait(600)
            time.sleep(0.1)
        return step(*of)

    monkeypatch.setattr(engine._core, "step", slowly)
    enter(browser, page, temperature="0", logprobs=True)
    browser.type("a\ue007")
    browser.until("return document.querySelectorAll('.token').length > 3")
    assert browser.run("return document.querySelector('#send').textContent") == "Stop"
    browser.type("\ue00c")
    browser.until(ENDED)
    stopped.set()
    assert "stopped" in browser.run("return document.querySelector('.assistant .stats').textContent")
    count = browser.run("return document.querySelectorAll('.token').length")
    assert 3 < count < 70
    browser.run("document.querySelector('.token').focus()")
    assert browser.run("return document.querySelectorAll('#tip .row').length") >= 5
    assert "%" in browser.run("return document.querySelector('#tip .chosen').textContent")
    until(lambda: engine.stats()["requests_cancelled_total"] == cancelled + 1)


def test_a_models_text_does_nothing(browser, page, monkeypatch):
    """No script, no handler, no element that its text names; on the width of a phone nothing is wider than that."""
    said = []

    def piece(self, i, token):
        said.append(token)
        return self._piece(i, self._text(HOSTILE + "x" * 200), None, None) if len(said) == 1 else None

    monkeypatch.setattr(Answer, "piece", piece)
    enter(browser, page, width=360, temperature="0", max_tokens="4")
    browser.type("go\ue007")
    browser.until(ENDED)
    assert browser.run("return window.bad === undefined")
    body = "document.querySelector('.assistant .body')"
    assert browser.run(f"return {body}.querySelectorAll('script, img, svg, b, i, u').length") == 0
    assert browser.run(
        f"return [...{body}.querySelectorAll('*')].every(e => !/^on/.test([...e.attributes].map(a => a.name).join()))"
    )
    text = browser.run(f"return {body}.textContent")
    assert "<script>window.bad = 1</script><img src=x" in text and '<svg onload="window.bad = 5">' in text
    assert browser.run(f"return [...{body}.querySelectorAll('a')].map(a => a.protocol)") in ([], ["https:"])
    assert browser.run(f"return {body}.querySelector('strong').textContent") == "bold"
    lists = f"return [...{body}.children].filter(e => /[OU]L/.test(e.tagName)).map(e => e.start ?? e.innerText)"
    assert browser.run(lists) == ["one\nin it", 3]
    for what in ("settings-open", "side-open"):
        widths = "return [document.documentElement.scrollWidth, document.querySelector('#log').scrollWidth]"
        assert browser.run(widths) == [360, 360]
        browser.run(f"document.querySelector('#{what}').click()")
        assert browser.run("return document.documentElement.scrollWidth") == 360
        browser.run("document.querySelector('#settings').close()")


def test_what_a_server_refuses_is_shown(browser, page):
    enter(browser, page, max_tokens="4")
    browser.run("document.querySelector('#text').value = 'a'.repeat(200)")
    browser.type("\ue007")
    error = browser.until("return document.querySelector('.assistant .error')?.textContent")
    assert "prompt" in error and "tokens" in error
