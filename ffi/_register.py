"""Registering the handlers with XLA, lazily."""

from __future__ import annotations

import ctypes
import threading

from jtile.ffi._library import FfiError, library

TARGET_CPU = "jtile_cpu"

_lock = threading.Lock()
_registered: set[str] = set()


def register(platform: str = "cpu") -> None:
    """Register jtile's custom call target for a platform; a second call does nothing. Safe from any thread.

    The lowering calls it. A process that only runs an exported or cached program calls it itself first.

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
        if platform not in _registered and _register_cpu():
            _registered.add(platform)


def _register_cpu() -> bool:
    import jax  # ctypes users of this package need no jax

    lib = library()
    # The backend comes first: registrations made before it exists are replayed targets before types, which fails.
    try:
        jax.devices("cpu")
    except RuntimeError:
        return False  # JAX_PLATFORMS leaves the CPU out: one may still lower and export for it, and cannot run there
    type_id, type_info = _capsule(lib.jtile_cpu_type_id()), _capsule(lib.jtile_cpu_type_info())
    jax.ffi.register_ffi_type("jtile_cpu_state", {"type_id": type_id, "type_info": type_info}, platform="cpu")
    stages = {
        "instantiate": jax.ffi.pycapsule(lib.jtile_cpu_instantiate),
        "execute": jax.ffi.pycapsule(lib.jtile_cpu_execute),
    }
    jax.ffi.register_ffi_target(TARGET_CPU, stages, platform="cpu")
    return True


def _capsule(address: int):
    """A nameless PyCapsule around an address, as `register_ffi_type` takes them."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, None, None)
