"""The thread of an engine, and what comes to it and from it: commands, tokens, errors.

The thread holds no reference to its `Engine`, so that an engine that nobody uses any more is collected, and its thread
ends.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator

from jtile._errors import EngineError, JtileError, QueueFullError

from .core import Core, Job
from .request import Completion, Request, Token

SWITCH = 5e-4  # seconds after which a thread that waits for Python's lock gets it
Wake = dict[asyncio.AbstractEventLoop, list[asyncio.Future]]


@contextlib.contextmanager
def responsive() -> Iterator[None]:
    """A block in which steps of engines are not held up by the rest of the process, for programs that are servers.

    The thread of an engine gets Python's lock from a busy event loop after half a millisecond, not after five, which is
    half of a step on a GPU. The garbage collector skips the objects that exist now, mostly JAX's programs; going
    through them takes some hundred milliseconds each time."""
    before = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


class Worker:
    """The thread of an engine, the only one that calls its core; every method may be called from any thread.

    Attributes:
      changed: a condition; whoever changes anything here holds it for a moment and notifies it. open: the number of
        requests that have not ended. closed: why the worker takes no more requests; None while it takes them.
    """

    def __init__(self, core: Core):
        self._core = core
        self.changed = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self.open = 0
        self.closed: str | None = None
        self._fresh: list[Mail] = []  # mail of clients that have something to be told
        self.thread = threading.Thread(target=self._run, name="jtile engine", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a thread that is in XLA when Python ends would abort the process

    def submit(self, request: Request, limit: int) -> Mail:
        """Begins a request, unless `limit` requests are open.

        Raises:
          QueueFullError: so many are open. EngineError: the worker is closed.
        """
        mail, core = Mail(self), self._core
        with self.changed:
            self._check_open()
            if self.open >= limit:
                raise QueueFullError(
                    f"{self.open} requests run and wait, and no more than {limit} may; try again later"
                )
            self.open += 1
            self.do(lambda: mail.begin(core, request))
        return mail

    def do(self, command: Callable[[], None]) -> None:
        """Runs a command on the thread, between two steps."""
        with self.changed:
            self._commands.append(command)
            self.changed.notify_all()

    def finish(self, command: Callable[[], None], what: str) -> None:
        """Runs a command on the thread, and waits until it has.

        Raises:
          EngineError: the worker is closed, or ends before it has done `what`.
        """
        done = threading.Event()

        def run() -> None:
            command()
            done.set()

        with self.changed:
            self._check_open()
            self.do(run)
        while not done.wait(1):
            if not self.thread.is_alive():
                raise EngineError(f"the engine ended before it {what}")

    def wait(self, seconds: float) -> None:
        """Waits until something changes, at most so many seconds."""
        with self.changed:
            self.changed.wait(seconds)

    def stop(self, drain: bool = False) -> None:
        """Takes no more requests, and ends the thread: with `drain` when all requests have their answers, else at once.
        It does not wait, since the garbage collector may call it, in any thread."""
        with self.changed:
            self.closed = self.closed or "the engine is closed"
            if not drain:
                self.do(lambda: [self._core.cancel(job) for job in self._core.jobs])
            self.changed.notify_all()

    def close(self, drain: bool = False) -> None:
        """Calls `stop`, and waits for the end of the thread."""
        self.stop(drain)
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _check_open(self) -> None:
        if self.closed is not None:
            raise EngineError(self.closed)

    def _run(self) -> None:
        try:
            while self._next_commands():
                self._core.step(self._woken)
                if self._core.idle:
                    self._woken()
        except Exception as error:  # from XLA or jtile: nobody else would report it
            with self.changed:
                self.closed = f"a step of the engine failed: {type(error).__name__}: {error}"
            failure = EngineError(self.closed)
            failure.__cause__ = error
            for command in self._take_commands():
                command()
            self._core.fail(failure)
        self._core.device.release()
        self._woken()
        atexit.unregister(self.close)

    def deliver(self, mail: Mail) -> None:
        """Notes, on the worker's thread, that something has come for a client, who is told of it by the next
        `_woken`."""
        self._fresh.append(mail)

    def _next_commands(self) -> bool:
        """Runs commands, and waits for some where there is nothing to do; False at the end."""
        with self.changed:
            while self._core.idle and not self._commands and self.closed is None:
                self.changed.wait()
        for command in self._take_commands():
            command()
        with self.changed:
            return not (self.closed is not None and self._core.idle and not self._commands)

    def _take_commands(self) -> list[Callable[[], None]]:
        with self.changed:
            commands, self._commands = self._commands, []
        return commands

    def _woken(self) -> None:
        """Wakes those who wait, since something has come: once a step for each event loop."""
        fresh, self._fresh = self._fresh, []
        wake: Wake = {}
        with self.changed:
            for mail in fresh:
                mail.tell(wake)
            self.changed.notify_all()
        for loop, waiters in wake.items():
            try:
                loop.call_soon_threadsafe(_resolve, waiters)
            except RuntimeError:  # the loop is closed, and nobody waits in it
                continue


def _resolve(waiters: list[asyncio.Future]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


class Mail:
    """What the engine has for one client. The worker holds it, and not the client's `Stream`, so that a stream that
    nobody reads any more is cancelled.

    Tokens need no lock, of which there would be two a token: the worker adds to `items`, and then looks whether the
    client waits; the client, which alone sets `_waiter`, says that it waits, and then looks at `items`. So one of them
    sees what the other did."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self.items: collections.deque[Token] = collections.deque()
        self.completion, self.error = Completion(), None
        self.ended = False  # set when all tokens are in `items`, and never unset
        self._end: tuple[JtileError | None] | None = None  # the error of an end that the client has not been told
        self._waiter: asyncio.Future | None = None  # what the client waits for, or did, if it is done
        self._job: Job | None = None
        self._gone = False
        self._noted = False  # whether the worker knows that the client is to be woken

    def begin(self, core: Core, request: Request) -> None:
        """Begins the request, on the thread of the worker."""
        self._job = core.submit(request, self._deliver)
        self.completion = self._job.completion
        if self._gone:
            core.cancel(self._job)

    def cancel(self, core: Core) -> None:
        """Cancels the request, on the thread of the worker."""
        self._gone = True
        if self._job is not None:
            core.cancel(self._job)

    def wait(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future:
        """A future that is set when something comes. What has come before this call may not set it."""
        self._waiter = waiter = loop.create_future()
        return waiter

    def _deliver(self, tokens: list[Token], error: JtileError | None) -> None:
        """Adds tokens, an error or the end, on the thread of the worker; `_woken` then tells all clients together."""
        if tokens:
            self.items.extend(tokens)
            waiter = self._waiter
            if waiter is not None and not self._noted and not waiter.done():
                self._noted = True
                self._worker.deliver(self)
        else:
            self._end = (error,)
            self._worker.deliver(self)

    def tell(self, wake: Wake) -> None:
        """Tells the client of the end, if it has come, and notes whom to wake. The worker's `changed` is held."""
        self._noted = False
        if self._end is not None:
            (self.error,), self._end = self._end, None
            self.ended = True
            self._worker.open -= 1
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            wake.setdefault(waiter.get_loop(), []).append(waiter)
