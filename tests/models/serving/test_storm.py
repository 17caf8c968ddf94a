"""Servers under all that clients do, over real connections: nothing is left behind, and a server that is told to stop
loses no request that it has taken."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from serving_checks import idle, until

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'jtile[serve]'")
pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'jtile[serve]'")

from server_storm import ASKED, KINDS, Storm

from jtile.models.serving.core import Job
from jtile.models.serving.engine import Stream
from jtile.models.serving.http import make_app
from jtile.models.serving.scheduler import Sequence
from jtile.models.serving.worker import Mail


@pytest.fixture
def server(engine, started):
    """A server with small limits, and its address."""
    server, url, thread = started(make_app(engine, "tiny", body_limit=20_000))
    yield server, url
    server.handle_exit(signal.SIGTERM, None)
    thread.join(600)
    assert not thread.is_alive()


def left(kinds=(Job, Mail, Sequence, Stream)) -> list:
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, kinds)]


def resident() -> int:
    """Bytes of this process that are in memory and in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def check_nothing_is_left(engine, server) -> None:
    until(lambda: idle(engine) and server._server.open == 0)
    scheduler = engine._core.scheduler
    assert engine._worker.open == 0 and not engine._core.jobs and not scheduler.running and not scheduler.waiting
    assert scheduler.pool.available == scheduler.pool.count
    assert len(scheduler._slots) == scheduler.rows
    assert not left()


@pytest.mark.early
@pytest.mark.parametrize("clients", [48, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_storm_leaves_nothing_behind(engine, server, clients):
    """Every kind of client; all that stay get the right answer."""
    running, url = server
    alone = engine.generate(["abc"], max_tokens=5, eos=None)[0].text
    storm = Storm(url, alone)
    came = asyncio.run(storm.requests(clients))
    assert set(came) == {name for name, _ in storm.outcomes} == set(KINDS)
    assert storm.outcomes["stays", "right"] == came["stays"]
    check_nothing_is_left(engine, running)
    assert httpx.post(f"{url}/v1/completions", json=ASKED, timeout=600).json()["choices"][0]["text"] == alone


@pytest.mark.slow
def test_a_soak(engine, server, request):
    """Twenty minutes of as many clients as find time (SOAK_SECONDS, SOAK_CLIENTS: so many clients within that time; see
    `make soak`): the memory of the process is that of its first tenth."""
    running, url = server
    gc.enable()  # as in a server; the tests do without
    request.addfinalizer(gc.disable)
    seconds, clients = float(os.environ.get("SOAK_SECONDS", "1200")), os.environ.get("SOAK_CLIENTS")
    few, many = (None, None) if clients is None else (int(clients) // 10, int(clients) - int(clients) // 10)
    storm = Storm(url, engine.generate(["abc"], max_tokens=5, eos=None)[0].text)
    asyncio.run(storm.for_seconds(seconds / 10, clients=few))
    check_nothing_is_left(engine, running)
    before = resident()
    count = asyncio.run(storm.for_seconds(0.9 * seconds, seed=1_000_000, clients=many))
    check_nothing_is_left(engine, running)
    grown = resident() - before
    print(f"{count} clients, {grown / 2**20:.1f} MiB more")
    assert grown < 32 << 20  # of 60,000 clients in twenty minutes 500 bytes each


async def under_load(url: str, clients: int, stop, at: int) -> list[tuple[int, list]]:
    """(status, finish reasons) of clients that all ask at once; `stop()` is called when so many have their first
    tokens, and the last two ask after that. Status 0: the connection was refused, or closed before any answer: a client
    that sends on a kept connection while the server closes it has not been heard."""
    begun, stopped = 0, asyncio.Event()

    async def one(client: httpx.AsyncClient, i: int) -> tuple[int, list]:
        nonlocal begun
        await (asyncio.sleep(0.01 * i) if i < clients - 2 else asyncio.wait_for(stopped.wait(), 600))
        body = ASKED | {"max_tokens": 60, "stream": True}
        status, reasons, first = 0, [], True
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                status = response.status_code
                async for line in response.aiter_lines():
                    if status == 200 and line.startswith("data: {"):
                        reasons.append(json.loads(line[6:])["choices"][0]["finish_reason"])
                    if first and reasons:
                        first, begun = False, begun + 1
                        if begun == at:
                            stop()
                            stopped.set()
                return status, reasons[-1:]
        except httpx.TransportError:
            if status:
                raise
            return 0, []

    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        return await asyncio.gather(*(one(client, i) for i in range(clients)))


def check_that_none_is_lost(seen: list[tuple[int, list]], at_least: int) -> None:
    """Each got all of its answer, or was refused at once."""
    assert all(reasons == (["length"] if status == 200 else []) for status, reasons in seen), seen
    assert {status for status, _ in seen} <= {200, 429, 503, 0}
    assert sum(status == 200 for status, _ in seen) >= at_least


@pytest.mark.parametrize("kept", [True, False], ids=["kept connection", "new connection"])
def test_what_lies_in_a_socket_is_answered_before_the_end(engine, started, kept):
    """A server that has nothing to do any more and was held up looks whether requests have come meanwhile, before it
    closes their connections."""
    server, url, thread = started(make_app(engine, "tiny"))
    host, held, go = url.removeprefix("http://"), threading.Event(), threading.Event()

    def hold():
        held.set()
        go.wait(600)

    with contextlib.closing(http.client.HTTPConnection(host, timeout=600)) as connection:
        if kept:
            connection.request("GET", "/health")
            assert connection.getresponse().read()
        server.servers[0].get_loop().call_soon_threadsafe(hold)
        assert held.wait(600)
        server.handle_exit(signal.SIGTERM, None)
        connection.request("POST", "/v1/completions", json.dumps(ASKED))
        time.sleep(0.3)  # the server's next look at its state is overdue
        go.set()
        with connection.getresponse() as response:
            assert (response.status, json.load(response)["error"]["code"]) == (503, "stopping")
    thread.join(600)
    assert not thread.is_alive()


def test_a_stop_under_load_loses_no_request(engine, started, monkeypatch):
    step = engine._core.step
    monkeypatch.setattr(engine._core, "step", lambda *of: (time.sleep(0.002), step(*of)))
    server, url, thread = started(make_app(engine, "tiny"))
    done = engine.stats()
    seen = asyncio.run(under_load(url, 16, lambda: server.handle_exit(signal.SIGTERM, None), 3))
    check_that_none_is_lost(seen, 3)
    assert any(status in (0, 503) for status, _ in seen)
    thread.join(600)
    assert not thread.is_alive()
    stats = engine.stats()
    finished = sum(status == 200 for status, _ in seen)
    assert stats["requests_length_total"] - done["requests_length_total"] == finished
    assert stats["requests_cancelled_total"] == done["requests_cancelled_total"]


@pytest.mark.slow
def test_kill_loses_no_request_of_a_process(write_gguf, tmp_path, subprocess_env):
    """SIGTERM, as `kill` sends it, to `jtile serve`."""
    path = write_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "jtile.tools.cli", "serve", str(path), "--port", "8765", "--max-length", "96"]
    process = subprocess.Popen(command, env=subprocess_env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "on http" in line).split(" on ")[1].split("/v1")[0]

        def answers() -> bool:
            try:
                return httpx.get(f"{url}/health", timeout=600).status_code == 200
            except httpx.TransportError:
                return False

        until(answers)
        seen = asyncio.run(under_load(url, 50, process.terminate, 5))
        check_that_none_is_lost(seen, 5)
        assert process.wait(600) == 0
        log = [json.loads(line) for line in process.communicate()[1].splitlines() if line.startswith('{"method"')]
        taken = [line["status"] for line in log if line["path"] == "/v1/completions"]
        assert taken.count(200) == sum(status == 200 for status, _ in seen), "all that it took have their answers"
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
