"""Clients of every kind over real connections: those that stay and know the right answer, and those that do all that a
server has to bear."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import time
from collections.abc import Awaitable, Callable

import httpx
import numpy as np

ASKED = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
LONG = ASKED | {"max_tokens": 80}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30}
NO_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
# path, body, and what the server answers
WRONG = (
    ("/v1/completions", b'{"prompt": ', 400),
    ("/v1/completions", b'{"prompt": "\xff\xfe"}', 400),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 400),
    ("/v1/completions", b"[" * 3000, 400),
    ("/v1/completions", b"\x00" * 100, 400),
    ("/v1/completions", b"x" * 30_000, 413),
    ("/v1/completions", ASKED | {"prompt": "a" * 500}, 400),
    ("/v1/completions", ASKED | {"prompt": {"a": []}}, 400),
    ("/v1/completions", ASKED | {"prompt": [10**30]}, 400),
    ("/v1/completions", ASKED | {"n": 10**9}, 400),
    ("/v1/completions", ASKED | {"n": 100}, 400),
    ("/v1/completions", ASKED | {"n": -1}, 400),
    ("/v1/completions", ASKED | {"max_tokens": "5"}, 400),
    ("/v1/completions", ASKED | {"temperature": -1}, 400),
    ("/v1/completions", ASKED | {"stop": ["a"] * 100}, 400),
    ("/v1/completions", ASKED | {"model": "other"}, 404),
    ("/v1/chat/completions", CHAT | {"response_format": NO_FORM}, 400),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user"}] * 2000}, 413),
    ("/v1/chat/completions", {"messages": "a"}, 400),
    ("/v1/embeddings", {"input": [[]]}, 400),
    ("/detokenize", {"tokens": [-5]}, 400),
    ("/v1/nothing", {}, 404),
)
Kind = Callable[["Storm", httpx.AsyncClient, np.random.Generator], Awaitable[str]]


class Storm:
    """On the server at `url`; alone: the text of `ASKED`. outcomes: how often each kind of client saw what."""

    def __init__(self, url: str, alone: str):
        self._url, self._alone = url, alone
        host, _, port = url.removeprefix("http://").partition(":")
        self._place = host, int(port)
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()

    async def requests(
        self, count: int, at_once: int = 24, seed: int = 0, seconds: float = 0.0
    ) -> collections.Counter[str]:
        """So many clients of random kinds, which come evenly within so many seconds; how many there were of each.

        Raises:
          AssertionError: one of them saw what it must not see.
        """
        rng = np.random.default_rng(seed)
        kinds = list(KINDS.items())
        drawn = rng.permutation(np.arange(count) % len(kinds))
        gate = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=self._url, timeout=600, trust_env=False) as client:

            async def one(i: int) -> None:
                name, kind = kinds[drawn[i]]
                await asyncio.sleep(seconds * i / count)
                async with gate:
                    self.outcomes[name, await kind(self, client, np.random.default_rng((seed, i)))] += 1

            await asyncio.gather(*map(one, range(count)))
        return collections.Counter(kinds[i][0] for i in drawn)

    async def for_seconds(self, seconds: float, seed: int = 0, clients: int | None = None) -> int:
        """Goes on for so long, with so many clients, or as many as find time; returns how many there were."""
        if clients is not None:
            await self.requests(clients, seed=seed, seconds=seconds)
            return clients
        end, turns = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            await self.requests(200, seed=seed + turns)
            turns += 1
        return 200 * turns

    # -- kinds of clients: each returns what it saw --------------------------------------------------------------------

    async def stays(self, client: httpx.AsyncClient, rng: np.random.Generator) -> str:
        """One that waits for its answer, in a stream or whole, of one choice or several; where the server has no room
        it comes again until it has. How often that is depends on how busy the machine is, the answer does not."""
        n = int(rng.integers(1, 4))
        body = ASKED | {"n": n, "stream": bool(rng.integers(0, 2))}
        while (response := await client.post("/v1/completions", json=body)).status_code == 429:
            self.outcomes["stays", "429"] += 1
            await asyncio.sleep(rng.random() / 20)
        assert response.status_code == 200, response.text
        texts = [""] * n
        if response.headers["content-type"].startswith("text/event-stream"):
            lines = [line[6:] for line in response.text.split("\n\n") if line]
            assert lines.pop() == "[DONE]"
            for choice in (json.loads(line)["choices"][0] for line in lines):
                texts[choice["index"]] += choice["text"]
        else:
            texts = [choice["text"] for choice in response.json()["choices"]]
        assert texts == [self._alone] * n
        return "right"

    async def has_a_form(self, client: httpx.AsyncClient, rng: np.random.Generator) -> str:
        """One whose answer is of a schema."""
        response = await client.post("/v1/chat/completions", json=CHAT | {"response_format": FORM})
        if response.status_code == 429:
            return "429"
        assert json.loads(response.json()["choices"][0]["message"]["content"]) in ("yes", "no")
        return "right"

    async def leaves(self, client: httpx.AsyncClient, rng: np.random.Generator) -> str:
        """One that goes in the middle of a stream."""
        async with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            if response.status_code == 429:
                return "429"
            left = int(rng.integers(0, 6))
            async for _ in response.aiter_lines():
                if left == 0:
                    break
                left -= 1
        return "gone"

    async def hangs_up(self, client: httpx.AsyncClient, rng: np.random.Generator) -> str:
        """One that breaks the connection off before its answer, or before its request is whole."""
        body = json.dumps(LONG).encode()
        whole = bool(rng.integers(0, 2))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        await self._raw(
            head + str(len(body)).encode() + b"\r\n\r\n" + (body if whole else body[:10]), rng.random() / 50
        )
        return "gone"

    async def speaks_no_http(self, client: httpx.AsyncClient, rng: np.random.Generator) -> str:
        await self._raw(bytes(rng.integers(0, 256, 200).tolist()) + b"\r\n\r\n", rng.random() / 50)
        return "gone"

    async def reads_slowly(self, client: httpx.AsyncClient, rng: np.random.Generator) -> str:
        async with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            if response.status_code == 429:
                return "429"
            text = ""
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    await asyncio.sleep(0.001)
            assert text.startswith(self._alone)
        return "right"

    async def asks_wrongly(self, client: httpx.AsyncClient, rng: np.random.Generator) -> str:
        """Requests that are none: each has its error, in OpenAI's form."""
        path, body, status = WRONG[rng.integers(0, len(WRONG))]
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        response = await client.post(path, **sent)
        assert response.status_code == status, (path, body, response.text)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return str(status)

    async def _raw(self, data: bytes, seconds: float) -> None:
        _, writer = await asyncio.open_connection(*self._place)
        with contextlib.suppress(OSError):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(seconds)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        Storm.stays, Storm.stays, Storm.has_a_form, Storm.leaves, Storm.hangs_up, Storm.speaks_no_http,
        Storm.reads_slowly, Storm.asks_wrongly,
    )
}  # fmt: skip
