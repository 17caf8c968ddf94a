"""Clients that go, do not read, or do not send: they leave nothing behind, and hold up no server that stops."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import numpy as np
import pytest
from serving_checks import idle, until

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'jtile[serve]'")
pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'jtile[serve]'")

from jtile.models.serving.http import endpoints, make_app

BODY = {"prompt": "abc", "max_tokens": 80, "temperature": 0, "ignore_eos": True}


def request_of(app, receive, send=None, path="/v1/completions"):
    """A POST of the application's own; returns its messages unless they go to `send`."""
    sent = []

    async def keep(message):
        sent.append(message)

    async def main():
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "headers": []}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
        await app(scope, receive, send or keep)
        return sent

    return main()


def leave(app, body: dict, after: int):
    """A client that goes when it has got so many messages of its answer."""

    async def main():
        sent, gone = [], asyncio.Event()
        parts = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) >= after:
                gone.set()
            await asyncio.sleep(0.002 * (after % 2))

        if after == 0:
            asyncio.get_running_loop().call_later(0.02, gone.set)
        await request_of(app, receive, send)

    return main()


def test_clients_that_go_at_any_moment(engine):
    """Beside others that stay, slow readers, and requests that are none; see `test_storm.py` for real connections."""
    rng, requests = np.random.default_rng(0), 36
    app = make_app(engine, "tiny")
    alone = engine.generate(["abc"], max_tokens=5, eos=None)[0].text

    async def stay():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=600) as client:
            response = await client.post("/v1/completions", json=BODY | {"max_tokens": 5})
            return response.json()["choices"][0]["text"] if response.status_code == 200 else response.status_code

    async def main():
        jobs = []
        for kind in rng.integers(0, 4, requests):
            broken = {"prompt": [1], "n": int(rng.integers(-3, 3)), "stream": bool(rng.integers(0, 2)), "max_tokens": 9}
            late = int(rng.integers(1, 9))
            jobs.append([(BODY | {"stream": True}, late), (BODY, 0), None, (broken, 3)][kind])
        results = []
        for i in range(0, len(jobs), 6):  # the queue is full now and then
            results += await asyncio.gather(*(leave(app, *job) if job else stay() for job in jobs[i : i + 6]))
        return [result for result in results if result is not None]

    results = asyncio.run(main())
    assert set(results) <= {alone, 429}
    assert results.count(alone) > requests // 10
    until(lambda: idle(engine))
    assert app.state.server.open == 0


@pytest.mark.parametrize(("stops", "status", "code"), [(False, 408, "request_timeout"), (True, 503, "stopping")])
def test_a_body_that_does_not_end(engine, monkeypatch, stops, status, code):
    """Its part is waited for, but not for ever, and not at all by a server that stops."""
    app = make_app(engine, "tiny")
    monkeypatch.setattr(endpoints, "PATIENCE", 1e6 if stops else 0.01)
    monkeypatch.setattr(endpoints, "TICK", 0.001)
    parts = [{"type": "http.request", "body": b'{"prompt": ', "more_body": True}]

    async def receive():
        if parts:
            return parts.pop()
        app.state.server.stopping = stops
        await asyncio.Event().wait()

    start, body = asyncio.run(request_of(app, receive))
    assert start["status"] == status and json.loads(body["body"])["error"]["code"] == code
    assert app.state.server.open == 0


def test_a_client_that_does_not_read_holds_up_no_stop(engine, monkeypatch):
    app = make_app(engine, "tiny")
    server, parts = app.state.server, [{"type": "http.request", "body": json.dumps(BODY).encode()}]

    async def receive():
        return parts.pop() if parts else await asyncio.Event().wait()

    async def main():
        reads = asyncio.Event()

        async def send(message):
            await reads.wait()

        request = asyncio.ensure_future(request_of(app, receive, send))
        assert not server.stuck
        while server.sending == 0:
            await asyncio.sleep(0.001)
        for patience, stuck in ((1e6, False), (-1.0, True)):
            monkeypatch.setattr(endpoints, "PATIENCE", patience)
            assert server.stuck is stuck
        reads.set()
        await request

    asyncio.run(main())
    assert (server.open, server.sending) == (0, 0)


def test_embeddings_of_a_client_that_has_gone(engine, monkeypatch):
    """The one under way is the last: others wait for these, and so does a server that stops."""
    app, begun, done, seen = make_app(engine, "tiny"), threading.Event(), threading.Event(), []

    def embed(_, ids):
        seen.append(ids)
        begun.set()
        done.wait()
        return np.ones(8)

    monkeypatch.setattr(type(engine.lm), "embed", embed)
    parts = [{"type": "http.request", "body": json.dumps({"input": [[1], [2], [3]]}).encode()}]

    async def receive():
        if not parts:
            await asyncio.to_thread(begun.wait)
            return {"type": "http.disconnect"}
        return parts.pop()

    async def main():
        sent = await request_of(app, receive, path="/v1/embeddings")
        done.set()
        while app.state.server.embedding.borrowed_tokens:
            await asyncio.sleep(0.001)
        return sent

    assert asyncio.run(main())[0]["status"] == 499
    assert (seen, app.state.server.open) == ([[1]], 0)
