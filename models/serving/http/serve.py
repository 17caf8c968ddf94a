"""`jtile serve`: loads a model, compiles its programs, and answers until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from jtile._errors import JtileError, ModelError

from ...console import FAILURE, SUCCESS, keep_programs
from ...load import load_over
from ..engine import Engine
from ..worker import responsive
from .app import LOG, make_app
from .endpoints import Server

CLOSING = 5  # seconds for connections to close when all answers have been sent
TURNS = 8  # of the event loop, in which a request that lies in a socket, also one that has to be accepted, is taken


class Graceful(uvicorn.Server):
    """A server that ends gracefully: after the first signal new requests get 503, and it ends when those under way have
    their answers, or when nobody reads these any more; after the second one it ends at once."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self._server = server

    def handle_exit(self, sig: int, frame) -> None:
        if self._server.stopping:
            super().handle_exit(sig, frame)
            return
        self._server.stopping = True
        LOG.info('{"event": "stopping", "open": %d}', self._server.open)

    async def on_tick(self, counter: int) -> bool:
        done = self._server.stopping and (await self._quiet() or self._server.stuck)
        return await super().on_tick(counter) or done

    async def _quiet(self) -> bool:
        """Whether no request is under way, nor in a socket: connections that are closed with one in them are reset,
        where its client should be told that the server stops."""
        came = self._server.came
        for _ in range(TURNS):
            if self._server.open:
                return False
            await asyncio.sleep(0)
        return self._server.open == 0 and self._server.came == came


def serve(
    model: str | None,
    host: str,
    port: int,
    name: str | None,
    api_keys: Sequence[str],
    origins: Sequence[str],
    requests_per_minute: int | None,
    cache_dir: str,
    load_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> int:
    """See `run_serve`."""
    keep_programs(cache_dir)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("jax", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    why = _unavailable(host, port)
    if why is not None:  # said before the model is loaded and compiled, not behind it
        print(
            f"jtile: port {port} of {host} cannot be used: {why}; give another one with --port, or --host",
            file=sys.stderr,
        )
        return FAILURE
    try:
        lm = load_over(path=model, **load_options)
        with _progress() as progress:
            engine = Engine(lm, compile_ahead=True, progress=progress, **engine_options)
        with engine, responsive():
            name = name or Path(lm.source or "model").stem
            if name in engine.settings.adapters:
                raise ModelError(f"the model and an adapter are both called {name!r}; give the model another --name")
            app = make_app(engine, name, api_keys, origins, requests_per_minute=requests_per_minute)
            print(f"jtile: {name} on http://{host}:{port}/v1 (Ctrl-C stops)", file=sys.stderr)
            config = uvicorn.Config(
                app, host=host, port=port, access_log=False, log_level="warning", timeout_graceful_shutdown=CLOSING
            )
            server = Graceful(config, app.state.server)
            server.run()
            return SUCCESS if server.started else FAILURE
    except JtileError as error:
        print(f"jtile: {error}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:  # uvicorn raises it again when it has ended
        return SUCCESS


def _unavailable(host: str, port: int) -> str | None:
    """Why a server cannot listen there, None where nothing is known against it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio does
            one.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None


class _progress:  # noqa: N801
    """A progress bar for `Engine`'s `progress`; it writes nothing where there is no terminal."""

    def __enter__(self) -> Callable[[int, int], None] | None:
        if not sys.stderr.isatty():
            self._bar = None
            return None
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True))
        self._bar.start()
        task = self._bar.add_task("compiling", total=None)
        return lambda done, total: self._bar and self._bar.update(task, completed=done, total=total)

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()
