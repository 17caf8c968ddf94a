"""What a call of a tunable kernel gets: the entry for its types, a search where one is asked for, or the defaults."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jtile._config import current
from jtile._errors import CacheWarning
from jtile.lowering.targets import check_capabilities
from jtile.primitive.lowering import compile_piece, pieces_of
from jtile.tune import device, resolve
from jtile.tune.space import Call, recorder
from jtile.tune.store import Entry, store


def choose(kernel: Any, tree: Any, leaves: Sequence[Any], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """The kernel with everything fixed, for a call with arguments of these types."""
    call = Call(kernel, tree, leaves, given, defaults)
    found = recorder.get()
    if found is not None and call.name:
        found.calls.setdefault(call.name, call)
    entry = lookup(call)
    if entry is None and found is None and call.name and _wanted(kernel):
        entry = _search(call)
    if entry is not None:
        try:
            bound = call.bound(entry.config)
            _check(bound, entry)
            return resolve.tuned(call, bound, entry)
        except Exception as e:  # the entry is outdated: what the kernel calls, or the compiler, has changed since
            why = getattr(e, "message", f"{type(e).__name__}: {e}")
            message = f"the tuner's entry {call.name!r} does not fit the kernel any more, defaults are taken: {why}"
            warnings.warn(message, CacheWarning, stacklevel=2)
    return call.bound({})


def lookup(call: Call) -> Entry | None:
    """The entry of a call on the device at hand; one with names or types of values that today's space does not have is
    none."""
    if not call.name:
        return None
    entry = store.lookup(device.kind(), call.name)
    if entry is None:
        return None
    return entry if call.has(entry.config) else None


def _check(bound: Any, entry: Entry) -> None:
    """Raises UnsupportedError for a choice that the device's target refuses. One of `num_stages` is compiled to see it:
    it is never lowered where memory is short, and how much is needed depends on the compiler."""
    target = device.target()
    for piece, kernel in enumerate(pieces_of(bound.program).kernels):
        check_capabilities(kernel, target)
        if "num_stages" in entry.config and "warps" in target.features:
            compile_piece(bound.program, piece, target)


def _wanted(kernel: Any) -> bool:
    options = current()
    interpreted = options.interpret if kernel._options.interpret is None else kernel._options.interpret
    return options.autotune and not interpreted and device.is_here() and not _busy.held()


def _search(call: Call) -> Entry | None:
    """Search in a thread of its own: what runs there is not part of a trace that this call may stand in."""
    from jtile.tune.measure import in_thread
    from jtile.tune.search import search

    with _busy:
        return in_thread(lambda: search(call).entry)


class _Busy(threading.local):
    """Whether this thread waits for a search; the search's own thread starts none."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1

    def held(self) -> bool:
        return self.depth > 0 or threading.current_thread().name.startswith("jtile-tune")


_busy = _Busy()
