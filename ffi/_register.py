"""Registering the handlers with XLA. The native library lists them: each of its handler files adds a line."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import NamedTuple

from ._library import FfiError, library


class Handlers(NamedTuple):
    """The handlers of one custom call target: XLA's platform, the target's name, and the stages that it has."""

    platform: str
    target: str
    stages: tuple[str, ...]


_lock = threading.Lock()
_registered: set[str] = set()


@functools.cache
def handlers() -> dict[str, tuple[Handlers, ...]]:
    """The handlers of each of jtile's platforms, by the platform's name; sorted, since the order of the lines is the
    linker's. Raises FfiError when the native library is missing."""
    found: dict[str, tuple[Handlers, ...]] = {}
    for line in library().jtile_handlers().decode().splitlines():
        name, platform, target, stages = line.split()
        found[name] = (*found.get(name, ()), Handlers(platform, target, tuple(stages.split(","))))
    return dict(sorted(found.items()))


def register(platform: str = "cpu") -> None:
    """Register jtile's custom call targets for a platform; a second call does nothing. Safe from any thread.

    `import jtile` and the lowering call it; no backend is initialised and no driver is opened by it.

    Args:
      platform: "cpu", "cuda", "rocm", or another that the native library has handlers for.
    Raises:
      FfiError: the platform has no handler, or the native library is missing.
    """
    if platform in _registered:
        return
    if platform not in handlers():
        expected = ", ".join(map(repr, handlers()))
        raise FfiError(f"jtile has no custom call handler for platform {platform!r}; expected one of {expected}")
    with _lock:
        if platform not in _registered:
            for found in handlers()[platform]:
                _register(found)
            _registered.add(platform)


def register_early() -> None:
    """Register every target whose library is there. A missing one is an error of the first kernel that needs it."""
    with contextlib.suppress(FfiError):
        for platform in handlers():
            register(platform)


def _register(found: Handlers) -> None:
    import jax  # ctypes users of this package need no jax

    lib = library()
    capsules = {stage: jax.ffi.pycapsule(getattr(lib, f"{found.target}_{stage}")) for stage in found.stages}
    # Before there is a backend, JAX keeps the handlers and hands them on when it makes one.
    jax.ffi.register_ffi_target(found.target, capsules, platform=found.platform)
