"""Requests whose answers have a form: making a grammar of a schema takes milliseconds, and with some schemas hours."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from .errors import BUSY, ApiError

AT_ONCE = 4  # grammars that are made at a time
SECONDS = 30.0  # that a request waits for a place, and then for its grammar
MESSAGE = "the schema of the answer takes more than {:.0f} s to compile; give a simpler one"


class Compilers:
    """Does work that may take for ever, a few pieces at a time.

    Nothing stops such work: what is given up goes on, and keeps its place from others of its kind. So it has threads of
    its own, whose end a server that stops does not wait for.
    """

    def __init__(self, at_once: int = AT_ONCE, seconds: float = SECONDS):
        self._free, self._seconds = at_once, seconds
        self._lock = threading.Lock()

    async def run[T](self, work: Callable[[], T]) -> T:
        """The result of `work()`, in a thread.

        Raises:
          ApiError: it takes too long (400), or no place was free for so long (429). What `work` raises.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._seconds
        while not self._take():
            if loop.time() > end:
                raise ApiError(429, "too many schemas are being compiled", BUSY, code="schemas_busy")
            await asyncio.sleep(0.02)
        ended, found = asyncio.Event(), []

        def go() -> None:
            try:
                found.append((work(), None))
            except BaseException as error:  # it is raised where the work is waited for
                found.append((None, error))
            finally:
                self._give_back()
            with contextlib.suppress(RuntimeError):  # the server has stopped, and nobody waits
                loop.call_soon_threadsafe(ended.set)

        try:
            threading.Thread(target=go, name="jtile grammar", daemon=True).start()
        except RuntimeError:  # the system has no thread
            self._give_back()
            raise
        try:
            # Counted from here on: a schema is not to blame for the time that others held all places.
            await asyncio.wait_for(ended.wait(), self._seconds)
        except TimeoutError:
            raise ApiError(400, MESSAGE.format(self._seconds), param="response_format") from None
        result, error = found[0]
        if error is not None:
            raise error
        return result

    def _take(self) -> bool:
        with self._lock:
            taken = self._free > 0
            self._free -= taken
            return taken

    def _give_back(self) -> None:
        with self._lock:
            self._free += 1
