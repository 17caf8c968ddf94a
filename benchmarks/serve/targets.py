"""The targets of a load: an engine in this process, servers in others, and a loop over batches that wait."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.serve.load import Answer, Call, Load
from jtile.models import Engine, LanguageModel


def of_engine(engine: Engine) -> Answer:
    """An engine in this process, called as programs call it."""

    async def answer(call: Call) -> AsyncIterator[int]:
        async for _ in engine.stream(call.prompt, max_tokens=call.count, eos=None):
            yield 1

    return answer


def of_batches(lm: LanguageModel, rows: int, load: Load) -> Answer:
    """A plain loop for requests of one length: takes up to `rows` that wait, fills the batch up to `rows`, and makes
    all their tokens before it takes others."""
    prompt, count = max(load.prompt.median, load.shared + 1), load.answer.median
    waiting: list[tuple[Call, asyncio.Queue]] = []
    locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}  # a load runs in an event loop of its own

    def batch(calls: list[Call], tell: Callable[[int], object]) -> None:
        ids = np.zeros((rows, prompt), np.int64)
        mask = np.zeros((rows, prompt), bool)
        mask[:, 0] = True
        for i, call in enumerate(calls):
            ids[i], mask[i] = call.prompt, True
        for step, _ in enumerate(lm.stream(ids, count, eos=None, attention_mask=mask)):
            tell(step)

    batch(load.calls(lm.config.vocab_size)[:1], lambda step: None)  # compiles

    async def take() -> None:
        loop = asyncio.get_running_loop()
        async with locks.setdefault(loop, asyncio.Lock()):
            taken, waiting[:] = waiting[:rows], waiting[rows:]
            say = lambda what: loop.call_soon_threadsafe(lambda: [queue.put_nowait(what) for _, queue in taken])
            if taken:  # else another call has taken this one into its batch
                try:
                    await asyncio.to_thread(batch, [one for one, _ in taken], say)
                except Exception as error:
                    say(error)

    async def answer(call: Call) -> AsyncIterator[int]:
        mine: asyncio.Queue = asyncio.Queue()
        waiting.append((call, mine))
        taking = asyncio.ensure_future(take())  # meanwhile tokens are read as they come
        for _ in range(call.count):
            if isinstance(found := await mine.get(), Exception):
                raise found
            yield 1
        await taking

    return answer


def of_server(url: str, spell: Callable[[list[int]], str], **more) -> Answer:
    """A server of OpenAI's interface. spell: the text of token ids; more: fields of the requests."""
    import httpx

    async def answer(call: Call) -> AsyncIterator[int]:
        body = {"prompt": spell(call.prompt), "max_tokens": call.count, "temperature": 0, "stream": True, **more}
        async with (
            httpx.AsyncClient(timeout=600, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code} {(await response.aread())[:100]!r}")
            made = 0
            async for line in response.aiter_lines():
                if line.startswith("data: {") and (json.loads(line[6:]).get("choices") or [{}])[0].get("text"):
                    made += 1
                    yield 1
            if 0 < made < call.count:  # some tokens have no text of their own
                yield call.count - made

    return answer


@contextlib.contextmanager
def server(command: list[str], ready: str, seconds: float = 300) -> Iterator[str]:
    """Runs a server of this machine; `{port}` in the command becomes a free one; `ready`: a path that answers 200 when
    the server is ready. Gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [part.format(port=port) for part in command]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        try:
            end = time.monotonic() + seconds
            while not _answers(url + ready):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    raise RuntimeError(f"{' '.join(command)} does not start: {said.read()[-300:]!r}")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def jtile_serve(rows: int, *more: str) -> list[str]:
    """The command of `jtile serve`."""
    return [sys.executable, "-m", "jtile.tools.cli", "serve", "--port", "{port}", "--rows", str(rows), *more]


def llama_cpp(path: Path, threads: int, context: int) -> list[str] | None:
    """The command of llama-cpp-python's server; None where it is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "fastapi", "sse_starlette")):
        return None
    sizes = ["--n_ctx", str(context), "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    # by default a new request breaks off the one that is being answered; with this it waits for it
    sizes += ["--interrupt_requests", "false"]
    return [sys.executable, "-m", "llama_cpp.server", "--model", str(path), "--port", "{port}", *sizes]
