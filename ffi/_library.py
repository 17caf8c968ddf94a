"""Finding, loading and typing the shared library."""

from __future__ import annotations

import ctypes
import functools
import sysconfig
from pathlib import Path

_NAME = "_jtile.so"
_TEXT = 8192


class FfiError(RuntimeError):
    """The native library is missing, refuses a kernel, or a kernel that it ran failed."""


def library_path() -> Path:
    """The file of the native library. Raises FfiError when it was never built."""
    # An editable install keeps the sources in the checkout and the library in site-packages; a developer's own build
    # lies beside the sources. The newest is meant.
    folders = [Path(__file__).parent, *(Path(sysconfig.get_path(k)) / "jtile" / "ffi" for k in ("platlib", "purelib"))]
    found = [folder / _NAME for folder in folders if (folder / _NAME).is_file()]
    if not found:
        raise FfiError(
            f"jtile's native library {_NAME} was not found in {', '.join(map(str, dict.fromkeys(folders)))}; "
            "run `pip install -e .` in the jtile checkout (it needs g++ and cmake), or install a jtile wheel"
        )
    return max(found, key=lambda path: path.stat().st_mtime)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library with typed functions; calls release the GIL. Raises FfiError when it cannot be loaded."""
    path = library_path()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        message = f"jtile's native library {path} cannot be loaded ({error}); build it again with `pip install -e .`"
        raise FfiError(message) from error
    pointer, text, i64, i32, u64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint64
    out, out_i64 = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64)
    signatures = {
        "jtile_open": (i32, text, i64, text, text, text, i64, i64, i64, out, text, i64),
        "jtile_close": (None, pointer),
        "jtile_run": (i32, pointer, out, i64, text, i64),
        "jtile_open_sized": (i32, text, i64, text, text, text, out_i64, i64, i64, i64, out, text, i64),
        "jtile_run_sized": (i32, pointer, out, out_i64, i64, text, i64),
        "jtile_link": (i32, text, i64, i32, u64, text, i64, out_i64, out_i64, text, i64),
        "jtile_check_isa": (i32, text, text, i64),
        "jtile_sha256": (None, text, i64, text),
        "jtile_handlers": (text,),
        "jtile_images_alive": (i64,),
        "jtile_images_loaded": (i64,),
        "jtile_gpu_open": (i32, text, text, text, i64, text, out, text, i64),
        "jtile_gpu_close": (None, pointer),
        "jtile_gpu_initialize": (i32, pointer, i32, text, i64),
        "jtile_gpu_talk": (i32, pointer, pointer, i64, i64, text, i64),
        "jtile_gpu_finish": (i32, pointer, i32, pointer, pointer, out_i64, text, i64),
        "jtile_gpu_launch": (i32, pointer, i32, pointer, pointer, i64, out_i64, text, i64),
        "jtile_gpu_reach": (i32, text, text, i32, i32, text, i64),
        "jtile_gpu_modules_alive": (i64,),
        "jtile_gpu_modules_loaded": (i64,),
    }
    for name, (result, *args) in signatures.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            message = f"jtile's native library {path} is older than its Python code; build it with `pip install -e .`"
            raise FfiError(message) from None
        function.restype, function.argtypes = result, args
    return lib


def call(function_name: str, *args) -> None:
    """Call a function whose last two parameters are a buffer for the error text and its size; raises FfiError."""
    error = ctypes.create_string_buffer(_TEXT)
    if getattr(library(), function_name)(*args, error, _TEXT) != 0:
        raise FfiError(error.value.decode(errors="replace"))


def images_alive() -> int:
    """Number of different kernel objects that are loaded in this process now."""
    return library().jtile_images_alive()


def images_loaded() -> int:
    """Number of times that this process loaded a kernel object; equal objects in use at one time count once."""
    return library().jtile_images_loaded()


def modules_alive() -> int:
    """Number of GPU modules that are loaded in this process now: one a device for each different image."""
    return library().jtile_gpu_modules_alive()


def modules_loaded() -> int:
    """Number of times that this process loaded a GPU module."""
    return library().jtile_gpu_modules_loaded()


def reach(platform: str, device: int, other: int, library_file: str | None = None) -> str:
    """Let kernels on one device of this process access the memory of another, by their numbers.

    Args:
      library_file: path of the driver's library; None: the usual one.
    Returns:
      "", or why they cannot.
    """
    file = None if library_file is None else library_file.encode()
    try:
        call("jtile_gpu_reach", platform.encode(), file, device, other)
    except FfiError as error:
        return str(error)
    return ""
