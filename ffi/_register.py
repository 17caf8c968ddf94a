"""Registering the handlers with XLA."""

from __future__ import annotations

import contextlib
import threading

from jtile.ffi._library import FfiError, library

TARGET_CPU = "jtile_cpu"
TARGETS = (TARGET_CPU,)

_lock = threading.Lock()
_registered: set[str] = set()


def register(platform: str = "cpu") -> None:
    """Register jtile's custom call target for a platform; a second call does nothing. Safe from any thread.

    `import jtile` and the lowering call it; no backend is initialised by it.

    Args:
      platform: "cpu".
    Raises:
      FfiError: the platform has no handler, or the native library is missing.
    """
    if platform in _registered:
        return
    if platform != "cpu":
        raise FfiError(f"jtile has no custom call handler for platform {platform!r}; expected 'cpu'")
    with _lock:
        if platform not in _registered:
            _register_cpu()
            _registered.add(platform)


def register_early() -> None:
    """Register every target whose library is there. A missing one is an error of the first kernel that needs it."""
    with contextlib.suppress(FfiError):
        register("cpu")


def _register_cpu() -> None:
    import jax  # ctypes users of this package need no jax

    lib = library()
    # Before there is a backend, JAX keeps these and hands them on when it makes one.
    stages = {
        "instantiate": jax.ffi.pycapsule(lib.jtile_cpu_instantiate),
        "execute": jax.ffi.pycapsule(lib.jtile_cpu_execute),
    }
    jax.ffi.register_ffi_target(TARGET_CPU, stages, platform="cpu")
