"""Requests whose answers have a form: making a grammar of a schema takes milliseconds, and with some schemas hours."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .errors import BUSY, ApiError

AT_ONCE = 4  # grammars that are made at a time
SECONDS = 30.0  # that a request waits for a place, and then for its grammar
KNOWN = 1024  # grammars that are remembered to have an end
PROGRAM = Path(__file__).with_name("try_grammar.py")
MESSAGE = "the schema of the answer takes more than {:.0f} s, or too much memory, to compile; give a simpler one"


class Compilers:
    """Does work that may take for ever, a few pieces at a time.

    Nothing stops work of this process: what is given up goes on, and keeps its place from others of its kind. So it has
    threads of its own, whose end a server that stops does not wait for; and grammars are compiled here only if another
    process, which can be ended, has done so before.
    """

    def __init__(self, at_once: int = AT_ONCE, seconds: float = SECONDS):
        self._free, self._seconds = at_once, seconds
        self._lock = threading.Lock()
        # By their digests, for the texts may be 256 KB each; the last ones asked for come last.
        self._known: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def prove(self, grammar: str) -> None:
        """Returns if it does not take too long to compile a grammar, right or wrong, given in llguidance's own form.

        Raises:
          ApiError: it does (400).
        """
        if self._knows(grammar):
            return
        command = [sys.executable, "-P", str(PROGRAM), str(math.ceil(self._seconds))]
        try:
            ended = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=self._seconds)
        except subprocess.TimeoutExpired:
            raise self._too_long() from None
        if ended.returncode < 0:  # by the system: it has used up its time, or the memory
            raise self._too_long()
        with self._lock:
            self._known[_digest(grammar)] = None
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)

    def _knows(self, grammar: str) -> bool:
        """Whether a grammar was proven and is remembered; it is for longer then."""
        key = _digest(grammar)
        with self._lock:
            known = key in self._known
            if known:
                self._known.move_to_end(key)
        return known

    def _too_long(self) -> ApiError:
        return ApiError(400, MESSAGE.format(self._seconds), param="response_format")

    async def run[T](self, work: Callable[[], T], grammar: str) -> T:
        """The result of `work()`, which compiles a grammar, in a thread; where the grammar is known, at once.

        Raises:
          ApiError: it takes too long (400), or no place was free for so long (429). What `work` raises.
        """
        loop, placed = asyncio.get_running_loop(), not self._knows(grammar)
        if placed:
            await self._place()
        ended, found = asyncio.Event(), []

        def go() -> None:
            try:
                self.prove(grammar)
                found.append((work(), None))
            except BaseException as error:  # it is raised where the work is waited for
                found.append((None, error))
            finally:
                self._give_back(placed)
            with contextlib.suppress(RuntimeError):  # the server has stopped, and nobody waits
                loop.call_soon_threadsafe(ended.set)

        try:
            threading.Thread(target=go, name="jtile grammar", daemon=True).start()
        except RuntimeError:  # the system has no thread
            self._give_back(placed)
            raise
        try:
            # Counted from here on: a schema is not to blame for the time that others held all places.
            await asyncio.wait_for(ended.wait(), self._seconds)
        except TimeoutError:
            raise self._too_long() from None
        result, error = found[0]
        if error is not None:
            raise error
        return result

    async def _place(self) -> None:
        """Takes one of the places, and waits for it if need be.

        Raises:
          ApiError: none has become free for too long (429).
        """
        end = time.monotonic() + self._seconds
        while not self._take():
            if time.monotonic() > end:
                raise ApiError(429, "too many schemas are being compiled", BUSY, code="schemas_busy")
            await asyncio.sleep(0.02)

    def _take(self) -> bool:
        with self._lock:
            taken = self._free > 0
            self._free -= taken
            return taken

    def _give_back(self, taken: bool = True) -> None:
        with self._lock:
            self._free += taken


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
