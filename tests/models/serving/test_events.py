"""Events of a stream: which tokens come together."""

from __future__ import annotations

import asyncio

import pytest

from jtile.models.serving.request import Completion, Token

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'jtile[serve]'")

from jtile.models.serving.http import make_app
from jtile.models.serving.http.schema import CompletionBody

TOKENS = 200


class Busy:
    """A stream that gets a token each time that the event loop has looked after everything."""

    def __init__(self):
        self.made, self.items, self.completion = 0, [], Completion()

    @property
    def more(self) -> bool:
        return bool(self.items)

    async def __anext__(self) -> Token:
        while not self.items:
            if self.made == TOKENS:
                raise StopAsyncIteration
            await asyncio.sleep(0)
        return self.items.pop(0)

    def __aiter__(self) -> Busy:
        return self

    def make(self) -> None:
        self.made += 1
        self.items.append(Token(1, str(self.made % 10), None, ()))
        if self.made < TOKENS:
            asyncio.get_running_loop().call_soon(self.make)


@pytest.mark.parametrize("n", [1, 3])
def test_no_stream_falls_behind(engine, n):
    """Where a token is there whenever the event loop asks: what has come is sent, in order, and not at the end."""
    server = make_app(engine, "tiny").state.server

    async def read() -> list[dict]:
        streams = [Busy() for _ in range(n)]
        for stream in streams:
            asyncio.get_running_loop().call_soon(stream.make)
        answer = server._answer(CompletionBody(prompt="a"), "text_completion", False)
        return [event["choices"][0] async for event in server._events(streams, answer, False, n)]

    choices = asyncio.run(read())
    for i in range(n):
        texts = [choice["text"] for choice in choices if choice["index"] == i]
        assert "".join(texts) == "1234567890" * (TOKENS // 10) and max(map(len, texts)) < 20
