"""Where winners are kept: JSON files by device kind, those shipped with jtile and the user's own on top of them.

A file is `{"format": "jtile-tune-1", "device": kind, "entries": {id: entry}}`; see `Entry`. It is replaced at once or
not at all, and one that is damaged is ignored with a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jtile import _cache
from jtile._config import current
from jtile._errors import CacheError, CacheWarning

FORMAT = "jtile-tune-1"
RECORDS = Path(__file__).parent / "records"


@dataclasses.dataclass(frozen=True)
class Entry:
    """The winner of one search.

    Attributes:
      config: meta-parameters and options by name.
      time_us, default_us: microseconds of one call, with the winner and with the defaults.
      tried: candidates that were measured, of `candidates` in the space.
      jtile: the version of jtile that measured.
      date: the date of the measurement, ISO 8601.
    """

    config: Mapping[str, Any]
    time_us: float
    default_us: float
    tried: int = 0
    candidates: int = 0
    jtile: str = ""
    date: str = ""

    @property
    def speedup(self) -> float:
        """How many times as fast as the defaults the winner is."""
        return self.default_us / self.time_us if self.time_us else 1.0


Entries = dict[str, Entry]


def read(path: Path) -> tuple[str, Entries]:
    """Device kind and entries of a file; raises CacheError where it is damaged, OSError where it cannot be read."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise CacheError(f"the file {path} has format {data['format']!r}: this jtile reads {FORMAT!r}")
        return str(data["device"]), {str(k): _entry(v) for k, v in data["entries"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CacheError(f"the tuning file {path} is damaged ({type(e).__name__}: {e})") from e


def write(path: Path, device: str, entries: Entries) -> None:
    """Write a file so that every reader sees all of it or none."""
    data = {k: dataclasses.asdict(v) for k, v in sorted(entries.items())}
    text = json.dumps({"format": FORMAT, "device": device, "entries": data}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    _cache.write(path, (text + "\n").encode())


def merge(*many: Entries) -> Entries:
    """All entries; of two for one id, the faster one."""
    out: Entries = {}
    for entries in many:
        for name, entry in entries.items():
            if name not in out or entry.time_us < out[name].time_us:
                out[name] = entry
    return out


def user_path(kind: str) -> Path | None:
    """The user's file for a device kind; None where the cache is switched off."""
    base = current().cache_dir
    return Path(base, "tune", f"{kind}.json") if base else None


def _entry(data: Mapping[str, Any]) -> Entry:
    known = {f.name for f in dataclasses.fields(Entry)}
    entry = Entry(**{k: v for k, v in data.items() if k in known})
    times = entry.time_us, entry.default_us
    if not isinstance(entry.config, dict) or not all(isinstance(t, int | float) and 0 <= t < math.inf for t in times):
        raise TypeError("an entry without configuration or times")
    return dataclasses.replace(entry, config={k: _value(v) for k, v in entry.config.items()})


def _value(v: Any) -> Any:
    return tuple(map(_value, v)) if isinstance(v, list) else v  # JSON has no tuples, and lists cannot be hashed


class Store:
    """The entries of this process, read from the files when they are first asked for; safe from any thread."""

    def __init__(self):
        self._lock = threading.RLock()
        self._known: dict[tuple[str, str], Entries] = {}
        self._count = itertools.count(1)
        self.version = 0  # changes with every entry: what was looked up before may be another now

    def lookup(self, kind: str, name: str) -> Entry | None:
        return self.entries(kind).get(name)

    def entries(self, kind: str) -> Entries:
        """All entries for a device kind, the user's before those shipped."""
        place = kind, current().cache_dir
        with self._lock:
            if place not in self._known:
                own = user_path(kind)
                shipped = _sound(RECORDS / f"{kind}.json", kind)
                self._known[place] = shipped | (_sound(own, kind) if own else {})
            return self._known[place]

    def put(self, kind: str, name: str, entry: Entry) -> None:
        """Keep an entry, in the user's file too; one that cannot be written is a warning."""
        with self._lock:
            self.entries(kind)[name] = entry
            self.version = next(self._count)
        path = user_path(kind)
        if path is None:
            return
        try:
            with _locked(path):
                write(path, kind, _sound(path, kind, aside=True) | {name: entry})
        except OSError as e:
            warnings.warn(f"nothing can be added to the tuning file {path}: {e}", CacheWarning, stacklevel=2)

    def forget(self) -> None:
        """Forget the entries, so that the files are read anew when they are next asked for."""
        with self._lock:
            self._known.clear()
            self.version = next(self._count)


def _sound(path: Path, kind: str, *, aside: bool = False) -> Entries:
    """The entries of a file; none where there is none, or it is damaged or another device's.

    `aside`: such a file gets a name of its own, as it is about to be replaced: it may hold hours of measurements, and a
    person may save them. One that cannot be read now may be sound, so this raises OSError, and it is not replaced.
    """
    try:
        device, entries = read(path)
    except FileNotFoundError:
        return {}
    except OSError as e:
        if aside:
            raise
        why = f"the tuning file {path} cannot be read: {e}"
    except CacheError as e:
        why = e.message
    else:
        if device == kind:
            return entries
        why = f"the tuning file {path} is of device {device!r}"
    kept = ""
    if aside:
        os.replace(path, other := _free(path.with_suffix(".damaged")))
        kept = f", and kept as {other}"
    warnings.warn(f"{why}; it is ignored{kept}", CacheWarning, stacklevel=3)
    return {}


def _free(path: Path) -> Path:
    """The path, with a number where there is such a file: `x.damaged`, `x.damaged-1`, ..."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(1)))
    return next(p for p in names if not os.path.lexists(p))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, so that one process at a time reads it, adds to it, and writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


store = Store()


# -- jit caches -----------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_generations = itertools.count(1)


def new_generation() -> None:
    """Make every jitted function trace again: what it chose before may have a better entry now."""
    _context().set_global(next(_generations))


@contextlib.contextmanager
def retracing() -> Iterator[None]:
    """A block in which no jitted function takes a trace from JAX's caches."""
    with _context()(f"trace {next(_generations)}"):
        yield


def _context() -> Any:
    with _lock:
        return _new_context()


@functools.cache
def _new_context() -> Any:
    # Made on first use, not at import: a new context variable makes every earlier jitted function trace again.
    import jax

    return jax.make_user_context(0)
