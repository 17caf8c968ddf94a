"""What tests of engines and servers wait for."""

from __future__ import annotations

import time
from collections.abc import Callable

from jtile.models import Engine


def until(true: Callable[[], object], seconds: float = 600) -> None:
    """Waits until something is true. The limit only ends a hang: a busy machine takes what it takes.

    Raises:
      AssertionError: it is not in time.
    """
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def idle(engine: Engine) -> bool:
    """Whether an engine has nothing to do, and no page of a request."""
    stats = engine.stats()
    return not (stats["requests_running"] or stats["requests_waiting"] or stats["pages_in_use"])
