"""Registering the handlers with XLA."""

from __future__ import annotations

import contextlib
import threading

from ._library import FfiError, library

TARGET_CPU = "jtile_cpu"
TARGET_CUDA, TARGET_CUDA_IO = "jtile_cuda", "jtile_cuda_io"
TARGET_ROCM, TARGET_ROCM_IO = "jtile_rocm", "jtile_rocm_io"
TARGETS = (TARGET_CPU, TARGET_CUDA, TARGET_CUDA_IO, TARGET_ROCM, TARGET_ROCM_IO)

# Of each platform: XLA's name for it, and its targets with the stages that they have.
_GPU_STAGES = ("instantiate", "initialize", "execute")
_PLATFORMS = {
    "cpu": ("cpu", {TARGET_CPU: ("instantiate", "execute")}),
    "cuda": ("CUDA", {TARGET_CUDA: _GPU_STAGES, TARGET_CUDA_IO: _GPU_STAGES}),
    "rocm": ("ROCM", {TARGET_ROCM: _GPU_STAGES, TARGET_ROCM_IO: _GPU_STAGES}),
}

_lock = threading.Lock()
_registered: set[str] = set()


def register(platform: str = "cpu") -> None:
    """Register jtile's custom call targets for a platform; a second call does nothing. Safe from any thread.

    `import jtile` and the lowering call it; no backend is initialised and no driver is opened by it.

    Args:
      platform: "cpu", "cuda" or "rocm".
    Raises:
      FfiError: the platform has no handler, or the native library is missing.
    """
    if platform in _registered:
        return
    if platform not in _PLATFORMS:
        expected = ", ".join(map(repr, _PLATFORMS))
        raise FfiError(f"jtile has no custom call handler for platform {platform!r}; expected one of {expected}")
    with _lock:
        if platform not in _registered:
            _register(*_PLATFORMS[platform])
            _registered.add(platform)


def register_early() -> None:
    """Register every target whose library is there. A missing one is an error of the first kernel that needs it."""
    with contextlib.suppress(FfiError):
        for platform in _PLATFORMS:
            register(platform)


def _register(platform: str, targets: dict[str, tuple[str, ...]]) -> None:
    import jax  # ctypes users of this package need no jax

    lib = library()
    # Before there is a backend, JAX keeps these and hands them on when it makes one.
    for name, stages in targets.items():
        handlers = {stage: jax.ffi.pycapsule(getattr(lib, f"{name}_{stage}")) for stage in stages}
        jax.ffi.register_ffi_target(name, handlers, platform=platform)
